"""How the cost grows with the data, how far several devices help, and what large instances take.

The time of a size is the median of rounds over all sizes, with a fixed number of iterations, so
that work and not luck is compared. Memory is what the process holds at its peak during a call, less
what it held before it, data and programs, and less the results. That is Linux's peak, which can be
set back, after all that is free was given back; elsewhere there is no memory in the table.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcmle as jc
from benchmarks.data import mixture_data, slow_data
from benchmarks.harness import (
    ONE_ARENA,
    Times,
    grown_bytes,
    in_own_process,
    interleave,
    peak_bytes,
    say,
    slope,
)
from benchmarks.judging import cem_cost, default_min_size, is_reached, solution_cost
from benchmarks.tables import Part, Table, number, ratio, source
from jaxcmle.candidates import scoring

# Iterations of CEM, on clusters that overlap so far that it does not converge sooner.
ITERATIONS = 20
# Memory below this is lost among pages that come and go for other reasons.
LEAST_BYTES = 2**20
# Memory is called flat if it grows by a smaller power of the size than this.
FLAT = 0.1


DEVICES = (1, 2, 4, 8)
# Points, features, clusters.
LARGE = ((1_000_000, 8, 20), (20_000, 16, 200), (5_000, 1_000, 10))
LARGE_QUICK = ((20_000, 2, 3),)

# Points of a file that is read in chunks, those of it that are also searched in memory, and those
# that iterations are timed on; features and clusters.
STREAM, STREAM_QUICK = (20_000_000, 200_000, 1_000_000), (300_000, 50_000, 131_072)
STREAM_D, STREAM_K = 8, 8
# What is written at once.
STREAM_BLOCK = 100_000

Run = Callable[[], Any]


def even(means: Any) -> jc.Mixture:
    """Return mixtures with these means, equal weights and variances of 1."""
    means = jnp.asarray(means, jnp.float32)
    ones = jnp.ones(means.shape[:-1], means.dtype)
    return jc.Mixture(weights=ones / means.shape[-2], means=means, variances=ones)


def run_cem(n: int, d: int, k: int) -> Run:
    x, means = slow_data(n, d, k)
    points, start = jnp.asarray(x), even(means)
    return lambda: jc.cem(points, start, max_iter=ITERATIONS)


def run_score(m: int) -> Run:
    x, means = slow_data(8192, 8, 8)
    noise = np.random.default_rng(1).normal(size=(m, 8, 8))
    points, mixtures = jnp.asarray(x), even(means + noise)
    return lambda: jc.score(points, mixtures)


def run_product(m: int) -> Run:
    """Return what scores some of the rows of a product of columns, without pruning."""
    n, count = 8192, 2048
    rng = np.random.default_rng(0)
    columns = tuple(jnp.asarray(rng.random((count, n), np.float32)) for _ in range(2))
    product = scoring.prepare_product(columns, None, float(n))
    tile = scoring.tile_rows(product, count)
    return partial(
        scoring.walk_product,
        product,
        scoring.nothing_yet(16, 2, np.float32),
        jnp.zeros(1, jnp.int32),
        m // (count * tile),
        columns=count,
        tile_rows=tile,
        pruning=scoring.NO_PRUNING,
    )


def many_data(b: int, n: int, d: int, k: int) -> tuple[np.ndarray, jc.Mixture]:
    """Return instances of overlapping clusters, each with clusters and a start of its own."""
    rng = np.random.default_rng(2)
    centres = 4 / d * rng.normal(size=(b, k, d))
    labels = rng.integers(0, k, size=(b, n, 1))
    x = np.take_along_axis(centres, labels, 1) + rng.normal(size=(b, n, d))
    return x.astype(np.float32), even(centres + rng.normal(size=(b, k, d)) / d)


def run_many(b: int) -> Run:
    xs, starts = many_data(b, 500, 4, 8)
    return lambda: jc.cem_many(xs, starts, max_iter=ITERATIONS)


class Ladder(NamedTuple):
    """A variable, what is run with the others fixed, and its sizes: in full, and when quick."""

    variable: str
    what: str
    make: Callable[[int], Run]
    sizes: tuple[int, ...]
    quick: tuple[int, ...]


CEM = f"`cem`, {ITERATIONS} iterations,"
# Quick ones share what they compile, where they can.
LADDERS = (
    Ladder(
        "n",
        f"{CEM} d = 8, k = 8",
        lambda n: run_cem(n, 8, 8),
        (65_536, 131_072, 262_144, 524_288, 1_048_576),
        (32_768, 131_072),
    ),
    Ladder(
        "d",
        f"{CEM} n = 131,072, k = 8",
        lambda d: run_cem(131_072, d, 8),
        (4, 8, 16, 32, 64, 128),
        (8, 32),
    ),
    Ladder(
        "k",
        f"{CEM} n = 131,072, d = 8",
        lambda k: run_cem(131_072, 8, k),
        (4, 8, 16, 32, 64, 128),
        (8, 32),
    ),
    Ladder(
        "m", "`score`, n = 8,192, d = 8, k = 8", run_score, (256, 512, 1024, 2048, 4096), (128, 512)
    ),
    Ladder(
        "m (product)",
        "one of 2 × 2,048 columns, n = 8,192",
        run_product,
        (524_288, 1_048_576, 2_097_152, 4_194_304),
        (),
    ),
    Ladder(
        "b",
        f"`cem_many`, {ITERATIONS} iterations, n = 500, d = 4, k = 8",
        run_many,
        (1024, 2048, 4096, 8192, 16384),
        (512, 2048),
    ),
)


def measure_growth(quick: bool) -> dict[str, Any]:
    return {"ladders": in_own_process(climb_all, quick, environment=ONE_ARENA)}


def climb_all(quick: bool) -> list[dict[str, Any]]:
    ladders = [ladder for ladder in LADDERS if ladder.quick or not quick]
    return [climb(ladder, ladder.quick if quick else ladder.sizes, quick) for ladder in ladders]


def climb(ladder: Ladder, sizes: tuple[int, ...], quick: bool) -> dict[str, Any]:
    """Return the times and the bytes of all sizes, and how they grow."""
    runs: dict[str, Run] = {str(size): ladder.make(size) for size in sizes}
    times = interleave(runs, 1 if quick else 5)
    medians = [times[str(size)].median for size in sizes]
    held = [held_bytes(runs[str(size)]) for size in sizes]
    memory = None
    if None not in held:
        memory = slope(list(sizes), [float(max(each or 0, LEAST_BYTES)) for each in held])
    result = {
        "variable": ladder.variable,
        "what": ladder.what,
        "sizes": list(sizes),
        "seconds": {str(size): times[str(size)].summary() for size in sizes},
        "slope of time": slope(list(sizes), medians),
        "slope at the end": slope(list(sizes[-2:]), medians[-2:]),
        "bytes": held,
        "slope of memory": memory,
    }
    say(f"growth in {ladder.variable}: {medians}, {held}")
    return result


def held_bytes(run: Run) -> int | None:
    """Return the bytes that a call takes above data, programs and results; None if unknown."""
    grown, result = grown_bytes(run)
    if grown is None:
        return None
    return grown - sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(result))


def growth_table(found: dict[str, Any]) -> Table:
    ladders = found["results"]["ladders"]
    rows = tuple(
        (
            each["variable"],
            f"{each['sizes'][0]:,} to {each['sizes'][-1]:,}",
            each["what"],
            f"{each['slope of time']:.2f}",
            f"{each['slope at the end']:.2f}",
            _in_words(each["slope of memory"]),
            " to ".join(_megabytes(each["bytes"][end]) for end in (0, -1)),
        )
        for each in ladders
    )
    flat = [each["variable"] for each in ladders if _in_words(each["slope of memory"]) == "flat"]
    after = f"Memory does not grow with {', '.join(flat)}.\n\n" if flat else ""
    return Table(
        "How time and memory grow, each variable by itself: the slope of the logarithms (1: in "
        "proportion), over all sizes and from the last but one to the last; and the memory on top "
        f"of data and results. A slope of memory under {FLAT:g} is called flat.",
        ("variable", "from, to", "what", "time", "at the end", "memory", "MB"),
        rows,
        after + source(found),
    )


def _in_words(memory: float | None) -> str:
    if memory is None:
        return "–"
    return "flat" if memory < FLAT else f"{memory:.2f}"


def _megabytes(count: int | None) -> str:
    return "–" if count is None else number(max(count, 0) / 1e6)


def measure_devices(quick: bool) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    alone: dict[str, OnDevices] = {}
    for count in DEVICES[:2] if quick else DEVICES:
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
        each = in_own_process(on_devices, quick, environment=flags)
        alone = alone or each
        row: dict[str, Any] = {"devices": count}
        for name, one in each.items():
            first = alone[name]
            difference = np.abs(one.costs - first.costs) / np.abs(first.costs)
            row[name] = {
                "ratio": one.times.median / first.times.median,
                "lowest": min(one.times.rounds) / first.times.median,
                "highest": max(one.times.rounds) / first.times.median,
                "seconds": one.times.summary(),
                "labels that differ": int((one.labels != first.labels).sum()),
                "labels": int(one.labels.size),
                "largest difference of costs": float(difference.max()),
            }
        rows.append(row)
        say(f"{count} devices: {row}")
    return {"rows": rows}


class OnDevices(NamedTuple):
    """The times of a function, and its costs and labels; no labels where it has none."""

    times: Times
    costs: np.ndarray
    labels: np.ndarray


def on_devices(quick: bool) -> dict[str, OnDevices]:
    """Run what spreads over all devices of this process."""
    xs, starts = many_data(512 if quick else 4096, 500, 4, 8)
    # Fewer and well separated, lest a rounding decide where a short search ends.
    few = np.stack([mixture_data(200, 2, 3, seed)[0] for seed in range(256)])
    x, means = slow_data(2**17 if quick else 2**19, 16, 16)
    across = NamedSharding(Mesh(np.array(jax.devices()), ("points",)), PartitionSpec("points"))
    points, mixture = jax.device_put(x, across), even(means)
    stack = even(means + np.random.default_rng(1).normal(size=(32, *means.shape)) / 4)
    cost, assign, score = jax.jit(jc.cost), jax.jit(jc.assign), jax.jit(jc.score)
    runs: dict[str, Run] = {
        "`cem_many`": lambda: jc.cem_many(xs, starts, max_iter=ITERATIONS),
        "`cost` and `assign`": lambda: (cost(points, mixture), assign(points, mixture)),
    }
    if not quick:
        runs["`fit_many`"] = lambda: jc.fit_many(few, 3, effort="quick", certificate=False)
        runs["`score`"] = lambda: (score(points, stack), jnp.zeros(0))
    times = interleave(runs, 3 if quick else 5)
    return {name: OnDevices(times[name], *_answers(run())) for name, run in runs.items()}


def _answers(result: Any) -> tuple[np.ndarray, np.ndarray]:
    costs, labels = (result.cost, result.labels) if isinstance(result, jc.Solution) else result
    return np.asarray(costs, np.float64), np.asarray(labels)


def devices_table(found: dict[str, Any]) -> Table:
    rows = found["results"]["rows"]
    names = [name for name in rows[0] if name != "devices"]
    others = rows[1:]
    counts = [
        (row[name]["labels that differ"], row[name]["labels"]) for row in others for name in names
    ]
    different, labels = (sum(column) for column in zip(*counts, strict=True))
    largest = max(row[name]["largest difference of costs"] for row in others for name in names)
    same = "All" if not different else f"All but {different:,} of {labels:,}"
    return Table(
        "The time on several simulated devices of one machine, as a multiple of that on one, with "
        "the range of the rounds: instances spread over the devices (`cem_many`, `fit_many`), or "
        "points, by `jax.sharding`, under `jit`. One device has all "
        f"{found['provenance']['cores']} cores to itself already, so that more of them can win "
        "little here: this is about the answers.",
        ("devices", *names),
        tuple((str(row["devices"]), *(ratio(row[name]) for name in names)) for row in rows),
        f"{same} labels are those of one device, and the largest difference between costs is "
        f"{largest:.1g} of the cost.\n\n{source(found)}",
    )


def measure_large(quick: bool) -> dict[str, Any]:
    effort = "quick" if quick else "default"
    rows = []
    for shape in LARGE_QUICK if quick else LARGE:
        rows.append(in_own_process(search, shape, effort, environment=ONE_ARENA))
        say(rows[-1])
    return {"rows": rows}


def search(shape: tuple[int, int, int], effort: Literal["quick", "default"]) -> dict[str, Any]:
    """Search for the clusters of a mixture, and hold them against the true ones."""
    n, d, k = shape
    x, labels = mixture_data(n, d, k, seed=0)
    min_size = default_min_size(n, k)
    points = jax.block_until_ready(jnp.asarray(x))
    begin = time.perf_counter()
    grown, solution = grown_bytes(
        lambda: jc.fit(points, k, min_size=min_size, effort=effort, progress=False)
    )
    seconds = time.perf_counter() - begin
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
        "data bytes": x.nbytes,
    }


def large_table(found: dict[str, Any]) -> Table:
    rows = found["results"]["rows"]
    return Table(
        f"Large instances, one of each shape at effort {rows[0]['effort']!r}: the cost beside that "
        "of CEM from the true labels, and the memory that the search and its compilation took on "
        "top of the data.",
        ("points × features, clusters", "cost", "memory"),
        tuple(
            (
                f"{each['n']:,} × {each['d']:,}, {each['k']}",
                "at most the truth" if each["reached"] else _above(each["difference"]),
                "–" if each["bytes"] is None else f"{each['bytes'] / 1e9:.1f} GB",
            )
            for each in rows
        ),
        source(found),
    )


def _above(difference: float | None) -> str:
    return "not admissible" if difference is None else f"{difference:,.0f} nats above"


def measure_streaming(quick: bool) -> dict[str, Any]:
    n, part, timed_n = STREAM_QUICK if quick else STREAM
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "x.npy"))
        pace = in_own_process(stream_pace, path, timed_n, 2 if quick else 9)
        say(pace)
        in_own_process(write_points, path, n)
        large = in_own_process(stream_search, path, part, environment=ONE_ARENA)
        say(large)
    return {"pace": pace, "large": large}


def write_points(path: str, n: int) -> None:
    """Write points of well separated clusters to a file, block by block."""
    rng = np.random.default_rng(0)
    centres = 5 * rng.normal(size=(STREAM_K, STREAM_D)).astype(np.float32)
    x = np.lib.format.open_memmap(path, "w+", np.float32, (n, STREAM_D))
    for first in range(0, n, STREAM_BLOCK):
        count = min(STREAM_BLOCK, n - first)
        labels = rng.integers(0, STREAM_K, count)
        noise = rng.standard_normal((count, STREAM_D), np.float32)
        x[first : first + count] = centres[labels] + noise


def stream_pace(path: str, n: int, rounds: int) -> dict[str, Any]:
    """Time iterations of CEM on the same points, read from a file or held in memory."""
    x, means = slow_data(n, STREAM_D, STREAM_K)
    np.save(path, x)
    given = {"memory": jnp.asarray(x), "file": np.load(path, mmap_mode="r")}
    start = even(means)

    def run(where: str, iterations: int) -> Run:
        return lambda: jc.cem(given[where], start, max_iter=iterations).cost

    few, many = 2, 2 + ITERATIONS
    runs = {f"{where} {count}": run(where, count) for count in (few, many) for where in given}
    times = interleave(runs, rounds)

    def compared(file: list[float], memory: list[float]) -> dict[str, float]:
        each = [one / other for one, other in zip(file, memory, strict=True)]
        return {"ratio": float(np.median(each)), "lowest": min(each), "highest": max(each)}

    def rounds_of(where: str, less: bool) -> list[float]:
        whole = times[f"{where} {many}"].rounds
        if not less:
            return whole
        return [a - b for a, b in zip(whole, times[f"{where} {few}"].rounds, strict=True)]

    return {
        "n": n,
        "iterations": many,
        "seconds": {name: each.summary() for name, each in times.items()},
        "call": compared(rounds_of("file", False), rounds_of("memory", False)),
        "iteration": compared(rounds_of("file", True), rounds_of("memory", True)),
    }


def stream_search(path: str, part: int) -> dict[str, Any]:
    """Search a file in little memory, and a part of it also in memory."""
    x = np.load(path, mmap_mode="r")
    begin = time.perf_counter()
    _, solution = grown_bytes(lambda: jc.fit(x, STREAM_K, effort="quick", progress=False))
    seconds = time.perf_counter() - begin
    peak = peak_bytes()
    some = np.array(x[:part])
    streamed = jc.fit(lambda: iter([some]), STREAM_K, effort="quick", progress=False)
    whole = jc.fit(some, STREAM_K, effort="quick", progress=False)
    return {
        "n": len(x),
        "data bytes": x.nbytes,
        "peak bytes": peak,
        "status": jc.Status(int(solution.status)).name,
        "seconds with compilation": seconds,
        "part": part,
        "relative difference": float(streamed.cost) / float(whole.cost) - 1,
    }


def streaming_table(found: dict[str, Any]) -> Table:
    pace, large = found["results"]["pace"], found["results"]["large"]
    peak = large["peak bytes"]
    return Table(
        f"Points read in chunks from a `numpy.memmap`, {STREAM_D} features, {STREAM_K} clusters: "
        "the time of `cem` as a multiple of that on the same points in memory, and the most memory "
        "that the whole process holds during `fit`.",
        ("what", "points", "result"),
        (
            (f"a call of {pace['iterations']} iterations", f"{pace['n']:,}", ratio(pace["call"])),
            ("each further iteration", f"{pace['n']:,}", ratio(pace["iteration"])),
            (
                f"memory of `fit`, data of {large['data bytes'] / 1e6:,.0f} MB",
                f"{large['n']:,}",
                "–" if peak is None else f"{peak / 2**20:,.0f} MiB",
            ),
            (
                "cost of `fit`, relative to that in memory",
                f"{large['part']:,}",
                f"{large['relative difference']:+.1e}",
            ),
        ),
        source(found),
    )


PARTS = {
    "growth": Part(measure_growth, growth_table),
    "devices": Part(measure_devices, devices_table),
    "large": Part(measure_large, large_table),
    "streaming": Part(measure_streaming, streaming_table),
}
