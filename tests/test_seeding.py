"""Starts: where their means come from, weights, padding, reproducibility."""

import jax
import numpy as np
import pytest
import reference

import jaxcmle as jc

METHODS = ("kmeans++", "farthest", "random", "subsets")


@pytest.fixture(scope="module")
def x(precision):
    rng = np.random.default_rng(0)
    return (rng.normal(size=(30, 2)) * 3).astype(precision)


def rows_of(means, x):
    """Return which point each mean is, or -1."""
    equal = (np.asarray(means)[:, None] == x[None]).all(axis=2)
    return np.where(equal.any(axis=1), equal.argmax(axis=1), -1)


@pytest.mark.parametrize("method", METHODS)
def test_a_start_is_a_valid_mixture(method, x, precision):
    mixture = jc.seed(jax.random.key(0), x, 3, method=method)
    assert mixture.means.shape == (3, 2)
    assert mixture.means.dtype == mixture.variances.dtype == mixture.weights.dtype == precision
    np.testing.assert_allclose(mixture.weights, 1 / 3, rtol=1e-6)
    nearest = reference.squared_distances(x, mixture.means).min(axis=1)
    np.testing.assert_allclose(mixture.variances, nearest.mean() / 2, rtol=1e-5)
    if method != "subsets":
        rows = rows_of(mixture.means, x)
        assert (rows >= 0).all()
        assert len(set(rows.tolist())) == 3


@pytest.mark.parametrize("method", METHODS)
def test_same_key_same_start_whatever_the_padding(method, x):
    start = jc.seed(jax.random.key(7), x, 3, method=method)
    again = jc.seed(jax.random.key(7), x, 3, method=method, sample_weight=np.ones(30))
    other = jc.seed(jax.random.key(8), x, 3, method=method)
    padded = np.concatenate([x, np.full((5, 2), np.nan, x.dtype)])
    weights = np.concatenate([np.ones(30), np.zeros(5)])
    wide = jc.seed(jax.random.key(7), padded, 3, method=method, sample_weight=weights)
    for same in (again, wide):
        np.testing.assert_allclose(same.means, start.means, rtol=1e-6)
        np.testing.assert_allclose(same.variances, start.variances, rtol=1e-5)
    assert not np.array_equal(np.asarray(other.means), np.asarray(start.means))


@pytest.mark.parametrize("method", METHODS)
def test_vmap_over_keys_equals_a_loop(method, x):
    keys = jax.random.split(jax.random.key(1), 5)
    stacked = jax.vmap(lambda key: jc.seed(key, x, 3, method=method))(keys)
    for i, key in enumerate(keys):
        single = jc.seed(key, x, 3, method=method)
        np.testing.assert_allclose(stacked.means[i], single.means, rtol=1e-6)


def test_farthest_is_gonzalez(x):
    mixture = jc.seed(jax.random.key(3), x, 3, method="farthest")
    rows = rows_of(mixture.means, x)
    centres, _, _ = reference.gonzalez(x, 3, first=int(rows[0]))
    assert rows.tolist() == [int(centre) for centre in centres]


@pytest.mark.parametrize("method", ["random", "kmeans++"])
def test_points_are_drawn_in_proportion_to_their_weight(method):
    """Chi-square of the first mean over 4000 keys; a control with equal weights must fail."""
    x = np.arange(4.0)[:, None]
    weights = np.array([1.0, 2.0, 3.0, 0.0])
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.vmap(lambda key: jc.seed(key, x, 1, method=method, sample_weight=weights).means)
    counts = np.bincount(np.asarray(draw(keys)).ravel().astype(int), minlength=4)
    assert counts[3] == 0
    expected = 4000 * weights[:3] / 6
    statistic = ((counts[:3] - expected) ** 2 / expected).sum()
    assert statistic < 20
    equal = np.full(3, 4000 / 3)
    assert ((counts[:3] - equal) ** 2 / equal).sum() > 100


def test_kmeans_plus_plus_draws_by_squared_distance():
    """From a first mean at 0, the second is at 3 nine times as often as at 1."""
    x = np.array([[0.0], [1.0], [3.0]])
    keys = jax.random.split(jax.random.key(0), 6000)
    means = np.asarray(jax.vmap(lambda key: jc.seed(key, x, 2).means)(keys))[:, :, 0]
    second = means[means[:, 0] == 0, 1]
    assert (second == 3).mean() == pytest.approx(0.9, abs=0.03)


def test_duplicates_never_give_the_same_mean_twice():
    x = np.repeat([[0.0], [1.0], [2.0]], 20, axis=0)
    keys = jax.random.split(jax.random.key(0), 50)
    means = np.asarray(jax.vmap(lambda key: jc.seed(key, x, 3).means)(keys))[:, :, 0]
    assert (np.sort(means, axis=1) == [0, 1, 2]).all()


def test_one_point_per_cluster(precision):
    x = np.array([[0.0], [5.0], [9.0]])
    mixture = jc.seed(jax.random.key(0), x, 3)
    assert sorted(np.asarray(mixture.means).ravel().tolist()) == [0, 5, 9]
    assert (np.asarray(mixture.variances) > 0).all()
