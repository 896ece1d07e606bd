"""Checkpoints: what is killed goes on, ends with the same bits, and harms no other file."""

import dataclasses
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_child
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_child import CALLS, bits, points

import jaxcmle as jc
from jaxcmle.candidates import leaves, scoring
from jaxcmle.solve import batches, checkpoint, claims, sources, walks
from jaxcmle.solve.checkpoint import Checkpoint, digest

PRECISIONS = ("float32",)
pytestmark = pytest.mark.usefixtures("shared_programs")
QUICK = jc.Effort(rounds=8, patience=3, restarts=2, population=4, starts=4, sample=64)
SMALL = points(12, 1, 0)
# Two clusters that are easy to tell apart: a proof is short.
PAIR = points(64, 2, 0) + 20.0 * (np.arange(64) % 2)[:, None].astype(np.float32)
# One of every kind, small, and with as few programs as possible.
KINDS = {
    "fit": lambda **kw: jc.fit(points(64, 2, 0), 2, effort=QUICK, **kw),
    "known": lambda **kw: jc.fit(
        points(64, 2, 0),
        2,
        effort=QUICK,
        init=np.arange(64) % 2,
        sample_weight=(np.arange(64) % 31 > 0) * 2.0,
        **kw,
    ),
    "sample": lambda **kw: jc.fit(points(1500, 2, 1), 2, effort=QUICK, **kw),
    "proof": lambda **kw: jc.fit(PAIR, 2, effort=QUICK, certify=True, **kw),
    "one cluster": lambda **kw: jc.fit(points(64, 2, 2), 1, effort=QUICK, **kw),
    "certificate": lambda **kw: jc.approximate(SMALL, 2, eta=0.02, **kw),
    "repetitions": lambda **kw: jc.approximate(SMALL, 2, eta=0.5, certificate=False, **kw),
    "subsets": lambda **kw: jc.approximate(SMALL, 2, eta=0.5, delta=0, certificate=False, **kw),
    "paper": lambda **kw: jc.approximate(
        SMALL, 2, algorithm="paper", guarantee=False, max_candidates=1e5, **kw
    ),
    "walks": lambda **kw: jc.approximate(
        SMALL, 2, algorithm="abs", eta=1.0, balance=math.inf, certificate=False, **kw
    ),
    "list": lambda **kw: jc.fit_many(
        [points(n, 2, n) for n in range(8, 16)], 2, effort=QUICK, **kw
    ),
    "stack": lambda **kw: jc.fit_many(
        np.stack([points(16, 2, i) for i in range(4)]), 2, effort=QUICK, **kw
    ),
    "large": lambda **kw: jc.fit_many(
        [points(1600, 2, 0), *points(32, 2, 1).reshape(2, 16, 2), points(1500, 2, 1)],
        2,
        effort=QUICK,
        **kw,
    ),
}
SOURCES = ("repetitions", "subsets", "paper", "walks")
INTERRUPTED = int(jc.Status.INTERRUPTED)


class KilledError(Exception):
    """Stands for the end of the process."""


def one_each(run, remaining, first, most, mesh=None):
    """Go on by the smallest steps that there are."""
    del most
    while remaining > 0:
        count = min(first, remaining)
        run(count)
        remaining -= count
        yield


def at_once(run, remaining, first, most, mesh=None):
    del first, most
    run(remaining)
    yield


def unevenly(run, remaining, first, most, mesh=None):
    del first
    count = 1
    while remaining > 0:
        count = min(2 * count % 11 + 1, remaining, most)
        run(count)
        remaining -= count
        yield


def set_pace(monkeypatch, pace):
    monkeypatch.setattr(sources, "paced", pace)
    monkeypatch.setattr(walks, "paced", pace)


@pytest.fixture
def many_steps(monkeypatch):
    """Save at every opportunity, and make many of them."""
    for module, name, value in checkpoint_child.SETTINGS:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(batches, "POINTS", {"cpu": 32})
    monkeypatch.setattr(scoring, "CPU_TILE", 16)
    monkeypatch.setattr(scoring, "CHUNK", 16)
    monkeypatch.setattr(leaves, "MOST_LEAVES", 64)
    set_pace(monkeypatch, one_each)


def dies_at(monkeypatch, number):
    """Raise right after the save of this number; return the list of saves."""
    write, saves = Checkpoint._write, []

    def written(self):
        write(self)
        saves.append(Path(self._path).stat().st_size)
        if len(saves) == number:
            raise KilledError

    monkeypatch.setattr(Checkpoint, "_write", written)
    return saves


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_resumed_ends_as_if_nothing_had_happened(kind, tmp_path, monkeypatch, many_steps):
    call = KINDS[kind]
    expected = bits(call())
    with monkeypatch.context() as patch:
        saves = dies_at(patch, 0)
        assert bits(call(checkpoint=tmp_path / "whole")) == expected
    assert len(saves) >= (5 if kind in SOURCES or kind in ("fit", "sample", "list") else 2)
    for number in sorted({1, 2, len(saves) // 2, len(saves) - 1, len(saves)}):
        path = tmp_path / f"{number}.ckpt"
        with monkeypatch.context() as patch:
            dies_at(patch, number)
            with pytest.raises(KilledError):
                call(checkpoint=path)
        with monkeypatch.context() as patch:
            rest = dies_at(patch, 0)
            assert bits(call(checkpoint=path)) == expected
        # It went on, and did not begin anew.
        assert len(rest) <= len(saves) - number + 2
    assert all(not name.startswith(".") for name in os.listdir(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_again_returns_the_answer(kind, tmp_path, monkeypatch, many_steps):
    call = KINDS[kind]
    first = call(checkpoint=tmp_path / "a")
    nothing = []
    for module, name in (
        ("jaxcmle.solve.searching", "_search"),
        ("jaxcmle.solve.many", "_solve"),
        ("jaxcmle.solve.approximate", "_enumerate"),
        ("jaxcmle.solve.claims", "certify_while"),
    ):
        monkeypatch.setattr(sys.modules[module], name, nothing)
    again = call(checkpoint=tmp_path / "a")
    assert bits(again) == bits(first)
    kinds = [type(leaf) for leaf in jax.tree.leaves(first)]
    assert [type(leaf) for leaf in jax.tree.leaves(again)] == kinds


@pytest.mark.parametrize("kind", SOURCES)
def test_the_pace_does_not_show(kind, monkeypatch, many_steps):
    call = KINDS[kind]
    answers = []
    for pace in (one_each, at_once, unevenly):
        set_pace(monkeypatch, pace)
        answers.append(bits(call()))
    assert answers[0] == answers[1] == answers[2]


def best_of(monkeypatch, call):
    """Return all of the best candidates, before any polishing, and the last step."""
    seen = []
    save = Checkpoint.save_if_due

    def kept(self, **entries):
        if "best" in entries:
            seen.append(bits(entries["best"]))
        save(self, **entries)

    monkeypatch.setattr(Checkpoint, "save_if_due", kept)
    call()
    return seen[-1]


@pytest.mark.parametrize("kind", SOURCES)
def test_the_pace_does_not_show_in_any_candidate(kind, monkeypatch, many_steps):
    found = []
    for pace in (one_each, at_once, unevenly):
        set_pace(monkeypatch, pace)
        found.append(best_of(monkeypatch, KINDS[kind]))
    assert found[0] == found[1] == found[2]


def test_walks_go_on_in_batches_of_another_form(tmp_path, monkeypatch, many_steps):
    call = KINDS["walks"]
    expected = bits(call())
    for number in (2, 3, 4):
        path = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(leaves, "MOST_LEAVES", 16)
            dies_at(patch, number)
            with pytest.raises(KilledError):
                call(checkpoint=path)
        assert bits(call(checkpoint=path)) == expected


def test_the_incumbent_is_kept_for_the_enumeration(tmp_path, monkeypatch, many_steps):
    monkeypatch.setattr(claims.Answers, "prove", lambda self, solution: False)

    def call(**kw):
        return jc.approximate(SMALL, 2, eta=0.5, **kw)

    expected = bits(call())
    with monkeypatch.context() as patch:
        saves = dies_at(patch, 0)
        call(checkpoint=tmp_path / "whole")
    for number in range(2, len(saves) + 1):
        path = tmp_path / str(number)
        with monkeypatch.context() as patch:
            dies_at(patch, number)
            with pytest.raises(KilledError):
                call(checkpoint=path)
        with monkeypatch.context() as patch:
            if number > 2:
                patch.setattr(claims, "certify_while", None)
            patch.setattr(claims.Answers, "local", None)
            assert bits(call(checkpoint=path)) == expected


def test_too_many_candidates_are_too_many_again(tmp_path, monkeypatch):
    monkeypatch.setattr(claims.Answers, "prove", lambda self, solution: False)
    errors = []
    for _ in range(2):
        with pytest.raises(jc.TooManyCandidatesError) as caught:
            jc.approximate(SMALL, 2, eta=0.5, max_candidates=5, checkpoint=tmp_path / "a")
        errors.append(bits(caught.value.solution))
        monkeypatch.setattr(claims.Answers, "local", None)
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    "kind",
    ["fit", "sample", "proof", "certificate", "repetitions", "subsets", "walks", "list"],
)
def test_a_time_limit_is_where_the_next_call_goes_on(kind, tmp_path, many_steps):
    call = KINDS[kind]
    expected = bits(call())
    path = tmp_path / "a"
    first = call(checkpoint=path, time_limit=1e-9)
    sizes = [path.stat().st_size]
    status = first[-1].status if kind == "list" else first.status
    assert int(status) in (INTERRUPTED, int(jc.Status.INADMISSIBLE))
    for _ in range(2):
        call(checkpoint=path, time_limit=1e-9)
        sizes.append(path.stat().st_size)
    assert bits(call(checkpoint=path)) == expected


@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_saves_at_once(tmp_path, monkeypatch, many_steps):
    monkeypatch.setattr(checkpoint, "EVERY", 1e9)
    expected = {kind: bits(KINDS[kind]()) for kind in ("fit", "repetitions", "list")}

    for kind, bits_expected in expected.items():
        path, pressed = tmp_path / kind, []

        def press(report, pressed=pressed):
            if report.done >= 2 and not pressed:
                pressed.append(report)
                os.kill(os.getpid(), signal.SIGINT)

        before = bits(KINDS[kind](checkpoint=path, progress=press))
        assert before != bits_expected
        seen = []
        assert bits(KINDS[kind](checkpoint=path, progress=seen.append)) == bits_expected
        assert seen[0].done >= pressed[0].done


def test_saves_are_not_too_frequent(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    saved = Checkpoint(tmp_path / "a", {})
    written = []
    monkeypatch.setattr(Checkpoint, "_write", lambda self: written.append(now[0]))
    saved.save_if_due(i=1)
    assert written == []
    now[0] = checkpoint.EVERY
    saved.save_if_due(i=2)
    assert written == [checkpoint.EVERY]
    monkeypatch.undo()
    # A save that takes a second is followed by ten without one.
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    replace = os.replace

    def slow(*paths):
        now[0] += 1.0
        replace(*paths)

    monkeypatch.setattr(os, "replace", slow)
    saved.save(i=3)
    assert saved._due == now[0] + 10.0


CHANGED = {
    "x": {"x": points(40, 2, 1)},
    "n_clusters": {"n_clusters": 3},
    "key": {"key": jax.random.key},
    "problem": {"problem": jc.WKM(beta=0.5)},
    "sample_weight": {"sample_weight": np.arange(40) + 1.0},
    "effort": {"effort": dataclasses.replace(QUICK, rounds=9)},
    "init": {"init": np.arange(40) % 2},
    "min_size": {"min_size": 3},
    "min_variance": {"min_variance": 0.1},
    "certify": {"certify": True},
}


@pytest.mark.parametrize("part", CHANGED)
def test_the_checkpoint_of_another_call_is_refused(part, tmp_path):
    path = tmp_path / "a"
    options = {"x": points(40, 2, 0), "n_clusters": 2, "effort": QUICK}
    jc.fit(**options, checkpoint=path)
    before = path.read_bytes()
    changed = CHANGED[part]
    if part == "key":
        changed = {"key": jax.random.key(1)}
    with pytest.raises(ValueError, match=f"another call:.*{part} .*delete it") as caught:
        jc.fit(**{**options, **changed}, checkpoint=path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    # These are no part of it.
    jc.fit(**options, checkpoint=path, progress=False, time_limit=100.0)


def test_other_functions_precisions_devices_and_versions_are_refused(tmp_path, monkeypatch):
    path, x = tmp_path / "a", points(20, 1, 0)
    jc.fit(x, 2, effort=QUICK, checkpoint=path)
    with pytest.raises(ValueError, match="function was fit and is approximate"):
        jc.approximate(x, 2, eta=5.0, checkpoint=path)
    with pytest.raises(ValueError, match="function was fit and is fit_many"):
        jc.fit_many([x], 2, checkpoint=path)
    with jax.enable_x64(True), pytest.raises(ValueError, match="dtype was float32 and is float64"):
        jc.fit(x.astype(np.float64), 2, effort=QUICK, checkpoint=path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "devices_of", lambda array: "8 x TPU v9")
        with pytest.raises(ValueError, match="devices was 1 x cpu and is 8 x TPU v9"):
            jc.fit(x, 2, effort=QUICK, checkpoint=path)
    with monkeypatch.context() as patch:
        patch.setattr(jc, "__version__", "99")
        with pytest.raises(ValueError, match=r"version was jaxcmle .* and is jaxcmle 99"):
            jc.fit(x, 2, effort=QUICK, checkpoint=path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 2)
        with pytest.raises(ValueError, match="has version 1 of the format"):
            jc.fit(x, 2, effort=QUICK, checkpoint=path)


def test_options_of_approximate_and_fit_many_are_part_of_it(tmp_path):
    path = tmp_path / "a"
    KINDS["certificate"](checkpoint=path)
    with pytest.raises(ValueError, match="target was"):
        jc.approximate(SMALL, 2, eta=0.03, checkpoint=path)
    with pytest.raises(ValueError, match="max_candidates was"):
        jc.approximate(SMALL, 2, eta=0.02, max_candidates=10, checkpoint=path)
    path, xs = tmp_path / "b", [points(12, 2, 0), points(14, 2, 1)]
    jc.fit_many(xs, 2, effort=QUICK, checkpoint=path)
    for options, part in (
        ({"xs": xs[::-1]}, "x"),
        ({"xs": xs[:1]}, "shape"),
        ({"n_clusters": [2, 3]}, "n_clusters"),
        ({"min_size": 3}, "min_size"),
        ({"certificate": False}, "certificate"),
        ({"sample_weight": [None, np.full(14, 2.0)]}, "sample_weight"),
    ):
        given = {"xs": xs, "n_clusters": 2, "effort": QUICK, **options}
        with pytest.raises(ValueError, match=f"another call:.*{part} "):
            jc.fit_many(**given, checkpoint=path)


@pytest.mark.parametrize("kind", ["fit", "repetitions", "list"])
def test_files_of_others_are_refused_and_left_alone(kind, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    jc.save(tmp_path / "solution.npz", jc.fit(SMALL, 2, effort=QUICK))
    KINDS[kind](checkpoint=tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    foreign = [b"", b"hello", b"PK\x03\x04 and no more", good[: len(good) // 2], good[:-1]]
    middle = bytearray(good)
    middle[len(good) // 3] ^= 1
    foreign += [(tmp_path / name).read_bytes() for name in ("other.npz", "solution.npz")]
    for content in foreign:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="left as it is: delete it to begin anew"):
            KINDS[kind](checkpoint=path)
        assert path.read_bytes() == content


def test_a_full_disk_does_not_cost_the_search(tmp_path, monkeypatch, many_steps):
    path, call = tmp_path / "a", KINDS["fit"]
    expected = bits(call())
    replace, calls = os.replace, []

    def full(*paths):
        calls.append(paths)
        if len(calls) in (3, 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(*paths)

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="a: the checkpoint could not be written .No space"):
        assert bits(call(checkpoint=path)) == expected
    # There was room again later on.
    assert len(calls) > 4
    assert bits(call(checkpoint=path)) == expected
    assert os.listdir(tmp_path) == ["a"]
    calls[:] = [None, None]
    path.unlink()
    with pytest.raises(OSError, match="No space left on device") as caught:
        call(checkpoint=path)
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == []


def test_places_where_no_file_can_be_are_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["jaxcmle.solve.searching"], "_search", None)
    with pytest.raises(FileNotFoundError, match="no such folder for the checkpoint"):
        KINDS["fit"](checkpoint=tmp_path / "folder" / "a")
    with pytest.raises(IsADirectoryError, match="this is a folder"):
        KINDS["fit"](checkpoint=tmp_path)
    with pytest.raises(TypeError, match="checkpoint must be a path or None, got int"):
        KINDS["fit"](checkpoint=3)
    assert os.listdir(tmp_path) == []
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a regular file, and this is none"):
        KINDS["fit"](checkpoint=tmp_path / "pipe")


def test_leftovers_of_the_dead_are_removed(tmp_path):
    path = tmp_path / "a.ckpt"
    process = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    number = int(process.stdout)
    dead = tmp_path / f".a-{checkpoint._tag()}{number}.ckpt"
    alive = tmp_path / f".a-{checkpoint._tag()}{os.getppid()}.ckpt"
    # Of another machine, which may well be at work; and of other work.
    elsewhere = tmp_path / f".a-checkpoint-another-{number}.ckpt"
    names = (f".a-{checkpoint._tag()}x.ckpt", f".b-{checkpoint._tag()}1.ckpt", "a.txt")
    others = [elsewhere, *(tmp_path / name for name in names)]
    for file in (dead, alive, *others):
        file.write_text("half")
    Checkpoint(path, {}).save(i=1)
    assert not dead.exists()
    assert all(file.exists() for file in (alive, *others))


def test_entries_come_back_bit_for_bit(tmp_path):
    path = tmp_path / "any name at all"
    labels = np.arange(5000, dtype=np.int32).reshape(5, -1) % 7
    entries = {
        "numbers": (1, 0.1, math.inf, None, True, "text"),
        "labels": jnp.asarray(labels),
        "negative": -labels.astype(np.int64) * 1000,
        "small": np.float32(0.1),
        "nan": np.array([np.nan, -0.0]),
        "nested": {"a": [jc.Guarantee(reason="none"), ()]},
    }
    Checkpoint(path, {"x": "1"}).save(**entries)
    again = Checkpoint(path, {"x": "1"}).load()
    assert again["numbers"] == entries["numbers"]
    assert isinstance(again["labels"], jax.Array)
    for name in ("labels", "negative", "small", "nan"):
        assert again[name].dtype == entries[name].dtype
        assert np.asarray(again[name]).tobytes() == np.asarray(entries[name]).tobytes()
    assert again["nested"] == {"a": (jc.Guarantee(reason="none"), ())}
    # Labels take a byte each.
    assert path.stat().st_size < 5000 + 2 * 5000 * 2 + 4000


def test_digests(monkeypatch):
    x = points(100, 3, 0)
    assert digest(x) == digest(jnp.asarray(x)) == digest(x[:, ::-1][:, ::-1])
    different = {digest(x), digest(x.T), digest(x[:50], x[50:]), digest(x.astype(np.float64))}
    assert len(different) == 4
    assert digest(jax.random.key(0)) != digest(jax.random.key(1))
    assert digest(jax.random.key(0)) != digest(jax.random.key(0, impl="rbg"))
    assert digest(x[:0]) != digest(x[:, :0])
    whole = digest(x, np.float32(1.0))
    monkeypatch.setattr(checkpoint, "PIECE", 100)
    assert digest(x, np.float32(1.0)) == digest(jnp.asarray(x), np.float32(1.0)) == whole


# The real thing: processes that are killed.

KILLS = {"fit": 5, "sampled": 4, "sampling": 3, "pruning": 3, "many": 5}


def started(name, path, cache):
    """Return a child that is about to begin its work."""
    environment = {**os.environ, "PYTHONPATH": str(Path(jc.__file__).parent.parent)}
    child = subprocess.Popen(
        [sys.executable, checkpoint_child.__file__, name, str(path), cache],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    with child.stdout:
        assert child.stdout.readline() == "begin\n"
    return child


def check_readable(path):
    with np.load(path, allow_pickle=False) as archive:
        assert json.loads(archive["header"].tobytes())["format"] == "jaxcmle checkpoint"
        assert all(archive[name] is not None for name in archive.files)


@pytest.mark.skipif(os.name != "posix", reason="there is no kill -9")
@pytest.mark.parametrize("name", KILLS)
def test_kill_9_at_any_moment(name, tmp_path, monkeypatch, shared_programs):
    """Twenty kills in all; after each the rest of the work gives the answer, bit for bit."""
    for module, setting, value in checkpoint_child.SETTINGS:
        monkeypatch.setattr(module, setting, value)
    rng = np.random.default_rng(sorted(KILLS).index(name))
    # Compiles what the children need.
    expected = bits(CALLS[name](None))
    child = started(name, tmp_path / "whole", shared_programs)
    begin = time.monotonic()
    assert child.wait(timeout=300) == 0
    length = time.monotonic() - begin
    assert bits(CALLS[name](tmp_path / "whole")) == expected
    kills = tries = 0
    path = tmp_path / "0"
    while kills < KILLS[name]:
        tries += 1
        assert tries < 60, "no child lives long enough to be killed"
        child = started(name, path, shared_programs)
        try:
            child.wait(timeout=rng.uniform(0, length))
        except subprocess.TimeoutExpired:
            child.kill()
        if child.wait() == 0:
            # It was done before that: once more from the beginning.
            path = tmp_path / str(tries)
            continue
        assert child.returncode == -signal.SIGKILL
        kills += 1
        if path.exists():
            check_readable(path)
            # The rest of the work on a copy; the next child goes on with the original.
            shutil.copy(path, tmp_path / "copy")
            assert bits(CALLS[name](tmp_path / "copy")) == expected
            (tmp_path / "copy").unlink()
        else:
            assert bits(CALLS[name](path)) == expected
            path.unlink()
    assert bits(CALLS[name](path)) == expected
    # Those who were killed while they wrote left something behind, the next one removed it.
    assert not list(tmp_path.glob(f".{path.name}-*"))
