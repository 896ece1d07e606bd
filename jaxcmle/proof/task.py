"""What is to be proved: the instance in float64, centred and scaled, and the partition at hand."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxcmle import numerics
from jaxcmle.problem.instance import variance_floor
from jaxcmle.problem.types import UCMLE, WKM, Problem
from jaxcmle.proof.pricing import NO_POINT, Pricing, threshold_grid
from jaxcmle.solve.padding import padded

__all__ = ["Task", "make_task", "mean_of_first"]

# Up to so many points the floor under variances is computed by sorting all distances.
MOST_SORTED = 4096
# Beyond, by thresholds: so many, over the range of some rows.
FLOOR_THRESHOLDS = 10
FLOOR_ROWS = 64
# Thresholds go no farther than this: rounding grows with them.
MOST_REACH = 1000.0


class Task(NamedTuple):
    """An instance and a partition of it.

    Attributes:
        x: `[n, d]`, centred and scaled, on the host.
        weight: `[n]`.
        k: the number of clusters.
        problem: on this scale.
        min_variance: the floor under variances on this scale.
        pricing: the same on the device, padded.
        labels: `[n]`, the partition.
        cost: of the partition, on this scale.
        offset: what the units of the user add to every cost.
    """

    x: np.ndarray
    weight: np.ndarray
    k: int
    problem: Problem
    min_variance: float
    pricing: Pricing
    labels: np.ndarray
    cost: float
    offset: float

    @property
    def total(self) -> float:
        """Return the weight of all points."""
        return float(self.pricing.total)

    def padded(self, values: np.ndarray) -> Array:
        """Return a dual for every point as the device has them."""
        extra = self.pricing.x.shape[0] - len(values)
        return jnp.asarray(np.pad(values, (0, extra), constant_values=NO_POINT))

    def moments(self, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sizes `[k]`, means `[k, d]` and scatters `[k]` of a partition."""
        sizes = np.bincount(labels, self.weight, minlength=self.k)
        one_hot = np.zeros((self.k, len(labels)))
        one_hot[labels, np.arange(len(labels))] = self.weight
        means = one_hot @ self.x / np.maximum(sizes, 1e-300)[:, None]
        squares = ((self.x - means[labels]) ** 2).sum(axis=1)
        return sizes, means, np.bincount(labels, self.weight * squares, minlength=self.k)

    def precisions(self, sizes: np.ndarray, scatters: np.ndarray) -> np.ndarray:
        """Return the precisions that suit clusters best."""
        low, high = float(self.pricing.low), float(self.pricing.high)
        with np.errstate(divide="ignore", invalid="ignore"):
            wanted = 2 * float(self.pricing.log_factor) * sizes / scatters
        return np.clip(np.where(scatters > 0, wanted, high), low, high)

    def cluster_costs(self, labels: np.ndarray) -> np.ndarray:
        """Return what each cluster costs, `[k]`."""
        return self.costs_of(*self.moments(labels)[::2])

    def costs_of(self, sizes: np.ndarray, scatters: np.ndarray) -> np.ndarray:
        """Return what clusters of these sizes and scatters cost."""
        u, constant = self._terms(sizes, scatters)
        return u / 2 * scatters - sizes * constant

    def point_costs(self) -> np.ndarray:
        """Return what each point costs in the partition, per unit of weight, `[n]`."""
        sizes, means, scatters = self.moments(self.labels)
        u, constant = self._terms(sizes, scatters)
        squares = ((self.x - means[self.labels]) ** 2).sum(axis=1)
        return u[self.labels] / 2 * squares - constant[self.labels]

    def assigned(self) -> np.ndarray:
        """Return the cheapest cluster of every point, for the clusters of the partition."""
        sizes, means, scatters = self.moments(self.labels)
        u, constant = self._terms(sizes, scatters)
        best, labels = np.full(len(self.x), np.inf), np.zeros(len(self.x), np.int32)
        for j in range(self.k):
            costs = u[j] / 2 * ((self.x - means[j]) ** 2).sum(axis=1) - constant[j]
            labels[costs < best] = j
            best = np.minimum(best, costs)
        return labels

    def _terms(self, sizes: np.ndarray, scatters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return precisions `[k]`, and what points gain whatever their distance, `[k]`."""
        u = self.precisions(sizes, scatters)
        log = float(self.pricing.log_factor) * np.log(u / (2 * np.pi))
        return u, log + float(self.pricing.entropy) * np.log(sizes / self.total)

    def with_labels(self, labels: np.ndarray) -> "Task":
        """Return the task with another partition."""
        return self._replace(labels=labels, cost=float(math.fsum(self.cluster_costs(labels))))

    def is_admissible(self, labels: np.ndarray) -> bool:
        """Tell whether every cluster of a partition has the minimum size."""
        sizes = np.bincount(labels, self.weight, minlength=self.k)
        return bool(sizes.min() >= float(self.pricing.min_size) * (1 - 1e-12))


def make_task(
    x: np.ndarray,
    weight: np.ndarray | None,
    k: int,
    labels: np.ndarray,
    min_size: float,
    problem: Problem,
    min_variance: float,
) -> Task | None:
    """Return the task, or None if clusters without any spread may cost minus infinity.

    The shift is one float64 vector and the scale a power of two: all that is lost is one rounding
    of each coordinate.
    """
    n, d = x.shape
    weight = np.ones(n) if weight is None else weight
    total = math.fsum(weight)
    centre = (weight[:, None] * x).sum(axis=0) / total
    x = x - centre
    spread = math.sqrt((weight * (x * x).sum(axis=1)).sum() / (total * d))
    scale = 2.0 ** round(math.log2(spread)) if spread > 0 else 1.0
    x = x / scale
    fixed = isinstance(problem, WKM)
    if isinstance(problem, WKM):
        problem = WKM(beta=float(np.asarray(problem.beta)) * scale**2)
    min_variance = min_variance / scale**2
    if (weight != 1).any():
        # Sums of weights that should be the minimum may be a rounding error below it.
        min_size = min_size * (1 - 1e-12)
    max_size = total - (k - 1) * min_size
    padded_x, padded_weight = padded(jnp.asarray(x), jnp.asarray(weight))
    if isinstance(problem, WKM):
        low = high = 2 * float(np.asarray(problem.beta))
    else:
        floor = max(_variance_floor(padded_x, padded_weight, weight, x, min_size), min_variance)
        if floor <= 0:
            return None
        high = 1 / floor
        widest = -mean_of_first(-(x * x).sum(axis=1), weight, min_size) * (1 + 1e-9)
        low = min(high, d / widest) if widest > 0 else min(high, float(d))
    entropy = 0.0 if isinstance(problem, UCMLE) else 1.0
    log_factor = 0.0 if fixed else d / 2
    grid = threshold_grid(min_size, max_size, total, entropy, 0.0)
    numbers = (total, min_size, max_size, log_factor, entropy, low, high, grid)
    pricing = Pricing(
        padded_x,
        None if (weight == 1).all() else padded_weight,
        *(jnp.asarray(number, jnp.float64) for number in numbers),
    )
    offset = 0.0 if fixed else total * d * math.log(scale)
    task = Task(x, weight, k, problem, min_variance, pricing, labels, math.nan, offset)
    task = task.with_labels(labels)
    if fixed:
        # Far points cost far more than where variances adapt.
        costs = task.point_costs()
        reach = min(float(costs.max() - np.median(costs)), MOST_REACH)
        grid = threshold_grid(min_size, max_size, total, entropy, reach)
        task = task._replace(pricing=pricing._replace(thresholds=jnp.asarray(grid)))
    return task


def mean_of_first(values: np.ndarray, weight: np.ndarray, size: float, spare: float = 0.0) -> float:
    """Return the mean of the least values of this weight, all but a spare part of it.

    The last point counts in part. For the largest values, take their negatives.
    """
    order = np.argsort(values, kind="stable")
    before = np.cumsum(weight[order]) - weight[order]
    taken = np.clip(size * (1 - spare) - before, 0, weight[order])
    return float((taken * values[order]).sum() / size)


def _variance_floor(
    x: Array, padded_weight: Array, weight: np.ndarray, points: np.ndarray, size: float
) -> float:
    """Return a variance that no cluster of this weight is below, rounded down."""
    if len(points) <= MOST_SORTED:
        plain = bool((weight == 1).all())
        floor = variance_floor(points, size, sample_weight=None if plain else weight)
        return float(floor) * (1 - 1e-9)
    rows = points[:: max(1, len(points) // FLOOR_ROWS)]
    near = []
    for row in rows:
        squares = ((points - row) ** 2).sum(axis=1)
        order = np.argsort(squares, kind="stable")
        reached = np.searchsorted(np.cumsum(weight[order]), size)
        near.append(float(squares[order[min(int(reached), len(points) - 1)]]))
    low, high = max(min(near) / 16, max(near) * 1e-12), max(near)
    if high <= 0:
        return 0.0
    thresholds = np.geomspace(low, high, FLOOR_THRESHOLDS)
    spreads = np.asarray(_least_spreads(x, padded_weight, thresholds, size))[: len(points)]
    # Not a hair more than the size: the next spread may be far larger.
    spare = len(points) * float(np.finfo(np.float64).eps)
    return mean_of_first(spreads, weight, size, spare) * (1 - 1e-9)


@jax.jit
def _least_spreads(x: Array, weight: Array, thresholds: Array, size: Array) -> Array:
    r"""Return a lower bound on $S_{n-1}(x) / (2 n d)$ for every point, without sorting.

    The smallest squares D of weight n sum to at least $n t - \sum a (t - D)_+$, for any t. What
    rounding can do to the difference is taken off; it is in proportion to t, and t may be small.
    """
    rounding = (x.shape[0] + 16) * jnp.finfo(x.dtype).eps

    def spread(point: Array) -> Array:
        square = numerics.squared_distances(x.T, point[None])[0]
        short = (jnp.maximum(thresholds[:, None] - square, 0) * weight).sum(axis=1)
        least = size * thresholds * (1 - rounding) - short * (1 + rounding)
        return jnp.maximum(least.max(), 0) / (2 * size * x.shape[1])

    return lax.map(spread, x, batch_size=8)
