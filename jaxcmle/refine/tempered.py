"""Soft assignment at a temperature: the free energy of a mixture, and EM steps that lower it.

At temperature 1 the free energy is the negative log-likelihood of the mixture, at 0 the cost of the
hard assignment. Values and gradients come from direct differences, in blocks of points, as many at
once as fit in a bound on bytes.
"""

from collections.abc import Callable
from typing import Any

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
    hide_missing,
    is_valid,
    model_inputs,
    shift_means,
    weighted_total,
)
from jaxcmle.problem.types import CMLE, Mixture, Problem
from jaxcmle.refine.iterations import is_finite

__all__ = ["em_step", "free_energy", "points_energy", "tempered_em"]

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
        >>> mixture = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [2.0]], variances=[1.0, 1.0])
        >>> x = [[0.0], [2.0]]
        >>> [round(float(jc.free_energy(x, mixture, tau)), 3) for tau in (1.0, 0.5, 0.01)]
        [2.97, 3.206, 3.224]
        >>> print(round(float(jc.cost(x, mixture)), 3))
        3.224
    """
    problem, points, weight, mixture = model_inputs(x, mixture, sample_weight, problem)
    temperature = inputs.to_limit(temperature, "temperature", positive=True)
    if not isinstance(temperature, Tracer) and temperature == np.inf:
        raise ValueError("temperature must be finite, got inf")
    return _free_energy(points, weight, mixture, problem, temperature)


def tempered_em(
    points: Points,
    mixture: Mixture,
    problem: Problem,
    temperatures: Array,
    floor: ArrayLike,
    exists: Array | None = None,
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
        exists: `[k]`, which clusters there are; by default all.
    """
    step = em_step(points, mixture.weights.shape[0], problem, floor)
    exists = jnp.ones(mixture.weights.shape, bool) if exists is None else exists

    def iterate(mixture: Mixture, temperature: Array) -> tuple[Mixture, None]:
        return hide_missing(step(mixture, temperature), exists), None

    return lax.scan(iterate, mixture, temperatures)[0]


@jax.jit
def _free_energy(
    x: Array, weight: Array | None, mixture: Mixture, problem: Problem, temperature: ArrayLike
) -> Array:
    points = numerics.prepare(x, weight)
    temperature = jnp.asarray(temperature, x.dtype)
    total = points_energy(points, shift_means(mixture, -points.shift), problem, temperature)
    valid = is_valid(mixture, problem) & (temperature > 0) & (temperature < jnp.inf)
    return jnp.where(valid, total, jnp.nan)


def points_energy(points: Points, mixture: Mixture, problem: Problem, temperature: Array) -> Array:
    """Return the free energy of a mixture in the shifted coordinates of the points."""
    blocks, bytes_each = _blocks(points.x, mixture.weights.shape[0])
    # A copy of the model for every block, so that gradients are sums in blocks, too.
    copies = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (blocks.shape[0], *leaf.shape)),
        problem.coefficients(mixture),
    )

    # Without the checkpoint a gradient would keep several [k, p] arrays of every block.
    @jax.checkpoint
    def block_energies(block: tuple[Array, Coefficients]) -> Array:
        columns, (means, slope, constant) = block
        costs = _squared_distances(columns, means) * slope[:, None] + constant[:, None]
        least, shares = _shares(costs, temperature)
        return least - temperature * jnp.log(shares.sum(axis=0))

    energies = numerics.map_stack(block_energies, (blocks, copies), bytes_each)
    return weighted_total(points, energies.reshape(-1)[: points.x.shape[0]])


def em_step(
    points: Points, k: int, problem: Problem, floor: ArrayLike
) -> Callable[[Mixture, Array], Mixture]:
    """Return a function that does one iteration of EM at a temperature."""
    weighted = jnp.concatenate([points.weight[:, None] * points.x, points.weight[:, None]], axis=1)
    blocks, bytes_each = _blocks(points.x, k)
    rows, _ = _blocks(weighted, k)
    whole = numerics.whole_moments(points)
    limits = jnp.finfo(points.x.dtype)

    def step(mixture: Mixture, temperature: Array) -> Mixture:
        means, slope, constant = problem.coefficients(mixture)

        def block_sums(block: tuple[Array, Array]) -> tuple[Array, Array]:
            columns, rows = block
            square = numerics.squared_distances(columns, means)
            _, shares = _shares(square * slope[:, None] + constant[:, None], temperature)
            shares = shares * (1 / shares.sum(axis=0))
            sums = jnp.matmul(shares, rows.T, precision=numerics.PRECISION)
            return sums, jnp.matmul(shares * square, rows[-1], precision=numerics.PRECISION)

        sums, square = jax.tree.map(
            numerics.blocked_sum, numerics.map_stack(block_sums, (blocks, rows), bytes_each)
        )
        # Of less weight than this, the mean of a cluster is a quotient of roundings.
        size = jnp.where(sums[:, -1] > whole.size * (limits.tiny / limits.eps), sums[:, -1], 0)
        mean = sums[:, :-1] / jnp.where(size > 0, size, 1)[:, None]
        drift = mean - means
        # Far from the old mean the difference cancels: better its rounding error than nothing.
        scatter = jnp.maximum(square - size * (drift * drift).sum(axis=1), limits.eps * square)
        new = problem.mixture(fill_empty(Moments(size, mean, scatter), whole), floor)
        taken = is_finite(new)
        return jax.tree.map(lambda after, before: jnp.where(taken, after, before), new, mixture)

    return step


def _blocks(rows: Array, k: int) -> tuple[Array, int]:
    """Return rows `[n, c]` as blocks of columns `[b, c, p]`, and the bytes to work on one."""
    n, columns = rows.shape
    length = min(n, numerics.BLOCK)
    count = -(-n // length)
    padded = jnp.pad(rows, ((0, count * length - n), (0, 0)))
    # Squared distances, costs and shares live side by side.
    bytes_each = 4 * rows.dtype.itemsize * length * max(k, columns)
    return padded.reshape(count, length, columns).transpose(0, 2, 1), bytes_each


def _shares(costs: Array, temperature: Array) -> tuple[Array, Array]:
    """Return the least of the costs `[k, p]`, and `exp((least - cost) / temperature)`.

    Costs that are infinite, or too far from the least, have a share and a gradient of 0.
    """
    least = lax.stop_gradient(numerics.smallest(costs)[0])
    above = costs - least
    # The compiler may compute costs once for the least and once more for this, rounded otherwise,
    # which low temperatures would magnify: what is within rounding of the least is not above it.
    rounding = 4 * jnp.finfo(costs.dtype).eps * jnp.abs(least)
    above = above - lax.stop_gradient(jnp.where(above <= rounding, above, 0))
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
