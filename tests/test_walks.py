"""Sampling and pruning as a search: its plans, its candidates, and whether it keeps its claims."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from support import BETA, PROBLEMS
from test_approximate import instances, joint_cost, keeps_claim, optimum

import jaxcmle as jc
from jaxcmle.apps.datasets import load_iris
from jaxcmle.candidates import choices, grids, leaves, pruning, scoring
from jaxcmle.candidates.claim import Instance, Target, measure, to_target
from jaxcmle.candidates.grids import Allowance
from jaxcmle.candidates.planning import abs_plan, make_plan
from jaxcmle.candidates.scoring import NO_PRUNING, PRUNING
from jaxcmle.solve.sources import Setting
from jaxcmle.solve.walks import make_tuples, pruned_walks

PRECISIONS = ("float32",)
DELTA = 0.2
INSTANCES = 30
# Problem, points, features, clusters, factor. Clusters may be as small as two points.
CLAIMS = (
    ("cmle", 10, 2, 2, 3.0),
    ("cmle", 10, 1, 3, 3.0),
    ("cmle", 48, 1, 2, 2.0),
    ("ucmle", 10, 3, 2, 3.0),
    ("ucmle", 48, 1, 2, 2.0),
    ("wkm", 10, 2, 3, 3.0),
    ("wkm", 48, 1, 2, 2.0),
    ("wkm", 24, 1, 3, 3.0),
)


def exact(x, k, name):
    """Return the least cost of clusters of at least two points."""
    if len(x) <= 12:
        return optimum(x, k, 2, name)
    if name == "wkm":
        return reference.wkm_1d(x.astype(float), k, 2, BETA)[0]
    return reference.narrowest_interval_1d(x.astype(float), k, 2, name)[0]


def make_setting(x, k, name, claim, y_high=None):
    """Return the setting of a search without a balance, and its plan, which does prune."""
    points, problem = jnp.asarray(x), PROBLEMS[name]
    instance = measure(points, None, k, math.inf, "tight", problem)
    if y_high is not None:
        # One plan for all instances, and so one program: a wider range is as good.
        assert instance.y_high <= y_high or name == "wkm"
        instance = instance._replace(y_high=y_high)
    target = to_target(claim.get("eps"), claim.get("eta"), DELTA)
    return Setting(points, None, problem, instance, target)


def raw_best(setting, plan, key, pruning=PRUNING, n_best=64):
    """Return the best candidates, on the user's scale, before any polishing."""
    source = pruned_walks(setting, plan, key, 1e8, pruning, math.inf)
    *_, (done, found, _) = source.steps(n_best, None)
    assert done == source.total == plan.tuples
    places = np.flatnonzero(np.asarray(found.cost) < np.inf)
    return np.asarray(found.cost)[places] - setting.offset, source.mixtures(found, places)


def model_cost(x, mixture, i, name):
    fields = (mixture.weights, mixture.means, mixture.variances)
    return reference.model_cost(
        x.astype(float), *(np.asarray(field[i], float) for field in fields), name, BETA
    )


@pytest.mark.parametrize("case", CLAIMS, ids=lambda case: "-".join(map(str, case)))
def test_the_claim_is_kept_with_no_balance_at_all(case):
    """240 instances in all; the best candidate as it is, before any polishing."""
    name, n, d, k, eps = case
    claim = {"eps": eps}
    failures = pruned = 0
    data = list(instances(n, d, INSTANCES, n + 10 * d + 100 * k))
    ranges = [measure(jnp.asarray(x), None, k, math.inf, "tight", PROBLEMS[name]) for x in data]
    y_high = max(instance.y_high for instance in ranges)
    for i, x in enumerate(data):
        setting = make_setting(x, k, name, claim, y_high)
        # The largest alpha: here it prunes most, and may prune most wrongly.
        plan = abs_plan(setting.instance, setting.target, setting.problem, alpha=0.25)
        pruned += plan.prunings
        costs, mixtures = raw_best(setting, plan, jax.random.key(i))
        assert abs(costs[0] - model_cost(x, mixtures, 0, name)) <= 1e-4 * n * d
        failures += not keeps_claim(costs[0], exact(x, k, name), setting.instance, claim)
    assert pruned >= 2 * INSTANCES
    # Four standard deviations above what is allowed.
    assert failures <= INSTANCES * DELTA + 4 * math.sqrt(INSTANCES * DELTA * (1 - DELTA))


@pytest.mark.parametrize("name", PROBLEMS)
def test_answers_of_approximate_keep_the_claim(name):
    for i, x in enumerate(instances(48, 1, 5, 3)):
        options = {"balance": math.inf, "delta": DELTA, "key": jax.random.key(i)}
        solution = jc.approximate(
            x, 2, eps=2.0, algorithm="abs", problem=PROBLEMS[name], certificate=False, **options
        )
        guarantee = solution.guarantee
        assert (guarantee.kind, guarantee.delta, guarantee.min_size) == ("probabilistic", DELTA, 2)
        assert abs(float(solution.cost) - joint_cost(x, solution, name)) <= 1e-4 * 48
        instance = measure(jnp.asarray(x), None, 2, math.inf, "tight", PROBLEMS[name])
        assert keeps_claim(float(solution.cost), exact(x, 2, name), instance, {"eps": 2.0})
        sizes = np.bincount(solution.labels, minlength=2)
        assert (solution.status == jc.Status.INADMISSIBLE) == (sizes.min() < 2)


# How often a repetition succeeds, with a control that has no prunings.


def small_and_large(name, n, small, rng):
    """Return points of a large cluster and of a small one far off, and their labels."""
    x = rng.normal(size=(n, 2))
    x[:small] = 2000 + 0.7 * rng.normal(size=(small, 2))
    return x / (1 if name == "wkm" else 0.05), np.where(np.arange(n) < small, 1, 0)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_repetition_succeeds_as_often_as_claimed_and_not_without_pruning(name):
    n, small, trials, k = 600, 2, 4000, 2
    x, labels = small_and_large(name, n, small, np.random.default_rng(4))
    setting = make_setting(x.astype(np.float32), k, name, {"eps": 2.0})
    plan = abs_plan(setting.instance, setting.target, setting.problem, alpha=0.05)
    assert plan.prunings >= 3
    assert plan.p > 0.015
    weights, _, variances = reference.estimate(x, labels, k, name, BETA)
    own = reference.partition_cost(x, labels, k, name, BETA)
    offset = setting.offset

    def success_rate(prunings):
        """Return how often some walk is good with the right variances and weights."""
        bits = jax.random.bits(jax.random.key(1), (trials, k, plan.m), jnp.uint32)
        scale = BETA if name == "wkm" else 0.5 / variances[0]
        means = pruning.expand(
            jnp.asarray(x, jnp.float32),
            bits,
            jnp.full((trials, 1), scale, jnp.float32),
            jnp.ones((trials, 1)),
            jnp.arange(plan.m, dtype=jnp.int32)[None],
            plan.m,
            prunings,
        )
        good = np.zeros(trials, bool)
        for walk in np.asarray(means[:, 0], float):
            square = ((x[:, None] - walk[:, None]) ** 2).sum(axis=-1)
            if name == "wkm":
                cost = BETA * square
            else:
                cost = square / (2 * variances) + np.log(2 * math.pi * variances)
            if name != "ucmle":
                cost = cost - np.log(weights)
            good |= cost.min(axis=-1).sum(axis=1) + offset <= 3 * (own + offset)
        return good.mean()

    error = 4 * math.sqrt(plan.p * (1 - plan.p) / trials)
    assert success_rate(plan.prunings) >= plan.p - error
    assert success_rate(0) < plan.p - error


# Candidates.


@pytest.mark.parametrize(("name", "k"), [("cmle", 2), ("cmle", 3), ("ucmle", 3), ("wkm", 1)])
def test_the_best_are_those_of_every_walk_and_tuple(name, k):
    """Against a loop over repetitions, walks and tuples."""
    x = next(instances(9, 2, 1, 5))
    setting = make_setting(x, k, name, {"eps": 8.0})
    plan = abs_plan(setting.instance, setting.target, setting.problem)
    values, exponents = (0.0,), 3 if name == "cmle" else 1
    if name != "wkm":
        values = (1.2, 2.5) if k == 2 else (1.2, 3.0)
    plan = dataclasses.replace(
        plan,
        m=2,
        prunings=2,
        walks=pruning.walk_count(k, 2),
        repetitions=2,
        variance_values=values,
        grid_values=len(values),
        weight_exponents=exponents,
        weight_tuples=grids.weight_tuples(k, exponents),
    )
    plan = dataclasses.replace(plan, tuples=2 * plan.walks * len(values) ** k * plan.weight_tuples)
    key = jax.random.key(2)
    costs, mixtures = raw_best(setting, plan, key, n_best=48)
    ratio = (plan.balance - k + 1) ** (1 / exponents)
    expected = []
    all_weights = grids.geometric_weights(k, plan.balance, exponents)
    for number in range(2):
        own = jax.random.fold_in(jax.random.fold_in(key, 0), number)
        bits = np.asarray(jax.random.bits(own, (k, 2), jnp.uint32))
        for value in itertools.product(values, repeat=k):
            variance = setting.variances(np.array(value))
            for w in all_weights if name != "ucmle" else [np.ones(k)]:
                constant = setting.instance.d / 2 * (np.array(value) - 1) - np.log(w)
                if name == "wkm":
                    constant = -np.log(w)
                for candidate in reference.abs_candidates(
                    x, bits, 0.5 / variance, constant, [[0, 1]], 2, 2
                ):
                    weights = np.full(k, 1 / k) if name == "ucmle" else w
                    expected.append(
                        reference.model_cost(x, weights, candidate.means, variance, name, BETA)
                    )
    assert len(expected) == plan.tuples
    assert ratio > 1 or exponents == 1
    count = min(48, len(expected))
    assert len(costs) == count
    np.testing.assert_allclose(costs, np.sort(expected)[:count], rtol=2e-5, atol=1e-3)
    for i in range(0, count, 7):
        assert abs(costs[i] - model_cost(x, mixtures, i, name)) <= 1e-4 * 9 * 2


def test_pruning_and_batches_change_nothing(monkeypatch):
    x = next(instances(24, 1, 1, 6))
    setting = make_setting(x, 3, "cmle", {"eps": 3.0})
    plan = abs_plan(setting.instance, setting.target, setting.problem, alpha=0.25)
    plan = dataclasses.replace(
        plan, repetitions=6, tuples=plan.tuples // plan.repetitions * 6, p=1.0
    )
    key = jax.random.key(3)
    costs, mixtures = raw_best(setting, plan, key)
    for field in ("partial_sums", "completions"):
        only = NO_PRUNING._replace(**{field: True})
        others, other_mixtures = raw_best(setting, plan, key, only)
        np.testing.assert_array_equal(costs, others)
        np.testing.assert_array_equal(mixtures.means, other_mixtures.means)
    monkeypatch.setattr(leaves, "FRONTIER_BYTES", 2**15)
    monkeypatch.setattr(leaves.numerics, "tile_bytes", lambda: 2**15)
    assert leaves.branches_together(24, 1, 3, 9, plan.prunings) < 32
    others, other_mixtures = raw_best(setting, plan, key)
    np.testing.assert_array_equal(costs, others)
    np.testing.assert_array_equal(mixtures.means, other_mixtures.means)


def test_same_key_same_answer_offsets_and_padding():
    x = np.round(next(instances(48, 1, 1, 7)) * 8) / 8
    options = {"eps": 2.0, "balance": math.inf, "algorithm": "abs", "certificate": False}
    one = jc.approximate(x, 2, **options)
    two = jc.approximate(x, 2, **options)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.all(a == b)), one, two))
    moved = jc.approximate(x + np.float32(1e4), 2, **options)
    np.testing.assert_array_equal(one.labels, moved.labels)
    padded = np.concatenate([x, [[np.nan]]]).astype(np.float32)
    three = jc.approximate(padded, 2, sample_weight=[1] * 48 + [0], **options)
    assert float(three.cost) == float(one.cost)
    assert three.labels.shape == (49,)


def test_interruption_keeps_the_best():
    def stop(report):
        raise KeyboardInterrupt

    x = next(instances(48, 1, 1, 14))
    options = {"eps": 0.5, "balance": math.inf, "algorithm": "abs", "certificate": False}
    solution = jc.approximate(x, 2, max_candidates=1e15, progress=stop, **options)
    assert solution.status == jc.Status.INTERRUPTED
    assert solution.guarantee.kind == "none"
    assert np.isfinite(solution.cost)


def test_nothing_is_claimed_on_a_budget():
    solution = jc.approximate(
        load_iris().x, 3, algorithm="abs", guarantee=False, max_candidates=1e5
    )
    assert solution.guarantee.kind == "none"
    assert float(solution.cost) < 420


# Plans.


def an_instance(n=1000, d=2, k=2, f=None, high=1e4):
    return Instance(
        n=n,
        d=d,
        n_clusters=k,
        total=float(n),
        min_size=2.0 if f is None else n / f,
        y_low=1.0,
        y_high=1 + math.log(high),
        factor=1.0,
        scale="tight",
        spread_low=1.0,
        spread_high=3.0,
        weighted=False,
    )


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("grid", ["reduced", "loglog"])
@pytest.mark.parametrize(("k", "claim"), [(2, {"eps": 1.0}), (3, {"eps": 0.7}), (2, {"eta": 1.5})])
def test_the_numbers_of_a_plan_fit_together(name, grid, k, claim):
    instance = an_instance(k=k)._replace(known_cost=3.0)
    target = Target(claim.get("eps"), claim.get("eta"), 0.1)
    plan = abs_plan(instance, target, PROBLEMS[name], grid)
    pruned_alpha = abs_plan(instance, target, PROBLEMS[name], grid, alpha=0.01)
    assert pruned_alpha.prunings > 0
    assert pruned_alpha.tuples >= plan.tuples
    for chosen in (plan, pruned_alpha):
        f, alpha, m = chosen.balance, chosen.alpha, chosen.m
        shares = [max(alpha / u, 1 / f) for u in range(1, k)]
        p = k ** (1 - m) * math.prod(shares) ** m * (1 - chosen.beta)
        assert chosen.p == pytest.approx(p)
        assert chosen.repetitions == math.ceil(math.log(0.1) / math.log1p(-p))
        assert chosen.walks == math.comb(chosen.prunings + k - 1, k - 1)
        grid_tuples = chosen.grid_values**k * chosen.weight_tuples
        assert chosen.tuples == chosen.repetitions * chosen.walks * grid_tuples
        # Once pruned so often, any point is share enough.
        smallest = min((alpha / u for u in range(1, k) if alpha / u > 1.001 / f), default=0)
        assert (1000 >> chosen.prunings) * smallest <= 1
        assert chosen.prunings == 0 or (1000 >> (chosen.prunings - 1)) * smallest > 1
        # What is left for the grids, beside what is pruned wrongly.
        wrong = choices.wrong_share(alpha) if chosen.prunings else 0.0
        if name == "wkm":
            continue
        slope, left = 0.0, None
        if "eps" in claim:
            slope = (1 + claim["eps"]) / (1 + wrong) - 1
            assert slope > 0
            credit = slope * grids.least_entropy(k, f)
        else:
            credit = (claim["eta"] - wrong * 3.0) / (1 + wrong)
        divergence = 0.0
        if name == "cmle":
            divergence = math.log(k) - grids.least_entropy(k, f)
            if chosen.weight_exponents > 1:
                divergence = grids.geometric_divergence(k, f, chosen.weight_exponents)
        if name == "ucmle":
            credit = 0.0 if "eps" in claim else credit
        left = credit - divergence
        y = np.linspace(1.0, instance.y_high, 2000)
        excess = reference.cover_excess(
            y, chosen.variance_values, chosen.e_m, slope, 2 / instance.d * left
        )
        assert excess.max() <= 1e-9
        assert min(chosen.variance_values) >= 1


@pytest.mark.parametrize(("slope", "constant"), [(0.5, 0.0), (0.3, 0.4), (1.0, -0.5), (0.0, 0.8)])
def test_the_loglog_grid_covers_with_the_error_it_leaves(slope, constant):
    high = 9.0
    errors = grids.loglog_mean_errors(1.0, high, Allowance(slope, constant))
    assert (np.diff(errors) >= -1e-12).all()
    assert errors[-1] > 0
    y = np.linspace(1.0, high, 5000)
    for count, error in enumerate(errors, start=1):
        cover = grids.loglog_cover(1.0, high, count)
        np.testing.assert_allclose(np.diff(np.log(cover.values)), math.log(high) / count)
        assert cover.values[-1] == pytest.approx(high)
        # For the value at or above, which is all that the paper looks at.
        above = cover.values[np.searchsorted(cover.values, y * (1 - 1e-12))]
        if error > 0:
            room = slope * y + constant
            assert (reference.phi(above - y, error) <= room + 1e-9).all()
    # Nothing is given away: fine grids leave nearly all to the means.
    assert errors[-1] > 0.98 * (slope + constant)


def test_auto_takes_the_cheaper_and_shows_the_other():
    options = {"eps": 1.0, "shape": (20000, 2), "algorithm": "auto"}
    unbalanced = jc.plan(None, 2, balance=math.inf, **options)
    assert (unbalanced.algorithm, unbalanced.other.algorithm) == ("abs", "sampling")
    assert unbalanced.point_evaluations <= unbalanced.other.point_evaluations
    balanced = jc.plan(None, 2, **options)
    assert (balanced.algorithm, balanced.other.algorithm) == ("sampling", "abs")
    text = str(unbalanced)
    assert "instead of  sampling" in text
    assert "prunings" in text
    assert unbalanced.to_dict()["other"]["algorithm"] == "sampling"
    assert unbalanced.seconds > 0
    alone = jc.plan(None, 2, balance=math.inf, **(options | {"algorithm": "abs"}))
    assert alone == dataclasses.replace(unbalanced, other=None)
    assert jc.plan(None, 2, grid="loglog", **options).other.grid == "loglog"
    # Where one cannot, it is the other.
    certain = jc.plan(None, 2, **options, delta=0)
    assert (certain.algorithm, certain.other) == ("sampling", None)


def test_auto_searches_by_the_plan():
    x = next(instances(48, 1, 1, 8))
    options = {"eps": 2.0, "certificate": False}
    auto = jc.approximate(x, 2, algorithm="auto", **options)
    plan = jc.plan(x, 2, eps=2.0, algorithm="auto")
    same = jc.approximate(x, 2, algorithm=plan.algorithm, **options)
    assert float(auto.cost) == float(same.cost)


def test_a_known_solution_helps_a_claim_in_nats():
    instance, target = an_instance(n=20000), Target(None, 1.0, 0.1)
    unknown = abs_plan(instance, target, jc.CMLE())
    known = abs_plan(instance._replace(known_cost=2.5), target, jc.CMLE())
    assert known.tuples < unknown.tuples


# Bad input.


def test_what_abs_cannot_do_gets_a_clear_error():
    x = next(instances(48, 1, 1, 9))
    options = {"eps": 2.0, "algorithm": "abs"}
    with pytest.raises(ValueError, match="without weights"):
        jc.plan(x, 2, sample_weight=np.linspace(1, 2, 48), **options)
    with pytest.raises(ValueError, match="delta above 0"):
        jc.plan(x, 2, delta=0, **options)
    with pytest.raises(ValueError, match="coincide"):
        jc.plan(np.zeros((9, 1)), 2, **options)
    with pytest.raises(ValueError, match="grid must be one of"):
        jc.plan(x, 2, grid="fine", **options)
    with pytest.raises(ValueError, match="grid must be one of"):
        jc.approximate(x, 2, grid="fine", **options)
    with pytest.raises(ValueError, match="alpha must be at most"):
        abs_plan(an_instance(), Target(9.0, None, 0.1), jc.CMLE(), alpha=0.3)
    # Weights only rule out one of the two.
    weighted = jc.plan(x, 2, eps=2.0, algorithm="auto", sample_weight=np.linspace(1, 2, 48))
    assert (weighted.algorithm, weighted.other) == ("sampling", None)


def test_costs_below_zero_are_rejected():
    low = an_instance()._replace(y_low=0.5)
    with pytest.raises(ValueError, match="not negative"):
        abs_plan(low, Target(1.0, None, 0.1), jc.CMLE())
    x = next(instances(10, 2, 1, 10))
    setting = make_setting(x, 2, "cmle", {"eps": 3.0})
    plan = abs_plan(setting.instance, setting.target, setting.problem)
    with pytest.raises(ValueError, match="not negative"):
        make_tuples(setting, plan, np.array([0.9, 2.0]))


def test_too_many_candidates_may_advise_the_other_algorithm():
    x = np.concatenate([next(instances(100, 1, 1, 11)) * s + s for s in (1, 70, 4000)])
    plans = {
        name: jc.plan(x, 2, eps=0.6, balance=math.inf, algorithm=name)
        for name in ("sampling", "abs")
    }
    dear, cheap = sorted(plans, key=lambda name: -plans[name].tuples)
    limit = (plans[dear].tuples + plans[cheap].tuples) / 2
    with pytest.raises(jc.TooManyCandidatesError, match=f'algorithm="{cheap}"'):
        jc.approximate(
            x,
            2,
            eps=0.6,
            balance=math.inf,
            algorithm=dear,
            max_candidates=limit,
            certificate=False,
        )


# Memory, and programs for accelerators.


def a_pass(n=512, k=3, prunings=4):
    """Return a function of arrays that is a pass of the search, and their shapes."""
    array = jax.ShapeDtypeStruct
    t, g, e, d = 8, 3, 5, 2
    floats, integers = jnp.float32, jnp.int32
    tuples = leaves.Tuples(
        slope=array((t, k - 1), floats),
        constant=array((t, k - 1), floats),
        mass=array((t,), floats),
        low=array((t,), integers),
        high=array((t,), integers),
        n_tuples=array((), integers),
        last_slope=array((g,), floats),
        last_constant=array((g,), floats),
        last_mass=array((e,), floats),
        last_shift=array((e,), floats),
        last_power=array((e,), integers),
        spread=array((), integers),
    )
    blocks = (array((n // 64, 64, d), floats), array((n // 64, 64), floats))
    found = jax.eval_shape(lambda: leaves.nothing_found(16, k, d, floats))
    batch = leaves.branches_together(n, d, k, g * e, prunings)

    def run(x, blocks, tuples, found):
        return leaves.next_branches(
            jax.random.key(0),
            x,
            blocks,
            tuples,
            found,
            (0, 0, 0),
            3,
            99,
            k=k,
            m=2,
            prunings=prunings,
            repetitions=batch // t,
            together=t,
        )

    return jax.jit(run), (array((n, d), floats), blocks, tuples, found)


@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
def test_the_pass_lowers_for_accelerators(platform):
    function, arguments = a_pass()
    exported = jax.export.export(function, platforms=[platform])(*arguments)
    assert exported.platforms == (platform,)


@pytest.mark.parametrize("n", [512, 16384])
def test_the_pass_stays_within_its_memory(n):
    function, arguments = a_pass(n)
    memory = function.lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= leaves.search_bytes(n, 2, 3, 3, 5, 8, 4)


def test_other_values_compile_nothing():
    x = next(instances(48, 1, 1, 12))
    setting = make_setting(x, 2, "cmle", {"eps": 2.0})
    plan = abs_plan(setting.instance, setting.target, setting.problem, alpha=0.25)
    raw_best(setting, plan, jax.random.key(0))
    before = leaves._next_branches._cache_size()
    for i, other in enumerate(instances(48, 1, 3, 13)):
        moved = setting._replace(points=jnp.asarray(other))
        raw_best(moved, plan, jax.random.key(i))
    assert leaves._next_branches._cache_size() == before


def test_make_plan_knows_the_algorithms():
    instance, target = an_instance(f=4), Target(1.0, None, 0.1)
    for name in ("sampling", "abs", "paper"):
        assert make_plan(instance, target, jc.CMLE(), name).algorithm == name
    assert scoring.LOOK == leaves.LOOK
