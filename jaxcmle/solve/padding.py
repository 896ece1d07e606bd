"""Points of weight 0: left out of the work, labelled at the end; and added to share programs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcmle.problem.objective import assign
from jaxcmle.problem.types import Mixture, Problem, Solution

__all__ = ["assign_all", "for_all_points", "padded"]

# Numbers of points are rounded up to four sizes for each power of two, and to this at least.
LEAST = 16


def for_all_points(points: Array, present: Any, solution: Solution, problem: Problem) -> Solution:
    """Return the solution with labels for points of weight 0 as well.

    Args:
        points: all of them, `[n, d]`.
        present: those that the solution has labels for, as `without_padding` gives them.
        solution: of the points that are present.
        problem: the problem that was solved.
    """
    if present is None or len(present) == len(points):
        return solution
    labels = np.array(assign_all(points, solution.mixture, problem))
    labels[present] = np.asarray(solution.labels)
    return dataclasses.replace(solution, labels=jnp.asarray(labels))


@jax.jit
def assign_all(points: Array, mixture: Mixture, problem: Problem) -> Array:
    """Return the labels of points that may be padding, which holds anything.

    Under jit, where values are not checked.
    """
    return assign(jnp.where(jnp.isfinite(points), points, 0), mixture, problem=problem)


def padded(points: Array, weight: Array | None) -> tuple[Array, Array]:
    """Return points and weights with points of weight 0 added, so that few lengths occur.

    Every length takes programs of its own, and they take longer to compile than to run.
    """
    n = points.shape[0]
    weight = jnp.ones(n, points.dtype) if weight is None else weight
    step = max(LEAST, 1 << max(n - 1, 1).bit_length()) // 8
    extra = -n % step if n > LEAST else LEAST - n
    return jnp.pad(points, ((0, extra), (0, 0))), jnp.pad(weight, (0, extra))
