"""How good the answers of `jc.fit` are: beside peers, known structure and the true optimum.

Costs are complete-data negative log-likelihoods in nats, lower is better, recomputed from labels in
float64 by the same function for everyone. A partition with a cluster that is smaller than
`min_size` costs infinity, and so does one with a cluster without spread, which would cost minus
infinity.

Real data: iris, wine, breast cancer and digits, wine and breast cancer standardised. The peers are
KMeans and a spherical GaussianMixture of scikit-learn, each the best of 20 starts of its own, on
the same float32 points; each of their partitions is improved by CEM before it counts. Per cell, the
best peer is the least over both and over all random states, and the excess is what the worst of our
keys costs more: it should not be above 0. Times are medians over the keys, interleaved; those of
peers are without CEM. To compile takes what the first call takes longer than the same call later.
The thorough search is compared with the least costs that are known, from far longer searches.

Synthetic data: mixtures with sizes and variances that are log-uniform over a decade, and 20 points
in the least cluster. The separation of two clusters is |mean - mean'| / sqrt((variance + variance')
/ 2). Every mean is, of ten normal draws, the one with the largest separation from the means before
it, lest clusters be nested; then all are scaled for the median separation of a cluster from its
nearest one to be uniform from 3 to 6. So there is structure, and clusters overlap. An instance is
solved if ours costs no more than what CEM makes of the labels that the data was drawn with; where
that is not admissible, any answer that is counts, and the instance has no difference in cost. The
seed is the number of the instance.

Brute force: instances of up to 12 points, with outliers, duplicates, two scales or heavy tails, for
all three problems, and variances of at least `FLOOR`. The optimum is the least over all partitions.

Run: `python -m benchmarks.quality` (add `--only real,thorough` for some of the parts,
`--quick` for fewer keys and instances, `--json FILE` to keep the numbers).
"""

import argparse
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import jaxcmle as jc
from benchmarks.common import report

T = TypeVar("T")

PARTS = ("real", "thorough", "synthetic", "brute")
CLUSTERS = (2, 3, 5, 8, 10, 15)
PEERS = ("KMeans", "GaussianMixture")
PEER_STARTS = 20
# The least costs that are known, by the number of clusters.
BEST_KNOWN = {
    "iris": {3: 387.756, 5: 305.246, 10: 204.090, 15: 158.729},
    "wine": {3: 2743.182, 5: 2634.509, 10: 2435.257, 15: 2275.761},
    "breast cancer": {3: 18995.701, 5: 17488.426, 10: 15565.866, 15: 14582.697},
    "digits": {3: 320234.353, 5: 311175.743, 10: 299191.373, 15: 292422.932},
}
# Nats from the best known at which a cell is marked.
SHORT, LOWER = 0.5, 0.05
# A variance of a cluster that is none, relative to that of all points.
NO_SPREAD = 1e-10
# For CEM to start from a partition with an empty cluster, or one without spread.
START_VARIANCE = 1e-6
SETTLE = 0.3

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
SEEDS = 10
LEAST_SIZE = 20
SEPARATION = (3.0, 6.0)
DRAWS = 10
AIM_SYNTHETIC = 0.95

FLOOR = 1e-3
BETA = 0.7
PROBLEMS: dict[str, jc.Problem] = {"CMLE": jc.CMLE(), "WKM": jc.WKM(BETA), "UCMLE": jc.UCMLE()}
FAMILIES = ("gaussian", "outlier", "rounded", "two scales", "Cauchy")
SIZES = (8, 10, 12)
OPTIMAL = 1e-4
AIM_BRUTE = 0.99


def default_min_size(n: int, k: int) -> int:
    return max(2, math.ceil(n / (10 * k)))


def partition_cost(x: np.ndarray, labels: np.ndarray, k: int, min_size: int) -> float:
    """Return the cost of a partition; infinity if a cluster is too small or has no spread."""
    x = x.astype(np.float64)
    n, d = x.shape
    least = NO_SPREAD * x.var(axis=0).mean()
    total = 0.0
    for cluster in range(k):
        members = x[labels == cluster]
        size = len(members)
        if size < max(1, min_size):
            return math.inf
        variance = float(members.var(axis=0).mean())
        if variance <= least:
            return math.inf
        total += size * d / 2 * (math.log(2 * math.pi * variance) + 1) - size * math.log(size / n)
    return total


def solution_cost(x: np.ndarray, solution: jc.Solution, k: int, min_size: int) -> float:
    if int(solution.status) not in (jc.Status.CONVERGED, jc.Status.MAX_ITER):
        return math.inf
    return partition_cost(x, np.asarray(solution.labels), k, min_size)


def cem_cost(x: np.ndarray, labels: np.ndarray, k: int, min_size: int) -> float:
    """Return the cost that CEM reaches from a partition."""
    start = jc.estimate(x, labels, k)
    if not (start.weights > 0).all() or not (start.variances > 0).all():
        start = jc.estimate(x, labels, k, min_variance=START_VARIANCE)
    return solution_cost(x, jc.cem(x, start, min_size=min_size), k, min_size)


def excess_over(cost: float, other: float) -> float:
    """Return how much more one costs than the other; 0 if both are infinite."""
    return 0.0 if cost == other else cost - other


def is_reached(cost: float, other: float) -> bool:
    """Tell whether one costs no more than the other, but for rounding."""
    if not math.isfinite(other):
        return math.isfinite(cost)
    return cost <= other + 1e-6 * abs(other) + 1e-3


def timed(run: Callable[[], T]) -> tuple[float, T]:
    # Threads of what ran before may still be spinning.
    time.sleep(SETTLE)
    begin = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - begin, result


def real_data() -> dict[str, np.ndarray]:
    from sklearn import datasets

    def standardised(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(axis=0)) / x.std(axis=0)

    sets = {
        "iris": datasets.load_iris().data,
        "wine": standardised(datasets.load_wine().data),
        "breast cancer": standardised(datasets.load_breast_cancer().data),
        "digits": datasets.load_digits().data,
    }
    return {name: x.astype(np.float32) for name, x in sets.items()}


def peer_labels(name: str, x: np.ndarray, k: int, seed: int, starts: int) -> np.ndarray:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    if name == "KMeans":
        model = KMeans(k, n_init=starts, random_state=seed)
    else:
        model = GaussianMixture(k, covariance_type="spherical", n_init=starts, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return np.asarray(model.fit_predict(x))


def measure_real(name: str, x: np.ndarray, k: int, keys: int) -> dict[str, Any]:
    min_size = default_min_size(len(x), k)
    points = jnp.asarray(x)

    def ours(seed: int) -> jc.Solution:
        return jc.fit(points, k, key=jax.random.key(seed), min_size=min_size, progress=False)

    first, _ = timed(lambda: ours(0))
    for peer in PEERS:
        peer_labels(peer, x, k, 0, 1)
    times: dict[str, list[float]] = {who: [] for who in ("jaxcmle", *PEERS)}
    costs: dict[str, list[float]] = {who: [] for who in times}
    for seed in range(keys):
        seconds, solution = timed(functools.partial(ours, seed))
        times["jaxcmle"].append(seconds)
        costs["jaxcmle"].append(solution_cost(x, solution, k, min_size))
        for peer in PEERS:
            run = functools.partial(peer_labels, peer, x, k, seed, PEER_STARTS)
            seconds, labels = timed(run)
            times[peer].append(seconds)
            costs[peer].append(cem_cost(x, labels, k, min_size))
    best_peer = min(min(costs[peer]) for peer in PEERS)
    medians = {who: statistics.median(values) for who, values in times.items()}
    result = {
        "set": name,
        "k": k,
        "min_size": min_size,
        "costs": costs,
        "best peer": best_peer,
        "excess": excess_over(max(costs["jaxcmle"]), best_peer),
        "keys": keys,
        "keys as good": sum(is_reached(cost, best_peer) for cost in costs["jaxcmle"]),
        "seconds": medians,
        "all seconds": times,
        "ratios": {peer: medians[peer] / medians["jaxcmle"] for peer in PEERS},
        "compile seconds": first - times["jaxcmle"][0],
    }
    return result


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
        "mark": "SHORT" if gap > SHORT else "lower" if gap < -LOWER else "",
        "rounds": int(solution.n_iter),
        "seconds with compilation": time.perf_counter() - begin,
    }


def run_thorough(quick: bool) -> dict[str, Any]:
    print("real data: the thorough search above the best known, in nats")
    print(f"(SHORT: by over {SHORT}; lower: by over {LOWER})")
    cells = []
    for name, x in real_data().items():
        for k, known in list(BEST_KNOWN[name].items())[: 1 if quick else None]:
            cell = measure_thorough(name, x, k, known)
            cells.append(cell)
            gap, rounds = cell["above best known"], cell["rounds"]
            print(f"{name:<14}{k:>3}{gap:>10.3f} in {rounds} rounds {cell['mark']}", flush=True)
    marks = [cell["mark"] for cell in cells]
    total = {"cells": len(cells), "short": marks.count("SHORT"), "lower": marks.count("lower")}
    print(f"{total['short']} of {len(cells)} short, {total['lower']} lower than known", flush=True)
    return {"cells": cells, "total": total}


def run_real(quick: bool) -> dict[str, Any]:
    keys = 2 if quick else 5
    print(f"real data: the worst of {keys} keys above the best of {2 * keys} peers, in nats; how")
    print("many keys are as good; GaussianMixture's time over ours")
    print(
        f"{'set':<14}{'k':>3}{'best peer':>13}{'excess':>11}{'keys':>6}{'ratio':>8}"
        f"{'ours s':>9}{'mixture s':>11}{'compile s':>11}"
    )
    cells = []
    for name, x in real_data().items():
        for k in CLUSTERS:
            cell = measure_real(name, x, k, keys)
            cells.append(cell)
            good = cell["keys as good"]
            text = f"{name:<14}{k:>3}{cell['best peer']:>13.3f}{cell['excess']:>11.3f}"
            text += f"{f'{good}/{keys}':>6}{cell['ratios']['GaussianMixture']:>8.2f}"
            text += f"{cell['seconds']['jaxcmle']:>9.3f}{cell['seconds']['GaussianMixture']:>11.3f}"
            text += f"{cell['compile seconds']:>11.1f}"
            print(text + ("" if good == keys else " WORSE"), flush=True)
    ratios = [cell["ratios"]["GaussianMixture"] for cell in cells]
    total = {
        "cells": len(cells),
        "cells as good with every key": sum(cell["keys as good"] == keys for cell in cells),
        "mean ratio": statistics.mean(ratios),
        "median ratio": statistics.median(ratios),
        "least ratio": min(ratios),
    }
    print(
        f"{total['cells as good with every key']} of {len(cells)} cells are as good with every "
        f"key; time ratio: mean {total['mean ratio']:.1f}, median {total['median ratio']:.1f}, "
        f"least {total['least ratio']:.2f}",
        flush=True,
    )
    return {"cells": cells, "total": total}


def mixture_data(n: int, d: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points, and the labels they were drawn with."""
    rng = np.random.default_rng(seed)
    shares, variances = np.exp(rng.uniform(0, math.log(10), size=(2, k)))
    sizes = np.maximum(LEAST_SIZE, n * shares / shares.sum()).astype(int)
    sizes[sizes.argmax()] += n - sizes.sum()
    means = rng.normal(size=(k, d))
    nearest = np.full(k, math.inf)
    for j in range(1, k):
        draws = rng.normal(size=(DRAWS, d))
        distances = np.sqrt(((draws[:, None] - means[:j]) ** 2).sum(axis=2))
        separations = distances / np.sqrt((variances[:j] + variances[j]) / 2)
        chosen = separations.min(axis=1).argmax()
        means[j] = draws[chosen]
        nearest[j] = separations[chosen].min()
        nearest[:j] = np.minimum(nearest[:j], separations[chosen])
    means *= rng.uniform(*SEPARATION) / np.median(nearest)
    labels = rng.permutation(np.repeat(np.arange(k), sizes))
    x = means[labels] + np.sqrt(variances[labels])[:, None] * rng.normal(size=(n, d))
    return x.astype(np.float32), labels


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
                "difference": excess_over(cost, truth),
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
    print(f"mixtures: share that costs no more than the truth after CEM (aim {AIM_SYNTHETIC:.0%}),")
    print("and what ours costs more, in nats")
    print(
        f"{'n':>6}{'d':>4}{'k':>4}{'reached':>9}{'mean diff':>12}{'worst diff':>12}"
        f"{'no truth':>10}{'seconds':>9}{'compile s':>11}"
    )
    shapes = []
    for place, (n, d, k) in enumerate(SHAPES):
        begin = SEEDS * place
        found = measure_synthetic(n, d, k, range(begin, begin + (2 if quick else SEEDS)))
        shapes.append(found)
        print(
            f"{n:>6}{d:>4}{k:>4}{found['reached']:>9.0%}{found['mean difference']:>12.3f}"
            f"{found['worst difference']:>12.3f}{found['inadmissible truths']:>10}"
            f"{found['median seconds']:>9.2f}{found['compile seconds']:>11.1f}",
            flush=True,
        )
    instances = [instance for found in shapes for instance in found["instances"]]
    total = synthetic_summary(instances)
    print(
        f"all {len(instances)}: {total['reached']:.1%}, mean difference "
        f"{total['mean difference']:.3f} nats, {total['inadmissible truths']} without an "
        f"admissible truth, median {total['median seconds']:.2f} s",
        flush=True,
    )
    return {"shapes": shapes, "total": total}


@functools.cache
def partitions(n: int, k: int) -> np.ndarray:
    """Return every partition of n points into k clusters as bit masks `[p, k]`.

    Clusters are in the order of their first points, so that none comes twice.
    """
    masks, used = np.zeros((1, k), np.int32), np.zeros(1, np.int32)
    for point in range(n):
        # A point joins a cluster that has points, or founds the next.
        rows, clusters = np.nonzero(np.arange(k) <= used[:, None])
        masks, used = masks[rows], np.maximum(used[rows], clusters + 1)
        masks[np.arange(len(rows)), clusters] |= 1 << point
        possible = k - used <= n - point - 1
        masks, used = masks[possible], used[possible]
    return masks


def subset_costs(x: np.ndarray, problem: str, min_size: int) -> np.ndarray:
    """Return the cost of every subset as a cluster, `[2^n]`; infinity if it is too small."""
    x = x.astype(np.float64)
    n, d = x.shape
    inside = ((np.arange(2**n)[:, None] >> np.arange(n)) & 1).astype(np.float64)
    distances = ((x[:, None] - x) ** 2).sum(axis=2)
    count = inside.sum(axis=1)
    size = np.maximum(count, 1)
    scatter = ((inside @ distances) * inside).sum(axis=1) / (2 * size)
    variance = np.maximum(scatter / (d * size), FLOOR)
    costs = size * d / 2 * np.log(2 * math.pi * variance) + scatter / (2 * variance)
    if problem == "WKM":
        costs = BETA * scatter
    if problem != "UCMLE":
        costs = costs - size * np.log(size / n)
    return np.where(count >= max(1, min_size), costs, math.inf)


def small_data(rng: np.random.Generator, family: str, n: int, d: int, k: int) -> np.ndarray:
    """Return few points, of which at least k are distinct."""
    while True:
        x = rng.normal(size=(n, d))
        if family == "outlier":
            x[0] += rng.choice([-1, 1], size=d) * rng.uniform(5, 50)
        elif family == "rounded":
            x = np.round(2 * x) / 2
        elif family == "two scales":
            x *= np.where(np.arange(n) % 2, 0.05, 2.0)[:, None]
        elif family == "Cauchy":
            x = rng.standard_cauchy(size=(n, d))
        x = x.astype(np.float32)
        if len(np.unique(x, axis=0)) >= k:
            return x


def measure_brute(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    problem, family = str(rng.choice(list(PROBLEMS))), str(rng.choice(FAMILIES))
    n, d, k = int(rng.choice(SIZES)), int(rng.integers(1, 3)), int(rng.integers(2, 5))
    min_size = int(rng.choice([1, 2, n // k]))
    x = small_data(rng, family, n, d, k)
    begin = time.perf_counter()
    solution = jc.fit(
        jnp.asarray(x),
        k,
        key=jax.random.key(seed),
        problem=PROBLEMS[problem],
        min_size=min_size,
        min_variance=FLOOR,
        progress=False,
    )
    labels = np.asarray(solution.labels)
    seconds = time.perf_counter() - begin
    costs = subset_costs(x, problem, min_size)
    best = float(costs[partitions(n, k)].sum(axis=1).min())
    masks = ((labels == np.arange(k)[:, None]) << np.arange(n)).sum(axis=1)
    cost = float(costs[masks].sum())
    return {
        "seed": seed,
        "problem": problem,
        "family": family,
        "n": n,
        "d": d,
        "k": k,
        "min_size": min_size,
        "cost": cost,
        "optimum": best,
        "reached": cost <= best + OPTIMAL * max(1.0, abs(best)),
        "seconds": seconds,
    }


def run_brute(quick: bool) -> dict[str, Any]:
    count = 60 if quick else 500
    print(f"brute force: share of {count} small instances solved to the optimum", end=" ")
    print(f"(aim {AIM_BRUTE:.0%})", flush=True)
    instances = []
    for seed in range(count):
        found = measure_brute(seed)
        instances.append(found)
        if not found["reached"]:
            words = " ".join(f"{name} {found[name]}" for name in ("n", "d", "k", "min_size"))
            gap = found["cost"] - found["optimum"]
            print(
                f"missed: seed {seed} {found['problem']} {found['family']} {words}: {gap:+.4f}",
                flush=True,
            )
        if (seed + 1) % 50 == 0:
            reached = sum(instance["reached"] for instance in instances)
            print(f"{reached} of {seed + 1}", flush=True)

    def shares(name: str) -> dict[str, float]:
        values = sorted({instance[name] for instance in instances})
        return {
            str(value): statistics.mean(
                float(found["reached"]) for found in instances if found[name] == value
            )
            for value in values
        }

    total = {
        "count": count,
        "reached": statistics.mean(float(found["reached"]) for found in instances),
        **{f"by {name}": shares(name) for name in ("problem", "family", "k", "d", "n")},
        "median seconds": statistics.median(found["seconds"] for found in instances),
    }
    for name in ("problem", "family"):
        print(", ".join(f"{value} {share:.1%}" for value, share in total[f"by {name}"].items()))
    print(
        f"all {count}: {total['reached']:.1%}, median {total['median seconds']:.3f} s", flush=True
    )
    return {"instances": instances, "total": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas between")
    parser.add_argument("--quick", action="store_true", help="fewer keys and instances")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--only takes some of {','.join(PARTS)}, got {','.join(sorted(unknown))}")

    runs = {
        "real": run_real,
        "thorough": run_thorough,
        "synthetic": run_synthetic,
        "brute": run_brute,
    }
    results = {}
    for part in PARTS:
        if part in chosen:
            results[part] = runs[part](options.quick)
            print()
    report({"quick": options.quick, **results}, options.json, "scikit-learn")


if __name__ == "__main__":
    main()
