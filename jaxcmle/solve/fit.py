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
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.candidates.seeding import sample_points
from jaxcmle.numerics import Points
from jaxcmle.problem import inputs
from jaxcmle.problem.bounds import with_certificate
from jaxcmle.problem.objective import assign, shift_means
from jaxcmle.problem.score import score
from jaxcmle.problem.types import CMLE, Guarantee, Mixture, Problem, Solution, Status
from jaxcmle.proof.certify import certify as tight_certificate
from jaxcmle.refine.cem import cem
from jaxcmle.refine.polish import Limits, polish, variance_limits
from jaxcmle.refine.workspace import Partitions, Workspace, fitted
from jaxcmle.solve.effort import Effort, EffortName, to_effort
from jaxcmle.solve.evolution import advance, begin, ended, pace_of
from jaxcmle.solve.padding import for_all_points, padded
from jaxcmle.solve.population import make_starts, numbered, outcome, workspace
from jaxcmle.solve.progress import CtrlC, Progress, ProgressOption
from jaxcmle.solve.sizes import default_min_size

__all__ = ["fit", "fit_in_places"]

# Up to so many points the lower bound takes less time than the search.
MOST_CERTIFIED = 4096
# After a search on a sample: iterations of CEM on all points in one go, all in all, and batches of
# moves at the end.
CHUNK = 10
MOST_ITERATIONS = 200
LAST_PASSES = 20
# A sample may miss a part of a cluster: there, clusters may be smaller.
SAMPLE_SLACK = 0.7


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
) -> Solution:
    """Return the best clustering that a global search finds, and how far from optimal it can be.

    A population of solutions, from starts of several kinds, is refined by CEM and single-point
    moves, recombined, and perturbed by giving one cluster up and splitting another, round after
    round, until nothing better is found. No single point can change cluster to lower the cost of
    what is returned. More points than `Effort.sample` are searched on a random sample, and the best
    solution is then refined on all of them.

    Args:
        x: points `[n, d]`.
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
    inputs.check_on_host("fit")
    effort = to_effort(effort, time_limit)
    problem = inputs.to_problem(problem)
    key = jax.random.key(0) if key is None else inputs.to_key(key)
    watch = _Watch(Progress(progress, "rounds"), effort)

    everything, weight = inputs.to_points(x, sample_weight)
    # Points of weight 0 are padding: they take no part, and get a label at the end.
    points, weight, present = inputs.without_padding(everything, weight)
    k = inputs.to_n_clusters(n_clusters, len(points))
    inputs.check_enough_points(points, weight, k)
    limits = _limits(points, weight, k, min_size, min_variance)
    known = _known_labels(init, everything, present, points, k, problem)
    instance = _Instance(points, weight, k, k, problem, limits)
    solution = _fit(instance, effort, key, known, watch)
    if certify and limits.min_size > 0 and not watch.ctrl_c.pressed:
        solution = for_all_points(everything, present, solution, problem)
        return _proved(x, sample_weight, instance, solution, watch, progress)
    return for_all_points(everything, present, _certified(instance, solution), problem)


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


class _Instance(NamedTuple):
    """What is to be solved; no point has weight 0. Programs are for `places` clusters."""

    points: Array
    weight: Array | None
    k: int
    places: int
    problem: Problem
    limits: Limits

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
    """Shows how far the search has come, and tells when to stop."""

    ctrl_c: CtrlC

    def __init__(self, progress: Progress, effort: Effort) -> None:
        self.progress = progress
        self._rounds = effort.rounds
        self._end = time.monotonic() + (math.inf if effort.seconds is None else effort.seconds)

    def stops(self) -> bool:
        """Tell whether somebody pressed Ctrl-C, or time is up."""
        return self.ctrl_c.pressed or time.monotonic() >= self._end

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
    with CtrlC() as watch.ctrl_c:
        try:
            return (_fit_all if few else _fit_sample)(instance, effort, key, known, watch)
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
    _, _, k, places, problem, limits = instance
    x, weight = padded(instance.points, instance.weight)
    space = workspace(x, weight, jnp.arange(places) < k, limits, problem)
    if known is not None:
        known = _lengthened(known, space)
    pace = pace_of(effort)
    search = begin(space, known, effort.population, effort.restarts, pace, problem)
    start_key, round_key = jax.random.split(key)
    starts: Any = None
    seedings, seeded, finished, stopped = 0, True, k == 1, False
    while not finished and not stopped:
        if seeded:
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
    status = Status.INTERRUPTED if stopped else Status.CONVERGED
    return _Done(space, ended(search), status, int(search.rounds))


def _fit_sample(
    instance: _Instance, effort: Effort, key: Array, known: Array | None, watch: _Watch
) -> Solution:
    """Search on a sample, and refine the best that comes of it on all points."""
    points, weight, k, places, problem, limits = instance
    sample_key, search_key = jax.random.split(key)
    size = max(effort.sample, 32 * k)
    drawn = _sample(sample_key, points, weight, size)
    few = _Instance(
        points=drawn.x + drawn.shift,
        weight=drawn.weight,
        k=k,
        places=places,
        problem=problem,
        limits=limits._replace(min_size=SAMPLE_SLACK * limits.min_size),
    )
    search = _search(few, effort, search_key, None, watch)
    mixtures = fitted(search.space, search.population.moments, problem)
    mixtures = _without_places(mixtures, k, problem)
    mixtures = shift_means(mixtures, search.space.points.shift)
    costs = np.asarray(score(points, mixtures, problem=problem, sample_weight=weight))
    short = np.asarray(search.population.rank.shortage) > 0
    best = int(np.lexsort((np.where(np.isfinite(costs), costs, np.inf), short))[0])
    mixture = jax.tree.map(lambda leaf: leaf[best], mixtures)

    labels = assign(points, mixture, problem=problem)
    for _ in range(MOST_ITERATIONS // CHUNK):
        if watch.stops():
            break
        refined = cem(points, mixture, max_iter=CHUNK, **instance.options)
        mixture, labels = refined.mixture, refined.labels
        watch.report(search.rounds, float(refined.cost))
        if int(refined.status) != Status.MAX_ITER:
            break
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
    return jnp.pad(labels, (0, space.points.x.shape[0] - len(labels)))


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
