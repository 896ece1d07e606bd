"""The search of `fit`: rounds on all points, or on a sample that is refined on all of them."""

import dataclasses
import math
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxcmle import memory, numerics
from jaxcmle.candidates.seeding import sample_points
from jaxcmle.numerics import Points
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import shift_means
from jaxcmle.problem.placement import agreed, everywhere, on_one_device, to_host
from jaxcmle.problem.score import score
from jaxcmle.problem.types import Mixture, Problem, Solution, Status
from jaxcmle.refine.cem import cem
from jaxcmle.refine.polish import Limits, polish
from jaxcmle.refine.workspace import Partitions, Workspace, fitted
from jaxcmle.solve.checkpoint import Checkpoint
from jaxcmle.solve.effort import Effort
from jaxcmle.solve.evolution import advance, begin, ended, pace_of
from jaxcmle.solve.padding import assign_all, padded
from jaxcmle.solve.population import make_starts, numbered, outcome, workspace
from jaxcmle.solve.progress import CtrlC, Progress

__all__ = [
    "SAMPLE_SLACK",
    "FoundMixtures",
    "Task",
    "Watch",
    "is_usable",
    "rank_of",
    "search_for_best",
    "search_mixtures",
]

# After a search on a sample: iterations of CEM on all points in one go, all in all, and batches of
# moves at the end.
CHUNK = 10
MOST_ITERATIONS = 200
LAST_PASSES = 20
# A sample may miss a part of a cluster: there, clusters may be smaller.
SAMPLE_SLACK = 0.7


class Task(NamedTuple):
    """What is to be solved; no point has weight 0. Programs are for `places` clusters."""

    points: Array
    weight: Array | None
    k: int
    places: int
    problem: Problem
    limits: Limits
    mesh: Mesh | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return what public functions take."""
        return {
            "problem": self.problem,
            "sample_weight": self.weight,
            "min_size": self.limits.min_size,
            "min_variance": self.limits.min_variance,
        }


class Watch:
    """Shows how far the search has come, saves it, and tells when to stop."""

    ctrl_c: CtrlC

    def __init__(self, progress: Progress, effort: Effort, mesh: Mesh | None = None) -> None:
        """Begin to count the time."""
        self.progress, self._mesh = progress, mesh
        self.checkpoint = Checkpoint(None, {})
        # Whether the work was cut short.
        self.stopped = False
        self._rounds = effort.rounds
        self._end = time.monotonic() + (math.inf if effort.seconds is None else effort.seconds)

    def stops(self) -> bool:
        """Tell whether somebody pressed Ctrl-C, or time is up; in the first of all processes."""
        stops = self.ctrl_c.pressed or time.monotonic() >= self._end
        self.stopped = bool(agreed(stops, self._mesh))
        return self.stopped

    def pressed(self) -> bool:
        """Tell whether somebody pressed Ctrl-C; in the first of all processes."""
        return bool(agreed(self.ctrl_c.pressed, self._mesh))

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(self._end - time.monotonic(), 0.0)

    def report(self, done: int, cost: float) -> None:
        """Show the round and the best cost so far."""
        self.progress.update(done, self._rounds, cost)


class FoundMixtures(NamedTuple):
    """A stack of mixtures in the user's units, the best first; and how the search ended."""

    mixtures: Mixture
    interrupted: bool
    rounds: int


def search_mixtures(
    x: Any,
    weight: Any,
    k: int,
    *,
    key: Array,
    problem: Problem,
    effort: Effort,
    limits: Limits,
    progress: Progress,
    ctrl_c: CtrlC,
    checkpoint: Checkpoint,
) -> FoundMixtures:
    """Return all mixtures that the search keeps, for somebody who compares them on more points."""
    points, weight = inputs.to_points(x, weight)
    task = Task(points, weight, k, k, problem, limits)
    watch = Watch(progress, effort)
    watch.ctrl_c, watch.checkpoint = ctrl_c, checkpoint
    search = memory.within(lambda: _search(task, effort, key, None, watch))
    mixtures = fitted(search.space, search.population.moments, problem)
    mixtures = _without_places(mixtures, k, problem)
    mixtures = shift_means(mixtures, search.space.points.shift)
    return FoundMixtures(mixtures, search.status == Status.INTERRUPTED, search.rounds)


def search_for_best(
    task: Task, effort: Effort, key: Array, known: Array | None, watch: Watch
) -> Solution:
    """Search on all points, or on a sample."""
    few = len(task.points) <= effort.sample or task.k == 1
    way = _on_all_points if few else _on_sample
    with CtrlC() as watch.ctrl_c:
        try:
            # A repetition goes on from the last round, which the checkpoint holds, file or not.
            return memory.within(lambda: way(task, effort, key, known, watch))
        finally:
            watch.progress.close()


def _on_all_points(
    task: Task, effort: Effort, key: Array, known: Array | None, watch: Watch
) -> Solution:
    """Search on all points."""
    n, problem = len(task.points), task.problem
    done = _search(task, effort, key, known, watch)
    labels, space = done.population.labels[0], done.space
    passes = 0 if done.status == Status.INTERRUPTED else space.points.x.shape[0]
    solution = outcome(space, labels, problem, int(done.status), done.rounds, passes)
    if known is not None:
        # Ranks within the search are rounded: what was given is looked at once more, exactly.
        labels = _lengthened(known, space)
        given = outcome(space, labels, problem, int(done.status), done.rounds, 0)
        solution = min(solution, given, key=rank_of)
    if task.mesh is not None:
        # From all devices to where other arrays are.
        solution = on_one_device(solution)
    mixture = _without_places(solution.mixture, task.k, problem)
    return dataclasses.replace(solution, mixture=mixture, labels=solution.labels[:n])


def _without_places(mixture: Mixture, k: int, problem: Problem) -> Mixture:
    """Return a mixture, or a stack, without the clusters that do not exist, which are last."""
    weights, variances = mixture.weights[..., :k], mixture.variances[..., :k]
    means = mixture.means[..., :k, :]
    return problem.constrained(Mixture(weights=weights, means=means, variances=variances))


class _Done(NamedTuple):
    """The end of a search."""

    space: Workspace
    population: Partitions
    status: Status
    rounds: int


def _search(task: Task, effort: Effort, key: Array, known: Array | None, watch: Watch) -> _Done:
    """Run rounds until nothing improves; at least one."""
    _, _, k, places, problem, limits, mesh = task
    x, weight = padded(task.points, task.weight)
    exists = np.arange(places) < k
    if mesh is not None:
        x, weight, key, exists = everywhere((x, weight, key, exists), mesh)
    space = workspace(x, weight, exists, limits, problem, mesh=mesh)
    if known is not None:
        known = _lengthened(known, space)
    pace = pace_of(effort)
    search = begin(space, known, effort.population, effort.restarts, pace, problem)
    search = watch.checkpoint.resumed("search", search)
    start_key, round_key = jax.random.split(key)
    starts: Any = None
    seedings, groups, finished = jax.device_get((search.seedings, search.groups, search.finished))
    seeded, stopped = groups > 0, False
    while not finished and not stopped:
        if starts is None and not seeded:
            # They do not count any more, but the program takes them.
            seedings = seedings - 1
        if seeded or starts is None:
            method = effort.methods[seedings % len(effort.methods)]
            starts = make_starts(start_key, seedings, space, effort.population, method, problem)
        search = advance(round_key, search, space, starts, pace, problem)
        # One transfer: everything that the host wants to know.
        seedings, groups, done, cost, finished = jax.device_get(
            (search.seedings, search.groups, search.rounds, search.best.cost, search.finished)
        )
        seeded = groups > 0
        watch.report(int(done), float(cost))
        stopped = not finished and watch.stops()
        watch.checkpoint.save_if_due(search=search)
    watch.checkpoint.save(search=search)
    status = Status.INTERRUPTED if stopped else Status.CONVERGED
    return _Done(space, ended(search), status, int(search.rounds))


def _on_sample(
    task: Task, effort: Effort, key: Array, known: Array | None, watch: Watch
) -> Solution:
    """Search on a sample, and refine the best that comes of it on all points."""
    points, weight, k, places, problem, limits, mesh = task
    sample_key, search_key = jax.random.split(key if mesh is None else everywhere(key, mesh))
    size = max(effort.sample, 32 * k)
    drawn = _sample(sample_key, points, weight, size)
    if mesh is not None:
        drawn = jax.tree.map(to_host, everywhere(drawn, mesh))
    few = Task(
        points=drawn.x + drawn.shift,
        weight=drawn.weight,
        k=k,
        places=places,
        problem=problem,
        limits=limits._replace(min_size=SAMPLE_SLACK * limits.min_size),
        mesh=mesh,
    )
    search = _search(few, effort, search_key, None, watch)
    mixtures = fitted(search.space, search.population.moments, problem)
    mixtures = _without_places(mixtures, k, problem)
    mixtures = shift_means(mixtures, search.space.points.shift)
    costs = np.asarray(score(points, mixtures, problem=problem, sample_weight=weight))
    short = np.asarray(search.population.rank.shortage) > 0
    best = int(np.lexsort((np.where(np.isfinite(costs), costs, np.inf), short))[0])
    first = jax.tree.map(lambda leaf: leaf[best], mixtures)

    chunks, mixture = watch.checkpoint.get("refined") or (0, first)
    while chunks < MOST_ITERATIONS // CHUNK and not watch.stops():
        refined = cem(points, mixture, max_iter=CHUNK, **task.options)
        mixture = refined.mixture
        watch.report(search.rounds, float(refined.cost))
        more = int(refined.status) == Status.MAX_ITER
        chunks = chunks + 1 if more else MOST_ITERATIONS // CHUNK
        watch.checkpoint.save_if_due(refined=(chunks, mixture))
    watch.checkpoint.save()
    passes = 0 if watch.stops() else LAST_PASSES

    def polished(labels: Array) -> Solution:
        return polish(points, labels, k, **task.options, max_passes=passes)

    def assigned(mixture: Mixture) -> Array:
        return assign_all(points, mixture if mesh is None else everywhere(mixture, mesh), problem)

    ends = [assigned(mixture)] if known is None else [assigned(mixture), known]
    solution = min(map(polished, ends), key=rank_of)
    if not is_usable(solution):
        # CEM has left a cluster so few points that it is not filled up again.
        solution = min(solution, polished(assigned(first)), key=rank_of)
    solution = numbered(solution, weight)
    status = Status(int(solution.status))
    if status != Status.INADMISSIBLE and (watch.stops() or search.status == Status.INTERRUPTED):
        status = Status.INTERRUPTED
    return dataclasses.replace(solution, status=jnp.int32(status), n_iter=jnp.int32(search.rounds))


@partial(jax.jit, static_argnames="size")
def _sample(key: Array, x: Array, weight: Array | None, size: int) -> Points:
    return sample_points(key, numerics.prepare(x, weight), size)


def _lengthened(labels: Array, space: Workspace) -> Array:
    """Return labels for the points of a workspace, which is padded."""
    longer = jnp.pad(labels, (0, space.points.x.shape[0] - len(labels)))
    return longer if space.mesh is None else everywhere(longer, space.mesh)


def is_usable(solution: Solution) -> bool:
    """Tell whether a solution is finite, and no cluster is known to be too small."""
    return int(solution.status) not in (Status.INADMISSIBLE, Status.NONFINITE)


def rank_of(solution: Solution) -> tuple[bool, float]:
    """Return what solutions are compared by."""
    cost = float(solution.cost)
    return not is_usable(solution), cost if math.isfinite(cost) else math.inf
