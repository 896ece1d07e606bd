"""Scoring products of columns, beside a matrix product and straightforward versions of the same.

A point evaluation is one minimum and one addition: one candidate of the product on one point. All
rates are point evaluations a second, without pruning; NumPy's sgemm in floating-point operations a
second, two to a multiplication with addition. Every method runs on a slice that takes it a while;
rounds are interleaved, and the best time of each counts. Then repetitions of block means, as
`approximate` scores them, and the memory that a slice of 2048^3 candidates takes.

Run: `python -m benchmarks.scoring` (add `--json FILE` to keep the numbers).
"""

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import report
from jaxcmle.candidates import scoring

N = 8192
# Components, columns, and how many rows of the product to score: by us, and by the others.
SHAPES = ((2, 512, 512, 16), (2, 2048, 2048, 8), (3, 512, 2048, 16), (3, 2048, 1024, 8))
AIMS = {"sgemm": 0.4, "NumPy": 5.0, "vmap": 5.0}
# Clusters, variances, features.
REPETITIONS = ((2, 3, 2), (3, 3, 2), (3, 5, 2), (4, 3, 8))


def data(k: int, columns: int) -> list[np.ndarray]:
    """Return the costs of points under Gaussians: one array of columns for each component."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 2)).astype(np.float32)
    result = []
    for _ in range(k):
        means = rng.normal(size=(columns, 2)).astype(np.float32)
        square = ((means[:, None] - x) ** 2).sum(axis=-1)
        result.append(square / rng.uniform(0.5, 4, size=(columns, 1)).astype(np.float32))
    return result


def ours(columns: list[np.ndarray], rows: int) -> Callable[[], Any]:
    k, count = len(columns), len(columns[0])
    product = scoring.prepare_product(tuple(map(jnp.asarray, columns)), None, float(N))
    tile = scoring.tile_rows(product, count ** (k - 1))
    best, start = scoring.nothing_yet(16, k, np.float32), jnp.zeros(k - 1, jnp.int32)

    def run() -> Any:
        return scoring.walk_product(
            product,
            best,
            start,
            rows // tile,
            columns=count,
            tile_rows=tile,
            pruning=scoring.NO_PRUNING,
        )

    return run


def straightforward_numpy(columns: list[np.ndarray], rows: int) -> Callable[[], Any]:
    def run() -> Any:
        best = np.inf
        for row in range(rows):
            first = columns[0][0 if len(columns) == 3 else row]
            if len(columns) == 3:
                first = np.minimum(first, columns[1][row])
            best = min(best, np.minimum(first, columns[-1]).sum(axis=1).min())
        return best

    return run


def straightforward_vmap(columns: list[np.ndarray], rows: int) -> Callable[[], Any]:
    def cost(*chosen: jax.Array) -> jax.Array:
        return jnp.stack(chosen).min(axis=0).sum()

    score = jax.vmap(cost, in_axes=(None,) * (len(columns) - 1) + (0,))
    for j in reversed(range(len(columns) - 1)):
        score = jax.vmap(score, in_axes=tuple(0 if i == j else None for i in range(len(columns))))
    best = jax.jit(lambda *given: score(*given).min())
    slices = [columns[0][: 1 if len(columns) == 3 else rows]]
    if len(columns) == 3:
        slices.append(columns[1][:rows])
    arrays = [jnp.asarray(part) for part in [*slices, columns[-1]]]
    return lambda: best(*arrays)


def sgemm() -> Callable[[], Any]:
    matrix = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    return lambda: matrix @ matrix


def best_times(methods: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, run in methods.items():
            # Threads of the method before may still be spinning: wait, and warm up again.
            time.sleep(0.3)
            jax.block_until_ready(run())
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - begin)
    return {name: min(values) for name, values in times.items()}


def measure(k: int, count: int, rows: int, few: int, rounds: int) -> dict[str, Any]:
    columns = data(k, count)
    methods = {
        "sgemm": sgemm(),
        "jaxcmle": ours(columns, rows),
        "NumPy": straightforward_numpy(columns, few),
        "vmap": straightforward_vmap(columns, few),
    }
    times = best_times(methods, rounds)
    work = {"sgemm": 2 * 2048**3, "jaxcmle": rows * count * N}
    work |= {"NumPy": few * count * N, "vmap": few * count * N}
    rates = {name: work[name] / times[name] for name in methods}
    return {
        "k": k,
        "columns": count,
        "rates": rates,
        "ratios": {name: rates["jaxcmle"] / rates[name] for name in methods if name != "jaxcmle"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()

    print(f"point evaluations a second on {N} points, as a multiple of the rate of")
    print(f"{'k':>2} {'columns':>8} {'ours':>12} " + "".join(f"{name:>18}" for name in AIMS))
    results = []
    for shape in SHAPES:
        result = measure(*shape, options.rounds)
        results.append(result)
        cells = [f"{result['ratios'][name]:.2f}x (aim {aim:g})" for name, aim in AIMS.items()]
        own = f"{result['rates']['jaxcmle'] / 1e9:.1f} G/s"
        row = "".join(f"{cell:>18}" for cell in cells)
        print(f"{result['k']:>2} {result['columns']:>8} {own:>12} {row}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    budget = scoring.product_bytes(3, 2048, N) / 2**20
    print(f"memory of a slice of 2048^3: budget {budget:.0f} MiB; peak of this process, with JAX")
    print(f"and the columns of all shapes and methods: {peak:.0f} MiB")
    repetitions = []
    for k, g, d in REPETITIONS:
        rate = scoring.repetition_rate(k, g, d)
        repetitions.append({"k": k, "variances": g, "d": d, "rate": rate})
        share = rate / results[0]["rates"]["sgemm"]
        print(f"block means, k={k}, {g} variances, d={d}: {rate / 1e9:.2f} G/s, {share:.3f} sgemm")
    found = {"results": results, "repetitions": repetitions, "peak MiB": peak}
    report(found, options.json)


if __name__ == "__main__":
    main()
