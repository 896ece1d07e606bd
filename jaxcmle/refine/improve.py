"""A population of partitions made better: Classification EM, then single-point moves."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle.numerics import Moments
from jaxcmle.problem.types import Mixture, Problem
from jaxcmle.refine.exchange import exchanged
from jaxcmle.refine.moves import moved
from jaxcmle.refine.workspace import (
    Partitions,
    Rank,
    Workspace,
    anywhere,
    fitted,
    is_better,
    labels_of,
    partitions_of,
    select_each,
)

__all__ = ["improve", "move_until_done", "no_partitions"]

CEM, MOVES, DONE = 0, 1, 2


class _Carry(NamedTuple):
    phase: Array
    step: Array
    live: Array
    mixtures: Mixture
    partitions: Partitions


def no_partitions(space: Workspace, m: int, k: int) -> Partitions:
    """Return a stack of m places for partitions, each worse than any."""
    (n, d), dtype = space.points.x.shape, space.points.x.dtype
    worst = jnp.full(m, jnp.inf, dtype)
    moments = Moments(
        jnp.zeros((m, k), dtype), jnp.zeros((m, k, d), dtype), jnp.zeros((m, k), dtype)
    )
    rank = Rank(worst, jnp.full(m, k + 1, jnp.int32), worst)
    return Partitions(jnp.full((m, n), -1, jnp.int32), moments, rank)


def improve(
    space: Workspace,
    mixtures: Mixture,
    partitions: Partitions,
    problem: Problem,
    max_iter: ArrayLike,
    max_passes: ArrayLike,
) -> Partitions:
    """Return partitions made from a stack of mixtures.

    CEM goes first, from the mixtures, until no label changes or for `max_iter` iterations, which is
    1 or more; then batches of moves, until none improves or for `max_passes`. One loop for both:
    its body has the moments once, and so takes half as long to compile.

    A partition that a step leaves as it is takes no part in the rest of the phase: what becomes of
    it does not depend on how long the others take, in this search or in one that runs with it.
    """
    m, k = mixtures.weights.shape

    def step(carry: _Carry) -> _Carry:
        phase, steps, live, mixtures, old = carry
        labels = lax.cond(
            phase == CEM,
            lambda: labels_of(space, mixtures, problem),
            lambda: _moved(space, old, problem, False),
        )
        new = partitions_of(space, labels, k, problem)
        changed = ((labels != old.labels) & (space.points.weight > 0)).any(axis=1)
        limit = jnp.where(phase == CEM, max_iter, max_passes)
        taken = live & (steps < limit) & changed & ((phase == CEM) | is_better(new.rank, old.rank))
        partitions = select_each(taken, new, old)
        steps = steps + 1
        over = ~anywhere(space, taken & (steps < limit))
        following = jnp.where(phase == CEM, MOVES, DONE)
        return _Carry(
            phase=jnp.where(over, following, phase).astype(jnp.int32),
            step=jnp.where(over, 0, steps),
            live=taken | over,
            mixtures=fitted(space, partitions.moments, problem),
            partitions=partitions,
        )

    last = jnp.where(anywhere(space, jnp.asarray(max_passes) > 0), MOVES, CEM)
    first = _Carry(jnp.int32(CEM), jnp.int32(0), jnp.ones(m, bool), mixtures, partitions)
    return lax.while_loop(lambda carry: carry.phase <= last, step, first).partitions


def move_until_done(
    space: Workspace, partitions: Partitions, problem: Problem, max_passes: ArrayLike
) -> tuple[Partitions, Array, Array]:
    """Return the partitions after batches of moves, how many there were, and whether none is left.

    The rank never becomes worse.
    """
    k = partitions.moments.size.shape[1]

    def step(carry: tuple[Partitions, Array, Array]) -> tuple[Partitions, Array, Array]:
        old, count, _ = carry
        new = partitions_of(space, _moved(space, old, problem, True), k, problem)
        taken = is_better(new.rank, old.rank)
        return select_each(taken, new, old), count + 1, taken.any()

    def unfinished(carry: tuple[Partitions, Array, Array]) -> Array:
        _, count, going = carry
        return going & (count < max_passes)

    first = (partitions, jnp.int32(0), jnp.array(True))
    partitions, count, going = lax.while_loop(unfinished, step, first)
    return partitions, count, ~going


def _moved(space: Workspace, partitions: Partitions, problem: Problem, last: ArrayLike) -> Array:
    """Return the labels after a batch of moves, or after an exchange where no move is left."""
    labels = moved(space, partitions, problem)
    stuck = (labels == partitions.labels).all(axis=1)
    swapped = exchanged(space, partitions, stuck, problem, last)
    return jnp.where(stuck[:, None], swapped, labels)
