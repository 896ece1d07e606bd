"""Points made ready once for a search that works on a whole population of partitions.

A population is a stack: labels `[m, n]`, and moments with a leading axis. Where the data allows it,
the arithmetic is that of the *fast* iterations of `cem` (products of matrices, sums about a common
centre); where it does not, direct differences and two-pass moments take their place, for the whole
population at once. What a search reports is computed exactly at its end.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import MomentRows, Moments, Points
from jaxcmle.problem.objective import (
    assign_points,
    fill_empty,
    hide_missing,
    moments_cost,
    shift_means,
)
from jaxcmle.problem.types import Mixture, Problem

__all__ = [
    "Partitions",
    "Rank",
    "Workspace",
    "anywhere",
    "fitted",
    "has_few_points",
    "is_behind",
    "is_better",
    "is_flawed",
    "is_safe",
    "labels_of",
    "make_workspace",
    "moments_of",
    "over_tiles",
    "own_values",
    "partitions_of",
    "select_each",
    "shortage_of",
    "squared_distances",
]

# Nats per feature that a matrix product may be wrong by.
TOLERANCE = 1e-3
# Relative error that a variance may have: with that the cost of a partition is right to a few
# roundings a point.
VARIANCE_TOLERANCE = 32
# What counts as few points.
FEW_POINTS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Workspace:
    """Points and limits of one search.

    Attributes:
        points: the points, shifted.
        tiles: the same, as `point_tiles` gives them.
        features: tiles of `matmul_features` about the centre; the points again where there are
            few clusters and features, and nothing is multiplied.
        rows: what moments are summed from.
        whole: the moments of all points as one cluster.
        largest_norm: the largest `|x|^2` about the centre.
        floor: the least variance of a cluster.
        least_spread: the variance up to which a cluster has no spread; negative where that does
            not matter.
        ample: the weight from which a cluster may do without spread.
        min_size: the least weight of a cluster.
        exists: `[k]`, false for clusters that are there only to share programs: they hold no
            points, and nothing is demanded of them.
        batch: the name of the axis along which `vmap` runs several searches at once, or None.
        mesh: devices to split a population over, which all have the points; or None.
    """

    points: Points
    tiles: Array
    features: Array
    rows: MomentRows
    whole: Moments
    largest_norm: Array
    floor: Array
    least_spread: Array
    ample: Array
    min_size: Array
    exists: Array
    batch: str | None = dataclasses.field(default=None, metadata={"static": True})
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})


class Rank(NamedTuple):
    """How good a partition is: the smaller the better, the first number that differs decides.

    Attributes:
        shortage: the weight that clusters lack to the minimum size.
        flaws: how many clusters are degenerate, see `is_flawed`.
        cost: `L_X(C)`; infinity where it is not a number.
    """

    shortage: Array
    flaws: Array
    cost: Array


class Partitions(NamedTuple):
    """A stack of partitions: labels `[m, n]`, the moments of their clusters, and their rank."""

    labels: Array
    moments: Moments
    rank: Rank


def make_workspace(
    points: Points,
    exists: Array,
    floor: ArrayLike,
    least_spread: ArrayLike,
    min_size: ArrayLike,
    batch: str | None = None,
    mesh: Mesh | None = None,
) -> Workspace:
    """Return what a search for so many clusters needs to know of the points."""
    k = len(exists)
    dtype = points.x.dtype
    # For twice as many clusters: a search splits them all.
    tiles = numerics.point_tiles(points.x, 2 * k)
    count, d, length = tiles.shape
    small = numerics.is_small(2 * k, d)
    centred, _ = numerics.centred(points)
    features = numerics.matmul_features(centred)
    return Workspace(
        points=points,
        tiles=tiles,
        features=tiles if small else numerics.in_tiles(features, count, length),
        rows=numerics.moment_rows(points),
        whole=numerics.whole_moments(points),
        largest_norm=features[:, -2].max(),
        floor=jnp.asarray(floor, dtype),
        least_spread=jnp.asarray(least_spread, dtype),
        ample=numerics.blocked_sum(points.weight) / (2 * exists.sum()).astype(dtype),
        # Sums of fractional weights round: what is short by rounding alone is enough.
        min_size=jnp.asarray(min_size, dtype) * (1 - 16 * jnp.finfo(dtype).eps),
        exists=exists,
        batch=batch,
        mesh=mesh,
    )


def has_few_points(space: Workspace) -> Array:
    """Tell whether there are so few points that work on them costs next to nothing.

    Points of weight 0 do not count: what a search does must not depend on padding.
    """
    return (space.points.weight > 0).sum() <= FEW_POINTS


def anywhere(space: Workspace, flags: Array) -> Array:
    """Tell whether any flag is set, in this search or in another one that runs with it.

    What depends on this is one decision for all of them, so that `vmap` need not go both ways: it
    must only save work, and change no answer.
    """
    flag = flags.any()
    if space.batch is None:
        return flag
    return lax.pmax(flag.astype(jnp.int32), space.batch) > 0


def fitted(space: Workspace, moments: Moments, problem: Problem) -> Mixture:
    """Return the best mixtures of a stack of partitions with these moments.

    Of twice as many clusters, too: the halves of all of them.
    """
    exists = jnp.tile(space.exists, moments.size.shape[-1] // len(space.exists))

    def one(moments: Moments) -> Mixture:
        mixture = problem.mixture(fill_empty(moments, space.whole), space.floor)
        return hide_missing(mixture, exists)

    return jax.vmap(one)(moments)


def partitions_of(space: Workspace, labels: Array, k: int, problem: Problem) -> Partitions:
    """Return a stack of partitions from their labels."""
    moments = moments_of(space, labels, k)
    return Partitions(labels, moments, _rank(space, moments, problem))


def _rank(space: Workspace, moments: Moments, problem: Problem) -> Rank:
    costs = jax.vmap(lambda each: moments_cost(each, problem, space.floor))(moments)
    flawed = is_flawed(space, moments.size, moments.scatter) & space.exists
    return Rank(
        shortage=shortage_of(space, moments.size),
        flaws=flawed.sum(axis=-1, dtype=jnp.int32),
        cost=jnp.where(jnp.isfinite(costs), costs, jnp.inf),
    )


def shortage_of(space: Workspace, size: Array) -> Array:
    """Return the weight that clusters `[..., k]` lack to the minimum size, in all."""
    return jnp.where(space.exists, jnp.maximum(space.min_size - size, 0), 0).sum(axis=-1)


def is_flawed(space: Workspace, size: Array, scatter: Array) -> Array:
    """Tell where a cluster is degenerate: a few points that coincide.

    They would cost minus infinity but for the floor. Half the average weight is not a few: data
    with many copies of a point has a cluster there.
    """
    d = space.points.x.shape[1]
    return (scatter <= space.least_spread * d * size) & (size < space.ample)


def is_better(new: Rank, old: Rank) -> Array:
    """Tell where the new rank is strictly better than the old one."""
    cheaper = (new.flaws < old.flaws) | ((new.flaws == old.flaws) & (new.cost < old.cost))
    return (new.shortage < old.shortage) | ((new.shortage == old.shortage) & cheaper)


def is_behind(rank: Rank) -> Array:
    """Tell which of a stack of ranks come after which, `[m, m]`: worse, or the same and later."""
    this = jax.tree.map(lambda leaf: leaf[:, None], rank)
    other = jax.tree.map(lambda leaf: leaf[None, :], rank)
    place = jnp.arange(rank.cost.shape[0], dtype=jnp.int32)
    earlier = place[None, :] < place[:, None]
    return is_better(other, this) | (~is_better(this, other) & earlier)


def select_each(mask: Array, new: Any, old: Any) -> Any:
    """Return the entries of one stack where the mask `[m]` is true, of another where it is not."""
    return jax.tree.map(
        lambda new, old: jnp.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old), new, old
    )


def labels_of(space: Workspace, mixtures: Mixture, problem: Problem) -> Array:
    """Return the cheapest cluster of every point under each of a stack of mixtures, `[m, n]`."""
    n, d = space.points.x.shape
    k = mixtures.weights.shape[1]
    small = numerics.is_small(k, d)
    bytes_each = space.points.x.dtype.itemsize * n * (1 if small else k)

    def directly(mixture: Mixture) -> Array:
        return assign_points(space.points, space.tiles, mixture, problem)[1]

    def by_matmul(mixture: Mixture) -> Array:
        coefficients = problem.coefficients(shift_means(mixture, -space.rows.centre))
        return numerics.assign_by_matmul(space.features, coefficients, n)

    if small:
        return numerics.map_stack(directly, mixtures, bytes_each)
    return lax.cond(
        is_safe(space, mixtures, problem),
        lambda stack: numerics.map_stack(by_matmul, stack, bytes_each),
        lambda stack: numerics.map_stack(directly, stack, bytes_each),
        mixtures,
    )


def is_safe(space: Workspace, mixtures: Mixture, problem: Problem) -> Array:
    """Tell whether a product of matrices is precise enough for all of a stack of mixtures."""
    slope = jax.vmap(problem.coefficients)(mixtures).slope
    tolerance = TOLERANCE * space.points.x.shape[1]
    return numerics.matmul_is_safe(space.largest_norm, slope, tolerance).all()


def over_tiles(space: Workspace, function: Any, *values: Array) -> Any:
    """Apply `function(tile, *values)` to every tile of the points, and join what it gives.

    Args:
        space: the points.
        function: of a tile, for `squared_distances`, and of the values of its points.
        values: arrays `[n]`; zeros are put where a tile is padded.
    """
    n = space.points.x.shape[0]
    count, _, length = space.tiles.shape
    shaped = tuple(
        jnp.pad(value, (0, count * length - n)).reshape(count, length) for value in values
    )
    tiles = (space.tiles, space.features)
    if count == 1:
        result = function(*jax.tree.map(lambda leaf: leaf[0], (tiles, *shaped)))
    else:
        result = lax.map(lambda given: function(*given), (tiles, *shaped))
    return jax.tree.map(lambda leaf: leaf.reshape(-1)[:n], result)


def squared_distances(space: Workspace, tile: Any, means: Array, safe: Array) -> Array:
    """Return the squared distances `[k, p]` of a tile of points to means.

    Args:
        space: the points.
        tile: as `over_tiles` gives it.
        means: `[k, d]`.
        safe: whether a product of matrices will do; one for the whole population.
    """
    columns, features = tile
    k, d = means.shape
    if numerics.is_small(k, d):
        return numerics.squared_distances(columns, means)

    def by_matmul() -> Array:
        ones, zeros = jnp.ones(k, means.dtype), jnp.zeros(k, means.dtype)
        about = numerics.Coefficients(means - space.rows.centre, ones, zeros)
        matrix = numerics.matmul_coefficients(about)
        return jnp.maximum(jnp.matmul(matrix, features, precision=numerics.PRECISION), 0)

    return lax.cond(safe, by_matmul, lambda: numerics.squared_distances(columns, means))


def own_values(values: Array, label: Array) -> Array:
    """Return from values `[k, p]` those in the row of each label `[p]`."""
    inside = jnp.arange(values.shape[0], dtype=jnp.int32)[:, None] == label
    return jnp.where(inside, values, 0).sum(axis=0)


def moments_of(space: Workspace, labels: Array, k: int) -> Moments:
    """Return the moments of a stack of partitions, in one pass where that is precise enough."""
    rows = space.rows
    itemsize = rows.rows.dtype.itemsize

    def exact(labels: Array) -> Moments:
        return numerics.map_stack(
            lambda labels: numerics.cluster_moments(space.points, rows, labels, k),
            labels,
            16 * itemsize * rows.rows.size,
        )

    quick, error = numerics.map_stack(
        lambda labels: numerics.quick_moments(rows, labels, k),
        labels,
        4 * itemsize * rows.rows.size,
    )
    tolerance = VARIANCE_TOLERANCE * jnp.finfo(rows.rows.dtype).eps
    return lax.cond((error <= tolerance).all(), lambda _: quick, exact, labels)
