"""Starts: where their means come from, weights, padding, reproducibility."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jaxcmle as jc

METHODS = ("kmeans++", "farthest", "random", "subsets", "abs")


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
    assert len(np.unique(mixture.means, axis=0)) == 3
    if method == "abs":
        # Any positive variances will do, no wider than the data.
        variances = np.asarray(mixture.variances)
        assert (variances > 0).all()
        assert (variances < x.var(axis=0).sum()).all()
        return
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


def success_rate(method, x, narrow, keys, k=2):
    """Return how often CEM finds the narrow cluster: most of it under one label, few others."""
    starts = jax.vmap(lambda key: jc.seed(key, x, k, method=method))(keys)
    labels = np.asarray(jax.vmap(lambda start: jc.cem(x, start).labels)(starts))
    found = 0
    for row in labels:
        label = np.bincount(row[narrow]).argmax()
        mine = row == label
        found += (mine & narrow).sum() > 0.9 * max(mine.sum(), narrow.sum())
    return found / len(keys)


def test_abs_finds_a_narrow_cluster_inside_a_wide_one():
    rng = np.random.default_rng(0)
    wide = 3 * rng.normal(size=(400, 8))
    x = np.concatenate([wide, 0.3 * rng.normal(size=(100, 8)) + 1, 20 + rng.normal(size=(200, 8))])
    narrow = np.zeros(700, bool)
    narrow[400:500] = True
    keys = jax.random.split(jax.random.key(0), 40)
    by_abs = success_rate("abs", x, narrow, keys, 3)
    by_distance = success_rate("kmeans++", x, narrow, keys, 3)
    assert by_abs >= by_distance + 0.3


def seed_by_abs(x, k=3, key=5, **options):
    return jc.seed(jax.random.key(key), x, k, method="abs", **options)


def assert_usable(mixture):
    chex.assert_tree_all_finite(mixture)
    assert (np.asarray(mixture.variances) > 0).all()


@pytest.mark.parametrize(
    ("x", "k"),
    [
        (np.repeat([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]], 10, axis=0), 3),
        (np.full((30, 2), 7.0), 3),
        (np.array([[0.0], [5.0], [9.0]]), 3),
        (np.array([[0.0], [5.0], [9.0]]), 1),
    ],
    ids=["duplicates and a constant column", "one value", "k = n", "k = 1"],
)
def test_abs_on_degenerate_data(x, k):
    keys = jax.random.split(jax.random.key(0), 20)
    starts = jax.vmap(lambda key: jc.seed(key, x, k, method="abs"))(keys)
    assert_usable(starts)
    if len(np.unique(x, axis=0)) == k:
        found = np.sort(np.asarray(starts.means), axis=1)
        distinct = np.sort(np.unique(x, axis=0), axis=0)
        np.testing.assert_allclose(found, np.broadcast_to(distinct, found.shape), atol=1e-5)


@pytest.mark.parametrize(("scale", "offset"), [(1e-6, 0), (1e6, 0), (1, 1e4)])
def test_abs_does_not_depend_on_units(x, scale, offset):
    # A copy that the offset does not round.
    x = np.round(x * 64) / 64
    start, moved = seed_by_abs(x), seed_by_abs((x * scale + offset).astype(x.dtype))
    np.testing.assert_allclose((moved.means - offset) / scale, start.means, atol=2e-3)
    np.testing.assert_allclose(moved.variances / scale**2, start.variances, rtol=1e-3)


def test_abs_respects_weights(x):
    """Weights in other units change nothing; whole weights act like repeated points."""
    weights = np.where(np.arange(30) < 20, 1.0, 3.0)
    start = seed_by_abs(x, sample_weight=weights)
    other = seed_by_abs(x, sample_weight=weights / 64)
    np.testing.assert_allclose(other.means, start.means, rtol=1e-5)
    np.testing.assert_allclose(other.variances, start.variances, rtol=1e-4)
    only = np.where(np.arange(30) < 20, 1.0, 0.0)
    np.testing.assert_allclose(
        seed_by_abs(x, sample_weight=only).means, seed_by_abs(x[:20]).means, rtol=1e-5
    )


def test_abs_of_many_points_is_a_fair_sample_whatever_the_padding(precision):
    """More points than are looked at: nine in ten at 0, but nine tenths of the weight at 1."""
    rng = np.random.default_rng(0)
    high = np.arange(6000) % 10 == 0
    x = (high + 0.01 * rng.normal(size=6000))[:, None].astype(precision)
    weights = np.where(high, 81.0, 1.0)
    start = seed_by_abs(x, 1, sample_weight=weights)
    assert float(start.means[0, 0]) == pytest.approx(0.9, abs=0.02)
    padded = np.concatenate([x, np.full((500, 1), np.inf, x.dtype)])
    wide = seed_by_abs(padded, 1, sample_weight=np.concatenate([weights, np.zeros(500)]))
    np.testing.assert_allclose(wide.means, start.means, rtol=1e-5)
    # Padding to more points than are looked at, from fewer.
    few, more = np.ones(6000), np.zeros(6000)
    few[4000:] = more[4000:] = 0
    np.testing.assert_allclose(
        seed_by_abs(x, 1, sample_weight=few).means, seed_by_abs(x[:4000], 1).means, rtol=1e-5
    )


def test_abs_under_jit_does_not_retrace(x):
    @jax.jit
    @chex.assert_max_traces(n=1)
    def start(key, x):
        return jc.seed(key, x, 3, method="abs")

    for key in range(3):
        result = start(jax.random.key(key), jnp.asarray(x) + key)
    np.testing.assert_allclose(result.means, seed_by_abs(x + 2, key=2).means, rtol=1e-5)
