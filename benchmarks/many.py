"""Many instances in one call, beside loops over scikit-learn and beside `vmap`.

- cem: CEM to convergence from the same starts, beside KMeans (n_init=1) and spherical
  GaussianMixture from the same means, each in a Python loop, and beside `jax.vmap` of our own CEM.
- fit: `fit_many(effort="quick")`, certificates included, beside a loop of GaussianMixture with
  n_init=10; and whose labels cost less, by one float64 formula. A partition with a cluster under
  the minimum size does not count as a solution.
- ragged: lengths from 20 to 5000, lognormal: what padding wastes, and what compilation takes.
- large: 100,000 instances in one call, and the memory that takes on top of the data.

Methods are run one after the other, interleaved, after a warm-up; a time is the median of the
rounds. Ours is that of the whole call: checks, packing, copies and results.

Run: `python -m benchmarks.many` (`--only NAME`, `--rounds N`, `--json FILE`).
"""

import argparse
import math
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcmle as jc
from benchmarks.common import report
from jaxcmle.solve.instances import bucket_of

# Instances, points, features, clusters; what the loops are to take, in units of our time.
CEM_SHAPES: tuple[tuple[int, int, int, int, dict[str, float]], ...] = (
    (1000, 200, 2, 3, {"KMeans": 40, "GaussianMixture": 100, "vmap": 2}),
    (64, 5000, 8, 8, {"KMeans": 3, "vmap": 2}),
)
FIT_SHAPE = (1000, 200, 2, 3)
FIT_AIMS = {"ratio": 10.0, "share": 0.99}
RAGGED = {"instances": 200, "median": 200.0, "sigma": 1.1, "shortest": 20, "longest": 5000}
LARGE = (100_000, 20, 2, 2)
# Costs are equal if they differ by less, relative to their size.
EQUAL = 1e-6
# Threads of the method before may still be spinning.
SETTLE = 0.5


def data(b: int, n: int, d: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return instances of overlapping clusters, and k points of each to start from."""
    rng = np.random.default_rng(seed)
    centres = 3 * rng.normal(size=(b, k, d))
    widths = rng.uniform(0.5, 1.5, size=(b, k))
    labels = rng.integers(0, k, size=(b, n))
    noise = np.take_along_axis(widths, labels, 1)[..., None] * rng.normal(size=(b, n, d))
    x = np.take_along_axis(centres, labels[..., None], 1) + noise
    starts = np.stack([each[rng.choice(n, k, replace=False)] for each in x])
    return x.astype(np.float32), starts.astype(np.float32)


def kmeans(xs: Any, means: Any) -> list[np.ndarray]:
    from sklearn.cluster import KMeans

    return [
        KMeans(len(start), init=start, n_init=1).fit(x).labels_
        for x, start in zip(xs, means, strict=True)
    ]


def gaussian_mixture(xs: Any, means: Any) -> list[np.ndarray]:
    from sklearn.mixture import GaussianMixture

    return [
        GaussianMixture(len(start), covariance_type="spherical", means_init=start).fit_predict(x)
        for x, start in zip(xs, means, strict=True)
    ]


def mixtures_with_restarts(xs: Any, k: int) -> list[np.ndarray]:
    from sklearn.mixture import GaussianMixture

    return [
        GaussianMixture(k, covariance_type="spherical", n_init=10, random_state=0).fit_predict(x)
        for x in xs
    ]


def timed(methods: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the times of all methods, one round after the other, after a warm-up of each."""
    for run in methods.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, run in methods.items():
            time.sleep(SETTLE)
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return times


def ratios(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return how many times ours fits into each other: of medians, lowest and highest of rounds."""
    own = times["jaxcmle"]
    result = {}
    for name, others in times.items():
        if name != "jaxcmle":
            each = [other / mine for other, mine in zip(others, own, strict=True)]
            middle = statistics.median(others) / statistics.median(own)
            result[name] = {"ratio": middle, "lowest": min(each), "highest": max(each)}
    return result


def measure_cem(
    b: int, n: int, d: int, k: int, aims: dict[str, float], rounds: int
) -> dict[str, Any]:
    x, means = data(b, n, d, k)
    starts = jc.Mixture(
        weights=jnp.full((b, k), 1 / k), means=jnp.asarray(means), variances=jnp.ones((b, k))
    )
    device_x = jnp.asarray(x)
    together = jax.jit(jax.vmap(lambda x, start: jc.cem(x, start)))
    methods: dict[str, Callable[[], Any]] = {
        "jaxcmle": lambda: jc.cem_many(x, starts),
        "vmap": lambda: jax.block_until_ready(together(device_x, starts)),
        "KMeans": lambda: kmeans(x, means),
        "GaussianMixture": lambda: gaussian_mixture(x, means),
    }
    times = timed(methods, rounds)
    found, same = jc.cem_many(x, starts), together(device_x, starts)
    equal = np.mean(np.all(np.asarray(found.labels) == np.asarray(same.labels), axis=1))
    result: dict[str, Any] = {
        "b": b,
        "n": n,
        "d": d,
        "k": k,
        "aims": aims,
        "seconds": {name: statistics.median(each) for name, each in times.items()},
        "ratios": ratios(times),
        "labels as by cem": float(equal),
        "iterations": float(np.mean(np.asarray(found.n_iter))),
    }
    print(f"cem, {b} instances of {n} x {d}, {k} clusters (time of the others / ours):")
    for name, ratio in result["ratios"].items():
        aim = f", aim {aims[name]:g}" if name in aims else ""
        spread = f"{ratio['lowest']:.1f} to {ratio['highest']:.1f}"
        print(f"  {name:16} {ratio['ratio']:8.1f}  ({spread}{aim})", flush=True)
    print(f"  labels equal to those of cem: {equal:.1%}")
    return result


def partition_cost(x: np.ndarray, labels: np.ndarray, k: int, min_size: float) -> float:
    """Return the cost of a partition in float64; infinity if a cluster is too small."""
    x, total = np.asarray(x, np.float64), 0.0
    n, d = x.shape
    for j in range(k):
        own = x[labels == j]
        if len(own) < min_size:
            return math.inf
        variance = ((own - own.mean(axis=0)) ** 2).sum() / (d * len(own))
        total += len(own) * (
            d / 2 * (math.log(2 * math.pi * variance) + 1) - math.log(len(own) / n)
        )
    return total


def after_cem(xs: Any, labels: list[np.ndarray], k: int) -> list[np.ndarray]:
    """Return labels after our CEM from the estimates of these, where every cluster has points."""
    result = list(labels)
    full = [i for i, own in enumerate(labels) if np.bincount(own, minlength=k).min() >= 2]
    starts = [estimate(np.asarray(xs[i]), labels[i], k) for i in full]
    for i, solution in zip(full, jc.cem_many([xs[i] for i in full], starts), strict=True):
        result[i] = solution.labels
    return result


def estimate(x: np.ndarray, labels: np.ndarray, k: int) -> jc.Mixture:
    """Return the best mixture of a partition, in NumPy: a program for each length takes long."""
    parts = [x[labels == j] for j in range(k)]
    values: dict[str, Any] = {
        "weights": np.array([len(part) / len(x) for part in parts], np.float32),
        "means": np.array([part.mean(axis=0) for part in parts]),
        "variances": np.array([max(part.var(axis=0).mean(), 1e-6) for part in parts], np.float32),
    }
    return jc.Mixture(**values)


def compare(xs: Any, ours: Any, theirs: list[np.ndarray], k: int) -> dict[str, float]:
    """Return the share of instances where our partition costs no more than theirs."""
    share = {}
    for name, labels in (("raw", theirs), ("after CEM", after_cem(xs, theirs, k))):
        good = short = 0
        for x, mine, other in zip(xs, ours, labels, strict=True):
            least = max(2, math.ceil(len(x) / (10 * k)))
            own, peer = (partition_cost(x, np.asarray(each), k, least) for each in (mine, other))
            short += math.isinf(peer)
            good += own <= peer + EQUAL * abs(own) if math.isfinite(own) else False
        share[name] = good / len(xs)
        share[f"too small, {name}"] = short / len(xs)
    return share


def measure_fit(rounds: int) -> dict[str, Any]:
    b, n, d, k = FIT_SHAPE
    x, _ = data(b, n, d, k, seed=5)
    methods: dict[str, Callable[[], Any]] = {
        "jaxcmle": lambda: jc.fit_many(x, k, effort="quick"),
        "without certificates": lambda: jc.fit_many(x, k, effort="quick", certificate=False),
        "GaussianMixture": lambda: mixtures_with_restarts(x, k),
    }
    begin = time.perf_counter()
    found = jc.fit_many(x, k, effort="quick")
    first = time.perf_counter() - begin
    times = timed(methods, rounds)
    share = compare(x, found.labels, mixtures_with_restarts(x, k), k)
    result: dict[str, Any] = {
        "b": b,
        "n": n,
        "d": d,
        "k": k,
        "aims": FIT_AIMS,
        "seconds": {name: statistics.median(each) for name, each in times.items()},
        "first call": first,
        "ratios": ratios(times),
        "share": share,
        "mean gap": float(np.mean(np.asarray(found.guarantee.gap))),
    }
    ratio = result["ratios"]["GaussianMixture"]
    print(f"fit_many(effort='quick'), {b} instances of {n} x {d}, {k} clusters:")
    print(f"  time of GaussianMixture(n_init=10) / ours: {ratio['ratio']:.1f}", end=" ")
    print(f"({ratio['lowest']:.1f} to {ratio['highest']:.1f}, aim {FIT_AIMS['ratio']:g})")
    for name, value in share.items():
        print(f"  {name}: {value:.1%}")
    print(f"  mean gap: {result['mean gap']:.2f} nats per point", flush=True)
    return result


def measure_ragged() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    lengths = rng.lognormal(math.log(RAGGED["median"]), RAGGED["sigma"], int(RAGGED["instances"]))
    lengths = np.clip(lengths, RAGGED["shortest"], RAGGED["longest"]).astype(int)
    k, d = 3, 2
    xs = [data(1, int(n), d, k, seed=i)[0][0] for i, n in enumerate(lengths)]
    buckets = [bucket_of(len(x), k, False).n for x in xs]
    waste = sum(buckets) / sum(lengths) - 1
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        found = jc.fit_many(xs, k, effort="quick", certificate=False)
        seconds.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    theirs = mixtures_with_restarts(xs, k)
    peer = time.perf_counter() - begin
    share = compare(xs, [one.labels for one in found], theirs, k)
    result = {
        **RAGGED,
        "d": d,
        "k": k,
        "shortest found": int(lengths.min()),
        "longest found": int(lengths.max()),
        "padding waste": waste,
        "buckets": len(set(buckets)),
        "first call": seconds[0],
        "second call": seconds[1],
        "GaussianMixture": peer,
        "ratio": peer / seconds[1],
        "share": share,
    }
    print(f"ragged, {len(xs)} instances of {lengths.min()} to {lengths.max()} points:")
    print(f"  padding adds {waste:.0%} of the points, in {len(set(buckets))} buckets")
    print(f"  the first call takes {seconds[0] / seconds[1]:.1f} times the second: compilation")
    print(f"  time of GaussianMixture(n_init=10) / ours: {peer / seconds[1]:.1f}")
    for name, value in share.items():
        print(f"  {name}: {value:.1%}", flush=True)
    return result


def measure_large() -> dict[str, Any]:
    b, n, d, k = LARGE
    x, means = data(b, n, d, k, seed=3)
    weights = jnp.full((b, k), 1 / k)
    starts = jc.Mixture(weights=weights, means=jnp.asarray(means), variances=jnp.ones_like(weights))

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def grown(run: Callable[[], Any]) -> tuple[int, float]:
        before, begin = peak(), time.perf_counter()
        jax.block_until_ready(run())
        return peak() - before, time.perf_counter() - begin

    # Compiles first, on a few.
    jc.cem_many(x[:1000], jax.tree.map(lambda leaf: leaf[:1000], starts))
    jc.fit_many(x[:200], k, effort="quick", certificate=False)
    cem_bytes, cem_seconds = grown(lambda: jc.cem_many(x, starts))
    fit_bytes, fit_seconds = grown(lambda: jc.fit_many(x, k, effort="quick", certificate=False))
    result = {
        "b": b,
        "n": n,
        "d": d,
        "k": k,
        "data bytes": x.nbytes,
        "cem bytes": cem_bytes,
        "fit bytes": fit_bytes,
        "cem instances a second": b / cem_seconds,
        "fit instances a second": b / fit_seconds,
    }
    print(f"{b} instances of {n} x {d}: data {x.nbytes / 1e6:.0f} MB,", end=" ")
    print(f"cem_many takes {cem_bytes / 1e6:.0f} MB more, fit_many {fit_bytes / 1e6:.0f} MB")
    print(f"  instances a second: {b / cem_seconds:,.0f} and {b / fit_seconds:,.0f}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("cem", "fit", "ragged", "large"))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*did not converge.*")
    warnings.filterwarnings("ignore", message=".*Number of distinct clusters.*")

    parts: dict[str, Callable[[], Any]] = {
        "cem": lambda: [measure_cem(*shape, options.rounds) for shape in CEM_SHAPES],
        "fit": lambda: measure_fit(max(1, options.rounds // 2)),
        "ragged": measure_ragged,
        "large": measure_large,
    }
    results = {
        name: run() for name, run in parts.items() if options.only is None or options.only == name
    }
    report(results, options.json, "scikit-learn")


if __name__ == "__main__":
    main()
