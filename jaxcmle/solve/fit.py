"""The practical global search: what most people call."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.problem import inputs
from jaxcmle.problem.bounds import with_certificate
from jaxcmle.problem.placement import (
    Placed,
    from_first,
    is_placed,
    on_host,
    on_one_device,
    place,
    split_points,
    takes_mesh,
    to_host,
    without_extra,
)
from jaxcmle.problem.types import CMLE, Guarantee, Mixture, Problem, Solution, Status
from jaxcmle.proof.certify import certify as tight_certificate
from jaxcmle.refine.polish import Limits, variance_limits
from jaxcmle.solve.checkpoint import PathOption, digest, instance_parts, open_checkpoint
from jaxcmle.solve.effort import Effort, EffortName, to_effort
from jaxcmle.solve.padding import assign_all, for_all_points
from jaxcmle.solve.progress import Progress, ProgressOption
from jaxcmle.solve.searching import Task, Watch, search_for_best
from jaxcmle.solve.sizes import default_min_size
from jaxcmle.stream.kinds import is_streamed, streamed

__all__ = ["fit", "fit_in_places"]

# Up to so many points the lower bound takes less time than the search.
MOST_CERTIFIED = 4096


@takes_mesh
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
            is not worse, unless it has clusters that are too small. Of a solution, points that are
            read in chunks take the mixture alone.
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
        on very many points, some may be; of points read in chunks, also where going on would
        make a cluster too small. `INTERRUPTED`: Ctrl-C or the time limit came first, and
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
    watch = Watch(Progress(progress, "rounds"), effort, mesh)

    # Points of weight 0 are padding: they take no part, and get a label at the end.
    if placed is None:
        everything, weight = inputs.to_points(x, sample_weight)
        points, weight, present = inputs.without_padding(everything, weight)
    else:
        points = everything = placed.x
        weight, present = placed.weight, None
    k = inputs.to_n_clusters(n_clusters, len(points) if placed is None else placed.n)
    inputs.check_enough_points(points, weight, k, to_host)
    limits = _limits(points, weight, k, min_size, min_variance)
    if placed is None or isinstance(init, Mixture):
        known = _known_labels(init, everything, present, points, k, problem)
    else:
        known = _split_labels(init, placed, k)
    task = Task(points, weight, k, k, problem, limits, mesh)
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
    solution = search_for_best(task, effort, key, known, watch)
    proves = certify and limits.min_size > 0 and not watch.pressed()
    if not proves:
        solution = _certified(task, solution)
    if placed is None:
        solution = for_all_points(everything, present, solution, problem)
    else:
        solution = _for_placed_points(placed, solution, problem)
    if proves:
        if placed is not None:
            x, sample_weight = on_host(placed, sample_weight is not None)
            solution = on_one_device(solution)
        solution = _proved(x, sample_weight, task, solution, watch, progress)
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
        cheapest = assign_all(placed.x, solution.mixture, problem)
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
    task = Task(points, weight, k, places if k > 1 else 1, problem, limits)
    solution = search_for_best(task, effort, key, None, Watch(Progress(False), effort))
    return for_all_points(everything, present, _certified(task, solution), problem)


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
        return assign_all(points, mixture, problem)
    labels = init.labels if isinstance(init, Solution) else init
    labels = inputs.to_labels(labels, len(everything), k)
    return labels if present is None else labels[present]


def _proved(
    x: Any,
    sample_weight: Any,
    task: Task,
    solution: Solution,
    watch: Watch,
    progress: ProgressOption,
) -> Solution:
    """Return the solution with a tight certificate, or a better one if that was found."""
    left = watch.left()
    guarantee = tight_certificate(
        x,
        solution,
        min_size=task.limits.min_size,
        problem=task.problem,
        sample_weight=sample_weight,
        min_variance=_floor(task),
        time_limit=left if math.isfinite(left) else None,
        progress=progress,
    )
    proved = dataclasses.replace(solution, guarantee=guarantee)
    if guarantee.better is not None:
        proved = dataclasses.replace(
            guarantee.better,
            status=solution.status,
            n_iter=solution.n_iter,
        )
    # How far a proof comes in a given time differs between processes.
    return from_first(proved, task.mesh)


def _floor(task: Task) -> float:
    """Return the floor under variances that the search had."""
    ready = numerics.prepare(task.points, task.weight)
    limits, problem = task.limits, task.problem
    return float(variance_limits(ready, limits.min_variance, problem)[0])


def _certified(task: Task, solution: Solution) -> Solution:
    """Return the solution with its certificate, or with the reason why it has none."""
    points, limits = task.points, task.limits
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
    if task.k == 1:
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
    floor = _floor(task)
    return with_certificate(points, solution, **{**task.options, "min_variance": floor})
