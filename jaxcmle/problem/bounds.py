"""Bounds on the optimum: Gonzalez' traversal from above, the closed-form certificate from below."""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxcmle import memory, numerics
from jaxcmle.numerics import Points
from jaxcmle.problem import inputs
from jaxcmle.problem.instance import smallest_size
from jaxcmle.problem.pairs import (
    MAX_POINTS,
    check_pairs_affordable,
    first_sums,
    over_pairs,
    running_sums,
    sorted_columns,
    sorted_rows,
    spare_part,
    sum_of_first,
    unless_nan,
)
from jaxcmle.problem.placement import everywhere, is_placed, replicate, takes_mesh
from jaxcmle.problem.types import CMLE, WKM, Guarantee, Problem, Solution

__all__ = [
    "Traversal",
    "UpperBound",
    "bound_terms",
    "distance_to",
    "farthest_first",
    "lower_bound",
    "lower_bound_terms",
    "minimum_size",
    "upper_bound",
    "with_certificate",
]


class Traversal(NamedTuple):
    """Gonzalez' farthest-first traversal.

    Attributes:
        centres: indices of the k centres, in the order they were found.
        labels: the nearest centre of every point, `[n]`; ties to the lowest index.
        radius_sq: the largest squared distance to the nearest centre.
    """

    centres: Array
    labels: Array
    radius_sq: Array


class UpperBound(NamedTuple):
    """What `upper_bound` returns.

    Attributes:
        gamma: `ln(2 pi e s^2 / d) + (2 / d) ln k`, s the radius of Gonzalez' traversal.
        bound: `n d / 2 * gamma`; infinity where it is not valid.
        smallest_cluster: weight of the smallest of Gonzalez' clusters. The bound holds for the
            best partition with clusters of at least any minimum size up to this, if it is 2 or
            more.
    """

    gamma: float | Array
    bound: float | Array
    smallest_cluster: float | Array


def farthest_first(points: Points, k: int, first: Array) -> Traversal:
    """Choose k centres, each the point farthest from those before it, starting from `first`."""

    def add_centre(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        nearest, labels, centres = state
        centre = jnp.argmax(jnp.where(points.weight > 0, nearest, -1))
        distance = distance_to(points, centre)
        closer = distance < nearest
        labels = jnp.where(closer, j.astype(jnp.int32), labels)
        return jnp.where(closer, distance, nearest), labels, centres.at[j].set(centre)

    nearest = distance_to(points, first)
    labels = jnp.zeros(points.x.shape[0], jnp.int32)
    centres = jnp.zeros(k, first.dtype).at[0].set(first)
    nearest, labels, centres = lax.fori_loop(1, k, add_centre, (nearest, labels, centres))
    return Traversal(centres, labels, jnp.where(points.weight > 0, nearest, 0).max())


def distance_to(points: Points, index: Array) -> Array:
    """Return the squared distance of every point to one of them."""
    difference = points.x - points.x[index]
    return (difference * difference).sum(axis=1)


def upper_bound(x: Any, n_clusters: int, *, sample_weight: Any = None) -> UpperBound:
    r"""Return the repaired $\Gamma$ of the paper, and $\frac{N d}{2} \Gamma$, above the optimum.

    With s the radius of Gonzalez' traversal from the first point, $\Gamma = \ln(2 \pi e s^2 / d) +
    \frac{2}{d} \ln K$. The optimum over partitions with clusters of at least `min_size` points is
    at most the bound if every one of Gonzalez' clusters holds at least `min_size`, and two, points:
    the bound is infinite where one holds fewer than two, and `smallest_cluster` tells the rest.

    Args:
        x: points `[n, d]`.
        n_clusters: k; a Python int.
        sample_weight: `[n]`, default ones.

    Returns:
        `UpperBound(gamma, bound, smallest_cluster)`, in the units of x.

    Example:
        >>> import jaxcmle as jc
        >>> gamma, bound, smallest = jc.upper_bound([[0.0], [2.0], [9.0], [11.0]], 2)
        >>> round(gamma, 3), round(bound, 3), smallest
        (5.61, 11.221, 2.0)
    """
    points, weight = inputs.to_points(x, sample_weight)
    k = inputs.to_n_clusters(n_clusters, points.shape[0])
    return inputs.to_python(_upper_bound(points, weight, k))


@takes_mesh
def lower_bound(
    x: Any,
    n_clusters: int,
    *,
    balance: ArrayLike | None = None,
    min_size: ArrayLike | None = None,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    min_variance: ArrayLike = 0.0,
    max_points: int = MAX_POINTS,
    byte_budget: int | None = None,
    mesh: Mesh | None = None,
) -> float | Array:
    r"""Return a cost that no partition into `n_clusters` clusters of the minimum size is below.

    With $S_j(x)$ the sum of the j smallest squared distances from x to other points and
    $q_n(x) = S_{n-1}(x) / (2 n d)$,

    $$LB = \sum_x \min_{n_{\min} \le n \le N - (K-1) n_{\min}}
        \left[ \tfrac{d}{2} \ln(2 \pi e\, q_n(x)) - \ln \tfrac{n}{N} \right],$$

    because the variance of a cluster C is at least the mean of $q_{|C|}(x)$ over C, and the
    logarithm is concave. WKM has $\beta S_{n-1}(x) / (2n)$ for the first term, UCMLE no second
    one. With point weights, sums are filled up to a weight instead of a number. A margin for
    rounding is taken off, so that the bound holds as computed.

    It bounds the cost of partitions, `partition_cost`, and not `cost` of an arbitrary mixture.

    Args:
        x: points `[n, d]`.
        n_clusters: k, which need not be static.
        balance: f; clusters weigh at least `N / f`: with whole weights, `max(2, ceil(N / f))`.
            Default: `2 * n_clusters`.
        min_size: the smallest weight of a cluster, instead of `balance`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        min_variance: the floor under variances, if the partitions are costed with one. Without
            one, enough coinciding points make the bound minus infinity.
        max_points: refuse more points than this: time is quadratic.
        byte_budget: bytes that the pass over all pairs may take; by default a share of the
            memory of the device.
        mesh: devices to split the pairs over; an x that is on several needs none.

    Returns:
        A scalar in nats, in the units of x (a Python float outside `jit`).

    Example:
        >>> import jaxcmle as jc
        >>> x = [[0.0], [2.0], [9.0], [11.0]]
        >>> print(round(jc.lower_bound(x, 2, min_size=2), 3))
        8.448
        >>> print(round(float(jc.partition_cost(x, [0, 0, 1, 1], 2)), 3))
        8.448
    """
    points, weight, size, problem, mesh = _bound_inputs(
        x, n_clusters, balance, min_size, problem, sample_weight, mesh
    )
    min_variance = inputs.to_limit(min_variance, "min_variance")
    check_pairs_affordable(points, max_points, "lower_bound")
    terms = _terms(points, weight, n_clusters, size, problem, min_variance, byte_budget, mesh)
    return inputs.to_python(terms.bound)


def lower_bound_terms(
    x: Array, weight: Array | None, n_clusters: int, min_size: float, problem: Problem
) -> tuple[Array, Array]:
    """Return what each point costs at least in a partition, `[n]`, and the rounding of the sum."""
    size = jnp.asarray(min_size, x.dtype)
    terms = _terms(x, weight, n_clusters, size, problem, 0.0, None, None)
    return terms.each, terms.margin


@takes_mesh
def with_certificate(
    x: Any,
    solution: Solution,
    *,
    balance: ArrayLike | None = None,
    min_size: ArrayLike | None = None,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    min_variance: ArrayLike = 0.0,
    max_points: int = MAX_POINTS,
    byte_budget: int | None = None,
    mesh: Mesh | None = None,
) -> Solution:
    """Return the solution with a `Guarantee` from `lower_bound` attached.

    The gap is how many nats per point the solution can be above the best partition whose clusters
    weigh at least the minimum size. Where the solution itself has a lighter cluster, the bound says
    nothing about it, and the gap is infinite.

    Args:
        x: the points that were clustered.
        solution: any solution on them.
        balance: f; clusters weigh at least `N / f`. Default: `2 k`.
        min_size: the smallest weight of a cluster, instead of `balance`.
        problem: the problem that was solved.
        sample_weight: the weights that were used.
        min_variance: as for `lower_bound`.
        max_points: refuse more points than this: time is quadratic.
        byte_budget: bytes that the pass over all pairs may take; by default a share of the
            memory of the device.
        mesh: devices to split the pairs over; an x that is on several needs none.

    Returns:
        The solution with `guarantee.kind == "certificate"`.

    Example:
        >>> import jax, jaxcmle as jc
        >>> x = [[0.0], [2.0], [9.0], [11.0]]
        >>> solution = jc.cem(x, jc.seed(jax.random.key(0), x, 2))
        >>> print(f"{jc.with_certificate(x, solution, min_size=2).guarantee.gap:.3f}")
        0.000
    """
    if not isinstance(solution, Solution):
        raise TypeError(f"expected a jaxcmle.Solution, got {type(solution).__name__}")
    k = solution.mixture.weights.shape[-1]
    points, weight, size, problem, mesh = _bound_inputs(
        x, k, balance, min_size, problem, sample_weight, mesh
    )
    min_variance = inputs.to_limit(min_variance, "min_variance")
    check_pairs_affordable(points, max_points, "with_certificate")
    labels, cost = solution.labels, solution.cost
    if mesh is not None:
        labels, cost = everywhere((labels, cost), mesh)
    labels = inputs.to_labels(labels, points.shape[0], k)
    bound = _terms(points, weight, k, size, problem, min_variance, byte_budget, mesh).bound
    gap, size = _gap(points, weight, labels, cost, bound, size, k)
    guarantee = Guarantee(
        kind="certificate", lower_bound=bound, gap=gap, min_size=size, method="pairs"
    )
    return dataclasses.replace(solution, guarantee=inputs.to_python(guarantee))


def _terms(
    x: Array,
    weight: Array | None,
    n_clusters: ArrayLike,
    size: ArrayLike,
    problem: Problem,
    min_variance: ArrayLike,
    byte_budget: int | None,
    mesh: Mesh | None,
) -> "_Terms":
    """Return the bound point by point, in tiles that fit into memory."""
    given = (x, weight, n_clusters, size, problem, min_variance)
    whole = inputs.are_zeros_and_ones(weight)
    return memory.within(
        lambda: bound_terms(*given, memory.pair_bytes(byte_budget), whole, mesh=mesh)
    )


def _bound_inputs(
    x: Any,
    n_clusters: Any,
    balance: Any,
    min_size: Any,
    problem: Problem,
    sample_weight: Any,
    mesh: Any,
) -> tuple[Array, Array | None, ArrayLike, Problem, Mesh | None]:
    """Return the checked points, weights, smallest cluster weight and problem; and the mesh."""
    problem = inputs.to_problem(problem)
    if is_placed(x, mesh):
        points, weight, mesh = replicate(x, sample_weight, mesh)
    else:
        points, weight = inputs.to_points(x, sample_weight)
    if not isinstance(n_clusters, Array):
        inputs.to_n_clusters(n_clusters, points.shape[0])
    size = minimum_size(points, weight, n_clusters, balance, min_size)
    size = jnp.asarray(size, points.dtype)
    return points, weight, size if mesh is None else everywhere(size, mesh), problem, mesh


def minimum_size(
    points: Array, weight: Array | None, n_clusters: Any, balance: Any, min_size: Any
) -> ArrayLike:
    """Return the least weight of a cluster from what the user gave, if there is a partition."""
    if balance is not None and min_size is not None:
        raise ValueError("give balance or min_size, not both: min_size is N / balance")
    if min_size is not None:
        size = inputs.to_limit(min_size, "min_size", positive=True)
    else:
        balance = 2 * n_clusters if balance is None else balance
        size = smallest_size(points, weight, inputs.to_limit(balance, "balance", positive=True))
    total = len(points) if weight is None else weight.sum()
    inputs.check_partition_exists(n_clusters, size, total)
    return size


@partial(jax.jit, static_argnames="k")
def _upper_bound(x: Array, weight: Array | None, k: int) -> UpperBound:
    points = numerics.prepare(x, weight)
    traversal = farthest_first(points, k, jnp.argmax(points.weight > 0))
    sizes = numerics.cluster_sums(points.weight[:, None], traversal.labels, k)[:, 0]
    d = x.shape[1]
    gamma = jnp.log(2 * math.pi * math.e * traversal.radius_sq / d) + 2 / d * math.log(k)
    bound = numerics.blocked_sum(points.weight) * d / 2 * gamma
    return UpperBound(gamma, jnp.where(sizes.min() >= 2, bound, jnp.inf), sizes.min())


class _Terms(NamedTuple):
    """What each point costs at least, `[n]`; the rounding error of their sum; the bound."""

    each: Array
    margin: Array
    bound: Array


class _Task(NamedTuple):
    """What the terms of all points depend on."""

    problem: Problem
    total: Array
    min_size: Array
    max_size: Array
    min_variance: ArrayLike
    weight: Array | None
    spare: Any

    def least_term(self, sums: Array, size: Array, axis: int, d: int) -> Array:
        """Return the least of the terms along an axis, for sizes that are allowed."""
        inside = (size >= self.min_size) & (size <= self.max_size)
        # Between two points that fill up, the term rises and then falls: the ends are enough.
        # Outside, a sum of 0 would have a gradient of NaN.
        terms = self.term(jnp.where(inside, sums, 1), jnp.where(inside, size, 1), d)
        return jnp.where(inside, terms, jnp.inf).min(axis=axis)

    def term(self, sums: Array, size: ArrayLike, d: int) -> Array:
        """Return the least a point can cost in a cluster of this weight, given the sum S."""
        size = jnp.asarray(size, sums.dtype)
        entropy = jnp.log(self.total / size)
        if isinstance(self.problem, WKM):
            return jnp.asarray(self.problem.beta, sums.dtype) * sums / (2 * size) + entropy
        variance = sums / (2 * d * size)
        floored = jnp.maximum(variance, jnp.asarray(self.min_variance, variance.dtype))
        # Under the floor the cost is linear in the variance: concave all the same.
        ratio = jnp.where(floored > 0, variance / jnp.where(floored > 0, floored, 1), 1)
        spread = d / 2 * (jnp.log(2 * math.pi * floored) + ratio)
        return spread + entropy if isinstance(self.problem, CMLE) else spread


@partial(jax.jit, static_argnames=("byte_budget", "whole_points", "mesh"))
def bound_terms(
    x: Array,
    weight: Array | None,
    n_clusters: ArrayLike,
    min_size: Array,
    problem: Problem,
    min_variance: ArrayLike,
    byte_budget: int,
    whole_points: bool = False,
    mesh: Mesh | None = None,
) -> _Terms:
    """Return the bound point by point; `whole_points` says that all weights are 0 or 1.

    Where there is a mesh, all its devices must have the points.
    """
    points = numerics.prepare(x, weight)
    n, d = x.shape
    total = numerics.blocked_sum(points.weight)
    max_size = total - jnp.asarray(n_clusters - 1, x.dtype) * min_size

    task = _Task(
        problem=problem,
        total=total,
        min_size=min_size,
        max_size=max_size,
        min_variance=min_variance,
        weight=weight,
        spare=spare_part(weight, n, x.dtype),
    )

    def of_whole_points(index: Array, distances: Array, task: _Task) -> Array:
        ordered = sorted_columns(distances)
        sums = running_sums(ordered)
        best = task.least_term(sums, jnp.arange(1, n + 1, dtype=x.dtype)[:, None], 0, d)
        for end in (task.min_size, task.max_size):
            best = jnp.minimum(best, task.term(sum_of_first(ordered, sums, end), end, d))
        return best

    def of_weights(index: Array, distances: Array, task: _Task) -> Array:
        ordered, spread = sorted_rows(distances, task.weight)
        sums = jnp.cumsum(jnp.where(spread > 0, spread * ordered, 0), axis=1)
        best = task.least_term(sums, jnp.cumsum(spread, axis=1), 1, d)
        for end in (task.min_size, task.max_size):
            best = jnp.minimum(
                best, task.term(first_sums(ordered, spread, end, task.spare), end, d)
            )
        return best

    if weight is None or whole_points:
        terms = over_pairs(
            points, of_whole_points, 8, byte_budget, as_columns=True, shared=(task,), mesh=mesh
        )
    else:
        terms = over_pairs(points, of_weights, 8, byte_budget, shared=(task,), mesh=mesh)
    present = points.weight > 0
    terms = jnp.where(present, terms, 0)
    bound = numerics.blocked_sum(points.weight * terms)
    # The distances err by d + 2 roundings, the sums of them by log2(n) more, the logarithm and the
    # sum over points by a few.
    roundings = d + 2 + math.ceil(math.log2(n + 1)) + 8
    size_of_terms = numerics.blocked_sum(points.weight * jnp.abs(terms))
    scale = total * d / 2 * roundings + size_of_terms * (8 + math.ceil(math.log2(n + 1)))
    margin = jnp.where(jnp.isfinite(scale), jnp.finfo(x.dtype).eps * scale, 0)
    exists = max_size >= min_size * (1 - 1e-5)
    return _Terms(terms, margin, unless_nan(points, jnp.where(exists, bound - margin, jnp.inf)))


@partial(jax.jit, static_argnames="k")
def _gap(
    x: Array, weight: Array | None, labels: Array, cost: Array, bound: Array, size: Array, k: int
) -> tuple[Array, Array]:
    """Return the gap in nats per point, infinite for a partition under the minimum size."""
    points = numerics.prepare(x, weight)
    sizes = numerics.cluster_sums(points.weight[:, None], labels, k)[:, 0]
    admissible = sizes.min() >= size * (1 - 16 * jnp.finfo(x.dtype).eps)
    gap = jnp.maximum(cost - bound, 0) / numerics.blocked_sum(points.weight)
    return jnp.where(admissible & jnp.isfinite(gap), gap, jnp.inf), size
