"""Files of solutions: whole, exact, and refused when they are not what they should be."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
import zipfile

import jax
import numpy as np
import pytest

import jaxcmle as jc
from jaxcmle import atomic
from jaxcmle.apps.saving import read_archive, write_archive

X = [[0.0, 1.0], [2.0, 0.5], [9.0, 3.0], [11.0, 2.0]]


@pytest.fixture
def solution():
    start = jc.Mixture(weights=[0.5, 0.5], means=[[1.0, 1.0], [9.0, 2.0]], variances=[1.0, 1.0])
    return jc.cem(X, start)


def bits(value):
    """Return what a leaf is made of."""
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        return repr(value)
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def assert_same(one, other):
    assert type(one) is type(other)
    for field in dataclasses.fields(one):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(first):
            assert_same(first, second)
        else:
            assert bits(first) == bits(second), field.name


def test_round_trip_bit_for_bit(solution, tmp_path):
    """Also odd numbers, a guarantee with a better solution, stacks and errors."""
    odd = np.array([np.nan, -0.0], np.asarray(solution.cost).dtype)
    strange = dataclasses.replace(
        solution,
        mixture=dataclasses.replace(solution.mixture, variances=odd),
        cost=np.float64(1e-310),
        guarantee=jc.Guarantee(
            kind="certificate",
            lower_bound=-np.inf,
            gap=0.1 + 0.2,
            method="cells",
            reason='naïve, "quoted"\n',
            reached=True,
            eta=np.float32(0.1),
            better=solution,
        ),
    )
    stack = jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * 3), solution)
    stack = dataclasses.replace(stack, error=("", "bad", ""))
    for i, one in enumerate((solution, strange, stack)):
        path = tmp_path / f"{i}.npz"
        jc.save(path, one)
        assert_same(jc.load(path), one)
        assert_same(jc.load(str(path)), one)
    assert sorted(os.listdir(tmp_path)) == ["0.npz", "1.npz", "2.npz"]


def test_float64_survives_where_jax_has_only_float32(solution, tmp_path):
    wide = dataclasses.replace(solution, cost=np.float64(1 / 3))
    jc.save(tmp_path / "a.npz", wide)
    with jax.enable_x64(False):
        assert jc.load(tmp_path / "a.npz").cost == 1 / 3


def test_a_loaded_solution_is_as_good_as_the_first(solution, tmp_path):
    jc.save(tmp_path / "a.npz", solution)
    again = jc.load(tmp_path / "a.npz")
    assert (jc.assign(X, again.mixture) == solution.labels).all()
    assert jc.cem(X, again.mixture).cost == solution.cost
    assert jc.with_certificate(X, again, min_size=2).guarantee.kind == "certificate"


def test_nothing_is_pickled(solution, tmp_path):
    jc.save(tmp_path / "a.npz", solution)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        assert all(archive[name].dtype != object for name in archive.files)
        header = json.loads(archive["header"].tobytes())
    assert header["format"] == "jaxcmle solution"
    assert header["version"] == 1


def test_extra_words_come_along(solution, tmp_path):
    write_archive(tmp_path / "a.npz", solution, {"columns": ["a", "b"]})
    again, extra = read_archive(tmp_path / "a.npz")
    assert_same(again, solution)
    assert extra == {"columns": ["a", "b"]}


def rewritten(path, **changes):
    """Write the file again with another header."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    header = {**json.loads(arrays["header"].tobytes()), **changes}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path, **arrays)


def test_other_versions_and_formats_are_refused(solution, tmp_path):
    path = tmp_path / "a.npz"
    jc.save(path, solution)
    rewritten(path, version=2)
    with pytest.raises(ValueError, match=r"a\.npz has version 2 .* reads version 1"):
        jc.load(path)
    rewritten(path, format="something else")
    with pytest.raises(ValueError, match="no file of jaxcmle"):
        jc.load(path)


def test_damage_is_named_wherever_it_is(solution, tmp_path):
    """Cut short at any length, or with any byte changed: an error, or the very same solution."""
    path = tmp_path / "a.npz"
    jc.save(path, solution)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for length in rng.integers(0, len(content), size=60):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged"):
            jc.load(path)
    for place in rng.integers(0, len(content), size=300):
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(changed))
        try:
            # Some bytes of an archive, as dates, mean nothing.
            assert_same(jc.load(path), solution)
        except ValueError as error:
            refused += 1
            assert "a.npz" in str(error)  # noqa: PT017
    assert refused > 150


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"PK\x03\x04 and no more", b"\x93NUMPY\x01\x00", b"{}"],
)
def test_files_of_others_are_refused(content, tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged, or no file of jaxcmle"):
        jc.load(path)


def test_archives_of_others_are_refused(solution, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones(3))
    with pytest.raises(ValueError, match="damaged, or no file of jaxcmle"):
        jc.load(path)
    np.save(tmp_path / "b.npy", np.ones(3))
    with pytest.raises(ValueError, match="damaged, or no file of jaxcmle"):
        jc.load(tmp_path / "b.npy")
    jc.save(path, solution)
    rewritten(path, solution={"type": "Solution", "fields": {"mixture": 3}})
    with pytest.raises(ValueError, match="damaged"):
        jc.load(path)
    rewritten(path, solution=5)
    with pytest.raises(ValueError, match="damaged"):
        jc.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.npy", b"junk")
    with pytest.raises(ValueError, match="damaged"):
        jc.load(path)


def test_what_is_no_solution_or_no_path_is_refused(solution, tmp_path):
    with pytest.raises(TypeError, match="Solution"):
        jc.save(tmp_path / "a.npz", solution.mixture)
    with pytest.raises(ValueError, match=r"end in \.npz"):
        jc.save(tmp_path / "a", solution)
    with pytest.raises(FileNotFoundError):
        jc.load(tmp_path / "missing.npz")
    with pytest.raises(FileNotFoundError):
        jc.save(tmp_path / "folder" / "a.npz", solution)
    assert os.listdir(tmp_path) == []


def test_a_failure_leaves_the_old_file_and_nothing_else(solution, tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    jc.save(path, solution)
    before = path.read_bytes()

    def fails(file, **_):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fails)
    with pytest.raises(OSError, match="disk full"):
        jc.save(path, solution)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.npz"]


def test_a_kill_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    code = f"""
import os
from jaxcmle.atomic import atomic_path
with atomic_path({str(path)!r}) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert done.returncode == -9
    assert path.read_text() == "old"


def test_links_are_followed_and_permissions_kept(tmp_path):
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with atomic.atomic_path(link) as temporary:
        assert temporary.suffix == ".txt"
        temporary.write_text("new")
    assert target.read_text() == "new"
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.npz").symlink_to(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"), atomic.atomic_path(tmp_path / "link.npz"):
        pass
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link.npz", "pipe"]
