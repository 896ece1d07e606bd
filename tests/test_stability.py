"""How far clusters depend on the sample: against plain NumPy, and on data where it is known."""

import jax
import numpy as np
import pytest

import jaxcmle as jc
from jaxcmle.solve.stability import _adjusted_rand, _compared, _resamples

PRECISIONS = ("float32",)
EFFORT = jc.Effort(rounds=3, patience=2, restarts=1, population=4, methods=("kmeans++",))


def blobs(apart, n=60, k=3, seed=0):
    rng = np.random.default_rng(seed)
    centres = apart * np.arange(k)[:, None]
    return (rng.normal(size=(n, 2)) + centres[np.arange(n) % k]).astype(np.float32)


def test_what_is_there_is_stable_and_what_is_not_is_not():
    x = blobs(12.0)
    found = jc.stability(x, 3, n_resamples=20, effort=EFFORT)
    assert found.n_resamples == 20
    assert found.rand.shape == (20,)
    assert found.rand.min() > 0.95
    together = np.arange(60)[:, None] % 3 == np.arange(60) % 3
    assert found.agreement[together].min() > 0.8
    assert found.agreement[~together].max() < 0.2
    np.testing.assert_allclose(found.agreement, found.agreement.T)
    np.testing.assert_allclose(np.diag(found.agreement), 1)
    assert found.clusters.min() > 0.9
    assert found.points.min() > 0.9
    noise = jc.stability(blobs(0.0), 3, n_resamples=20, effort=EFFORT)
    assert noise.rand.mean() < 0.8
    again = jc.stability(x, 3, n_resamples=20, effort=EFFORT)
    np.testing.assert_array_equal(again.agreement, found.agreement)
    other = jc.stability(blobs(0.0), 3, n_resamples=20, effort=EFFORT, key=jax.random.key(5))
    assert (other.agreement != noise.agreement).any()


def test_resamples_draw_in_proportion_to_weight():
    x = np.zeros((5, 1), np.float32)
    weight = np.array([0, 1, 1, 2, 4], np.float32)
    counts = np.asarray(_resamples(jax.random.key(0), x, weight, 4000))
    assert (counts.sum(axis=1) == 4).all()
    assert (counts[:, 0] == 0).all()
    np.testing.assert_allclose(counts.mean(axis=0), 4 * weight / 8, atol=0.08)
    plain = np.asarray(_resamples(jax.random.key(0), x, None, 4000))
    assert (plain.sum(axis=1) == 5).all()
    np.testing.assert_allclose(plain.mean(axis=0), 1, atol=0.08)


def naive_rand(first, second):
    """Return the adjusted Rand index from its definition, over all pairs of points."""
    n = len(first)
    pairs = [(i, j) for i in range(n) for j in range(i)]
    one = np.array([first[i] == first[j] for i, j in pairs])
    other = np.array([second[i] == second[j] for i, j in pairs])
    expected = one.sum() * other.sum() / len(pairs)
    return ((one & other).sum() - expected) / ((one.sum() + other.sum()) / 2 - expected)


@pytest.mark.parametrize("seed", range(20))
def test_the_comparison_is_that_over_all_pairs(seed):
    rng = np.random.default_rng(seed)
    n, k, r = int(rng.integers(4, 15)), 3, 4
    own = rng.integers(0, k, n)
    own[:k] = range(k)
    labels = rng.integers(0, k, (r, n))
    solution = jc.Solution(mixture=None, labels=own, cost=0.0, status=0, n_iter=0)
    found = _compared(solution, labels, k)
    for i in range(r):
        table = np.array(
            [[((own == a) & (labels[i] == b)).sum() for b in range(k)] for a in range(k)]
        )
        assert found.rand[i] == pytest.approx(naive_rand(own, labels[i]), abs=1e-12)
        assert _adjusted_rand(table) == pytest.approx(found.rand[i])
    for i in range(n):
        for j in range(n):
            share = np.mean(labels[:, i] == labels[:, j])
            assert found.agreement[i, j] == pytest.approx(share)
        as_there = [
            (labels[s, i] == labels[s, j]) == (own[i] == own[j])
            for s in range(r)
            for j in range(n)
            if j != i
        ]
        assert found.points[i] == pytest.approx(np.mean(as_there))
    for a in range(k):
        overlaps = [
            max(
                ((own == a) & (each == b)).sum() / max(((own == a) | (each == b)).sum(), 1)
                for b in range(k)
            )
            for each in labels
        ]
        assert found.clusters[a] == pytest.approx(np.mean(overlaps))
    assert _compared(solution, own[None], k).rand[0] == 1


def test_errors():
    x = blobs(5.0)
    with pytest.raises(ValueError, match="n_resamples must be 1 or more"):
        jc.stability(x, 3, n_resamples=0)
    with pytest.raises(ValueError, match="pass a random sample"):
        jc.stability(np.zeros((20_001, 1)), 1)
    with pytest.raises(ValueError, match="NaN"):
        jc.stability(x * np.nan, 3)
