"""Scoring products of columns, beside a matrix product and straightforward versions of the same.

A point evaluation is one minimum and one addition: one candidate of the product on one point. All
rates are point evaluations a second, without pruning; NumPy's sgemm in floating-point operations a
second, two to a multiplication with addition. Every method runs on a slice that takes it a while.
Then repetitions of block means, as `approximate` scores them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import ROUNDS, interleave, say, seconds
from benchmarks.tables import Part, Table, ratio, source
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


def measure_shape(k: int, count: int, rows: int, few: int, rounds: int) -> dict[str, Any]:
    columns = data(k, count)
    methods = {
        "sgemm": sgemm(),
        "jaxcmle": ours(columns, rows),
        "NumPy": straightforward_numpy(columns, few),
        "vmap": straightforward_vmap(columns, few),
    }
    times = interleave(methods, rounds)
    work = {"sgemm": 2 * 2048**3, "jaxcmle": rows * count * N}
    work |= {"NumPy": few * count * N, "vmap": few * count * N}

    def against(name: str) -> dict[str, float]:
        """Return our rate over theirs: of medians, lowest and highest of the rounds."""
        share = work["jaxcmle"] / work[name]
        pairs = zip(times[name].rounds, times["jaxcmle"].rounds, strict=True)
        each = [share * theirs / mine for theirs, mine in pairs]
        middle = share * times[name].median / times["jaxcmle"].median
        return {"ratio": middle, "lowest": min(each), "highest": max(each)}

    return {
        "k": k,
        "columns": count,
        "rate": work["jaxcmle"] / times["jaxcmle"].median,
        "seconds": seconds(times),
        "ratios": {name: against(name) for name in AIMS},
    }


def measure(quick: bool) -> dict[str, Any]:
    shapes = []
    for shape in SHAPES[::2] if quick else SHAPES:
        say("scoring", *shape[:2])
        shapes.append(measure_shape(*shape, 3 if quick else ROUNDS))
    repetitions = [
        {"k": k, "variances": g, "d": d, "rate": scoring.repetition_rate(k, g, d)}
        for k, g, d in REPETITIONS[: 1 if quick else None]
    ]
    return {"shapes": shapes, "repetitions": repetitions}


def table(found: dict[str, Any]) -> Table:
    rows = []
    missed = []
    for one in found["results"]["shapes"]:
        name = f"{one['k']} components, {one['columns']} columns"
        cells = []
        for peer, aim in AIMS.items():
            cells.append(ratio(one["ratios"][peer]))
            if one["ratios"][peer]["ratio"] < aim:
                missed.append(peer)
        rows.append((name, *cells))
    before = (
        f"Scoring a product of columns (one minimum and one addition for each candidate and point) "
        f"on {N:,} points, without pruning: our rate over that of others, with the range of the "
        "rounds."
    )
    words = ", ".join(
        f"beside {peer} in {missed.count(peer)} of {len(rows)}" for peer in AIMS if peer in missed
    )
    after = f"The aim is missed {words}." if words else "All aims are reached."
    if "sgemm" in missed:
        after += (
            " A minimum and an addition are two instructions where sgemm has one for two flops."
        )
    header = (
        "product",
        f"NumPy's sgemm, in flops (aim {AIMS['sgemm']:g})",
        f"straightforward NumPy (aim {AIMS['NumPy']:g})",
        f"straightforward `vmap` (aim {AIMS['vmap']:g})",
    )
    return Table(before, header, tuple(rows), f"{after}\n\n{source(found)}")


PARTS = {"product": Part(measure, table)}
