r"""Ways to fulfil a claim: how many points to a mean, how fine the grids, and what that takes.

Both algorithms need grids of variances and weights and means that err little; they differ in how
often a draw of means is right. *Sampling* draws m points for each cluster from all points. *ABS*
draws them one cluster after the other, and prunes in between: see `Pruned`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxcmle.candidates import grids
from jaxcmle.candidates.claim import Instance, Target
from jaxcmle.candidates.grids import Allowance
from jaxcmle.candidates.pruning import walk_count
from jaxcmle.problem.types import UCMLE, WKM, Problem

__all__ = [
    "Choice",
    "Pruned",
    "VarianceGrid",
    "log_repetitions",
    "pruned_choices",
    "sampled_choices",
    "wrong_share",
]

VarianceGrid = Literal["reduced", "loglog"]

# The numbers of exponents that grids of weights may have.
EXPONENTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48)
# How many shares of a cluster in what remains are tried.
ALPHAS = 12


class _Weights(NamedTuple):
    """A grid of weights: how many exponents, and the nats per point it leaves for the rest.

    With an eps, `left` is what it leaves beside eps times the rest of the cost.
    """

    exponents: int
    left: float


class Choice(NamedTuple):
    """One way to fulfil the claim.

    Attributes:
        log_tuples: the logarithm of the number of candidates.
        m: points to a mean.
        e_m: the error allowed for the means, in variances.
        grid_values: values of the grid of variances.
        exponents: those of the grid of weights.
        allowance: what a cluster may cost in excess.
        beta: the probability that the means err more though the points were drawn right.
        log_success: the logarithm of the probability that a repetition succeeds.
    """

    log_tuples: float
    m: int
    e_m: float
    grid_values: int
    exponents: int
    allowance: Allowance
    beta: float
    log_success: float


# The logarithm of the probability that m points for every cluster are all drawn right.
LogRight = Callable[[int], float]


class Pruned(NamedTuple):
    r"""How the means of ABS are drawn.

    With u clusters yet to be found, one of them is drawn from when it holds a share of at least
    `alpha / u` of what remains; as long as none does, half of that is pruned. What is pruned
    wrongly costs at most `wrong` times what the rest costs.

    Attributes:
        alpha: the share, times u.
        prunings: how many there are at most: then so few points remain that any of a cluster's
            are share enough.
        wrong: see `wrong_share`.
    """

    alpha: float
    prunings: int
    wrong: float


# The largest alpha for which `wrong_share` is proved.
LARGEST_ALPHA = 0.25


def wrong_share(alpha: float) -> float:
    r"""Return what wrongly pruned points cost at most, as a multiple of what the others cost.

    Take a cost t, and the first pruning that removes a point wrongly, of cost t or more. Let r
    points remain before it and h = floor(r / 2) after it, v and v' of them of clusters not found
    yet; $v < \alpha r$, because none of the u clusters has a share of $\alpha / u$. All points of
    cost t or more that are ever removed wrongly are among the v. Of the v', only those can be that
    are not found by the next pruning, fewer than $\alpha h$. And all h cost t or more, so that
    h - v' points that are not wrong do. The ratio is at most
    $\frac{v - v' + \min(v', \alpha h)}{h - v'} \le \frac{v}{(1 - \alpha) h}$, for
    $v \le (1 - \alpha) h$, which $\alpha \le 1/4$ implies; and since v > 0 takes
    $r > 1 / \alpha$, it is less than $\frac{2 \alpha}{(1 - \alpha)^2}$. That is so for every t,
    hence for the sums. The paper has $8 \alpha K^2$ with shares of alpha.
    """
    return 2 * alpha / (1 - alpha) ** 2


def sampled_choices(instance: Instance, target: Target, problem: Problem) -> Iterator[Choice]:
    """Yield ways to fulfil the claim by drawing for all clusters at once, the best among them."""
    k, balance = instance.n_clusters, instance.balance
    # The least product of weights, times the number of orders.
    product = -(k - 1) * math.log(balance) + math.log(1 - (k - 1) / balance)
    return _choices(
        instance, target, problem, "reduced", lambda m: math.lgamma(k + 1) + m * product
    )


def pruned_choices(
    instance: Instance,
    target: Target,
    problem: Problem,
    grid: VarianceGrid = "reduced",
    alphas: Sequence[float] | None = None,
) -> Iterator[tuple[Choice, Pruned]]:
    r"""Yield ways to fulfil the claim by sampling and pruning, the best among them.

    All m points of the first draw are of one cluster with probability
    $\sum_k w_k^m \ge K^{1 - m}$, those of the others of the right one with the share to the power
    of m; as long as nothing is pruned, every cluster's is `1 / balance` or more.

    Args:
        instance: what is known of the points.
        target: what is to be claimed.
        problem: the problem.
        grid: which grid of variances.
        alphas: those to try, by default as many as are of use. `1 / balance` needs no prunings.
    """
    k, smallest = instance.n_clusters, 1 / instance.balance
    if alphas is None:
        steps = smallest * (LARGEST_ALPHA / smallest) ** (np.arange(1, ALPHAS + 1) / ALPHAS)
        alphas = [smallest, *(steps.tolist() if smallest < LARGEST_ALPHA and k > 1 else [])]
    cheapest = math.inf
    for alpha in alphas:
        pruned = _pruned(instance, alpha)
        log_shares = sum(math.log(max(alpha / u, smallest)) for u in range(1, k))
        inner = _inner_target(instance, target, problem, pruned.wrong)
        if inner is None:
            continue

        def log_right(m: int, log_shares: float = log_shares) -> float:
            return (1 - m) * math.log(k) + m * log_shares

        log_walks = math.log(walk_count(k, pruned.prunings))
        limit = cheapest - log_walks
        for choice in _choices(instance, inner, problem, grid, log_right, limit):
            choice = choice._replace(log_tuples=choice.log_tuples + log_walks)
            cheapest = min(cheapest, choice.log_tuples)
            yield choice, pruned


def _pruned(instance: Instance, alpha: float) -> Pruned:
    """Return how often to prune: until any point is share enough."""
    k, n = instance.n_clusters, instance.n
    # Shares that every cluster has from the start need no pruning.
    shares = [alpha / u for u in range(1, k) if alpha / u * instance.balance > 1 + 1e-9]
    if not shares:
        return Pruned(alpha, 0, 0.0)
    if alpha > LARGEST_ALPHA:
        raise ValueError(f"alpha must be at most {LARGEST_ALPHA:g}, got {alpha:g}")
    prunings = next(p for p in range(n.bit_length()) if (n >> p) * min(shares) <= 1)
    return Pruned(alpha, prunings, wrong_share(alpha))


def _inner_target(
    instance: Instance, target: Target, problem: Problem, wrong: float
) -> Target | None:
    """Return what is to be claimed of the points that are not pruned wrongly, if anything can.

    They may cost so much that `1 + wrong` times that is within the claim. In nats per point this
    takes something that the best partition costs at most.
    """
    if target.eps is not None:
        eps = (1 + target.eps) / (1 + wrong) - 1
        return target._replace(eps=eps) if eps > 0 else None
    assert target.eta is not None
    if wrong == 0:
        return target
    eta = (target.eta - wrong * instance.most_cost(problem)) / (1 + wrong)
    return target._replace(eta=eta) if eta > 0 else None


def _choices(
    instance: Instance,
    target: Target,
    problem: Problem,
    grid: VarianceGrid,
    log_right: LogRight,
    cheapest: float = math.inf,
) -> Iterator[Choice]:
    """Yield ways to fulfil the claim, as long as they may take less than the cheapest known."""
    finest, *weight_grids = _weight_grids(instance, target, problem)

    def with_weights(weights: _Weights) -> Iterator[Choice]:
        return _mean_choices(instance, target, problem, weights, grid, log_right)

    beside_weights = min((choice.log_tuples for choice in with_weights(finest)), default=math.inf)
    for weights in weight_grids:
        log_weights = math.log(grids.weight_tuples(instance.n_clusters, weights.exponents))
        if log_weights + beside_weights > cheapest:
            break
        for choice in with_weights(weights):
            choice = choice._replace(log_tuples=choice.log_tuples + log_weights)
            cheapest = min(cheapest, choice.log_tuples)
            yield choice


def _weight_grids(instance: Instance, target: Target, problem: Problem) -> list[_Weights]:
    """Return the grids of weights, the smallest first, and before them all one without error."""
    if isinstance(problem, UCMLE):
        return [_Weights(1, target.eta or 0.0)] * 2
    k, balance = instance.n_clusters, instance.balance
    entropy = grids.least_entropy(k, balance)
    # Uniform weights: the divergence is ln K less the entropy. A claim on a factor gives back eps
    # times the entropy.
    if target.eta is not None:
        credit, uniform = target.eta, target.eta - (math.log(k) - entropy)
    else:
        assert target.eps is not None
        credit, uniform = target.eps * entropy, (1 + target.eps) * entropy - math.log(k)
    weights = [_Weights(1, max(credit, uniform)), _Weights(1, uniform)]
    if k > 1 and balance - k > 1e-9:
        weights += [
            _Weights(a, credit - grids.geometric_divergence(k, balance, a)) for a in EXPONENTS
        ]
    return weights


def _mean_choices(
    instance: Instance,
    target: Target,
    problem: Problem,
    weights: _Weights,
    grid: VarianceGrid,
    log_right: LogRight,
) -> Iterator[Choice]:
    """Yield, for a grid of weights, how many points to a mean and how fine a grid of variances."""
    if isinstance(problem, WKM):
        allowance = Allowance(0.0, 0.0)
        errors = [_wkm_error(instance, target, weights)]
    else:
        allowance = Allowance(target.eps or 0.0, 2 / instance.d * weights.left)
        largest = {"reduced": grids.largest_mean_errors, "loglog": grids.loglog_mean_errors}[grid]
        errors = largest(instance.y_low, instance.y_high, allowance).tolist()
    k, n = instance.n_clusters, instance.n
    if not errors or max(errors) <= 0:
        return
    fewest = k * math.log(1 + next(i for i, error in enumerate(errors) if error > 0))
    cheapest, m = math.inf, math.floor(1 / max(errors))
    # More points to a mean only help the means: stop once the draws cost too much whatever else.
    while True:
        m += 1
        if target.delta == 0:
            if m > min(instance.min_size, n):
                return
            means = k * (math.lgamma(n + 1) - math.lgamma(m + 1) - math.lgamma(n - m + 1))
        else:
            means = log_repetitions(min(0.0, log_right(m)), target.delta)
        if means + fewest >= cheapest:
            return
        for grid_values, error in enumerate(errors, start=1):
            if m * error <= 1:
                continue
            if target.delta == 0:
                draws, used, beta, log_success = means, 1 / m, 0.0, 0.0
            else:
                used, beta = error, 1 / (m * error)
                log_success = min(0.0, log_right(m) + math.log1p(-beta))
                draws = log_repetitions(log_success, target.delta)
            choice = Choice(
                draws + k * math.log(grid_values),
                m,
                used,
                grid_values,
                weights.exponents,
                allowance,
                beta,
                log_success,
            )
            cheapest = min(cheapest, choice.log_tuples)
            yield choice


def _wkm_error(instance: Instance, target: Target, weights: _Weights) -> float:
    """Return how far means may err, in variances, if only means and weights do.

    The means' errors cost `spread * e`, where a partition costs `spread` beside its entropy; the
    claim leaves `eps * spread + left`. The worst spread of the range decides.
    """
    low, high = instance.spread_low, instance.spread_high
    left = weights.left - grids.MARGIN
    factor = target.eps or 0.0
    if left >= 0:
        return factor + (left / high if high > 0 else math.inf)
    return max(0.0, factor + left / low) if low > 0 else 0.0


def log_repetitions(log_success: float, delta: float) -> float:
    """Return the logarithm of the number of repetitions after which all failed with `delta`."""
    if log_success > -30:
        success = math.exp(log_success)
        if success >= 1:
            return 0.0
        return math.log(max(1, math.ceil(math.log(delta) / math.log1p(-success))))
    return math.log(-math.log(delta)) - log_success
