"""Mixtures, solutions, their status and guarantee, and the three problems."""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxcmle.numerics import Coefficients, Moments

T = TypeVar("T")

__all__ = ["CMLE", "UCMLE", "WKM", "Guarantee", "Mixture", "Problem", "Solution", "Status"]


class Status(enum.IntEnum):
    """How a search ended. Only `CONVERGED` is an unqualified success.

    Attributes:
        CONVERGED: no label changed in the last assignment.
        MAX_ITER: the limit on iterations came first; the answer is valid and could be improved.
        INADMISSIBLE: a cluster weighs less than the minimum size.
        NONFINITE: NaN or infinity came up (in the data, the start or on the way).
        INTERRUPTED: stopped by the user or a time limit; the answer is the best so far.
    """

    CONVERGED = 0
    MAX_ITER = 1
    INADMISSIBLE = 2
    NONFINITE = 3
    INTERRUPTED = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """K weighted spherical Gaussians. A leading axis on all three arrays makes a stack of mixtures.

    Attributes:
        weights: `[k]`.
        means: `[k, d]`.
        variances: `[k]`, one per cluster and the same in every direction.
    """

    weights: Array
    means: Array
    variances: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarantee:
    """How far from optimal a solution can be.

    Attributes:
        kind: `"certificate"` (the lower bound proves it), `"probabilistic"`, `"deterministic"`,
            `"estimate"` (of a lower bound, from a sample: nothing is proved) or `"none"`.
        lower_bound: no partition whose clusters weigh at least `min_size` costs less.
        gap: `(cost - lower_bound) / total weight`, in nats per point; infinite where nothing is
            claimed, as for a solution with a cluster under `min_size`.
        min_size: the smallest cluster weight the lower bound allows for.
        eps: the solution costs at most `1 + eps` times the best balanced one, or None.
        eta: the solution costs at most `eta` nats per point more than the best balanced one, or
            None.
        delta: the probability that a probabilistic claim fails, or None.
        scale: the scale on which the claim of `eps` holds, `"tight"` or `"paper"` as in `rescale`;
            None where costs are taken as they are.
        reason: why there is no certificate, where one could be expected.
        method: which of the lower bounds this is: `"pairs"` (the closed form over all pairs of
            points), `"cells"`, `"span"` or `"triangle"` (see `certify`).
        tolerance: the gap that `certify` was asked for, or None.
        reached: whether the gap is within the tolerance, or None.
        interrupted: Ctrl-C or a limit on time or work came before all had been tried. The lower
            bound holds all the same.
        better: a solution that costs less, if `certify` came across one, with a guarantee of its
            own; or None.
    """

    kind: Literal["certificate", "probabilistic", "deterministic", "estimate", "none"] = (
        dataclasses.field(default="none", metadata={"static": True})
    )
    lower_bound: ArrayLike = -math.inf
    gap: ArrayLike = math.inf
    min_size: ArrayLike | None = None
    eps: ArrayLike | None = None
    eta: ArrayLike | None = None
    delta: ArrayLike | None = None
    scale: Literal["tight", "paper"] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    reason: str = dataclasses.field(default="", metadata={"static": True})
    method: Literal["", "pairs", "cells", "span", "triangle"] = dataclasses.field(
        default="", metadata={"static": True}
    )
    tolerance: ArrayLike | None = None
    reached: ArrayLike | None = None
    interrupted: ArrayLike | None = None
    better: "Solution | None" = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution:
    """A mixture, the partition that goes with it, and what is known about both.

    Attributes:
        mixture: the model, in the user's units.
        labels: int32 `[n]`.
        cost: `L_X(mixture, labels)` in nats: the sum of every point's cost under its own cluster.
        status: an int32 `Status` code.
        n_iter: iterations done.
        guarantee: how far from optimal it can be.
        consistent: whether `labels` are what the mixture assigns. False only where a minimum
            size keeps a point from its cheapest cluster.
        error: why there is no answer, for an instance among many that cannot be solved; a tuple
            with one for each in a stack of solutions.
    """

    mixture: Mixture
    labels: Array
    cost: Array
    status: Array
    n_iter: Array
    guarantee: Guarantee = dataclasses.field(default_factory=Guarantee)
    consistent: ArrayLike = True
    error: str | tuple[str, ...] = dataclasses.field(default="", metadata={"static": True})


def _register_problem(problem_type: type[T]) -> type[T]:
    """Register a problem as a pytree whose structure names its type.

    Not `register_dataclass`: in jax 0.10 the structures of two dataclasses compare equal if they
    have as many fields, whatever their types (the hashes differ). Now and then, as the hash table
    has it, jit then runs the program of one problem for another.
    """
    names = tuple(field.name for field in dataclasses.fields(problem_type))  # type: ignore[arg-type]

    def flatten(problem: T) -> tuple[tuple[Any, ...], str]:
        return tuple(getattr(problem, name) for name in names), problem_type.__qualname__

    def unflatten(_: str, values: Sequence[Any]) -> T:
        return problem_type(*values)

    jax.tree_util.register_pytree_node(problem_type, flatten, unflatten)
    return problem_type


@_register_problem
@dataclasses.dataclass(frozen=True)
class CMLE:
    """Weights, means and variances are all free.

    A point costs `d/2 ln(2 pi variance) + |x - mean|^2 / (2 variance) - ln weight`.
    """

    def coefficients(self, mixture: Mixture) -> Coefficients:
        """Return the costs as functions of the squared distance."""
        slope, constant = _gaussian(mixture)
        return Coefficients(mixture.means, slope, constant - _log(mixture.weights))

    def mixture(self, moments: Moments, min_variance: ArrayLike) -> Mixture:
        """Return the best mixture for clusters with these moments."""
        weights = moments.size / moments.size.sum()
        variances = _variances(moments, min_variance)
        return Mixture(weights=weights, means=moments.mean, variances=variances)

    def constrained(self, mixture: Mixture) -> Mixture:
        """Return the mixture with what this problem fixes put in its place: nothing."""
        return mixture


@_register_problem
@dataclasses.dataclass(frozen=True)
class WKM:
    """Weighted k-means: every variance is fixed at `1 / (2 beta)`.

    A point costs `beta |x - mean|^2 - ln weight`. The variances of a mixture are ignored on the
    way in, and are `1 / (2 beta)` on the way out.
    """

    beta: ArrayLike = 1.0

    def coefficients(self, mixture: Mixture) -> Coefficients:
        """Return the costs as functions of the squared distance."""
        slope = jnp.full_like(mixture.weights, self.beta)
        return Coefficients(mixture.means, slope, -_log(mixture.weights))

    def mixture(self, moments: Moments, min_variance: ArrayLike) -> Mixture:
        """Return the best mixture for clusters with these moments."""
        weights = moments.size / moments.size.sum()
        return self.constrained(
            Mixture(weights=weights, means=moments.mean, variances=jnp.ones_like(weights))
        )

    def constrained(self, mixture: Mixture) -> Mixture:
        """Return the mixture with what this problem fixes put in its place."""
        variances = 0.5 / jnp.full_like(mixture.variances, self.beta)
        return dataclasses.replace(mixture, variances=variances)


@_register_problem
@dataclasses.dataclass(frozen=True)
class UCMLE:
    """Uniform weights: every weight is fixed at `1 / k`, and costs nothing.

    A point costs `d/2 ln(2 pi variance) + |x - mean|^2 / (2 variance)`. The weights of a mixture
    are ignored on the way in, and are `1 / k` on the way out.
    """

    def coefficients(self, mixture: Mixture) -> Coefficients:
        """Return the costs as functions of the squared distance."""
        return Coefficients(mixture.means, *_gaussian(mixture))

    def mixture(self, moments: Moments, min_variance: ArrayLike) -> Mixture:
        """Return the best mixture for clusters with these moments."""
        variances = _variances(moments, min_variance)
        return self.constrained(
            Mixture(weights=moments.size, means=moments.mean, variances=variances)
        )

    def constrained(self, mixture: Mixture) -> Mixture:
        """Return the mixture with what this problem fixes put in its place."""
        weights = jnp.full_like(mixture.weights, 1 / mixture.weights.shape[-1])
        return dataclasses.replace(mixture, weights=weights)


Problem = CMLE | WKM | UCMLE


def _log(weights: Array) -> Array:
    """Return the logarithm, with minus infinity and a gradient of 0 at 0."""
    positive = weights > 0
    log = jnp.log(jnp.where(positive, weights, 1))
    return jnp.where(positive, log, jnp.where(weights == 0, -jnp.inf, jnp.nan))


def _gaussian(mixture: Mixture) -> tuple[Array, Array]:
    half_d = mixture.means.shape[-1] / 2
    return 0.5 / mixture.variances, half_d * jnp.log(2 * math.pi * mixture.variances)


def _variances(moments: Moments, min_variance: ArrayLike) -> Array:
    size, mean, scatter = moments
    variances = scatter / (mean.shape[1] * jnp.where(size > 0, size, 1))
    return jnp.maximum(variances, jnp.asarray(min_variance, variances.dtype))
