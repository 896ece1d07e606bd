"""Starts: where their means come from, weights, padding, reproducibility."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jaxcmle as jc
from jaxcmle.candidates import seeding
from jaxcmle.numerics import Points
from jaxcmle.refine.cem import cem_all

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


def success_rate(method, x, narrow, keys):
    """Return how often CEM finds the narrow cluster: nearly all of it, and little else."""
    starts = jax.vmap(lambda key: jc.seed(key, x, 2, method=method))(keys)
    found = 0
    for row in np.asarray(cem_all(x, starts).labels):
        mine = row == np.bincount(row[narrow]).argmax()
        found += (mine & narrow).sum() > 0.9 * max(mine.sum(), narrow.sum())
    return found / len(keys)


def test_abs_finds_a_narrow_cluster_inside_a_wide_one():
    rng = np.random.default_rng(0)
    x = np.concatenate([3 * rng.normal(size=(600, 4)), 2 + 0.1 * rng.normal(size=(60, 4))])
    narrow = np.arange(660) >= 600
    keys = jax.random.split(jax.random.key(0), 50)
    assert success_rate("abs", x, narrow, keys) > 0.8
    assert success_rate("kmeans++", x, narrow, keys) < 0.5


def seed_by_abs(x, k=3, key=5, **options):
    return jc.seed(jax.random.key(key), x, k, method="abs", **options)


def assert_usable(mixture):
    chex.assert_tree_all_finite(mixture)
    assert (np.asarray(mixture.variances) > 0).all()


@pytest.mark.parametrize(
    "x",
    [
        np.repeat([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]], 10, axis=0),
        np.array([[0.0], [5.0], [9.0]]),
    ],
    ids=["duplicates, a constant column", "k = n, d = 1"],
)
def test_abs_on_degenerate_data(x):
    for key in range(20):
        start = seed_by_abs(x, key=key)
        assert_usable(start)
        means = np.sort(np.asarray(start.means), axis=0)
        np.testing.assert_allclose(means, np.unique(x, axis=0), atol=1e-5)


def test_abs_with_one_cluster(x):
    start = seed_by_abs(x, 1)
    assert_usable(start)
    assert (np.abs(start.means[0] - x.mean(axis=0)) < x.std(axis=0)).all()


@pytest.mark.parametrize(("scale", "offset"), [(1e-6, 0), (1e6, 0), (1, 1e4)])
def test_abs_does_not_depend_on_units(x, scale, offset):
    # So few digits that the offset does not round them.
    x = np.round(x * 64) / 64
    start, moved = seed_by_abs(x), seed_by_abs((x * scale + offset).astype(x.dtype))
    np.testing.assert_allclose((moved.means - offset) / scale, start.means, atol=2e-3)
    np.testing.assert_allclose(moved.variances / scale**2, start.variances, rtol=1e-4)


def test_abs_respects_weights(x):
    heavy = np.arange(30) >= 20
    weights = np.where(heavy, 1, 1e-6)
    start = seed_by_abs(x, sample_weight=weights)
    other = seed_by_abs(x, sample_weight=weights / 64)
    np.testing.assert_allclose(other.means, start.means, rtol=1e-5)
    np.testing.assert_allclose(other.variances, start.variances, rtol=1e-4)
    assert (start.means >= x[heavy].min(axis=0) - 1e-3).all()
    assert (start.means <= x[heavy].max(axis=0) + 1e-3).all()


def test_abs_looks_at_a_fair_sample_whatever_the_padding(precision):
    """Sums over it are those over all; a point much heavier than others is always in it."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3000, 1)) + 1, precision)
    weight = jnp.asarray(rng.uniform(0.1, 2, size=3000), precision).at[7].set(500)
    points = Points(x, weight, jnp.zeros(1, precision))
    sample = seeding.sample_points(jax.random.key(0), points, 1000)
    assert float(sample.weight.sum()) == pytest.approx(float(weight.sum()), rel=0.05)
    expected = float(weight @ x[:, 0])
    assert float(sample.weight @ sample.x[:, 0]) == pytest.approx(expected, rel=0.1)
    assert float(sample.weight.max()) == 500

    padding = jnp.zeros(500, precision)
    padded = Points(
        jnp.concatenate([x, padding[:, None]]), jnp.concatenate([weight, padding]), points.shift
    )
    again = seeding.sample_points(jax.random.key(0), padded, 1000)
    np.testing.assert_array_equal(again.x, sample.x)
    np.testing.assert_array_equal(again.weight, sample.weight)
    # Fewer than are wanted: all of them, unchanged, though with padding there are more.
    few = Points(x, weight.at[900:].set(0), points.shift)
    all_of_them = seeding.sample_points(jax.random.key(0), few, 1000)
    np.testing.assert_array_equal(all_of_them.x[:900], x[:900])
    np.testing.assert_array_equal(all_of_them.weight[:900], weight[:900])


def test_abs_under_jit_does_not_retrace(x):
    # Chex counts by name, over both precisions.
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def start(key, x):
        return jc.seed(key, x, 3, method="abs")

    result = start(jax.random.key(5), jnp.asarray(x))
    np.testing.assert_allclose(result.means, seed_by_abs(x).means, rtol=1e-5)
    # What is refused outside jit: one value, thirty times.
    assert_usable(start(jax.random.key(1), jnp.full_like(x, 7)))
