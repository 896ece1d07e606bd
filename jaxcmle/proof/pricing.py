r"""The pricing problem: the best profit that one cluster can make, given a price for every point.

A cluster C of weight W makes $\alpha(C) - cost(C)$. With the duals per unit of weight,
$\beta_x = \alpha_x / a_x$, its mean $\mu$ and precision u = 1 / variance, a point gains

$$v_x = \beta_x - \tfrac{u}{2} |x - \mu|^2 + \tfrac{d}{2} \ln \tfrac{u}{2 \pi}$$

and the profit is $F(\mu, u) = \max_W [S(W) + W \ln(W / N)]$, S(W) the most that points of weight W
gain together. WKM has no logarithm of u, and u is fixed; UCMLE has no logarithm of W.

Sorting the gains gives S. Bounds do without it: for any threshold s, $S(W) \le g(s) - W s$ with
$g(s) = \sum_x a_x (v_x + s)_+$, a sum that vectorises. Some thirty thresholds make a concave
envelope of S from above that is tight to second order in their distance; between two of its
corners the profit is convex in W, so that the corners decide.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxcmle import numerics

__all__ = [
    "NO_POINT",
    "SLACKS",
    "Pricing",
    "Sets",
    "best_sets",
    "cell_profits",
    "profit_curves",
    "threshold_grid",
    "to_curves",
    "vertex_profits",
]

# A vertex of a cell is allowed some slack per unit of weight, which depends on the cell. The best
# profit is a convex function of it, and is kept at these values.
SLACKS = np.array([0.0, *(2.0 ** np.arange(-8, 2))])
# Thresholds where the best size may lie inside its range, above and below.
CORE, ABOVE, BELOW = 14, 10, 6
ABOVE_RATIO, BELOW_RATIO = 1.35, 1.6
LEAST_STEP = 0.05
# Gains of so few points are sorted: thresholds would be too far apart.
FEW_POINTS = 128
# The dual of a point that is not there: it never gains anything.
NO_POINT = -1e200


class Pricing(NamedTuple):
    """An instance of the pricing problem, in float64, centred and scaled.

    Attributes:
        x: `[n, d]`.
        weight: `[n]`, 0 for padding; or None for ones. Padding has a dual of `NO_POINT`.
        total: the sum of the weights, N.
        min_size: the least weight of a cluster.
        max_size: the largest, `N - (k - 1) min_size`.
        log_factor: `d / 2`, or 0 for WKM.
        entropy: 1, or 0 for UCMLE.
        low: the least precision u that matters.
        high: the largest.
        thresholds: `[t]`, increasing.
    """

    x: Array
    weight: Array | None
    total: Array
    min_size: Array
    max_size: Array
    log_factor: Array
    entropy: Array
    low: Array
    high: Array
    thresholds: Array


class Sets(NamedTuple):
    """Clusters that make a profit, as arrays on the device or the host.

    Attributes:
        members: bool `[m, n]`.
        profit: `[m]`; minus infinity for a set of a weight that is out of range.
        cost: `[m]`.
        mean: `[m, d]`.
        precision: `[m]`.
    """

    members: Any
    profit: Any
    cost: Any
    mean: Any
    precision: Any


def threshold_grid(
    min_size: float, max_size: float, total: float, entropy: float, reach: float
) -> np.ndarray:
    """Return thresholds, close to each other where the best size is inside its range.

    Above, where a cluster takes points only to be large enough, they go as far as `reach`.
    """
    low = entropy * (1 + np.log(min_size / total))
    high = entropy * (1 + np.log(max_size / total))
    step = max((high - low) / (CORE - 1), LEAST_STEP)
    core = (low + high) / 2 + step * (np.arange(CORE) - (CORE - 1) / 2)
    above = step * _powers(ABOVE_RATIO, ABOVE, reach / step)
    below = step * _powers(BELOW_RATIO, BELOW, 0.0)
    return np.concatenate([core[0] - below[::-1], core, core[-1] + above])


def _powers(ratio: float, count: int, reach: float) -> np.ndarray:
    """Return the sums of the first powers of the ratio, or of one whose last sum is far enough."""
    sums = np.cumsum(ratio ** np.arange(1, count + 1))
    return sums if sums[-1] >= reach else _powers(1.05 * ratio, count, reach)


def log_term(pricing: Pricing, precision: Array) -> Array:
    """Return what a point gains from the precision alone."""
    return pricing.log_factor * jnp.log(precision / (2 * np.pi))


def size_term(pricing: Pricing, size: Array) -> Array:
    """Return what a cluster gains from its weight."""
    return pricing.entropy * size * jnp.log(size / pricing.total)


def profit_curves(pricing: Pricing, sums: Array) -> Array:
    """Return the best profit for every slack, `[..., q]`, from `g` at the thresholds `[..., t]`."""
    s = pricing.thresholds
    low, high = pricing.min_size, pricing.max_size
    # Where the lines of two thresholds cross; sizes increase with the threshold.
    crossing = jnp.diff(sums, axis=-1) / jnp.diff(s)
    inside = (crossing > low) & (crossing < high)
    sizes = jnp.where(inside, crossing, low)
    values = jnp.where(
        inside, sums[..., :-1] - sizes * s[:-1] + size_term(pricing, sizes), -jnp.inf
    )
    best = (values[..., None, :] + SLACKS[:, None] * sizes[..., None, :]).max(axis=-1)
    for end in (low, high):
        value = (sums - end * s).min(axis=-1) + size_term(pricing, end)
        best = jnp.maximum(best, value[..., None] + SLACKS * end)
    return best


def to_curves(pricing: Pricing, gains: Array) -> Array:
    """Return the best profit for every slack, `[m, q]`, of gains `[m, n]`."""
    if gains.shape[1] <= FEW_POINTS:
        return _sorted_curves(pricing, gains)
    # Not to be computed anew for every threshold.
    gains = lax.optimization_barrier(gains)
    shifted = jnp.maximum(gains[:, None, :] + pricing.thresholds[:, None], 0)
    if pricing.weight is not None:
        shifted = shifted * pricing.weight
    return profit_curves(pricing, shifted.sum(axis=-1))


def _sorted_curves(pricing: Pricing, gains: Array) -> Array:
    """Return what `to_curves` does by sorting, exactly but for sets of a part of a point."""
    ordered, weight = _descending(gains, pricing.weight)
    sizes = jnp.cumsum(weight, axis=1)
    values = jnp.cumsum(weight * ordered, axis=1)
    inside = (sizes > pricing.min_size) & (sizes < pricing.max_size) & (weight > 0)
    safe = jnp.where(inside, sizes, pricing.min_size)
    values = jnp.where(inside, values + size_term(pricing, safe), -jnp.inf)
    best = (values[:, None, :] + SLACKS[:, None] * safe[:, None, :]).max(axis=-1)
    for end in (pricing.min_size, pricing.max_size):
        taken = jnp.clip(end - (sizes - weight), 0, weight)
        value = (taken * ordered).sum(axis=1) + size_term(pricing, end)
        best = jnp.maximum(best, value[:, None] + SLACKS * end)
    return best


@jax.jit
def vertex_profits(pricing: Pricing, duals: Array, means: Array, precision: Array) -> Array:
    """Return for each of m means and precisions the best profit at every slack, `[m, q]`.

    Never less than F, and more by the distance of the thresholds only.
    """

    def curves(mean: Array, u: Array) -> Array:
        square = numerics.squared_distances(pricing.x.T, mean)
        gains = duals - u[:, None] / 2 * square + log_term(pricing, u)[:, None]
        return to_curves(pricing, gains)

    return by_rows(curves, pricing.x.shape[0], means, precision)


@jax.jit
def cell_profits(
    pricing: Pricing, duals: Array, centre: Array, half: Array, low: Array, high: Array
) -> Array:
    """Return for each of m cells a profit that nothing in it exceeds, `[m]`.

    Every point has the mean and the precision of the cell that suit it best.
    """

    def profits(centre: Array, half: Array, low: Array, high: Array) -> Array:
        square = squares_outside(pricing.x, centre, half)
        return to_curves(pricing, duals + best_terms(pricing, square, low, high))[:, 0]

    return by_rows(profits, pricing.x.shape[0], centre, half, low, high)


def squares_outside(x: Array, centre: Array, half: Array) -> Array:
    """Return the squared distances `[m, n]` of points from boxes."""
    total = jnp.zeros((centre.shape[0], x.shape[0]), x.dtype)
    for column in range(x.shape[1]):
        distance = jnp.abs(x[:, column] - centre[:, column, None])
        outside = jnp.maximum(distance - half[:, column, None], 0)
        total = total + outside * outside
    return total


def best_terms(pricing: Pricing, square: Array, low: Array, high: Array) -> Array:
    """Return the most that points `[m, n]` gain from distance and precision, in its interval."""
    u = _best_precision(pricing, square, low[:, None], high[:, None])
    return log_term(pricing, u) - u / 2 * square


def by_rows(function: Callable[..., Any], n: int, *arrays: Array) -> Any:
    """Apply a function of stacks with a leading axis m, as many rows of n numbers as are fit."""
    length = arrays[0].shape[0]
    rows = max(1, min(length, numerics.tile_bytes() // (8 * n)))
    while length % rows:
        rows -= 1
    if rows == length:
        return function(*arrays)
    tiles = tuple(array.reshape(-1, rows, *array.shape[1:]) for array in arrays)
    result = lax.map(lambda tile: function(*tile), tiles)
    return jax.tree.map(lambda leaf: leaf.reshape(length, *leaf.shape[2:]), result)


def _best_precision(pricing: Pricing, square: Array, low: Array, high: Array) -> Array:
    """Return the precision that suits a point at this squared distance best, of an interval."""
    positive = square > 0
    wanted = 2 * pricing.log_factor / jnp.where(positive, square, 1)
    return jnp.clip(jnp.where(positive, wanted, high), low, high)


@partial(jax.jit, static_argnames="iterations")
def best_sets(
    pricing: Pricing, duals: Array, means: Array, precision: Array, iterations: int = 6
) -> Sets:
    """Climb from each of m means and precisions: the best set for them, its own mean, and so on.

    Profits never fall. A set is the points of the largest gains; of points that gain the same, all
    or none.
    """

    def climb(means: Array, precision: Array) -> Sets:
        def step(_: Array, sets: Sets) -> Sets:
            return better(sets, own(sets.mean, sets.precision))

        def own(means: Array, precision: Array) -> Sets:
            square = numerics.squared_distances(pricing.x.T, means)
            gains = duals - precision[:, None] / 2 * square
            gains = lax.optimization_barrier(gains + log_term(pricing, precision)[:, None])
            return _own(pricing, duals, gains > -_best_threshold(pricing, gains)[:, None])

        return lax.fori_loop(1, iterations, step, own(means, precision))

    return by_rows(climb, 4 * pricing.x.shape[0], means, precision)


def better(old: Sets, new: Sets) -> Sets:
    """Return of each pair of sets the one that makes more profit."""
    wins = new.profit > old.profit

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(wins.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)


def _in_range(pricing: Pricing, sizes: Array) -> Array:
    slack = 1e-9 * pricing.total
    return (sizes >= pricing.min_size - slack) & (sizes <= pricing.max_size + slack)


def _best_threshold(pricing: Pricing, gains: Array) -> Array:
    """Return a threshold for each row of gains: what is above its negative makes the best set."""
    ordered, weight = _descending(gains, pricing.weight)
    sizes = jnp.cumsum(weight, axis=1)
    sums = jnp.cumsum(weight * ordered, axis=1)
    inside = _in_range(pricing, sizes) & (ordered > NO_POINT / 2)
    profits = jnp.where(inside, sums + size_term(pricing, sizes), -jnp.inf)
    place = jnp.argmax(profits, axis=1)[:, None]
    # A hair below the last gain, so that what gains the same is in as well.
    last = jnp.take_along_axis(ordered, place, axis=1)[:, 0]
    return 1e-12 * (1 + jnp.abs(last)) - last


def _own(pricing: Pricing, duals: Array, members: Array) -> Sets:
    """Return sets `[m, n]` with the means and precisions that suit them best, and their profits."""
    weight = jnp.ones_like(duals) if pricing.weight is None else pricing.weight
    share = jnp.where(members, weight, 0)
    size = share.sum(axis=1)
    mean = (share @ pricing.x) / jnp.maximum(size, 1e-9)[:, None]
    square = numerics.squared_distances(pricing.x.T, mean)
    scatter = (share * square).sum(axis=1)
    wanted = 2 * pricing.log_factor * size / jnp.where(scatter > 0, scatter, 1)
    u = jnp.clip(jnp.where(scatter > 0, wanted, pricing.high), pricing.low, pricing.high)
    size_gain = size_term(pricing, jnp.maximum(size, 1e-9))
    cost = u / 2 * scatter - size * log_term(pricing, u) - size_gain
    profit = jnp.where(_in_range(pricing, size), share @ duals - cost, -jnp.inf)
    return Sets(members, profit, cost, mean, u)


def _descending(gains: Array, weight: Array | None) -> tuple[Array, Array]:
    """Return rows of gains in descending order, and the weights of the points behind."""
    bits = lax.bitcast_convert_type(-gains, jnp.int64)
    # Integers that order as the numbers do: they sort far faster than floats on the CPU.
    key = jnp.where(bits < 0, jnp.int64(-(2**63)) - bits, bits)
    if weight is None:
        key = lax.sort(key, dimension=1, is_stable=False)
    else:
        behind = jnp.broadcast_to(weight, key.shape)
        key, weight = lax.sort((key, behind), dimension=1, num_keys=1, is_stable=False)
    bits = jnp.where(key < 0, jnp.int64(-(2**63)) - key, key)
    ordered = -lax.bitcast_convert_type(bits, jnp.float64)
    if weight is None:
        weight = jnp.where(ordered > NO_POINT / 2, 1.0, 0.0)
    return ordered, weight
