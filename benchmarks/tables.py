"""Tables of what was measured: printed after a run, put into README, held against an older run."""

import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# Numbers closer than this are called the same when two runs are compared.
SAME = 0.02


class Table(NamedTuple):
    """A table with the words around it, all made from the results."""

    before: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    after: str = ""

    def markdown(self) -> str:
        """Return it as README shows it."""
        lines = [*_wrapped(self.before), ""] if self.before else []
        lines += ["| " + " | ".join(self.header) + " |", "|" + "---|" * len(self.header)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        lines += ["", *_wrapped(self.after)] if self.after else []
        return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    """Return paragraphs as lines of README's width."""
    lines = []
    for paragraph in text.split("\n\n"):
        lines += textwrap.wrap(paragraph, 100, break_long_words=False, break_on_hyphens=False)
        lines.append("")
    return lines[:-1]


class Part(NamedTuple):
    """Something to measure: how, told whether to be quick, and how the results are shown."""

    measure: Callable[[bool], dict[str, Any]]
    table: Callable[[dict[str, Any]], Table]


def ratio(found: dict[str, float]) -> str:
    """Return a ratio with its range over the rounds."""
    return f"{number(found['ratio'])} ({number(found['lowest'])} to {number(found['highest'])})"


def number(value: float | None) -> str:
    """Return a number with two digits or so; a dash for none."""
    if value is None:
        return "–"
    return (
        f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    )


def span(values: Iterable[float], digits: int, unit: str = "") -> str:
    """Return the lowest and the highest; one of them, where they are the same."""
    rounded = [round(value, digits) for value in values]
    low, high = (f"{value:g}" for value in (min(rounded), max(rounded)))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def source(found: dict[str, Any]) -> str:
    """Return one line on where the numbers of a file come from."""
    where = found["provenance"]
    sgemm, copied = (value / 1e9 for value in found["limits"].values())
    dirty = ", with changes that are not committed" if where["dirty"] else ""
    quick = "--quick " if found["quick"] else ""
    return (
        f"*`python -m benchmarks {quick}--only {found['part']}` at commit `{where['commit']}`"
        f"{dirty}: jax {where['jax']} on {where['cores']} cores of {where['processor']} "
        f"(sgemm {sgemm:.0f} Gflop/s, copy {copied:.0f} GB/s), {where['dtype']}.*"
    )


def compare(old: Table, new: Table) -> str:
    """Return the rows of two runs side by side, with the change of every number."""
    before = {row[0]: row for row in old.rows}
    lines = ["| " + " | ".join(new.header) + " |", "|" + "---|" * len(new.header)]
    for row in new.rows:
        if row[0] not in before:
            lines.append("| " + " | ".join((f"{row[0]} (new)", *row[1:])) + " |")
            continue
        pairs = zip(before.pop(row[0])[1:], row[1:], strict=False)
        lines.append("| " + " | ".join((row[0], *(_change(*pair) for pair in pairs))) + " |")
    lines += [f"| {name} (gone) |" + " |" * (len(new.header) - 1) for name in before]
    return "\n".join(lines)


def _change(old: str, new: str) -> str:
    found = [re.search(r"-?\d[\d,]*\.?\d*", text) for text in (old, new)]
    if old == new or found[0] is None or found[1] is None:
        return new if old == new else f"{old} → {new}"
    first, second = (float(each.group().replace(",", "")) for each in found if each)
    if first == 0:
        return f"{old} → {new}"
    factor = second / first
    return f"{new} (as before)" if abs(factor - 1) < SAME else f"{old} → {new} (×{factor:.2f})"
