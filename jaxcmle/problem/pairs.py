"""All pairs of points, row tile by row tile, so that memory stays within a budget."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Points

__all__ = [
    "BYTE_BUDGET",
    "MAX_POINTS",
    "check_pairs_affordable",
    "first_sums",
    "over_pairs",
    "sorted_rows",
    "spare_part",
    "unless_nan",
]

# Pairs take time in the square of the number of points: about a minute here on two CPU cores.
MAX_POINTS = 50_000
BYTE_BUDGET = 2**28


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
    points: Points, row_function: Callable[[Array, Array], Any], arrays: int, byte_budget: int
) -> Any:
    """Apply `row_function(index [r], distances [r, n])` to tiles of rows, and join the results.

    Distances to points of weight 0 are infinite. `arrays` is how many arrays like the distances
    the function holds at once.
    """
    n = points.x.shape[0]
    bytes_per_row = points.x.dtype.itemsize * n * arrays
    rows = max(1, min(n, int(byte_budget) // bytes_per_row, -(-(2**22) // n)))
    tiles = -(-n // rows)
    index = jnp.minimum(jnp.arange(tiles * rows), n - 1).reshape(tiles, rows)
    columns = points.x.T

    def one_tile(index: Array) -> Any:
        square = numerics.squared_distances(columns, points.x[index])
        return row_function(index, jnp.where(points.weight > 0, square, jnp.inf))

    result = lax.map(one_tile, index)
    return jax.tree.map(lambda leaf: leaf.reshape(tiles * rows, *leaf.shape[2:])[:n], result)


def sorted_rows(distances: Array, weight: Array | None) -> tuple[Array, Array]:
    """Sort each row of `[r, n]`; return the distances, and the weights of the points behind."""
    if weight is None:
        return _sort_rows(distances), jnp.ones_like(distances)
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
def _sort_rows(distances: Array) -> Array:
    bits = lax.sort(_bits(distances), dimension=1, is_stable=False)
    return lax.bitcast_convert_type(bits, distances.dtype)


@_sort_rows.defjvp
def _sort_rows_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The way through the bits has no derivative: follow the order instead."""
    (distances,), (tangent,) = primals, tangents
    order = jnp.argsort(distances, axis=1)
    sort = partial(jnp.take_along_axis, indices=order, axis=1)
    return sort(distances), sort(tangent)


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
