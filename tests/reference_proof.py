"""Naive float64 NumPy oracle for the tests of `jaxcmle.proof`; shares no code with the package.

A partition of the points into k clusters costs the sum of the costs of its clusters. For any
numbers alpha_x,

    min over partitions of the cost >= sum_x alpha_x - k P,
    P = max over sets C of admissible weight of alpha(C) - cost(C).

P is the *pricing maximum*, and also the largest value over all means and precisions u = 1/s^2 of
the *price* F(mean, u), the best set's alpha less what its points cost under that one component.

The arguments are those of `reference`: `problem`, `beta` ("wkm" only), `sample_weight` (here
a_x > 0, all ones by default). A point's alpha is for the whole point, whatever its weight. W is
the weight of a set, N that of all points, and W is admissible if
min_size <= W <= N - (k - 1) min_size.
"""

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from reference import Floats, _check_problem, _points

# Forgives rounding in a sum of weights that should equal a limit.
ROUNDING = 1e-12


def _sample_weight(sample_weight: ArrayLike | None, n: int) -> Floats:
    """Return the point weights as a float64 array [n]; None means ones."""
    if sample_weight is None:
        return np.ones(n)
    sample_weight = np.asarray(sample_weight, dtype=np.float64)
    if sample_weight.shape != (n,) or (sample_weight <= 0).any():
        raise ValueError(f"expected {n} point weights > 0")
    return sample_weight


def _limits(total: float, k: int, min_size: float) -> tuple[float, float]:
    """Return the least and the largest admissible weight of a set."""
    least, most = min_size, total - (k - 1) * min_size
    if least > most * (1 + ROUNDING):
        raise ValueError(f"weight {total} does not allow {k} clusters of >= {min_size}")
    return least, most


def _admissible(weight: Floats, least: float, most: float) -> NDArray[np.bool_]:
    slack = ROUNDING * most
    return (weight > 0) & (weight >= least - slack) & (weight <= most + slack)


def _size_gain(weight: Floats, total: float, problem: str) -> Floats:
    """Return W ln(W / N), the part of minus the cost that depends on W only; ucmle has none."""
    if problem == "ucmle":
        return np.zeros_like(weight)
    return weight * np.log(np.where(weight > 0, weight, 1.0) / total)


def cluster_cost(
    x: ArrayLike,
    weight: ArrayLike,
    total: float,
    problem: str = "cmle",
    beta: float = 1.0,
    min_variance: float = 0.0,
) -> float:
    """Return the cost of the set of points x [n, d] with weights [n], out of a total weight N.

    * cmle: W d/2 (ln(2 pi s^2) + v / s^2) - W ln(W / N), v = scatter / (W d),
      s^2 = max(v, min_variance); -inf where s^2 = 0
    * wkm: beta scatter - W ln(W / N)
    * ucmle: as cmle without - W ln(W / N)
    """
    _check_problem(problem)
    x, a = _points(x), np.asarray(weight, dtype=np.float64)
    d = x.shape[1]
    w = math.fsum(a)
    # Measured from one of the points, so that identical points have a scatter of exactly 0.
    offset = x - x[0]
    mean = (a[:, None] * offset).sum(axis=0) / w
    scatter = math.fsum(a * ((offset - mean) ** 2).sum(axis=1))
    size_cost = 0.0 if problem == "ucmle" else -w * math.log(w / total)
    if problem == "wkm":
        return beta * scatter + size_cost
    variance = scatter / (w * d)
    floored = max(variance, min_variance)
    if floored == 0:
        return -math.inf
    return w * d / 2 * (math.log(2 * math.pi * floored) + variance / floored) + size_cost


def pricing_maximum(
    x: ArrayLike,
    alpha: ArrayLike,
    k: int,
    min_size: float,
    problem: str = "cmle",
    beta: float = 1.0,
    min_variance: float = 0.0,
    sample_weight: ArrayLike | None = None,
) -> tuple[float, NDArray[np.int64]]:
    """Return max alpha(C) - cost(C) over all sets C of admissible weight, and a maximiser.

    By enumeration: at most 12 points. The set is given by the ascending indices of its points.
    """
    x, alpha = _points(x), np.asarray(alpha, dtype=np.float64)
    n = len(x)
    if n > 12:
        raise ValueError(f"enumeration is for at most 12 points, got {n}")
    a = _sample_weight(sample_weight, n)
    total = math.fsum(a)
    least, most = _limits(total, k, min_size)
    best, best_set = -math.inf, None
    for size in range(1, n + 1):
        for members in map(list, itertools.combinations(range(n), size)):
            if not _admissible(np.array(math.fsum(a[members])), least, most):
                continue
            cost = cluster_cost(x[members], a[members], total, problem, beta, min_variance)
            value = math.fsum(alpha[members]) - cost
            if best_set is None or value > best:
                best, best_set = value, members
    if best_set is None:
        raise ValueError(f"no set has a weight between {least} and {most}")
    return best, np.array(best_set, dtype=np.int64)


def dual_bound(
    x: ArrayLike,
    alpha: ArrayLike,
    k: int,
    min_size: float,
    problem: str = "cmle",
    beta: float = 1.0,
    min_variance: float = 0.0,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return sum_x alpha_x - k P: no partition with every cluster >= min_size costs less."""
    largest, _ = pricing_maximum(x, alpha, k, min_size, problem, beta, min_variance, sample_weight)
    return math.fsum(np.asarray(alpha, dtype=np.float64)) - k * largest


def price(
    x: ArrayLike,
    alpha: ArrayLike,
    mean: ArrayLike,
    precision: ArrayLike,
    k: int,
    min_size: float,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
) -> Floats:
    """Return F(mean, u) [m] for a batch of means [m, d] and precisions u = 1/s^2 [m].

    Put the points in the order of their value per unit weight,
    alpha_x / a_x - u |x - mean|^2 / 2 + d/2 ln(u / 2 pi). F is the maximum, over the sets of the
    first 1, 2, ... of them whose weight W is admissible, of the sum of values + W ln(W / N).

    With unit weights no set does better. With other weights one near the limits of W may: then F
    is a lower estimate, and -inf if no prefix is admissible. It is never above the pricing
    maximum, as long as u <= 1 / min_variance.

    wkm: u = 2 beta whatever `precision` says, and no term in ln u. ucmle: no W ln(W / N).
    """
    _check_problem(problem)
    x, alpha, mean = _points(x), np.asarray(alpha, dtype=np.float64), _points(mean)
    n, d = x.shape
    a = _sample_weight(sample_weight, n)
    total = math.fsum(a)
    least, most = _limits(total, k, min_size)
    if problem == "wkm":
        u, gain = np.full(len(mean), 2 * beta), np.zeros(len(mean))
    else:
        u = np.broadcast_to(np.asarray(precision, dtype=np.float64), len(mean))
        gain = d / 2 * np.log(u / (2 * np.pi))

    distances = np.zeros((len(mean), n))
    for feature in range(d):
        distances += (x[:, feature] - mean[:, feature, None]) ** 2
    rates = alpha / a - u[:, None] * distances / 2 + gain[:, None]
    order = np.argsort(-rates, axis=1, kind="stable")
    values = np.cumsum(np.take_along_axis(rates * a, order, axis=1), axis=1)
    weights = np.cumsum(a[order], axis=1)
    totals = values + _size_gain(weights, total, problem)
    return np.where(_admissible(weights, least, most), totals, -math.inf).max(axis=1)


def _best_fractional_set(
    rates: Floats, a: Floats, least: float, most: float, problem: str
) -> float:
    """Return the maximum of sum_x f_x a_x rate_x + W ln(W / N), 0 <= f_x <= 1, W = sum_x f_x a_x.

    Points are taken in the order of their rates, the last perhaps in part. The sum is linear in W
    between two whole prefixes and W ln(W / N) is convex: the maximum is at a whole prefix or at a
    limit of W. With unit weights and whole limits that is a set.
    """
    total = math.fsum(a)
    order = np.argsort(-rates, kind="stable")
    weights = np.concatenate([[0.0], np.cumsum(a[order])])
    values = np.concatenate([[0.0], np.cumsum((rates * a)[order])])
    inside = (weights >= least) & (weights <= most)
    ends = np.array([least, most])
    w = np.concatenate([weights[inside], ends])
    value = np.concatenate([values[inside], np.interp(ends, weights, values)])
    return float((value + _size_gain(w, total, problem)).max())


def coarse_bound(
    x: ArrayLike,
    alpha: ArrayLike,
    centre: ArrayLike,
    half_widths: ArrayLike,
    u1: float,
    u2: float,
    k: int,
    min_size: float,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return an upper bound on F over a cell: every point takes its own best (mean, u) in it.

    The cell is the box with this centre [d] and these half-widths [d] times [u1, u2]. At a squared
    distance D from the box the best u is d / D, or the nearest to it in [u1, u2]. With weights,
    sets may hold one point in part. wkm ignores u1 and u2.
    """
    _check_problem(problem)
    x, alpha = _points(x), np.asarray(alpha, dtype=np.float64)
    n, d = x.shape
    a = _sample_weight(sample_weight, n)
    rates = np.empty(n)
    for i in range(n):
        outside = np.maximum(np.abs(x[i] - np.asarray(centre)) - np.asarray(half_widths), 0.0)
        distance = float((outside**2).sum())
        if problem == "wkm":
            gain = -beta * distance
        else:
            u = u2 if distance * u2 <= d else max(u1, d / distance)
            gain = d / 2 * math.log(u / (2 * math.pi)) - u * distance / 2
        rates[i] = alpha[i] / a[i] + gain
    return _best_fractional_set(rates, a, *_limits(math.fsum(a), k, min_size), problem)


def vertex_bound(
    x: ArrayLike,
    alpha: ArrayLike,
    centre: ArrayLike,
    half_widths: ArrayLike,
    u1: float,
    u2: float,
    k: int,
    min_size: float,
    problem: str = "cmle",
    beta: float = 1.0,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return an upper bound on F over a cell from the 2^(d+1) vertices; cells as `coarse_bound`.

    The largest price at a vertex (v, u_i), every unit of weight being worth more by

        eps_i = d/2 (u_i / u0 - 1 - ln(u_i / u0)) + u_i |h|^2 / 2, u0 = (u2 - u1) / ln(u2 / u1),

    the divergence of N(centre, 1/u0) from N(v, 1/u_i). Prices are convex in (u, u mean) once the
    log-partition function is replaced by its tangent at the centre, and eps is what that adds.
    wkm has u fixed at 2 beta: 2^d vertices and eps = beta |h|^2.
    """
    _check_problem(problem)
    x, alpha = _points(x), np.asarray(alpha, dtype=np.float64)
    n, d = x.shape
    a = _sample_weight(sample_weight, n)
    centre, h = np.asarray(centre, dtype=np.float64), np.asarray(half_widths, dtype=np.float64)
    limits = _limits(math.fsum(a), k, min_size)
    if problem == "wkm":
        u1 = u2 = 2 * beta
    u0 = u1 if u1 == u2 else (u2 - u1) / math.log(u2 / u1)
    bounds = []
    for u in {u1, u2}:
        eps = d / 2 * (u / u0 - 1 - math.log(u / u0)) + u * float((h**2).sum()) / 2
        gain = 0.0 if problem == "wkm" else d / 2 * math.log(u / (2 * math.pi))
        for signs in itertools.product((-1, 1), repeat=d):
            vertex = centre + np.array(signs) * h
            distances = ((x - vertex) ** 2).sum(axis=1)
            rates = alpha / a - u * distances / 2 + gain + eps
            bounds.append(_best_fractional_set(rates, a, *limits, problem))
    return max(bounds)
