"""Solutions as files: one `.npz` that any NumPy can open, written whole or not at all.

The arrays of a solution are members of the archive; what is not an array is in `header`, a text in
JSON that also names the format and its version. Nothing is pickled.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxcmle.atomic import atomic_path
from jaxcmle.problem.archive import described, restored
from jaxcmle.problem.types import Solution

__all__ = ["load", "read_archive", "save", "write_archive"]

FORMAT = "jaxcmle solution"
VERSION = 1


def save(path: str | os.PathLike[str], solution: Solution) -> None:
    """Write a solution to an `.npz` file, whole or not at all.

    A file that was there before is replaced in one step, once the new one is complete: nobody ever
    reads half of it, and a crash loses nothing.

    Args:
        path: where to; must end in `.npz`.
        solution: the solution, or a stack of solutions.

    Example:
        >>> import pathlib, tempfile
        >>> import jaxcmle as jc
        >>> solution = jc.fit([[0.0], [2.0], [9.0], [11.0]], 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "solution.npz")
        ...     jc.save(path, solution)
        ...     again = jc.load(path)
        >>> (again.labels == solution.labels).all().item(), again.cost == solution.cost
        (True, Array(True, dtype=bool))
    """
    write_archive(path, solution, {})


def load(path: str | os.PathLike[str]) -> Solution:
    """Return the solution in a file that `save` has written, bit for bit.

    Args:
        path: the file.

    Returns:
        The `Solution`, which holds NumPy arrays: those keep float64 whatever JAX is set to. All
        functions take it as it is.

    Raises:
        ValueError: the file is damaged, is no such file, or comes from a later version.

    Example:
        >>> import pathlib, tempfile
        >>> import jaxcmle as jc
        >>> x = [[0.0], [2.0], [9.0], [11.0]]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "solution.npz")
        ...     jc.save(path, jc.fit(x, 2))
        ...     jc.assign(x, jc.load(path).mixture).tolist()
        [0, 0, 1, 1]
    """
    return read_archive(path)[0]


def write_archive(
    path: str | os.PathLike[str], solution: Solution, extra: Mapping[str, Any]
) -> None:
    """Write a solution and what else there is to say in JSON."""
    if not isinstance(solution, Solution):
        raise TypeError(f"expected a jaxcmle.Solution, got {type(solution).__name__}")
    if Path(path).suffix != ".npz":
        raise ValueError(f"the name of the file must end in .npz, got {os.fspath(path)!r}")
    arrays: dict[str, np.ndarray] = {}
    members = described(solution, "", arrays)
    header = {"format": FORMAT, "version": VERSION, "solution": members, "extra": dict(extra)}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, header=text, **arrays)  # type: ignore[arg-type]


def read_archive(path: str | os.PathLike[str]) -> tuple[Solution, dict[str, Any]]:
    """Return the solution in a file and what else there is, or say what is wrong with the file."""
    name = os.fspath(path)
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise ValueError(f"{name} is damaged, or no file of jaxcmle.save: it is no .npz file")
        file.seek(0)
        # Damaged bytes raise nearly anything.
        try:
            with np.load(file, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
            header = json.loads(arrays.pop("header").tobytes())
            known = header["format"] == FORMAT
            version = header["version"] if known else None
        except Exception as error:
            raise ValueError(f"{name} is damaged, or no file of jaxcmle.save ({error})") from None
    if not known:
        raise ValueError(f"{name} is no file of jaxcmle.save: its format is {header['format']!r}")
    if version != VERSION:
        raise ValueError(
            f"{name} has version {version!r} of the format, and this jaxcmle reads version "
            f"{VERSION}: install the jaxcmle that wrote it, or a later one"
        )
    try:
        solution = restored(header["solution"], arrays)
        extra = header["extra"]
        whole = isinstance(solution, Solution) and isinstance(extra, dict)
    except Exception as error:
        raise ValueError(f"{name} is damaged: {error}") from None
    if not whole:
        raise ValueError(f"{name} is damaged: it holds no solution")
    return solution, extra
