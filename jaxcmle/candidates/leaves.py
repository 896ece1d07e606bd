"""The search through the walks of sampling and pruning: scored in batches, the best are kept.

A *leaf* is a complete tuple of means. Its first k - 1 components have the variances and weights
that its prunings were made with; the last is tried with all of them together.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxcmle import memory, numerics
from jaxcmle.candidates import sampling, scoring
from jaxcmle.candidates.pruning import expand, remaining_sizes, walk_count
from jaxcmle.candidates.scoring import LOOK, Best, Pruning
from jaxcmle.selection import keep_largest

__all__ = [
    "Found",
    "Tuples",
    "branch_bytes",
    "branches_together",
    "found_before",
    "leaf_rate",
    "next_branches",
    "nothing_found",
    "search_bytes",
    "selection_rate",
]

# Bytes of the frontier of a batch of branches on the CPU; on accelerators, those of a tile.
FRONTIER_BYTES = 2**24
# The most leaves of a batch.
MOST_LEAVES = 2**13


class Tuples(NamedTuple):
    """Tuples of variances and weights, by their first k - 1 components and by their last.

    Weights are powers of a ratio, relative to each other, and are normalised at the end: a
    candidate costs `total * ln(sum of its masses)` more than its points say.

    Attributes:
        slope: `[t, k - 1]`, of the first components: the cost of a unit of squared distance.
        constant: `[t, k - 1]`, the cost at no distance, with that of the mass; never negative.
        mass: `[t]`, the sum of the masses of the first components.
        low: int32 `[t]`, the smallest power among them.
        high: int32 `[t]`, the largest.
        n_tuples: how many of the t count; the rest is padding.
        last_slope: `[g]`, of the last component, for each variance.
        last_constant: `[g]`, with the smallest mass.
        last_mass: `[e]`, its masses.
        last_shift: `[e]`, what each saves beside the smallest mass; never positive.
        last_power: int32 `[e]`, its powers.
        spread: int32, the most that powers of a tuple may differ by.
    """

    slope: Array
    constant: Array
    mass: Array
    low: Array
    high: Array
    n_tuples: Array
    last_slope: Array
    last_constant: Array
    last_mass: Array
    last_shift: Array
    last_power: Array
    spread: Array


class Found(NamedTuple):
    """The best candidates so far, with their means.

    Attributes:
        best: costs and choices: the number of the repetition, in two parts, the tuple of the first
            components, the walk, variance and weight of the last component, and the place in
            `means`.
        means: `[m, k, d]`.
    """

    best: Best
    means: Array

    @property
    def cost(self) -> Array:
        """The costs, ascending."""
        return self.best.cost


CHOICES = 7


def nothing_found(m: int, k: int, d: int, dtype: Any) -> Found:
    """Return a `Found` of m places with nothing in them."""
    return Found(scoring.nothing_yet(m, CHOICES, dtype), jnp.zeros((m, k, d), dtype))


def found_before(found: Found, number: tuple[int, int]) -> Found:
    """Return what was found by the repetitions before the one with this number."""
    first, second = found.best.choice[:, 0], found.best.choice[:, 1]
    earlier = (first < number[0]) | ((first == number[0]) & (second < number[1]))
    m, length = found.best.choice.shape
    nothing = scoring.nothing_yet(m, length, found.best.cost.dtype)
    cost = jnp.where(earlier, found.best.cost, jnp.inf)
    choice = jnp.where(earlier[:, None], found.best.choice, nothing.choice)
    best = scoring.merge(nothing, cost, choice)
    means = found.means[jnp.minimum(best.choice[:, -1], m - 1)]
    slots = jnp.where(best.cost < jnp.inf, jnp.arange(m), np.iinfo(np.int32).max)
    return Found(best._replace(choice=best.choice.at[:, -1].set(slots.astype(jnp.int32))), means)


def branch_bytes(n: int, d: int, k: int, last: int, prunings: int, itemsize: int = 4) -> int:
    """Return about how much memory the frontier of one branch takes, at most."""
    sizes = remaining_sizes(n, prunings)
    states = max(
        sum(walk_count(found, level) * size for level, size in enumerate(sizes))
        for found in range(1, max(2, k))
    )
    leaves = walk_count(k, prunings)
    return 4 * (itemsize + 4) * states + itemsize * leaves * (4 * k * d + 2 * last)


def search_bytes(
    n: int, d: int, k: int, values: int, powers: int, tuples: int, prunings: int, itemsize: int = 4
) -> int:
    """Return about how much memory the search takes.

    Args:
        n: points.
        d: features.
        k: clusters.
        values: variances of a cluster.
        powers: weights of the last cluster.
        tuples: tuples of the first k - 1 components.
        prunings: the most prunings of a walk.
        itemsize: bytes of a float.
    """
    last = values * powers
    batch = branches_together(n, d, k, last, prunings, itemsize)
    frontier = batch * branch_bytes(n, d, k, last, prunings, itemsize)
    leaves = batch * walk_count(k, prunings)
    tile = scoring.tile_repetitions(last)
    scored = LOOK * (leaves * (k + values + 2) + 2 * tile * (k + values + powers)) + 4 * tile * last
    return frontier + itemsize * (scored + (d + 2) * n + 4 * k * tuples)


def branches_together(n: int, d: int, k: int, last: int, prunings: int, itemsize: int = 4) -> int:
    """Return how many branches go into one batch: a power of two."""
    budget = max(memory.halved(FRONTIER_BYTES), numerics.tile_bytes())
    fitting = budget // branch_bytes(n, d, k, last, prunings, itemsize)
    most = max(1, min(fitting, MOST_LEAVES // walk_count(k, prunings)))
    return 1 << (most.bit_length() - 1)


def next_branches(
    key: Array,
    x: Array,
    blocks: tuple[Array, Array],
    tuples: Tuples,
    found: Found,
    start: tuple[int, int, int],
    steps: int,
    end: int,
    *,
    k: int,
    m: int,
    prunings: int,
    repetitions: int,
    together: int,
    pruning: Pruning = scoring.PRUNING,
    tile: int | None = None,
) -> Found:
    """Expand and score the next batches of branches, and return the best candidates.

    Args:
        key: the key of the search.
        x: the points `[n, d]`, all of weight 1.
        blocks: the same in blocks, from `scoring.point_blocks`.
        tuples: variances and weights.
        found: the best so far.
        start: the number of the first repetition, in two parts, and the first tuple.
        steps: how many batches. Those of a repetition go over its tuples, then come the next
            repetitions.
        end: the second part of the number of the last repetition, and one.
        k: clusters.
        m: points to a mean.
        prunings: the most prunings of a walk.
        repetitions: repetitions in a batch.
        together: tuples in a batch; all of them if there is more than one repetition.
        pruning: what not to finish.
        tile: candidates scored together.
    """
    first, second, place = start
    if end > sampling.NUMBERS:
        raise ValueError(f"repetitions up to {end} go past {sampling.NUMBERS}: split them")
    if tile is None:
        tile = scoring.tile_repetitions(tuples.last_slope.shape[0] * tuples.last_mass.shape[0])
    return _next_branches(
        key,
        x,
        blocks,
        tuples,
        found,
        jnp.array([first, second, place], jnp.int32),
        jnp.int32(steps),
        jnp.int32(end),
        jnp.int32(m),
        k,
        sampling.bucket(m),
        prunings,
        repetitions,
        together,
        pruning,
        tile,
    )


@partial(
    jax.jit,
    static_argnames=("k", "drawn", "prunings", "repetitions", "together", "pruning", "tile"),
)
def _next_branches(
    key: Array,
    x: Array,
    blocks: tuple[Array, Array],
    tuples: Tuples,
    found: Found,
    start: Array,
    steps: Array,
    end: Array,
    m: Array,
    k: int,
    drawn: int,
    prunings: int,
    repetitions: int,
    together: int,
    pruning: Pruning,
    tile: int,
) -> Found:
    n_walks = walk_count(k, prunings)
    chosen = jnp.arange(drawn, dtype=jnp.int32)[None]
    batch = repetitions * together

    def draw(number: Array) -> Array:
        return jax.random.bits(sampling.repetition_key(key, number), (k, drawn), jnp.uint32)

    def one_batch(_: Array, state: tuple[Array, Array, Found]) -> tuple[Array, Array, Found]:
        second, place, found = state
        seconds = second + jnp.arange(repetitions, dtype=jnp.int32)
        number = jnp.stack([jnp.broadcast_to(start[0], seconds.shape), seconds], axis=1)
        bits = jnp.repeat(jax.vmap(draw)(number), together, axis=0)
        which = place + jnp.arange(together, dtype=jnp.int32)
        exists = (seconds < end)[:, None] & (which < tuples.n_tuples)
        which = jnp.minimum(which, tuples.slope.shape[0] - 1)
        branch = jnp.tile(which, repetitions)
        slope, constant = tuples.slope[branch], tuples.constant[branch]
        means = expand(x, bits, slope, constant, chosen, m, prunings)
        walk = jnp.tile(jnp.arange(n_walks, dtype=jnp.int32), batch)
        labels = (*jnp.repeat(number, together * n_walks, axis=0).T, branch.repeat(n_walks), walk)
        # In the order of their labels, so that ties go the same way however they are batched.
        leaves = _Leaves(
            means=means[:, 0].swapaxes(0, 1).reshape(batch * n_walks, k, -1),
            branch=branch.repeat(n_walks),
            exists=exists.reshape(-1).repeat(n_walks),
            label=jnp.stack(labels, axis=1),
        )
        found = _score(blocks, leaves, tuples, found, pruning, min(tile, n_walks * batch))
        place = place + together
        done = place >= tuples.n_tuples
        return second + jnp.where(done, repetitions, 0), jnp.where(done, 0, place), found

    return lax.fori_loop(jnp.int32(0), steps, one_batch, (start[1], start[2], found))[2]


class _Leaves(NamedTuple):
    """Complete tuples of means, each to be tried with all values of the last component.

    Attributes:
        means: `[s, k, d]`.
        branch: int32 `[s]`, the tuple of the first components.
        exists: `[s]`, False for padding.
        label: int32 `[s, 4]`, what to call them.
    """

    means: Array
    branch: Array
    exists: Array
    label: Array


def _score(
    blocks: tuple[Array, Array],
    leaves: _Leaves,
    tuples: Tuples,
    found: Found,
    pruning: Pruning,
    tile: int,
) -> Found:
    r"""Score leaves with all values of the last component.

    With its shift e the last component costs a point c + e, so that the point costs
    $\min(p, c + e) = e + \min(p - e, c)$, p its smallest cost under the others: variances and
    weights of the last component are two axes that meet only in the innermost loop.
    """
    x, weight = blocks
    s, k, _ = leaves.means.shape
    g, e = tuples.last_slope.shape[0], tuples.last_mass.shape[0]
    dtype = leaves.means.dtype
    # Candidates go along the vectors.
    means = leaves.means.transpose(1, 2, 0)
    slope, constant = tuples.slope[leaves.branch].T, tuples.constant[leaves.branch].T

    def first_costs(b: Array, member: Array) -> Array:
        """Return the smallest costs of a block of points under the first components."""
        least = jnp.full((LOOK, member.shape[0]), jnp.inf, dtype)
        for j in range(k - 1):
            square = numerics.squared_distances(means[j][:, member], x[b])
            least = jnp.minimum(least, square * slope[j, member] + constant[j, member])
        return least

    def last_costs(b: Array, member: Array) -> Array:
        """Return the costs of a block under the last component, `[LOOK, g, s]`."""
        square = numerics.squared_distances(means[k - 1][:, member], x[b])[:, None]
        return square * tuples.last_slope[:, None] + tuples.last_constant[:, None]

    def times_weight(b: Array, cost: Array) -> Array:
        return cost * weight[b].reshape(LOOK, *[1] * (cost.ndim - 1))

    total = weight.sum()
    power = tuples.last_power
    wide = jnp.maximum(tuples.high[leaves.branch], power[:, None]) - jnp.minimum(
        tuples.low[leaves.branch], power[:, None]
    )
    normaliser = jnp.log(tuples.mass[leaves.branch] + tuples.last_mass[:, None])
    # What a tuple of weights costs beside the points, `[e, s]`.
    extra = total * (normaliser + tuples.last_shift[:, None])
    extra = jnp.where((wide <= tuples.spread) & leaves.exists, extra, jnp.inf)

    def optimistic() -> Array:
        """Return, for each leaf, a cost that none of its candidates is below."""
        everyone = jnp.arange(s, dtype=jnp.int32)

        def block_sum(b: Array) -> Array:
            first = first_costs(b, everyone) - tuples.last_shift.max()
            last = last_costs(b, everyone).min(axis=1)
            return scoring.min_sum([times_weight(b, first), times_weight(b, last)], [(), ()])

        sums = scoring.sum_blocks(x.shape[0], block_sum, (s,), dtype, jnp.inf)
        return sums + extra.min(axis=0)

    # Sums are monotone only up to rounding here, which the limit has room for.
    least = optimistic() if pruning.completions else jnp.full(s, -jnp.inf, dtype)
    m = found.best.cost.shape[0]

    def one_tile(member: Array, inside: Array, found: Found) -> Found:
        beside = jnp.where(inside, extra[:, member], jnp.inf)
        limit = scoring.give_up_above(found.best) - beside.min()

        def block_sum(b: Array) -> Array:
            first = first_costs(b, member)[:, None] - tuples.last_shift[:, None]
            last = last_costs(b, member)
            return scoring.min_sum([times_weight(b, first), times_weight(b, last)], [(0,), (1,)])

        stop = limit if pruning.partial_sums else jnp.asarray(jnp.inf, dtype)
        cost = scoring.sum_blocks(x.shape[0], block_sum, (g, e, tile), dtype, stop)
        cost = (cost + beside).reshape(g * e, tile)

        def take(found: Found) -> Found:
            values, row, flat = scoring.smallest_entries(cost.T, m)
            leaf = member[row]
            slot = m + jnp.arange(values.shape[0], dtype=jnp.int32)
            parts = (flat // e, flat % e, slot)
            index = jnp.concatenate([leaves.label[leaf], jnp.stack(parts, axis=1)], axis=1)
            best = scoring.merge(found.best, values, index)
            # An empty place has a number out of range: it takes anything.
            means = jnp.concatenate([found.means, leaves.means[leaf]])
            means = means[jnp.minimum(best.choice[:, -1], means.shape[0] - 1)]
            slots = jnp.where(best.cost < jnp.inf, jnp.arange(m), np.iinfo(np.int32).max)
            choice = best.choice.at[:, -1].set(slots.astype(jnp.int32))
            return Found(Best(best.cost, choice), means)

        return lax.cond(cost.min() <= found.best.cost[-1], take, lambda found: found, found)

    bound = jnp.where(leaves.exists, least, jnp.inf)
    return scoring.best_first(bound, tile, found, lambda found: found.best, one_tile)


# How fast this device is.


@cache
def leaf_rate(k: int, values: int, powers: int, d: int) -> float:
    """Return how many point evaluations a second scoring leaves does, roughly."""
    # More values have about the same rate.
    values, powers = min(values, 8), min(powers, 16)
    n, s = 512, 512
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (n, d))
    ones = jnp.ones((1, k - 1))
    zero = jnp.zeros(1, jnp.int32)
    tuples = Tuples(
        slope=ones,
        constant=ones,
        mass=ones.sum(axis=1),
        low=zero,
        high=zero,
        n_tuples=jnp.int32(1),
        last_slope=jnp.linspace(1.0, 2.0, values),
        last_constant=jnp.ones(values),
        last_mass=jnp.ones(powers),
        last_shift=jnp.zeros(powers),
        last_power=jnp.zeros(powers, jnp.int32),
        spread=jnp.int32(0),
    )
    leaves = _Leaves(
        means=jax.random.normal(keys[1], (s, k, d)),
        branch=jnp.zeros(s, jnp.int32),
        exists=jnp.ones(s, bool),
        label=jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[:, None], (s, 4)),
    )
    blocks = scoring.point_blocks(x, jnp.ones(n))
    found = nothing_found(16, k, d, x.dtype)
    tile = min(s, scoring.tile_repetitions(values * powers))
    score = jax.jit(_score, static_argnames=("pruning", "tile"))
    seconds = scoring.best_time(
        lambda: score(blocks, leaves, tuples, found, pruning=scoring.NO_PRUNING, tile=tile)
    )
    return s * values * powers * n / seconds


@cache
def selection_rate() -> float:
    """Return how many points a second pruning looks at, roughly."""
    least = jax.random.normal(jax.random.key(0), (256, 512))
    return 256 * 512 / scoring.best_time(lambda: keep_largest(least, 256))
