"""Solutions in words, for a terminal, and as records, for JSON."""

import math
from typing import Any

import numpy as np

import jaxcmle as jc

__all__ = [
    "claim_lines",
    "cluster_lines",
    "cluster_records",
    "counted",
    "finite",
    "guarantee_record",
    "result_lines",
    "solution_record",
]

# So many features of a mean are printed.
MOST_FEATURES = 6


def cluster_lines(
    solution: jc.Solution, weight: np.ndarray | None, notes: list[str] | None = None
) -> list[str]:
    """Return a table with a line for each cluster, and a note at its end."""
    mixture = solution.mixture
    k, d = mixture.means.shape
    sizes = np.bincount(np.asarray(solution.labels), weight, k)
    lines = [f"{'cluster':>7} {'points':>9} {'weight':>7} {'sigma':>9}  mean"]
    for j in range(k):
        sigma = float(mixture.variances[j]) ** 0.5
        mean = " ".join(_coordinate(value, sigma) for value in mixture.means[j][:MOST_FEATURES])
        more = f" ... ({d} features)" if d > MOST_FEATURES else ""
        note = f"   {notes[j]}" if notes else ""
        weight_ = float(mixture.weights[j])
        lines.append(f"{j:>7} {sizes[j]:>9.8g} {weight_:>7.4f} {sigma:>9.4g} {mean}{more}{note}")
    return lines


def _coordinate(value: Any, sigma: float) -> str:
    """Return a number with as many digits as the width of the cluster makes sense of."""
    ratio = abs(float(value)) / sigma if sigma > 0 else 1.0
    digits = min(4 + max(0, math.ceil(math.log10(max(ratio, 1.0))) - 2), 15)
    return f"{float(value):9.{digits}g}"


def counted(count: int, noun: str) -> str:
    """Return so many of something."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def result_lines(solution: jc.Solution, total: float) -> list[str]:
    """Return the status, the cost and what is proved of it."""
    proved, cost = guarantee_record(solution.guarantee), float(solution.cost)
    lines = [
        f"status       {jc.Status(int(solution.status)).name} after "
        f"{counted(int(solution.n_iter), 'iteration')}",
        f"cost         {cost:.3f} nats ({cost / total:.4f} per point)",
    ]
    if proved["kind"] == "estimate" and proved["gap"] is not None:
        lines.append(f"gap          about {proved['gap']:.4f} nats per point: {proved['reason']}")
    elif proved["gap"] is not None:
        lines += [
            f"lower bound  {proved['lower_bound']:.3f} nats, over all partitions with clusters of "
            f"at least {proved['min_size']:g} points",
            f"gap          {proved['gap']:.4f} nats per point: no such partition is better by more "
            f"(proof by {proved['method']})",
        ]
    elif proved["reason"] is not None:
        # What follows is advice for those who call the library.
        lines.append(f"gap          not known: {proved['reason'].split(';')[0]}")
    return lines


def claim_lines(solution: jc.Solution) -> list[str]:
    """Return what is claimed of a solution of the guaranteed search, if anything is."""
    made = guarantee_record(solution.guarantee)
    if made["kind"] not in ("probabilistic", "deterministic") or made["eta"] is None:
        return []
    sure = f"with probability {1 - made['delta']:g}" if made["delta"] else "for certain"
    return [f"claim        {made['eta']:g} nats per point: none is better by more, {sure}"]


def solution_record(solution: jc.Solution, total: float) -> dict[str, Any]:
    """Return all of a solution but its labels."""
    return {
        "clusters": cluster_records(solution.mixture),
        "cost": finite(solution.cost),
        "cost_per_point": finite(float(solution.cost) / total),
        "status": jc.Status(int(solution.status)).name,
        "iterations": int(solution.n_iter),
        "consistent": bool(solution.consistent),
        "guarantee": guarantee_record(solution.guarantee),
    }


def cluster_records(mixture: jc.Mixture) -> list[dict[str, Any]]:
    """Return the clusters of a mixture."""
    parts = (mixture.weights, mixture.means, mixture.variances)
    weights, means, variances = (np.asarray(part).tolist() for part in parts)
    return [
        {"weight": weight, "mean": mean, "variance": variance}
        for weight, mean, variance in zip(weights, means, variances, strict=True)
    ]


def guarantee_record(guarantee: jc.Guarantee) -> dict[str, Any]:
    """Return what is proved; None for what is not."""
    numbers = ("lower_bound", "gap", "min_size", "eps", "eta", "delta")
    return {
        "kind": guarantee.kind,
        "method": guarantee.method or None,
        "scale": guarantee.scale,
        "reason": guarantee.reason or None,
        **{name: finite(getattr(guarantee, name)) for name in numbers},
    }


def finite(value: Any) -> float | None:
    """Return a number for JSON, which has neither infinity nor NaN."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
