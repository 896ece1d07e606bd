"""Many instances at once: each as if it were alone, whatever its company."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support import BETA, PROBLEMS

import jaxcmle as jc
from jaxcmle.solve import batches, instances, many, pieces, searches

PRECISIONS = ("float32",)
# Few buckets, so that few programs are compiled; a search that finds the optimum of such instances,
# so that other programs, which add up in another order, find it too.
SMALL = jc.Effort(rounds=40, patience=6, restarts=2, population=6, methods=("kmeans++",))
KEY = jax.random.key(3)
D = 2


def points(rng, n, k=3, spread=6.0):
    centres = spread * rng.normal(size=(k, D))
    widths = rng.uniform(0.3, 1.5, size=k)
    labels = rng.integers(0, k, n)
    x = centres[labels] + widths[labels][:, None] * rng.normal(size=(n, D))
    return x.astype(np.float32)


def ragged(count=24, seed=0, low=50, high=65):
    """Return instances in two buckets: lengths up to 64, three, five or six clusters, weights."""
    rng = np.random.default_rng(seed)
    ks = [(3, 5, 6)[i % 3] for i in range(count)]
    xs = [points(rng, int(rng.integers(low, high)), k) for k in ks]
    kinds = [None, lambda n: rng.integers(0, 3, n), lambda n: rng.uniform(0.2, 2, n)]
    weights = [kinds[(i // 3) % 3] for i in range(count)]
    weights = [kind and kind(len(x)) for kind, x in zip(weights, xs, strict=True)]
    return xs, ks, weights


def assert_same(one, other, rtol=1e-5):
    np.testing.assert_array_equal(one.labels, other.labels)
    np.testing.assert_allclose(one.cost, other.cost, rtol=rtol)
    assert int(one.status) == int(other.status)
    for mine, theirs in zip(
        jax.tree.leaves(one.mixture), jax.tree.leaves(other.mixture), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module", autouse=True)
def traced():
    """Return the shapes that the search was traced for, of which each may be only once."""
    shapes = []
    original = searches._search_all

    def counted(tasks, counts, pace, problem, plan, layout):
        program = (tasks.x.shape, tasks.exists.shape, type(problem), plan, layout, tasks[4] is None)
        shapes.append(program)
        return original.__wrapped__(tasks, counts, pace, problem, plan, layout)

    chex.clear_trace_counter()
    limited = jax.jit(chex.assert_max_traces(counted, n=16), static_argnames=("plan", "layout"))
    searches._search_all = lambda *given: limited(*given[:4], plan=given[4], layout=given[5])
    yield shapes
    searches._search_all = original
    chex.clear_trace_counter()


@pytest.fixture(scope="module")
def together():
    xs, ks, weights = ragged()
    return jc.fit_many(xs, ks, sample_weight=weights, key=KEY, effort=SMALL)


@pytest.fixture(scope="module")
def some(together):
    """Return instances in one bucket, with different numbers of clusters, and their answers."""
    xs, ks, weights = ragged()
    chosen = [i for i, k in enumerate(ks) if k > 3]
    keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.asarray(chosen, jnp.uint32))
    given = {
        "xs": [xs[i] for i in chosen],
        "n_clusters": [ks[i] for i in chosen],
        "sample_weight": [weights[i] for i in chosen],
        "key": keys,
        "effort": SMALL,
        "certificate": False,
    }
    return given, [together[i] for i in chosen]


def test_every_instance_is_answered_as_if_it_were_alone(together):
    xs, ks, weights = ragged()
    assert len(together) == len(xs)
    for i, solution in enumerate(together):
        own = jax.random.fold_in(KEY, i)[None]
        (alone,) = jc.fit_many([xs[i]], ks[i], sample_weight=[weights[i]], key=own, effort=SMALL)
        assert_same(solution, alone, rtol=1e-6)
        assert solution.labels.shape == (len(xs[i]),)
        assert solution.mixture.means.shape == (ks[i], D)
        assert solution.error == ""
        assert int(solution.status) == jc.Status.CONVERGED
        assert solution.guarantee.kind == "certificate"
        assert solution.guarantee.gap == pytest.approx(alone.guarantee.gap, rel=1e-3)


def test_the_answer_is_that_of_fit():
    rng = np.random.default_rng(1)
    xs = [points(rng, n, 5) for n in (57, 60, 64)]
    found = jc.fit_many(xs, 5, key=KEY, effort=SMALL)
    for i, x in enumerate(xs):
        alone = jc.fit(x, 5, key=jax.random.fold_in(KEY, i), effort=SMALL)
        assert_same(found[i], alone)
        assert bool(found[i].consistent) == bool(alone.consistent)
        guarantee = found[i].guarantee
        assert guarantee.min_size == alone.guarantee.min_size
        assert guarantee.lower_bound == pytest.approx(alone.guarantee.lower_bound, rel=1e-5)
        assert guarantee.gap == pytest.approx(alone.guarantee.gap, rel=1e-3)
        assert guarantee.method == "pairs"


def test_the_order_does_not_matter(together):
    xs, ks, weights = ragged()
    order = np.random.default_rng(0).permutation(len(xs))
    keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.asarray(order, jnp.uint32))
    found = jc.fit_many(
        [xs[i] for i in order],
        [ks[i] for i in order],
        sample_weight=[weights[i] for i in order],
        key=keys,
        effort=SMALL,
    )
    for place, solution in zip(order, found, strict=True):
        assert_same(solution, together[place], rtol=0)


def test_the_size_of_chunks_does_not_matter(some, monkeypatch):
    given, answers = some
    monkeypatch.setitem(batches.MOST_INSTANCES, "cpu", 5)
    for one, other in zip(jc.fit_many(**given), answers, strict=True):
        assert_same(one, other)


def test_the_bucket_does_not_matter(some, monkeypatch):
    given, answers = some
    monkeypatch.setattr(instances, "LEAST_POINTS", 128)
    for one, other in zip(jc.fit_many(**given), answers, strict=True):
        assert_same(one, other)


def test_lanes_give_the_same_answers(some, monkeypatch):
    """The way of accelerators: rounds of several at once, of which the finished make room."""
    given, answers = some
    lanes = batches.layout_of("lanes")
    monkeypatch.setattr(many, "layout_of", lambda: lanes)
    monkeypatch.setitem(batches.MOST_INSTANCES, "cpu", 16)
    for one, other in zip(jc.fit_many(**given), answers, strict=True):
        assert_same(one, other)


SEVERAL_DEVICES = """
import json, sys
sys.path.insert(0, {folder!r})
import jax
import jaxcmle as jc
import test_many
assert jax.device_count() == 4
xs, ks, weights = test_many.ragged()
found = jc.fit_many(xs, ks, sample_weight=weights, key=test_many.KEY, effort=test_many.SMALL)
starts = [jc.seed(jax.random.key(0), x, k) for x, k in zip(xs[:9], ks)]
cem = jc.cem_many(xs[:9], starts)
bounds = jc.lower_bound_many(xs, ks)
print(json.dumps([
    [[one.labels.tolist(), float(one.cost)] for one in found],
    [[one.labels.tolist(), float(one.cost)] for one in cem],
    bounds.tolist(),
]))
"""


def test_four_devices_give_the_same_answers(together):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    script = SEVERAL_DEVICES.format(folder=str(Path(__file__).parent))
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found, cem, bounds = json.loads(ran.stdout.splitlines()[-1])
    for (labels, cost), one in zip(found, together, strict=True):
        np.testing.assert_array_equal(labels, one.labels)
        np.testing.assert_allclose(cost, one.cost, rtol=1e-6)
    xs, ks, _ = ragged()
    starts = [jc.seed(jax.random.key(0), x, k) for x, k in zip(xs[:9], ks[:9], strict=True)]
    for (labels, cost), one in zip(cem, jc.cem_many(xs[:9], starts), strict=True):
        np.testing.assert_array_equal(labels, one.labels)
        np.testing.assert_allclose(cost, one.cost, rtol=1e-6)
    np.testing.assert_allclose(bounds, jc.lower_bound_many(xs, ks), rtol=1e-6)


def test_a_bad_instance_among_a_thousand_harms_no_other():
    rng = np.random.default_rng(2)
    xs = rng.normal(size=(1000, 12, 1)).astype(np.float32)
    xs[:, 6:] += 9
    good = jc.fit_many(xs, 2, effort=SMALL, certificate=False)
    assert (np.asarray(good.status) == jc.Status.CONVERGED).all()
    assert good.error == ("",) * 1000
    for bad, status, words in (
        (np.nan, jc.Status.NONFINITE, "NaN or infinity in 1 of 12 points"),
        (np.inf, jc.Status.NONFINITE, "NaN or infinity"),
        (None, jc.Status.INADMISSIBLE, "1 distinct points"),
    ):
        spoiled = xs.copy()
        spoiled[500, 3] = bad or 0
        if bad is None:
            spoiled[500] = 7
        found = jc.fit_many(spoiled, 2, effort=SMALL, certificate=False)
        others = np.arange(1000) != 500
        for mine, theirs in zip(
            jax.tree.leaves((found.mixture, found.labels, found.cost, found.status)),
            jax.tree.leaves((good.mixture, good.labels, good.cost, good.status)),
            strict=True,
        ):
            np.testing.assert_array_equal(mine[others], theirs[others])
        assert int(found.status[500]) == status
        assert words in found.error[500]
        assert math.isinf(found.cost[500])
        assert np.isnan(found.mixture.means[500]).all()
        assert [error for i, error in enumerate(found.error) if i != 500] == [""] * 999


def test_what_is_wrong_with_an_instance_is_said():
    x = points(np.random.default_rng(3), 60)
    cases = (
        (x[:2], None, jc.Status.INADMISSIBLE, "n_clusters must lie from 1"),
        (np.zeros((0, D), np.float32), None, jc.Status.INADMISSIBLE, "no points"),
        (np.ones((60, D), np.float32), None, jc.Status.INADMISSIBLE, "1 distinct points"),
        (x * 1e30, None, jc.Status.NONFINITE, "rescale x"),
        (x, np.full(60, -1.0), jc.Status.NONFINITE, "must not be negative"),
        (x, np.full(60, np.nan), jc.Status.NONFINITE, "NaN or infinity"),
        (x, np.zeros(60), jc.Status.NONFINITE, "0 for every point"),
        (x, np.where(np.arange(60) < 2, 1.0, 0), jc.Status.INADMISSIBLE, "2 distinct points"),
    )
    xs = [x, *(case[0] for case in cases), x]
    weights = [None, *(case[1] for case in cases), None]
    found = jc.fit_many(xs, 3, sample_weight=weights, effort=SMALL, key=KEY)
    for solution, (given, _, status, words) in zip(found[1:-1], cases, strict=True):
        assert int(solution.status) == status
        assert words in solution.error
        assert words in solution.guarantee.reason
        assert solution.labels.shape == (len(given),)
        assert math.isinf(solution.cost)
    assert int(found[0].status) == int(found[-1].status) == jc.Status.CONVERGED
    with pytest.raises(ValueError, match=r"(?s)instance 1: .*and 3 more.*errors=\"status\""):
        jc.fit_many(xs, 3, sample_weight=weights, errors="raise")
    large = jc.fit_many([x, x], 3, min_size=[2, 30], effort=SMALL)
    assert int(large[0].status) == jc.Status.CONVERGED
    assert int(large[1].status) == jc.Status.INADMISSIBLE
    assert "3 clusters of at least 30" in large[1].error


def test_one_compilation_per_bucket(traced):
    # From the beginning: between two tests, programs may be dropped for want of memory maps.
    jax.clear_caches()
    batches._compiled.clear()
    traced.clear()
    xs, ks, weights = ragged(24, seed=5, low=33)
    options = {"effort": SMALL, "key": KEY, "certificate": False}
    jc.fit_many(xs, ks, sample_weight=weights, **options)
    assert len(traced) == len(set(traced)) == 2
    before = len(traced)
    # Other lengths, numbers of instances and of clusters, weights and limits: the same buckets.
    xs, ks, weights = ragged(29, seed=6, low=33)
    jc.fit_many(
        xs,
        ks,
        sample_weight=weights,
        effort=dataclasses.replace(SMALL, rounds=2, starts=4),
        min_size=[2 + i % 2 for i in range(29)],
        key=jax.random.key(8),
        certificate=False,
    )
    assert len(traced) == before
    buckets = {instances.bucket_of(len(x), k, False) for x, k in zip(xs, ks, strict=True)}
    assert len(buckets) == 2


def test_points_without_weight_get_the_label_that_is_theirs():
    rng = np.random.default_rng(7)
    x = points(rng, 60, spread=8.0)
    weight = np.ones(60)
    weight[::4] = 0
    x_bad = x.copy()
    x_bad[0] = np.nan
    with_nan, without = jc.fit_many(
        [x_bad, x], 3, sample_weight=[weight, weight], key=jnp.stack([KEY, KEY]), effort=SMALL
    )
    np.testing.assert_array_equal(with_nan.labels[1:], without.labels[1:])
    np.testing.assert_array_equal(without.labels, jc.assign(x, without.mixture))
    present = weight > 0
    (alone,) = jc.fit_many([x[present]], 3, key=KEY[None], effort=SMALL)
    np.testing.assert_array_equal(without.labels[present], alone.labels)


@pytest.mark.parametrize("name", ["wkm", "ucmle"])
def test_other_problems_with_padded_clusters(name):
    rng = np.random.default_rng(8)
    xs = [points(rng, 60, 5) for _ in range(8)]
    problem = PROBLEMS[name]
    found = jc.fit_many(xs, 5, problem=problem, key=KEY, effort=SMALL, min_size=2)
    for x, one in zip(xs, found, strict=True):
        # No move is left, and every cluster is used.
        assert int(one.status) == jc.Status.CONVERGED
        assert np.bincount(one.labels, minlength=5).min() >= 2
        again = jc.polish(x, one.labels, 5, problem=problem)
        np.testing.assert_array_equal(again.labels, one.labels)
        cost = jc.partition_cost(x, one.labels, 5, problem=problem)
        np.testing.assert_allclose(one.cost, cost, rtol=1e-5)
        if name == "ucmle":
            np.testing.assert_allclose(one.mixture.weights, 0.2)
        else:
            np.testing.assert_allclose(one.mixture.variances, 0.5 / BETA, rtol=1e-6)


def test_a_stack_is_a_list_with_an_axis():
    rng = np.random.default_rng(9)
    xs = np.stack([points(rng, 60) for _ in range(5)])
    xs[2, 1, 1] = np.nan
    stack = jc.fit_many(xs, 3, key=KEY, effort=SMALL)
    each = jc.fit_many(list(xs), 3, key=KEY, effort=SMALL)
    assert stack.labels.shape == (5, 60)
    assert isinstance(stack.cost, jax.Array)
    assert stack.guarantee.kind == "certificate"
    for i, one in enumerate(each):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], (stack.labels, stack.cost, stack.status))
        for mine, theirs in zip(own, (one.labels, one.cost, one.status), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
        assert stack.error[i] == one.error
        np.testing.assert_allclose(stack.guarantee.gap[i], one.guarantee.gap, rtol=1e-4)
    mixed = jc.fit_many(xs, [3, 5, 3, 5, 3], key=KEY, effort=SMALL)
    assert isinstance(mixed, list)
    assert mixed[1].mixture.weights.shape == (5,)


def test_large_instances_and_those_without_a_certificate(monkeypatch):
    x = points(np.random.default_rng(10), 60)
    sampled = jc.Effort(
        rounds=3, patience=2, restarts=1, population=4, methods=("kmeans++",), sample=40
    )
    large, small = jc.fit_many([x, x[:35]], 3, effort=sampled, key=KEY)
    alone = jc.fit(x, 3, effort=sampled, key=jax.random.fold_in(KEY, 0))
    assert_same(large, alone, rtol=0)
    assert int(small.status) == jc.Status.CONVERGED
    monkeypatch.setattr(many, "MOST_CERTIFIED", 10)
    (bare,) = jc.fit_many([x], 3, effort=SMALL)
    assert bare.guarantee.kind == "none"
    assert "lower_bound_many" in bare.guarantee.reason
    (unasked,) = jc.fit_many([x], 3, effort=SMALL, certificate=False)
    assert "certificate=False" in unasked.guarantee.reason
    (free,) = jc.fit_many([x], 3, effort=SMALL, min_size=0)
    assert math.isinf(free.guarantee.gap)


@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_returns_what_is_done(monkeypatch):
    xs, _, _ = ragged(24)
    # Chunks of a few, with a program for more.
    original = batches.chunks_of
    monkeypatch.setattr(
        many,
        "chunks_of",
        lambda each, *given, **options: [
            chunk._replace(places=[i], instances=[one])
            for chunk in original(each, *given, **options)
            for i, one in zip(chunk.places, chunk.instances, strict=True)
        ],
    )
    reports = []

    def progress(report):
        reports.append(report)
        if len(reports) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    found = jc.fit_many(xs, 3, effort=SMALL, key=KEY, progress=progress, certificate=False)
    states = [int(one.status) for one in found]
    done = [state == jc.Status.CONVERGED for state in states]
    assert 0 < sum(done) < 24
    assert reports[-1].done == sum(done)
    assert reports[-1].total == 24
    monkeypatch.undo()
    whole = jc.fit_many(xs, 3, effort=SMALL, key=KEY, certificate=False)
    for one, other, is_done in zip(found, whole, done, strict=True):
        if is_done:
            assert_same(one, other, rtol=0)
        else:
            assert int(one.status) == jc.Status.INTERRUPTED
            assert "interrupted" in one.error
    late = jc.fit_many(xs, 3, effort=SMALL, time_limit=0)
    assert {int(one.status) for one in late} == {int(jc.Status.INTERRUPTED)}


def test_progress_is_silent_unless_asked_for(capsys):
    xs, _, _ = ragged(3)
    jc.fit_many(xs, 3, effort=SMALL, certificate=False)
    assert capsys.readouterr().err == ""
    jc.fit_many(xs, 3, effort=SMALL, certificate=False, progress=True)
    assert "of 3 instances" in capsys.readouterr().err


def test_chunks_have_bounded_memory_and_are_shared_among_workers():
    layout = batches.layout_of()._replace(workers=2)
    one = instances.Instance(np.zeros((50, D), np.float32), None, 3, None)
    chunks = batches.chunks_of([one] * 100_000, False, layout)
    assert len(chunks) % 2 == 0
    assert max(len(chunk.instances) for chunk in chunks) <= batches.capacity_of(chunks[0].bucket)
    assert sorted(place for chunk in chunks for place in chunk.places) == list(range(100_000))
    for n in (16, 300, 5000, 10**6):
        bucket = instances.bucket_of(n, 3, False)
        assert bucket.n >= n
        capacity = batches.capacity_of(bucket)
        assert capacity == 1 or capacity * bucket.n <= batches.POINTS["cpu"]
    halves = batches.chunks_of([one] * 30, False, layout)
    assert [len(chunk.instances) for chunk in halves] == [15, 15]

    class Two:
        devices = 2

    counts, places = batches.spread(5, 4, Two())
    assert counts.tolist() == [3, 2]
    assert places.tolist() == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("k", range(1, 100))
def test_few_numbers_of_clusters(k):
    bucket = instances.bucket_of(200, k, False)
    assert k <= bucket.k <= max(4, 1.5 * k)
    assert bucket == instances.bucket_of(200, bucket.k, False)
    assert bucket.n == 256
    assert instances.bucket_of(200, k, True).n == 200
    assert instances.bucket_of(5000, k, True).n == 5120


def test_cem_many_is_cem_for_each():
    xs, ks, weights = ragged(18, seed=11)
    starts = [
        jc.seed(jax.random.fold_in(KEY, i), x, k)
        for i, (x, k) in enumerate(zip(xs, ks, strict=True))
    ]
    found = jc.cem_many(xs, starts, sample_weight=weights, min_size=1)
    for x, start, weight, one in zip(xs, starts, weights, found, strict=True):
        alone = jc.cem(x, start, sample_weight=weight, min_size=1)
        assert_same(one, alone)
        assert int(one.n_iter) == int(alone.n_iter)
    limited = jc.cem_many(xs, starts, max_iter=1)
    assert {int(one.n_iter) for one in limited} == {1}
    # NaN among many.
    xs[4] = xs[4].copy()
    xs[4][0] = np.nan
    weights[4] = None
    again = jc.cem_many(xs, starts, sample_weight=weights, min_size=1)
    assert int(again[4].status) == jc.Status.NONFINITE
    assert "row 0" in again[4].error
    for i in (3, 5):
        assert_same(again[i], found[i], rtol=0)
    with pytest.raises(ValueError, match="18 instances, and starts for 2"):
        jc.cem_many(xs, starts[:2])
    with pytest.raises(TypeError, match="list of mixtures"):
        jc.cem_many(xs, 3)


def test_score_many_is_score_for_each():
    xs, ks, weights = ragged(9, seed=12)
    keys = jax.random.split(KEY, 5)
    stacks = [
        jax.vmap(lambda key, x=x, k=k: jc.seed(key, x, k))(keys[: 2 + i % 3])
        for i, (x, k) in enumerate(zip(xs, ks, strict=True))
    ]
    found = jc.score_many(xs, stacks, sample_weight=weights)
    for x, stack, weight, costs in zip(xs, stacks, weights, found, strict=True):
        expected = jc.score(x, stack, sample_weight=weight)
        np.testing.assert_allclose(costs, expected, rtol=1e-5)
    same = np.stack([xs[0][:50]] * 2)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), stacks[0])
    costs = jc.score_many(same, both)
    assert costs.shape == (2, 2)
    np.testing.assert_allclose(costs[0], jc.score(same[0], stacks[0]), rtol=1e-5)
    with pytest.raises(ValueError, match="instance 1: x holds NaN"):
        jc.score_many(np.stack([same[0], same[0] * np.nan]), both)


@pytest.mark.parametrize("name", PROBLEMS)
def test_lower_bound_many_is_lower_bound_for_each(name):
    xs, ks, weights = ragged(9, seed=13)
    options = {"problem": PROBLEMS[name]}
    plain = jc.lower_bound_many(xs, ks, **options)
    weighted = jc.lower_bound_many(xs, ks, sample_weight=weights, balance=9.0, **options)
    for i, (x, k) in enumerate(zip(xs, ks, strict=True)):
        assert plain[i] == pytest.approx(jc.lower_bound(x, k, **options), rel=1e-4)
        single = jc.lower_bound(x, k, sample_weight=weights[i], balance=9.0, **options)
        assert weighted[i] == pytest.approx(single, rel=1e-4)
    with pytest.raises(ValueError, match="not both"):
        jc.lower_bound_many(xs, ks, balance=3, min_size=2)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("form", ["map", "lanes"])
def test_searches_lower_for_accelerators(form, platform):
    c, n, k = 8, 64, 6
    dtype = np.float32
    shape = jax.ShapeDtypeStruct
    task = searches.Task(
        shape((c, n, D), dtype),
        shape((c, n), dtype),
        shape((c, k), bool),
        shape((c,), dtype),
        None,
        jax.eval_shape(lambda: jax.random.split(KEY, c)),
    )
    layout = batches.layout_of(form)
    counts = shape((1,), np.int32)

    def search(task, counts):
        return searches.search_all(task, counts, SMALL, jc.CMLE(), layout)

    exported = export.export(jax.jit(search), platforms=[platform])(task, counts)
    assert exported.platforms == (platform,)
    packed = instances.Packed(*task[:3])
    starts = jc.Mixture(
        weights=shape((c, k), dtype), means=shape((c, k, D), dtype), variances=shape((c, k), dtype)
    )

    def cem(packed, starts, sizes, counts):
        return pieces._cem_all(packed, starts, sizes, counts, jc.CMLE(), 300, None, layout)

    exported = export.export(jax.jit(cem), platforms=[platform])(
        packed, starts, task.min_size, counts
    )
    assert exported.platforms == (platform,)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.zeros((5, 2)), 2), ValueError, r"xs\[None\]"),
        (([], 2), ValueError, "xs is empty"),
        (("abc", 2), TypeError, "list of arrays"),
        (([[1.0, 2.0]], 1), ValueError, "instance 0 has shape"),
        (([np.zeros((5, 2)), np.zeros((5, 3))], 2), ValueError, r"instance 1 has shape \(5, 3\)"),
        (([np.zeros((5, 2))], [2, 3]), ValueError, "one for each of the 1 instances, got 2"),
        (([np.zeros((5, 2))], 0), ValueError, "n_clusters"),
        (([np.zeros((5, 2))], 2.5), ValueError, "n_clusters"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        jc.fit_many(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"errors": "ignore"}, ValueError, "errors must be one of"),
        ({"effort": "much"}, ValueError, "effort must be one of"),
        ({"min_size": [1, 2]}, ValueError, "min_size must be one for all"),
        ({"sample_weight": [None, None]}, ValueError, "weights for each of the 1"),
        ({"sample_weight": [np.ones(3)]}, ValueError, "one weight per point"),
        ({"key": 3}, TypeError, "key must be one key"),
        ({"key": jax.random.split(KEY, 3)}, ValueError, "one for each of the 1, got 3"),
    ],
)
def test_option_errors(options, error, message):
    x = points(np.random.default_rng(0), 60)
    with pytest.raises(error, match=message):
        jc.fit_many([x], 3, **options)


def test_not_inside_jit():
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda x: jc.fit_many(x, 2))(np.zeros((2, 5, 2)))


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = points(np.random.default_rng(0), 60).astype(np.float64)
        (one,) = jc.fit_many([x], 3, effort=SMALL, key=KEY)
        assert one.mixture.means.dtype == np.float64
        (start,) = (jc.seed(KEY, x, 3),)
        assert jc.cem_many([x], [start])[0].cost.dtype == np.float64
