r"""Means by sampling and pruning (Algorithm 2 of the paper, ABS).

A state is the means found so far and the points that remain. A *sampling* step draws a few of the
remaining points and appends their mean. A *pruning* step removes the $\lceil |R| / 2 \rceil$ of
them that cost least under the means found, so that points of clusters not found yet make up more of
the rest. A candidate comes of every order of k samplings and up to p prunings, a *walk*; since the
first step samples, a walk is the number of prunings before each of the k means: non-decreasing, and
0 for the first.

Which points a pruning removes depends on the variances and weights, so that tuples of them have
means of their own. They are in the order in which the means are found, and all orders are tried.
The last component of a tuple removes nothing: for the same means all its values are scored
together.

After p prunings the number of remaining points is known, so the frontier of states is a few arrays,
one for each number of prunings, and one compiled pass takes a batch of *branches* (a repetition and
a tuple for the first k - 1 components) through all their walks.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxcmle.candidates import sampling
from jaxcmle.selection import keep_largest

__all__ = ["expand", "pruned_points", "remaining_sizes", "walk_count", "walks"]

# Features whose sum is unrolled.
UNROLLED = 16


def remaining_sizes(n: int, prunings: int) -> tuple[int, ...]:
    """Return how many of n points remain after 0, 1, ... prunings."""
    return tuple(n >> level for level in range(prunings + 1))


def walks(k: int, prunings: int) -> tuple[tuple[int, ...], ...]:
    """Return, for every walk in order, the number of prunings before each of the k means."""
    found: list[list[tuple[int, ...]]] = [[] for _ in range(k + 1)]
    complete: list[tuple[int, ...]] = []
    for level in range(prunings + 1):
        found[0] = [()] if level == 0 else []
        for j in range(1, k):
            found[j] = found[j] + [(*walk, level) for walk in found[j - 1]]
        complete += [(*walk, level) for walk in found[k - 1]]
    return tuple(complete)


def walk_count(k: int, prunings: int) -> int:
    """Return how many walks there are."""
    return math.comb(prunings + k - 1, k - 1)


def pruned_points(n: int, k: int, prunings: int) -> int:
    """Return how many points the prunings of one branch look at."""
    sizes = remaining_sizes(n, prunings)
    return sum(
        walk_count(found, level) * sizes[level]
        for found in range(1, k)
        for level in range(prunings)
    )


class _States(NamedTuple):
    """States with the same number of means and of remaining points.

    Attributes:
        means: `[q, c, b, j, d]`: q walks so far, c choices of means, b branches, j means found.
        least: `[q, c, b, r]`, the smallest cost of the remaining points.
        remaining: int32 `[q, c, b, r]`, which points those are, ascending; None for all of them.
    """

    means: Array
    least: Array
    remaining: Array | None


@partial(jax.jit, static_argnames="prunings")
def expand(
    x: Array,
    bits: Array,
    slope: Array,
    constant: Array,
    chosen: Array,
    m: Array | int,
    prunings: int,
) -> Array:
    """Return the means of all walks of some branches.

    Args:
        x: points `[n, d]`.
        bits: uint32 `[b, k, s]`, random; what is drawn in every sampling step. A step draws the
            same on every walk, from what remains there.
        slope: `[b, k - 1]`, the cost of a unit of squared distance, for all components but the
            last, in the order in which their means are found.
        constant: `[b, k - 1]`, the cost at no distance, with that of the weight.
        chosen: int32 `[c, w]`, which of the s drawn points go into each of c means. One row is
            the default; with all subsets of the draws it is superset sampling, as printed.
        m: how many of the w columns count.
        prunings: the most prunings of a walk.

    Returns:
        `[walks, c ** k, b, k, d]`. Once no points remain, the last mean is repeated.
    """
    n = x.shape[0]
    b, k, _ = bits.shape
    empty = jnp.zeros((1, 1, b, 0, x.shape[1]), x.dtype)
    nothing_known = jnp.full((1, 1, b, n), jnp.inf, x.dtype)
    # The states with 1, 2, ..., k - 1 means on a level.
    found: list[_States] = []
    complete = []
    for level, size in enumerate(remaining_sizes(n, prunings)):
        pruned = _prune(found, size)
        found = []
        here = _States(empty, nothing_known, None) if level == 0 else None
        for j in range(k - 1):
            new = None if here is None else _sample(x, here, bits[:, j], chosen, m)
            if new is not None:
                new = _with_cost(x, new, slope[:, j], constant[:, j])
            here = _joined(pruned[j] if pruned else None, new)
            found.append(here)
        if here is not None:
            complete.append(_sample(x, here, bits[:, k - 1], chosen, m).means)
    return jnp.concatenate(complete)


def _sample(x: Array, states: _States, bits: Array, chosen: Array, m: Array | int) -> _States:
    """Append the means of what is drawn from the remaining points, for each choice of them."""
    means, least, remaining = states
    q, c, b, r = least.shape
    d, new = x.shape[1], chosen.shape[0]
    if r == 0:
        mean = jnp.broadcast_to(means[:, :, None, :, -1], (q, c, new, b, d))
    else:
        place = jnp.broadcast_to(sampling.places_of(bits, r), (q, c, *bits.shape))
        index = place if remaining is None else jnp.take_along_axis(remaining, place, axis=-1)
        # One after the other, so that the sums do not depend on how branches are batched.
        total = x[index[..., chosen[:, 0]]]
        for i in range(1, chosen.shape[1]):
            total = total + jnp.where(i < m, x[index[..., chosen[:, i]]], 0)
        mean = (total / jnp.asarray(m, x.dtype)).transpose(0, 1, 3, 2, 4)

    def for_each(array: Array) -> Array:
        """Return the array of the states once for each of the new means."""
        repeated = jnp.broadcast_to(array[:, :, None], (q, c, new, *array.shape[2:]))
        return repeated.reshape(q, c * new, *array.shape[2:])

    return _States(
        jnp.concatenate([for_each(means), mean.reshape(q, c * new, b, 1, d)], axis=3),
        for_each(least),
        None if remaining is None else for_each(remaining),
    )


def _with_cost(x: Array, states: _States, slope: Array, constant: Array) -> _States:
    """Return the states with the costs under the last of their means counted in."""
    means, least, remaining = states
    mean = means[..., -1, :]
    columns = x.T

    def add(total: Array, f: Any) -> Array:
        column = columns[f]
        difference = (column if remaining is None else column[remaining]) - mean[..., f][..., None]
        return total + difference * difference

    square = jnp.zeros_like(least)
    if x.shape[1] <= UNROLLED:
        for f in range(x.shape[1]):
            square = add(square, f)
    else:
        square = lax.fori_loop(0, x.shape[1], lambda f, total: add(total, f), square)
    cost = square * slope[:, None] + constant[:, None]
    return states._replace(least=jnp.minimum(least, cost))


def _prune(found: list[_States], size: int) -> list[_States]:
    """Keep the points that cost most: of all states on a level in one go."""
    if not found:
        return []
    shapes = [states.least.shape for states in found]
    rows = [
        states.least.reshape(math.prod(shape[:-1]), shape[-1])
        for states, shape in zip(found, shapes, strict=True)
    ]
    ends = np.cumsum([len(row) for row in rows])
    kept_rows = jnp.split(keep_largest(jnp.concatenate(rows), size), ends[:-1])
    pruned = []
    for states, kept in zip(found, kept_rows, strict=True):
        kept = kept.reshape(*states.least.shape[:-1], size)
        least = jnp.take_along_axis(states.least, kept, axis=-1)
        if states.remaining is not None:
            kept = jnp.take_along_axis(states.remaining, kept, axis=-1)
        pruned.append(_States(states.means, least, kept))
    return pruned


def _joined(one: _States | None, other: _States | None) -> _States:
    if one is None or other is None:
        states = one or other
        assert states is not None
        return states
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), one, other)
