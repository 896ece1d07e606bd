"""The objective: what points, mixtures and partitions cost, and the best mixture of a partition.

Everything here uses direct differences, and so is right to rounding on any data.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Moments, Points
from jaxcmle.problem import inputs
from jaxcmle.problem.types import CMLE, Mixture, Problem

__all__ = [
    "assign",
    "assign_points",
    "cost",
    "estimate",
    "fill_empty",
    "hide_missing",
    "is_valid",
    "model_inputs",
    "moments_cost",
    "partition_cost",
    "partition_inputs",
    "point_costs",
    "shift_means",
    "weighted_total",
]


def point_costs(x: Any, mixture: Mixture, *, problem: Problem = CMLE()) -> Array:
    r"""Return what every point costs under every cluster.

    For CMLE, $\ell_x(w_k, \mu_k, \sigma_k^2) = \frac{d}{2} \ln(2 \pi \sigma_k^2) +
    \frac{|x - \mu_k|^2}{2 \sigma_k^2} - \ln w_k$; see `WKM` and `UCMLE` for theirs. A weight of 0
    costs infinity.

    Args:
        x: points `[n, d]`.
        mixture: the model, k clusters.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.

    Returns:
        Costs `[n, k]`, in nats.

    Example:
        >>> import numpy as np, jaxcmle as jc
        >>> mixture = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [4.0]], variances=[1.0, 1.0])
        >>> print(np.asarray(jc.point_costs([[0.0], [4.0]], mixture)).round(3))
        [[1.612 9.612]
         [9.612 1.612]]
    """
    problem, points, _, mixture = model_inputs(x, mixture, None, problem)
    return _point_costs(points, mixture, problem)


def cost(
    x: Any, mixture: Mixture, *, problem: Problem = CMLE(), sample_weight: Any = None
) -> Array:
    r"""Return the cost of the model, $L_X(\theta) = \sum_x a_x \min_k \ell_x(\theta_k)$.

    Differentiable in `x`, in the mixture and in the weights (where no point is tied).

    Args:
        x: points `[n, d]`.
        mixture: the model.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: $a_x$, `[n]`; a point of weight 0 changes nothing. Default: ones.

    Returns:
        A scalar, in nats.

    Example:
        >>> import jaxcmle as jc
        >>> mixture = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [4.0]], variances=[1.0, 1.0])
        >>> print(round(float(jc.cost([[0.0], [4.0]], mixture)), 3))
        3.224
    """
    problem, points, weight, mixture = model_inputs(x, mixture, sample_weight, problem)
    return _cost(points, weight, mixture, problem)


def assign(x: Any, mixture: Mixture, *, problem: Problem = CMLE()) -> Array:
    """Return the cheapest cluster of every point; ties go to the lowest index.

    Args:
        x: points `[n, d]`.
        mixture: the model.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.

    Returns:
        int32 labels `[n]`.

    Example:
        >>> import jaxcmle as jc
        >>> mixture = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [4.0]], variances=[1.0, 1.0])
        >>> jc.assign([[0.0], [1.9], [2.1]], mixture).tolist()
        [0, 0, 1]
    """
    problem, points, _, mixture = model_inputs(x, mixture, None, problem)
    return _assign(points, mixture, problem)


def estimate(
    x: Any,
    labels: Any,
    n_clusters: int,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    min_variance: ArrayLike = 0.0,
) -> Mixture:
    r"""Return the best mixture for a partition (the M-step).

    $w_k = n_k / N$, $\mu_k$ the mean, $\sigma_k^2 = \max(\frac{1}{d n_k} \sum |x - \mu_k|^2,
    \sigma_{\min}^2)$. An empty cluster gets weight 0 (`UCMLE`: 1/k) and the mean and variance of
    the whole data, so that the mixture is always finite.

    Args:
        x: points `[n, d]`.
        labels: int `[n]`, from 0 to `n_clusters - 1`.
        n_clusters: k; fixes shapes, so a Python int.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        min_variance: floor under every variance.

    Returns:
        A mixture with k clusters.

    Example:
        >>> import jaxcmle as jc
        >>> mixture = jc.estimate([[0.0], [2.0], [9.0], [11.0]], [0, 0, 1, 1], 2)
        >>> mixture.means.tolist(), mixture.variances.tolist()
        ([[1.0], [10.0]], [1.0, 1.0])
    """
    problem, points, weight, labels, k = partition_inputs(
        x, labels, n_clusters, sample_weight, problem
    )
    min_variance = inputs.to_limit(min_variance, "min_variance")
    return _estimate(points, weight, labels, k, problem, min_variance)


def partition_cost(
    x: Any,
    labels: Any,
    n_clusters: int,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    min_variance: ArrayLike = 0.0,
) -> Array:
    r"""Return the cost of a partition under its own best mixture, $L_X(C)$.

    For CMLE, $\sum_k [ n_k \frac{d}{2} (\ln(2 \pi \sigma_k^2) + 1) - n_k \ln \frac{n_k}{N} ]$.
    Empty clusters cost nothing. A cluster without spread costs minus infinity, unless
    `min_variance` is positive. Under `jit`, labels out of range give NaN.

    Args:
        x: points `[n, d]`.
        labels: int `[n]`, from 0 to `n_clusters - 1`.
        n_clusters: k; a Python int.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        min_variance: floor under every variance.

    Returns:
        A scalar, in nats.

    Example:
        >>> import jaxcmle as jc
        >>> x = [[0.0], [2.0], [9.0], [11.0]]
        >>> print(round(float(jc.partition_cost(x, [0, 0, 1, 1], 2)), 3))
        8.448
    """
    problem, points, weight, labels, k = partition_inputs(
        x, labels, n_clusters, sample_weight, problem
    )
    min_variance = inputs.to_limit(min_variance, "min_variance")
    return _partition_cost(points, weight, labels, k, problem, min_variance)


def assign_points(
    points: Points, tiles: Array, mixture: Mixture, problem: Problem
) -> tuple[Array, Array]:
    """Return every point's smallest cost and label, for a mixture in shifted coordinates."""
    coefficients = problem.coefficients(mixture)
    return numerics.assign_directly(tiles, coefficients, points.x.shape[0])


def fill_empty(moments: Moments, whole: Moments) -> Moments:
    """Give empty clusters the mean and, as if they had weight 1, the variance of the whole data."""
    empty = moments.size == 0
    mean = jnp.where(empty[:, None], whole.mean, moments.mean)
    scatter = jnp.where(empty, whole.scatter / whole.size, moments.scatter)
    return Moments(moments.size, mean, scatter)


def hide_missing(mixture: Mixture, exists: Array) -> Mixture:
    """Return a mixture, or a stack, in which clusters that do not exist never win a point.

    They are there to make mixtures with different numbers of clusters alike. Without weight they
    cost infinity under `CMLE` and `WKM`, without end to their variance under `UCMLE`, too.
    """
    return Mixture(
        weights=jnp.where(exists, mixture.weights, 0),
        means=mixture.means,
        variances=jnp.where(exists, mixture.variances, jnp.inf),
    )


def is_valid(mixture: Mixture, problem: Problem) -> Array:
    """Tell whether a mixture, or each of a stack, holds no NaN and nothing out of range."""
    means, slope, constant = problem.coefficients(mixture)
    finite = jnp.isfinite(means).all(axis=(-2, -1))
    # A weight of 0 costs infinity, which is fine; all of them would be.
    return (
        finite
        & (jnp.isfinite(slope) & (slope > 0)).all(axis=-1)
        & ~(jnp.isnan(constant) | (constant == -jnp.inf)).any(axis=-1)
        & (constant < jnp.inf).any(axis=-1)
    )


def shift_means(mixture: Mixture, shift: Array) -> Mixture:
    """Return the mixture with its means moved by `shift`."""
    return Mixture(
        weights=mixture.weights, means=mixture.means + shift, variances=mixture.variances
    )


def model_inputs(
    x: Any, mixture: Mixture, sample_weight: Any, problem: Problem, *, stack: bool = False
) -> tuple[Problem, Array, Array | None, Mixture]:
    """Return the checked problem, points, weights and mixture (or stack of mixtures)."""
    problem = inputs.to_problem(problem)
    points, weight = inputs.to_points(x, sample_weight)
    d, dtype = points.shape[1], points.dtype
    return problem, points, weight, inputs.to_mixture(mixture, d, dtype, problem, stack=stack)


def partition_inputs(
    x: Any, labels: Any, n_clusters: Any, sample_weight: Any, problem: Problem
) -> tuple[Problem, Array, Array | None, Array, int]:
    """Return the checked problem, points, weights, labels and number of clusters."""
    problem = inputs.to_problem(problem)
    points, weight = inputs.to_points(x, sample_weight)
    k = inputs.to_n_clusters(n_clusters, points.shape[0])
    return problem, points, weight, inputs.to_labels(labels, points.shape[0], k), k


@jax.jit
def _point_costs(x: Array, mixture: Mixture, problem: Problem) -> Array:
    points = numerics.prepare(x, None)
    means, slope, constant = problem.coefficients(shift_means(mixture, -points.shift))
    return (numerics.squared_distances(points.x.T, means) * slope[:, None] + constant[:, None]).T


@jax.jit
def _assign(x: Array, mixture: Mixture, problem: Problem) -> Array:
    points = numerics.prepare(x, None)
    return _cheapest(points, mixture, problem)[1]


@jax.jit
def _cost(x: Array, weight: Array | None, mixture: Mixture, problem: Problem) -> Array:
    points = numerics.prepare(x, weight)
    total = weighted_total(points, _cheapest(points, mixture, problem)[0])
    return jnp.where(is_valid(mixture, problem), total, jnp.nan)


def _cheapest(points: Points, mixture: Mixture, problem: Problem) -> tuple[Array, Array]:
    tiles = numerics.point_tiles(points.x, mixture.weights.shape[0])
    return assign_points(points, tiles, shift_means(mixture, -points.shift), problem)


def weighted_total(points: Points, costs: Array) -> Array:
    """Return the weighted sum of the points' costs; weight 0 silences any cost."""
    return numerics.blocked_sum(numerics.silence(points.weight, points.weight * costs))


@partial(jax.jit, static_argnames="k")
def _estimate(
    x: Array,
    weight: Array | None,
    labels: Array,
    k: int,
    problem: Problem,
    min_variance: ArrayLike,
) -> Mixture:
    points = numerics.prepare(x, weight)
    rows = numerics.moment_rows(points)
    moments = numerics.cluster_moments(points, rows, labels, k)
    moments = fill_empty(moments, numerics.whole_moments(points))
    mixture = problem.mixture(moments, min_variance)
    return shift_means(mixture, points.shift)


@partial(jax.jit, static_argnames="k")
def _partition_cost(
    x: Array,
    weight: Array | None,
    labels: Array,
    k: int,
    problem: Problem,
    min_variance: ArrayLike,
) -> Array:
    points = numerics.prepare(x, weight)
    moments = numerics.cluster_moments(points, numerics.moment_rows(points), labels, k)
    total = moments_cost(moments, problem, min_variance)
    valid = ((labels >= 0) & (labels < k)) | (points.weight == 0)
    return jnp.where(valid.all(), total, jnp.nan)


def moments_cost(moments: Moments, problem: Problem, min_variance: ArrayLike) -> Array:
    """Return `L_X(C)` from the weights, means and scatters of the clusters."""
    size, mean, scatter = moments
    # Any scatter will do for an empty cluster, but 0 would have a gradient of NaN.
    filled = Moments(size, mean, jnp.where(size == 0, 1, scatter))
    _, slope, constant = problem.coefficients(problem.mixture(filled, min_variance))
    # Where a cluster has no spread, slope * scatter would be infinity times zero.
    spread = jnp.where(scatter == 0, 0, slope * scatter)
    return jnp.where(size == 0, 0, size * constant + spread).sum()
