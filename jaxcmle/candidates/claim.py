"""What is to be claimed, and the few numbers of an instance that decide what that takes."""

import math
import operator
from typing import Any, Literal, NamedTuple, get_args

from jax import Array

from jaxcmle import numerics
from jaxcmle.problem import inputs
from jaxcmle.problem.instance import check_instance, smallest_size, y_range
from jaxcmle.problem.pairs import MAX_POINTS, check_pairs_affordable
from jaxcmle.problem.types import UCMLE, WKM, Problem

__all__ = [
    "Instance",
    "Scale",
    "Target",
    "imagine",
    "measure",
    "on_scale",
    "to_scale",
    "to_target",
]

Scale = Literal["tight", "paper"]

# The y range of data comes from float32: widened by this, so that its rounding cannot matter.
RANGE_SLACK = 1e-4
# An eps or eta beyond this says nothing.
LARGEST_CLAIM = 1e6
# The smallest y on either scale: variances of at least 1/(2 pi), and of at least 1/pi.
SMALLEST_Y = {"tight": 1.0, "paper": 1 + math.log(2)}


class Instance(NamedTuple):
    """What the number of candidates depends on.

    Attributes:
        n: points of positive weight.
        d: features.
        n_clusters: k.
        total: weight of all points.
        min_size: the smallest weight of a cluster.
        y_low: the smallest `y = ln(2 pi e variance)` of a cluster, on the scale.
        y_high: the largest.
        factor: multiply x by this to be on the scale.
        scale: `"tight"`, `"paper"`, or None for WKM, whose costs are taken as they are.
        spread_low: WKM only, the least that a partition costs per point beside its entropy.
        spread_high: WKM only, the most that the best partition does.
        weighted: whether the points have weights other than 1.
        known_cost: something that the best balanced partition costs at most per point, on the
            scale; infinity if nothing is known beside the range of y.
    """

    n: int
    d: int
    n_clusters: int
    total: float
    min_size: float
    y_low: float
    y_high: float
    factor: float
    scale: Scale | None
    spread_low: float
    spread_high: float
    weighted: bool
    known_cost: float = math.inf

    def most_cost(self, problem: Problem) -> float:
        """Return what the best balanced partition costs at most per point, on the scale."""
        weights = 0.0 if isinstance(problem, UCMLE) else math.log(self.n_clusters)
        spread = self.spread_high if isinstance(problem, WKM) else self.d / 2 * self.y_high
        return min(self.known_cost, spread + weights)

    @property
    def balance(self) -> float:
        """The balance that the smallest size amounts to."""
        return self.total / self.min_size


class Target(NamedTuple):
    """What is to be claimed: a factor `1 + eps`, or `eta` nats per point; it fails with `delta`."""

    eps: float | None
    eta: float | None
    delta: float


def to_target(eps: Any, eta: Any, delta: Any) -> Target:
    """Return what is to be claimed, checked."""
    if (eps is None) == (eta is None):
        raise ValueError(
            "give eta (nats per point above the best balanced solution, which no scaling changes) "
            f"or eps (a factor of 1 + eps, on a scale), one of them, got eta={eta!r}, eps={eps!r}"
        )
    delta = inputs.to_limit(delta, "delta")
    if delta >= 1:
        raise ValueError(f"delta, the probability of failure, must be under 1, got {delta!r}")

    def positive(value: Any, name: str) -> float | None:
        if value is None:
            return None
        value = inputs.to_limit(value, name, positive=True)
        if value > LARGEST_CLAIM:
            raise ValueError(f"{name} must be finite, and {LARGEST_CLAIM:g} at most, got {value:g}")
        return float(value)

    return Target(positive(eps, "eps"), positive(eta, "eta"), float(delta))


def to_scale(scale: Any, target: Target) -> Scale:
    """Return the scale to work on: for a claim in nats per point the tight one does."""
    if scale not in get_args(Scale):
        raise ValueError(f"scale must be one of {get_args(Scale)}, got {scale!r}")
    return scale if target.eta is None else "tight"


def measure(
    points: Array,
    weight: Array | None,
    n_clusters: Any,
    balance: Any,
    scale: Scale,
    problem: Problem,
    max_points: int = MAX_POINTS,
) -> Instance:
    """Return the numbers of a data set."""
    n, d = points.shape
    k = inputs.to_n_clusters(n_clusters, n)
    balance = 2 * k if balance is None else inputs.to_limit(balance, "balance", positive=True)
    size = float(smallest_size(points, weight, balance))
    total = float(n if weight is None else weight.sum())
    inputs.check_partition_exists(k, size, total)
    size = min(size, total / k)
    check_pairs_affordable(points, max_points, "this guarantee")
    bounds = y_range(points, size, sample_weight=weight, max_points=max_points)
    instance = Instance(
        n=n,
        d=d,
        n_clusters=k,
        total=total,
        min_size=size,
        y_low=float(bounds.low),
        y_high=float(bounds.high),
        factor=1.0,
        scale=None,
        spread_low=0.0,
        spread_high=math.inf,
        weighted=weight is not None,
    )
    scatter, paper_shift = math.nan, math.inf
    if isinstance(problem, WKM):
        whole = numerics.whole_moments(numerics.prepare(points, weight))
        scatter = float(whole.scatter[0])
    elif scale == "paper" and math.isfinite(instance.y_low):
        report = check_instance(points, max_points=max_points)
        if report.min_distance_sq > 0:
            paper_shift = math.log(report.required / report.min_distance_sq)
    return on_scale(instance, scale, problem, scatter, paper_shift)


def on_scale(
    instance: Instance, scale: Scale, problem: Problem, scatter: float, paper_shift: float
) -> Instance:
    """Return the numbers of a data set on the scale; for WKM, with the range of its spread.

    Args:
        instance: the numbers in the user's units.
        scale: `"tight"` or `"paper"`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        scatter: for WKM, the squared distances of all points to their mean, added up.
        paper_shift: for the paper's scale, what every y grows by; not finite where points coincide.
    """
    low, high, size = instance.y_low, instance.y_high, instance.min_size
    if isinstance(problem, WKM):
        beta = float(problem.beta)  # type: ignore[arg-type]
        least = beta * instance.d * math.exp(low - 1) / (2 * math.pi)
        return instance._replace(
            spread_low=least * (1 - RANGE_SLACK),
            spread_high=beta * scatter / instance.total * (1 + RANGE_SLACK),
        )
    shift, reason = 1 - low, f"points that weigh {size:g}, enough for a cluster, coincide"
    if scale == "paper" and math.isfinite(low):
        shift, reason = paper_shift, "two points coincide"
    if not math.isfinite(shift):
        raise ValueError(
            f"this instance is not well-defined on the {scale} scale, because {reason}: remove "
            "duplicates"
            + (", or lower balance so that clusters are larger" if scale == "tight" else "")
        )
    return instance._replace(
        y_low=low + shift - RANGE_SLACK,
        y_high=max(high, low) + shift + RANGE_SLACK,
        factor=math.exp(shift / 2),
        scale=scale,
    )


def imagine(
    shape: Any, n_clusters: Any, balance: Any, scale: Scale, problem: Problem, ratio: Any
) -> Instance:
    """Return the numbers of a data set that is not at hand."""
    try:
        n, d = (operator.index(value) for value in shape)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"without x, give shape=(n, d), two whole numbers, got {shape!r}"
        ) from error
    if min(n, d) < 1:
        raise ValueError(f"shape=(n, d) must be 1 or more, got {shape!r}")
    k = inputs.to_n_clusters(n_clusters, n)
    balance = 2 * k if balance is None else inputs.to_limit(balance, "balance", positive=True)
    size = float(max(2, math.ceil(n / balance * (1 - 1e-9))))
    inputs.check_partition_exists(k, size, n)
    ratio = inputs.to_limit(ratio, "variance_ratio", positive=True)
    if not 1 <= ratio < math.inf:
        raise ValueError(f"variance_ratio must be 1 or more, and finite, got {ratio!r}")
    low = SMALLEST_Y[scale]
    return Instance(
        n=n,
        d=d,
        n_clusters=k,
        total=float(n),
        min_size=size,
        y_low=low,
        y_high=low + math.log(ratio),
        factor=1.0,
        scale=None if isinstance(problem, WKM) else scale,
        spread_low=0.0,
        spread_high=math.inf,
        weighted=False,
    )
