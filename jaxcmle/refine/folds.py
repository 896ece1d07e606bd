"""Sums over the points of many instances at once, lanes last, that a CPU does along the lanes."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxcmle import numerics

__all__ = ["Part", "branches_of", "fold"]

# Sums over tiles of points, and over such sums, have no more terms than this.
MOST_BRANCHES = 32

Combine = Callable[[Array, Array], Array]
REDUCTIONS: dict[Combine, Callable[[Array], Array]] = {
    jnp.add: numerics.blocked_sum,
    jnp.minimum: partial(jnp.min, axis=0),
    jnp.maximum: partial(jnp.max, axis=0),
    jnp.logical_and: partial(jnp.all, axis=0),
    jnp.logical_or: partial(jnp.any, axis=0),
}


class Part(NamedTuple):
    """Something to be summed, or combined otherwise, over the points."""

    term: Callable[..., Array]
    arrays: tuple[Array, ...]
    combine: Combine


def branches_of(n: int, tile: int) -> tuple[int, ...]:
    """Return how many values go into one at each level of the sums over n points, or nothing.

    Their product is at least n, and little more: so many points there are with padding.
    """
    if tile >= n:
        return ()
    groups = -(-n // tile)
    # Rows a power of two apart share few places in a cache: twice the time, or more.
    groups += groups % 16 == 0
    levels = math.ceil(math.log(groups, MOST_BRANCHES)) if groups > 1 else 0
    upper = []
    for level in range(levels, 0, -1):
        upper.append(math.ceil(groups ** (1 / level) - 1e-9))
        groups = -(-groups // upper[-1])
    return (tile, *upper)


def fold(parts: Sequence[Part], branches: tuple[int, ...], busy: Array | None) -> tuple[Array, ...]:
    """Combine the terms of the points, the leading axis, for each of several parts.

    As trees whose nodes are written out: the CPU then works along the lanes, which it does not in
    a reduction. Such sums need no compensation either.
    """
    if not branches:
        return tuple(REDUCTIONS[part.combine](part.term(*part.arrays)) for part in parts)

    def level(*values: Array, branches: int) -> tuple[Array, ...]:
        return tuple(
            _combined(lambda value: value, (value,), branches, part.combine)
            for part, value in zip(parts, values, strict=True)
        )

    values = tuple(_combined(*part[:2], branches[0], part.combine) for part in parts)
    for number in branches[1:]:
        values = numerics.apart(partial(level, branches=number), busy, *values)
    return tuple(value[0] for value in values)


def _combined(
    term: Callable[..., Array], arrays: tuple[Array, ...], number: int, combine: Combine
) -> Array:
    """Combine the terms of every so many points in a row."""
    groups = [array.reshape(-1, number, *array.shape[1:]) for array in arrays]
    total = term(*(group[:, 0] for group in groups))
    for point in range(1, number):
        total = combine(total, term(*(group[:, point] for group in groups)))
    return total
