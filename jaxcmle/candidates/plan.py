"""How many candidates a guarantee takes, and how much memory and time, before anything runs."""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax

from jaxcmle.candidates import grids, pruning, scoring
from jaxcmle.candidates.choices import (
    Choice,
    VarianceGrid,
    log_repetitions,
    pruned_choices,
    sampled_choices,
)
from jaxcmle.candidates.claim import (
    RANGE_SLACK,
    Instance,
    Scale,
    Target,
    imagine,
    measure,
    to_scale,
    to_target,
)
from jaxcmle.problem import inputs
from jaxcmle.problem.pairs import MAX_POINTS
from jaxcmle.problem.types import CMLE, UCMLE, WKM, Problem

__all__ = ["Algorithm", "Plan", "abs_plan", "make_plan", "plan", "to_grid"]

Algorithm = Literal["sampling", "abs", "auto", "paper"]

# What selecting takes for each point that a pruning looks at, in point evaluations: a comparison
# and a count for each of 32 bits, where an evaluation is a minimum and an addition.
SELECTION = 32


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What a guarantee takes. `print` it, or take `to_dict()`.

    Attributes:
        algorithm: `"sampling"`, `"abs"`, or `"paper"` for the counts of the paper's own constants.
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
        point_evaluations: candidates times points, and what pruning takes.
        peak_bytes: memory that scoring takes beside the points.
        grid: which grid of variances, `"reduced"` or `"loglog"`.
        alpha: ABS only: with u clusters yet to be found, one of them is drawn from when it makes up
            a share of `alpha / u` of what remains.
        prunings: ABS only: how often half of the points is pruned, at most.
        walks: ABS only: the orders of drawing and pruning.
        pruned_points: ABS only: how many points all prunings look at.
        other: with `algorithm="auto"`, the plan of the dearer algorithm; None if it has none.
    """

    algorithm: Literal["sampling", "abs", "paper"]
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
    grid: VarianceGrid = "reduced"
    alpha: float | None = None
    prunings: int = 0
    walks: int = 1
    pruned_points: int = 0
    other: "Plan | None" = None

    @property
    def seconds(self) -> float | None:
        """About how long scoring takes on this device, from a short calibration; None if absurd.

        The calibration runs the same program for a moment, once for each kind of plan. Pruning,
        which depends on the data, is not counted on.
        """
        if self.algorithm == "paper" or self.log10_tuples > 30:
            return None
        if self.algorithm == "abs":
            powers = 2 * self.weight_exponents - 1
            scored = pruning.leaf_rate(self.n_clusters, self.grid_values, powers, self.d)
            seconds = float(self.tuples * self.n) / scored
            return seconds + float(self.pruned_points) / pruning.selection_rate()
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
        values["other"] = None if self.other is None else self.other.to_dict()
        counts = ("tuples", "point_evaluations", "repetitions", "mean_tuples", "pruned_points")
        for name in counts:
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
        if self.alpha is not None:
            lines.append(
                f"  prunings    up to {self.prunings}, {self.walks} walks, alpha = {self.alpha:.3g}"
            )
        if self.delta > 0:
            lines.append(
                f"  success     p = {self.p:.4g} for a repetition, {_count(self.repetitions)} "
                "repetitions"
            )
        weights = "uniform" if self.weight_tuples == 1 else f"{_count(self.weight_tuples)} tuples"
        values = "fixed" if self.problem == "WKM" else f"{self.grid_values} values a cluster"
        if self.grid == "loglog":
            values += " (log-log)"
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
        if self.other is not None:
            lines.append(
                f"  instead of  {self.other.algorithm}: {_count(self.other.tuples)} tuples, "
                f"{self.other.peak_bytes / 2**20:.1f} MiB, {_duration(self.other.seconds)}"
            )
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
    grid: VarianceGrid = "reduced",
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
        balance: f; clusters weigh at least `N / f`. Default: `2 * n_clusters`; infinity for
            all clusters of two points and more.
        algorithm: `"sampling"`; `"abs"`, which draws means from what pruning leaves, and so hardly
            depends on the balance; `"auto"`, the one that takes less; or `"paper"`, to count what
            the constants of the paper's first algorithm take.
        scale: `"tight"` or `"paper"`, as in `rescale`.
        grid: for ABS, the grid of variances: `"reduced"`, or `"loglog"`, the paper's, repaired.
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
    return make_plan(instance, target, problem, algorithm, to_grid(grid))


def to_grid(grid: Any) -> VarianceGrid:
    """Return which grid of variances, checked."""
    if grid not in get_args(VarianceGrid):
        raise ValueError(f"grid must be one of {get_args(VarianceGrid)}, got {grid!r}")
    return grid


def make_plan(
    instance: Instance,
    target: Target,
    problem: Problem,
    algorithm: Algorithm = "sampling",
    grid: VarianceGrid = "reduced",
) -> Plan:
    """Return the plan with the fewest candidates."""
    if algorithm == "paper":
        return _paper_plan(instance, target, problem)
    if algorithm == "abs":
        return abs_plan(instance, target, problem, grid)
    if algorithm == "sampling":
        return _sampling_plan(instance, target, problem)
    plans = []
    reasons = []
    for make in (_sampling_plan, abs_plan):
        try:
            plans.append(make(instance, target, problem))
        except ValueError as error:
            reasons.append(error)
    if not plans:
        raise reasons[0]
    # Not by time, which is measured: the same call has to take the same way.
    best, *others = sorted(plans, key=lambda plan: plan.point_evaluations)
    return dataclasses.replace(best, other=others[0] if others else None)


def _sampling_plan(instance: Instance, target: Target, problem: Problem) -> Plan:
    if target.delta == 0 and instance.weighted:
        raise ValueError(
            "a deterministic guarantee (delta=0) is for points without weights; give a delta, "
            "or repeat the points"
        )
    best = min(sampled_choices(instance, target, problem), default=None)
    if best is None:
        raise ValueError(_impossible(instance, target, problem))
    k, n = instance.n_clusters, instance.n
    fields = _chosen(instance, target, problem, best, "reduced")
    values = fields["grid_values"]
    mean_tuples = 1
    if target.delta == 0:
        mean_tuples = math.comb(n, best.m) ** k
        columns = math.comb(n, best.m) * values
        # Beside what is walked: the columns without weights, and those of other cases.
        peak_bytes = 2 * scoring.product_bytes(k, columns * best.exponents, n)
    else:
        peak_bytes = scoring.repetition_bytes(k, values, instance.d, n)
    tuples = fields["repetitions"] * mean_tuples * values**k * fields["weight_tuples"]
    return Plan(
        algorithm="sampling",
        mean_tuples=mean_tuples,
        tuples=tuples,
        log10_tuples=math.log10(tuples),
        point_evaluations=tuples * n,
        peak_bytes=peak_bytes,
        **fields,
    )


def abs_plan(
    instance: Instance,
    target: Target,
    problem: Problem,
    grid: VarianceGrid = "reduced",
    alpha: float | None = None,
) -> Plan:
    """Return the plan of sampling and pruning; for one alpha, if one is given."""
    if target.delta == 0:
        raise ValueError('algorithm="abs" draws at random: give a delta above 0')
    if instance.weighted:
        raise ValueError(
            'algorithm="abs" is for points without weights, since half of them is pruned each '
            'time: use algorithm="sampling", or repeat the points'
        )
    if not isinstance(problem, WKM) and instance.y_low < 1 - 2 * RANGE_SLACK:
        raise ValueError(
            "pruning takes costs that are not negative: every y = ln(2 pi e variance) must be 1 or "
            f"more, and here it is as low as {instance.y_low:g}; rescale the points"
        )
    alphas = None if alpha is None else (alpha,)
    ways = pruned_choices(instance, target, problem, grid, alphas)
    best, how = min(ways, default=(None, None))
    if best is None or how is None:
        raise ValueError(_impossible(instance, target, problem))
    k, n, d = instance.n_clusters, instance.n, instance.d
    fields = _chosen(instance, target, problem, best, grid)
    values, powers = fields["grid_values"], 2 * best.exponents - 1
    walks = pruning.walk_count(k, how.prunings)
    tuples = fields["repetitions"] * walks * values**k * fields["weight_tuples"]
    # Prunings depend on all components but the last.
    first = values ** (k - 1) * max(1, grids.weight_tuples(k - 1, best.exponents))
    pruned = fields["repetitions"] * first * pruning.pruned_points(n, k, how.prunings)
    return Plan(
        algorithm="abs",
        mean_tuples=walks,
        tuples=tuples,
        log10_tuples=math.log10(tuples),
        point_evaluations=tuples * n + SELECTION * pruned,
        peak_bytes=pruning.search_bytes(n, d, k, values, powers, first, how.prunings),
        grid=grid,
        alpha=how.alpha,
        prunings=how.prunings,
        walks=walks,
        pruned_points=pruned,
        **fields,
    )


def _chosen(
    instance: Instance, target: Target, problem: Problem, choice: Choice, grid: VarianceGrid
) -> dict[str, Any]:
    """Return the fields of a plan that come of a choice."""
    if isinstance(problem, WKM):
        values, starts = (0.0,), (0.0,)
    else:
        low, high = instance.y_low, instance.y_high
        if grid == "loglog":
            cover = grids.loglog_cover(low, high, choice.grid_values)
        else:
            cover = grids.cover_variances(low, high, choice.e_m, choice.allowance)
        values, starts = tuple(cover.values.tolist()), tuple(cover.starts.tolist())
    repetitions = 1
    if target.delta > 0:
        repetitions = _whole(log_repetitions(choice.log_success, target.delta))
    return {
        "m": choice.m,
        "e_m": choice.e_m,
        "beta": choice.beta,
        "p": math.exp(choice.log_success),
        "repetitions": repetitions,
        "variance_values": values,
        "variance_starts": starts,
        "grid_values": len(values),
        "weight_exponents": choice.exponents,
        "weight_tuples": grids.weight_tuples(instance.n_clusters, choice.exponents),
        **_shared(instance, target, problem),
    }


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
