"""What a guarantee takes, for people and programs to read."""

import dataclasses
import math
from typing import Any, Literal

import jax

from jaxcmle.candidates import leaves, scoring
from jaxcmle.candidates.choices import VarianceGrid
from jaxcmle.candidates.claim import Scale

__all__ = ["Plan"]


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
            scored = leaves.leaf_rate(self.n_clusters, self.grid_values, powers, self.d)
            seconds = float(self.tuples * self.n) / scored
            return seconds + float(self.pruned_points) / leaves.selection_rate()
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
        if self.grid == "loglog" and self.problem != "WKM":
            values += " (log-log)"
        if self.estimates > 1:
            values += f" for each of {self.estimates} estimates"
        lines.append(f"  grids       variances {values}, weights {weights}")
        lines.append(
            f"  candidates  {_count(self.tuples)} tuples, {_count(self.point_evaluations)} point "
            "evaluations"
        )
        if self.algorithm != "paper":
            lines.append(f"  memory      {_size(self.peak_bytes)} beside the points")
            lines.append(f"  time        {_duration(self.seconds)} on {jax.default_backend()}")
        if self.other is not None:
            lines.append(
                f"  instead of  {self.other.algorithm}: {_count(self.other.tuples)} tuples, "
                f"{_size(self.other.peak_bytes)}, {_duration(self.other.seconds)}"
            )
        return "\n".join(lines)


def _count(count: int) -> str:
    """Return a count to read: in full while short, as a power of ten beyond."""
    if count < 10**7:
        return f"{count:,}"
    return f"10^{math.log10(count):.1f}"


def _size(count: int) -> str:
    """Return a number of bytes to read."""
    if count < 2**60:
        return f"{count / 2**20:.1f} MiB"
    return f"10^{math.log10(count):.1f} bytes"


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
