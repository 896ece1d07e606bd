"""Sums over chunks, which the host adds up."""

from typing import Any

import numpy as np

__all__ = ["Total"]


class Total:
    """A sum of arrays in float64, and beside it the sum of what each addition has rounded off.

    As exact as if it were summed with twice the digits and rounded once (Knuth's two-sum), however
    many chunks there are. What is not finite makes it NaN or infinity, as any sum.

    Example:
        >>> from jaxcmle.stream.totals import Total
        >>> total = Total()
        >>> for value in (1e17, 1.0, 1.0, -1e17):
        ...     total.add(value)
        >>> float(total.value)
        2.0
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._sum: Any = 0.0
        self._lost: Any = 0.0

    def add(self, part: Any) -> None:
        """Add an array, of the same shape each time."""
        part = np.asarray(part, np.float64)
        # What is not finite is for the caller to see, who has a status for it.
        with np.errstate(over="ignore", invalid="ignore"):
            total = self._sum + part
            added = total - self._sum
            lost = (self._sum - (total - added)) + (part - added)
        # Infinity has lost nothing.
        self._lost = self._lost + np.where(np.isfinite(lost), lost, 0.0)
        self._sum = total

    @property
    def value(self) -> Any:
        """The sum so far."""
        return self._sum + self._lost
