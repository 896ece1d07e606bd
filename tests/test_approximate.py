"""The guaranteed search keeps its claims, and says what it cannot claim."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from support import BETA, PROBLEMS

import jaxcmle as jc
from jaxcmle.apps.datasets import load_iris
from jaxcmle.candidates import scoring
from jaxcmle.candidates.claim import measure, to_target
from jaxcmle.candidates.planning import make_plan
from jaxcmle.candidates.scoring import PRUNING, Pruning
from jaxcmle.solve.progress import CtrlC
from jaxcmle.solve.sizes import assign_with_sizes
from jaxcmle.solve.sources import Setting, repetitions, useful_values

PRECISIONS = ("float32",)
FAMILIES = ("plain", "outlier", "nested")
# Problem, points, features, clusters, what is claimed. Every shape takes seconds to compile.
CLAIMS = (
    ("cmle", 9, 1, 2, {"eps": 1.0}),
    ("cmle", 10, 2, 3, {"eps": 1.0}),
    ("cmle", 9, 2, 2, {"eps": 0.5}),
    ("cmle", 10, 3, 2, {"eta": 2.0}),
    ("wkm", 9, 2, 2, {"eps": 0.5}),
    ("wkm", 9, 1, 3, {"eps": 1.0}),
    ("ucmle", 9, 3, 3, {"eps": 1.0}),
    ("ucmle", 9, 2, 2, {"eta": 1.0}),
)
INSTANCES = 40
DELTA = 0.2


def instances(n, d, count, seed):
    rng = np.random.default_rng(seed)
    for i in range(count):
        x = reference.well_defined_instance(rng, n, d, FAMILIES[i % 3])
        yield x.astype(np.float32)


def optimum(x, k, min_size, problem):
    return reference.brute_force(x.astype(float), k, min_size, problem, BETA)[0]


def on_scale(cost, instance):
    """Return a cost on the scale that a factor is claimed on."""
    return cost + instance.total * instance.d * math.log(instance.factor)


def keeps_claim(cost, best, instance, claim):
    slack = 1e-4 * instance.n * instance.d
    if "eta" in claim:
        return cost <= best + claim["eta"] * instance.n + slack
    return on_scale(cost, instance) <= (1 + claim["eps"]) * on_scale(best, instance) + slack


def joint_cost(x, solution, problem):
    mixture = solution.mixture
    parameters = (mixture.weights, mixture.means, mixture.variances)
    return reference.joint_cost(
        x.astype(float),
        np.asarray(solution.labels),
        *(np.asarray(value, float) for value in parameters),
        problem,
        BETA,
    )


def raw_best(x, k, problem, claim, key):
    """Return the cost of the best candidate, before any polishing, and the instance."""
    points = jnp.asarray(x)
    instance = measure(points, None, k, None, "tight", problem)
    target = to_target(claim.get("eps"), claim.get("eta"), DELTA)
    setting = Setting(points, None, problem, instance, target)
    plan = make_plan(instance, target, problem)
    source = repetitions(setting, plan, key, 1e8, PRUNING, math.inf)
    *_, (done, best, _) = source.steps(64, None)
    assert done == plan.tuples == source.total
    return float(best.cost[0]) - setting.offset, instance


@pytest.mark.parametrize(
    "case", CLAIMS, ids=lambda case: f"{case[0]}-{case[2]}-{case[3]}-{case[4]}"
)
def test_the_claim_is_kept_at_the_promised_rate(case):
    """Of 320 instances in all: by the best candidate as it is, and by the answer."""
    name, n, d, k, claim = case
    problem = PROBLEMS[name]
    raw_failures = failures = 0
    for i, x in enumerate(instances(n, d, INSTANCES, n + 10 * d + 100 * k)):
        key = jax.random.key(i)
        solution = jc.approximate(
            x, k, **claim, delta=DELTA, problem=problem, certificate=False, key=key
        )
        cost, instance = raw_best(x, k, problem, claim, jax.random.fold_in(key, 0))
        best = optimum(x, k, int(instance.min_size), name)
        raw_failures += not keeps_claim(cost, best, instance, claim)
        failures += not keeps_claim(float(solution.cost), best, instance, claim)
        guarantee = solution.guarantee
        assert (guarantee.kind, guarantee.delta) == ("probabilistic", DELTA)
        assert guarantee.lower_bound <= best + 1e-4 * n
        assert abs(float(solution.cost) - joint_cost(x, solution, name)) <= 1e-4 * n * d
        sizes = np.bincount(solution.labels, minlength=k)
        assert (solution.status == jc.Status.INADMISSIBLE) == (sizes.min() < instance.min_size)
        if solution.status == jc.Status.CONVERGED:
            assert float(solution.cost) >= best - 1e-4 * n * d
            assert guarantee.gap * n >= float(solution.cost) - best - 1e-4 * n
    # Four standard deviations above what is allowed.
    most = INSTANCES * DELTA + 4 * math.sqrt(INSTANCES * DELTA * (1 - DELTA))
    assert raw_failures <= most
    assert failures <= raw_failures


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("cmle", {"eps": 1.0}),
        ("cmle", {"eta": 1.5}),
        ("ucmle", {"eta": 1.0}),
        ("wkm", {"eps": 1.0}),
    ],
)
def test_a_deterministic_claim_never_fails(name, claim):
    for x in instances(9, 2, 15, 5):
        solution = jc.approximate(
            x, 2, **claim, delta=0, problem=PROBLEMS[name], certificate=False, n_polish=1
        )
        instance = measure(jnp.asarray(x), None, 2, None, "tight", PROBLEMS[name])
        best = optimum(x, 2, int(instance.min_size), name)
        assert keeps_claim(float(solution.cost), best, instance, claim)
        assert (solution.guarantee.kind, solution.guarantee.delta) == ("deterministic", 0)


def test_a_certificate_is_deterministic_and_true():
    certified = 0
    for x in instances(9, 2, 15, 6):
        solution = jc.approximate(x, 2, eta=1.0)
        best = optimum(x, 2, 3, "cmle")
        guarantee = solution.guarantee
        assert guarantee.lower_bound <= best + 1e-4
        if guarantee.kind == "certificate":
            certified += 1
            assert guarantee.delta == 0
            assert float(solution.cost) <= best + 9 * guarantee.gap + 1e-4
            assert guarantee.gap <= guarantee.eta == 1.0
    assert certified >= 3


def test_both_scales_and_what_a_factor_means():
    x = next(instances(9, 2, 1, 7))
    tight = jc.approximate(x, 2, eps=1.0, certificate=False)
    paper = jc.approximate(x, 2, eps=1.0, certificate=False, scale="paper")
    assert (tight.guarantee.scale, paper.guarantee.scale) == ("tight", "paper")
    assert jc.approximate(x, 2, eta=2.0).guarantee.scale is None
    best = optimum(x, 2, 3, "cmle")
    for solution in (tight, paper):
        # What the factor amounts to, in nats per point, which need no scale.
        assert float(solution.cost) <= best + 9 * solution.guarantee.eta + 1e-3
    # Costs are in the user's units: scaling the points adds n d ln c.
    scaled = jc.approximate(100 * x, 2, eps=1.0, certificate=False)
    assert abs(float(scaled.cost - tight.cost) - 18 * math.log(100)) <= 1e-3
    np.testing.assert_array_equal(scaled.labels, tight.labels)


@pytest.mark.parametrize("name", ["variances", "partial_sums", "completions"])
def test_each_pruning_leaves_the_best_cost(name):
    """With the incumbent of CEM, so that there is something to prune by."""
    only = Pruning(**{field: field == name for field in Pruning._fields})
    claim = {"eps": 0.4} if name == "variances" else {"eta": 0.9}
    for i, x in enumerate(instances(9, 2, 8, 8)):
        key = jax.random.key(i)
        plain = jc.approximate(x, 2, **claim, key=key, prune=False)
        pruned = jc.approximate(x, 2, **claim, key=key, prune=only)
        assert float(pruned.cost) == float(plain.cost)
        assert pruned.guarantee == plain.guarantee


def test_a_variance_is_left_out_only_if_no_partition_with_it_would_be_better():
    """The bound behind the pruning of variances, against every partition."""
    left_out = 0
    for i, x in enumerate(instances(9, 2, 12, 9)):
        points, problem = jnp.asarray(x), jc.CMLE()
        instance = measure(points, None, 2, None, "tight", problem)
        target = to_target(None, 0.1, 0.1)
        setting = Setting(points, None, problem, instance, target)
        plan = make_plan(instance, target, problem)
        known = optimum(x, 2, 3, "cmle") + i / 4
        kept = len(useful_values(setting, plan, PRUNING, known))
        left_out += plan.grid_values - kept
        if kept == plan.grid_values:
            continue
        for labels in reference.set_partitions(9, 2):
            labels = np.asarray(labels)
            if np.bincount(labels, minlength=2).min() < 3:
                continue
            variances = reference.estimate(x.astype(float), labels, 2)[2]
            y = np.log(2 * np.pi * np.e * variances) + 2 * math.log(instance.factor)
            if y.max() >= plan.variance_starts[kept]:
                cost = reference.partition_cost(x.astype(float), labels, 2)
                assert known <= cost + 0.1 * 9 + 1e-3
    assert left_out > 0


# The same answer.


def test_same_key_same_answer_and_padding_changes_nothing():
    x = next(instances(9, 2, 1, 10))
    one = jc.approximate(x, 2, eps=0.5, certificate=False, key=jax.random.key(1))
    two = jc.approximate(x, 2, eps=0.5, certificate=False, key=jax.random.key(1))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.all(a == b)), one, two))
    padded = np.concatenate([x, [[np.nan, np.inf]], [[1e9, 0]]]).astype(np.float32)
    weight = [1] * 9 + [0, 0]
    three = jc.approximate(
        padded, 2, eps=0.5, certificate=False, key=jax.random.key(1), sample_weight=weight
    )
    np.testing.assert_array_equal(three.labels[:9], one.labels)
    assert three.labels.shape == (11,)
    assert float(three.cost) == float(one.cost)


def test_the_answer_does_not_depend_on_chunks(monkeypatch):
    x = next(instances(9, 2, 1, 18))
    one = jc.approximate(x, 2, eps=0.3, certificate=False)
    monkeypatch.setattr(scoring, "CHUNK", 256)
    two = jc.approximate(x, 2, eps=0.3, certificate=False)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.all(a == b)), one, two))


def test_an_offset_changes_no_label():
    """In eighths, which float32 holds exactly at 1e4."""
    x = np.round(next(instances(9, 2, 1, 11)) * 8) / 8
    plain = jc.approximate(x, 2, eps=0.5, certificate=False)
    moved = jc.approximate(x + np.float32(1e4), 2, eps=0.5, certificate=False)
    np.testing.assert_array_equal(plain.labels, moved.labels)
    assert abs(float(plain.cost - moved.cost)) <= 1e-3


def test_weights_of_points():
    rng = np.random.default_rng(12)
    for x in instances(9, 2, 6, 12):
        weight = rng.uniform(0.6, 1.4, size=9)
        size = weight.sum() / 4
        best = reference.brute_force(x.astype(float), 2, size, "cmle", 1.0, weight)[0]
        solution = jc.approximate(x, 2, eta=1.5, sample_weight=weight, certificate=False)
        assert abs(solution.guarantee.min_size - size) <= 1e-5
        assert float(solution.cost) <= best + weight.sum() * 1.5
        assert solution.guarantee.lower_bound <= best + 1e-4
    with pytest.raises(ValueError, match="deterministic"):
        jc.approximate(x, 2, eta=1.0, sample_weight=weight, certificate=False, delta=0)


# Budgets, progress, interruption.


def test_a_budget_claims_nothing_but_the_lower_bound():
    x = load_iris().x
    solution = jc.approximate(x, 3, guarantee=False, max_candidates=1e5)
    assert solution.guarantee.kind == "none"
    assert solution.guarantee.delta is None
    assert 0 < solution.guarantee.gap < 2
    assert float(solution.cost) < 400
    assert solution.status == jc.Status.CONVERGED


def test_the_papers_own_candidates_run_on_a_budget():
    x = next(instances(9, 2, 1, 13))
    solution = jc.approximate(x, 2, algorithm="paper", guarantee=False, max_candidates=1e5)
    assert solution.guarantee.kind == "none"
    assert np.isfinite(solution.cost)
    with pytest.raises(ValueError, match="guarantee=False"):
        jc.approximate(x, 2, algorithm="paper", eps=0.5)
    # One cluster, which holds all points: a grid of a single size.
    one = jc.approximate(x, 1, algorithm="paper", guarantee=False, balance=1, max_candidates=1e3)
    assert abs(float(one.cost) - optimum(x, 1, 2, "cmle")) <= 1e-3


def test_too_many_candidates_names_what_fits():
    x = load_iris().x
    with pytest.raises(jc.TooManyCandidatesError, match="would fit") as caught:
        jc.approximate(x, 3, eps=0.2, max_candidates=1e6, certificate=False)
    assert caught.value.plan.tuples > 1e6
    message = str(caught.value)
    options = message.split("would fit: ")[1].split(";")[0].split(", ")
    assert {option.split("=")[0] for option in options} >= {"eps", "max_candidates"}
    given = {"eps": 0.2, "max_candidates": 1e6}
    for option in options:
        name, value = option.split("=")
        changed = given | {name: float(value)}
        limit = changed.pop("max_candidates")
        assert jc.plan(x, 3, **changed).tuples <= limit
    # With a certificate tried first, in vain, what was found is not lost.
    noise = np.random.default_rng(0).normal(size=(60, 8))
    with pytest.raises(jc.TooManyCandidatesError) as caught:
        jc.approximate(noise, 3, eta=0.1, max_candidates=1e6)
    assert math.isfinite(caught.value.solution.cost)
    assert 0.1 < caught.value.solution.guarantee.gap < 2
    assert caught.value.solution.guarantee.method


def test_the_tight_certificate_comes_before_any_enumeration():
    """Of which there would be no end."""
    solution = jc.approximate(load_iris().x, 3, eta=0.05, max_candidates=1)
    assert solution.guarantee.kind == "certificate"
    assert solution.guarantee.method == "cells"
    assert solution.guarantee.gap <= 0.05
    assert abs(float(solution.cost) - 387.756) < 0.01


def test_what_is_rounded_off_a_huge_cost_is_not_taken_for_proved():
    """A point costs 10^8 nats: float32 rounds the whole to 512, and one per point is claimed."""
    x = np.float32(60000 + 20000 * np.random.default_rng(0).normal(size=(50, 1)))
    try:
        solution = jc.approximate(x, 2, eta=1.0, problem=jc.WKM(), algorithm="sampling")
    except jc.TooManyCandidatesError as error:
        solution = error.solution
        assert solution.guarantee.gap > 1.0
    wide = np.asarray(x, np.float64)
    of_labels = [wide[np.asarray(solution.labels) == c] for c in range(2)]
    cost = sum(
        ((part - part.mean()) ** 2).sum() - len(part) * np.log(len(part) / 50) for part in of_labels
    )
    np.testing.assert_allclose(solution.cost, cost, rtol=1e-6)
    true_gap = (cost - solution.guarantee.lower_bound) / 50
    assert 0 <= true_gap <= solution.guarantee.gap + 1e-6


def test_progress_reports_and_interruption_keeps_the_best():
    x = load_iris().x
    reports = []
    whole = jc.approximate(x, 3, eta=1.0, certificate=False, progress=reports.append)
    assert reports[-1].done == reports[-1].total
    assert reports[-1].rate > 0
    assert [report.cost for report in reports] == sorted(
        (report.cost for report in reports), reverse=True
    )

    def stop(report):
        raise KeyboardInterrupt

    stopped = jc.approximate(x, 3, eta=1.0, certificate=False, progress=stop)
    assert stopped.status == jc.Status.INTERRUPTED
    assert stopped.guarantee.kind == "none"
    assert np.isfinite(stopped.guarantee.lower_bound)
    assert float(stopped.cost) >= float(whole.cost) - 1e-3


def test_of_several_processes_one_that_is_interrupted_ends(monkeypatch):
    def stop(report):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        sys.modules["jaxcmle.solve.approximate"], "spans_processes", lambda mesh: True
    )
    with pytest.raises(KeyboardInterrupt):
        jc.approximate(load_iris().x, 3, eta=1.0, certificate=False, progress=stop)


@pytest.mark.usefixtures("ctrl_c_works")
def test_a_signal_interrupts():
    """Ctrl-C some time into an enumeration that takes several seconds."""
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))

    def start_once(report):
        # Not `is_alive`: the timer may be done before the signal arrives.
        if timer.ident is None:
            timer.start()

    x = load_iris().x
    try:
        solution = jc.approximate(
            x, 3, eta=0.75, certificate=False, max_candidates=1e15, progress=start_once
        )
    finally:
        timer.cancel()
    assert solution.status == jc.Status.INTERRUPTED
    assert float(solution.cost) < 400


@pytest.mark.usefixtures("ctrl_c_works")
def test_the_first_ctrl_c_is_noted_and_the_second_raises():
    with CtrlC() as ctrl_c:
        assert not ctrl_c.pressed
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Somebody else's handler stays.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with CtrlC() as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        assert not ctrl_c.pressed


def test_silent_when_piped():
    code = (
        "import jaxcmle as jc; from jaxcmle.apps.datasets import load_iris;"
        "s = jc.approximate(load_iris().x, 3, eta=1.2, certificate=False); print('done')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert (run.stdout, run.stderr) == ("done\n", "")


def test_progress_on_request(capsys):
    x = next(instances(9, 2, 1, 14))
    jc.approximate(x, 2, eps=0.5, certificate=False, progress=True)
    error = capsys.readouterr().err
    assert "100.0% of" in error
    assert "best cost" in error
    assert error.endswith("\r")


# Clusters that must be filled up.


def test_assignment_with_sizes_is_the_cheapest():
    rng = np.random.default_rng(15)
    for k, n, size in ((2, 7, 3), (3, 7, 2), (4, 8, 2)):
        for _ in range(20):
            costs = rng.normal(size=(n, k)) + 2 * rng.normal(size=k)
            labels = assign_with_sizes(costs, size)
            assert np.bincount(labels, minlength=k).min() >= size
            every = np.arange(k**n)[:, None] // k ** np.arange(n) % k
            sizes = (every[:, :, None] == np.arange(k)).sum(axis=1)
            every = every[sizes.min(axis=1) >= size]
            least = costs[np.arange(n), every].sum(axis=1).min()
            assert abs(costs[np.arange(n), labels].sum() - least) <= 1e-9
        with pytest.raises(ValueError, match="cannot fill"):
            assign_with_sizes(costs, n)
        costs[0, 0] = np.inf
        with pytest.raises(ValueError, match="not finite"):
            assign_with_sizes(costs, size)


def test_the_best_balanced_partition_that_cem_leaves():
    """Section 6 of the spec: CEM moves a point away and leaves a cluster of one."""
    u = math.sqrt(4 / math.pi)
    x = np.array([[0.0], [u], [2 * u], [100.0]])
    solution = jc.approximate(x, 2, eps=1.0, balance=2)
    assert solution.guarantee.kind == "certificate"
    assert abs(float(solution.cost) - 15.082) < 1e-2
    assert np.bincount(solution.labels).tolist() == [2, 2]
    assert not solution.consistent


def test_clusters_that_end_empty_are_filled_up():
    """Where distances cost next to nothing, every start of CEM leaves a cluster without points."""
    rng, beta = np.random.default_rng(18), 0.01
    for _ in range(3):
        x = rng.normal(size=(9, 2)).astype(np.float32)
        empty = jc.cem(x, jc.seed(jax.random.key(0), x, 2), problem=jc.WKM(beta=beta))
        assert empty.mixture.weights.min() == 0
        solution = jc.approximate(x, 2, eta=0.2, problem=jc.WKM(beta=beta))
        best = reference.brute_force(x.astype(float), 2, 3, "wkm", beta)[0]
        assert solution.guarantee.kind == "certificate"
        assert np.bincount(solution.labels, minlength=2).min() >= 3
        assert best - 1e-4 * len(x) <= float(solution.cost) <= best + (0.2 + 1e-4) * len(x)


# Bad input.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "give eta"),
        ({"eps": 0.5, "eta": 0.5}, "one of them"),
        ({"eps": -1}, "eps must be positive"),
        ({"eta": math.nan}, "eta must be positive"),
        ({"eta": math.inf}, "finite"),
        ({"eta": 1, "delta": 1}, "under 1"),
        ({"eta": 1, "balance": 1.5}, "lower n_clusters"),
        ({"eta": 1, "scale": "huge"}, "scale must be"),
        ({"eta": 1, "algorithm": "magic"}, "algorithm must be"),
        ({"eta": 1, "max_candidates": 0}, "max_candidates must be positive"),
        ({"eta": 1, "n_polish": 0}, "n_polish must be 1"),
        ({"eta": 1, "guarantee": False, "max_candidates": 1}, "raise it"),
    ],
    ids=str,
)
def test_bad_options_get_a_clear_error(options, match):
    x = next(instances(9, 2, 1, 16))
    with pytest.raises(ValueError, match=match):
        jc.approximate(x, 2, **options)


def test_bad_data_gets_a_clear_error():
    x = np.repeat([[0.0, 0], [1, 1], [5, 5]], 3, axis=0)
    with pytest.raises(ValueError, match="coincide"):
        jc.approximate(x, 2, eta=1.0)
    with pytest.raises(ValueError, match="coincide"):
        jc.approximate(x[::2], 2, eps=1.0, scale="paper")
    # Costs of WKM need no variances: duplicates are fine.
    assert jc.approximate(x, 2, eps=0.5, problem=jc.WKM(beta=1.0)).status == jc.Status.CONVERGED
    with pytest.raises(ValueError, match="NaN"):
        jc.approximate(np.full((9, 2), np.nan), 2, eta=1.0)
    with pytest.raises(TypeError, match="progress"):
        jc.approximate(x, 2, eta=1.0, progress="yes")
    with pytest.raises(ValueError, match="max_points"):
        jc.approximate(np.random.default_rng(0).normal(size=(40, 1)), 2, eta=1.0, max_points=30)


def test_one_cluster():
    x = next(instances(9, 2, 1, 17))
    solution = jc.approximate(x, 1, eta=0.5, certificate=False)
    assert abs(float(solution.cost) - optimum(x, 1, 2, "cmle")) <= 1e-3
    assert dataclasses.asdict(solution.guarantee)["kind"] == "probabilistic"
