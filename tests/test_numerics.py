"""The arithmetic underneath: exact shifts, selections, sums per cluster, tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcmle import numerics


def test_the_shift_is_exact(precision):
    rng = np.random.default_rng(0)
    x = np.stack(
        [
            1e4 + rng.normal(size=500),
            -3e6 + 1e3 * rng.normal(size=500),
            rng.normal(size=500),
            np.full(500, 7.25),
            rng.uniform(1, 3, size=500),
        ],
        axis=1,
    ).astype(precision)
    points = numerics.prepare(x, None)
    exact = x.astype(np.longdouble) - np.asarray(points.shift).astype(np.longdouble)
    np.testing.assert_array_equal(np.asarray(points.x).astype(np.longdouble), exact)
    shift = np.asarray(points.shift)
    assert abs(shift[0] - 1e4) < 10
    assert abs(shift[1] + 3e6) < 1e4
    assert shift[2] == shift[4] == 0
    assert shift[3] == 7.25


def test_prepare_silences_padding():
    x = np.array([[5.0], [np.nan], [6.0], [np.inf]])
    points = numerics.prepare(jnp.asarray(x), jnp.array([1.0, 0.0, 1.0, 0.0]))
    assert np.isfinite(points.x).all()
    np.testing.assert_array_equal((points.x + points.shift)[np.array([0, 2]), 0], [5, 6])


@pytest.mark.parametrize("k", [1, 3, 64, 65, 100])
def test_smallest(k, precision):
    rng = np.random.default_rng(k)
    costs = rng.integers(0, 4, size=(k, 200)).astype(precision)
    best, label = numerics.smallest(jnp.asarray(costs))
    np.testing.assert_array_equal(label, costs.argmin(axis=0))
    np.testing.assert_array_equal(best, costs.min(axis=0))
    assert label.dtype == jnp.int32
    costs[0, :50] = np.nan
    costs[:, 0] = np.nan
    costs[:, 1] = np.inf
    best, label = numerics.smallest(jnp.asarray(costs))
    assert not np.isnan(best).any()
    assert np.isinf(best[:2]).all()
    assert label[:2].tolist() == [0, 0]
    if k > 1:
        assert (np.asarray(label[2:50]) > 0).all()


@pytest.mark.parametrize("n", [7, 512, 513, 3000])
def test_cluster_sums_by_scatter_and_by_matmul(n, precision, monkeypatch):
    rng = np.random.default_rng(n)
    k = 5
    rows = rng.normal(size=(n, 3)).astype(precision)
    labels = rng.integers(0, k, size=n).astype(np.int32)
    expected = np.stack([rows[labels == j].astype(np.float64).sum(axis=0) for j in range(k)])
    loose = {"rtol": 1e-5, "atol": 1e-4} if precision == np.float32 else {"rtol": 1e-12}
    scattered = numerics.cluster_sums(jnp.asarray(rows), jnp.asarray(labels), k)
    np.testing.assert_allclose(scattered, expected, **loose)
    monkeypatch.setattr(
        numerics.lax, "platform_dependent", lambda *args, cpu, default: default(*args)
    )
    for size in (2**21, 4096):
        monkeypatch.setattr(numerics, "tile_bytes", lambda size=size: size)
        multiplied = numerics.cluster_sums(jnp.asarray(rows), jnp.asarray(labels), k)
        np.testing.assert_allclose(multiplied, expected, **loose)


def test_blocked_sum_keeps_small_terms(precision):
    values = np.full(2_000_000, 0.1, precision)
    total = numerics.blocked_sum(jnp.asarray(values))
    assert float(total) == pytest.approx(2_000_000 * float(values[0]), rel=1e-5)


def test_map_stack_equals_vmap(monkeypatch):
    values = jnp.arange(35.0).reshape(7, 5)
    expected = jax.vmap(lambda row: (row * 2).sum())(values)
    monkeypatch.setattr(numerics, "tile_bytes", lambda: 100)
    for bytes_each in (1, 25, 40, 100, 1000):
        found = numerics.map_stack(lambda row: (row * 2).sum(), values, bytes_each)
        np.testing.assert_array_equal(found, expected)


def test_the_guard_of_the_matmul_form():
    norm = jnp.float32(1e4)
    assert bool(numerics.matmul_is_safe(norm, jnp.array([0.5, 0.1], jnp.float32), 1e-3))
    assert not bool(numerics.matmul_is_safe(norm, jnp.array([0.5, 5.0], jnp.float32), 1e-3))
    assert not bool(numerics.matmul_is_safe(norm, jnp.array([np.nan], jnp.float32), 1e-3))
