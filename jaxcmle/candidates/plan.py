"""How many candidates a guarantee takes, and how much memory and time, before anything runs."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax

from jaxcmle.candidates import grids, scoring
from jaxcmle.candidates.claim import (
    Instance,
    Scale,
    Target,
    imagine,
    measure,
    to_scale,
    to_target,
)
from jaxcmle.candidates.grids import Allowance
from jaxcmle.problem import inputs
from jaxcmle.problem.pairs import MAX_POINTS
from jaxcmle.problem.types import CMLE, UCMLE, WKM, Problem

__all__ = ["Algorithm", "Plan", "make_plan", "plan"]

Algorithm = Literal["sampling", "paper"]

# The numbers of exponents that grids of weights may have.
EXPONENTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What a guarantee takes. `print` it, or take `to_dict()`.

    Attributes:
        algorithm: `"sampling"`, or `"paper"` for the counts of the paper's own constants.
        problem: `"CMLE"`, `"WKM"` or `"UCMLE"`.
        n: points.
        d: features.
        n_clusters: k.
        eps: the factor that is claimed, less 1, or None.
        eta: the nats per point that are claimed, or None.
        delta: the probability that the claim fails; 0 for a deterministic one.
        balance: f, as the smallest size has it.
        min_size: the smallest weight of a cluster.
        scale: the scale that eps holds on; None for WKM.
        factor: multiply x by this to be on the scale.
        y_min: the smallest `y = ln(2 pi e variance)` on the scale.
        y_max: the largest.
        m: points per mean.
        e_m: the error allowed for the means, in variances.
        beta: the probability that the means err more though the points were drawn right.
        p: the probability that a repetition succeeds.
        repetitions: how often means are drawn; for a deterministic claim, 1.
        mean_tuples: how many tuples of means a repetition has.
        variance_values: the grid of `ln(2 pi e variance)` on the scale.
        variance_starts: where the range of y that each value has to serve starts.
        grid_values: how many values the grid of variances has.
        estimates: how often the grid of variances is tried; more than once only in the paper.
        weight_exponents: the weights are powers of a ratio, with so many exponents; 1 if uniform.
        weight_tuples: how many tuples of weights there are.
        tuples: candidates in all.
        log10_tuples: the same as a power of ten.
        point_evaluations: candidates times points.
        peak_bytes: memory that scoring takes beside the points.
    """

    algorithm: Algorithm
    problem: str
    n: int
    d: int
    n_clusters: int
    eps: float | None
    eta: float | None
    delta: float
    balance: float
    min_size: float
    scale: Scale | None
    factor: float
    y_min: float
    y_max: float
    m: int
    e_m: float
    beta: float
    p: float
    repetitions: int
    mean_tuples: int
    variance_values: tuple[float, ...]
    variance_starts: tuple[float, ...]
    grid_values: int
    estimates: int = 1
    weight_exponents: int
    weight_tuples: int
    tuples: int
    log10_tuples: float
    point_evaluations: int
    peak_bytes: int

    @property
    def seconds(self) -> float | None:
        """About how long scoring takes on this device, from a short calibration; None if absurd.

        The calibration runs the same program for a moment, once for each kind of plan. Pruning,
        which depends on the data, is not counted on.
        """
        if self.algorithm == "paper" or self.log10_tuples > 30:
            return None
        if self.delta == 0:
            rate = scoring.product_rate()
        else:
            rate = scoring.repetition_rate(self.n_clusters, self.grid_values, self.d)
        return float(self.point_evaluations) / rate

    @property
    def claim(self) -> str:
        """The guarantee in words."""
        if self.eps is not None:
            scale = "" if self.scale is None else f" on the {self.scale} scale"
            what = f"cost at most {1 + self.eps:g} times the best balanced one{scale}"
        else:
            what = f"cost at most {self.eta:g} nats per point above the best balanced one"
        if self.delta == 0:
            return f"{what}, for certain"
        return f"{what}, with probability {1 - self.delta:g}"

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON. Counts that fit no float are None; see `log10_tuples`."""
        values = dataclasses.asdict(self)
        for name in ("tuples", "point_evaluations", "repetitions", "mean_tuples"):
            count = values[name]
            if abs(count) >= 2**53:
                values[name] = float(count) if math.log10(count) < 300 else None
        for name in ("p", "y_min", "y_max", "e_m"):
            if not math.isfinite(values[name]):
                values[name] = None
        return values | {"seconds": self.seconds}

    def __repr__(self) -> str:
        """Return a few of the numbers: some of the others may have thousands of digits."""
        claim = f"eps={self.eps:g}" if self.eps is not None else f"eta={self.eta:g}"
        return (
            f"Plan(algorithm={self.algorithm!r}, n_clusters={self.n_clusters}, {claim}, "
            f"delta={self.delta:g}, log10_tuples={self.log10_tuples:.2f})"
        )

    def __str__(self) -> str:
        """Return the plan in a few lines."""
        n, k = self.n, self.n_clusters
        lines = [
            f"plan: {self.algorithm}, {self.problem}, {n:,} points, {self.d} features, {k} "
            f"clusters of at least {self.min_size:g}",
            f"  claim       {self.claim}",
        ]
        if self.scale is not None:
            lines.append(
                f"  y range     {self.y_min:.3f} to {self.y_max:.3f}, y = ln(2 pi e variance), on "
                f"the {self.scale} scale (x times {self.factor:.4g})"
            )
        if self.algorithm == "paper":
            means = f"all {self.m}-subsets of {math.ceil(self.m * self.balance)} drawn points"
        elif self.delta == 0:
            means = f"all {self.m}-subsets of the points, error e_m = {self.e_m:.4g}"
        else:
            means = f"m = {self.m} points each, error e_m = {self.e_m:.4g}, beta = {self.beta:.4g}"
        lines.append(f"  means       {means}")
        if self.delta > 0:
            lines.append(
                f"  success     p = {self.p:.4g} for a repetition, {_count(self.repetitions)} "
                "repetitions"
            )
        weights = "uniform" if self.weight_tuples == 1 else f"{_count(self.weight_tuples)} tuples"
        values = "fixed" if self.problem == "WKM" else f"{self.grid_values} values a cluster"
        if self.estimates > 1:
            values += f" for each of {self.estimates} estimates"
        lines.append(f"  grids       variances {values}, weights {weights}")
        lines.append(
            f"  candidates  {_count(self.tuples)} tuples, {_count(self.point_evaluations)} point "
            "evaluations"
        )
        if self.algorithm != "paper":
            lines.append(f"  memory      {self.peak_bytes / 2**20:.1f} MiB beside the points")
            lines.append(f"  time        {_duration(self.seconds)} on {jax.default_backend()}")
        return "\n".join(lines)


def plan(
    x: Any,
    n_clusters: int,
    *,
    eps: float | None = None,
    eta: float | None = None,
    delta: float = 0.1,
    balance: float | None = None,
    algorithm: Algorithm = "sampling",
    scale: Scale = "tight",
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    shape: tuple[int, int] | None = None,
    variance_ratio: float = 1e4,
    max_points: int = MAX_POINTS,
) -> Plan:
    """Tell what a guarantee takes: how many candidates, how much memory, about how much time.

    Give `eps` for a cost within a factor of `1 + eps` of the best balanced one (on a scale: the
    factor means nothing without one), or `eta` for a cost within `eta` nats per point, which no
    scaling changes: the one to prefer.

    Args:
        x: points `[n, d]`, or None with `shape`.
        n_clusters: k.
        eps: the factor, less 1.
        eta: nats per point.
        delta: the probability with which the claim may fail; 0 for all subsets of the points.
        balance: f; clusters weigh at least `N / f`. Default: `2 * n_clusters`.
        algorithm: `"sampling"`; or `"paper"`, to count what the paper's own constants take.
        scale: `"tight"` or `"paper"`, as in `rescale`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        shape: `(n, d)` of points that are not at hand.
        variance_ratio: with `shape`, the ratio of the largest variance of a cluster to the
            smallest.
        max_points: refuse more points than this: looking at all pairs takes quadratic time.

    Returns:
        A `Plan`: readable when printed, JSON by `to_dict()`.

    Example:
        >>> import jaxcmle as jc
        >>> plan = jc.plan(None, 3, eps=0.5, shape=(1200, 2), variance_ratio=1e4)
        >>> plan.m, plan.grid_values, plan.repetitions, plan.tuples
        (1, 3, 84, 15876)
    """
    inputs.check_on_host("plan")
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"algorithm must be one of {get_args(Algorithm)}, got {algorithm!r}")
    problem = inputs.to_problem(problem)
    target = to_target(eps, eta, delta)
    if x is None:
        if sample_weight is not None:
            raise ValueError("sample_weight goes with x, and there is only a shape")
        scale = to_scale(scale, target)
        instance = imagine(shape, n_clusters, balance, scale, problem, variance_ratio)
    else:
        if shape is not None:
            raise ValueError("give x or shape, not both")
        points, weight, _ = inputs.without_padding(*inputs.to_points(x, sample_weight))
        scale = to_scale(scale, target)
        instance = measure(points, weight, n_clusters, balance, scale, problem, max_points)
    return make_plan(instance, target, problem, algorithm)


class _Weights(NamedTuple):
    """A grid of weights: how many exponents, and the nats per point it leaves for the rest.

    With an eps, `left` is what it leaves beside eps times the rest of the cost.
    """

    exponents: int
    left: float


class _Choice(NamedTuple):
    """One way to fulfil the claim, and the logarithm of what it costs."""

    log_tuples: float
    m: int
    e_m: float
    grid_values: int
    exponents: int
    allowance: Allowance


def make_plan(
    instance: Instance, target: Target, problem: Problem, algorithm: Algorithm = "sampling"
) -> Plan:
    """Return the plan with the fewest candidates."""
    if algorithm == "paper":
        return _paper_plan(instance, target, problem)
    if target.delta == 0 and instance.weighted:
        raise ValueError(
            "a deterministic guarantee (delta=0) is for points without weights; give a delta, "
            "or repeat the points"
        )
    best = min(_choices(instance, target, problem), default=None)
    if best is None:
        raise ValueError(_impossible(instance, target, problem))
    k, n = instance.n_clusters, instance.n
    weight_tuples = grids.weight_tuples(k, best.exponents)
    if isinstance(problem, WKM):
        values, starts = (0.0,), (0.0,)
    else:
        cover = grids.cover_variances(instance.y_low, instance.y_high, best.e_m, best.allowance)
        values, starts = tuple(cover.values.tolist()), tuple(cover.starts.tolist())
    grid_tuples = len(values) ** k * weight_tuples
    if target.delta == 0:
        beta, success, repetitions = 0.0, 1.0, 1
        mean_tuples = math.comb(n, best.m) ** k
        columns = math.comb(n, best.m) * len(values)
        # Beside what is walked: the columns without weights, and those of other cases.
        peak_bytes = 2 * scoring.product_bytes(k, columns * best.exponents, n)
    else:
        beta = 1 / (best.m * best.e_m)
        log_success = _log_success(instance, best.m, beta)
        success = math.exp(log_success)
        repetitions = _whole(_log_repetitions(log_success, target.delta))
        mean_tuples = 1
        peak_bytes = scoring.repetition_bytes(k, len(values), instance.d, n)
    tuples = repetitions * mean_tuples * grid_tuples
    return Plan(
        algorithm="sampling",
        m=best.m,
        e_m=best.e_m,
        beta=beta,
        p=success,
        repetitions=repetitions,
        mean_tuples=mean_tuples,
        variance_values=values,
        variance_starts=starts,
        grid_values=len(values),
        weight_exponents=best.exponents,
        weight_tuples=weight_tuples,
        tuples=tuples,
        log10_tuples=math.log10(tuples),
        point_evaluations=tuples * n,
        peak_bytes=peak_bytes,
        **_shared(instance, target, problem),
    )


def _shared(instance: Instance, target: Target, problem: Problem) -> dict[str, Any]:
    """Return the fields that a plan takes over from what was asked."""
    return {
        "problem": type(problem).__name__,
        "n": instance.n,
        "d": instance.d,
        "n_clusters": instance.n_clusters,
        "balance": instance.balance,
        "min_size": instance.min_size,
        "scale": instance.scale,
        "factor": instance.factor,
        "y_min": instance.y_low,
        "y_max": instance.y_high,
        **target._asdict(),
    }


def _choices(instance: Instance, target: Target, problem: Problem) -> Iterator[_Choice]:
    """Yield ways to fulfil the claim, the cheapest among them."""
    finest, *weight_grids = _weight_grids(instance, target, problem)
    beside_weights = min(
        (choice.log_tuples for choice in _mean_choices(instance, target, problem, finest)),
        default=math.inf,
    )
    cheapest = math.inf
    for weights in weight_grids:
        log_weights = math.log(grids.weight_tuples(instance.n_clusters, weights.exponents))
        if log_weights + beside_weights > cheapest:
            break
        for choice in _mean_choices(instance, target, problem, weights):
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
    instance: Instance, target: Target, problem: Problem, weights: _Weights
) -> Iterator[_Choice]:
    """Yield, for a grid of weights, how many points to a mean and how fine a grid of variances."""
    if isinstance(problem, WKM):
        allowance = Allowance(0.0, 0.0)
        errors = [_wkm_error(instance, target, weights)]
    else:
        allowance = Allowance(target.eps or 0.0, 2 / instance.d * weights.left)
        errors = grids.largest_mean_errors(instance.y_low, instance.y_high, allowance).tolist()
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
            means = _log_repetitions(_log_success(instance, m, 0.0), target.delta)
        if means + fewest >= cheapest:
            return
        for grid_values, error in enumerate(errors, start=1):
            if m * error <= 1:
                continue
            if target.delta == 0:
                draws, used = means, 1 / m
            else:
                log_success = _log_success(instance, m, 1 / (m * error))
                draws, used = _log_repetitions(log_success, target.delta), error
            choice = _Choice(
                draws + k * math.log(grid_values),
                m,
                used,
                grid_values,
                weights.exponents,
                allowance,
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


def _log_success(instance: Instance, m: int, beta: float) -> float:
    """Return the logarithm of `K! (prod w)^m (1 - beta)` for the least product of weights."""
    k, balance = instance.n_clusters, instance.balance
    largest = 1 - (k - 1) / balance
    product = -(k - 1) * math.log(balance) + math.log(largest)
    return min(0.0, math.lgamma(k + 1) + m * product + math.log1p(-beta))


def _log_repetitions(log_success: float, delta: float) -> float:
    """Return the logarithm of the number of repetitions after which all failed with `delta`."""
    if log_success > -30:
        success = math.exp(log_success)
        if success >= 1:
            return 0.0
        return math.log(max(1, math.ceil(math.log(delta) / math.log1p(-success))))
    return math.log(-math.log(delta)) - log_success


def _whole(log_count: float) -> int:
    """Return a whole number from its logarithm, exact while floats are."""
    if log_count < 36:
        return round(math.exp(log_count))
    digits = log_count / math.log(10)
    return math.ceil(10 ** (digits % 1 + 15)) * 10 ** (math.floor(digits) - 15)


def _impossible(instance: Instance, target: Target, problem: Problem) -> str:
    if target.delta == 0:
        return (
            f"no deterministic claim of this kind: clusters of {instance.min_size:g} points have "
            "no subsets whose means are near enough; raise eps or eta, lower balance, or give a "
            "delta"
        )
    if isinstance(problem, WKM) and math.isinf(instance.spread_high):
        return "for WKM, eta takes the points themselves: give x, or eps"
    return "no grid of weights is fine enough for so small an eps or eta; raise it"


def _paper_plan(instance: Instance, target: Target, problem: Problem) -> Plan:
    """Return the counts of the paper's own constants, as printed but for plain slips.

    The optimum's Gamma is taken as large as the range of y allows.
    """
    if target.eps is None or target.delta == 0:
        raise ValueError(
            "the paper's algorithm is for eps (a factor of 1 + eps) and a positive delta, got "
            f"eps={target.eps}, eta={target.eta}, delta={target.delta:g}"
        )
    k, d, balance = instance.n_clusters, instance.d, instance.balance
    # Four factors of 1 + eps multiply.
    eps = (1 + target.eps) ** 0.25 - 1
    step = math.log1p(eps)
    m = math.ceil(1 / (eps * target.delta))
    sampled = math.ceil(m * balance - 1e-9)
    sizes = 1 if isinstance(problem, UCMLE) else len(grids.printed_shares(balance, eps))
    gamma = instance.y_high + 2 / d * math.log(k)
    estimates = math.ceil(math.log(gamma) / step)
    values = math.ceil(math.log(gamma * balance) / step) + 2
    if isinstance(problem, WKM):
        estimates = values = 1
    success = ((1 - target.delta) / 5) ** k
    repetitions = math.ceil(math.log(target.delta) / math.log1p(-success))
    mean_tuples = math.comb(sampled, m) ** k
    tuples = repetitions * mean_tuples * sizes**k * estimates * values**k
    return Plan(
        algorithm="paper",
        m=m,
        e_m=eps,
        beta=target.delta,
        p=success,
        repetitions=repetitions,
        mean_tuples=mean_tuples,
        variance_values=(),
        variance_starts=(),
        grid_values=values,
        estimates=estimates,
        weight_exponents=sizes,
        weight_tuples=sizes**k,
        tuples=tuples,
        log10_tuples=math.log10(tuples),
        point_evaluations=tuples * instance.n,
        peak_bytes=0,
        **_shared(instance, target, problem),
    )


def _count(count: int) -> str:
    """Return a count to read: in full while short, as a power of ten beyond."""
    if count < 10**7:
        return f"{count:,}"
    return f"10^{math.log10(count):.1f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "longer than the universe"
    for limit, unit, name in (
        (1, 1e-3, "ms"),
        (120, 1, "s"),
        (7200, 60, "min"),
        (172800, 3600, "h"),
    ):
        if seconds < limit:
            return f"about {max(seconds / unit, 1):.0f} {name}"
    days = seconds / 86400
    return (
        f"about {days:.0f} days" if days < 1000 else f"about 10^{math.log10(days / 365):.1f} years"
    )
