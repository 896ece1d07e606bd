"""The practical global search: what most people call."""

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
from jax.typing import ArrayLike

from jaxcmle import memory, numerics
from jaxcmle.candidates.seeding import sample_points
from jaxcmle.numerics import Points
from jaxcmle.problem import inputs
from jaxcmle.problem.bounds import with_certificate
from jaxcmle.problem.objective import assign, shift_means
from jaxcmle.problem.placement import (
    Placed,
    agreed,
    everywhere,
    is_placed,
    on_host,
    on_one_device,
    place,
    split_points,
    tells_lost_processes,
    to_host,
    without_extra,
)
from jaxcmle.problem.score import score
from jaxcmle.problem.types import CMLE, Guarantee, Mixture, Problem, Solution, Status
from jaxcmle.proof.certify import certify as tight_certificate
from jaxcmle.refine.cem import cem
from jaxcmle.refine.polish import Limits, polish, variance_limits
from jaxcmle.refine.workspace import Partitions, Workspace, fitted
from jaxcmle.solve.checkpoint import (
    Checkpoint,
    PathOption,
    digest,
    instance_parts,
    open_checkpoint,
)
from jaxcmle.solve.effort import Effort, EffortName, to_effort
from jaxcmle.solve.evolution import advance, begin, ended, pace_of
from jaxcmle.solve.padding import for_all_points, padded
from jaxcmle.solve.population import make_starts, numbered, outcome, workspace
from jaxcmle.solve.progress import CtrlC, Progress, ProgressOption
from jaxcmle.solve.sizes import default_min_size
from jaxcmle.stream.kinds import is_streamed, streamed

__all__ = ["SAMPLE_SLACK", "fit", "fit_in_places", "search_mixtures"]

# Up to so many points the lower bound takes less time than the search.
MOST_CERTIFIED = 4096
# After a search on a sample: iterations of CEM on all points in one go, all in all, and batches of
# moves at the end.
CHUNK = 10
MOST_ITERATIONS = 200
LAST_PASSES = 20
# A sample may miss a part of a cluster: there, clusters may be smaller.
SAMPLE_SLACK = 0.7


@tells_lost_processes
def fit(
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
    mesh: Mesh | None = None,
) -> Solution:
    """Return the best clustering that a global search finds, and how far from optimal it can be.

    A population of solutions, from starts of several kinds, is refined by CEM and single-point
    moves, recombined, and perturbed by giving one cluster up and splitting another, round after
    round, until nothing better is found. No single point can change cluster to lower the cost of
    what is returned. More points than `Effort.sample` are searched on a random sample, and the best
    solution is then refined on all of them.

    Args:
        x: points `[n, d]`: an array; or points that are read in chunks and need not fit into
            memory, a `numpy.memmap`, a path to an `.npy` or Parquet file, or a function without
            arguments that returns an iterator of chunks `[c, d]`. Those are searched on a weighted
            sample and then refined by CEM, without single-point moves; their labels are a NumPy
            array, their `guarantee` an estimate.
        n_clusters: k.
        key: default `jax.random.key(0)`. The same key gives the same answer.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        effort: `"quick"`, `"default"`, `"thorough"`, or an `Effort` with numbers of your own.
        init: something known to begin with: a `Solution`, a `Mixture`, or labels `[n]`. The answer
            is not worse, unless it has clusters that are too small.
        min_size: the least weight of a cluster. Default: a tenth of the average, `n / (10 k)`, but
            2 points at least, if there are so many; without a minimum, pairs of points that happen
            to be close make clusters of their own.
        min_variance: floor under every variance. Default: the rounding error of the data, squared;
            and clusters of a few points (fewer than half the average) that all coincide, which
            would cost minus infinity without the floor, count as worse than any other: only if
            nothing else is found are they returned.
        time_limit: seconds. The round at hand is finished, so it may take somewhat longer.
        certify: True proves how good the answer is as `jaxcmle.certify` does, to its default
            tolerance, in the time that is left. If a better solution turns up on the way, that is
            the answer.
        progress: True shows a line on standard error, False nothing, None a line on terminals and
            in notebooks; or a function of a report.
        checkpoint: a file to save the search to, every few seconds, at Ctrl-C and at the time
            limit. The same call goes on from there, also after its process was killed, and ends
            with the same answer, bit for bit, as if nothing had happened. The file stays. One that
            is no checkpoint, or one of other arguments, is refused and left as it is.
        mesh: devices to use, of one process or of several: more points than `Effort.sample` are
            split over them, along the axis `"points"` (or the first one), and the solutions of a
            search over all of them. An x that is split already needs none. In several processes
            all make the same call, with the same x or one global array; the first one's clock
            counts.

    Returns:
        A `Solution`. `CONVERGED`: no move of a single point is left that improves it. `MAX_ITER`:
        on very many points, some may be. `INTERRUPTED`: Ctrl-C or the time limit came first, and
        it is the best so far. `INADMISSIBLE`: no solution with clusters of `min_size` was found.
        `n_iter` counts rounds. Clusters are numbered in the order of their first points.
        `guarantee` is a certificate over partitions with clusters of
        `min_size`, or says why there is none; without `certify` it is a quick one, and loose.

    Example:
        >>> import jaxcmle as jc
        >>> x = [[0.0], [2.0], [9.0], [11.0], [20.0], [22.0]]
        >>> solution = jc.fit(x, 3)
        >>> sorted(solution.mixture.means[:, 0].tolist()), solution.guarantee.kind
        ([1.0, 10.0, 21.0], 'certificate')
    """
    if is_streamed(x):
        return streamed("fit", mesh)(
            x,
            n_clusters,
            key=key,
            problem=problem,
            sample_weight=sample_weight,
            effort=effort,
            init=init,
            min_size=min_size,
            min_variance=min_variance,
            time_limit=time_limit,
            certify=certify,
            progress=progress,
            checkpoint=checkpoint,
        )
    inputs.check_on_host("fit")
    effort = to_effort(effort, time_limit)
    problem = inputs.to_problem(problem)
    key = jax.random.key(0) if key is None else inputs.to_key(key)
    placed = place(x, sample_weight, mesh) if is_placed(x, mesh) else None
    if placed is not None:
        mesh = placed.placement.mesh
        if placed.n <= effort.sample or n_clusters == 1:
            # Few points: every device has all of them.
            x, sample_weight = on_host(placed, sample_weight is not None)
            placed = None
    watch = _Watch(Progress(progress, "rounds"), effort, mesh)

    # Points of weight 0 are padding: they take no part, and get a label at the end.
    if placed is None:
        everything, weight = inputs.to_points(x, sample_weight)
        points, weight, present = inputs.without_padding(everything, weight)
    else:
        points = everything = placed.x
        weight, present = placed.weight, None
    k = inputs.to_n_clusters(n_clusters, len(points) if placed is None else placed.n)
    inputs.check_enough_points(points, weight, k)
    limits = _limits(points, weight, k, min_size, min_variance)
    if placed is None or isinstance(init, Mixture):
        known = _known_labels(init, everything, present, points, k, problem)
    else:
        known = _split_labels(init, placed, k)
    instance = _Instance(points, weight, k, k, problem, limits, mesh)
    watch.checkpoint = open_checkpoint(
        checkpoint,
        lambda: instance_parts(
            "fit",
            everything,
            (weight, present),
            key,
            problem,
            mesh,
            n_clusters=k,
            effort=dataclasses.replace(effort, seconds=None),
            init=None if known is None else digest(known),
            min_size=limits.min_size,
            min_variance=limits.min_variance,
            certify=certify,
        ),
        mesh,
    )
    answer = watch.checkpoint.answer()
    if answer is not None:
        return answer
    solution = _fit(instance, effort, key, known, watch)
    proves = certify and limits.min_size > 0 and not watch.ctrl_c.pressed
    if not proves:
        solution = _certified(instance, solution)
    if placed is None:
        solution = for_all_points(everything, present, solution, problem)
    else:
        solution = _for_placed_points(placed, solution, problem)
    if proves:
        if placed is not None:
            x, sample_weight = on_host(placed, sample_weight is not None)
            solution = on_one_device(solution)
        solution = _proved(x, sample_weight, instance, solution, watch, progress)
    # Of points over several devices, what comes after the last save is soon done again.
    cut = watch.stopped or watch.ctrl_c.pressed
    return solution if placed else watch.checkpoint.finished(solution, cut)


def _split_labels(init: Any, placed: Placed, k: int) -> Array | None:
    """Return labels that somebody knows already, where the points are."""
    if init is None:
        return None
    labels = to_host(init.labels if isinstance(init, Solution) else init)
    return split_points(placed.placement, np.asarray(inputs.to_labels(labels, placed.n, k)))


def _for_placed_points(placed: Placed, solution: Solution, problem: Problem) -> Solution:
    """Return the solution with labels for points of weight 0 as well, but none for padding."""
    labels = solution.labels
    if placed.weight is not None:
        cheapest = assign(placed.x, solution.mixture, problem=problem)
        labels = jnp.where(placed.weight > 0, labels, cheapest)
    return dataclasses.replace(solution, labels=without_extra(labels, placed.n))


def fit_in_places(
    x: Any,
    weight: Any,
    k: int,
    places: int,
    *,
    key: Array,
    problem: Problem,
    effort: Effort,
    limits: Limits,
) -> Solution:
    """Return what `fit` does, silently, by programs for as many clusters as there are places.

    So that searches for different numbers of clusters share them. For input that has been checked.
    """
    everything, weight = inputs.to_points(x, weight)
    points, weight, present = inputs.without_padding(everything, weight)
    instance = _Instance(points, weight, k, places if k > 1 else 1, problem, limits)
    solution = _fit(instance, effort, key, None, _Watch(Progress(False), effort))
    return for_all_points(everything, present, _certified(instance, solution), problem)


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
    instance = _Instance(points, weight, k, k, problem, limits)
    watch = _Watch(progress, effort)
    watch.ctrl_c, watch.checkpoint = ctrl_c, checkpoint
    search = _search(instance, effort, key, None, watch)
    mixtures = fitted(search.space, search.population.moments, problem)
    mixtures = _without_places(mixtures, k, problem)
    mixtures = shift_means(mixtures, search.space.points.shift)
    return FoundMixtures(mixtures, search.status == Status.INTERRUPTED, search.rounds)


class _Instance(NamedTuple):
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


class _Watch:
    """Shows how far the search has come, saves it, and tells when to stop."""

    ctrl_c: CtrlC

    def __init__(self, progress: Progress, effort: Effort, mesh: Mesh | None = None) -> None:
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

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(self._end - time.monotonic(), 0.0)

    def report(self, done: int, cost: float) -> None:
        """Show the round and the best cost so far."""
        self.progress.update(done, self._rounds, cost)


def _limits(
    points: Array, weight: Array | None, k: int, min_size: Any, min_variance: Any
) -> Limits:
    """Return the limits on clusters, by default those that keep degenerate pairs from winning."""
    total = len(points) if weight is None else float(weight.sum())
    if min_size is None:
        size = default_min_size(total, weight is None or bool((weight == weight.round()).all()), k)
    else:
        size = inputs.to_limit(min_size, "min_size")
    inputs.check_partition_exists(k, size, total)
    floor = None if min_variance is None else inputs.to_limit(min_variance, "min_variance")
    return Limits(size, floor)


def _known_labels(
    init: Any, everything: Array, present: Any, points: Array, k: int, problem: Problem
) -> Array | None:
    """Return the labels of the points that somebody knows already, or None."""
    if init is None:
        return None
    if isinstance(init, Mixture):
        mixture = inputs.to_mixture(init, points.shape[1], points.dtype, problem, stack=False)
        if mixture.weights.shape[0] != k:
            raise ValueError(f"init has {mixture.weights.shape[0]} clusters, and n_clusters is {k}")
        return assign(points, mixture, problem=problem)
    labels = init.labels if isinstance(init, Solution) else init
    labels = inputs.to_labels(labels, len(everything), k)
    return labels if present is None else labels[present]


def _fit(
    instance: _Instance, effort: Effort, key: Array, known: Array | None, watch: "_Watch"
) -> Solution:
    """Search on all points, or on a sample."""
    few = len(instance.points) <= effort.sample or instance.k == 1
    way = _fit_all if few else _fit_sample
    with CtrlC() as watch.ctrl_c:
        try:
            # A repetition goes on from the last round, which the checkpoint holds, file or not.
            return memory.within(lambda: way(instance, effort, key, known, watch))
        finally:
            watch.progress.close()


def _fit_all(
    instance: _Instance, effort: Effort, key: Array, known: Array | None, watch: _Watch
) -> Solution:
    """Search on all points."""
    n, problem = len(instance.points), instance.problem
    done = _search(instance, effort, key, known, watch)
    labels, space = done.population.labels[0], done.space
    passes = 0 if done.status == Status.INTERRUPTED else space.points.x.shape[0]
    solution = outcome(space, labels, problem, int(done.status), done.rounds, passes)
    if known is not None:
        # Ranks within the search are rounded: what was given is looked at once more, exactly.
        labels = _lengthened(known, space)
        given = outcome(space, labels, problem, int(done.status), done.rounds, 0)
        solution = min(solution, given, key=_order)
    if instance.mesh is not None:
        # From all devices to where other arrays are.
        solution = on_one_device(solution)
    mixture = _without_places(solution.mixture, instance.k, problem)
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


def _search(
    instance: _Instance, effort: Effort, key: Array, known: Array | None, watch: _Watch
) -> _Done:
    """Run rounds until nothing improves; at least one."""
    _, _, k, places, problem, limits, mesh = instance
    x, weight = padded(instance.points, instance.weight)
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


def _fit_sample(
    instance: _Instance, effort: Effort, key: Array, known: Array | None, watch: _Watch
) -> Solution:
    """Search on a sample, and refine the best that comes of it on all points."""
    points, weight, k, places, problem, limits, mesh = instance
    sample_key, search_key = jax.random.split(key if mesh is None else everywhere(key, mesh))
    size = max(effort.sample, 32 * k)
    drawn = _sample(sample_key, points, weight, size)
    if mesh is not None:
        drawn = jax.tree.map(to_host, everywhere(drawn, mesh))
    few = _Instance(
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
    mixture = jax.tree.map(lambda leaf: leaf[best], mixtures)

    chunks, mixture = watch.checkpoint.get("refined") or (0, mixture)
    while chunks < MOST_ITERATIONS // CHUNK and not watch.stops():
        refined = cem(points, mixture, max_iter=CHUNK, **instance.options)
        mixture = refined.mixture
        watch.report(search.rounds, float(refined.cost))
        more = int(refined.status) == Status.MAX_ITER
        chunks = chunks + 1 if more else MOST_ITERATIONS // CHUNK
        watch.checkpoint.save_if_due(refined=(chunks, mixture))
    watch.checkpoint.save()
    labels = assign(points, mixture if mesh is None else everywhere(mixture, mesh), problem=problem)
    ends = [labels] if known is None else [labels, known]
    passes = 0 if watch.stops() else LAST_PASSES
    options = {**instance.options, "max_passes": passes}
    solution = min((polish(points, each, k, **options) for each in ends), key=_order)
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


def _order(solution: Solution) -> tuple[bool, float]:
    """Return what solutions are compared by."""
    cost = float(solution.cost)
    bad = int(solution.status) in (Status.INADMISSIBLE, Status.NONFINITE)
    return bad, cost if math.isfinite(cost) else math.inf


def _proved(
    x: Any,
    sample_weight: Any,
    instance: _Instance,
    solution: Solution,
    watch: "_Watch",
    progress: ProgressOption,
) -> Solution:
    """Return the solution with a tight certificate, or a better one if that was found."""
    left = watch.left()
    guarantee = tight_certificate(
        x,
        solution,
        min_size=instance.limits.min_size,
        problem=instance.problem,
        sample_weight=sample_weight,
        min_variance=_floor(instance),
        time_limit=left if math.isfinite(left) else None,
        progress=progress,
    )
    if guarantee.better is not None:
        return dataclasses.replace(
            guarantee.better,
            status=solution.status,
            n_iter=solution.n_iter,
        )
    return dataclasses.replace(solution, guarantee=guarantee)


def _floor(instance: _Instance) -> float:
    """Return the floor under variances that the search had."""
    ready = numerics.prepare(instance.points, instance.weight)
    limits, problem = instance.limits, instance.problem
    return float(variance_limits(ready, limits.min_variance, problem)[0])


def _certified(instance: _Instance, solution: Solution) -> Solution:
    """Return the solution with its certificate, or with the reason why it has none."""
    points, limits = instance.points, instance.limits
    reason, later = "", "; with_certificate computes it all the same"
    if limits.min_size <= 0:
        reason = "there is no lower bound without a minimum size; set min_size to 1 or more"
    elif int(solution.status) == Status.INTERRUPTED:
        reason = "the search was interrupted" + later
    elif len(points) > MOST_CERTIFIED:
        reason = (
            f"the lower bound looks at all pairs of points, and {len(points)} points are more than "
            f"{MOST_CERTIFIED}" + later
        )
    if instance.k == 1:
        # There is only one partition.
        proved = Guarantee(
            kind="certificate",
            lower_bound=solution.cost,
            gap=0.0,
            min_size=limits.min_size,
            method="pairs",
        )
        return dataclasses.replace(solution, guarantee=proved)
    if reason:
        return dataclasses.replace(
            solution, guarantee=Guarantee(reason=reason, min_size=limits.min_size)
        )
    floor = _floor(instance)
    return with_certificate(points, solution, **{**instance.options, "min_variance": floor})
