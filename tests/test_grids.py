"""Grids of weights and variances against the core identity and naive searches."""

import itertools
import math

import numpy as np
import pytest
import reference

from jaxcmle.candidates import grids
from jaxcmle.candidates.grids import Allowance

PRECISIONS = ("float32",)


def balanced_weights(rng, k, f, count):
    """Return weights of at least 1/f: inside, near the edges and at the vertices."""
    spread = rng.dirichlet(np.ones(k), size=count) ** rng.choice([1, 3, 9], size=(count, 1))
    spread = np.concatenate([spread / spread.sum(axis=1, keepdims=True), np.eye(k)])
    return 1 / f + (1 - k / f) * spread


def divergence(w, other):
    return float((w * np.log(w / other)).sum())


def allowances(rng, count):
    """Yield (low, high, allowance): flat and rising ones, narrow and wide ranges."""
    for number in range(count):
        slope = 0.0 if number % 2 else float(np.exp(rng.uniform(-3, 0.5)))
        low = float(rng.uniform(0.9, 3))
        high = low + float(np.exp(rng.uniform(-2, 2.5)))
        # What is allowed at the low end.
        room = float(np.exp(rng.uniform(-3, 1)))
        yield low, high, Allowance(slope, room - slope * low)


def dense(low, high, cover):
    """Return many y in the range, its ends, and those around the ends of every value's part."""
    starts = cover.starts
    around = np.concatenate([starts, starts - 1e-9, starts + 1e-9, [low, high]])
    return np.concatenate([np.linspace(low, high, 3000), np.clip(around, low, high)])


def assert_covers(low, high, cover, e, allowance):
    y = dense(low, high, cover)
    assert reference.cover_excess(y, cover.values, e, *allowance).max() <= 0


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("k", [1, 3])
def test_errors_of_variances_and_weights_are_of_second_order(d, k):
    rng = np.random.default_rng([d, k])
    for _ in range(20):
        n = int(rng.integers(4 * k, 40))
        x = rng.normal(size=(n, d)) * np.exp(rng.normal()) + rng.normal()
        labels = rng.permutation(np.arange(n) % k)
        labels[: n // 4] = 0
        w, means, variances = reference.estimate(x, labels, k)
        other_means = means + rng.normal(size=(k, d)) * np.exp(rng.normal(size=(k, 1)) - 1)
        other_variances = variances * np.exp(rng.normal(size=k))
        other_w = rng.dirichlet(np.full(k, 2.0))
        t = np.log(other_variances / variances)
        e = ((other_means - means) ** 2).sum(axis=1) / (d * variances)
        excess = n * (d / 2 * (w * reference.phi(t, e)).sum() + divergence(w, other_w))
        expected = reference.joint_excess(x, labels, k, other_means, other_variances, other_w)
        scale = max(abs(reference.partition_cost(x, labels, k)), abs(expected))
        assert abs(excess - expected) <= 1e-13 * scale * math.sqrt(n)
        np.testing.assert_allclose(grids.excess(t, e), reference.phi(t, e), rtol=1e-14)


def test_the_grid_of_variances_covers_the_range_and_no_value_can_be_spared():
    rng = np.random.default_rng(0)
    sizes = []
    for low, high, allowance in allowances(rng, 60):
        limit = math.expm1(allowance.slope * low + allowance.constant - grids.MARGIN)
        for e in limit * np.array([1e-3, 0.4, 0.8, 0.97]):
            cover = grids.cover_variances(low, high, e, allowance)
            sizes.append(len(cover.values))
            assert_covers(low, high, cover, e, allowance)
            assert cover.starts[0] == low
            assert (np.diff(cover.values) > 0).all()
            assert (np.diff([*cover.starts, high]) > 0).all()
            y = dense(low, high, cover)
            # The middle of every part: a narrow one is easily missed.
            y = np.append(y, (cover.starts + np.append(cover.starts[1:], high)) / 2)
            for left_out in range(len(cover.values)):
                fewer = np.delete(cover.values, left_out)
                if len(fewer):
                    assert reference.cover_excess(y, fewer, e, *allowance).max() > 0
    assert min(sizes) == 1
    assert max(sizes) > 30


@pytest.mark.parametrize("problem", ["cmle", "ucmle"])
@pytest.mark.parametrize("d", [1, 2, 8])
def test_the_grid_covers_for_claims(problem, d):
    for k, ratio, claim in itertools.product((2, 4), (1.0, 1e4), (0.25, 0.5, 1.0)):
        entropy = reference.min_entropy(k, 2 * k)
        uniform = 0.0 if problem == "ucmle" else math.log(k) - entropy
        for slope, left in ((claim, claim * entropy - uniform), (0.0, 2 * claim - uniform)):
            allowance = Allowance(slope, 2 / d * left)
            low, high = 1.0, 1 + math.log(ratio)
            for e in grids.largest_mean_errors(low, high, allowance)[:8]:
                if e > 0:
                    cover = grids.cover_variances(low, high, e, allowance)
                    assert_covers(low, high, cover, e, allowance)


def test_grids_are_as_small_as_a_greedy_search_by_bisection_finds():
    rng = np.random.default_rng(1)
    for low, high, allowance in allowances(rng, 40):
        limit = math.expm1(allowance.slope * low + allowance.constant - grids.MARGIN)
        errors = limit * rng.uniform(0.01, 0.95, size=4)
        needed = reference.greedy_cover(
            errors, low, high, allowance.slope, allowance.constant - grids.MARGIN, 99
        )
        found = [len(grids.cover_variances(low, high, e, allowance).values) for e in errors]
        assert found == needed.tolist()


def test_no_variance_makes_up_for_a_mean_that_is_far_off():
    with pytest.raises(ValueError, match="no variance makes up for a mean error of 2"):
        grids.cover_variances(1.0, 5.0, 2.0, Allowance(0.5, 0.0))
    assert len(grids.largest_mean_errors(1.0, 5.0, Allowance(0.5, -0.5))) == 0
    with pytest.raises(ValueError, match="too many"):
        grids.cover_variances(1.0, 1e4, 1e-4, Allowance(0.0, 1e-3))


def test_largest_mean_errors_are_the_largest():
    rng = np.random.default_rng(2)
    checked = {"flat": 0, "rising": 0}
    for low, high, allowance in allowances(rng, 60):
        errors = grids.largest_mean_errors(low, high, allowance)
        limit = math.expm1(allowance.slope * low + allowance.constant)
        assert (np.diff(errors) >= 0).all()
        assert (errors < limit).all()
        for count, e in enumerate(errors[:20], start=1):
            if e == 0:
                # Not even a mean without error.
                needed = reference.greedy_cover([0.0], low, high, *allowance, 99)
                assert needed[0] > count
                continue
            assert len(grids.cover_variances(low, high, e, allowance).values) == count
            try:
                more = len(grids.cover_variances(low, high, 1.001 * e, allowance).values)
            except ValueError:
                assert 1.001 * e > limit * (1 - 2 * grids.MARGIN)
            else:
                assert more > count
            checked["rising" if allowance.slope else "flat"] += 1
    assert min(checked.values()) > 30


def test_more_values_than_that_hardly_help():
    rng = np.random.default_rng(3)
    for low, high, allowance in allowances(rng, 40):
        errors = grids.largest_mean_errors(low, high, allowance)
        if len(errors) < grids.MAX_VALUES:
            limit = math.expm1(allowance.slope * low + allowance.constant - grids.MARGIN)
            assert errors[-1] > 0.985 * limit


@pytest.mark.parametrize(("k", "f"), [(2, 2), (2, 4), (3, 3.2), (3, 6), (4, 9.5)])
def test_least_entropy_is_least(k, f):
    least = grids.least_entropy(k, f)
    assert least == pytest.approx(reference.min_entropy(k, f), rel=1e-12)
    weights = balanced_weights(np.random.default_rng(4), k, f, 2000)
    entropy = -(weights * np.log(weights)).sum(axis=1)
    assert entropy.min() >= least - 1e-12
    assert entropy.min() <= least + 1e-9


def test_one_cluster_has_no_entropy():
    assert grids.least_entropy(1, 2.0) == 0
    assert grids.least_entropy(1, 1.0) == 0


@pytest.mark.parametrize(("k", "f"), [(2, 2.5), (2, 8), (3, 6), (3, 30), (4, 8)])
@pytest.mark.parametrize("exponents", [1, 2, 3, 5])
def test_geometric_weights_are_near_every_balanced_tuple(k, f, exponents):
    grid = grids.geometric_weights(k, f, exponents)
    assert len(grid) == grids.weight_tuples(k, exponents)
    np.testing.assert_allclose(grid.sum(axis=1), 1, rtol=1e-14)
    assert len(np.unique(np.round(grid, 12), axis=0)) == len(grid)
    # Any order of a tuple is a tuple.
    ordered = {tuple(np.round(row, 12)) for row in grid}
    assert all(order in ordered for row in ordered for order in itertools.permutations(row))

    most = grids.geometric_divergence(k, f, exponents)
    ratio = (f - k + 1) ** (1 / exponents)
    assert most == pytest.approx(math.log(ratio) ** 2 / 8)
    weights = balanced_weights(np.random.default_rng([5, k, exponents]), k, f, 500)
    nearest = [(w * np.log(w / grid)).sum(axis=1).min() for w in weights]
    assert max(nearest) <= most


def test_the_divergence_of_geometric_weights_is_not_much_less_than_the_bound():
    grid, most = grids.geometric_weights(2, 8, 4), grids.geometric_divergence(2, 8, 4)
    shares = np.linspace(1 / 8, 7 / 8, 2001)
    weights = np.stack([shares, 1 - shares], axis=1)
    nearest = [(w * np.log(w / grid)).sum(axis=1).min() for w in weights]
    assert max(nearest) > most / 5


@pytest.mark.parametrize(("k", "f"), [(1, 1), (1, 2), (2, 2), (2, 4), (3, 6), (3, 9.5)])
@pytest.mark.parametrize("eps", [0.1, 0.5, 1.0])
def test_printed_sizes_hold_every_balanced_tuple_from_above(k, f, eps):
    tuples = grids.printed_sizes(k, f, eps)
    np.testing.assert_allclose(tuples.sum(axis=1), 1, rtol=1e-12)
    known = {tuple(np.round(row, 9)) for row in tuples}
    assert len(known) <= len(tuples)
    steps = range(1, max(1, math.ceil(math.log(f) / math.log1p(eps) - 1e-9)) + 1)
    for w in balanced_weights(np.random.default_rng(6), k, f, 300):
        # The smallest size of the grid that is not below.
        sizes = np.array(
            [min(s for i in steps if (s := (1 + eps) ** i / f) >= v * (1 - 1e-9)) for v in w]
        )
        assert (sizes <= (1 + eps) * w * (1 + 1e-9)).all()
        assert tuple(np.round(sizes / sizes.sum(), 9)) in known


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("eps", [0.1, 0.5])
def test_printed_variances_hold_one_within_the_bound_of_the_paper(d, eps):
    # Theorem "variancegridding", with Gamma and g just as large as the partition needs.
    rng = np.random.default_rng([7, d])
    for _ in range(60):
        k = int(rng.integers(1, 4))
        n = int(rng.integers(4 * k, 30))
        x = reference.well_defined_instance(rng, n, d, ("plain", "outlier", "nested")[k - 1])
        labels = rng.permutation(np.r_[np.repeat(np.arange(k), 2), rng.integers(0, k, n - 2 * k)])
        w, _, variances = reference.estimate(x, labels, k)
        y = np.log(2 * math.pi * math.e * variances)
        share = w * y
        gamma, cost_balance = share.sum(), share.sum() / share.min()
        assert reference.is_balanced(x, labels, k, 1 / w.min(), cost_balance * (1 + 1e-12))
        sizes = w * (1 + eps) ** rng.choice([0.0, 1.0, rng.random()], size=k)
        values = grids.printed_variances(sizes, gamma, cost_balance, eps)
        assert values.shape[:1] == (k,)
        for cluster in range(k):
            off = values[cluster] - y[cluster]
            bound = ((1 + eps) ** 2 - 1) * y[cluster]
            assert ((off >= -1e-9) & (off <= bound + 1e-9)).any()


def test_printed_variances_take_the_whole_range_of_exponents():
    # One cluster costs nearly everything, another as little as the balance of costs allows.
    eps, gamma, cost_balance = 0.1, 9.0, 20.0
    values = grids.printed_variances(np.array([1.0]), gamma, cost_balance, eps)[0]
    assert (np.diff(values) > 0).all()
    assert values[0] <= (1 + eps) ** 2 / cost_balance
    assert values[-1] >= (1 + eps) * gamma
    assert values[-2] < (1 + eps) * gamma
