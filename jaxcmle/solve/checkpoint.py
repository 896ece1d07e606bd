"""Long searches that outlive their process: what was found so far, in a file.

The file is an archive as NumPy writes them: a header in JSON, with the format, the function and the
fingerprint of its arguments, and the arrays of the state. It is replaced in one step, so that it is
whole at any moment. A file of anybody else, or of other arguments, is never touched.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxcmle.atomic import atomic_path
from jaxcmle.problem.archive import described, restored
from jaxcmle.problem.placement import from_first, is_first, same_in_all, to_host
from jaxcmle.problem.types import Problem, Solution, Status

__all__ = [
    "Checkpoint",
    "PathOption",
    "devices_of",
    "digest",
    "dtype_text",
    "instance_parts",
    "open_checkpoint",
    "problem_text",
]

PathOption = str | os.PathLike[str] | None

FORMAT = "jaxcmle checkpoint"
VERSION = 1
# Seconds between two saves, at least; and the share of the time that saving may take.
EVERY = 3.0
SHARE = 0.1
# Bytes of an array that are looked at in one go.
PIECE = 2**26
TAG = "checkpoint"


class Checkpoint:
    """A state made of named entries, and the file that it is saved to.

    Example:
        >>> import pathlib, tempfile
        >>> from jaxcmle.solve.checkpoint import Checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "work.ckpt")
        ...     Checkpoint(path, {"function": "sum", "data": "1a2b"}).save(done=3, total=6.0)
        ...     Checkpoint(path, {"function": "sum", "data": "1a2b"}).load()
        {'done': 3, 'total': 6.0}
    """

    def __init__(
        self, path: PathOption, fingerprint: Mapping[str, str], mesh: Mesh | None = None
    ) -> None:
        """Open a checkpoint: read it if it is there, else write one without entries.

        Args:
            path: the file; None to save nothing, and to find nothing.
            fingerprint: what the state depends on, by names that users know.
            mesh: the devices at work. If several processes have them, the first one writes.

        Raises:
            ValueError: there is a file that is no checkpoint, one of other work, or not the same
                in all processes.
            FileNotFoundError: there is no such folder.
        """
        self._path = None if path is None else Path(os.path.realpath(path))
        self._fingerprint = {"version": _software(), **fingerprint}
        self._entries: dict[str, Any] = {}
        self._due = -np.inf
        if self._path is None:
            return
        self._begin(self._path, mesh)
        if not is_first(mesh):
            self._path = None
        self._due = time.monotonic() + EVERY

    def _begin(self, path: Path, mesh: Mesh | None) -> None:
        """Read the file, or write it; raise in all processes unless all have read the same."""
        wrong: Exception | None = None
        try:
            _check_place(path)
            if path.exists():
                self._entries = self._read(path)
            if is_first(mesh):
                _remove_leftovers(path)
                if not path.exists():
                    # What is wrong with the place shows before the work begins.
                    self._write()
        except OSError as error:
            # Of a file that is open, nobody says the name.
            wrong = error if error.filename else OSError(error.errno, error.strerror, str(path))
        except ValueError as error:
            wrong = error
        alike = same_in_all(digest(*jax.tree.leaves(self._entries)) if wrong is None else "", mesh)
        of_first = from_first("" if wrong is None else str(wrong), mesh)
        if wrong is not None:
            raise wrong
        if of_first:
            raise ValueError(f"the first process cannot use the checkpoint: {of_first}")
        if not alike:
            raise ValueError(
                f"{path} is not the same in all processes: put it where all of them see it"
            )

    def load(self) -> dict[str, Any]:
        """Return the entries that there are."""
        return dict(self._entries)

    def get(self, name: str) -> Any:
        """Return an entry, None if there is none."""
        return self._entries.get(name)

    def resumed(self, name: str, begin: Any) -> Any:
        """Return an entry in the form and on the devices of `begin`; that itself if there is none.

        Lists and named tuples come back from the file as tuples, so that their form is lost.
        """
        entry = self.get(name)
        if entry is None:
            return begin
        leaves, structure = jax.tree.flatten(begin)
        saved = jax.tree.leaves(entry)
        pairs = zip(saved, leaves, strict=True)
        return jax.tree.unflatten(structure, [_placed(one, like) for one, like in pairs])

    def answer(self) -> Solution | None:
        """Return the answer, if the work has come to its end."""
        return self.get("answer")

    def finished(self, solution: Solution, cut: bool) -> Solution:
        """Save the answer and return it, unless it was cut short: then there is more to do."""
        cut = cut or bool(solution.guarantee.interrupted)
        if not cut and int(solution.status) != Status.INTERRUPTED:
            self.save(answer=solution)
        return solution

    def save_if_due(self, **entries: Any) -> None:
        """Change some entries, and save all of them unless that has just been done."""
        self._entries.update(entries)
        if time.monotonic() >= self._due:
            self._write_if_possible()

    def save(self, **entries: Any) -> None:
        """Change some entries, and save all of them now."""
        self._entries.update(entries)
        self._write_if_possible()

    def _write_if_possible(self) -> None:
        """Write the file, if there is to be one; a full disk must not cost the search."""
        if self._path is None:
            return
        try:
            self._write()
        except OSError as error:
            self._due = time.monotonic() + EVERY
            warnings.warn(
                f"{self._path}: the checkpoint could not be written ({error.strerror or error}); "
                "the search goes on, and the file holds what was saved before",
                RuntimeWarning,
                stacklevel=3,
            )

    def _write(self) -> None:
        assert self._path is not None
        begin = time.monotonic()
        arrays: dict[str, np.ndarray] = {}
        entries = described(self._entries, "", arrays, exact=True)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self._fingerprint,
            "entries": entries,
        }
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with (
            atomic_path(self._path, f"{_tag()}{os.getpid()}") as temporary,
            open(temporary, "wb") as file,
        ):
            np.savez(file, header=text, **arrays)  # type: ignore[arg-type]
        end = time.monotonic()
        self._due = end + max(EVERY, (end - begin) / SHARE)

    def _read(self, path: Path) -> dict[str, Any]:
        """Return the entries of a file, or say what is wrong with it."""
        remedy = "It was left as it is: delete it to begin anew, or give another path"
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                header = json.loads(archive["header"].tobytes())
                known = header["format"] == FORMAT
                version = header["version"]
                if known and version == VERSION:
                    given = dict(header["fingerprint"])
                    arrays = {key: archive[key] for key in archive.files if key != "header"}
        # Damaged bytes raise nearly anything.
        except Exception as error:
            raise ValueError(
                f"{path} is damaged, or no checkpoint of jaxcmle ({error}). {remedy}"
            ) from None
        if not known:
            raise ValueError(f"{path} is no checkpoint, but a {header['format']!r}. {remedy}")
        if version != VERSION:
            raise ValueError(
                f"{path} has version {version!r} of the format, and this jaxcmle has {VERSION}. "
                f"{remedy}"
            )
        own = self._fingerprint
        names = [name for name in {**own, **given} if own.get(name) != given.get(name)]
        if names:
            listed = ", ".join(_difference(name, given.get(name), own.get(name)) for name in names)
            raise ValueError(f"{path} is the checkpoint of another call: {listed}. {remedy}")
        try:
            entries = restored(header["entries"], arrays)
        except Exception as error:
            raise ValueError(f"{path} is damaged ({error}). {remedy}") from None
        return dict(entries)


def open_checkpoint(
    path: PathOption,
    fingerprint: Callable[[], Mapping[str, str]],
    mesh: Mesh | None = None,
) -> Checkpoint:
    """Return the checkpoint at a path; None saves nothing, and computes no fingerprint."""
    if path is None:
        return Checkpoint(None, {})
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"checkpoint must be a path or None, got {type(path).__name__}")
    if mesh is None:
        # Before the fingerprint, which may take seconds, and which other processes take part in.
        _check_place(Path(os.path.realpath(path)))
    return Checkpoint(path, fingerprint(), mesh)


def instance_parts(
    function: str,
    points: Array,
    weight: Any,
    key: Array,
    problem: Problem,
    mesh: Mesh | None,
    **options: Any,
) -> dict[str, str]:
    """Return the fingerprint of a call for one instance.

    Args:
        function: its name.
        points: all of the points.
        weight: what is known of their weights: arrays and None.
        key: the key.
        problem: the problem.
        mesh: the devices at work, None for those that the points are on.
        options: all else that the answer depends on, but for limits on time. Arrays by their
            digests.
    """
    return {
        "function": function,
        "x": digest(points),
        "sample_weight": digest(*jax.tree.leaves(weight)),
        "key": digest(key),
        "problem": problem_text(problem),
        "dtype": dtype_text(points.dtype),
        "devices": devices_of(points if mesh is None else mesh),
        **{name: repr(value) for name, value in options.items()},
    }


def dtype_text(dtype: Any) -> str:
    """Return the dtype of the points, and whether others are wider."""
    double = jnp.result_type(float) == jnp.float64
    return f"{np.dtype(dtype).name}{' with jax_enable_x64' if double else ''}"


def problem_text(problem: Problem) -> str:
    """Return a problem as text, with all digits."""
    values = ", ".join(repr(float(value)) for value in jax.tree.leaves(problem))
    return f"{type(problem).__name__}({values})"


def digest(*arrays: Any) -> str:
    """Return a hash of arrays or keys, on the host or on devices: of types, shapes and bytes.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxcmle.solve.checkpoint import digest
        >>> digest(np.ones(3, np.float32)) == digest(jnp.ones(3, jnp.float32))
        True
    """
    result = hashlib.blake2b(digest_size=16)
    for array in arrays:
        if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            result.update(str(jax.random.key_impl(array)).encode())
            array = jax.random.key_data(array)
        if not isinstance(array, jax.Array):
            array = np.asarray(array)
        result.update(f"{array.dtype.name}{array.shape}".encode())
        # Not all at once: what is on a device may be larger than what is free on the host.
        rows = max(1, PIECE * max(1, len(array) if array.ndim else 1) // max(1, array.nbytes))
        pieces = range(0, len(array), rows) if array.ndim and array.nbytes > PIECE else [None]
        for start in pieces:
            piece = array if start is None else array[start : start + rows]
            flat = np.ascontiguousarray(to_host(piece)).reshape(-1)
            result.update(flat.view(np.uint8).data)
    return result.hexdigest()


def devices_of(place: Array | Mesh) -> str:
    """Return how many devices of which kind an array is on, or there are in a mesh."""
    if isinstance(place, Mesh):
        shape = " x ".join(f"{size} {name}" for name, size in place.shape.items())
        processes = len({device.process_index for device in place.devices.flat})
        several = f" of {processes} processes" if processes > 1 else ""
        return f"{shape} x {place.devices.flat[0].device_kind}{several}"
    devices = sorted(place.devices(), key=lambda device: device.id)
    return f"{len(devices)} x {devices[0].device_kind}"


def _placed(saved: Any, like: Any) -> Any:
    """Return a leaf as an array of the same type, on the same devices."""
    array = jnp.asarray(saved)
    if array.dtype != like.dtype or array.shape != like.shape:
        raise ValueError(
            f"the checkpoint holds {array.dtype} {array.shape} where the search has {like.dtype} "
            f"{like.shape}: delete it to begin anew, or give another path"
        )
    return jax.device_put(array, like.sharding) if like.committed else array


def _check_place(path: Path) -> None:
    """Raise where no file can be."""
    if not path.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "no such folder for the checkpoint: make it first", str(path.parent)
        )
    if path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "checkpoint must be a file, and this is a folder", str(path)
        )
    if path.exists() and not path.is_file():
        raise OSError(
            errno.EINVAL, "checkpoint must be a regular file, and this is none", str(path)
        )


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote."""
    begin, end = f".{path.stem}-{_tag()}", path.suffix
    for file in path.parent.iterdir():
        middle = file.name.removeprefix(begin).removesuffix(end)
        if file.name != f"{begin}{middle}{end}" or not middle.isdigit():
            continue
        if int(middle) == os.getpid() or not _is_running(int(middle)):
            # Windows does not remove what another process has open.
            with contextlib.suppress(OSError):
                file.unlink()


def _tag() -> str:
    """Return what temporary files have in their names: other machines have other ones."""
    machine = re.sub(r"[^\w.]", "_", platform.node())
    return f"{TAG}-{machine}-"


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _software() -> str:
    own = sys.modules["jaxcmle"].__version__
    return f"jaxcmle {own} with jax {jax.__version__} and jaxlib {metadata.version('jaxlib')}"


def _difference(name: str, given: str | None, own: str | None) -> str:
    """Return what differs: the values where they are short, the name alone for a hash."""
    texts = [str(value) for value in (given, own)]
    if name in ("x", "sample_weight", "key", "init") or max(map(len, texts)) > 200:
        return f"{name} differs"
    return f"{name} was {texts[0]} and is {texts[1]}"
