"""Several processes work as one: real ones, on the loopback of this machine."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from in_processes import all_answers

PRECISIONS = ("float32",)
CHILD = Path(__file__).with_name("in_processes.py")
# Seconds after which nothing more is waited for.
PATIENCE = 600
# Seconds within which a process has to notice that another one is no more.
NOTICES = 60


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def two_processes(command, folder):
    """Start two processes, and stop whatever is left of them in the end."""
    port = free_port()
    running = []
    try:
        for number in range(2):
            with (
                open(folder / f"out{number}", "w") as out,
                open(folder / f"error{number}", "w") as error,
            ):
                given = command(number, port)
                running.append(subprocess.Popen(given, stdout=out, stderr=error))
        yield running
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(timeout=30)


def child(task, folder):
    return lambda number, port: [sys.executable, CHILD, str(number), str(port), task, folder]


def ends(processes, folder):
    """Wait for both, and return what each has found."""
    end = time.monotonic() + PATIENCE
    for number, process in enumerate(processes):
        code = process.wait(timeout=max(end - time.monotonic(), 1))
        assert code == 0, (folder / f"error{number}").read_text()[-3000:]
    texts = [(folder / f"out{number}").read_text() for number in range(2)]
    return [json.loads(re.findall(r"^found (.*)$", text, re.M)[0]) for text in texts]


def test_two_processes_give_the_answers_of_one(tmp_path):
    with two_processes(child("answers", tmp_path), tmp_path) as processes:
        first, second = ends(processes, tmp_path)
    assert first == second
    words = [(tmp_path / f"out{number}").read_text() for number in range(2)]
    # The file that the second process sees is damaged, then that of the first.
    damaged = "is damaged, or no checkpoint"
    refused = [re.findall("^refused .*", each, re.M) for each in words]
    assert "is not the same in all processes" in refused[0][0]
    assert damaged in refused[1][0]
    assert damaged in refused[0][1]
    assert "the first process cannot use the checkpoint" in refused[1][1]
    for name, one in all_answers(None).items():
        for part, value in one.items():
            if part in ("cost", "means"):
                np.testing.assert_allclose(first[name][part], value, rtol=2e-6, atol=2e-6)
            else:
                assert first[name][part] == value, (name, part)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a folder, with compiled programs in it, and what a search finds that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with two_processes(child("undisturbed", folder), folder) as processes:
        return folder, ends(processes, folder)[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_noticed_and_a_restart_goes_on(tmp_path, undisturbed, victim):
    folder, expected = undisturbed
    task = f"disturbed {victim}"
    with two_processes(child(f"slow {task}", folder), tmp_path) as processes:
        end = time.monotonic() + PATIENCE
        while "round 3" not in (tmp_path / "out0").read_text() and time.monotonic() < end:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.1)
        processes[victim].send_signal(signal.SIGKILL)
        code = processes[1 - victim].wait(timeout=NOTICES)
    words = (tmp_path / f"error{1 - victim}").read_text()
    # Ours, from a collective that failed; or JAX's own, if its heartbeat was faster.
    assert (code == 5 and "another of the 2 processes has ended" in words) or (
        code != 0 and "another task died" in words
    )
    assert (folder / f"{task}.checkpoint").exists()
    with two_processes(child(task, folder), tmp_path) as processes:
        found = ends(processes, tmp_path)
    assert found == [expected, expected]


def test_the_command_line_joins_processes(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(40, 2)), rng.normal(size=(41, 2)) + 9])
    np.save(tmp_path / "x.npy", x.astype(np.float32))
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def command(number, port, *more):
        return [
            *(sys.executable, "-m", "jaxcmle", "fit", tmp_path / "x.npy", "-k", "2", "--json"),
            *("--effort", "quick", "--labels", tmp_path / "labels.npy", *more),
        ]

    def joined(number, port):
        where = ("--distributed", "--coordinator", f"127.0.0.1:{port}", "--processes", "2")
        return command(number, port, *where, "--process-id", str(number))

    with two_processes(joined, tmp_path) as processes:
        for number, process in enumerate(processes):
            code = process.wait(timeout=PATIENCE)
            assert code == 0, (tmp_path / f"error{number}").read_text()[-3000:]
    report = json.loads((tmp_path / "out0").read_text())
    assert (tmp_path / "out1").read_text() == ""
    together = np.load(tmp_path / "labels.npy")
    alone = subprocess.run(command(0, 0), capture_output=True, text=True, check=True, timeout=600)
    assert np.load(tmp_path / "labels.npy").tolist() == together.tolist()
    np.testing.assert_allclose(report["cost"], json.loads(alone.stdout)["cost"], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--processes", "2"], "go with --distributed"),
        (["--distributed", "--processes", "2", "--process-id", "2"], "from 0 to"),
        (["--distributed", "--processes", "2", "--process-id", "0"], "cannot be met"),
    ],
)
def test_processes_that_cannot_meet_are_told_why(tmp_path, options, words):
    np.save(tmp_path / "x.npy", np.eye(4))
    command = [sys.executable, "-m", "jaxcmle", "fit", tmp_path / "x.npy", "-k", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
