"""The files that the command line writes."""

import argparse
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxcmle.apps.exits import Exit, ProgramError, reason
from jaxcmle.apps.processes import is_first
from jaxcmle.apps.tables import Table
from jaxcmle.atomic import atomic_path

__all__ = ["axes", "check_outputs", "print_result", "write", "write_labels", "write_report"]

# Which kinds of file each output can be.
SUFFIXES = {
    "labels": (".csv", ".npy"),
    "model": (".json", ".npz"),
    "report": (".json",),
    "picture": (".png", ".svg"),
}


def check_outputs(options: argparse.Namespace) -> None:
    """Fail before the work, not after it, where an output could not be written.

    Of several processes, the first one writes: others need no place for it.
    """
    writes = not getattr(options, "distributed", False) or is_first()
    taken = {} if options.data in ("-", None) else {os.path.realpath(options.data): "the data"}
    for name, suffixes in SUFFIXES.items():
        path = getattr(options, name, None)
        if path is None:
            continue
        if Path(path).suffix.lower() not in suffixes:
            wanted = " or ".join(suffixes)
            raise ProgramError(f"--{name} {path}: the name must end in {wanted}")
        real = os.path.realpath(path)
        if real in taken:
            raise ProgramError(f"--{name} {path}: is the file of {taken[real]} already")
        taken[real] = f"--{name}"
        if not writes:
            continue
        _check_place(name, path)
        if name == "picture" and importlib.util.find_spec("matplotlib") is None:
            raise ProgramError("--picture needs matplotlib: pip install 'jaxcmle[plot]'")
    checkpoint = getattr(options, "checkpoint", None)
    if checkpoint is not None:
        if os.path.realpath(checkpoint) in taken:
            raise ProgramError(
                f"--checkpoint {checkpoint}: is another file of this command already"
            )
        _check_place("checkpoint", checkpoint)


def _check_place(name: str, path: str) -> None:
    """Fail where no file can be written."""
    real = os.path.realpath(path)
    folder = os.path.dirname(real)
    problem = ""
    if os.path.isdir(real):
        problem = "is a folder"
    elif os.path.exists(real) and not os.path.isfile(real):
        problem = "is no regular file"
    elif not os.path.isdir(folder):
        problem = "there is no such folder"
    elif not os.access(folder, os.W_OK):
        problem = "its folder cannot be written to"
    if problem:
        raise ProgramError(f"--{name} {path}: {problem}", Exit.NOT_WRITTEN)


def write(path: str | None, writer: Callable[[str], Any]) -> None:
    """Write one output, if it was asked for; every writer writes whole files or none."""
    if path is None:
        return
    try:
        writer(path)
    except OSError as error:
        raise ProgramError(f"{path}: {reason(error)}", Exit.NOT_WRITTEN) from None


def write_labels(path: str, table: Table, labels: np.ndarray) -> None:
    """Write a label for every row of the data; rows that were left out have none, or -1."""
    every = np.full(table.total_rows, -1, np.int32)
    every[table.rows] = labels
    with atomic_path(path) as temporary:
        if Path(path).suffix.lower() == ".npy":
            with open(temporary, "wb") as file:
                np.save(file, every)
            return
        with open(temporary, "w", encoding="utf-8", newline="") as text:
            text.write("row,label\n")
            numbered = enumerate(every.tolist(), 1)
            text.writelines(f"{row},{label if label >= 0 else ''}\n" for row, label in numbered)


def write_report(path: str, record: dict[str, Any]) -> None:
    """Write a record as JSON."""
    with atomic_path(path) as temporary:
        temporary.write_text(_json(record) + "\n", encoding="utf-8")


def axes() -> Any:
    """Return axes that need no screen."""
    from matplotlib.figure import Figure

    return Figure(figsize=(7, 5.5), layout="constrained").subplots()


def print_result(options: argparse.Namespace, lines: list[str], record: dict[str, Any]) -> None:
    """Print lines for a person, or a record for a program."""
    print(_json(record) if options.json else "\n".join(lines))


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, allow_nan=False)
