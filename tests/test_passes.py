"""One pass over the points against a float64 NumPy oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from support import BETA, PROBLEMS, as_mixture, assert_cost, assert_labels, parameters, stack

from jaxcmle import numerics
from jaxcmle.problem.objective import shift_means
from jaxcmle.refine.passes import Sums, moments_about, pass_sums


def oracle(x, weight, labels, about):
    """Return size, drift, square and scatter of every cluster in float64."""
    x, about = x.astype(np.float64), np.asarray(about, np.float64)
    size, drift, square, scatter = [], [], [], []
    for j in range(len(about)):
        mine = (labels == j) & (weight > 0)
        a = weight[mine].astype(np.float64)
        difference = x[mine] - about[j]
        size.append(a.sum())
        drift.append(a @ difference)
        square.append(a @ (difference**2).sum(axis=1))
        mean = x[mine].T @ a / max(a.sum(), 1e-300)
        scatter.append(a @ ((x[mine] - mean) ** 2).sum(axis=1))
    return tuple(np.array(each) for each in (size, drift, square, scatter))


def cases(rng, precision):
    """Yield the name, the points and the weights of difficult data, 2000 points each."""
    n, d = 2000, 3
    plain, _ = reference.random_mixture_data(rng, n, d, 4, 4.0)
    yield "plain", plain, np.ones(n)
    yield "weighted", plain, rng.integers(0, 4, n) * rng.uniform(0.5, 2, n)
    yield "duplicates", np.repeat(plain[:20], n // 20, axis=0), np.ones(n)
    yield "offset", plain + 1e4, np.ones(n)
    narrow = plain.copy()
    narrow[: n // 2] = 3.0 + 1e-4 * rng.normal(size=(n // 2, d))
    yield "narrow", narrow, np.ones(n)
    silent = plain.copy()
    silent[::7] = np.nan
    yield "silent", silent, (np.arange(n) % 7 > 0).astype(float)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("kind", ["number", "mask"])
def test_pass_sums_equals_the_oracle(name, kind, precision):
    rng = np.random.default_rng(0)
    run = jax.jit(pass_sums)
    for case, x, weight in cases(rng, precision):
        if kind == "mask":
            weight = (weight > 0).astype(float)
        x, weight = x.astype(precision), weight.astype(precision)
        points = numerics.prepare(jnp.asarray(x), jnp.asarray(weight))
        k, d = 5, x.shape[1]
        clean = x[weight > 0]
        far = np.full(d, 1e3) + clean.mean(axis=0)
        mixtures = []
        for m in range(3):
            means = clean[rng.choice(len(clean), k)]
            means[0] = far if m == 1 else means[0]
            value = (rng.dirichlet(np.full(k, 3.0)), means, rng.uniform(0.5, 2, k))
            mixtures.append(as_mixture(value, precision)[0])
        mixtures = stack(mixtures)
        shifted = shift_means(mixtures, -points.shift)
        given = points.weight > 0 if kind == "mask" else points.weight
        about = shifted.means + 0.5
        shifted_x = jnp.asarray(x) - points.shift
        sums, labels, costs = run(shifted_x, given, shifted, about, PROBLEMS[name])
        present = weight > 0
        for m in range(3):
            found = parameters(jax.tree.map(lambda leaf, m=m: leaf[m], shifted))
            mine = np.asarray(shifted_x)[present].astype(float)
            assert_labels(np.asarray(labels[m])[present], mine, found, name, precision)
            expected = reference.model_cost(mine, *found, name, BETA, weight[present])
            assert_cost(costs[m], expected, len(x), d, precision)
            size, drift, square, _ = oracle(
                np.asarray(shifted_x), weight, np.asarray(labels[m]), about[m]
            )
            small = 64 * np.finfo(precision).eps
            np.testing.assert_allclose(sums.size[m], size, rtol=small, err_msg=case)
            np.testing.assert_allclose(sums.square[m], square, rtol=small, err_msg=case)
            scale = np.sqrt(square * size) + 1e-30
            error = np.abs(np.asarray(sums.drift[m]) - drift).max(axis=1) / scale
            assert error.max() <= small, case


def test_sums_of_parts_add_up(precision):
    rng = np.random.default_rng(1)
    x, _ = reference.random_mixture_data(rng, 1000, 2, 3, 4.0)
    x = jnp.asarray(x.astype(precision))
    start, _ = as_mixture((np.full(3, 1 / 3), np.asarray(x[:3]), np.ones(3)), precision)
    starts = stack([start])
    whole, labels, costs = pass_sums(x, None, starts, starts.means, PROBLEMS["cmle"])
    parts = [
        pass_sums(x[i : i + 300], None, starts, starts.means, PROBLEMS["cmle"])
        for i in range(0, 1000, 300)
    ]
    added = jax.tree.map(lambda *leaves: sum(leaves), *[part[0] for part in parts])
    joined = np.concatenate([part[1] for part in parts], axis=1)
    np.testing.assert_array_equal(joined, labels)
    small = 64 * np.finfo(precision).eps
    for one, other in zip(whole, added, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3 * small**0.5, atol=100 * small)
    np.testing.assert_allclose(sum(part[2] for part in parts), costs, rtol=small)


def test_more_clusters_than_are_unrolled(precision):
    rng = np.random.default_rng(2)
    x, _ = reference.random_mixture_data(rng, 700, 30, 6, 4.0)
    x = jnp.asarray(x.astype(precision))
    pair = [
        as_mixture((np.full(6, 1 / 6), np.asarray(x[i : i + 6]), np.ones(6)), precision)[0]
        for i in (0, 6)
    ]
    starts = stack(pair)
    sums, labels, _ = pass_sums(x, None, starts, starts.means, PROBLEMS["cmle"])
    for m in range(2):
        found = parameters(pair[m])
        assert_labels(labels[m], np.asarray(x, float), found, "cmle", precision)
        size, _, square, _ = oracle(
            np.asarray(x), np.ones(700), np.asarray(labels[m]), starts.means[m]
        )
        np.testing.assert_allclose(sums.size[m], size)
        np.testing.assert_allclose(sums.square[m], square, rtol=64 * np.finfo(precision).eps)


def test_one_more_pass_makes_moments_precise(precision):
    """A narrow cluster far from where its mean was: the first pass cancels, and says so."""
    rng = np.random.default_rng(3)
    n, d, sigma = 4000, 3, 1e-3
    x = np.concatenate([rng.normal(size=(n, d)), 50 + sigma * rng.normal(size=(n, d))])
    x = jnp.asarray(x.astype(precision))
    weight = np.ones(2 * n)
    means = np.array([[0.0] * d, [45.0] * d])
    start, _ = as_mixture(([0.5, 0.5], means, [1.0, 1.0]), precision)
    starts = stack([start])
    run = jax.jit(pass_sums)
    sums, labels, _ = run(x, None, starts, starts.means, PROBLEMS["cmle"])
    first, precise = moments_about(sums, starts.means, 0.0)
    assert not precise[0]
    again, same, _ = run(x, None, starts, first.mean, PROBLEMS["cmle"])
    np.testing.assert_array_equal(same, labels)
    moments, precise = moments_about(again, first.mean, 0.0)
    assert precise[0]
    scatter = oracle(np.asarray(x), weight, np.asarray(labels[0]), means)[3]
    # No better than the mean can be represented.
    rounding = n * d * (np.finfo(precision).eps * 50) ** 2
    error = np.abs(np.asarray(moments.scatter[0]) - scatter)
    assert (error <= 256 * np.finfo(precision).eps * scatter + rounding).all()
    exact = 50 + (np.asarray(x[n:], float) - 50).mean(axis=0)
    assert np.abs(np.asarray(moments.mean[0, 1]) - exact).max() <= np.finfo(precision).eps * 50


def test_moments_of_empty_clusters_and_of_duplicates(precision):
    about = jnp.asarray(np.array([[[1.0, 1.0], [7.0, 7.0]]]), precision)
    sums = Sums(
        size=jnp.asarray([[2.0, 0.0]], precision),
        drift=jnp.asarray([[[2.0, 2.0], [0.0, 0.0]]], precision),
        square=jnp.asarray([[4.0, 0.0]], precision),
    )
    moments, precise = moments_about(sums, about, 0.0)
    assert moments.mean.tolist() == [[[2.0, 2.0], [7.0, 7.0]]]
    assert moments.scatter.tolist() == [[0.0, 0.0]]
    # Two equal points, seen from elsewhere: a scatter of 0 is not to be had by a difference...
    assert not precise[0]
    # ...unless it is far below the floor.
    assert moments_about(sums, about, 1.0)[1][0]
    again = sums._replace(drift=0 * sums.drift, square=0 * sums.square)
    moments, precise = moments_about(again, moments.mean, 0.0)
    assert precise[0]
    assert moments.scatter.tolist() == [[0.0, 0.0]]
