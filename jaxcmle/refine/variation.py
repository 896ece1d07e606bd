"""New mixtures from old partitions: crossover, and giving one cluster up to split another."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxcmle import numerics
from jaxcmle.numerics import Moments
from jaxcmle.problem.types import Mixture, Problem
from jaxcmle.refine.moves import cluster_change
from jaxcmle.refine.workspace import (
    Partitions,
    Workspace,
    fitted,
    is_flawed,
    is_safe,
    moments_of,
    over_tiles,
    own_values,
    select_each,
    squared_distances,
)

__all__ = ["crossover", "swap", "swap_keys"]

# Clusters are split by so many iterations of CEM with two clusters inside each.
ITERATIONS = 3
# Half of them begin as a narrow cluster and the whole: its share of the variance.
NARROW = 0.1
# Where clusters are many, a child may give up one for so many of them.
CLUSTERS_PER_SWAP = 16
# Noise in the choice of clusters to give up and to split, as shares of the least it costs to give
# one up. One is drawn for every child.
TEMPERATURES = (0.03, 0.1, 0.3)


def crossover(key: Array, mixtures: Mixture, exists: Array) -> Mixture:
    """Return a stack of children, each with clusters of two parents drawn from a stack.

    A cut divides space: by the distance to a cluster of the first parent, or by a plane across
    the way from there to a cluster of the second. The child has as many clusters of the first on
    the near side as were drawn, and the remaining ones of the second on the far side.
    """
    m, k, _ = mixtures.means.shape
    count = exists.sum()
    draws = _uniform(jax.random.split(key, m), 6, mixtures.means.dtype)

    def child(draw: Array) -> Mixture:
        i = _below(draw[0], m)
        j = (i + 1 + _below(draw[1], max(m - 1, 1))) % m
        first, second = (jax.tree.map(lambda leaf, p=p: leaf[p], mixtures) for p in (i, j))
        # Clusters that exist come before those that do not.
        origin = first.means[_below(draw[2], count)]
        way = second.means[_below(draw[3], count)] - origin

        def order(means: Array) -> Array:
            away = means - origin
            along = jnp.matmul(away, way, precision=numerics.PRECISION)
            place = jnp.where(draw[4] < 0.5, (away * away).sum(axis=1), along)
            return jnp.argsort(jnp.where(exists, place, jnp.inf))

        near, far = jax.vmap(order)(jnp.stack([first.means, second.means]))
        cut = 1 + _below(draw[5], jnp.maximum(count - 1, 1))
        picked = select_each(
            jnp.arange(k, dtype=jnp.int32) < cut,
            jax.tree.map(lambda leaf: leaf[near], first),
            jax.tree.map(lambda leaf: leaf[far], second),
        )
        return Mixture(
            weights=picked.weights / picked.weights.sum(),
            means=picked.means,
            variances=picked.variances,
        )

    return jax.vmap(child)(draws)


def swap_keys(key: Array, m: int) -> Array:
    """Return the keys `[m, 4]` of m swaps."""
    split_key, key = jax.random.split(key)
    halves, own = jax.random.split(split_key, 3 * m), jax.random.split(key, m)
    halves = halves.reshape(3, m, *halves.shape[1:])
    return jnp.concatenate([halves, own[None]]).swapaxes(0, 1)


def swap(
    keys: Array, space: Workspace, partitions: Partitions, problem: Problem
) -> tuple[Mixture, Array]:
    """Return, for each partition, a mixture with one cluster given up and another one split.

    Which ones is drawn, more likely where giving up costs little and splitting gains much; a
    cluster that is too small always goes first. Of many clusters, several are given up. Also
    returns where that was possible: splits are not where a half would be too small. Every
    partition has keys of its own, from `swap_keys`.
    """
    m, k = partitions.moments.size.shape
    mixtures = fitted(space, partitions.moments, problem)
    safe = is_safe(space, mixtures, problem)
    halves = _split(keys, space, partitions, problem, safe)
    loss = _removal_costs(space, mixtures, partitions.labels, problem, safe)

    draws = _uniform(keys[:, 3], 2 * k + 2, loss.dtype)
    temperature = jnp.array(TEMPERATURES, loss.dtype)[_below(draws[:, 0], len(TEMPERATURES))]
    short = (partitions.moments.size < space.min_size) & space.exists
    least = jnp.where(short | ~space.exists, jnp.inf, loss).min(axis=1)
    scale = temperature * jnp.where(jnp.isfinite(least), least, 1)
    # Two for a cluster, so that clusters that do not exist do not change those of the others.
    noise = scale[:, None, None] * _gumbel(draws[:, 2:]).reshape(m, k, 2)
    loss = jnp.where(short, -jnp.finfo(loss.dtype).max / 4, loss - noise[..., 0])
    loss = jnp.where(space.exists, loss, jnp.inf)
    swaps = _pairs(loss, halves.gain + noise[..., 1], draws[:, 1], space.exists.sum())
    row = jnp.arange(m)
    # Out of range is dropped.
    parted_to, gone_to = (jnp.where(swaps.made, place, k) for place in (swaps.parted, swaps.gone))

    def put(whole: Array, left: Array, right: Array) -> Array:
        whole = whole.at[row, parted_to].set(left[row, swaps.parted], mode="drop")
        return whole.at[row, gone_to].set(right[row, swaps.parted], mode="drop")

    swapped = jax.tree.map(put, partitions.moments, halves.left, halves.right)
    return fitted(space, swapped, problem), swaps.made[0]


class _Swaps(NamedTuple):
    """Pairs of clusters `[pairs, m]`: one given up, one split, and whether that is done."""

    gone: Array
    parted: Array
    made: Array


def _pairs(loss: Array, gain: Array, draw: Array, count: Array) -> _Swaps:
    """Choose clusters to give up and to split: one pair always, more if each of them gains.

    Where clusters are many, one pair in a round takes long to mend a poor start. How many there are
    at most is drawn: pairs that are near to each other may not gain together. `count` clusters
    exist; the others have a loss of infinity and a gain of minus infinity.
    """
    m, k = loss.shape
    most = jnp.maximum(count // CLUSTERS_PER_SWAP, 1).astype(draw.dtype)
    limit = jnp.exp(draw * jnp.log(most)).round().astype(jnp.int32)
    never = jnp.eye(k, dtype=bool) | jnp.isinf(loss)[:, :, None] | jnp.isinf(gain)[:, None, :]
    score = jnp.where(never, jnp.inf, loss[:, :, None] - gain[:, None, :])
    cluster = jnp.arange(k, dtype=jnp.int32)

    def choose(score: Array, place: Array) -> tuple[Array, _Swaps]:
        flat = score.reshape(m, k * k)
        best = jnp.argmin(flat, axis=1).astype(jnp.int32)
        least = flat.min(axis=1)
        made = jnp.isfinite(least) & ((place == 0) | ((least < 0) & (place < limit)))
        gone, parted = best // k, best % k
        used = (cluster == gone[:, None]) | (cluster == parted[:, None])
        score = jnp.where(used[:, :, None] | used[:, None, :], jnp.inf, score)
        return score, _Swaps(gone, parted, made)

    return lax.scan(choose, score, jnp.arange(max(1, k // CLUSTERS_PER_SWAP), dtype=jnp.int32))[1]


def _removal_costs(
    space: Workspace, mixtures: Mixture, labels: Array, problem: Problem, safe: Array
) -> Array:
    """Return what it costs to hand a cluster's points to their second-best ones, `[m, k]`."""
    n, k = space.points.x.shape[0], mixtures.weights.shape[1]

    def one(given: tuple[Mixture, Array]) -> Array:
        mixture, labels = given
        means, slope, constant = problem.coefficients(mixture)

        def one_tile(tile: tuple[Array, Array], label: Array) -> Array:
            square = squared_distances(space, tile, means, safe)
            costs = square * slope[:, None] + constant[:, None]
            elsewhere = jnp.arange(k, dtype=jnp.int32)[:, None] != label
            return jnp.where(elsewhere, costs, jnp.inf).min(axis=0) - own_values(costs, label)

        loss = numerics.silence(space.points.weight, over_tiles(space, one_tile, labels))
        return jax.ops.segment_sum(space.points.weight * loss, labels, k)

    return numerics.map_stack(one, (mixtures, labels), 4 * n * k * space.points.x.dtype.itemsize)


class _Halves(NamedTuple):
    """What splitting each cluster gains, `[m, k]`, and the moments of its halves."""

    gain: Array
    left: Moments
    right: Moments


def _split(
    keys: Array, space: Workspace, partitions: Partitions, problem: Problem, safe: Array
) -> _Halves:
    """Split every cluster of every partition in two, by a few iterations of CEM inside it."""
    (n, d), dtype = space.points.x.shape, space.points.x.dtype
    labels, moments, _ = partitions
    m, k = moments.size.shape
    x, weight = space.points.x, space.points.weight
    total = moments.size.sum(axis=1, keepdims=True)
    variance = fitted(space, moments, problem).variances

    def own_distances(means: Array) -> tuple[Array, Array]:
        """Return the squared distances of every point to both means of its cluster, `[m, n]`."""

        def one(given: tuple[Array, Array]) -> tuple[Array, Array]:
            means, labels = given

            def one_tile(tile: tuple[Array, Array], label: Array) -> tuple[Array, Array]:
                square = squared_distances(space, tile, means, safe)
                return own_values(square[:k], label), own_values(square[k:], label)

            return over_tiles(space, one_tile, labels)

        return numerics.map_stack(one, (means, labels), 8 * n * k * dtype.itemsize)

    def own(values: Array) -> Array:
        return jnp.take_along_axis(values, labels, axis=1)

    def drawn(log_mass: Array, uniform: Array) -> Array:
        """Draw a point of every cluster, `[m, k, d]`."""

        def one(noise: Array, labels: Array) -> Array:
            largest = jax.ops.segment_max(noise, labels, k)
            place = jnp.where(noise == largest[labels], jnp.arange(n, dtype=jnp.int32), -1)
            return x[jnp.maximum(jax.ops.segment_max(place, labels, k), 0)]

        return jax.vmap(one)(log_mass + _gumbel(uniform), labels)

    uniform = _uniform(jnp.concatenate([keys[:, 0], keys[:, 1]]), n, dtype)
    first = drawn(jnp.log(weight), uniform[:m])
    away, _ = own_distances(jnp.concatenate([first, first], axis=1))
    second = drawn(jnp.log(weight * away), uniform[m:])
    narrow = _uniform(keys[:, 2], k, dtype) < 0.5
    pair = [
        jnp.where(narrow[..., None], moments.mean, first),
        jnp.where(narrow[..., None], first, second),
    ]
    halves = Mixture(
        weights=jnp.full((m, 2 * k), 1 / (2 * k), dtype),
        means=jnp.concatenate(pair, axis=1),
        variances=jnp.concatenate([variance, jnp.where(narrow, NARROW, 1) * variance], axis=1),
    )

    def divided(halves: Mixture) -> Array:
        """Return for every point which half of its cluster is cheaper, as one of 2k labels."""
        means, slope, constant = jax.vmap(problem.coefficients)(halves)
        squares = own_distances(means)
        left, right = (
            square * own(slope[:, part]) + own(constant[:, part])
            for square, part in zip(squares, (slice(k), slice(k, 2 * k)), strict=True)
        )
        return labels + k * (right < left).astype(jnp.int32)

    def iterate(_: Array, state: tuple[Mixture, Moments]) -> tuple[Mixture, Moments]:
        parted = numerics.apart(divided, space.floor > 0, state[0])
        parts = moments_of(space, parted, 2 * k)
        return fitted(space, parts, problem), parts

    # Only the structure matters: the first iteration replaces all of it.
    nothing = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf], axis=1), moments)
    parts = lax.fori_loop(0, ITERATIONS, iterate, (halves, nothing))[1]
    parts = jax.tree.map(lambda leaf: leaf.reshape(m, 2, k, *leaf.shape[2:]), parts)

    def part_costs(size: Array, scatter: Array, total: Array) -> Array:
        """Return what clusters cost, as a change from clusters without points."""
        none = jnp.zeros_like(size)
        return cluster_change(
            none, none, size, scatter, total=total, d=d, problem=problem, floor=space.floor
        )

    size, scatter = parts.size, parts.scatter
    apart = part_costs(size, scatter, total[:, None]).sum(axis=1)
    gain = part_costs(moments.size, moments.scatter, total) - apart
    allowed = (size >= space.min_size) & ~is_flawed(space, size, scatter)
    allowed = allowed.all(axis=1) & space.exists
    gain = jnp.where(allowed & jnp.isfinite(gain), gain, -jnp.inf)
    left, right = (jax.tree.map(lambda leaf, i=i: leaf[:, i], parts) for i in range(2))
    return _Halves(gain, left, right)


def _uniform(keys: Array, count: int, dtype: jnp.dtype) -> Array:
    """Draw uniform numbers `[m, count]`, each row from a key of its own."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,), dtype))(keys)


def _gumbel(uniform: Array) -> Array:
    """Turn uniform numbers into those whose largest, added to logarithms, draws by mass."""
    tiny = jnp.finfo(uniform.dtype).tiny
    return -jnp.log(-jnp.log(jnp.maximum(uniform, tiny)) + tiny)


def _below(uniform: Array, count: int | Array) -> Array:
    """Turn uniform numbers into whole ones from 0 to `count - 1`."""
    count = jnp.asarray(count, jnp.int32)
    return jnp.minimum((uniform * count.astype(uniform.dtype)).astype(jnp.int32), count - 1)
