"""Large instances for `jc.fit`: many points, many clusters, many features.

Mixtures as in `benchmarks.quality`, one of each shape, at the default effort; each in a process of
its own, so that its memory can be told. Printed are the cost, what CEM makes of the labels that the
data was drawn with, and the time with compilation; and the peak of resident memory less what it was
with the data in place, as a multiple of the data.

Run: `python -m benchmarks.large` (add `--quick` for the quick effort, `--json FILE` to keep the
numbers).
"""

import argparse
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxcmle as jc
from benchmarks.common import report
from benchmarks.quality import cem_cost, default_min_size, is_reached, mixture_data, solution_cost

# Points, features, clusters.
SHAPES = ((1_000_000, 8, 20), (20_000, 16, 200), (5_000, 1_000, 10))


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def measure(shape: tuple[int, int, int], effort: Literal["quick", "default"]) -> dict[str, Any]:
    n, d, k = shape
    x, labels = mixture_data(n, d, k, seed=0)
    min_size = default_min_size(n, k)
    points = jax.block_until_ready(jnp.asarray(x))
    before = peak_bytes()
    begin = time.perf_counter()
    solution = jc.fit(points, k, min_size=min_size, effort=effort, progress=False)
    jax.block_until_ready(solution.cost)
    seconds = time.perf_counter() - begin
    grown = peak_bytes() - before
    cost, truth = solution_cost(x, solution, k, min_size), cem_cost(x, labels, k, min_size)
    return {
        "n": n,
        "d": d,
        "k": k,
        "effort": effort,
        "status": jc.Status(int(solution.status)).name,
        "rounds": int(solution.n_iter),
        "cost": cost,
        "truth": truth,
        "difference": cost - truth,
        "reached": is_reached(cost, truth),
        "seconds with compilation": seconds,
        "bytes": grown,
        "bytes over data": grown / np.asarray(x).nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the quick effort")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    effort: Literal["quick", "default"] = "quick" if options.quick else "default"

    print(
        f"{'n':>9}{'d':>6}{'k':>5}{'truth':>14}{'above it':>12}{'seconds':>9}{'MB':>7}"
        f"{'x data':>8}  status"
    )
    found = []
    for shape in SHAPES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            one = pool.apply(measure, (shape, effort))
        found.append(one)
        print(
            f"{one['n']:>9}{one['d']:>6}{one['k']:>5}{one['truth']:>14.1f}"
            f"{one['difference']:>12.1f}{one['seconds with compilation']:>9.0f}"
            f"{one['bytes'] / 1e6:>7.0f}{one['bytes over data']:>8.1f}  {one['status']}",
            flush=True,
        )
    report({"results": found}, options.json)


if __name__ == "__main__":
    main()
