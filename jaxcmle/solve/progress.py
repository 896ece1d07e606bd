"""Long work: a line about it on a terminal, and a Ctrl-C that loses nothing."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["CtrlC", "Progress", "ProgressOption", "Report"]


class Report(NamedTuple):
    """How far a search has come.

    Attributes:
        done: candidates or cells looked at, rounds or instances done.
        total: candidates or instances in all, or rounds at most; 0 where that is not known.
        rate: candidates, cells, rounds or instances a second.
        cost: the best cost so far, in the user's units; NaN where there is no such thing, as for
            many instances.
        gap: for a certificate, how far from optimal that can be, in nats per point; else None.
    """

    done: int
    total: int
    rate: float
    cost: float
    gap: float | None = None


# Characters of a full bar.
BAR = 20

ProgressOption = bool | Callable[[Report], Any] | None


class Progress:
    """Shows reports as they come.

    Args:
        option: True shows a line on standard error; False nothing; None a line if standard error is
            a terminal or a notebook; a function is called with every `Report`.
        unit: what is counted.
    """

    def __init__(self, option: ProgressOption, unit: str = "candidates") -> None:
        """Decide what to show."""
        if not (option is None or isinstance(option, bool) or callable(option)):
            raise TypeError(
                f"progress must be True, False, None or a function of a report, got {option!r}"
            )
        self._function = option if callable(option) else None
        self._unit = unit
        # What writes to a notebook is no terminal, and its kernel is always loaded.
        interactive = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._shows = interactive if option is None else option is True
        self._begin = time.monotonic()
        self._last = -1.0
        self._width = 0

    def update(self, done: int, total: int, cost: float, gap: float | None = None) -> None:
        """Report, to the terminal not more often than is pleasant. A total of 0 is not known."""
        now = time.monotonic()
        report = Report(done, total, done / max(now - self._begin, 1e-9), cost, gap)
        if self._function is not None:
            self._function(report)
        if self._shows and (now - self._last > 0.2 or 0 < total <= done):
            self._last = now
            line = _line(report, self._unit)
            self._width = max(self._width, len(line))
            print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)
            self._width = 0


def _line(report: Report, unit: str) -> str:
    if report.total:
        share = min(report.done / report.total, 1.0)
        bar = "#" * int(BAR * share)
        how_far = f"[{bar:<{BAR}}] {share:6.1%} of {_short(report.total)} {unit}"
    else:
        how_far = f"{_short(report.done)} {unit}"
    line = f"{how_far}, {_short(report.rate)}/s"
    if not math.isnan(report.cost):
        line += f", best cost {report.cost:.3f}"
    return line if report.gap is None else f"{line}, at most {report.gap:.4f} per point too much"


class CtrlC:
    """Inside `with`, the first Ctrl-C is only noted; the second raises `KeyboardInterrupt`.

    An exception could come at any place, also where Python drops it (JAX collects garbage in a
    callback of its own). Between two steps of the work it is safe to stop. Where somebody else
    handles the signal, and outside the main thread, nothing is changed.
    """

    def __enter__(self) -> "CtrlC":
        """Listen."""
        self.pressed = False
        main = threading.current_thread() is threading.main_thread()
        self._listens = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._listens:
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *_: Any) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        if sys.stderr.isatty():
            # Not by print: the signal may have come in the middle of one.
            os.write(sys.stderr.fileno(), b"\nstopping after this step; Ctrl-C again: at once\n")

    def __exit__(self, *_: object) -> None:
        """Leave the signal as it was."""
        if self._listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _short(count: float) -> str:
    for limit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.1f}{name}"
    return f"{count:.0f}"
