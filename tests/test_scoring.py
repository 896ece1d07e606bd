"""Scoring a product equals scoring every candidate on its own."""

import numpy as np
import pytest
import reference
from products import random_columns, random_repetitions, repetition_inputs, walk
from support import tolerance

from jaxcmle.candidates import scoring
from jaxcmle.candidates.scoring import NO_PRUNING

# Columns of each component: one component, one column, more than a tile holds on both sides.
SIZES = ((7,), (300,), (1, 5), (9, 300), (6, 5, 7), (3, 4, 3, 5), (3, 2, 3, 2, 4))


def assert_best(best, costs, m, n, dtype):
    """The costs are the smallest; every choice costs what it says, and none comes twice."""
    values, _ = reference.smallest_entries(costs, m)
    scale = tolerance(dtype) * np.maximum(1, np.abs(values))
    assert (np.abs(np.asarray(best.cost[: len(values)], np.float64) - values) <= scale).all()
    chosen = [tuple(choice) for choice in np.asarray(best.choice[: len(values)])]
    assert len(set(chosen)) == len(values)
    for cost, choice in zip(np.asarray(best.cost), chosen, strict=False):
        assert abs(float(cost) - costs[choice]) <= tolerance(dtype) * max(1, abs(costs[choice]))
    assert (np.asarray(best.cost[len(values) :]) == np.inf).all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_product_equals_the_naive_one(sizes, weighted, precision):
    rng = np.random.default_rng(len(sizes) + 10 * weighted)
    n = 37
    for kind in ("plain", "padding"):
        columns = random_columns(rng, sizes, n, precision, kind)
        masses = [rng.uniform(0.1, 1, size) for size in sizes] if weighted else None
        if weighted:
            logs = [-np.log(mass)[:, None].astype(precision) for mass in masses]
            columns = [column + log for column, log in zip(columns, logs, strict=True)]
        naive = [column.astype(np.float64) for column in columns]
        costs = reference.product_costs(naive, masses, float(n))
        assert_best(walk(columns, masses, float(n), 20), costs, 20, n, precision)


@pytest.mark.parametrize("sizes", [(9, 300), (6, 5, 7)], ids=str)
def test_top_m_is_exact_with_ties(sizes, precision):
    """Whole numbers add up without rounding: the choices themselves have to be the first ones."""
    rng = np.random.default_rng(3)
    for m in (1, 5, 40):
        columns = random_columns(rng, sizes, 16, precision, "ties")
        best = walk(columns, None, 16.0, m, pruning=NO_PRUNING)
        values, index = reference.smallest_entries(
            reference.product_costs([column.astype(float) for column in columns], None, 16.0), m
        )
        assert np.asarray(best.cost).tolist() == list(values)
        assert [tuple(choice) for choice in np.asarray(best.choice)] == [tuple(i) for i in index]


def test_nan_and_infinity_never_win():
    columns = [np.ones((4, 16), np.float32), np.full((3, 16), 2.0, np.float32)]
    columns[0][1, 3] = np.nan
    columns[0][2] = np.inf
    columns[1][0, 5] = np.nan
    best = walk(columns, None, 16.0, 12, pruning=NO_PRUNING)
    finite = np.isfinite(np.asarray(best.cost))
    assert finite.any()
    assert not np.isnan(np.asarray(best.cost)).any()
    # NaN and infinity cost nothing only where the other component has a number: 2 there.
    naive = [np.nan_to_num(column, nan=np.inf, posinf=np.inf) for column in columns]
    values, index = reference.smallest_entries(reference.product_costs(naive, None, 16.0), 12)
    assert [tuple(choice) for choice in np.asarray(best.choice)] == [tuple(i) for i in index]
    assert np.asarray(best.cost).tolist() == values


# Repetitions.


@pytest.mark.parametrize(("k", "g", "w"), [(1, 3, 1), (2, 3, 5), (3, 2, 7), (4, 2, 1), (5, 2, 2)])
@pytest.mark.parametrize("problem", ["cmle", "ucmle"])
def test_repetitions_equal_the_naive_ones(k, g, w, problem, precision):
    rng = np.random.default_rng(k)
    w = w if problem == "cmle" else 1
    s, m = 40, 30
    x, weight, means, variances, weights = random_repetitions(rng, s, 70, 2, k, g, w, precision)
    # Means of very different quality, some all alike.
    means[: s // 2] += 8
    means[5] = means[4]
    inputs = repetition_inputs(x, weight, means, variances, weights, problem)
    best = scoring.score_repetitions(
        *inputs, scoring.nothing_yet(m, 3 + k, precision), pruning=NO_PRUNING, tile=16
    )
    costs = np.stack(
        [
            reference.block_means_costs(
                *(value.astype(float) for value in (x, weight, mean, variances)),
                np.log(weights.astype(float)),
                problem,
                1.0,
            )
            for mean in means
        ]
    )
    shifted = best._replace(
        choice=np.asarray(best.choice)[:, 1:] - np.eye(1, k + 2, dtype=int) * 100
    )
    assert_best(shifted, costs, m, len(x), precision)
    assert (np.asarray(best.choice[:, 0]) == 5).all()
