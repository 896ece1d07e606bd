"""Every repair to the paper: what is printed fails on the README's counterexample, ours does not.

One test for each row of the table, in its order. The numbers that the table shows go through
`shows`, so that the last test can hold the one against the other.
"""

import inspect
import itertools
import math
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jaxcmle as jc
from jaxcmle.candidates import choices, claim, grids, planning, pruning

PRECISIONS = ("float64",)
ROOT = Path(__file__).parent.parent
# The closest that two points of a well-defined instance on the line can be.
U = math.sqrt(4 / math.pi)
# ln(2 pi e): y of a variance of 1.
Y_ONE = math.log(2 * math.pi * math.e)


def shows(value, text):
    """The value rounds to the number in the table."""
    decimals = len(text.partition(".")[2])
    assert f"{value:.{decimals}f}" == text


def column(points):
    return np.array(points, np.float64)[:, None]


def paper_plan(n_clusters, d=2, **options):
    options = {"eps": 0.5, "delta": 0.1, "shape": (1000, d), **options}
    return jc.plan(None, n_clusters, algorithm="paper", **options)


def test_row_cem_does_not_keep_the_constrained_optimum():
    x = column([0, U, 2 * U, 100])
    optimum, labels = reference.brute_force(x, 2, 2)
    shows(optimum, "15.08")
    assert labels.tolist() == [0, 0, 1, 1]
    there, here = reference.point_costs(x, *reference.estimate(x, labels, 2))[2]
    shows(there, "5.54")
    shows(here, "6.00")
    best = jc.estimate(x, labels, 2)
    assert jc.assign(x, best).tolist() == [0, 0, 0, 1]
    moved = jc.cem(x, best, min_size=2, min_variance=1e-3)
    assert moved.labels.tolist() == [0, 0, 0, 1]
    assert int(moved.status) == jc.Status.INADMISSIBLE


def test_row_repeated_points_and_the_sharp_bound_on_variances():
    x = column([0, 0, 0, 0, 0, 0, U])
    values = np.unique(x)
    assert reference.min_distance_sq(values) == pytest.approx(4 / math.pi)
    shows(np.var(x), "0.1559")
    shows(1 / (2 * math.pi), "0.1592")
    assert np.var(x) < 1 / (2 * math.pi)
    report = jc.check_instance(x)
    assert not report.well_defined
    assert report.duplicates == 5

    def sharp(x):
        n, d = x.shape
        return (n - 1) / (2 * n * d) * reference.min_distance_sq(x)

    assert sharp(x) <= np.var(x)
    # Attained by two points and by regular simplices; the proof has half of it.
    triangle = np.array([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2]])
    for points in (column([0, U]), triangle):
        n, d = points.shape
        variance = points.var(axis=0).mean()
        assert sharp(points) == pytest.approx(variance)
        assert jc.variance_floor(points, n) == pytest.approx(variance)
        printed = math.comb(n, 2) / (2 * n**2 * d) * reference.min_distance_sq(points)
        assert printed == pytest.approx(variance / 2)


def test_row_only_optimal_partitions_are_balanced_in_cost():
    far, k = 1e7, 3
    x = column([0, U, far, far + U, 2 * far, 2 * far + U])
    poor, optimal = [0, 0, 1, 2, 1, 2], [0, 0, 1, 1, 2, 2]
    # The most that the lemma allows Gamma to be; each optimal cluster has a diameter of U.
    largest_gamma = 2 * math.log(32 * math.pi * U) + math.log(k) + 1
    shows(largest_gamma * 3, "34.68")
    costs = [reference.partition_cost(x[np.equal(poor, j)], [0, 0], 1) for j in range(k)]
    shows(sum(costs) / min(costs), "40.79")
    assert jc.is_balanced(x, poor, k, f=3)
    assert not jc.is_balanced(x, poor, k, f=3, g=3 * largest_gamma)
    assert jc.is_balanced(x, poor, k, f=3, g=40.8)
    assert reference.brute_force(x, k, 2)[1].tolist() == optimal
    assert jc.is_balanced(x, optimal, k, f=3, g=3 * jc.upper_bound(x, k).gamma)


def test_row_four_factors_multiply():
    x, eps = [0, 2], 0.5
    optimum, _ = reference.brute_force(x, 1, 2)
    assert optimum == pytest.approx(Y_ONE)

    def worst(eps):
        """Return what all errors cost that the theorem allows, and the variance."""
        # OPT(C, 1) is n d / 2 times y, so that the logarithm may be off by this much of y.
        variance = math.exp(((1 + eps) ** 2 - 1) * Y_ONE)
        return reference.model_cost(x, [1], [[1 + math.sqrt(eps)]], [variance]), variance

    cost, variance = worst(eps)
    shows(variance, "34.72")
    shows(cost, "5.43")
    shows((1 + eps) * optimum, "4.26")
    assert (1 + eps) * optimum < cost <= (1 + eps) ** 4 * optimum
    fourth = paper_plan(1, eps=eps, balance=1).e_m
    assert (1 + fourth) ** 4 == pytest.approx(1 + eps)
    shows(worst(fourth)[0], "3.06")
    assert worst(fourth)[0] <= (1 + eps) * optimum


def test_row_the_last_step_of_the_cost_bound_and_the_identity():
    def last_step(eps, d):
        return (1 + eps) ** 3 + 2 * eps / d, (1 + eps) ** 4

    left, right = last_step(0.1, 1)
    shows(left, "1.531")
    shows(right, "1.464")
    assert left > right
    # In two dimensions and more it is right.
    assert all(np.less_equal(*last_step(eps, 2)) for eps in np.linspace(0, 1, 101))
    # The identity, on a partition of four points.
    x, labels = column([0, 2, 9, 13]), [0, 0, 1, 1]
    w, means, variances = reference.estimate(x, labels, 2)
    other = np.array([0.3, 0.7]), means + np.array([[0.5], [-1]]), variances * [2, 0.7]
    t, e = np.log([2, 0.7]), np.array([0.25, 1]) / variances
    divergence = (w * np.log(w / other[0])).sum()
    excess = 4 * (0.5 * (w * grids.excess(t, e)).sum() + divergence)
    expected = reference.joint_cost(x, labels, *other) - reference.partition_cost(x, labels, 2)
    assert excess == pytest.approx(expected, rel=1e-12)
    # By it the claim holds on the line as well, for all errors that the theorem allows.
    rng = np.random.default_rng(0)
    count = 20_000
    eps = rng.uniform(1e-3, 1, size=(count, 1))
    w = rng.dirichlet([1, 1], size=count)
    y = 1 + 4 * rng.exponential(size=(count, 2)) * rng.integers(0, 2, size=(count, 2))
    t = ((1 + eps) ** 2 - 1) * y * rng.choice([0, 0.1, 1], size=(count, 2))
    sizes = w * (1 + eps * rng.integers(0, 2, size=(count, 2)))
    other_w = sizes / sizes.sum(axis=1, keepdims=True)
    divergence = (w * np.log(w / other_w)).sum(axis=1)
    excess = 0.5 * (w * grids.excess(t, eps)).sum(axis=1) + divergence
    cost = (w * (0.5 * y - np.log(w))).sum(axis=1)
    assert (excess <= ((1 + eps[:, 0]) ** 4 - 1) * cost).all()


def test_row_the_sample_is_smaller_than_the_lemma_asks_for():
    alpha = eps = delta = 1 / 2
    drawn, asked = 1 / (alpha * eps * delta), 2 / (alpha * eps * delta)
    shows(drawn, "8")
    shows(asked, "16")

    def holds_enough(draws, share, least):
        """Return the probability of so many points of a cluster with this share."""
        return math.fsum(
            math.comb(draws, i) * share**i * (1 - share) ** (draws - i)
            for i in range(least, draws + 1)
        )

    shows(holds_enough(8, 1 / 2, 4), "0.637")
    for m, balance in itertools.product((1, 2, 4, 9, 30), (1.5, 2, 3.3, 6)):
        assert holds_enough(math.ceil(m * balance), 1 / balance, m) >= 1 / 2
    # With so many the means are near with 1 - delta or more, as Markov has it: more than a fifth.
    plan = paper_plan(2, balance=4)
    assert plan.mean_tuples == math.comb(4 * plan.m, plan.m) ** 2
    assert plan.p <= ((1 - plan.delta) * holds_enough(4 * plan.m, 1 / 4, plan.m)) ** 2


def test_row_repetitions():
    delta, k = 0.1, 2
    p = ((1 - delta) / 5) ** k
    shows(p, "0.0324")
    shows(math.ceil(math.log(1 / delta)), "3")
    shows(1 - (1 - p) ** 3, "0.094")
    repetitions = math.exp(choices.log_repetitions(math.log(p), delta))
    shows(repetitions, "70")
    assert 1 - (1 - p) ** 69 < 1 - delta <= 1 - (1 - p) ** 70
    assert paper_plan(k, delta=delta).repetitions == 70


def test_row_gamma_on_the_line_and_with_singletons():
    def printed(x, k, radius):
        n, d = x.shape
        return n * d / 2 * (math.log(2 * math.pi * radius**2) + 1 + math.log(k))

    x = column([0, -2, 2, 98, 100, 102, 198, 200])
    centres, radius, labels = reference.gonzalez(x, 3)
    assert x[centres, 0].tolist() == [0, 200, 100]
    assert radius == 2
    assert np.bincount(labels).min() == 2
    optimum, _ = reference.brute_force(x, 3, 2)
    shows(optimum, "22.95")
    shows(printed(x, 3, radius), "21.29")
    assert printed(x, 3, radius) < optimum <= jc.upper_bound(x, 3).bound < math.inf

    x = column([0, 2, 4, 1000])
    assert reference.gonzalez(x, 2)[2].tolist() == [0, 0, 0, 1]
    optimum, _ = reference.brute_force(x, 2, 2)
    shows(optimum, "20.87")
    # {0, 2, 4} and {1000}: the smallest largest diameter is 4, and s is at most four times it.
    shows(printed(x, 2, 16), "18.15")
    assert printed(x, 2, 16) < optimum
    assert jc.upper_bound(x, 2).bound == math.inf
    assert jc.upper_bound(x, 2).smallest_cluster == 1


def test_row_the_number_of_estimates_and_one_exponent_for_two():
    k, d = 2, 24
    step = np.eye(d)[0] * math.sqrt(4 * d / math.pi)
    x = np.stack([0 * step, step, 1000 * step, 1001 * step])
    _, radius, _ = reference.gonzalez(x, k)
    gamma = math.log(2 * math.pi * radius**2) + 1 + math.log(k)
    shows(3 * gamma / d, "0.87")
    assert math.log(3 * gamma / d) < 0
    plan = paper_plan(k, d)
    assert (1 + plan.e_m) ** plan.estimates >= plan.y_max + 2 / d * math.log(k)

    eps, gamma, cost_balance = 1, 8, 4
    pairs = list(itertools.product((1, 2, 3), (-2, -1, 0)))
    shows(len(pairs), "9")
    shows(len({i + j for i, j in pairs}), "5")
    ours = grids.printed_variances([1.0], gamma, cost_balance, eps)[0]
    assert len(set(ours)) == len(ours)
    # The value for an estimate N of a cluster with all points is 1 + eps times it.
    assert {(1 + eps) * 2.0 ** (i + j) for i, j in pairs} < set(ours)


def test_row_tuples_of_variances_are_a_product():
    k, eps, cost_balance = 8, 1, 64
    printed = k * math.log(cost_balance) / math.log1p(eps)
    shows(printed, "48")
    first = np.array(list(itertools.product((1, 5), repeat=k - 1)))
    costs = np.column_stack([first, 64 - first.sum(axis=1)])
    assert costs.min() == 1
    shows(len(costs), "128")
    # One value serves y if it is y to (1 + eps)^2 y. Clusters are of a size: y is as the costs are.
    ratio = np.maximum(costs[:, None] / costs, costs / costs[:, None]).max(axis=2)
    np.fill_diagonal(ratio, math.inf)
    assert (ratio > (1 + eps) ** 2).all()
    # Ours, with units in which the sum is 16: every cluster of every case has its value.
    share = costs / 4
    values = grids.printed_variances([1 / k], 16, cost_balance, eps)[0]
    y = k * share[..., None]
    assert ((values >= y) & (values <= (1 + eps) ** 2 * y)).any(axis=-1).all()
    plan = paper_plan(3)
    beside = plan.repetitions * plan.mean_tuples * plan.weight_tuples * plan.estimates
    assert plan.tuples == beside * plan.grid_values**3


def test_row_exponents_go_one_further():
    eps, cost_balance, estimate, weight = 1, 3, 4, 1 / 2
    costs = np.array([0.85, 1.7])
    shows(costs[0], "0.85")
    shows(costs[1], "1.7")
    assert estimate / (1 + eps) <= costs.sum() <= estimate
    assert costs.min() * cost_balance == pytest.approx(costs.sum())
    y = costs / weight
    assert (y >= 1 + math.log(2)).all()

    def right(exponent, cost):
        upper = (1 + eps) ** exponent * estimate
        return upper / (1 + eps) <= cost <= upper

    def serves(exponent, y):
        value = (1 + eps) * (1 + eps) ** exponent * estimate / weight
        return y <= value <= (1 + eps) ** 2 * y

    printed = range(math.ceil(-math.log(cost_balance) / math.log1p(eps)), 1)
    assert list(printed) == [-1, 0]
    assert not any(right(j, costs[0]) or serves(j, y[0]) for j in printed)
    assert right(-2, costs[0])
    assert serves(-2, y[0])
    assert any(right(j, costs[1]) and serves(j, y[1]) for j in printed)
    # Ours has the exponent, and all that a cluster can need: shares down to 1 / g of the least sum.
    gamma = 4.0
    values = grids.printed_variances([1.0], gamma, cost_balance, eps)[0]
    lowest = -math.ceil(math.log(cost_balance) / math.log1p(eps))
    assert lowest == -2
    assert values[0] == (1 + eps) ** (1.0 + lowest)
    for cost in np.linspace(1 / cost_balance, gamma, 1000):
        assert ((values >= cost) & (values <= (1 + eps) ** 2 * cost)).any()


def test_row_the_base_of_the_loglog_grid():
    eps = 1.0
    x = column([0, U])
    variance = x.var()
    shows(variance, "0.318")
    shows(variance ** (1 + eps), "0.101")
    base = 1 / (2 * math.pi)
    shows(base, "0.159")
    shows(base ** (1 + eps), "0.025")
    assert variance ** (1 + eps) < variance
    printed = base ** (1 + eps) ** np.arange(10)
    assert (np.diff(printed) < 0).all()
    assert not (printed[1:] >= variance).any()
    # Nor does the printed range of exponents hold one.
    assert math.log(-math.log(reference.diameter_sq(x), base), 1 + eps) < 1
    # Ours: for this y, and for any other.
    high = 40.0
    values = grids.loglog_values(high, math.ceil(math.log(high) / math.log1p(eps)))
    for y in [1 + math.log(2 * math.pi * variance), *np.linspace(1, high, 1000)]:
        assert ((values >= y * (1 - 1e-12)) & (values <= (1 + eps) * y)).any()


def test_row_weights_are_normalised():
    x, labels, eps = column([0, 2, 9, 11]), [0, 0, 1, 1], 0.5
    optimum, best = reference.brute_force(x, 2, 2)
    assert best.tolist() == labels
    _, means, variances = reference.estimate(x, labels, 2)
    sizes = np.array([3, 3])
    assert ((sizes >= 2) & (sizes <= (1 + eps) * 2)).all()
    shows(reference.model_cost(x, sizes / 4, means, variances), "6.83")
    shows(optimum, "8.45")
    tuples = grids.printed_sizes(2, 3, eps)
    np.testing.assert_allclose(tuples.sum(axis=1), 1)
    costs = [
        float(jc.cost(x, jc.Mixture(weights=weights, means=means, variances=variances)))
        for weights in tuples
    ]
    assert min(costs) == pytest.approx(optimum)
    assert min(costs) >= optimum * (1 - 1e-12)


def drawn_means(x, bits, chosen, prunings):
    """Return the means [walks, k] of one branch that prunes by distance."""
    ones = jnp.ones((1, len(bits) - 1))
    numbers = jnp.asarray(np.array([bits], np.uint32))
    chosen = jnp.asarray(chosen, jnp.int32)
    means = pruning.expand(jnp.asarray(x), numbers, ones, ones, chosen, 2, prunings)
    return np.asarray(means)[:, 0, 0, :, 0]


def test_row_the_order_of_discovery():
    x, weights = column([0, 2, 100, 140]), [0.5, 0.5]
    optimum, _ = reference.brute_force(x, 2, 2)
    # Two draws for each mean: the last two points first, then the first two.
    bits = [[2 << 30, 3 << 30], [0, 1 << 30]]
    means = drawn_means(x, bits, [[0, 1]], 0)[0]
    assert means.tolist() == [120, 1]
    costs = {
        order: reference.model_cost(x, weights, means, order)
        for order in itertools.product((1, 400), repeat=2)
    }
    shows(costs[1, 400], "54.84")
    shows(optimum, "14.44")
    assert min(costs, key=costs.get) == (400, 1)
    assert costs[400, 1] == pytest.approx(optimum)
    # Plans count on all of them, and a grid of weights has all orders of each of its tuples.
    plan = jc.plan(None, 2, eps=1.0, shape=(20_000, 2), balance=math.inf, algorithm="abs")
    assert plan.grid_values > 1
    beside = plan.repetitions * plan.walks * plan.weight_tuples
    assert plan.tuples == beside * plan.grid_values**2
    tuples = {tuple(np.round(row, 12)) for row in grids.geometric_weights(3, 8, 3)}
    assert all(order in tuples for row in tuples for order in itertools.permutations(row))


def test_row_prunings_and_the_end_of_the_recursion():
    # No cost without a mean: the least over nothing.
    with pytest.raises(ValueError, match="zero-size"):
        reference.point_costs([0, 2], [1], [[1]], [1])[:, :0].min(axis=1)
    assert all(walk[0] == 0 for walk in pruning.walks(3, 4))
    half = 3 / 2
    shows(half, "1.5")
    assert not half.is_integer()
    # Rounded up, nothing is left in the end; rounded down, one point is for ever.
    assert pruning.remaining_sizes(3, 4) == (3, 1, 0, 0, 0)
    down = list(itertools.accumulate(range(4), lambda rest, _: rest - rest // 2, initial=3))
    assert down == [3, 2, 1, 1, 1]

    weights, variances = [1 / 3] * 3, [12, 1, 100]
    of_points = reference.model_cost([0, 2], weights[1:], [[0], [2]], variances[1:])
    of_mean = reference.model_cost([0, 2], weights[1:2], [[1]], variances[1:2])
    shows(of_points, "6.04")
    shows(of_mean, "5.04")
    # R is that after two prunings: the first mean is 105, and two more are to be found.
    x = column([0, 2, 100, 102, 104, 106, 108, 110])
    bits = [[2 << 29, 7 << 29], [0, 1 << 31], [0, 1 << 31]]
    means = drawn_means(x, bits, [[0, 1]], 2)
    ours = means[pruning.walks(3, 2).index((0, 2, 2))]
    assert ours.tolist() == [105, 1, 1]
    printed = reference.model_cost(x, weights, [105, 0, 2], variances)
    assert printed - reference.model_cost(x, weights, ours, variances) == pytest.approx(1)


def test_row_what_is_pruned_wrongly():
    x, labels = column([0, 2, 20, 22, 24]), np.array([0, 0, 1, 1, 1])
    mixture = [2 / 5], [[1]], [1]
    costs = reference.point_costs(x, *mixture)[:, 0]
    alpha, k = 3 / 4, 2
    run = reference.wrongly_assigned(costs, labels, {0}, alpha)
    assert run.chunks == [[0, 1, 2]]
    assert run.wrong_points == [2]
    shows(run.wrong, "182.3")
    shows(run.start, "4.67")
    shows(8 * alpha * k * run.start, "56.0")
    assert run.wrong > 8 * alpha * k * run.start
    # Ours: so large an alpha is refused, and with the largest nothing is pruned.
    instance = claim.imagine((1000, 2), 2, 100, "tight", jc.CMLE(), 1e4)
    target = claim.to_target(2.0, None, 0.1)
    with pytest.raises(ValueError, match="alpha must be at most"):
        planning.abs_plan(instance, target, jc.CMLE(), alpha=alpha)
    largest = choices.LARGEST_ALPHA
    assert reference.wrongly_assigned(costs, labels, {0}, largest).chunks == []
    # Where something is, it costs less than that: three points in the middle of twelve.
    x = column([*range(-20, -9, 2), *range(10, 21, 2), -2, 0, 2])
    labels = np.repeat([0, 1], [12, 3])
    costs = reference.point_costs(x, [0.8], [[0]], [x[:12].var()])[:, 0]
    run = reference.wrongly_assigned(costs, labels, {0}, largest)
    assert run.wrong_points == [12, 13, 14]
    assert 0 < run.wrong <= choices.wrong_share(largest) * run.start


def table_rows():
    """Return the cells of the README's table of repairs, without its head."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.split(r"^##+ Repairs to the paper$", readme, flags=re.MULTILINE)[1]
    section = re.split(r"^##+ ", section, flags=re.MULTILINE)[0]
    lines = [line.strip() for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return rows[2:]


def test_the_table_in_the_readme_says_what_is_tested():
    rows = table_rows()
    tests = [value for name, value in globals().items() if name.startswith("test_row_")]
    assert len(rows) == len(tests)
    for row, test in zip(rows, tests, strict=True):
        assert len(row) == 4
        modules = re.findall(r"`(\w+/\w+\.py)`", row[-1])
        assert modules, row
        assert all((ROOT / "jaxcmle" / module).is_file() for module in modules), row
        source = inspect.getsource(test)
        numbers = re.findall(r'^ +shows\(.*, "([\d.]+)"\)$', source, re.MULTILINE)
        assert 0 < len(numbers) == source.count("shows("), test.__name__
        for number in numbers:
            pattern = rf"(?<![\d.]){re.escape(number)}(?!\.?\d)"
            assert re.search(pattern, " ".join(row)), (test.__name__, number)
