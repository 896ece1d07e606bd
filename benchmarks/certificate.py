"""How near to a proof of optimality `jc.certify` comes, and how fast.

Gaussian mixtures of several dimensions and iris, clustered by `jc.fit`, with clusters of at least
half the average size (balance 2K). Printed are the gap in nats per point of the quick bound over
all pairs of points and of the tight one, with its method; the time with and without compilation;
and, where the proof is by cells, the time of a straightforward NumPy version of the same branch and
bound (`benchmarks.numpy_certificate`), with the same prices and for the same gap, as a multiple of
ours, both the least of several runs that alternate. Overlapping clusters in many dimensions are
there to see how soon it says that the tolerance cannot be reached.

Run: `python -m benchmarks.certificate` (add `--only NAME`, `--json FILE` to keep the numbers,
`--svg FILE` for a picture of the bounds closing in).
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxcmle as jc
from benchmarks.common import report
from benchmarks.numpy_certificate import price_by_branch_and_bound
from jaxcmle.apps.datasets import load_iris
from jaxcmle.proof.branch import price
from jaxcmle.proof.duals import Bundle, improve
from jaxcmle.proof.space import WholeSpace
from jaxcmle.proof.task import make_task

REPEATS = 3
# The peer is not given longer than this: then its time is at least the ratio given.
MOST_SECONDS = 40.0


class Case(NamedTuple):
    """An instance, what is asked for, and what the gap should be at most."""

    name: str
    x: np.ndarray
    k: int
    tolerance: float
    wanted: float | None


def mixture(n: int, d: int, k: int, distance: float, seed: int, spread: float = 0.0) -> np.ndarray:
    """Return points of k Gaussians whose centres are so many standard deviations apart or more."""
    random = np.random.default_rng(seed)
    deviations = np.exp(spread * random.normal(size=k))
    width = distance
    centres = np.zeros((0, d))
    while len(centres) < k:
        centre = width * random.normal(size=(1, d))
        away = np.sqrt(((centres - centre) ** 2).sum(axis=1))
        pairs = np.maximum(deviations[: len(centres)], deviations[len(centres)])
        if (away >= distance * pairs).all():
            centres = np.concatenate([centres, centre])
        width *= 1.01
    labels = random.permutation(np.arange(n) % k)
    return centres[labels] + deviations[labels, None] * random.normal(size=(n, d))


def simplex(n: int, d: int, k: int, distance: float, seed: int) -> np.ndarray:
    """Return points of k Gaussians whose centres are all exactly so many deviations apart."""
    random = np.random.default_rng(seed)
    directions = np.linalg.qr(random.normal(size=(d, d)))[0][:k]
    labels = random.permutation(np.arange(n) % k)
    return directions[labels] * distance / np.sqrt(2) + random.normal(size=(n, d))


def cases() -> Iterator[Case]:
    yield Case("iris, K=3", np.asarray(load_iris().x, np.float64), 3, 0.01, 0.02)
    for seed in range(3):
        x = mixture(5000, 2, 15, 4.0, seed, 0.2)
        yield Case(f"2-D, 5000, K=15, 4 sigma, seed {seed}", x, 15, 0.004, 0.005)
    for seed, (n, k) in enumerate(((300, 2), (300, 3), (1000, 4), (2000, 5))):
        yield Case(f"1-D, {n}, K={k}", mixture(n, 1, k, 4.0, seed, 0.3), k, 0.01, 0.05)
    for seed in range(2):
        x = mixture(1000, 3, 4, 4.0, seed, 0.3)
        yield Case(f"3-D, 1000, K=4, seed {seed}", x, 4, 0.01, 0.02)
    for n in (300, 1000):
        yield Case(f"5-D, {n}, K=3", mixture(n, 5, 3, 4.0, n, 0.3), 3, 0.02, 0.04)
    for distance in (7.0, 7.6):
        x = simplex(1000, 20, 3, distance, 0)
        yield Case(f"20-D, 1000, K=3, {distance:g} sigma", x, 3, 0.01, 0.03)
    yield Case("8-D, 1000, K=8, 12 sigma", simplex(1000, 8, 8, 12.0, 0), 8, 0.01, None)
    yield Case("2-D, 5000, K=15, overlapping", mixture(5000, 2, 15, 2.0, 0, 0.2), 15, 0.01, None)
    yield Case("20-D, 1000, K=3, 3 sigma", simplex(1000, 20, 3, 3.0, 0), 3, 0.01, None)
    yield Case("6-D, 1000, K=5, 2 sigma", simplex(1000, 6, 5, 2.0, 0), 5, 0.01, None)
    yield Case("2-D, 50000, K=3", mixture(50_000, 2, 3, 4.0, 0, 0.3), 3, 0.01, None)


def measure(case: Case) -> dict[str, Any]:
    n, d = case.x.shape
    balance = 2.0 * case.k
    min_size = float(np.ceil(n / balance))
    found = jc.fit(case.x, case.k, min_size=min_size, progress=False)
    quick = None
    if n <= 20_000:
        quick = np.asarray(jc.with_certificate(case.x, found, balance=balance).guarantee.gap).item()
    trace: list[list[float]] = []
    grown = peak_bytes()

    def certify(keep: bool) -> tuple[jc.Guarantee, float]:
        begin = time.perf_counter()

        def follow(one: Any) -> None:
            if keep and (not trace or one.gap < trace[-1][1]):
                trace.append([time.perf_counter() - begin, one.gap])

        guarantee = jc.certify(
            case.x, found, balance=balance, tolerance=case.tolerance, progress=follow
        )
        return guarantee, time.perf_counter() - begin

    _, first = certify(False)
    grown = peak_bytes() - grown
    guarantee, second = certify(True)
    if guarantee.better is not None:
        found = guarantee.better
        guarantee, second = certify(True)
    result = {
        "name": case.name,
        "n": n,
        "d": d,
        "k": case.k,
        "min size": min_size,
        "tolerance": case.tolerance,
        "wanted": case.wanted,
        "quick gap": quick,
        "gap": np.asarray(guarantee.gap).item(),
        "method": guarantee.method,
        "reached": bool(guarantee.reached),
        "interrupted": bool(guarantee.interrupted),
        "seconds": second,
        "seconds with compilation": first,
        "bytes": grown,
        "trace": trace,
        "peer": None,
    }
    if guarantee.method == "cells" and n <= 5000:
        result["peer"] = against_numpy(case, np.asarray(found.labels), min_size)
    return result


def against_numpy(case: Case, labels: np.ndarray, min_size: float) -> dict[str, Any]:
    """Time both versions of branch and bound, with the same prices and for the same gap."""
    n = len(case.x)
    with jax.enable_x64(True):
        task = make_task(case.x, None, case.k, labels, min_size, jc.CMLE(), 0.0)
        assert task is not None
        bundle = Bundle(task)
        improve(bundle, 60, 0.03 * case.tolerance * n, lambda: False)
        prices, known, value = bundle.best
        allowed = max(case.tolerance - (task.cost - value) / n, 0.4 * case.tolerance)
        allowed *= n / case.k
        geometry = WholeSpace(task, prices)
        price(geometry, known, allowed, lambda *_: False)
        ours, theirs = [], []
        for _ in range(REPEATS):
            seconds, priced = timed(lambda: price(geometry, known, allowed, lambda *_: False))
            ours.append(seconds)
            bound, evaluations, seconds = price_by_branch_and_bound(
                task.x,
                prices,
                case.k,
                int(min_size),
                known,
                allowed,
                float(task.pricing.low),
                float(task.pricing.high),
                time_limit=MOST_SECONDS,
            )
            theirs.append(seconds)
            if seconds > 10:
                break
    total = float(prices.sum())
    return {
        "ratio": min(theirs) / min(ours),
        "cut short": min(theirs) > MOST_SECONDS,
        "our gap": (task.cost - total + case.k * priced.bound) / n,
        "their gap": (task.cost - total + case.k * bound) / n,
        "our evaluations": priced.evaluations,
        "their evaluations": evaluations,
    }


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def picture(results: list[dict[str, Any]], names: list[str]) -> str:
    """Return a picture of the gap over time, both on logarithmic axes."""
    chosen = [each for each in results if each["name"] in names and len(each["trace"]) > 1]
    width, height, left, bottom = 720, 360, 60, 40
    t_low, t_high, g_low, g_high = -2.0, 1.5, -2.5, 1.5

    def place(seconds: float, gap: float) -> str:
        t = np.clip(np.log10(max(seconds, 1e-9)), t_low, t_high)
        g = np.clip(np.log10(max(gap, 1e-9)), g_low, g_high)
        x = left + (t - t_low) / (t_high - t_low) * (width - left - 20)
        y = 20 + (g_high - g) / (g_high - g_low) * (height - bottom - 20)
        return f"{x:.1f},{y:.1f}"

    def text(x: float, y: float, content: str, more: str = "") -> str:
        return f'<text x="{x}" y="{y}" {more}>{content}</text>'

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for power in range(-2, 2):
        x, y = place(10.0**t_low, 10.0**power).split(",")
        end = place(10.0**t_high, 1.0).split(",")[0]
        lines.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#dddddd"/>')
        lines.append(text(left - 6, float(y) + 4, f"{10.0**power:g}", 'text-anchor="end"'))
        x = place(10.0**power, 1.0).split(",")[0]
        lines.append(text(float(x), height - 22, f"{10.0**power:g}", 'text-anchor="middle"'))
    lines.append(text(width / 2, height - 5, "seconds", 'text-anchor="middle"'))
    lines.append(text(left, 14, "cost less lower bound, nats per point"))
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
    for i, each in enumerate(chosen):
        steps, last = [], each["trace"][0][1]
        for seconds, gap in each["trace"]:
            steps += [place(seconds, last), place(seconds, gap)]
            last = gap
        colour = colours[i % len(colours)]
        points = " ".join(steps)
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        label = f"{each['name']}: {each['gap']:.4f}"
        lines.append(text(width - 20, 36 + 16 * i, label, f'text-anchor="end" fill="{colour}"'))
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    results = []
    for case in cases():
        if arguments.only not in case.name:
            continue
        result = measure(case)
        results.append(result)
        peer = result["peer"]
        ratio = "" if peer is None else f", NumPy's time over ours {peer['ratio']:.1f}"
        quick = "-" if result["quick gap"] is None else f"{result['quick gap']:.3f}"
        wanted = "" if case.wanted is None else f" (wanted {case.wanted:g})"
        print(
            f"{case.name}: quick {quick}, gap {result['gap']:.4f}{wanted}, {result['method']}, "
            f"{'reached' if result['reached'] else 'not reached'}, {result['seconds']:.2f} s, "
            f"with compilation {result['seconds with compilation']:.1f} s, "
            f"{result['bytes'] / 2**20:.0f} MiB{ratio}",
            flush=True,
        )
    if arguments.svg:
        shown = [
            "iris, K=3",
            "1-D, 2000, K=5",
            "2-D, 5000, K=15, 4 sigma, seed 0",
            "3-D, 1000, K=4, seed 0",
            "5-D, 1000, K=3",
        ]
        arguments.svg.write_text(picture(results, shown), encoding="utf-8")
    report({"results": results}, arguments.json)


if __name__ == "__main__":
    main()
