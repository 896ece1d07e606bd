r"""Points by cluster of the partition at hand: what a set can gain from a shift of its mean.

Let points of group j have offsets o with mean 0, and a set take the weight k of the group's n. Its
offsets sum to a vector no longer than $\beta(k) = \sqrt{n \lambda k (1 - k/n)}$, $\lambda$ the
largest eigenvalue of their covariance, nor than the k, or the n - k, longest add up to. So for any
D, $\kappa \beta(k) \le D k + A(\kappa, D)$ with

$$A = \tfrac{n}{2} \left(\sqrt{\lambda \kappa^2 + D^2} - D\right), \quad
  A = n \max(-D, 0) \text{ where } |D| \ge \kappa \max |o|,$$

and the most that the group gains at a threshold s, with $\kappa \beta$ on top of its gains v, is
$\min_r [\sum_x a (v_x + r)_+ + A(\kappa, r - s)]$: no sorting, and no search over sets.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxcmle.proof.pricing import NO_POINT, SLACKS, Pricing, size_term
from jaxcmle.proof.task import Task

__all__ = ["Groups", "group_sums", "line_profits", "make_groups", "shifted_sums"]

# Numbers of points in a group are rounded up to a multiple of this part of a power of two.
PADDING = 8
# Sizes of sets that are told apart.
SIZES = 48


class Groups(NamedTuple):
    """The points of each group, padded to the same number p.

    Attributes:
        places: whole `[j, p]`, where the points are; -1 for padding.
        weight: `[j, p]`, 0 for padding.
        size: `[j]`, the weight of the group.
        spread: `[j]`, the largest eigenvalue of the covariance of the offsets, rounded up.
        longest: `[j]`, the length of the longest offset, rounded up.
    """

    places: np.ndarray
    weight: Array
    size: Array
    spread: Array
    longest: Array

    def prices(self, prices: np.ndarray) -> Array:
        """Return the prices of the points by group."""
        return jnp.asarray(np.where(self.places >= 0, prices[self.places], NO_POINT))


def make_groups(task: Task, offsets: np.ndarray) -> Groups:
    """Return the groups of the partition at hand, for offsets `[n, q]` with mean 0 in each."""
    members = [np.flatnonzero(task.labels == j) for j in range(task.k)]
    longest = max(len(each) for each in members)
    step = max(8, 1 << max(longest - 1, 1).bit_length()) // PADDING
    length = longest + -longest % step
    places = np.full((task.k, length), -1)
    for row, each in zip(places, members, strict=True):
        row[: len(each)] = each
    weight = np.where(places >= 0, task.weight[places], 0.0)
    size, spread, norm = [], [], []
    for each in members:
        a, o = task.weight[each], offsets[each]
        size.append(a.sum())
        covariance = (a[:, None] * o).T @ o / a.sum()
        # Rounding, and a mean that is not quite 0, lengthen it by less than this.
        spread.append(np.linalg.eigvalsh(covariance)[-1] * (1 + 1e-9) + 1e-24)
        norm.append(np.sqrt((o * o).sum(axis=1).max()) * (1 + 1e-9) + 1e-12)
    return Groups(places, *(jnp.asarray(each) for each in (weight, size, spread, norm)))


def group_sums(groups: Groups, gains: Array, thresholds: Array) -> Array:
    """Return `sum_x a (v + r)_+` of each group at all thresholds, `[..., j, t]`."""
    gains = lax.optimization_barrier(gains)
    positive = jnp.maximum(gains[..., None, :] + thresholds[:, None], 0)
    return (positive * groups.weight[:, None, :]).sum(axis=-1)


def shifted_sums(
    groups: Groups, sums: Array, kappa: Array, thresholds: Array, wanted: Array
) -> Array:
    """Return what each group gains at most at the wanted thresholds, `[..., j, w]`.

    Args:
        groups: with the spread of their offsets.
        sums: `[..., j, t]`, what they gain at the thresholds without a shift.
        kappa: `[...]`.
        thresholds: `[t]`.
        wanted: `[..., w]`.
    """
    kappa = kappa[..., None, None, None]
    distance = thresholds - wanted[..., None, :, None]
    spread, size = groups.spread[:, None, None], groups.size[:, None, None]
    root = jnp.sqrt(spread * kappa * kappa + distance * distance)
    far = jnp.abs(distance) >= kappa * groups.longest[:, None, None]
    extra = size * jnp.where(far, jnp.maximum(-distance, 0), (root - distance) / 2)
    return (sums[..., None, :] + extra).min(axis=-1)


def line_profits(pricing: Pricing, sums: Array) -> Array:
    """Return the best profit for every slack, `[..., q]`, from sums at the thresholds `[..., t]`.

    As `profit_curves`, for sums that are not convex in the threshold. Between two sizes of a grid,
    the best of the thresholds for both bounds the profit: with it, profits are convex in the size.
    """
    share = np.arange(SIZES) / (SIZES - 1)
    sizes = pricing.min_size * (pricing.max_size / pricing.min_size) ** share
    sizes = sizes.at[-1].set(pricing.max_size)
    lines = sums[..., None] - sizes * pricing.thresholds[:, None] + size_term(pricing, sizes)
    between = jnp.maximum(lines[..., :-1], lines[..., 1:]).min(axis=-2)
    return (between[..., None, :] + SLACKS[:, None] * sizes[1:]).max(axis=-1)
