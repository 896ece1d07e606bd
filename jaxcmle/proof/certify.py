"""The tight certificate: proof that a clustering is nearly the best of all."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxcmle.problem import inputs
from jaxcmle.problem.bounds import minimum_size
from jaxcmle.problem.objective import estimate, partition_cost
from jaxcmle.problem.types import CMLE, Guarantee, Problem, Solution, Status
from jaxcmle.proof.prove import Given, Proved, Watch, prove
from jaxcmle.solve.padding import for_all_points
from jaxcmle.solve.progress import CtrlC, Progress, ProgressOption

__all__ = ["certify", "certify_while"]


def certify(
    x: Any,
    solution: Solution,
    *,
    balance: ArrayLike | None = None,
    min_size: ArrayLike | None = None,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    min_variance: ArrayLike = 0.0,
    tolerance: float = 0.01,
    time_limit: float | None = None,
    progress: ProgressOption = None,
) -> Guarantee:
    r"""Prove how far a clustering is from the best of all that have clusters of the minimum size.

    For any prices $\alpha_x$ of the points, no partition into K clusters costs less than
    $\sum_x \alpha_x - K \max_C [\alpha(C) - cost(C)]$. Good prices are found from a linear
    programme, and the maximum over all clusters C is bounded from above by one of

    * `"cells"`: branch and bound over the mean and the variance of one cluster; tight, for up to
      six features;
    * `"span"`: the same within the span of the centres, for up to four clusters that are apart;
    * `"triangle"`: distances from the centres only; any number of features, clusters far apart.

    The largest lower bound is reported, and `"pairs"`, the one of `lower_bound`, where it is no
    smaller. It is computed in float64 whatever the default is, and holds in spite of rounding.

    What it says: among all partitions whose clusters weigh at least `min_size`, none costs less. It
    says nothing about partitions with smaller clusters, nor whether there are K clusters.

    Args:
        x: the points that were clustered.
        solution: any solution on them.
        balance: f; clusters weigh at least `N / f`.
        min_size: the least weight of a cluster, instead of `balance`. Default: the one that the
            solution was found with, if it says so, else that of `balance = 2 k`.
        problem: the problem that was solved.
        sample_weight: the weights that were used.
        min_variance: the floor under variances that was used.
        tolerance: nats per point; a gap of this is enough.
        time_limit: seconds. Without one, what is not likely to be of use is not tried for long.
        progress: True shows a line on standard error, False nothing, None a line on terminals and
            in notebooks; or a function of a report.

    Returns:
        A `Guarantee` with `kind="certificate"`: `lower_bound`, `gap` in nats per point, `min_size`,
        `method`, whether the tolerance is `reached`, and whether it was `interrupted`, by Ctrl-C
        or a limit; the bound is valid then, too. `better` is a solution that costs less, if one
        was found on the way.

    Example:
        >>> import jaxcmle as jc
        >>> x = [[0.0], [2.0], [4.0], [9.0], [11.0], [13.0]]
        >>> guarantee = jc.certify(x, jc.fit(x, 2), tolerance=0.01)
        >>> guarantee.reached, guarantee.gap <= 0.01
        (True, True)
    """
    inputs.check_on_host("certify")
    limit = math.inf if time_limit is None else inputs.to_limit(time_limit, "time_limit")
    watch = Watch(Progress(progress, "cells"), limit)
    return certify_while(
        watch,
        x,
        solution,
        balance=balance,
        min_size=min_size,
        problem=problem,
        sample_weight=sample_weight,
        min_variance=min_variance,
        tolerance=tolerance,
    )


def certify_while(
    watch: Watch,
    x: Any,
    solution: Solution,
    *,
    balance: ArrayLike | None = None,
    min_size: ArrayLike | None,
    problem: Problem,
    sample_weight: Any,
    min_variance: ArrayLike,
    tolerance: float,
) -> Guarantee:
    """Return what `certify` does, until a watch stops it: that knows whether it did."""
    if not isinstance(solution, Solution):
        raise TypeError(f"expected a jaxcmle.Solution, got {type(solution).__name__}")
    problem = inputs.to_problem(problem)
    tolerance = inputs.to_limit(tolerance, "tolerance", positive=True)
    floor = inputs.to_limit(min_variance, "min_variance")
    if min_size is None and balance is None:
        min_size = solution.guarantee.min_size
    with _double_precision():
        given = _checked(x, solution, balance, min_size, problem, sample_weight, floor)
        with CtrlC() as watch.ctrl_c:
            try:
                proved = prove(given, watch, tolerance)
            finally:
                watch.progress.close()
    better = _better(x, sample_weight, given, proved, tolerance)
    return _guarantee(given, proved, solution, tolerance, better)


@contextlib.contextmanager
def _double_precision() -> Iterator[None]:
    """Compute in float64: on the default device, or on the host if that only pretends to."""
    chosen: Any = jax.config.values["jax_default_device"]
    trusted = jax.default_backend() in ("cpu", "gpu", "cuda", "rocm")
    device = chosen if trusted else jax.local_devices(backend="cpu")[0]
    with jax.enable_x64(True), jax.default_device(device):
        yield


def _checked(
    x: Any,
    solution: Solution,
    balance: Any,
    min_size: Any,
    problem: Problem,
    sample_weight: Any,
    floor: float,
) -> Given:
    """Return what is to be proved, or say what is wrong."""
    everything, weight = inputs.to_points(x, sample_weight)
    points, weight, present = inputs.without_padding(everything, weight)
    k = solution.mixture.weights.shape[-1]
    if solution.mixture.weights.ndim != 1:
        raise ValueError("expected one solution, got a stack of them: certify each by itself")
    inputs.to_n_clusters(k, len(points))
    labels = np.asarray(inputs.to_labels(solution.labels, len(everything), k))
    wide = points.astype(np.float64)
    heavy = None if weight is None else weight.astype(np.float64)
    size = float(np.asarray(minimum_size(wide, heavy, k, balance, min_size)))
    total = len(points) if weight is None else float(weight.sum())
    # Points of weight 1 make clusters of whole sizes.
    size = float(max(1, math.ceil(size - 1e-9))) if weight is None else size
    weights = None
    if weight is not None:
        # As given: points in float32 would have weights in float32.
        weights = np.asarray(sample_weight, np.float64)[present]
    return Given(
        np.asarray(points, np.float64),
        weights,
        labels if present is None else labels[present],
        k,
        min(size, total / k),
        problem,
        floor,
    )


def _guarantee(
    given: Given, proved: Proved, solution: Solution, tolerance: float, better: Solution | None
) -> Guarantee:
    """Return what is proved of a solution."""
    total = float(len(given.x)) if given.weight is None else math.fsum(given.weight)
    # The solution's own cost is rounded, and its mixture need not be the best for its labels.
    cost = max(float(solution.cost), proved.given_cost)
    gap = max(cost - proved.lower_bound, 0.0) / total
    gap = gap if proved.admissible and math.isfinite(gap) else math.inf
    return Guarantee(
        kind="certificate",
        lower_bound=float(proved.lower_bound),
        gap=float(gap),
        min_size=given.min_size,
        method=proved.method,
        reason=proved.reason,
        tolerance=tolerance,
        reached=bool(gap <= tolerance),
        interrupted=proved.interrupted,
        better=better,
    )


def _better(
    x: Any, sample_weight: Any, given: Given, proved: Proved, tolerance: float
) -> Solution | None:
    """Return the better solution that was found, if any, in the precision that others have."""
    if proved.labels is None:
        return None
    everything, weight = inputs.to_points(x, sample_weight)
    points, weight, present = inputs.without_padding(everything, weight)
    options: dict[str, Any] = {
        "problem": given.problem,
        "sample_weight": weight,
        "min_variance": given.min_variance,
    }
    solution = Solution(
        mixture=estimate(points, proved.labels, given.k, **options),
        labels=jnp.asarray(proved.labels, jnp.int32),
        cost=jnp.asarray(partition_cost(points, proved.labels, given.k, **options)),
        status=jnp.int32(Status.CONVERGED),
        n_iter=jnp.int32(0),
    )
    solution = for_all_points(everything, present, solution, given.problem)
    own = proved._replace(given_cost=proved.best_cost, admissible=True)
    guarantee = _guarantee(given, own, solution, tolerance, None)
    return dataclasses.replace(solution, guarantee=guarantee)
