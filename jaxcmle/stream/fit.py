"""The search of `fit` for points that are read in chunks.

Four passes, and then one for every iteration: a look at the points, a draw of samples, the best of
the search on the sample compared on all points, CEM on all points, and the labels.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import math
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxcmle import memory
from jaxcmle.candidates.seeding import SeedMethod, seed
from jaxcmle.problem import inputs
from jaxcmle.problem.bounds import lower_bound
from jaxcmle.problem.objective import shift_means
from jaxcmle.problem.types import CMLE, Guarantee, Mixture, Problem, Solution, Status
from jaxcmle.refine.cem import cem_all
from jaxcmle.refine.iterations import best_admissible
from jaxcmle.refine.polish import Limits
from jaxcmle.solve.checkpoint import (
    Checkpoint,
    PathOption,
    devices_of,
    digest,
    dtype_text,
    open_checkpoint,
    problem_text,
)
from jaxcmle.solve.effort import Effort, EffortName, to_effort
from jaxcmle.solve.fit import fit
from jaxcmle.solve.progress import CtrlC, Progress, ProgressOption
from jaxcmle.solve.searching import SAMPLE_SLACK, is_usable, rank_of, search_mixtures
from jaxcmle.solve.sizes import default_min_size
from jaxcmle.stream.cem import (
    End,
    State,
    Stream,
    costs_of,
    open_stream,
    pass_over,
    refine,
    settled,
)
from jaxcmle.stream.sampling import Samples, draw_samples
from jaxcmle.stream.sources import Source, open_source

__all__ = ["fit_streamed"]

# How many of the best of the sample are compared on all points.
COMPARED = 4
# Iterations of CEM on all points at most, and the nats per point below which one is the last.
MOST_ITERATIONS = 200
LEAST_GAIN = 1e-6
# Starts of CEM alone, of each kind, where all of those end with clusters that are too small; after
# how many iterations it is looked at, and how many of the best are taken then.
RESTARTS = 16
RESTART_ITERATIONS = (300, 30, 3, 0)
RESTARTED = 2
RESTART_METHODS: tuple[SeedMethod, ...] = ("kmeans++", "random")
# Points of the sample that the estimate of the lower bound comes from.
BOUND_SAMPLE = 2048


def fit_streamed(
    x: Any,
    n_clusters: int,
    *,
    key: Array | None = None,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    effort: EffortName | Effort = "default",
    init: Any = None,
    min_size: ArrayLike | None = None,
    min_variance: ArrayLike | None = None,
    time_limit: float | None = None,
    certify: bool = False,
    progress: ProgressOption = None,
    checkpoint: PathOption = None,
) -> Solution:
    """Return what `fit` does, for points that are read in chunks."""
    inputs.check_on_host("fit")
    effort = to_effort(effort, time_limit)
    problem = inputs.to_problem(problem)
    key = jax.random.key(0) if key is None else inputs.to_key(key)
    source = open_source(x, sample_weight)
    shown = Progress(progress, "rounds")
    end = time.monotonic() + (math.inf if effort.seconds is None else effort.seconds)
    if _is_few(source, effort):
        points, weight = source.load()
        return fit(
            points,
            n_clusters,
            key=key,
            problem=problem,
            sample_weight=weight,
            effort=dataclasses.replace(effort, seconds=max(end - time.monotonic(), 0.0)),
            init=init,
            min_size=min_size,
            min_variance=min_variance,
            certify=certify,
            progress=progress,
            checkpoint=checkpoint,
        )
    if certify:
        raise ValueError(
            "certify looks at all pairs of points, which streamed points are too many for; leave "
            "it out (the guarantee then is an estimate), or load a sample and certify that"
        )
    with CtrlC() as ctrl_c:
        try:
            search = _Search(source, effort, key, problem, shown, ctrl_c, end)
            return search.run(n_clusters, init, min_size, min_variance, checkpoint)
        finally:
            shown.close()


def _digests(source: Source) -> dict[str, str]:
    """Return hashes of all points and of their weights, which chunks do not show in."""
    points, weights = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for chunk in source.chunks():
        points.update(chunk.x[: chunk.length].data.cast("B"))
        if source.weighted:
            weights.update(chunk.weight[: chunk.length].data.cast("B"))
    return {"x": points.hexdigest(), "sample_weight": weights.hexdigest()}


def _is_few(source: Source, effort: Effort) -> bool:
    """Tell whether all points fit in the sample; counts them if need be, as far as that goes."""
    if source.n is None:
        count = 0
        for chunk in source.chunks():
            count += chunk.length
            if count > effort.sample:
                return False
    return source.n is not None and source.n <= effort.sample


class _Search:
    """A search on a stream, and what it may take."""

    def __init__(
        self,
        source: Source,
        effort: Effort,
        key: Array,
        problem: Problem,
        progress: Progress,
        ctrl_c: CtrlC,
        end: float,
    ) -> None:
        self._source, self._effort, self._key, self._problem = source, effort, key, problem
        self._progress, self._ctrl_c, self._end = progress, ctrl_c, end

    def run(
        self,
        n_clusters: Any,
        init: Any,
        min_size: Any,
        min_variance: Any,
        checkpoint: PathOption,
    ) -> Solution:
        """Return the best solution that is found."""
        source, problem = self._source, self._problem
        known = None if init is None else _known(init, source, n_clusters, problem)
        inputs.to_n_clusters(n_clusters, sys.maxsize if source.n is None else source.n)
        stream = open_stream(source, problem, min_variance, n_clusters)
        survey = stream.survey
        k = inputs.to_n_clusters(n_clusters, survey.n)
        size = default_min_size(survey.total, survey.whole_weights, k)
        if min_size is not None:
            size = inputs.to_limit(min_size, "min_size")
        inputs.check_partition_exists(k, size, survey.total)

        saved = self._checkpoint(checkpoint, stream, k, known, size)
        sample_key, search_key = jax.random.split(self._key)
        count = max(self._effort.sample, 32 * k)
        drawn = draw_samples(sample_key, source, survey, count, BOUND_SAMPLE)
        floor = None if min_variance is None else stream.floor
        left = max(self._end - time.monotonic(), 0.0)
        found = search_mixtures(
            drawn.x,
            drawn.weight,
            k,
            key=search_key,
            problem=problem,
            effort=dataclasses.replace(self._effort, seconds=left),
            limits=Limits(SAMPLE_SLACK * size, floor),
            progress=self._progress,
            ctrl_c=self._ctrl_c,
            checkpoint=saved,
        )
        _give_back()
        mixtures = jax.tree.map(lambda leaf: leaf[:COMPARED], found.mixtures)
        if known is not None:
            mixtures = jax.tree.map(
                lambda one, more: jnp.concatenate([one[None], more]), known, mixtures
            )
        solution = self._refined(stream, mixtures, size, found.rounds, saved)
        if not is_usable(solution) and not self._stops():
            # Where the minimum binds, what is best on the sample need not be what CEM stays at.
            others = self._restarts(drawn, k, size, floor, jax.random.fold_in(search_key, 1))
            if others is not None:
                other = self._refined(stream, others, size, found.rounds, saved, " of CEM")
                solution = other if is_usable(other) else solution
        status = Status(int(solution.status))
        if found.interrupted and status in (Status.CONVERGED, Status.MAX_ITER):
            solution = dataclasses.replace(solution, status=jnp.int32(Status.INTERRUPTED))
        solution = dataclasses.replace(solution, n_iter=jnp.int32(found.rounds))
        guarantee = self._guarantee(stream, solution, drawn.equal, size)
        return dataclasses.replace(solution, guarantee=guarantee)

    def _checkpoint(
        self, path: PathOption, stream: Stream, k: int, known: Mixture | None, size: float
    ) -> Checkpoint:
        """Open the checkpoint; one more pass tells whether it is that of these points."""
        return open_checkpoint(
            path,
            lambda: {
                "function": "fit of points read in chunks",
                **_digests(self._source),
                "key": digest(self._key),
                "problem": problem_text(self._problem),
                "shape": repr((stream.survey.n, self._source.d)),
                "dtype": dtype_text(self._source.dtype),
                "devices": devices_of(jnp.zeros(())),
                "n_clusters": repr(k),
                "effort": repr(dataclasses.replace(self._effort, seconds=None)),
                "init": digest(*jax.tree.leaves(known)),
                "min_size": repr(size),
                "min_variance": repr(float(stream.floor)),
            },
        )

    def _stops(self) -> bool:
        return self._ctrl_c.pressed or time.monotonic() >= self._end

    def _restarts(
        self, drawn: Samples, k: int, size: float, floor: float | None, key: Array
    ) -> Mixture | None:
        """Return what CEM alone comes to on the sample, where all clusters are large enough.

        At its end and earlier on: there are minimum sizes that it keeps to no end, from no start.
        """
        stacks = [
            jax.vmap(partial(_start, drawn=drawn, k=k, method=method))(
                jax.random.split(jax.random.fold_in(key, i), RESTARTS)
            )
            for i, method in enumerate(RESTART_METHODS)
        ]
        starts = _joined(stacks)
        best = []
        for most in RESTART_ITERATIONS:
            ends = cem_all(
                drawn.x,
                starts,
                problem=self._problem,
                sample_weight=drawn.weight,
                max_iter=most,
                min_size=size,
                min_variance=floor,
            )
            costs = np.asarray(best_admissible(ends)[1])
            places = np.argsort(costs)[: min(RESTARTED, int(np.isfinite(costs).sum()))]
            best.append(jax.tree.map(lambda leaf, places=places: leaf[places], ends.mixture))
        joined = _joined(best)
        return joined if len(joined.weights) else None

    def _refined(
        self,
        stream: Stream,
        mixtures: Mixture,
        size: float,
        rounds: int,
        saved: Checkpoint,
        kind: str = "",
    ) -> Solution:
        """Return what CEM makes of the best of the mixtures.

        Where its clusters become too small, the last mixture before that, or what becomes of the
        next one, whichever is better.
        """
        order = saved.get(f"order{kind}")
        if order is None:
            order = self._order(stream, mixtures, size)
            if not self._stops():
                saved.save(**{f"order{kind}": order})
        best: Solution | None = None
        # Those that were compared, and what somebody knows; of restarts, the best on all points.
        for place in order[: COMPARED + 1]:

            def report(state: State, name: str = f"refined {place}{kind}") -> None:
                self._progress.update(rounds, self._effort.rounds, state.cost)
                saved.save_if_due(**{name: tuple(state)})

            last = saved.get(f"refined {place}{kind}")
            last = None if last is None else State(*last)
            mixture = jax.tree.map(lambda leaf, place=place: leaf[place], mixtures)
            end = refine(
                stream, mixture, MOST_ITERATIONS, self._stops, report, LEAST_GAIN, last, size
            )
            saved.save()
            solution = memory.within(partial(settled, stream, end, size, in_order=True))
            stays = is_usable(solution)
            if not stays and end.admissible is not None:
                cut = end.status == Status.INTERRUPTED
                status = Status.INTERRUPTED if cut else Status.MAX_ITER
                end = End(end.admissible, status, end.n_iter)
                solution = memory.within(partial(settled, stream, end, size, in_order=True))
            best = solution if best is None else min(best, solution, key=rank_of)
            if stays or self._stops():
                break
        assert best is not None
        return best

    def _order(self, stream: Stream, mixtures: Mixture, size: float) -> list[int]:
        """Return the places of the mixtures, the best on all points first."""
        places = list(range(mixtures.weights.shape[0]))
        shifted = shift_means(mixtures, -jnp.asarray(stream.survey.shift))
        found = memory.within(lambda: pass_over(stream, shifted, shifted.means, self._stops))
        if found is None:
            return places
        smallest = np.asarray(found.sums.size).min(axis=1)
        # Clusters that are too small come after those that are not, far too small ones last.
        short = (smallest < size).astype(int) + (smallest < SAMPLE_SLACK * size)
        costs = costs_of(found, shifted, stream.problem)
        costs = np.where(np.isfinite(costs), costs, np.inf)
        return sorted(places, key=lambda place: (short[place], costs[place]))

    def _guarantee(
        self, stream: Stream, solution: Solution, sample: np.ndarray, size: float
    ) -> Guarantee:
        """Return an estimate of the lower bound, or why there is none."""
        k, total, cost = len(solution.mixture.weights), stream.survey.total, float(solution.cost)
        reason = ""
        if int(solution.status) == Status.INTERRUPTED:
            reason = "the search was interrupted"
        elif not is_usable(solution):
            reason = "a cluster is under the minimum size"
            reason += ", and the search was interrupted" if self._stops() else ""
        elif k == 1:
            # There is only one partition, and this is its best mixture.
            return Guarantee(
                kind="certificate", lower_bound=cost, gap=0.0, min_size=size, method="pairs"
            )
        elif size <= 0:
            reason = "there is no lower bound without a minimum size; set min_size to 1 or more"
        elif k > len(sample):
            reason = f"the estimate is from {len(sample)} points, and there are more clusters"
        if reason:
            return Guarantee(reason=reason, min_size=size)
        share = len(sample) / total
        bound = lower_bound(
            sample,
            k,
            min_size=size * share,
            problem=stream.problem,
            min_variance=stream.floor,
        )
        bound = float(bound) / share
        return Guarantee(
            kind="estimate",
            lower_bound=bound,
            gap=max(cost - bound, 0.0) / total,
            min_size=size,
            method="pairs",
            reason=f"an estimate from a sample of {len(sample)} points, and not a bound",
        )


def _joined(stacks: list[Mixture]) -> Mixture:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stacks)


def _start(key: Array, drawn: Samples, k: int, method: SeedMethod) -> Mixture:
    return seed(key, drawn.x, k, method=method, sample_weight=drawn.weight)


def _give_back() -> None:
    """Return what is free to the system: compiling the search leaves some hundred megabytes.

    Only the C library of Linux can; elsewhere, memory stays as it is.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _known(init: Any, source: Source, n_clusters: Any, problem: Problem) -> Mixture:
    """Return the mixture that somebody knows already."""
    mixture = init.mixture if isinstance(init, Solution) else init
    if not isinstance(mixture, Mixture):
        raise TypeError(
            "init for streamed points must be a jaxcmle.Solution or a jaxcmle.Mixture, got "
            f"{type(init).__name__}"
        )
    mixture = inputs.to_mixture(mixture, source.d, source.dtype, problem, stack=False)
    if mixture.weights.shape[0] != n_clusters:
        raise ValueError(
            f"init has {mixture.weights.shape[0]} clusters, and n_clusters is {n_clusters}"
        )
    return mixture
