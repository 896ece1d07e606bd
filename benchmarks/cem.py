"""Time per iteration of our CEM beside what others iterate.

All start from the same means on the same float32 points. The time of an iteration is the slope
between two iteration counts, so that set-up, compilation and seeding do not count. An iteration of
ours estimates weights and variances as well, which k-means does not have; EM has them too. gmmx
has no spherical clusters: its are diagonal.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcmle as jc
from benchmarks.data import slow_data
from benchmarks.harness import ROUNDS, Times, interleave, say, timed
from benchmarks.peers import quiet, torch_cem_steps
from benchmarks.tables import Part, Table, ratio, source

# Points, features, clusters, and the two iteration counts to take the slope between.
SHAPES = (
    (100_000, 2, 3, 4, 34),
    (100_000, 16, 8, 4, 24),
    (100_000, 64, 32, 4, 14),
    (1_000_000, 2, 8, 4, 14),
)
QUICK_SHAPES = ((20_000, 16, 8, 4, 24),)
AIMS = {
    "scikit-learn KMeans": {2: 2.5, 16: 1.0, 64: 1.0},
    "scikit-learn GaussianMixture": {2: 25.0, 16: 25.0},
}

Run = Callable[[int], int]


def ours(x: np.ndarray, means: np.ndarray) -> Run:
    k = len(means)
    points, centres = jnp.asarray(x), jnp.asarray(means)
    start = jc.Mixture(weights=jnp.full(k, 1 / k), means=centres, variances=jnp.ones(k))

    def run(iterations: int) -> int:
        solution = jax.block_until_ready(jc.cem(points, start, max_iter=iterations))
        return int(solution.n_iter)

    return run


def sklearn_kmeans(x: np.ndarray, means: np.ndarray) -> Run:
    from sklearn.cluster import KMeans

    def run(iterations: int) -> int:
        model = KMeans(len(means), init=means, n_init=1, max_iter=iterations, tol=0)
        with quiet():
            return int(model.fit(x).n_iter_)

    return run


def sklearn_mixture(x: np.ndarray, means: np.ndarray) -> Run:
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
        with quiet():
            return int(model.fit(x).n_iter_)

    return run


def gmmx_mixture(x: np.ndarray, means: np.ndarray) -> Run:
    from gmmx import EMFitter, GaussianMixtureModelJax

    k = len(means)
    points = jnp.asarray(x)
    start = GaussianMixtureModelJax.from_squeezed(
        means=means,
        covariances=np.ones((k, x.shape[1])),
        weights=np.full(k, 1 / k),
        covariance_type="diag",
    )

    def run(iterations: int) -> int:
        fitted = EMFitter(max_iter=iterations, tol=0.0).fit(points, start)
        return int(jax.block_until_ready(fitted).n_iter)

    return run


def ott_kmeans(x: np.ndarray, means: np.ndarray) -> Run:
    from ott.tools.k_means import k_means

    points, centres = jnp.asarray(x), jnp.asarray(means)

    # By itself it would trace anew in every call.
    @partial(jax.jit, static_argnames="iterations")
    def program(points: jax.Array, centres: jax.Array, iterations: int) -> Any:
        found = k_means(
            points,
            len(means),
            init=lambda *_: centres,
            n_init=1,
            tol=0.0,
            min_iterations=iterations,
            max_iterations=iterations,
        )
        return found.iteration

    return lambda iterations: int(program(points, centres, iterations))


def faiss_kmeans(x: np.ndarray, means: np.ndarray) -> Run:
    import faiss

    def run(iterations: int) -> int:
        model = faiss.Kmeans(
            x.shape[1], len(means), niter=iterations, max_points_per_centroid=len(x)
        )
        model.train(x, init_centroids=means)
        return iterations

    return run


def torch_cem(x: np.ndarray, means: np.ndarray) -> Run:
    import torch

    points, centres = torch.from_numpy(x), torch.from_numpy(means)
    return lambda iterations: torch_cem_steps(points, centres, iterations)[2]


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], Run]] = {
    "jaxcmle": ours,
    "scikit-learn KMeans": sklearn_kmeans,
    "scikit-learn GaussianMixture": sklearn_mixture,
    "gmmx": gmmx_mixture,
    "OTT": ott_kmeans,
    "faiss": faiss_kmeans,
    "torch": torch_cem,
}


def measure_shape(n: int, d: int, k: int, short: int, long: int, rounds: int) -> dict[str, Any]:
    x, means = slow_data(n, d, k)
    runs, absent = {}, []
    for name, make in METHODS.items():
        try:
            runs[name] = make(x, means)
        except ImportError:
            absent.append(name)
    started = {name: timed(partial(run, short)) for name, run in runs.items()}
    iterations = {name: run(long) - started[name][1] for name, run in runs.items()}
    for name, count in iterations.items():
        if count < (long - short) / 2:
            raise RuntimeError(f"{name} converges too early to be measured: use harder data")
    calls: dict[str, Callable[[], Any]] = {
        f"{name} {count}": partial(run, count)
        for name, run in runs.items()
        for count in (short, long)
    }
    times = interleave(calls, rounds)

    def per_iteration(name: str) -> Times:
        """Return the differences of the rounds; one that noise made nothing is left out."""
        result = Times()
        pairs = zip(times[f"{name} {long}"].rounds, times[f"{name} {short}"].rounds, strict=True)
        slopes = [(more - less) / iterations[name] for more, less in pairs]
        result.rounds = [value for value in slopes if value > 0]
        return result

    each = {name: per_iteration(name) for name in runs}
    own = each["jaxcmle"].rounds
    result: dict[str, Any] = {"n": n, "d": d, "k": k, "absent": absent, "ratios": {}}
    result["milliseconds"] = {name: 1e3 * value.median for name, value in each.items()}
    result["compile seconds"] = started["jaxcmle"][0] - times[f"jaxcmle {short}"].median
    result["rounds left out"] = {name: rounds - len(value.rounds) for name, value in each.items()}
    for name, value in each.items():
        if name != "jaxcmle":
            spread = [other / statistics.median(own) for other in value.rounds]
            result["ratios"][name] = {
                "ratio": value.median / statistics.median(own),
                "lowest": min(spread),
                "highest": max(spread),
            }
    return result


def measure(quick: bool) -> dict[str, Any]:
    shapes = []
    for shape in QUICK_SHAPES if quick else SHAPES:
        say("cem", *shape[:3])
        shapes.append(measure_shape(*shape, 3 if quick else ROUNDS))
    return {"shapes": shapes, "aims": AIMS}


def table(found: dict[str, Any]) -> Table:
    shapes = found["results"]["shapes"]
    names = [name for name in METHODS if name != "jaxcmle"]
    rows, reached, aimed = [], 0, 0
    for one in shapes:
        cells = [f"{one['n']:,} × {one['d']}, {one['k']}"]
        for name in names:
            beside = one["ratios"].get(name)
            aim = AIMS.get(name, {}).get(one["d"])
            cells.append("–" if beside is None else ratio(beside))
            if aim is not None and beside is not None:
                cells[-1] += f", aim {aim:g}"
                aimed += 1
                reached += beside["ratio"] >= aim
        rows.append(tuple(cells))
    before = (
        "Time per iteration of others over that of our CEM, on the same points from the same "
        "means: above 1, ours is faster. In brackets the range of the rounds."
    )
    after = (
        f"{reached} of {aimed} aims are reached. An iteration of ours estimates weights and "
        f"variances as well, which k-means does not.\n\n{source(found)}"
    )
    return Table(before, ("points × features, clusters", *names), tuple(rows), after)


PARTS = {"iteration": Part(measure, table)}
