"""Classification EM: assign every point to its cheapest cluster, re-estimate, repeat.

The loop has two speeds. *Exact* iterations are `assign` and `estimate` themselves: direct
differences and two-pass variances. On many points *fast* iterations run ahead of them: a matmul (or
the same unrolled kernel where clusters are few) and sums of `[x, |x|^2, 1]` about a common centre.
They stop as soon as they are no longer trustworthy or no longer help, and the exact ones finish the
job, so that what is returned never depends on the fast ones being right.
"""

from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Points
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import (
    assign_points,
    fill_empty,
    is_valid,
    moments_cost,
    shift_means,
    weighted_total,
)
from jaxcmle.problem.types import CMLE, Mixture, Problem, Solution, Status

__all__ = [
    "Limits",
    "best_admissible",
    "cem",
    "cem_all",
    "cem_restarts",
    "cem_stack",
    "default_min_variance",
    "least_variance",
    "rounding_variance",
]

# Fewer points than this are not worth a second program.
FAST_FROM = 16384
# Nats per feature that a matmul may be wrong by in a fast iteration.
FAST_TOLERANCE = 1e-3
# Relative error that a variance may have in a fast iteration.
FAST_VARIANCE_TOLERANCE = 1e-4

# Fast iterations in a row that may fail to lower the cost visibly before exact ones take over.
FAST_PATIENCE = 4

FAST, EXACT, DONE = 0, 1, 2


def cem(
    x: Any,
    start: Mixture,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    max_iter: ArrayLike = 300,
    min_size: ArrayLike = 2,
    min_variance: ArrayLike | None = None,
) -> Solution:
    """Improve a mixture by Classification EM until no label changes.

    Each iteration assigns every point to its cheapest cluster (ties to the lowest index) and
    re-estimates the mixture with variances of at least `min_variance`; neither step can raise the
    cost. A cluster that becomes empty keeps weight 0 and takes the mean and variance of the whole
    data: under `CMLE` and `WKM` it stays empty, under `UCMLE` it may win points again. The mixture
    is always finite.

    Args:
        x: points `[n, d]`.
        start: the mixture to start from, as from `seed`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        max_iter: the most iterations to do.
        min_size: the weight every cluster must reach for the solution to be admissible (with
            weights that add up to 1, pass a share).
        min_variance: floor under every variance. Default: the square of the data's rounding error,
            which only keeps identical points from costing minus infinity.

    Returns:
        A `Solution` whose labels are `assign(x, mixture)` and whose cost is `cost(x, mixture)`.
        Its status is `CONVERGED` (no label changed), `MAX_ITER`, `INADMISSIBLE` (it ended with a
        cluster lighter than `min_size`) or `NONFINITE`.

    Example:
        >>> import jax, jaxcmle as jc
        >>> x = [[0.0], [2.0], [9.0], [11.0]]
        >>> solution = jc.cem(x, jc.seed(jax.random.key(0), x, 2))
        >>> sorted(solution.mixture.means[:, 0].tolist()), jc.Status(int(solution.status)).name
        ([1.0, 10.0], 'CONVERGED')
    """
    problem, points, weight = _inputs(x, problem, sample_weight)
    d, dtype = points.shape[1], points.dtype
    start = inputs.to_mixture(start, d, dtype, problem, stack=False)
    inputs.check_enough_points(points, weight, start.weights.shape[0])
    limits = _limits(max_iter, min_size, min_variance)
    stack = jax.tree.map(lambda leaf: leaf[None], start)
    solutions = cem_stack(points, weight, stack, problem, limits)
    return jax.tree.map(lambda leaf: leaf[0], solutions)


@overload
def cem_restarts(
    x: Any,
    starts: Mixture,
    *,
    problem: Problem = ...,
    sample_weight: Any = ...,
    max_iter: ArrayLike = ...,
    min_size: ArrayLike = ...,
    min_variance: ArrayLike | None = ...,
    return_costs: Literal[False] = ...,
) -> Solution: ...
@overload
def cem_restarts(
    x: Any,
    starts: Mixture,
    *,
    problem: Problem = ...,
    sample_weight: Any = ...,
    max_iter: ArrayLike = ...,
    min_size: ArrayLike = ...,
    min_variance: ArrayLike | None = ...,
    return_costs: Literal[True],
) -> tuple[Solution, Array]: ...
def cem_restarts(
    x: Any,
    starts: Mixture,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    max_iter: ArrayLike = 300,
    min_size: ArrayLike = 2,
    min_variance: ArrayLike | None = None,
    return_costs: bool = False,
) -> Solution | tuple[Solution, Array]:
    """Run `cem` from every start of a stack, together, and return the best admissible solution.

    Only if no start ends admissible is an inadmissible solution returned, and its status says so.
    The answer of a start does not depend on the others.

    Args:
        x: points `[n, d]`.
        starts: a stack of mixtures, as from `jax.vmap(lambda key: seed(key, x, k))(keys)`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        max_iter: the most iterations to do from each start.
        min_size: the weight every cluster must reach for a solution to be admissible.
        min_variance: floor under every variance, as in `cem`.
        return_costs: also return the cost reached from every start, `[m]`; infinity for those
            that are inadmissible.

    Returns:
        The best `Solution`, or `(solution, costs)`.

    Example:
        >>> import jax, jaxcmle as jc
        >>> x = [[0.0], [2.0], [9.0], [11.0], [20.0], [22.0]]
        >>> keys = jax.random.split(jax.random.key(0), 8)
        >>> starts = jax.vmap(lambda key: jc.seed(key, x, 3))(keys)
        >>> solution = jc.cem_restarts(x, starts)
        >>> sorted(solution.mixture.means[:, 0].tolist())
        [1.0, 10.0, 21.0]
    """
    solutions = cem_all(
        x,
        starts,
        problem=problem,
        sample_weight=sample_weight,
        max_iter=max_iter,
        min_size=min_size,
        min_variance=min_variance,
    )
    best, costs = best_admissible(solutions)
    return (best, costs) if return_costs else best


def cem_all(
    x: Any,
    starts: Mixture,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    max_iter: ArrayLike = 300,
    min_size: ArrayLike = 2,
    min_variance: ArrayLike | None = None,
) -> Solution:
    """Run `cem` from every start of a stack, together, and return the stack of solutions."""
    problem, points, weight = _inputs(x, problem, sample_weight)
    d, dtype = points.shape[1], points.dtype
    starts = inputs.to_mixture(starts, d, dtype, problem, stack=True)
    inputs.check_enough_points(points, weight, starts.weights.shape[1])
    limits = _limits(max_iter, min_size, min_variance)
    return cem_stack(points, weight, starts, problem, limits)


def default_min_variance(points: Points) -> Array:
    """Return the square of the data's rounding error: less spread than that is no information."""
    present = (points.weight > 0)[:, None]
    low = jnp.min(points.x, axis=0, where=present, initial=jnp.inf)
    high = jnp.max(points.x, axis=0, where=present, initial=-jnp.inf)
    return rounding_variance((high - low).max())


def rounding_variance(spread: Array) -> Array:
    """Return the square of the rounding error of data that spreads so far, as a variance."""
    limits = jnp.finfo(spread.dtype)
    rounding = limits.eps * spread
    return jnp.maximum(rounding * rounding, 4 * limits.tiny)


def least_variance(points: Points, min_variance: ArrayLike | None) -> Array:
    """Return the floor under variances: what was asked for, by default the rounding error."""
    if min_variance is None:
        return default_min_variance(points)
    dtype = points.x.dtype
    # Even a floor of 0 must not let identical points cost minus infinity.
    return jnp.maximum(jnp.asarray(min_variance, dtype), 4 * jnp.finfo(dtype).tiny)


class Limits(NamedTuple):
    """When to stop, the least weight of an admissible cluster, and the least variance."""

    max_iter: ArrayLike
    min_size: ArrayLike
    min_variance: ArrayLike | None


class _Carry(NamedTuple):
    mixtures: Mixture
    labels: Array
    unseen: Array
    cost: Array
    stalled: Array
    n_iter: Array
    phase: Array
    status: Array


class _Step(NamedTuple):
    """One iteration of every start; `trusted` where its rounding errors are small enough."""

    mixtures: Mixture
    labels: Array
    cost: Array
    trusted: Array


def _inputs(x: Any, problem: Problem, sample_weight: Any) -> tuple[Problem, Array, Array | None]:
    return inputs.to_problem(problem), *inputs.to_points(x, sample_weight)


def _limits(max_iter: Any, min_size: Any, min_variance: Any) -> Limits:
    return Limits(
        inputs.to_count(max_iter, "max_iter"),
        inputs.to_limit(min_size, "min_size"),
        None if min_variance is None else inputs.to_limit(min_variance, "min_variance"),
    )


@jax.jit
def best_admissible(solutions: Solution) -> tuple[Solution, Array]:
    """Return the best solution of a stack, and what each costs; infinity if inadmissible."""
    admissible = (solutions.status == Status.CONVERGED) | (solutions.status == Status.MAX_ITER)
    finite = jnp.isfinite(solutions.cost)
    costs = jnp.where(admissible & finite, solutions.cost, jnp.inf)
    # If none is admissible: the cheapest that is at least finite.
    fallback = jnp.where(finite, solutions.cost, jnp.inf)
    index = jnp.where(jnp.isfinite(costs).any(), jnp.argmin(costs), jnp.argmin(fallback))
    return jax.tree.map(lambda leaf: leaf[index], solutions), costs


@jax.jit
def cem_stack(
    x: Array, weight: Array | None, starts: Mixture, problem: Problem, limits: Limits
) -> Solution:
    """Run CEM from every start on the same points; returns a stack of solutions."""
    points = numerics.prepare(x, weight)
    (n, d), (m, k) = points.x.shape, starts.weights.shape
    # Not points.x, where rows of weight 0 are silenced: they get the label that is theirs, too.
    tiles = numerics.point_tiles(x - points.shift, k)
    itemsize = points.x.dtype.itemsize
    assign_bytes = itemsize * n * (1 if numerics.is_small(k, d) else k)
    if n >= FAST_FROM and not numerics.is_small(k, d):
        # One start at a time: a matmul for several rounds differently, and a start must not notice.
        assign_bytes = numerics.tile_bytes()
    estimate_bytes = 16 * itemsize * n * (d + 2)
    floor = least_variance(points, limits.min_variance)

    first = FAST if n >= FAST_FROM else EXACT
    rows = numerics.moment_rows(points)
    whole = numerics.whole_moments(points)
    fast_assign = _fast_assign(points, tiles, k, problem)

    def exact_assign(mixture: Mixture) -> tuple[Array, Array]:
        return assign_points(points, tiles, mixture, problem)[1], jnp.array(True)

    def exact_estimate(labels: Array) -> tuple[Mixture, Array, Array]:
        moments = numerics.cluster_moments(points, rows, labels, k)
        mixture = problem.mixture(fill_empty(moments, whole), floor)
        # The means that the user will see, rounded in the user's units: what converges is what is
        # returned.
        mixture = shift_means(shift_means(mixture, points.shift), -points.shift)
        return mixture, jnp.zeros((), x.dtype), jnp.array(True)

    def fast_estimate(labels: Array) -> tuple[Mixture, Array, Array]:
        moments, error = numerics.quick_moments(rows, labels, k)
        moments = fill_empty(moments, whole)
        cost = moments_cost(moments, problem, floor)
        precise = (error <= FAST_VARIANCE_TOLERANCE).all()
        return problem.mixture(moments, floor), cost, precise

    def iterate(carry: _Carry) -> _Carry:
        ahead = (carry.phase == FAST).any()

        def choose(fast: Any, exact: Any, stack: Any, bytes_each: int) -> Any:
            if first == EXACT:
                return numerics.map_stack(exact, stack, bytes_each)
            return lax.cond(
                ahead,
                lambda stack: numerics.map_stack(fast, stack, bytes_each),
                lambda stack: numerics.map_stack(exact, stack, bytes_each),
                stack,
            )

        labels, safe = choose(fast_assign, exact_assign, carry.mixtures, assign_bytes)
        mixtures, cost, precise = choose(fast_estimate, exact_estimate, labels, estimate_bytes)
        step = _Step(mixtures, labels, cost, safe & precise)
        return _advance(carry, step, weight, limits.max_iter)

    def unfinished(carry: _Carry) -> Array:
        return (carry.phase != DONE).any()

    # A start with NaN in it is not run, lest it come out as something that looks like an answer.
    starts = problem.constrained(starts)
    valid = is_valid(starts, problem)
    runs = valid & (jnp.asarray(limits.max_iter) > 0)
    carry = _Carry(
        mixtures=shift_means(starts, -points.shift),
        labels=jnp.zeros((m, n), jnp.int32),
        unseen=jnp.ones(m, bool),
        cost=jnp.full(m, jnp.inf, points.x.dtype),
        stalled=jnp.zeros(m, jnp.int32),
        n_iter=jnp.zeros(m, jnp.int32),
        phase=jnp.where(runs, first, DONE).astype(jnp.int32),
        status=jnp.full(m, Status.MAX_ITER, jnp.int32),
    )
    carry = lax.while_loop(unfinished, iterate, carry)

    def finish(result: tuple[Mixture, Array, Array, Array]) -> Solution:
        mixture, n_iter, status, valid = result
        mixture = shift_means(mixture, points.shift)
        costs, labels = assign_points(points, tiles, shift_means(mixture, -points.shift), problem)
        total = weighted_total(points, costs)
        sizes = numerics.cluster_sums(points.weight[:, None], labels, k)[:, 0]
        # Sums of fractional weights round: a size that is short by rounding alone is enough.
        enough = limits.min_size * (1 - 16 * jnp.finfo(points.x.dtype).eps)
        status = jnp.where(sizes.min() < enough, Status.INADMISSIBLE, status)
        status = jnp.where(jnp.isfinite(total) & valid, status, Status.NONFINITE)
        return Solution(mixture=mixture, labels=labels, cost=total, status=status, n_iter=n_iter)

    result = (carry.mixtures, carry.n_iter, carry.status, valid)
    return numerics.map_stack(finish, result, assign_bytes)


def _fast_assign(points: Points, tiles: Array, k: int, problem: Problem) -> Any:
    """Return a function that gives the labels of a mixture, and whether they can be trusted."""
    n, d = points.x.shape
    if numerics.is_small(k, d):
        return lambda mixture: (assign_points(points, tiles, mixture, problem)[1], jnp.array(True))
    centred, centre = numerics.centred(points)
    features = numerics.matmul_features(centred)
    largest_norm = features[:, d].max()
    feature_tiles = numerics.point_tiles(features, k)

    def assign(mixture: Mixture) -> tuple[Array, Array]:
        coefficients = problem.coefficients(shift_means(mixture, -centre))
        labels = numerics.assign_by_matmul(feature_tiles, coefficients, n)
        slope = coefficients.slope
        return labels, numerics.matmul_is_safe(largest_norm, slope, FAST_TOLERANCE * d)

    return assign


def _advance(carry: _Carry, step: _Step, weight: Array | None, max_iter: ArrayLike) -> _Carry:
    """Decide, for every start, what the step means: go on, leave the fast phase, or stop.

    Fast iterations go first; a start that is through with them waits until all are.
    """
    phase_now = jnp.where((carry.phase == FAST).any(), FAST, EXACT)
    active = carry.phase == phase_now
    fast = phase_now == FAST
    different = step.labels != carry.labels
    if weight is not None:
        different &= weight > 0
    changed = carry.unseen | different.any(axis=1)
    finite = jax.vmap(is_finite)(step.mixtures)

    # A fast step that is not trusted is not taken; one that gains nothing is the last.
    taken = active & changed & finite & (step.trusted | ~fast)
    stalled = jnp.where(step.cost < carry.cost, 0, carry.stalled + 1)
    goes_on = changed & finite & step.trusted & (stalled < FAST_PATIENCE)
    n_iter = carry.n_iter + taken.astype(jnp.int32)
    exhausted = n_iter >= max_iter
    converged = ~fast & ~changed
    broken = ~fast & changed & ~finite
    stopped = converged | broken | (taken & exhausted)

    phase = jnp.where(stopped, DONE, jnp.where(fast & ~goes_on, EXACT, phase_now))
    status = jnp.where(
        converged, Status.CONVERGED, jnp.where(broken, Status.NONFINITE, Status.MAX_ITER)
    )

    def choose(mask: Array, new: Array, old: Array) -> Array:
        return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return _Carry(
        mixtures=jax.tree.map(
            lambda new, old: choose(taken, new, old), step.mixtures, carry.mixtures
        ),
        labels=step.labels,
        # The exact phase starts as if from scratch: its first iteration always re-estimates.
        unseen=fast & (jnp.where(active, phase, carry.phase) == EXACT),
        cost=jnp.where(active & (step.cost < carry.cost), step.cost, carry.cost),
        stalled=jnp.where(active, stalled, carry.stalled),
        n_iter=n_iter,
        phase=jnp.where(active, phase, carry.phase),
        status=jnp.where(active & stopped, status, carry.status),
    )


def is_finite(mixture: Mixture) -> Array:
    """Tell whether every number of the mixture is finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(mixture)]).all()
