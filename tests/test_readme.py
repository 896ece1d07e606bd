"""The README is true: its examples run and print what it says, its commands are what CI runs."""

import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcmle as jc
from benchmarks import readme
from benchmarks.__main__ import parsed
from benchmarks.harness import RESULTS
from benchmarks.suites import PARTS, file_name
from jaxcmle.apps.exits import Exit
from jaxcmle.solve.fit import MOST_CERTIFIED
from jaxcmle.solve.instances import bucket_of
from jaxcmle.solve.many import MOST_POINTS

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
    from matplotlib.image import imread

    drawn, shown = imread(tmp_path / "iris.png"), imread(RESULTS / "example.png")
    assert drawn.shape == shown.shape
    assert abs(drawn - shown).mean() < 0.02


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


def test_every_public_function_is_mentioned():
    for name in jc.__all__:
        if name[0].islower():
            assert f"{name}(" in README, name


def test_the_tables_are_those_of_the_committed_results():
    assert readme.filled(README) == README
    assert readme.PICTURE.read_text(encoding="utf-8") == readme.picture()
    for path in re.findall(r"!\[[^]]*\]\((.*?)\)", README):
        assert 0 < (ROOT / path).stat().st_size < 300_000


def test_empty_places_are_filled_each_by_itself():
    empty = "".join(f"<!-- measured: {part} -->\n<!-- end -->\n\n" for part in PARTS)
    full = readme.filled(empty)
    assert full.count("commit `") == len(PARTS)
    assert readme.filled(full) == full


def test_everything_that_was_measured_is_shown():
    shown = [match.group(2) for match in readme.PLACES.finditer(README)]
    assert sorted(shown) == sorted(PARTS)
    files = {path.name for path in RESULTS.glob("*.json")}
    assert files == {file_name(part) for part in PARTS}


@pytest.mark.parametrize("part", PARTS)
def test_results_say_where_they_come_from(part):
    found = json.loads((RESULTS / file_name(part)).read_text(encoding="utf-8"))
    assert found["part"] == part
    assert found["quick"] is False
    source = found["provenance"]
    assert source["dirty"] is False
    assert re.fullmatch("[0-9a-f]{7,}", source["commit"])
    assert {"jaxcmle", "jax", "numpy", "device", "dtype", "processor", "cores"} <= set(source)
    assert min(found["limits"].values()) > 1e9
    assert f"commit `{source['commit']}`" in README


def test_every_file_that_is_named_exists():
    named = re.findall(r"`([a-z_]+/[a-z_]+\.py|[a-z]+/)`", README)
    assert len(named) > 20
    for name in named:
        assert (ROOT / "jaxcmle" / name).exists() or (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    headings = re.findall(r"^#+ (.*)$", README, flags=re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in headings}
    for anchor in re.findall(r"\]\(#([^)]+)\)", README):
        assert anchor in anchors, anchor


def prose():
    """Return README without what other tests check: code, tables that were measured, repairs."""
    text = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    text = readme.PLACES.sub("", text)
    text = re.sub(r"## Repairs to the paper.*?(?=\n## )", "", text, flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return " ".join(text.split())


def default(function, name):
    return inspect.signature(function).parameters[name].default


# All numbers in the words of README: what the code has, definitions, and places in the paper.
PHRASES = (
    f"quick certificate for up to {MOST_CERTIFIED} points",
    f"More than {jc.Effort().sample:,} (",
    f"(default {default(jc.certify, 'tolerance'):g} nats per point)",
    f"(default {format(default(jc.approximate, 'max_candidates'), '.0e')})".replace("1e+08", "10⁸"),
    f"Instances of more than {MOST_POINTS} points",
    f"({', '.join(dict.fromkeys(str(bucket_of(100, k, False).k) for k in range(1, 13)))}, ...)",
    "; ".join(["0 done", "1 an error in jaxcmle", "2 arguments or data that cannot be used"]),
    "3 no admissible answer",
    "4 an output could not be written",
    "5 another process of",
    "130 Ctrl-C",
    "Python 3.11",
    "clusters of 167 points and more does not rule out a better partition with a cluster of 5",
    "a factor of 1+ε",
    "Algorithm 1",
    "Algorithm 2",
    "1/ε",
    "1/η",
    "1/(2π)",
    "4d/π",
    "1/(2β)",
    "w = 1/k",
    "n / 2K",
    "n / 2k",
    "as good as 0.",
    "−1",
    "counts data, from 1",
    "circles at 1 and 2 σ",
    "and to 2 points at least",
    "τ = 1",
    "τ → 0",
    "above 0",
    "weight of 0",
    "keeps weight 0",
    "(default 2)",
)


def test_no_number_is_typed_that_was_measured():
    """What was measured stands in the tables; other numbers are known to this test."""
    words = prose()
    for phrase in sorted(PHRASES, key=len, reverse=True):
        assert phrase in words, phrase
        words = words.replace(phrase, "")
    left = re.findall(r".{0,40}(?<![A-Za-z0-9])\d.{0,20}", words)
    assert left == []


def test_the_commands_of_the_benchmarks_are_theirs(monkeypatch):
    """All but the installation, up to where they would begin to measure."""
    commands = re.search(r"<!-- benchmarks -->\n```bash\n(.*?)```", README, re.DOTALL).group(1)
    lines = [line.split("#")[0].split() for line in commands.splitlines()]
    runs = [line[3:] for line in lines if line[:3] == ["python", "-m", "benchmarks"]]
    assert len(runs) == 3
    monkeypatch.chdir(ROOT)
    for arguments in runs:
        options = parsed(arguments)
        assert options.parts
        assert set(options.older) <= set(options.parts)
