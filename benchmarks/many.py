"""Many instances in one call, beside loops over scikit-learn and beside `vmap`.

- cem: CEM to convergence from the same starts, beside KMeans (n_init=1) and spherical
  GaussianMixture from the same means, each in a Python loop, and beside `jax.vmap` of our own CEM.
- fit: `fit_many(effort="quick")`, certificates included, beside a loop of GaussianMixture with
  n_init=10; and whose labels cost less, by one float64 formula. A partition with a cluster under
  the minimum size does not count as a solution.
- ragged: lengths from 20 to 5000, lognormal: what padding wastes, and what compilation takes.
- memory: 100,000 instances in one call, and the memory that takes on top of the data.

Ours is the time of the whole call: checks, packing, copies and results.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcmle as jc
from benchmarks.harness import (
    ONE_ARENA,
    ROUNDS,
    grown_bytes,
    in_own_process,
    interleave,
    ratios,
    say,
    seconds,
    timed,
)
from benchmarks.judging import default_min_size, partition_cost
from benchmarks.peers import quiet
from benchmarks.tables import Part, Table, number, ratio, source
from jaxcmle.solve.instances import bucket_of

# Instances, points, features, clusters; what the loops are to take, in units of our time.
CEM_SHAPES: tuple[tuple[int, int, int, int, dict[str, float]], ...] = (
    (1000, 200, 2, 3, {"KMeans": 40, "GaussianMixture": 100, "vmap": 2}),
    (64, 5000, 8, 8, {"KMeans": 3, "vmap": 2}),
)
QUICK_SHAPES = ((200, 200, 2, 3, CEM_SHAPES[0][4]),)
FIT_SHAPE = (1000, 200, 2, 3)
# With the length that the ragged ones are padded to when quick, for one program to serve both.
QUICK_FIT_SHAPE = (50, 256, 2, 3)
FIT_AIMS = {"ratio": 10.0, "share": 0.99}
RAGGED = {"instances": 200, "median": 200.0, "sigma": 1.1, "shortest": 20, "longest": 5000}
LARGE = (100_000, 20, 2, 2)
# Costs are equal if they differ by less, relative to their size.
EQUAL = 1e-6


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
            least = default_min_size(len(x), k)
            own, peer = (partition_cost(x, np.asarray(each), k, least) for each in (mine, other))
            short += math.isinf(peer)
            good += own <= peer + EQUAL * abs(own) if math.isfinite(own) else False
        share[name] = good / len(xs)
        share[f"too small, {name}"] = short / len(xs)
    return share


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
        "vmap": lambda: together(device_x, starts),
        "KMeans": lambda: kmeans(x, means),
        "GaussianMixture": lambda: gaussian_mixture(x, means),
    }
    with quiet():
        times = interleave(methods, rounds)
    found, same = jc.cem_many(x, starts), together(device_x, starts)
    equal = np.mean(np.all(np.asarray(found.labels) == np.asarray(same.labels), axis=1))
    return {
        "b": b,
        "n": n,
        "d": d,
        "k": k,
        "aims": aims,
        "seconds": seconds(times),
        "ratios": ratios(times),
        "labels as by cem": float(equal),
        "iterations": float(np.mean(np.asarray(found.n_iter))),
    }


def cem(quick: bool) -> dict[str, Any]:
    shapes = []
    for shape in QUICK_SHAPES if quick else CEM_SHAPES:
        say("many cem", *shape[:4])
        shapes.append(measure_cem(*shape, 2 if quick else ROUNDS))
    return {"shapes": shapes}


def cem_table(found: dict[str, Any]) -> Table:
    names = {
        "KMeans": "KMeans (n_init=1)",
        "GaussianMixture": "spherical GaussianMixture",
        "vmap": "`vmap`",
    }
    rows = []
    for one in found["results"]["shapes"]:
        cells = []
        for name in names:
            aim = f", aim {one['aims'][name]:g}" if name in one["aims"] else ""
            cells.append(ratio(one["ratios"][name]) + aim)
        rows.append((f"{one['b']:,} × {one['n']:,} × {one['d']}, {one['k']}", *cells))
    before = (
        "`cem_many` to convergence beside Python loops over scikit-learn and beside `jax.vmap` of "
        "our own CEM, all from the same starts: their time over ours, which is that of the whole "
        "call."
    )
    equal = min(one["labels as by cem"] for one in found["results"]["shapes"])
    after = f"At least {equal:.1%} of the instances have the labels that `cem` finds.\n\n"
    header = ("instances × points × features, clusters", *names.values())
    return Table(before, header, tuple(rows), after + source(found))


def fit(quick: bool) -> dict[str, Any]:
    b, n, d, k = QUICK_FIT_SHAPE if quick else FIT_SHAPE
    say("many fit", b, n, d, k)
    x, _ = data(b, n, d, k, seed=5)
    methods: dict[str, Callable[[], Any]] = {
        "jaxcmle": lambda: jc.fit_many(x, k, effort="quick"),
        "without certificates": lambda: jc.fit_many(x, k, effort="quick", certificate=False),
        "GaussianMixture": lambda: mixtures_with_restarts(x, k),
    }
    with quiet():
        times = interleave(methods, 1 if quick else 3)
        found, theirs = jc.fit_many(x, k, effort="quick"), mixtures_with_restarts(x, k)
    return {
        "b": b,
        "n": n,
        "d": d,
        "k": k,
        "seconds": seconds(times),
        "ratios": ratios(times),
        "share": compare(x, found.labels, theirs, k),
        "mean gap": float(np.mean(np.asarray(found.guarantee.gap))),
    }


def fit_table(found: dict[str, Any]) -> Table:
    one = found["results"]
    share, aim = one["share"], f"{FIT_AIMS['share']:.0%}"
    rows = (
        (
            "time of the loop / ours",
            ratio(one["ratios"]["GaussianMixture"]),
            f"{FIT_AIMS['ratio']:g}",
        ),
        ("ours costs no more than theirs", f"{share['raw']:.1%}", aim),
        ("ours costs no more than theirs after our CEM", f"{share['after CEM']:.1%}", aim),
        (
            "of the latter, theirs left a cluster too small",
            f"{share['too small, after CEM']:.1%}",
            "",
        ),
        ("mean gap of the quick bound, nats per point", f"{one['mean gap']:.2f}", ""),
    )
    before = (
        f'The whole search, `fit_many(effort="quick")` with certificates, on {one["b"]:,} '
        f"instances of {one['n']} × {one['d']} with {one['k']} clusters, beside a loop of "
        'GaussianMixture(n_init=10). The settings of `"quick"` were chosen on other instances of '
        "the same family."
    )
    return Table(before, ("", "measured", "aim"), rows, source(found))


def ragged(quick: bool) -> dict[str, Any]:
    say("many ragged")
    count = 50 if quick else int(RAGGED["instances"])
    shortest, longest = (130, 256) if quick else (RAGGED["shortest"], RAGGED["longest"])
    rng = np.random.default_rng(2)
    lengths = rng.lognormal(math.log(RAGGED["median"]), RAGGED["sigma"], count)
    lengths = np.clip(lengths, shortest, longest).astype(int)
    k, d = 3, 2
    xs = [data(1, int(n), d, k, seed=i)[0][0] for i, n in enumerate(lengths)]
    buckets = [bucket_of(len(x), k, False).n for x in xs]
    first, _ = timed(lambda: jc.fit_many(xs, k, effort="quick", certificate=False))
    second, found = timed(lambda: jc.fit_many(xs, k, effort="quick", certificate=False))
    with quiet():
        peer, theirs = timed(lambda: mixtures_with_restarts(xs, k))
        share = compare(xs, [one.labels for one in found], theirs, k)
    return {
        "instances": count,
        "d": d,
        "k": k,
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
        "padding waste": sum(buckets) / sum(lengths) - 1,
        "buckets": len(set(buckets)),
        "first call over second": first / second,
        "ratio": peer / second,
        "share": share,
    }


def ragged_table(found: dict[str, Any]) -> Table:
    one = found["results"]
    rows = (
        ("points that padding adds", f"{one['padding waste']:.0%}, in {one['buckets']} sizes"),
        ("first call / second: compilation", number(one["first call over second"])),
        ("time of the loop / our second call", number(one["ratio"])),
        ("ours costs no more than theirs", f"{one['share']['raw']:.1%}"),
        ("ours costs no more than theirs after our CEM", f"{one['share']['after CEM']:.1%}"),
    )
    before = (
        f"{one['instances']} instances of {one['shortest']} to {one['longest']:,} points, "
        "lognormal, in one call, beside the same loop."
    )
    return Table(before, ("", "measured"), rows, source(found))


def measure_memory(b: int, search: bool) -> dict[str, Any]:
    _, n, d, k = LARGE
    x, means = data(b, n, d, k, seed=3)
    weights = jnp.full((b, k), 1 / k)
    starts = jc.Mixture(weights=weights, means=jnp.asarray(means), variances=jnp.ones_like(weights))

    # Compiles first, on a few.
    jc.cem_many(x[:1000], jax.tree.map(lambda leaf: leaf[:1000], starts))
    cem_bytes, _ = grown_bytes(lambda: jc.cem_many(x, starts))
    fit_bytes = None
    if search:
        jc.fit_many(x[:200], k, effort="quick", certificate=False)
        fit_bytes, _ = grown_bytes(lambda: jc.fit_many(x, k, effort="quick", certificate=False))
    return {
        "b": b,
        "n": n,
        "d": d,
        "k": k,
        "data bytes": x.nbytes,
        "cem bytes": cem_bytes,
        "fit bytes": fit_bytes,
    }


def memory(quick: bool) -> dict[str, Any]:
    say("many memory")
    count = 5000 if quick else LARGE[0]
    return in_own_process(measure_memory, count, not quick, environment=ONE_ARENA)


def megabytes(value: float | None) -> str:
    return "not measured" if value is None else f"{value / 1e6:.0f} MB"


def memory_table(found: dict[str, Any]) -> Table:
    one = found["results"]
    rows = (
        ("`cem_many`, results included", megabytes(one["cem bytes"])),
        ("`fit_many`, results included", megabytes(one["fit bytes"])),
    )
    before = (
        f"{one['b']:,} instances of {one['n']} × {one['d']} ({one['data bytes'] / 1e6:.0f} MB) in "
        "one call: memory on top of the data, in one process."
    )
    return Table(before, ("", "more memory"), rows, source(found))


PARTS = {
    "cem": Part(cem, cem_table),
    "fit": Part(fit, fit_table),
    "ragged": Part(ragged, ragged_table),
    "memory": Part(memory, memory_table),
}
