"""Sample and prune: all walks against the recursion of the paper, and the cost of wrong points.

The bounds on what pruning assigns wrongly are tested in the oracle: they hold for any costs that
are not negative, Gaussian or not. Each has a control that must fail.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxcmle.candidates import choices
from jaxcmle.candidates.pruning import expand, remaining_sizes, walks

ROUNDING = 1 + 1e-9


def test_the_oracle_prunes_by_hand():
    assert reference.halve([3.0, 1.0, 2.0, 4.0, 0.0]) == ([1, 2, 4], [0, 3])
    # Of equal ones the lower positions go first.
    assert reference.halve([1.0, 1.0, 1.0]) == ([0, 1], [2])
    assert reference.halve([2.0, 1.0, 2.0, 2.0]) == ([0, 1], [2, 3])
    assert reference.halve([7.0]) == ([0], [])
    assert reference.halve([]) == ([], [])


def test_the_oracle_walks_by_hand():
    # The first mean is 0, and pruning leaves 10 and 11, then 11, then nothing.
    candidates = reference.abs_candidates([0, 1, 10, 11], [[0], [0]], [1], [0], [[0]], 1, 3)
    found = [(c.levels, c.choices, c.means.ravel().tolist()) for c in candidates]
    assert found == [
        ((0, 0), (0, 0), [0, 0]),
        ((0, 1), (0, 0), [0, 10]),
        ((0, 2), (0, 0), [0, 11]),
        ((0,), (0,), [0, 0]),
    ]


def test_the_oracle_draws_by_hand():
    # A third of 2^32 is between whole numbers: the draws below and above it differ.
    bits = [[0, 1431655765, 1431655766, 2863311530, 2863311531, 2**32 - 1]]
    candidates = reference.abs_candidates([0, 1, 2], bits, [], [], [[i] for i in range(6)], 1, 2)
    assert [c.means.item() for c in candidates] == [0, 0, 1, 1, 2, 2]
    pairs = list(itertools.combinations(range(3), 2))
    candidates = reference.abs_candidates([0, 1, 5], [[0, 2**31, 2**32 - 1]], [], [], pairs, 2, 0)
    assert [c.means.item() for c in candidates] == [0.5, 2.5, 3]


def test_the_oracle_takes_the_cheapest_component_by_hand():
    # Means 0 and 8. Under slopes 1 and 4, point 5 costs 25 and 36, and point 2 costs 4.
    x, bits, chosen = [0, 2, 5, 8], [[0], [2**32 - 1], [0]], [[0]]
    candidates = reference.abs_candidates(x, bits, [1, 4], [0, 0], chosen, 1, 1)
    assert {c.levels: c.means.ravel().tolist() for c in candidates} == {
        (0, 0, 0): [0, 8, 0],
        (0, 0, 1): [0, 8, 2],
        (0, 1, 1): [0, 8, 5],
    }
    # With a constant of 30 the second mean is dear on itself: only 5 and 8 are left.
    candidates = reference.abs_candidates(x, bits, [1, 4], [0, 30], chosen, 1, 1)
    assert candidates[1].means.ravel().tolist() == [0, 8, 5]


@pytest.mark.parametrize("n", [0, 1, 2, 5, 13, 64, 100])
def test_remaining_sizes(n):
    rest, sizes = n, []
    for _ in range(9):
        sizes.append(rest)
        rest = len(reference.halve(np.zeros(rest))[1])
    assert remaining_sizes(n, 8) == tuple(sizes)
    assert remaining_sizes(n, 0) == (n,)


@pytest.mark.parametrize(
    ("k", "prunings"), [(1, 0), (1, 3), (2, 0), (2, 4), (3, 0), (3, 3), (4, 5)]
)
def test_walks(k, prunings):
    found = walks(k, prunings)
    assert len(found) == len(set(found)) == math.comb(prunings + k - 1, k - 1)
    for levels in found:
        assert len(levels) == k
        assert levels[0] == 0
        assert list(levels) == sorted(levels)
        assert levels[-1] <= prunings


def block(m):
    return [list(range(m))]


def superset(s, m):
    return [list(subset) for subset in itertools.combinations(range(s), m)]


# Points, features, clusters, which draws go into the candidate means, how many, prunings. Most run
# down to the empty set, and one prunes that again.
CASES = (
    (5, 1, 1, block(2), 2, 2),
    (1, 1, 2, block(1), 1, 1),
    (5, 1, 2, block(1), 1, 3),
    (13, 2, 2, block(2), 2, 5),
    (8, 2, 2, superset(3, 2), 2, 2),
    (12, 1, 2, superset(3, 2), 2, 0),
    (9, 2, 2, superset(4, 3), 3, 4),
    (7, 1, 3, block(1), 1, 3),
    (13, 2, 3, block(2), 2, 3),
    (6, 1, 3, superset(3, 2), 2, 2),
    (9, 2, 3, superset(3, 2), 2, 4),
    (11, 2, 3, block(3), 3, 4),
)
BRANCHES = 4


def instance(case, seed, precision):
    """Return points, draws, slopes and constants.

    A mean of two points is as far from the one as from the other. On whole numbers, and with
    powers of two, such ties are exact in any precision, so that the order of indices decides. A
    mean of three has no ties between points in general position.
    """
    n, d, k, chosen, m, _ = case
    rng = np.random.default_rng(seed)
    x = rng.integers(-4, 5, size=(n, d)) if m < 3 else rng.normal(size=(n, d)) * 3
    bits = rng.integers(2**32, size=(BRANCHES, k, 1 + max(map(max, chosen))), dtype=np.uint32)
    slope = 2.0 ** rng.integers(-2, 3, size=(BRANCHES, k - 1))
    constant = rng.integers(0, 16, size=(BRANCHES, k - 1)) / 2
    return *(v.astype(precision) for v in (x, slope, constant)), bits


# Once for all tests of a shape: it compiles again for each.
jit_expand = jax.jit(expand, static_argnames="prunings")


def expanded(x, bits, slope, constant, chosen, m, prunings):
    arrays = (jnp.asarray(value) for value in (x, bits, slope, constant))
    chosen = jnp.asarray(np.array(chosen), jnp.int32)
    means = jit_expand(*arrays, chosen, m, prunings=prunings)
    assert means.dtype == x.dtype
    return np.asarray(means)


def candidate_at(candidates, levels, choices):
    """Return the means of a walk: those of its longest part that the recursion has gone."""
    for length in range(len(levels), 0, -1):
        if (levels[:length], choices[:length]) in candidates:
            return candidates[levels[:length], choices[:length]]
    raise KeyError((levels, choices))


def as_set(means):
    """Return the different tuples of means [..., k, d] as sorted rows, to rounding."""
    rows = np.asarray(means, np.float64)
    rows = rows.reshape(-1, rows.shape[-2] * rows.shape[-1])
    # Whole numbers and halves are then not where rounding turns, so that equal means stay equal.
    return np.unique(np.round(rows + 0.000_314, 3), axis=0)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}-{len(c[3])}-{c[5]}")
def test_all_walks_are_those_of_the_recursion(case, seed, precision):
    n, d, k, chosen, m, prunings = case
    x, slope, constant, bits = instance(case, seed, precision)
    means = expanded(x, bits, slope, constant, chosen, m, prunings)
    every_walk, c = walks(k, prunings), len(chosen)
    assert means.shape == (len(every_walk), c**k, BRANCHES, k, d)
    for b in range(BRANCHES):
        candidates = reference.abs_candidates(
            x, bits[b], slope[b], constant[b], chosen, m, prunings
        )
        np.testing.assert_allclose(
            as_set(means[:, :, b]), as_set([found.means for found in candidates]), atol=1e-9
        )
        # Unless the set runs empty there are as many candidates as walks and choices.
        if n >> prunings:
            assert len(candidates) == len(every_walk) * c**k
        # Each is where its walk and its choices say.
        by_walk = {(found.levels, found.choices): found.means for found in candidates}
        assert len(by_walk) == len(candidates)
        expected = [
            [candidate_at(by_walk, levels, choices) for choices in product_of(c, k)]
            for levels in every_walk
        ]
        np.testing.assert_allclose(means[:, :, b], np.array(expected), rtol=1e-5, atol=1e-5)


def product_of(c, k):
    return itertools.product(range(c), repeat=k)


def test_ties_are_decided_by_index(precision):
    # All points but the first are equally far from it, in pairs on either side.
    x = np.array([[0], [1], [-1], [1], [-1], [1], [-1]], precision)
    bits = np.array([[[0], [0]], [[0], [2**32 - 1]]], np.uint32)
    slope, constant = np.ones((2, 1), precision), np.zeros((2, 1), precision)
    means = expanded(x, bits, slope, constant, block(1), 1, 3)
    # Points 0 to 3 go, then 4 and 5, then 6.
    second = {levels[1]: means[i, 0, :, 1, 0].tolist() for i, levels in enumerate(walks(2, 3))}
    assert second == {0: [0, -1], 1: [-1, -1], 2: [-1, -1], 3: [0, 0]}


@pytest.mark.parametrize("n", [3, 1000, 100_003])
def test_draws_are_exact(n, precision):
    # The first and the last draw of every position, or of some: a rounded product would miss.
    positions = np.unique(np.linspace(0, n - 1, min(n, 1000)).astype(int)).tolist()
    first = [-(-(position << 32) // n) for position in positions]
    last = [(((position + 1) << 32) - 1) // n for position in positions]
    x = np.arange(n)[:, None].astype(precision)
    nothing = np.zeros((1, 0), precision)
    chosen = [[i] for i in range(len(positions))]
    for numbers in (first, last):
        bits = np.array(numbers, np.uint32)[None, None]
        means = expanded(x, bits, nothing, nothing, chosen, 1, 0)
        assert means[0, :, 0, 0, 0].tolist() == positions


@pytest.mark.parametrize("traced", [False, True])
def test_only_the_first_m_columns_count(traced, precision):
    case = (9, 2, 2, [[0, 1, 2, 3], [3, 2, 0, 1]], 2, 2)
    x, slope, constant, bits = instance(case, 5, precision)
    function = jit_expand if traced else expand
    wide, narrow = jnp.asarray(case[3], jnp.int32), jnp.asarray(case[3], jnp.int32)[:, :2]
    arrays = tuple(jnp.asarray(value) for value in (x, bits, slope, constant))
    for m in (1, 2):
        found = function(*arrays, wide, m, prunings=2)
        np.testing.assert_array_equal(found, function(*arrays, narrow, m, prunings=2))


def test_a_branch_does_not_depend_on_the_others(precision):
    case = (13, 2, 3, block(2), 2, 3)
    x, slope, constant, bits = instance(case, 6, precision)
    together = expanded(x, bits, slope, constant, *case[3:])
    alone = expanded(x, bits[2:3], slope[2:3], constant[2:3], *case[3:])
    np.testing.assert_array_equal(alone[:, :, 0], together[:, :, 2])


def test_the_order_of_the_variances_matters(precision):
    case = (13, 1, 3, block(1), 1, 3)
    x, slope, constant, bits = instance(case, 7, precision)
    slope[:], constant[:] = [2.0, 0.25], [0.0, 3.0]
    kept = expanded(x, bits, slope, constant, *case[3:])
    swapped = expanded(x, bits, slope[:, ::-1], constant[:, ::-1], *case[3:])
    sets = [[as_set(means[:, :, b]) for b in range(BRANCHES)] for means in (kept, swapped)]
    assert any(not np.array_equal(one, other) for one, other in zip(*sets, strict=True))
    # Both are those of the recursion.
    for b in range(BRANCHES):
        for order, found in zip((slice(None), slice(None, None, -1)), sets, strict=True):
            candidates = reference.abs_candidates(
                x, bits[b], slope[b, order], constant[b, order], *case[3:]
            )
            assert np.array_equal(found[b], as_set([c.means for c in candidates]))


def test_one_component_prunes_by_distance_whatever_its_variance(precision):
    # So that of two clusters all tuples of variances and weights have the same candidates.
    case = (13, 2, 2, block(2), 2, 4)
    x, slope, constant, bits = instance(case, 8, precision)
    one = expanded(x, bits, slope, constant, *case[3:])
    other = expanded(x, bits, 4 * slope[::-1], constant[::-1] + 1, *case[3:])
    np.testing.assert_array_equal(one, other)


# What follows is about the prunings between two samplings: with u unfound clusters, each with a
# share below alpha of R as long as it lasts, a = alpha u <= 1/4.


def run_bounds(run, u, alpha):
    """Return two bounds on the wrong cost of a run: the one of the paper repaired, and a sharper.

    The sharper charges the wrong points of every pruning to the found ones of the next, or to what
    remains after the last. None of those costs less, and there are enough: 4 v / (r - 1) and
    2 v / (r - 1) wrong ones to one, with v < a r, and r > 1 / alpha if there are any.
    """
    a = alpha * u
    repaired = 4 * a / ((1 - 2 * a) * (1 - alpha)) * run.start
    sharper = 4 * a / (1 - alpha) * run.later + 2 * a / (1 - alpha) * run.rest
    return repaired, sharper


def total_bounds(k, alpha):
    """Return two bounds on all wrong costs, as factors of what the right points cost.

    The first adds up the runs, each with its own charge. The second charges level by level: of the
    wrong points that cost at least t, all were in R and unfound before the first pruning that
    removed one, fewer than a r; and about half of R costs at least t after it, wherever it ends.
    """
    a = alpha * (k - 1)
    return alpha * (k * (k - 1) + 2) / (1 - alpha), 2 * a / ((1 - a) * (1 - alpha))


def cost_kind(name, rng, shape):
    """Return costs >= 0: light and heavy tails, ties, mostly zeros, or all equal."""
    if name == "uniform":
        return rng.uniform(size=shape)
    if name == "heavy":
        return rng.pareto(0.3, size=shape)
    if name == "ties":
        return rng.integers(0, 4, size=shape).astype(float)
    if name == "zeros":
        return rng.exponential(size=shape) * (rng.uniform(size=shape) < 0.7)
    if name == "binary":
        return rng.integers(0, 2, size=shape).astype(float)
    if name == "equal":
        return np.ones(shape)
    return np.exp(3 * rng.normal(size=shape))


KINDS = ("uniform", "heavy", "ties", "zeros", "binary", "equal", "lognormal")


def shares(rng, n, u):
    """Return alpha and u sizes of unfound clusters in n points, most of them just below it."""
    most = max(1, (n - 1) // (4 * u))
    size = int(rng.integers(1, most + 1)) if rng.uniform() < 0.7 else min(most, 2)
    alpha = min(size / n * (1 + 1e-9), 0.25 / u)
    below = math.ceil(alpha * n) - 1
    sizes = [below if rng.uniform() < 0.8 else int(rng.integers(0, below + 1)) for _ in range(u)]
    return alpha, sizes


def mixed_run(rng, name):
    """Return costs, labels (0 is found), u and alpha; which point is dear is left to chance."""
    u, n = int(rng.integers(1, 5)), int(rng.integers(1, 301))
    alpha, sizes = shares(rng, n, u)
    labels = rng.permutation(np.repeat(np.arange(u + 1), [n - sum(sizes), *sizes]))
    return cost_kind(name, rng, n), labels, u, alpha


def adversarial_run(rng):
    """As `mixed_run`, with the unfound points the last ones to go in every pruning.

    What goes before them costs nothing, or little; what goes after them costs the same or more.
    """
    u, n = int(rng.integers(1, 5)), int(rng.integers(5, 301))
    alpha, sizes = shares(rng, n, u)
    unfound = rng.permutation(np.repeat(np.arange(1, u + 1), sizes)).tolist()
    labels, costs, rest, level = [], [], n, 1.0
    growth, first = rng.choice([1.0, 1.0, 2.0, 50.0]), rng.uniform(0.5, 1)
    while rest:
        chunk = -(-rest // 2)
        now = min(len(unfound), chunk, round(first * len(unfound)))
        removed, unfound = unfound[:now], unfound[now:]
        labels += [0] * (chunk - now) + removed
        low = 0.0 if not costs else level
        costs += [low] * (chunk - now) + [level] * now
        level, rest = level * growth, rest - chunk
        # Most in the first pruning, and the others in any that follows.
        first = rng.uniform(0, 1)
    return np.array(costs), np.array(labels), u, alpha


def worst_of_runs(trials):
    """Return how near to the two bounds the wrong costs come, at most."""
    worst, wrong = np.zeros(2), 0
    for costs, labels, u, alpha in trials:
        assert u * alpha <= 0.25
        run = reference.wrongly_assigned(costs, labels, {0}, alpha)
        wrong += run.wrong > 0
        for i, bound in enumerate(run_bounds(run, u, alpha)):
            assert run.wrong <= ROUNDING * bound, (costs.tolist(), labels.tolist(), alpha)
            worst[i] = max(worst[i], run.wrong / bound if bound else 0)
    # The trials are about something.
    assert wrong > 100
    return worst


def test_the_oracle_of_wrong_costs_by_hand():
    labels = [0, 0, 0, 0, 1, 0, 0, 0, 0]
    run = reference.wrongly_assigned(np.arange(9.0), labels, {0}, 0.12)
    # A share of 1/9 is below 0.12. Then no unfound point is left, and all goes.
    assert run.chunks == [[0, 1, 2, 3, 4], [5, 6], [7], [8]]
    assert run.remaining == []
    assert run.wrong_points == [4]
    assert (run.wrong, run.start, run.later, run.rest) == (4, 32, 26, 0)
    # One in four is not below 0.12: the run ends after one pruning.
    labels[7] = 2
    run = reference.wrongly_assigned(np.arange(9.0), labels, {0}, 0.12)
    assert run.chunks == [[0, 1, 2, 3, 4]]
    assert run.remaining == [5, 6, 7, 8]
    assert (run.wrong, run.start, run.later, run.rest) == (4, 25, 0, 19)
    # Nor does one begin where a cluster has its share.
    assert reference.wrongly_assigned(np.arange(9.0), labels, {0}, 0.11).chunks == []
    assert reference.wrongly_assigned([], [], {0}, 0.1).chunks == []


def test_the_oracle_of_all_wrong_costs_by_hand():
    # As above; then cluster 2 is found, and ranks the last three by costs of its own.
    labels = [0, 0, 0, 0, 1, 0, 0, 2, 0]
    costs = np.stack([np.arange(9.0), np.full(9, 50.0), np.array([9.0] * 5 + [1, 2, 0.5, 4])], 1)
    wrong, right = reference.all_wrongly_assigned(costs, labels, [0.12, 0.12])
    # Cluster 1 has no point left: only point 4 is wrong.
    assert wrong == 4
    assert right == 0 + 1 + 2 + 3 + 5 + 6 + 0.5 + 8
    # With a share of 1/10 no pruning is needed to find cluster 1, nor cluster 2.
    assert reference.all_wrongly_assigned(costs, labels, [0.1, 0.1])[0] == 0


@pytest.mark.parametrize("name", KINDS)
def test_wrong_cost_of_a_run(name):
    rng = np.random.default_rng(KINDS.index(name))
    worst_of_runs(mixed_run(rng, name) for _ in range(1500))


def test_wrong_cost_of_a_run_where_wrong_points_are_the_last_to_go():
    rng = np.random.default_rng(10)
    worst = worst_of_runs(adversarial_run(rng) for _ in range(3000))
    # A control: a quarter of the one and half of the other would not do.
    assert worst[0] > 0.25
    assert worst[1] > 0.7


def test_the_sharper_bound_of_a_run_is_nearly_attained():
    # Two points to each unfound cluster, all but one removed at the cut; the one ends the run.
    u, n = 20, 163
    labels = np.zeros(n, int)
    removed = (n + 1) // 2
    labels[removed - 2 * u + 1 : removed] = np.repeat(np.arange(1, u + 1), 2)[:-1]
    labels[-1] = u
    costs = (np.arange(n) >= removed - 2 * u + 1).astype(float)
    alpha = 2 / n * (1 + 1e-9)
    run = reference.wrongly_assigned(costs, labels, {0}, alpha)
    assert len(run.chunks) == 1
    _, sharper = run_bounds(run, u, alpha)
    assert 0.97 * sharper < run.wrong <= sharper


def total_trial(rng, kind):
    """Return costs [n, k], labels and alpha: clusters of any sizes, the first the largest."""
    k, n = int(rng.integers(2, 6)), int(rng.integers(1, 121))
    alpha, sizes = shares(rng, n, k - 1)
    if kind == "gaussian":
        means = rng.normal(size=k) * 4
        labels = rng.choice(k, p=rng.dirichlet(np.full(k, 0.5)), size=n)
        x = means[labels] + rng.normal(size=n)
        return (x[:, None] - means) ** 2 / 2 + rng.uniform(0, 2, size=k), labels, alpha
    if rng.uniform() < 0.3:
        # Some are much larger than the share, and found without pruning.
        sizes = (np.array(sizes) * rng.choice([0, 1, 3], size=k - 1)).tolist()
    labels = rng.permutation(np.repeat(np.arange(k), [n - sum(sizes), *sizes]))
    costs = cost_kind(kind, rng, (n, k))
    if rng.uniform() < 0.5:
        # Under the first component wrong points are dear, but not so dear as what remains.
        costs[:, 0] = np.where(labels == 0, costs[:, 0], np.median(costs[:, 0]))
    return costs, labels, alpha


def hardest_total(k, n, size):
    """Return costs, labels and alpha: one half of the unfound points goes in the first pruning.

    The other half goes in the second. Before them only free points go.
    """
    labels, costs = np.zeros(n, int), np.zeros((n, k))
    unfound = np.tile(np.arange(1, k), size)
    half, early = (n + 1) // 2, len(unfound) // 2
    labels[half - early : half], labels[half : half + early] = unfound[:early], unfound[early:]
    costs[half - early :] = 1
    return costs, labels, size / n * (1 + 1e-6)


@pytest.mark.parametrize("kind", [*KINDS, "gaussian"])
def test_wrong_cost_of_all_runs(kind):
    rng = np.random.default_rng(20 + len(kind))
    wrong_trials = 0
    for _ in range(1500):
        costs, labels, alpha = total_trial(rng, kind)
        k = costs.shape[1]
        choose = functools.partial(rng.choice, replace=False)
        wrong, right = reference.all_wrongly_assigned(costs, labels, [alpha] * (k - 1), choose)
        wrong_trials += wrong > 0
        for factor in total_bounds(k, alpha):
            assert wrong <= ROUNDING * factor * right, (costs.tolist(), labels.tolist(), alpha)
    assert wrong_trials > 100


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_bound_on_all_runs_is_nearly_attained(k):
    costs, labels, alpha = hardest_total(k, 400, 80 // (k - 1) // 2 * 2)
    wrong, right = reference.all_wrongly_assigned(costs, labels, [alpha] * (k - 1))
    adding, levels = (factor * right for factor in total_bounds(k, alpha))
    assert 0.75 * levels < wrong <= levels
    # A control: a quarter of the sum over runs would not do.
    assert 0.25 * adding < wrong <= adding


def test_larger_shares_where_fewer_are_unfound():
    # The bound by levels needs alpha u = a only, so that alpha may grow from run to run.
    rng = np.random.default_rng(30)
    wrong_trials = 0
    for i in range(2100):
        costs, labels, alpha = total_trial(rng, KINDS[i % len(KINDS)])
        k = costs.shape[1]
        a = alpha * (k - 1)
        alphas = [a / (k - i) for i in range(1, k)]
        wrong, right = reference.all_wrongly_assigned(costs, labels, alphas)
        wrong_trials += wrong > 0
        assert wrong <= ROUNDING * choices.wrong_share(a) * right
    assert wrong_trials > 100


def test_costs_below_zero_break_the_bounds():
    # 16 points of a found cluster and one other, that costs 1 and goes with the first pruning.
    # What comes later costs more, but the start is so far below zero that the sum is.
    costs = np.array([-9.0] * 8 + [1.0] + [1.5] * 8)
    labels = np.array([0] * 8 + [1] + [0] * 8)
    alpha = 1 / 17 * (1 + 1e-9)
    run = reference.wrongly_assigned(costs, labels, {0}, alpha)
    assert run.wrong == 1
    assert run.wrong > run_bounds(run, 1, alpha)[0]
    # Lifted to zero and above, which moves no point, the bound holds.
    lifted = reference.wrongly_assigned(costs + 9, labels, {0}, alpha)
    assert lifted.chunks == run.chunks
    assert lifted.wrong <= min(run_bounds(lifted, 1, alpha))
    # All below zero, the sharper one fails too.
    lowered = reference.wrongly_assigned(costs - 2, labels, {0}, alpha)
    assert lowered.wrong == -1
    assert lowered.wrong > max(run_bounds(lowered, 1, alpha))
