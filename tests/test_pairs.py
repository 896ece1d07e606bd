"""Sorted columns and running sums are those of NumPy, whichever way they are computed."""

import jax
import numpy as np
import pytest
from jax import export

from jaxcmle.problem import pairs

# One, both sides of powers of two, and far from them.
LENGTHS = (1, 2, 3, 4, 7, 8, 9, 16, 33, 100, 129)


def columns(n, width, dtype, seed=0):
    """Return numbers with ties, zeros and infinities, all in one column too."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, max(2, n), size=(n, width)).astype(dtype) / 7
    values[rng.random((n, width)) < 0.2] = np.inf
    values[:, 0], values[:, -1] = np.inf, 0
    return values


@pytest.mark.parametrize("n", LENGTHS)
def test_columns_are_sorted(n, precision):
    for width in (1, pairs.FEW_COLUMNS):
        values = columns(n, width, precision)
        actual = jax.jit(pairs.sorted_columns)(values)
        assert actual.dtype == precision
        np.testing.assert_array_equal(actual, np.sort(values, axis=0))


def test_all_ways_to_sort_agree(precision, monkeypatch):
    """One network for every order of zeros and ones proves it for all numbers (Knuth)."""
    n = 10
    every = (np.arange(2**n) >> np.arange(n)[:, None]) & 1
    np.testing.assert_array_equal(jax.jit(pairs._sort_by_network)(every), np.sort(every, axis=0))
    values = columns(45, 30, precision)
    by_network = jax.jit(jax.vmap(pairs.sorted_columns))(np.stack([values, values[::-1]]))
    rows, ones = jax.jit(lambda rows: pairs.sorted_rows(rows, None))(values.T)
    np.testing.assert_array_equal(rows, np.sort(values.T, axis=1))
    assert (ones == 1).all()
    monkeypatch.setattr(pairs, "NETWORK_POINTS", 44)
    by_rows = pairs.sorted_columns(values)
    np.testing.assert_array_equal(by_network, np.stack([by_rows, by_rows]))


def test_derivatives_of_the_sort(precision):
    rng = np.random.default_rng(1)
    values, tangent = rng.random((2, 40, 30)).astype(precision)
    _, actual = jax.jvp(pairs.sorted_columns, (values,), (tangent,))
    np.testing.assert_array_equal(
        actual, np.take_along_axis(tangent, np.argsort(values, axis=0), axis=0)
    )
    gradient = jax.grad(lambda values: (pairs.sorted_columns(values)[:3]).sum())(values)
    np.testing.assert_array_equal(gradient, values <= np.sort(values, axis=0)[2])


@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
def test_the_sort_lowers_for_accelerators(platform, precision):
    program = export.export(jax.jit(pairs.sorted_columns), platforms=[platform])
    module = program(jax.ShapeDtypeStruct((40, 30), precision)).mlir_module()
    assert "stablehlo.sort" in module
    assert "stablehlo.maximum" not in module


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 33, 300])
def test_running_sums(n, precision):
    values = np.random.default_rng(n).random((n, 3)).astype(precision)
    exact = np.cumsum(values.astype(np.longdouble), axis=0)
    sums = np.asarray(jax.jit(pairs.running_sums)(values))
    error = np.abs(sums / exact - 1).max()
    assert error <= np.ceil(np.log2(n + 1)) * np.finfo(precision).eps
    values[-1] = np.inf
    assert np.isfinite(pairs.running_sums(values)[:-1]).all()


@pytest.mark.parametrize("size", [0.0, 0.25, 1.0, 3.0, 3.5, 7.75, 8.0])
def test_sum_of_first_equals_first_sums(size, precision):
    ordered = np.sort(np.random.default_rng(0).random((8, 5)), axis=0).astype(precision)
    given = np.asarray(size, precision)
    actual = jax.jit(pairs.sum_of_first)(ordered, np.cumsum(ordered, axis=0), given)
    expected = pairs.first_sums(ordered.T, np.ones_like(ordered.T), given)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
