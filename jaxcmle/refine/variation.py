"""New partitions from old ones: crossover, and giving up one cluster to split another."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxcmle import numerics
from jaxcmle.numerics import Moments
from jaxcmle.problem.types import Mixture, Problem
from jaxcmle.refine.moves import cluster_change
from jaxcmle.refine.workspace import (
    Workspace,
    fitted,
    is_safe,
    moments_of,
    over_tiles,
    squared_distances,
)

__all__ = ["crossover", "swap"]

TRIALS = 2
ITERATIONS = 5


def crossover(keys: Array, mixtures: Mixture) -> Mixture:
    m, k, _ = mixtures.means.shape
    draws = jax.vmap(lambda key: jax.random.uniform(key, (6,), mixtures.means.dtype))(keys)

    def below(draw: Array, count: int) -> Array:
        return jnp.minimum((draw * count).astype(jnp.int32), count - 1)

    def one(draw: Array) -> Mixture:
        i = below(draw[0], m)
        j = (i + 1 + below(draw[1], m - 1)) % m if m > 1 else i
        first, second = (jax.tree.map(lambda leaf: leaf[p], mixtures) for p in (i, j))
        origin = first.means[below(draw[2], k)]
        way = second.means[below(draw[3], k)] - origin
        ball = draw[4] < 0.5

        def order(mixture: Mixture) -> Array:
            away = mixture.means - origin
            along = jnp.matmul(away, way, precision=numerics.PRECISION)
            return jnp.argsort(jnp.where(ball, (away * away).sum(axis=1), along))

        cut = 1 + below(draw[5], max(k - 1, 1))
        orders = jax.vmap(order)(jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second))
        from_first = jnp.arange(k) < cut

        def pick(first: Array, second: Array) -> Array:
            mask = from_first.reshape(-1, *[1] * (first.ndim - 1))
            return jnp.where(mask, first[orders[0]], second[orders[1]])

        child = jax.tree.map(pick, first, second)
        return Mixture(
            weights=child.weights / child.weights.sum(),
            means=child.means,
            variances=child.variances,
        )

    return jax.vmap(one)(draws)


def removal_costs(space, mixtures, labels, problem, safe):
    """What it costs to hand each cluster's points to their second-best cluster [m,k]."""
    n, d = space.points.x.shape
    k = mixtures.weights.shape[1]

    def one(given):
        mixture, labels = given
        means, slope, constant = problem.coefficients(mixture)

        def one_tile(tile, label):
            square = squared_distances(space, tile, means, safe)
            costs = square * slope[:, None] + constant[:, None]
            inside = jnp.arange(k, dtype=jnp.int32)[:, None] == label
            own = jnp.where(inside, costs, 0).sum(axis=0)
            return jnp.where(inside, jnp.inf, costs).min(axis=0) - own

        loss = over_tiles(space, one_tile, labels)
        return jax.ops.segment_sum(loss * space.points.weight, labels, k)

    return numerics.map_stack(one, (mixtures, labels), 4 * n * k * space.points.x.dtype.itemsize)


class Halves(NamedTuple):
    gain: Array
    left: Moments
    right: Moments


def split(key, space, labels, moments, problem, safe):
    n, d = space.points.x.shape
    m, k = moments.size.shape
    x, weight = space.points.x, space.points.weight
    total = moments.size.sum(axis=1)[:, None]
    variance = jnp.maximum(
        moments.scatter / (d * jnp.where(moments.size > 0, moments.size, 1)), space.floor
    )
    bytes_each = 4 * n * max(d, k) * x.dtype.itemsize

    def pick(noise, labels):
        top = jax.ops.segment_max(noise, labels, k)
        chosen = jnp.where(noise == top[labels], jnp.arange(n, dtype=jnp.int32), -1)
        return jnp.maximum(jax.ops.segment_max(chosen, labels, k), 0)

    def distance_to_own(given):
        means, labels = given

        def one_tile(tile, label):
            square = squared_distances(space, tile, means, safe)
            return jnp.where(jnp.arange(k, dtype=jnp.int32)[:, None] == label, square, 0).sum(axis=0)

        return over_tiles(space, one_tile, labels)

    def own_distances(means):
        return numerics.map_stack(distance_to_own, (means, labels), bytes_each)

    def trial(t):
        keys = jax.random.split(jax.random.fold_in(key, t), (2, m))
        noise = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (n,), x.dtype)))(keys)
        # In proportion to weight, and then to weight and squared distance.
        noise = jnp.log(-jnp.log(noise + 1e-30) + 1e-30)
        first = x[jax.vmap(pick)(jnp.log(weight) - noise[0], labels)]
        far = jnp.log(own_distances(first) * weight)
        second = x[jax.vmap(pick)(far - noise[1], labels)]
        narrow = t % 2 == 1
        means = jnp.stack(
            [jnp.where(narrow, moments.mean, first), jnp.where(narrow, first, second)], axis=1
        )
        variances = jnp.stack([variance, variance * jnp.where(narrow, 0.1, 1.0)], axis=1)
        halves = Mixture(weights=jnp.ones((m, 2, k), x.dtype), means=means, variances=variances)
        halves = jax.tree.map(lambda leaf: leaf.reshape(m, 2 * k, *leaf.shape[3:]), halves)

        def iterate(_, state):
            mixtures, _ = state
            means, slope, constant = jax.vmap(problem.coefficients)(mixtures)

            def cost(which):
                part = slice(which * k, (which + 1) * k)
                pick_own = jax.vmap(lambda values, labels: values[labels])
                return own_distances(means[:, part]) * pick_own(slope[:, part], labels) + pick_own(
                    constant[:, part], labels
                )

            half = labels + k * (cost(1) < cost(0)).astype(jnp.int32)
            moments = moments_of(space, half, 2 * k)
            return fitted(space, moments, problem), moments

        first_moments = Moments(halves.weights, halves.means, halves.variances)
        return lax.fori_loop(0, ITERATIONS, iterate, (halves, first_moments))[1]

    def step(t, best):
        size, mean, scatter = trial(t)
        size, scatter = size.reshape(m, 2, k), scatter.reshape(m, 2, k)
        mean = mean.reshape(m, 2, k, d)
        zero = jnp.zeros((), x.dtype)
        together = cluster_change(
            jnp.zeros_like(total), zero, moments.size, moments.scatter, total, d, problem, space.floor
        )
        apart = cluster_change(
            jnp.zeros_like(size), zero, size, scatter, total[:, None], d, problem, space.floor
        )
        gain = together - apart.sum(axis=1)
        allowed = (size.min(axis=1) >= space.min_size) & (scatter > space.least_spread * d * size).all(axis=1)
        gain = jnp.where(allowed & jnp.isfinite(gain), gain, -jnp.inf)
        left, right = (Moments(size[:, i], mean[:, i], scatter[:, i]) for i in range(2))
        better = gain > best.gain
        return jax.tree.map(
            lambda a, b: jnp.where(better.reshape(better.shape + (1,) * (a.ndim - 2)), a, b),
            Halves(gain, left, right),
            best,
        )

    none = Halves(jnp.full((m, k), -jnp.inf, x.dtype), moments, moments)
    return lax.fori_loop(0, TRIALS, step, none)


def swap(key, space, labels, moments, problem):
    """Children: a cluster is given up, another is split."""
    m, k = moments.size.shape
    dtype = moments.size.dtype
    mixtures = fitted(space, moments, problem)
    safe = is_safe(space, mixtures, problem)
    halves = split(key, space, labels, moments, problem, safe)
    removal = removal_costs(space, mixtures, labels, problem, safe)
    short = moments.size < space.min_size
    keys = jax.random.split(jax.random.fold_in(key, TRIALS), m)
    draws = jax.vmap(lambda key: jax.random.uniform(key, (2 * k + 1,), dtype))(keys)
    heat = jnp.array([0.3, 1.0, 3.0], dtype)[(draws[:, 0] * 3).astype(jnp.int32)]
    noise = -jnp.log(-jnp.log(draws[:, 1:] + 1e-30) + 1e-30)
    least = jnp.where(short, jnp.inf, removal).min(axis=1)
    scale = 0.1 * heat * jnp.where(jnp.isfinite(least), least, 1)
    removal = jnp.where(short, -1e30, removal)
    score = (removal - scale[:, None] * noise[:, :k])[:, :, None] - (
        halves.gain + scale[:, None] * noise[:, k:]
    )[:, None, :]
    flat = jnp.where(jnp.eye(k, dtype=bool), jnp.inf, score).reshape(m, k * k)
    best = jnp.argmin(flat, axis=1)
    possible = jnp.isfinite(flat.min(axis=1))
    gone, parted = best // k, best % k
    row = jnp.arange(m)

    def put(whole, left, right):
        new = whole.at[row, parted].set(left[row, parted]).at[row, gone].set(right[row, parted])
        return jnp.where(possible.reshape(-1, *[1] * (whole.ndim - 1)), new, whole)

    child = jax.tree.map(put, moments, halves.left, halves.right)
    return fitted(space, child, problem), possible
