"""The bounds hold against brute force, and equal the oracle's."""

import math

import jax
import numpy as np
import pytest
import reference
from support import BETA, NAMES, PROBLEMS, random_weights

import jaxcmle as jc
from jaxcmle.problem import bounds

FAMILIES = ("plain", "outlier", "nested")


@pytest.mark.parametrize("kind", ["none", "whole", "fraction"])
@pytest.mark.parametrize("name", NAMES)
def test_lower_bound_is_below_the_optimum_and_equals_the_oracle(name, kind, precision):
    """90 instances for each problem and kind of weights, each with its optimum by brute force."""
    checked = 0
    for seed in range(90):
        rng = np.random.default_rng(seed)
        d, k = (1, 2)[seed % 2], (2, 3)[seed % 4 // 2]
        n = 9
        if seed % 3:
            x = reference.well_defined_instance(rng, n, d, FAMILIES[seed % 3])
        else:
            x = rng.integers(0, 4, size=(n, d)).astype(float)
        x = x.astype(precision)
        weights = random_weights(rng, n, kind)
        if weights is not None:
            weights = weights.astype(precision).astype(float)
        size = 2 if kind == "fraction" else (2, 3)[seed % 2]
        floor = 0.3 if seed % 3 == 0 else 0.0
        common = (name, BETA, weights, floor)
        try:
            optimum, _ = reference.brute_force(x, k, size, *common)
        except ValueError:
            continue
        bound = jc.lower_bound(
            x,
            k,
            min_size=size,
            problem=PROBLEMS[name],
            sample_weight=weights,
            min_variance=floor,
        )
        assert bound <= optimum
        expected = reference.lower_bound(x, k, size, *common)
        if math.isfinite(expected):
            loose = 1e-4 if precision == np.float32 else 1e-11
            assert bound == pytest.approx(expected, abs=loose * (n * d + abs(expected)))
            assert bound <= expected
        checked += 1
    assert checked >= 70


def test_the_bound_is_attained():
    """Two far equilateral triangles: the bound is the cost."""
    triangle = np.array([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2]])
    x = np.concatenate([triangle, triangle + 100])
    bound = jc.lower_bound(x, 2, min_size=3)
    assert bound == pytest.approx(float(jc.partition_cost(x, [0, 0, 0, 1, 1, 1], 2)), rel=1e-4)


def test_balance_and_min_size_agree(precision):
    x = np.random.default_rng(0).normal(size=(20, 2)).astype(precision)
    assert jc.lower_bound(x, 2) == jc.lower_bound(x, 2, balance=4)
    assert jc.lower_bound(x, 2, balance=4) == jc.lower_bound(x, 2, min_size=5)
    assert jc.lower_bound(x, 3, balance=7) == jc.lower_bound(x, 3, min_size=3)
    assert jc.lower_bound(x, 2, balance=100) == jc.lower_bound(x, 2, min_size=2)
    # Scaled weights: the same shares, N times the cost.
    halves = jc.lower_bound(x, 2, balance=4, sample_weight=np.full(20, 0.3))
    assert halves == pytest.approx(0.3 * jc.lower_bound(x, 2, balance=4), rel=1e-4)


def test_padding_changes_no_bound(precision):
    x = np.random.default_rng(0).normal(size=(20, 2)).astype(precision)
    padded = np.concatenate([x, np.full((4, 2), np.nan, precision)])
    weights = np.concatenate([np.ones(20), np.zeros(4)])
    for problem in PROBLEMS.values():
        plain = jc.lower_bound(x, 3, problem=problem)
        wide = jc.lower_bound(padded, 3, problem=problem, sample_weight=weights)
        assert wide == pytest.approx(plain, rel=1e-4)
    assert jc.upper_bound(x, 3) == pytest.approx(
        jc.upper_bound(padded, 3, sample_weight=weights), rel=1e-5
    )


def test_byte_budget_does_not_show(precision):
    x = np.random.default_rng(1).normal(size=(70, 3)).astype(precision)
    whole = jc.lower_bound(x, 2)
    assert jc.lower_bound(x, 2, byte_budget=1) == pytest.approx(whole, rel=1e-6)
    assert jc.lower_bound(x, 2, byte_budget=20_000) == pytest.approx(whole, rel=1e-6)


def test_memory_stays_within_the_budget():
    """n = 20,000, d = 8, as compiled."""
    x = jax.ShapeDtypeStruct((20_000, 8), np.float32)
    arguments = (x, None, 3, jax.ShapeDtypeStruct((), np.float32), jc.CMLE(), 0.0)
    compiled = bounds._bound_terms.lower(*arguments, byte_budget=2**28).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**28


def test_impossible_sizes_are_refused():
    x = np.arange(10.0)[:, None]
    with pytest.raises(ValueError, match="lower n_clusters or min_size, or raise balance"):
        jc.lower_bound(x, 3, min_size=4)
    with pytest.raises(ValueError, match="balance or min_size, not both"):
        jc.lower_bound(x, 3, min_size=3, balance=3)


def test_upper_bound_equals_the_oracle_and_is_above_the_optimum(precision):
    valid = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        d = (1, 2)[seed % 2]
        x = reference.well_defined_instance(rng, 9, d, FAMILIES[seed % 3]).astype(precision)
        gamma, bound, smallest = jc.upper_bound(x, 2)
        expected = reference.gamma_bound(x, 2)
        assert gamma == pytest.approx(expected[0], rel=1e-4)
        _, _, labels = reference.gonzalez(x, 2)
        assert smallest == np.bincount(labels, minlength=2).min()
        if smallest < 2:
            assert bound == math.inf
            continue
        valid += 1
        assert bound == pytest.approx(expected[1], rel=1e-4)
        optimum, _ = reference.brute_force(x, 2, int(smallest))
        assert bound >= optimum - 1e-3
    assert valid > 10


def test_a_certificate_on_a_solution(precision):
    rng = np.random.default_rng(2)
    for seed in range(10):
        x = reference.random_mixture_data(np.random.default_rng(seed), 9, 2, 2, 6.0)[0]
        x = x.astype(precision)
        optimum, labels = reference.brute_force(x, 2, 3)
        solution = jc.cem(x, jc.estimate(x, labels, 2), min_size=3)
        certified = jc.with_certificate(x, solution, min_size=3)
        guarantee = certified.guarantee
        assert guarantee.kind == "certificate"
        assert guarantee.min_size == 3
        np.testing.assert_array_equal(certified.labels, solution.labels)
        if int(solution.status) != jc.Status.CONVERGED:
            assert guarantee.gap == math.inf
            continue
        assert guarantee.gap >= (float(solution.cost) - optimum) / 9 - 1e-5
        wanted = (float(solution.cost) - guarantee.lower_bound) / 9
        assert guarantee.gap == pytest.approx(wanted, abs=1e-5)
    # A cluster under the minimum size: no claim.
    x = np.concatenate([rng.normal(size=(20, 1)), [[50.0], [50.1]]])
    solution = jc.cem(x, jc.seed(jax.random.key(0), x, 2, method="farthest"))
    assert jc.with_certificate(x, solution, min_size=5).guarantee.gap == math.inf
    assert math.isfinite(jc.with_certificate(x, solution, min_size=2).guarantee.gap)


def test_gradients_of_the_bound(precision):
    if precision == np.float32:
        pytest.skip("finite differences need float64")
    x = np.random.default_rng(3).normal(size=(12, 2))
    direction = np.random.default_rng(4).normal(size=(12, 2))
    weights = np.random.default_rng(5).uniform(0.5, 2, size=12)
    for options in ({}, {"sample_weight": weights}):

        def bound(x, options=options):
            return jc.lower_bound(x, 2, min_size=3, **options)

        step = 1e-6
        slope = (bound(x + step * direction) - bound(x - step * direction)) / (2 * step)
        gradient = jax.grad(bound)(x)
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5)
    assert np.isnan(jax.jit(lambda x: jc.lower_bound(x, 2))(np.where(x > 1, np.nan, x)))


def test_certificate_under_jit(precision):
    x = np.random.default_rng(0).normal(size=(12, 2)).astype(precision)
    solution = jc.cem(x, jc.seed(jax.random.key(0), x, 2))
    traced = jax.jit(jc.with_certificate)(x, solution).guarantee
    eager = jc.with_certificate(x, solution).guarantee
    assert traced.kind == eager.kind == "certificate"
    assert float(traced.lower_bound) == pytest.approx(eager.lower_bound, rel=1e-5)
