"""How everything here is measured, and what is kept with a number.

Methods run interleaved, after a call of each that compiles and warms up; before every call there is
a pause, because threads of other libraries keep spinning for a while. A time is the median of its
rounds, with the lowest and the highest; a speed is a ratio of two such times of one run. What the
machine can do, a matrix product and a copy, is measured in the same run.
"""

import ctypes
import gc
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

import jaxcmle as jc

T = TypeVar("T")

ROUNDS = 5
SETTLE, QUICK_SETTLE = 0.3, 0.1
# Memory that is free can only be given back where all threads share it.
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "numpy", "scikit-learn", "gmmx", "ott-jax", "faiss-cpu", "torch")


def say(*words: object) -> None:
    """Tell on standard error how far a run is: standard output is for the tables."""
    print(*words, file=sys.stderr, flush=True)


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Return how long a call takes until its arrays are there, and what it returns."""
    time.sleep(SETTLE)
    begin = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - begin, result


class Times:
    """The times of one method: the first call, and those that count."""

    def __init__(self) -> None:
        """Begin without any."""
        self.first = math.nan
        self.rounds: list[float] = []

    @property
    def median(self) -> float:
        """Return the median of the rounds."""
        return statistics.median(self.rounds)

    def summary(self) -> dict[str, Any]:
        """Return what is kept: the spread, and what the first call took longer, to compile."""
        return {
            "median": self.median,
            "lowest": min(self.rounds),
            "highest": max(self.rounds),
            "rounds": len(self.rounds),
            "compile": max(0.0, self.first - self.median),
        }


def interleave(methods: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, Times]:
    """Time all methods, one round after the other, after a first call of each."""
    times = {name: Times() for name in methods}
    for name, run in methods.items():
        times[name].first, _ = timed(run)
    for _ in range(rounds):
        for name, run in methods.items():
            times[name].rounds.append(timed(run)[0])
    return times


def seconds(times: dict[str, Times]) -> dict[str, dict[str, Any]]:
    """Return the summaries of all methods."""
    return {name: each.summary() for name, each in times.items()}


def ratios(times: dict[str, Times], own: str = "jaxcmle") -> dict[str, dict[str, float]]:
    """Return how many times ours fits into each other: of medians, lowest and highest of rounds."""
    mine = times[own]
    result = {}
    for name, theirs in times.items():
        if name != own:
            each = [other / one for other, one in zip(theirs.rounds, mine.rounds, strict=True)]
            middle = theirs.median / mine.median
            result[name] = {"ratio": middle, "lowest": min(each), "highest": max(each)}
    return result


def slope(sizes: list[int], values: list[float]) -> float:
    """Return the slope of the line through the logarithms: 1 for what grows in proportion."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def grown_bytes(run: Callable[[], T]) -> tuple[int | None, T]:
    """Return the most memory that a call takes on top of what is held before, and its result.

    Best in a process of its own with `ONE_ARENA`. None where the system does not tell: Linux does.
    """
    gc.collect()
    try:
        # Give back what is free, and let the peak begin anew: a new process begins with that of
        # the one that started it.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError, TypeError):
        return None, jax.block_until_ready(run())
    before = _memory("VmRSS")
    result = jax.block_until_ready(run())
    return _memory("VmHWM") - before, result


def peak_bytes() -> int | None:
    """Return the most memory that this process has held since `grown_bytes` began, if known."""
    return _memory("VmHWM") if Path("/proc/self/status").exists() else None


def _memory(field: str) -> int:
    """Return the bytes that this process holds, as Linux tells them: `VmRSS`, the peak `VmHWM`."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise ValueError(f"no {field} in /proc/self/status")


def in_own_process(
    run: Callable[..., T], *arguments: Any, environment: dict[str, str] | None = None
) -> T:
    """Run a function of a module in a new process: for its memory, or with other devices."""
    kept = dict(os.environ)
    os.environ.update(environment or {})
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(run, arguments)
    finally:
        os.environ.clear()
        os.environ.update(kept)


def machine_limits() -> dict[str, float]:
    """Return what the machine does at best: single precision flops, and bytes copied, a second."""
    matrix = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    source = np.ones(2**26, np.float32)
    target = np.empty_like(source)
    times = interleave(
        {"sgemm": lambda: matrix @ matrix, "copy": lambda: np.copyto(target, source)}
    )
    return {
        "sgemm flops a second": 2 * 2048**3 / times["sgemm"].median,
        # Read and written.
        "copied bytes a second": 2 * source.nbytes / times["copy"].median,
    }


def provenance() -> dict[str, Any]:
    """Return the versions of what was measured, the machine and the commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return {
        "jaxcmle": jc.__version__,
        "python": platform.python_version(),
        **versions,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
        "processor": processor(),
        "dtype": "float32",
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", ".", "../jaxcmle")),
    }


def processor() -> str:
    """Return the name of the processor."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def as_json(value: Any) -> str:
    """Return the text of a file of results."""
    return json.dumps(_plain(value), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Return the value with None for what JSON has no number for, and six digits of the others."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.8g}") if math.isfinite(value) else None
    return value
