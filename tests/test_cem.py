"""CEM against the oracle, its status codes, and restarts."""

import dataclasses
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from support import (
    BETA,
    NAMES,
    PROBLEMS,
    as_mixture,
    assert_cost,
    assert_labels,
    parameters,
    random_weights,
    stack,
    tolerance,
)

import jaxcmle as jc
from jaxcmle import numerics
from jaxcmle.refine import iterations as cem_module


def clustered(rng, n, d, k, precision, spread=4.0):
    x, labels = reference.random_mixture_data(rng, n, d, k, spread)
    return x.astype(precision), labels


@pytest.mark.parametrize(
    "case",
    [
        ("cmle", 40, 1, 3, "none"),
        ("cmle", 60, 2, 4, "whole"),
        ("cmle", 60, 30, 5, "fraction"),
        ("wkm", 60, 2, 4, "fraction"),
        ("ucmle", 60, 2, 4, "whole"),
    ],
)
def test_cem_equals_plain_cem(case, precision):
    name, n, d, k, kind = case
    same = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x, _ = clustered(rng, n, d, k, precision)
        weights = random_weights(rng, n, kind)
        values = (np.full(k, 1 / k), x[rng.choice(n, k, replace=False)], np.full(k, 4.0))
        start, values = as_mixture(values, precision)
        floor = 1e-2
        solution = jc.cem(
            x, start, problem=PROBLEMS[name], sample_weight=weights, min_variance=floor
        )
        oracle = reference.cem(x, *values, name, BETA, weights, min_variance=floor)
        found = parameters(solution.mixture)
        assert_labels(solution.labels, x, found, name, precision)
        cost = reference.model_cost(x, *found, name, BETA, weights)
        assert_cost(solution.cost, cost, n, d, precision)
        same += np.array_equal(np.asarray(solution.labels), oracle.labels)
        if np.array_equal(np.asarray(solution.labels), oracle.labels):
            assert_cost(solution.cost, oracle.costs[-1], n, d, precision)
            wanted = (oracle.weights, oracle.means, oracle.variances)
            for value, exact in zip(found, wanted, strict=True):
                np.testing.assert_allclose(value, exact, rtol=20 * tolerance(precision), atol=1e-5)
    # A near-tie in float32 may send a run elsewhere; more than one in twenty may not.
    assert same >= (38 if precision == np.float32 else 40)


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_never_rises(name, precision):
    rng = np.random.default_rng(3)
    x, _ = clustered(rng, 200, 2, 4, precision, spread=1.5)
    start = jc.seed(jax.random.key(0), x, 4, method="random")
    costs = [float(jc.cem(x, start, problem=PROBLEMS[name], max_iter=i).cost) for i in range(30)]
    slack = tolerance(precision) * abs(costs[-1])
    assert all(after <= before + slack for before, after in pairwise(costs))
    assert costs[-1] < costs[0]


def test_the_solution_is_consistent_with_the_public_functions(precision):
    rng = np.random.default_rng(4)
    x, _ = clustered(rng, 150, 2, 3, precision)
    solution = jc.cem(x, jc.seed(jax.random.key(1), x, 3))
    assert int(solution.status) == jc.Status.CONVERGED
    np.testing.assert_array_equal(solution.labels, jc.assign(x, solution.mixture))
    np.testing.assert_allclose(solution.cost, jc.cost(x, solution.mixture), rtol=1e-6)
    partition = jc.partition_cost(x, solution.labels, 3)
    np.testing.assert_allclose(solution.cost, partition, rtol=tolerance(precision))
    assert solution.guarantee.kind == "none"
    assert solution.labels.dtype == jnp.int32
    assert solution.cost.dtype == precision


@pytest.mark.parametrize(("d", "k"), [(2, 4), (20, 10)])
def test_fast_iterations_lead_to_the_same_answer(d, k, precision, monkeypatch):
    """The exact iterations alone end in the same place, on easy data with the same start."""
    rng = np.random.default_rng(5)
    n = 17_000
    x, _ = clustered(rng, n, d, k, precision, spread=8.0)
    start = jc.seed(jax.random.key(2), x, k)
    fast = jc.cem(x, start)
    monkeypatch.setattr(cem_module, "FAST_FROM", 10**9)
    limits = cem_module.Limits(300, 2, None)
    stacked = jax.tree.map(lambda leaf: leaf[None], start)
    exact = jax.jit(cem_module.cem_stack.__wrapped__)(x, None, stacked, jc.CMLE(), limits)
    assert int(fast.status) == int(exact.status[0]) == jc.Status.CONVERGED
    np.testing.assert_allclose(fast.cost, exact.cost[0], rtol=10 * tolerance(precision))
    assert (np.asarray(fast.labels) == np.asarray(exact.labels[0])).mean() > 0.999


def test_status_converged_and_max_iter(precision):
    rng = np.random.default_rng(6)
    x, _ = clustered(rng, 200, 2, 4, precision, spread=1.5)
    start = jc.seed(jax.random.key(0), x, 4, method="random")
    for limit in (0, 1, 2):
        solution = jc.cem(x, start, max_iter=limit)
        assert int(solution.status) == jc.Status.MAX_ITER
        assert int(solution.n_iter) == limit
    solution = jc.cem(x, start)
    assert int(solution.status) == jc.Status.CONVERGED
    assert int(jc.cem(x, solution.mixture).n_iter) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_cluster_is_inadmissible_and_finite(name, precision):
    rng = np.random.default_rng(7)
    x, _ = clustered(rng, 30, 2, 2, precision)
    far = np.array([[1e3, 1e3], [0.0, 0.0], [1e3, -1e3]])
    start, _ = as_mixture((np.full(3, 1 / 3), far, np.ones(3)), precision)
    solution = jc.cem(x, start, problem=PROBLEMS[name])
    assert all(np.isfinite(value).all() for value in parameters(solution.mixture))
    assert np.isfinite(solution.cost)
    sizes = np.bincount(np.asarray(solution.labels), minlength=3)
    assert (int(solution.status) == jc.Status.INADMISSIBLE) == (sizes.min() < 2)
    if name != "ucmle":
        assert int(solution.status) == jc.Status.INADMISSIBLE
        assert np.asarray(solution.mixture.weights).tolist()[0] == 0


def test_min_size_counts_weight(precision):
    x = np.array([[0.0], [1.0], [10.0], [11.0]])
    start, _ = as_mixture(([0.5, 0.5], [[0.5], [10.5]], [1.0, 1.0]), precision)
    assert int(jc.cem(x, start, min_size=2).status) == jc.Status.CONVERGED
    assert int(jc.cem(x, start, min_size=3).status) == jc.Status.INADMISSIBLE
    heavy = jc.cem(x, start, min_size=3, sample_weight=[2, 2, 2, 2])
    assert int(heavy.status) == jc.Status.CONVERGED
    tenths = jc.cem(x, start, min_size=0.2, sample_weight=[0.1, 0.1, 0.1, 0.1])
    assert int(tenths.status) == jc.Status.CONVERGED


def test_cem_need_not_keep_the_constrained_optimum(precision):
    """X = {0, u, 2u, 100}: the optimum with two points a cluster is left by the E-step."""
    unit = np.sqrt(4 / np.pi)
    x = np.array([[0], [unit], [2 * unit], [100]])
    start = jc.estimate(x, [0, 0, 1, 1], 2)
    solution = jc.cem(x, start)
    assert solution.labels.tolist() == [0, 0, 0, 1]
    assert int(solution.status) == jc.Status.INADMISSIBLE


def test_duplicates_and_the_floor(precision):
    x = np.repeat([[0.0, 0.0], [5.0, 5.0]], 4, axis=0)
    solution = jc.cem(x, jc.seed(jax.random.key(0), x, 2))
    assert int(solution.status) == jc.Status.CONVERGED
    assert all(np.isfinite(value).all() for value in parameters(solution.mixture))
    assert np.isfinite(solution.cost)
    zero = jc.cem(x, jc.seed(jax.random.key(0), x, 2), min_variance=0.0)
    assert np.isfinite(zero.cost)
    floored = jc.cem(x, jc.seed(jax.random.key(0), x, 2), min_variance=0.25)
    np.testing.assert_allclose(floored.mixture.variances, 0.25)
    same = jc.cem(np.ones((5, 3)), jc.seed(jax.random.key(0), np.ones((5, 3)), 1))
    assert np.isfinite(same.cost)


def test_bad_values_under_jit_have_a_status(precision):
    x = np.random.default_rng(0).normal(size=(20, 2)).astype(precision)
    start = jc.seed(jax.random.key(0), x, 2)
    run = jax.jit(jc.cem)
    run_weighted = jax.jit(lambda a: jc.cem(x, start, sample_weight=a))
    cost_weighted = jax.jit(lambda a: jc.cost(x, start, sample_weight=a))
    for value in (np.nan, np.inf):
        bad = x.copy()
        bad[3, 1] = value
        solution = run(bad, start)
        assert int(solution.status) == jc.Status.NONFINITE
        assert all(np.isfinite(part).all() for part in parameters(solution.mixture))
        for broken in (
            dataclasses.replace(start, means=start.means.at[0, 0].set(value)),
            dataclasses.replace(start, variances=start.variances.at[1].set(value)),
            dataclasses.replace(start, variances=start.variances.at[1].set(-1.0)),
            dataclasses.replace(start, weights=start.weights.at[1].set(np.nan)),
        ):
            solution = run(x, broken)
            assert int(solution.status) == jc.Status.NONFINITE
        weights = np.ones(20, precision)
        for weight in (np.nan, -1.0):
            weights[4] = weight
            solution = run_weighted(weights)
            assert int(solution.status) == jc.Status.NONFINITE
            assert np.isnan(cost_weighted(weights))
            assert all(np.isfinite(part).all() for part in parameters(solution.mixture))
    nothing = run_weighted(np.zeros(20, precision))
    assert int(nothing.status) != jc.Status.CONVERGED
    assert all(np.isfinite(part).all() for part in parameters(nothing.mixture))


def test_what_converges_is_what_is_returned(precision):
    """At an offset where means round visibly, the answer is a fixed point all the same."""
    rng = np.random.default_rng(1)
    for offset in (1e3, 1e5):
        x = np.concatenate([rng.normal(0, 0.5, (150, 1)), rng.normal(3, 1, (150, 1))]) + offset
        x = x.astype(precision)
        solution = jc.cem(x, jc.seed(jax.random.key(0), x, 4), min_variance=1e-3)
        assert int(solution.status) == jc.Status.CONVERGED
        again = jc.estimate(x, solution.labels, 4, min_variance=1e-3)
        for value, wanted in zip(parameters(solution.mixture), parameters(again), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-5)
        assert int(jc.cem(x, solution.mixture, min_variance=1e-3).n_iter) <= 1


def test_what_a_problem_fixes_is_fixed_on_the_way_out(precision):
    x = np.arange(6.0)[:, None]
    start, _ = as_mixture(([0.9, 0.1], [[1.0], [4.0]], [3.0, 5.0]), precision)
    for limit in (0, 300):
        fixed = jc.cem(x, start, problem=jc.WKM(beta=2.0), max_iter=limit)
        np.testing.assert_allclose(fixed.mixture.variances, 0.25)
        uniform = jc.cem(x, start, problem=jc.UCMLE(), max_iter=limit)
        np.testing.assert_allclose(uniform.mixture.weights, 0.5)


def test_padding_changes_nothing(precision):
    rng = np.random.default_rng(8)
    x, _ = clustered(rng, 50, 2, 3, precision)
    start = jc.seed(jax.random.key(0), x, 3)
    plain = jc.cem(x, start)
    for junk in (0.0, np.nan, np.inf, 1e30):
        padded = np.concatenate([x, np.full((14, 2), junk, precision)])
        weights = np.concatenate([np.ones(50), np.zeros(14)])
        solution = jc.cem(padded, start, sample_weight=weights)
        assert int(solution.status) == int(plain.status)
        np.testing.assert_array_equal(solution.labels[:50], plain.labels)
        np.testing.assert_allclose(solution.cost, plain.cost, rtol=tolerance(precision))
        for value, wanted in zip(
            parameters(solution.mixture), parameters(plain.mixture), strict=True
        ):
            np.testing.assert_allclose(value, wanted, rtol=10 * tolerance(precision))


@pytest.mark.parametrize("n", [120, 17_000])
def test_restarts_equal_single_runs(n, precision):
    rng = np.random.default_rng(9)
    x, _ = clustered(rng, n, 2, 4, precision, spread=2.5)
    keys = jax.random.split(jax.random.key(0), 7)
    starts = jax.vmap(lambda key: jc.seed(key, x, 4, method="random"))(keys)
    best, costs = jc.cem_restarts(x, starts, return_costs=True)
    single = [jc.cem(x, jax.tree.map(lambda leaf, i=i: leaf[i], starts)) for i in range(7)]
    admissible = [int(one.status) == jc.Status.CONVERGED for one in single]
    expected = [
        float(one.cost) if ok else np.inf for one, ok in zip(single, admissible, strict=True)
    ]
    np.testing.assert_allclose(costs, expected, rtol=tolerance(precision))
    winner = single[int(np.argmin(expected))]
    np.testing.assert_array_equal(best.labels, winner.labels)
    np.testing.assert_array_equal(best.n_iter, winner.n_iter)
    # Fewer starts, in another order: the same answers.
    some = jax.tree.map(lambda leaf: leaf[np.array([5, 2])], starts)
    _, again = jc.cem_restarts(x, some, return_costs=True)
    np.testing.assert_allclose(again, costs[np.array([5, 2])], rtol=tolerance(precision))


def test_restarts_prefer_admissible_solutions(precision):
    """A pair of near-identical points makes a cheap cluster; with min_size it must lose."""
    rng = np.random.default_rng(10)
    x = rng.normal(size=(60, 2)).astype(precision)
    x[30:, 0] += 8
    x[1] = x[0] + 1e-4
    good = (np.full(2, 0.5), np.array([[0.0, 0.0], [8.0, 0.0]]), np.ones(2))
    cheap = (np.array([0.03, 0.97]), np.stack([x[0], x.mean(axis=0)]), np.array([1e-8, 1.0]))
    starts = stack([as_mixture(values, precision)[0] for values in (cheap, good)])
    unconstrained = jc.cem_restarts(x, starts)
    constrained, costs = jc.cem_restarts(x, starts, min_size=10, return_costs=True)
    assert int(constrained.status) == jc.Status.CONVERGED
    assert np.isinf(costs[0])
    assert np.isfinite(costs[1])
    # Without a minimum size, the cheaper of the two is simply whichever costs less.
    _, free = jc.cem_restarts(x, starts, return_costs=True)
    assert float(unconstrained.cost) == float(free.min())
    hopeless = jc.cem_restarts(x, starts, min_size=59)
    assert int(hopeless.status) == jc.Status.INADMISSIBLE
    assert np.isfinite(hopeless.cost)


def test_tiles_and_batches_do_not_show(precision, monkeypatch):
    rng = np.random.default_rng(11)
    x, _ = clustered(rng, 3000, 20, 8, precision, spread=6.0)
    keys = jax.random.split(jax.random.key(0), 5)
    starts = jax.vmap(lambda key: jc.seed(key, x, 8))(keys)
    limits = cem_module.Limits(300, 2, None)
    whole = cem_module.cem_stack(x, None, starts, jc.CMLE(), limits)
    monkeypatch.setattr(numerics, "tile_bytes", lambda: 2**15)
    tiled = jax.jit(cem_module.cem_stack.__wrapped__)(x, None, starts, jc.CMLE(), limits)
    np.testing.assert_array_equal(tiled.labels, whole.labels)
    np.testing.assert_allclose(tiled.cost, whole.cost, rtol=1e-6)
