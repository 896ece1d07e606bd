"""Mixtures to start from: means picked from the data, and equal weights.

With one variance for all, the first assignment of `cem` is to the nearest mean. Only sample and
prune (`"abs"`) gives every cluster a variance of its own.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxcmle import numerics
from jaxcmle.numerics import Coefficients, Points
from jaxcmle.problem import inputs
from jaxcmle.problem.bounds import distance_to, farthest_first
from jaxcmle.problem.objective import hide_missing, shift_means
from jaxcmle.problem.types import Mixture
from jaxcmle.selection import keep_largest

__all__ = ["SeedMethod", "drawn_mixture", "sample_points", "seed"]

SeedMethod = Literal["kmeans++", "farthest", "random", "subsets", "abs"]

# Sample and prune looks at no more points than this, or than so many per cluster.
SAMPLE = 4096
SAMPLE_PER_CLUSTER = 256
# Candidates for each cluster: drawn from what pruning leaves, and from everything. The latter find
# a narrow cluster inside a wide one, whose points are cheap already.
FROM_REMAINDER, FROM_ALL = 4, 2
# Variances that a candidate may begin with, as shares of the variance of the data.
FIRST_VARIANCES = (1 / 2, 1 / 8, 1 / 32, 1 / 128)
# Halvings of the interval in which the costs lie, to find the one to prune at.
BISECTIONS = 24
# Points per block in a draw: about as many as there are blocks.
DRAW_BLOCK = 64
# How often a candidate is re-estimated from the points it would win.
ROUNDS = 2


def seed(
    key: Array,
    x: Any,
    n_clusters: int,
    *,
    method: SeedMethod = "kmeans++",
    sample_weight: Any = None,
    subset_size: int = 3,
) -> Mixture:
    """Return a mixture to start from, with means drawn from the data.

    Weights are `1/k`, and all variances are the mean squared distance to the nearest mean, per
    feature; with `"abs"` every cluster has its own. Points are drawn in proportion to their weight;
    points of weight 0 never are, and padding with them does not change what a key draws.

    Args:
        key: a key, as from `jax.random.key(0)`.
        x: points `[n, d]`.
        n_clusters: k; a Python int.
        method: `"kmeans++"` draws each next mean in proportion to its weight and its squared
            distance to the nearest one so far; `"farthest"` takes the farthest point (Gonzalez)
            from a random first one; `"random"` draws k different points; `"subsets"` takes the
            means of k random subsets of `subset_size` points; `"abs"` (sample and prune) draws a
            few candidates among the points that cost most so far, re-estimates each from the
            points it would win, and keeps the mean and variance that lower the cost most. It is
            for clusters of unequal variances and sizes, and looks at no more than
            `max(4096, 256 k)` of the points.
        sample_weight: `[n]`, default ones.
        subset_size: points per subset, for `"subsets"`; a Python int.

    Returns:
        A mixture with k clusters. `jax.vmap` over keys gives a stack for `cem_restarts`.

    Example:
        >>> import jax, jaxcmle as jc
        >>> x = [[0.0], [0.0], [8.0], [8.0]]
        >>> sorted(jc.seed(jax.random.key(0), x, 2).means[:, 0].tolist())
        [0.0, 8.0]
    """
    if method not in get_args(SeedMethod):
        raise ValueError(f"method must be one of {get_args(SeedMethod)}, got {method!r}")
    if inputs.to_count(subset_size, "subset_size") < 1:
        raise ValueError(f"subset_size must be 1 or more, got {subset_size!r}")
    key = inputs.to_key(key)
    points, weight = inputs.to_points(x, sample_weight)
    k = inputs.to_n_clusters(n_clusters, points.shape[0])
    inputs.check_enough_points(points, weight, k)
    return _seed(key, points, weight, k, method, int(subset_size))


@partial(jax.jit, static_argnames=("k", "method", "subset_size"))
def _seed(
    key: Array, x: Array, weight: Array | None, k: int, method: SeedMethod, subset_size: int
) -> Mixture:
    points = numerics.prepare(x, weight)
    mixture = drawn_mixture(key, points, jnp.ones(k, bool), method, subset_size)
    return shift_means(mixture, points.shift)


def drawn_mixture(
    key: Array, points: Points, exists: Array, method: SeedMethod, subset_size: int = 3
) -> Mixture:
    """Return a mixture to start from, in the coordinates of the points.

    It has as many clusters as `exists` has entries. The first of them, where those are true, do not
    depend on how many follow that do not exist.
    """
    k, dtype = len(exists), points.x.dtype
    if method == "abs":
        return _sample_and_prune(key, points, exists)
    if method == "kmeans++":
        means = points.x[_kmeans_plus_plus(key, points, k)]
    elif method == "farthest":
        means = points.x[farthest_first(points, k, _draw(key, points.weight)).centres]
    elif method == "random":
        means = points.x[_draw_different(key, points.weight, k)]
    else:
        drawn = _draw_many(key, points.weight, k * subset_size)
        means = points.x[drawn].reshape(k, subset_size, -1).mean(axis=1)

    n, d = points.x.shape
    ones = jnp.ones(k, dtype)
    tiles = numerics.point_tiles(points.x, k)
    square, _ = numerics.assign_directly(
        tiles, Coefficients(means, ones, jnp.where(exists, 0, jnp.inf).astype(dtype)), n
    )
    total = numerics.blocked_sum(points.weight)
    variance = numerics.blocked_sum(points.weight * square) / (total * d)
    # With a point on every mean the distances are all 0: any positive variance will do.
    variance = jnp.where(variance > 0, variance, 1)
    weights = ones / exists.sum().astype(dtype)
    return hide_missing(Mixture(weights=weights, means=means, variances=variance * ones), exists)


def _draw(key: Array, mass: Array) -> Array:
    """Draw one index in proportion to `mass` (the largest perturbed logarithm wins)."""
    return jnp.argmax(jnp.log(mass) + jax.random.gumbel(key, mass.shape, mass.dtype))


def _draw_different(key: Array, mass: Array, k: int) -> Array:
    """Draw k different indices, each in proportion to `mass` among those left."""
    noise = jax.random.gumbel(key, mass.shape, mass.dtype)
    return lax.top_k(jnp.log(mass) + noise, k)[1]


def _draw_many(key: Array, mass: Array, count: int) -> Array:
    """Draw indices in proportion to `mass`, with replacement."""
    return lax.map(lambda key: _draw(key, mass), jax.random.split(key, count))


def _kmeans_plus_plus(key: Array, points: Points, k: int) -> Array:
    """Return the indices of k points drawn by squared distance to those before them."""

    def add_centre(j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        nearest, centres = state
        centre = _draw(jax.random.fold_in(key, j), points.weight * nearest)
        distance = distance_to(points, centre)
        return jnp.minimum(nearest, distance), centres.at[j].set(centre)

    first = _draw(jax.random.fold_in(key, 0), points.weight)
    centres = jnp.zeros(k, first.dtype).at[0].set(first)
    return lax.fori_loop(1, k, add_centre, (distance_to(points, first), centres))[1]


class _Found(NamedTuple):
    """The clusters so far, and what every point costs under the cheapest of them."""

    least: Array
    means: Array
    variances: Array


def _sample_and_prune(key: Array, points: Points, exists: Array) -> Mixture:
    """Return a mixture found cluster by cluster, without the claims of the paper's ABS.

    A cluster with variance v costs a point `d/2 ln(2 pi v) + |x - mean|^2 / (2 v) + ln k`. It wins
    those that it costs less than the clusters before it, and less than what they may still hope
    for: the mean cost in a cluster to come, if these share the volume of the data evenly.
    """
    sample_key, draw_key = jax.random.split(key)
    most = len(exists)
    points = sample_points(sample_key, points, max(SAMPLE, SAMPLE_PER_CLUSTER * most))
    k = exists.sum().astype(points.x.dtype)
    centred, centre = numerics.centred(points)
    scale = jnp.abs(jnp.where(points.weight[:, None] > 0, centred, 0)).max()
    scale = jnp.where(scale > 0, scale, 1)
    x, weight = centred / scale, points.weight
    (n, d), columns = x.shape, x.T
    total = numerics.blocked_sum(weight)
    # The weight of one point: what is known of a variance before any point is seen.
    unit = total / (weight > 0).sum().astype(x.dtype)
    norms = numerics.squared_distances(columns, jnp.zeros((1, d), x.dtype))[0]
    whole = numerics.blocked_sum(weight * norms) / (total * d)
    whole = jnp.where(whole > 0, whole, 1)
    typical = whole * k ** (-2 / d)

    def constant(variance: Array) -> Array:
        return d / 2 * jnp.log(2 * math.pi * variance) + jnp.log(k)

    def costs(square: Array, variances: Array) -> Array:
        return square / (2 * variances[..., None]) + constant(variances)[..., None]

    def add_cluster(j: Array, found: _Found) -> _Found:
        # One at least, for those that do not exist.
        to_come = jnp.maximum(k - j.astype(x.dtype), 1)
        hope = constant(whole * to_come ** (-2 / d)) + d / 2
        least = jnp.minimum(found.least, hope)
        remainder = _prune(jnp.minimum(found.least, background), weight, to_come / k)
        means = x[_draw_by_blocks(uniform[j], jnp.stack([remainder, weight]), source)]
        # Kept as it is: XLA would compute the distances anew for every variance.
        square = lax.optimization_barrier(numerics.squared_distances(columns, means))

        def totals(costs: Array) -> Array:
            return _dot(jnp.minimum(least, costs), weight)

        tried = whole * jnp.array(FIRST_VARIANCES, x.dtype)
        choice = jnp.argmin(jax.vmap(lambda each: totals(costs(square, each)))(tried), axis=0)

        def reestimate(_: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            means, variances, square = state
            won = jnp.where(costs(square, variances) < least, weight, 0)
            sums = _dot(won, ones_and_x)
            size = sums[:, 0]
            means = jnp.where(size[:, None] > 0, sums[:, 1:] / size[:, None], means)
            square = numerics.squared_distances(columns, means)
            scatter = jax.vmap(_dot)(won, square)
            # As if one point more were known, so that a few points are not worth a cluster.
            return means, (scatter + unit * d * typical) / (d * (size + unit)), square

        first = (means, tried[choice], square)
        means, variances, square = lax.fori_loop(0, ROUNDS, reestimate, first)
        new = costs(square, variances)
        best = jnp.argmin(totals(new))
        return _Found(
            jnp.minimum(found.least, new[best]),
            found.means.at[j].set(means[best]),
            found.variances.at[j].set(variances[best]),
        )

    source = jnp.array([0] * FROM_REMAINDER + [1] * FROM_ALL)
    uniform = jax.random.uniform(draw_key, (most, len(source), 2), x.dtype)
    ones_and_x = jnp.concatenate([jnp.ones((n, 1), x.dtype), x], axis=1)
    background = norms / (2 * whole) + constant(whole)
    nothing = _Found(
        jnp.full(n, jnp.inf, x.dtype), jnp.zeros((most, d), x.dtype), jnp.ones(most, x.dtype)
    )
    found = lax.fori_loop(0, most, add_cluster, nothing)
    mixture = Mixture(
        weights=jnp.ones(most, x.dtype) / k,
        means=found.means * scale + centre,
        variances=jnp.maximum(found.variances * scale * scale, 4 * jnp.finfo(x.dtype).tiny),
    )
    return hide_missing(mixture, exists)


def sample_points(key: Array, points: Points, count: int) -> Points:
    """Return at most `count` of the points, weighted so that sums over them are unbiased.

    Priority sampling (Duffield, Lund, Thorup): keep the points with the largest `weight / u`, u
    uniform, and raise their weights to the largest that is not kept. Of fewer points than `count`
    all are kept as they are, even if padding makes them more.
    """
    n = points.weight.shape[0]
    if n <= count:
        return points
    tiny = jnp.finfo(points.weight.dtype).tiny
    uniform = jax.random.uniform(key, (n,), points.weight.dtype, minval=tiny)
    priority = points.weight / uniform
    kept = keep_largest(priority, count)
    limit = priority.at[kept].set(0).max()
    weight = points.weight[kept]
    weight = jnp.where(weight > 0, jnp.maximum(weight, limit), weight)
    return Points(points.x[kept], weight, points.shift)


def _prune(values: Array, weight: Array, share: Array) -> Array:
    """Return the weights of the points with the largest values, about a share of all; 0 else."""
    present = weight > 0
    low = jnp.min(jnp.where(present, values, jnp.inf))
    high = jnp.max(jnp.where(present, values, -jnp.inf))
    wanted = share * weight.sum()

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + (high - low) / 2
        enough = _dot((values >= middle).astype(weight.dtype), weight) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    # Always from below, so that there is something left.
    low, _ = lax.fori_loop(0, BISECTIONS, halve, (low, high))
    return jnp.where(values >= low, weight, 0)


def _draw_by_blocks(uniform: Array, masses: Array, source: Array) -> Array:
    """Draw indices `[m]` in proportion to the row `source` of masses: a block, then one in it.

    That takes two uniform numbers `[m, 2]` each, far fewer than `_draw` does.
    """
    rows, n = masses.shape
    blocks = -(-n // DRAW_BLOCK)
    padded = jnp.pad(masses, ((0, 0), (0, blocks * DRAW_BLOCK - n)))
    padded = padded.reshape(rows, blocks, DRAW_BLOCK)

    def invert(masses: Array, uniform: Array) -> Array:
        # A product, as a running sum takes a second to compile.
        sums = _dot(masses, jnp.tri(masses.shape[1], dtype=masses.dtype).T)
        # Where there is no mass there is no way in, however the sums round.
        sums = jnp.where(masses > 0, sums, 0)
        return jnp.argmax(sums > uniform[:, None] * sums.max(axis=1, keepdims=True), axis=1)

    block = invert(padded.sum(axis=2)[source], uniform[:, 0])
    return block * DRAW_BLOCK + invert(padded[source, block], uniform[:, 1])


def _dot(left: Array, right: Array) -> Array:
    """Multiply matrices. Sums over the points are far faster this way than as reductions."""
    return jnp.matmul(left, right, precision=numerics.PRECISION)
