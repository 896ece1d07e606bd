"""A whole search as a state that one round after the other moves on.

There are several searches, each with starts of its own, which end when some rounds in a row find
nothing better. If enough of them agree, that is the answer; if not, the best of all meet in a last
one. All decisions are made on the device: `fit` looks on from the host and can stop at any round;
many instances at once run without anybody looking.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle.problem.types import Mixture, Problem
from jaxcmle.refine.improve import no_partitions
from jaxcmle.refine.workspace import (
    Partitions,
    Rank,
    Workspace,
    has_few_points,
    is_behind,
    is_better,
    partitions_of,
)
from jaxcmle.solve.effort import Effort
from jaxcmle.solve.population import next_round

__all__ = ["Pace", "Search", "advance", "begin", "ended", "pace_of"]

# Iterations of CEM for a child. Where clusters of few points have a minimum size, CEM leaves good
# partitions: then every second round has one iteration, and single-point moves do the rest.
MAX_ITER = 30
# What counts as better, relative to the cost.
VISIBLE = 1e-7
# What two searches may differ by, relative to the cost, to have found the same.
AGREE = 2e-6


class Pace(NamedTuple):
    """What of an `Effort` changes no shape.

    Attributes:
        rounds: at most.
        patience: rounds without a better solution that end a search.
        agreeing: searches that have to agree.
        groups: of starts, for each search.
    """

    rounds: ArrayLike
    patience: ArrayLike
    agreeing: ArrayLike
    groups: ArrayLike


class Search(NamedTuple):
    """How far a search has come.

    Attributes:
        population: m solutions, the best first.
        found: the populations `[r, m]` of the searches that have ended, `searches` of them.
        searches: how many searches have ended.
        best: the rank to beat.
        stale: rounds since something better was found.
        groups: of starts that are still to come in this search.
        seedings: groups of starts so far, in all searches.
        rounds: so far.
        meeting: whether this is the last search, without starts.
        finished: whether there is nothing more to do.
    """

    population: Partitions
    found: Partitions
    searches: Array
    best: Rank
    stale: Array
    groups: Array
    seedings: Array
    rounds: Array
    meeting: Array
    finished: Array


def pace_of(effort: Effort) -> Pace:
    """Return what of an effort changes no shape."""
    groups = -(-effort.starts // effort.population)
    return Pace(effort.rounds, effort.patience, effort.agreeing, groups)


@partial(jax.jit, static_argnames=("m", "restarts"))
def begin(
    space: Workspace,
    known: Array | None,
    m: int,
    restarts: int,
    pace: Pace,
    problem: Problem,
) -> Search:
    """Return a search for m solutions that has not begun, but for labels `[n]` that are known."""
    k = len(space.exists)
    population = no_partitions(space, m, k)
    found = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (restarts, *leaf.shape)), population)
    if k == 1:
        # Nothing to search for.
        known = jnp.zeros(space.points.x.shape[0], jnp.int32)
    if known is not None:
        first = partitions_of(space, known[None], k, problem)
        population = jax.tree.map(lambda new, old: old.at[0].set(new[0]), first, population)
    zero = jnp.int32(0)
    return Search(
        population=population,
        found=found,
        searches=zero,
        best=_first(population.rank),
        stale=zero,
        groups=jnp.asarray(pace.groups, jnp.int32),
        seedings=zero,
        rounds=zero,
        meeting=jnp.array(False),
        finished=jnp.array(k == 1),
    )


@jax.jit
def advance(
    key: Array, search: Search, space: Workspace, starts: Mixture, pace: Pace, problem: Problem
) -> Search:
    """Return the search after one more round; `starts` count if there are groups to come."""
    seeded = search.groups > 0
    max_iter = jnp.where(has_few_points(space) & (search.rounds % 2 == 1), 1, MAX_ITER)
    population = next_round(
        key, search.rounds, space, search.population, starts, seeded, max_iter, problem
    )
    rank = _first(population.rank)
    visible = rank._replace(cost=rank.cost + VISIBLE * jnp.abs(rank.cost))
    stale = jnp.where(is_better(visible, search.best) | seeded, 0, search.stale + 1)
    better = is_better(rank, search.best)
    search = search._replace(
        population=population,
        best=jax.tree.map(partial(jnp.where, better), rank, search.best),
        stale=stale,
        groups=jnp.maximum(search.groups - 1, 0),
        seedings=search.seedings + seeded.astype(jnp.int32),
        rounds=search.rounds + 1,
    )
    over = (search.rounds >= pace.rounds) | (stale >= pace.patience)
    return lax.cond(over, lambda: _next_search(search, space, pace), lambda: search)


@jax.jit
def ended(search: Search) -> Partitions:
    """Return the best solutions of a search that is stopped, the best first."""
    on_its_own = ~(search.finished | search.meeting)
    union = _union(_kept(search))
    return jax.tree.map(partial(jnp.where, on_its_own), union, search.population)


def _next_search(search: Search, space: Workspace, pace: Pace) -> Search:
    """Go on where a search has ended: with another one, a last one, or not at all."""
    m, k = search.population.moments.size.shape
    restarts = search.found.labels.shape[0]
    kept = _kept(search)
    # Rounds on few points cost next to nothing, and their searches agree on what is not optimal.
    enough = (_agreeing(kept) >= pace.agreeing) & ~has_few_points(space)
    left = search.rounds < pace.rounds
    more = left & ~enough & (kept.searches < restarts) & ~search.meeting
    meeting = left & ~enough & (kept.searches > 1) & ~more & ~search.meeting
    last = jax.tree.map(partial(jnp.where, search.meeting), search.population, _union(kept))
    population = jax.tree.map(partial(jnp.where, more), no_partitions(space, m, k), last)
    return search._replace(
        population=population,
        found=kept.found,
        searches=kept.searches,
        best=_first(population.rank),
        stale=jnp.int32(0),
        groups=jnp.where(more, pace.groups, 0).astype(jnp.int32),
        meeting=meeting,
        finished=~more & ~meeting,
    )


def _kept(search: Search) -> Search:
    """Return the search with its population among those that have ended."""
    found = jax.tree.map(
        lambda all_, new: all_.at[search.searches].set(new, mode="drop"),
        search.found,
        search.population,
    )
    restarts = search.found.labels.shape[0]
    return search._replace(found=found, searches=jnp.minimum(search.searches + 1, restarts))


def _first(rank: Rank) -> Rank:
    """Return the rank of the first solution, which is the best."""
    return jax.tree.map(lambda leaf: leaf[0], rank)


def _agreeing(search: Search) -> Array:
    """Return how many of the searches that have ended have found the best, to rounding."""
    rank = jax.tree.map(lambda leaf: leaf[:, 0], search.found.rank)
    restarts = rank.cost.shape[0]
    counts = jnp.arange(restarts, dtype=jnp.int32) < search.searches
    # Places without a search are worse than any.
    leader = jnp.argmin(is_behind(rank).sum(axis=1))
    limit = jax.tree.map(lambda leaf: leaf[leader], rank)
    limit = limit._replace(cost=limit.cost + AGREE * jnp.abs(limit.cost))
    return (counts & ~is_better(limit, rank)).sum()


def _union(search: Search) -> Partitions:
    """Return the best of the searches that have ended, about as many of each, in one population.

    The best of each are taken first, then the second best of each, and so on; then all are ordered.
    """
    m = search.population.labels.shape[0]
    turn = jnp.arange(m, dtype=jnp.int32)
    of_search, place = turn % search.searches, turn // search.searches
    mixed = jax.tree.map(lambda leaf: leaf[of_search, place], search.found)
    order = jnp.zeros(m, jnp.int32).at[is_behind(mixed.rank).sum(axis=1)].set(turn)
    return jax.tree.map(lambda leaf: leaf[order], mixed)
