"""The pricing problem on the device against the naive oracle, at points and over whole cells."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_proof
from proof_cases import Case, random_case
from support import BETA, NAMES

import jaxcmle as jc
from jaxcmle.proof import branch, pricing
from jaxcmle.proof.cells import UNITS, Cells, slack
from jaxcmle.proof.pricing import SLACKS
from jaxcmle.proof.space import WholeSpace
from jaxcmle.proof.task import make_task

PRECISIONS = ("float32",)
pytestmark = pytest.mark.usefixtures("double_precision")
MEANS = 64


def random_places(rng, task, count=MEANS):
    """Return means near points, near sets and anywhere, and precisions from all of their range."""
    n, d = task.x.shape
    spread = task.x.std(axis=0)
    anywhere = rng.uniform(task.x.min(axis=0), task.x.max(axis=0), size=(count, d))
    near = task.x[rng.integers(n, size=count)] + 0.1 * spread * rng.normal(size=(count, d))
    share = rng.dirichlet(np.ones(n), size=count)
    means = np.where(rng.random((count, 1)) < 0.5, near, anywhere)
    means = np.where(rng.random((count, 1)) < 0.3, share @ task.x, means)
    low, high = float(task.pricing.low), float(task.pricing.high)
    return means, low * (high / low) ** rng.random(count)


def values_at(case, members, means, precision):
    """Return what sets gain at means and precisions that are not their own."""
    task, factor = case.task, float(case.task.pricing.log_factor)
    u = np.full_like(precision, 2 * case.beta) if case.name == "wkm" else precision
    squares = ((task.x - means[:, None]) ** 2).sum(axis=2)
    gains = case.prices - u[:, None] / 2 * squares + factor * np.log(u / (2 * np.pi))[:, None]
    size = members @ task.weight
    entropy = 0.0 if case.name == "ucmle" else 1.0
    return (members * task.weight * gains).sum(axis=1) + entropy * size * np.log(size / task.total)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_best_sets_are_those_of_the_oracle(d):
    """The set for a mean and a precision is worth F there, and no less with its own ones."""
    seen = set()
    for seed in range(36):
        case = random_case(seed, 14, d, weighted=seed % 4 == 0 and d < 5)
        task = case.task
        rng = np.random.default_rng(1000 + seed)
        means, precision = random_places(rng, task)
        expected = case.price(means, precision)
        sets = pricing.best_sets(
            task.pricing, task.padded(case.prices), means, precision, iterations=1
        )
        sets = jax.tree.map(np.asarray, sets)
        n = len(task.x)
        assert not sets.members[:, n:].any()
        valid = np.isfinite(expected)
        members = sets.members[:, :n]
        if not np.isfinite(expected).all():
            assert (task.weight != 1).any()
        # Points that coincide and cost the same are taken together, which the oracle does not.
        assert (sets.profit[valid] >= expected[valid] - case.margin).all()
        values = values_at(case, members[valid], means[valid], precision[valid])
        np.testing.assert_allclose(values, expected[valid], rtol=1e-10, atol=case.margin)
        for i in range(0, MEANS, 9):
            if not valid[i]:
                continue
            own = np.flatnonzero(members[i])
            assert sets.cost[i] == pytest.approx(case.cost(own), rel=1e-9, abs=1e-9)
            assert sets.profit[i] == pytest.approx(case.profit(own), rel=1e-9, abs=1e-9)
        seen.add((case.name, valid.all()))
    assert len(seen) >= 3


@pytest.mark.parametrize("d", [1, 2])
def test_points_that_gain_the_same_are_taken_together(d):
    """On a lattice with equal prices, sets are closed under ties, and their profits are real."""
    for seed in range(20):
        case = random_case(seed, 14, d, family="duplicates", k=2)
        case = case._replace(prices=np.round(case.prices))
        task = case.task
        means, precision = random_places(np.random.default_rng(seed), task)
        means = np.round(2 * means) / 2
        sets = pricing.best_sets(task.pricing, task.padded(case.prices), means, precision)
        sets = jax.tree.map(np.asarray, sets)
        members = sets.members[:, : len(task.x)]
        for i in np.flatnonzero(np.isfinite(sets.profit)):
            own = np.flatnonzero(members[i])
            assert sets.profit[i] == pytest.approx(case.profit(own), rel=1e-9, abs=1e-9)
            same = (task.x[:, None] == task.x[own]).all(axis=2)
            same &= case.prices[:, None] == case.prices[own]
            assert members[i][same.any(axis=1)].all()


def test_profits_never_fall():
    for seed in range(24):
        case = random_case(seed, 14, 2)
        task = case.task
        means, precision = random_places(np.random.default_rng(seed), task)
        duals = task.padded(case.prices)
        before = np.full(MEANS, -np.inf)
        for iterations in (1, 6) if seed % 4 == 0 else (1, 2, 6):
            sets = pricing.best_sets(task.pricing, duals, means, precision, iterations)
            # Each number of iterations is a program of its own, and rounds in its own way.
            assert (np.asarray(sets.profit) >= before - 1e-3 * case.margin).all()
            before = np.asarray(sets.profit)
        # What is reported is the set that makes the profit.
        best = int(before.argmax())
        own = np.flatnonzero(sets.members[best])
        assert before[best] == pytest.approx(case.profit(own), rel=1e-9, abs=1e-9)
        size = task.weight[own].sum()
        assert case.min_size - 1e-6 <= size <= float(task.pricing.max_size) + 1e-6


@pytest.mark.parametrize(("n", "d"), [(14, 1), (14, 2), (14, 5), (160, 2)])
def test_vertex_profits_are_never_below_the_oracle(n, d):
    """At every slack, with no more tolerance than the margin that is taken off the bound."""
    for seed in range(36):
        case = random_case(seed, n, d, weighted=seed % 4 == 0 and d < 5)
        task = case.task
        means, precision = random_places(np.random.default_rng(seed), task)
        curves = np.asarray(
            pricing.vertex_profits(task.pricing, task.padded(case.prices), means, precision)
        )
        assert curves.shape == (MEANS, len(SLACKS))
        assert case.margin < 1e-3 * task.total
        for place in (0, 1, 6, len(SLACKS) - 1):
            expected = case.price(means, precision, SLACKS[place])
            assert (curves[:, place] + case.margin >= expected).all()
        # Convex in the slack: what chords need.
        slopes = np.diff(curves, axis=1) / np.diff(SLACKS)
        assert (np.diff(slopes, axis=1) >= -1e-6 * (1 + np.abs(slopes[:, 1:]))).all()


@pytest.mark.parametrize("d", [1, 2])
def test_vertex_profits_of_few_points_are_those_of_the_oracle(d):
    """Points of weight 1 and whole limits: the largest sum is that of a set."""
    for seed in range(36):
        case = random_case(seed, 14, d, weighted=False)
        task = case.task
        means, precision = random_places(np.random.default_rng(seed), task)
        curves = pricing.vertex_profits(task.pricing, task.padded(case.prices), means, precision)
        for place in (0, 4, len(SLACKS) - 1):
            expected = case.price(means, precision, SLACKS[place])
            np.testing.assert_allclose(curves[:, place], expected, rtol=1e-11, atol=case.margin)


@pytest.mark.parametrize("name", NAMES)
def test_vertex_profits_are_close_for_many_points(name):
    """Where it matters, that is, where the profit is not far below the largest."""
    rng = np.random.default_rng(5)
    n, k = 2000, 4
    centres = 4 * rng.normal(size=(k, 2))
    labels = rng.integers(k, size=n)
    x = centres[labels] + rng.normal(size=(n, 2))
    task = make_task(x, None, k, labels, 250.0, problem_of(name), 0.0)
    for prices in (task.point_costs(), 3 * rng.normal(size=n)):
        case = Case(task, prices, name)
        means, precision = random_places(rng, task)
        if name != "wkm":
            precision = np.exp(rng.uniform(-1.5, 3, size=MEANS))
        curves = pricing.vertex_profits(task.pricing, task.padded(prices), means, precision)
        expected = case.price(means, precision)
        excess = np.asarray(curves)[:, 0] - expected
        assert (excess >= -case.margin).all()
        near = expected >= expected.max() - 0.2 * n
        assert near.sum() >= 5
        assert excess[near].max() <= 0.005 * n


def problem_of(name):
    return {"cmle": jc.CMLE(), "wkm": jc.WKM(beta=BETA), "ucmle": jc.UCMLE()}[name]


def test_profit_curves_against_a_grid_of_sizes():
    """Any size, the least of the lines of all thresholds there, and the slack times the size."""
    envelope, sort = jax.jit(pricing.profit_curves), jax.jit(pricing.to_curves)
    for seed in range(60):
        case = random_case(seed, 14, 2)
        task, rng = case.task, np.random.default_rng(seed)
        thresholds = np.asarray(task.pricing.thresholds)
        weight = task.weight
        gains = rng.choice([0.3, 3.0, 30.0]) * rng.normal(size=(5, 14)) + 2 * rng.normal(
            size=(5, 1)
        )
        sums = (np.maximum(gains[:, None] + thresholds[:, None], 0) * weight).sum(axis=2)
        curves = np.asarray(envelope(task.pricing, jnp.asarray(sums)))
        padded = np.full((5, 16), pricing.NO_POINT)
        padded[:, :14] = gains
        # Sorting does no worse.
        exact = np.asarray(sort(task.pricing, jnp.asarray(padded)))
        assert (exact <= curves + 1e-9 * (1 + np.abs(curves))).all()

        low, high = case.min_size, float(task.pricing.max_size)
        sizes = np.linspace(low, high, 2001)
        least = (sums[:, :, None] - sizes * thresholds[:, None]).min(axis=1)
        entropy = 0.0 if case.name == "ucmle" else 1.0
        values = least + entropy * sizes * np.log(sizes / task.total)
        dense = (values[:, None] + SLACKS[:, None] * sizes).max(axis=2)
        assert (curves >= dense - 1e-9 * (1 + np.abs(dense))).all()
        # Between two sizes of the grid nothing changes by more than the steepest of the lines.
        step = (sizes[1] - sizes[0]) * (np.abs(thresholds).max() + 2 + SLACKS[-1])
        assert (curves <= dense + step + 1e-9).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_padding_changes_nothing(weighted):
    for seed in (1, 2, 3):
        case = random_case(seed, 14, 2, weighted=weighted)
        task = case.task
        assert len(task.pricing.x) == 16
        bare = task.pricing._replace(
            x=jnp.asarray(task.x), weight=jnp.asarray(task.weight) if weighted else None
        )
        padded, duals = task.padded(case.prices), jnp.asarray(case.prices)
        means, precision = random_places(np.random.default_rng(seed), task)
        wide = pricing.vertex_profits(task.pricing, padded, means, precision)
        narrow = pricing.vertex_profits(bare, duals, means, precision)
        np.testing.assert_allclose(wide, narrow, rtol=1e-13, atol=case.margin)
        cell = (means, np.abs(means) * 0.1, precision, 1.5 * precision)
        wide = pricing.cell_profits(task.pricing, padded, *cell)
        narrow = pricing.cell_profits(bare, duals, *cell)
        np.testing.assert_allclose(wide, narrow, rtol=1e-13, atol=case.margin)
        wide = pricing.best_sets(task.pricing, padded, means, precision)
        narrow = pricing.best_sets(bare, duals, means, precision)
        np.testing.assert_array_equal(wide.members[:, :14], narrow.members)
        assert not np.asarray(wide.members[:, 14:]).any()
        np.testing.assert_allclose(wide.profit, narrow.profit, rtol=1e-12, atol=case.margin)


def test_tiles_change_nothing(monkeypatch):
    case = random_case(4, 14, 2)
    task = case.task
    duals = task.padded(case.prices)
    means, precision = random_places(np.random.default_rng(0), task)
    whole = np.asarray(pricing.vertex_profits(task.pricing, duals, means, precision))
    monkeypatch.setattr(pricing.numerics, "tile_bytes", lambda: 8 * 16 * 5)
    own = jax.jit(lambda *args: pricing.vertex_profits.__wrapped__(*args))
    tiled = np.asarray(own(task.pricing, duals, means, precision))
    np.testing.assert_allclose(tiled, whole, rtol=1e-13, atol=case.margin)


def random_cells(rng, geometry, count):
    """Return cells of all sizes, anywhere on the grid."""
    axes = len(geometry.domain.low) + 1
    level = rng.integers(0, 7, size=(count, axes))
    size = np.int64(UNITS) >> level
    low = (rng.random((count, axes)) * 2.0**level).astype(np.int64) * size
    flat = geometry.domain.precision_high <= geometry.domain.precision_low
    if flat:
        low[:, -1] = size[:, -1] = 0
    return Cells(low, size, np.full(count, np.inf), np.full((count, 2**axes), -1, np.int32))


def small_cells(rng, geometry, case, count):
    """Return cells around the best places, with little slack."""
    domain = geometry.domain
    means, precision = random_places(rng, case.task, 256)
    order = np.argsort(-case.price(means, precision))[: 4 * count]
    chosen = rng.choice(order, size=count, replace=False)
    axes = len(domain.low) + 1
    width = np.sqrt(rng.uniform(0.05, 1, size=count) / precision[chosen] / (axes - 1))
    extent = np.maximum(domain.high - domain.low, 1e-300)
    level = np.clip(np.ceil(np.log2(extent / width[:, None])), 0, 39)
    ratio = np.log(domain.precision_high / domain.precision_low)
    levels = np.ceil(np.log2(max(ratio, 1e-9) / rng.uniform(0.1, 0.7, size=count)))
    level = np.column_stack([level, np.clip(levels, 0, 39)]).astype(np.int64)
    place = (means[chosen] - domain.low) / extent
    height = np.log(precision[chosen] / domain.precision_low) / max(ratio, 1e-9)
    place = np.clip(np.column_stack([place, height]), 0, 1 - 1e-9)
    size = np.int64(UNITS) >> level
    low = (place * 2.0**level).astype(np.int64) * size
    if ratio <= 0:
        low[:, -1] = size[:, -1] = 0
    return Cells(low, size, np.full(count, np.inf), np.full((count, 2**axes), -1, np.int32))


def corner_bounds(geometry, cells):
    """Return the bounds of cells from their corners, and their slack."""
    search = branch._Search(geometry, -np.inf, 1.0)
    _, half, low, high = cells.box(geometry.domain)
    slacks = slack(geometry.domain, half, low, high)
    return search._corner_bounds(search._with_corners(cells), slacks), slacks.max(axis=0)


def sampled(rng, case, box, count):
    """Return the largest price at places inside a cell, some of them on its boundary."""
    centre, half, low, high = box
    side = rng.uniform(-1, 1, size=(count, len(centre)))
    side[: count // 4] = np.clip(1.5 * side[: count // 4], -1, 1)
    height = np.clip(rng.uniform(-0.1, 1.1, size=count), 0, 1)
    precision = low * (high / low) ** height
    return max(
        case.price(centre + half * part, u).max()
        for part, u in zip(np.array_split(side, 10), np.array_split(precision, 10), strict=True)
    )


@pytest.mark.parametrize(("d", "name"), list(itertools.product([1, 2, 3], NAMES)))
def test_nothing_in_a_cell_exceeds_its_bounds(d, name):
    """100,000 places in some cells, fewer in many."""
    rng = np.random.default_rng(d)
    checked = 0
    for seed in range(10):
        case = random_case(seed, 14, d, name=name, weighted=seed % 4 == 0 and d < 3)
        geometry = WholeSpace(case.task, case.prices)
        cells = branch._joined(
            [random_cells(rng, geometry, 6), small_cells(rng, geometry, case, 10)]
        )
        coarse = geometry.cell_profits(*cells.box(geometry.domain))
        fine, slacks = corner_bounds(geometry, cells)
        for i, box in enumerate(zip(*cells.box(geometry.domain), strict=True)):
            thorough = seed == 0 and i in (7, 11)
            largest = sampled(rng, case, box, 100_000 if thorough else 1000)
            assert coarse[i] + case.margin >= largest
            naive = case.naive(reference_proof.coarse_bound, *box)
            assert coarse[i] + case.margin >= naive
            if slacks[i] < branch.MOST_SLACK:
                assert fine[i] + case.margin >= largest
                naive = case.naive(reference_proof.vertex_bound, *box)
                assert fine[i] + case.margin >= naive
                checked += 1
    assert checked >= 60


@pytest.mark.parametrize("name", NAMES)
def test_bounds_of_cells_are_close_to_the_oracle_for_many_points(name):
    rng = np.random.default_rng(11)
    n, k, d = 1000, 3, 2
    labels = rng.integers(k, size=n)
    x = 5 * rng.normal(size=(k, d))[labels] + rng.normal(size=(n, d))
    task = make_task(x, None, k, labels, 160.0, problem_of(name), 0.0)
    case = Case(task, task.point_costs(), name)
    geometry = WholeSpace(task, case.prices)
    cells = small_cells(rng, geometry, case, 30)
    coarse = geometry.cell_profits(*cells.box(geometry.domain))
    fine, slacks = corner_bounds(geometry, cells)
    assert (slacks < branch.MOST_SLACK).all()
    for i, box in enumerate(zip(*cells.box(geometry.domain), strict=True)):
        naive = case.naive(reference_proof.coarse_bound, *box)
        assert naive - case.margin <= coarse[i] <= naive + 0.01 * n
        naive = case.naive(reference_proof.vertex_bound, *box)
        assert naive - case.margin <= fine[i] <= naive + 0.005 * n


def test_a_cell_without_extent_is_a_corner():
    for seed in range(8):
        case = random_case(seed, 14, 2)
        task = case.task
        duals = task.padded(case.prices)
        means, precision = random_places(np.random.default_rng(seed), task)
        corner = pricing.vertex_profits(task.pricing, duals, means, precision)[:, 0]
        cell = (means, np.zeros_like(means), precision, precision)
        own = pricing.cell_profits(task.pricing, duals, *cell)
        np.testing.assert_allclose(own, corner, rtol=1e-12, atol=case.margin)
