"""Classification EM: assign every point to its cheapest cluster, re-estimate, repeat."""

from typing import Any, Literal, overload

import jax
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxcmle import memory
from jaxcmle.problem import inputs
from jaxcmle.problem.placement import is_placed, place, takes_mesh, to_host
from jaxcmle.problem.types import CMLE, Mixture, Problem, Solution
from jaxcmle.refine.iterations import Limits, best_admissible, cem_stack
from jaxcmle.refine.sharded import cem_placed
from jaxcmle.stream.kinds import is_streamed, streamed

__all__ = ["cem", "cem_all", "cem_restarts"]


@takes_mesh
def cem(
    x: Any,
    start: Mixture,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    max_iter: ArrayLike = 300,
    min_size: ArrayLike = 2,
    min_variance: ArrayLike | None = None,
    mesh: Mesh | None = None,
) -> Solution:
    """Improve a mixture by Classification EM until no label changes.

    Each iteration assigns every point to its cheapest cluster (ties to the lowest index) and
    re-estimates the mixture with variances of at least `min_variance`; neither step can raise the
    cost. A cluster that becomes empty keeps weight 0 and takes the mean and variance of the whole
    data: under `CMLE` and `WKM` it stays empty, under `UCMLE` it may win points again. The mixture
    is always finite.

    Args:
        x: points `[n, d]`: an array, or what `fit` reads in chunks.
        start: the mixture to start from, as from `seed`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        max_iter: the most iterations to do.
        min_size: the weight every cluster must reach for the solution to be admissible (with
            weights that add up to 1, pass a share).
        min_variance: floor under every variance. Default: the square of the data's rounding error,
            which only keeps identical points from costing minus infinity.
        mesh: devices to split the points over, along the axis `"points"` (or the first one); an x
            that is split already needs none.

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
    if is_streamed(x):
        return streamed("cem", mesh)(
            x,
            start,
            problem=problem,
            sample_weight=sample_weight,
            max_iter=max_iter,
            min_size=min_size,
            min_variance=min_variance,
        )
    limits = _limits(max_iter, min_size, min_variance)
    solutions = _run(x, start, problem, sample_weight, limits, mesh, stack=False)
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
    mesh: Mesh | None = ...,
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
    mesh: Mesh | None = ...,
) -> tuple[Solution, Array]: ...
@takes_mesh
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
    mesh: Mesh | None = None,
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
        mesh: devices to split the points over, as in `cem`, and the starts along all other axes.

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
        mesh=mesh,
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
    mesh: Mesh | None = None,
) -> Solution:
    """Run `cem` from every start of a stack, together, and return the stack of solutions."""
    limits = _limits(max_iter, min_size, min_variance)
    return _run(x, starts, problem, sample_weight, limits, mesh, stack=True)


def _run(
    x: Any,
    starts: Mixture,
    problem: Problem,
    sample_weight: Any,
    limits: Limits,
    mesh: Mesh | None,
    *,
    stack: bool,
) -> Solution:
    """Check everything, and run CEM from one start or from a stack; returns a stack."""
    problem = inputs.to_problem(problem)
    placed = place(x, sample_weight, mesh) if is_placed(x, mesh) else None
    points, weight = inputs.to_points(x, sample_weight) if placed is None else placed[:2]
    d, dtype = points.shape[1], points.dtype
    starts = inputs.to_mixture(starts, d, dtype, problem, stack=stack)
    inputs.check_enough_points(points, weight, starts.weights.shape[-1], to_host)
    if not stack:
        starts = jax.tree.map(lambda leaf: leaf[None], starts)
    if placed is None:
        return memory.within(lambda: cem_stack(points, weight, starts, problem, limits))
    return memory.within(lambda: cem_placed(placed, starts, problem, limits))


def _limits(max_iter: Any, min_size: Any, min_variance: Any) -> Limits:
    return Limits(
        inputs.to_count(max_iter, "max_iter"),
        inputs.to_limit(min_size, "min_size"),
        None if min_variance is None else inputs.to_limit(min_variance, "min_variance"),
    )
