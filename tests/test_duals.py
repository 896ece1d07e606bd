"""The choice of the prices: columns are real sets, and no dual value exceeds the optimum."""

import itertools
import math

import numpy as np
import pytest
import reference
from proof_cases import Case, random_case
from support import NAMES

import jaxcmle as jc
from jaxcmle.proof import duals
from jaxcmle.proof.duals import Bundle, improve, incumbent_duals, least_square
from jaxcmle.proof.pricing import Sets
from jaxcmle.proof.rounding import data_margin, profit_margin
from jaxcmle.proof.task import make_task

PRECISIONS = ("float32",)
pytestmark = pytest.mark.usefixtures("double_precision")


def test_least_square_fulfils_the_conditions_of_an_optimum():
    """No coordinate has less gradient than those that have a share, which all have the same."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        m = 1 + seed % 25
        members = (rng.random((m, 3 + seed % 40)) < 0.4).astype(float)
        square = np.exp(rng.normal()) * (members * rng.uniform(0.5, 2)) @ members.T
        linear = 3 * rng.normal(size=m) + np.diag(square)
        start = rng.dirichlet(np.ones(m)) if seed % 2 else np.eye(m)[0]
        before = start.copy()
        p = least_square(square, linear, start)
        np.testing.assert_array_equal(start, before)
        assert (p >= 0).all()
        assert p.sum() == pytest.approx(1)
        gradient = square @ p - linear
        scale = 1 + np.abs(gradient).max()
        assert (gradient[p > 0] - gradient.min() <= 1e-6 * scale).all()

        def value(p, square=square, linear=linear):
            return p @ square @ p / 2 - linear @ p

        assert value(p) <= value(start) + 1e-9 * scale
        for other in [*np.eye(m), *rng.dirichlet(np.ones(m), size=20)]:
            assert value(p) <= value(other) + 1e-6 * scale


def test_least_square_with_equal_columns_and_few_steps():
    square = np.ones((4, 4))
    p = least_square(square, np.array([0.0, 2.0, 2.0, 1.0]), np.array([1.0, 0, 0, 0]))
    np.testing.assert_allclose([p[0], p[3], p[1] + p[2]], [0, 0, 1], atol=1e-12)
    rng = np.random.default_rng(0)
    members = rng.random((40, 60)) < 0.5
    square, linear = (members @ members.T).astype(float), rng.normal(size=40)
    start = np.full(40, 1 / 40)
    values = []
    for most in (0, 1, 5, 50, 3000):
        p = least_square(square, linear, start, most)
        assert p.sum() == pytest.approx(1)
        assert (p >= 0).all()
        values.append(p @ square @ p / 2 - linear @ p)
    np.testing.assert_array_equal(least_square(square, linear, start, 0), start)
    assert (np.diff(values) <= 1e-12).all()


def user_optimum(seed, n, d, name, k):
    """Return a case, and the optimum by brute force for the points as they are given."""
    rng = np.random.default_rng(seed)
    x = reference.well_defined_instance(rng, n, d, ("plain", "outlier", "nested")[seed % 3])
    x = x * (1.0, 1e-5, 1e7)[seed // 3 % 3] + (0.0, 0.1, 1e4)[seed % 3]
    scale = float(x.std())
    weight = rng.uniform(0.3, 2, size=n) if seed % 4 == 0 else None
    beta = 2 / scale**2
    problem = {"cmle": jc.CMLE(), "wkm": jc.WKM(beta=beta), "ucmle": jc.UCMLE()}[name]
    floor = 0.02 * scale**2 if seed % 4 == 0 or seed % 5 == 0 else 0.0
    labels = rng.permutation(np.arange(n) % k)
    sizes = np.bincount(labels, weight)
    min_size = float(sizes.min() * 0.8) if weight is not None else float(2 + seed % 2)
    optimum, _ = reference.brute_force(x, k, min_size, name, beta, weight, floor)
    task = make_task(x, weight, k, labels, min_size, problem, floor)
    return Case(task, incumbent_duals(task), name), optimum


def dual_value(case, prices):
    """Return the lower bound that prices give, with the true largest profit."""
    largest, _ = case._replace(prices=prices).maximum()
    return math.fsum(case.task.weight * prices) - case.task.k * largest


@pytest.mark.parametrize("name", NAMES)
def test_no_dual_value_exceeds_the_optimum(name):
    """Whatever the prices; and those that are chosen come near it."""
    gaps = []
    for seed in range(20):
        case, optimum = user_optimum(seed, 9, 1 + seed % 2, name, 2 + seed % 2)
        task = case.task
        bundle = Bundle(task)
        rounds = 1 + seed % 12
        improve(bundle, rounds, 0.0, lambda: False)
        best = bundle.best
        margin = profit_margin(task, best.prices)
        value = dual_value(case, best.prices)
        assert value + task.offset <= optimum + data_margin(task) + task.k * margin
        # What is known is the profit of a set: the value is no less than the true one.
        assert best.value >= value - task.k * margin
        largest, _ = case._replace(prices=best.prices).maximum()
        assert best.known <= largest + margin
        expected = math.fsum(task.weight * best.prices) - task.k * best.known
        assert best.value == pytest.approx(expected, rel=1e-12)
        rng = np.random.default_rng(seed)
        for prices in (incumbent_duals(task, 0.7), 4 * rng.normal(size=9)):
            assert dual_value(case, prices) + task.offset <= optimum + data_margin(task) + margin
        # The task's own costs are the user's but for the units.
        assert task.cost + task.offset >= optimum - data_margin(task)
        if rounds >= 6:
            gaps.append((optimum - task.offset - value) / task.total)
    assert np.median(gaps) < 0.15


def test_what_is_known_is_the_profit_of_a_set():
    """Of an admissible one, whether it is still a column or not."""
    every = np.array(list(itertools.product([False, True], repeat=9))[1:])
    found = 0
    for seed in range(30):
        case = random_case(seed, 9, 2)
        task = case.task
        sizes = every @ task.weight
        fits = (sizes >= case.min_size - 1e-9) & (sizes <= float(task.pricing.max_size) + 1e-9)
        costs = np.array([case.cost(np.flatnonzero(row)) for row in every[fits]])
        bundle = Bundle(task)
        for _ in range(5):
            bundle.round()
            prices, known, _ = bundle.best
            profits = every[fits] @ (task.weight * prices) - costs
            assert np.abs(profits - known).min() <= 1e-8 * (1 + abs(known))
            own = bundle.profits(prices)
            nearest = np.abs(profits - own[:, None]).min(axis=1)
            assert (nearest <= 1e-8 * (1 + np.abs(own))).all()
        found += known >= profits.max() - 1e-6
    assert found >= 20


def test_what_is_known_is_no_less_than_the_profit_of_a_column():
    for seed in range(30):
        case = random_case(seed, 9, 2)
        bundle = Bundle(case.task)
        for _ in range(5):
            bundle.round()
            prices, known, _ = bundle.best
            assert known >= bundle.profits(prices).max() - 1e-9 * (1 + abs(known))


def test_columns_are_real_sets_and_cost_what_they_cost():
    for seed in range(30):
        case = random_case(seed, 9, 2)
        task = case.task
        bundle = Bundle(task)
        for _ in range(3):
            bundle.round()
        count = len(bundle.cost)
        assert bundle.members.shape == (count, 9)
        assert len(bundle.mean) == len(bundle.precision) == len(bundle.share) == count
        assert len({row.tobytes() for row in bundle.members}) == count
        for i in range(count):
            own = np.flatnonzero(bundle.members[i])
            assert bundle.cost[i] == pytest.approx(case.cost(own), rel=1e-9, abs=1e-9)
            weight = task.weight[own]
            mean = np.average(task.x[own], axis=0, weights=weight)
            np.testing.assert_allclose(bundle.mean[i], mean, atol=1e-9)
            size = weight.sum()
            assert size >= case.min_size * (1 - 1e-9)
            assert size <= float(task.pricing.max_size) * (1 + 1e-9)
        expected = (bundle.members * task.weight) @ bundle.members.T
        np.testing.assert_allclose(bundle.overlap, expected, atol=1e-12)
        # The clusters of the partition come first.
        for j in range(task.k):
            np.testing.assert_array_equal(bundle.members[j], task.labels == j)


def test_the_oracle_returns_the_best_first():
    for seed in range(12):
        case = random_case(seed, 9, 2)
        sets = Bundle(case.task).oracle(case.prices)
        assert (np.diff(sets.profit[np.isfinite(sets.profit)]) <= 0).all()
        assert len(sets.profit) == duals.STARTS + case.task.k - duals.STARTS % 4
        largest, _ = case.maximum()
        own = np.flatnonzero(sets.members[0])
        assert sets.profit[0] == pytest.approx(case.profit(own), rel=1e-9, abs=1e-9)
        assert sets.profit[0] <= largest + case.margin


@pytest.mark.parametrize("name", NAMES)
def test_rounds_improve_the_value(name):
    """200 points that overlap: much better in the end than at first."""
    rng = np.random.default_rng(1)
    n, k = 200, 4
    labels = np.arange(n) % k
    x = 3 * rng.normal(size=(k, 2))[labels] + rng.normal(size=(n, 2))
    problem = {"cmle": jc.CMLE(), "wkm": jc.WKM(beta=0.5), "ucmle": jc.UCMLE()}[name]
    task = make_task(x, None, k, labels, 25.0, problem, 0.0)
    task = task.with_labels(task.assigned())
    bundle = Bundle(task)
    values, promised = [], []
    for _ in range(25):
        before = bundle.best
        bundle.round()
        values.append(bundle.best.value)
        promised.append(bundle.promised)
        if bundle.best.value == before.value:
            assert bundle.best is before
        # A model of the columns so far is never below.
        assert bundle.promised >= bundle.best.value - 1e-6 * n
        # The same prices may turn out to be worth less, by a column that was found since.
        if bundle.best.prices is before.prices and math.isfinite(before.known):
            assert bundle.best.known >= before.known
    assert values[-1] <= task.cost + 1e-9 * n
    first, last = (task.cost - values[0]) / n, (task.cost - values[-1]) / n
    assert last < 0.5 * first


def test_improve_stops_when_told_to():
    case = random_case(1, 9, 2)
    calls = []

    def stops():
        calls.append(1)
        return len(calls) == 3

    bundle = Bundle(case.task)
    improve(bundle, 50, -math.inf, stops)
    assert len(calls) == 3
    bundle = Bundle(case.task)
    calls.clear()
    improve(bundle, 50, math.inf, stops)
    assert len(calls) == 1
    assert math.isfinite(bundle.best.value)


def test_sets_of_others_are_taken():
    for seed in range(10):
        case = random_case(seed, 9, 2)
        task = case.task
        bundle = Bundle(task)
        bundle.round()
        prices, known, value = bundle.best
        largest, own = case._replace(prices=prices).maximum()
        members = np.zeros((2, 16), bool)
        members[0, own] = True
        members[1, :2] = True
        cost = np.array([case.cost(own), 0.0])
        sizes = task.weight[own].sum()
        mean = np.average(task.x[own], axis=0, weights=task.weight[own])
        scatter = (task.weight[own] * ((task.x[own] - mean) ** 2).sum(axis=1)).sum()
        precision = task.precisions(np.array([sizes]), np.array([scatter]))
        # One of them has no admissible weight.
        sets = Sets(
            members,
            np.array([largest, -np.inf]),
            cost,
            np.stack([mean, mean]),
            np.repeat(precision, 2),
        )
        count = len(bundle.cost)
        bundle.raise_known([sets])
        assert len(bundle.cost) <= count + 1
        assert bundle.best.prices is prices
        assert bundle.best.known == pytest.approx(max(known, largest), rel=1e-9, abs=1e-9)
        assert bundle.best.value <= value


def test_columns_are_dropped_when_there_are_many(monkeypatch):
    monkeypatch.setattr(duals, "MOST_COLUMNS", 32)
    monkeypatch.setattr(duals, "ADDED", 6)
    rng = np.random.default_rng(1)
    n, k = 200, 4
    labels = np.arange(n) % k
    x = 3 * rng.normal(size=(k, 2))[labels] + rng.normal(size=(n, 2))
    task = make_task(x, None, k, labels, 25.0, jc.CMLE(), 0.0)
    bundle = Bundle(task)
    counts = []
    for _ in range(12):
        bundle.round()
        counts.append(len(bundle.cost))
        assert counts[-1] <= 32
        assert bundle.share.sum() == pytest.approx(1)
        assert len(bundle._keys) == len(bundle.cost)
        np.testing.assert_array_equal(bundle.members[:k], labels == np.arange(k)[:, None])
        expected = bundle.members.astype(float) @ bundle.members.T
        np.testing.assert_array_equal(bundle.overlap, expected)
    assert (np.diff(counts) < 0).any()


def test_prices_of_a_partition_sum_to_its_cost():
    for seed in range(20):
        case = random_case(seed, 9, 2)
        task = case.task
        members = [np.flatnonzero(task.labels == j) for j in range(task.k)]
        costs = [case.cost(own) for own in members]
        assert task.cost == pytest.approx(math.fsum(costs), rel=1e-10, abs=1e-9)
        plain, shifted = incumbent_duals(task), incumbent_duals(task, 0.5)
        for own, cost in zip(members, costs, strict=True):
            weight = task.weight[own]
            assert (weight * plain[own]).sum() == pytest.approx(cost, rel=1e-9, abs=1e-9)
            more = (weight * (shifted - plain)[own]).sum()
            assert more == pytest.approx(0.5 * task.total / task.k)


def test_the_partition_that_the_columns_suggest():
    """Far apart, it is that of the data, though the one at hand is wrong."""
    rng = np.random.default_rng(0)
    n, k = 120, 3
    truth = np.arange(n) % k
    x = np.array([[0, 0], [20, 0], [0, 20]])[truth] + rng.normal(size=(n, 2))
    labels = truth.copy()
    labels[:30] = 0
    for problem in (jc.CMLE(), jc.WKM(beta=0.5), jc.UCMLE()):
        task = make_task(x, None, k, labels, 20.0, problem, 0.0)
        bundle = Bundle(task)
        improve(bundle, 15, 0.0, lambda: False)
        found = bundle.partition()
        assert found.dtype == np.int32
        pairs = {(int(a), int(b)) for a, b in zip(found, truth, strict=True)}
        assert len(pairs) == k
        better = task.with_labels(found)
        assert better.cost < task.cost
        bundle.use_partition(better)
        columns = {row.tobytes() for row in bundle.members}
        assert {(found == j).tobytes() for j in range(k)} <= columns
        bundle.round()
        assert bundle.best.value <= better.cost + 1e-6
