"""The data files of the command line."""

import dataclasses
import errno
import gzip
import io
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxcmle.apps.columns import (
    Choice,
    Choose,
    Columns,
    DataError,
    choose_columns,
    shortened,
    shown,
)
from jaxcmle.apps.text import read_text

__all__ = ["DataError", "Table", "name_of", "read_table"]

KINDS = ("csv", "tsv", "npy", "npz", "parquet")
SUFFIXES = {".txt": "csv", ".dat": "csv", **{f".{kind}": kind for kind in KINDS}}
MAGIC = {b"\x93NUMPY": "npy", b"PK": "npz", b"PAR1": "parquet"}
# What an archive of NumPy calls its points, if it has several arrays of two dimensions.
ARRAYS = ("x", "X", "data")


@dataclasses.dataclass(frozen=True)
class Table:
    """The points of a data file.

    Attributes:
        x: `[n, d]`, float32 where the file has that and float64 otherwise.
        names: of the `d` columns, or None where the file has none.
        weight: `[n]`, or None.
        rows: `[n]`, which of the file's rows of data the points are, counted from 0: all of them
            unless rows were dropped.
        total_rows: how many rows of data the file has.
        dropped: how many of them were left out because values were missing.
    """

    x: np.ndarray
    names: list[str] | None
    weight: np.ndarray | None
    rows: np.ndarray
    total_rows: int
    dropped: int


class _Content(NamedTuple):
    """What a file holds; `line` maps a row to the number that a person gives it."""

    x: np.ndarray
    weight: np.ndarray | None
    columns: Columns
    choice: Choice
    line: Callable[[int], int] = lambda row: row + 1


def read_table(
    source: str | os.PathLike[str],
    *,
    kind: str | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
    columns: str | Sequence[str | int] | None = None,
    exclude: str | Sequence[str | int] | None = None,
    weight_column: str | int | None = None,
    array: str | None = None,
    drop_missing: bool = False,
    stdin: BinaryIO | None = None,
) -> Table:
    r"""Read points from a file of text, of NumPy or of Parquet.

    Text may be compressed with gzip. Blank lines and lines that begin with "#" are skipped. With
    semicolons or tabs between the cells, numbers may have decimal commas, if all have.

    Args:
        source: the file, or "-" for the standard input.
        kind: "csv" (any text), "tsv", "npy", "npz" or "parquet"; None goes by the suffix, and
            without a known one by the content.
        delimiter: the character between the cells of a text, "tab", or "space" for any white
            space; None finds it out.
        header: whether the first row of a text names the columns; None finds it out.
        columns: names, numbers from 1 and ranges such as "2-5": a list, or a string with commas
            between them; None takes all. A name wins over a number that is spelled the same.
        exclude: columns to leave out, likewise.
        weight_column: the column of the weights, which is no feature.
        array: the array of an npz file; None takes the only one of two dimensions, or the one
            that is called "x", "X" or "data".
        drop_missing: leave out the rows in which a value is missing.
        stdin: where the standard input comes from; None is that of the process.

    Returns:
        The points, with the rows they are in the file.

    Raises:
        DataError: whatever is wrong with the file, in one line that says what to do.

    Example:
        >>> import io
        >>> from jaxcmle.apps.tables import read_table
        >>> table = read_table("-", stdin=io.BytesIO(b"width,height\n1,2\n3,4\n"))
        >>> table.names, table.x.tolist()
        (['width', 'height'], [[1.0, 2.0], [3.0, 4.0]])
    """
    name = name_of(source)

    def pick(available: Columns) -> Choice:
        return choose_columns(
            name, available, wanted=columns, unwanted=exclude, weight=weight_column
        )

    with _open(source, name, stdin) as stream:
        kind = _kind(stream, source, name, kind)
        match kind:
            case "npy" | "npz":
                content = _read_numpy(stream, name, kind, array, pick)
            case "parquet":
                content = _read_parquet(stream, name, pick)
            case _:
                if kind == "tsv" and delimiter is None:
                    delimiter = "tab"
                text = read_text(stream.read(), name, pick, delimiter=delimiter, header=header)
                x = _floats(text.values[:, : len(text.choice.features)])
                weight = None if text.choice.weight is None else _floats(text.values[:, -1])
                content = _Content(x, weight, text.columns, text.choice, text.line)
    return _finish(content, name, drop_missing)


def name_of(source: str | os.PathLike[str]) -> str:
    """Return what messages call a file: its path, or the end of a long one, which tells more."""
    path = "standard input" if source == "-" else os.fspath(source)
    return path if len(path) <= 80 else "..." + path[-77:]


def _open(source: str | os.PathLike[str], name: str, stdin: BinaryIO | None) -> BinaryIO:
    """Open a file for reading anywhere in it, and unpack it."""
    try:
        if source == "-":
            stream: BinaryIO = io.BytesIO((stdin or sys.stdin.buffer).read())
        else:
            stream = open(source, "rb")  # noqa: SIM115
            if not stream.seekable():
                # A pipe, as the shell makes of <(command).
                with stream:
                    stream = io.BytesIO(stream.read())
        if stream.read(2) == b"\x1f\x8b":
            stream.seek(0)
            with stream, gzip.open(stream) as unpacked:
                return io.BytesIO(unpacked.read())
        stream.seek(0)
        return stream
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise DataError(f"{name}: is damaged: gzip cannot unpack it") from None
    except OSError as error:
        problems = {
            errno.ENOENT: "no such file",
            errno.EISDIR: "is a directory; name a file in it",
            errno.EACCES: "no permission to read it",
        }
        problem = problems.get(error.errno or 0, f"cannot be read: {error.strerror}")
        raise DataError(f"{name}: {problem}") from None
    except ValueError:
        # Of a path with NUL in it.
        raise DataError(f"{name}: no such file") from None


def _kind(stream: BinaryIO, source: str | os.PathLike[str], name: str, kind: str | None) -> str:
    """Return the kind of a file: the one that is given, or that of its suffix or content."""
    if kind is not None and kind not in KINDS:
        raise DataError(f"--kind {shown(kind)} is none of {', '.join(KINDS)}")
    start = stream.read(6)
    stream.seek(0)
    if not start:
        raise DataError(f"{name}: is empty")
    path = PurePath(source)
    suffix = PurePath(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix
    content = next((MAGIC[magic] for magic in MAGIC if start.startswith(magic)), "csv")
    return kind or SUFFIXES.get(suffix.lower(), content)


def _read_numpy(
    stream: BinaryIO, name: str, kind: str, array: str | None, pick: Choose
) -> _Content:
    values = _load(stream, name, kind, array)
    advice = "save the points as an array of shape [n, d]"
    if values.dtype.kind not in "fiub":
        raise DataError(f"{name}: holds no plain numbers but {values.dtype}; {advice}")
    if values.ndim == 1:
        advice = "reshape it: x.reshape(-1, 1) is one column"
    if values.ndim != 2:
        raise DataError(f"{name}: its array has the shape {values.shape}; {advice}")
    columns = Columns(values.shape[1], None)
    if not columns.width:
        raise DataError(f"{name}: its array has no columns (shape {values.shape}); {advice}")
    choice = pick(columns)
    weight = None if choice.weight is None else _floats(values[:, choice.weight])
    whole = choice.features == list(range(columns.width))
    x = _floats(values if whole else values[:, choice.features])
    return _Content(x, weight, columns, choice)


def _load(stream: BinaryIO, name: str, kind: str, array: str | None) -> np.ndarray:
    """Load the array of a file of NumPy, or one of its arrays."""
    # A damaged file makes NumPy stumble in a dozen ways: over its zip, its header, its size.
    try:
        loaded = np.load(stream, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return _member(loaded, name, array)
    except DataError:
        raise
    except Exception as error:
        problem = f"is damaged, or no {kind} file; write it with numpy.save or numpy.savez"
        if "Object arrays" in str(error):
            problem = "holds Python objects and no numbers; save x.astype(float)"
        raise DataError(f"{name}: {problem}") from None


def _member(archive: Any, name: str, array: str | None) -> np.ndarray:
    """Return the array that is asked for, or the one that must be meant."""
    wanted = archive.files if array is None else [array]
    listed = shortened(", ".join(archive.files), 100)
    if array is not None and array not in archive.files:
        raise DataError(f"{name}: --array {shown(array)} is not there; choose from: {listed}")
    loaded = ((member, archive[member]) for member in wanted)
    arrays = {member: value for member, value in loaded if isinstance(value, np.ndarray)}
    flat = [member for member, value in arrays.items() if value.ndim == 2]
    usual = [member for member in ARRAYS if member in arrays]
    for candidates in (flat, usual[:1], list(arrays)):
        if len(candidates) == 1:
            return arrays[candidates[0]]
    if arrays:
        raise DataError(f"{name}: choose one of its arrays with --array: {listed}")
    raise DataError(f"{name}: holds no arrays of NumPy; save a spreadsheet as CSV")


def _read_parquet(stream: BinaryIO, name: str, pick: Choose) -> _Content:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{name}: to read Parquet install pyarrow: pip install 'jaxcmle[parquet]'"
        ) from None
    try:
        file = parquet.ParquetFile(stream)
        names, types = list(file.schema_arrow.names), file.schema_arrow.types
    except Exception:
        raise DataError(f"{name}: is damaged, or no Parquet file") from None
    columns = Columns(len(names), names)
    if not columns.width:
        raise DataError(f"{name}: has no columns")
    choice = pick(columns)
    kinds = pa.types
    tests = (kinds.is_floating, kinds.is_integer, kinds.is_boolean, kinds.is_decimal, kinds.is_null)
    words = [column for column in choice.all if not any(test(types[column]) for test in tests)]
    if words:
        numbers = sorted(set(choice.features) - set(words))
        advice = columns.advice(numbers, words)
        if words[0] == choice.weight:
            advice = "; choose the column of the weights with --weight-column"
        kind = shortened(str(types[words[0]]), 30)
        raise DataError(f"{name}: {columns.place(words[0])} holds no numbers but {kind}{advice}")
    # Parquet finds columns by name, and a name may stand for several.
    unique = len(set(names)) == len(names)
    try:
        table = file.read(columns=[names[column] for column in choice.all] if unique else None)

        def values(column: int) -> np.ndarray:
            single = kinds.is_float16(types[column]) or kinds.is_float32(types[column])
            found = table.column(names[column] if unique else column)
            return found.cast(pa.float32() if single else pa.float64(), safe=False).to_numpy()

        x = np.column_stack([values(column) for column in choice.features])
        weight = None if choice.weight is None else values(choice.weight)
    except Exception:
        raise DataError(f"{name}: is damaged, or no Parquet file") from None
    return _Content(x, weight, columns, choice)


def _floats(values: np.ndarray) -> np.ndarray:
    single = values.dtype.kind == "f" and values.dtype.itemsize <= 4
    # What is too large for float64 becomes infinite, and is reported as that.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype=np.float32 if single else np.float64)


def _finish(content: _Content, name: str, drop_missing: bool) -> Table:
    """Check the values, and leave out rows."""
    x, weight, columns, choice, line = content
    total = len(x)
    if not total:
        raise DataError(f"{name}: holds no rows")

    def everywhere(test: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return test(x) if weight is None else np.column_stack([test(x), test(weight)])

    def first(mask: np.ndarray) -> tuple[int, int]:
        row, place = divmod(int(np.argmax(mask)), mask.shape[1])
        return line(row), choice.all[place]

    infinite = everywhere(np.isinf)
    if infinite.any():
        row, column = first(infinite)
        raise DataError(
            f"{name}: row {row}, {columns.place(column)}: the value is infinite; "
            "correct it, or write NA if it is missing"
        )
    if weight is not None and (weight < 0).any():
        row = int(np.argmax(weight < 0))
        raise DataError(
            f"{name}: row {line(row)}, {columns.place(choice.all[-1])}: the weight "
            f"{weight[row]:g} is negative; weights are 0 or more"
        )
    missing = everywhere(np.isnan)
    keep = ~missing.any(axis=1)
    dropped = total - int(keep.sum())
    if dropped and (not drop_missing or dropped == total):
        row, column = first(missing)
        count = int(missing.sum())
        empty = [choice.all[place] for place in np.flatnonzero(missing.all(axis=0))]
        advice = "drop those rows with --drop-missing, or fill them in"
        if empty:
            option = columns.option(empty)
            advice = f"leave out what is wholly empty with --exclude {option}"
        elif dropped == total:
            advice = "no row would be left: choose fewer columns with --columns, or fill them in"
        raise DataError(
            f"{name}: {count} missing value{'s' * (count != 1)} in {dropped} of {total} rows "
            f"(first: row {row}, {columns.name(column)}); {advice}"
        )
    rows = np.flatnonzero(keep)
    names = columns.names and [columns.names[column] for column in choice.features]
    if dropped:
        x = x[rows]
        weight = None if weight is None else weight[rows]
    return Table(x, names, weight, rows, total, dropped)
