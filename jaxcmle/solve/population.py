"""The population search: one round of it, as one compiled pass.

A round makes as many children as there are solutions. They begin as starts or by crossover; CEM
refines them; each gives up a cluster and splits another, which is kept if it is better; and batches
of single-point moves bring them near their end. Of parents and children the best are kept, one of
any that cost the same.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.candidates.seeding import seed
from jaxcmle.problem.objective import shift_means
from jaxcmle.problem.types import Mixture, Problem, Solution
from jaxcmle.refine.improve import improve, no_partitions
from jaxcmle.refine.polish import Limits, ready, settle, variance_limits
from jaxcmle.refine.tempered import tempered_em
from jaxcmle.refine.variation import crossover, swap
from jaxcmle.refine.workspace import (
    Partitions,
    Workspace,
    fitted,
    is_better,
    partitions_of,
    select_each,
)
from jaxcmle.solve.effort import StartMethod, to_seed_method

__all__ = [
    "CROSS",
    "FINISH",
    "START",
    "begin",
    "evaluate",
    "make_starts",
    "next_round",
    "outcome",
]

# What the children of a round begin as.
START, CROSS, FINISH = 0, 1, 2
# Batches of moves for a child; to finish, as many as there are.
MAX_PASSES = 4
# How often a child gives up a cluster for another.
SWAPS = 1
# Solutions whose costs differ by less than so many nats (or roundings) are the same.
TWINS = 0.5
TWIN_ROUNDINGS = 8

# Soft EM for starts: iterations at temperature 1, or falling from there.
SOFT = (1.0,) * 6
FALLING = tuple(0.8**i for i in range(10))


@partial(jax.jit, static_argnames=("k", "m"))
def begin(
    x: Array, weight: Array, k: int, m: int, limits: Limits, problem: Problem
) -> tuple[Workspace, Partitions]:
    """Return the points made ready, and m places for solutions."""
    space = ready(numerics.prepare(x, weight), k, limits, problem)
    return space, no_partitions(space, m, k)


@partial(jax.jit, static_argnames=("k", "count", "method"))
def make_starts(
    key: Array,
    number: ArrayLike,
    x: Array,
    weight: Array,
    k: int,
    count: int,
    method: StartMethod,
    problem: Problem,
    limits: Limits,
) -> Mixture:
    """Return a stack of mixtures to start from; `number` is that of the group."""
    seeding = to_seed_method(method)
    mixtures = jax.vmap(lambda key: seed(key, x, k, method=seeding, sample_weight=weight))(
        jax.random.split(jax.random.fold_in(key, number), count)
    )
    if method not in ("em", "annealed"):
        return mixtures
    points = numerics.prepare(x, weight)
    floor, _ = variance_limits(points, limits.min_variance, problem)
    temperatures = jnp.array(SOFT if method == "em" else FALLING, x.dtype)

    def softly(mixture: Mixture) -> Mixture:
        mixture = problem.constrained(shift_means(mixture, -points.shift))
        mixture = tempered_em(points, mixture, problem, temperatures, floor)
        return shift_means(mixture, points.shift)

    return jax.vmap(softly)(mixtures)


@partial(jax.jit, static_argnames="k")
def evaluate(space: Workspace, labels: Array, k: int, problem: Problem) -> Partitions:
    """Return a stack of partitions from labels `[m, n]`."""
    return partitions_of(space, labels, k, problem)


@jax.jit
def next_round(
    key: Array,
    number: ArrayLike,
    space: Workspace,
    population: Partitions,
    starts: Mixture,
    kind: ArrayLike,
    max_iter: ArrayLike,
    problem: Problem,
) -> Partitions:
    """Return the population after a round, the best first.

    Args:
        key: for all that is drawn in a search.
        number: of the round.
        space: the points.
        population: m solutions.
        starts: m mixtures in the user's coordinates, for a round of starts.
        kind: START, CROSS, or FINISH, which moves single points of the best until none improves.
        max_iter: iterations of CEM for a child, at most.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
    """
    finishing = jnp.asarray(kind) == FINISH
    swaps = jnp.where(finishing, 0, SWAPS)

    def stage(i: Array, children: Partitions) -> Partitions:
        own = jax.random.fold_in(jax.random.fold_in(key, number), i)
        first = i == 0

        def fresh() -> tuple[Mixture, Array]:
            mixtures = lax.cond(
                jnp.asarray(kind) == START,
                lambda: shift_means(starts, -space.points.shift),
                lambda: crossover(own, fitted(space, population.moments, problem)),
            )
            return mixtures, jnp.ones(len(mixtures.weights), bool)

        mixtures, possible = lax.cond(first, fresh, lambda: swap(own, space, children, problem))
        passes = jnp.where(i == swaps, MAX_PASSES, 0)
        new = improve(
            space,
            mixtures,
            children,
            problem,
            jnp.where(finishing, 0, max_iter),
            jnp.where(finishing, space.points.x.shape[0], passes),
        )
        return select_each(possible & (first | is_better(new.rank, children.rank)), new, children)

    # Only the best is wanted at the end: copies of it are done when it is.
    best = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), population)
    first = jax.tree.map(partial(jnp.where, finishing), best, population)
    children = lax.fori_loop(0, swaps + 1, stage, first)
    return _best(population, children)


def _best(parents: Partitions, children: Partitions) -> Partitions:
    """Return the best of both stacks, as many as there are parents, best first.

    A solution that is not better than another with nearly the same cost comes after all others.
    Ranks by comparing all with all: a sort takes longer to compile than the rest of it to run.
    """
    m = parents.labels.shape[0]
    both = jax.tree.map(lambda *stacks: jnp.concatenate(stacks), parents, children)
    this = jax.tree.map(lambda leaf: leaf[:, None], both.rank)
    other = jax.tree.map(lambda leaf: leaf[None, :], both.rank)
    place = jnp.arange(2 * m, dtype=jnp.int32)
    behind = is_better(other, this) | (~is_better(this, other) & (place[None, :] < place[:, None]))
    rounding = TWIN_ROUNDINGS * jnp.finfo(other.cost.dtype).eps * jnp.abs(other.cost)
    near = jnp.abs(this.cost - other.cost) <= jnp.maximum(TWINS, rounding)
    alike = (this.shortage == other.shortage) & (this.flaws == other.flaws) & near
    # Places that are still empty come after twins, as those are better.
    twin = (behind & alike).any(axis=1) | jnp.isinf(both.rank.shortage)
    behind = jnp.where(twin[:, None] == twin[None, :], behind, twin[:, None])
    order = jnp.zeros(2 * m, jnp.int32).at[behind.sum(axis=1)].set(place)
    return jax.tree.map(lambda leaf: leaf[order[:m]], both)


@partial(jax.jit, static_argnames="k")
def outcome(
    space: Workspace, labels: Array, k: int, problem: Problem, status: ArrayLike, n_iter: ArrayLike
) -> Solution:
    """Return the solution of one partition, exactly."""
    return settle(space, labels, k, problem, status, n_iter)
