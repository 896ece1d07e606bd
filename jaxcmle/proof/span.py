"""Cells in the span of the centres: for few clusters that are apart, in any dimension.

A point has a part p in the span of the centres and a part o orthogonal to it. Of a cluster's mean,
only the part in the span and the length of the other are searched; what the length can gain is
bounded by the spread of o within each group of the partition at hand (see `groups`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcmle.proof.cells import Domain
from jaxcmle.proof.groups import Groups, group_sums, line_profits, make_groups, shifted_sums
from jaxcmle.proof.pricing import (
    Pricing,
    Sets,
    best_sets,
    best_terms,
    by_rows,
    log_term,
    squares_outside,
)
from jaxcmle.proof.rounding import UNIT
from jaxcmle.proof.space import extreme_means, in_batches
from jaxcmle.proof.task import Task

__all__ = ["CentreSpan"]


class CentreSpan:
    """Means by their place in the span of the centres and their distance from it."""

    def __init__(self, task: Task) -> None:
        """Split the points."""
        self.task = task
        pricing = task.pricing
        _, means, _ = task.moments(task.labels)
        middle = means.mean(axis=0)
        rank = min(task.k - 1, task.x.shape[1])
        self._basis = np.linalg.svd(means - middle, full_matrices=False)[2][:rank].T
        self._middle = middle
        inside = (task.x - middle) @ self._basis
        outside = task.x - middle - inside @ self._basis.T
        self._groups = make_groups(task, outside)
        index = self._groups.places
        self._inside = jnp.asarray(np.where(index[..., None] >= 0, inside[index], 0.0))
        lengths = np.sqrt((outside * outside).sum(axis=1))
        self._squares = jnp.asarray(np.where(index >= 0, lengths[index] ** 2, 0.0))

        size = float(pricing.min_size)
        groups = self._groups
        spread = float((groups.size * groups.spread).sum())
        _, longest = extreme_means(lengths[:, None], task.weight, size)
        reach = min(float(longest[0]), np.sqrt(spread / size)) * (1 + 1e-9)
        low, high = extreme_means(inside, task.weight, size)
        self.domain = Domain(
            np.append(low, 0.0),
            np.append(high, reach),
            float(pricing.low),
            float(pricing.high),
            float(pricing.log_factor),
        )
        self.max_size = float(pricing.max_size)
        # The parts are orthogonal, and those outside have mean 0, but for rounding.
        drift = max(
            float(np.linalg.norm(np.average(outside[own], axis=0, weights=task.weight[own])))
            for own in (task.labels == j for j in range(task.k))
        )
        radius = float((task.x * task.x).sum(axis=1).max())
        steep = float(pricing.high)
        rounding = 16 * task.x.shape[1] * UNIT * radius
        self.margin = task.total * steep * (2 * reach * drift + rounding)
        self._prices = jnp.zeros_like(groups.weight)
        self._own_prices = task.padded(np.zeros(len(task.x)))

    def with_prices(self, prices: np.ndarray) -> "CentreSpan":
        """Use these prices, `[n]`."""
        self._prices = self._groups.prices(prices)
        self._own_prices = self.task.padded(prices)
        return self

    def corner_profits(self, places: np.ndarray, precisions: np.ndarray) -> np.ndarray:
        """Return the best profit at every slack, `[m, q]`."""

        def profits(*batch: np.ndarray) -> Array:
            return _corner_profits(*self._arrays(), *batch)

        return in_batches(profits, places, precisions)

    def cell_profits(
        self, centre: np.ndarray, half: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> np.ndarray:
        """Return a profit that nothing in the cell exceeds, `[m]`."""

        def profits(*batch: np.ndarray) -> Array:
            return _cell_profits(*self._arrays(), *batch)

        return in_batches(profits, centre, half, low, high)

    def climb(self, places: np.ndarray, precisions: np.ndarray) -> Sets:
        """Return sets of points found from there, with means anywhere."""
        means = self._middle + places[:, :-1] @ self._basis.T
        sets = best_sets(self.task.pricing, self._own_prices, means, precisions)
        return jax.tree.map(np.asarray, sets)

    def _arrays(self) -> tuple[Pricing, Groups, Array, Array, Array]:
        groups = self._groups._replace(places=np.zeros(0))
        return self.task.pricing, groups, self._inside, self._squares, self._prices


@jax.jit
def _corner_profits(
    pricing: Pricing,
    groups: Groups,
    inside: Array,
    squares: Array,
    prices: Array,
    places: Array,
    precisions: Array,
) -> Array:
    flat = inside.reshape(-1, inside.shape[-1])

    def curves(place: Array, u: Array) -> Array:
        reach = place[:, -1]
        square = ((flat - place[:, None, :-1]) ** 2).sum(axis=2) + squares.reshape(-1)
        square = square + (reach * reach)[:, None]
        gains = prices.reshape(-1) - u[:, None] / 2 * square + log_term(pricing, u)[:, None]
        return line_profits(pricing, _totals(pricing, groups, gains, u * reach))

    return by_rows(curves, 4 * len(flat), places, precisions)


@jax.jit
def _cell_profits(
    pricing: Pricing,
    groups: Groups,
    inside: Array,
    squares: Array,
    prices: Array,
    centre: Array,
    half: Array,
    low: Array,
    high: Array,
) -> Array:
    flat = inside.reshape(-1, inside.shape[-1])

    def profits(centre: Array, half: Array, low: Array, high: Array) -> Array:
        near = jnp.maximum(centre[:, -1] - half[:, -1], 0)
        square = squares_outside(flat, centre[:, :-1], half[:, :-1]) + squares.reshape(-1)
        square = square + (near * near)[:, None]
        gains = prices.reshape(-1) + best_terms(pricing, square, low, high)
        kappa = high * (centre[:, -1] + half[:, -1])
        return line_profits(pricing, _totals(pricing, groups, gains, kappa))[:, 0]

    return by_rows(profits, 4 * len(flat), centre, half, low, high)


def _totals(pricing: Pricing, groups: Groups, gains: Array, kappa: Array) -> Array:
    """Return what all groups together gain at most at each threshold, `[m, t]`."""
    s = pricing.thresholds
    gains = gains.reshape(len(gains), *groups.weight.shape)
    sums = group_sums(groups, gains, s)
    wanted = jnp.broadcast_to(s, (len(gains), len(s)))
    return shifted_sums(groups, sums, kappa, s, wanted).sum(axis=1)
