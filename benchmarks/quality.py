"""How good the answers of `jc.fit` are: beside peers, known structure and the true optimum.

Costs are complete-data negative log-likelihoods in nats, lower is better, recomputed from labels in
float64 by the same function for everyone. A partition with a cluster that is smaller than
`min_size` costs infinity, and so does one with a cluster without spread, which would cost minus
infinity.

Peers: real data and mixtures. Each peer is the best of 20 starts of its own, on the same float32
points, raw and after our CEM has improved it. Times are interleaved over the seeds; those of peers
are without CEM. The thorough search is compared with the least costs that are known, from far
longer searches.

Synthetic data: an instance is solved if ours costs no more than what CEM makes of the labels that
the data was drawn with; where that is not admissible, any answer that is counts, and the instance
has no difference in cost. The seed is the number of the instance.
"""

import functools
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcmle as jc
from benchmarks import brute
from benchmarks.data import mixture_data, real_data
from benchmarks.harness import say, timed
from benchmarks.judging import (
    cem_cost,
    default_min_size,
    is_reached,
    partition_cost,
    solution_cost,
)
from benchmarks.peers import absent, present
from benchmarks.tables import Part, Table, number, source, span

PEER_STARTS = 20
SEEDS = 3
CLUSTERS = (3, 10)
# Points, features, clusters and seed of mixtures beside the real data.
MIXTURES = ((2000, 2, 15, 7), (2000, 8, 10, 8))
# The least costs that are known, by the number of clusters.
BEST_KNOWN = {
    "iris": {3: 387.756, 5: 305.246, 10: 204.090, 15: 158.729},
    "wine": {3: 2743.182, 5: 2634.509, 10: 2435.257, 15: 2275.761},
    "breast cancer": {3: 18995.701, 5: 17488.426, 10: 15565.866, 15: 14582.697},
    "digits": {3: 320234.353, 5: 311175.743, 10: 299191.373, 15: 292422.932},
}
AIM_THOROUGH = 0.5

# Points, features, clusters.
SHAPES = (
    (2000, 2, 5),
    (2000, 10, 5),
    (2000, 5, 10),
    (2000, 50, 10),
    (3000, 2, 20),
    (3000, 20, 20),
    (4000, 5, 30),
    (5000, 20, 40),
    (5000, 2, 50),
    (5000, 50, 50),
)
# Of the shape of iris, whose programs are there already.
QUICK_SHAPES = ((150, 4, 3),)
INSTANCES = 10
AIM_SYNTHETIC = 0.95


def cells(quick: bool) -> list[tuple[str, np.ndarray, int]]:
    """Return the data sets with their names and numbers of clusters."""
    sets = real_data()
    if quick:
        return [("iris", sets["iris"], 3)]
    result = [(name, x, k) for name, x in sets.items() for k in CLUSTERS]
    for n, d, k, seed in MIXTURES:
        result.append((f"mixture, {d}-D", mixture_data(n, d, k, seed)[0], k))
    return result


def measure_cell(name: str, x: np.ndarray, k: int, seeds: int, starts: int) -> dict[str, Any]:
    """Run everyone with every seed, in turns, after a call of each."""
    min_size = default_min_size(len(x), k)
    points = jnp.asarray(x)

    def ours(seed: int) -> np.ndarray:
        key = jax.random.key(seed)
        solution = jc.fit(points, k, key=key, min_size=min_size, progress=False)
        return np.asarray(solution.labels)

    methods = {"jaxcmle": ours} | {
        peer.name: functools.partial(lambda labels, seed: labels(x, k, seed, starts), peer.labels)
        for peer in present()
    }
    first = {who: timed(functools.partial(run, 0))[0] for who, run in methods.items()}
    found: dict[str, dict[str, list[float]]] = {
        who: {"seconds": [], "raw": [], "after CEM": []} for who in methods
    }
    for seed in range(seeds):
        for who, run in methods.items():
            seconds, labels = timed(functools.partial(run, seed))
            found[who]["seconds"].append(seconds)
            found[who]["raw"].append(partition_cost(x, labels, k, min_size))
            improved = cem_cost(x, labels, k, min_size) if who != "jaxcmle" else math.nan
            found[who]["after CEM"].append(improved)
    n, d = x.shape
    own = statistics.median(found["jaxcmle"]["seconds"])
    return {
        "set": name,
        "n": n,
        "d": d,
        "k": k,
        "min_size": min_size,
        "found": found,
        "compile seconds": max(0.0, first["jaxcmle"] - own),
        "time ratios": {
            who: statistics.median(each["seconds"]) / own
            for who, each in found.items()
            if who != "jaxcmle"
        },
    }


def measure_peers(quick: bool) -> dict[str, Any]:
    seeds, starts = (1, 5) if quick else (SEEDS, PEER_STARTS)
    result = []
    for name, x, k in cells(quick):
        say("quality peers", name, k)
        result.append(measure_cell(name, x, k, seeds, starts))
    what = {peer.name: peer.what for peer in present()}
    return {
        "cells": result,
        "seeds": seeds,
        "starts": starts,
        "methods": what,
        "absent": absent(),
    }


class Tally(NamedTuple):
    """How often ours costs less, the same and more, where theirs is admissible, and how much less.

    The mean gain is in nats per point, over the runs in which both are admissible.
    """

    less: int
    same: int
    more: int
    inadmissible: int
    gain: float

    def __str__(self) -> str:
        """Return the counts for a table."""
        counts = f"{self.less} / {self.same} / {self.more}"
        return counts + (f", {self.inadmissible} too small" if self.inadmissible else "")


def tally(cells: list[dict[str, Any]], peer: str, word: str) -> Tally:
    less = same = more = inadmissible = 0
    gains = []
    for cell in cells:
        pairs = zip(cell["found"]["jaxcmle"]["raw"], cell["found"][peer][word], strict=True)
        for given in pairs:
            mine, theirs = (math.inf if cost is None else cost for cost in given)
            if math.isinf(theirs):
                inadmissible += 1
            elif not is_reached(mine, theirs):
                more += 1
            elif is_reached(theirs, mine):
                same += 1
            else:
                less += 1
            if math.isfinite(mine) and math.isfinite(theirs):
                gains.append((theirs - mine) / cell["n"])
    return Tally(less, same, more, inadmissible, statistics.mean(gains) if gains else math.nan)


def peers_table(found: dict[str, Any]) -> Table:
    results = found["results"]
    rows = []
    for peer, what in results["methods"].items():
        row = [f"{peer} ({what})"]
        for word in ("raw", "after CEM"):
            counts = tally(results["cells"], peer, word)
            row += [str(counts), f"{counts.gain:.3f}"]
        each = [cell["time ratios"][peer] for cell in results["cells"]]
        spread = f"{number(min(each))} to {number(max(each))}"
        rows.append((*row, f"{number(statistics.median(each))} ({spread})"))
    sets = dict.fromkeys(cell["set"] for cell in results["cells"])
    numbers = sorted({cell["k"] for cell in results["cells"]})
    runs = len(results["cells"]) * results["seeds"]
    before = (
        f"`fit` beside others with {results['starts']} starts each (mclust has its own one): "
        f"{', '.join(sets)}; K = {', '.join(map(str, numbers))}; {runs} runs in all, clusters of "
        "at least `max(2, n / (10 K))` points, one float64 cost from labels. In how many runs ours "
        "costs less / the same / more, and how many nats per point less on average, held against "
        "their labels and against what our CEM makes of them; runs in which they left a cluster "
        "too small are counted apart. Then their time over ours after compilation: below 1, they "
        "are faster."
    )
    missing = "; ".join(f"{name}: {why}" for name, why in results["absent"].items())
    compiling = span([cell["compile seconds"] for cell in results["cells"]], 0)
    after = (
        f"A first call of `fit` takes {compiling} seconds more, to compile. Absent: {missing}."
        f"\n\n{source(found)}"
    )
    header = (
        "peer",
        "raw: less / same / more",
        "nats per point less",
        "after our CEM: less / same / more",
        "nats per point less",
        "time / ours",
    )
    return Table(before, header, tuple(rows), after)


def measure_thorough(name: str, x: np.ndarray, k: int, known: float) -> dict[str, Any]:
    min_size = default_min_size(len(x), k)
    key = jax.random.key(0)
    begin = time.perf_counter()
    solution = jc.fit(
        jnp.asarray(x), k, key=key, min_size=min_size, effort="thorough", progress=False
    )
    gap = solution_cost(x, solution, k, min_size) - known
    return {
        "set": name,
        "k": k,
        "cost": gap + known,
        "best known": known,
        "above best known": gap,
        "rounds": int(solution.n_iter),
        "seconds with compilation": time.perf_counter() - begin,
    }


def run_thorough(quick: bool) -> dict[str, Any]:
    result = []
    for name, x in list(real_data().items())[: 1 if quick else None]:
        for k, known in list(BEST_KNOWN[name].items())[: 1 if quick else None]:
            say("quality thorough", name, k)
            result.append(measure_thorough(name, x, k, known))
    return {"cells": result}


def thorough_table(found: dict[str, Any]) -> Table:
    cells = found["results"]["cells"]
    numbers = sorted({cell["k"] for cell in cells})
    rows = []
    for name in dict.fromkeys(cell["set"] for cell in cells):
        above = {cell["k"]: cell["above best known"] for cell in cells if cell["set"] == name}
        rows.append(
            (name, *(f"{round(above[k], 2) + 0.0:.2f}" if k in above else "" for k in numbers))
        )
    before = (
        '`effort="thorough"`, one key, in nats (not per point) above the least cost that is known, '
        f"from far longer searches (aim: {AIM_THOROUGH:g} at most)."
    )
    return Table(before, ("set", *(f"K = {k}" for k in numbers)), tuple(rows), source(found))


def measure_synthetic(n: int, d: int, k: int, seeds: range) -> dict[str, Any]:
    """Solve the instances of one shape, after a run that compiles."""
    min_size = default_min_size(n, k)
    instances = []
    first = math.nan
    for seed in seeds:
        x, labels = mixture_data(n, d, k, seed)
        run = functools.partial(
            jc.fit, jnp.asarray(x), k, key=jax.random.key(seed), min_size=min_size, progress=False
        )
        if seed == seeds[0]:
            first, _ = timed(run)
        seconds, solution = timed(run)
        cost, truth = solution_cost(x, solution, k, min_size), cem_cost(x, labels, k, min_size)
        instances.append(
            {
                "seed": seed,
                "cost": cost,
                "truth": truth,
                "reached": is_reached(cost, truth),
                "difference": 0.0 if cost == truth else cost - truth,
                "seconds": seconds,
            }
        )
    return {
        "n": n,
        "d": d,
        "k": k,
        "instances": instances,
        "compile seconds": first - instances[0]["seconds"],
        **synthetic_summary(instances),
    }


def synthetic_summary(instances: list[dict[str, Any]]) -> dict[str, Any]:
    differences = [found["difference"] for found in instances if math.isfinite(found["difference"])]
    return {
        "reached": statistics.mean(float(found["reached"]) for found in instances),
        "mean difference": statistics.mean(differences) if differences else math.nan,
        "worst difference": max(differences, default=math.nan),
        "inadmissible truths": sum(not math.isfinite(found["truth"]) for found in instances),
        "inadmissible answers": sum(not math.isfinite(found["cost"]) for found in instances),
        "median seconds": statistics.median(found["seconds"] for found in instances),
    }


def run_synthetic(quick: bool) -> dict[str, Any]:
    result = []
    for place, (n, d, k) in enumerate(QUICK_SHAPES if quick else SHAPES):
        say("quality synthetic", n, d, k)
        begin = INSTANCES * place
        seeds = range(begin, begin + (2 if quick else INSTANCES))
        result.append(measure_synthetic(n, d, k, seeds))
    instances = [instance for found in result for instance in found["instances"]]
    return {"shapes": result, "total": synthetic_summary(instances)}


def synthetic_table(found: dict[str, Any]) -> Table:
    shapes, total = found["results"]["shapes"], found["results"]["total"]
    rows = []
    for one in shapes:
        good, count = sum(each["reached"] for each in one["instances"]), len(one["instances"])
        worst = number(max(0.0, one["worst difference"] or 0.0))
        rows.append((f"{one['n']:,} × {one['d']}, {one['k']}", f"{good} of {count}", worst))
    count = sum(len(one["instances"]) for one in shapes)
    good = sum(each["reached"] for one in shapes for each in one["instances"])
    rows.append(("all", f"{good} of {count}", number(max(0.0, total["worst difference"] or 0.0))))
    before = (
        "Mixtures whose sizes and variances spread over a decade: how many cost no more than what "
        f"CEM makes of the labels they were drawn with (aim {AIM_SYNTHETIC:.0%}), and the most "
        "nats (not per point) that one costs more."
    )
    free = total["inadmissible truths"]
    after = f"{free} of them count for free, as CEM left a cluster that is too small.\n\n"
    header = ("points × features, clusters", "as good as the truth", "worst")
    return Table(before, header, tuple(rows), after + source(found))


PARTS = {
    "peers": Part(measure_peers, peers_table),
    "thorough": Part(run_thorough, thorough_table),
    "synthetic": Part(run_synthetic, synthetic_table),
    "brute": Part(brute.measure, brute.table),
}
