"""The command line, as a person runs it: the real program, on good and on bad files."""

import argparse
import gzip
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import jaxcmle as jc
from jaxcmle.apps import outputs
from jaxcmle.apps.datasets import load_iris
from jaxcmle.apps.exits import ProgramError

PRECISIONS = ("float32",)
OLD = "what was there before\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return an environment with a cache of its own: programs are compiled once for all tests."""
    folder = tmp_path_factory.getbasetemp()
    # Workers of a parallel run have folders beside each other.
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture
def run(tmp_path, environment):
    """Return a function that runs the program in an empty folder."""

    def function(*arguments, before=(), **options):
        command = [*before, sys.executable, "-W", "error", "-m", "jaxcmle", *map(str, arguments)]
        given = {"env": environment, "cwd": tmp_path, "capture_output": True, "timeout": 300}
        given |= options
        if not isinstance(given.get("input"), bytes):
            given["text"] = True
        return subprocess.run(command, check=False, **given)

    return function


@pytest.fixture
def points():
    """Return three clusters of 20 points."""
    rng = np.random.default_rng(0)
    centres = np.repeat([[0.0, 0.0], [20.0, 0.0], [0.0, 20.0]], 20, axis=0)
    return np.round(centres + rng.normal(size=(60, 2)), 6)


@pytest.fixture
def data(tmp_path, points):
    path = tmp_path / "data.csv"
    np.savetxt(path, points, delimiter=",", header="width,height", comments="", fmt="%.6f")
    return path


MODEL = {
    "format": "jaxcmle model",
    "version": 1,
    "problem": {"name": "CMLE"},
    "columns": ["width", "height"],
    "standardized": None,
    "clusters": [
        {"weight": 1 / 3, "mean": mean, "variance": 1.0} for mean in ([0, 0], [20, 0], [0, 20])
    ],
}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL))
    return path


def fails(result, code, *words):
    """Check that a run ended with one line that says what is wrong."""
    assert result.returncode == code, (result.stdout, result.stderr)
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr) < 600
    for word in words:
        assert word in result.stderr
    return True


def labels_in(path):
    """Return the labels of a CSV file, None where there is none."""
    header, *rows = path.read_text().splitlines()
    assert header == "row,label"
    numbers, labels = zip(*(row.split(",") for row in rows), strict=True)
    assert list(map(int, numbers)) == list(range(1, len(rows) + 1))
    return [int(label) if label else None for label in labels]


TRUE = [0] * 20 + [1] * 20 + [2] * 20
FIT = ("fit", "data.csv", "-k", 3, "--effort", "quick")


def test_fit_writes_all_that_was_asked_for(run, data, tmp_path, points):
    outputs = ("--labels", "l.csv", "--model", "m.json", "--report", "r.json", "--picture", "p.png")
    result = run(*FIT, *outputs)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "60 points, 2 features" in result.stdout
    assert "CONVERGED" in result.stdout
    assert re.search(r"gap +\d\.\d+ nats per point", result.stdout)
    assert labels_in(tmp_path / "l.csv") == TRUE
    report = json.loads((tmp_path / "r.json").read_text())
    wanted = jc.partition_cost(points.astype(np.float32), TRUE, 3)
    assert report["cost"] == pytest.approx(float(wanted), rel=1e-5)
    assert report["data"]["columns"] == ["width", "height"]
    assert report["guarantee"]["kind"] == "certificate"
    assert report["status"] == "CONVERGED"
    assert report["precision"] == "float32"
    assert report["icl"] >= report["bic"] - 1e-3
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["data.csv", "l.csv", "m.json", "p.png", "r.json"]

    again = run(*FIT, "--model", "n.npz", "--labels", "l.npy", "--picture", "p.svg", "--json")
    assert again.returncode == 0, again.stderr
    printed = json.loads(again.stdout)
    del printed["seconds"], report["seconds"]
    assert printed == report
    assert np.load(tmp_path / "l.npy").tolist() == TRUE
    assert "<svg" in (tmp_path / "p.svg").read_text()
    solution = jc.load(tmp_path / "n.npz")
    assert solution.labels.tolist() == TRUE
    assert float(solution.cost) == report["cost"]

    for name in ("m.json", "n.npz"):
        scored = run("score", "data.csv", "--model", name, "--labels", "again.csv", "--json")
        assert scored.returncode == 0, scored.stderr
        assert labels_in(tmp_path / "again.csv") == TRUE
        found = json.loads(scored.stdout)
        assert found["cost"] == pytest.approx(report["cost"], rel=1e-5)
        assert found["icl"] == pytest.approx(report["icl"], rel=1e-5)
        assert found["sizes"] == [20, 20, 20]


def test_seeds_and_problems(run, data):
    first, second = (run(*FIT, "--seed", 3, "--json").stdout for _ in range(2))
    assert re.sub(r'"seconds": .*', "", first) == re.sub(r'"seconds": .*', "", second)
    for options in (("--problem", "wkm", "--beta", 0.5), ("--problem", "ucmle")):
        result = run("fit", "data.csv", "-k", 1, *options, "--model", "m.json", "--json")
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["problem"] == options[1].upper()
        scored = run("score", "data.csv", "--model", "m.json", "--json")
        assert json.loads(scored.stdout)["cost"] == pytest.approx(report["cost"], rel=1e-5)
    assert fails(run(*FIT, "--problem", "wkm"), 2, "--beta")
    assert fails(run(*FIT, "--beta", 1), 2, "wkm")


def test_missing_values_are_counted_or_dropped(run, data, tmp_path):
    lines = data.read_text().splitlines()
    lines[3] = "NA,1"
    lines[7] = "1,"
    data.write_text("\n".join(lines) + "\n")
    assert fails(run(*FIT), 2, "data.csv: 2 missing values in 2 of 60 rows", "--drop-missing")
    one = ("fit", "data.csv", "-k", 1, "--drop-missing")
    result = run(*one, "--labels", "l.csv")
    assert result.returncode == 0, result.stderr
    assert "58 points" in result.stdout
    assert "2 rows with missing values left out" in result.stdout
    wanted = [None if i in (2, 6) else 0 for i in range(60)]
    assert labels_in(tmp_path / "l.csv") == wanted
    assert run(*one, "--labels", "l.npy").returncode == 0
    assert np.load(tmp_path / "l.npy").tolist() == [-1 if one is None else one for one in wanted]


def test_standardized_models_know_how_to_treat_new_data(run, data, tmp_path, points):
    result = run(*FIT, "--standardize", "--model", "m.json", "--report", "r.json")
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "m.json").read_text())
    assert record["standardized"]["centre"] == pytest.approx(points.mean(axis=0).tolist())
    assert record["standardized"]["scale"] == pytest.approx(points.std(axis=0).tolist())
    means = np.array([cluster["mean"] for cluster in record["clusters"]])
    assert abs(np.average(means, axis=0, weights=[20, 20, 20])).max() < 1e-5
    scored = run("score", "data.csv", "--model", "m.json", "--json", "--labels", "l.csv")
    cost = json.loads((tmp_path / "r.json").read_text())["cost"]
    assert json.loads(scored.stdout)["cost"] == pytest.approx(cost, rel=1e-5)
    assert labels_in(tmp_path / "l.csv") == TRUE


def test_score_finds_the_columns_of_the_model(run, model, tmp_path, points):
    """By name, in whatever order; without names, if there are as many."""
    rows = "".join(f"{b},name,{a}\n" for a, b in points)
    (tmp_path / "mixed.csv").write_text("height,who,width\n" + rows)
    result = run("score", "mixed.csv", "--model", model, "--labels", "l.csv")
    assert result.returncode == 0, result.stderr
    assert labels_in(tmp_path / "l.csv") == TRUE
    np.save(tmp_path / "plain.npy", points)
    assert run("score", "plain.npy", "--model", model, "--labels", "k.csv").returncode == 0
    assert labels_in(tmp_path / "k.csv") == TRUE
    np.save(tmp_path / "wide.npy", np.ones((4, 3)))
    assert fails(run("score", "wide.npy", "--model", model), 2, "3 columns", "is for 2")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert fails(run("score", "other.csv", "--model", model), 2, "width")


def as_parquet(points):
    import pyarrow as pa
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pa.table({"width": points[:, 0], "height": points[:, 1]}), buffer)
    return buffer.getvalue()


def as_numpy(writer):
    def function(points):
        buffer = io.BytesIO()
        writer(buffer, points)
        return buffer.getvalue()

    return function


def as_text(delimiter, header="", end="\n"):
    def function(points):
        rows = [delimiter.join(f"{value:.6f}" for value in point) for point in points]
        return end.join([*([header] if header else []), *rows, ""]).encode()

    return function


KINDS = {
    "data.csv": as_text(","),
    "windows.csv": as_text(";", "width;height", "\r\n"),
    "data.tsv": as_text("\t", "width\theight"),
    "data.txt": as_text("  "),
    "data.csv.gz": lambda points: gzip.compress(as_text(",", "width,height")(points)),
    "data.npy": as_numpy(np.save),
    "data.npz": as_numpy(lambda file, points: np.savez(file, x=points, y=np.ones(3))),
    "data.parquet": as_parquet,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_and_standard_input(run, model, tmp_path, points, name):
    content = KINDS[name](points)
    (tmp_path / name).write_bytes(content)
    result = run("score", name, "--model", model, "--labels", "l.csv")
    assert result.returncode == 0, result.stderr
    assert labels_in(tmp_path / "l.csv") == TRUE
    piped = run("score", "-", "--model", model, "--labels", "k.csv", input=content)
    assert piped.returncode == 0, piped.stderr
    assert labels_in(tmp_path / "k.csv") == TRUE


BAD = {
    "empty.csv": (b"", "empty"),
    "header.csv": (b"a,b\n", "header.csv"),
    "text.csv": (b"name\nanna\nberta\ncarla\n", "number"),
    "ragged.csv": (b"1,2\n3,4\n5\n7,8\n", "row 3"),
    "missing.csv": (b"1,2\nnan,4\n5,6\n", "1 missing value"),
    "infinite.csv": (b"1,2\ninf,4\n5,6\n", "row 2"),
    "semicolons.csv": (b"1;2\n3;4\n5;6\n", "delimiter"),
    "junk.csv": (bytes(range(256)) * 40, "text"),
    "junk.npy": (b"\x93NUMPY\x01\x00 no array", "junk.npy"),
    "junk.npz": (b"PK\x03\x04 no archive", "junk.npz"),
    "junk.parquet": (b"PAR1 no table", "junk.parquet"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line_and_cost_nothing(run, tmp_path, name):
    content, word = BAD[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "l.csv").write_text(OLD)
    delimiter = ("--delimiter", ",") if name == "semicolons.csv" else ()
    result = run("fit", name, "-k", 1, "--labels", "l.csv", *delimiter)
    assert fails(result, 2, f"jaxcmle: {name}: ", word)
    assert result.stdout == ""
    assert (tmp_path / "l.csv").read_text() == OLD
    assert sorted(os.listdir(tmp_path)) == sorted(["l.csv", name])


def test_missing_files_and_folders(run, tmp_path, model):
    assert fails(run("fit", "nowhere.csv", "-k", 2), 2, "nowhere.csv")
    assert fails(run("fit", tmp_path, "-k", 2), 2, str(tmp_path))
    assert fails(run("score", "nowhere.csv", "--model", model), 2, "nowhere.csv")
    assert fails(run("score", model, "--model", "nothing.json"), 2, "nothing.json")


@pytest.mark.parametrize(
    "command",
    [
        ("fit", "-k", 2),
        ("plan", "-k", 2, "--eta", 1),
        ("approximate", "-k", 2, "--eta", 1),
        ("select",),
        ("score", "--model", "model.json"),
    ],
)
def test_every_subcommand_reads_alike(run, tmp_path, model, command):
    name, *options = command
    (tmp_path / "ragged.csv").write_text("1,2\n3,4\n5\n")
    assert fails(run(name, "ragged.csv", *options), 2, "ragged.csv: row 3")
    assert fails(run(name, "ragged.csv", *options, "--no-such-option"), 2, "--no-such-option")
    assert fails(run(name, "ragged.csv", *options, "--device", "gpu"), 2, "no gpu")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no model"),
        (b"\x00\xff", "no model"),
        (b"[]", "no model of jaxcmle"),
        (json.dumps(MODEL | {"version": 7}).encode(), "version 7"),
        (json.dumps(MODEL | {"clusters": []}).encode(), "damaged"),
        (json.dumps(MODEL | {"clusters": [{"weight": 1}]}).encode(), "damaged"),
        (json.dumps(MODEL | {"problem": {"name": "KMEANS"}}).encode(), "damaged"),
        (json.dumps(MODEL | {"columns": ["a"]}).encode(), "damaged"),
        (b"PK\x03\x04", "damaged"),
        (json.dumps(MODEL | {"clusters": MODEL["clusters"][:2]}).encode(), "add up to 1"),
        (json.dumps(MODEL).replace("1.0", "-1.0").encode(), "variances must be positive"),
        (json.dumps(MODEL).replace("20", "NaN").encode(), "means must be finite"),
    ],
)
def test_bad_models_are_one_line(run, data, tmp_path, content, words):
    (tmp_path / "bad.json").write_bytes(content)
    assert fails(run("score", "data.csv", "--model", "bad.json"), 2, "bad.json", words)


def test_outputs_are_checked_before_the_work(run, data, tmp_path):
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.csv").symlink_to(tmp_path / "pipe")
    for option, path, code, word in (
        ("--labels", "l.txt", 2, ".csv or .npy"),
        ("--model", "m.pkl", 2, ".json or .npz"),
        ("--report", "r.csv", 2, ".json"),
        ("--picture", "p.jpg", 2, ".png or .svg"),
        ("--labels", "data.csv", 2, "the data"),
        ("--labels", "folder.csv", 4, "folder"),
        ("--labels", "nowhere/l.csv", 4, "no such folder"),
        ("--labels", "link.csv", 4, "no regular file"),
    ):
        assert fails(run(*FIT, option, path), code, path, word)
    assert fails(run(*FIT, "--model", "a.json", "--report", "a.json"), 2, "--model")
    assert sorted(os.listdir(tmp_path)) == ["data.csv", "folder.csv", "link.csv", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_full_disk_leaves_the_old_file(run, tmp_path, model):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "data.npy", rng.normal(size=(5000, 2)))
    (tmp_path / "l.csv").write_text(OLD)

    options = ("--model", model, "--labels", "l.csv", "--no-cache")
    no_large_files = ("bash", "-c", 'ulimit -f 4 && exec "$@"', "bash")
    result = run("score", "data.npy", *options, before=no_large_files)
    assert fails(result, 4, "l.csv", "too large")
    assert (tmp_path / "l.csv").read_text() == OLD
    assert sorted(os.listdir(tmp_path)) == ["data.npy", "l.csv", "model.json"]


def test_a_million_rows(run, tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, size=10**6)
    x = rng.normal(size=(10**6, 2)) + 12.0 * labels[:, None]
    with open(tmp_path / "data.csv", "w") as file:
        file.write("a,b\n")
        file.writelines(f"{a:.4f},{b:.4f}\n" for a, b in x.tolist())
    result = run("fit", "data.csv", "-k", 2, "--effort", "quick", "--labels", "l.npy")
    assert result.returncode == 0, result.stderr
    assert "1,000,000 points" in result.stdout
    found = np.load(tmp_path / "l.npy")
    agreeing = (found == labels).mean()
    assert max(agreeing, 1 - agreeing) > 0.999


def test_weights(run, tmp_path, points):
    rows = "".join(f"{a},{b},{2 if a < 10 else 1}\n" for a, b in points)
    (tmp_path / "data.csv").write_text("a,b,count\n" + rows)
    result = run("fit", "data.csv", "-k", 1, "--weight-column", "count", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["data"]["features"] == 2
    assert report["data"]["weighted"]
    (tmp_path / "zero.csv").write_text("a,b,count\n1,2,0\n3,4,0\n")
    zero = run("fit", "zero.csv", "-k", 1, "--weight-column", "count", "--standardize")
    assert fails(zero, 2, "zero.csv: the weights are all 0")
    mean = np.average(points, axis=0, weights=np.where(points[:, 0] < 10, 2, 1))
    assert report["clusters"][0]["mean"] == pytest.approx(mean.tolist(), rel=1e-5)
    assert report["cost_per_point"] == pytest.approx(report["cost"] / 100)


def test_numbers_that_float32_cannot_hold(run, tmp_path, points):
    far = points + 1.7e9
    np.savetxt(tmp_path / "data.csv", far, delimiter=",", fmt="%.6f")
    moved = [
        cluster | {"mean": [value + 1.7e9 for value in cluster["mean"]]}
        for cluster in MODEL["clusters"]
    ]
    (tmp_path / "far.json").write_text(json.dumps(MODEL | {"clusters": moved}))
    result = run("score", "data.csv", "--model", "far.json", "--labels", "l.csv", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["precision"] == "float64"
    assert labels_in(tmp_path / "l.csv") == TRUE


def test_numbers_that_nothing_can_hold(run, tmp_path, points):
    for name, factor in (("huge.csv", 1e300), ("tiny.csv", 1e-300)):
        np.savetxt(tmp_path / name, points * factor, delimiter=",")
        assert fails(run("fit", name, "-k", 1), 2, f"{name}: squared distances", "rescale x")
    standardized = run("fit", "huge.csv", "-k", 1, "--standardize", "--json")
    assert standardized.returncode == 0, standardized.stderr
    assert json.loads(standardized.stdout)["clusters"][0]["variance"] == pytest.approx(1, rel=1e-4)


def test_clusters_without_spread_are_named(run, tmp_path):
    (tmp_path / "data.csv").write_text("1,2\n" * 30)
    result = run("fit", "data.csv", "-k", 1)
    assert result.returncode == 0, result.stderr
    assert "no spread    in 0" in result.stdout
    floor = run("fit", "data.csv", "-k", 1, "--min-variance", 0.01)
    assert "no spread" not in floor.stdout


def test_standard_output_that_cannot_be_written(run, data, model):
    with open("/dev/full", "w") as full:
        options = {"stdout": full, "stderr": subprocess.PIPE, "capture_output": False}
        assert fails(run("score", "data.csv", "--model", model, **options), 4, "no space left")


def test_select_chooses_and_writes(run, data, tmp_path):
    outputs = ("--labels", "l.csv", "--model", "m.npz", "--report", "r.json", "--picture", "p.png")
    result = run("select", "data.csv", "-k", "1-3,4", "--effort", "quick", *outputs)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^\* +3 ", result.stdout, flags=re.MULTILINE)
    assert labels_in(tmp_path / "l.csv") == TRUE
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["table"]["n_clusters"] == [1, 2, 3, 4]
    assert report["criterion"] == "icl"
    assert len(jc.load(tmp_path / "m.npz").mixture.weights) == 3
    assert (tmp_path / "p.png").stat().st_size > 1000
    for text in ("0-2", "3-2", "a", "1,,2", ""):
        assert fails(run("select", "data.csv", "-k", text), 2, "--clusters")


def test_plan_and_approximate(run, data, tmp_path):
    plan = run("plan", "data.csv", "-k", 2, "--eta", 2, "--json")
    assert plan.returncode == 0, plan.stderr
    assert json.loads(plan.stdout)["n"] == 60
    shape = run("plan", "-k", 2, "--eps", 0.5, "--shape", "1000,2", "--scale", "paper")
    assert "135 tuples" in shape.stdout
    paper = ("--shape", "1000,2", "--algorithm", "paper")
    assert "10^189.7" in run("plan", "-k", 2, "--eps", 0.5, *paper).stdout
    assert fails(run("plan", "-k", 2, "--eps", 0.5), 2, "--shape")
    assert fails(run("plan", "data.csv", "-k", 2), 2, "--eta")
    assert fails(run("plan", "-k", 2, "--eps", 1, "--shape", "1000"), 2, "two numbers")

    options = ("approximate", "data.csv", "-k", 3, "--eta", 1)
    found = run(*options, "--labels", "l.csv", "--json")
    assert found.returncode == 0, found.stderr
    # Here clusters have any order.
    labels = labels_in(tmp_path / "l.csv")
    assert len(set(labels)) == len(set(zip(labels, TRUE, strict=True))) == 3
    assert json.loads(found.stdout)["guarantee"]["kind"] == "certificate"
    few = ("--no-certificate", "--max-candidates", 10)
    assert fails(run(*options, *few), 3, "data.csv", "--max-candidates", "--no-guarantee")


def test_demo(run, tmp_path):
    result = run("demo")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for words in (
        "150 points, 4 features",
        "50 setosa",
        "CONVERGED",
        "cost         387.756 nats",
        "gap          0.0100 nats per point",
        "proof by cells",
        "plan: sampling, CMLE, 150 points, 4 features, 3 clusters of at least 25",
        "candidates  10^7.9 tuples",
        "claim        1 nats per point: none is better by more, with probability 0.9",
        "picture      jaxcmle-demo.png",
    ):
        assert words in result.stdout
    assert (tmp_path / "jaxcmle-demo.png").read_bytes().startswith(b"\x89PNG")


def test_demo_of_more_clusters_than_can_be_enumerated(run, tmp_path):
    result = run("demo", "-k", 5, "--eta", 0.5, "--picture", "iris.svg")
    assert result.returncode == 0, result.stderr
    assert "That is too many" in result.stdout
    assert "nats per point: no such partition is better by more" in result.stdout
    assert os.listdir(tmp_path) == ["iris.svg"]
    assert fails(run("demo", "-k", 200), 2, "from 1 to the number of points, 150")
    assert fails(run("demo", "-k", 0), 2, "1 or more")


def test_the_built_in_data_is_a_good_first_file(run, tmp_path):
    """The column of text is named, and so is the way out."""
    iris = load_iris()
    rows = [
        ",".join([*map(str, x), iris.species_names[z]]) for x, z in zip(*iris[0::2], strict=True)
    ]
    (tmp_path / "iris.csv").write_text(
        "\n".join([",".join([*iris.feature_names, "species"]), *rows])
    )
    result = run("fit", "iris.csv", "-k", 3)
    assert fails(result, 2, "iris.csv: row 2, column 5 ('species'): 'setosa'", "--exclude species")
    advice = re.search(r"--columns \S+", result.stderr).group().split()
    for options in (advice, ["--exclude", "species"], ["--columns", "1-4"]):
        assert run("plan", "iris.csv", "-k", 3, "--eta", 1, *options).returncode == 0


def test_info_and_the_cache(run, data, model, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    folder = tmp_path / "jaxcmle"
    fit = ("fit", "data.csv", "-k", 1, "--json")
    first = run(*fit, "--no-cache", env=environment)
    assert first.returncode == 0, first.stderr
    assert not folder.exists()
    assert run(*fit, env=environment).returncode == 0
    kept = list(folder.iterdir())
    assert kept
    found = json.loads(run("info", "--json", env=environment).stdout)
    assert found["jaxcmle"] == jc.__version__
    assert found["cache"]["folder"] == str(folder)
    assert found["cache"]["bytes"] > 0
    assert found["devices"][0]["platform"] == "cpu"

    for path in kept:
        path.write_bytes(path.read_bytes()[:100])
    damaged = run(*fit, env=environment)
    assert damaged.returncode == 0, damaged.stderr
    assert damaged.stderr == ""
    assert json.loads(damaged.stdout)["cost"] == json.loads(first.stdout)["cost"]

    # A folder that the user has named for JAX is not ours to clear.
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "program").write_text("precious")
    named = {**environment, "JAX_COMPILATION_CACHE_DIR": str(mine)}
    cleared = run("info", "--clear-cache", env=named)
    assert cleared.returncode == 0
    assert str(mine) in cleared.stdout
    assert "removed" in cleared.stderr
    assert (mine / "program").exists()
    assert not folder.exists()


def test_tracebacks_are_for_those_who_ask(run, data):
    assert fails(run("fit", "data.csv", "-k", 61), 2, "data.csv: --clusters must lie from 1")
    result = run("fit", "data.csv", "-k", 61, "--debug")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


def test_too_large_a_minimum_size(run, data):
    assert fails(run(*FIT, "--min-size", 25), 2, "data.csv: 3 clusters of at least 25")


def test_a_time_limit_is_no_failure(run, data, tmp_path):
    result = run(*FIT, "--time-limit", 0, "--labels", "l.csv", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["status"] == "INTERRUPTED"
    assert len(labels_in(tmp_path / "l.csv")) == 60
    late = run("select", "data.csv", "--time-limit", 0)
    assert fails(late, 3, "time limit")


def test_a_reader_that_has_seen_enough(data, environment, tmp_path):
    command = (
        f"{sys.executable} -m jaxcmle plan data.csv -k 2 --eta 2 | true; echo ${{PIPESTATUS[0]}}"
    )
    options = {"env": environment, "cwd": tmp_path, "timeout": 120, "check": True}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, **options)
    assert done.stdout.strip() == "0"
    assert done.stderr == ""


def on_terminal(arguments, environment, folder, stop_at=None, seconds=240, times=1):
    """Run the program with its errors on a terminal; interrupt it when a word appears."""
    master, slave = pty.openpty()
    # Where the tests run in the background of a shell, Ctrl-C is ignored, and so it would be here.
    listen = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    program = [sys.executable, "-m", "jaxcmle", *map(str, arguments)]
    command = [sys.executable, "-c", listen, *program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=slave, env=environment, cwd=folder, text=True
    ) as process:
        os.close(slave)
        seen, end = b"", time.monotonic() + seconds
        while time.monotonic() < end:
            ready, _, _ = select.select([master], [], [], 0.2)
            try:
                seen += os.read(master, 4096) if ready else b""
            except OSError:
                break
            if stop_at is not None and stop_at in seen:
                process.send_signal(signal.SIGINT)
                # A second one, once the first has been seen.
                times, stop_at = times - 1, b"again" if times > 1 else None
        output = process.communicate(timeout=60)[0]
    os.close(master)
    return process.returncode, output, seen.decode()


def test_progress_is_for_terminals(data, environment, tmp_path):
    code, output, shown = on_terminal(FIT, environment, tmp_path)
    assert code == 0
    assert "CONVERGED" in output
    assert re.search(r"\[#* *\] +\d+\.\d% of 6 rounds", shown)
    # The line is wiped at the end.
    assert shown.rstrip("\r").endswith(" ")
    code, _, shown = on_terminal((*FIT, "--quiet"), environment, tmp_path)
    assert code == 0
    assert shown == ""


def test_ctrl_c_keeps_the_best_so_far(environment, tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "data.npy", rng.normal(size=(500, 2)).astype(np.float32))
    arguments = ("fit", "data.npy", "-k", 10, "--effort", "thorough", "--labels", "l.npy")
    code, output, shown = on_terminal(arguments, environment, tmp_path, stop_at=b" rounds")
    assert code == 130
    assert "INTERRUPTED" in output
    assert shown.splitlines()[-1].endswith("jaxcmle: interrupted: this is the best so far")
    assert np.load(tmp_path / "l.npy").shape == (500,)
    assert "Ctrl-C again" in shown

    code, output, shown = on_terminal(arguments, environment, tmp_path, b" rounds", times=2)
    assert code == 130
    assert output == ""
    assert shown.splitlines()[-1].endswith("jaxcmle: interrupted")


def test_version_and_help(run):
    assert run("--version").stdout.strip() == f"jaxcmle {jc.__version__}"
    words = run("--help").stdout
    for name in ("fit", "plan", "approximate", "select", "score", "demo", "info", "130"):
        assert name in words
    assert fails(run("nothing"), 2, "invalid choice")
    assert fails(run(), 2, "required")


def test_a_checkpoint_is_used_again_and_not_for_other_work(run, data, tmp_path):
    given = (data, "--effort", "quick", "--json", "--checkpoint", tmp_path / "run.ckpt")
    first = run("fit", "-k", 3, *given, "--all-devices")
    assert first.returncode == 0, first.stderr
    again = run("fit", "-k", 3, *given, "--all-devices")
    reports = [json.loads(each.stdout) for each in (first, again)]
    for report in reports:
        del report["seconds"]
    assert reports[0] == reports[1]
    other = run("fit", "-k", 2, *given)
    assert other.returncode == 2
    assert "another call" in other.stderr
    assert other.stderr.count("\n") == 1
    nowhere = run("fit", data, "-k", 2, "--checkpoint", tmp_path / "nowhere" / "run.ckpt")
    assert nowhere.returncode == 4
    assert nowhere.stderr.startswith("jaxcmle: --checkpoint")
    assert "no such folder" in nowhere.stderr


def test_only_the_first_process_needs_room_for_outputs(tmp_path, monkeypatch):
    given = {"data": "-", "labels": str(tmp_path / "nowhere" / "l.csv"), "checkpoint": None}
    for distributed, first in ((False, False), (True, True), (True, False)):
        monkeypatch.setattr(outputs, "is_first", lambda first=first: first)
        options = argparse.Namespace(distributed=distributed, **given)
        if distributed and not first:
            outputs.check_outputs(options)
            continue
        with pytest.raises(ProgramError, match="no such folder"):
            outputs.check_outputs(options)
