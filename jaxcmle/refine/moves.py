r"""Single-point moves: what a partition gains when one point changes cluster, as Hartigan did.

The cost of a partition is a sum over clusters, and a cluster's part depends on its weight n and its
scatter S only. A point of weight w at squared distance t from the mean changes them to

$$n' = n \pm w, \qquad S' = S \pm \frac{n w t}{n \pm w}.$$

Where no move lowers the cost, CEM has nothing to do either: a point that is cheaper elsewhere under
the current mixture is cheaper still after the mixture is estimated anew.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Moments
from jaxcmle.problem.types import UCMLE, WKM, Problem
from jaxcmle.refine.workspace import (
    Partitions,
    Workspace,
    fitted,
    is_flawed,
    is_safe,
    over_tiles,
    own_values,
    shortage_of,
    squared_distances,
)

__all__ = ["cluster_change", "entering_and_leaving", "moved"]

# Moves made at once, at most; where there are many points, one for so many of them.
MOST_AT_ONCE = 128
POINTS_PER_MOVE = 256
# A move counts only if it gains more than so many roundings of its two parts.
ROUNDINGS = 64


def cluster_change(
    size: Array,
    scatter: Array,
    added: Array,
    rise: Array,
    *,
    total: Array,
    d: int,
    problem: Problem,
    floor: ArrayLike,
) -> Array:
    r"""Return by how much a cluster's cost changes when its weight and its scatter do.

    All arrays broadcast. The change is small and the costs may be large, so it is not a difference
    of two costs: with $v$ and $v'$ the variances before and after, $\rho = v'/v - 1$ and
    $q' = S'/(d n')$, which is $v'$ unless the floor is above it,

    $$\Delta = \tfrac{d}{2} (n'-n) \ln 2 \pi v + \frac{S'-S}{2 v}
        + \tfrac{d}{2} n' \left[ \ln(1+\rho) - \rho \frac{q'}{v'} \right]
        - (n'-n) \ln \tfrac{n}{N} - n' \ln \tfrac{n'}{n}:$$

    what the points cost under the old mixture, and what its new estimate saves. WKM has
    $\beta (S'-S)$ for the first three terms, UCMLE not the last two.

    Args:
        size: n, the weight of the cluster.
        scatter: S.
        added: $n' - n$.
        rise: $S' - S$.
        total: N.
        d: the number of features.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        floor: the least variance.
    """
    new = size + added
    some, left = jnp.where(size > 0, size, 1), jnp.where(new > 0, new, 1)
    entropy = -added * jnp.log(some / total) - new * jnp.log1p(jnp.where(new > 0, added / some, 0))
    first = -added * jnp.log(jnp.where(added > 0, added, 1) / total)
    entropy = jnp.where(size > 0, entropy, first)
    if isinstance(problem, WKM):
        return jnp.asarray(problem.beta, rise.dtype) * rise + entropy
    floor = jnp.asarray(floor, size.dtype)
    raw, new_raw = scatter / (d * some), jnp.maximum(scatter + rise, 0) / (d * left)
    variance, new_variance = jnp.maximum(raw, floor), jnp.maximum(new_raw, floor)
    difference = jnp.where(
        (raw >= floor) & (new_raw >= floor),
        (rise - scatter * (added / some)) / (d * left),
        new_variance - variance,
    )
    ratio = jnp.maximum(difference / variance, jnp.finfo(size.dtype).eps - 1)
    spread = (
        d / 2 * added * jnp.log(2 * math.pi * variance)
        + rise / (2 * variance)
        + d / 2 * new * (jnp.log1p(ratio) - ratio * (new_raw / new_variance))
    )
    return spread if isinstance(problem, UCMLE) else spread + entropy


def entering_and_leaving(
    moments: Moments,
    square: Array,
    label: Array,
    weight: Array,
    *,
    problem: Problem,
    floor: ArrayLike,
) -> tuple[Array, Array, Array]:
    """Return what it costs that points enter each cluster, and leave their own.

    Args:
        moments: of the k clusters.
        square: squared distances of p points to the means, `[k, p]`.
        label: their clusters, `[p]`.
        weight: `[p]`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        floor: the least variance.

    Returns:
        Changes `[k, p]` by entering; changes `[p]` by leaving; the scatter that is left `[p]`.
    """
    size, mean, scatter = moments
    options: dict[str, Any] = {
        "total": size.sum(),
        "d": mean.shape[1],
        "problem": problem,
        "floor": floor,
    }
    grown = size[:, None] + weight
    rise = size[:, None] * weight * square / jnp.where(grown > 0, grown, 1)
    entering = cluster_change(size[:, None], scatter[:, None], weight, rise, **options)

    own_size, own_scatter = size[label], scatter[label]
    left = own_size - weight
    fall = own_size * weight * own_values(square, label) / jnp.where(left > 0, left, 1)
    # The last point takes all of the scatter with it; what is left by rounding alone is nothing.
    rounding = 4 * jnp.finfo(fall.dtype).eps * own_scatter
    fall = jnp.where((left > 0) & (own_scatter - fall > rounding), fall, own_scatter)
    leaving = cluster_change(own_size, own_scatter, -weight, -fall, **options)
    return entering, leaving, own_scatter - fall


def moved(space: Workspace, partitions: Partitions, problem: Problem) -> Array:
    """Return the labels `[m, n]` of a stack of partitions after a batch of moves in each.

    The best move of every point is found, and of those that improve the first one, two, four, ...
    are tried: the batch is the one that gains most. A batch of one gains what it promises, so
    that there is none only where no move improves. While a cluster is too small, points move only
    into such clusters, whatever it costs.
    """
    n, k = space.points.x.shape[0], partitions.moments.size.shape[1]
    safe = is_safe(space, fitted(space, partitions.moments, problem), problem)
    return numerics.map_stack(
        lambda each: _move_batch(space, each[0], each[1], problem, safe),
        (partitions.labels, partitions.moments),
        4 * n * k * space.points.x.dtype.itemsize,
    )


def _best_moves(
    space: Workspace, labels: Array, moments: Moments, problem: Problem, safe: Array
) -> tuple[Array, Array]:
    """Return the change by the best move of every point, and where it goes.

    The change is infinite where no move is allowed, or none improves.
    """
    size, mean, scatter = moments
    short = (size < space.min_size) & space.exists
    busy = space.floor > 0

    def changes(tile: Any, label: Array, weight: Array) -> tuple[Array, Array, Array]:
        square = squared_distances(space, tile, mean, safe)
        return entering_and_leaving(
            moments, square, label, weight, problem=problem, floor=space.floor
        )

    def cheapest(entering: Array, label: Array) -> tuple[Array, Array]:
        elsewhere = jnp.arange(len(size), dtype=jnp.int32)[:, None] != label
        open_to = elsewhere & (space.exists & (short | ~short.any()))[:, None]
        return numerics.smallest(jnp.where(open_to, entering, jnp.inf))

    def one_tile(tile: Any, label: Array, weight: Array) -> tuple[Array, Array]:
        entering, leaving, rest = numerics.apart(changes, busy, tile, label, weight)
        best, target = numerics.apart(cheapest, busy, entering, label)
        left = size[label] - weight
        # From gathered numbers: to gather truth values takes longer than all the rest.
        flawed = is_flawed(space, size[label], scatter[label])
        sound = ~is_flawed(space, left, rest) | flawed
        allowed = (weight > 0) & (left >= space.min_size) & sound
        change = best + leaving
        rounding = ROUNDINGS * jnp.finfo(change.dtype).eps * (jnp.abs(best) + jnp.abs(leaving))
        return jnp.where(allowed & ((change < -rounding) | short.any()), change, jnp.inf), target

    return over_tiles(space, one_tile, labels, space.points.weight)


def _move_batch(
    space: Workspace, labels: Array, moments: Moments, problem: Problem, safe: Array
) -> Array:
    n, d = space.points.x.shape
    size, mean, scatter = moments
    k = size.shape[0]
    change, target = _best_moves(space, labels, moments, problem, safe)
    most = min(n, max(MOST_AT_ONCE, n // POINTS_PER_MOVE))
    gain, index = lax.top_k(-change, most)
    improving = gain > -jnp.inf
    source, target = labels[index], target[index]
    weight = jnp.where(improving, space.points.weight[index], 0)[:, None]

    # Step s has the first 2^s moves: what they change in every cluster, about its mean.
    step = jnp.array([place.bit_length() for place in range(most)], jnp.int32)
    steps = (most - 1).bit_length() + 1
    x = space.points.x[index]
    rows = jnp.concatenate(
        [
            weight * numerics.matmul_features(x - mean[target]),
            -weight * numerics.matmul_features(x - mean[source]),
        ]
    )
    segment = jnp.concatenate([target, source]) + k * jnp.concatenate([step, step])
    sums = jax.ops.segment_sum(rows, segment, k * steps).reshape(steps, k, d + 2)
    sums = jnp.cumsum(sums, axis=0)
    drift, square, added = sums[..., :d], sums[..., d], sums[..., d + 1]
    new = size + added
    rise = square - (drift * drift).sum(axis=-1) / jnp.where(new > 0, new, 1)
    rise = jnp.maximum(rise, -scatter)
    changes = cluster_change(
        size, scatter, added, rise, total=size.sum(), d=d, problem=problem, floor=space.floor
    ).sum(axis=1)

    # The least shortage first, then the fewest flaws, then the cost.
    shortage = shortage_of(space, new)
    flaws = (is_flawed(space, new, scatter + rise) & space.exists).sum(axis=1)
    best = (shortage <= shortage.min()) & jnp.isfinite(changes)
    best &= flaws <= jnp.where(best, flaws, k + 1).min()
    choice = jnp.argmin(jnp.where(best, changes, jnp.inf)).astype(jnp.int32)
    return labels.at[index].set(jnp.where(improving & (step <= choice), target, source))
