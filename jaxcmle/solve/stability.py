"""How far a clustering depends on the sample: the same search on many resamples, in one batch."""

import dataclasses
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxcmle.problem import inputs
from jaxcmle.problem.objective import assign
from jaxcmle.problem.types import CMLE, Mixture, Problem, Solution, Status
from jaxcmle.solve.effort import Effort, EffortName
from jaxcmle.solve.fit import fit
from jaxcmle.solve.many import fit_many
from jaxcmle.solve.progress import ProgressOption

__all__ = ["Stability", "stability"]

# The agreement of all pairs is held in memory.
MAX_POINTS = 20_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stability:
    """How far the clusters of a data set are the same in resamples of it.

    Attributes:
        solution: the solution on the data as it is.
        agreement: `[n, n]`, for all pairs of points the share of resamples in which they are in one
            cluster. 0 and 1 everywhere: nothing depends on the sample.
        rand: `[r]`, for each resample the adjusted Rand index between its clusters and those of
            the solution: 1 where they are the same, 0 where they have no more in common than by
            chance.
        clusters: `[k]`, for each cluster of the solution the mean, over the resamples, of the
            largest overlap with one of theirs (points in both over points in either).
        points: `[n]`, for each point the share of (resample, other point) pairs in which the two
            are together, or apart, as in the solution.
        n_resamples: how many resamples have an answer; fewer than asked for after Ctrl-C.
    """

    solution: Solution
    agreement: np.ndarray
    rand: np.ndarray
    clusters: np.ndarray
    points: np.ndarray
    n_resamples: int


def stability(
    x: Any,
    n_clusters: int,
    *,
    n_resamples: int = 100,
    key: Array | None = None,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    effort: EffortName | Effort = "quick",
    min_size: ArrayLike | None = None,
    min_variance: ArrayLike | None = None,
    progress: ProgressOption = None,
) -> Stability:
    """Cluster resamples of the points, all in one batch, and tell how far they agree.

    A resample draws as many points as there are, with replacement and in proportion to their
    weight (the bootstrap). Each is clustered by `fit_many`; the mixture found is then asked for the
    cluster of every point, drawn or not.

    Args:
        x: points `[n, d]`, up to 20,000.
        n_clusters: k.
        n_resamples: r.
        key: default `jax.random.key(0)`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones. Resamples draw as many points as have a weight.
        effort: for the resamples, as in `fit`. The solution on all points has that, too.
        min_size: the least weight of a cluster; default as in `fit`.
        min_variance: floor under every variance; default as in `fit`.
        progress: as in `fit_many`.

    Returns:
        A `Stability`.

    Example:
        >>> import jaxcmle as jc, numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = np.concatenate([rng.normal(size=(40, 2)), rng.normal(size=(40, 2)) + 20])
        >>> found = jc.stability(x, 2, n_resamples=20)
        >>> print(found.rand.mean().round(2), found.agreement[0, [1, 79]].round(2))
        1.0 [1. 0.]
    """
    inputs.check_on_host("stability")
    points, weight = inputs.to_points(x, sample_weight)
    n = len(points)
    k = inputs.to_n_clusters(n_clusters, n)
    count = inputs.to_whole(operator.index(n_resamples), "n_resamples")
    if n > MAX_POINTS:
        raise ValueError(
            f"stability compares all pairs of points, and {n} points are more than {MAX_POINTS}: "
            "pass a random sample of them"
        )
    key = jax.random.key(0) if key is None else inputs.to_key(key)
    fit_key, draw_key, many_key = jax.random.split(key, 3)
    options: dict[str, Any] = {
        "problem": problem,
        "effort": effort,
        "min_size": min_size,
        "min_variance": min_variance,
    }
    solution = fit(points, k, key=fit_key, sample_weight=weight, progress=False, **options)
    counts = np.asarray(_resamples(draw_key, points, weight, count))
    stack = np.broadcast_to(np.asarray(points), (count, *points.shape))
    found = fit_many(
        stack,
        k,
        key=many_key,
        sample_weight=counts,
        certificate=False,
        progress=progress,
        **options,
    )
    done = np.isin(np.asarray(found.status), (Status.CONVERGED, Status.MAX_ITER))
    if not done.any():
        raise KeyboardInterrupt
    mixtures = jax.tree.map(lambda leaf: leaf[np.flatnonzero(done)], found.mixture)
    labels = np.asarray(_assigned(points, mixtures, problem))
    return _compared(solution, labels, k)


@partial(jax.jit, static_argnames="count")
def _resamples(key: Array, x: Array, weight: Array | None, count: int) -> Array:
    """Return how often each point is in each resample, `[r, n]`."""
    n = x.shape[0]
    mass = jnp.ones(n, x.dtype) if weight is None else weight
    drawn = (mass > 0).sum()

    def one(key: Array) -> Array:
        picks = jax.random.categorical(key, jnp.log(mass), shape=(n,))
        # Points without weight are not drawn; as many as there are others.
        taken = jnp.arange(n) < drawn
        return jnp.zeros(n, x.dtype).at[picks].add(taken.astype(x.dtype))

    return jax.lax.map(one, jax.random.split(key, count))


@jax.jit
def _assigned(x: Array, mixtures: Mixture, problem: Problem) -> Array:
    finite = jnp.where(jnp.isfinite(x), x, 0)
    return jax.lax.map(lambda mixture: assign(finite, mixture, problem=problem), mixtures)


def _compared(solution: Solution, labels: np.ndarray, k: int) -> Stability:
    """Return what labels `[r, n]` have in common with each other and with a solution."""
    r, n = labels.shape
    own = np.asarray(solution.labels)
    agreement = np.zeros((n, n))
    rand, overlap = np.zeros(r), np.zeros((r, k))
    mine = own[:, None] == np.arange(k)
    for i, each in enumerate(labels):
        theirs = each[:, None] == np.arange(k)
        both = theirs.astype(np.float32)
        agreement += both @ both.T
        table = mine.T.astype(float) @ theirs
        rand[i] = _adjusted_rand(table)
        union = table.sum(axis=1)[:, None] + table.sum(axis=0) - table
        overlap[i] = (table / np.maximum(union, 1)).max(axis=1)
    agreement /= r
    together = own[:, None] == own
    same = np.where(together, agreement, 1 - agreement)
    others = np.maximum(n - 1, 1)
    return Stability(
        solution=solution,
        agreement=agreement,
        rand=rand,
        clusters=overlap.mean(axis=0),
        points=(same.sum(axis=1) - np.diag(same)) / others if n > 1 else np.ones(1),
        n_resamples=r,
    )


def _adjusted_rand(table: np.ndarray) -> float:
    """Return the adjusted Rand index of two partitions, from how many points they share."""

    def pairs(counts: np.ndarray) -> float:
        return float((counts * (counts - 1)).sum() / 2)

    total = pairs(np.array([table.sum()]))
    first, second = pairs(table.sum(axis=1)), pairs(table.sum(axis=0))
    expected = first * second / total if total else 0.0
    most = (first + second) / 2
    return 1.0 if most == expected else (pairs(table) - expected) / (most - expected)
