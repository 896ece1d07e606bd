"""What pruning assigns wrongly costs little: the bounds that the claims of ABS rest on.

They hold for any costs that are not negative, Gaussian or not, and are tested in the oracle alone.
Each has a control that must fail.
"""

import functools
import math

import numpy as np
import pytest
import reference

from jaxcmle.candidates import choices

PRECISIONS = ("float32",)
ROUNDING = 1 + 1e-9

# Between two samplings: with u unfound clusters, each with a
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
