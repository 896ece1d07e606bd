"""The population search: one round of it, as one compiled pass.

A round makes as many children as there are solutions. They begin as starts or by crossover; CEM
refines them; each gives up a cluster and splits another, which is kept if it is better; and batches
of single-point moves bring them near their end. Of parents and children the best are kept, one of
any that cost the same.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.candidates.seeding import drawn_mixture
from jaxcmle.problem.objective import hide_missing
from jaxcmle.problem.placement import split_stack
from jaxcmle.problem.types import Mixture, Problem, Solution
from jaxcmle.refine.improve import improve, move_until_done
from jaxcmle.refine.polish import Limits, ready, settle
from jaxcmle.refine.tempered import tempered_em
from jaxcmle.refine.variation import crossover, swap, swap_keys
from jaxcmle.refine.workspace import (
    Partitions,
    Workspace,
    fitted,
    is_behind,
    is_better,
    partitions_of,
    select_each,
)
from jaxcmle.solve.effort import StartMethod, to_seed_method

__all__ = ["make_starts", "next_round", "numbered", "outcome", "workspace"]

# Batches of moves for a child.
MAX_PASSES = 4
# How often a child gives up a cluster for another.
SWAPS = 1
# Solutions whose costs differ by less than so many nats (or roundings) are the same.
TWINS = 0.5
TWIN_ROUNDINGS = 8

# Soft EM for starts: iterations at temperature 1, or falling from there.
SOFT = (1.0,) * 6
FALLING = tuple(0.8**i for i in range(10))


@partial(jax.jit, static_argnames=("batch", "mesh"))
def workspace(
    x: Array,
    weight: Array,
    exists: Array,
    limits: Limits,
    problem: Problem,
    batch: str | None = None,
    mesh: Mesh | None = None,
) -> Workspace:
    """Return the points made ready for a search."""
    return ready(numerics.prepare(x, weight), exists, limits, problem, batch, mesh)


@partial(jax.jit, static_argnames=("count", "method"))
def make_starts(
    key: Array,
    number: ArrayLike,
    space: Workspace,
    count: int,
    method: StartMethod,
    problem: Problem,
) -> Mixture:
    """Return a stack of mixtures to start from; `number` is that of the group."""
    seeding = to_seed_method(method)
    keys = jax.random.split(jax.random.fold_in(key, number), count)
    temperatures = jnp.array(SOFT if method == "em" else FALLING, space.points.x.dtype)

    def some(shared: tuple[Workspace, Problem, Array], keys: Array) -> Mixture:
        space, problem, temperatures = shared

        def one(key: Array) -> Mixture:
            return drawn_mixture(key, space.points, space.exists, seeding)

        def softly(mixture: Mixture) -> Mixture:
            mixture = problem.constrained(mixture)
            mixture = hide_missing(mixture, space.exists)
            return tempered_em(
                space.points, mixture, problem, temperatures, space.floor, space.exists
            )

        mixtures = jax.vmap(one)(keys)
        return jax.vmap(softly)(mixtures) if method in ("em", "annealed") else mixtures

    return split_stack(some, space.mesh, (space, problem, temperatures), keys)


@jax.jit
def next_round(
    key: Array,
    number: ArrayLike,
    space: Workspace,
    population: Partitions,
    starts: Mixture,
    seeded: ArrayLike,
    max_iter: ArrayLike,
    problem: Problem,
) -> Partitions:
    """Return the population after a round, the best first.

    Args:
        key: for all that is drawn in a search.
        number: of the round.
        space: the points.
        population: m solutions.
        starts: m mixtures in the coordinates of the workspace.
        seeded: whether children begin as those, or by crossover.
        max_iter: iterations of CEM for a child, at most.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
    """
    m = population.labels.shape[0]

    def stage(i: Array, children: Partitions) -> Partitions:
        own = jax.random.fold_in(jax.random.fold_in(key, number), i)
        first = i == 0
        passes = jnp.where(i == SWAPS, MAX_PASSES, 0)

        def fresh() -> Mixture:
            parents = fitted(space, population.moments, problem)
            crossed = crossover(own, parents, space.exists)
            return jax.tree.map(partial(jnp.where, seeded), starts, crossed)

        begun = lax.cond(first, fresh, lambda: starts)
        keys = swap_keys(own, m)
        shared = (space, problem, max_iter, passes, first)
        return split_stack(_next_children, space.mesh, shared, begun, keys, children)

    children = lax.fori_loop(0, SWAPS + 1, stage, population)
    return _best(population, children)


def _next_children(shared: Any, begun: Mixture, keys: Array, children: Partitions) -> Partitions:
    """Return children after a stage: made from mixtures that have begun, or by a swap."""
    space, problem, max_iter, passes, first = shared
    mixtures, possible = lax.cond(
        first,
        lambda: (begun, jnp.ones(len(begun.weights), bool)),
        lambda: swap(keys, space, children, problem),
    )
    new = improve(space, mixtures, children, problem, max_iter, passes)
    return select_each(possible & (first | is_better(new.rank, children.rank)), new, children)


def _best(parents: Partitions, children: Partitions) -> Partitions:
    """Return the best of both stacks, as many as there are parents, best first.

    A solution that is not better than another with nearly the same cost comes after all others.
    Ranks by comparing all with all: a sort takes longer to compile than the rest of it to run.
    """
    m = parents.labels.shape[0]
    both = jax.tree.map(lambda *stacks: jnp.concatenate(stacks), parents, children)
    this = jax.tree.map(lambda leaf: leaf[:, None], both.rank)
    other = jax.tree.map(lambda leaf: leaf[None, :], both.rank)
    behind = is_behind(both.rank)
    rounding = TWIN_ROUNDINGS * jnp.finfo(other.cost.dtype).eps * jnp.abs(other.cost)
    near = jnp.abs(this.cost - other.cost) <= jnp.maximum(TWINS, rounding)
    alike = (this.shortage == other.shortage) & (this.flaws == other.flaws) & near
    # Places that are still empty come after twins, as those are better.
    twin = (behind & alike).any(axis=1) | jnp.isinf(both.rank.shortage)
    behind = jnp.where(twin[:, None] == twin[None, :], behind, twin[:, None])
    place = jnp.arange(2 * m, dtype=jnp.int32)
    order = jnp.zeros(2 * m, jnp.int32).at[behind.sum(axis=1)].set(place)
    return jax.tree.map(lambda leaf: leaf[order[:m]], both)


@jax.jit
def outcome(
    space: Workspace,
    labels: Array,
    problem: Problem,
    status: ArrayLike,
    n_iter: ArrayLike,
    max_passes: ArrayLike,
) -> Solution:
    """Return the solution of one partition, exactly, after so many batches of moves."""
    start = partitions_of(space, labels[None], len(space.exists), problem)
    end, _, _ = move_until_done(space, start, problem, max_passes)
    return numbered(settle(space, end.labels[0], problem, status, n_iter), space.points.weight)


@jax.jit
def numbered(solution: Solution, weight: Array | None) -> Solution:
    """Return the solution with clusters in the order of their first points; empty ones are last.

    A search may come to the same partition by several ways, and number its clusters in as many.
    """
    labels = solution.labels
    n, k = labels.shape[0], solution.mixture.weights.shape[0]
    place = jnp.arange(n, dtype=jnp.int32)
    if weight is not None:
        place = jnp.where(weight > 0, place, n)
    mine = labels[None, :] == jnp.arange(k, dtype=jnp.int32)[:, None]
    order = jnp.argsort(jnp.where(mine, place, n).min(axis=1))
    number = jnp.zeros(k, jnp.int32).at[order].set(jnp.arange(k, dtype=jnp.int32))
    mixture = jax.tree.map(lambda leaf: leaf[order], solution.mixture)
    return dataclasses.replace(solution, mixture=mixture, labels=number[labels])
