"""The choice of the duals: prices for the points that make the lower bound tight.

Any prices give a valid bound, the sum of the prices less k times the largest profit. The best ones
solve a linear programme over all clusters. A proximal bundle method comes near: it keeps clusters
that make much profit, chooses prices near the best ones so far that are good against these, looks
for clusters that make more, and so on.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcmle.proof.pricing import Sets, best_sets
from jaxcmle.proof.task import Task

__all__ = ["Bundle", "Duals", "incumbent_duals", "least_square"]

# Starts of the oracle beside one for each cluster, columns added in a round, and columns kept.
STARTS = 60
ADDED = 25
MOST_COLUMNS = 400
# The first length of steps, and how it changes after a step that helped, and after some that did
# not.
STEP, LONGER, SHORTER, PATIENCE = 0.2, 1.3, 0.8, 4
# A step helps if it gains this part of what the model promised.
HELPS = 0.05
# A column that has this share in the solution is not dropped.
SHARE = 1e-9


class Duals(NamedTuple):
    """Prices and what is known of them.

    Attributes:
        prices: per unit of weight, `[n]`.
        known: the largest profit found with them.
        value: the lower bound that they would give if no profit were larger.
    """

    prices: np.ndarray
    known: float
    value: float


def incumbent_duals(task: Task, shift: float = 0.0) -> np.ndarray:
    """Return what the points cost in the partition at hand, and c N / K more per cluster."""
    prices = task.point_costs()
    if shift:
        sizes = np.bincount(task.labels, task.weight, minlength=task.k)
        prices = prices + shift * task.total / task.k / sizes[task.labels]
    return prices


class Bundle:
    """Columns (clusters with their costs) and the best prices so far."""

    def __init__(self, task: Task) -> None:
        """Begin with the clusters of the partition at hand, and the prices of its points."""
        self.task = task
        n, d = task.x.shape
        self.members = np.zeros((0, n), bool)
        self.cost = np.zeros(0)
        self.mean = np.zeros((0, d))
        self.precision = np.zeros(0)
        self.overlap = np.zeros((0, 0))
        self.share = np.zeros(0)
        self._keys: set[bytes] = set()
        self._random = np.random.default_rng(0)
        self._idle = 0
        self._add_partition()
        self._next = incumbent_duals(task)
        self._step = STEP * max(1.0, float(self._next.std()))
        self._promised = math.inf
        self.best = Duals(self._next, math.inf, -math.inf)

    @property
    def promised(self) -> float:
        """Return the value that the next prices have if no further column is needed."""
        return self._promised

    def use_partition(self, task: Task) -> None:
        """Go on with another partition of the same points."""
        self.task = task
        self._add_partition()
        self._choose()

    def _add_partition(self) -> None:
        task = self.task
        sizes, means, scatters = task.moments(task.labels)
        members = task.labels == np.arange(task.k)[:, None]
        costs = task.costs_of(sizes, scatters)
        self.add(Sets(members, costs, costs, means, task.precisions(sizes, scatters)))

    def add(self, sets: Sets) -> None:
        """Add sets as columns, those that are new."""
        n, weight = len(self.task.x), self.task.weight
        members = np.asarray(sets.members)[:, :n]
        new = []
        for i in range(len(members)):
            key = np.packbits(members[i]).tobytes()
            if np.isfinite(sets.profit[i]) and key not in self._keys:
                self._keys.add(key)
                new.append(i)
        if not new:
            return
        columns = members[new]
        across = self._products(self.members, columns, weight)
        within = self._products(columns, columns, weight)
        self.overlap = np.block([[self.overlap, across], [across.T, within]])
        self.members = np.concatenate([self.members, columns])
        self.cost = np.concatenate([self.cost, np.asarray(sets.cost)[new]])
        self.mean = np.concatenate([self.mean, np.asarray(sets.mean)[new]])
        self.precision = np.concatenate([self.precision, np.asarray(sets.precision)[new]])
        self.share = np.concatenate([self.share, np.zeros(len(new))])

    @staticmethod
    def _products(first: np.ndarray, second: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return first.astype(np.float64) @ (second * weight).T

    def profits(self, prices: np.ndarray) -> np.ndarray:
        """Return the profit of every column."""
        return self.members @ (self.task.weight * prices) - self.cost

    def _starts(self, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return means and precisions to climb from; always as many."""
        task, random = self.task, self._random
        k, few = task.k, STARTS // 4
        means, precision = self.mean[:k], self.precision[:k]
        top = np.resize(np.argsort(-self.profits(prices), kind="stable")[: 2 * few], 2 * few)
        points = task.x[random.integers(len(task.x), size=few)]
        i, j = random.integers(k, size=(2, few))
        share = random.random((few, 1))
        between = share * means[i] + (1 - share) * means[j]
        between += 0.5 * random.normal(size=between.shape) / np.sqrt(precision[i])[:, None]
        widths = precision[random.integers(k, size=few)] * np.exp(random.normal(size=few))
        others = precision[i] * np.exp(0.7 * random.normal(size=few))
        return (
            np.concatenate([means, self.mean[top], points, between]),
            np.concatenate([precision, self.precision[top], widths, others]),
        )

    def oracle(self, prices: np.ndarray) -> Sets:
        """Return sets that make much profit, the best first."""
        sets = best_sets(self.task.pricing, self.task.padded(prices), *self._starts(prices))
        host: Any = jax.tree.map(np.asarray, sets)
        order = np.argsort(-host.profit, kind="stable")
        return jax.tree.map(lambda leaf: leaf[order], host)

    def round(self) -> None:
        """Look at the next prices, and choose others."""
        task, prices = self.task, self._next
        sets = self.oracle(prices)
        known = float(max(sets.profit[0], self.profits(prices).max()))
        value = math.fsum(task.weight * prices) - task.k * known
        first = self.best.value == -math.inf
        if first or value > self.best.value + HELPS * max(self._promised - self.best.value, 0):
            self._step *= 1.0 if first else LONGER
            self.best = Duals(prices, known, value)
            self._idle = 0
        else:
            self._idle += 1
            if self._idle >= PATIENCE:
                self._step *= SHORTER
                self._idle = 0
        self.add(jax.tree.map(lambda leaf: leaf[:ADDED], sets))
        self._choose()

    def raise_known(self, sets: list[Sets]) -> None:
        """Take sets that others have found, and choose other prices."""
        for each in sets:
            self.add(each)
        self._choose()

    def _choose(self) -> None:
        """Choose the prices that are best against the columns, near the best ones so far."""
        prices = self.best.prices
        known = float(self.profits(prices).max())
        if known > self.best.known:
            # A column that was found for other prices makes more with these as well.
            value = math.fsum(self.task.weight * prices) - self.task.k * known
            self.best = Duals(prices, known, value)
        self._drop()
        task, step, k = self.task, self._step, self.task.k
        if self.share.sum() < 0.5:
            self.share[:] = 0
            self.share[:k] = 1 / k
        linear = k * self.profits(self.best.prices) + step * k * np.diag(self.overlap)
        self.share = least_square(step * k * k * self.overlap, linear, self.share)
        excess = k * (self.share @ self.members) - 1
        self._next = self.best.prices - step * excess
        largest = float(self.profits(self._next).max())
        self._promised = math.fsum(task.weight * self._next) - k * largest

    def _drop(self) -> None:
        """Drop columns that make little profit, if there are too many."""
        count = len(self.cost)
        if count <= MOST_COLUMNS:
            return
        score = self.profits(self.best.prices)
        score[self.share > SHARE] = np.inf
        score[: self.task.k] = np.inf
        score[-2 * ADDED :] = np.inf
        keep = np.sort(np.argsort(-score, kind="stable")[: MOST_COLUMNS * 3 // 4])
        for i in np.setdiff1d(np.arange(count), keep):
            self._keys.discard(np.packbits(self.members[i]).tobytes())
        self.members, self.cost = self.members[keep], self.cost[keep]
        self.mean, self.precision = self.mean[keep], self.precision[keep]
        self.overlap = self.overlap[np.ix_(keep, keep)]
        self.share = self.share[keep] / max(self.share[keep].sum(), 1e-300)

    def partition(self) -> np.ndarray:
        """Return labels `[n]`: every point to the cheapest of the k columns of the largest shares.

        Columns that overlap one of those chosen before by more than half are left out.
        """
        chosen: list[int] = []
        for i in np.argsort(-self.share, kind="stable"):
            size = self.overlap[i, i]
            if all(self.overlap[i, j] <= 0.5 * min(size, self.overlap[j, j]) for j in chosen):
                chosen.append(int(i))
            if len(chosen) == self.task.k:
                break
        chosen = (chosen + list(range(self.task.k)))[: self.task.k]
        task, pricing = self.task, self.task.pricing
        squares = ((task.x[:, None] - self.mean[chosen]) ** 2).sum(axis=2)
        u = self.precision[chosen]
        sizes = np.array([task.weight[self.members[i]].sum() for i in chosen])
        log = float(pricing.log_factor) * np.log(u) + float(pricing.entropy) * np.log(sizes)
        return np.argmin(u / 2 * squares - log, axis=1).astype(np.int32)


def least_square(
    square: np.ndarray, linear: np.ndarray, start: np.ndarray, most: int = 3000
) -> np.ndarray:
    """Return p on the simplex that nearly minimises `p.square.p / 2 - linear.p`.

    Two coordinates at a time: the one whose gradient is least takes from the one that gains most.
    """
    p = start.copy()
    gradient = square @ p - linear
    diagonal = np.diag(square)
    for _ in range(most):
        i = int(gradient.argmin())
        difference = np.where(p > 0, gradient - gradient[i], 0.0)
        if difference.max() < 1e-10 * max(1.0, float(np.abs(gradient).max())):
            break
        curvature = np.maximum(diagonal + diagonal[i] - 2 * square[i], 1e-12)
        j = int((difference * np.minimum(difference / curvature, p)).argmax())
        moved = min(difference[j] / curvature[j], p[j])
        p[i] += moved
        p[j] = 0.0 if p[j] - moved < 1e-15 else p[j] - moved
        gradient += moved * (square[:, i] - square[:, j])
    return p


def improve(bundle: Bundle, rounds: int, enough: float, stops: Callable[[], bool]) -> None:
    """Run rounds until little more is promised than is known.

    Args:
        bundle: is changed.
        rounds: at most so many.
        enough: in nats: no more is asked for.
        stops: True ends it.
    """
    for _ in range(rounds):
        bundle.round()
        if stops() or bundle.promised - bundle.best.value < enough:
            break
