"""The columns of a data file: which there are, which are wanted, and how messages speak of them."""

import csv
import difflib
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = [
    "Choice",
    "Choose",
    "Columns",
    "DataError",
    "choose_columns",
    "shortened",
    "shown",
    "telling_columns",
]

LONGEST_MESSAGE = 300
LONGEST_LIST = 70
# Nine digits, since `int` refuses thousands of them.
NUMBER = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class DataError(ValueError):
    """What is wrong with a data file, where, and what to do: one line for the command line."""

    def __init__(self, message: str) -> None:
        """Keep the message to one line of at most 300 characters that can be printed."""
        line = "".join(letter if letter.isprintable() else "?" for letter in message)
        super().__init__(shortened(line, LONGEST_MESSAGE))


class Columns(NamedTuple):
    """The columns of a file.

    Attributes:
        width: how many there are.
        names: what they are called, or None.
    """

    width: int
    names: list[str] | None

    def place(self, column: int) -> str:
        """Return the number of a column and its name, if it has one of its own."""
        number = f"column {column + 1}"
        if self.names is None or self.names[column] == number:
            return number
        return f"{number} ({shown(self.names[column])})"

    def name(self, column: int) -> str:
        """Return the name of a column, or its number."""
        number = f"column {column + 1}"
        if self.names is None or self.names[column] == number:
            return number
        return f"column {shown(self.names[column])}"

    def option(self, columns: Iterable[int]) -> str:
        """Return what a person types to choose the columns."""
        words: list[str] = []
        for column in columns:
            name = "" if self.names is None else self.names[column]
            # A name that we or the shell could misread is harder to type than its number.
            plain = re.fullmatch(r"[^\W\d][\w. -]*", name) and (self.names or []).count(name) == 1
            words.append(name if plain else str(column + 1))
            if len(",".join(words)) > LONGEST_LIST:
                return ",".join([*words[:-1], "..."])
        return shlex.quote(",".join(words))

    def advice(self, numbers: list[int], words: list[int]) -> str:
        """Return how to choose the columns that hold numbers."""
        these = "this" if len(words) == 1 else "these"
        exclude = f"leave {these} out with --exclude {self.option(words)}"
        if not numbers:
            return f"; {exclude}"
        return f"; choose the columns with --columns {self.option(numbers)} or {exclude}"


class Choice(NamedTuple):
    """Which columns are wanted, by index.

    Attributes:
        features: those of the points.
        weight: the one of their weights, or None.
    """

    features: list[int]
    weight: int | None

    @property
    def all(self) -> list[int]:
        """The features, then the weight."""
        return self.features if self.weight is None else [*self.features, self.weight]


# Picks columns, or raises `DataError`.
Choose = Callable[[Columns], Choice]


def shortened(text: str, longest: int) -> str:
    """Cut a text that is too long, and show that it was cut."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def shown(value: object) -> str:
    """Return a value from the file as a message shows it."""
    return repr(shortened(str(value), 30))


def choose_columns(
    name: str,
    columns: Columns,
    *,
    wanted: str | Sequence[str | int] | None = None,
    unwanted: str | Sequence[str | int] | None = None,
    weight: str | int | None = None,
) -> Choice:
    """Choose columns by names, by numbers from 1 and by ranges of numbers.

    Args:
        name: what messages call the file.
        columns: those that there are.
        wanted: the features, default all.
        unwanted: columns that are no features.
        weight: the column of the weights, which is no feature either.

    Example:
        >>> from jaxcmle.apps.columns import Columns, choose_columns
        >>> columns = Columns(4, ["id", "width", "height", "count"])
        >>> choose_columns("data.csv", columns, wanted="2-4", weight="count")
        Choice(features=[1, 2], weight=3)
    """
    features = list(range(columns.width))
    if wanted is not None:
        features = _find_all(name, columns, wanted, "--columns")
        column, times = Counter(features).most_common(1)[0]
        if times > 1:
            raise DataError(f"{name}: --columns has {columns.place(column)} more than once")
    left_out = set() if unwanted is None else set(_find_all(name, columns, unwanted, "--exclude"))
    place = None
    if weight is not None:
        found = _find(name, columns, weight, "--weight-column")
        if len(found) > 1:
            raise DataError(f"{name}: --weight-column {shown(weight)} is more than one column")
        place = found[0]
        left_out.add(place)
    features = [column for column in features if column not in left_out]
    if not features:
        raise DataError(
            f"{name}: none of the {columns.width} columns is left for the points; "
            "change --columns, --exclude or --weight-column"
        )
    return Choice(features, place)


def _find_all(
    name: str, columns: Columns, entries: str | Sequence[str | int], option: str
) -> list[int]:
    if isinstance(entries, str):
        # Quotes, as in the file, keep together a name that has a comma in it.
        try:
            parts = next(csv.reader([entries], skipinitialspace=True), [])
        except csv.Error:
            raise DataError(f"{name}: {option} {shown(entries)} is no list of columns") from None
        entries = [part.strip() for part in parts if part.strip()]
    found = [column for entry in entries for column in _find(name, columns, entry, option)]
    if not found and option == "--columns":
        raise DataError(f"{name}: --columns names no column")
    return found


def _find(name: str, columns: Columns, entry: str | int, option: str) -> list[int]:
    """Return the columns that one entry stands for."""
    names = columns.names or []
    asked = f"{name}: {option} {shown(entry)}"
    if isinstance(entry, str) and entry in names:
        found = [column for column, other in enumerate(names) if other == entry]
        if len(found) > 1:
            numbers = " and ".join(str(column + 1) for column in found[:3])
            raise DataError(f"{asked} is the name of columns {numbers}; choose by number")
        return found
    match = NUMBER.fullmatch(str(entry))
    if match is None:
        if columns.names is None:
            raise DataError(
                f"{asked} is no column: the columns have no names; choose by number, 1 to "
                f"{columns.width}"
            )
        raise DataError(f"{asked} is no column; there are {_listed(str(entry), names)}")
    first = int(match[1])
    last = int(match[2] or first)
    if not 1 <= first <= last <= columns.width:
        raise DataError(f"{asked} is no column; their numbers are 1 to {columns.width}")
    return list(range(first - 1, last))


def _listed(wanted: str, names: Sequence[str]) -> str:
    """Return names as a list that is not too long, those like the one that is wanted first."""

    def unlikeness(name: str) -> float:
        matcher = difflib.SequenceMatcher(None, wanted.casefold(), name.casefold()[:50])
        return min(-matcher.ratio(), -0.6)

    # Comparing takes its time, and a table may have very many columns.
    words = [shown(name) for name in sorted(names[:1000], key=unlikeness)]
    return shortened(", ".join(words), 140)


def telling_columns(named: Columns, unnamed: Columns, choose: Choose) -> list[int] | None:
    """Return the columns that tell whether there is a header; None if there must be one."""
    try:
        chosen = choose(named).all
    except DataError:
        return list(range(named.width))
    try:
        # A number may be a name: what it means without a header counts too.
        return [*chosen, *choose(unnamed).all]
    except DataError:
        return None
