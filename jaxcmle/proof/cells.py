"""Cells: boxes of means times intervals of precisions, on a dyadic grid, on the host.

Corners have whole coordinates, so that cells that touch share them exactly: there are no gaps
between cells, and what a corner takes long to compute is computed once.
"""

from typing import NamedTuple

import numpy as np

__all__ = ["UNITS", "Cells", "Domain", "chords", "halves", "missing_corners", "root_cells", "slack"]

# The finest cells: so many along each axis.
UNITS = 2**40
# The first cells span at most this ratio of precisions.
ROOT_LOG_RATIO = 0.7


class Domain(NamedTuple):
    """The place of all cells.

    Attributes:
        low: `[r]`, the least coordinates of a mean.
        high: `[r]`, the largest.
        precision_low: the least precision.
        precision_high: the largest.
        log_factor: `d / 2`, or 0 for WKM.
    """

    low: np.ndarray
    high: np.ndarray
    precision_low: float
    precision_high: float
    log_factor: float

    def means(self, places: np.ndarray) -> np.ndarray:
        """Return the coordinates of places `[m, r]`."""
        return self.low + (self.high - self.low) * (places / UNITS)

    def precisions(self, places: np.ndarray) -> np.ndarray:
        """Return the precisions of places `[m]`."""
        return self.precision_low * (self.precision_high / self.precision_low) ** (places / UNITS)


class Cells(NamedTuple):
    """Cells, c of them, in r + 1 axes, the last of which is the precision.

    Attributes:
        low: whole `[c, r + 1]`, the least corner.
        size: whole `[c, r + 1]`.
        bound: `[c]`, a profit that nothing in the cell exceeds.
        corners: `[c, 2^(r+1)]`, rows of a table of corners, -1 where unknown. Bit i of the corner's
            number tells whether it is at the high end of axis i.
    """

    low: np.ndarray
    size: np.ndarray
    bound: np.ndarray
    corners: np.ndarray

    def take(self, which: np.ndarray | slice) -> "Cells":
        """Return some of the cells."""
        return Cells(*(field[which] for field in self))

    @property
    def number(self) -> int:
        """Return how many there are."""
        return len(self.bound)

    def box(self, domain: Domain) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return centres `[c, r]`, half-widths `[c, r]`, and the ends of the precisions `[c]`."""
        low = domain.means(self.low[:, :-1])
        high = domain.means(self.low[:, :-1] + self.size[:, :-1])
        ends = (
            domain.precisions(self.low[:, -1]),
            domain.precisions(self.low[:, -1] + self.size[:, -1]),
        )
        centre = (low + high) / 2
        # The centre is rounded: no less than what it takes to reach either end.
        half = np.maximum(high - centre, centre - low)
        return centre, half, *ends


def root_cells(domain: Domain) -> Cells:
    """Return cells of all means, in levels of the precision."""
    axes = len(domain.low) + 1
    ratio = np.log(domain.precision_high / domain.precision_low)
    levels = 1 << max(0, int(np.ceil(np.log2(max(ratio / ROOT_LOG_RATIO, 1.0)))))
    low = np.zeros((levels, axes), np.int64)
    low[:, -1] = np.arange(levels) * (UNITS // levels)
    size = np.full((levels, axes), UNITS)
    size[:, -1] = UNITS // levels
    # Axes without extent have one place.
    flat = np.append(domain.high <= domain.low, ratio <= 0)
    low, size = np.where(flat, 0, low), np.where(flat, 0, size)
    corners = np.full((levels, 2**axes), -1, np.int32)
    return Cells(low, size, np.full(levels, np.inf), corners)


def slack(domain: Domain, half: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    r"""Return the slack that corners at the low and the high precision are allowed, `[2, c]`.

    $KL(N(\mu_0, 1/u_0) \| N(v, 1/u_i))$, with $\mu_0$ the centre and $u_0$ the logarithmic mean of
    the precisions. Any $u_0 > 0$ is valid.
    """
    ratio = high / low
    with np.errstate(invalid="ignore"):
        middle = np.where(ratio > 1 + 1e-6, (high - low) / np.log(ratio), (low + high) / 2)
    square = (half * half).sum(axis=1)
    ends = np.stack([low, high])
    relative = (ends - middle) / middle
    return domain.log_factor * (relative - np.log1p(relative)) + ends * square / 2


def chords(slacks: np.ndarray, slack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of each slack in a table of slacks, and the share of the next entry."""
    place = np.clip(np.searchsorted(slacks, slack, side="right") - 1, 0, len(slacks) - 2)
    return place, (slack - slacks[place]) / (slacks[place + 1] - slacks[place])


def halves(cells: Cells, domain: Domain) -> Cells:
    """Return both halves of every cell, side by side, cut where its slack is largest."""
    _, half, low, high = cells.box(domain)
    middle = np.sqrt(low * high)
    spread = middle[:, None] * half**2 / 2
    spread = np.column_stack([spread, domain.log_factor * np.log(high / low) ** 2 / 8])
    # What cannot be cut any more is not.
    spread = np.where(cells.size > 1, spread, -1.0)
    axis = spread.argmax(axis=1)
    rows = np.arange(cells.number)
    cut = cells.size[rows, axis] // 2
    size = cells.size.copy()
    size[rows, axis] = cut
    upper = cells.low.copy()
    upper[rows, axis] += cut
    numbers = np.arange(cells.corners.shape[1])
    is_high = ((numbers >> np.arange(cells.size.shape[1])[:, None]) & 1 == 1)[axis]
    corners_low = np.where(is_high, -1, cells.corners)
    corners_high = np.where(is_high, cells.corners, -1)
    return Cells(
        _side_by_side(cells.low, upper),
        _side_by_side(size, size),
        _side_by_side(cells.bound, cells.bound),
        _side_by_side(corners_low, corners_high),
    )


def _side_by_side(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.stack([first, second], axis=1).reshape(-1, *first.shape[1:])


def missing_corners(cells: Cells) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return which corners are unknown, and the places of the distinct ones.

    Returns:
        `(cell, corner, places [m, r + 1], row)`: corner `corner[i]` of cell `cell[i]` is at
        `places[row[i]]`.
    """
    cell, corner = np.nonzero(cells.corners < 0)
    axes = cells.low.shape[1]
    bits = (corner[:, None] >> np.arange(axes)) & 1
    places = cells.low[cell] + bits * cells.size[cell]
    # Distinct places have distinct hashes, or else are told apart by another hash.
    for seed in range(100):
        factors = np.random.default_rng(seed).integers(2**63, size=axes, dtype=np.uint64) | 1
        hashes = (places.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
        _, first, row = np.unique(hashes, return_index=True, return_inverse=True)
        if (places[first[row]] == places).all():
            # In the order of the cells: neighbours stay close.
            order = np.argsort(first)
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            return cell, corner, places[first[order]], rank[row]
    raise AssertionError("no hash tells the corners apart")
