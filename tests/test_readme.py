"""The README is true: its examples run and print what it says, its commands are what CI runs."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcmle.apps.exits import Exit

PRECISIONS = ("float32",)
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks():
    """Return the fenced blocks as (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_python_examples_print_what_is_shown(tmp_path, monkeypatch):
    """Run one after the other, as a reader would; each is followed by its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace = {}
    found = blocks()
    examples = [i for i, (language, _) in enumerate(found) if language == "python"]
    assert len(examples) >= 3
    for i in examples:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(found[i][1], f"README block {i}", "exec"), namespace)
        language, expected = found[i + 1]
        assert language == "text"
        assert output.getvalue() == expected


@pytest.mark.parametrize(
    ("marker", "ending"),
    [("main command", ".venv/bin/jaxcmle demo"), ("test command", "-m pytest -q")],
)
def test_the_two_commands_set_everything_up(marker, ending):
    command = re.search(rf"<!-- {marker} -->\n```bash\n(.*)\n```", README).group(1)
    assert command.startswith("python3 -m venv .venv && .venv/bin/python -m pip install")
    assert command.endswith(ending)
    assert marker != "test command" or marker in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_command_line_prints_what_is_shown(tmp_path):
    """The program that pip has installed, in an empty folder."""
    commands, expected = re.search(
        r"<!-- command line -->\n```bash\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL
    ).groups()
    scripts = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    options = {"cwd": tmp_path, "env": environment, "timeout": 300, "check": False}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == expected


def test_the_exit_codes_are_those_of_the_program():
    words = " ".join(README.split())
    for code in Exit:
        assert re.search(rf"[:;] {code.value} \w", words), code


def test_the_measured_ranges_are_those_of_the_committed_results():
    runs = [
        json.loads(path.read_text(encoding="utf-8"))["results"]
        for path in sorted((ROOT / "benchmarks" / "results").glob("cem_*.json"))
    ]
    assert len(runs) == 3
    for results in zip(*runs, strict=True):
        first = results[0]
        row = f"| {first['n']:,} × {first['d']}, {first['k']} |"
        line = next(line for line in README.splitlines() if line.startswith(row))
        for name in ("KMeans", "GaussianMixture"):
            ratios = [round(result["ratios"][name], 2) for result in results]
            assert f"{min(ratios):g} to {max(ratios):g}" in line


def test_the_measured_ranges_of_scoring_are_those_of_the_committed_results():
    runs = [
        json.loads(path.read_text(encoding="utf-8"))["results"]
        for path in sorted((ROOT / "benchmarks" / "results").glob("scoring_*.json"))
    ]
    assert len(runs) == 3
    for results in zip(*runs, strict=True):
        row = f"| {results[0]['k']} components, {results[0]['columns']} columns |"
        line = next(line for line in README.splitlines() if line.startswith(row))
        for name in ("sgemm", "NumPy", "vmap"):
            ratios = [round(result["ratios"][name], 2) for result in results]
            assert f"{min(ratios):g} to {max(ratios):g}" in line


def test_every_public_function_is_mentioned():
    import jaxcmle as jc

    for name in jc.__all__:
        if name[0].islower():
            assert f"{name}(" in README, name


def span(values, digits, unit=""):
    """Return the lowest and the highest as they are written in a table."""
    low, high = (f"{round(value, digits):g}" for value in (min(values), max(values)))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def test_the_measured_ranges_of_pruning_are_those_of_the_committed_results():
    runs = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "benchmarks" / "results").glob("pruning_*.json"))
    ]
    assert len(runs) == 3
    for found in zip(*(run["selection"] for run in runs), strict=True):
        ratios = span([one["ratio"] for one in found], 1)
        assert f"| {found[0]['rows']:,} × {found[0]['length']:,} | {ratios} |" in README
    for found in zip(*(run["seeding"] for run in runs), strict=True):
        kind, n, d, k, _ = found[0]["set"].values()
        costs = [
            span([one["one start"][name]["mean"] for one in found], 3)
            for name in ("abs", "kmeans++")
        ]
        shares = [span([100 * one[word] for one in found], 0, " %") for word in ("better", "worse")]
        row = f"| {kind}, {n:,} × {d}, {k} | " + " | ".join(costs + shares) + " |"
        assert row in README
    shares = [
        span([100 * run["all sets"][word] for run in runs], 0, " %") for word in ("better", "worse")
    ]
    assert f"| all sets | | | {shares[0]} | {shares[1]} |" in README


def quality(part):
    path = ROOT / "benchmarks" / "results" / f"quality_{part}.json"
    return json.loads(path.read_text(encoding="utf-8"))[part]


def test_the_quality_of_fit_is_that_of_the_committed_results():
    found = quality("real")["cells"]
    for name in dict.fromkeys(cell["set"] for cell in found):
        cells = [cell for cell in found if cell["set"] == name]
        good = sum(cell["keys as good"] for cell in cells)
        keys = sum(cell["keys"] for cell in cells)
        ratios = span([cell["ratios"]["GaussianMixture"] for cell in cells], 2)
        assert f"| {name} | {good} of {keys} | {ratios} |" in README
    fast = sum(cell["ratios"]["GaussianMixture"] >= 1 for cell in found)
    assert f"met in {fast} of {len(found)} cells" in README


def test_the_quality_of_the_thorough_search_is_that_of_the_committed_results():
    cells = quality("thorough")["cells"]
    for name in dict.fromkeys(cell["set"] for cell in cells):
        above = [round(cell["above best known"], 2) for cell in cells if cell["set"] == name]
        row = " | ".join(f"{value + 0.0:.2f}" for value in above)
        assert f"| {name} | {row} |" in README


def test_the_quality_on_known_answers_is_that_of_the_committed_results():
    synthetic, brute = quality("synthetic"), quality("brute")
    instances = [one for shape in synthetic["shapes"] for one in shape["instances"]]
    reached = sum(one["reached"] for one in instances)
    words = " ".join(README.split())
    assert f"{reached} of {len(instances)} mixtures" in words
    reached = sum(one["reached"] for one in brute["instances"])
    assert f"{reached} of {len(brute['instances'])} instances" in words


def test_the_large_instances_are_those_of_the_committed_results():
    path = ROOT / "benchmarks" / "results" / "large.json"
    for one in json.loads(path.read_text(encoding="utf-8"))["results"]:
        words = "at most the truth" if one["reached"] else f"{one['difference']:.0f} nats above"
        memory = f"{one['bytes'] / 1e9:.1f} GB"
        assert f"| {one['n']:,} × {one['d']:,}, {one['k']} | {words} | {memory} |" in README


def certificate_rows():
    """Return the rows of the table of certificates."""
    path = ROOT / "benchmarks" / "results" / "certificate.json"
    for found in json.loads(path.read_text(encoding="utf-8"))["results"]:
        quick = "" if found["quick gap"] is None else f"{found['quick gap']:.2f}"
        wanted = "" if found["wanted"] is None else f"{found['wanted']:g}"
        ratio = "" if found["peer"] is None else f"{found['peer']['ratio']:.1f}"
        cells = (found["name"], quick, f"{found['gap']:.3f}", wanted, found["method"], ratio)
        yield found, "| " + " | ".join(cells) + " |"


def test_the_certificates_are_those_of_the_committed_results():
    rows = list(certificate_rows())
    assert len(rows) > 10
    for found, row in rows:
        assert row in README
        assert found["wanted"] is None or found["gap"] <= found["wanted"]
    picture = (ROOT / "benchmarks" / "results" / "certificate.svg").read_text(encoding="utf-8")
    assert "(benchmarks/results/certificate.svg)" in README
    assert picture.count("<polyline") >= 3


def test_the_times_of_many_instances_are_those_of_the_committed_results():
    path = ROOT / "benchmarks" / "results" / "many.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    words = " ".join(README.split())

    def ratio(one):
        return f"{one['ratio']:.1f} ({one['lowest']:.1f} to {one['highest']:.1f}"

    for one in found["cem"]:
        row = f"| {one['b']:,} × {one['n']:,} × {one['d']}, {one['k']} |"
        line = next(line for line in README.splitlines() if line.startswith(row))
        for name in ("KMeans", "GaussianMixture", "vmap"):
            assert ratio(one["ratios"][name]) in line
        assert one["labels as by cem"] > 0.99
    fit, ragged, large = found["fit"], found["ragged"], found["large"]
    peer = fit["ratios"]["GaussianMixture"]
    fast = (
        f"{peer['ratio']:.1f} times as fast ({peer['lowest']:.1f} to {peer['highest']:.1f}, aim 10)"
    )
    assert fast in words
    assert f"lower or equal in {fit['share']['raw']:.1%} of them" in words
    assert f"or in {fit['share']['after CEM']:.1%} after our CEM" in words
    assert f"padding adds {ragged['padding waste']:.0%} of the points" in words
    assert f"the second is {ragged['ratio']:.1f} times as fast" in words
    assert f"{large['cem bytes'] / 1e6:.0f} MB on top for `cem_many`" in words
    assert f"{large['fit bytes'] / 1e6:.0f} MB for `fit_many`" in words
