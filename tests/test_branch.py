"""Cells cover all there is, and branch and bound never ends below the largest profit."""

import itertools

import numpy as np
import pytest
from proof_cases import Case, random_case
from support import NAMES

import jaxcmle as jc
from jaxcmle.proof import branch, pricing
from jaxcmle.proof import task as task_module
from jaxcmle.proof.cells import (
    UNITS,
    Cells,
    Domain,
    chords,
    halves,
    missing_corners,
    root_cells,
    slack,
)
from jaxcmle.proof.pricing import SLACKS
from jaxcmle.proof.space import WholeSpace
from jaxcmle.proof.task import make_task

PRECISIONS = ("float32",)
pytestmark = pytest.mark.usefixtures("double_precision")


def random_domain(rng, r, flat=()):
    low = rng.normal(size=r)
    high = low + np.exp(rng.normal(size=r))
    high[list(flat)] = low[list(flat)]
    first = np.exp(rng.normal())
    return Domain(low, high, first, first * np.exp(rng.uniform(0.1, 12)), r / 2)


def descend(rng, domain, levels, most=60):
    """Return cells of several levels, all with their corners in a table, and the table."""
    cells, table, seen = root_cells(domain), [], []
    for _ in range(levels):
        cell, corner, places, row = missing_corners(cells)
        corners = cells.corners.copy()
        corners[cell, corner] = len(table) + row
        table += [tuple(place) for place in places]
        cells = cells._replace(corners=corners)
        seen.append(cells)
        chosen = rng.permutation(cells.number)[:most]
        cells = halves(cells.take(chosen), domain)
    return seen, table


def corner_places(cells):
    """Return the places of the corners, `[c, 2^axes, axes]`."""
    axes = cells.low.shape[1]
    bits = np.array([[number >> axis & 1 for axis in range(axes)] for number in range(2**axes)])
    return cells.low[:, None] + bits * cells.size[:, None]


@pytest.mark.parametrize(("r", "flat"), [(1, ()), (2, ()), (2, (0,)), (3, (1, 2)), (4, ())])
def test_halves_cover_their_cell_and_share_its_corners(r, flat):
    rng = np.random.default_rng(r)
    for _ in range(5):
        domain = random_domain(rng, r, flat)
        seen, table = descend(rng, domain, 9)
        for cells in seen:
            # What the table says of a corner is where it is.
            assert (cells.corners >= 0).all()
            known = np.array([[table[i] for i in row] for row in cells.corners])
            np.testing.assert_array_equal(known, corner_places(cells))
            both = halves(cells, domain)
            first, second = both.take(slice(0, None, 2)), both.take(slice(1, None, 2))
            cut = first.size != cells.size
            assert (cut.sum(axis=1) == 1).all()
            np.testing.assert_array_equal(first.size, second.size)
            np.testing.assert_array_equal(first.low, cells.low)
            np.testing.assert_array_equal(second.low, cells.low + np.where(cut, first.size, 0))
            np.testing.assert_array_equal(
                second.low + second.size, cells.low + cells.size, "a gap at the end"
            )
            np.testing.assert_array_equal(first.bound, cells.bound)
            # A half knows the corners on its side, and those only.
            for half in (first, second):
                places = corner_places(half)
                for i in range(min(half.number, 20)):
                    for j, row in enumerate(half.corners[i]):
                        own = tuple(places[i, j])
                        assert (row >= 0) == (own in {table[k] for k in cells.corners[i]}) or flat
                        assert row < 0 or table[row] == own
            # In numbers, too: the same float from both sides.
            _, _, low, high = cells.box(domain)
            for half, end in ((first, low), (second, high)):
                box = half.box(domain)
                side = box[2] if half is first else box[3]
                np.testing.assert_array_equal(side, end)
            inner = first.low + np.where(cut, first.size, 0)
            np.testing.assert_array_equal(
                domain.means(inner[:, :-1]), domain.means(second.low[:, :-1])
            )


def test_the_cut_is_where_the_slack_is_largest():
    rng = np.random.default_rng(0)
    domain = random_domain(rng, 2)
    seen, _ = descend(rng, domain, 8)
    cells = branch._joined(seen)
    _, half, low, high = cells.box(domain)
    before = slack(domain, half, low, high).max(axis=0)
    _, half, low, high = halves(cells, domain).box(domain)
    after = slack(domain, half, low, high).max(axis=0).reshape(-1, 2).max(axis=1)
    assert (after < before).all()
    # Whichever of three axes: three cuts of a cell halve its slack at least.
    for _ in range(2):
        cells = halves(cells, domain)
    _, half, low, high = halves(cells, domain).box(domain)
    after = slack(domain, half, low, high).max(axis=0).reshape(-1, 8).max(axis=1)
    assert (after < 0.62 * before).all()


def test_cells_that_cannot_be_cut_end_the_search():
    domain = Domain(np.zeros(1), np.ones(1), 1.0, 1.0, 0.5)
    cells = Cells(
        np.zeros((1, 2), np.int64),
        np.array([[1, 0]]),
        np.zeros(1),
        np.full((1, 4), -1, np.int32),
    )

    class Geometry:
        max_size = 1e300

        def __init__(self):
            self.domain = domain

    search = branch._Search(Geometry(), -np.inf, 1e-9)
    search._keep(cells)
    assert not search.live
    assert search.done == 0


@pytest.mark.parametrize("r", [1, 2, 4])
def test_missing_corners_are_those_of_a_set_of_tuples(r):
    rng = np.random.default_rng(r)
    for trial in range(20):
        domain = random_domain(rng, r, (0,) if trial % 4 == 0 else ())
        seen, _ = descend(rng, domain, 6, 40)
        cells = halves(seen[-1], domain)
        if trial % 3 == 0:
            cells = seen[-1]._replace(corners=np.full_like(seen[-1].corners, -1))
        cell, corner, places, row = missing_corners(cells)
        assert len(cell) == (cells.corners < 0).sum()
        assert (cells.corners[cell, corner] < 0).all()
        wanted = corner_places(cells)[cell, corner]
        np.testing.assert_array_equal(places[row], wanted)
        assert len(places) == len({tuple(place) for place in wanted})
    # None missing.
    cells = seen[-1]
    cell, corner, places, row = missing_corners(cells)
    assert len(cell) == len(corner) == len(places) == len(row) == 0


def test_root_cells_cover_the_domain():
    rng = np.random.default_rng(3)
    for trial in range(40):
        r = 1 + trial % 4
        domain = random_domain(rng, r)
        if trial % 5 == 0:
            domain = domain._replace(precision_high=domain.precision_low)
        cells = root_cells(domain)
        assert (cells.low[:, :-1] == 0).all()
        assert (cells.size[:, :-1] == UNITS).all()
        assert np.isinf(cells.bound).all()
        assert (cells.corners == -1).all()
        ends = cells.low[:, -1] + cells.size[:, -1]
        assert cells.low[0, -1] == 0
        np.testing.assert_array_equal(cells.low[1:, -1], ends[:-1])
        assert ends[-1] == (0 if trial % 5 == 0 else UNITS)
        centre, half, low, high = cells.box(domain)
        near = 1e-12 * np.abs(np.concatenate([domain.low, domain.high])).max()
        assert (centre - half <= domain.low + near).all()
        assert (centre + half >= domain.high - near).all()
        assert low[0] == pytest.approx(domain.precision_low, rel=1e-13)
        assert high[-1] == pytest.approx(domain.precision_high, rel=1e-13)
        assert (np.log(high / low) <= 0.7 + 1e-9).all()


def test_axes_without_extent_have_one_place():
    domain = Domain(np.array([0.0, 2.0]), np.array([1.0, 2.0]), 3.0, 3.0, 0.0)
    cells = root_cells(domain)
    np.testing.assert_array_equal(cells.size, [[UNITS, 0, 0]])
    _, _, places, row = missing_corners(cells)
    np.testing.assert_array_equal(places, [[0, 0, 0], [UNITS, 0, 0]])
    np.testing.assert_array_equal(row, [0, 1, 0, 1, 0, 1, 0, 1])
    both = halves(cells, domain)
    np.testing.assert_array_equal(both.size, [[UNITS // 2, 0, 0]] * 2)
    centre, half, low, high = both.box(domain)
    np.testing.assert_array_equal(centre, [[0.25, 2], [0.75, 2]])
    np.testing.assert_array_equal(half, [[0.25, 0], [0.25, 0]])
    assert (low == 3).all()
    assert (high == 3).all()
    # A corner of the whole is worth 1/4 * 3 / 2 more than it says, at the most.
    np.testing.assert_allclose(
        slack(domain, *cells.box(domain)[1:]), np.full((2, 1), 3 * 0.25 / 2), rtol=1e-15
    )


def divergence(mean, covariance, other_mean, other_covariance):
    """Return KL(N || other N)."""
    inverse = np.linalg.inv(other_covariance)
    offset = other_mean - mean
    logs = np.linalg.slogdet(other_covariance)[1] - np.linalg.slogdet(covariance)[1]
    return (np.trace(inverse @ covariance) + offset @ inverse @ offset - len(mean) + logs) / 2


@pytest.mark.parametrize("d", [1, 2, 3])
def test_slack_is_the_divergence_of_corners_from_the_middle(d):
    rng = np.random.default_rng(d)
    for _ in range(10):
        domain = random_domain(rng, d)
        seen, _ = descend(rng, domain, 5, 10)
        cells = seen[-1]
        centre, half, low, high = cells.box(domain)
        found = slack(domain, half, low, high)
        assert found.shape == (2, cells.number)
        for i in range(cells.number):
            middle = (high[i] - low[i]) / np.log(high[i] / low[i])
            for end, u in enumerate((low[i], high[i])):
                for signs in itertools.product((-1, 1), repeat=d):
                    corner = centre[i] + np.array(signs) * half[i]
                    gaussians = (centre[i], np.eye(d) / middle, corner, np.eye(d) / u)
                    assert found[end, i] == pytest.approx(divergence(*gaussians), rel=1e-9)


def test_slack_of_narrow_intervals():
    """To second order d/2 (u / u0 - 1)^2 / 2, and continuous where the middle changes its form."""
    domain = Domain(np.zeros(1), np.ones(1), 1.0, 2.0, 0.5)
    for ratio in (1 + 1e-12, 1 + 1e-8, 1 + 0.99e-6, 1 + 1.01e-6, 1 + 1e-4, 1.01):
        found = slack(domain, np.zeros((1, 1)), np.array([3.0]), np.array([3 * ratio]))[:, 0]
        expected = 0.25 * ((ratio - 1) / 2) ** 2
        np.testing.assert_allclose(found, expected, rtol=1.1 * (ratio - 1) + 1e-3)
        assert (found >= 0).all()


def test_chords_are_above_a_convex_function():
    rng = np.random.default_rng(0)
    wanted = np.concatenate([SLACKS, rng.uniform(0, SLACKS[-1], size=500), [1e-9, 1.9999]])
    for _ in range(20):
        slopes, heights = rng.uniform(0, 10, size=30), -rng.exponential(size=30)

        def curve(slack, slopes=slopes, heights=heights):
            return (slopes * np.asarray(slack)[..., None] + heights).max(axis=-1)

        place, share = chords(SLACKS, wanted)
        assert ((share >= 0) & (share <= 1)).all()
        table = curve(SLACKS)
        values = table[place] + share * (table[place + 1] - table[place])
        assert (values >= curve(wanted) - 1e-12).all()
        np.testing.assert_allclose(values[: len(SLACKS)], table, atol=1e-12)
    place, share = chords(SLACKS, wanted[:10].reshape(2, 5))
    assert place.shape == share.shape == (2, 5)


def never(_bound, _evaluations):
    return False


def blind(geometry):
    """Return the same without any sets found: then nothing but the cells make the bound."""
    geometry.climb = lambda *_: None
    return geometry


def after(count):
    """Return a rule to stop after so many looks."""
    calls = iter(range(10**9))
    return lambda _bound, _evaluations: next(calls) >= count


def assert_real(case, sets, known):
    """Found sets have the profit that they claim, and some have more than was known."""
    members = np.asarray(sets.members)
    assert not members[:, len(case.task.x) :].any()
    finite = np.flatnonzero(np.isfinite(sets.profit))
    for i in finite[:4]:
        own = np.flatnonzero(members[i])
        assert sets.profit[i] == pytest.approx(case.profit(own), rel=1e-9, abs=1e-9)
    assert sets.profit.max() > known


SHAPES = [(9, 1), (9, 2), (8, 3)]


@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_no_set_makes_more_profit_than_the_bound(n, d):
    """On 180 instances, whenever it is stopped; and it is not far above when it is not."""
    for seed in range(60):
        case = random_case(seed, n, d, weighted=seed % 4 == 0 and d < 3)
        largest, best = case.maximum()
        task = case.task
        geometry = WholeSpace(task, case.prices)
        if seed % 2:
            geometry = blind(geometry)

        # The best set is somewhere in the cells.
        own, weight = task.x[best], task.weight[best]
        mean = np.average(own, axis=0, weights=weight)
        scatter = (weight * ((own - mean) ** 2).sum(axis=1)).sum()
        domain = geometry.domain
        assert (mean >= domain.low).all()
        assert (mean <= domain.high).all()
        if case.name != "wkm":
            variance = max(scatter / (weight.sum() * d), task.min_variance)
            assert domain.precision_low <= 1 / variance * (1 + 1e-12)
            assert domain.precision_high >= 1 / variance * (1 - 1e-12)

        allowed = (0.1, 0.3, 1.0)[d - 1] * task.total / task.k
        known = largest - (0.5, 5.0, 50.0)[seed // 2 % 3]
        search = branch._Search(geometry, known, allowed)
        bound, steps = np.inf, 0
        for value in search.steps():
            assert value == search.bound()
            assert value + case.margin >= largest
            assert value <= bound
            bound, steps = value, steps + 1
            if search.evaluations > 20_000:
                break
        else:
            bound = search.bound()
            # Sets with a part of a point make more than any set; a corner knows about them.
            reachable = max(known, search.known, search.corner)
            assert bound <= max(known + allowed, reachable + 0.25 * allowed)
        assert search.bound() + case.margin >= largest
        assert search.known <= largest + case.margin
        for sets in search.found:
            assert_real(case, sets, known)
        assert not (seed % 2 and search.found)


@pytest.mark.parametrize("sorts", [True, False])
def test_all_sets_lie_in_the_domain(sorts, monkeypatch):
    """Their means and precisions; with the floor under variances of few points, and of many."""
    if not sorts:
        monkeypatch.setattr(task_module, "MOST_SORTED", 0)
    every = np.array(list(itertools.product([False, True], repeat=9))[1:])
    for seed in range(40):
        case = random_case(seed, 9, 2)
        task = case.task
        sizes = every @ task.weight
        fits = sizes >= case.min_size * (1 - 1e-12)
        fits &= sizes <= float(task.pricing.max_size) * (1 + 1e-12)
        share, size = (every * task.weight)[fits], sizes[fits]
        means = share @ task.x / size[:, None]
        domain = WholeSpace(task, case.prices).domain
        assert (means >= domain.low).all()
        assert (means <= domain.high).all()
        if case.name == "wkm":
            continue
        squares = ((task.x - means[:, None]) ** 2).sum(axis=2)
        variances = (share * squares).sum(axis=1) / (2 * size)
        precisions = 1 / np.maximum(variances, max(task.min_variance, 1e-300))
        assert (precisions >= domain.precision_low * (1 - 1e-12)).all()
        assert (precisions <= domain.precision_high * (1 + 1e-12)).all()


def test_a_number_that_is_none_bounds_nothing():
    for seed in range(6):
        case = random_case(seed, 9, 2)
        largest, _ = case.maximum()
        geometry = blind(WholeSpace(case.task, case.prices))
        corners, cells = geometry.corner_profits, geometry.cell_profits
        rng = np.random.default_rng(seed)

        def spoiled(values, rng=rng):
            values = values.copy()
            values[rng.random(len(values)) < 0.2] = np.nan
            return values

        geometry.corner_profits = lambda *args, f=corners: spoiled(f(*args))
        geometry.cell_profits = lambda *args, f=cells: spoiled(f(*args))
        for count in (0, 2, 6):
            priced = branch.price(geometry, largest - 20, 0.1, after(count))
            assert priced.bound + case.margin >= largest


def test_bounds_hold_after_any_number_of_chunks(monkeypatch):
    """With chunks of four cells, it stops within levels and between them."""
    monkeypatch.setattr(branch, "CHUNK", 4)
    stopped = 0
    for seed in range(30):
        case = random_case(seed, 9, 2)
        largest, _ = case.maximum()
        geometry = blind(WholeSpace(case.task, case.prices))
        allowed = 0.05 * case.task.total / case.task.k
        before = np.inf
        for count in (0, 1, 2, 5, 11, 30):
            priced = branch.price(geometry, largest - 3, allowed, after(count))
            assert priced.bound + case.margin >= largest
            assert priced.bound <= before
            assert not priced.exhausted
            stopped += not priced.finished
            before = priced.bound
        search = branch._Search(geometry, largest - 20, allowed)
        for value in itertools.islice(search.steps(), 150):
            assert value + case.margin >= largest
    assert stopped >= 100


@pytest.mark.usefixtures("own_programs")
def test_thresholds_instead_of_sorting(monkeypatch):
    """Many points have no exact profit at corners; make few go that way."""
    monkeypatch.setattr(pricing, "FEW_POINTS", 0)
    for seed in range(40):
        case = random_case(seed, 9, 2)
        largest, _ = case.maximum()
        geometry = blind(WholeSpace(case.task, case.prices))
        allowed = 0.1 * case.task.total / case.task.k
        priced = branch.price(geometry, largest - 20, allowed, after(60))
        assert priced.bound + case.margin >= largest


def test_memory_that_runs_out_leaves_a_bound(monkeypatch):
    ran_out = 0
    for most in (0, 3_000, 30_000):
        monkeypatch.setattr(branch, "MOST_BYTES", most)
        for seed in range(12):
            case = random_case(seed, 9, 2)
            largest, _ = case.maximum()
            geometry = blind(WholeSpace(case.task, case.prices))
            priced = branch.price(geometry, largest - 20, 1e-3, never)
            assert priced.bound + case.margin >= largest
            assert priced.finished != priced.exhausted
            ran_out += priced.exhausted
    assert ran_out >= 12


def test_it_gives_up_when_a_better_set_is_found():
    found = 0
    for seed in range(24):
        case = random_case(seed, 9, 2)
        largest, _ = case.maximum()
        geometry = WholeSpace(case.task, case.prices)
        known = largest - 6
        priced = branch.price(geometry, known, 0.01, never, give_up=0.5)
        assert priced.bound + case.margin >= largest
        assert priced.bound >= priced.known
        if priced.known > known + 0.5:
            # Or else there was nothing left to do.
            assert not priced.finished or priced.bound <= priced.known + 0.02
            assert not priced.exhausted
            assert_real(case, priced.found[-1], known)
            assert priced.found[-1].profit.max() == priced.known
            found += 1
        # Later than not at all: the same, but it goes on.
        whole = branch.price(geometry, known, 1.0, after(40))
        assert whole.bound + case.margin >= largest
    assert found >= 15


@pytest.mark.parametrize("name", NAMES)
def test_many_points_are_priced_to_what_is_allowed(name):
    """300 points in two dimensions, prices of a partition: finished, and near a real profit."""
    rng = np.random.default_rng(0)
    n, k = 320, 3
    labels = np.arange(n) % k
    x = np.array([[0, 0], [6, 0], [0, 7]])[labels] + rng.normal(size=(n, 2))
    problem = {"cmle": jc.CMLE(), "wkm": jc.WKM(beta=0.5), "ucmle": jc.UCMLE()}[name]
    task = make_task(x, None, k, labels, 54.0, problem, 0.0)
    case = Case(task, task.point_costs(), name)
    geometry = WholeSpace(task, case.prices)
    sizes, means, scatters = task.moments(labels)
    known = float(geometry.climb(means, task.precisions(sizes, scatters)).profit.max())
    allowed = 0.02 * n / k
    priced = branch.price(geometry, known, allowed, never)
    assert priced.finished
    assert known <= priced.known <= priced.bound <= priced.known + 1.1 * allowed
    for sets in priced.found:
        assert_real(case, sets, known)
