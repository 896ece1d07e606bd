"""The benchmarks measure what they say, judge everyone alike, and say who is absent."""

import json
import math
import os
import time

import jax
import numpy as np
import pytest
import reference

import jaxcmle as jc
from benchmarks import brute, harness, judging, peers, quality
from benchmarks.__main__ import main
from benchmarks.data import mixture_data, slow_data
from benchmarks.suites import PARTS, SUITES, file_name
from benchmarks.tables import Table, compare, span

PRECISIONS = ("float32",)


def test_methods_take_turns_after_a_call_of_each(monkeypatch):
    monkeypatch.setattr(harness, "SETTLE", 0.0)
    calls = []

    def slow_at_first():
        calls.append("a")
        time.sleep(0.2 if len(calls) == 1 else 0.0)

    times = harness.interleave({"a": slow_at_first, "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert len(times["a"].rounds) == 3
    summary = times["a"].summary()
    assert summary["compile"] > 0.1 > summary["highest"]
    assert summary["lowest"] <= summary["median"] <= summary["highest"]


def test_a_ratio_is_their_time_over_ours():
    times = {name: harness.Times() for name in ("jaxcmle", "other")}
    times["jaxcmle"].rounds, times["other"].rounds = [1.0, 2.0, 4.0], [3.0, 3.0, 20.0]
    found = harness.ratios(times)
    assert found == {"other": {"ratio": 1.5, "lowest": 1.5, "highest": 5.0}}


def test_what_is_timed_has_arrived(monkeypatch):
    monkeypatch.setattr(harness, "SETTLE", 0.0)
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda value: waited.append(value) or value)
    harness.timed(lambda: 7)
    assert waited == [7]


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_slope_is_the_power(power):
    sizes = [10, 100, 1000]
    assert harness.slope(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power)


def test_the_limits_of_the_machine_are_measured(monkeypatch):
    monkeypatch.setattr(harness, "SETTLE", 0.0)
    limits = harness.machine_limits()
    assert all(1e8 < value < 1e15 for value in limits.values())


def read_variable(name):
    return os.environ.get(name), os.getpid()


def test_a_process_of_its_own_has_its_own_environment():
    value, process = harness.in_own_process(
        read_variable, "JAXCMLE_TEST", environment={"JAXCMLE_TEST": "there"}
    )
    assert value == "there"
    assert process != os.getpid()
    assert "JAXCMLE_TEST" not in os.environ


def test_memory_is_what_a_call_takes():
    assert harness.in_own_process(fill, 200, environment=harness.ONE_ARENA) == pytest.approx(
        200e6, rel=0.1
    )


def fill(megabytes):
    return harness.grown_bytes(lambda: np.ones(megabytes * 10**6, np.int8).sum())[0]


def test_what_json_has_no_number_for_is_none():
    found = {"a": np.float32(np.inf), "b": [math.nan, np.int64(3)], "c": (True, 1 / 3)}
    text = harness.as_json(found)
    assert json.loads(text) == {"a": None, "b": [None, 3], "c": [True, 0.33333333]}


def test_the_cost_is_that_of_the_library_and_of_the_oracle():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n, d, k = int(rng.integers(12, 60)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
        x = rng.normal(size=(n, d)) * 10.0 ** rng.integers(-2, 3)
        labels = rng.permutation(np.arange(n) % k)
        cost = judging.partition_cost(x, labels, k, 2)
        assert cost == pytest.approx(reference.partition_cost(x, labels, k), rel=1e-12)
        assert cost == pytest.approx(float(jc.partition_cost(x, labels, k)), rel=1e-4, abs=1e-2)


def test_a_cluster_that_is_too_small_or_has_no_spread_costs_infinity():
    x = np.array([[0.0], [0.0], [1.0], [2.0], [9.0]])
    assert judging.partition_cost(x, np.array([0, 0, 1, 1, 1]), 2, 2) == math.inf
    assert judging.partition_cost(x, np.array([0, 0, 0, 0, 1]), 2, 2) == math.inf
    assert math.isfinite(judging.partition_cost(x, np.array([0, 0, 0, 1, 1]), 2, 2))
    assert judging.is_reached(1.0, math.inf)
    assert not judging.is_reached(math.inf, math.inf)
    assert not judging.is_reached(1.01, 1.0)


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_peers_find_what_is_plain_to_see(peer):
    if peer.missing():
        assert peer.name in peers.absent()
        return
    rng = np.random.default_rng(0)
    truth = np.arange(90) % 3
    x = (20 * truth[:, None] + rng.normal(size=(90, 2))).astype(np.float32)
    with peers.quiet(), jax.numpy_dtype_promotion("standard"):
        labels = np.asarray(peer.labels(x, 3, 0, 4))
    assert labels.shape == (90,)
    cost = judging.partition_cost(x, labels, 3, 2)
    assert cost == pytest.approx(judging.partition_cost(x, truth, 3, 2))


def test_peers_that_are_absent_say_why(monkeypatch):
    assert {peer.name for peer in peers.present()} | set(peers.absent()) == {
        *(peer.name for peer in peers.PEERS),
        *peers.IMPOSSIBLE,
    }
    assert all(len(why) > 10 for why in peers.absent().values())
    assert "bench" in peers._lacks("no_such_module")
    monkeypatch.setenv("PATH", "")
    assert "Rscript" in peers._mclust_missing()


def test_wins_are_counted_apart_from_clusters_that_are_too_small():
    found = {
        "jaxcmle": {"raw": [1.0, 2.0, 3.0, 4.0, None]},
        "peer": {"raw": [2.0, 2.0, 1.0, None, 5.0]},
    }
    counts = quality.tally([{"n": 10, "found": found}], "peer", "raw")
    assert counts[:4] == (1, 1, 2, 1)
    assert counts.gain == pytest.approx((0.1 + 0.0 - 0.2) / 3)


def test_brute_force_knows_the_optimum():
    for seed in range(5):
        instance = brute.draw(seed)
        if instance.problem != "CMLE":
            continue
        costs = brute.subset_costs(instance.x, "CMLE", instance.min_size)
        best = costs[brute.partitions(len(instance.x), instance.k)].sum(axis=1).min()
        rng = np.random.default_rng(seed)
        for _ in range(50):
            labels = rng.permutation(np.arange(len(instance.x)) % instance.k)
            assert judging.partition_cost(instance.x, labels, instance.k, 1) >= best - 1e-9


def test_data_is_what_it_says():
    x, labels = mixture_data(500, 3, 4, seed=1)
    assert x.shape == (500, 3)
    assert x.dtype == np.float32
    assert np.bincount(labels).min() >= 20
    x, start = slow_data(400, 2, 3)
    assert (x.shape, start.shape) == ((400, 2), (3, 2))


def test_runs_are_compared_number_by_number():
    old = Table("", ("what", "ratio"), (("a", "2.00 (1 to 3)"), ("b", "5"), ("gone", "1")))
    new = Table("", ("what", "ratio"), (("a", "3.00 (1 to 4)"), ("b", "5"), ("new", "1")))
    words = compare(old, new)
    assert "(×1.50)" in words
    assert "| b | 5 |" in words
    assert "gone (gone)" in words
    assert "new (new)" in words
    assert span([0.123, 0.5], 2, " s") == "0.12 to 0.5 s"


def test_the_suites_are_those_of_the_readme():
    names = ["cem", "scoring", "pruning", "quality", "many", "guarantee", "scaling"]
    assert list(SUITES) == names


def test_a_run_prints_saves_and_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "SETTLE", 0.0)
    arguments = ["--quick", "--only", "pruning.selection", "--save", str(tmp_path)]
    main(arguments)
    path = tmp_path / file_name("pruning.selection")
    found = json.loads(path.read_text(encoding="utf-8"))
    first = capsys.readouterr()
    assert PARTS["pruning.selection"].table(found).markdown() in first.out
    assert "hgmeans" in first.err
    # Without --only, what is compared is what runs.
    main(["--quick", "--compare", str(path)])
    second = capsys.readouterr().out
    assert second.count("\n## ") == 1
    assert "pruning.selection: before → now" in second


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "nothing"], "there is no benchmark nothing"),
        (["--compare", "nowhere.json"], "nowhere.json is not a file of results"),
    ],
)
def test_what_cannot_be_run_is_said(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=words):
        main(arguments)
