"""The larger values of a row: exactly those that a stable sort puts last, whatever the values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcmle.selection import keep_largest

ROWS = 300
SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, 1e30, -1e30)


def continuous(rng, shape):
    return rng.normal(size=shape)


def heavy(rng, shape):
    """Values of both signs over sixty orders of magnitude."""
    return rng.choice([-1.0, 1.0], size=shape) * 10.0 ** rng.uniform(-30, 30, size=shape)


def rounded(rng, shape):
    return np.round(rng.normal(size=shape))


def equal(rng, shape):
    return np.broadcast_to(rng.normal(size=(*shape[:-1], 1)), shape)


def two_valued(rng, shape):
    return rng.choice([-1.5, 2.5], size=shape)


def zeros(rng, shape):
    """0.0 and -0.0, that are equal, and a few others."""
    return rng.choice([0.0, -0.0, 0.0, -0.0, 1.0, -1.0], size=shape)


def special(rng, shape):
    return rng.choice(SPECIAL, size=shape)


def infinite(rng, shape):
    return rng.choice([np.inf, -np.inf, 0.5], size=shape)


def nan(rng, shape):
    """NaN of both signs among infinities: all of them tie with +inf."""
    return rng.choice([np.nan, -np.nan, np.inf, -np.inf], size=shape)


def neighbours(rng, shape):
    """Values that differ in their last bits only."""
    return 1 + rng.integers(-3, 4, size=shape) * 1.2e-7


def ascending(rng, shape):
    return np.sort(rng.normal(size=shape), axis=-1)


def descending(rng, shape):
    return -ascending(rng, shape)


KINDS = (
    continuous,
    heavy,
    rounded,
    equal,
    two_valued,
    zeros,
    special,
    infinite,
    nan,
    neighbours,
    ascending,
    descending,
)


def check(values, count, function=keep_largest):
    """Compare with the oracle, and return what is kept."""
    found = function(jnp.asarray(values), count)
    assert found.dtype == jnp.int32
    expected = reference.keep_largest(values, count)
    assert found.shape == expected.shape == (*values.shape[:-1], count)
    np.testing.assert_array_equal(np.asarray(found), expected)
    return found


@pytest.mark.parametrize(
    ("values", "count", "expected"),
    [
        ([3.0, 1.0, 2.0], 2, [0, 2]),
        ([1.0, 1.0, 1.0, 1.0], 1, [3]),
        ([2.0, 1.0, 2.0, 1.0, 2.0], 2, [2, 4]),
        ([2.0, 1.0, 2.0, 1.0, 2.0], 4, [0, 2, 3, 4]),
        ([0.0, -0.0], 1, [1]),
        ([-0.0, 0.0], 1, [1]),
        ([np.nan, 5.0, np.inf], 1, [2]),
        ([np.inf, 5.0, np.nan], 1, [2]),
        ([np.inf, -np.nan, 5.0], 1, [1]),
        ([-np.inf, -3.0, -2.0, -np.inf], 3, [1, 2, 3]),
        ([4.0], 1, [0]),
        ([4.0], 0, []),
        ([], 0, []),
    ],
)
def test_by_hand(values, count, expected, precision):
    values = np.array(values, precision)
    assert reference.keep_largest(values, count).tolist() == expected
    assert keep_largest(jnp.asarray(values), count).tolist() == expected


@pytest.mark.parametrize("r", [2, 3, 13, 33])
def test_exactly_those_that_a_sort_puts_last(r, precision):
    rng = np.random.default_rng(r)
    values = np.concatenate([kind(rng, (ROWS, r)) for kind in KINDS]).astype(precision)
    for count in {1, r // 2, r - 1}:
        check(values, count)


@pytest.mark.parametrize("r", [1, 5])
def test_every_count(r, precision):
    rng = np.random.default_rng(10 + r)
    values = np.concatenate([kind(rng, (40, r)) for kind in KINDS]).astype(precision)
    for count in range(r + 1):
        check(values, count)


def test_every_order_of_a_few_values(precision):
    # All rows of four out of these: 0.0 and -0.0 tie, and so do NaN and +inf.
    grid = np.meshgrid(*[[-np.inf, -2.0, -0.0, 0.0, np.inf, np.nan]] * 4, indexing="ij")
    values = np.stack(grid, axis=-1).reshape(-1, 4).astype(precision)
    for count in (1, 2, 3):
        check(values, count)


def test_halved_down_to_the_empty_set(precision):
    # As a pruning does: ceil(r/2) of the rows' values go each time.
    rng = np.random.default_rng(1)
    values = np.concatenate([kind(rng, (20, 13)) for kind in KINDS]).astype(precision)
    rest = np.broadcast_to(np.arange(13), values.shape)
    sizes = [13]
    while rest.shape[1]:
        kept = check(np.take_along_axis(values, rest, axis=1), rest.shape[1] // 2)
        rest = np.take_along_axis(rest, np.asarray(kept), axis=1)
        # What remains is what one sort of the whole row says.
        np.testing.assert_array_equal(rest, reference.keep_largest(values, rest.shape[1]))
        sizes.append(rest.shape[1])
    assert sizes == [13, 6, 3, 1, 0]
    check(np.zeros((4, 0), precision), 0)


def test_leading_axes(precision):
    values = special(np.random.default_rng(2), (3, 5, 11)).astype(precision)
    for rows in (values, values[0], values[0, 0], values[:, :0]):
        check(rows, 4)


def test_jit_and_vmap_and_a_loop(precision):
    values = special(np.random.default_rng(3), (4, 6, 9)).astype(precision)
    kept = functools.partial(keep_largest, count=4)
    for function in (jax.jit(jax.vmap(kept)), jax.vmap(jax.vmap(kept))):
        check(values, 4, lambda rows, _, function=function: function(rows))
    swapped = jax.vmap(kept, in_axes=1, out_axes=1)
    check(values, 4, lambda rows, _: swapped(rows))
    check(values, 4, lambda rows, _: jax.lax.map(kept, rows))


@pytest.mark.parametrize(
    "kind", [continuous, rounded, heavy, special, equal], ids=lambda f: f.__name__
)
def test_long_rows(kind, precision):
    values = kind(np.random.default_rng(4), (4, 10_240)).astype(precision)
    check(values, 5120)


@pytest.mark.parametrize("count", [1, 10_240])
def test_a_long_row_kept_almost_whole_or_almost_not_at_all(count, precision):
    values = rounded(np.random.default_rng(5), (2, 10_241)).astype(precision)
    check(values, count)


def test_narrow_values_where_wide_ones_are_the_default():
    # The dtype is that of the values, not the default.
    values = special(np.random.default_rng(6), (50, 17)).astype(np.float32)
    check(values, 8)


def test_the_largest_and_the_smallest_numbers(precision):
    limits = np.finfo(precision)
    few = [limits.max, -limits.max, limits.tiny, -limits.tiny, 0.0, np.inf, -np.inf]
    values = np.random.default_rng(7).choice(np.array(few, precision), size=(ROWS, 9))
    check(values, 4)


def test_subnormal_numbers_are_themselves_or_zero(precision):
    # A device may flush them to zero; then they tie with it. It does the same each time.
    rng = np.random.default_rng(8)
    smallest = np.finfo(precision).smallest_subnormal
    values = (rng.integers(-3, 4, size=(ROWS, 9)) * smallest).astype(precision)
    values[:, 0] = 1.0
    values[:, 1] = -1.0
    flushed = np.where(np.abs(values) == 1, values, 0)
    found = np.asarray(keep_largest(jnp.asarray(values), 4))
    either = [reference.keep_largest(rows, 4) for rows in (values, flushed)]
    assert any((found == expected).all() for expected in either)
    again = jax.jit(jax.vmap(functools.partial(keep_largest, count=4)))(jnp.asarray(values))
    np.testing.assert_array_equal(np.asarray(again), found)


@pytest.mark.parametrize("count", [-1, 4])
def test_no_more_than_there_are(count, precision):
    with pytest.raises(ValueError, match="cannot keep"):
        keep_largest(jnp.zeros((2, 3), precision), count)


# One shape and few counts, since every pair of them compiles.
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    row=st.lists(
        st.one_of(
            st.sampled_from(SPECIAL),
            st.integers(-2, 2).map(float),
            st.floats(width=32, allow_subnormal=False),
        ),
        min_size=7,
        max_size=7,
    ),
    count=st.sampled_from([1, 3, 6]),
)
def test_any_row(row, count, precision):
    check(np.array(row, precision), count)
