"""Every point against every candidate of a product, in tiles, with a running exact top-m.

A candidate picks one *column* for each component: the costs of all points under one mean, variance
and weight. What it costs is the sum over the points of the smallest of its columns, so scoring a
product is a matrix product with min for times:

    R[i, j] = sum_n min(P[n, i], Q[n, j]),

P the running minimum over the columns of the first components and Q the columns of the last.
Weights that do not add up to 1 are mended afterwards: their normaliser is a constant for each
candidate. Two shapes of product come up. `walk_product` has the same columns, many of them, for all
candidates; `score_repetitions` has a few columns of their own for each of many repetitions.

Nothing of the size of the product is ever held. What is kept are the m best, ties to the first in
the order of the product, so that the answer does not depend on the tiles. Points are added in a
fixed order, and rounded addition is monotone: a sum over smaller terms is never larger, so the
pruning below loses nothing, not even to rounding.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle import memory, numerics

__all__ = [
    "Best",
    "Grid",
    "Product",
    "Pruning",
    "best_first",
    "best_time",
    "component_columns",
    "give_up_above",
    "merge",
    "merge_stack",
    "min_sum",
    "nothing_yet",
    "point_blocks",
    "prepare_product",
    "product_bytes",
    "product_rate",
    "repetition_bytes",
    "repetition_rate",
    "score_repetitions",
    "smallest_entries",
    "sum_blocks",
    "tile_repetitions",
    "tile_rows",
    "walk_product",
]

# Points added per step of the inner loop. The compiler makes far slower code of other numbers.
UNROLL = 16
# Points between two looks at whether a tile can be given up.
LOOK = 64
# The same for a tile of a product; also the most points of one running sum.
BLOCK = 1024
# Rows and columns of a tile of a product, on the CPU: one step's columns fit the first cache.
CPU_TILE = 256
# Bytes of the running minima of a tile of rows.
ROW_BYTES = 2**24
# Repetitions whose means are drawn, bounded and sorted together.
CHUNK = 2048


class Best(NamedTuple):
    """The best candidates so far.

    Attributes:
        cost: `[m]`, ascending; infinity where there are not that many.
        choice: int32 `[m, l]`, which candidates; ties in the cost go to the first of them.
    """

    cost: Array
    choice: Array


class Pruning(NamedTuple):
    """Which candidates not to look at, or not to finish.

    Attributes:
        variances: leave out variances with which no partition would be better than the incumbent
            by more than is claimed. (Not here: the grid comes without them.)
        partial_sums: give a tile up once its sums over some of the points are above the m best.
            For costs of points that are not negative.
        completions: skip rows of the product that are above the m best even if every point takes
            its best among all columns of the last component.
    """

    variances: bool = True
    partial_sums: bool = True
    completions: bool = True


PRUNING = Pruning()
NO_PRUNING = Pruning(False, False, False)


class Grid(NamedTuple):
    """The variances and weights that every repetition is tried with.

    Attributes:
        slope: `[g]`, the cost of a unit of squared distance.
        constant: `[g]`, the cost at no distance, without the weight.
        log_weights: `[w, k]`, logarithms of tuples of weights.
        n_weights: how many of them count; the rest is padding.
    """

    slope: Array
    constant: Array
    log_weights: Array
    n_weights: Array


def nothing_yet(m: int, length: int, dtype: Any) -> Best:
    """Return a `Best` of m places with nothing in them."""
    return Best(
        jnp.full(m, jnp.inf, dtype), jnp.full((m, length), np.iinfo(np.int32).max, jnp.int32)
    )


def merge(best: Best, cost: Array, index: Array) -> Best:
    """Return the best of both, by cost and then by index; NaN is never among them."""
    cost = jnp.where(cost < jnp.inf, cost, jnp.inf)
    costs = jnp.concatenate([best.cost, cost])
    indices = jnp.concatenate([best.choice, index])
    keys = (costs, *(indices[:, j] for j in range(indices.shape[1])))
    ordered = lax.sort(keys, num_keys=len(keys))
    m = best.cost.shape[0]
    return Best(ordered[0][:m], jnp.stack([column[:m] for column in ordered[1:]], axis=1))


def merge_stack(stack: Best) -> Best:
    """Return the best of a stack that has a leading axis; entries may be there several times."""
    n_best = stack.cost.shape[1]
    cost = stack.cost.reshape(-1)
    choice = stack.choice.reshape(cost.shape[0], -1)
    keys = (cost, *(choice[:, j] for j in range(choice.shape[1])))
    cost, *columns = lax.sort(keys, num_keys=len(keys))
    index = jnp.stack(columns, axis=1)
    # The same index has the same cost, and follows itself.
    again = jnp.concatenate([jnp.zeros(1, bool), (index[1:] == index[:-1]).all(axis=1)])
    nothing = nothing_yet(n_best, index.shape[1], cost.dtype)
    unused = np.iinfo(np.int32).max
    return merge(nothing, jnp.where(again, jnp.inf, cost), jnp.where(again[:, None], unused, index))


def smallest_entries(costs: Array, m: int) -> tuple[Array, Array, Array]:
    """Return the m smallest of a matrix with their rows and columns; ties in row-major order.

    In two steps, both exact: the m rows with the smallest minima hold them.
    """
    rows, columns = costs.shape
    # NaN would count as the largest for `top_k` of the negative.
    costs = jnp.where(costs < jnp.inf, costs, jnp.inf)
    kept = min(m, rows)
    row = jnp.sort(lax.top_k(-costs.min(axis=1), kept)[1])
    values, flat = lax.top_k(-costs[row].reshape(-1), min(m, kept * columns))
    return -values, row[flat // columns].astype(jnp.int32), (flat % columns).astype(jnp.int32)


def min_sum(
    parts: Sequence[Array],
    axes: Sequence[tuple[int, ...]],
    start: ArrayLike = 0,
    length: int | None = None,
) -> Array:
    """Return the sum over the leading axis of the smallest of the parts.

    From `start` on, over `length` places, by default all; both are multiples of `UNROLL`.

    Args:
        parts: arrays with the same leading axis.
        axes: for each part, the axes to insert into its other axes, so that all broadcast. Here
            and not before, because the compiler would copy arrays that come with them.
        start: the first place.
        length: how many places.
    """
    length = parts[0].shape[0] if length is None else length

    def add(step: Array, total: Array) -> Array:
        place = start + step * UNROLL
        slices = [lax.dynamic_slice_in_dim(part, place, UNROLL) for part in parts]
        for i in range(UNROLL):
            first, *others = (
                jnp.expand_dims(part[i], inserted)
                for part, inserted in zip(slices, axes, strict=True)
            )
            least = first
            for part in others:
                # Compiles to better code than `jnp.minimum`, which hands on NaN from both.
                least = jnp.where(least < part, least, part)
            total = total + least
        return total

    shapes = [
        jnp.expand_dims(part[0], inserted).shape for part, inserted in zip(parts, axes, strict=True)
    ]
    total = jnp.zeros(jnp.broadcast_shapes(*shapes), parts[0].dtype)
    return lax.fori_loop(0, length // UNROLL, add, total)


def sum_blocks(
    blocks: int, block_sum: Any, shape: tuple[int, ...], dtype: Any, limit: ArrayLike
) -> Array:
    """Return the sum of `block_sum(b)` over the blocks, or what it was when all passed `limit`."""

    def unfinished(state: tuple[Array, Array]) -> Array:
        block, total = state
        return (block < blocks) & ~(total > limit).all()

    def add(state: tuple[Array, Array]) -> tuple[Array, Array]:
        block, total = state
        return block + 1, total + block_sum(block)

    return lax.while_loop(unfinished, add, (jnp.int32(0), jnp.zeros(shape, dtype)))[1]


def give_up_above(best: Best) -> Array:
    """Return the cost above which a candidate is of no interest, with room for rounding."""
    worst = best.cost[-1]
    return worst + 16 * jnp.finfo(worst.dtype).eps * jnp.abs(worst)


def best_first(
    bound: Array,
    tile: int,
    state: Any,
    best_of: Callable[[Any], Best],
    one_tile: Callable[[Array, Array, Any], Any],
) -> Any:
    """Look at groups of candidates in tiles, until no other can hold any of the best.

    Args:
        bound: `[s]`, what no candidate of a group costs less than; infinity to leave it out.
        tile: groups to a tile.
        state: what is handed from tile to tile.
        best_of: the best so far, of the state.
        one_tile: a function of the groups of a tile `[tile]`, ascending so that ties go the same
            way in any tile, of whether each is one, and of the state; returns the next state.
    """
    s = bound.shape[0]
    # Stable: without bounds, in the order of the groups.
    order = jnp.argsort(bound).astype(jnp.int32)

    def step(place_and_state: tuple[Array, Any]) -> tuple[Array, Any]:
        place, state = place_and_state
        position = place + jnp.arange(tile, dtype=jnp.int32)
        member = jnp.sort(jnp.where(position < s, order[jnp.minimum(position, s - 1)], s))
        inside = member < s
        member = jnp.minimum(member, s - 1)
        return place + tile, one_tile(member, inside & (bound[member] < jnp.inf), state)

    def unfinished(place_and_state: tuple[Array, Any]) -> Array:
        place, state = place_and_state
        # Sorted by their bounds: once one is above the limit, so are all after it.
        bound_here = bound[order[jnp.minimum(place, s - 1)]]
        limit = give_up_above(best_of(state))
        return (place < s) & (bound_here < jnp.inf) & (bound_here <= limit)

    return lax.while_loop(unfinished, step, (jnp.int32(0), state))[1]


# The product of a few components with many columns each.


class Product(NamedTuple):
    """A product of columns, ready to be walked.

    Attributes:
        first: for each component but the last, its columns as `[n, c]`, padded with points that
            cost nothing.
        last: the columns of the last one as tiles `[t, n, width]`, padded with infinite columns.
        best_last: `[n]`, the smallest of the last component's columns.
        mass: for each component, the unnormalised weights of its columns, `[c]`; or None.
        total: the weight of all points.
    """

    first: tuple[Array, ...]
    last: Array
    best_last: Array
    mass: tuple[Array, ...] | None
    total: Array


@jax.jit
def component_columns(
    x: Array, weight: Array, means: Array, slope: Array, constant: Array
) -> Array:
    """Return the costs of all points under every mean and every (slope, constant), `[t * g, n]`.

    Column `i * g + j` belongs to mean i and to slope j. Costs are times the points' weights.
    """
    square = numerics.squared_distances(x.T, means)
    cost = square[:, None] * slope[:, None] + constant[:, None]
    return numerics.silence(weight, weight * cost).reshape(-1, x.shape[0])


def _padded(n: int) -> int:
    """Return n rounded up to blocks of one length, in whole steps."""
    blocks = -(-n // BLOCK)
    return blocks * UNROLL * -(-n // (blocks * UNROLL))


def _tile_width(columns: int) -> int:
    """Return how many columns of the last component go into one tile."""
    if jax.default_backend() == "cpu":
        return min(CPU_TILE, columns)
    return columns


def prepare_product(
    columns: tuple[Array, ...], mass: tuple[Array, ...] | None, total: Any
) -> Product:
    """Return the product of columns `[c, n]`, one array for each component.

    Args:
        columns: costs of all points, times the points' weights, without the normaliser.
        mass: the weights in the columns, `[c]` for each component, if they are to be normalised:
            a candidate then costs `total * ln(sum of its masses)` more. None: they add up to 1, or
            do not count.
        total: the weight of all points.
    """
    return _prepare_product(columns, mass, total, _tile_width(columns[-1].shape[0]))


@partial(jax.jit, static_argnames="width")
def _prepare_product(
    columns: tuple[Array, ...], mass: tuple[Array, ...] | None, total: Any, width: int
) -> Product:
    n = columns[0].shape[1]
    # A cost that is not a number is no bargain.
    columns = tuple(jnp.where(jnp.isnan(column), jnp.inf, column) for column in columns)
    extra = _padded(n) - n
    first = tuple(jnp.pad(column, ((0, 0), (0, extra))).T for column in columns[:-1])
    count = columns[-1].shape[0]
    tiles = -(-count // width)
    last = jnp.pad(columns[-1], ((0, tiles * width - count), (0, 0)), constant_values=jnp.inf)
    last = jnp.pad(last, ((0, 0), (0, extra)))
    best_last = last.min(axis=0)
    last = last.reshape(tiles, width, n + extra).transpose(0, 2, 1)
    return Product(first, last, best_last, mass, jnp.asarray(total, last.dtype))


def _tile_rows(rows: int, columns: int, n: int, itemsize: int) -> int:
    """Return how many rows go into one tile."""
    # Not more than the host has the patience for.
    most = max(16, min(CPU_TILE, 2**33 // (columns * n)))
    if jax.default_backend() != "cpu":
        most = max(1, numerics.tile_bytes() // (itemsize * columns))
    budget = max(memory.halved(ROW_BYTES), numerics.tile_bytes())
    return max(1, min(most, rows, budget // (itemsize * n)))


def tile_rows(product: Product, rows: int) -> int:
    """Return how many rows `walk_product` scores at once."""
    tiles, n, width = product.last.shape
    return _tile_rows(rows, tiles * width, n, product.last.dtype.itemsize)


def walk_product(
    product: Product,
    best: Best,
    start: Array,
    tiles: Any,
    *,
    columns: int,
    tile_rows: int,
    pruning: Pruning = PRUNING,
) -> tuple[Best, Array]:
    """Score the next tiles of a product, and return the best and where to go on.

    Args:
        product: from `prepare_product`.
        best: the best so far, with one index for each component.
        start: int32 `[k - 1]`, the first row: a column for each component but the last. Rows go in
            lexicographic order.
        tiles: how many tiles of rows to score.
        columns: how many columns the last component has.
        tile_rows: rows to a tile, as from `tile_rows`.
        pruning: what not to finish.
    """
    tiles = jnp.asarray(tiles, jnp.int32)
    return _walk_product(product, best, start, tiles, columns, pruning, tile_rows)


@partial(jax.jit, static_argnames=("columns", "pruning", "tile_rows"))
def _walk_product(
    product: Product,
    best: Best,
    start: Array,
    tiles: Array,
    columns: int,
    pruning: Pruning,
    tile_rows: int,
) -> tuple[Best, Array]:
    first, last, best_last, mass, total = product
    n, width = last.shape[1:]
    dtype = last.dtype
    block = n // -(-n // BLOCK)
    m = best.cost.shape[0]

    def rows_after(start: Array, steps: Array) -> tuple[list[Array], Array]:
        """Return the rows so many steps after one, digit by digit, and how often that wraps."""
        digits: list[Array] = []
        for j in reversed(range(len(first))):
            digit = start[j] + steps
            steps = digit // first[j].shape[1]
            digits.insert(0, digit % first[j].shape[1])
        return digits, steps

    def one_tile(_: Array, state: tuple[Best, Array]) -> tuple[Best, Array]:
        best, start = state
        digits, wraps = rows_after(start, jnp.arange(tile_rows, dtype=jnp.int32))
        index = jnp.stack(digits, axis=1) if digits else jnp.zeros((tile_rows, 0), jnp.int32)
        exists = wraps == 0
        left = jnp.full((n, tile_rows), jnp.inf, dtype)
        for j, column in enumerate(first):
            left = jnp.minimum(left, column[:, index[:, j]])
        if mass is not None:
            row_mass = sum((mass[j][index[:, j]] for j in range(len(first))), jnp.zeros((), dtype))
            row_mass = jnp.broadcast_to(row_mass, (tile_rows,))
            least_normaliser = total * jnp.log(row_mass.min() + mass[-1].min())
        limit = give_up_above(best)

        def score_tile(best: Best) -> Best:
            def column_tile(right: Array) -> Array:
                def block_sum(b: Array) -> Array:
                    return min_sum([left, right], [(1,), (0,)], b * block, block)

                stop: Any = jnp.inf
                if pruning.partial_sums:
                    # What the normaliser adds at least is not in the sums yet.
                    stop = limit - (least_normaliser if mass is not None else 0)
                return sum_blocks(n // block, block_sum, (tile_rows, width), dtype, stop)

            cost = lax.map(column_tile, last).transpose(1, 0, 2).reshape(tile_rows, -1)[:, :columns]
            if mass is not None:
                cost = cost + total * jnp.log(row_mass[:, None] + mass[-1])
            cost = jnp.where(exists[:, None], cost, jnp.inf)

            def take(best: Best) -> Best:
                values, row, column = smallest_entries(cost, m)
                picked = jnp.concatenate([index[row], column[:, None]], axis=1)
                return merge(best, values, picked)

            return lax.cond(cost.min() <= best.cost[-1], take, lambda best: best, best)

        if pruning.completions:

            def block_bound(b: Array) -> Array:
                return min_sum([best_last, left], [(0,), ()], b * block, block)

            bound = sum_blocks(n // block, block_bound, (tile_rows,), dtype, jnp.inf)
            if mass is not None:
                bound = bound + total * jnp.log(row_mass + mass[-1].min())
            worth_it = (exists & (bound <= limit)).any()
            best = lax.cond(worth_it, score_tile, lambda best: best, best)
        else:
            best = score_tile(best)

        digits, wraps = rows_after(start, jnp.int32(tile_rows))
        if digits:
            # Past the end there are no more rows.
            digits[0] = digits[0] + wraps * first[0].shape[1]
            start = jnp.stack(digits)
        return best, start

    return lax.fori_loop(jnp.int32(0), tiles, one_tile, (best, start))


def product_bytes(k: int, columns: int, n: int, itemsize: int = 4) -> int:
    """Return about how much memory walking a product of k components takes."""
    width = _tile_width(columns)
    rows = _tile_rows(columns ** (k - 1), max(columns, width), n, itemsize)
    padded = _padded(n)
    held = columns * padded * (3 if k > 1 else 2)
    return itemsize * (held + 3 * rows * padded + 4 * rows * max(columns, width))


# Repetitions: a few columns of their own for each.


def score_repetitions(
    blocks: tuple[Array, Array],
    means: Array,
    number: Array,
    valid: Array,
    grid: Grid,
    best: Best,
    *,
    pruning: Pruning = PRUNING,
    tile: int | None = None,
) -> Best:
    """Score every repetition's means with every tuple of variances and weights.

    Args:
        blocks: the points, from `point_blocks`.
        means: `[s, k, d]`.
        number: int32 `[s, 2]`, what to call the repetitions, ascending.
        valid: `[s]`, whether a repetition is to be scored at all.
        grid: the variances and weights.
        best: the best so far. The index of a candidate is the number of its repetition, that of
            its tuple of weights, and one for each component's variance.
        pruning: what not to finish.
        tile: repetitions to a tile, by default as many as fit.
    """
    s, k, _ = means.shape
    tuples = grid.slope.shape[0] ** k
    together = _weights_together(grid.log_weights.shape[0], tuples)
    if tile is None:
        tile = tile_repetitions(together * tuples)
    return _score_repetitions(
        blocks, means, number, valid, grid, best, pruning, min(tile, s), together
    )


def point_blocks(x: Array, weight: Array) -> tuple[Array, Array]:
    """Return points `[n, d]` and weights in blocks of `LOOK`, padded with points of weight 0."""
    n, d = x.shape
    count = -(-n // LOOK)
    padded = jnp.pad(x, ((0, count * LOOK - n), (0, 0))).reshape(count, LOOK, d)
    return padded, jnp.pad(weight, (0, count * LOOK - n)).reshape(count, LOOK)


def _weights_together(weights: int, variance_tuples: int) -> int:
    """Return how many tuples of weights go into one tile."""
    return max(1, min(weights, 64 // variance_tuples))


def tile_repetitions(tuples: int) -> int:
    """Return how many repetitions go into one tile."""
    if jax.default_backend() == "cpu":
        return 128 if tuples <= 64 else max(8, min(64, 2**22 // tuples))
    return max(8, min(CHUNK, numerics.tile_bytes() // (8 * tuples)))


@partial(jax.jit, static_argnames=("pruning", "tile", "together"))
def _score_repetitions(
    blocks: tuple[Array, Array],
    means: Array,
    number: Array,
    valid: Array,
    grid: Grid,
    best: Best,
    pruning: Pruning,
    tile: int,
    together: int,
) -> Best:
    s, k, d = means.shape
    slope, constant, log_weights, n_weights = grid
    g, w = slope.shape[0], log_weights.shape[0]
    x, weight = blocks
    dtype = means.dtype
    m = best.cost.shape[0]

    def columns(b: Array, mean: Array) -> Array:
        """Return the costs of a block without the weights of the clusters, `[LOOK, k, g, s]`."""
        square = numerics.squared_distances(mean.reshape(d, -1), x[b]).reshape(LOOK, k, 1, -1)
        return square * slope[:, None] + constant[:, None]

    def times_weight(b: Array, cost: Array) -> Array:
        return cost * weight[b].reshape(LOOK, *[1] * (cost.ndim - 1))

    def optimistic(mean: Array) -> Array:
        """Return, for each repetition, a cost that none of its candidates is below."""
        most = log_weights.max(axis=0)[:, None]

        def block_sum(b: Array) -> Array:
            cost = times_weight(b, columns(b, mean).min(axis=2) - most)
            return min_sum([cost[:, j] for j in range(k)], [()] * k)

        return sum_blocks(x.shape[0], block_sum, (mean.shape[2],), dtype, jnp.inf)

    def score_tile(mean: Array, log_weight: Array, limit: Array) -> Array:
        """Return the costs `[weights, g, ..., g, repetitions]` of a tile."""

        def block_sum(b: Array) -> Array:
            cost = columns(b, mean)[:, :, None] - log_weight.T[:, :, None, None]
            cost = times_weight(b, cost)
            # Each component's variances get an axis of their own, after that of the weights.
            own = [tuple(i for i in range(1, k + 1) if i != j + 1) for j in range(k)]
            return min_sum([cost[:, j] for j in range(k)], own)

        shape = (together, *[g] * k, tile)
        return sum_blocks(x.shape[0], block_sum, shape, dtype, limit)

    # Repetitions go along the vectors.
    by_feature = means.transpose(2, 1, 0)
    least = optimistic(by_feature) if pruning.completions else jnp.full(s, -jnp.inf, dtype)

    def one_tile(member: Array, inside: Array, best: Best) -> Best:
        mean = by_feature[:, :, member]

        def some_weights(t: Array, best: Best) -> Best:
            limit = give_up_above(best) if pruning.partial_sums else jnp.asarray(jnp.inf, dtype)
            index = t * together + jnp.arange(together, dtype=jnp.int32)
            cost = score_tile(mean, log_weights[jnp.minimum(index, w - 1)], limit)
            cost = cost.reshape(together, g**k, tile)
            cost = jnp.where((index < n_weights)[:, None, None] & inside, cost, jnp.inf)

            def take(best: Best) -> Best:
                values, row, flat = smallest_entries(cost.reshape(-1, tile).T, m)
                variances = [flat // g ** (k - 1 - j) % g for j in range(k)]
                which = (t * together + flat // g**k, *variances)
                picked = (number[member[row]], *(part[:, None] for part in which))
                return merge(best, values, jnp.concatenate(picked, axis=1, dtype=jnp.int32))

            return lax.cond(cost.min() <= best.cost[-1], take, lambda best: best, best)

        return lax.fori_loop(jnp.int32(0), -(-n_weights // together), some_weights, best)

    bound = jnp.where(valid, least, jnp.inf)
    return best_first(bound, tile, best, lambda best: best, one_tile)


def repetition_bytes(k: int, g: int, d: int, n: int, itemsize: int = 4) -> int:
    """Return about how much memory scoring repetitions takes."""
    tile = tile_repetitions(g**k)
    columns = LOOK * max(tile * 3 * k * g, CHUNK * k * (g + 2))
    return itemsize * (2 * columns + 4 * tile * g**k + 4 * CHUNK * k * d + (d + 2) * n)


# How fast this device is.


def best_time(run: Any, repeats: int = 3) -> float:
    """Return the least time that a function takes, in seconds, after it has been compiled."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times)


@cache
def product_rate() -> float:
    """Return how many point evaluations a second walking a product does, roughly."""
    n, count = 512, 512
    columns = jax.random.uniform(jax.random.key(0), (count, n))
    product = prepare_product((columns, columns), None, float(n))
    best = nothing_yet(16, 2, columns.dtype)
    start = jnp.zeros(1, jnp.int32)
    rows = tile_rows(product, count)
    seconds = best_time(
        lambda: walk_product(
            product,
            best,
            start,
            -(-count // rows),
            columns=count,
            tile_rows=rows,
            pruning=NO_PRUNING,
        )
    )
    return count * count * n / seconds


def repetition_rate(k: int, g: int, d: int) -> float:
    """Return how many point evaluations a second scoring repetitions does, roughly."""
    # Finer grids have about the same rate, and take longer to find out.
    while g > 1 and g**k > 4096:
        g -= 1
    return _repetition_rate(k, g, d)


@cache
def _repetition_rate(k: int, g: int, d: int) -> float:
    n, s = 512, 512 if g**k <= 256 else 128
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (n, d))
    means = jax.random.normal(keys[1], (s, k, d))
    grid = Grid(
        slope=jnp.linspace(1.0, 2.0, g),
        constant=jnp.zeros(g),
        log_weights=jnp.zeros((1, k)),
        n_weights=jnp.int32(1),
    )
    number = jnp.stack([jnp.zeros(s, jnp.int32), jnp.arange(s, dtype=jnp.int32)], axis=1)
    best = nothing_yet(16, 3 + k, x.dtype)
    blocks = point_blocks(x, jnp.ones(n))
    valid = jnp.ones(s, bool)
    seconds = best_time(
        lambda: score_repetitions(blocks, means, number, valid, grid, best, pruning=NO_PRUNING)
    )
    return s * g**k * n / seconds
