"""How many candidates a guarantee takes, and how much memory and time, before anything runs."""

import dataclasses
import math
from typing import Any, Literal, get_args

from jaxcmle.candidates import grids, leaves, pruning, scoring
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
from jaxcmle.candidates.plan import Plan
from jaxcmle.problem import inputs
from jaxcmle.problem.pairs import MAX_POINTS
from jaxcmle.problem.types import CMLE, UCMLE, WKM, Problem

__all__ = ["Algorithm", "abs_plan", "make_plan", "plan", "to_grid"]

Algorithm = Literal["sampling", "abs", "auto", "paper"]

# What selecting takes for each point that a pruning looks at, in point evaluations: a comparison
# and a count for each of 32 bits, where an evaluation is a minimum and an addition.
SELECTION = 32
# Counts are cut at so many digits: more would only take time to write down.
MOST_DIGITS = 10_000


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
    plans: list[Plan] = []
    reasons: list[ValueError] = []
    ways: tuple[Algorithm, ...] = ("sampling", "abs")
    for way in ways:
        try:
            plans.append(make_plan(instance, target, problem, way, grid))
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
        peak_bytes=leaves.search_bytes(n, d, k, values, powers, first, how.prunings),
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
    """Return a whole number from its logarithm, exact while floats are; not too large to handle."""
    if log_count < 36:
        return round(math.exp(log_count))
    digits = min(log_count / math.log(10), MOST_DIGITS)
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
