"""Points read in chunks: the same answers as in memory, wrong input, and bounded memory."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import reference
from support import BETA, NAMES, PROBLEMS, parameters, tolerance

import jaxcmle as jc
from jaxcmle.solve import progress as progress_module
from jaxcmle.stream import fit as stream_fit
from jaxcmle.stream import sources
from jaxcmle.stream.cem import open_stream, refine
from jaxcmle.stream.sampling import draw_samples
from jaxcmle.stream.sources import open_source
from jaxcmle.stream.survey import survey

N, D, K = 4_000, 3, 4
ROWS = 512
# Searches take long to compile: what does not depend on the precision is tried in float32 alone.
ONCE = "once is enough"
# One for all, so that they share programs.
EFFORT = jc.Effort(rounds=4, patience=2, restarts=1, population=4, sample=1500)


def set_rows(monkeypatch):
    monkeypatch.setattr(sources, "ROWS", ROWS)
    monkeypatch.setattr(sources, "LEAST_ROWS", ROWS)


@pytest.fixture
def _short_chunks(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1)
    set_rows(monkeypatch)


def clustered(precision, seed=0, n=N, offset=0.0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(K, D)) * 6
    x = centres[rng.integers(0, K, n)] + rng.normal(size=(n, D)) + offset
    return x.astype(precision)


def overlapping(seed):
    """Return points in six clusters that are hard to tell apart."""
    rng = np.random.default_rng(seed)
    return (1.3 * rng.normal(size=(N, 3)) + 2 * rng.integers(0, 6, N)[:, None]).astype(np.float32)


def start_of(x):
    return jc.seed(jax.random.key(1), x, K)


def ragged(x, weight=None):
    """Return a function that returns chunks of different lengths, an empty one among them."""
    ends = [0, 1, 1, 700, len(x) // 2, len(x) // 2 + 1, len(x)]

    def chunks():
        for first, last in itertools.pairwise(ends):
            here = slice(first, last)
            yield x[here] if weight is None else (x[here], weight[here])

    return chunks


def as_memmap(folder, x):
    path = folder / "x.npy"
    np.save(path, x)
    return np.load(path, mmap_mode="r")


def as_parquet(folder, x):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({f"x{j}": x[:, j] for j in range(x.shape[1])})
    parquet.write_table(table, folder / "x.parquet", row_group_size=700)
    return folder / "x.parquet"


def assert_same(found, expected, x, problem, weight=None):
    """Compare solutions: the labels, the cost to rounding, and both with the mixture."""
    np.testing.assert_array_equal(found.labels, np.asarray(expected.labels))
    assert found.labels.dtype == np.int32
    assert int(found.status) == int(expected.status)
    tight = tolerance(x.dtype)
    assert abs(float(found.cost) - float(expected.cost)) <= tight * abs(float(expected.cost))
    np.testing.assert_array_equal(found.labels, jc.assign(x, found.mixture, problem=problem))
    name = next(name for name in NAMES if type(PROBLEMS[name]) is type(problem))
    cost = reference.model_cost(x, *parameters(found.mixture), name, BETA, weight)
    assert abs(float(found.cost) - cost) <= tight * max(abs(cost), len(x))
    close = 1e-3 if x.dtype == np.float32 else 1e-9
    for one, other in zip(parameters(found.mixture), parameters(expected.mixture), strict=True):
        np.testing.assert_allclose(one, other, rtol=close, atol=close)


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize(
    ("kind", "name"),
    [("memmap", "cmle"), ("path", "wkm"), ("parquet", "ucmle"), ("function", "cmle")],
)
def test_cem_is_the_same_as_in_memory(kind, name, precision, tmp_path):
    x = clustered(precision)
    given = {
        "memmap": lambda: as_memmap(tmp_path, x),
        "path": lambda: os.fspath(Path(as_memmap(tmp_path, x).filename)),
        "parquet": lambda: as_parquet(tmp_path, x),
        "function": lambda: ragged(x),
    }[kind]()
    start = start_of(x)
    found = jc.cem(given, start, problem=PROBLEMS[name])
    assert_same(found, jc.cem(x, start, problem=PROBLEMS[name]), x, PROBLEMS[name])


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize("kind", ["array", "file", "pairs", "long"])
def test_weights_and_points_of_weight_0(kind, precision, tmp_path):
    x = clustered(precision, seed=1)
    rng = np.random.default_rng(2)
    weight = (rng.integers(0, 3, len(x)) * rng.uniform(0.5, 2, len(x))).astype(precision)
    start = start_of(x)
    expected = jc.cem(x, start, sample_weight=weight)
    silent = x.copy()
    silent[np.flatnonzero(weight == 0)[:50]] = np.nan
    if kind == "pairs":
        found = jc.cem(ragged(silent, weight), start)
    elif kind == "long":
        found = jc.cem(ragged(silent), start, sample_weight=weight)
    else:
        other = tmp_path / "weight"
        other.mkdir()
        given = as_memmap(other, weight) if kind == "file" else weight
        found = jc.cem(as_memmap(tmp_path, silent), start, sample_weight=given)
    present = weight > 0
    np.testing.assert_array_equal(found.labels[present], np.asarray(expected.labels)[present])
    tight = tolerance(precision)
    assert abs(float(found.cost) - float(expected.cost)) <= tight * abs(float(expected.cost))


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_length_of_chunks_does_not_show(offset, precision, monkeypatch):
    x = clustered(precision, seed=3, offset=offset)
    start = start_of(x)
    expected = jc.cem(x, start)
    set_rows(monkeypatch)
    for size in (1, 2**22):
        monkeypatch.setattr(sources, "CHUNK_BYTES", size)
        assert_same(jc.cem(ragged(x), start), expected, x, jc.CMLE())


@pytest.mark.usefixtures("_short_chunks")
def test_status_of_cem(precision):
    x = clustered(precision, seed=4)
    start = start_of(x)
    for options in ({"max_iter": 0}, {"max_iter": 1}, {"min_size": len(x)}):
        found, expected = jc.cem(ragged(x), start, **options), jc.cem(x, start, **options)
        assert int(found.status) == int(expected.status)
        np.testing.assert_array_equal(found.labels, np.asarray(expected.labels))


def test_costs_that_are_rounded_do_not_end_cem(precision):
    """Near the end an iteration gains less than rounding takes: labels tell, as in memory."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(20_000, 2)) + c for c in ([0, 0], [3, 0], [0, 3.5])])
    x = rng.permutation(x.astype(precision))
    for seed in range(6):
        start = jc.seed(jax.random.key(seed), x, 5)
        inside = jc.cem(x, start, max_iter=2000, min_size=0)
        streamed = jc.cem(lambda: iter([x]), start, max_iter=2000, min_size=0)
        assert int(streamed.status) == int(inside.status) == jc.Status.CONVERGED
        assert (streamed.labels != np.asarray(inside.labels)).mean() < 1e-3


@pytest.mark.usefixtures("_short_chunks")
def test_empty_clusters_and_duplicates(precision):
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(size=(900, 2)), np.full((900, 2), 7.0)]).astype(precision)
    means = np.array([[0.0, 0.0], [6.0, 6.0], [1e3, 1e3]], precision)
    start = jc.Mixture(
        weights=np.array([0.4, 0.4, 0.2], precision), means=means, variances=np.ones(3, precision)
    )
    found, expected = jc.cem(ragged(x), start), jc.cem(x, start)
    np.testing.assert_array_equal(found.labels, np.asarray(expected.labels))
    for one, other in zip(parameters(found.mixture), parameters(expected.mixture), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize("name", NAMES)
def test_fit_is_as_good_as_in_memory(name, precision):
    if precision == np.float64:
        pytest.skip(ONCE)
    x = clustered(precision, seed=6)
    problem = PROBLEMS[name]
    found = jc.fit(ragged(x), K, problem=problem, effort=EFFORT)
    expected = jc.fit(x, K, problem=problem, effort=EFFORT)
    assert abs(float(found.cost) - float(expected.cost)) <= 1e-3 * abs(float(expected.cost))
    assert int(found.status) == jc.Status.CONVERGED
    np.testing.assert_array_equal(found.labels, jc.assign(x, found.mixture, problem=problem))
    # In the order of their first points.
    assert [*dict.fromkeys(found.labels.tolist())] == list(range(K))
    guarantee = found.guarantee
    assert guarantee.kind == "estimate"
    assert "2048 points" in guarantee.reason
    assert guarantee.min_size == expected.guarantee.min_size
    assert guarantee.lower_bound <= float(found.cost)
    gap = (float(found.cost) - guarantee.lower_bound) / len(x)
    assert abs(guarantee.gap - gap) <= 1e-5 * max(1, abs(gap))
    exact = jc.lower_bound(x, K, min_size=guarantee.min_size, problem=problem)
    assert abs(exact - guarantee.lower_bound) / len(x) < 0.3


def test_an_estimate_is_saved(precision, tmp_path):
    if precision == np.float64:
        pytest.skip(ONCE)
    x = clustered(precision, seed=6)
    solution = jc.fit(ragged(x), K, effort=EFFORT)
    jc.save(tmp_path / "solution.npz", solution)
    loaded = jc.load(tmp_path / "solution.npz")
    assert loaded.guarantee.kind == "estimate"
    assert loaded.guarantee.reason == solution.guarantee.reason
    np.testing.assert_array_equal(loaded.labels, solution.labels)


@pytest.mark.usefixtures("_short_chunks")
def test_one_cluster_is_certified_only_with_its_best_mixture(precision):
    x = np.random.default_rng(19).gamma(1.0, size=(N, D)).astype(precision)
    found = jc.fit(lambda: iter([x]), 1, effort=EFFORT)
    assert (found.guarantee.kind, float(found.guarantee.gap)) == ("certificate", 0)
    # The mixture is that of a sample: there is a better one for the same partition.
    cut = jc.fit(lambda: iter([x]), 1, effort=EFFORT, time_limit=0.0)
    assert int(cut.status) == jc.Status.INTERRUPTED
    assert float(cut.cost) >= float(found.cost)
    assert cut.guarantee.kind == "none"
    assert "interrupted" in cut.guarantee.reason


@pytest.mark.usefixtures("_short_chunks")
def test_a_minimum_size_that_binds_is_kept(precision):
    if precision == np.float64:
        pytest.skip(ONCE)
    for seed in range(2):
        # What CEM comes to from the best of the sample has clusters that are too small.
        x = overlapping(seed)
        found = jc.fit(ragged(x), 6, effort=EFFORT, min_size=300)
        assert int(found.status) in (jc.Status.CONVERGED, jc.Status.MAX_ITER)
        assert np.bincount(found.labels).min() >= 300
        assert found.guarantee.kind == "estimate"
        whole = jc.fit(x, 6, effort=EFFORT, min_size=300)
        assert float(found.cost) <= 1.002 * float(whole.cost)


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize("seed", [0, 2])
def test_a_minimum_size_that_cem_does_not_keep_is_kept(seed, precision):
    if precision == np.float64:
        pytest.skip(ONCE)
    # One cluster that is to be four: all but one of them shrink, from whatever start.
    x = np.random.default_rng(seed).normal(size=(N, D)).astype(precision)
    found = jc.fit(ragged(x), K, effort=EFFORT)
    assert int(found.status) in (jc.Status.CONVERGED, jc.Status.MAX_ITER)
    assert np.bincount(found.labels).min() >= N / (10 * K)
    assert found.guarantee.kind == "estimate"


@pytest.mark.usefixtures("_short_chunks")
def test_the_last_mixture_with_large_clusters_is_kept(precision):
    start = jc.seed(jax.random.key(8), overlapping(0), 6, method="random")
    start = jax.tree.map(lambda leaf: leaf.astype(precision), start)
    x = overlapping(0).astype(precision)
    stream = open_stream(open_source(ragged(x)), jc.CMLE(), None, 6)
    ends = [refine(stream, start, most, lambda: False, min_size=30) for most in range(12)]
    sizes = [np.bincount(jc.assign(x, end.mixture), minlength=6).min() for end in ends]
    # A cluster shrinks from iteration to iteration.
    assert sizes[0] >= 30 > sizes[-1]
    expected = None
    for end, size in zip(ends, sizes, strict=True):
        kept = None if end.admissible is None else end.admissible.means.tolist()
        assert kept == expected
        if size >= 30:
            expected = end.mixture.means.tolist()


@pytest.mark.usefixtures("_short_chunks")
def test_more_clusters_than_the_estimate_has_points(precision, monkeypatch):
    if precision == np.float64:
        pytest.skip(ONCE)
    monkeypatch.setattr(stream_fit, "BOUND_SAMPLE", K - 1)
    x = clustered(precision, seed=20)
    found = jc.fit(ragged(x), K, effort=EFFORT)
    assert int(found.status) in (jc.Status.CONVERGED, jc.Status.MAX_ITER)
    assert found.guarantee.kind == "none"
    assert "more clusters" in found.guarantee.reason


def test_few_points_are_loaded(precision, tmp_path):
    if precision == np.float64:
        pytest.skip(ONCE)
    x = clustered(precision, seed=7, n=300)
    expected = jc.fit(x, K, effort=EFFORT)
    for given in (as_memmap(tmp_path, x), lambda: iter([x[:100], x[100:]])):
        found = jc.fit(given, K, effort=EFFORT)
        np.testing.assert_array_equal(found.labels, expected.labels)
        assert found.guarantee.kind == "certificate"


@pytest.mark.usefixtures("_short_chunks")
def test_init_is_not_made_worse(precision):
    if precision == np.float64:
        pytest.skip(ONCE)
    x = clustered(precision, seed=8)
    good = jc.cem(x, start_of(x))
    for init in (good, good.mixture):
        found = jc.fit(ragged(x), K, init=init, effort=EFFORT)
        assert float(found.cost) <= float(good.cost) + 1e-5 * abs(float(good.cost))
    with pytest.raises(TypeError, match=r"Solution or a jaxcmle\.Mixture"):
        jc.fit(ragged(x), K, init=good.labels, effort=EFFORT)
    with pytest.raises(ValueError, match="has 4 clusters, and n_clusters is 3"):
        jc.fit(ragged(x), 3, init=good, effort=EFFORT)
    with pytest.raises(ValueError, match="certify looks at all pairs"):
        jc.fit(ragged(x), 3, certify=True, effort=EFFORT)


def test_samples_do_not_depend_on_chunks(precision, monkeypatch):
    x = clustered(precision, seed=9)
    weight = np.random.default_rng(0).uniform(0, 2, len(x)).astype(precision)
    found = []
    set_rows(monkeypatch)
    for size in (1, 2**22):
        monkeypatch.setattr(sources, "CHUNK_BYTES", size)
        source = open_source(ragged(x, weight))
        known = survey(source, K)
        found.append(draw_samples(jax.random.key(3), source, known, 1000, 200))
    np.testing.assert_array_equal(found[0].x, found[1].x)
    np.testing.assert_array_equal(found[0].equal, found[1].equal)
    np.testing.assert_allclose(found[0].weight, found[1].weight, rtol=1e-5)
    # Sums over the coreset are about those over all points.
    total = float(weight.sum())
    assert abs(found[0].weight.sum() - total) <= 1e-4 * total
    mean = found[0].weight @ found[0].x / total
    np.testing.assert_allclose(mean, weight @ x / total, atol=0.5)
    np.testing.assert_allclose(found[0].equal.mean(axis=0), weight @ x / total, atol=2)


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize("far", [-99_999, 1e7])
@pytest.mark.parametrize("place", [0, N // 2, N - 1])
def test_a_point_far_away_spoils_nothing(far, place, precision):
    x = clustered(precision, seed=17)
    x[place] = far
    weight = np.random.default_rng(1).uniform(0.5, 2, N).astype(precision)
    source = open_source(ragged(x, weight))
    known = survey(source, K)
    wide, own = x.astype(np.float64), weight.astype(np.float64)
    mean = own @ wide / own.sum()
    scatter = own @ ((wide - mean) ** 2).sum(axis=1)
    np.testing.assert_allclose(known.moments.scatter, [scatter], rtol=1e-5)
    drift = known.moments.mean[0] + known.shift - mean
    assert np.abs(drift).max() <= 1e-5 * np.sqrt(scatter / own.sum())
    # Half of the draws are for points as they weigh, the other half for the one far away.
    drawn = draw_samples(jax.random.key(4), source, known, 2000, 200)
    assert 600 < len(drawn.x) < 1000
    assert far in drawn.x
    assert len(drawn.equal) == 200


def test_wide_points_come_in_few_rows(precision):
    rng = np.random.default_rng(18)
    for d in (3_000, 200_000):
        x = np.concatenate([rng.normal(size=(40, d)), 3 + rng.normal(size=(40, d))])
        source = open_source(lambda x=x: iter([x]))
        assert source.rows <= 1024
        assert source.rows * d <= max(sources.CHUNK_BYTES, sources.LEAST_ROWS * d)
    x = x[:, :3_000].astype(precision)
    start = jc.seed(jax.random.key(0), x, 2)
    found, expected = jc.cem(lambda: iter([x]), start), jc.cem(x, start)
    np.testing.assert_array_equal(found.labels, expected.labels)


@pytest.mark.usefixtures("_short_chunks")
def test_predict(precision, tmp_path):
    x = clustered(precision, seed=10)
    solution = jc.cem(x, start_of(x))
    expected = np.asarray(jc.assign(x, solution.mixture))
    given = [x, jax.numpy.asarray(x), as_memmap(tmp_path, x), tmp_path / "x.npy", ragged(x)]
    given.append(as_parquet(tmp_path, x))
    for each in given:
        for out in (None, tmp_path / "labels.npy"):
            labels = jc.predict(each, solution, out=out)
            np.testing.assert_array_equal(labels, expected)
            assert labels.dtype == np.int32
            assert isinstance(labels, np.memmap) == (out is not None)
    assert not labels.flags.writeable
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "labels.npy",
        "x.npy",
        "x.parquet",
    ]
    problem = jc.WKM(beta=2.0)
    labels = jc.predict(ragged(x), solution.mixture, problem=problem)
    np.testing.assert_array_equal(labels, jc.assign(x, solution.mixture, problem=problem))


def test_predict_leaves_nothing_behind(precision, tmp_path):
    x = clustered(precision, seed=10)
    model = start_of(x)
    x[-1] = np.nan
    with pytest.raises(ValueError, match=f"in row {len(x) - 1}"):
        jc.predict(ragged(x), model, out=tmp_path / "labels.npy")
    with pytest.raises(ValueError, match=r"must end in \.npy"):
        jc.predict(x, model, out=tmp_path / "labels.csv")
    assert list(tmp_path.iterdir()) == []


def test_predict_does_not_write_over_the_points(precision, tmp_path):
    x = clustered(precision, n=50)
    opened, path = as_memmap(tmp_path, x), tmp_path / "x.npy"
    (tmp_path / "link.npy").symlink_to(path)
    for given in (path, str(path), opened, opened[::2]):
        for out in (path, tmp_path / "link.npy"):
            with pytest.raises(ValueError, match="holds the points: write the labels elsewhere"):
                jc.predict(given, start_of(x), out=out)
    np.testing.assert_array_equal(np.load(path), x)


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize("order", ["F", "slice", "swapped", "float64", "int", "half", "long"])
def test_layouts_and_dtypes(order, precision, tmp_path):
    x = clustered(precision, seed=11)
    stored = {
        "F": np.asfortranarray,
        "swapped": lambda x: x.astype(x.dtype.newbyteorder()),
        "float64": lambda x: x.astype(np.float64),
        "int": lambda x: (10 * x).astype(np.int16),
        "half": lambda x: x.astype(np.float16),
        "long": lambda x: x.astype(np.longdouble),
    }.get(order, lambda x: x)(x)
    given = as_memmap(tmp_path, stored)
    if order == "slice":
        given, stored = given[100::2, 1:], stored[100::2, 1:]
    start = jc.seed(jax.random.key(1), np.asarray(stored), K)
    found, expected = jc.cem(given, start), jc.cem(np.array(stored), start)
    np.testing.assert_array_equal(found.labels, np.asarray(expected.labels))
    assert found.mixture.means.dtype == expected.mixture.means.dtype


def test_wrong_input(precision, tmp_path):
    x = clustered(precision, seed=12, n=9000)
    start = start_of(x)
    once = iter([x])

    def fails(error, match, given, **options):
        with pytest.raises(error, match=match):
            jc.cem(given, start, **options)

    fails(TypeError, "can be read only once", iter([x]))
    fails(ValueError, "same iterator twice", lambda: once)
    fails(ValueError, "no points", lambda: iter([]))
    fails(ValueError, "no points", lambda: iter([x[:0]]))
    fails(TypeError, "calling it gave", lambda: 3)
    fails(ValueError, "shape", lambda: iter([x[:, 0]]))
    fails(ValueError, r"must have 3 features.*row 5000", lambda: iter([x[:5000], x[5000:, :2]]))
    fails(TypeError, "real numbers", lambda: iter([x.astype(complex)]))
    if precision == np.float64:
        mixed = [x[:5000].astype(np.float32), x[5000:]]
        fails(TypeError, "more digits", lambda: iter(mixed))
    fails(ValueError, "or none is", lambda: iter([(x, np.ones(len(x))), x]))
    fails(ValueError, "one for each", lambda: iter([(x, np.ones(3))]))
    fails(ValueError, "one weight per point", lambda: iter([x]), sample_weight=np.ones(3))
    fails(ValueError, "one weight per point", lambda: iter([x]), sample_weight=np.ones(10**5))
    fails(ValueError, "must not be negative", lambda: iter([x]), sample_weight=-np.ones(len(x)))
    fails(ValueError, "is 0 for every", lambda: iter([x]), sample_weight=np.zeros(len(x)))
    bad = np.ones(len(x))
    bad[7] = np.nan
    fails(ValueError, "NaN or infinity", lambda: iter([x]), sample_weight=bad)
    fails(ValueError, "distinct points", lambda: iter([np.repeat(x[:2], 5000, axis=0)]))
    fails(ValueError, "range", lambda: iter([x * np.finfo(precision).max ** 0.6]))
    fails(FileNotFoundError, "missing", tmp_path / "missing.npy")
    fails(FileNotFoundError, "missing", tmp_path / "missing.parquet")
    fails(ValueError, "neither", tmp_path / "x.csv")
    for name in ("empty.npy", "empty.parquet"):
        (tmp_path / name).write_bytes(b"")
        fails(ValueError, "empty", tmp_path / name)
    np.save(tmp_path / "flat.npy", x[:, 0])
    fails(ValueError, "shape", tmp_path / "flat.npy")
    np.save(tmp_path / "none.npy", x[:0])
    fails(ValueError, "at least one point", tmp_path / "none.npy")
    np.save(tmp_path / "text.npy", np.array([["a", "b"]]))
    fails(TypeError, "real numbers", tmp_path / "text.npy")
    fails(ValueError, "features", lambda: iter([x[:, :2]]))
    holes = x.copy()
    holes[[8000, 8500]] = np.inf
    fails(ValueError, "2 of 9000 points .first in row 8000", as_memmap(tmp_path, holes))

    calls = []

    def changes():
        calls.append(None)
        return iter([x if len(calls) < 4 else x[:100]])

    fails(ValueError, "9000 points the first time and 100 now", changes)
    with pytest.raises(TypeError, match="n_clusters must be a Python int"):
        jc.fit(lambda: iter([x]), 2.5)

    calls.clear()

    def grows():
        calls.append(None)
        return itertools.repeat(x) if len(calls) >= 4 else iter([x])

    fails(ValueError, "9000 points the first time and more now", grows)


def test_text_in_parquet(precision, tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    x = clustered(precision, seed=12, n=900)
    table = pa.table({"x": x[:, 0], "name": ["a"] * len(x)})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(TypeError, match="column 'name' holds string"):
        jc.cem(tmp_path / "x.parquet", start_of(x))


def test_parquet_without_pyarrow(precision, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"jaxcmle\[parquet\]"):
        jc.predict(tmp_path / "x.parquet", start_of(clustered(precision, n=100)))


@pytest.mark.usefixtures("_short_chunks")
def test_an_error_in_a_chunk_surfaces(precision):
    x = clustered(precision, seed=13)
    calls = []

    def chunks():
        calls.append(None)
        yield x[:900]
        if len(calls) > 3:
            raise OSError("the disk is gone")
        yield x[900:]

    with pytest.raises(OSError, match="the disk is gone"):
        jc.cem(chunks, start_of(x))


@pytest.mark.usefixtures("_short_chunks", "ctrl_c_works")
def test_ctrl_c_returns_the_best_so_far(precision):
    x = clustered(precision, seed=14)
    start = start_of(x)
    calls = []

    def chunks():
        calls.append(None)
        for first in range(0, len(x), ROWS):
            if len(calls) == 5 and first == 2 * ROWS:
                os.kill(os.getpid(), signal.SIGINT)
            yield x[first : first + ROWS]

    found = jc.cem(chunks, start)
    assert int(found.status) == jc.Status.INTERRUPTED
    expected = jc.cem(x, start, max_iter=int(found.n_iter))
    assert int(found.n_iter) >= 1
    np.testing.assert_array_equal(found.labels, jc.assign(x, found.mixture))
    assert abs(float(found.cost) - float(expected.cost)) <= 1e-4 * abs(float(expected.cost))


@pytest.mark.usefixtures("_short_chunks")
def test_time_limit_and_progress(precision):
    if precision == np.float64:
        pytest.skip(ONCE)
    x = clustered(precision, seed=15)
    found = jc.fit(ragged(x), K, effort=EFFORT, time_limit=0.0)
    assert int(found.status) == jc.Status.INTERRUPTED
    assert found.guarantee.kind == "none"
    np.testing.assert_array_equal(found.labels, jc.assign(x, found.mixture))
    reports = []
    jc.fit(ragged(x), K, effort=EFFORT, progress=reports.append)
    assert all(isinstance(report, progress_module.Report) for report in reports)
    assert len(reports) >= 2


LARGE = """
import os, sys
import numpy as np
import jaxcmle as jc

path, n, d, k = sys.argv[1], 20_000_000, 8, 8
rng = np.random.default_rng(0)
centres = 5 * rng.normal(size=(k, d)).astype(np.float32)
block = 10**6
for seed in range(n // block):
    rng = np.random.default_rng(seed)
    x = np.lib.format.open_memmap(path, "r+" if seed else "w+", np.float32, (n, d))
    noise = rng.standard_normal((block, d), np.float32)
    x[seed * block : (seed + 1) * block] = centres[rng.integers(0, k, block)] + noise
    del x
x = np.load(path, mmap_mode="r")
solution = jc.fit(x, k, effort="quick", progress=False)
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
assert jc.Status(int(solution.status)) in (jc.Status.CONVERGED, jc.Status.MAX_ITER)
assert solution.labels.shape == (n,)
sizes = np.bincount(solution.labels, minlength=k)
assert sizes.min() > 0.9 * n / k, sizes
part = np.array(x[:200_000])
streamed = jc.fit(lambda: iter([part]), k, effort="quick")
whole = jc.fit(part, k, effort="quick")
difference = abs(float(streamed.cost) / float(whole.cost) - 1)
print(peak / 2**10, difference)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_more_points_than_memory_should_hold(precision, tmp_path):
    """2e7 points, 640 MB, in less than 1 GiB: the interpreter and the labels take half of it."""
    if precision == np.float64:
        pytest.skip(ONCE)
    path = tmp_path / "large.npy"
    try:
        done = subprocess.run(
            [sys.executable, "-c", LARGE, path],
            check=True,
            timeout=1200,
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr)
    finally:
        path.unlink(missing_ok=True)
    peak, difference = map(float, done.stdout.split())
    assert peak < 1024
    assert difference < 1e-3
