"""The certificate against brute force, and what a user sees of it."""

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jaxcmle as jc
from jaxcmle.problem.types import Status
from jaxcmle.proof import branch, prove, rounding
from jaxcmle.proof import span as span_module
from jaxcmle.proof import task as task_module
from jaxcmle.proof.certify import certify
from jaxcmle.proof.pricing import best_sets, cell_profits, vertex_profits
from jaxcmle.proof.span import CentreSpan
from jaxcmle.proof.task import make_task

PROBLEMS = {"cmle": jc.CMLE(), "wkm": jc.WKM(beta=0.7), "ucmle": jc.UCMLE()}
BETA = 0.7
PRECISIONS = ("float32",)
certify_module = sys.modules["jaxcmle.proof.certify"]


def instance(rng, n, d, kind):
    """Return a small instance, of the ugly kinds as well."""
    x = rng.normal(size=(n, d))
    if kind == "duplicates":
        x[1] = x[0]
        x[3] = x[2]
    elif kind == "outliers":
        x[0] *= 30
        x[1] += 20
    elif kind == "nested":
        x[: n // 2] *= 0.1
    elif kind == "groups":
        x += 6 * rng.integers(3, size=(n, 1))
    elif kind == "integer":
        x = np.round(3 * x)
    return x


KINDS = ("plain", "duplicates", "outliers", "nested", "groups", "integer")


def solution_of(x, labels, k, problem, **options):
    """Return a solution with these labels, whatever they are."""
    x = np.asarray(x)
    mixture = jc.estimate(x, labels, k, problem=problem, **options)
    return jc.Solution(
        mixture=mixture,
        labels=jnp.asarray(labels, jnp.int32),
        cost=jc.partition_cost(x, labels, k, problem=problem, **options),
        status=jnp.int32(Status.CONVERGED),
        n_iter=jnp.int32(0),
    )


def cases(seed, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n, d, k = int(rng.integers(6, 11)), int(rng.integers(1, 4)), int(rng.integers(2, 4))
        kind, name = rng.choice(KINDS), rng.choice(list(PROBLEMS))
        size = int(rng.integers(2, n // k + 1))
        yield rng, instance(rng, n, d, kind), k, size, str(name), str(kind)


@pytest.mark.parametrize("seed", range(8))
def test_never_above_the_optimum(seed):
    """Given the best partition, or another; with the time to finish, or none."""
    finished = 0
    for rng, x, k, size, name, _ in cases(seed, 66):
        floor = float(rng.choice([0.0, 1e-3]))
        best, labels = reference.brute_force(
            x, k, size, problem=name, beta=BETA, min_variance=floor
        )
        if not math.isfinite(best):
            continue
        if rng.random() < 0.3:
            labels = rng.permutation(labels)
        given = solution_of(x, labels, k, PROBLEMS[name], min_variance=max(floor, 1e-6))
        guarantee = certify(
            x,
            given,
            min_size=size,
            problem=PROBLEMS[name],
            min_variance=floor,
            tolerance=float(rng.choice([0.001, 0.01, 0.1])),
            time_limit=float(rng.choice([0.0, 1.0])),
        )
        assert guarantee.kind == "certificate"
        assert guarantee.min_size == size
        assert guarantee.lower_bound <= best + 1e-9 * (1 + abs(best))
        if guarantee.better is not None:
            assert float(guarantee.better.cost) >= best - 1e-4 * (1 + abs(best))
        finished += guarantee.lower_bound > best - 0.1 * len(x)
    assert finished > 15


def stopping_after(calls):
    """Return a class that watches as `prove.Watch` does, and stops after so many calls."""

    class Watch(prove.Watch):
        def stops(self):
            self.calls = getattr(self, "calls", 0) + 1
            self.stopped = self.calls > calls
            return self.stopped

    return Watch


@pytest.mark.parametrize("seed", range(2))
def test_never_above_the_optimum_when_stopped_after_any_number_of_cells(seed, monkeypatch):
    monkeypatch.setattr(branch, "CHUNK", 4)
    monkeypatch.setattr(prove, "ROUNDS", 3)
    interrupted = 0
    for rng, x, k, size, name, _ in cases(100 + seed, 40):
        best, labels = reference.brute_force(x, k, size, problem=name, beta=BETA)
        if not math.isfinite(best):
            continue
        monkeypatch.setattr(certify_module, "Watch", stopping_after(int(rng.integers(1, 60))))
        given = solution_of(x, labels, k, PROBLEMS[name], min_variance=1e-6)
        guarantee = certify(x, given, min_size=size, problem=PROBLEMS[name], tolerance=1e-4)
        assert guarantee.lower_bound <= best + 1e-9 * (1 + abs(best))
        interrupted += guarantee.interrupted
    assert interrupted > 10


def test_weights_are_repetitions_and_fractions():
    rng = np.random.default_rng(5)
    for _ in range(25):
        n, d, k = 7, 2, 2
        x = instance(rng, n, d, str(rng.choice(KINDS)))
        weight = rng.integers(1, 4, size=n).astype(float)
        if rng.random() < 0.5:
            weight = rng.uniform(0.3, 2.0, size=n)
        size = 0.25 * weight.sum()
        best, labels = reference.brute_force(x, k, size, sample_weight=weight)
        if not math.isfinite(best):
            continue
        given = solution_of(x, labels, k, jc.CMLE(), sample_weight=weight, min_variance=1e-6)
        guarantee = certify(x, given, min_size=size, sample_weight=weight, time_limit=3.0)
        assert guarantee.lower_bound <= best + 1e-9 * (1 + abs(best))
        # Points of weight 0 are not there.
        more = np.concatenate([x, np.full((2, d), np.nan)])
        given = dataclasses.replace(given, labels=jnp.pad(given.labels, (0, 2)))
        heavy = np.append(weight, [0.0, 0.0])
        again = certify(more, given, min_size=size, sample_weight=heavy, time_limit=3.0)
        assert abs(again.lower_bound - guarantee.lower_bound) < 0.1 * weight.sum() or (
            again.interrupted or guarantee.interrupted
        )
        assert again.lower_bound <= best + 1e-9 * (1 + abs(best))


def worst_case(space, unit):
    """Return the geometry with every gain lowered, and every sum, as far as rounding can."""
    task = space.task
    n, d = task.x.shape
    prices = np.asarray(space.duals)[:n]
    ends = np.log(np.array([float(task.pricing.low), float(task.pricing.high)]) / (2 * np.pi))
    thresholds = np.abs(np.asarray(task.pricing.thresholds)).max()
    logs = float(task.pricing.log_factor) * np.abs(ends).max()
    largest = np.abs(prices).max() + logs + thresholds + 2
    space.duals = task.padded(prices - (d + 10) * unit * largest)
    corner, cell = space.corner_profits, space.cell_profits
    lost = n * unit * task.total * largest
    space.corner_profits = lambda *arguments: corner(*arguments) - lost
    space.cell_profits = lambda *arguments: cell(*arguments) - lost
    return space


@pytest.mark.parametrize("margin", [True, False])
def test_the_margin_covers_the_worst_that_rounding_can_do(margin, monkeypatch):
    """With roundings a hundred million times as large; without a margin they show.

    Nothing is known of profits beforehand: that would hide it.
    """
    unit = 2.0**-24
    space, price = prove.WholeSpace, prove.price

    def price_from_nothing(geometry, known, allowed, stops, give_up):
        geometry.climb = lambda *_: None
        return price(geometry, -1e300, allowed, stops, give_up)

    monkeypatch.setattr(prove, "WholeSpace", lambda *given: worst_case(space(*given), unit))
    monkeypatch.setattr(prove, "price", price_from_nothing)
    monkeypatch.setattr(rounding, "UNIT", unit)
    if not margin:
        monkeypatch.setattr(prove, "profit_margin", lambda *_: 0.0)
        monkeypatch.setattr(prove, "data_margin", lambda *_: 0.0)
    counted = above = 0
    for rng, _, k, size, name, kind in cases(7, 60):
        if kind == "duplicates" or name == "wkm":
            continue
        x = instance(rng, 9, 1, kind)
        best, labels = reference.brute_force(x, k, size, problem=name)
        if not math.isfinite(best):
            continue
        given = solution_of(x, labels, k, PROBLEMS[name], min_variance=1e-6)
        guarantee = certify(x, given, min_size=size, problem=PROBLEMS[name], tolerance=1e-6)
        counted += guarantee.method == "cells"
        above += guarantee.method == "cells" and guarantee.lower_bound > best + 1e-8
    assert counted > 5
    assert (above == 0) if margin else (above > 2)


def test_centring_loses_no_more_than_its_margin():
    """The same whole numbers, near 0 and far from it: the optimum is known exactly."""
    rng = np.random.default_rng(3)
    for _ in range(10):
        x = rng.integers(-9, 10, size=(8, 2)).astype(float)
        best, labels = reference.brute_force(x, 2, 3)
        if not math.isfinite(best):
            continue
        for offset, scale in ((0.0, 1.0), (2.0**45, 1.0), (-(2.0**30), 2.0**-40), (0, 2.0**60)):
            moved = scale * (x + offset)
            shift = 2 * 8 * math.log(scale)
            with jax.enable_x64(True):
                given = solution_of(moved, labels, 2, jc.CMLE())
                guarantee = certify(moved, given, min_size=3, tolerance=1e-3)
            assert guarantee.lower_bound <= best + shift + 1e-12 * abs(shift)
            assert guarantee.lower_bound >= best + shift - 1.0


@pytest.mark.parametrize("name", PROBLEMS)
def test_ordinary_clusters_are_proved_optimal(name):
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=(60, 2)), rng.normal(size=(60, 2)) + 7])
    found = jc.fit(x + 1e4, 2, problem=PROBLEMS[name], min_size=30)
    guarantee = jc.certify((x + 1e4).astype(np.float32), found, problem=PROBLEMS[name])
    assert guarantee.min_size == 30
    assert guarantee.reached
    assert not guarantee.interrupted
    assert guarantee.gap <= guarantee.tolerance == 0.01
    assert guarantee.better is None
    assert guarantee.method == "cells"
    gap = (float(found.cost) - guarantee.lower_bound) / 120
    assert abs(gap - guarantee.gap) < 1e-5


@pytest.mark.parametrize(("d", "k", "distance"), [(5, 2, 6.0), (12, 3, 14.0), (12, 3, 10.0)])
def test_clusters_that_are_apart_are_proved_optimal_in_many_dimensions(d, k, distance):
    rng = np.random.default_rng(d)
    labels = np.arange(300) % k
    x = distance * np.eye(d)[labels] / math.sqrt(2) + rng.normal(size=(300, d))
    guarantee = jc.certify(x, solution_of(x, labels, k, jc.CMLE()), tolerance=0.05)
    assert guarantee.min_size == math.ceil(300 / (2 * k))
    assert guarantee.gap < 0.3
    assert guarantee.method in ("cells", "span", "triangle")


def test_what_cannot_be_proved_is_said_soon():
    """One cloud in many dimensions, without a time limit."""
    x = np.random.default_rng(0).normal(size=(200, 9))
    found = jc.fit(x, 3, effort="quick")
    guarantee = jc.certify(x, found, tolerance=1e-3)
    assert not guarantee.reached
    assert 0.001 < guarantee.gap < 3
    assert guarantee.lower_bound <= float(found.cost)


def test_a_better_solution_is_returned():
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.normal(size=(50, 2)), rng.normal(size=(50, 2)) + 9])
    wrong = (np.arange(100) % 50 >= 25).astype(np.int32)
    given = solution_of(x, wrong, 2, jc.CMLE())
    guarantee = jc.certify(x, given, balance=4)
    assert guarantee.gap > 0.5
    assert not guarantee.reached
    better = guarantee.better
    assert float(better.cost) < float(given.cost) - 50
    assert better.guarantee.reached
    assert better.guarantee.better is None
    assert better.labels.dtype == jnp.int32
    assert better.mixture.means.dtype == given.mixture.means.dtype


def test_fit_certifies():
    rng = np.random.default_rng(4)
    x = np.concatenate([rng.normal(size=(40, 3)), rng.normal(size=(60, 3)) + 6])
    weight = np.where(np.arange(100) % 10 == 0, 0.0, 1.0)
    found = jc.fit(x, 2, sample_weight=weight, certify=True)
    assert found.guarantee.kind == "certificate"
    assert found.guarantee.method == "cells"
    assert found.guarantee.reached
    assert found.labels.shape == (100,)
    quick = jc.fit(x, 2, sample_weight=weight)
    assert quick.guarantee.method == "pairs"
    assert quick.guarantee.lower_bound < found.guarantee.lower_bound
    none = jc.fit(x, 2, certify=True, min_size=0)
    assert none.guarantee.kind == "none"
    assert "min_size" in none.guarantee.reason
    hurried = jc.fit(x, 2, certify=True, time_limit=0.0)
    assert hurried.guarantee.kind == "certificate"


def test_one_cluster_and_one_point_per_cluster():
    x = np.random.default_rng(0).normal(size=(6, 2))
    one = jc.certify(x, solution_of(x, np.zeros(6, int), 1, jc.CMLE()))
    assert one.reached
    assert one.gap < 1e-5
    wkm = jc.WKM(beta=1.0)
    each = jc.certify(x, solution_of(x, np.arange(6), 6, wkm), problem=wkm, min_size=1)
    assert each.reached
    assert abs(each.lower_bound - 6 * math.log(6)) < 0.1


def test_an_empty_cluster_is_no_obstacle():
    x = np.random.default_rng(0).normal(size=(30, 2)) + 9 * (np.arange(30) % 3)[:, None]
    given = solution_of(x, np.arange(30) % 2, 3, jc.CMLE(), min_variance=1e-3)
    guarantee = jc.certify(x, given, balance=6)
    assert guarantee.gap == math.inf
    assert guarantee.better is not None
    assert guarantee.better.guarantee.reached


def test_the_better_solution_is_what_its_guarantee_is_about():
    """Far from 0, where float32 tells few places apart."""
    rng = np.random.default_rng(0)
    x = 1e6 + np.where(np.arange(40) < 20, 0.0, 0.2)[:, None] + 0.02 * rng.normal(size=(40, 1))
    guarantee = jc.certify(x, solution_of(x, np.arange(40) % 2, 2, jc.UCMLE()), min_size=5)
    better = guarantee.better
    cost = reference.partition_cost(x, np.asarray(better.labels), 2)
    assert better.guarantee.gap >= (cost - guarantee.lower_bound) / 40 - 1e-9


@pytest.mark.parametrize("most_sorted", [4096, 4])
@pytest.mark.parametrize("width", [0.0, 1e-9, 1e-6, 1e-2])
def test_narrow_clumps_far_apart(most_sorted, width, monkeypatch):
    """Sums of distances that are next to nothing, and must not be rounded up."""

    def below(cost):
        return cost + 1e-9 * abs(cost) if math.isfinite(cost) else cost

    monkeypatch.setattr(task_module, "MOST_SORTED", most_sorted)
    rng = np.random.default_rng(3)
    x = np.concatenate([width * rng.normal(size=(30, 2)), rng.normal(size=(30, 2)) + 9])
    labels = np.repeat([0, 1], 30)
    for weight in (None, np.full(60, 0.1)):
        size = 30 if weight is None else 3.0
        given = solution_of(x, labels, 2, jc.CMLE(), min_variance=1e-30, sample_weight=weight)
        best = reference.partition_cost(x, labels, 2, sample_weight=weight)
        guarantee = jc.certify(x, given, min_size=size, sample_weight=weight, time_limit=5.0)
        assert guarantee.lower_bound <= below(best)
        if not width:
            assert "coincide" in guarantee.reason
    for weight in (np.full(20, 0.1), np.full(20, 0.05)):
        few, size = np.concatenate([x[:10], x[30:40]]), 10 * weight[0]
        best = reference.partition_cost(few, np.repeat([0, 1], 10), 2, sample_weight=weight)
        with jax.enable_x64(True):
            bound = jc.lower_bound(few, 2, min_size=size, sample_weight=weight)
        assert bound <= below(best)


def test_clusters_without_spread_have_a_reason():
    x = np.repeat([[0.0], [1.0], [5.0]], 4, axis=0)
    given = solution_of(x, np.repeat([0, 1, 2], 4), 3, jc.CMLE(), min_variance=1e-4)
    guarantee = jc.certify(x, given, min_size=3)
    assert guarantee.lower_bound == -math.inf
    assert guarantee.gap == math.inf
    assert not guarantee.reached
    assert "min_variance" in guarantee.reason
    floored = jc.certify(x, given, min_size=3, min_variance=1e-4)
    assert floored.reached


def test_a_solution_with_small_clusters_has_no_gap():
    x = np.random.default_rng(0).normal(size=(20, 2))
    labels = np.array([0] + [1] * 19)
    given = solution_of(x, labels, 2, jc.CMLE(), min_variance=1e-3)
    guarantee = jc.certify(x, given, min_size=5, time_limit=5.0)
    assert guarantee.gap == math.inf
    assert math.isfinite(guarantee.lower_bound)


def test_progress_and_ctrl_c(monkeypatch):
    """Workers of pytest need not be in the main thread, where Ctrl-C arrives: it is played."""
    x = np.random.default_rng(0).normal(size=(300, 3))
    found = jc.fit(x, 4, effort="quick")
    reports, keyboards = [], []

    class Keyboard:
        pressed = False

        def __enter__(self):
            keyboards.append(self)
            return self

        def __exit__(self, *_):
            pass

    def press(report):
        reports.append(report)
        keyboards[0].pressed = len(reports) >= 5

    monkeypatch.setattr(certify_module, "CtrlC", Keyboard)
    guarantee = jc.certify(x, found, tolerance=1e-4, progress=press)
    assert guarantee.interrupted
    assert not guarantee.reached
    assert math.isfinite(guarantee.lower_bound)
    gaps = [report.gap for report in reports]
    assert gaps == sorted(gaps, reverse=True)
    assert len(reports) < 20


def test_bad_input_is_told():
    x = np.random.default_rng(0).normal(size=(20, 2))
    given = solution_of(x, np.arange(20) % 2, 2, jc.CMLE())
    with pytest.raises(TypeError, match="Solution"):
        jc.certify(x, given.mixture)
    with pytest.raises(ValueError, match="not both"):
        jc.certify(x, given, balance=4, min_size=3)
    with pytest.raises(ValueError, match="tolerance must be positive"):
        jc.certify(x, given, tolerance=0)
    with pytest.raises(ValueError, match="time_limit"):
        jc.certify(x, given, time_limit=-1)
    with pytest.raises(ValueError, match="need"):
        jc.certify(x, given, min_size=11)
    with pytest.raises(ValueError, match="labels"):
        jc.certify(x[:10], given)
    with pytest.raises(ValueError, match="NaN"):
        jc.certify(np.where(x > 2, np.nan, x) * np.nan, given)
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda x: jc.certify(x, given).gap)(x)
    stack = jax.tree.map(
        lambda leaf: jnp.stack([leaf, leaf]),
        dataclasses.replace(given, guarantee=jc.Guarantee(), consistent=jnp.array(True)),
    )
    with pytest.raises(ValueError, match="stack"):
        jc.certify(x, stack)


def kernels(n=64):
    """Return the programs that do the work, with arguments for so many points."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 2))
    task = make_task(x, None, 3, np.arange(64) % 3, 10.0, jc.CMLE(), 1e-2)
    prices = task.padded(np.zeros(64))
    many = np.zeros((1024, 2)), np.ones(1024)
    span = CentreSpan(task)._arrays()
    found = {
        "vertices": (vertex_profits, (task.pricing, prices, *many)),
        "cells": (cell_profits, (task.pricing, prices, many[0], many[0], many[1], many[1])),
        "sets": (best_sets, (task.pricing, prices, many[0][:63], many[1][:63])),
        "span": (span_module._corner_profits, (*span, np.zeros((1024, 3)), many[1])),
    }
    length = span[-1].shape[1]
    assert length not in (64, 1024)
    longer = {64: n, length: n * length // 64}

    def resized(leaf):
        shape = tuple(longer.get(axis, axis) for axis in leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return {
        name: (function, jax.tree.map(resized, arguments))
        for name, (function, arguments) in found.items()
    }


def test_memory_stays_within_the_budget():
    """At 50,000 points, with tiles in place of all corners times all points."""
    with jax.enable_x64(True):
        for name, (function, arguments) in kernels(50_000).items():
            compiled = function.lower(*arguments).compile()
            temporary = compiled.memory_analysis().temp_size_in_bytes
            assert temporary < 2**27, (name, temporary)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_programs_lower_for_accelerators(platform):
    with jax.enable_x64(True):
        for function, arguments in kernels().values():
            exported = jax.export.export(function, platforms=[platform])(*arguments)
            assert exported.platforms == (platform,)
