"""Cells in the space of the points: tight, and affordable in few dimensions."""

from collections.abc import Callable

import jax
import numpy as np

from jaxcmle.proof.cells import Domain
from jaxcmle.proof.pricing import Sets, best_sets, cell_profits, vertex_profits
from jaxcmle.proof.task import Task, mean_of_first

__all__ = ["WholeSpace", "extreme_means", "in_batches"]

# Corners and cells are evaluated in batches of one of these sizes.
BATCHES = (64, 1024)


class WholeSpace:
    """Means anywhere, bounded by the corners of cells."""

    def __init__(self, task: Task, duals: np.ndarray) -> None:
        """Take the duals per unit of weight, `[n]`."""
        self.task, self.duals = task, task.padded(duals)
        pricing = task.pricing
        low, high = extreme_means(task.x, task.weight, float(pricing.min_size))
        self.domain = Domain(
            low,
            high,
            float(pricing.low),
            float(pricing.high),
            float(pricing.log_factor),
        )
        self.max_size = float(pricing.max_size)

    def corner_profits(self, places: np.ndarray, precisions: np.ndarray) -> np.ndarray:
        """Return the best profit at every slack, `[m, q]`."""

        def profits(*batch: np.ndarray) -> jax.Array:
            return vertex_profits(self.task.pricing, self.duals, *batch)

        return in_batches(profits, places, precisions)

    def cell_profits(
        self, centre: np.ndarray, half: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> np.ndarray:
        """Return a profit that nothing in the cell exceeds, `[m]`."""

        def profits(*batch: np.ndarray) -> jax.Array:
            return cell_profits(self.task.pricing, self.duals, *batch)

        return in_batches(profits, centre, half, low, high)

    def climb(self, places: np.ndarray, precisions: np.ndarray) -> Sets:
        """Return sets of points found from there."""
        sets = best_sets(self.task.pricing, self.duals, places, precisions)
        return jax.tree.map(np.asarray, sets)


def extreme_means(x: np.ndarray, weight: np.ndarray, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest coordinates that the mean of a cluster can have.

    That is the mean of the smallest, or the largest, values of the minimum weight, and a hair more.
    """
    low = np.array([mean_of_first(column, weight, size) for column in x.T])
    high = -np.array([mean_of_first(-column, weight, size) for column in x.T])
    hair = 1e-9 * np.abs(x).max(axis=0)
    return low - hair, high + hair


def in_batches(function: Callable[..., jax.Array], *arrays: np.ndarray) -> np.ndarray:
    """Apply a function of m rows batch by batch, so that it is compiled for two sizes only."""
    parts, done, count = [], 0, len(arrays[0])
    while done < count:
        left = count - done
        size = BATCHES[0] if left <= 4 * BATCHES[0] else BATCHES[1]
        rows = np.minimum(np.arange(done, done + size), count - 1)
        parts.append(np.asarray(function(*(array[rows] for array in arrays)))[:left])
        done += size
    return np.concatenate(parts)
