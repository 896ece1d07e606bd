r"""Grids of weights and variances that hold a good value for every balanced partition.

With $t = \ln(\tilde\sigma^2 / \sigma^2)$ and $e = |\tilde\mu - \mu|^2 / (d \sigma^2)$ for every
cluster, and weights that add up to 1, the model costs more than the partition itself by

$$N \left[ \tfrac{d}{2} \sum_k w_k\, \varphi(t_k; e_k) + KL(w \| \tilde w) \right], \qquad
\varphi(t; e) = t + (1 + e)\, e^{-t} - 1,$$

so errors of variances and weights are of second order, and grids that err to both sides are far
smaller than the paper's, which err to one. With $y = \ln(2 \pi e \sigma^2)$, a grid of values v
*covers* y if some v has $\varphi(v - y; e) \le slope \cdot y + constant$: what a cluster may cost
in excess.

All of this is arithmetic on a few numbers before anything runs: float64 on the host.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Allowance",
    "VarianceCover",
    "cover_variances",
    "excess",
    "geometric_divergence",
    "geometric_weights",
    "largest_mean_errors",
    "least_entropy",
    "loglog_cover",
    "loglog_mean_errors",
    "loglog_values",
    "printed_shares",
    "printed_sizes",
    "printed_variances",
    "weight_ratio",
    "weight_tuples",
]

Floats = NDArray[np.float64]

# Kept between what is allowed and what is used, for rounding.
MARGIN = 1e-6
# More values than this are never worth it.
MAX_VALUES = 64
# No two values of y are farther apart: variances are floats.
LONGEST_STEP = 700.0


class Allowance(NamedTuple):
    """What a cluster with `y` may cost in excess: `slope * y + constant`, in units of d/2 nats."""

    slope: float
    constant: float


class VarianceCover(NamedTuple):
    """Values of `v = ln(2 pi e variance)`, and where the range of y that each has to serve starts.

    Attributes:
        values: ascending.
        starts: `values[i]` serves y from `starts[i]` to `starts[i + 1]`.
    """

    values: Floats
    starts: Floats


def excess(t: ArrayLike, e: ArrayLike) -> Any:
    r"""Return $\varphi(t; e)$: what errors of the variance and of the mean cost together."""
    t, e = np.asarray(t, np.float64), np.asarray(e, np.float64)
    return t + (1 + e) * np.exp(-t) - 1


def cover_variances(
    low: float, high: float, mean_error: float, allowance: Allowance
) -> VarianceCover:
    """Return the fewest values that cover every y from low to high.

    Greedy: from y on, the largest value that still serves y; then from the last y it serves. No
    value can be left out.

    Args:
        low: the smallest y; something must be allowed there for the mean's error and more.
        high: the largest y.
        mean_error: e, what the mean may be off by.
        allowance: what a cluster may cost in excess.
    """
    values: list[float] = []
    starts: list[float] = []
    start, error = np.array([low]), np.array([mean_error])
    allowance = Allowance(allowance.slope, allowance.constant - MARGIN)
    if math.log1p(mean_error) > allowance.slope * low + allowance.constant:
        raise ValueError(
            f"no variance makes up for a mean error of {mean_error:g} at y = {low:g}: the "
            f"allowance there is {allowance.slope * low + allowance.constant:g}"
        )
    while not values or start[0] < high:
        if len(values) == 4 * MAX_VALUES:
            raise ValueError("the grid of variances has too many values")
        value, end = _serve(start, error, allowance)
        values.append(float(value[0]))
        starts.append(float(start[0]))
        start = end
    # The last value need not reach beyond the range.
    values[-1] = min(values[-1], max(high, starts[-1]) + math.log1p(mean_error))
    return VarianceCover(np.array(values), np.array(starts))


def largest_mean_errors(low: float, high: float, allowance: Allowance) -> Floats:
    """Return, for 1, 2, ... values, the largest mean error with which they cover low to high.

    Ascending; 0 where so few values cannot. More values than the answer is long gain nothing that
    matters: the last is within a percent of the most that any number of values allows.
    """
    allowance_low = allowance.slope * low + allowance.constant - MARGIN
    if not allowance_low > 0:
        return np.zeros(0)
    # Where much is allowed, more than this is never needed, and would overflow.
    limit = math.expm1(min(allowance_low, 12.0)) * (1 - 1e-9)

    narrowed = Allowance(allowance.slope, allowance.constant - MARGIN)
    if allowance.slope == 0:
        return _equal_steps(high - low, limit, narrowed)

    def values_needed(errors: Floats) -> NDArray[np.int64]:
        start, needed = np.full(errors.shape, low), np.zeros(errors.shape, np.int64)
        for _ in range(MAX_VALUES):
            going = (start < high) | (needed == 0)
            if not going.any():
                break
            needed += going
            start = np.where(going, _serve(start, errors, narrowed)[1], start)
        return np.where(start < high, MAX_VALUES + 1, needed)

    # The number needed rises with the error: close in on every step of it.
    fine = 64
    errors = limit * np.linspace(0, 1, 8 * fine + 1)
    needed = values_needed(errors)
    lower = np.array([_last(errors, needed, g) for g in range(1, MAX_VALUES + 1)])
    lower = lower[: _enough(lower, limit)]
    counts = np.arange(1, len(lower) + 1)
    width = errors[1]
    for _ in range(4):
        candidates = np.minimum(lower[:, None] + width * np.linspace(0, 1, fine + 1), limit)
        fits = values_needed(candidates.ravel()).reshape(candidates.shape) <= counts[:, None]
        lower = np.where(fits, candidates, lower[:, None]).max(axis=1)
        width /= fine
    return np.where(counts >= needed[0], lower, 0.0)


def loglog_values(high: float, count: int) -> Floats:
    r"""Return `count` values of $y = \ln(2 \pi e \sigma^2)$ in equal steps of ln y from 1 to high.

    The paper's grid, repaired: its base, $1 / (2 \pi)$, is below 1, so that powers of it shrink.
    Every y from 1 to high has a value of at least y, and of at most `high ** (1 / count)` times it.
    """
    return max(high, 1.0) ** (np.arange(1, count + 1) / count)


def loglog_cover(low: float, high: float, count: int) -> VarianceCover:
    """Return `loglog_values` with what each has to serve, without those below `low`."""
    values = loglog_values(high, count)
    starts = np.concatenate([[1.0], values[:-1]])
    used = values >= low
    return VarianceCover(values[used], np.maximum(starts[used], low))


def loglog_mean_errors(low: float, high: float, allowance: Allowance) -> Floats:
    r"""Return, for 1, 2, ... of the `loglog_values`, the largest mean error they leave room for.

    As `largest_mean_errors`. For the value v of y, $t = v - y$ is anything from 0 to $r y$, r the
    ratio less 1, and $\varphi$ is convex in t: at 0 it is e, and at $r y$ it is within the
    allowance for $e \le h(y) = e^{r y} (1 + slope \cdot y + constant - r y) - 1$. The sign of the
    derivative of h changes once at most, so that h is smallest at the ends or there.
    """
    slope, constant = allowance.slope, allowance.constant - MARGIN
    low = max(low, 1.0)
    at_low = slope * low + constant
    if not at_low > 0:
        return np.zeros(0)
    limit = math.expm1(min(at_low, 12.0)) * (1 - 1e-9)
    errors = []
    for count in range(1, MAX_VALUES + 1):
        ratio = max(high, 1.0) ** (1 / count) - 1
        ends = [low, max(high, low)]
        if slope != ratio and ratio > 0:
            flat = -(slope / ratio + constant) / (slope - ratio)
            # No step is longer than the range: from where it would be, h only rises.
            inner = (flat, LONGEST_STEP / ratio)
            ends += [y for y in inner if low < y < high]
        y = np.array(ends)
        step = np.minimum(ratio * y, LONGEST_STEP)
        room = (np.exp(step) * (1 + slope * y + constant - step) - 1).min()
        errors.append(max(0.0, min(room, at_low, limit)))
    return np.array(errors)[: _enough(np.array(errors), min(at_low, limit))]


def _equal_steps(length: float, limit: float, allowance: Allowance) -> Floats:
    """Return the largest mean errors for an allowance that is the same everywhere.

    Then every value serves a range of the same width.
    """
    counts = np.arange(1, MAX_VALUES + 1)
    low, high = np.zeros(MAX_VALUES), np.full(MAX_VALUES, limit)
    origin = np.zeros(MAX_VALUES)

    def fits(errors: Floats) -> NDArray[np.bool_]:
        return counts * _serve(origin, errors, allowance)[1] >= length * (1 + 1e-9)

    possible = fits(low)
    for _ in range(50):
        middle = (low + high) / 2
        fit = fits(middle)
        low, high = np.where(fit, middle, low), np.where(fit, high, middle)
    low = np.where(possible, low, 0.0)
    return low[: _enough(low, limit)]


def _enough(errors: Floats, limit: float) -> int:
    """Return how many values it takes to come within a percent of what is possible at all."""
    near = errors >= 0.99 * limit
    return int(np.argmax(near)) + 1 if near.any() else len(errors)


def _last(errors: Floats, needed: NDArray[np.int64], count: int) -> float:
    return float(errors[needed <= count].max(initial=0.0))


def _serve(start: Floats, error: Floats, allowance: Allowance) -> tuple[Floats, Floats]:
    """Return the largest value that serves y = start, and the largest y that it serves.

    Both are the right-hand roots of convex functions: Newton from the right goes straight there.
    Stopping early errs to the right by less than the margin, which is what it is for.
    """
    slope, constant = allowance
    room = slope * start + constant
    t = np.maximum(room + 1, np.log1p(error))
    for _ in range(60):
        decay = (1 + error) * np.exp(-t)
        step = (t + decay - 1 - room) / np.maximum(1 - decay, 1e-12)
        t = np.where(step > 0, t - step, t)
        if not (step > 1e-12).any():
            break
    t = np.maximum(t, np.log1p(error))
    value = start + t
    # With z = y - value: (1 + e) e^z - (1 + slope) z <= 1 + slope * value + constant.
    room = 1 + slope * value + constant
    z = np.log((1 + slope) * (1 + np.maximum(room, 0)) / (1 + error)) + 2
    for _ in range(60):
        growth = (1 + error) * np.exp(z)
        step = (growth - (1 + slope) * z - room) / np.maximum(growth - (1 + slope), 1e-12)
        z = np.where(step > 0, z - step, z)
        if not (step > 1e-12).any():
            break
    return value, np.maximum(value + z, start)


def least_entropy(n_clusters: int, balance: float) -> float:
    """Return the least entropy of the weights of an f-balanced partition.

    It is that of K - 1 clusters of the smallest size and one of the rest.
    """
    small, large = 1 / balance, 1 - (n_clusters - 1) / balance
    total = -(n_clusters - 1) * small * math.log(small)
    return total - large * math.log(large) if large > 0 else total


def geometric_divergence(n_clusters: int, balance: float, exponents: int) -> float:
    r"""Return the most that `geometric_weights` are off by, $KL(w \| \tilde w) \le (\ln \rho)^2/8$.

    (Hoeffding's lemma: the logarithms of `w / rho^a` lie within $\ln \rho$ of each other.)
    """
    return (math.log(balance - n_clusters + 1) / exponents) ** 2 / 8


def weight_ratio(n_clusters: int, balance: float, exponents: int) -> float:
    """Return the ratio of `geometric_weights`; 1 for uniform weights, a single exponent."""
    return (balance - n_clusters + 1) ** (1 / exponents) if exponents > 1 else 1.0


def geometric_weights(n_clusters: int, balance: float, exponents: int) -> Floats:
    """Return tuples of weights in proportion to `ratio ** a`, a from 0 to `exponents - 1`.

    The largest weight of an f-balanced partition is at most `f - K + 1` times the smallest, so
    `ratio ** exponents` is that. Tuples that differ by a common shift of the exponents are the
    same: `A^K - (A - 1)^K` are left.
    """
    ratio = weight_ratio(n_clusters, balance, exponents)
    powers = np.array(
        [t for t in itertools.product(range(exponents), repeat=n_clusters) if min(t) == 0]
    )
    weights = ratio ** powers.astype(np.float64)
    return weights / weights.sum(axis=1, keepdims=True)


def weight_tuples(n_clusters: int, exponents: int) -> int:
    """Return how many tuples `geometric_weights` gives."""
    return exponents**n_clusters - (exponents - 1) ** n_clusters


def printed_shares(balance: float, eps: float) -> Floats:
    """Return the paper's cluster sizes as shares: `(1 + eps)^i / f` up to the first of at least 1.

    Any size of an f-balanced partition has one that is at least as large, by at most `1 + eps`.
    """
    count = max(1, math.ceil(math.log(balance) / math.log1p(eps) - 1e-9))
    return (1 + eps) ** np.arange(1.0, count + 1) / balance


def printed_sizes(n_clusters: int, balance: float, eps: float) -> Floats:
    """Return the paper's tuples of cluster sizes as weights: normalised, and only the possible.

    The right sizes of `printed_shares` add up to at least 1 and at most `1 + eps`: only such
    tuples are kept.
    """
    shares = printed_shares(balance, eps)
    grid = np.stack(np.meshgrid(*[shares] * n_clusters, indexing="ij"), axis=-1)
    tuples = grid.reshape(-1, n_clusters)
    total = tuples.sum(axis=1)
    kept = (total >= 1 - 1e-9) & (total <= (1 + eps) * (1 + 1e-9))
    return tuples[kept] / total[kept, None]


def printed_variances(weights: ArrayLike, gamma: float, cost_balance: float, eps: float) -> Floats:
    r"""Return the paper's values of $y = \ln(2 \pi e \sigma^2)$ for clusters of these weights.

    A cluster's share of the cost is estimated as $\hat N = (1 + \epsilon)^i \frac{N d}{2}$ with one
    exponent, from `-ceil(log g)` to `ceil(log gamma)`, and its variance is
    $\exp(\frac{2 (1 + \epsilon) \hat N}{n_k d} - \ln 2 \pi - 1)$.

    Args:
        weights: `n_k / N` of the paper's sizes as they are, not normalised; of any shape.
        gamma: the optimum is at most `N d / 2 * gamma`.
        cost_balance: g; a cluster costs at least `1 / g` of the sum.
        eps: the ratio of the grid, less 1.

    Returns:
        The shape of `weights` and one more axis.
    """
    step = math.log1p(eps)
    exponents = np.arange(
        -math.ceil(math.log(cost_balance) / step), math.ceil(math.log(gamma) / step) + 1
    )
    return (1 + eps) ** (exponents + 1.0) / np.asarray(weights)[..., None]
