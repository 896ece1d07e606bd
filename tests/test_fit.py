"""The practical search: against brute force, and what a user relies on."""

import dataclasses
import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from support import BETA, PROBLEMS, tolerance

import jaxcmle as jc
from jaxcmle.solve import fit as fit_module
from jaxcmle.solve.evolution import advance
from jaxcmle.solve.padding import padded

PRECISIONS = ("float32",)
UNIT = np.sqrt(4 / np.pi)
FLOOR = 1e-3
# Few shapes, so that few programs are compiled.
N, D, K = 56, 2, 3
SMALL = jc.Effort(rounds=3, restarts=1, methods=("kmeans++",))


def clusters(seed=0, n=N, spread=4.0):
    rng = np.random.default_rng(seed)
    return reference.random_mixture_data(rng, n, D, K, spread)[0].astype(np.float32)


def small_instance(seed, d, k):
    """Return at most ten points of one of five kinds, and a minimum size, often a tight one."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2 * k, 11))
    x = rng.normal(size=(n, d)) * 3
    family = seed % 5
    if family == 1:
        x[0] *= 20
    elif family == 2:
        x = np.round(x)
    elif family == 3:
        x[: n // 2] *= 0.05
    elif family == 4:
        x = rng.standard_cauchy(size=(n, d))
    size = int(rng.integers(2, n // k + 1)) if seed % 2 else 2
    return x, size


@pytest.mark.parametrize(("name", "d", "k"), [("cmle", 1, 2), ("wkm", 1, 4), ("ucmle", 2, 3)])
def test_the_optimum_by_brute_force_is_found(name, d, k):
    missed, count = 0, 0
    for seed in range(60):
        x, size = small_instance(seed, d, k)
        if len(np.unique(x, axis=0)) < k:
            continue
        optimum, _ = reference.brute_force(x, k, size, name, BETA, min_variance=FLOOR)
        solution = jc.fit(
            x,
            k,
            problem=PROBLEMS[name],
            min_size=size,
            min_variance=FLOOR,
            key=jax.random.key(seed),
        )
        labels = np.asarray(solution.labels)
        assert np.bincount(labels, minlength=k).min() >= size
        cost = reference.partition_cost(x, labels, k, name, BETA, min_variance=FLOOR)
        assert cost >= optimum - 1e-6 * max(1, abs(optimum))
        missed += cost > optimum + 1e-4 * max(1, abs(optimum))
        count += 1
    assert count > 50
    assert missed <= 0.01 * count + 1e-9


def test_the_example_of_the_specification_is_solved():
    x = np.array([[0.0], [UNIT], [2 * UNIT], [100.0]])
    solution = jc.fit(x, 2)
    assert abs(float(solution.cost) - 15.082) < 1e-3
    assert int(solution.status) == jc.Status.CONVERGED
    assert not bool(solution.consistent)


def test_the_solution_is_what_it_says():
    x = clusters()
    solution = jc.fit(x, K, effort=SMALL)
    assert int(solution.status) == jc.Status.CONVERGED
    assert solution.labels.shape == (N,)
    np.testing.assert_allclose(
        solution.cost, jc.partition_cost(x, solution.labels, K), rtol=tolerance(np.float32)
    )
    assert bool(solution.consistent)
    np.testing.assert_array_equal(solution.labels, jc.assign(x, solution.mixture))
    deltas = np.asarray(jc.move_deltas(x, solution.labels, K))
    sizes = np.bincount(np.asarray(solution.labels), minlength=K)
    assert deltas[sizes[np.asarray(solution.labels)] > 2].min() > -1e-3
    assert solution.guarantee.kind == "certificate"
    assert 0 <= solution.guarantee.gap < 5
    assert solution.guarantee.min_size == 2


def test_the_same_key_gives_the_same_answer_and_padding_none_other():
    x = clusters(1, spread=1.0)
    first, again = (jc.fit(x, K, effort=SMALL, key=jax.random.key(5)) for _ in range(2))
    np.testing.assert_array_equal(first.labels, again.labels)
    assert float(first.cost) == float(again.cost)
    longer = np.concatenate([np.full((4, D), np.nan, np.float32), x])
    weights = np.concatenate([np.zeros(4), np.ones(N)])
    same = jc.fit(longer, K, effort=SMALL, key=jax.random.key(5), sample_weight=weights)
    np.testing.assert_array_equal(same.labels[4:], first.labels)
    assert same.labels.shape == (N + 4,)


def test_what_a_key_draws_does_not_depend_on_the_length():
    x = jnp.asarray(clusters(2))
    for n in (49, 56):
        longer, weight = padded(x[:n], None)
        assert longer.shape[0] == 56
        assert float(weight.sum()) == n
    keys = jax.random.split(jax.random.key(0), 4)
    draw = jax.vmap(lambda key: jax.random.uniform(key, (56,)))(keys)
    np.testing.assert_array_equal(
        jax.vmap(lambda key: jax.random.uniform(key, (49,)))(keys), draw[:, :49]
    )


def test_other_values_and_lengths_compile_nothing():
    jc.fit(clusters(0), K, effort=SMALL)
    before = advance._cache_size()
    jc.fit(clusters(1)[:50], K, effort=dataclasses.replace(SMALL, rounds=4, starts=16), min_size=3)
    assert advance._cache_size() == before


def test_an_offset_does_not_change_the_partition():
    x = np.round(clusters(3) * 64) / 64
    plain = jc.fit(x, K, effort=SMALL)
    moved = jc.fit(x + np.float32(1e4), K, effort=SMALL)
    # Clusters may have other numbers: the search rounds differently, and takes another way.
    pairs = set(zip(plain.labels.tolist(), moved.labels.tolist(), strict=True))
    assert len(pairs) == K
    np.testing.assert_allclose(moved.cost, plain.cost, rtol=1e-5)


def test_a_warm_start_is_never_made_worse():
    x = clusters(4, spread=1.0)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, K, N)
    quick = dataclasses.replace(SMALL, rounds=1)
    best = jc.fit(x, K)
    for init in (labels, best, best.mixture, best.labels):
        solution = jc.fit(x, K, init=init, effort=quick, key=jax.random.key(9))
        given = jc.partition_cost(x, labels, K) if init is labels else best.cost
        assert float(solution.cost) <= float(given) * (1 + 1e-6)
    with pytest.raises(ValueError, match="init has 2 clusters"):
        jc.fit(x, K, init=jc.seed(jax.random.key(0), x, 2))
    with pytest.raises(ValueError, match="one label per point"):
        jc.fit(x, K, init=[0, 1])


def test_a_warm_start_that_cem_would_leave_is_kept():
    x = np.array([[0.0], [UNIT], [2 * UNIT], [100.0]])
    solution = jc.fit(x, 2, init=[0, 0, 1, 1], effort=dataclasses.replace(SMALL, rounds=1))
    assert abs(float(solution.cost) - 15.082) < 1e-3


def test_a_time_limit_returns_the_best_so_far():
    x = clusters()
    effort = dataclasses.replace(SMALL, rounds=10**6, patience=10**6)
    solution = jc.fit(x, K, effort=effort, time_limit=0.3)
    assert int(solution.status) == jc.Status.INTERRUPTED
    assert 1 <= int(solution.n_iter) < 10**6
    assert np.isfinite(solution.cost)
    assert solution.guarantee.kind == "none"
    assert "interrupted" in solution.guarantee.reason
    again = jc.fit(x, K, effort=dataclasses.replace(effort, seconds=0.0))
    assert int(again.n_iter) == 1


@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_returns_the_best_so_far():
    x = clusters()
    reports = []

    def progress(report):
        reports.append(report)
        if report.done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    effort = dataclasses.replace(SMALL, rounds=10**6, patience=10**6)
    solution = jc.fit(x, K, effort=effort, progress=progress)
    assert int(solution.status) == jc.Status.INTERRUPTED
    assert int(solution.n_iter) in (3, 4)
    costs = [report.cost for report in reports]
    assert costs == sorted(costs, reverse=True)


def test_progress_is_silent_unless_asked_for(capsys):
    x = clusters()
    jc.fit(x, K, effort=SMALL)
    assert capsys.readouterr().err == ""
    jc.fit(x, K, effort=SMALL, progress=True)
    assert "of 3 rounds" in capsys.readouterr().err


def test_searches_that_agree_are_enough():
    x = clusters(8, n=70, spread=30.0)
    effort = jc.Effort(patience=2, restarts=5, agreeing=2, methods=("kmeans++",))
    two = jc.fit(x, K, effort=effort)
    five = jc.fit(x, K, effort=dataclasses.replace(effort, agreeing=5))
    never = jc.fit(x, K, effort=dataclasses.replace(effort, agreeing=6))
    # Each has a round of starts and two in which nothing improves; the last one has no starts.
    assert [int(each.n_iter) for each in (two, five, never)] == [6, 15, 17]
    assert float(two.cost) == float(five.cost) == float(never.cost)


def test_clusters_of_identical_points_do_not_win():
    """A pair of equal points would cost less than anything: it must lose all the same."""
    blob = np.arange(N) % 2
    x = (np.random.default_rng(5).normal(size=(N, D)) + 9 * blob[:, None]).astype(np.float32)
    x[2] = x[0]
    solution = jc.fit(x, K, min_size=2)
    sizes = np.bincount(np.asarray(solution.labels), minlength=K)
    assert sizes[solution.labels[0]] > 2
    assert float(solution.mixture.variances.min()) > 1e-4
    pair = np.where(np.isin(np.arange(N), [0, 2]), 2, blob)
    assert float(jc.partition_cost(x, pair, K, min_variance=1e-12)) < float(solution.cost)


def test_heavy_duplicates_and_constant_columns():
    x = np.repeat([[0.0, 7.0], [5.0, 7.0], [9.0, 7.0]], [20, 20, 16], axis=0).astype(np.float32)
    solution = jc.fit(x, K, effort=SMALL)
    assert np.isfinite(solution.cost)
    assert int(solution.status) == jc.Status.CONVERGED
    assert len(set(np.asarray(solution.labels)[[0, 20, 40]].tolist())) == 3


@pytest.mark.parametrize(
    ("n", "d", "k"), [(1, 1, 1), (9, 2, 1), (5, 2, 5), (20, 30, 3), (20, 60, 3)]
)
def test_edges(n, d, k):
    x = np.random.default_rng(0).normal(size=(n, d))
    solution = jc.fit(x, k, effort=SMALL)
    assert np.isfinite(solution.cost)
    assert int(solution.status) == jc.Status.CONVERGED
    assert np.bincount(np.asarray(solution.labels), minlength=k).min() >= 1


def test_whole_weights_are_copies():
    x = clusters(6)
    weights = np.tile([1, 3], N // 2)
    solution = jc.fit(x, K, sample_weight=weights)
    assert int(solution.status) == jc.Status.CONVERGED
    # A tenth of the average of 112 copies.
    assert solution.guarantee.min_size == 4
    copies = np.repeat(np.asarray(solution.labels), weights)
    same = jc.partition_cost(np.repeat(x, weights, axis=0), copies, K)
    np.testing.assert_allclose(solution.cost, same, rtol=1e-5)


def test_a_sample_is_searched_where_there_are_many_points():
    rng = np.random.default_rng(7)
    x = rng.normal(size=(1500, D)) + 6 * np.arange(1500)[:, None] % 18
    effort = jc.Effort(rounds=4, restarts=1, methods=("kmeans++",), sample=224)
    truth = jc.cem(x, jc.estimate(x, np.arange(1500) % 3, K))
    sampled = jc.fit(x, K, effort=effort)
    assert int(sampled.status) == jc.Status.CONVERGED
    assert sampled.labels.shape == (1500,)
    assert float(sampled.cost) <= float(truth.cost) + 0.01
    known = jc.fit(x, K, effort=effort, init=truth)
    assert float(known.cost) <= float(truth.cost) * (1 + 1e-6)


def test_clusters_of_many_points_that_cem_makes_too_small_are_large_enough_in_the_end():
    # One cluster that is to be three: CEM all but gives up two of them.
    x = np.random.default_rng(0).normal(size=(50_000, D)).astype(np.float32)
    solution = jc.fit(x, K, effort=dataclasses.replace(SMALL, rounds=4, sample=1000))
    assert int(solution.status) in (jc.Status.CONVERGED, jc.Status.MAX_ITER)
    assert np.bincount(solution.labels).min() >= len(x) / (10 * K)


def test_without_a_certificate_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(fit_module, "MOST_CERTIFIED", 10)
    solution = jc.fit(clusters(), K, effort=SMALL)
    assert solution.guarantee.kind == "none"
    assert "56 points are more than 10" in solution.guarantee.reason
    assert "with_certificate" in solution.guarantee.reason
    solution = jc.fit(clusters(), K, effort=SMALL, min_size=0)
    assert np.isfinite(solution.cost)
    assert solution.guarantee.kind == "none"
    assert "without a minimum size" in solution.guarantee.reason
    assert math.isinf(solution.guarantee.gap)


def test_all_methods_of_starting():
    x = clusters()
    methods = ("kmeans++", "farthest", "random", "subsets", "abs", "em", "annealed")
    for method in methods:
        solution = jc.fit(x, K, effort=dataclasses.replace(SMALL, methods=(method,)))
        assert int(solution.status) == jc.Status.CONVERGED


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"effort": "much"}, ValueError, "effort must be one of"),
        ({"effort": 3}, TypeError, "jaxcmle.Effort"),
        ({"effort": jc.Effort(rounds=0)}, ValueError, r"Effort.rounds must be 1 or more"),
        ({"effort": jc.Effort(methods=("x",))}, ValueError, r"Effort.methods must be some of"),
        ({"effort": jc.Effort(methods="em")}, ValueError, r"Effort.methods must be some of"),
        ({"min_size": 30}, ValueError, "3 clusters of at least 30"),
        ({"min_size": -1}, ValueError, "min_size must be 0 or more"),
        ({"time_limit": -1}, ValueError, "time_limit must be 0 or more"),
        ({"progress": 3}, TypeError, "progress must be"),
        ({"key": 3}, TypeError, "key must be one key"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        jc.fit(clusters(), K, **options)


def test_bad_points_and_tracing():
    x = clusters()
    x[3, 0] = np.nan
    with pytest.raises(ValueError, match="first in row 3"):
        jc.fit(x, K)
    with pytest.raises(ValueError, match="distinct points"):
        jc.fit(np.ones((5, 2)), 2)
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda x: jc.fit(x, K))(clusters())
