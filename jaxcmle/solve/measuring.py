"""The numbers of many instances that a plan depends on, and one plan that covers them all."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxcmle import memory, numerics
from jaxcmle.candidates.claim import Instance as Measured
from jaxcmle.candidates.claim import Scale, Target, on_scale
from jaxcmle.candidates.plan import Plan
from jaxcmle.candidates.planning import make_plan
from jaxcmle.problem.instance import variance_at_least, variance_at_most
from jaxcmle.problem.pairs import over_pairs
from jaxcmle.problem.types import Problem
from jaxcmle.solve.advice import fitting_claim, in_two_digits
from jaxcmle.solve.approximate import TooManyCandidatesError
from jaxcmle.solve.batches import Layout
from jaxcmle.solve.instances import Instance, Packed
from jaxcmle.solve.sources import MAX_BYTES
from jaxcmle.solve.stacks import over_instances

__all__ = ["Numbers", "covering", "covering_plan", "measure_all", "measured"]


class Numbers(NamedTuple):
    """What a plan depends on: bounds of variances, the scatter, the closest squared distance."""

    floor: Array
    ceiling: Array
    scatter: Array
    closest: Array


@partial(jax.jit, static_argnames="layout")
def measure_all(packed: Packed, sizes: Array, counts: Array, layout: Layout) -> Numbers:
    """Return the numbers of each instance, whose clusters have at least these sizes."""
    _, n, _ = packed.x.shape
    position = jnp.arange(n)

    def one(given: tuple[Array, Array, Array], _: None) -> Numbers:
        x, weight, size = given
        points = numerics.prepare(x, weight)

        def nearest_before(index: Array, distances: Array) -> Array:
            before = (position < index[:, None]) & (points.weight[index] > 0)[:, None]
            return jnp.where(before, distances, jnp.inf).min(axis=1)

        return Numbers(
            floor=variance_at_least(x, weight, size, memory.pair_bytes()),
            ceiling=variance_at_most(x, weight, size, memory.pair_bytes()),
            scatter=numerics.whole_moments(points).scatter[0],
            closest=over_pairs(points, nearest_before, 2, memory.pair_bytes()).min(),
        )

    stack = (packed.x, packed.weight, sizes)
    return over_instances(one, stack, counts, None, layout, 8 * n * n * packed.x.dtype.itemsize)


def measured(
    instance: Instance, numbers: Numbers, size: float, scale: Scale, problem: Problem
) -> Measured:
    """Return what `measure` does, from what a compiled pass found out."""
    d, offset = instance.x.shape[1], math.log(2 * math.pi * math.e)
    raw = Measured(
        n=len(instance.x) if instance.weight is None else int((instance.weight > 0).sum()),
        d=d,
        n_clusters=instance.k,
        total=instance.total,
        min_size=size,
        y_low=_log(numbers.floor) + offset,
        y_high=_log(numbers.ceiling) + offset,
        factor=1.0,
        scale=None,
        spread_low=0.0,
        spread_high=math.inf,
        weighted=not instance.unweighted,
    )
    paper_shift = math.log(4 * d / math.pi) - _log(numbers.closest)
    return on_scale(raw, scale, problem, float(numbers.scatter), paper_shift)


def _log(value: Array) -> float:
    return math.log(value) if value > 0 else -math.inf


def covering(each: Sequence[Measured]) -> Measured:
    """Return an instance such that a plan for it is a plan for each of these.

    Of an instance, its balance enters the probability that a repetition succeeds, and the grid of
    weights: f-balanced partitions are so for every larger f, and what holds for all weights of at
    least `1 / f` holds for those of fewer partitions. The grid of variances serves every y from
    the lowest to the highest, so those of an instance in between. The means of WKM may err by as
    much as the worst spread of the range allows, and a longer range has no better a worst.
    """
    return max(each, key=lambda instance: instance.balance)._replace(
        n=max(instance.n for instance in each),
        y_low=min(instance.y_low for instance in each),
        y_high=max(instance.y_high for instance in each),
        # As of data that is on the scale: the instances have factors of their own.
        factor=1.0,
        spread_low=min(instance.spread_low for instance in each),
        spread_high=max(instance.spread_high for instance in each),
        weighted=any(instance.weighted for instance in each),
        known_cost=max(instance.known_cost for instance in each),
    )


def covering_plan(
    each: dict[int, Measured], limit: float, target: Target, problem: Problem
) -> Plan:
    """Return one plan for all instances, given by their places; raise if it takes too much."""
    plan = make_plan(covering(list(each.values())), target, problem)
    if plan.tuples > limit:
        raise TooManyCandidatesError(_too_many(plan, limit, each, target, problem), plan, None)
    if plan.peak_bytes > MAX_BYTES:
        raise ValueError(
            f"trying {plan.tuples // plan.repetitions:,} tuples of variances and weights with "
            f"every draw of means takes {plan.peak_bytes / 2**30:.1f} GiB; raise eps or eta"
        )
    return plan


def _too_many(
    plan: Plan, limit: float, each: dict[int, Measured], target: Target, problem: Problem
) -> str:
    instance = covering(list(each.values()))

    def fits(target: Target) -> bool:
        try:
            return make_plan(instance, target, problem).tuples <= limit
        except ValueError:
            return False

    options = fitting_claim(target, fits)
    options.append(f"max_candidates={in_two_digits(plan.log10_tuples)}")
    widest = max(each, key=lambda i: each[i].y_high)
    lightest = max(each, key=lambda i: each[i].balance)
    return (
        f"this guarantee takes 10^{plan.log10_tuples:.2f} candidates for each of the {len(each)} "
        f"instances that no certificate was found for, more than max_candidates = {limit:g}. Any "
        f"of these would fit: {', '.join(options)}. A lower balance, or fewer instances, may take "
        f"fewer: the range of variances is that of instance {widest}, the balance that of instance "
        f"{lightest}; approximate has a plan for each.\n{plan}"
    )
