"""Partitions whose clusters must hold a minimum number of points.

Where the minimum binds, the best partition need not be what any mixture assigns: some points have
to stay in a cluster that is not their cheapest.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxcmle.problem.objective import assign, estimate, partition_cost, point_costs
from jaxcmle.problem.types import UCMLE, WKM, Mixture, Problem, Solution, Status

__all__ = [
    "assign_with_sizes",
    "balanced_size",
    "default_min_size",
    "fillable",
    "refine_on_host",
    "refine_with_sizes",
]

MAX_ROUNDS = 100


def default_min_size(total: float, whole: bool, k: int) -> float:
    """Return a tenth of the average weight of a cluster, and of whole points 2 at least.

    That keeps pairs of points that happen to be close from being clusters. Less where there are not
    so many points.
    """
    size, most = balanced_size(total, whole, 10 * k), total / k
    return min(size, float(math.floor(most)) if whole and most >= 1 else most)


def balanced_size(total: float, whole: bool, balance: float) -> float:
    """Return the least weight of a cluster in an f-balanced partition, as `smallest_size` does."""
    share = total / balance
    # The slack keeps a quotient that is whole but for rounding from being rounded up.
    return float(max(2, math.ceil(share * (1 - 1e-6)))) if whole else share


def assign_with_sizes(costs: NDArray[Any], min_size: int) -> NDArray[np.int32]:
    """Return the cheapest labels with at least `min_size` points in every cluster, exactly.

    Starts from everyone's cheapest cluster. While a cluster is short of a point, it gets one along
    the cheapest chain of moves from a cluster that can spare one (successive shortest paths).

    Args:
        costs: `[n, k]`, what every point costs in every cluster; finite.
        min_size: the smallest number of points in a cluster; `k * min_size <= n`.
    """
    costs = np.asarray(costs, np.float64)
    k = costs.shape[1]
    if k * min_size > len(costs):
        raise ValueError(f"{len(costs)} points cannot fill {k} clusters of {min_size}")
    if not np.isfinite(costs).all():
        raise ValueError(
            "some points have costs that are not finite, because a cluster has a weight of 0, or "
            "distances overflow: rescale x, or enable float64"
        )
    labels = costs.argmin(axis=1).astype(np.int32)
    sizes = np.bincount(labels, minlength=k)
    while (short := sizes < min_size).any():
        # The cheapest point to move from each cluster to each other one, and what that costs.
        step = np.full((k, k), np.inf)
        who = np.zeros((k, k), np.int64)
        for source in range(k):
            members = np.flatnonzero(labels == source)
            if members.size:
                change = costs[members] - costs[members, source][:, None]
                nearest = change.argmin(axis=0)
                step[source], who[source] = change[nearest, np.arange(k)], members[nearest]
        np.fill_diagonal(step, np.inf)
        # Bellman and Ford, from all clusters that can spare a point.
        distance = np.where(sizes > min_size, 0.0, np.inf)
        before = np.full(k, -1)
        for _ in range(k - 1):
            through = distance[:, None] + step
            nearer = (through.min(axis=0) < distance) & (sizes <= min_size)
            before = np.where(nearer, through.argmin(axis=0), before)
            distance = np.where(nearer, through.min(axis=0), distance)
        target = int(np.where(short, distance, np.inf).argmin())
        sizes[target] += 1
        for _ in range(k):
            source = int(before[target])
            labels[who[source, target]] = target
            target = source
            if sizes[target] > min_size:
                break
        sizes[target] -= 1
    return labels


def fillable(weights: Any, min_size: int, n: int) -> Any:
    """Return weights with `min_size / n` in place of 0, for clusters that n points are to fill.

    To a cluster that has nobody, nobody would be moved at any price.
    """
    weights = np.asarray(weights)
    return np.where(weights > 0, weights, weights.dtype.type(min_size / n))


def refine_with_sizes(
    x: Array, start: Mixture, min_size: int, problem: Problem, min_variance: float
) -> Solution:
    """Alternate `assign_with_sizes` and `estimate` until no label changes; the cost never rises."""
    k = start.weights.shape[0]
    weights = jnp.asarray(fillable(start.weights, min_size, len(x)))
    mixture, labels = dataclasses.replace(start, weights=weights), None
    n_iter = 0
    while n_iter < MAX_ROUNDS:
        costs = np.asarray(point_costs(x, mixture, problem=problem))
        new = assign_with_sizes(costs, min_size)
        if labels is not None and (new == labels).all():
            break
        labels, n_iter = new, n_iter + 1
        mixture = estimate(x, labels, k, problem=problem, min_variance=min_variance)
    assert labels is not None
    status = Status.CONVERGED if n_iter < MAX_ROUNDS else Status.MAX_ITER
    return Solution(
        mixture=mixture,
        labels=jnp.asarray(labels),
        cost=partition_cost(x, labels, k, problem=problem, min_variance=min_variance),
        status=jnp.int32(status),
        n_iter=jnp.int32(n_iter),
        consistent=(assign(x, mixture, problem=problem) == labels).all(),
    )


def refine_on_host(
    x: NDArray[Any],
    n: int,
    start: Mixture,
    min_size: int,
    problem: Problem,
    min_variance: float,
    known: dict[bytes, Solution],
) -> Solution | None:
    """Return what `refine_with_sizes` does, on the host: programs would be for one n each.

    Args:
        x: points, of which the first n count; the others get the label that is theirs.
        n: how many.
        start: the mixture to start from. If it is not finite, nothing is returned.
        min_size: the smallest number of points in a cluster.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        min_variance: floor under every variance.
        known: solutions by the first assignment, which decides the rest: many mixtures have the
            same. What is found is added.
    """
    dtype, d = start.means.dtype, x.shape[1]
    x = np.asarray(x, np.float64)
    parts = (start.weights, start.means, start.variances)
    weights, means, variances = (np.asarray(part, np.float64) for part in parts)
    if not all(np.isfinite(part).all() for part in (weights, means, variances)):
        return None
    k, weights = len(weights), fillable(weights, min_size, n)
    labels, first, n_iter = None, b"", 0
    while True:
        square = ((x[:, None] - means) ** 2).sum(axis=2)
        costs = square / (2 * variances)
        if not isinstance(problem, WKM):
            costs += d / 2 * np.log(2 * math.pi * variances)
        if not isinstance(problem, UCMLE):
            costs -= np.log(weights)
        cheapest = costs.argmin(axis=1).astype(np.int32)
        new = np.append(assign_with_sizes(costs[:n], min_size), cheapest[n:])
        first = new.tobytes() if labels is None else first
        if first in known:
            return known[first]
        converged = labels is not None and (new == labels)[:n].all()
        labels = new
        if converged or n_iter == MAX_ROUNDS:
            break
        n_iter += 1
        member = np.eye(k)[labels[:n]]
        sizes = member.sum(axis=0)
        means = member.T @ x[:n] / sizes[:, None]
        if not isinstance(problem, WKM):
            scatter = ((x[:n] - means[labels[:n]]) ** 2).sum(axis=1) @ member
            variances = np.maximum(scatter / (d * sizes), min_variance)
        if not isinstance(problem, UCMLE):
            weights = sizes / n
    fields: dict[str, Any] = {
        "labels": labels,
        "cost": np.asarray(costs[np.arange(n), labels[:n]].sum(), dtype)[()],
        "status": np.int32(Status.CONVERGED if converged else Status.MAX_ITER),
        "n_iter": np.int32(n_iter),
        "consistent": bool((cheapest == labels).all()),
    }
    own: dict[str, Any] = {"weights": weights, "means": means, "variances": variances}
    rounded = Mixture(**{name: part.astype(dtype) for name, part in own.items()})
    known[first] = Solution(mixture=rounded, **fields)
    return known[first]
