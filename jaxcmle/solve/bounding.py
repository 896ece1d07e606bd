"""The quick lower bound for a stack of instances, as one compiled pass."""

from functools import partial

import jax
from jax import Array

from jaxcmle import memory
from jaxcmle.problem.bounds import bound_terms
from jaxcmle.problem.types import Problem
from jaxcmle.solve.batches import Layout
from jaxcmle.solve.instances import Packed
from jaxcmle.solve.stacks import over_instances

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
        return bound_terms(x, weight, k, size, problem, least, memory.pair_bytes(), whole).bound

    n = packed.x.shape[1]
    stack = (packed, min_size, floor)
    return over_instances(one, stack, counts, problem, layout, 8 * n * n * packed.x.dtype.itemsize)
