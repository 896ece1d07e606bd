"""Many instances with one plan: every claim is kept, and no instance notices the others."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from support import BETA, PROBLEMS

import jaxcmle as jc
from jaxcmle.candidates.claim import measure, to_target
from jaxcmle.candidates.planning import make_plan
from jaxcmle.solve import approximate_many as module
from jaxcmle.solve import enumerating, known, measuring
from jaxcmle.solve.approximate import TooManyCandidatesError
from jaxcmle.solve.approximate_many import approximate_many
from jaxcmle.solve.batches import layout_of
from jaxcmle.solve.sources import paced

PRECISIONS = ("float32",)
FAMILIES = ("plain", "outlier", "nested")
# Problem, what is claimed, scale. Every problem, and every shape of a plan, takes seconds to
# compile.
CLAIMS = (
    ("cmle", {"eta": 0.6}, "tight"),
    ("cmle", {"eps": 0.5}, "paper"),
    ("wkm", {"eps": 0.25}, "tight"),
    ("ucmle", {"eta": 0.4}, "tight"),
)
COUNT = 36
DELTA = 0.1


def make_instances(count=COUNT, seed=0):
    """Return instances of 7 to 9 points, which are all padded to 16."""
    rng = np.random.default_rng(seed)
    return [
        reference.well_defined_instance(rng, 7 + i % 3, 2, FAMILIES[i // 3 % 3]).astype(np.float32)
        for i in range(count)
    ]


def keys_of(count, seed=0):
    key = jax.random.key(seed)
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))


def optimum(x, name, min_size=None, weight=None):
    size = max(2, math.ceil(len(x) / 4)) if min_size is None else min_size
    return reference.brute_force(x.astype(float), 2, size, name, BETA, weight)[0]


def keeps_claim(cost, best, measured, claim):
    slack = 1e-4 * measured.total * measured.d
    if "eta" in claim:
        return cost <= best + claim["eta"] * measured.total + slack
    offset = measured.total * measured.d * math.log(measured.factor)
    return cost + offset <= (1 + claim["eps"]) * (best + offset) + slack


def joint_cost(x, solution, name, weight=None):
    mixture = solution.mixture
    parameters = (mixture.weights, mixture.means, mixture.variances)
    labels = np.asarray(solution.labels)
    numbers = (np.asarray(value, float) for value in parameters)
    return reference.joint_cost(x.astype(float), labels, *numbers, name, BETA, weight)


def assert_same(first, second):
    assert first.guarantee.kind == second.guarantee.kind
    assert float(first.cost) == pytest.approx(float(second.cost), rel=1e-5)
    assert int(first.status) == int(second.status)
    np.testing.assert_array_equal(first.labels, second.labels)
    np.testing.assert_allclose(first.mixture.means, second.mixture.means, rtol=1e-4, atol=1e-4)


@pytest.fixture
def candidates(monkeypatch):
    """Return what the best candidates cost before any polishing, and what was measured."""
    raw = {}
    answer = known.Known.answer

    def spy(self, found, incumbent, finished):
        cost = float(found[2][0]) - self.setting.offset
        raw[self.setting.points.tobytes()] = cost, self.setting.instance
        return answer(self, found, incumbent, finished)

    monkeypatch.setattr(known.Known, "answer", spy)
    return raw


@pytest.fixture
def plans(monkeypatch):
    """Return the plans that were made."""
    made = []

    def spy(*arguments):
        made.append(make_plan(*arguments))
        return made[-1]

    monkeypatch.setattr(measuring, "make_plan", spy)
    return made


@pytest.mark.parametrize("case", CLAIMS, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_the_claim_is_kept_at_the_promised_rate(case, candidates, plans):
    """By the best candidate as it is, and by the answer; the plan covers every instance."""
    name, claim, scale = case
    problem, xs = PROBLEMS[name], make_instances()
    options = {"delta": DELTA, "problem": problem, "certificate": False, "scale": scale}
    solutions = approximate_many(xs, 2, **claim, **options)
    (plan,) = plans
    raw_failures = failures = 0
    for x, solution in zip(xs, solutions, strict=True):
        measured = measure(jnp.asarray(x), None, 2, None, scale, problem)
        assert plan.y_min <= measured.y_low + 1e-4
        assert plan.y_max >= measured.y_high - 1e-4
        assert plan.balance >= measured.balance
        raw_cost, numbers = candidates[x.tobytes()]
        for found, expected in zip(numbers, measured, strict=True):
            assert found == expected or found == pytest.approx(expected, rel=1e-4)
        best, cost = optimum(x, name), float(solution.cost)
        raw_failures += not keeps_claim(raw_cost, best, measured, claim)
        failures += not keeps_claim(cost, best, measured, claim)
        guarantee = solution.guarantee
        assert (guarantee.kind, guarantee.delta) == ("probabilistic", DELTA)
        assert guarantee.scale == (scale if "eps" in claim and name != "wkm" else None)
        rounding = 1e-4 * len(x) + 1e-6 * abs(best)
        assert guarantee.lower_bound <= best + rounding
        assert guarantee.min_size == measured.min_size
        assert abs(cost - joint_cost(x, solution, name)) <= rounding
        sizes = np.bincount(solution.labels, minlength=2)
        assert (solution.status == jc.Status.INADMISSIBLE) == (sizes.min() < measured.min_size)
        if solution.status == jc.Status.CONVERGED:
            assert cost >= best - rounding
            assert guarantee.gap * len(x) >= cost - best - rounding
        else:
            assert cost <= raw_cost + rounding
    # Four standard deviations above what is allowed.
    most = COUNT * DELTA + 4 * math.sqrt(COUNT * DELTA * (1 - DELTA))
    assert raw_failures <= most
    assert failures <= raw_failures


def test_one_plan_does_for_each():
    """By the formulas of the claim, with the numbers that each instance has by itself."""
    eta, problem = 1.0, jc.CMLE()
    each = [measure(jnp.asarray(x), None, 2, None, "tight", problem) for x in make_instances(18)]
    assert len({measured.balance for measured in each}) > 1
    plan = make_plan(measuring.covering(each), to_target(None, eta, DELTA), problem)
    assert plan.weight_tuples == 1
    values = np.array(plan.variance_values)
    for measured in each:
        f = measured.balance
        # Draws of one point in each cluster of the least likely shares, in either order.
        right = (2 * (1 / f) * (1 - 1 / f)) ** plan.m / 2 ** (plan.m - 1)
        assert (1 - right * (1 - plan.beta)) ** plan.repetitions <= DELTA * (1 + 1e-9)
        entropy = -(1 / f) * math.log(1 / f) - (1 - 1 / f) * math.log(1 - 1 / f)
        y = np.linspace(measured.y_low, measured.y_high, 1000)
        t = values[:, None] - y
        excess = (t + (1 + plan.e_m) * np.exp(-t) - 1).min(axis=0)
        assert (measured.d / 2 * excess + math.log(2) - entropy <= eta).all()


def test_an_instance_is_answered_as_if_alone():
    """On the scale, copies of other sizes are the same, and have the same plan by themselves."""
    x = make_instances(3)[2]
    xs, keys = [x * scale for scale in (1.0, 2.0**-20, 2.0**9)], keys_of(3, 7)
    together = approximate_many(xs, 2, eta=1.0, key=keys, certificate=False)
    for i, (copy, solution) in enumerate(zip(xs, together, strict=True)):
        (alone,) = approximate_many([copy], 2, eta=1.0, key=keys[i : i + 1], certificate=False)
        assert_same(solution, alone)
        other = jc.approximate(copy, 2, eta=1.0, key=keys[i], certificate=False, n_polish=8)
        assert_same(solution, other)


def test_order_and_layout_do_not_matter(monkeypatch):
    xs, keys = make_instances(18, 3), keys_of(18)
    solutions = approximate_many(xs, 2, eta=1.0, key=jax.random.key(0))
    assert {solution.guarantee.kind for solution in solutions} == {"certificate", "probabilistic"}
    order = np.random.default_rng(0).permutation(18)
    permuted = approximate_many([xs[i] for i in order], 2, eta=1.0, key=keys[order])
    for i, solution in zip(order, permuted, strict=True):
        assert_same(solution, solutions[i])
    monkeypatch.setattr(module, "layout_of", lambda: layout_of("lanes"))
    for solution, other in zip(solutions, approximate_many(xs, 2, eta=1.0), strict=True):
        assert_same(solution, other)


def test_a_certificate_is_certain_and_true():
    xs = make_instances(18, 3)
    solutions = approximate_many(xs, 2, eta=1.0)
    enumerated = approximate_many(xs, 2, eta=1.0, certificate=False)
    certified = 0
    for x, solution, other in zip(xs, solutions, enumerated, strict=True):
        best, guarantee = optimum(x, "cmle"), solution.guarantee
        if guarantee.kind == "probabilistic":
            assert solution.guarantee.delta == 0.1
            continue
        certified += 1
        assert (guarantee.kind, guarantee.delta, guarantee.eta) == ("certificate", 0, 1.0)
        assert solution.status in (jc.Status.CONVERGED, jc.Status.MAX_ITER)
        assert guarantee.lower_bound == other.guarantee.lower_bound
        assert guarantee.lower_bound <= best + 1e-4 * len(x)
        assert float(solution.cost) <= guarantee.lower_bound + len(x) + 1e-4 * len(x)
        assert float(solution.cost) >= best - 1e-4 * len(x)
        assert abs(float(solution.cost) - joint_cost(x, solution, "cmle")) <= 1e-4 * len(x)
    assert 6 <= certified < len(xs)


def test_clusters_that_end_empty_are_filled_up():
    """Where distances cost next to nothing, CEM leaves a cluster without points."""
    xs = make_instances(9)
    solutions = approximate_many(xs, 2, eta=1.0, problem=jc.WKM(1e-5))
    assert not all(solution.consistent for solution in solutions)
    for x, solution in zip(xs, solutions, strict=True):
        assert solution.guarantee.kind == "certificate"
        assert np.bincount(solution.labels, minlength=2).min() >= math.ceil(len(x) / 4)


def test_weights_count_as_repeated_points():
    """Also those of 0, whose points get a label all the same."""
    rng = np.random.default_rng(4)
    xs = make_instances(6, 4)
    weights = [rng.integers(1, 3, len(x)).astype(float) for x in xs]
    for weight in weights:
        weight[2] = 0
    for x in xs:
        x[2] = x[3] + 1e-3
    options = {"eps": 1.0, "certificate": False}
    solutions = approximate_many(xs, 2, sample_weight=weights, **options)
    failures = 0
    for x, weight, solution in zip(xs, weights, solutions, strict=True):
        total = weight.sum()
        measured = measure(
            jnp.asarray(x), jnp.asarray(weight, x.dtype), 2, None, "tight", jc.CMLE()
        )
        size = max(2, math.ceil(total / 4))
        assert solution.guarantee.min_size == measured.min_size == size
        best = optimum(x, "cmle", size, weight)
        failures += not keeps_claim(float(solution.cost), best, measured, {"eps": 1.0})
        assert solution.labels[2] == solution.labels[3]
        assert abs(float(solution.cost) - joint_cost(x, solution, "cmle", weight)) <= 1e-3
        sizes = np.bincount(solution.labels, weight, 2)
        assert (solution.status == jc.Status.INADMISSIBLE) == (sizes.min() < size)
    assert failures <= 3


def test_a_bad_instance_harms_no_other():
    xs = make_instances(6)
    same = np.repeat(xs[0][:3], 3, axis=0)
    bad = {1: np.full((8, 2), np.nan, np.float32), 3: same, 5: xs[0][:3], 6: xs[0][:1]}
    mixed, good = [], iter(xs)
    for i in range(10):
        mixed.append(bad[i] if i in bad else next(good))
    keys = keys_of(10)
    solutions = approximate_many(mixed, 2, eta=1.0, key=keys)
    expected = approximate_many(
        xs, 2, eta=1.0, key=keys[np.array([i for i in range(10) if i not in bad])]
    )
    words = {1: "NaN", 3: "enough for a cluster, coincide", 5: "weigh only 3", 6: "n_clusters"}
    for i, solution in enumerate(solutions):
        if i not in bad:
            assert_same(solution, expected.pop(0))
            assert solution.error == ""
            continue
        assert words[i] in solution.error
        assert solution.guarantee.kind == "none"
        assert np.isinf(solution.cost)
        nan = i == 1
        assert solution.status == (jc.Status.NONFINITE if nan else jc.Status.INADMISSIBLE)
    with pytest.raises(ValueError, match="instance 3: this instance is not well-defined"):
        approximate_many([*xs[:3], same], 2, eta=1.0, errors="raise")


def test_an_array_gives_a_stack():
    xs = np.stack([x[:7] for x in make_instances(9)])
    xs[4] = np.nan
    stack = approximate_many(xs, 2, eps=0.4)
    each = approximate_many(list(xs), 2, eps=0.4)
    kinds = [solution.guarantee.kind for solution in each]
    assert {*kinds} == {"certificate", "probabilistic", "none"}
    guarantee = stack.guarantee
    assert (guarantee.kind, guarantee.scale) == ("probabilistic", "tight")
    assert stack.mixture.means.shape == (9, 2, 2)
    for i, solution in enumerate(each):
        assert stack.error[i] == solution.error
        assert stack.status[i] == solution.status
        if kinds[i] != "none":
            assert guarantee.delta[i] == pytest.approx(solution.guarantee.delta)
            assert guarantee.eta[i] == pytest.approx(solution.guarantee.eta)
            assert guarantee.gap[i] == pytest.approx(solution.guarantee.gap)
            np.testing.assert_array_equal(stack.labels[i], solution.labels)
            assert stack.cost[i] == solution.cost
    assert np.isinf(stack.cost[4])


def test_too_many_candidates(plans, monkeypatch):
    xs = make_instances(9)
    with pytest.raises(TooManyCandidatesError, match="9 instances") as error:
        approximate_many(xs, 2, eta=0.2, max_candidates=1000, certificate=False)
    assert error.value.plan is plans[0]
    assert error.value.plan.tuples > 1000
    assert error.value.solution is None
    # What it names would do.
    monkeypatch.setattr(module._Many, "enumerate", lambda *arguments: None)
    eta = float(str(error.value).split("eta=")[1].split(",")[0])
    plans.clear()
    approximate_many(xs, 2, eta=eta, max_candidates=1000, certificate=False)
    assert plans[0].tuples <= 1000
    # Where certificates do, no plan is needed.
    simple = [np.array([[0.0, 0], [0, 1], [1, 0], [90, 0], [90, 1], [91, 0]]) + i for i in range(3)]
    for solution in approximate_many(simple, 2, eta=0.5, max_candidates=1):
        assert solution.guarantee.kind == "certificate"


def test_ctrl_c_leaves_no_claim(monkeypatch):
    xs, drawn = make_instances(18, 3), []
    draw = enumerating.draw_all

    def spy(*arguments):
        drawn.append(arguments)
        return draw(*arguments)

    def in_small_steps(run, remaining, first, most, mesh):
        return paced(run, remaining, 16, 16, mesh)

    monkeypatch.setattr(enumerating, "paced", in_small_steps)
    monkeypatch.setattr(enumerating, "draw_all", spy)
    monkeypatch.setattr(module._Finished, "stops", lambda self: bool(drawn))
    solutions = approximate_many(xs, 2, eta=1.0)
    kinds = [solution.guarantee.kind for solution in solutions]
    assert {*kinds} == {"certificate", "none"}
    for x, solution, kind in zip(xs, solutions, kinds, strict=True):
        assert (solution.status == jc.Status.INTERRUPTED) == (kind == "none")
        assert (solution.guarantee.delta is None) == (kind == "none")
        assert abs(float(solution.cost) - joint_cost(x, solution, "cmle")) <= 1e-4 * len(x)


def test_progress_counts_instances():
    reports = []
    xs = make_instances(18, 3)
    approximate_many(xs, 2, eta=1.0, progress=reports.append)
    assert reports[-1].done == reports[-1].total == len(xs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_clusters": [2, 3]}, "one plan is for one number of clusters"),
        ({"delta": 0}, "delta above 0"),
        ({"eps": 1.0}, "one of them"),
        ({"errors": "ignore"}, "errors must be"),
        ({"balance": -1.0}, "balance"),
        ({"xs": [np.zeros((5000, 2))]}, "up to 4096 points"),
    ],
)
def test_what_is_wrong_with_a_call_raises(options, message):
    arguments = {"xs": make_instances(2), "n_clusters": 2, "eta": 1.0} | options
    with pytest.raises(ValueError, match=message):
        approximate_many(arguments.pop("xs"), arguments.pop("n_clusters"), **arguments)
