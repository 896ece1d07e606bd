"""Mixtures to start from: means picked from the data, one shared variance, equal weights.

With one variance and equal weights the first assignment of `cem` is to the nearest mean.
"""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxcmle import numerics
from jaxcmle.numerics import Coefficients, Points
from jaxcmle.problem import inputs
from jaxcmle.problem.bounds import distance_to, farthest_first
from jaxcmle.problem.types import Mixture

__all__ = ["SeedMethod", "seed"]

SeedMethod = Literal["kmeans++", "farthest", "random", "subsets"]


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
    feature. Points are drawn in proportion to their weight; points of weight 0 never are, and
    padding with them does not change what a key draws.

    Args:
        key: a key, as from `jax.random.key(0)`.
        x: points `[n, d]`.
        n_clusters: k; a Python int.
        method: `"kmeans++"` draws each next mean in proportion to its weight and its squared
            distance to the nearest one so far; `"farthest"` takes the farthest point (Gonzalez)
            from a random first one; `"random"` draws k different points; `"subsets"` takes the
            means of k random subsets of `subset_size` points.
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
    if method == "kmeans++":
        means = points.x[_kmeans_plus_plus(key, points, k)]
    elif method == "farthest":
        means = points.x[farthest_first(points, k, _draw(key, points.weight)).centres]
    elif method == "random":
        means = points.x[_draw_different(key, points.weight, k)]
    else:
        drawn = _draw_many(key, points.weight, k * subset_size)
        means = points.x[drawn].reshape(k, subset_size, -1).mean(axis=1)

    ones = jnp.ones(k, x.dtype)
    tiles = numerics.point_tiles(points.x, k)
    square, _ = numerics.assign_directly(
        tiles, Coefficients(means, ones, jnp.zeros_like(ones)), x.shape[0]
    )
    total = numerics.blocked_sum(points.weight)
    variance = numerics.blocked_sum(points.weight * square) / (total * x.shape[1])
    # With a point on every mean the distances are all 0: any positive variance will do.
    variance = jnp.where(variance > 0, variance, 1)
    return Mixture(weights=ones / k, means=means + points.shift, variances=variance * ones)


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
