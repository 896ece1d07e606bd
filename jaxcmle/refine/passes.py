"""One pass of CEM over some of the points, whose sums need one reduction afterwards.

Points that do not meet in one place (chunks of a stream, shards of a mesh) give sums that simply
add up. They are sums of differences to a point `about` for every cluster, as a rule its mean in the
last iteration: so nothing cancels once the means hardly move, and one pass does for an iteration.
Where a cluster has moved far from there, `moments_about` says so, and one more pass with the same
mixtures, but `about` the new means, is right to rounding.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Moments
from jaxcmle.problem.types import Mixture, Problem

__all__ = ["MOST_ROUNDINGS", "Sums", "moments_about", "pass_sums", "quick_sums"]

# How many times its scatter the sum of squares about another point may be: so many roundings.
MOST_ROUNDINGS = 16
# Blocks that a sum turns to in turn.
INTERLEAVE = 8

_sums = partial(numerics.cluster_sums, interleave=INTERLEAVE)


class Sums(NamedTuple):
    """Sums over the points of each cluster, for each of m mixtures; those of parts add up.

    Attributes:
        size: `[m, k]`, the sum of the weights.
        drift: `[m, k, d]`, of `weight (x - about)`.
        square: `[m, k]`, of `weight |x - about|^2`.
    """

    size: Array
    drift: Array
    square: Array


def pass_sums(
    x: Array, weight: Array | None, mixtures: Mixture, about: Array, problem: Problem
) -> tuple[Sums, Array, Array]:
    """Assign the points under each of a stack of mixtures, and sum them up per cluster.

    Args:
        x: points `[n, d]`, less the shift that `numerics.prepare` takes off.
        weight: `[n]`; booleans, for points that are there or not, take less time than numbers, and
            None, for ones, the least. Rows of weight 0 may hold anything.
        mixtures: a stack of m, in the same coordinates.
        about: `[m, k, d]`, what differences are taken to.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.

    Returns:
        The sums; labels `[m, n]` as `assign_points` gives them; and costs `[m]` under `mixtures`.
    """
    (n, d), k = x.shape, mixtures.weights.shape[1]
    small = numerics.is_small(k, d)
    tiles = None if small else numerics.point_tiles(x, k)

    def one(pair: tuple[Mixture, Array]) -> tuple[Sums, Array, Array]:
        mixture, about = pair
        best, labels = _assigned(x, mixture, problem, small, tiles)
        difference = numerics.apart(
            lambda about, labels: x - about[labels], _busy(mixture), about, labels
        )
        square = numerics.row_sum(difference * difference)
        sums = _summed(weight, labels, k, difference, square)
        if weight is not None:
            amount = weight.astype(x.dtype)
            best = numerics.silence(amount, amount * best)
        return sums, labels, numerics.blocked_sum(best)

    stack = (mixtures, about)
    if mixtures.weights.shape[0] == 1:
        alone = one(jax.tree.map(lambda leaf: leaf[0], stack))
        return jax.tree.map(lambda leaf: leaf[None], alone)
    bytes_each = x.dtype.itemsize * n * (d + 3 if small else max(k, d + 3))
    return numerics.map_stack(one, stack, bytes_each)


def quick_sums(
    x: Array, weight: Array | None, mixture: Mixture, centre: Array, problem: Problem
) -> Sums:
    """Return what `pass_sums` does for one mixture, but for sums about one point for all clusters.

    The differences themselves need not be made, and so it takes less time; it is worth what the
    moments are precise to. `drift` is the sum of `weight x`: who adds up all parts takes off
    `size * centre`, in arithmetic that does not cancel.

    Returns:
        The sums, without a leading axis.
    """
    k, d = mixture.means.shape
    labels = _assigned(x, mixture, problem, numerics.is_small(k, d))[1]
    difference = x - centre
    square = numerics.row_sum(difference * difference)
    return _summed(weight, labels, k, x, square)


def _summed(weight: Array | None, labels: Array, k: int, rows: Array, square: Array) -> Sums:
    """Return sums per cluster of rows `[n, d]` and numbers `[n]`, for any kind of weights."""
    ones = jnp.ones(len(labels), rows.dtype)
    if weight is not None and weight.dtype == bool:
        # Labels out of range take no part in sums: cheaper than weights in every feature.
        labels = jnp.where(weight, labels, k)
    elif weight is not None:
        ones = weight
        rows = numerics.silence(weight[:, None], weight[:, None] * rows)
        square = numerics.silence(weight, weight * square)
    # Three sums, not one of joined columns: XLA joins them by slow scalar code.
    return Sums(
        size=_sums(ones[:, None], labels, k)[:, 0],
        drift=_sums(rows, labels, k),
        square=_sums(square[:, None], labels, k)[:, 0],
    )


def _assigned(
    x: Array, mixture: Mixture, problem: Problem, small: bool, tiles: Array | None = None
) -> tuple[Array, Array]:
    """Return the smallest cost and the label of every point, compiled apart from what follows."""
    n, k = x.shape[0], mixture.weights.shape[0]
    if not small and tiles is None:
        tiles = numerics.point_tiles(x, k)

    def assign(x: Array, mixture: Mixture) -> tuple[Array, Array]:
        # Few clusters go in one kernel that reads rows as they are: transposed outside, they
        # would be copied first.
        columns = x.T[None] if tiles is None else tiles
        return numerics.assign_directly(columns, problem.coefficients(mixture), n)

    return numerics.apart(assign, _busy(mixture), x, mixture)


def _busy(mixture: Mixture) -> Array:
    """Return what is always true: for what is compiled in pieces, else repeated for every sum."""
    total = mixture.weights.sum()
    return jnp.isnan(total) | (total > -1)


def moments_about(
    sums: Sums, about: Array, floor: ArrayLike, roundings: ArrayLike = MOST_ROUNDINGS
) -> tuple[Moments, Array]:
    """Return the moments of every cluster, and for which of the mixtures they are precise.

    Args:
        sums: over all points, of `pass_sums`.
        about: `[m, k, d]`, as it was there.
        floor: the least variance: below it, precision does not matter.
        roundings: what a scatter may be off by and still count as precise.

    Returns:
        Moments with a leading axis m, zeros for empty clusters (but the mean `about`); and `[m]`,
        whether no scatter is a small difference of large numbers. If not, repeat the pass with
        the same mixtures and `about` these means.
    """
    size, drift, square = sums
    d = about.shape[-1]
    move = drift / jnp.where(size > 0, size, 1)[..., None]
    scatter = jnp.maximum(square - size * (move * move).sum(axis=-1), 0)
    most = jnp.maximum(scatter, size * d * jnp.asarray(floor, square.dtype))
    precise = (square <= roundings * most) | (size == 0)
    return Moments(size, about + move, scatter), precise.all(axis=-1)
