"""One cost for everybody: from labels, in float64, by NumPy."""

import math

import numpy as np

import jaxcmle as jc

# A variance of a cluster that is none, relative to that of all points.
NO_SPREAD = 1e-10
# For CEM to start from a partition with an empty cluster, or one without spread.
START_VARIANCE = 1e-6


def default_min_size(n: int, k: int) -> int:
    """Return the least size of a cluster that counts: a tenth of the average, at least two."""
    return max(2, math.ceil(n / (10 * k)))


def partition_cost(x: np.ndarray, labels: np.ndarray, k: int, min_size: float) -> float:
    """Return the cost of a partition; infinity if a cluster is too small or has no spread."""
    x = np.asarray(x, np.float64)
    n, d = x.shape
    least = NO_SPREAD * x.var(axis=0).mean()
    total = 0.0
    for cluster in range(k):
        members = x[labels == cluster]
        size = len(members)
        if size < max(1, min_size):
            return math.inf
        variance = float(members.var(axis=0).mean())
        if variance <= least:
            return math.inf
        total += size * d / 2 * (math.log(2 * math.pi * variance) + 1) - size * math.log(size / n)
    return total


def solution_cost(x: np.ndarray, solution: jc.Solution, k: int, min_size: int) -> float:
    """Return the cost of our labels; infinity if the status is bad."""
    if int(solution.status) not in (jc.Status.CONVERGED, jc.Status.MAX_ITER):
        return math.inf
    return partition_cost(x, np.asarray(solution.labels), k, min_size)


def cem_cost(x: np.ndarray, labels: np.ndarray, k: int, min_size: int) -> float:
    """Return the cost that our CEM reaches from a partition."""
    start = jc.estimate(x, labels, k)
    if not (start.weights > 0).all() or not (start.variances > 0).all():
        start = jc.estimate(x, labels, k, min_variance=START_VARIANCE)
    return solution_cost(x, jc.cem(x, start, min_size=min_size), k, min_size)


def is_reached(cost: float, other: float) -> bool:
    """Tell whether one costs no more than the other, but for rounding."""
    if not math.isfinite(other):
        return math.isfinite(cost)
    return cost <= other + 1e-6 * abs(other) + 1e-3
