"""The oracle checked against hand values, other formulas and itself by other routes."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
import reference

PRECISIONS = ("float32",)
UNIT = math.sqrt(4 / math.pi)
FAMILIES = ("plain", "outlier", "nested")


def blocks(labels):
    """Return the partition as a set of frozensets of indices."""
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in np.unique(labels)}


def subset_variances(x, min_size):
    """Return the variance of every subset of at least min_size points."""
    n, d = x.shape
    return [
        x[list(members)].var(axis=0).sum() / d
        for size in range(min_size, n + 1)
        for members in combinations(range(n), size)
    ]


def random_mixture(rng, k, d):
    weights = rng.dirichlet(np.full(k, 3.0))
    return weights, rng.normal(size=(k, d)) * 3, rng.uniform(0.3, 3.0, size=k)


def test_point_costs_are_negative_log_densities():
    normal = pytest.importorskip("scipy.stats").multivariate_normal
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 3))
    weights, means, variances = random_mixture(rng, 4, 3)
    log_density = np.stack(
        [normal(m, v * np.eye(3)).logpdf(x) for m, v in zip(means, variances, strict=True)], axis=1
    )
    cmle = reference.point_costs(x, weights, means, variances)
    np.testing.assert_allclose(cmle, -log_density - np.log(weights), rtol=1e-12)
    ucmle = reference.point_costs(x, weights, means, variances, "ucmle")
    np.testing.assert_allclose(ucmle, -log_density, rtol=1e-12)
    # WKM is CMLE at the variance 1/(2 beta), less the constant d/2 ln(pi / beta).
    wkm = reference.point_costs(x, weights, means, variances, "wkm", 0.7)
    shared = reference.point_costs(x, weights, means, np.full(4, 1 / 1.4))
    np.testing.assert_allclose(wkm, shared - 1.5 * math.log(math.pi / 0.7), rtol=1e-12)


def test_zero_weights_ties_and_margins():
    x = np.array([[0.0], [1.0], [5.0]])
    means, variances = np.array([[0.0], [2.0], [5.0]]), np.ones(3)
    costs = reference.point_costs(x, [0.5, 0.5, 0.0], means, variances)
    assert np.isinf(costs[:, 2]).all()
    assert np.isfinite(costs[:, :2]).all()
    assert reference.assign(x, [0.5, 0.5, 0.0], means, variances).tolist() == [0, 0, 1]
    np.testing.assert_allclose(
        reference.margins(x, [0.5, 0.5, 0.0], means, variances), [2.0, 0.0, 8.0]
    )
    assert reference.margins(x, [1.0], means[:1], variances[:1]).tolist() == [math.inf] * 3
    assert reference.assign(x, [0.5, 0.5, 0.0], means, variances, "ucmle").tolist() == [0, 0, 2]
    joint = (x, [0, 0, 2], [0.5, 0.5, 0.0], means, variances)
    assert reference.joint_cost(*joint) == math.inf
    assert reference.joint_cost(*joint, sample_weight=[1, 2, 0]) == pytest.approx(
        costs[0, 0] + 2 * costs[1, 0]
    )


def test_estimate_matches_numpy_and_fills_empty_clusters():
    rng = np.random.default_rng(1)
    x, a = rng.normal(size=(20, 2)), rng.uniform(0.1, 2.0, size=20)
    labels = rng.integers(2, size=20)
    weights, means, variances = reference.estimate(x, labels, 3, sample_weight=a)
    for k in range(2):
        chosen = labels == k
        np.testing.assert_allclose(weights[k], a[chosen].sum() / a.sum())
        np.testing.assert_allclose(means[k], np.average(x[chosen], axis=0, weights=a[chosen]))
        scatter = np.cov(x[chosen].T, aweights=a[chosen], ddof=0).trace()
        np.testing.assert_allclose(variances[k], scatter / 2)
    assert weights[2] == 0
    np.testing.assert_allclose(means[2], np.average(x, axis=0, weights=a))
    np.testing.assert_allclose(variances[2], np.cov(x.T, aweights=a, ddof=0).trace() / 2)
    floored = reference.estimate(x, labels, 3, sample_weight=a, min_variance=50.0)
    assert (floored[2] == 50.0).all()
    assert (reference.estimate(x, labels, 3, "ucmle")[0] == 1 / 3).all()
    assert (reference.estimate(x, labels, 3, "wkm", 4.0)[2] == 0.125).all()


def test_variance_survives_a_far_origin():
    x = np.array([0.0, 1.0, 2.0, 3.0]) + 2.0**40
    assert reference.estimate(x, [0, 0, 0, 0], 1)[2][0] == 1.25


@pytest.mark.parametrize("problem", reference.PROBLEMS)
@pytest.mark.parametrize("min_variance", [0.0, 1.0])
def test_partition_cost_is_the_joint_cost_of_the_estimate_and_its_minimum(problem, min_variance):
    rng = np.random.default_rng(2)
    x, a = rng.normal(size=(15, 2)), rng.uniform(0.1, 2.0, size=15)
    labels = np.arange(15) % 3
    extra = {"problem": problem, "beta": 0.8, "sample_weight": a}
    cost = reference.partition_cost(x, labels, 3, min_variance=min_variance, **extra)
    weights, means, variances = reference.estimate(x, labels, 3, min_variance=min_variance, **extra)
    best = reference.joint_cost(x, labels, weights, means, variances, **extra)
    assert cost == pytest.approx(best, rel=1e-12)
    for _ in range(20):
        other = weights * rng.uniform(0.8, 1.25, size=3)
        theta = (
            other / other.sum(),
            means + 0.1 * rng.normal(size=means.shape),
            np.maximum(variances * rng.uniform(0.8, 1.25, size=3), min_variance),
        )
        assert reference.joint_cost(x, labels, *theta, **extra) > cost
        assert reference.model_cost(x, *theta, **extra) <= reference.joint_cost(
            x, labels, *theta, **extra
        )


def test_zero_variance_costs_minus_infinity_unless_floored():
    x = np.array([[0.1, 0.3]] * 3 + [[4.0, 5.0], [6.0, 9.0]])
    labels = np.array([0, 0, 0, 1, 1])
    assert reference.partition_cost(x, labels, 2) == -math.inf
    assert reference.brute_force(x, 2)[0] == -math.inf
    assert math.isfinite(reference.partition_cost(x, labels, 2, min_variance=0.01))
    assert math.isfinite(reference.partition_cost(x, labels, 2, "wkm"))
    assert reference.model_cost(x[:3], *reference.estimate(x[:3], labels[:3], 1)) == -math.inf


@pytest.mark.parametrize("problem", reference.PROBLEMS)
def test_weight_zero_changes_nothing_and_integer_weights_are_copies(problem):
    rng = np.random.default_rng(3)
    x, labels = rng.normal(size=(8, 2)) * 2, np.array([0, 1, 0, 1, 1, 0, 0, 1])
    a = np.array([1, 3, 2, 0, 1, 0, 2, 1])
    copies, copied_labels = np.repeat(x, a, axis=0), np.repeat(labels, a)
    theta = random_mixture(rng, 2, 2)
    floor = {"problem": problem, "beta": 0.6, "min_variance": 0.05}
    plain = {"problem": problem, "beta": 0.6}

    def all_costs(x, labels, a):
        result = reference.cem(x, *theta, sample_weight=a, **floor)
        return [
            reference.model_cost(x, *theta, sample_weight=a, **plain),
            reference.joint_cost(x, labels, *theta, sample_weight=a, **plain),
            reference.partition_cost(x, labels, 2, sample_weight=a, **floor),
            reference.lower_bound(x, 2, 3, sample_weight=a, **floor),
            *np.concatenate(
                [np.ravel(p) for p in reference.estimate(x, labels, 2, **floor, sample_weight=a)]
            ),
            result.n_iter,
            *result.costs,
        ]

    np.testing.assert_allclose(
        all_costs(x, labels, a), all_costs(copies, copied_labels, None), rtol=1e-12
    )
    # A weighted point cannot be split, so copies can only do better.
    weighted, _ = reference.brute_force(x, 2, 3, sample_weight=a, **floor)
    copied, _ = reference.brute_force(copies, 2, 3, **floor)
    assert copied <= weighted + 1e-9
    padded, _ = reference.brute_force(x[a > 0], 2, 3, sample_weight=a[a > 0], **floor)
    assert padded == weighted


@pytest.mark.parametrize("d", [1, 2, 5])
def test_core_identity(d):
    rng = np.random.default_rng(4)
    x, labels = reference.random_mixture_data(rng, 40, d, 3, 5.0)
    weights, means, variances = reference.estimate(x, labels, 3)
    for _ in range(10):
        other_weights, _, _ = random_mixture(rng, 3, d)
        other_means = means + rng.normal(size=means.shape)
        other_variances = variances * np.exp(rng.normal(size=3))
        e = ((other_means - means) ** 2).sum(axis=1) / (d * variances)
        t = np.log(other_variances / variances)
        phi = t + (1 + e) * np.exp(-t) - 1
        divergence = (weights * np.log(weights / other_weights)).sum()
        predicted = reference.partition_cost(x, labels, 3) + 40 * (
            d / 2 * (weights * phi).sum() + divergence
        )
        actual = reference.joint_cost(x, labels, other_weights, other_means, other_variances)
        assert actual == pytest.approx(predicted, rel=1e-10)


@pytest.mark.parametrize("problem", reference.PROBLEMS)
@pytest.mark.parametrize("weighted", [False, True])
def test_cem_never_raises_the_cost_and_ends_at_a_fixed_point(problem, weighted):
    rng = np.random.default_rng(5)
    for _ in range(10):
        x, _ = reference.random_mixture_data(rng, 40, 2, 3, 3.0)
        a = rng.choice([0.0, 0.5, 1.0, 2.3], size=40) if weighted else None
        theta = random_mixture(rng, 3, 2)
        run = reference.cem(x, *theta, problem, 0.4, a, min_variance=0.01)
        assert run.converged
        assert len(run.costs) == run.n_iter
        assert (np.diff(run.costs) <= 1e-9).all()
        assert run.costs[0] <= reference.model_cost(x, *theta, problem, 0.4, a) + 1e-9
        again = reference.estimate(x, run.labels, 3, problem, 0.4, a, 0.01)
        for got, expected in zip((run.weights, run.means, run.variances), again, strict=True):
            np.testing.assert_array_equal(got, expected)
        end = reference.partition_cost(x, run.labels, 3, problem, 0.4, a, 0.01)
        assert run.costs[-1] == pytest.approx(end, rel=1e-12)


@pytest.mark.parametrize("problem", ["cmle", "ucmle"])
def test_scaling_adds_n_d_log_scale(problem):
    rng = np.random.default_rng(6)
    x, labels = reference.random_mixture_data(rng, 9, 2, 2, 4.0)
    shift = 9 * 2 * math.log(7.0)
    cost, best = reference.brute_force(x, 2, 2, problem)
    scaled, scaled_best = reference.brute_force(7 * x, 2, 2, problem)
    assert scaled == pytest.approx(cost + shift)
    assert blocks(best) == blocks(scaled_best)
    assert reference.partition_cost(7 * x, labels, 2, problem) == pytest.approx(
        reference.partition_cost(x, labels, 2, problem) + shift
    )
    assert reference.lower_bound(7 * x, 2, 2, problem) == pytest.approx(
        reference.lower_bound(x, 2, 2, problem) + shift
    )


def test_scaling_leaves_wkm_alone_when_beta_scales_back():
    x, labels = reference.random_mixture_data(np.random.default_rng(7), 9, 2, 2, 4.0)
    assert reference.partition_cost(7 * x, labels, 2, "wkm", 0.5 / 49) == pytest.approx(
        reference.partition_cost(x, labels, 2, "wkm", 0.5)
    )


@pytest.mark.parametrize(
    ("n", "k", "count"), [(1, 1, 1), (4, 2, 7), (5, 5, 1), (7, 3, 301), (9, 3, 3025), (3, 4, 0)]
)
def test_set_partitions_are_counted_by_stirling_numbers(n, k, count):
    partitions = list(reference.set_partitions(n, k))
    as_sets = {frozenset(blocks(labels)) for labels in partitions}
    assert len(partitions) == len(as_sets) == count
    for labels in partitions:
        assert len(np.unique(labels)) == k
        assert (labels == reference._canonical(labels)).all()


@pytest.mark.parametrize("problem", reference.PROBLEMS)
@pytest.mark.parametrize("weighted", [False, True])
def test_brute_force_is_the_least_partition_cost(problem, weighted):
    rng = np.random.default_rng(8)
    for k in (1, 2, 3):
        x = rng.normal(size=(7, 2)) * 2
        a = rng.uniform(0.3, 2.0, size=7) if weighted else np.ones(7)
        extra = {"problem": problem, "beta": 0.3, "sample_weight": a, "min_variance": 0.1}
        cost, labels = reference.brute_force(x, k, 1.2, **extra)
        admissible = [
            reference.partition_cost(x, candidate, k, **extra)
            for candidate in reference.set_partitions(7, k)
            if np.bincount(candidate, a, minlength=k).min() >= 1.2
        ]
        assert cost == pytest.approx(min(admissible), rel=1e-12)
        assert reference.partition_cost(x, labels, k, **extra) == pytest.approx(cost, rel=1e-12)


def test_brute_force_refuses_the_impossible():
    with pytest.raises(ValueError, match="no partition"):
        reference.brute_force(np.arange(5.0), 3, 2)
    with pytest.raises(ValueError, match="at most 12"):
        reference.brute_force(np.arange(13.0), 2)
    with pytest.raises(ValueError, match="problem must be"):
        reference.brute_force(np.arange(5.0), 2, 2, "kmeans")


def test_cem_leaves_the_constrained_optimum():
    x = np.array([0, UNIT, 2 * UNIT, 100.0])
    cost, labels = reference.brute_force(x, 2, 2)
    assert cost == pytest.approx(15.082, abs=5e-4)
    assert labels.tolist() == [0, 0, 1, 1]
    assert reference.assign(x, *reference.estimate(x, labels, 2)).tolist() == [0, 0, 0, 1]


def test_the_best_partition_of_a_line_need_not_be_contiguous():
    x = np.array([-40, -20, 0, UNIT, 2 * UNIT, 3 * UNIT, 20, 40])
    cost, labels = reference.brute_force(x, 2, 2)
    assert cost == pytest.approx(31.64, abs=5e-3)
    assert labels.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    contiguous = min(
        reference.partition_cost(x, (np.arange(8) >= cut).astype(int), 2) for cut in range(2, 7)
    )
    assert contiguous == pytest.approx(36.53, abs=5e-3)
    assert reference.narrowest_interval_1d(x, 2, 2)[0] == pytest.approx(cost)


def line_data(rng, n):
    """Return a random instance on the line: well defined, free, or with repeated points."""
    kind = rng.integers(5)
    if kind < 3:
        return reference.well_defined_instance(rng, n, 1, FAMILIES[kind])[:, 0]
    if kind == 3:
        return rng.normal(size=n) * np.exp(2 * rng.normal(size=n))
    return rng.integers(0, 12, size=n).astype(float)


@pytest.mark.parametrize("seed", range(60))
def test_wkm_1d_is_brute_force(seed):
    rng = np.random.default_rng([9, seed])
    n, beta = int(rng.integers(6, 10)), float(np.exp(rng.normal() * 2 - 2))
    x = line_data(rng, n)
    for k in (1, 2, 3):
        for min_size in range(1, n // k + 1):
            cost, labels = reference.wkm_1d(x, k, min_size, beta)
            expected, _ = reference.brute_force(x, k, min_size, "wkm", beta)
            assert cost == pytest.approx(expected, rel=1e-10, abs=1e-10)
            assert np.bincount(labels).min() >= min_size
            assert len(np.unique(labels)) == k
            again = reference.partition_cost(x, labels, k, "wkm", beta)
            assert again == pytest.approx(cost, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("problem", ["cmle", "ucmle"])
@pytest.mark.parametrize("seed", range(60))
def test_narrowest_interval_1d_is_brute_force(problem, seed):
    rng = np.random.default_rng([10, seed])
    n = int(rng.integers(6, 10))
    x = line_data(rng, n)
    # From 1 (unbounded: -inf) to the sizes that leave no freedom at all.
    cases = [(k, size) for k in (1, 2, 3, 4) for size in range(1, n // k + 1)]
    for k, min_size in cases:
        cost, labels = reference.narrowest_interval_1d(x, k, min_size, problem)
        expected, optimum = reference.brute_force(x, k, min_size, problem)
        assert cost == pytest.approx(expected, rel=1e-10, abs=1e-10)
        assert np.bincount(labels).min() >= min_size
        assert len(np.unique(labels)) == k
        again = reference.partition_cost(x, labels, k, problem)
        assert again == pytest.approx(cost, rel=1e-10, abs=1e-10)
        if math.isfinite(cost):
            # The claim itself, on the optimum that brute force found.
            inside = optimum == reference.estimate(x, optimum, k, problem)[2].argmin()
            narrowest, others = x[inside], x[~inside]
            assert not ((others > narrowest.min()) & (others < narrowest.max())).any()


def test_contiguity_on_a_line_needs_unit_weights():
    # With point weights and a minimum weight, {0, 10} and {5} is the only admissible partition.
    _, labels = reference.brute_force([0.0, 5.0, 10.0], 2, 4, "wkm", sample_weight=[2, 5, 2])
    assert labels.tolist() == [0, 1, 0]


def bound_data(rng, weights):
    """Return points (some repeated) and point weights of the given kind."""
    n, d = int(rng.integers(6, 10)), int(rng.integers(1, 4))
    x = reference.well_defined_instance(rng, n, d, FAMILIES[rng.integers(3)])
    x *= np.exp(rng.normal())
    repeated = rng.integers(0, 3)
    x[:repeated] = x[n - repeated :]
    if weights == "unit":
        return x, np.ones(n)
    if weights == "integer":
        return x, rng.integers(0, 4, size=n).astype(float) + np.eye(n)[0]
    return x, rng.exponential(size=n) * rng.choice([0.2, 1.0, 3.0])


@pytest.mark.parametrize("problem", reference.PROBLEMS)
@pytest.mark.parametrize("weights", ["unit", "integer", "real"])
def test_lower_bound_is_below_every_optimum(problem, weights):
    rng = np.random.default_rng(11)
    finite = 0
    for _ in range(40):
        x, a = bound_data(rng, weights)
        floor, beta = float(np.exp(rng.normal() - 2)), float(np.exp(rng.normal() - 1))
        for k in (1, 2, 3):
            min_size = a.sum() / k * rng.uniform(0.2, 0.9)
            if weights != "real":
                min_size = max(1, math.floor(min_size))
            for min_variance in (0.0, floor):
                extra = (problem, beta, a, min_variance)
                bound = reference.lower_bound(x, k, min_size, *extra)
                try:
                    optimum, _ = reference.brute_force(x, k, min_size, *extra)
                except ValueError:
                    continue
                assert bound <= optimum + 1e-9 * max(1.0, abs(optimum)) or bound == optimum
                finite += math.isfinite(bound)
    assert finite > 100


@pytest.mark.parametrize("problem", reference.PROBLEMS)
def test_lower_bound_is_attained(problem):
    # Two far equilateral triangles: sizes are forced to 3, and q is the same at every point.
    triangle = np.array([[1.0, 0.0], [-0.5, math.sqrt(0.75)], [-0.5, -math.sqrt(0.75)]])
    x = np.concatenate([triangle, triangle + 100])
    optimum, labels = reference.brute_force(x, 2, 3, problem)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert reference.lower_bound(x, 2, 3, problem) == pytest.approx(optimum, rel=1e-12)


def test_lower_bound_of_one_wkm_cluster_is_its_cost_for_any_weights():
    rng = np.random.default_rng(18)
    x, a = rng.normal(size=(9, 3)), rng.exponential(size=9)
    cost = reference.partition_cost(x, np.zeros(9, int), 1, "wkm", 0.7, a)
    bound = reference.lower_bound(x, 1, math.fsum(a), "wkm", 0.7, a)
    assert bound == pytest.approx(cost, rel=1e-12)


@pytest.mark.parametrize("problem", reference.PROBLEMS)
def test_lower_bound_with_unit_weights_is_the_formula(problem):
    rng = np.random.default_rng(12)
    n, d, k, min_size, beta = 9, 2, 3, 2, 0.3
    x = rng.normal(size=(n, d))
    total = 0.0
    for point in range(n):
        others = sorted(((x[point] - x[other]) ** 2).sum() for other in range(n) if other != point)
        values = []
        for size in range(min_size, n - (k - 1) * min_size + 1):
            nearest = sum(others[: size - 1])
            log_weight = math.log(size / n)
            q = nearest / (2 * size * d)
            values.append(
                {
                    "cmle": d / 2 * math.log(2 * math.pi * math.e * q) - log_weight,
                    "wkm": beta * nearest / (2 * size) - log_weight,
                    "ucmle": d / 2 * math.log(2 * math.pi * math.e * q),
                }[problem]
            )
        assert problem != "ucmle" or min(values) == values[0]
        total += min(values)
    assert reference.lower_bound(x, k, min_size, problem, beta) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("problem", reference.PROBLEMS)
@pytest.mark.parametrize("min_variance", [0.0, 0.5])
def test_lower_bound_term_is_least_at_the_cumulative_weights(problem, min_variance):
    rng = np.random.default_rng(13)
    for d in (1, 3):
        x, a = rng.normal(size=(8, d)), rng.exponential(size=8)
        for distances in reference.squared_distances(x, x)[:4]:
            corners = np.cumsum(a[np.argsort(distances)])

            def term(weight, distances=distances, a=a, d=d):
                return reference.lower_bound_term(
                    distances, a, weight, d, problem, 0.7, min_variance
                )

            for low, high in pairwise(corners):
                grid = np.array([term(weight) for weight in np.linspace(low, high, 60)[1:]])
                ends = min(term(low), term(high))
                assert grid.min() >= ends - 1e-9 * max(1.0, abs(term(high)))
                # Rises, then falls: no step up after a step down.
                steps = np.sign(np.round(np.diff(grid), 12))
                assert (np.diff(steps[steps != 0]) <= 0).all()


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_variance_range_holds_for_every_subset(family, d):
    rng = np.random.default_rng(14)
    for min_size in (2, 3, 4):
        x = reference.well_defined_instance(rng, 8, d, family)
        variances = subset_variances(x, min_size)
        floor = reference.variance_floor(x, min_size)
        assert floor <= min(variances) * (1 + 1e-12)
        closest = reference.min_distance_sq(x)
        assert floor >= (min_size - 1) / (2 * min_size * d) * closest * (1 - 1e-12)
        assert floor >= 1 / (2 * math.pi)
        low, high = reference.y_range(x, min_size)
        assert low == pytest.approx(math.log(2 * math.pi * math.e * floor))
        assert math.exp(high) / (2 * math.pi * math.e) >= max(variances) * (1 - 1e-12)


def test_variance_range_is_sharp():
    # A lone close pair attains the floor; the vertices of a regular simplex attain Jung's bound.
    x = np.array([0.0, 1.0, 50.0, 90.0])
    assert reference.variance_floor(x, 2) == 0.25
    triangle = np.array([[1.0, 0.0], [-0.5, math.sqrt(0.75)], [-0.5, -math.sqrt(0.75)]])
    _, high = reference.y_range(triangle, 3)
    assert math.exp(high) / (2 * math.pi * math.e) == pytest.approx(0.5)
    assert reference.diameter_sq(triangle) == pytest.approx(3.0)
    assert reference.min_distance_sq([1.0, 4.0, 1.0]) == 0.0


def test_gonzalez_by_hand():
    centres, radius, labels = reference.gonzalez([0.0, 1.0, 10.0, 12.0, 4.0], 3)
    assert centres == [0, 3, 4]
    assert radius == 2.0
    assert labels.tolist() == [0, 0, 1, 1, 2]


def test_gamma_by_hand():
    log = math.log(2 * math.pi * math.e)
    line = np.array([0.0, 3.0, 20.0, 23.0])
    plane = np.stack([line, np.zeros(4)], axis=1)
    assert reference.gamma_bound(line, 2)[0] == pytest.approx(log + math.log(9) + 2 * math.log(2))
    assert reference.gamma_bound(plane, 2)[0] == pytest.approx(log + math.log(4.5) + math.log(2))


def test_gamma_bounds_the_optimum():
    rng = np.random.default_rng(15)
    checked = 0
    for _ in range(150):
        d, k = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        x, _ = reference.random_mixture_data(rng, 9, d, k, 6.0)
        _, radius, labels = reference.gonzalez(x, k)
        smallest = int(np.bincount(labels, minlength=k).min())
        if smallest >= 2:
            checked += 1
            gamma, bound = reference.gamma_bound(x, k)
            assert bound == pytest.approx(9 * d / 2 * gamma)
            assert reference.brute_force(x, k, smallest)[0] <= bound + 1e-9
            # No partition into k clusters has a smaller largest diameter than the radius.
            if k == 2:
                assert radius**2 <= min(
                    max(reference.diameter_sq(x[labels == j]) for j in range(2))
                    for labels in reference.set_partitions(9, 2)
                ) * (1 + 1e-12)
    assert checked > 50


def test_gamma_does_not_bound_the_optimum_under_a_larger_min_size():
    # The far pair is a Gonzalez cluster of 2; min_size 3 tears it apart or stretches a cluster.
    x = np.array([0.0, UNIT, 2 * UNIT, 3 * UNIT, 1000.0, 1000.0 + UNIT])
    _, bound = reference.gamma_bound(x, 2)
    assert reference.brute_force(x, 2, 2)[0] <= bound
    assert reference.brute_force(x, 2, 3)[0] > bound + 5


def test_the_best_balanced_partition_need_not_be_f_gamma_f_balanced():
    # g = Gamma f needs the optimum that Gamma bounds, not the best f-balanced partition.
    x = np.array([0.0, UNIT, 2 * UNIT, 3 * UNIT, 1e10, 1e10 + 2])
    assert reference.min_distance_sq(x) >= 4 / math.pi * (1 - 1e-12)
    gamma, _ = reference.gamma_bound(x, 2)
    _, balanced = reference.brute_force(x, 2, 3)
    assert reference.is_balanced(x, balanced, 2, 2)
    assert not reference.is_balanced(x, balanced, 2, 2, gamma * 2)
    _, free = reference.brute_force(x, 2, 2)
    assert reference.is_balanced(x, free, 2, 3, gamma * 3)


def test_balance():
    x = np.array([0.0, UNIT, 10.0, 12.0, 17.0, 40.0])
    labels = np.array([0, 0, 1, 1, 1, 1])
    assert reference.is_balanced(x, labels, 2, 3)
    assert not reference.is_balanced(x, labels, 2, 2.9)
    assert not reference.is_balanced(x, labels, 3, 100)
    costs = [
        reference.partition_cost(x[labels == k], np.zeros(n, int), 1) for k, n in enumerate((2, 4))
    ]
    ratio = sum(costs) / min(costs)
    assert reference.is_balanced(x, labels, 2, 3, ratio * 1.001)
    assert not reference.is_balanced(x, labels, 2, 3, ratio * 0.999)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n", "d"), [(12, 1), (12, 3), (60, 2)])
def test_instances_are_well_defined(family, n, d):
    x = reference.well_defined_instance(np.random.default_rng(16), n, d, family)
    assert x.shape == (n, d)
    assert reference.min_distance_sq(x) >= 4 * d / math.pi


def test_mixture_data_has_every_component_twice():
    x, labels = reference.random_mixture_data(np.random.default_rng(17), 11, 2, 5, 3.0)
    assert x.shape == (11, 2)
    assert np.bincount(labels, minlength=5).min() >= 2


def test_product_costs_are_those_of_naive_scoring():
    rng = np.random.default_rng(20)
    x, a = rng.normal(size=(7, 2)), rng.uniform(size=7)
    _, means, _ = random_mixture(rng, 3, 2)
    variances, log_weights = np.array([0.5, 2.0]), np.log([[0.2, 0.3, 0.5], [0.5, 0.25, 0.25]])
    costs = reference.block_means_costs(x, a, means, variances, log_weights)
    assert costs.shape == (2, 2, 2, 2)
    # The same by columns, with weights that are normalised afterwards only.
    for row, log_weight in enumerate(log_weights):
        columns, masses = [], []
        for mean, share in zip(means, np.exp(log_weight), strict=True):
            one = [reference.point_costs(x, [3 * share], [mean], [v])[:, 0] for v in variances]
            columns.append(a * np.array(one))
            masses.append(np.full(2, 3 * share))
        product = reference.product_costs(columns, masses, a.sum())
        np.testing.assert_allclose(product, costs[row], rtol=1e-12)
    mixture = (np.exp(log_weights[1]), means, variances[[0, 1, 1]])
    expected = reference.model_cost(x, *mixture, sample_weight=a)
    assert costs[1, 0, 1, 1] == pytest.approx(expected, rel=1e-12)


def test_smallest_entries_by_hand():
    costs = np.array([[2.0, 1.0, 1.0], [0.5, 2.0, 1.0]])
    values, indices = reference.smallest_entries(costs, 4)
    assert values == [0.5, 1.0, 1.0, 1.0]
    assert indices == [(1, 0), (0, 1), (0, 2), (1, 2)]
    assert len(reference.smallest_entries(costs, 9)[0]) == 6


def test_subset_means_by_hand():
    assert reference.subset_means([0.0, 2.0, 10.0], 2)[:, 0].tolist() == [1.0, 5.0, 6.0]


def test_phi_is_least_where_the_variance_makes_up_for_the_mean():
    t = np.linspace(-2, 4, 6001)
    for e in (0.0, 0.3, 5.0):
        values = reference.phi(t, e)
        assert values.min() == pytest.approx(math.log1p(e), abs=1e-6)
        assert t[values.argmin()] == pytest.approx(math.log1p(e), abs=1e-3)


@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_greedy_cover_takes_as_few_values_as_a_search_over_a_fine_grid(slope):
    low, high, constant = 1.0, 4.0, 0.3
    y = np.linspace(low, high, 601)
    for e in (0.1, 0.25):
        # Which of many values serves which y; then the fewest that serve all, from the left.
        candidates = np.linspace(low, high + 2, 3001)
        serves = reference.phi(candidates[:, None] - y, e) <= slope * y + constant
        first, count = 0, 0
        while first < len(y):
            first += max(int((~row[first:]).argmax()) or len(y) for row in serves if row[first])
            count += 1
        assert reference.greedy_cover([e], low, high, slope, constant)[0] == count


def test_the_naive_plan_by_hand():
    # One y, so that one value does, for any e_m up to e - 1; draws of one point each.
    total, m, e, values = reference.best_plan(2, 2, None, 1.0, 0.5, 2.0, 1.0, 1.0)
    assert (m, values) == (1, 1)
    assert 1 < e < math.e - 1
    most = 2 / 4 * (1 - 1 / (math.e - 1))
    assert total == math.ceil(math.log(0.5) / math.log(1 - most)) == 3
