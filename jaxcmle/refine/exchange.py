"""Moves of two points at once, for clusters that cannot spare one.

Where a cluster is as small as it may be, no single point can leave it. A point can if another one
takes its place: the two change places, or the one goes on to a third cluster. Without that, a
search among small clusters is stuck almost anywhere.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Moments
from jaxcmle.problem.types import Problem
from jaxcmle.refine.moves import ROUNDINGS, cluster_change, entering_and_leaving
from jaxcmle.refine.workspace import (
    Partitions,
    Workspace,
    anywhere,
    has_few_points,
    is_flawed,
)

__all__ = ["exchanged"]

# All pairs of points are looked at: for more points than this, none is.
MOST_POINTS = 1024


def exchanged(
    space: Workspace, partitions: Partitions, stuck: Array, problem: Problem, last: ArrayLike
) -> Array:
    """Return the labels `[m, n]` of a stack of partitions after the best such move in each.

    Only where the partition is `stuck` `[m]` and has a cluster that cannot spare a point. If this
    is not the `last` attempt to improve it, only for few points: for more it takes too long.
    """
    n = space.points.x.shape[0]
    if n > MOST_POINTS:
        return partitions.labels
    smallest = jnp.where(space.exists, partitions.moments.size, jnp.inf).min(axis=1)
    spare = smallest - space.points.weight.max() >= space.min_size
    wanted = stuck & ~spare & (jnp.asarray(last) | has_few_points(space))

    def exchange() -> Array:
        labels = numerics.map_stack(
            lambda each: _exchange(space, each[0], each[1], problem),
            (partitions.labels, partitions.moments),
            8 * n * n * space.points.x.dtype.itemsize,
        )
        return jnp.where(wanted[:, None], labels, partitions.labels)

    return lax.cond(anywhere(space, wanted), exchange, lambda: partitions.labels)


def _exchange(space: Workspace, labels: Array, moments: Moments, problem: Problem) -> Array:
    n, d = space.points.x.shape
    size, mean, scatter = moments
    k = len(size)
    x, weight = space.points.x, space.points.weight
    out, into = weight[:, None], weight[None, :]
    square = numerics.squared_distances(x.T, mean)

    # Entry (x, y): what happens to the cluster of x when y takes the place of x.
    to_own = square[labels]
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
    replaced = cluster_change(
        own_size,
        own_scatter,
        added,
        rise,
        total=size.sum(),
        d=d,
        problem=problem,
        floor=space.floor,
    )
    flawed = is_flawed(space, size, scatter)[labels]
    sound = ~is_flawed(space, new, own_scatter + rise) | flawed[:, None]
    allowed = (new >= space.min_size) & sound & (out > 0) & (into > 0)
    allowed &= labels[:, None] != labels[None, :]

    # Either x goes where y was, or to the best cluster that is neither's.
    entering, leaving, rest = entering_and_leaving(
        moments, square, labels, weight, problem=problem, floor=space.floor
    )
    cluster = jnp.arange(k, dtype=jnp.int32)[:, None]
    open_to = (cluster != labels) & space.exists[:, None]
    elsewhere = jnp.where(open_to, entering, jnp.inf)
    best, first = numerics.smallest(elsewhere)
    second_best, second = numerics.smallest(jnp.where(cluster == first, jnp.inf, elsewhere))
    taken = first[:, None] == labels[None, :]
    goes_to = jnp.where(taken, second[:, None], first[:, None])
    left = size[labels] - weight
    spared = (left >= space.min_size) & (~is_flawed(space, left, rest) | flawed)
    changes = jnp.stack(
        [
            jnp.where(allowed & allowed.T, replaced + replaced.T, jnp.inf),
            jnp.where(
                allowed & spared[None, :],
                replaced + leaving[None, :] + jnp.where(taken, second_best[:, None], best[:, None]),
                jnp.inf,
            ),
        ]
    )
    rounding = ROUNDINGS * jnp.finfo(replaced.dtype).eps * jnp.abs(replaced)
    changes = jnp.where(changes < -rounding, changes, jnp.inf)
    choice = jnp.argmin(changes)
    chain, i, j = choice // (n * n), choice // n % n, choice % n
    after = labels.at[i].set(jnp.where(chain == 1, goes_to[i, j], labels[j])).at[j].set(labels[i])
    return jnp.where(jnp.isfinite(changes.min()), after, labels)
