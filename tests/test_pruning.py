"""Sample and prune: all walks against the recursion of the paper."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

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
