"""Classification EM on points that are split over several devices.

Every device looks at its own points; one all-reduce an iteration joins what they found: the sums
about the means of the iteration before, and whether a label has changed. Sums about those means
cancel only where a cluster has moved far; then the pass is repeated about the new ones.
"""

import dataclasses
import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxcmle import numerics
from jaxcmle.numerics import Moments, Points
from jaxcmle.problem.objective import fill_empty, is_valid, shift_means
from jaxcmle.problem.placement import (
    Placed,
    Placement,
    everywhere,
    padded_stack,
    without_extra,
)
from jaxcmle.problem.types import Mixture, Problem, Solution, Status
from jaxcmle.refine.iterations import Limits, cem_stack, is_finite, rounding_variance
from jaxcmle.refine.passes import Sums, moments_about, pass_sums

__all__ = ["cem_placed"]


def cem_placed(placed: Placed, starts: Mixture, problem: Problem, limits: Limits) -> Solution:
    """Run CEM from every start of a stack on points over several devices; a stack of solutions."""
    m = starts.weights.shape[0]
    # One start has nothing to split: all other axes of the mesh do the same.
    splits = m > 1 and placed.placement.lanes > 1
    stack = padded_stack(starts, placed.placement.lanes) if splits else starts
    stack = everywhere(stack, placed.placement.mesh)
    found = _cem(placed.x, placed.weight, stack, problem, limits, placed.placement, splits)
    found = jax.tree.map(lambda leaf: leaf[:m], found) if splits else found
    return dataclasses.replace(found, labels=without_extra(found.labels, placed.n))


@partial(jax.jit, static_argnames=("placement", "splits"))
def _cem(
    x: Array,
    weight: Array | None,
    starts: Mixture,
    problem: Problem,
    limits: Limits,
    placement: Placement,
    splits: bool,
) -> Solution:
    stacks = placement.along_others if splits else PartitionSpec()
    others = placement.others if splits else None
    same = PartitionSpec()
    labels = PartitionSpec(others, placement.points)
    parts: Any = dict.fromkeys(
        ("mixture", "cost", "status", "n_iter", "guarantee", "consistent"), stacks
    )
    outcome = Solution(labels=labels, **parts)  # type: ignore[arg-type]
    # Where the points are whole on every device, nothing is exchanged.
    local: Any = partial(_local_cem, axes=placement.points) if placement.points else cem_stack
    return jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(placement.along_points, placement.along_points, stacks, same, same),
        out_specs=outcome,
        check_vma=False,
    )(x, weight, starts, problem, limits)


class _Carry(NamedTuple):
    """Where every start has come to.

    Attributes:
        mixtures: in shifted coordinates.
        about: the means `[m, k, d]` that sums are taken about.
        labels: of the points of this device.
        unseen: whether labels count as changed whatever they are.
        again: whether this pass repeats the last one about better means.
        running: whether it goes on.
        n_iter: iterations so far.
        status: an int32 `Status`.
    """

    mixtures: Mixture
    about: Array
    labels: Array
    unseen: Array
    again: Array
    running: Array
    n_iter: Array
    status: Array


def _local_cem(
    x: Array,
    weight: Array | None,
    starts: Mixture,
    problem: Problem,
    limits: Limits,
    *,
    axes: tuple[str, ...],
) -> Solution:
    """Run CEM on the points of one device, together with all others."""
    weight = jnp.ones(x.shape[0], x.dtype) if weight is None else weight
    points, spread = _prepared(x, weight, axes)
    n, m = x.shape[0], starts.weights.shape[0]
    whole = _whole(points, axes)
    least = 4 * jnp.finfo(x.dtype).tiny
    floor = rounding_variance(spread)
    if limits.min_variance is not None:
        floor = jnp.maximum(jnp.asarray(limits.min_variance, x.dtype), least)
    # Not points.x, where rows of weight 0 are silenced: they get the label that is theirs, too.
    everything = x - points.shift

    def passed(mixtures: Mixture, about: Array) -> tuple[Sums, Array, Array]:
        return pass_sums(everything, points.weight, mixtures, about, problem)

    def iterate(carry: _Carry) -> _Carry:
        sums, labels, _ = passed(carry.mixtures, carry.about)
        different = ((labels != carry.labels) & (points.weight > 0)).any(axis=1)
        sums, changed = _joined(sums, different, axes)
        moments, precise = moments_about(sums, carry.about, floor)
        again = ~precise & ~carry.again
        mixtures = jax.vmap(lambda one: _mixture(one, whole, floor, problem))(moments)
        # The means that the user will see, rounded in the user's units.
        mixtures = shift_means(shift_means(mixtures, points.shift), -points.shift)
        return _advanced(carry, _Step(mixtures, moments.mean, labels, changed, again), limits)

    starts = problem.constrained(starts)
    valid = is_valid(starts, problem)
    first = shift_means(starts, -points.shift)
    carry = _Carry(
        mixtures=first,
        about=first.means,
        labels=jnp.zeros((m, n), jnp.int32),
        unseen=jnp.ones(m, bool),
        again=jnp.zeros(m, bool),
        running=valid & (jnp.asarray(limits.max_iter) > 0),
        n_iter=jnp.zeros(m, jnp.int32),
        status=jnp.full(m, Status.MAX_ITER, jnp.int32),
    )
    carry = lax.while_loop(lambda carry: carry.running.any(), iterate, carry)

    mixtures = shift_means(carry.mixtures, points.shift)
    final = shift_means(mixtures, -points.shift)
    sums, labels, costs = passed(final, final.means)
    joined = lax.psum(jnp.concatenate([costs[:, None], sums.size], axis=1), axes)
    cost, sizes = joined[:, 0], joined[:, 1:]
    # Sums of fractional weights round: a size that is short by rounding alone is enough.
    enough = limits.min_size * (1 - 16 * jnp.finfo(x.dtype).eps)
    status = jnp.where(sizes.min(axis=1) < enough, Status.INADMISSIBLE, carry.status)
    status = jnp.where(jnp.isfinite(cost) & valid, status, Status.NONFINITE)

    def solution(mixture: Mixture, labels: Array, cost: Array, status: Array, n: Array) -> Solution:
        return Solution(mixture=mixture, labels=labels, cost=cost, status=status, n_iter=n)

    return jax.vmap(solution)(mixtures, labels, cost, status, carry.n_iter)


def _prepared(x: Array, weight: Array, axes: tuple[str, ...]) -> tuple[Points, Array]:
    """Return the points with the shift of all of them, and how far all of them spread."""
    low, high = numerics.feature_range(x, weight)
    low, minus_high = lax.pmin(jnp.stack([low, -high]), axes)
    return numerics.shifted(x, weight, low, -minus_high), (-minus_high - low).max()


def _whole(points: Points, axes: tuple[str, ...]) -> Moments:
    """Return the moments of all points as one cluster."""

    def total(rows: Array) -> Array:
        return lax.psum(numerics.blocked_sum(rows), axes)

    weight = points.weight[:, None]
    sums = total(jnp.concatenate([weight * points.x, weight], axis=1))
    size, centre = sums[-1], sums[:-1] / sums[-1]
    difference = points.x - centre
    square = (difference * difference).sum(axis=1, keepdims=True)
    sums = total(weight * jnp.concatenate([difference, square], axis=1))
    drift, scatter = sums[:-1] / size, sums[-1]
    scatter = jnp.maximum(scatter - size * (drift * drift).sum(), 0)
    return Moments(size[None], (centre + drift)[None], scatter[None])


def _joined(sums: Sums, different: Array, axes: tuple[str, ...]) -> tuple[Sums, Array]:
    """Return the sums over all devices, and whether a label has changed on any: one all-reduce."""
    parts = [sums.size, sums.drift, sums.square, different[:, None].astype(sums.size.dtype)]
    m = sums.size.shape[0]
    flat = lax.psum(jnp.concatenate([part.reshape(m, -1) for part in parts], axis=1), axes)
    ends = itertools.accumulate(part[0].size for part in parts[:-1])
    size, drift, square, changed = jnp.split(flat, list(ends), axis=1)
    return Sums(size, drift.reshape(sums.drift.shape), square), changed[:, 0] > 0


def _mixture(moments: Moments, whole: Moments, floor: Array, problem: Problem) -> Mixture:
    return problem.mixture(fill_empty(moments, whole), floor)


class _Step(NamedTuple):
    """What a pass has found for every start; `again` where it has to be repeated."""

    mixtures: Mixture
    means: Array
    labels: Array
    changed: Array
    again: Array


def _advanced(carry: _Carry, step: _Step, limits: Limits) -> _Carry:
    """Decide, for every start, what the pass means: repeat it, go on, or stop."""
    changed = carry.unseen | step.changed
    finite = jax.vmap(is_finite)(step.mixtures)
    again = carry.running & changed & finite & step.again
    taken = carry.running & changed & finite & ~again
    n_iter = carry.n_iter + taken.astype(jnp.int32)
    converged = carry.running & ~changed
    broken = carry.running & changed & ~finite
    over = converged | broken | (taken & (n_iter >= limits.max_iter))
    status = jnp.where(converged, Status.CONVERGED, carry.status)

    def choose(mask: Array, new: Any, old: Any) -> Any:
        return jax.tree.map(
            lambda new, old: jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old), new, old
        )

    mixtures = choose(taken, step.mixtures, carry.mixtures)
    return _Carry(
        mixtures=mixtures,
        about=choose(again, step.means, mixtures.means),
        labels=step.labels,
        # What is repeated was a change.
        unseen=again,
        again=again,
        running=carry.running & ~over,
        n_iter=n_iter,
        status=jnp.where(broken, Status.NONFINITE, status).astype(jnp.int32),
    )
