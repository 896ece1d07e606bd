"""Which bounds are tried, in which order, and for how long."""

import math
import time
from typing import Any, NamedTuple

import numpy as np

from jaxcmle.problem.bounds import lower_bound
from jaxcmle.problem.pairs import MAX_POINTS
from jaxcmle.problem.types import Problem
from jaxcmle.proof.branch import Geometry, Priced, price
from jaxcmle.proof.duals import Bundle, improve, incumbent_duals
from jaxcmle.proof.rounding import data_margin, profit_margin
from jaxcmle.proof.space import WholeSpace
from jaxcmle.proof.span import CentreSpan
from jaxcmle.proof.task import Task, make_task
from jaxcmle.proof.triangle import Triangle
from jaxcmle.solve.progress import CtrlC, Progress

__all__ = ["Given", "Proved", "Watch", "prove"]

# Up to so many points the bound over all pairs comes first; of more, last.
FEW_POINTS = 4096
# Cells in the space of the points are for so many dimensions, those in the span of the centres for
# so many clusters; up to a dimension nothing but the former is needed.
MOST_DIMENSIONS = 6
MOST_SPANNED = 4
LOW_DIMENSION = 4
# Rounds of the choice of duals, and how often branch and bound may send back to it.
ROUNDS = 60
RETURNS = 5
# The part of the tolerance up to which duals are improved; that which branch and bound has at
# least; and that by which a profit has to exceed the known one to go back to the duals.
DUALS_PART, CELLS_PART, RETURN_PART = 0.03, 0.4, 0.3
# Evaluations of a point that one branch and bound may take, if there is no time limit; a corner
# takes the host as long as so many points.
MOST_WORK = 1e10
CORNER_WORK = 2000
# Shifts of the prices of clusters, in units of N / K.
SHIFTS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
# How many of them are tried with the span, which as a rule can do with more than distances can.
TRIED, MORE = 2, (1.0, 2.0)
# Iterations of CEM from what the columns suggest, and what counts as better, per point.
MOST_ITERATIONS = 100
VISIBLE = 1e-7


class Given(NamedTuple):
    """What is to be proved, in float64, on the host; no point has weight 0."""

    x: np.ndarray
    weight: np.ndarray | None
    labels: np.ndarray
    k: int
    min_size: float
    problem: Problem
    min_variance: float


class Proved(NamedTuple):
    """What was proved, in the units of the user.

    Attributes:
        lower_bound: no partition costs less.
        method: which bound it is.
        given_cost: what the partition that was given costs.
        admissible: whether its clusters have the minimum size.
        interrupted: whether something was left undone.
        reason: why there is no bound, if there is none.
        labels: of a better partition, or None.
        best_cost: what that one costs.
    """

    lower_bound: float
    method: Any
    given_cost: float
    admissible: bool
    interrupted: bool
    reason: str = ""
    labels: np.ndarray | None = None
    best_cost: float = math.nan


class Watch:
    """Shows how far it has come, and tells when to stop."""

    ctrl_c: CtrlC

    def __init__(self, progress: Progress, limit: float) -> None:
        """Take a limit in seconds from now on."""
        self.progress = progress
        self.limited = math.isfinite(limit)
        self._end = time.monotonic() + limit
        self.stopped = False

    def stops(self) -> bool:
        """Tell whether somebody pressed Ctrl-C, or time is up."""
        late = self.ctrl_c.pressed or time.monotonic() >= self._end
        self.stopped = self.stopped or late
        return self.stopped


def prove(given: Given, watch: Watch, tolerance: float) -> Proved:
    """Return the best lower bound that can be had."""
    labels = _without_empty(given)
    task = make_task(
        given.x,
        given.weight,
        given.k,
        labels,
        given.min_size,
        given.problem,
        given.min_variance,
    )
    if task is None:
        cost, admissible = math.nan, False
        reason = (
            "as many points as a cluster must have coincide, and such a cluster costs minus "
            "infinity; set min_variance, or raise min_size"
        )
        return Proved(-math.inf, "pairs", cost, admissible, False, reason)
    proof = _Proof(task, watch, tolerance)
    few = len(given.x) <= FEW_POINTS
    if few:
        # Takes next to no time: something to show for, even if there is none.
        _pairs(proof, given)
    d = given.x.shape[1]
    if given.k == 1:
        # There is only one partition.
        proof.offer("cells", task.cost - data_margin(task))
    elif d <= LOW_DIMENSION:
        _cells(proof)
    else:
        shifts = _triangle(proof)
        if d <= MOST_DIMENSIONS:
            _cells(proof)
        if given.k <= MOST_SPANNED:
            _span(proof, shifts)
    if not few and len(given.x) <= MAX_POINTS and not proof.done():
        _pairs(proof, given)
    return proof.ended(given)


def _without_empty(given: Given) -> np.ndarray:
    """Return the labels, with large clusters halved in favour of empty ones.

    A partition with empty clusters has no gap, but something has to be begun with.
    """
    labels = given.labels
    weight = np.ones(len(labels)) if given.weight is None else given.weight
    for empty in np.setdiff1d(np.arange(given.k), labels):
        counts = np.bincount(labels, minlength=given.k)
        sizes = np.where(counts > 1, np.bincount(labels, weight, minlength=given.k), -1.0)
        own = np.flatnonzero(labels == sizes.argmax())
        column = given.x[own, given.x[own].std(axis=0).argmax()]
        labels = labels.copy()
        labels[own[np.argsort(column, kind="stable")[: len(own) // 2]]] = empty
    return labels


class _Proof:
    """The best lower bound so far. Costs are on the scale of the task."""

    def __init__(self, task: Task, watch: Watch, tolerance: float) -> None:
        self.task, self.watch, self.tolerance = task, watch, tolerance
        self.given_cost = task.cost
        self.first = task.labels
        self.lower = -math.inf
        self.method = ""
        self.evaluations = 0
        self.cut_short = False

    @property
    def gap(self) -> float:
        """Return the gap of the partition at hand, in nats per point."""
        return max(self.task.cost - self.lower, 0.0) / self.task.total

    def done(self) -> bool:
        """Tell whether the tolerance is reached, or there is no more time."""
        return self.gap <= self.tolerance or self.watch.stops()

    def offer(self, method: str, lower: float) -> None:
        """Take a lower bound, if it is better."""
        if lower > self.lower:
            self.lower, self.method = lower, method
        task = self.task
        self.watch.progress.update(self.evaluations, 0, task.cost + task.offset, self.gap)

    def bound(self, prices: np.ndarray, profit: float) -> float:
        """Return the lower bound from prices, and a profit that no cluster exceeds."""
        task = self.task
        largest = profit + profit_margin(task, prices)
        return math.fsum(task.weight * prices) - task.k * largest - data_margin(task)

    def price(
        self,
        method: str,
        geometry: Geometry,
        prices: np.ndarray,
        known: float,
        margin: float = 0.0,
        give_up: float = math.inf,
    ) -> Priced:
        """Run branch and bound for these prices, and take what comes of it."""
        task = self.task
        left = self.tolerance - (task.cost - self.bound(prices, known + margin)) / task.total
        allowed = max(left, CELLS_PART * self.tolerance) * task.total / task.k
        before = self.evaluations

        def stops(profit: float, evaluations: int) -> bool:
            self.evaluations = before + evaluations
            self.offer(method, self.bound(prices, profit + margin))
            too_long = (
                not self.watch.limited and evaluations * (len(task.x) + CORNER_WORK) > MOST_WORK
            )
            self.cut_short = self.cut_short or too_long
            return too_long or self.done()

        priced = price(geometry, known, allowed, stops, give_up * allowed)
        self.cut_short = self.cut_short or priced.exhausted
        self.offer(method, self.bound(prices, priced.bound + margin))
        return priced

    def try_partition(self, labels: np.ndarray) -> bool:
        """Run CEM from these labels; take the partition if it is better and admissible."""
        task = self.task
        best = None
        for _ in range(MOST_ITERATIONS):
            if not task.is_admissible(labels):
                break
            trial = task.with_labels(labels)
            if best is not None and trial.cost >= best.cost:
                break
            best = trial
            labels = trial.assigned()
        if best is None or best.cost >= task.cost - VISIBLE * task.total:
            return False
        self.task = best
        return True

    def ended(self, given: Given) -> Proved:
        """Return what was proved."""
        task = self.task
        better = None if task.labels is self.first else task.labels
        return Proved(
            self.lower + task.offset,
            self.method,
            self.given_cost + task.offset,
            task.is_admissible(given.labels),
            bool(self.gap > self.tolerance and (self.watch.stopped or self.cut_short)),
            "",
            better,
            task.cost + task.offset,
        )


def _pairs(proof: _Proof, given: Given) -> None:
    """Try the closed form over all pairs of points."""
    bound = lower_bound(
        given.x,
        given.k,
        min_size=given.min_size,
        problem=given.problem,
        sample_weight=given.weight,
        min_variance=given.min_variance,
    )
    proof.offer("pairs", float(bound) - proof.task.offset)


def _cells(proof: _Proof) -> None:
    """Try cells in the space of the points, with the best prices."""
    if proof.done():
        return
    bundle = Bundle(proof.task)
    for attempt in range(RETURNS + 1):
        _improve(proof, bundle)
        prices, known, _ = bundle.best
        give_up = RETURN_PART if attempt < RETURNS else math.inf
        geometry = WholeSpace(proof.task, prices)
        priced = proof.price("cells", geometry, prices, known, give_up=give_up)
        if priced.finished or priced.exhausted or proof.cut_short or proof.done():
            return
        bundle.raise_known(priced.found)


def _improve(proof: _Proof, bundle: Bundle) -> None:
    """Improve the prices, and look at the partition that they suggest."""
    improve(bundle, ROUNDS, DUALS_PART * proof.tolerance * proof.task.total, proof.watch.stops)
    if proof.try_partition(bundle.partition()):
        bundle.use_partition(proof.task)


def _triangle(proof: _Proof) -> list[float]:
    """Try distances from the centres; return the shifts of the prices, the best first."""
    if proof.done():
        return list(SHIFTS)
    task = proof.task
    triangle = Triangle(task)
    values = {}
    for shift in SHIFTS:
        prices = incumbent_duals(task, shift)
        values[shift] = proof.bound(prices, triangle.profit(prices))
        proof.offer("triangle", values[shift])
        if proof.done():
            break
    return sorted(values, key=lambda shift: -values[shift])


def _span(proof: _Proof, shifts: list[float]) -> None:
    """Try cells in the span of the centres, for several prices."""
    if proof.done():
        return
    task = proof.task
    span, bundle = CentreSpan(task), Bundle(task)
    _improve(proof, bundle)
    choices = [bundle.best.prices]
    tried = dict.fromkeys(more * shift for shift in shifts[:TRIED] for more in MORE)
    choices += [incumbent_duals(task, shift) for shift in tried]
    for prices in choices:
        known = float(max(bundle.oracle(prices).profit[0], bundle.profits(prices).max()))
        if proof.bound(prices, known) <= proof.lower:
            continue
        proof.price("span", span.with_prices(prices), prices, known, margin=span.margin)
        if proof.done():
            return
