"""What the estimator clusters, and the limits and starts of Classification EM alone."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcmle.candidates.seeding import seed
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import estimate
from jaxcmle.problem.types import Mixture, Problem, Solution
from jaxcmle.solve.sizes import default_min_size

__all__ = ["Data", "possible_clusters"]


class Data(NamedTuple):
    """What is to be clustered."""

    points: Array
    weight: Array | None
    k: int
    problem: Problem

    def least_size(self, min_size: Any) -> float:
        """Return the least weight of a cluster, by default that of a search."""
        total = len(self.points) if self.weight is None else float(self.weight.sum())
        whole = self.weight is None or bool((self.weight == self.weight.round()).all())
        size = default_min_size(total, whole, self.k)
        if min_size is not None:
            size = inputs.to_limit(min_size, "min_size")
        inputs.check_partition_exists(self.k, size, total)
        return size

    def drawn(self, key: Array, count: int) -> Mixture:
        """Return a stack of mixtures by k-means++. The first do not depend on how many follow."""
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(count))
        return jax.vmap(lambda key: seed(key, self.points, self.k, sample_weight=self.weight))(keys)

    def around(self, means: Any) -> Mixture:
        """Return a mixture to start from, with these means, that assigns to the nearest."""
        shape = (self.k, self.points.shape[1])
        array = inputs.to_array(means, "init")
        if array.shape != shape:
            raise ValueError(f"init must hold means [k, d], {shape}, got {array.shape}")
        variance = self.points.var(axis=0).mean()
        return Mixture(
            weights=jnp.full(self.k, 1 / self.k, self.points.dtype),
            means=array,
            variances=jnp.full(self.k, jnp.where(variance > 0, variance, 1)),
        )

    def stack(self, start: Any, floor: Callable[[], float]) -> Mixture:
        """Return a stack of mixtures from what is known to begin with.

        Labels need the floor under variances; it is a function since nothing else does.
        """
        if isinstance(start, Solution):
            start = start.mixture
        if not isinstance(start, Mixture):
            options: Any = {"problem": self.problem, "sample_weight": self.weight}
            start = estimate(self.points, start, self.k, min_variance=floor(), **options)
        if np.ndim(start.weights) == 1:
            parts: Any = {name: np.asarray(part)[None] for name, part in vars(start).items()}
            start = Mixture(**parts)
        k = np.shape(start.weights)[-1]
        if k != self.k:
            raise ValueError(f"init has {k} clusters, and n_clusters is {self.k}")
        return start


def possible_clusters(k: int, points: Array, weight: Array | None) -> int:
    """Return the number of clusters: k, or less if there are fewer points to tell apart."""
    try:
        inputs.check_enough_points(points, weight, k)
    except ValueError:
        present = points if weight is None else points[weight > 0]
        return len(np.unique(np.asarray(present), axis=0))
    return k
