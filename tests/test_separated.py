"""Bounds by group of a partition: what a shift gains, the span of the centres, and distances."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proof_cases import Case, random_case
from support import NAMES

import jaxcmle as jc
from jaxcmle.proof import branch, groups, triangle
from jaxcmle.proof.duals import incumbent_duals
from jaxcmle.proof.pricing import SLACKS
from jaxcmle.proof.rounding import data_margin, profit_margin
from jaxcmle.proof.span import CentreSpan
from jaxcmle.proof.task import make_task
from jaxcmle.proof.triangle import Triangle

PRECISIONS = ("float32",)
pytestmark = pytest.mark.usefixtures("double_precision")
FAMILIES = ("apart", "plain", "outlier", "nested", "duplicates", "constant", "tiny", "huge")
SHAPES = [(8, 2), (9, 3)]
D = 5


def separated_case(seed, n, k, weighted=None):
    options = {"family": FAMILIES[seed % 8], "name": NAMES[seed % 3], "weighted": weighted}
    return random_case(seed, n, D, k=k, **options)


def subsets(n):
    """Return all sets of n points but the empty one, bool `[2^n - 1, n]`."""
    return np.array(list(itertools.product([False, True], repeat=n))[1:])


def admissible(case, every):
    """Return which sets have an admissible weight."""
    sizes = every @ case.task.weight
    fits = sizes >= case.min_size * (1 - 1e-12)
    return np.flatnonzero(fits & (sizes <= float(case.task.pricing.max_size) * (1 + 1e-12)))


def one_group(rng, n):
    """Return a group of n points with weights, and their offsets."""
    weight = rng.choice([np.ones(n), rng.uniform(0.1, 3, size=n)])
    offsets = rng.normal(size=(n, 3)) * np.exp(rng.normal(size=3))
    if rng.random() < 0.3:
        offsets[0] *= 30
    offsets -= np.average(offsets, axis=0, weights=weight)

    class Task:
        k = 1
        labels = np.zeros(n, int)

    Task.weight = weight
    return groups.make_groups(Task, offsets), weight, offsets


def test_a_shift_gains_no_more_than_the_bound():
    """Against all sets of 9 points: `sum a (v + s) + kappa |sum a o|`."""
    rng = np.random.default_rng(0)
    every = subsets(9)
    bound = jax.jit(
        lambda group, gains, s, kappa, wanted: groups.shifted_sums(
            group, groups.group_sums(group, gains, s), kappa, s, wanted
        )
    )
    tight = []
    for _ in range(150):
        group, weight, offsets = one_group(rng, 9)
        assert group.places.shape == (1, 10)
        gains = rng.choice([0.3, 3.0]) * rng.normal(size=(1, 10))
        gains[:, 9] = -1e200
        s = np.sort(4 * rng.normal(size=20))
        wanted = np.append(s[::4], 5 * rng.normal(size=3))
        kappas = np.append(0.0, np.exp(3 * rng.normal(size=3)))
        found = np.array(
            [
                bound(group._replace(places=np.zeros(0)), jnp.asarray(gains), s, kappa, wanted)[0]
                for kappa in kappas
            ]
        )
        sums = (every * weight) @ gains[0, :9]
        lengths = np.linalg.norm((every * weight) @ offsets, axis=1)
        sizes = every @ weight
        exact = (sums + kappas[:, None] * lengths)[:, None] + wanted[:, None] * sizes
        exact = np.maximum(exact.max(axis=2), 0)
        assert found.shape == exact.shape == (4, 8)
        assert (found >= exact - 1e-9 * (1 + np.abs(exact))).all()
        tight.append(found - exact)
        # Without a shift nothing is lost at the thresholds themselves.
        np.testing.assert_allclose(found[0, :5], exact[0, :5], rtol=1e-9, atol=1e-9)
    assert np.median(tight) < 5


def test_the_length_of_sums_of_offsets():
    """All that the bounds know of a group is its spread and its longest offset."""
    rng = np.random.default_rng(1)
    every = subsets(9)
    for _ in range(50):
        group, weight, offsets = one_group(rng, 9)
        lengths = np.linalg.norm((every * weight) @ offsets, axis=1)
        sizes = every @ weight
        total = float(group.size[0])
        assert total == pytest.approx(weight.sum())
        curve = np.sqrt(total * float(group.spread[0]) * sizes * np.maximum(1 - sizes / total, 0))
        assert (lengths <= curve + 1e-9 * total).all()
        shorter = np.minimum(sizes, total - sizes)
        assert (lengths <= float(group.longest[0]) * shorter + 1e-9 * total).all()


def test_line_profits_against_a_grid_of_sizes():
    """Sums that need not be convex in the threshold."""
    find = jax.jit(groups.line_profits)
    for seed in range(60):
        case = separated_case(seed, 9, 3)
        task, rng = case.task, np.random.default_rng(seed)
        s = np.asarray(task.pricing.thresholds)
        gains = 3 * rng.normal(size=(4, 9))
        sums = (np.maximum(gains[:, None] + s[:, None], 0) * task.weight).sum(axis=2)
        sums += rng.choice([0.0, 1.0]) * rng.exponential(size=sums.shape)
        found = np.asarray(find(task.pricing, jnp.asarray(sums)))
        low, high = case.min_size, float(task.pricing.max_size)
        sizes = np.linspace(low, high, 3001)
        entropy = 0.0 if case.name == "ucmle" else 1.0
        values = (sums[:, :, None] - sizes * s[:, None]).min(axis=1)
        values = values + entropy * sizes * np.log(sizes / task.total)
        dense = (values[:, None] + SLACKS[:, None] * sizes).max(axis=2)
        assert found.shape == dense.shape == (4, len(SLACKS))
        assert (found >= dense - 1e-9 * (1 + np.abs(dense))).all()
        # Two sizes of the grid are a small part of the whole range apart.
        widest = high * (1 - (low / high) ** (1 / (groups.SIZES - 1))) + (sizes[1] - sizes[0])
        steepest = np.abs(s).max() + 2 + SLACKS[-1] + np.log(task.total / low)
        assert (found <= dense + widest * steepest + 1e-9).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_set_has_a_place_in_the_span(n, k):
    """Where a set is, the bound is no less than its profit; in a cell around it, too."""
    every = subsets(n)
    for seed in range(30):
        case = separated_case(seed, n, k)
        task, rng = case.task, np.random.default_rng(seed)
        span = CentreSpan(task).with_prices(case.prices)
        chosen = every[rng.permutation(admissible(case, every))[:64]]
        profits = np.array([case.profit(np.flatnonzero(row)) for row in chosen])
        share = chosen * task.weight
        size = share.sum(axis=1)
        means = share @ task.x / size[:, None]
        squares = ((task.x - means[:, None]) ** 2).sum(axis=2)
        precision = task.precisions(size, (share * squares).sum(axis=1))
        inside = (means - span._middle) @ span._basis
        outside = means - span._middle - inside @ span._basis.T
        places = np.column_stack([inside, np.linalg.norm(outside, axis=1)])
        assert (places >= span.domain.low).all()
        assert (places <= span.domain.high).all()

        margin = case.margin + span.margin
        curves = span.corner_profits(places, precision)
        assert (curves[:, 0] + margin >= profits).all()
        slacks = SLACKS * size[:, None]
        assert (curves + margin >= profits[:, None] + slacks).all()
        half = rng.uniform(0, 0.3, size=places.shape) * np.abs(places)
        centre = places + rng.uniform(-1, 1, size=places.shape) * half
        factor = np.exp(rng.uniform(0, 1, size=(2, len(places))))
        low, high = precision / factor[0], precision * factor[1]
        if case.name == "wkm":
            low = high = precision
        cells = span.cell_profits(centre, half * (1 + 1e-12), low, high)
        assert (cells + margin >= profits).all()
        # At the near end of a long cell, and at the far end.
        for side in (1, -1):
            half = np.zeros_like(places)
            half[:, -1] = (4 if side == 1 else 0.5) * rng.random(len(places)) * places[:, -1]
            cells = span.cell_profits(places + side * half, half, precision, precision)
            assert (cells + margin >= profits).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_no_set_makes_more_profit_than_the_bound_in_the_span(n, k):
    finished = 0
    for seed in range(30):
        case = separated_case(seed, n, k)
        largest, _ = case.maximum()
        span = CentreSpan(case.task).with_prices(case.prices)
        margin = case.margin + span.margin
        allowed = 0.5 * case.task.total / k
        if seed % 3:
            # Nothing but the cells make the bound.
            span.climb = lambda *_: None
        search = branch._Search(span, largest - (3, 20)[seed % 2], allowed)
        for bound in search.steps():
            assert bound + margin >= largest
            if search.evaluations > 6000:
                break
        else:
            finished += 1
        assert search.bound() + margin >= largest
        assert search.known <= largest + case.margin
    assert finished >= 5


def check_distances(n, k, weighted=None):
    """Several prices for each partition, against all sets."""
    every = subsets(n)
    for seed in range(24):
        case = separated_case(seed, n, k, weighted)
        rng = np.random.default_rng(seed)
        task = case.task
        largest, _ = case.maximum()
        sets = every[admissible(case, every)]
        costs = np.array([case.cost(np.flatnonzero(row)) for row in sets])
        assert (sets @ case.alpha - costs).max() == pytest.approx(largest, rel=1e-12, abs=1e-9)
        bounds = Triangle(task)
        choices = [case.prices, 10 * rng.normal(size=n), 60 + rng.normal(size=n)]
        choices += [incumbent_duals(task, shift) for shift in (0.0, 1.0, 5.0)]
        for prices in choices:
            largest = (sets @ (task.weight * prices) - costs).max()
            assert bounds.profit(prices) + profit_margin(task, prices) >= largest


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_no_set_makes_more_profit_than_the_bound_from_distances(n, k):
    check_distances(n, k)


@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("shells", [2, 6])
def test_shells_may_be_wide(shells, monkeypatch):
    monkeypatch.setattr(triangle, "SHELLS", shells)
    check_distances(9, 3, weighted=False)


@pytest.mark.usefixtures("own_programs")
def test_a_set_half_way_between_two_centres(monkeypatch):
    """Two points of each group make the best set; shells as wide as the centres are apart."""
    monkeypatch.setattr(triangle, "SHELLS", 2)
    labels = np.repeat([0, 1], 4)
    good = np.tile([True, True, False, False], 2)
    for seed, strength in enumerate(np.linspace(7, 20, 24)):
        rng = np.random.default_rng(seed)
        x = 0.01 * rng.normal(size=(8, D))
        x[:, 0] += 3.0 * labels
        task = make_task(x, None, 2, labels, 4.0, jc.WKM(beta=strength / 9), 0.0)
        case = Case(task, np.where(good, 8.0, -300.0), "wkm")
        largest, best = case.maximum()
        np.testing.assert_array_equal(best, np.flatnonzero(good))
        assert Triangle(task).profit(case.prices) + case.margin >= largest


def apart(name, n, d, k, separation):
    rng = np.random.default_rng(0)
    labels = np.arange(n) % k
    centres = np.zeros((k, d))
    centres[np.arange(k), np.arange(k)] = separation / np.sqrt(2)
    x = centres[labels] + rng.normal(size=(n, d))
    problem = {"cmle": jc.CMLE(), "wkm": jc.WKM(beta=0.5), "ucmle": jc.UCMLE()}[name]
    return make_task(x, None, k, labels, float(n // (2 * k)), problem, 0.0)


def gap(task, prices, profit):
    """Return the gap that a bound on the profit proves, in nats per point."""
    largest = profit + profit_margin(task, prices)
    lower = (task.weight * prices).sum() - task.k * largest - data_margin(task)
    return (task.cost - lower) / task.total


@pytest.mark.parametrize("name", NAMES)
def test_distances_suffice_for_clusters_far_apart(name):
    """300 points in eight dimensions: within 0.05 nats per point of the cost."""
    task = apart(name, 300, 8, 3, 30.0)
    bounds = Triangle(task)
    gaps = []
    for shift in (0.0, 1.0, 3.0, 5.0):
        prices = incumbent_duals(task, shift)
        gaps.append(gap(task, prices, bounds.profit(prices)))
    assert -1e-9 <= min(gaps) <= 0.05


@pytest.mark.parametrize("name", NAMES)
def test_the_span_suffices_for_clusters_apart(name):
    task = apart(name, 300, 8, 2, 10.0)
    span = CentreSpan(task)
    gaps = []
    for shift in (1.0, 5.0):
        prices = incumbent_duals(task, shift)
        case = Case(task, prices, name)
        known = max(case.profit(np.flatnonzero(task.labels == j)) for j in range(2))
        priced = branch.price(
            span.with_prices(prices), known, 0.01 * 150, lambda _, count: count > 60_000
        )
        gaps.append(gap(task, prices, priced.bound + span.margin))
    assert -1e-9 <= min(gaps) <= 0.05
