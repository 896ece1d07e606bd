"""Exchanges of two points, for clusters that cannot spare one.

Where a cluster is as small as it may be, no single point can leave it. Two points that change places
can: without that, a search among small clusters is stuck almost anywhere.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Moments
from jaxcmle.problem.types import Problem
from jaxcmle.refine.moves import ROUNDINGS, cluster_change
from jaxcmle.refine.workspace import Partitions, Workspace

__all__ = ["exchanged"]

# All pairs of points are looked at: for more points than this, none is. And for more than these
# few, it takes too long to be done on the way.
MOST_POINTS = 1024
FEW_POINTS = 64


def exchanged(
    space: Workspace, partitions: Partitions, stuck: Array, problem: Problem, last: ArrayLike
) -> Array:
    """Return the labels `[m, n]` of a stack of partitions after the best exchange in each.

    Only where the partition is `stuck` `[m]` and has a cluster that cannot spare a point. If this
    is not the `last` attempt to improve it, only for few points.
    """
    n = space.points.x.shape[0]
    if n > MOST_POINTS:
        return partitions.labels
    spare = partitions.moments.size.min(axis=1) - space.points.weight.max() >= space.min_size
    wanted = stuck & ~spare & (jnp.asarray(last) | (n <= FEW_POINTS))

    def exchange() -> Array:
        labels = numerics.map_stack(
            lambda each: _exchange(space, *each, problem),
            (partitions.labels, partitions.moments),
            8 * n * n * space.points.x.dtype.itemsize,
        )
        return jnp.where(wanted[:, None], labels, partitions.labels)

    return lax.cond(wanted.any(), exchange, lambda: partitions.labels)


def _exchange(space: Workspace, labels: Array, moments: Moments, problem: Problem) -> Array:
    n, d = space.points.x.shape
    size, mean, scatter = moments
    x, weight = space.points.x, space.points.weight
    out, into = weight[:, None], weight[None, :]
    # Entry (x, y): what happens to the cluster of x when y takes the place of x.
    to_own = numerics.squared_distances(x.T, mean)[labels]
    away = x - mean[labels]
    product = jnp.matmul(away, x.T, precision=numerics.PRECISION)
    product = product - (away * mean[labels]).sum(axis=1)[:, None]
    own = (away * away).sum(axis=1)[:, None]
    own_size, own_scatter = size[labels][:, None], scatter[labels][:, None]
    added = into - out
    new = own_size + added
    drift = into * into * to_own + out * out * own - 2 * into * out * product
    rise = into * to_own - out * own - drift / jnp.where(new > 0, new, 1)
    rise = jnp.maximum(rise, -own_scatter)
    half = cluster_change(
        own_size,
        own_scatter,
        added,
        rise,
        total=size.sum(),
        d=d,
        problem=problem,
        floor=space.floor,
    )
    spread = own_scatter + rise > space.least_spread * d * new
    flawed = own_scatter <= space.least_spread * d * own_size
    allowed = (new >= space.min_size) & (spread | flawed) & (out > 0) & (into > 0)
    allowed = allowed & allowed.T & (labels[:, None] != labels[None, :])
    rounding = ROUNDINGS * jnp.finfo(half.dtype).eps * (jnp.abs(half) + jnp.abs(half.T))
    change = jnp.where(allowed & (half + half.T < -rounding), half + half.T, jnp.inf)
    best = jnp.argmin(change)
    i, j = best // n, best % n
    after = labels.at[i].set(labels[j]).at[j].set(labels[i])
    return jnp.where(jnp.isfinite(change.min()), after, labels)
