"""What a guarantee takes: candidates, certified gaps, and how often a certificate is enough.

- plans: how many candidates the paper's constants take and how many ours, for the same claim.
- gaps: how near to a proof `jc.certify` comes (see `benchmarks.certificate`).
- shares: how often `jc.approximate` is done before it enumerates any candidate, because a lower
  bound proves the claim for the best of 64 starts of CEM. Bounds are computed once for an instance,
  for the hardest claim, and every claim is put to them by `approximate`'s own test; some instances
  go through `approximate` itself, to see that both say the same.
"""

import itertools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcmle as jc
from benchmarks.certificate import gaps_table, measure_gaps, mixture, picture
from benchmarks.harness import say
from benchmarks.tables import Part, Table, source, span
from jaxcmle.apps.datasets import load_iris
from jaxcmle.candidates.claim import Target, measure
from jaxcmle.problem.pairs import MAX_POINTS
from jaxcmle.solve.claims import Answers
from jaxcmle.solve.sources import Setting

__all__ = ["PARTS", "picture"]

DELTA = 0.1
POINTS = 1000
# Clusters, features, factor less 1.
FACTORS = (
    *itertools.product((2, 3, 4), (2,), (0.1, 0.25, 0.5, 1.0)),
    *itertools.product((2, 3, 4), (8,), (0.5,)),
)
# Clusters, features, nats per point.
ADDED = (
    *itertools.product((2, 3, 4), (2,), (0.25, 1.0)),
    *itertools.product((2, 3, 4), (8,), (1.0,)),
)
# Counts up to this are written out.
WRITTEN_OUT = 10_000

EPS, ETA = (0.1, 0.25, 0.5), (0.05, 0.25, 1.0)
TARGETS = {
    **{f"ε = {eps:g}": Target(eps, None, DELTA) for eps in EPS},
    **{f"η = {eta:g}": Target(None, eta, DELTA) for eta in ETA},
}
STARTS = 64
DISTANCES = (1.0, 2.0, 4.0, 6.0)
# Seconds for the tight bound of an instance, and for compiling it before.
MOST_SECONDS, MOST_FIRST = 10.0, 60.0
# Every so many instances goes through `approximate` as well, with this claim.
CHECKED, CHECKED_NAME = 8, f"ε = {EPS[0]:g}"


def measure_plans(quick: bool) -> dict[str, Any]:
    del quick
    rows = []
    for k, d, eps in FACTORS:
        ways = {
            "paper": _count(k, d, eps=eps, algorithm="paper", scale="paper"),
            "sampling": _count(k, d, eps=eps, scale="paper"),
            "abs": _count(k, d, eps=eps, algorithm="abs", scale="paper"),
            "tight": _count(k, d, eps=eps, scale="tight"),
        }
        rows.append({"k": k, "d": d, "eps": eps, "eta": None, **ways})
    for k, d, eta in ADDED:
        ways = {"sampling": _count(k, d, eta=eta), "abs": _count(k, d, eta=eta, algorithm="abs")}
        rows.append({"k": k, "d": d, "eps": None, "eta": eta, **ways})
    return {"n": POINTS, "delta": DELTA, "rows": rows}


def _count(k: int, d: int, **claim: Any) -> float:
    """Return the power of ten of the number of candidates."""
    shape = (POINTS, d)
    return jc.plan(None, k, shape=shape, delta=DELTA, balance=2 * k, **claim).log10_tuples


def plans_table(found: dict[str, Any]) -> Table:
    results = found["results"]
    rows = results["rows"]
    factors = [row for row in rows if row["eps"] is not None]
    saved = [row["paper"] - row["sampling"] for row in factors]
    return Table(
        f"Candidates that a claim takes for {results['n']:,} points, clusters of at least n / 2K "
        f"points and δ = {results['delta']:g}: as printed in the paper, and by our plans, for a "
        "factor of 1 + ε on the paper's scale and on the tight one, and for η nats per point, "
        "which has no scale.",
        ("clusters, features, claim", "as printed", "sampling", "ABS", "sampling, tight scale"),
        tuple(
            (
                f"{row['k']}, {row['d']}, "
                + (f"η = {row['eta']:g}" if row["eps"] is None else f"ε = {row['eps']:g}"),
                *(_power(row.get(way)) for way in ("paper", "sampling", "abs", "tight")),
            )
            for row in rows
        ),
        f"Sampling takes 10^{min(saved):.0f} to 10^{max(saved):.0f} times fewer than printed for "
        f"the same claim.\n\n{source(found)}",
    )


def _power(log10: float | None) -> str:
    if log10 is None:
        return "–"
    count = round(10**log10) if log10 < 300 else math.inf
    return f"{count:,}" if count <= WRITTEN_OUT else f"10^{log10:.1f}"


class Mixture(NamedTuple):
    """An instance to certify: its clusters are so many standard deviations apart or more."""

    n: int
    d: int
    k: int
    distance: float
    seed: int


def mixtures(quick: bool) -> list[Mixture]:
    if quick:
        return [Mixture(300, 2, 3, distance, seed) for distance in (2.0, 4.0) for seed in (0, 1)]
    result: list[Mixture] = []
    for d, k, distance in itertools.product((1, 2, 3), (2, 3, 5), DISTANCES):
        result.append(Mixture(300, d, k, distance, len(result)))
    for d, distance in itertools.product((5, 8), DISTANCES):
        result.append(Mixture(300, d, 3, distance, len(result)))
    return result


def measure_shares(quick: bool) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    seen: set[tuple[int, ...]] = set()
    for one in mixtures(quick):
        x = mixture(one.n, one.d, one.k, one.distance, one.seed, 0.3)
        rows.append({**one._asdict(), **certified(x, one.k, seen, len(rows))})
        say(rows[-1])
    if not quick:
        x = np.asarray(load_iris().x)
        rows.append({"n": len(x), "d": 4, "k": 3, "distance": None, "seed": None})
        rows[-1] |= certified(x, 3, seen, 0)
    return {"rows": rows, "most seconds": MOST_SECONDS, "starts": STARTS}


def certified(x: np.ndarray, k: int, seen: set[tuple[int, ...]], place: int) -> dict[str, Any]:
    """Return which claims the quick bound proves, and which the tight one."""
    points = jnp.asarray(x, jnp.float32)
    instance = measure(points, None, k, 2 * k, "tight", jc.CMLE())

    def answers(target: Target) -> Answers:
        return Answers(Setting(points, None, jc.CMLE(), instance, target), MAX_POINTS)

    hardest = answers(TARGETS[f"η = {min(ETA):g}"])
    local = hardest.local(jax.random.fold_in(jax.random.key(0), 1), STARTS)
    if points.shape not in seen:
        # Compiles, for longer than the limit may be.
        hardest.tight(local, False, time.monotonic() + MOST_FIRST)
        seen.add(points.shape)
    begin = time.perf_counter()
    tight = hardest.tight(local, False, time.monotonic() + MOST_SECONDS)
    seconds = time.perf_counter() - begin
    proved = {name: answers(target).prove(tight) for name, target in TARGETS.items()}
    return {
        "quick gap": float(np.asarray(local.guarantee.gap)),
        "gap": float(np.asarray(tight.guarantee.gap)),
        "cost on the scale": (float(tight.cost) + hardest.setting.offset) / len(x),
        "method": tight.guarantee.method,
        "seconds": seconds,
        "quick": {name: answers(target).prove(local) for name, target in TARGETS.items()},
        "tight": proved,
        "agrees": None if place % CHECKED else agrees(points, k, proved[CHECKED_NAME]),
    }


def agrees(points: jax.Array, k: int, proved: bool) -> bool:
    """Tell whether `approximate` says the same."""
    try:
        found = jc.approximate(
            points,
            k,
            eps=EPS[0],
            balance=2 * k,
            max_candidates=1,
            time_limit=MOST_FIRST,
            progress=False,
        )
    except jc.TooManyCandidatesError:
        return not proved
    return proved == (found.guarantee.kind == "certificate")


def shares_table(found: dict[str, Any]) -> Table:
    results = found["results"]
    rows = results["rows"]

    def share(some: list[dict[str, Any]], bound: str, name: str) -> str:
        return f"{sum(row[bound][name] for row in some)} of {len(some)}"

    groups: list[tuple[str, str, list[dict[str, Any]]]] = [("all", "quick", rows)]
    groups.append(("all", "tight", rows))
    drawn = [row for row in rows if row["distance"] is not None]
    for d in sorted({row["d"] for row in drawn}):
        groups.append((f"{d}-D", "tight", [row for row in drawn if row["d"] == d]))
    for distance in sorted({row["distance"] for row in drawn}):
        some = [row for row in drawn if row["distance"] == distance]
        groups.append((f"{distance:g} sigma", "tight", some))
    checked = [row["agrees"] for row in rows if row["agrees"] is not None]
    return Table(
        f"How many of {len(rows)} instances are certified without enumeration: the claim is proved "
        f"for the best of {results['starts']} starts of CEM by the quick bound alone, or by that "
        f"and the tight one in {results['most seconds']:g} seconds. Claims are a factor of 1 + ε "
        "on the tight scale, or η nats per point; clusters of at least n / 2K points; mixtures of "
        f"{span((row['k'] for row in drawn), 0)} Gaussians so many "
        "standard deviations apart or more" + (", and iris." if len(rows) > len(drawn) else "."),
        ("instances", "bound", *TARGETS),
        tuple(
            (name, bound, *(share(some, bound, target) for target in TARGETS))
            for name, bound, some in groups
        ),
        f"`approximate` itself says the same in {sum(checked)} of {len(checked)} that were put to "
        f"it.\n\n{source(found)}",
    )


PARTS = {
    "plans": Part(measure_plans, plans_table),
    "gaps": Part(measure_gaps, gaps_table),
    "shares": Part(measure_shares, shares_table),
}
