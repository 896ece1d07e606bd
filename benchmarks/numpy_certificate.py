"""The proof that a pricing problem is solved, in plain NumPy: a peer to time `jaxcmle.proof` by.

A lower bound on the cost of every partition into k clusters needs an upper bound on

    P = max over sets C, min_size <= |C| <= N - (k - 1) min_size, of alpha(C) - cost(C)
      = max over means and u = 1/s^2 of F(mean, u),
    F = max over n of the n largest alpha_x - u |x - mean|^2 / 2 + d/2 ln(u / 2 pi), + n ln(n / N).

Branch and bound over cells, each a box of means times an interval of u, breadth first. All cells
of a level go through the same array operations, a few million numbers at a time. Unit weights,
and weights, means and variances free.
"""

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# How many numbers are worked on at once.
CHUNK = 4_000_000
# The logarithm of u2 / u1 in the cells to start from, at most.
LEVEL_WIDTH = 0.7
# Cells with a larger eps are left to the coarse bound.
VERTEX_LIMIT = 1.5
PROBES = 16
ASCENT_STEPS = 8


@dataclass(frozen=True)
class Cells:
    """Boxes of means, by centres and half-widths [m, d], times [u1, u2], [m] each.

    `bound` [m] is an upper bound on F over the cell, infinity before there is one.
    """

    centre: Floats
    half: Floats
    u1: Floats
    u2: Floats
    bound: Floats

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.u1)

    def take(self, places: slice | NDArray[np.bool_] | NDArray[np.intp]) -> "Cells":
        """Return some of the cells."""
        return Cells(
            self.centre[places],
            self.half[places],
            self.u1[places],
            self.u2[places],
            self.bound[places],
        )


class _Pricing:
    """One pricing problem, and how many times it sorted all points."""

    def __init__(self, x: Floats, alpha: Floats, k: int, min_size: int) -> None:
        n, d = x.shape
        most = n - (k - 1) * min_size
        if not 1 <= min_size <= most:
            raise ValueError(f"{n} points do not allow {k} clusters of at least {min_size}")
        # Squared distances are expanded below: better about the middle.
        self.middle = (x.min(axis=0) + x.max(axis=0)) / 2
        self.x = x - self.middle
        self.alpha = alpha
        self.features = np.vstack([np.ones(n), (self.x**2).sum(axis=1), self.x.T])
        self.sizes = slice(min_size - 1, most)
        sizes = np.arange(min_size, most + 1)
        self.size_gain = sizes * np.log(sizes / n)
        self.signs = np.array(list(itertools.product((-1.0, 1.0), repeat=d)))
        self.rows = max(1, CHUNK // n)
        self.evaluations = 0

    def losses(self, mean: Floats, u: Floats, gain: Floats) -> Floats:
        """Return - alpha_x + u |x - mean|^2 / 2 - d/2 ln(u / 2 pi) - gain, [m, n]."""
        d = mean.shape[1]
        constant = u * (mean**2).sum(axis=1) / 2 - d / 2 * np.log(u / (2 * math.pi)) - gain
        rows = np.column_stack([constant, u / 2, -u[:, None] * mean])
        losses = rows @ self.features
        losses -= self.alpha
        return losses

    def best_totals(self, losses: Floats) -> Floats:
        """Return, for every row, max over n of n ln(n / N) - its n least; overwrites losses."""
        self.evaluations += len(losses)
        losses.sort(axis=1)
        totals = np.cumsum(losses[:, : self.sizes.stop], axis=1)[:, self.sizes]
        np.subtract(self.size_gain, totals, out=totals)
        return totals.max(axis=1)

    def coarse_bounds(self, cells: Cells) -> Floats:
        """Bound F over cells: every point takes its own best mean and u of the cell."""
        d = self.x.shape[1]
        distances = np.zeros((len(cells), len(self.x)))
        for feature in range(d):
            outside = np.abs(self.x[:, feature] - cells.centre[:, feature, None])
            outside -= cells.half[:, feature, None]
            np.maximum(outside, 0, out=outside)
            distances += np.square(outside, out=outside)
        # u = d / distance within the limits.
        u = d / np.maximum(distances, 1e-300)
        np.clip(u, cells.u1[:, None], cells.u2[:, None], out=u)
        losses = np.multiply(distances, u, out=distances)
        losses -= d * np.log(u, out=u)
        losses /= 2
        losses += d / 2 * math.log(2 * math.pi) - self.alpha
        return self.best_totals(losses)

    def vertex_bounds(self, cells: Cells, eps: Floats) -> Floats:
        """Bound F over cells by its values at their vertices, with eps [m, 2] for a point more."""
        m, d = cells.centre.shape
        corners = cells.centre[:, None, :] + self.signs * cells.half[:, None, :]
        vertices = np.tile(corners, (1, 2, 1)).reshape(-1, d)
        ends = np.stack([cells.u1, cells.u2], axis=1)
        u = np.repeat(ends, len(self.signs), axis=1).reshape(-1)
        gain = np.repeat(eps, len(self.signs), axis=1).reshape(-1)
        totals = np.empty(len(vertices))
        for start in range(0, len(vertices), self.rows):
            part = slice(start, start + self.rows)
            totals[part] = self.best_totals(self.losses(vertices[part], u[part], gain[part]))
        return totals.reshape(m, -1).max(axis=1)

    def ascend(self, mean: Floats, u: Floats, u_low: float, u_high: float) -> float:
        """Return the largest price after a few rounds of {best set; its mean and precision}."""
        n, d = self.x.shape
        gain = np.zeros(len(mean))
        best = -math.inf
        for _ in range(ASCENT_STEPS):
            losses = self.losses(mean, u, gain)
            order = np.argsort(losses, axis=1)
            self.evaluations += len(losses)
            sums = np.cumsum(np.take_along_axis(losses, order, axis=1), axis=1)
            totals = self.size_gain - sums[:, self.sizes]
            largest = float(totals.max())
            if largest <= best:
                break
            best = largest
            size = totals.argmax(axis=1) + self.sizes.start + 1
            members = np.zeros_like(losses)
            np.put_along_axis(members, order, np.arange(n) < size[:, None], axis=1)
            mean = members @ self.x / size[:, None]
            spread = ((self.x - mean[:, None, :]) ** 2).sum(axis=2)
            scatter = np.maximum((members * spread).sum(axis=1), 1e-300)
            u = np.clip(d * size / scatter, u_low, u_high)
        return best


def _root_cells(x: Floats, u_low: float, u_high: float) -> Cells:
    """Return the box of the points times intervals of u of equal ratio."""
    levels = max(1, math.ceil(math.log(u_high / u_low) / LEVEL_WIDTH))
    ends = np.geomspace(u_low, u_high, levels + 1)
    low, high = x.min(axis=0), x.max(axis=0)
    return Cells(
        np.tile((low + high) / 2, (levels, 1)),
        np.tile((high - low) / 2, (levels, 1)),
        ends[:-1],
        ends[1:],
        np.full(levels, math.inf),
    )


def _eps(cells: Cells) -> Floats:
    """Return what the tangent adds per point at the vertices with u1 and with u2, [m, 2]."""
    d = cells.half.shape[1]
    ends = np.stack([cells.u1, cells.u2], axis=1)
    width = np.log(cells.u2 / cells.u1)
    # The point of tangency; any is valid, and this one makes both ends alike.
    u0 = np.where(width > 0, (cells.u2 - cells.u1) / np.where(width > 0, width, 1), cells.u1)
    ratio = ends / u0[:, None]
    return d / 2 * (ratio - 1 - np.log(ratio)) + ends * (cells.half**2).sum(axis=1)[:, None] / 2


def _split(cells: Cells) -> Cells:
    """Halve every cell where it adds most to eps: along one feature, or in ln u."""
    d = cells.half.shape[1]
    middle = np.sqrt(cells.u1 * cells.u2)
    by_feature = middle[:, None] * cells.half**2 / 2
    by_u = d / 2 * np.log(cells.u2 / cells.u1) ** 2 / 8
    axis = np.column_stack([by_feature, by_u]).argmax(axis=1)
    step = np.where(axis[:, None] == np.arange(d), cells.half / 2, 0)
    in_u = axis == d
    half = cells.half - step
    return Cells(
        np.concatenate([cells.centre - step, cells.centre + step]),
        np.concatenate([half, half]),
        np.concatenate([cells.u1, np.where(in_u, middle, cells.u1)]),
        np.concatenate([np.where(in_u, middle, cells.u2), cells.u2]),
        np.concatenate([cells.bound, cells.bound]),
    )


def _bounded(problem: _Pricing, cells: Cells, threshold: float, deadline: float) -> Cells:
    """Return the cells with better bounds; those left at the deadline keep their parents'."""
    bound = cells.bound.copy()
    for start in range(0, len(cells), problem.rows):
        if time.perf_counter() > deadline:
            break
        part = cells.take(slice(start, start + problem.rows))
        found = np.minimum(part.bound, problem.coarse_bounds(part))
        eps = _eps(part)
        small = np.flatnonzero((found > threshold) & (eps.max(axis=1) < VERTEX_LIMIT))
        if len(small):
            vertex = problem.vertex_bounds(part.take(small), eps[small])
            found[small] = np.minimum(found[small], vertex)
        bound[start : start + problem.rows] = found
    return Cells(cells.centre, cells.half, cells.u1, cells.u2, bound)


def price_by_branch_and_bound(
    x: ArrayLike,
    alpha: ArrayLike,
    k: int,
    min_size: int,
    known: float,
    slack: float,
    u_low: float,
    u_high: float,
    time_limit: float | None = None,
) -> tuple[float, int, float]:
    """Bound the pricing maximum from above, to within `slack` if there is time.

    Args:
        x: The points [n, d].
        alpha: What every point pays [n].
        k: The number of clusters.
        min_size: The least number of points in one.
        known: The value alpha(C) - cost(C) of some admissible set, or -inf; raised by the way.
        slack: Positive. Cells are done when their bound is at most `known` + slack.
        u_low: Precisions 1/s^2 of admissible sets are at least this,
        u_high: and at most this. The bound is over sets of such precisions only.
        time_limit: In seconds. The bound is valid whenever the search is interrupted.

    Returns:
        The upper bound, how many times all points were sorted, and the seconds it took.
    """
    begin = time.perf_counter()
    deadline = math.inf if time_limit is None else begin + time_limit
    points = np.asarray(x, np.float64)
    problem = _Pricing(points, np.asarray(alpha, np.float64), k, min_size)
    cells = _root_cells(problem.x, u_low, u_high)
    done = -math.inf
    while True:
        cells = _bounded(problem, cells, known + slack, deadline)
        live = np.flatnonzero(cells.bound > known + slack)
        if len(live) and time.perf_counter() <= deadline:
            worst = cells.take(live[np.argsort(-cells.bound[live])[:PROBES]])
            middle = np.sqrt(worst.u1 * worst.u2)
            known = max(known, problem.ascend(worst.centre, middle, u_low, u_high))
        open_ = cells.bound > known + slack
        done = max(done, float(cells.bound[~open_].max(initial=-math.inf)))
        cells = cells.take(open_)
        if len(cells) == 0 or time.perf_counter() > deadline:
            break
        cells = _split(cells)
    # Rounding apart, the bounds are never below a value that is attained.
    upper = max(done, known, float(cells.bound.max(initial=-math.inf)))
    return upper, problem.evaluations, time.perf_counter() - begin
