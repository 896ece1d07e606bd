"""All pairs of points, row tile by row tile, so that memory stays within a budget."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Points
from jaxcmle.problem.placement import split_stack

__all__ = [
    "MAX_POINTS",
    "check_pairs_affordable",
    "first_sums",
    "over_pairs",
    "running_sums",
    "sorted_columns",
    "sorted_rows",
    "spare_part",
    "sum_of_first",
    "unless_nan",
]

# Pairs take time in the square of the number of points: about a minute here on two CPU cores.
MAX_POINTS = 50_000
# On the CPU a network sorts columns up to this length; every factor of two takes it longer to
# compile. It needs columns side by side to fill vectors: with few of them a plain sort is as fast,
# and many are worth more than a tile that fits in the cache.
NETWORK_POINTS = 4096
FEW_COLUMNS, MANY_COLUMNS = 24, 64
# Terms per block of running sums: with fewer, XLA computes them anew for each use.
BLOCK = 16


def check_pairs_affordable(points: Array, max_points: int, name: str) -> None:
    """Raise where a pass over all pairs would take too long."""
    n = points.shape[0]
    if n > max_points:
        raise ValueError(
            f"{name} looks at all pairs of points, and {n} points make too many: raise max_points "
            f"above {max_points} to wait for it (time grows with the square), or pass a random "
            "sample of the points to get an idea"
        )


def over_pairs(
    points: Points,
    row_function: Callable[..., Any],
    arrays: int,
    byte_budget: int,
    *,
    as_columns: bool = False,
    shared: tuple[Any, ...] = (),
    mesh: Mesh | None = None,
) -> Any:
    """Apply `row_function(index [r], distances [r, n])` to tiles of rows, and join the results.

    Distances to points of weight 0 are infinite. `arrays` is how many arrays like the distances
    the function holds at once. `as_columns` gives it the distances as `[n, r]`. The tiles are split
    over the devices of a mesh, which must all have the points; they are cut as on one device, so
    that results are the same. There the function must close over no array: `shared` are its other
    arguments.
    """
    n = points.x.shape[0]
    bytes_per_row = points.x.dtype.itemsize * n * arrays
    rows = min(n, int(byte_budget) // bytes_per_row, -(-(2**22) // n))
    if as_columns and n <= NETWORK_POINTS:
        in_cache = numerics.tile_bytes() // (4 * points.x.dtype.itemsize * n)
        rows = min(rows, max(MANY_COLUMNS, in_cache))
    tiles = -(-n // max(1, rows))
    rows = -(-n // tiles)
    index = jnp.minimum(jnp.arange(tiles * rows), n - 1).reshape(tiles, rows)

    def some_tiles(given: Any, index: Array) -> Any:
        (x, weight, _), others = given
        columns = x.T

        def one_tile(index: Array) -> Any:
            if as_columns:
                square = numerics.squared_distances(columns[:, index], x)
                distances = jnp.where(weight[:, None] > 0, square, jnp.inf)
            else:
                square = numerics.squared_distances(columns, x[index])
                distances = jnp.where(weight > 0, square, jnp.inf)
            return row_function(index, distances, *others)

        return lax.map(one_tile, index)

    result = split_stack(some_tiles, mesh, (points, shared), index)
    return jax.tree.map(lambda leaf: leaf.reshape(tiles * rows, *leaf.shape[2:])[:n], result)


def sorted_rows(distances: Array, weight: Array | None) -> tuple[Array, Array]:
    """Sort each row of `[r, n]`; return the distances, and the weights of the points behind."""
    if weight is None:
        return sorted_columns(distances.T).T, jnp.ones_like(distances)
    position = lax.broadcasted_iota(jnp.int32, distances.shape, 1)
    _, order = lax.sort((_bits(distances), position), dimension=1, num_keys=1, is_stable=False)
    return jnp.take_along_axis(distances, order, axis=1), weight[order]


def _bits(distances: Array) -> Array:
    """Return integers that order as the distances do, none of which is negative.

    Integers sort four times as fast as floats on the CPU.
    """
    integer = jnp.int32 if distances.dtype == jnp.float32 else jnp.int64
    return lax.bitcast_convert_type(distances, integer)


@jax.custom_jvp
def sorted_columns(distances: Array) -> Array:
    """Sort each column of `[n, r]`, of distances or other numbers that are not negative."""
    n, columns = distances.shape
    bits = _bits(distances)
    if n > NETWORK_POINTS or columns < FEW_COLUMNS:
        bits = _sort_by_rows(bits)
    else:
        bits = lax.platform_dependent(bits, cpu=_sort_by_network, default=_sort_by_rows)
    return lax.bitcast_convert_type(bits, distances.dtype)


@sorted_columns.defjvp
def _sorted_columns_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The way through the bits has no derivative: follow the order instead."""
    (distances,), (tangent,) = primals, tangents
    order = jnp.argsort(distances, axis=0)
    sort = partial(jnp.take_along_axis, indices=order, axis=0)
    return sort(distances), sort(tangent)


def _sort_by_rows(bits: Array) -> Array:
    return lax.sort(bits.T, dimension=1, is_stable=False).T


def _sort_by_network(bits: Array) -> Array:
    """Sort each column by Batcher's bitonic merges, which are minima and maxima of whole rows.

    Sorted runs double in length. The first step of a merge compares one run with the other one
    reversed, so that every run ascends and the padding stays at the end.
    """
    n, columns = bits.shape
    length = 1 << (n - 1).bit_length()
    largest = jnp.asarray(jnp.iinfo(bits.dtype).max, bits.dtype)
    values = lax.pad(bits, largest, ((0, length - n, 0), (0, 0, 0)))
    run = 1
    while run < length:
        step = run
        while step:
            pairs = values.reshape(length // (2 * step), 2, step, columns)
            low, high = pairs[:, :1], pairs[:, 1:]
            if step == run:
                least, most = lax.min(low, lax.rev(high, (2,))), lax.max(lax.rev(low, (2,)), high)
            else:
                least, most = lax.min(low, high), lax.max(low, high)
            values = lax.concatenate([least, most], 1).reshape(length, columns)
            step //= 2
        run *= 2
    return values[:n]


def running_sums(values: Array) -> Array:
    """Return the sums of the first 1, 2, 3, ... rows of `[n, r]`, of at most 2 log2(n) roundings.

    Blocks of fixed length have their sums by doubling, and then take those of the blocks before
    them: four times as fast as `cumsum` on the CPU.
    """
    n, columns = values.shape
    if n == 1:
        return values
    blocks = -(-n // BLOCK)
    sums = jnp.pad(values, ((0, blocks * BLOCK - n), (0, 0))).reshape(blocks, BLOCK, columns)
    reach = 1
    while reach < min(n, BLOCK):
        sums = lax.concatenate([sums[:, :reach], sums[:, reach:] + sums[:, :-reach]], 1)
        reach *= 2
    if blocks > 1:
        before = jnp.pad(running_sums(sums[:-1, -1]), ((1, 0), (0, 0)))
        sums = sums + before[:, None]
    return sums.reshape(blocks * BLOCK, columns)[:n]


def sum_of_first(ordered: Array, sums: Array, size: Array) -> Array:
    """Return what `first_sums` does, of columns `[n, r]` of whole points and their running sums."""
    n = ordered.shape[0]
    whole = jnp.floor(size)
    part = size - whole
    position = jnp.clip(whole.astype(jnp.int32), 0, n)
    full = jnp.where(position > 0, sums[jnp.maximum(position - 1, 0)], 0)
    following = jnp.where(part > 0, ordered[jnp.minimum(position, n - 1)], 0)
    return full + part * following


def first_sums(values: Array, weight: Array, size: ArrayLike, spare: float = 0.0) -> Array:
    r"""Return $\sum_y b_y v_y$ over the first weight W of each row, the last point in part.

    $0 \le b_y \le a_y$ and $\sum_y b_y = W$, filled from the left; $v$ and $a$ are `[r, n]`, the
    result is `[r]`. On rows that `sorted_rows` gives, this is the least such sum.

    `spare` is a part of W that is left out. Sums of weights are rounded, and a trifle of a point
    that should not be there at all counts, if it is far away and all others coincide.
    """
    taken = jnp.clip(size * (1 - spare) - (jnp.cumsum(weight, axis=1) - weight), 0, weight)
    return jnp.where(taken > 0, taken * values, 0).sum(axis=1)


def spare_part(weight: Array | None, n: int, dtype: Any) -> float:
    """Return the part of a sum of n weights that rounding may miss: none of whole points."""
    return 0.0 if weight is None else n * float(jnp.finfo(dtype).eps)


def unless_nan(points: Points, value: Array) -> Array:
    """Return the value, or NaN if a point or weight is not finite (possible only under tracing)."""
    return jnp.where(
        jnp.isfinite(points.x).all() & jnp.isfinite(points.weight).all(), value, jnp.nan
    )
