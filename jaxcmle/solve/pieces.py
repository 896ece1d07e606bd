"""Parts of a search for many instances at once: local search, scores and lower bounds."""

import dataclasses
import math
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxcmle.problem import inputs
from jaxcmle.problem.score import score_points
from jaxcmle.problem.types import CMLE, Guarantee, Mixture, Problem, Solution
from jaxcmle.refine.lanes import cem_lanes
from jaxcmle.solve.answers import Part, collected
from jaxcmle.solve.batches import (
    Chunk,
    Layout,
    Watch,
    capacity_of,
    chunks_of,
    each_first,
    layout_of,
    over_devices,
    run_chunks,
    spread,
)
from jaxcmle.solve.bounding import bound_all
from jaxcmle.solve.instances import (
    Instances,
    Packed,
    each_of,
    pack,
    raise_failures,
    to_instances,
)
from jaxcmle.solve.many import ErrorOption
from jaxcmle.solve.progress import Progress, ProgressOption
from jaxcmle.solve.sizes import balanced_size

__all__ = ["cem_many", "lower_bound_many", "score_many"]

# What there is to do for a point, beside the search of `fit`.
CEM_WORK, SCORE_WORK = 1 / 16, 1 / 16
# Bytes of points that the lanes work on at once, and how many lanes that may be: measured.
LANE_BYTES = 3 * 2**17
FEWEST_LANES, MOST_LANES = 8, 128
# Points that are summed in one go on a CPU.
TILE = 16


def cem_many(
    xs: Any,
    starts: Any,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    max_iter: ArrayLike = 300,
    min_size: Any = 2,
    min_variance: ArrayLike | None = None,
    errors: ErrorOption = "status",
    progress: ProgressOption = None,
) -> Any:
    """Run `cem` to convergence on many instances, each from a start of its own.

    Instances share the vector units rather than wait for each other: every one has a lane, and a
    lane that is done takes the next. The answers are those of `cem`, to rounding.

    Args:
        xs: an array `[b, n, d]`, or a list of arrays `[n, d]` with different n.
        starts: a stack of mixtures with a leading axis b, or a list of mixtures.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[b, n]`, or a list with weights `[n]` or None for each; default ones.
        max_iter: the most iterations to do.
        min_size: the weight that clusters must reach, one for all or one for each.
        min_variance: floor under every variance, as in `cem`.
        errors: as in `fit_many`.
        progress: as in `fit_many`.

    Returns:
        `Solution`s as `fit_many` returns them, without a guarantee.

    Example:
        >>> import jax, jaxcmle as jc
        >>> xs = jax.numpy.array([[[0.0], [2.0], [9.0], [11.0]], [[0.0], [1.0], [5.0], [6.0]]])
        >>> starts = jax.vmap(lambda x: jc.seed(jax.random.key(0), x, 2))(xs)
        >>> print(jc.cem_many(xs, starts).mixture.means.sort(axis=1)[..., 0])
        [[ 1.  10. ]
         [ 0.5  5.5]]
    """
    inputs.check_on_host("cem_many")
    if errors not in get_args(ErrorOption):
        raise ValueError(f"errors must be one of {get_args(ErrorOption)}, got {errors!r}")
    problem = inputs.to_problem(problem)
    most = inputs.to_count(max_iter, "max_iter")
    floor = None if min_variance is None else inputs.to_limit(min_variance, "min_variance")
    shown = Progress(progress, "instances")
    mixtures = starts if isinstance(starts, Mixture) else _to_list(starts)
    if isinstance(mixtures, Mixture):
        mixtures = _on_host(mixtures)
        clusters = [mixtures.weights.shape[1]] * len(mixtures.weights)
    else:
        clusters = [len(mixture.weights) for mixture in mixtures]
    instances = _checked(xs, clusters, sample_weight, "starts")
    if errors == "raise":
        raise_failures(instances.failures)
    b, d, dtype = len(instances.each), instances.d, instances.dtype
    limits = np.array(each_of(min_size, b, "min_size"), object)
    for size in set(limits.tolist()):
        inputs.to_limit(size, "min_size")
    layout = layout_of()

    def solve(chunk: Chunk) -> Part:
        size, counts, places = _shape(chunk, layout, CEM_WORK)
        packed = pack(chunk.instances, chunk.bucket, places, size)
        stack = _packed_mixtures(mixtures, chunk.places, places, size, packed)
        sizes = np.zeros(size, dtype)
        sizes[places] = limits[chunk.places]
        found = _cem_all(packed, stack, sizes, counts, problem, most, floor, layout)
        found = jax.tree.map(lambda leaf: leaf[places], jax.device_get(found))
        own = dataclasses.replace(found, guarantee=Guarantee())
        return Part(chunk.places, own)

    with Watch(shown, None, b) as watch:
        parts = run_chunks(
            chunks_of(instances.each, instances.stacked, layout, CEM_WORK),
            solve,
            ("cem", d, dtype, type(problem), floor is None),
            layout,
            watch,
        )
    return collected(instances, parts, problem)


def score_many(
    xs: Any,
    mixtures: Any,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
) -> Any:
    """Return what `score` does for many instances, each with mixtures of its own.

    Args:
        xs: an array `[b, n, d]`, or a list of arrays `[n, d]` with different n.
        mixtures: a stack with leading axes `[b, m]`, or a list of stacks with leading axes `[m]`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[b, n]`, or a list with weights `[n]` or None for each; default ones.

    Returns:
        Costs `[b, m]`, or a list of arrays `[m]` if either came as a list. Instances that are not
        valid raise an error.

    Example:
        >>> import jaxcmle as jc
        >>> mixtures = jc.Mixture(
        ...     weights=[[[1.0], [1.0]]], means=[[[[0.0]], [[1.0]]]], variances=[[[1.0], [1.0]]]
        ... )
        >>> print(jc.score_many([[[0.0], [2.0]]], mixtures)[0].round(2))
        [3.84 2.84]
    """
    inputs.check_on_host("score_many")
    problem = inputs.to_problem(problem)
    each = _to_list(mixtures)
    # Any number of clusters will do, also more than there are points.
    instances = _checked(xs, [1] * len(each), sample_weight, "mixtures")
    raise_failures(instances.failures)
    d, dtype = instances.d, instances.dtype
    stacks = [inputs.to_mixture(mixture, d, dtype, problem, stack=True) for mixture in each]
    widths = {stack.weights.shape for stack in stacks}
    most = tuple(1 << (max(width) - 1).bit_length() for width in zip(*widths, strict=True))
    layout = layout_of()

    def solve(chunk: Chunk) -> tuple[list[int], np.ndarray]:
        size, counts, places = _shape(chunk, layout, SCORE_WORK)
        packed = pack(chunk.instances, chunk.bucket, places, size)
        stack = _repeated([stacks[i] for i in chunk.places], places, size, most, dtype)
        costs = jax.device_get(_score_all(packed, stack, counts, problem, layout))
        return chunk.places, costs[places]

    with Watch(Progress(False), None, len(each)) as watch:
        results = run_chunks(
            chunks_of(instances.each, instances.stacked, layout, SCORE_WORK),
            solve,
            ("score", d, dtype, type(problem), most),
            layout,
            watch,
        )
    costs = np.concatenate([found for _, found in results])[_order(results, len(each))]
    if instances.stacked and isinstance(mixtures, Mixture):
        return jnp.asarray(costs[:, : stacks[0].weights.shape[0]])
    return [own[: len(stack.weights)].copy() for own, stack in zip(costs, stacks, strict=True)]


def lower_bound_many(
    xs: Any,
    n_clusters: Any,
    *,
    balance: ArrayLike | None = None,
    min_size: Any = None,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    min_variance: ArrayLike = 0.0,
    progress: ProgressOption = None,
) -> np.ndarray:
    """Return what `lower_bound` does, for many instances.

    Args:
        xs: an array `[b, n, d]`, or a list of arrays `[n, d]` with different n.
        n_clusters: k, one for all or one for each.
        balance: f; clusters weigh at least `N / f`. Default: `2 k`.
        min_size: the smallest weight of a cluster instead, one for all or one for each.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[b, n]`, or a list with weights `[n]` or None for each; default ones.
        min_variance: the floor under variances, if the partitions are costed with one.
        progress: as in `fit_many`.

    Returns:
        A NumPy array `[b]`, in nats. Instances that are not valid raise an error.

    Example:
        >>> import jaxcmle as jc
        >>> xs = [[[0.0], [2.0], [9.0], [11.0]], [[0.0], [1.0], [5.0], [6.0]]]
        >>> print(jc.lower_bound_many(xs, 2, min_size=2).round(3))
        [8.448 5.676]
    """
    inputs.check_on_host("lower_bound_many")
    problem = inputs.to_problem(problem)
    if balance is not None and min_size is not None:
        raise ValueError("give balance or min_size, not both: min_size is N / balance")
    instances = to_instances(xs, n_clusters, sample_weight)
    raise_failures(instances.failures)
    b, d, dtype = len(instances.each), instances.d, instances.dtype
    sizes = []
    for instance, size in zip(instances.each, each_of(min_size, b, "min_size"), strict=True):
        assert instance is not None
        if size is None:
            f = 2 * instance.k if balance is None else balance
            f = inputs.to_limit(f, "balance", positive=True)
            size = balanced_size(instance.total, instance.whole, f)
        sizes.append(inputs.to_limit(size, "min_size", positive=True))
        inputs.check_partition_exists(instance.k, sizes[-1], instance.total)
    floor = inputs.to_limit(min_variance, "min_variance")
    layout = layout_of()

    def solve(chunk: Chunk) -> tuple[list[int], np.ndarray]:
        size, counts, places = _shape(chunk, layout, 1.0)
        packed = pack(chunk.instances, chunk.bucket, places, size)
        least = np.zeros(size, dtype)
        least[places] = [sizes[i] for i in chunk.places]
        whole = all(instance.unweighted for instance in chunk.instances)
        floors = np.full(size, floor, dtype)
        bounds = jax.device_get(bound_all(packed, least, floors, counts, problem, layout, whole))
        return chunk.places, bounds[places]

    with Watch(Progress(progress, "instances"), None, b) as watch:
        results = run_chunks(
            chunks_of(instances.each, instances.stacked, layout),
            solve,
            ("bound", d, dtype, type(problem)),
            layout,
            watch,
        )
    return np.concatenate([found for _, found in results])[_order(results, b)]


def _to_list(mixtures: Any) -> list[Mixture]:
    """Return a list of mixtures, from one with a leading axis or from a list."""
    if isinstance(mixtures, Mixture):
        host = _on_host(mixtures)
        return [jax.tree.map(lambda leaf, i=i: leaf[i], host) for i in range(len(host.weights))]
    if not isinstance(mixtures, list | tuple) or not all(
        isinstance(each, Mixture) for each in mixtures
    ):
        raise TypeError(
            "expected a jaxcmle.Mixture with a leading axis for the instances, or a list of "
            f"mixtures, got {type(mixtures).__name__}"
        )
    return [_on_host(each) for each in mixtures]


def _on_host(mixture: Mixture) -> Mixture:
    """Return a mixture of NumPy arrays; it may hold lists."""
    parts: dict[str, Any] = {
        name: np.asarray(inputs.to_array(getattr(mixture, name), f"mixture.{name}"))
        for name in ("weights", "means", "variances")
    }
    return Mixture(**parts)


def _checked(xs: Any, clusters: list[int], sample_weight: Any, name: str) -> Instances:
    """Return the instances, of which there must be as many as there are mixtures."""
    xs = xs if hasattr(xs, "shape") else list(xs)
    count = len(xs)
    if count != len(clusters):
        raise ValueError(f"there are {count} instances, and {name} for {len(clusters)}")
    return to_instances(xs, clusters, sample_weight)


def _order(results: list[tuple[list[int], np.ndarray]], b: int) -> np.ndarray:
    """Return where the result of each instance is among those of all chunks.

    If somebody pressed Ctrl-C some are missing, and have no place to say so: that raises.
    """
    places = np.concatenate([np.zeros(0, int), *(own for own, _ in results)]).astype(int)
    if len(places) < b:
        raise KeyboardInterrupt
    return np.argsort(places)


def _shape(chunk: Chunk, layout: Layout, work: float) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the size of a chunk's stack, the counts of the devices, and who is where."""
    capacity = capacity_of(chunk.bucket, work)
    return capacity * layout.devices, *spread(len(chunk.instances), capacity, layout)


def _packed_mixtures(
    mixtures: Mixture | list[Mixture],
    chosen: list[int],
    places: np.ndarray,
    size: int,
    packed: Packed,
) -> Mixture:
    """Return some of the mixtures in their places, padded with clusters that do not exist."""
    k, d, dtype = packed.exists.shape[1], packed.x.shape[2], packed.x.dtype
    parts: dict[str, Any] = {
        "weights": np.zeros((size, k), dtype),
        "means": np.zeros((size, k, d), dtype),
        "variances": np.ones((size, k), dtype),
    }
    for name, part in parts.items():
        if isinstance(mixtures, Mixture):
            part[places, : mixtures.weights.shape[1]] = getattr(mixtures, name)[chosen]
            continue
        for i, own in zip(places, (mixtures[j] for j in chosen), strict=True):
            part[i, : len(own.weights)] = getattr(own, name)
    return Mixture(**parts)


def _repeated(
    stacks: list[Mixture], places: np.ndarray, size: int, most: tuple[int, ...], dtype: Any
) -> Mixture:
    """Return stacks of mixtures in their places; repetitions of mixtures and clusters fill up.

    A cluster twice changes no minimum.
    """
    m, k = most
    first = stacks[0]

    def part(name: str) -> Any:
        inner = getattr(first, name).shape[2:]
        result = np.ones((size, m, k, *inner), dtype)
        for i, stack in zip(places, stacks, strict=True):
            own, clusters = stack.weights.shape
            rows = np.minimum(np.arange(m), own - 1)
            columns = np.minimum(np.arange(k), clusters - 1)
            result[i] = np.asarray(getattr(stack, name))[rows][:, columns]
        return result

    return Mixture(weights=part("weights"), means=part("means"), variances=part("variances"))


@partial(jax.jit, static_argnames="layout")
def _cem_all(
    packed: Packed,
    starts: Mixture,
    sizes: Array,
    counts: Array,
    problem: Problem,
    max_iter: ArrayLike,
    min_variance: ArrayLike | None,
    layout: Layout,
) -> Solution:
    n, d = packed.x.shape[1:]
    lanes, tile = MOST_LANES, n
    if layout.form == "map":
        fitting = LANE_BYTES / (packed.x.dtype.itemsize * n * (d + 2))
        lanes = 2 ** math.floor(math.log2(max(fitting, 1)))
        lanes, tile = min(max(lanes, FEWEST_LANES), MOST_LANES), TILE

    def local(stack: Any, count: Array, shared: Any) -> Solution:
        (x, weight, exists), starts, sizes = stack
        problem, max_iter, min_variance = shared
        floors = None
        if min_variance is not None:
            # Even a floor of 0 must not let identical points cost minus infinity.
            least = jnp.maximum(jnp.asarray(min_variance, x.dtype), 4 * jnp.finfo(x.dtype).tiny)
            floors = jnp.full(x.shape[0], least)
        return cem_lanes(
            x,
            weight,
            starts,
            exists,
            problem,
            max_iter,
            sizes,
            floors,
            count,
            lanes=min(lanes, x.shape[0]),
            tile=tile,
        )

    shared = (problem, max_iter, min_variance)
    return over_devices(local, layout)((packed, starts, sizes), counts, shared)


@partial(jax.jit, static_argnames="layout")
def _score_all(
    packed: Packed, mixtures: Mixture, counts: Array, problem: Problem, layout: Layout
) -> Array:
    def local(stack: Any, count: Array, problem: Problem) -> Array:
        def one(given: tuple[Packed, Mixture]) -> Array:
            (x, weight, _), mixtures = given
            return score_points(x, weight, mixtures, problem)

        return each_first(one, stack, count)

    return over_devices(local, layout)((packed, mixtures), counts, problem)
