"""Deterministic annealing: a soft assignment that hardens as the temperature falls, then CEM.

Following the minimum of the free energy from the likelihood of the mixture to the cost of the hard
assignment avoids many of the poor minima that CEM alone would end in.
"""

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
from jaxcmle.numerics import Points
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import is_valid, model_inputs, shift_means
from jaxcmle.problem.types import CMLE, Mixture, Problem, Solution
from jaxcmle.refine.cem import cem
from jaxcmle.refine.iterations import is_finite, least_variance
from jaxcmle.refine.tempered import em_step, points_energy

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped]

__all__ = ["anneal"]

# From the ordinary mixture to almost hard, each a fifth cooler than the one before.
TEMPERATURES = tuple(0.8**i for i in range(14))
# Steps at each temperature: of closed-form EM, of an optimiser.
EM_STEPS = 5
OPTIMIZER_STEPS = 50


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
        >>> import optax, jaxcmle as jc
        >>> x = [[0.0], [2.0], [9.0], [11.0]]
        >>> start = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [9.0]], variances=[9.0, 9.0])
        >>> print(jc.anneal(x, start).mixture.means.tolist())
        [[1.0], [10.0]]
        >>> print(jc.anneal(x, start, optimizer=optax.adam(0.05)).mixture.means.tolist())
        [[1.0], [10.0]]
    """
    problem, points, weight, start = model_inputs(x, start, sample_weight, problem)
    inputs.check_enough_points(points, weight, start.weights.shape[0])
    _check_optimizer(optimizer)
    annealed = _anneal(
        jax.random.key(0) if key is None else inputs.to_key(key),
        points,
        weight,
        start,
        problem,
        _to_temperatures(temperatures, points.dtype),
        _to_steps(steps, optimizer),
        None if min_variance is None else inputs.to_limit(min_variance, "min_variance"),
        optimizer=optimizer,
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


class _Parameters(NamedTuple):
    """A mixture without constraints: any finite numbers are one."""

    means: Array
    log_variances: Array
    logits: Array


class _Frame(NamedTuple):
    """How parameters become a mixture, and the lower and upper bounds they are kept in."""

    centre: Array
    scale: Array
    means: tuple[Array, Array]
    log_variances: tuple[Array, Array]


# The parameters, and the state of the optimiser.
_Carry = tuple[_Parameters, Any]


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
    floor = least_variance(points, min_variance)
    start = problem.constrained(start)
    mixture = shift_means(start, -points.shift)
    steps = jnp.asarray(steps, jnp.int32)
    count = steps * temperatures.shape[0]
    if optimizer is None:
        improve = em_step(points, start.weights.shape[0], problem, floor)
        mixture = lax.fori_loop(
            0, count, lambda i, mixture: improve(mixture, temperatures[i // steps]), mixture
        )
    else:
        frame = _frame(points, floor)
        step, carry = _optimizer_step(points, mixture, frame, problem, optimizer, batch_size)
        parameters, _ = lax.fori_loop(
            0,
            count,
            lambda i, carry: step(carry, temperatures[i // steps], jax.random.fold_in(key, i)),
            carry,
        )
        mixture = problem.constrained(_to_mixture(parameters, frame))
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
    whole = numerics.blocked_sum(points.weight)

    def step(carry: _Carry, temperature: Array, key: Array) -> _Carry:
        batch, total = points, whole
        if batch_size is not None:
            chosen = jax.random.randint(key, (batch_size,), 0, n)
            batch = Points(points.x[chosen], points.weight[chosen], points.shift)
            total = whole * (batch_size / n)

        def objective(parameters: _Parameters) -> Array:
            mixture = _to_mixture(parameters, frame)
            return points_energy(batch, mixture, problem, temperature) / total

        parameters, state = carry
        value, gradient = jax.value_and_grad(objective)(parameters)
        extra = {"value": value, "grad": gradient, "value_fn": objective}
        # optax itself does not work where promotion is strict.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradient, state, parameters, **extra)
            moved = optax.apply_updates(parameters, updates)
        parameters = _Parameters(
            jnp.clip(moved.means, *frame.means),
            jnp.clip(moved.log_variances, *frame.log_variances),
            moved.logits,
        )
        taken = is_finite(_to_mixture(parameters, frame))
        return jax.tree.map(
            lambda after, before: jnp.where(taken, after, before), (parameters, state), carry
        )

    parameters = _to_parameters(mixture, frame)
    with jax.numpy_dtype_promotion("standard"):
        return step, (parameters, optimizer.init(parameters))


def _frame(points: Points, floor: Array) -> _Frame:
    """Return the frame in which the data has mean 0 and an overall standard deviation of 1."""
    size, mean, scatter = (leaf[0] for leaf in numerics.whole_moments(points))
    spread = scatter / (size * points.x.shape[1])
    scale = jnp.sqrt(jnp.where(spread > 0, spread, 1))
    present = (points.weight > 0)[:, None]
    low = (jnp.min(points.x, axis=0, where=present, initial=jnp.inf) - mean) / scale
    high = (jnp.max(points.x, axis=0, where=present, initial=-jnp.inf) - mean) / scale
    narrowest = jnp.log(floor) - 2 * jnp.log(scale)
    widest = jnp.maximum(jnp.log(((high - low) ** 2).sum()), narrowest)
    return _Frame(mean, scale, (low, high), (narrowest, widest))


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
        raise TypeError(f"temperatures must be numbers, got {temperatures!r}") from error
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"temperatures must be 1-D, as [1.0, 0.5], got shape {array.shape}")
    if isinstance(array, np.ndarray) and not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"temperatures must be positive and finite, got {temperatures!r}")
    return jnp.asarray(array, dtype)


def _to_steps(steps: Any, optimizer: Any) -> Any:
    if steps is None:
        return EM_STEPS if optimizer is None else OPTIMIZER_STEPS
    count = inputs.to_count(steps, "steps")
    if not isinstance(count, Tracer) and count < 1:
        raise ValueError(f"steps must be 1 or more, got {steps!r}")
    return count


def _check_optimizer(optimizer: Any) -> None:
    usable = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    if optimizer is not None and not usable:
        raise TypeError(
            "optimizer must be an optax optimiser, such as optax.adam(0.05), with init and update, "
            f"got {optimizer!r}"
        )


def _to_batch_size(batch_size: Any, optimizer: Any) -> int | None:
    if batch_size is not None and optimizer is None:
        raise ValueError("batch_size needs an optimizer, such as optax.adam(0.05)")
    return None if batch_size is None else inputs.to_whole(batch_size, "batch_size")
