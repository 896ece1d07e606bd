"""Sums over chunks lose nothing to the number of chunks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcmle.stream.totals import Total

PRECISIONS = ("float32",)


def total_of(parts):
    total = Total()
    for part in parts:
        total.add(part)
    return total.value


@settings(deadline=None)
@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=200))
def test_a_total_is_that_of_exact_arithmetic_rounded(values):
    size = math.fsum(abs(value) for value in values)
    # Twice the digits: what is left of the rounding counts only where all but 1e-27 cancels.
    bound = 2.0**-52 * abs(math.fsum(values)) + len(values) ** 2 * 2.0**-104 * size
    assert abs(float(total_of(values)) - math.fsum(values)) <= bound + 1e-300


def test_many_small_parts_do_not_vanish():
    parts = [np.array([1.0, 1e16])] + [np.array([1e-16, 1.0])] * 10_000
    np.testing.assert_array_equal(total_of(parts), [1.0 + 1e-12, 1e16 + 1e4])
    # Without compensation nothing of them is left.
    np.testing.assert_array_equal(sum(parts), [1.0, 1e16])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([1.0, np.inf, 2.0], np.inf),
        ([np.inf, -np.inf], np.nan),
        ([1.0, np.nan, 2.0], np.nan),
        ([1e308, 1e308], np.inf),
    ],
)
def test_what_is_not_finite_shows(parts, expected):
    np.testing.assert_equal(total_of([np.array([part]) for part in parts]), np.array([expected]))


def test_parts_of_single_precision_are_added_in_double():
    assert total_of([np.float32(2.0**24), np.float32(1)]) == 2.0**24 + 1
