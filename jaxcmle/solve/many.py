"""Many instances at once: thousands of small data sets in one call."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxcmle.problem import inputs
from jaxcmle.problem.types import CMLE, Guarantee, Problem, Solution, Status
from jaxcmle.refine.polish import Limits
from jaxcmle.solve.answers import Part, collected
from jaxcmle.solve.batches import (
    Chunk,
    Layout,
    Watch,
    capacity_of,
    chunks_of,
    layout_of,
    run_chunks,
    spread,
)
from jaxcmle.solve.bounding import bound_all
from jaxcmle.solve.checkpoint import (
    Checkpoint,
    PathOption,
    digest,
    open_checkpoint,
    problem_text,
)
from jaxcmle.solve.effort import Effort, EffortName, to_effort
from jaxcmle.solve.finished import Finished
from jaxcmle.solve.fit import MOST_CERTIFIED, fit_in_places
from jaxcmle.solve.instances import (
    Failure,
    Instance,
    Instances,
    each_of,
    pack,
    raise_failures,
    to_instances,
    to_keys,
)
from jaxcmle.solve.progress import Progress, ProgressOption
from jaxcmle.solve.searches import Task, search_all
from jaxcmle.solve.sizes import default_min_size

__all__ = ["ErrorOption", "fit_many", "fit_numbers"]

ErrorOption = Literal["status", "raise"]

# Larger instances gain nothing from company: `fit` takes them one by one.
MOST_POINTS = 8192


def fit_many(
    xs: Any,
    n_clusters: Any,
    *,
    key: Array | None = None,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    effort: EffortName | Effort = "default",
    min_size: Any = None,
    min_variance: ArrayLike | None = None,
    time_limit: float | None = None,
    certificate: bool = True,
    errors: ErrorOption = "status",
    progress: ProgressOption = None,
    checkpoint: PathOption = None,
) -> Any:
    """Cluster many instances: the search of `fit` for each of them, in one call.

    Instances are padded to a few sizes (powers of two for the points, and few numbers of clusters),
    each of which is compiled once, and run in chunks of bounded memory on all local devices; on a
    CPU, on all cores. The answer for an instance is that of `fit` with the same key and effort, to
    rounding: it does not depend on the other instances, their number or their order.

    Args:
        xs: an array `[b, n, d]`, or a list of arrays `[n, d]` with different n.
        n_clusters: k, one for all or one for each.
        key: one key, by default `jax.random.key(0)`: instance i has `jax.random.fold_in(key, i)`;
            or a key for each, `[b]`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[b, n]`, or a list with weights `[n]` or None for each; default ones.
        effort: as in `fit`.
        min_size: the least weight of a cluster, one for all or one for each; default as in `fit`.
        min_variance: floor under every variance; default as in `fit`.
        time_limit: seconds. Chunks that have begun are finished.
        certificate: False leaves out the lower bounds, which take the square of n. By default
            instances of up to 4096 points get one, as in `fit`.
        errors: `"status"`: an instance that cannot be solved (NaN, too few points, ...) gets a
            status and an `error`, and harms no other. `"raise"`: raises an error that names them,
            before anything else is done.
        progress: True shows a line on standard error, False nothing, None a line on terminals and
            in notebooks; or a function of a report.
        checkpoint: a file to save answers to as they come, every few seconds, as in `fit`. The same
            call does the rest.

    Returns:
        For a list, a list of `Solution`s in order, which hold NumPy arrays. For an array, one
        `Solution` with a leading axis; its `guarantee` has a `lower_bound`, a `gap` and a
        `min_size` for each. An instance without an answer has an `error`, a status of `NONFINITE`
        or `INADMISSIBLE`, an infinite cost and a mixture of NaN. After Ctrl-C or the time limit,
        those not begun have the status `INTERRUPTED`.

    Example:
        >>> import jaxcmle as jc
        >>> x = [[0.0], [2.0], [9.0], [11.0], [20.0], [22.0]]
        >>> first, second = jc.fit_many([x, x[:4]], [3, 2])
        >>> sorted(first.mixture.means[:, 0].tolist()), sorted(second.mixture.means[:, 0].tolist())
        ([1.0, 10.0, 21.0], [1.0, 10.0])
    """
    inputs.check_on_host("fit_many")
    if errors not in get_args(ErrorOption):
        raise ValueError(f"errors must be one of {get_args(ErrorOption)}, got {errors!r}")
    effort = to_effort(effort, time_limit)
    problem = inputs.to_problem(problem)
    floor = None if min_variance is None else inputs.to_limit(min_variance, "min_variance")
    shown = Progress(progress, "instances")
    instances = to_instances(xs, n_clusters, sample_weight)
    b = len(instances.each)
    keys = to_keys(key, b)
    sizes = _sizes(instances, each_of(min_size, b, "min_size"))
    if errors == "raise":
        raise_failures(instances.failures)

    setting = _Setting(problem, effort, floor, sizes, keys, layout_of(), certificate)
    saved = open_checkpoint(checkpoint, lambda: _parts(instances, setting))
    return _fit(instances, setting, shown, Finished(saved))


def fit_numbers(
    x: Any,
    numbers: list[int],
    *,
    key: Array,
    problem: Problem,
    sample_weight: Any,
    effort: Effort,
    min_size: float | None,
    min_variance: float | None,
    progress: Progress,
) -> list[Solution]:
    """Return the answers of `fit` for one instance and several numbers of clusters.

    They share a program, that for the largest number: compiling one for each takes far longer than
    the clusters that most of them do not have.
    """
    b = len(numbers)
    weights = None if sample_weight is None else [sample_weight] * b
    instances = to_instances([x] * b, numbers, weights)
    sizes = _sizes(instances, [min_size] * b)
    keys = jnp.stack([key] * b)
    most = max((instance.k for instance in instances.each if instance is not None), default=0)
    setting = _Setting(problem, effort, min_variance, sizes, keys, layout_of(), True, most)
    return _fit(instances, setting, progress, Finished(Checkpoint(None, {})))


def _fit(instances: Instances, setting: "_Setting", progress: Progress, finished: Finished) -> Any:
    effort, problem, floor = setting.effort, setting.problem, setting.min_variance
    with Watch(progress, effort.seconds, len(instances.each)) as watch:
        before = list(finished.parts)
        if before:
            watch.add(sum(len(part.places) for part in before))
        parts = run_chunks(
            finished.rest(_cut(instances, setting)),
            lambda chunk: _solve(chunk, setting, watch),
            ("fit", instances.d, instances.dtype, type(problem), floor is None, effort),
            setting.layout,
            watch,
            lambda part: finished.keep(part, watch.stops()),
        )
        finished.save()
    return collected(instances, before + parts, problem)


def _parts(instances: Instances, setting: "_Setting") -> dict[str, str]:
    """Return the fingerprint of a call."""
    each = [instance for instance in instances.each if instance is not None]
    arrays = [array for one in each for array in (one.x, one.weight, one.order)]
    device = setting.layout.mesh.devices.flat[0]
    double = jnp.result_type(float) == jnp.float64
    return {
        "function": "fit_many",
        "x": digest(*(array for array in arrays if array is not None)),
        "sample_weight": digest(np.array([one.weight is not None for one in each])),
        "shape": f"{len(instances.each)} instances{' in one array' if instances.stacked else ''}",
        "failures": repr(sorted(instances.failures)),
        "n_clusters": digest(np.array(instances.clusters)),
        "key": digest(setting.keys),
        "problem": problem_text(setting.problem),
        "dtype": f"{np.dtype(instances.dtype).name}{' with jax_enable_x64' if double else ''}",
        "devices": f"{setting.layout.devices} x {device.device_kind}",
        "effort": repr(dataclasses.replace(setting.effort, seconds=None)),
        "min_size": digest(np.array(setting.sizes)),
        "min_variance": repr(setting.min_variance),
        "certificate": repr(setting.certificate),
    }


class _Setting(NamedTuple):
    """What all chunks share."""

    problem: Problem
    effort: Effort
    min_variance: float | None
    sizes: list[float]
    keys: Array
    layout: Layout
    certificate: bool
    clusters: int = 0


def _sizes(instances: Instances, given: list[Any]) -> list[float]:
    """Return the least weight of a cluster for each instance; too large a one is its failure."""
    sizes = []
    for i, (instance, size) in enumerate(zip(instances.each, given, strict=True)):
        if size is not None:
            size = inputs.to_limit(size, "min_size")
        if instance is None:
            sizes.append(0.0 if size is None else size)
            continue
        if size is None:
            size = default_min_size(instance.total, instance.whole, instance.k)
        sizes.append(size)
        try:
            inputs.check_partition_exists(instance.k, size, instance.total)
        except ValueError as error:
            instances.failures[i] = Failure(Status.INADMISSIBLE, str(error))
            instances.each[i] = None
    return sizes


def _cut(instances: Instances, setting: _Setting) -> list[Chunk]:
    """Return the chunks; large instances have one for themselves."""
    most = min(MOST_POINTS, setting.effort.sample)
    large = [i for i, each in enumerate(instances.each) if each is not None and len(each.x) > most]
    small = list(instances.each)
    for i in large:
        small[i] = None

    def chunks(some: list[Instance | None]) -> list[Chunk]:
        return chunks_of(some, instances.stacked, setting.layout, clusters=setting.clusters)

    alone = [chunk._replace(places=[i]) for i in large for chunk in chunks([instances.each[i]])]
    return alone + chunks(small)


def _solve(chunk: Chunk, setting: _Setting, watch: Watch) -> Part:
    """Return the solutions of a chunk, on the host."""
    if len(chunk.instances[0].x) > min(MOST_POINTS, setting.effort.sample):
        return _solve_large(chunk, setting, watch)
    layout, bucket = setting.layout, chunk.bucket
    capacity = capacity_of(bucket)
    size = capacity * layout.devices
    counts, places = spread(len(chunk.instances), capacity, layout)
    packed = pack(chunk.instances, bucket, places, size)
    dtype = packed.x.dtype
    # Places without an instance get the key of some other.
    keys = np.zeros(size, np.int32)
    keys[places] = chunk.places
    sizes = np.zeros(size, dtype)
    sizes[places] = [setting.sizes[i] for i in chunk.places]
    floors = None
    if setting.min_variance is not None:
        floors = np.full(size, setting.min_variance, dtype)
    task = Task(packed.x, packed.weight, packed.exists, sizes, floors, setting.keys[keys])
    found = search_all(task, counts, setting.effort, setting.problem, layout)
    bounds = None
    if setting.certificate and bucket.n <= MOST_CERTIFIED:
        whole = all(instance.unweighted for instance in chunk.instances)
        problem = setting.problem
        bounds = bound_all(packed, sizes, found.floor, counts, problem, layout, whole)
    solution, bounds = jax.device_get((found.solution, bounds))
    solution = jax.tree.map(lambda leaf: leaf[places], solution)
    guarantee = _guarantee(chunk, solution, None if bounds is None else bounds[places], setting)
    return Part(chunk.places, dataclasses.replace(solution, guarantee=guarantee))


def _solve_large(chunk: Chunk, setting: _Setting, watch: Watch) -> Part:
    (instance,), (place,) = chunk.instances, chunk.places
    solution = fit_in_places(
        instance.x,
        instance.weight,
        instance.k,
        max(instance.k, setting.clusters),
        key=setting.keys[place],
        problem=setting.problem,
        effort=dataclasses.replace(setting.effort, seconds=watch.left()),
        limits=Limits(setting.sizes[place], setting.min_variance),
    )
    solution = jax.tree.map(lambda leaf: np.asarray(leaf)[None], solution)
    return Part(chunk.places, solution)


def _guarantee(chunk: Chunk, solution: Solution, bounds: Any, setting: _Setting) -> Guarantee:
    """Return the certificates of a chunk, or the reason why there are none."""
    sizes = np.array([setting.sizes[i] for i in chunk.places])
    if bounds is None:
        return Guarantee(reason=_reason(setting.certificate), min_size=sizes)
    bounds = np.where(sizes > 0, bounds.astype(np.float64), -np.inf)
    totals = np.array([instance.total for instance in chunk.instances])
    costs = np.asarray(solution.cost, np.float64)
    # There is only one partition into one cluster.
    bounds = np.where([instance.k == 1 for instance in chunk.instances], costs, bounds)
    gaps = np.maximum(costs - bounds, 0) / totals
    certain = (np.asarray(solution.status) == Status.CONVERGED) & np.isfinite(gaps)
    return Guarantee(
        kind="certificate",
        lower_bound=bounds,
        gap=np.where(certain, gaps, np.inf),
        min_size=sizes,
        method="pairs",
    )


def _reason(asked: bool) -> str:
    if not asked:
        return "certificate=False; lower_bound_many computes it"
    return (
        "the lower bound looks at all pairs of points, and there are more than "
        f"{MOST_CERTIFIED} points; lower_bound_many computes it all the same"
    )
