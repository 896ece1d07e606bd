"""Partitions brought to an end: no single-point move improves them, and every number is exact."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Points
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import (
    assign_points,
    fill_empty,
    hide_missing,
    partition_inputs,
    shift_means,
    weighted_total,
)
from jaxcmle.problem.types import CMLE, WKM, Mixture, Problem, Solution, Status
from jaxcmle.refine.improve import move_until_done
from jaxcmle.refine.iterations import least_variance
from jaxcmle.refine.moves import entering_and_leaving
from jaxcmle.refine.workspace import (
    Partitions,
    Workspace,
    is_better,
    make_workspace,
    partitions_of,
    select_each,
)

__all__ = ["Limits", "move_deltas", "polish", "ready", "settle", "variance_limits"]

# Assignments that the end of a search may take to become a fixed point, where ties were rounded.
SETTLING = 4
# Roundings squared, below which the variance of a cluster is as good as none.
NO_SPREAD = 16


class Limits(NamedTuple):
    """What is demanded of clusters. `min_variance` None: some spread, if it can be had."""

    min_size: Any
    min_variance: Any


def move_deltas(
    x: Any,
    labels: Any,
    n_clusters: int,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    min_variance: ArrayLike = 0.0,
) -> Array:
    r"""Return by how much the cost of a partition changes when one point changes cluster.

    Entry $(x, k)$ is $L_X(C') - L_X(C)$, where $C'$ differs from $C$ in that point x is in cluster
    k: the difference of two calls of `partition_cost`, in closed form, for all points and clusters
    at once. It is 0 for the cluster that the point is in, and for points of weight 0.

    Args:
        x: points `[n, d]`.
        labels: int `[n]`, from 0 to `n_clusters - 1`.
        n_clusters: k; a Python int.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        min_variance: floor under every variance; without one, a move that leaves a cluster without
            spread gains infinity.

    Returns:
        Changes `[n, k]`, in nats.

    Example:
        >>> import jaxcmle as jc
        >>> x, labels = [[0.0], [2.0], [4.0], [9.0], [11.0]], [0, 0, 1, 1, 1]
        >>> print(jc.move_deltas(x, labels, 2)[2].round(2))
        [-1.77  0.  ]
        >>> after = jc.partition_cost(x, [0, 0, 0, 1, 1], 2)
        >>> print((after - jc.partition_cost(x, labels, 2)).round(2))
        -1.77
    """
    problem, points, weight, labels, k = partition_inputs(
        x, labels, n_clusters, sample_weight, problem
    )
    min_variance = inputs.to_limit(min_variance, "min_variance")
    return _move_deltas(points, weight, labels, k, problem, min_variance)


def polish(
    x: Any,
    labels: Any,
    n_clusters: int,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    min_size: ArrayLike = 2,
    min_variance: ArrayLike | None = None,
    max_passes: ArrayLike = 1000,
) -> Solution:
    """Improve a partition by single-point moves until no move of one point lowers its cost.

    The end is a fixed point of `cem` too, and never costs more than the partition given. No cluster
    goes below `min_size`; clusters that are below it at the start are filled up first, whatever it
    costs.

    Args:
        x: points `[n, d]`.
        labels: int `[n]`, from 0 to `n_clusters - 1`: the partition to start from.
        n_clusters: k; a Python int.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        min_size: the least weight of a cluster.
        min_variance: floor under every variance. Default: the rounding error of the data, squared,
            and no move may leave a cluster of a few points without spread.
        max_passes: how many batches of moves to make, at most.

    Returns:
        A `Solution`: `CONVERGED` if no move is left, `MAX_ITER` after `max_passes`, `INADMISSIBLE`
        if a cluster is still too small. Where the minimum size keeps a point from its cheapest
        cluster, `consistent` is False.

    Example:
        >>> import jaxcmle as jc
        >>> x = [[0.0], [1.0], [2.0], [100.0]]
        >>> solution = jc.polish(x, [0, 1, 0, 1], 2)
        >>> solution.labels.tolist(), bool(solution.consistent)
        ([0, 0, 1, 1], False)
    """
    problem, points, weight, labels, k = partition_inputs(
        x, labels, n_clusters, sample_weight, problem
    )
    limits = Limits(
        inputs.to_limit(min_size, "min_size"),
        None if min_variance is None else inputs.to_limit(min_variance, "min_variance"),
    )
    most = inputs.to_count(max_passes, "max_passes")
    return _polish(points, weight, labels, k, problem, limits, most)


def variance_limits(
    points: Points, min_variance: ArrayLike | None, problem: Problem
) -> tuple[Array, Array]:
    """Return the floor under variances, and the variance up to which a cluster has no spread."""
    floor = least_variance(points, min_variance)
    # Where all have one variance, or under a floor that somebody chose, clusters without spread are
    # as good as any.
    matters = min_variance is None and not isinstance(problem, WKM)
    return floor, NO_SPREAD * floor if matters else -floor


def ready(
    points: Points,
    exists: Array,
    limits: Limits,
    problem: Problem,
    batch: str | None = None,
    mesh: Mesh | None = None,
) -> Workspace:
    """Return the workspace of points with these limits, for as many clusters as `exists` has."""
    floor, least_spread = variance_limits(points, limits.min_variance, problem)
    return make_workspace(points, exists, floor, least_spread, limits.min_size, batch, mesh)


def settle(
    space: Workspace, labels: Array, problem: Problem, status: ArrayLike, n_iter: ArrayLike
) -> Solution:
    """Return the solution of a partition, all numbers from direct differences.

    Searches round, so that a point may be in a cluster that is dearer by a rounding error: labels
    become what their mixture assigns, where that is no worse.
    """
    points, k = space.points, len(space.exists)

    def partition(labels: Array) -> Partitions:
        return partitions_of(space, labels[None], k, problem)

    def mixture_of(labels: Array) -> Mixture:
        moments = numerics.cluster_moments(points, space.rows, labels, k)
        mixture = problem.mixture(fill_empty(moments, space.whole), space.floor)
        mixture = hide_missing(mixture, space.exists)
        # As the user will see it: the means rounded in the user's units.
        return shift_means(shift_means(mixture, points.shift), -points.shift)

    def assigned(mixture: Mixture) -> Array:
        return assign_points(points, space.tiles, mixture, problem)[1]

    def step(carry: tuple[Array, Array, Partitions]) -> tuple[Array, Array, Partitions]:
        count, _, old = carry
        new = partition(assigned(mixture_of(old.labels[0])))
        slack = 4 * jnp.finfo(points.x.dtype).eps * jnp.abs(new.rank.cost)
        no_worse = ~is_better(old.rank, new.rank._replace(cost=new.rank.cost - slack))
        moving = no_worse[0] & (new.labels != old.labels).any()
        return count + 1, moving, select_each(no_worse, new, old)

    first = (jnp.int32(0), jnp.array(True), partition(labels))
    last = lax.while_loop(lambda carry: carry[1] & (carry[0] < SETTLING), step, first)[2]
    labels = last.labels[0]
    mixture = mixture_of(labels)
    means, slope, constant = problem.coefficients(mixture)
    difference = points.x - means[labels]
    own = (difference * difference).sum(axis=1) * slope[labels] + constant[labels]
    total = weighted_total(points, own)
    status = jnp.where(last.rank.shortage[0] > 0, Status.INADMISSIBLE, status)
    return Solution(
        mixture=shift_means(mixture, points.shift),
        labels=labels,
        cost=total,
        status=jnp.where(jnp.isfinite(total), status, Status.NONFINITE).astype(jnp.int32),
        n_iter=jnp.asarray(n_iter, jnp.int32),
        consistent=((assigned(mixture) == labels) | (points.weight == 0)).all(),
    )


@partial(jax.jit, static_argnames="k")
def _polish(
    x: Array,
    weight: Array | None,
    labels: Array,
    k: int,
    problem: Problem,
    limits: Limits,
    max_passes: ArrayLike,
) -> Solution:
    space = ready(numerics.prepare(x, weight), jnp.ones(k, bool), limits, problem)
    start = partitions_of(space, labels[None], k, problem)
    end, passes, done = move_until_done(space, start, problem, max_passes)
    status = jnp.where(done, Status.CONVERGED, Status.MAX_ITER)
    return settle(space, end.labels[0], problem, status, passes)


@partial(jax.jit, static_argnames="k")
def _move_deltas(
    x: Array,
    weight: Array | None,
    labels: Array,
    k: int,
    problem: Problem,
    min_variance: ArrayLike,
) -> Array:
    points = numerics.prepare(x, weight)
    moments = numerics.cluster_moments(points, numerics.moment_rows(points), labels, k)
    tiles = numerics.point_tiles(points.x, k)
    count, _, length = tiles.shape
    floor, lowest = (least_variance(points, least) for least in (min_variance, 0.0))

    def shaped(values: Array) -> Array:
        return jnp.pad(values, (0, count * length - len(values))).reshape(count, length)

    def one_tile(given: tuple[Array, Array, Array]) -> Array:
        columns, label, weight = given
        square = numerics.squared_distances(columns, moments.mean)
        entering, leaving, rest = entering_and_leaving(
            moments, square, label, weight, problem=problem, floor=floor
        )
        # Without a floor, a cluster that loses its spread costs minus infinity.
        if not isinstance(problem, WKM):
            free = (rest <= 0) & (moments.size[label] > weight) & (floor <= lowest)
            leaving = jnp.where(free, -jnp.inf, leaving)
        elsewhere = jnp.arange(k, dtype=jnp.int32)[:, None] != label
        return jnp.where(elsewhere & (weight > 0), entering + leaving, 0).T

    deltas = lax.map(one_tile, (tiles, shaped(labels), shaped(points.weight)))
    return deltas.reshape(count * length, k)[: x.shape[0]]
