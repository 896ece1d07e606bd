"""The bounds hold against brute force, and equal the oracle's."""

import math
from functools import partial

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
        # Weights of 0 and 1 take the way of no weights, where they can be seen.
        assert wide == pytest.approx(plain, rel=4 * float(np.finfo(precision).eps))
        hidden = jax.jit(partial(jc.lower_bound, n_clusters=3, problem=problem))
        assert hidden(padded, sample_weight=weights) == pytest.approx(plain, rel=1e-4)
    assert jc.upper_bound(x, 3) == pytest.approx(
        jc.upper_bound(padded, 3, sample_weight=weights), rel=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_padding_with_whole_points(name, precision):
    """Weights of 0 and 1 take the way of no weights, for any sizes, in a batch."""
    problem, floor, most = PROBLEMS[name], 0.01, 33
    rng = np.random.default_rng(0)
    counts, clusters, sizes = (27, 33), np.array([3, 2]), np.array([4.5, 11])
    x = [rng.normal(size=(n, 2)).astype(precision) for n in counts]
    padded = np.full((2, most, 2), np.nan, precision)
    weights = np.zeros((2, most), precision)
    for i, n in enumerate(counts):
        places = np.sort(rng.permutation(most)[:n])
        padded[i, places], weights[i, places] = x[i], 1

    def terms(x, weight, k, size, floor):
        return bounds.bound_terms(x, weight, k, size, problem, floor, 2**28, whole_points=True)

    given = (padded, weights, clusters, sizes.astype(precision), np.full(2, floor, precision))
    mapped = jax.jit(lambda given: jax.lax.map(lambda one: terms(*one), given))(given)
    if name == "cmle":
        together = jax.jit(jax.vmap(terms))(*given)
        np.testing.assert_allclose(together.bound, mapped.bound, rtol=1e-5)
    loose = 1e-5 if precision == np.float32 else 1e-13
    for i in range(2):
        options = {"min_size": sizes[i], "problem": problem, "min_variance": floor}
        plain = jc.lower_bound(x[i], int(clusters[i]), **options)
        assert mapped.bound[i] == pytest.approx(plain, abs=loose * (most + abs(plain)))
        exact = reference.lower_bound(x[i], clusters[i], sizes[i], name, BETA, min_variance=floor)
        assert mapped.bound[i] <= exact
        assert mapped.bound[i] == pytest.approx(exact, abs=10 * loose * (most + abs(exact)))
        assert (mapped.each[i][weights[i] == 0] == 0).all()


def test_padding_with_whole_points_at_the_edges(precision):
    def bound(x, weight, k, size):
        size = np.asarray(size, precision)
        given = (x, weight, k, size, jc.CMLE(), 0.0, 2**28)
        return bounds.bound_terms(*given, whole_points=True).bound

    x = np.random.default_rng(0).normal(size=(30, 2)).astype(precision)
    ones, none = np.ones(30, precision), np.zeros(30, precision)
    assert bound(x, ones, 3, 5) == bound(x, None, 3, 5)
    assert bound(x, none, 3, 5) == math.inf
    half = (np.arange(30) < 15).astype(precision)
    assert bound(x, half, 3, 6) == math.inf
    # Absent points lie at the origin: they must not count as near ones.
    far = np.where(half[:, None] > 0, 1e3 * x, np.inf).astype(precision)
    plain = jc.lower_bound(far[:15], 2, min_size=4)
    assert bound(far, half, 2, 4) == pytest.approx(plain, rel=1e-5)
    gradient = jax.grad(bound)(far, half, 2, np.asarray(4.5, precision))
    expected = jax.grad(lambda x: jc.lower_bound(x, 2, min_size=4.5))(far[:15])
    np.testing.assert_allclose(gradient[:15], expected, rtol=1e-3, atol=1e-6)
    assert (gradient[15:] == 0).all()
    assert np.isnan(bound(np.where(x > 1, np.nan, x), ones, 3, 5))


def test_many_points_equal_the_oracle(precision):
    """Enough points for the sorting network, and for several tiles of it."""
    for n, size in ((40, 3), (700, 50)):
        x = np.random.default_rng(n).normal(size=(n, 1)).astype(precision)
        bound = jc.lower_bound(x, 3, min_size=size)
        distances = np.sort(reference.squared_distances(x, x), axis=1)
        sizes = np.arange(1, n + 1)
        variances = np.cumsum(distances, axis=1) / (2 * sizes)
        with np.errstate(divide="ignore"):
            terms = 0.5 * np.log(2 * np.pi * np.e * variances) - np.log(sizes / n)
        expected = terms[:, size - 1 : n - 2 * size].min(axis=1).sum()
        loose = 1e-5 if precision == np.float32 else 1e-13
        assert expected - loose * abs(expected) <= bound <= expected


def test_byte_budget_does_not_show(precision):
    x = np.random.default_rng(1).normal(size=(70, 3)).astype(precision)
    whole = jc.lower_bound(x, 2)
    assert jc.lower_bound(x, 2, byte_budget=1) == pytest.approx(whole, rel=1e-6)
    assert jc.lower_bound(x, 2, byte_budget=20_000) == pytest.approx(whole, rel=1e-6)


def test_memory_stays_within_the_budget():
    """n = 20,000, d = 8, as compiled."""
    x = jax.ShapeDtypeStruct((20_000, 8), np.float32)
    arguments = (x, None, 3, jax.ShapeDtypeStruct((), np.float32), jc.CMLE(), 0.0)
    compiled = bounds.bound_terms.lower(*arguments, byte_budget=2**28).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**28
    # Just above a power of two, where the sorting network is widest.
    arguments = (jax.ShapeDtypeStruct((520, 2), np.float32), *arguments[1:])
    compiled = bounds.bound_terms.lower(*arguments, byte_budget=2**19).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**19


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
    # Enough points for the sorting network.
    x = np.random.default_rng(3).normal(size=(26, 2))
    direction = np.random.default_rng(4).normal(size=(26, 2))
    weights = np.random.default_rng(5).uniform(0.5, 2, size=26)
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
