"""Tables as text: rows of cells between commas, semicolons, tabs or white space.

NumPy's parser reads a file whose lines are simple. Whatever it cannot read goes to a careful
reader, which knows missing values, quotes and decimal commas, and says what is wrong and where.
"""

import contextlib
import csv
import io
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from jaxcmle.apps.columns import Choice, Choose, Columns, DataError, shown, telling_columns

__all__ = ["TextTable", "read_text"]

# Rows that tell the delimiter, and which columns hold text.
SAMPLE = 200
# Of several delimiters that would do, the first: neither of the first two is part of a number.
DELIMITERS = (";", "\t", ",", None)
# Between these, numbers may have decimal commas.
COMMA_DELIMITERS = (";", "\t")
DELIMITER_NAMES = {"\\t": "\t", "tab": "\t", " ": None, "space": None, "whitespace": None}
# NaN need not be here: `float` knows it.
MISSING = frozenset(("", "na", "n/a", "n.a.", "#n/a", "<na>", "null", "none", "?", ".", "-", "--"))
# What a spreadsheet writes into a cell that has no value begins with the sign of a comment.
COMMENT = re.compile(r"\s*#(?!N/A|DIV/0!|VALUE!|REF!|NAME\?|NUM!|NULL!)")
# A point next to a decimal comma makes no number.
DECIMAL_COMMA = str.maketrans(",.", "._")
# A first row that has 1_000 or 12:30 is data to complain of: it must not vanish as a header.
NUMERIC = re.compile(r"\s*[-+.]?[0-9]")
SPACED_CELL = re.compile(r'"([^"]*)"|(\S+)')


class TextTable(NamedTuple):
    """What a text holds.

    Attributes:
        values: `[n, len(choice.all)]`, with NaN where a value is missing.
        columns: all columns of the file.
        choice: those that were read.
        line: maps a row of `values` to its line in the file, counted from 1.
    """

    values: np.ndarray
    columns: Columns
    choice: Choice
    line: Callable[[int], int]


def read_text(
    data: bytes,
    name: str,
    choose: Choose,
    *,
    delimiter: str | None = None,
    header: bool | None = None,
) -> TextTable:
    r"""Read a table of numbers from text.

    Args:
        data: the bytes of the file: UTF-8, or UTF-16 with a byte order mark.
        name: what messages call the file.
        choose: picks columns, or raises `DataError`.
        delimiter: one character, "tab" or "space"; None finds it out.
        header: whether the first row names the columns; None finds it out.

    Returns:
        The columns that were chosen, as float64.

    Example:
        >>> from jaxcmle.apps.columns import Choice
        >>> from jaxcmle.apps.text import read_text
        >>> read_text(b"a,b\n1,NA\n", "data.csv", lambda columns: Choice([0, 1], None)).values
        array([[ 1., nan]])
    """
    text = _Text(data, name)
    chosen = _find_delimiter(text) if delimiter is None else _parse_delimiter(delimiter)
    layout = _Layout.of(text, chosen, header, choose)
    try:
        values = _read_simple(text, layout)
    except ValueError:
        values = _read_careful(text, layout)
    return TextTable(values, layout.columns, layout.choice, lambda row: layout.line(text, row))


def _parse_delimiter(delimiter: str) -> str | None:
    """Return the delimiter that a person typed; None is white space."""
    if delimiter in DELIMITER_NAMES:
        return DELIMITER_NAMES[delimiter]
    if len(delimiter) != 1 or delimiter.isalnum() or delimiter in '"#.+-\r\n\0':
        raise DataError(
            f"--delimiter {shown(delimiter)} cannot separate numbers; "
            "give one character such as ',' or ';', or the word tab or space"
        )
    return delimiter


class _Text:
    """A text, of which every pass reads the lines anew."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data = data
        self.name = name
        self.encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"

    def lines(self) -> Iterator[str]:
        """Yield all lines, each with its end."""
        problem = "it is neither UTF-8 nor UTF-16"
        with contextlib.suppress(UnicodeDecodeError):
            for line in io.TextIOWrapper(io.BytesIO(self.data), encoding=self.encoding):
                if "\0" in line:
                    problem = "it contains NUL bytes"
                    break
                yield line
            else:
                return
        raise DataError(
            f"{self.name}: is no text: {problem}; save it as UTF-8, or say of which kind it is "
            "with --kind"
        )

    def records(self, delimiter: str | None) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows of cells, each with the number of the line where it begins."""
        lines = _Records(self.lines(), delimiter)
        if delimiter is None:
            for line in lines:
                yield lines.begin, _split(line)
                lines.between = True
            return
        # Strict, since a quote that is never closed would otherwise swallow the rest of the file.
        reader = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)
        try:
            for cells in reader:
                yield lines.begin, cells
                lines.between = True
        except csv.Error as error:
            raise DataError(
                f"{self.name}: row {lines.begin}: the quotes or cells are malformed ({error}); "
                "write a quote inside quotes twice"
            ) from None

    def sample(self, delimiter: str | None) -> list[list[str]]:
        """Return the cells of the first rows, as far as they can be read like this."""
        rows = []
        with contextlib.suppress(DataError):
            for _, cells in islice(self.records(delimiter), SAMPLE):
                rows.append(cells)
        return rows


class _Records:
    """Lines without those between the rows that hold nothing: blank ones and comments.

    Whoever takes a row sets `between`: inside of quotes a blank line is part of a cell.
    """

    def __init__(self, lines: Iterator[str], delimiter: str | None) -> None:
        self.lines = enumerate(lines, start=1)
        self.delimiter = delimiter
        self.begin = 0
        self.between = True

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for number, line in self.lines:
            if self.between:
                if _holds_nothing(line, self.delimiter):
                    continue
                self.begin = number
                self.between = False
            return line
        raise StopIteration


class _Layout(NamedTuple):
    """How the rows are laid out; `skip` lines come before those of the data."""

    delimiter: str | None
    columns: Columns
    choice: Choice
    skip: int

    @classmethod
    def of(
        cls, text: _Text, delimiter: str | None, header: bool | None, choose: Choose
    ) -> "_Layout":
        """Look at the first two rows."""
        rows = list(islice(text.records(delimiter), 2))
        if not rows:
            raise DataError(f"{text.name}: holds no rows")
        begin, first = rows[0]
        second = rows[1][1] if len(rows) > 1 else None
        names = [cell.strip() or f"column {number}" for number, cell in enumerate(first, start=1)]
        named, unnamed = Columns(len(first), names), Columns(len(first), None)
        if header is None:
            columns = telling_columns(named, unnamed, choose)
            header = columns is None or _names(first, second, columns, delimiter)
        if not header:
            return cls(delimiter, unnamed, choose(unnamed), 0)
        if second is None:
            raise DataError(
                f"{text.name}: holds only a header (row {begin}) and no rows; "
                "if that row is data, say --no-header"
            )
        skip = begin + sum(cell.count("\n") for cell in first)
        return cls(delimiter, named, choose(named), skip)

    def records(self, text: _Text) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows of the data, with their lines."""
        return islice(text.records(self.delimiter), int(self.columns.names is not None), None)

    def line(self, text: _Text, row: int) -> int:
        """Return the line where a row of the data begins."""
        return next(islice(self.records(text), row, None))[0]


def _holds_nothing(line: str, delimiter: str | None) -> bool:
    # Between tabs, tabs alone are a row of missing values.
    blank = not line.strip(" \n") if delimiter == "\t" else not line.strip()
    return blank or ("#" in line and COMMENT.match(line) is not None)


def _split(line: str) -> list[str]:
    if '"' not in line:
        return line.split()
    return [cell[1] or cell[2] or "" for cell in SPACED_CELL.finditer(line)]


def _number(cell: str, decimal: str = ".") -> float | None:
    """Return the value of a cell: NaN if it is missing, None if it is no number."""
    cell = cell.strip()
    number = cell if decimal == "." else cell.translate(DECIMAL_COMMA)
    try:
        # `float` reads 1_000, which NumPy does not.
        if "_" not in number:
            return float(number)
    except ValueError:
        pass
    return float("nan") if cell.casefold() in MISSING else None


def _is_number(cell: str, delimiter: str | None) -> bool:
    """Return whether a cell is a number, or missing."""
    return _number(cell) is not None or (
        delimiter in COMMA_DELIMITERS and _number(cell, ",") is not None
    )


def _find_delimiter(text: _Text) -> str | None:
    """Return the delimiter that gives most rows the same number of cells, more than one."""
    best: tuple[bool, float] = (False, 0.0)
    found: str | None = ","
    for delimiter in DELIMITERS:
        rows = text.sample(delimiter)
        counts = Counter(len(row) for row in rows if len(row) > 1)
        share = max(counts.values(), default=0) / max(1, len(rows))
        numbers = any(_is_number(cell, delimiter) for row in rows[1:] or rows for cell in row)
        rank = (share == 1 and numbers, share)
        if share >= 0.5 and rank > best:
            best, found = rank, delimiter
    return found


def _better_delimiter(text: _Text, delimiter: str | None) -> str:
    """Return a question whether the delimiter is another one, if that would give numbers."""
    for other in DELIMITERS:
        rows = text.sample(other)
        cells = [cell for row in rows[1:] for cell in row]
        even = len({len(row) for row in rows}) == 1 and len(rows[0]) > 1
        if other != delimiter and even and cells and all(_is_number(c, other) for c in cells):
            words = {"\t": ("a tab", "tab"), None: ("white space", "space")}
            word, option = words.get(other, (f"'{other}'", f"'{other}'"))
            return f"; is the delimiter {word}? try --delimiter {option}"
    return ""


def _names(
    first: list[str], second: list[str] | None, columns: list[int], delimiter: str | None
) -> bool:
    """Return whether the first row has a word where the next one has a number."""
    return any(
        not NUMERIC.match(first[column])
        and not _is_number(first[column], delimiter)
        and (second is None or (column < len(second) and _is_number(second[column], delimiter)))
        for column in columns
    )


def _read_simple(text: _Text, layout: _Layout) -> np.ndarray:
    """Read with NumPy; any ValueError means that the careful reader must look."""
    return np.loadtxt(
        _simple_lines(text, layout),
        delimiter=layout.delimiter,
        usecols=layout.choice.all,
        comments=None,
        ndmin=2,
    )


def _simple_lines(text: _Text, layout: _Layout) -> Iterator[str]:
    """Yield the lines that both readers cut into the same cells; raise ValueError at another."""
    delimiter, width = layout.delimiter, layout.columns.width
    edge, space = (r"\s", "") if delimiter is None else (re.escape(delimiter), " *")
    cell = rf'(?:{space}"[^"{edge}\n]+"|[^"{edge}\n]*)'
    quoted = re.compile(rf"{cell}(?:{edge}{cell})*\n?")
    for line in islice(text.lines(), layout.skip, None):
        if _holds_nothing(line, delimiter):
            continue
        if '"' in line:
            if not quoted.fullmatch(line):
                raise ValueError
            line = line.replace('"', "")
        # With `usecols`, NumPy does not look whether all rows have the same number of cells.
        if (len(line.split()) if delimiter is None else line.count(delimiter) + 1) != width:
            raise ValueError
        yield line


class _NoNumberError(Exception):
    """A cell is no number; `progress` is how many were read before it."""

    def __init__(self, line: int, column: int, cell: str, progress: int) -> None:
        self.line = line
        self.column = column
        self.cell = cell
        self.progress = progress


def _read_careful(text: _Text, layout: _Layout) -> np.ndarray:
    troubles = []
    for decimal in ".," if layout.delimiter in COMMA_DELIMITERS else ".":
        try:
            return _read_cells(text, layout, decimal)
        except _NoNumberError as error:
            troubles.append(error)
    # With the wrong decimal sign the reader stumbles early, over what is a number.
    raise _explain(text, layout, max(troubles, key=lambda trouble: trouble.progress))


def _read_cells(text: _Text, layout: _Layout, decimal: str) -> np.ndarray:
    width, chosen = layout.columns.width, layout.choice.all
    # Python floats in lists would take four times the memory.
    values = array("d")
    for line, cells in layout.records(text):
        if len(cells) != width:
            raise DataError(
                f"{text.name}: row {line} has {len(cells)} cell{'s' * (len(cells) != 1)}, "
                f"the rows before it have {width}{_better_delimiter(text, layout.delimiter)}"
            )
        for column in chosen:
            value = _number(cells[column], decimal)
            if value is None:
                raise _NoNumberError(line, column, cells[column], len(values))
            values.append(value)
    return np.frombuffer(values).reshape(-1, len(chosen))


def _explain(text: _Text, layout: _Layout, trouble: _NoNumberError) -> DataError:
    """Say what to do about a cell that is no number."""
    columns, choice = layout.columns, layout.choice
    rows = [cells for _, cells in islice(layout.records(text), SAMPLE)]

    def is_text(column: int) -> bool:
        cells = [row[column] for row in rows if column < len(row)]
        return 2 * sum(_is_number(cell, layout.delimiter) for cell in cells) < len(cells)

    words = [column for column in choice.features if is_text(column)]
    numbers = sorted(set(choice.features) - set(words))
    other = _better_delimiter(text, layout.delimiter)
    message = (
        f"{text.name}: row {trouble.line}, {columns.place(trouble.column)}: "
        f"{shown(trouble.cell)} is not a number"
    )
    if _is_number(trouble.cell, layout.delimiter):
        return DataError(f"{message} like those before it; use decimal points or commas, not both")
    if trouble.column == choice.weight:
        return DataError(f"{message}; choose the column of the weights with --weight-column")
    if not numbers:
        scope = "no column" if len(choice.all) == columns.width else "none of these columns"
        return DataError(f"{message}, and {scope} holds numbers{other}")
    if other:
        return DataError(message + other)
    if trouble.column in words:
        return DataError(message + columns.advice(numbers, words))
    if columns.names is None and trouble.line == layout.line(text, 0):
        return DataError(f"{message}; if that row names the columns, say --header")
    return DataError(
        f"{message}; correct it, write NA if it is missing, or leave the column out "
        f"with --exclude {columns.option([trouble.column])}"
    )
