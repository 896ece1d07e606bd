"""Deterministic annealing: a soft assignment that hardens as the temperature falls, then CEM.

At temperature 1 the free energy is the negative log-likelihood of the mixture, at 0 the cost of the
hard assignment. Following its minimum from the one to the other avoids many of the poor minima that
CEM alone would end in.

Both ways down share their arithmetic: direct differences, on tiles of points whose bytes are
bounded, for values and for gradients.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Coefficients, Moments, Points
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import (
    fill_empty,
    is_valid,
    model_inputs,
    shift_means,
    weighted_total,
)
from jaxcmle.problem.types import CMLE, Mixture, Problem, Solution
from jaxcmle.refine.cem import cem, default_min_variance, is_finite

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped]

__all__ = ["anneal", "free_energy", "tempered_em"]

# From the ordinary mixture to almost hard, each a fifth cooler than the one before.
TEMPERATURES = tuple(0.8**i for i in range(14))
# Steps at each temperature: of closed-form EM, of an optimiser.
EM_STEPS = 5
OPTIMIZER_STEPS = 50
# Costs that lie this many temperatures above the cheapest have no share, in float64 either.
FARTHEST = 1000.0


def free_energy(
    x: Any,
    mixture: Mixture,
    temperature: ArrayLike,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
) -> Array:
    r"""Return the tempered free energy of the model.

    $F_\tau(\theta) = -\tau \sum_x a_x \ln \sum_k \exp(-\ell_x(\theta_k) / \tau)$. At $\tau = 1$
    this is the negative log-likelihood of the mixture (for `WKM` and `UCMLE` up to the constants
    that their costs leave out); as $\tau \to 0$ it rises to `cost(x, mixture)`.

    Differentiable in `x`, in the mixture, in the temperature and in the weights. A cluster of
    weight 0 has no share, and a gradient of 0. Memory is bounded for the value and the gradient:
    no `[n, k]` array is made.

    Args:
        x: points `[n, d]`.
        mixture: the model.
        temperature: $\tau$, positive and finite. Under `jit`, any other value gives NaN.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: $a_x$, `[n]`; a point of weight 0 changes nothing. Default: ones.

    Returns:
        A scalar, in nats.

    Example:
        >>> import jaxcmle as jc
        >>> from jaxcmle.refine.anneal import free_energy
        >>> mixture = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [2.0]], variances=[1.0, 1.0])
        >>> x = [[0.0], [2.0]]
        >>> [round(float(free_energy(x, mixture, tau)), 3) for tau in (1.0, 0.5, 0.01)]
        [2.97, 3.206, 3.224]
        >>> print(round(float(jc.cost(x, mixture)), 3))
        3.224
    """
    problem, points, weight, mixture = model_inputs(x, mixture, sample_weight, problem)
    temperature = inputs.to_limit(temperature, "temperature", positive=True)
    if not isinstance(temperature, Tracer) and temperature == np.inf:
        raise ValueError("temperature must be finite, got inf")
    return _free_energy(points, weight, mixture, problem, temperature)


def anneal(
    x: Any,
    start: Mixture,
    *,
    temperatures: Any = TEMPERATURES,
    optimizer: "optax.GradientTransformation | None" = None,
    steps: ArrayLike | None = None,
    batch_size: int | None = None,
    key: Array | None = None,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    max_iter: ArrayLike = 300,
    min_size: ArrayLike = 2,
    min_variance: ArrayLike | None = None,
) -> Solution:
    r"""Improve a mixture on ever cooler free energies, then by CEM.

    Without an optimiser, each step is one iteration of EM with the shares
    $\operatorname{softmax}_k(-\ell_x(\theta_k) / \tau)$: closed form, and $F_\tau$ never rises.
    With one, each step is a step of the optimiser on `free_energy` divided by the total weight,
    over means in units of the data's overall standard deviation, logarithms of variances, and
    logits of weights: one learning rate fits any scale and any number of points. Parameters are
    kept where every minimum is (means in the box of the data, variances from the floor to its
    squared diagonal), a weight of 0 is raised to the rounding error, and a step that is not finite
    is not taken.

    Args:
        x: points `[n, d]`.
        start: the mixture to start from, as from `seed`.
        temperatures: `[t]`, positive, used in the order given. Begin at 1 or below: above 1 the
            clusters merge. Default: from 1 to 0.055, each 0.8 times the one before.
        optimizer: any optax optimiser, such as `optax.adam(0.05)`. Each new one is a new program.
        steps: how many at each temperature. Default: 5, with an optimiser 50.
        batch_size: with an optimiser, how many points to use in a step. They are drawn anew each
            time, uniformly with replacement, and count with their weights, so that the expected
            gradient is that of all points. Default: all points.
        key: for the batches; default `jax.random.key(0)`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        max_iter: the most iterations of `cem` to do at the end.
        min_size: the weight every cluster must reach for the solution to be admissible.
        min_variance: floor under every variance, as in `cem`.

    Returns:
        The `Solution` of `cem` on all points; `n_iter` counts the iterations of `cem` only.

    Example:
        >>> import jax, optax, jaxcmle as jc
        >>> from jaxcmle.refine.anneal import anneal
        >>> x = [[0.0], [2.0], [9.0], [11.0]]
        >>> start = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [9.0]], variances=[9.0, 9.0])
        >>> print(anneal(x, start).mixture.means.tolist())
        [[1.0], [10.0]]
        >>> print(anneal(x, start, optimizer=optax.adam(0.05)).mixture.means.tolist())
        [[1.0], [10.0]]
    """
    problem, points, weight, start = model_inputs(x, start, sample_weight, problem)
    inputs.check_enough_points(points, weight, start.weights.shape[0])
    if steps is None:
        steps = EM_STEPS if optimizer is None else OPTIMIZER_STEPS
    annealed = _anneal(
        jax.random.key(0) if key is None else inputs.to_key(key),
        points,
        weight,
        start,
        problem,
        _to_temperatures(temperatures, points.dtype),
        _to_steps(steps),
        None if min_variance is None else inputs.to_limit(min_variance, "min_variance"),
        optimizer=_to_optimizer(optimizer),
        batch_size=_to_batch_size(batch_size, optimizer),
    )
    return cem(
        points,
        annealed,
        problem=problem,
        sample_weight=weight,
        max_iter=max_iter,
        min_size=min_size,
        min_variance=min_variance,
    )


def tempered_em(
    points: Points, mixture: Mixture, problem: Problem, temperatures: Array, floor: ArrayLike
) -> Mixture:
    """Return the mixture after one iteration of EM at each temperature in turn.

    Everything is in the shifted coordinates of the points. To be mapped over a stack of mixtures
    with `jax.vmap`. A cluster that loses every point is filled as in `cem`; an iteration whose
    result is not finite is not taken.

    Args:
        points: as from `prepare`.
        mixture: the model to start from.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        temperatures: `[t]`, in the dtype of the points.
        floor: the least variance.
    """
    step = _em_step(points, mixture.weights.shape[0], problem, floor)
    return lax.scan(lambda mixture, now: (step(mixture, now), None), mixture, temperatures)[0]


class _Tiles(NamedTuple):
    """Points as columns `[t, d, p]`, their weights `[t, p]`; p is a multiple of the block."""

    columns: Array
    weight: Array


class _Parameters(NamedTuple):
    """A mixture without constraints: any finite numbers are one."""

    means: Array
    log_variances: Array
    logits: Array


class _Frame(NamedTuple):
    """How parameters become a mixture, and the bounds they are kept in."""

    centre: Array
    scale: Array
    lowest: _Parameters
    highest: _Parameters


class _Carry(NamedTuple):
    parameters: _Parameters
    state: Any


@jax.jit
def _free_energy(
    x: Array, weight: Array | None, mixture: Mixture, problem: Problem, temperature: ArrayLike
) -> Array:
    points = numerics.prepare(x, weight)
    temperature = jnp.asarray(temperature, x.dtype)
    total = _energy(points, shift_means(mixture, -points.shift), problem, temperature)
    valid = is_valid(mixture, problem) & (temperature > 0) & (temperature < jnp.inf)
    return jnp.where(valid, total, jnp.nan)


def _energy(points: Points, mixture: Mixture, problem: Problem, temperature: Array) -> Array:
    """Return the free energy of a mixture in the coordinates of the points."""
    n, (k, d) = points.x.shape[0], mixture.means.shape
    tiles = _tiles(points, k)
    coefficients = problem.coefficients(mixture)

    def block_energies(columns: Array, coefficients: Coefficients) -> Array:
        means, slope, constant = coefficients
        costs = _squared_distances(columns, means) * slope[:, None] + constant[:, None]
        least, shares = _shares(costs, temperature)
        whole = shares.sum(axis=0)
        return least - temperature * jnp.log(jnp.where(whole > 0, whole, 1))

    # Without the checkpoint a gradient would keep several [k, p] arrays of every tile.
    @jax.checkpoint
    def tile_energies(columns: Array) -> Array:
        length = min(columns.shape[1], numerics.BLOCK)
        blocks = columns.reshape(d, -1, length)
        # A copy of the model for every block, so that gradients are sums in blocks, too.
        copies = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (blocks.shape[1], *leaf.shape)), coefficients
        )
        return jax.vmap(block_energies, in_axes=(1, 0))(blocks, copies)

    energies = _map_tiles(tile_energies, tiles.columns).reshape(-1)[:n]
    return weighted_total(points, energies)


def _em_step(
    points: Points, k: int, problem: Problem, floor: ArrayLike
) -> Callable[[Mixture, Array], Mixture]:
    """Return a function that does one iteration of EM at a temperature."""
    tiles = _tiles(points, k)
    weighted = tiles.weight[:, None] * tiles.columns
    rows = jnp.concatenate([weighted, tiles.weight[:, None]], axis=1)
    whole = numerics.whole_moments(points)
    limits = jnp.finfo(points.x.dtype)

    def step(mixture: Mixture, temperature: Array) -> Mixture:
        means, slope, constant = problem.coefficients(mixture)

        def tile_sums(tile: tuple[Array, Array]) -> tuple[Array, Array]:
            columns, rows = tile
            square = numerics.squared_distances(columns, means)
            _, shares = _shares(square * slope[:, None] + constant[:, None], temperature)
            shares = shares * (1 / shares.sum(axis=0))
            sums = jnp.matmul(shares, rows.T, precision=numerics.PRECISION)
            return sums, jnp.matmul(shares * square, rows[-1], precision=numerics.PRECISION)

        sums, square = jax.tree.map(
            numerics.blocked_sum, _map_tiles(tile_sums, (tiles.columns, rows))
        )
        # Of less weight than this, the mean of a cluster is a quotient of roundings.
        size = jnp.where(sums[:, -1] > whole.size * (limits.tiny / limits.eps), sums[:, -1], 0)
        mean = sums[:, :-1] / jnp.where(size > 0, size, 1)[:, None]
        drift = mean - means
        # Far from the old mean the difference cancels: better its rounding error than nothing.
        scatter = jnp.maximum(square - size * (drift * drift).sum(axis=1), limits.eps * square)
        moments = fill_empty(Moments(size, mean, scatter), whole)
        new = problem.mixture(moments, floor)
        taken = is_finite(new)
        return jax.tree.map(lambda after, before: jnp.where(taken, after, before), new, mixture)

    return step


def _shares(costs: Array, temperature: Array) -> tuple[Array, Array]:
    """Return the least of the costs `[k, p]`, and `exp((least - cost) / temperature)`.

    Costs that are infinite, or too far from the least, have a share and a gradient of 0.
    """
    least = lax.stop_gradient(numerics.smallest(costs)[0])
    above = costs - least
    near = above < FARTHEST * temperature
    return least, jnp.where(near, jnp.exp(jnp.where(near, above, 0) * (-1 / temperature)), 0)


def _squared_distances(columns: Array, means: Array) -> Array:
    """Return the squared distances `[k, p]`, whose gradient never holds a `[d, k, p]` array."""
    if numerics.is_small(*means.shape):
        return numerics.squared_distances(columns, means)

    @jax.checkpoint
    def add_feature(total: Array, feature: tuple[Array, Array]) -> tuple[Array, None]:
        difference = feature[0] - feature[1][:, None]
        return total + difference * difference, None

    start = jnp.zeros((means.shape[0], columns.shape[1]), columns.dtype)
    return lax.scan(add_feature, start, (columns, means.T))[0]


def _tiles(points: Points, k: int) -> _Tiles:
    """Return the points in tiles: the few `[k, p]` arrays of one fit in `tile_bytes` together."""
    n, d = points.x.shape
    block = min(n, numerics.BLOCK)
    blocks = -(-n // block)
    # Squared distances, costs and shares live side by side.
    most = max(1, numerics.tile_bytes() // (4 * points.x.dtype.itemsize * block * max(k, d)))
    count = -(-blocks // most)
    length = -(-blocks // count) * block
    x = jnp.pad(points.x, ((0, count * length - n), (0, 0)))
    weight = jnp.pad(points.weight, (0, count * length - n))
    columns = x.reshape(count, length, d).transpose(0, 2, 1)
    return _Tiles(columns, weight.reshape(count, length))


def _map_tiles(function: Callable[[Any], Any], tiles: Any) -> Any:
    """Apply a function to every tile; one alone needs no loop."""
    if jax.tree.leaves(tiles)[0].shape[0] > 1:
        return lax.map(function, tiles)
    result = function(jax.tree.map(lambda leaf: leaf[0], tiles))
    return jax.tree.map(lambda leaf: leaf[None], result)


@partial(jax.jit, static_argnames=("optimizer", "batch_size"))
def _anneal(
    key: Array,
    x: Array,
    weight: Array | None,
    start: Mixture,
    problem: Problem,
    temperatures: Array,
    steps: ArrayLike,
    min_variance: ArrayLike | None,
    *,
    optimizer: Any,
    batch_size: int | None,
) -> Mixture:
    """Return the mixture after `steps` steps at each temperature."""
    points = numerics.prepare(x, weight)
    if min_variance is None:
        floor = default_min_variance(points)
    else:
        floor = jnp.maximum(jnp.asarray(min_variance, x.dtype), 4 * jnp.finfo(x.dtype).tiny)
    start = problem.constrained(start)
    mixture = shift_means(start, -points.shift)
    steps = jnp.asarray(steps, jnp.int32)
    count = steps * temperatures.shape[0]
    if optimizer is None:
        em_step = _em_step(points, start.weights.shape[0], problem, floor)
        mixture = lax.fori_loop(
            0, count, lambda i, mixture: em_step(mixture, temperatures[i // steps]), mixture
        )
    else:
        frame = _frame(points, mixture, floor)
        step, carry = _optimizer_step(points, mixture, frame, problem, optimizer, batch_size)
        carry = lax.fori_loop(
            0,
            count,
            lambda i, carry: step(carry, temperatures[i // steps], jax.random.fold_in(key, i)),
            carry,
        )
        mixture = problem.constrained(_to_mixture(carry.parameters, frame))
    # As in cem: a start with NaN in it must not come out as something that looks like an answer.
    valid = is_valid(start, problem)
    annealed = shift_means(mixture, points.shift)
    return jax.tree.map(lambda after, before: jnp.where(valid, after, before), annealed, start)


def _optimizer_step(
    points: Points,
    mixture: Mixture,
    frame: _Frame,
    problem: Problem,
    optimizer: Any,
    batch_size: int | None,
) -> tuple[Callable[[_Carry, Array, Array], _Carry], _Carry]:
    """Return a function that does one step of the optimiser, and what to begin with."""
    # Not at the top: importing this package is to stay cheap.
    import optax

    # Line searches want to evaluate the objective; other optimisers then ignore it.
    optimizer = optax.with_extra_args_support(optimizer)
    n = points.x.shape[0]
    total = numerics.blocked_sum(points.weight)

    def step(carry: _Carry, temperature: Array, key: Array) -> _Carry:
        batch, share = points, jnp.ones((), total.dtype)
        if batch_size is not None:
            chosen = jax.random.randint(key, (batch_size,), 0, n)
            batch = Points(points.x[chosen], points.weight[chosen], points.shift)
            share = jnp.asarray(batch_size / n, total.dtype)

        def objective(parameters: _Parameters) -> Array:
            energy = _energy(batch, _to_mixture(parameters, frame), problem, temperature)
            return energy / (share * total)

        value, gradient = jax.value_and_grad(objective)(carry.parameters)
        extra = {"value": value, "grad": gradient, "value_fn": objective}
        # optax itself does not work where promotion is strict.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradient, carry.state, carry.parameters, **extra)
        parameters = jax.tree.map(
            lambda leaf, update, low, high: jnp.clip(leaf + update.astype(leaf.dtype), low, high),
            carry.parameters,
            updates,
            frame.lowest,
            frame.highest,
        )
        new = _Carry(parameters, state)
        taken = jnp.stack([jnp.isfinite(leaf).all() for leaf in parameters]).all()
        return jax.tree.map(lambda after, before: jnp.where(taken, after, before), new, carry)

    parameters = _to_parameters(mixture, frame)
    with jax.numpy_dtype_promotion("standard"):
        return step, _Carry(parameters, optimizer.init(parameters))


def _frame(points: Points, mixture: Mixture, floor: Array) -> _Frame:
    """Return the frame in which the data has mean 0 and an overall standard deviation of 1."""
    size, mean, scatter = (leaf[0] for leaf in numerics.whole_moments(points))
    spread = scatter / (size * points.x.shape[1])
    scale = jnp.sqrt(jnp.where(spread > 0, spread, 1))
    present = (points.weight > 0)[:, None]
    low = (jnp.min(points.x, axis=0, where=present, initial=jnp.inf) - mean) / scale
    high = (jnp.max(points.x, axis=0, where=present, initial=-jnp.inf) - mean) / scale
    narrowest = jnp.log(floor) - 2 * jnp.log(scale)
    widest = jnp.maximum(jnp.log(((high - low) ** 2).sum()), narrowest)
    # Of logits only differences matter, and beyond these a weight is 0 or 1 anyway.
    steepest = jnp.asarray(FARTHEST, scale.dtype)
    return _Frame(
        mean,
        scale,
        _Parameters(low, narrowest, -steepest),
        _Parameters(high, widest, steepest),
    )


def _to_parameters(mixture: Mixture, frame: _Frame) -> _Parameters:
    weights = jnp.maximum(mixture.weights, jnp.finfo(mixture.weights.dtype).eps)
    return _Parameters(
        means=(mixture.means - frame.centre) / frame.scale,
        log_variances=jnp.log(mixture.variances) - 2 * jnp.log(frame.scale),
        logits=jnp.log(weights),
    )


def _to_mixture(parameters: _Parameters, frame: _Frame) -> Mixture:
    return Mixture(
        weights=jax.nn.softmax(parameters.logits),
        means=frame.centre + frame.scale * parameters.means,
        variances=jnp.exp(parameters.log_variances + 2 * jnp.log(frame.scale)),
    )


def _to_temperatures(temperatures: Any, dtype: Any) -> Array:
    """Return the temperatures as `[t]` in the given dtype."""
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(temperatures))
    try:
        array = jnp.asarray(temperatures) if traced else np.asarray(temperatures, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"temperatures must be a 1-D array of numbers, got {temperatures!r}"
        ) from error
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"temperatures must be 1-D with at least one, got shape {array.shape}; for a single "
            "one pass [temperature]"
        )
    if isinstance(array, np.ndarray) and not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"temperatures must be positive and finite, got {temperatures!r}")
    return jnp.asarray(array, dtype)


def _to_steps(steps: Any) -> Any:
    count = inputs.to_count(steps, "steps")
    if not isinstance(count, Tracer) and count < 1:
        raise ValueError(f"steps must be 1 or more, got {steps!r}")
    return count


def _to_optimizer(optimizer: Any) -> Any:
    usable = callable(getattr(optimizer, "init", None)) and callable(
        getattr(optimizer, "update", None)
    )
    if optimizer is not None and not usable:
        raise TypeError(
            "optimizer must be an optax optimiser, such as optax.adam(0.05), with init and update, "
            f"got {optimizer!r}"
        )
    return optimizer


def _to_batch_size(batch_size: Any, optimizer: Any) -> int | None:
    if batch_size is None:
        return None
    try:
        size = operator.index(batch_size)
    except TypeError as error:
        raise TypeError(f"batch_size must be a Python int, got {batch_size!r}") from error
    if size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {size}")
    if optimizer is None:
        raise ValueError(
            "batch_size needs an optimizer, such as optax.adam(0.05): EM in closed form uses all "
            "points"
        )
    return size
