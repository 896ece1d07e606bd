"""The command line, as a person runs it."""

import subprocess
import sys

import jaxcmle as jc

PRECISIONS = ("float32",)


def run(*arguments):
    command = [sys.executable, "-m", "jaxcmle", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_demo_prints_a_certified_clustering():
    result = run("demo")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "150 points, 4 features" in result.stdout
    assert "50 setosa" in result.stdout
    assert "CONVERGED" in result.stdout
    assert "cost         387.756 nats" in result.stdout
    assert "gap          0.0100 nats per point" in result.stdout
    assert "proof by cells" in result.stdout
    assert (
        "plan: sampling, CMLE, 150 points, 4 features, 3 clusters of at least 25" in result.stdout
    )
    assert "candidates  10^7.9 tuples" in result.stdout
    assert "claim        1 nats per point: none is better by more, with probability 0.9" in (
        result.stdout
    )


def test_demo_of_more_clusters_than_can_be_enumerated():
    result = run("demo", "--clusters", "5", "--eta", "0.5")
    assert result.returncode == 0, result.stderr
    assert "That is too many" in result.stdout
    assert "nats per point: no such partition is better by more" in result.stdout


def test_bad_arguments_are_one_line():
    result = run("demo", "--clusters", "200")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "from 1 to the number of points, 150" in result.stderr
    assert "Traceback" not in result.stderr
    assert run("demo", "--clusters", "0").returncode == 2
    assert run("nothing").returncode == 2


def test_version():
    assert run("--version").stdout.strip() == f"jaxcmle {jc.__version__}"
