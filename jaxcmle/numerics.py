"""Arithmetic that stays right in float32: shifts, distances, assignments and sums per cluster.

Every cost in this package has the form `constant[k] + slope[k] * |x - means[k]|^2`. Two ways lead
there. *Direct* differences are exact to rounding on any data, and are what every reported number is
made of. The *matmul* form `|x|^2 - 2 x.mean + |mean|^2` is faster when there are many clusters and
features, but cancels when the data is wide and a cluster is narrow: it serves only behind
`matmul_is_safe`.

Work over the points goes in tiles whose bytes are bounded, and sums over the points go in blocks of
a fixed length, so that neither the tile nor the padding shows in the result.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle import memory

__all__ = [
    "Coefficients",
    "MomentRows",
    "Moments",
    "Points",
    "apart",
    "assign_by_matmul",
    "assign_directly",
    "blocked_sum",
    "centred",
    "cluster_moments",
    "cluster_sums",
    "exact_shift",
    "feature_range",
    "in_tiles",
    "is_small",
    "map_stack",
    "matmul_coefficients",
    "matmul_features",
    "matmul_is_safe",
    "moment_rows",
    "point_tiles",
    "prepare",
    "quick_moments",
    "row_sum",
    "shifted",
    "silence",
    "smallest",
    "squared_distances",
    "tile_bytes",
    "whole_moments",
]

# Terms per running sum: few enough that float32 loses next to nothing even if all roundings go the
# same way, as they do on constant data.
BLOCK = 512
# Up to this many (cluster, feature) pairs an unrolled elementwise kernel beats a matmul and never
# materialises a [k, n] array.
SMALL = 128
# Rows compared per step where clusters are too many to unroll all of them.
ROWS_UNROLLED = 32

PRECISION = lax.Precision.HIGHEST


class Points(NamedTuple):
    """Points ready for arithmetic.

    Attributes:
        x: `[n, d]`, the data less `shift`.
        weight: `[n]`, zero for padding.
        shift: `[d]`, what was subtracted; the subtraction is exact.
    """

    x: Array
    weight: Array
    shift: Array


class Coefficients(NamedTuple):
    """Costs as functions of the squared distance: `constant[k] + slope[k] * |x - means[k]|^2`."""

    means: Array
    slope: Array
    constant: Array


def tile_bytes() -> int:
    """Return the bytes one tile of work may take: a cache on the CPU, far more on accelerators."""
    return memory.tile_bytes()


def apart(function: Callable[..., Any], busy: Array | None, *operands: Any) -> Any:
    """Return what the function gives, compiled apart from what goes before and comes after.

    The compiler for the CPU repeats work wherever its result is used, be it for every point, and
    does not mind `optimization_barrier`. It does not look into a branch, though. `busy` is always
    true where the result matters, and nothing the compiler could know; None leaves it to itself.
    Compilers for accelerators need no such help, and branches cost them something.
    """
    if busy is None or jax.default_backend() != "cpu":
        return function(*operands)
    blank = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *operands)
    )
    return lax.cond(busy, function, lambda *_: blank, *operands)


def prepare(x: Array, sample_weight: Array | None) -> Points:
    """Return the points with zero-weight rows silenced and a common offset taken off, exactly.

    A feature is shifted only where all its values have one sign and lie within a factor of two of
    each other: then `value - shift` has no rounding error (Sterbenz), so a large offset disappears
    and no bit of the data is lost. Elsewhere the offset is no larger than the spread, and stays.
    Rows of weight 0 may hold anything, even NaN. One bad weight (only possible under tracing) makes
    all weights NaN, and so shows in whatever is computed from them.
    """
    weight = jnp.ones(x.shape[0], x.dtype) if sample_weight is None else sample_weight
    return shifted(x, weight, *feature_range(x, weight))


def feature_range(x: Array, weight: Array) -> tuple[Array, Array]:
    """Return the lowest and the highest value of each feature, of points of positive weight."""
    present = (weight > 0)[:, None]
    low = jnp.min(jnp.where(present, x, jnp.inf), axis=0)
    return low, jnp.max(jnp.where(present, x, -jnp.inf), axis=0)


def shifted(x: Array, weight: Array, low: Array, high: Array) -> Points:
    """Return what `prepare` does, for some of the points that have this range together."""
    weight = jnp.where((weight >= 0).all(), weight, jnp.nan)
    shift = exact_shift(low, high)
    return Points(jnp.where((weight > 0)[:, None], x - shift, 0), weight, shift)


def exact_shift(low: Array, high: Array) -> Array:
    """Return what can be taken off features of this range without rounding."""
    near = ((low > 0) & (high <= 2 * low)) | ((high < 0) & (low >= 2 * high))
    return jnp.where(near & (low <= high), low + (high - low) / 2, 0).astype(low.dtype)


def silence(weight: Array, values: Array) -> Array:
    """Return the values, 0 where the weight is 0, NaN where it is NaN."""
    return jnp.where(weight == 0, 0, jnp.where(jnp.isnan(weight), jnp.nan, values))


def centred(points: Points) -> tuple[Array, Array]:
    """Return `(x - centre, centre)` for the matmul form, `centre` about the mean of the points.

    Unlike `prepare`, this subtraction rounds, by as much as the matmul form itself does.
    """
    total = blocked_sum(points.weight)
    centre = blocked_sum(points.weight[:, None] * points.x) / total
    return points.x - centre, centre


def blocked_sum(values: Array) -> Array:
    """Sum over the leading axis: inside fixed blocks first, then in blocks of the blocks."""
    n = values.shape[0]
    if n <= BLOCK:
        return values.sum(axis=0)
    blocks = -(-n // BLOCK)
    padded = jnp.pad(values, [(0, blocks * BLOCK - n)] + [(0, 0)] * (values.ndim - 1))
    return blocked_sum(padded.reshape(blocks, BLOCK, *values.shape[1:]).sum(axis=1))


def cluster_sums(rows: Array, labels: Array, k: int, *, interleave: int = 1) -> Array:
    """Sum rows `[n, c]` per label into `[k, c]`, in blocks of the points.

    The CPU adds row by row (a scatter); accelerators multiply by a one-hot matrix, which is fast
    there and, unlike atomic additions, always gives the same bits. Labels out of range are dropped.
    With `interleave`, a scatter turns to so many blocks in turn: else, where most points are of one
    cluster, every addition waits for the one before.
    """
    n, columns = rows.shape
    blocks = -(-n // BLOCK)

    def by_scatter(rows: Array, labels: Array) -> Array:
        place = jnp.arange(n, dtype=jnp.int32)
        block = place // (BLOCK * interleave) * interleave + place % interleave
        count = -(-n // (BLOCK * interleave)) * interleave
        in_range = (labels >= 0) & (labels < k)
        segment = jnp.where(in_range, labels + k * block, k * count)
        sums = jax.ops.segment_sum(rows, segment, k * count)
        return blocked_sum(sums.reshape(count, k, columns))

    def by_matmul(rows: Array, labels: Array) -> Array:
        length = BLOCK if blocks > 1 else n
        extra = blocks * length - n
        rows = jnp.pad(rows, ((0, extra), (0, 0))).reshape(blocks, length, columns)
        labels = jnp.pad(labels, (0, extra), constant_values=k).reshape(blocks, length)

        def block_sums(block: tuple[Array, Array]) -> Array:
            rows, labels = block
            one_hot = (labels == jnp.arange(k, dtype=labels.dtype)[:, None]).astype(rows.dtype)
            return jnp.matmul(one_hot, rows, precision=PRECISION)

        sums = map_stack(block_sums, (rows, labels), rows.dtype.itemsize * length * k)
        return blocked_sum(sums)

    return lax.platform_dependent(rows, labels, cpu=by_scatter, default=by_matmul)


class Moments(NamedTuple):
    """Weight `[k]`, mean `[k, d]` and scatter `[k]` of each cluster; zeros for an empty one."""

    size: Array
    mean: Array
    scatter: Array


def whole_moments(points: Points) -> Moments:
    """Return the moments of all points as one cluster."""
    total = blocked_sum(points.weight)
    centred_x, centre = centred(points)
    drift = blocked_sum(points.weight[:, None] * centred_x) / total
    square = blocked_sum(points.weight * row_sum(centred_x * centred_x))
    scatter = jnp.maximum(square - total * (drift * drift).sum(), 0)
    return Moments(total[None], (centre + drift)[None], scatter[None])


class MomentRows(NamedTuple):
    """Rows `[a (x - centre), a |x - centre|^2, a]`, whose sums per cluster give its moments."""

    rows: Array
    centre: Array


def moment_rows(points: Points) -> MomentRows:
    """Return the rows about the centre of the points."""
    centred_x, centre = centred(points)
    return MomentRows(points.weight[:, None] * matmul_features(centred_x), centre)


def quick_moments(rows: MomentRows, labels: Array, k: int) -> tuple[Moments, Array]:
    """Return the moments in one pass, and the rounding error of each scatter relative to it.

    The scatter is a difference of sums about a common centre: it is worth its error estimate.
    """
    sums = cluster_sums(rows.rows, labels, k)
    square, size = sums[:, -2], sums[:, -1]
    mean = sums[:, :-2] / jnp.where(size > 0, size, 1)[:, None]
    scatter = jnp.maximum(square - size * (mean * mean).sum(axis=1), 0)
    error = jnp.where(size > 0, jnp.finfo(square.dtype).eps * square / scatter, 0)
    return Moments(size, mean + rows.centre, scatter), error


def cluster_moments(points: Points, rows: MomentRows, labels: Array, k: int) -> Moments:
    """Return the moments in two passes, right to rounding however wide the data.

    The second pass works on the differences to the means of the first, and corrects both: the mean
    by the mean difference, the scatter by what that moves. So neither a wide data set nor the
    rounding of the mean itself spoils a narrow cluster.
    """
    (size, mean, _), _ = quick_moments(rows, labels, k)
    mean = jnp.where(size[:, None] > 0, mean, 0)
    difference = points.x - mean[labels]
    weight = points.weight
    # Two sums, not one of joined rows: XLA would join them by slow scalar code, anew every time.
    drift = cluster_sums(weight[:, None] * difference, labels, k)
    drift = drift / jnp.where(size > 0, size, 1)[:, None]
    square = weight * row_sum(difference * difference)
    scatter = cluster_sums(square[:, None], labels, k)[:, 0] - size * (drift * drift).sum(axis=1)
    return Moments(size, mean + drift, jnp.maximum(scatter, 0))


def row_sum(values: Array) -> Array:
    """Sum `[n, d]` over d; unrolled for few features, where a reduction over them is slow."""
    if values.shape[1] > 16:
        return values.sum(axis=1)
    total = values[:, 0]
    for column in range(1, values.shape[1]):
        total = total + values[:, column]
    return total


def squared_distances(columns: Array, means: Array) -> Array:
    """Return `|x - means[k]|^2` as `[k, n]` by direct differences; `columns` is x as `[d, n]`."""

    def add_feature(j: Array, total: Array) -> Array:
        difference = columns[j] - means[:, j][:, None]
        return total + difference * difference

    d, n = columns.shape
    if d * means.shape[0] <= SMALL:
        total = (columns[0] - means[:, 0][:, None]) ** 2
        for j in range(1, d):
            total = total + (columns[j] - means[:, j][:, None]) ** 2
        return total
    start = jnp.zeros((means.shape[0], n), jnp.result_type(columns, means))
    return lax.fori_loop(0, d, add_feature, start)


def smallest(costs: Array) -> tuple[Array, Array]:
    """Return the smallest of the k costs `[k, ...]` and its index; ties to the lowest, NaN never.

    Where nothing is smaller than infinity the answer is `(inf, 0)`.
    """
    k = costs.shape[0]
    best = jnp.full(costs.shape[1:], jnp.inf, costs.dtype)
    label = jnp.zeros(costs.shape[1:], jnp.int32)
    if k <= 2 * ROWS_UNROLLED:
        for j in range(k):
            best, label = _keep_smaller(best, label, costs[j], j)
        return best, label

    groups = -(-k // ROWS_UNROLLED)
    padding = [(0, groups * ROWS_UNROLLED - k)] + [(0, 0)] * (costs.ndim - 1)
    costs = jnp.pad(costs, padding, constant_values=jnp.inf)
    costs = costs.reshape(groups, ROWS_UNROLLED, *costs.shape[1:])

    def compare_group(g: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        for j in range(ROWS_UNROLLED):
            state = _keep_smaller(*state, costs[g, j], g * ROWS_UNROLLED + j)
        return state

    return lax.fori_loop(0, groups, compare_group, (best, label))


def _keep_smaller(best: Array, label: Array, cost: Array, j: int | Array) -> tuple[Array, Array]:
    less = cost < best
    return jnp.where(less, cost, best), jnp.where(less, jnp.int32(j), label)


def is_small(k: int, d: int) -> bool:
    """Tell whether k clusters in d dimensions are few enough to unroll: then direct is fastest."""
    return k * d <= SMALL


def point_tiles(rows: Array, k: int) -> Array:
    """Return rows `[n, c]` as tiles `[t, c, p]` such that a `[k, p]` array fits in `tile_bytes`.

    Small problems never make such an array, and go in one tile. Padded columns are zeros.
    """
    n, columns = rows.shape
    needed = 0 if is_small(k, columns) else n * k * rows.dtype.itemsize
    tiles = max(1, -(-needed // tile_bytes()))
    length = -(-n // tiles)
    return in_tiles(rows, tiles, length)


def in_tiles(rows: Array, tiles: int, length: int) -> Array:
    """Return rows `[n, c]` as so many tiles of so many points, `[tiles, c, length]`."""
    n, columns = rows.shape
    padded = jnp.pad(rows, ((0, tiles * length - n), (0, 0)))
    return padded.reshape(tiles, length, columns).transpose(0, 2, 1)


def assign_directly(tiles: Array, coefficients: Coefficients, n: int) -> tuple[Array, Array]:
    """Return the smallest cost and its label for each of n points, by direct differences.

    `tiles` are the points as `point_tiles` gives them.
    """
    means, slope, constant = coefficients

    def one_tile(columns: Array) -> tuple[Array, Array]:
        if not is_small(*means.shape):
            square = squared_distances(columns, means)
            return smallest(square * slope[:, None] + constant[:, None])
        # Unrolled over clusters as well, so that all of it is one elementwise kernel.
        best = jnp.full(columns.shape[1], jnp.inf, columns.dtype)
        label = jnp.zeros(columns.shape[1], jnp.int32)
        for k in range(means.shape[0]):
            square = squared_distances(columns, means[k : k + 1])[0]
            best, label = _keep_smaller(best, label, square * slope[k] + constant[k], k)
        return best, label

    return _over_tiles(one_tile, tiles, n)


def matmul_features(x: Array) -> Array:
    """Return the rows `[x, |x|^2, 1]`: costs are their products with `matmul_coefficients`."""
    ones = jnp.ones((x.shape[0], 1), x.dtype)
    return jnp.concatenate([x, row_sum(x * x)[:, None], ones], axis=1)


def matmul_coefficients(coefficients: Coefficients) -> Array:
    """Return `[k, d + 2]`, whose products with `matmul_features` are the costs."""
    means, slope, constant = coefficients
    offset = constant + slope * (means * means).sum(axis=-1)
    return jnp.concatenate(
        [-2 * slope[..., None] * means, slope[..., None], offset[..., None]], axis=-1
    )


def assign_by_matmul(tiles: Array, coefficients: Coefficients, n: int) -> Array:
    """Return the label of each of n points by the matmul form; `tiles` hold `matmul_features`."""
    matrix = matmul_coefficients(coefficients)
    return _over_tiles(
        lambda columns: smallest(jnp.matmul(matrix, columns, precision=PRECISION))[1], tiles, n
    )


def matmul_is_safe(largest_norm: Array, slope: Array, tolerance: ArrayLike) -> Array:
    """Tell whether the matmul form errs by less than about `tolerance` nats in any cost.

    Its rounding error is that of `slope * |x|^2`, whatever the distance: `largest_norm` is the
    largest `|x|^2`, and the steepest slope belongs to the narrowest cluster.
    """
    error = jnp.finfo(largest_norm.dtype).eps * largest_norm * slope.max(axis=-1)
    return error < tolerance


def _over_tiles(function: Callable[[Array], Any], tiles: Array, n: int) -> Any:
    """Apply a function of `[c, p]` to every tile, and join what it gives per point."""
    if tiles.shape[0] == 1:
        return jax.tree.map(lambda value: value[:n], function(tiles[0]))
    return jax.tree.map(lambda value: value.reshape(-1)[:n], lax.map(function, tiles))


def map_stack(function: Callable[[Any], Any], stack: Any, bytes_each: int) -> Any:
    """Apply a function along the leading axis, as many at once as fit in `tile_bytes`.

    What does not fill the last batch is padded with repetitions, so that one batch size, and so
    one compiled body, serves all.
    """
    length = jax.tree.leaves(stack)[0].shape[0]
    batches = -(-length // max(1, tile_bytes() // max(1, bytes_each)))
    batch = -(-length // batches)
    if batch == 1:
        # Not the same as batches of one: scatters are slower with a batch axis.
        return lax.map(function, stack)
    if batches == 1:
        return jax.vmap(function)(stack)
    index = jnp.minimum(jnp.arange(batches * batch), length - 1)
    padded = stack if batches * batch == length else jax.tree.map(lambda leaf: leaf[index], stack)
    mapped = lax.map(function, padded, batch_size=batch)
    return jax.tree.map(lambda leaf: leaf[:length], mapped)
