"""Means drawn from the points, and their search (Algorithm 1 of the paper).

*Block means* (the default): a repetition draws m points with replacement for each of the K
clusters. With a probability that is bounded below, the points of each block come from a cluster of
their own, and their means are near those of the clusters.

*Superset sampling* (as printed): draw a larger sample, and take the means of all its m-subsets for
every cluster. With all points for the sample nothing is left to chance.

Every repetition has a key of its own, so what it draws depends on nothing else.
"""

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jaxcmle.candidates import scoring
from jaxcmle.candidates.scoring import Best, Grid, Pruning
from jaxcmle.problem.placement import split_stack

__all__ = [
    "NUMBERS",
    "Pool",
    "bucket",
    "make_pool",
    "next_repetitions",
    "places_of",
    "repetition_key",
    "repetition_means",
    "subset_means",
    "superset_means",
    "traced_means",
    "traced_repetitions",
]

# A repetition is called by two numbers, so that there can be more than fit in 32 bits: its number
# is `first * NUMBERS + second`.
NUMBERS = 2**24


class Pool(NamedTuple):
    """Points to draw from.

    Attributes:
        x: `[n, d]`, all of positive weight.
        ends: uint32 `[n - 1]`, where the share of each point but the last ends, of 2^32; None for
            points of equal weight.
    """

    x: Array
    ends: Array | None


def make_pool(x: Array, weight: Array | None) -> Pool:
    """Return the points to draw from, in proportion to their weight; on the host."""
    if weight is None:
        return Pool(x, None)
    shares = np.cumsum(np.asarray(weight, np.float64))
    ends = np.floor(shares[:-1] / shares[-1] * 2.0**32)
    return Pool(x, jnp.asarray(np.minimum(ends, 2.0**32 - 1).astype(np.uint32)))


def _draw(key: Array, pool: Pool, shape: tuple[int, ...]) -> Array:
    """Draw indices with replacement. Probabilities are right to 2^-32."""
    bits = jax.random.bits(key, shape, jnp.uint32)
    if pool.ends is not None:
        return jnp.searchsorted(pool.ends, bits, side="right").astype(jnp.int32)
    return places_of(bits, pool.x.shape[0])


def places_of(bits: Array, n: int) -> Array:
    """Return one of n places for each random uint32: the high word of `bits * n`."""
    # In halves of a word.
    low, high = bits & 0xFFFF, bits >> 16
    n_low, n_high = n & 0xFFFF, n >> 16
    middle = high * n_low + (low * n_low >> 16)
    other = low * n_high + (middle & 0xFFFF)
    return (high * n_high + (middle >> 16) + (other >> 16)).astype(jnp.int32)


def bucket(m: int) -> int:
    """Return m rounded up to a power of two: so many points are drawn, and the first m count.

    So that not every m needs a program of its own.
    """
    return 1 << (m - 1).bit_length()


def repetition_key(key: Array, number: Array) -> Array:
    """Return the key of the repetition with this number `[2]`."""
    return jax.random.fold_in(jax.random.fold_in(key, number[0]), number[1])


def _block_means(key: Array, pool: Pool, k: int, m: Array, drawn: int) -> Array:
    """Draw m points for each of k clusters, and return their means `[k, d]`."""
    points = pool.x[_draw(key, pool, (drawn, k))]
    # One after the other, so that the sums do not depend on how repetitions are batched.
    total = points[0]
    for i in range(1, drawn):
        total = total + jnp.where(i < m, points[i], 0)
    return total / m.astype(total.dtype)


def repetition_means(key: Array, number: Array, pool: Pool, k: int, m: int) -> Array:
    """Return the block means `[s, k, d]` of the repetitions with these numbers `[s, 2]`."""
    return traced_means(key, number, pool, k, jnp.int32(m), bucket(m))


@partial(jax.jit, static_argnames=("k", "drawn"))
def traced_means(key: Array, number: Array, pool: Pool, k: int, m: Array, drawn: int) -> Array:
    """Return what `repetition_means` does, with m traced: the first m points of `drawn` count."""

    def one(number: Array) -> Array:
        return _block_means(repetition_key(key, number), pool, k, m, drawn)

    return jax.vmap(one)(number)


def next_repetitions(
    key: Array,
    pool: Pool,
    blocks: tuple[Array, Array],
    grid: Grid,
    best: Best,
    start: tuple[int, int],
    count: int,
    *,
    k: int,
    m: int,
    chunk: int = scoring.CHUNK,
    pruning: Pruning = scoring.PRUNING,
    tile: int | None = None,
    mesh: Mesh | None = None,
) -> Best:
    """Draw and score the next repetitions, in chunks, and return the best.

    Args:
        key: the key of the search.
        pool: the points to draw from.
        blocks: the points to score on, from `scoring.point_blocks`.
        grid: the variances and weights to try.
        best: the best so far.
        start: the number of the first repetition, in two parts.
        count: how many repetitions; the second part of their numbers stays below `NUMBERS`.
        k: clusters.
        m: points to a mean.
        chunk: repetitions drawn together.
        pruning: what not to finish.
        tile: repetitions scored together.
        mesh: devices to split the repetitions over; all must have all arrays.
    """
    first, second = start
    if second + count > NUMBERS:
        raise ValueError(f"{count} repetitions from {second} go past {NUMBERS}: split them")
    numbers = tuple(np.int32(number) for number in (count, m))
    shared = (key, pool, blocks, grid, best, np.array([first, second], np.int32), *numbers)
    static = (k, bucket(m), chunk, pruning, tile)
    if mesh is None:
        return traced_repetitions(*shared, *static)
    return _split_repetitions(shared, static, mesh)


@partial(jax.jit, static_argnames=("static", "mesh"))
def _split_repetitions(shared: Any, static: Any, mesh: Mesh) -> Best:
    """Return what `traced_repetitions` does, each device drawing and scoring an equal share."""

    def local(shared: Any, rank: Array) -> Best:
        *arrays, start, count, m = shared
        share = -(-count // mesh.size)
        before = jnp.minimum(rank[0] * share, count)
        own = jnp.minimum(share, count - before)
        start = start + jnp.stack([jnp.int32(0), before])
        found = traced_repetitions(*arrays, start, own, m, *static)
        return jax.tree.map(lambda leaf: leaf[None], found)

    ranks = jnp.arange(mesh.size, dtype=jnp.int32)
    return scoring.merge_stack(split_stack(local, mesh, shared, ranks))


@partial(jax.jit, static_argnames=("k", "drawn", "chunk", "pruning", "tile"))
def traced_repetitions(
    key: Array,
    pool: Pool,
    blocks: tuple[Array, Array],
    grid: Grid,
    best: Best,
    start: Array,
    count: Array,
    m: Array,
    k: int,
    drawn: int,
    chunk: int,
    pruning: Pruning,
    tile: int | None,
) -> Best:
    """Return what `next_repetitions` does, with the numbers and m traced."""
    offset = jnp.arange(chunk, dtype=jnp.int32)

    def one_chunk(i: Array, best: Best) -> Best:
        place = i * chunk + offset
        number = jnp.stack([jnp.broadcast_to(start[0], (chunk,)), start[1] + place], axis=1)
        means = traced_means(key, number, pool, k, m, drawn)
        return scoring.score_repetitions(
            blocks, means, number, place < count, grid, best, pruning=pruning, tile=tile
        )

    return lax.fori_loop(jnp.int32(0), -(-count // chunk), one_chunk, best)


def subset_means(x: Array, m: int) -> Array:
    """Return the means `[C(n, m), d]` of all m-subsets of the points, in lexicographic order."""
    n = x.shape[0]
    subsets = itertools.chain.from_iterable(itertools.combinations(range(n), m))
    index = np.fromiter(subsets, np.int32, math.comb(n, m) * m).reshape(-1, m)
    return _means(x, jnp.asarray(index))


def superset_means(key: Array, pool: Pool, sample_size: int, m: int, most: int) -> Array:
    """Return the means of the m-subsets of a sample: of all, or of `most` drawn ones.

    Args:
        key: a key.
        pool: the points to draw from.
        sample_size: how many points to draw, with replacement.
        m: points to a mean.
        most: if there are more subsets than this, so many of them are drawn instead.
    """
    if not 1 <= m <= sample_size:
        raise ValueError(f"subsets of {m} points need a sample of as many, got {sample_size}")
    sample_key, subset_key = jax.random.split(key)
    sample = pool.x[_draw(sample_key, pool, (sample_size,))]
    if math.comb(sample_size, m) <= most:
        return subset_means(sample, m)

    def different(key: Array) -> Any:
        return jnp.sort(jax.random.choice(key, sample_size, (m,), replace=False))

    return _means(sample, jax.vmap(different)(jax.random.split(subset_key, most)))


@jax.jit
def _means(x: Array, index: Array) -> Array:
    total = x[index[:, 0]]
    for i in range(1, index.shape[1]):
        total = total + x[index[:, i]]
    return total / index.shape[1]
