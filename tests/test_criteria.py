"""AIC, BIC and ICL against sums written out, for all three problems."""

import math

import numpy as np
import pytest
import reference
from support import BETA, NAMES, PROBLEMS, random_mixture, random_weights

import jaxcmle as jc
from jaxcmle.solve.criteria import criteria, criteria_of_many, log_densities, n_parameters

# Free parameters of k clusters in d dimensions.
PARAMETERS = {
    "cmle": lambda k, d: k - 1 + k * d + k,
    "wkm": lambda k, d: k - 1 + k * d,
    "ucmle": lambda k, d: k * d + k,
}


def fixed(problem, weights, means, variances):
    """Return the numbers with what the problem fixes in its place."""
    if problem == "wkm":
        variances = np.full_like(variances, 1 / (2 * BETA))
    if problem == "ucmle":
        weights = np.full_like(weights, 1 / len(weights))
    return weights, means, variances


def log_joint(x, weights, means, variances):
    """Return `ln w_k N(x; mean, variance)` for all points and clusters."""
    d = x.shape[1]
    squares = ((x[:, None] - means) ** 2).sum(axis=2)
    with np.errstate(divide="ignore"):
        return np.log(weights) - d / 2 * np.log(2 * np.pi * variances) - squares / (2 * variances)


@pytest.mark.parametrize("kind", ["none", "whole", "fraction"])
@pytest.mark.parametrize("problem", NAMES)
def test_the_criteria_are_those_written_out(problem, kind, precision):
    rng = np.random.default_rng(3)
    for n, d, k in ((30, 2, 3), (12, 1, 1), (20, 5, 4)):
        x = rng.normal(size=(n, d)) * 3
        numbers = random_mixture(rng, k, d)
        weight = random_weights(rng, n, kind)
        mixture = jc.Mixture(weights=numbers[0], means=numbers[1], variances=numbers[2])
        found = criteria(x, mixture, problem=PROBLEMS[problem], sample_weight=weight)

        joint = log_joint(x, *fixed(problem, *numbers))
        each = np.ones(n) if weight is None else weight
        hard = -(each * joint.max(axis=1)).sum()
        soft = -(each * np.logaddexp.reduce(joint, axis=1)).sum()
        p, total = PARAMETERS[problem](k, d), each.sum()
        assert n_parameters(k, d, PROBLEMS[problem]) == p
        tolerance = 1e-4 if precision == np.float32 else 1e-10
        wanted = (2 * soft + 2 * p, 2 * soft + p * math.log(total), 2 * hard + p * math.log(total))
        np.testing.assert_allclose(found, wanted, rtol=tolerance)
        densities = log_densities(x, mixture, problem=PROBLEMS[problem])
        np.testing.assert_allclose(densities, np.logaddexp.reduce(joint, axis=1), rtol=tolerance)


def test_a_cluster_of_weight_zero_has_no_density():
    x = np.array([[0.0], [1.0]])
    one = jc.Mixture(weights=[1.0], means=[[0.0]], variances=[1.0])
    two = jc.Mixture(weights=[1.0, 0.0], means=[[0.0], [1.0]], variances=[1.0, 1.0])
    np.testing.assert_allclose(log_densities(x, two), log_densities(x, one), rtol=1e-6)


def test_icl_is_twice_the_cost_of_the_labels_and_the_penalty():
    """Also for labels that are not the cheapest."""
    x = np.array([[0.0], [1.0], [2.0], [9.0]])
    labels = np.array([0, 1, 0, 1])
    mixture = jc.estimate(x, labels, 2)
    cost = reference.partition_cost(x, labels, 2, "cmle")
    assert cost > float(jc.cost(x, mixture)) + 0.1
    found = criteria(x, mixture, partition_cost=cost)
    assert found.icl == pytest.approx(2 * cost + 5 * math.log(4))


@pytest.mark.parametrize("problem", NAMES)
def test_mixtures_of_different_sizes_come_out_as_each_alone(problem, precision):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(25, 2))
    mixtures = []
    for k in (1, 4, 2):
        weights, means, variances = random_mixture(rng, k, 2)
        mixtures.append(jc.Mixture(weights=weights, means=means, variances=variances))
    options = {"problem": PROBLEMS[problem]}
    costs = [float(jc.cost(x, mixture, **options)) for mixture in mixtures]
    together = criteria_of_many(x, mixtures, partition_costs=costs, **options)
    alone = [criteria(x, mixture, **options) for mixture in mixtures]
    np.testing.assert_allclose(together, alone, rtol=1e-5 if precision == np.float32 else 1e-12)
