"""Classification EM: assign every point to its cheapest cluster, re-estimate, repeat.

The loop has two speeds. *Exact* iterations are `assign` and `estimate` themselves: direct
differences and two-pass variances. On many points *fast* iterations run ahead of them: a matmul (or
the same unrolled kernel where clusters are few) and sums of `[x, |x|^2, 1]` about a common centre.
They stop as soon as they are no longer trustworthy or no longer help, and the exact ones finish the
job, so that what is returned never depends on the fast ones being right.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Points
from jaxcmle.problem.objective import (
    assign_points,
    fill_empty,
    is_valid,
    moments_cost,
    shift_means,
    weighted_total,
)
from jaxcmle.problem.types import Mixture, Problem, Solution, Status

__all__ = [
    "FAST_VARIANCE_TOLERANCE",
    "Limits",
    "best_admissible",
    "cem_stack",
    "default_min_variance",
    "is_finite",
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
