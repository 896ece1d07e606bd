"""The quick lower bound for a stack of instances, as one compiled pass."""

from functools import partial
from typing import Any

import jax
from jax import Array, lax

from jaxcmle.problem.bounds import bound_terms
from jaxcmle.problem.pairs import BYTE_BUDGET
from jaxcmle.problem.types import Problem
from jaxcmle.solve.batches import Layout, each_first, over_devices
from jaxcmle.solve.instances import Packed

__all__ = ["bound_all"]


@partial(jax.jit, static_argnames=("layout", "whole"))
def bound_all(
    packed: Packed,
    min_size: Array,
    floor: Array,
    counts: Array,
    problem: Problem,
    layout: Layout,
    whole: bool,
) -> Array:
    """Return what no partition of each instance costs less than, `[c]`.

    Args:
        packed: padded instances.
        min_size: the least weight of a cluster, `[c]`.
        floor: the least variance, `[c]`.
        counts: how many of the instances each device is to look at.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        layout: where to.
        whole: whether all weights are 0 or 1, which takes a fraction of the time.
    """

    def one(given: tuple[Packed, Array, Array], problem: Problem) -> Array:
        (x, weight, exists), size, least = given
        k = exists.sum()
        return bound_terms(x, weight, k, size, problem, least, BYTE_BUDGET, whole).bound

    def local(stack: Any, count: Array, problem: Problem) -> Array:
        if layout.form == "map":
            return each_first(lambda given: one(given, problem), stack, count)
        n = packed.x.shape[1]
        at_once = max(1, BYTE_BUDGET // (8 * n * n * packed.x.dtype.itemsize))
        return lax.map(lambda given: one(given, problem), stack, batch_size=at_once)

    return over_devices(local, layout)((packed, min_size, floor), counts, problem)
