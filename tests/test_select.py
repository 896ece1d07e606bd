"""Choosing the number of clusters."""

import itertools
import json
import math

import jax
import numpy as np
import pytest

import jaxcmle as jc
from jaxcmle.solve import many
from jaxcmle.solve.criteria import criteria

PRECISIONS = ("float32",)
# Everywhere the same shape: one program for all tests.
N, MOST = 240, 8
NUMBERS = range(1, MOST + 1)


def well_separated(rng):
    """Return points of 2 to 6 clusters, their centres 9 and more of their widths apart."""
    k = int(rng.integers(2, 7))
    sigma = rng.uniform(0.5, 2.0, size=k)
    while True:
        centres = rng.uniform(-40, 40, size=(k, 2))
        distances = [
            math.dist(centres[i], centres[j]) / max(sigma[i], sigma[j])
            for i, j in itertools.combinations(range(k), 2)
        ]
        if min(distances) > 9:
            break
    share = rng.dirichlet(np.full(k, 5.0)) * 0.7 + 0.3 / k
    labels = rng.choice(k, size=N, p=share)
    return centres[labels] + rng.normal(size=(N, 2)) * sigma[labels][:, None], k


@pytest.fixture(scope="module")
def mixtures():
    rng = np.random.default_rng(11)
    return [well_separated(rng) for _ in range(50)]


def test_the_true_number_is_found(mixtures):
    tables = [jc.select(x, NUMBERS, progress=False).table for x, _ in mixtures]
    true = [k for _, k in mixtures]
    by_icl = [int(table.n_clusters[table.best]) for table in tables]
    by_bic = [int(table.n_clusters[table.bic.argmin()]) for table in tables]
    for chosen in (by_icl, by_bic):
        assert sum(k == wanted for k, wanted in zip(chosen, true, strict=True)) >= 45, chosen


def test_the_table_is_true(mixtures):
    """Its numbers are those of its solutions, which are those of `fit`."""
    x, _ = mixtures[0]
    key = jax.random.key(4)
    solution, table = jc.select(x, NUMBERS, key=key, effort="quick")
    assert len(table) == MOST
    assert solution is table.solutions[table.best]
    assert table.icl[table.best] == table.icl.min()
    for i, one in enumerate(table.solutions):
        assert table.n_clusters[i] == len(one.mixture.weights) == i + 1
        assert table.status[i] == one.status == jc.Status.CONVERGED
        assert table.cost[i] == pytest.approx(float(one.cost))
        assert table.smallest[i] == np.bincount(one.labels, minlength=i + 1).min()
        if i == table.best:
            wanted = criteria(x, one.mixture, partition_cost=float(one.cost))
            found = (table.aic[i], table.bic[i], table.icl[i])
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        if i:
            assert table.gap[i] == one.guarantee.gap < math.inf
    assert table.gap[0] == 0
    k = int(table.n_clusters[table.best])
    alone = jc.fit(x, k, key=key, effort="quick")
    assert (np.asarray(alone.labels) == solution.labels).all()
    assert float(alone.cost) == pytest.approx(float(solution.cost), rel=1e-5)


@pytest.mark.parametrize("criterion", ["icl", "bic", "aic"])
def test_the_criterion_decides(mixtures, criterion):
    x, _ = mixtures[2]
    solution, table = jc.select(x, NUMBERS, criterion=criterion, effort="quick")
    values = getattr(table, criterion)
    assert table.criterion == criterion
    assert len(solution.mixture.weights) == 1 + values.argmin()


def test_what_is_found_does_not_depend_on_the_other_numbers(mixtures):
    x, true = mixtures[1]
    _, table = jc.select(x, NUMBERS, effort="quick")
    _, fewer = jc.select(x, [true, MOST, true], effort="quick")
    assert fewer.n_clusters.tolist() == [true, MOST]
    np.testing.assert_allclose(fewer.icl, table.icl[[true - 1, MOST - 1]], rtol=1e-5)


def test_weights_count_as_copies(mixtures):
    x, true = mixtures[3]
    x = x[:160]
    weight = np.random.default_rng(0).integers(0, 3, size=160)
    _, weighted = jc.select(x, [1, true, MOST], sample_weight=weight, effort="quick")
    _, copied = jc.select(np.repeat(x, weight, axis=0), [1, true, MOST], effort="quick")
    np.testing.assert_allclose(weighted.icl[:2], copied.icl[:2], rtol=1e-4)
    np.testing.assert_allclose(weighted.bic[:2], copied.bic[:2], rtol=1e-4)
    np.testing.assert_allclose(weighted.smallest[:2], copied.smallest[:2])


@pytest.mark.parametrize("problem", [jc.UCMLE(), jc.WKM(beta=0.5)])
def test_other_problems(mixtures, problem):
    x, true = next(one for one in mixtures if one[1] == 3)
    _, table = jc.select(x, NUMBERS, problem=problem, effort="quick")
    assert np.isfinite(table.icl).all()
    one = table.solutions[2]
    wanted = criteria(x, one.mixture, problem=problem, partition_cost=float(one.cost))
    found = (table.aic[2], table.bic[2], table.icl[2])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    if isinstance(problem, jc.UCMLE):
        assert table.n_clusters[table.best] == true


def test_numbers_without_an_answer_have_a_row_and_do_no_harm(mixtures):
    x, _ = mixtures[4]
    _, table = jc.select(x, [1, 2, MOST, MOST + 1, 500], effort="quick", min_size=N / MOST)
    assert np.isfinite(table.icl[:3]).all()
    assert np.isnan(table.icl[3:]).all()
    assert table.best < 3
    assert "9 clusters of at least 30" in table.solutions[3].error
    assert "from 1 to the number of points" in table.solutions[4].error
    record = table.to_dict()
    assert record["cost"][3] is None
    json.dumps(record, allow_nan=False)
    lines = str(table).splitlines()
    assert len(lines) == 6
    assert [line.startswith("*") for line in lines[1:]].index(True) == table.best
    assert " - " in lines[5]
    assert f"best={table.best}" in repr(table)


def test_huge_offsets_change_nothing(mixtures):
    x = np.round(mixtures[5][0] * 64) / 64
    _, near = jc.select(x, NUMBERS, effort="quick")
    _, far = jc.select(x + 1e4, NUMBERS, effort="quick")
    assert far.best == near.best
    np.testing.assert_allclose(far.icl[near.best], near.icl[near.best], rtol=1e-4)


def test_points_that_are_clusters_of_their_own_do_not_win():
    """Their cost is that of the floor under variances, and may be as low as that is."""
    x = np.random.default_rng(0).normal(size=(12, 2))
    _, table = jc.select(x, [1, 2, 7, 10], effort="quick")
    assert table.degenerate.tolist() == [False, False, True, True]
    assert table.icl[3] < table.icl[0]
    assert table.n_clusters[table.best] == 1
    assert "no spread" in str(table).splitlines()[4]
    assert table.to_dict()["degenerate"] == [False, False, True, True]


@pytest.mark.parametrize(("problem", "sample"), [(jc.CMLE(), 160), (jc.UCMLE(), 8192)])
def test_many_points_take_another_way(mixtures, monkeypatch, problem, sample):
    """They go through `fit` one by one, by programs for the largest number, also on a sample."""
    monkeypatch.setattr(many, "MOST_POINTS", 100)
    effort = jc.Effort(rounds=4, patience=2, restarts=1, population=4, sample=sample)
    x, true = next(one for one in mixtures if one[1] == 3)
    solution, table = jc.select(x, [1, true, MOST], effort=effort, problem=problem)
    assert table.n_clusters.tolist() == [1, true, MOST]
    assert (table.status == jc.Status.CONVERGED).all()
    assert len(solution.mixture.weights) == true
    alone = jc.fit(x, true, effort=effort, problem=problem)
    assert (np.asarray(alone.labels) == solution.labels).all()
    for name in ("weights", "means", "variances"):
        wanted = getattr(alone.mixture, name)
        np.testing.assert_allclose(getattr(solution.mixture, name), wanted, rtol=1e-4, atol=1e-5)


def test_a_time_limit_is_kept():
    x = np.arange(20.0)[:, None]
    with pytest.raises(TimeoutError, match="time limit"):
        jc.select(x, [1, 2], time_limit=0)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (([[0.0], [1.0]], 3), {}, TypeError, "range"),
        (([[0.0], [1.0]], []), {}, ValueError, "empty"),
        (([[0.0], [1.0]], [0, 1]), {}, ValueError, "1 or more"),
        (([[0.0], [1.0]], [1.5]), {}, ValueError, "whole number"),
        (([[0.0], [1.0]], "12"), {}, TypeError, "range"),
        (([[0.0], [1.0]], [1]), {"criterion": "mdl"}, ValueError, "icl"),
        (([[0.0], [np.nan]], [1]), {}, ValueError, "NaN"),
        (([[0.0], [1.0]], [5, 6]), {}, ValueError, "no number of clusters has an answer"),
        (([[0.0], [1.0]], [1]), {"min_size": -1}, ValueError, "min_size"),
    ],
)
def test_bad_input_is_named(arguments, options, error, words):
    with pytest.raises(error, match=words):
        jc.select(*arguments, **options)
