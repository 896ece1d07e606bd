"""Time per iteration of our CEM beside scikit-learn's KMeans and spherical GaussianMixture.

All three start from the same means on the same float32 points. The time of an iteration is the
slope between two iteration counts, so that set-up, compilation and seeding do not count; runs are
interleaved, and each time is the best of the rounds. An iteration of ours estimates weights and
variances as well, which KMeans does not have.

Run: `python -m benchmarks.cem` (add `--json FILE` to keep the numbers).
"""

import argparse
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

# Points, features, clusters, and the two iteration counts to take the slope between.
SHAPES = (
    (100_000, 2, 3, 4, 34),
    (100_000, 16, 8, 4, 24),
    (100_000, 64, 32, 4, 14),
    (1_000_000, 2, 8, 4, 14),
)
AIMS = {"KMeans": {2: 2.5, 16: 1.0, 64: 1.0}, "GaussianMixture": {2: 25.0, 16: 25.0}}


def data(n: int, d: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return overlapping clusters, and rough means, so that all methods need many iterations."""
    rng = np.random.default_rng(0)
    centres = 4 * rng.normal(size=(k, d)) / d
    labels = rng.integers(0, k, size=n)
    x = centres[labels] + rng.normal(size=(n, d))
    start = centres + rng.normal(size=(k, d)) / d
    return x.astype(np.float32), start.astype(np.float32)


def ours(x: np.ndarray, means: np.ndarray) -> Callable[[int], int]:
    k = len(means)
    points, centres = jnp.asarray(x), jnp.asarray(means)
    start = jc.Mixture(weights=jnp.full(k, 1 / k), means=centres, variances=jnp.ones(k))

    def run(iterations: int) -> int:
        solution = jax.block_until_ready(jc.cem(points, start, max_iter=iterations))
        return int(solution.n_iter)

    return run


def kmeans(x: np.ndarray, means: np.ndarray) -> Callable[[int], int]:
    from sklearn.cluster import KMeans

    def run(iterations: int) -> int:
        model = KMeans(len(means), init=means, n_init=1, max_iter=iterations, tol=0)
        return int(model.fit(x).n_iter_)

    return run


def gaussian_mixture(x: np.ndarray, means: np.ndarray) -> Callable[[int], int]:
    from sklearn.mixture import GaussianMixture

    k = len(means)

    def run(iterations: int) -> int:
        model = GaussianMixture(
            k,
            covariance_type="spherical",
            means_init=means,
            weights_init=np.full(k, 1 / k),
            precisions_init=np.ones(k),
            max_iter=iterations,
            tol=0,
        )
        return int(model.fit(x).n_iter_)

    return run


def timed(run: Callable[[int], int], iterations: int) -> float:
    begin = time.perf_counter()
    run(iterations)
    return time.perf_counter() - begin


def measure(n: int, d: int, k: int, short: int, long: int, rounds: int) -> dict[str, Any]:
    x, means = data(n, d, k)
    methods = {
        "jaxcmle": ours(x, means),
        "KMeans": kmeans(x, means),
        "GaussianMixture": gaussian_mixture(x, means),
    }
    iterations = {}
    for name, run in methods.items():
        iterations[name] = run(long) - run(short)
        if iterations[name] < (long - short) / 2:
            raise RuntimeError(f"{name} converges too early to be measured: use harder data")
    times: dict[tuple[str, int], list[float]] = {
        (name, count): [] for name in methods for count in (short, long)
    }
    for _ in range(rounds):
        for name, run in methods.items():
            # Threads of the method before may still be spinning: wait, and warm up again.
            time.sleep(0.5)
            run(short)
            for count in (short, long):
                times[name, count].append(timed(run, count))

    def slope(name: str, summary: Callable[[list[float]], float]) -> float:
        difference = summary(times[name, long]) - summary(times[name, short])
        return 1e3 * difference / iterations[name]

    # The best times: whatever else the machine does can only add to them.
    best = {name: slope(name, min) for name in methods}
    return {
        "n": n,
        "d": d,
        "k": k,
        "milliseconds": best,
        "milliseconds by medians": {name: slope(name, statistics.median) for name in methods},
        "ratios": {name: best[name] / best["jaxcmle"] for name in methods if name != "jaxcmle"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*did not converge.*")

    print("time per iteration, and how many times ours fits into it")
    print(f"{'n':>9} {'d':>3} {'k':>3} {'ours':>10} {'KMeans':>20} {'GaussianMixture':>22}")
    results = []
    for n, d, k, short, long in SHAPES:
        result = measure(n, d, k, short, long, options.rounds)
        results.append(result)
        cells = []
        for name in ("KMeans", "GaussianMixture"):
            ratio = result["ratios"][name]
            aim = AIMS[name].get(d)
            mark = "" if aim is None else f" (aim {aim:g})"
            cells.append(f"{ratio:.2f}x{mark}")
        own = f"{result['milliseconds']['jaxcmle']:.2f} ms"
        print(f"{n:>9} {d:>3} {k:>3} {own:>10} {cells[0]:>20} {cells[1]:>22}", flush=True)
    report({"results": results}, options.json, "scikit-learn")


if __name__ == "__main__":
    main()
