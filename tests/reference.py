"""Naive float64 NumPy oracle for the tests; shares no code with the package.

Clarity comes before speed: plain loops, one formula a function. Axis letters: `n` points, `d`
features, `k` clusters. Every function that knows the problem takes

* `problem`: "cmle" (weights, means and variances free), "wkm" (every variance is 1/(2 beta)) or
  "ucmle" (weights fixed at 1/k, and no weight term in the cost);
* `beta`: used by "wkm" only;
* `sample_weight`: a_x >= 0, all ones by default. A point of weight 0 changes nothing, anywhere.

Below, N is the sum of the point weights and n_k the weight of cluster k.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Mixture = tuple[Floats, Floats, Floats]

PROBLEMS = ("cmle", "wkm", "ucmle")


def _points(x: ArrayLike) -> Floats:
    """Return x as a float64 array [n, d]; a flat array is read as n points on the line."""
    x = np.asarray(x, dtype=np.float64)
    return x[:, None] if x.ndim == 1 else x


def _sample_weight(sample_weight: ArrayLike | None, n: int) -> Floats:
    """Return the point weights as a float64 array [n]; None means ones."""
    if sample_weight is None:
        return np.ones(n)
    sample_weight = np.asarray(sample_weight, dtype=np.float64)
    if sample_weight.shape != (n,) or (sample_weight < 0).any() or sample_weight.sum() == 0:
        raise ValueError(f"expected {n} point weights >= 0 with a positive sum")
    return sample_weight


def _check_problem(problem: str) -> None:
    if problem not in PROBLEMS:
        raise ValueError(f"problem must be one of {PROBLEMS}, got {problem!r}")


def _log(value: float) -> float:
    """Return ln(value), with ln(0) = -inf."""
    return math.log(value) if value > 0 else -math.inf


def _weighted_total(costs: Floats, sample_weight: Floats) -> float:
    """Return sum_x a_x cost_x; weight 0 silences any cost, and +inf beats -inf."""
    terms = [a * cost for a, cost in zip(sample_weight, costs, strict=True) if a > 0]
    return math.inf if math.inf in terms else math.fsum(terms)


def squared_distances(x: ArrayLike, y: ArrayLike) -> Floats:
    """Return |x_i - y_j|^2 as [n, m], from the differences (no cancellation)."""
    return ((_points(x)[:, None, :] - _points(y)[None, :, :]) ** 2).sum(axis=2)


def _mean_and_scatter(x: Floats, sample_weight: Floats) -> tuple[Floats, float]:
    """Return mu = sum a_x x / sum a_x and sum a_x |x - mu|^2 in two passes.

    Measured from one of the points, so that identical points give a scatter of exactly 0.
    """
    anchor = x[0]
    total = math.fsum(sample_weight)
    offset = [math.fsum(sample_weight * column) / total for column in (x - anchor).T]
    mean = anchor + np.array(offset)
    return mean, math.fsum(sample_weight * ((x - mean) ** 2).sum(axis=1))


def point_costs(
    x: ArrayLike,
    weights: ArrayLike,
    means: ArrayLike,
    variances: ArrayLike,
    problem: str = "cmle",
    beta: float = 1.0,
) -> Floats:
    """Return the cost [n, k] of every point under every component.

    * cmle: d/2 ln(2 pi s^2) + |x - mu|^2 / (2 s^2) - ln w
    * wkm: beta |x - mu|^2 - ln w
    * ucmle: as cmle without - ln w

    A weight of 0 costs +inf. A variance of 0 costs -inf on its mean and +inf elsewhere.
    """
    _check_problem(problem)
    d = _points(x).shape[1]
    weights, variances = np.asarray(weights, float), np.asarray(variances, float)
    columns = []
    for component, distances in enumerate(squared_distances(x, means).T):
        weight, variance = weights[component], variances[component]
        if problem == "wkm":
            cost = beta * distances
        elif variance == 0:
            cost = np.where(distances == 0, -math.inf, math.inf)
        else:
            cost = d / 2 * math.log(2 * math.pi * variance) + distances / (2 * variance)
        if problem != "ucmle":
            cost = np.full_like(cost, math.inf) if weight == 0 else cost - math.log(weight)
        columns.append(cost)
    return np.stack(columns, axis=1)


def assign(
    x: ArrayLike,
    weights: ArrayLike,
    means: ArrayLike,
    variances: ArrayLike,
    problem: str = "cmle",
    beta: float = 1.0,
) -> Labels:
    """Return the cheapest component of every point; ties go to the lowest index."""
    return point_costs(x, weights, means, variances, problem, beta).argmin(axis=1)


def margins(
    x: ArrayLike,
    weights: ArrayLike,
    means: ArrayLike,
    variances: ArrayLike,
    problem: str = "cmle",
    beta: float = 1.0,
) -> Floats:
    """Return the second-smallest minus the smallest cost of every point (inf when k = 1)."""
    costs = np.sort(point_costs(x, weights, means, variances, problem, beta), axis=1)
    if costs.shape[1] == 1:
        return np.full(len(costs), math.inf)
    return np.array([0.0 if row[1] == row[0] else row[1] - row[0] for row in costs])


def model_cost(
    x: ArrayLike,
    weights: ArrayLike,
    means: ArrayLike,
    variances: ArrayLike,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return L_X(theta) = sum_x a_x min_k cost_x(theta_k)."""
    costs = point_costs(x, weights, means, variances, problem, beta)
    return _weighted_total(costs.min(axis=1), _sample_weight(sample_weight, len(costs)))


def joint_cost(
    x: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike,
    means: ArrayLike,
    variances: ArrayLike,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return L_X(theta, C) = sum_x a_x cost_x(theta_{z(x)}), z the labels."""
    costs = point_costs(x, weights, means, variances, problem, beta)
    chosen = costs[np.arange(len(costs)), np.asarray(labels)]
    return _weighted_total(chosen, _sample_weight(sample_weight, len(costs)))


def estimate(
    x: ArrayLike,
    labels: ArrayLike,
    k: int,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
    min_variance: float = 0.0,
) -> Mixture:
    """Return the best (weights, means, variances) for the partition: the M-step.

    w_k = n_k / N (ucmle: 1/k), mu_k the mean, s_k^2 = max(sum a_x |x - mu_k|^2 / (d n_k),
    min_variance) (wkm: 1/(2 beta)). An empty cluster has weight 0 (ucmle: 1/k) and the mean and
    variance of the whole data.
    """
    _check_problem(problem)
    x, labels = _points(x), np.asarray(labels)
    n, d = x.shape
    a = _sample_weight(sample_weight, n)
    total = math.fsum(a)
    weights, means, variances = np.empty(k), np.empty((k, d)), np.empty(k)
    for cluster in range(k):
        members = (labels == cluster) & (a > 0)
        share = math.fsum(a[members])
        if share == 0:
            members = a > 0
        mean, scatter = _mean_and_scatter(x[members], a[members])
        weights[cluster] = 1 / k if problem == "ucmle" else share / total
        means[cluster] = mean
        variance = max(scatter / (d * math.fsum(a[members])), min_variance)
        variances[cluster] = 1 / (2 * beta) if problem == "wkm" else variance
    return weights, means, variances


def _variance_cost(variance: float, d: int, min_variance: float) -> float:
    """Return psi(q) = d/2 ln(2 pi s^2) + d q / (2 s^2), s^2 = max(q, min_variance).

    The cost per point of a cluster whose variance is q: d/2 ln(2 pi e q) above the floor, and
    linear in q, with the same slope at the floor, below it. Increasing and concave in q.
    """
    if variance >= min_variance:
        return d / 2 * (_log(2 * math.pi * variance) + 1)
    return d / 2 * (math.log(2 * math.pi * min_variance) + variance / min_variance)


def _cluster_cost(
    weight: float,
    scatter: float,
    total: float,
    d: int,
    problem: str,
    beta: float,
    min_variance: float,
) -> float:
    """Return one cluster's part of L_X(C); it depends on n_k, its scatter, N and d only.

    cmle: n_k psi(scatter / (d n_k)) - n_k ln(n_k / N); wkm: beta scatter - n_k ln(n_k / N);
    ucmle: as cmle without the last term.
    """
    if problem == "wkm":
        spread = beta * scatter
    else:
        spread = weight * _variance_cost(scatter / (d * weight), d, min_variance)
    return spread if problem == "ucmle" else spread - weight * math.log(weight / total)


def partition_cost(
    x: ArrayLike,
    labels: ArrayLike,
    k: int,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
    min_variance: float = 0.0,
) -> float:
    """Return L_X(C) = min over theta (variances >= min_variance) of L_X(theta, C).

    Sum over nonempty clusters of n_k d/2 ln(2 pi s_k^2) + scatter_k / (2 s_k^2) -
    n_k ln(n_k / N), with s_k^2 = max(scatter_k / (d n_k), min_variance); -inf when a variance
    is 0. wkm: beta scatter_k - n_k ln(n_k / N). ucmle: no weight term.
    """
    _check_problem(problem)
    x, labels = _points(x), np.asarray(labels)
    n, d = x.shape
    a = _sample_weight(sample_weight, n)
    total = math.fsum(a)
    costs = []
    for cluster in range(k):
        members = (labels == cluster) & (a > 0)
        if members.any():
            _, scatter = _mean_and_scatter(x[members], a[members])
            weight = math.fsum(a[members])
            costs.append(_cluster_cost(weight, scatter, total, d, problem, beta, min_variance))
    return math.fsum(costs)


@dataclass(frozen=True, kw_only=True)
class CemResult:
    """The end of a CEM run; `costs[t]` is L_X(theta_t, C_t) after M-step t."""

    labels: Labels
    weights: Floats
    means: Floats
    variances: Floats
    n_iter: int
    costs: list[float]
    converged: bool


def cem(
    x: ArrayLike,
    weights: ArrayLike,
    means: ArrayLike,
    variances: ArrayLike,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
    max_iter: int = 300,
    min_variance: float = 0.0,
) -> CemResult:
    """Assign, then repeat {estimate; assign} until no label (of positive weight) changes.

    `n_iter` counts M-steps. Every step minimises L_X(theta, C) over one argument, so `costs`
    never rises. The labels are always those of the returned mixture.
    """
    mixture = (np.asarray(weights, float), _points(means), np.asarray(variances, float))
    labels = assign(x, *mixture, problem, beta)
    k, counted = len(mixture[0]), _sample_weight(sample_weight, len(labels)) > 0
    costs: list[float] = []
    converged = False
    while not converged and len(costs) < max_iter:
        mixture = estimate(x, labels, k, problem, beta, sample_weight, min_variance)
        costs.append(joint_cost(x, labels, *mixture, problem, beta, sample_weight))
        previous, labels = labels, assign(x, *mixture, problem, beta)
        converged = bool((labels == previous)[counted].all())
    return CemResult(
        labels=labels,
        weights=mixture[0],
        means=mixture[1],
        variances=mixture[2],
        n_iter=len(costs),
        costs=costs,
        converged=converged,
    )


def set_partitions(n: int, k: int) -> Iterator[Labels]:
    """Yield every partition of n items into exactly k nonempty blocks, once each.

    Labels are in restricted-growth form: labels[0] = 0, and a label is at most one more than
    the largest before it. Lexicographic order.
    """

    def extend(prefix: tuple[int, ...], blocks: int) -> Iterator[Labels]:
        if len(prefix) == n:
            yield np.array(prefix, dtype=np.int64)
            return
        for label in range(min(blocks + 1, k)):
            used = max(blocks, label + 1)
            if k - used <= n - len(prefix) - 1:
                yield from extend((*prefix, label), used)

    if 1 <= k <= n:
        yield from extend((), 0)


@functools.lru_cache(maxsize=8)
def _partition_bitmasks(n: int, k: int) -> NDArray[np.uint16]:
    """Return the partitions of n items into k blocks as bit masks, one row each: [p, k].

    The same partitions as `set_partitions`, grown item by item for all rows at once.
    """
    masks, used = np.zeros((1, k), dtype=np.uint16), np.zeros(1, dtype=np.int64)
    for item in range(n):
        grown = []
        for block in range(k):
            rows, blocks = masks[used >= block].copy(), np.maximum(used[used >= block], block + 1)
            rows[:, block] |= np.uint16(1 << item)
            possible = k - blocks <= n - item - 1
            grown.append((rows[possible], blocks[possible]))
        masks = np.concatenate([rows for rows, _ in grown])
        used = np.concatenate([blocks for _, blocks in grown])
    return masks


def _canonical(labels: ArrayLike) -> Labels:
    """Rename the labels 0, 1, ... in order of first appearance."""
    names: dict[int, int] = {}
    return np.array([names.setdefault(int(label), len(names)) for label in np.asarray(labels)])


def brute_force(
    x: ArrayLike,
    k: int,
    min_size: float = 2,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
    min_variance: float = 0.0,
) -> tuple[float, Labels]:
    """Return min L_X(C), and a minimiser, over partitions with every n_k >= min_size.

    A cluster's cost depends only on the cluster and N, so the 2^n subsets are costed once, from
    scatter(C) = sum_{x,y in C} a_x a_y |x - y|^2 / (2 n_C), and every partition is a sum of k of
    them. Labels are in restricted-growth form; points of weight 0 get label 0. At most 12 points
    of positive weight. Raises ValueError when no partition is admissible.
    """
    _check_problem(problem)
    x = _points(x)
    size = len(x)
    a = _sample_weight(sample_weight, size)
    counted = np.flatnonzero(a > 0)
    x, a = x[counted], a[counted]
    n, d = x.shape
    if n > 12:
        raise ValueError(f"brute force is for at most 12 points, got {n}")

    indicator = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    mass = indicator * a
    subset_weights = mass.sum(axis=1)
    pair_sums = ((mass @ squared_distances(x, x)) * mass).sum(axis=1)
    # The slack forgives rounding in a sum of weights that should equal min_size.
    admissible = subset_weights >= min_size * (1 - 1e-12)
    admissible[0] = False
    subset_costs = np.zeros(2**n)
    for subset in np.flatnonzero(admissible):
        weight = float(subset_weights[subset])
        scatter = float(pair_sums[subset]) / (2 * weight)
        subset_costs[subset] = _cluster_cost(
            weight, scatter, math.fsum(a), d, problem, beta, min_variance
        )

    masks = _partition_bitmasks(n, k)
    masks = masks[admissible[masks].all(axis=1)]
    if len(masks) == 0:
        raise ValueError(f"no partition of weight {a.sum()} into {k} clusters of >= {min_size}")
    totals = subset_costs[masks].sum(axis=1)
    best = int(totals.argmin())
    labels = np.zeros(size, dtype=np.int64)
    for block, mask in enumerate(masks[best]):
        labels[counted[indicator[mask] == 1]] = block
    return float(totals[best]), labels


def _sorted_line(x: ArrayLike, k: int, min_size: int) -> tuple[Floats, NDArray[np.intp]]:
    """Return the points of the line in sorted order, and that order."""
    flat = _points(x)[:, 0]
    if _points(x).shape[1] != 1 or min_size < 1 or not 1 <= k * min_size <= len(flat):
        raise ValueError(f"expected at least {k} * {min_size} points in one dimension")
    order = np.argsort(flat, kind="stable")
    return flat[order], order


def wkm_1d(x: ArrayLike, k: int, min_size: int = 2, beta: float = 1.0) -> tuple[float, Labels]:
    """Return the exact WKM optimum on the line, unit weights, n_k >= min_size.

    Clusters are contiguous in sorted order: with mu_A <= mu_B, x in B, y in A and x < y, swapping
    x and y keeps the sizes and changes the cost at the old means by
    2 beta (mu_B - mu_A)(x - y) <= 0; the means move, so re-estimating them gains strictly more.
    Hence best[j][i], the least cost of the first i points in j clusters, is the minimum over h
    of best[j - 1][h] + cost(h..i).
    """
    sorted_x, order = _sorted_line(x, k, min_size)
    n = len(sorted_x)
    best = np.full((k + 1, n + 1), math.inf)
    start = np.zeros((k + 1, n + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for stop in range(1, n + 1):
        for first in range(stop - min_size + 1):
            members = sorted_x[first:stop, None]
            size = stop - first
            _, scatter = _mean_and_scatter(members, np.ones(size))
            cost = _cluster_cost(size, scatter, n, 1, "wkm", beta, 0.0)
            for j in range(1, k + 1):
                if best[j - 1, first] + cost < best[j, stop]:
                    best[j, stop], start[j, stop] = best[j - 1, first] + cost, first
    labels, stop = np.empty(n, dtype=np.int64), n
    for j in range(k, 0, -1):
        labels[order[start[j, stop] : stop]] = j
        stop = start[j, stop]
    return float(best[k, n]), _canonical(labels)


def narrowest_interval_1d(
    x: ArrayLike, k: int, min_size: int = 2, problem: str = "cmle"
) -> tuple[float, Labels]:
    """Return the exact CMLE or UCMLE optimum on the line, unit weights, n_k >= min_size.

    Claim: in an optimum, the cluster A of least variance is an interval of the sorted data, that
    is, no other point lies strictly between two of its points (among equal values, choose which).
    Proof: fix the optimal theta and let x of a cluster B lie between y < x < z, both in A. The
    difference of point costs g = cost(theta_A) - cost(theta_B) is a quadratic with leading
    coefficient 1/(2 s_A^2) - 1/(2 s_B^2) >= 0, hence convex, so g(x) <= g(t) for t = y or t = z.
    Swapping x and t changes L_X(theta, C) by g(x) - g(t) <= 0. It moves the mean of A, so the
    old theta is not the estimate of the new partition, and re-estimating gains strictly:
    a contradiction. The swap keeps every size, so the claim holds for each vector of sizes,
    whether the size constraint binds or not. (Moving x alone could break the constraint: this is
    why a swap is used, and why point weights, which a swap does not keep, are not allowed.) A
    variance of 0 means equal points, again an interval.

    The other clusters are optimal for the remaining points with N fixed, so the claim applies to
    them again: try every interval of the remaining sorted data, and recurse.
    """
    if problem not in ("cmle", "ucmle"):
        raise ValueError(f"problem must be 'cmle' or 'ucmle', got {problem!r}")
    sorted_x, order = _sorted_line(x, k, min_size)
    n = len(sorted_x)

    @functools.cache
    def cost(members: tuple[int, ...]) -> float:
        size = len(members)
        _, scatter = _mean_and_scatter(sorted_x[list(members), None], np.ones(size))
        return _cluster_cost(size, scatter, n, 1, problem, 1.0, 0.0)

    @functools.cache
    def solve(rest: tuple[int, ...], clusters: int) -> tuple[float, tuple[tuple[int, ...], ...]]:
        if clusters == 1:
            return cost(rest), (rest,)
        best: tuple[float, tuple[tuple[int, ...], ...]] = (math.inf, ())
        for size in range(min_size, len(rest) - (clusters - 1) * min_size + 1):
            for first in range(len(rest) - size + 1):
                interval = rest[first : first + size]
                others_cost, others = solve(rest[:first] + rest[first + size :], clusters - 1)
                if cost(interval) + others_cost < best[0]:
                    best = cost(interval) + others_cost, (interval, *others)
        return best

    optimum, clusters = solve(tuple(range(n)), k)
    labels = np.empty(n, dtype=np.int64)
    for label, members in enumerate(clusters):
        labels[order[list(members)]] = label
    return optimum, _canonical(labels)


def nearest_sum(distances: Floats, sample_weight: Floats, weight: float) -> float:
    """Return S_W = min sum_y b_y distance_y over 0 <= b_y <= a_y with sum b_y = W.

    Filled from the nearest point outwards: convex and piecewise linear in W, with its corners at
    the cumulative weights. With unit weights and the point itself among the y at distance 0, S_n
    is the sum of the n - 1 smallest squared distances to the other points.
    """
    order = np.argsort(distances, kind="stable")
    corners = np.concatenate([[0.0], np.cumsum(sample_weight[order])])
    sums = np.concatenate([[0.0], np.cumsum((sample_weight * distances)[order])])
    return float(np.interp(weight, corners, sums))


def lower_bound_term(
    distances: Floats,
    sample_weight: Floats,
    weight: float,
    d: int,
    problem: str = "cmle",
    beta: float = 1.0,
    min_variance: float = 0.0,
) -> float:
    """Return a point's least cost, per unit of its weight, in a cluster of weight W.

    With q = S_W / (2 W d): cmle: psi(q) - ln(W / N); wkm: beta d q - ln(W / N); ucmle: psi(q).
    """
    q = nearest_sum(distances, sample_weight, weight) / (2 * weight * d)
    spread = beta * d * q if problem == "wkm" else _variance_cost(q, d, min_variance)
    return spread if problem == "ucmle" else spread - math.log(weight / math.fsum(sample_weight))


def lower_bound(
    x: ArrayLike,
    k: int,
    min_size: float = 2,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
    min_variance: float = 0.0,
) -> float:
    """Return LB = sum_x a_x min_W term_x(W) <= the optimum with every n_k >= min_size.

    A cluster C of weight W has variance sum_{x,y in C} a_x a_y |x - y|^2 / (2 d W^2), at least
    the weighted mean over C of q_W(x); psi is increasing and concave, so n_C psi(variance) is at
    least sum_{x in C} a_x psi(q_W(x)). W lies between min_size and N - (k - 1) min_size. Between
    two cumulative weights S_W = D W - c with c >= 0, and the term rises, then falls: its least
    value is at an end. So W need only run over the two limits and the cumulative weights.
    """
    _check_problem(problem)
    x = _points(x)
    a = _sample_weight(sample_weight, len(x))
    x, a = x[a > 0], a[a > 0]
    lowest, highest = min_size, math.fsum(a) - (k - 1) * min_size
    if lowest > highest * (1 + 1e-12):
        raise ValueError(f"no partition of weight {a.sum()} into {k} clusters of >= {min_size}")
    terms = []
    for distances in squared_distances(x, x):
        corners = np.cumsum(a[np.argsort(distances, kind="stable")])
        candidates = [lowest, highest, *corners[(corners > lowest) & (corners < highest)]]
        terms.append(
            min(
                lower_bound_term(distances, a, weight, x.shape[1], problem, beta, min_variance)
                for weight in candidates
            )
        )
    return _weighted_total(np.array(terms), a)


def variance_floor(x: ArrayLike, min_size: int) -> float:
    """Return s_min^2 = mean of the min_size smallest q(x), q(x) = S_{min_size - 1}(x) / (2 n d).

    Here n = min_size and S_j is the sum of the j smallest squared distances to the other points.
    No set of at least min_size points has a smaller variance.
    """
    x = _points(x)
    nearest = np.sort(squared_distances(x, x), axis=1)[:, :min_size]
    q = [math.fsum(row) / (2 * min_size * x.shape[1]) for row in nearest]
    return math.fsum(sorted(q)[:min_size]) / min_size


def min_distance_sq(x: ArrayLike) -> float:
    """Return min |x_i - x_j|^2 over i != j: 0 when a point is repeated, inf for one point."""
    distances = squared_distances(x, x)
    return float(distances[~np.eye(len(distances), dtype=bool)].min(initial=math.inf))


def diameter_sq(x: ArrayLike) -> float:
    """Return max |x_i - x_j|^2 over i != j: 0 for one point."""
    return float(squared_distances(x, x).max())


def gonzalez(x: ArrayLike, k: int, first: int = 0) -> tuple[list[int], float, Labels]:
    """Return (centre indices, radius, labels) of the farthest-first traversal from `first`.

    Each new centre is the point farthest from those before it; a point belongs to its nearest
    centre; the radius is the largest distance of a point to its centre. Ties go to the lowest
    index.
    """
    x = _points(x)
    centres = [first]
    while len(centres) < k:
        centres.append(int(squared_distances(x, x[centres]).min(axis=1).argmax()))
    distances = squared_distances(x, x[centres])
    return centres, math.sqrt(distances.min(axis=1).max()), distances.argmin(axis=1)


def gamma_bound(x: ArrayLike, k: int, first: int = 0) -> tuple[float, float]:
    """Return Gamma = ln(2 pi e s^2 / d) + (2 / d) ln k, s the Gonzalez radius, and N d/2 Gamma.

    The second bounds the CMLE cost of the Gonzalez partition: its variances are at most s^2 / d
    and its weights have an entropy of at most ln k. So it bounds the optimum for min_size only
    when every Gonzalez cluster has at least min_size points.
    """
    n, d = _points(x).shape
    _, radius, _ = gonzalez(x, k, first)
    gamma = _log(2 * math.pi * math.e * radius**2 / d) + 2 / d * math.log(k)
    return gamma, n * d / 2 * gamma


def y_range(x: ArrayLike, min_size: int) -> tuple[float, float]:
    """Return bounds of y = ln(2 pi e s^2) over all clusters of at least min_size points.

    Below: s^2 = `variance_floor`. Above: s^2 = min(diameter^2 / (2 (d + 1)), mean of the min_size
    largest |x - c|^2 / d), c the mean of x; the first is Jung's theorem.
    """
    x = _points(x)
    d = x.shape[1]
    centre, _ = _mean_and_scatter(x, np.ones(len(x)))
    largest = np.sort(((x - centre) ** 2).sum(axis=1))[-min_size:]
    ceiling = min(diameter_sq(x) / (2 * (d + 1)), math.fsum(largest) / (min_size * d))
    floor = variance_floor(x, min_size)
    return 1 + _log(2 * math.pi * floor), 1 + _log(2 * math.pi * ceiling)


def is_balanced(x: ArrayLike, labels: ArrayLike, k: int, f: float, g: float | None = None) -> bool:
    """Say whether n_k >= N / f, and with g also OPT(C_k, 1) >= (1/g) sum_j OPT(C_j, 1).

    OPT(C, 1) = |C| d/2 ln(2 pi e s_C^2) is the CMLE cost of C as one cluster.
    """
    x, labels = _points(x), np.asarray(labels)
    sizes = np.bincount(labels, minlength=k)
    if (sizes * f < len(x) * (1 - 1e-12)).any():
        return False
    if g is None:
        return True
    costs = [partition_cost(x[labels == j], np.zeros(sizes[j], int), 1) for j in range(k)]
    return all(cost >= math.fsum(costs) / g for cost in costs)


def well_defined_instance(rng: np.random.Generator, n: int, d: int, family: str) -> Floats:
    """Return n points with pairwise |x - y|^2 >= 4 d / pi.

    * plain: one Gaussian cloud;
    * outlier: the same with about a fifth of the points (at least one) thirty times farther out;
    * nested: every point at one of three scales (ratios 1 : 6 : 36) around one centre.

    Points are drawn one by one; each rejection widens the cloud by 2 %, so the loop ends.
    """
    if family not in ("plain", "outlier", "nested"):
        raise ValueError(f"unknown family {family!r}")
    if family == "plain":
        scales = np.ones(n)
    elif family == "outlier":
        scales = np.where(np.arange(n) < max(1, n // 5), 30.0, 1.0)
    else:
        scales = rng.choice([1.0, 6.0, 36.0], size=n)
    x = np.empty((0, d))
    for scale in scales:
        spread = 1.5 * scale
        point = spread * rng.normal(size=(1, d))
        while (squared_distances(point, x) < 4 * d / math.pi).any():
            spread *= 1.02
            point = spread * rng.normal(size=(1, d))
        x = np.concatenate([x, point])
    return rng.permutation(x)


def random_mixture_data(
    rng: np.random.Generator, n: int, d: int, k: int, separation: float
) -> tuple[Floats, Labels]:
    """Return n points of k spherical Gaussians, and their components.

    Standard deviations are uniform on [0.5, 1.5], centres are `separation` times standard
    normal, proportions are random. Every component has at least two points when n >= 2 k.
    """
    centres = separation * rng.normal(size=(k, d))
    deviations = rng.uniform(0.5, 1.5, size=k)
    free = rng.choice(k, size=max(n - 2 * k, 0), p=rng.dirichlet(np.full(k, 2.0)))
    labels = rng.permutation(np.concatenate([np.arange(2 * k) % k, free])[:n])
    return centres[labels] + deviations[labels, None] * rng.normal(size=(n, d)), labels


def product_costs(columns: list[Floats], masses: list[Floats] | None, total: float) -> Floats:
    """Return sum_n min_j columns[j][i_j, n] for every (i_1, ..., i_k), as [c_1, ..., c_k].

    The columns hold point costs that are weighted already. With masses, the unnormalised weights
    of the columns, total * ln(sum_j masses[j][i_j]) is added.
    """
    columns = [np.asarray(column, np.float64) for column in columns]
    costs = np.empty([len(column) for column in columns])
    for index in np.ndindex(costs.shape):
        chosen = [column[i] for column, i in zip(columns, index, strict=True)]
        costs[index] = np.min(chosen, axis=0).sum()
        if masses is not None:
            mass = math.fsum(float(mass[i]) for mass, i in zip(masses, index, strict=True))
            costs[index] += total * math.log(mass)
    return costs


def smallest_entries(costs: ArrayLike, m: int) -> tuple[list[float], list[tuple[int, ...]]]:
    """Return the m smallest entries of an array and their indices.

    By value, and equal values by index. All of them when there are fewer.
    """
    costs = np.asarray(costs)
    entries = sorted((float(costs[index]), index) for index in np.ndindex(costs.shape))[:m]
    return [value for value, _ in entries], [index for _, index in entries]


def block_means_costs(
    x: ArrayLike,
    weight: ArrayLike | None,
    means: ArrayLike,
    variances: ArrayLike,
    log_weights: ArrayLike,
    problem: str = "cmle",
    beta: float = 1.0,
) -> Floats:
    """Return what means [k, d] cost with every tuple of weights and of variances: [w, g, ..., g].

    log_weights is [w, k] and variances [g]; every component takes any of the variances.
    """
    means, variances = _points(means), np.asarray(variances, np.float64)
    weights = np.exp(np.asarray(log_weights, np.float64))
    costs = np.empty((len(weights), *[len(variances)] * len(means)))
    for row, *choice in np.ndindex(costs.shape):
        mixture = (weights[row], means, variances[choice])
        costs[(row, *choice)] = model_cost(x, *mixture, problem, beta, weight)
    return costs


def subset_means(x: ArrayLike, m: int) -> Floats:
    """Return the mean of every m-subset of the points, in lexicographic order."""
    x = _points(x)
    return np.array([x[list(s)].mean(axis=0) for s in itertools.combinations(range(len(x)), m)])


def phi(t: ArrayLike, e: ArrayLike) -> Floats:
    """Return t + (1 + e) exp(-t) - 1.

    In units of d/2 a point, what a cluster costs in excess when its variance is off by a factor
    exp(t) and its mean by |shift|^2 = e d s^2.
    """
    t, e = np.asarray(t, np.float64), np.asarray(e, np.float64)
    return t + (1 + e) * np.exp(-t) - 1


def min_entropy(k: int, f: float) -> float:
    """Return the least entropy of k weights of at least 1/f.

    Entropy is concave, so that it is least at a vertex: all weights but one are as small as can be.
    """
    vertex = [1 / f] * (k - 1) + [1 - (k - 1) / f]
    return -math.fsum(w * math.log(w) for w in vertex if w > 0)


def joint_excess(
    x: ArrayLike,
    labels: ArrayLike,
    k: int,
    means: ArrayLike,
    variances: ArrayLike,
    weights: ArrayLike,
) -> float:
    """Return L_X(theta, C) - L_X(C): what a mixture costs more than the partition's own."""
    own = partition_cost(x, labels, k)
    return joint_cost(x, labels, weights, means, variances) - own


def cover_excess(
    y: ArrayLike, values: ArrayLike, e: float, slope: float, constant: float
) -> Floats:
    """Return, for every y, the least phi(v - y; e) over the values v, less slope * y + constant.

    The values cover y if that is at most 0.
    """
    y = np.asarray(y, np.float64)
    costs = [phi(value - y, e) for value in np.asarray(values, np.float64)]
    return np.min(costs, axis=0) - (slope * y + constant)


def _bisect(function: Callable[[Floats], Floats], low: Floats, high: Floats) -> Floats:
    """Return where a function passes from <= 0 at low to > 0 at high, from below."""
    for _ in range(60):
        middle = (low + high) / 2
        inside = function(middle) <= 0
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return low


def greedy_cover(
    e: ArrayLike, y_min: float, y_max: float, slope: float, constant: float, most: int = 12
) -> Floats:
    """Return how many values cover y_min to y_max, for every mean error e; inf if over `most`.

    From y, the largest v with phi(v - y; e) <= slope y + constant; then the largest y that v
    serves, and on from there.
    """
    e = np.asarray(e, np.float64)
    y, count = np.full(e.shape, y_min), np.zeros(e.shape)
    possible = np.log1p(e) <= slope * y_min + constant
    for _ in range(most):
        going = possible & ((y < y_max) | (count == 0))
        if not going.any():
            break
        room = slope * y + constant
        least = y + np.log1p(e)
        v = _bisect(lambda v, y=y, room=room: phi(v - y, e) - room, least, least + room + 1)
        # From where the slope in y is 0, phi(v - y; e) - slope * y rises.
        flat = v - np.log((1 + e) / (1 + slope))
        end = flat + np.log(2 + slope * v + constant) + 2 + slope
        last = _bisect(lambda y, v=v: phi(v - y, e) - (slope * y + constant), flat, end)
        y, count = np.where(going, last, y), count + going
    return np.where(possible & (y >= y_max), count, np.inf)


def best_plan(
    k: int,
    d: int,
    eps: float | None,
    eta: float | None,
    delta: float,
    f: float,
    y_min: float,
    y_max: float,
    exponents: int = 1,
    fineness: int = 400,
) -> tuple[float, int, float, int]:
    """Return the fewest tuples over a dense grid of (m, e_m), and (m, e_m, grid values).

    The weights are uniform, or powers of a ratio with so many exponents. Tuples are
    R g^k |W|: R = ceil(ln delta / ln(1 - p)), p = k! (prod w)^m (1 - 1 / (m e_m)).
    """
    entropy = min_entropy(k, f)
    divergence = math.log(k) - entropy
    if exponents > 1:
        divergence = (math.log(f - k + 1) / exponents) ** 2 / 8
    weight_tuples = exponents**k - (exponents - 1) ** k
    credit = eta if eps is None else eps * entropy
    slope, constant = eps or 0.0, 2 / d * (credit - divergence) - 1e-6
    if slope * y_min + constant <= 0:
        return math.inf, 0, math.nan, 0
    limit = math.expm1(slope * y_min + constant)
    errors = limit * np.arange(1, fineness + 1) / fineness
    counts = greedy_cover(errors, y_min, y_max, slope, constant)
    product = (1 / f) ** (k - 1) * (1 - (k - 1) / f)
    best = (math.inf, 0, math.nan, 0)
    for m in range(1, math.ceil(1 / limit) + 40):
        for e, count in zip(errors, counts, strict=True):
            p = math.factorial(k) * product**m * (1 - 1 / (m * e))
            if p > 0 and math.isfinite(count):
                repetitions = 1 if p >= 1 else math.ceil(math.log(delta) / math.log1p(-p))
                total = repetitions * count**k * weight_tuples
                best = min(best, (float(total), m, float(e), int(count)))
    return best


def keep_largest(values: ArrayLike, count: int) -> NDArray[np.intp]:
    """Return the ascending positions of the `count` largest of every row [..., r].

    Those that a stable ascending sort puts last. NaN counts as +inf.
    """
    values = np.asarray(values)
    order = np.argsort(np.where(np.isnan(values), math.inf, values), axis=-1, kind="stable")
    return np.sort(order[..., values.shape[-1] - count :], axis=-1)


def halve(costs: ArrayLike) -> tuple[list[int], list[int]]:
    """Return the positions a pruning removes and those it keeps, both ascending.

    The ceil(r/2) cheapest go; of equal ones the lower positions go first.
    """
    costs = np.asarray(costs, np.float64)
    order = sorted(range(len(costs)), key=lambda place: (costs[place], place))
    cut = -(-len(costs) // 2)
    return sorted(order[:cut]), sorted(order[cut:])


@dataclass(frozen=True)
class AbsCandidate:
    """The means [k, d], at which level each was drawn, and which candidate mean was taken.

    `levels` and `choices` are shorter than k where the remaining set ran empty.
    """

    levels: tuple[int, ...]
    choices: tuple[int, ...]
    means: Floats


def abs_candidates(
    x: ArrayLike,
    bits: ArrayLike,
    slope: ArrayLike,
    constant: ArrayLike,
    chosen: ArrayLike,
    m: int,
    prunings: int,
) -> list[AbsCandidate]:
    """Return all candidates of Algorithm 2, repaired, for given draws.

    Args:
        x: The points [n, d].
        bits: Whole numbers below 2^32 [k, s]: draw i of step j is the point at position
            floor(bits[j, i] |R| / 2^32) of the remaining set R.
        slope: The cost of x under mean i is slope[i] |x - mean|^2 + constant[i].
        constant: As `slope`, for every mean but the last.
        chosen: Which draws go into every candidate mean [c, at least m].
        m: The number of draws that count, from the first.
        prunings: At most so many on the way to a candidate.
    """
    x = _points(x)
    k = len(bits)

    def approx_means(
        remaining: list[int], means: list[Floats], levels: list[int], choices: list[int], level: int
    ) -> list[AbsCandidate]:
        found = len(means)
        if found == k or not remaining:
            filled = means + [means[-1]] * (k - found)
            return [AbsCandidate(tuple(levels), tuple(choices), np.array(filled))]
        candidates = []
        draws = [remaining[int(b) * len(remaining) >> 32] for b in bits[found]]
        for choice, places in enumerate(chosen):
            mean = sum(x[draws[place]] for place in places[:m]) / m
            candidates += approx_means(
                remaining, [*means, mean], [*levels, level], [*choices, choice], level
            )
        if found >= 1 and level < prunings:
            costs = [
                min(
                    slope[i] * ((x[point] - mean) ** 2).sum() + constant[i]
                    for i, mean in enumerate(means)
                )
                for point in remaining
            ]
            kept = [remaining[place] for place in halve(costs)[1]]
            candidates += approx_means(kept, means, levels, choices, level + 1)
        return candidates

    return approx_means(list(range(len(x))), [], [], [], 0)


@dataclass(frozen=True)
class PruningRun:
    """The prunings between two samplings: the points removed in each, and those that remain.

    `wrong` is the cost of the removed points of unfound clusters, and the other costs are of
    points of found clusters: in R at the start, removed in the second, third, ... pruning, and
    still in R at the end.
    """

    chunks: list[list[int]]
    remaining: list[int]
    wrong_points: list[int]
    wrong: float
    start: float
    later: float
    rest: float


def wrongly_assigned(
    costs: ArrayLike,
    labels: ArrayLike,
    found: set[int],
    alpha: float,
    remaining: list[int] | None = None,
) -> PruningRun:
    """Prune until an unfound cluster holds a share alpha of what remains, or nothing does.

    Args:
        costs: Of every point under the found components [n].
        labels: The clusters of the points [n].
        found: The labels of the found clusters.
        alpha: The share at which the prunings stop.
        remaining: The set R at the start, ascending; all points by default.
    """
    costs, labels = np.asarray(costs, np.float64), np.asarray(labels)
    start = list(range(len(costs))) if remaining is None else remaining

    def is_found(points: list[int]) -> list[int]:
        return [point for point in points if labels[point] in found]

    def total(points: list[int]) -> float:
        return math.fsum(costs[point] for point in points)

    rest, chunks = start, []
    while rest:
        sizes = [sum(labels[rest] == label) for label in set(labels.tolist()) - found]
        if any(size >= alpha * len(rest) for size in sizes):
            break
        removed, kept = halve(costs[rest])
        chunks.append([rest[place] for place in removed])
        rest = [rest[place] for place in kept]
    wrong = [point for chunk in chunks for point in chunk if labels[point] not in found]
    return PruningRun(
        chunks,
        rest,
        wrong,
        total(wrong),
        total(is_found(start)),
        math.fsum(total(is_found(chunk)) for chunk in chunks[1:]),
        total(is_found(rest)),
    )


def all_wrongly_assigned(
    costs: ArrayLike,
    labels: ArrayLike,
    alphas: list[float],
    choose: Callable[[list[int]], int] = min,
) -> tuple[float, float]:
    """Find one cluster after the other, and return what wrong and right points cost.

    The first is any cluster of X; then follow prunings up to a share alphas[0], and so on. Wrong
    points are those removed before their cluster is found, at the cost they are removed at; the
    others cost what they do under their own component. If nothing remains, the rest is not found.

    Args:
        costs: Of every point under every component [n, k].
        labels: The clusters of the points [n].
        alphas: The share at the end of each run of prunings: k - 1 of them.
        choose: Which of the clusters to find that hold the share.
    """
    costs, labels = np.asarray(costs, np.float64), np.asarray(labels)
    n, k = costs.shape
    remaining, wrong_points, wrong = list(range(n)), [], 0.0
    found = {choose(sorted(set(labels.tolist())))}
    for alpha in alphas:
        now = costs[:, sorted(found)].min(axis=1)
        run = wrongly_assigned(now, labels, found, alpha, remaining)
        remaining, wrong = run.remaining, wrong + run.wrong
        wrong_points += run.wrong_points
        if not remaining:
            break
        found.add(
            choose(
                [
                    label
                    for label in sorted(set(range(k)) - found)
                    if sum(labels[remaining] == label) >= alpha * len(remaining)
                ]
            )
        )
    right = sorted(set(range(n)) - set(wrong_points))
    return wrong, math.fsum(costs[point, labels[point]] for point in right)


def free_energy(
    x: ArrayLike,
    weights: ArrayLike,
    means: ArrayLike,
    variances: ArrayLike,
    temperature: float,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return F = - t sum_x a_x ln sum_k exp(- cost_x(theta_k) / t), t the temperature."""
    costs = point_costs(x, weights, means, variances, problem, beta)
    a = _sample_weight(sample_weight, len(costs))
    energies = []
    for row in costs:
        least = row.min()
        partition = math.fsum(math.exp(-(cost - least) / temperature) for cost in row)
        energies.append(least - temperature * math.log(partition))
    return _weighted_total(np.array(energies), a)


def tempered_em_step(
    x: ArrayLike,
    weights: ArrayLike,
    means: ArrayLike,
    variances: ArrayLike,
    temperature: float,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
    min_variance: float = 0.0,
) -> Mixture:
    """Return (weights, means, variances) after one iteration of EM at a temperature.

    Shares r_xk in proportion to exp(- cost_x(theta_k) / t), then the M-step of `estimate` with
    point x in cluster k by the weight a_x r_xk. A cluster without any share has weight 0
    (ucmle: 1/k) and the mean and variance of the whole data.
    """
    x = _points(x)
    n, d = x.shape
    a = _sample_weight(sample_weight, n)
    costs = point_costs(x, weights, means, variances, problem, beta)
    shares = np.exp(-(costs - costs.min(axis=1, keepdims=True)) / temperature)
    shares /= shares.sum(axis=1, keepdims=True)
    k = shares.shape[1]
    new_weights, new_means, new_variances = np.empty(k), np.empty((k, d)), np.empty(k)
    for cluster in range(k):
        amounts = a * shares[:, cluster]
        size = math.fsum(amounts)
        mean, scatter = _mean_and_scatter(x, amounts if size > 0 else a)
        variance = max(scatter / (d * (size if size > 0 else math.fsum(a))), min_variance)
        new_weights[cluster] = 1 / k if problem == "ucmle" else size / math.fsum(a)
        new_means[cluster] = mean
        new_variances[cluster] = 1 / (2 * beta) if problem == "wkm" else variance
    return new_weights, new_means, new_variances
