"""What must not matter: the order of points and of clusters, translation, scale, padding."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import NAMES, PROBLEMS, as_mixture, tolerance

import jaxcmle as jc

N, D, K = 24, 2, 3


def problem_data(seed, precision, name):
    rng = np.random.default_rng(seed)
    # Multiples of 1/64: translations and scalings by powers of two are exact.
    x = (rng.integers(-640, 640, size=(N, D)) / 64).astype(precision)
    values = (rng.dirichlet(np.full(K, 3.0)), x[rng.choice(N, K, replace=False)], np.full(K, 4.0))
    start, _ = as_mixture(values, precision)
    return rng, x, start, PROBLEMS[name]


def run(x, start, problem, **options):
    return jc.cem(x, start, problem=problem, min_variance=1e-3, **options)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_the_order_of_points_does_not_matter(name, precision, seed):
    rng, x, start, problem = problem_data(seed, precision, name)
    order = rng.permutation(N)
    plain, permuted = run(x, start, problem), run(x[order], start, problem)
    np.testing.assert_array_equal(permuted.labels, np.asarray(plain.labels)[order])
    np.testing.assert_allclose(permuted.cost, plain.cost, rtol=tolerance(precision))
    low = jc.lower_bound(x, K, problem=problem)
    np.testing.assert_allclose(jc.lower_bound(x[order], K, problem=problem), low, rtol=1e-4)


@pytest.mark.parametrize("name", ["cmle"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_the_order_of_clusters_does_not_matter(name, precision, seed):
    rng, x, start, problem = problem_data(seed, precision, name)
    order = rng.permutation(K)
    renamed = np.argsort(order)
    plain = run(x, start, problem)
    permuted = run(x, jax.tree.map(lambda leaf: np.asarray(leaf)[order], start), problem)
    np.testing.assert_array_equal(permuted.labels, renamed[np.asarray(plain.labels)])
    np.testing.assert_allclose(permuted.cost, plain.cost, rtol=tolerance(precision))


@pytest.mark.parametrize("name", ["cmle", "wkm"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), offset=st.sampled_from([-4096, 2.0**14, 10240]))
def test_translation_does_not_matter(name, precision, seed, offset):
    _, x, start, problem = problem_data(seed, precision, name)
    shift = np.asarray(offset, precision)
    moved_start = jc.Mixture(
        weights=start.weights, means=start.means + shift, variances=start.variances
    )
    plain, moved = run(x, start, problem), run(x + shift, moved_start, problem)
    np.testing.assert_array_equal(moved.labels, plain.labels)
    np.testing.assert_allclose(moved.cost, plain.cost, rtol=1e-5)
    np.testing.assert_allclose(moved.mixture.variances, plain.mixture.variances, rtol=1e-5)
    low = jc.lower_bound(x, K, problem=problem)
    np.testing.assert_allclose(jc.lower_bound(x + shift, K, problem=problem), low, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), power=st.integers(-20, 20))
def test_scale_adds_n_d_ln_c_and_keeps_the_labels(name, precision, seed, power):
    """WKM's beta scales with the data, and its cost stays."""
    _, x, start, problem = problem_data(seed, precision, name)
    factor = 2.0**power
    scaled = jc.Mixture(
        weights=start.weights,
        means=start.means * np.asarray(factor, precision),
        variances=start.variances * np.asarray(factor**2, precision),
    )
    other = jc.WKM(beta=problem.beta / factor**2) if name == "wkm" else problem
    plain = jc.cem(x, start, problem=problem, min_variance=1e-3)
    large = jc.cem(
        x * np.asarray(factor, precision), scaled, problem=other, min_variance=1e-3 * factor**2
    )
    np.testing.assert_array_equal(large.labels, plain.labels)
    shift = 0 if name == "wkm" else N * D * np.log(factor)
    expected = float(plain.cost) + shift
    scale = N * D + abs(expected) + abs(shift)
    assert abs(float(large.cost) - expected) <= tolerance(precision) * scale


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_padding_and_whole_weights(name, precision, seed):
    """Weight 0 is padding, wherever it stands; weight w is w copies of a point."""
    rng, x, start, problem = problem_data(seed, precision, name)
    weights = rng.integers(0, 3, size=N).astype(precision)
    weights[rng.choice(N, 2 * K, replace=False)] += 1
    labels = rng.integers(0, K, size=N)
    repeats = weights.astype(int)
    # Padded back to one shape, so that all seeds share a program.
    copies, copied = np.repeat(x, repeats, axis=0), np.repeat(labels, repeats)
    room = 4 * N - len(copies)
    copies = np.concatenate([copies, np.full((room, D), np.nan, precision)])
    copied = np.concatenate([copied, np.zeros(room, int)])
    present = np.arange(4 * N) < 4 * N - room

    options = {"problem": problem, "min_variance": 1e-3}
    cost = jc.partition_cost(x, labels, K, sample_weight=weights, **options)
    same = jc.partition_cost(copies, copied, K, sample_weight=present, **options)
    np.testing.assert_allclose(same, cost, rtol=tolerance(precision), atol=1e-3)
    weighted = run(x, start, problem, sample_weight=weights)
    repeated = run(copies, start, problem, sample_weight=present)
    np.testing.assert_allclose(repeated.cost, weighted.cost, rtol=tolerance(precision), atol=1e-3)
    expected = np.repeat(np.asarray(weighted.labels), repeats)
    np.testing.assert_array_equal(np.asarray(repeated.labels)[present], expected)
