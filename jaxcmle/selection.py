"""The larger values of many rows at once, exactly.

A float's bits, read as an integer and with those of negative numbers turned around, have the order
of the floats. So the smallest value to keep is found bit by bit: every step compares and counts,
and nothing is moved. On the CPU that is several times as fast as `lax.top_k`, which sorts.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["keep_largest"]

# Places counted by one product.
BLOCK = 32


@partial(jax.jit, static_argnames="count")
def keep_largest(values: Array, count: int) -> Array:
    """Return where the `count` largest values of each row are, in ascending order.

    They are those that a stable ascending sort puts last: of equal values the first are dropped.
    NaN counts as infinity.

    Args:
        values: `[..., r]`, floats.
        count: how many to keep, from 0 to r.

    Returns:
        int32 `[..., count]`.
    """
    *rows, r = values.shape
    if not 0 <= count <= r:
        raise ValueError(f"cannot keep {count} of {r} values")
    place = jnp.arange(r, dtype=jnp.int32)
    if count in (0, r):
        return jnp.broadcast_to(place[:count], (*rows, count))
    kept = _kept(_ordered_bits(values.reshape(-1, r)), count)
    # What is not kept goes to one place more than there are, and is dropped.
    target = jnp.where(kept, _running_sum(kept.astype(jnp.float32)), 0).astype(jnp.int32)
    row = jnp.arange(kept.shape[0], dtype=jnp.int32)[:, None]
    places = jnp.zeros((kept.shape[0], count + 1), jnp.int32).at[row, target].set(place)
    return places[:, 1:].reshape(*rows, count)


def _running_sum(values: Array) -> Array:
    """Return the sums of `[b, r]` up to each place of the row; exact for counts up to 2^24.

    In blocks, by products with a triangle of ones: quicker than a cumulative sum.
    """
    b, r = values.shape
    length = min(r, BLOCK)
    blocks = -(-r // length)
    padded = jnp.pad(values, ((0, 0), (0, blocks * length - r))).reshape(b, blocks, length)
    triangle = jnp.triu(jnp.ones((length, length), values.dtype))
    inside = jnp.matmul(padded, triangle, precision=lax.Precision.HIGHEST)
    if blocks > 1:
        whole = inside[..., -1]
        inside = inside + (_running_sum(whole) - whole)[..., None]
    return inside.reshape(b, blocks * length)[:, :r]


def _ordered_bits(values: Array) -> Array:
    """Return integers in the order of the floats."""
    integer = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
    # -0.0 has other bits than 0.0, and is equal.
    values = jnp.where(values == 0, 0, jnp.where(jnp.isnan(values), jnp.inf, values))
    bits = lax.bitcast_convert_type(values, integer)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)


def _kept(bits: Array, count: int) -> Array:
    """Return which of the integers `[b, r]` are among the `count` largest of their row."""
    b, r = bits.shape
    limits = jnp.iinfo(bits.dtype)

    def largest_with(
        enough: Callable[[Array], Array], low: Array, high: Array, steps: int
    ) -> Array:
        """Return the largest number for which there are enough."""

        def halve(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = state
            # The mean rounded up, without overflow.
            middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
            fits = enough(middle[:, None])
            return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

        return lax.fori_loop(0, steps, halve, (low, high))[0][:, None]

    def number(chosen: Array) -> Array:
        return chosen.sum(axis=1, dtype=jnp.int32)

    least = largest_with(
        lambda value: number(bits >= value) >= count,
        jnp.full(b, limits.min),
        jnp.full(b, limits.max),
        limits.bits,
    )
    larger, equal = bits > least, bits == least
    place = jnp.arange(r, dtype=jnp.int32)
    missing = count - number(larger)
    first = largest_with(
        lambda value: number(equal & (place >= value)) >= missing,
        jnp.zeros(b, jnp.int32),
        jnp.full(b, r, jnp.int32),
        r.bit_length(),
    )
    return larger | (equal & (place >= first))
