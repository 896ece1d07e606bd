"""How good a model is, its size taken into account: AIC, BIC and ICL.

With p free parameters and N points (their total weight),

* AIC = 2 F + 2 p and BIC = 2 F + p ln N, where F is the negative log-likelihood of the mixture,
  every point being drawn from some cluster;
* ICL = 2 L + p ln N, where L is the cost: the negative log-likelihood of points *and* labels.

`CMLE` minimises L itself, so ICL is the criterion of the very thing that was fitted: clusters that
overlap cost what they confuse, and only clusters that can be told apart pay. BIC asks how well the
density is fitted, and so may take several clusters where a single one is not Gaussian.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcmle.problem.objective import cost, point_costs
from jaxcmle.problem.types import CMLE, UCMLE, WKM, Mixture, Problem
from jaxcmle.refine.tempered import free_energy

__all__ = [
    "Criteria",
    "Criterion",
    "criteria",
    "criteria_of_many",
    "log_densities",
    "n_parameters",
]

Criterion = Literal["icl", "bic", "aic"]


class Criteria(NamedTuple):
    """What a model is worth; lower is better.

    Attributes:
        aic: Akaike's criterion.
        bic: the Bayesian information criterion.
        icl: the integrated completed likelihood.
    """

    aic: float
    bic: float
    icl: float


def n_parameters(k: int, d: int, problem: Problem = CMLE()) -> int:
    """Return how many numbers of a mixture are free.

    Example:
        >>> from jaxcmle.solve.criteria import n_parameters
        >>> n_parameters(3, 2)  # two weights, three means of two features, three variances
        11
    """
    weights = 0 if isinstance(problem, UCMLE) else k - 1
    variances = 0 if isinstance(problem, WKM) else k
    return weights + k * d + variances


def log_densities(x: Any, mixture: Mixture, *, problem: Problem = CMLE()) -> Array:
    """Return the logarithm of the density of the mixture at every point, `[n]`.

    Example:
        >>> import numpy as np, jaxcmle as jc
        >>> from jaxcmle.solve.criteria import log_densities
        >>> mixture = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [4.0]], variances=[1.0, 1.0])
        >>> print(np.asarray(log_densities([[0.0], [2.0]], mixture)).round(3))
        [-1.612 -2.919]
    """
    costs = point_costs(x, _density(mixture, problem))
    least = costs.min(axis=1, keepdims=True)
    return jnp.log(jnp.exp(least - costs).sum(axis=1)) - least[:, 0]


def criteria(
    x: Any,
    mixture: Mixture,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    partition_cost: float | None = None,
) -> Criteria:
    """Return AIC, BIC and ICL of a model on points.

    Args:
        x: points `[n, d]`.
        mixture: the model. Clusters of weight 0 count as parameters, too.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`. What its costs leave out is added.
        sample_weight: `[n]`, default ones.
        partition_cost: what the points cost under the labels that go with the mixture; by default
            everyone has the cheapest.

    Example:
        >>> import jaxcmle as jc
        >>> from jaxcmle.solve.criteria import criteria
        >>> x = [[0.0], [2.0], [9.0], [11.0]]
        >>> solution = jc.fit(x, 2)
        >>> print(round(criteria(x, solution.mixture).icl, 2))
        23.83
    """
    if partition_cost is None:
        partition_cost = float(cost(x, mixture, problem=problem, sample_weight=sample_weight))
    options: dict[str, Any] = {"problem": problem, "sample_weight": sample_weight}
    return criteria_of_many(x, [mixture], partition_costs=[partition_cost], **options)[0]


def criteria_of_many(
    x: Any,
    mixtures: Sequence[Mixture],
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    partition_costs: Sequence[float],
) -> list[Criteria]:
    """Return what `criteria` does for mixtures with different numbers of clusters.

    They are given the same number, by clusters of weight 0, and so share one program.
    """
    n = float(np.shape(x)[0])
    if sample_weight is not None:
        n = np.asarray(sample_weight).sum(dtype=np.float64).item()
    most = max(len(mixture.weights) for mixture in mixtures)
    results = []
    for mixture, partition_cost in zip(mixtures, partition_costs, strict=True):
        k, d = np.shape(mixture.means)
        padded = _padded(_density(mixture, problem), most)
        likelihood = float(free_energy(x, padded, 1.0, sample_weight=sample_weight))
        completed = partition_cost + n * _left_out(k, d, problem)
        p = n_parameters(k, d, problem)
        result = Criteria(
            aic=2 * likelihood + 2 * p,
            bic=2 * likelihood + p * math.log(n),
            icl=2 * completed + p * math.log(n),
        )
        results.append(result)
    return results


def _density(mixture: Mixture, problem: Problem) -> Mixture:
    """Return the mixture with what the problem fixes in its place: as a density it is a `CMLE`."""
    parts = (mixture.weights, mixture.means, mixture.variances)
    weights, means, variances = (jnp.asarray(part) for part in parts)
    return problem.constrained(Mixture(weights=weights, means=means, variances=variances))


def _padded(mixture: Mixture, k: int) -> Mixture:
    """Return the mixture with clusters of weight 0 added."""
    more = k - len(mixture.weights)
    return Mixture(
        weights=jnp.pad(mixture.weights, (0, more)),
        means=jnp.pad(mixture.means, ((0, more), (0, 0)), mode="edge"),
        variances=jnp.pad(mixture.variances, (0, more), mode="edge"),
    )


def _left_out(k: int, d: int, problem: Problem) -> float:
    """Return the nats per point that the costs of a problem leave out of the log-likelihood."""
    if isinstance(problem, WKM):
        return d / 2 * math.log(math.pi / np.asarray(problem.beta).item())
    return math.log(k) if isinstance(problem, UCMLE) else 0.0
