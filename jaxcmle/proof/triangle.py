r"""Distances from the centres only: any number of features, clusters far apart.

A cluster's mean is at some distance $\delta$ from the nearest centre i of the partition at hand,
and, by the triangle inequality, at least $\max(\delta, |m_i - m_j| - \delta)$ from any other j. For
every group and every shell of distances, two bounds on what it gains: each point by its own
distance from the shell; and all together by the spread of the group (see `groups`). Precisions are
a fine grid; between two of them the profit is a convex function, and some slack.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxcmle.proof.cells import Domain, slack
from jaxcmle.proof.groups import Groups, group_sums, line_profits, make_groups, shifted_sums
from jaxcmle.proof.pricing import Pricing, log_term
from jaxcmle.proof.task import Task

__all__ = ["Triangle"]

# Slack between two precisions, per unit of weight; shells of distances; precisions at a time.
SLACK = 0.004
SHELLS = 60
CHUNK = 16
# Shells are narrow up to so many standard deviations.
NARROW = 4.0


class Triangle:
    """A bound on the profit from distances."""

    def __init__(self, task: Task) -> None:
        """Measure the groups of the partition at hand."""
        self.task = task
        pricing = task.pricing
        _, means, _ = task.moments(task.labels)
        offsets = task.x - means[task.labels]
        self._groups = make_groups(task, offsets)
        index = self._groups.places
        lengths = np.sqrt((offsets * offsets).sum(axis=1))
        self._lengths = jnp.asarray(np.where(index >= 0, lengths[index], 0.0))
        between = np.sqrt(((means[:, None] - means) ** 2).sum(axis=2)) * (1 - 1e-9)
        self._between = jnp.asarray(between)
        farthest = max(np.sqrt(((task.x - mean) ** 2).sum(axis=1).max()) for mean in means)
        self._farthest = jnp.asarray(farthest * (1 + 1e-9))

        d = task.x.shape[1]
        low, high = float(pricing.low), float(pricing.high)
        step = math.sqrt(16 * SLACK / d)
        count = 1 if high <= low else max(2, math.ceil(math.log(high / low) / step) + 1)
        self._precisions = np.geomspace(low, high, count)
        self._slack = 0.0
        if count > 1:
            domain = Domain(np.zeros(0), np.zeros(0), low, high, float(pricing.log_factor))
            ends = self._precisions[:-1], self._precisions[1:]
            self._slack = float(slack(domain, np.zeros((count - 1, 0)), *ends).max()) * (1 + 1e-9)

    def profit(self, prices: np.ndarray) -> float:
        """Return a profit that no cluster exceeds."""
        best = -math.inf
        by_group = self._groups.prices(prices)
        groups = self._groups._replace(places=np.zeros(0))
        for i in range(0, len(self._precisions), CHUNK):
            rows = np.minimum(np.arange(i, i + CHUNK), len(self._precisions) - 1)
            profits = _profits(
                self.task.pricing,
                groups,
                self._lengths,
                self._between,
                self._farthest,
                by_group + self._slack,
                self._precisions[rows],
            )
            best = max(best, float(profits.max()))
        return best


@jax.jit
def _profits(
    pricing: Pricing,
    groups: Groups,
    lengths: Array,
    between: Array,
    farthest: Array,
    prices: Array,
    precisions: Array,
) -> Array:
    s = pricing.thresholds

    def profit(u: Array) -> Array:
        edges = _edges(u, farthest)
        low, high = edges[:-1], edges[1:]
        log = log_term(pricing, u)

        # All of a group together: [shells, j, t].
        sums = group_sums(groups, prices - u / 2 * lengths * lengths + log, s)
        wanted = s - u / 2 * (low * low)[:, None]
        sums = jnp.broadcast_to(sums, (len(low), *sums.shape))
        together = shifted_sums(groups, sums, u * high, s, wanted)

        # Each point by itself.
        def shell(ends: tuple[Array, Array]) -> Array:
            gap = jnp.maximum(jnp.maximum(ends[0] - lengths, lengths - ends[1]), 0)
            return group_sums(groups, prices - u / 2 * gap * gap + log, s)

        alone = lax.map(shell, (low, high), batch_size=4)
        gains = jnp.minimum(together, alone)
        beyond = lax.cummax(gains[::-1], axis=0)[::-1]

        # Centre i is the nearest, in a shell; where may the others be?
        def total(i: Array) -> Array:
            least = jnp.maximum(low[:, None], between[i] - high[:, None])
            place = jnp.clip(jnp.searchsorted(edges, least, side="right") - 1, 0, len(low) - 1)
            others = jnp.take_along_axis(beyond, place[:, :, None], axis=0)
            own = jnp.arange(len(between)) == i
            return jnp.where(own[:, None], gains, others).sum(axis=1)

        totals = lax.map(total, jnp.arange(len(between)))
        return line_profits(pricing, totals)[..., 0].max()

    return lax.map(profit, precisions)


def _edges(u: Array, farthest: Array) -> Array:
    """Return the edges of shells from 0 to the farthest, close to each other near the centre."""
    narrow = jnp.minimum(NARROW / jnp.sqrt(u), farthest)
    share = np.arange(SHELLS // 2 + 1) / (SHELLS // 2)
    first, second = narrow * share[:-1], narrow + (farthest - narrow) * share
    return jnp.concatenate([first, second])
