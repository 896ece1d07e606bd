"""Costs, labels and estimates against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from support import (
    BETA,
    CASES,
    PROBLEMS,
    as_mixture,
    assert_cost,
    assert_labels,
    parameters,
    random_mixture,
    random_weights,
    tolerance,
)

import jaxcmle as jc


@pytest.mark.parametrize("case", CASES)
def test_model_costs_and_labels_equal_the_oracle(case, precision):
    name, n, d, k, kind = case
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x = (rng.normal(size=(n, d)) * 4).astype(precision)
        mixture, values = as_mixture(random_mixture(rng, k, d), precision)
        weights = random_weights(rng, n, kind)
        problem = PROBLEMS[name]

        costs = jc.point_costs(x, mixture, problem=problem)
        expected = reference.point_costs(x, *values, name, BETA)
        np.testing.assert_allclose(costs, expected, rtol=tolerance(precision), atol=1e-4 * d)
        labels = jc.assign(x, mixture, problem=problem)
        assert labels.dtype == jnp.int32
        assert_labels(labels, x, values, name, precision)
        cost = jc.cost(x, mixture, problem=problem, sample_weight=weights)
        assert cost.dtype == precision
        assert_cost(cost, reference.model_cost(x, *values, name, BETA, weights), n, d, precision)


@pytest.mark.parametrize("case", CASES)
def test_partition_costs_and_estimates_equal_the_oracle(case, precision):
    name, n, d, k, kind = case
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x = (rng.normal(size=(n, d)) * 4).astype(precision)
        labels = rng.integers(0, k, size=n)
        weights = random_weights(rng, n, kind)
        floor = 0.5 if seed % 2 or n == k else 1e-3
        common = {"problem": PROBLEMS[name], "sample_weight": weights, "min_variance": floor}
        oracle = (name, BETA, weights, floor)

        mixture = jc.estimate(x, labels, k, **common)
        expected = reference.estimate(x, labels, k, *oracle)
        for value, wanted in zip(parameters(mixture), expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=10 * tolerance(precision), atol=1e-6)
        cost = jc.partition_cost(x, labels, k, **common)
        wanted = reference.partition_cost(x, labels, k, *oracle)
        assert_cost(cost, wanted, n, d, precision)


def test_the_two_worked_examples_of_the_specification():
    unit = np.sqrt(4 / np.pi)
    small = np.array([[0], [unit], [2 * unit], [100]])
    assert float(jc.partition_cost(small, [0, 0, 1, 1], 2)) == pytest.approx(15.082, abs=1e-3)
    wide = np.array([[-40], [-20], [0], [unit], [2 * unit], [3 * unit], [20], [40]])
    nested = np.array([0, 0, 1, 1, 1, 1, 0, 0])
    assert float(jc.partition_cost(wide, nested, 2)) == pytest.approx(31.64, abs=5e-3)
    best, _ = reference.brute_force(wide, 2)
    assert best == pytest.approx(31.64, abs=5e-3)


@pytest.mark.parametrize("name", ["cmle", "ucmle"])
def test_the_core_identity(name, precision):
    """L(theta, C) - L(C) = N [ d/2 sum w phi(t; e) + KL(w || w~) ] (section 3)."""
    if precision == np.float32:
        pytest.skip("an identity to 1e-10 needs float64")
    for seed in range(100):
        rng = np.random.default_rng(seed)
        n, d, k = 30, (1, 3)[seed % 2], (1, 3)[seed % 4 // 2]
        x = rng.normal(size=(n, d)) * 3
        labels = np.concatenate([np.arange(k), np.arange(k), rng.integers(0, k, n - 2 * k)])
        mixture = jc.estimate(x, labels, k, problem=PROBLEMS[name])
        _, means, variances = parameters(mixture)
        sizes = np.bincount(labels, minlength=k) / n
        other = random_mixture(rng, k, d)
        changed, _ = as_mixture((other[0], means + other[1] * 0.1, variances * other[2]), precision)

        costs = jc.point_costs(x, changed, problem=PROBLEMS[name])
        joint = float(costs[np.arange(n), labels].sum())
        shift = ((other[1] * 0.1) ** 2).sum(axis=1) / (d * variances)
        ratio = np.log(other[2])
        phi = ratio + (1 + shift) * np.exp(-ratio) - 1
        divergence = (sizes * np.log(sizes / other[0])).sum() if name == "cmle" else 0
        excess = n * (d / 2 * (sizes * phi).sum() + divergence)
        own = float(jc.partition_cost(x, labels, k, problem=PROBLEMS[name]))
        assert joint == pytest.approx(own + excess, rel=1e-10)


def test_ties_go_to_the_lowest_index_and_zero_weights_never_win():
    twins = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [0.0]], variances=[1.0, 1.0])
    assert jc.assign([[1.0], [-3.0]], twins).tolist() == [0, 0]
    silent = jc.Mixture(weights=[0.0, 1.0], means=[[0.0], [9.0]], variances=[1.0, 1.0])
    assert jc.assign([[0.0], [9.0]], silent).tolist() == [1, 1]
    assert jc.assign([[0.0], [9.0]], silent, problem=jc.UCMLE()).tolist() == [0, 1]
    assert np.isinf(jc.point_costs([[0.0]], silent)[0, 0])


def test_an_empty_cluster_is_finite_and_costs_nothing():
    x = np.array([[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]])
    mixture = jc.estimate(x, [0, 2, 2], 3)
    assert mixture.weights.tolist()[1] == 0
    np.testing.assert_allclose(mixture.means[1], [2, 2])
    np.testing.assert_allclose(mixture.variances[1], 8 / 3, rtol=1e-6)
    uniform = jc.estimate(x, [0, 2, 2], 3, problem=jc.UCMLE())
    np.testing.assert_allclose(uniform.weights, 1 / 3, rtol=1e-6)
    two = jc.partition_cost(x, [0, 1, 1], 2, min_variance=1.0)
    three = jc.partition_cost(x, [0, 2, 2], 3, min_variance=1.0)
    assert float(two) == pytest.approx(float(three), rel=1e-6)


def test_a_cluster_without_spread_costs_minus_infinity_unless_floored():
    x = np.array([[1.0], [1.0], [5.0], [7.0]])
    assert float(jc.partition_cost(x, [0, 0, 1, 1], 2)) == -np.inf
    assert np.isfinite(jc.partition_cost(x, [0, 0, 1, 1], 2, min_variance=0.1))
    assert np.isfinite(jc.partition_cost(x, [0, 0, 1, 1], 2, problem=jc.WKM(beta=1.0)))


def test_labels_out_of_range_give_nan_under_jit():
    x = jnp.arange(4.0)[:, None]
    cost = jax.jit(lambda labels: jc.partition_cost(x, labels, 2))
    assert np.isnan(cost(jnp.array([0, 0, 1, 2])))
    assert np.isfinite(cost(jnp.array([0, 0, 1, 1])))


def test_gradients_of_the_cost(precision):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(40, 3)), precision)
    mixture, values = as_mixture(random_mixture(rng, 4, 3), precision)
    gradient = jax.grad(lambda mixture: jc.cost(x, mixture))(mixture)
    labels = reference.assign(x, *values)
    expected = np.zeros((4, 3))
    for label, point in zip(labels, np.asarray(x, np.float64), strict=True):
        expected[label] += (values[1][label] - point) / values[2][label]
    np.testing.assert_allclose(gradient.means, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        gradient.weights, -np.bincount(labels, minlength=4) / values[0], rtol=1e-5
    )
    silent, _ = as_mixture((np.array([0.0, 0.3, 0.3, 0.4]), values[1], values[2]), precision)
    gradient = jax.grad(lambda mixture: jc.cost(x, mixture))(silent)
    assert all(np.isfinite(value).all() for value in jax.tree.leaves(gradient))
    labels = np.arange(40) % 3
    slopes = jax.grad(lambda a: jc.partition_cost(x, labels, 4, sample_weight=a))(jnp.ones(40))
    assert np.isfinite(slopes).all()
