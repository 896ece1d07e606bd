"""Branch and bound for the pricing problem: a profit that no cluster exceeds, valid at any time."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from jaxcmle.proof.cells import Cells, Domain, chords, halves, missing_corners, root_cells, slack
from jaxcmle.proof.pricing import SLACKS, Sets

__all__ = ["Geometry", "Priced", "price"]

# Up to this slack per point the corners bound a cell well; from this one on, each point by itself.
MOST_SLACK = 1.5
COARSE_SLACK = 0.4
# Cells looked at in one go.
CHUNK = 4096
# Cells whose slack is less than this part of what may be lost are not cut any more, and those that
# come as near as that to a profit that there is are good enough.
FINEST, NEAR = 0.02, 0.2
# Probes from the worst cells after every level.
PROBES = 16
# Bytes that live cells and their corners may take; what is done with them takes some times as much.
MOST_BYTES = 2**28


class Geometry(Protocol):
    """Where cells lie, and how to bound the profit at corners and in cells."""

    domain: Domain
    max_size: float

    def corner_profits(self, places: np.ndarray, precisions: np.ndarray) -> np.ndarray:
        """Return the best profit at every slack, `[m, q]`."""

    def cell_profits(
        self, centre: np.ndarray, half: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> np.ndarray:
        """Return a profit that nothing in the cell exceeds, `[m]`."""

    def climb(self, places: np.ndarray, precisions: np.ndarray) -> Sets | None:
        """Return sets of points found from there, if that is known how to."""


class Priced(NamedTuple):
    """What branch and bound came to.

    Attributes:
        bound: no cluster makes more profit.
        known: the best profit found.
        found: sets with more profit than was known before, at most a few for each level.
        finished: whether no cell is left that could be of use.
        exhausted: whether there were too many cells for the memory.
        evaluations: corners and cells evaluated.
    """

    bound: float
    known: float
    found: list[Sets]
    finished: bool
    exhausted: bool
    evaluations: int


def price(
    geometry: Geometry,
    known: float,
    allowed: float,
    stops: Callable[[float, int], bool],
    give_up: float = np.inf,
) -> Priced:
    """Bound the largest profit from above.

    Args:
        geometry: what to search.
        known: the best profit known.
        allowed: a bound that exceeds `known` by no more than this is good enough.
        stops: called with the bound so far and the evaluations done; True ends the search.
        give_up: end the search if a profit is found that exceeds `known` by more than this.
    """
    search = _Search(geometry, known, allowed)
    start = known
    finished = True
    for bound in search.steps():
        if search.known > start + give_up or stops(bound, search.evaluations):
            finished = False
            break
    return Priced(
        search.bound(),
        search.known,
        search.found,
        finished and not search.exhausted,
        search.exhausted,
        search.evaluations,
    )


class _Search:
    """Cells of one level, those of the next, and the table of corners."""

    def __init__(self, geometry: Geometry, known: float, allowed: float) -> None:
        self.geometry, self.known, self.allowed = geometry, known, allowed
        self.target = known + allowed
        self.waiting = [root_cells(geometry.domain)]
        self.live: list[Cells] = []
        # Corners, and how many there are: the table has room for more.
        self.table = np.zeros((CHUNK, len(SLACKS)))
        self.rows = 0
        self.done = -np.inf
        self.corner = -np.inf
        self.evaluations = 0
        self.exhausted = False
        self.found: list[Sets] = []

    def bound(self) -> float:
        """Return a profit that no cluster exceeds."""
        left = [cells.bound.max() for cells in self.waiting + self.live if cells.number]
        return float(max([self.done, self.known, *left]))

    def threshold(self) -> float:
        """Return the profit up to which cells are of no interest.

        No bound gets below what is known, nor below the profit at a corner. Once those exceed the
        target, it cannot be reached, and it is enough to come near them.
        """
        least = max(self.known, self.corner)
        return max(self.target, least + NEAR * self.allowed, self.done)

    def steps(self) -> Iterator[float]:
        """Look at cells, chunk by chunk and level by level."""
        while self.waiting:
            while self.waiting:
                cells = self._bounded(self.waiting[-1])
                self.waiting.pop()
                self._keep(cells)
                yield self.bound()
            if not self.live:
                return
            self._probe()
            cells, self.live = _joined(self.live), []
            self._keep(cells)
            if not self.live:
                return
            halved = halves(self._compact(self.live[0]), self.geometry.domain)
            if _bytes(halved) + self.table[: self.rows].nbytes > MOST_BYTES:
                self.exhausted = True
                return
            self.live = []
            # Last in, first out: reversed, so that the order in space is kept.
            chunks = range(0, halved.number, CHUNK)
            self.waiting = [halved.take(slice(i, i + CHUNK)) for i in chunks][::-1]

    def _keep(self, cells: Cells) -> None:
        """Note cells that are of no more interest, and keep the others."""
        _, half, low, high = cells.box(self.geometry.domain)
        error = slack(self.geometry.domain, half, low, high).max(axis=0) * self.geometry.max_size
        finest = (error < FINEST * self.allowed) | (cells.size <= 1).all(axis=1)
        if finest.any():
            self.done = max(self.done, cells.bound[finest].max())
        live = (cells.bound > self.threshold()) & ~finest
        if not live.all():
            self.done = max(self.done, cells.bound[~live].max())
        if live.any():
            self.live.append(cells.take(live))

    def _bounded(self, cells: Cells) -> Cells:
        """Return the cells with better bounds."""
        domain = self.geometry.domain
        centre, half, low, high = cells.box(domain)
        slacks = slack(domain, half, low, high)
        largest = slacks.max(axis=0)
        bound = cells.bound.copy()

        coarse = np.flatnonzero((largest > COARSE_SLACK) & (bound > self.threshold()))
        if len(coarse):
            values = self.geometry.cell_profits(
                centre[coarse], half[coarse], low[coarse], high[coarse]
            )
            bound[coarse] = np.fmin(bound[coarse], values)
            self.evaluations += len(coarse)

        fine = np.flatnonzero((largest < MOST_SLACK) & (bound > self.threshold()))
        corners = cells.corners
        if len(fine):
            known = self._with_corners(cells.take(fine))
            values = self._corner_bounds(known, slacks[:, fine])
            bound[fine] = np.fmin(bound[fine], values)
            corners = corners.copy()
            corners[fine] = known
        return cells._replace(bound=bound, corners=corners)

    def _with_corners(self, cells: Cells) -> np.ndarray:
        """Return the corners of the cells, evaluated."""
        cell, corner, places, row = missing_corners(cells)
        domain = self.geometry.domain
        values = self.geometry.corner_profits(
            domain.means(places[:, :-1]), domain.precisions(places[:, -1])
        )
        # A NaN bounds nothing.
        values = np.where(np.isnan(values), np.inf, values)
        corners = cells.corners.copy()
        corners[cell, corner] = self.rows + row
        self._append(values)
        self.corner = max(self.corner, values[:, 0].max(initial=-np.inf))
        self.evaluations += len(places)
        return corners

    def _append(self, values: np.ndarray) -> None:
        """Add rows to the table of corners."""
        rows = self.rows + len(values)
        if rows > len(self.table):
            larger = np.zeros((max(rows, 2 * len(self.table)), len(SLACKS)))
            larger[: self.rows] = self.table[: self.rows]
            self.table = larger
        self.table[self.rows : rows] = values
        self.rows = rows

    def _corner_bounds(self, corners: np.ndarray, slacks: np.ndarray) -> np.ndarray:
        """Return the largest profit at any corner, each with its slack."""
        place, share = chords(SLACKS, slacks)
        ends = corners.reshape(len(corners), 2, -1)
        best = np.full(len(corners), -np.inf)
        for end in (0, 1):
            below = self.table[ends[:, end], place[end][:, None]]
            above = self.table[ends[:, end], place[end][:, None] + 1]
            part = share[end][:, None]
            values = below * (1 - part) + above * part
            best = np.maximum(best, values.max(axis=1))
        return best

    def _compact(self, cells: Cells) -> Cells:
        """Drop corners from the table that no cell refers to."""
        used = np.zeros(self.rows + 1, bool)
        used[cells.corners] = True
        # That is where unknown corners point to.
        used[-1] = False
        rows = np.where(used, np.cumsum(used) - 1, -1).astype(np.int32)
        kept = self.table[: self.rows][used[:-1]]
        self.table[: len(kept)] = kept
        self.rows = len(kept)
        return cells._replace(corners=rows[cells.corners])

    def _probe(self) -> None:
        """Climb from the worst cells: perhaps a set makes more profit than is known."""
        cells = _joined(self.live)
        # Always as many, so that one program serves all.
        worst = cells.take(np.resize(np.argsort(-cells.bound, kind="stable")[:PROBES], PROBES))
        centre, _, low, high = worst.box(self.geometry.domain)
        sets = self.geometry.climb(centre, np.sqrt(low * high))
        if sets is not None and sets.profit.max() > self.known:
            self.found.append(sets)
            self.known = float(sets.profit.max())


def _joined(parts: list[Cells]) -> Cells:
    return Cells(*(np.concatenate(fields) for fields in zip(*parts, strict=True)))


def _bytes(cells: Cells) -> int:
    return sum(field.nbytes for field in cells)
