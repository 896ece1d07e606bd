r"""What rounding can do to a bound, and so what is taken off it.

Everything is computed in float64, $u = 2^{-52}$ a unit. With R the largest norm of a point, A the
largest that a gain that counts is made of (prices, logarithms, thresholds; a distance that counts
is no larger, since the gain is positive), and N the weight of n points in d dimensions:

* A gain errs by $(d + 10) u A$, from the distance and its terms; that of a cell also by
  $8 u R \sqrt{2 A h}$, h the largest precision, as boxes have rounded sides.
* A sum of n gains errs by $n u$ of itself at most, in whatever order it is added.
* The size at which two thresholds meet is a difference of sums over a difference of thresholds,
  and moves the profit by that times its slope: the errors so far times $1 + 4 (S + 2) / s$, S the
  largest threshold and s the smallest distance of two. (Of few points, which are sorted, gains
  that do not pay may count as well; the factor covers them.)
* The points themselves were centred, with one rounding of each coordinate: that changes the cost
  of a partition by $u \sqrt{d h} R$ per unit of weight, for WKM by $u h R^2$.
"""

import math

import numpy as np

from jaxcmle.proof.task import Task

__all__ = ["UNIT", "data_margin", "profit_margin"]

UNIT = float(np.finfo(np.float64).eps)


def profit_margin(task: Task, prices: np.ndarray) -> float:
    """Return by how much a computed bound on the profit may be too small."""
    pricing = task.pricing
    n, d = task.x.shape
    radius = _radius(task)
    high = float(pricing.high)
    ends = np.log(np.array([float(pricing.low), high]) / (2 * np.pi))
    thresholds = np.asarray(pricing.thresholds)
    logs = float(pricing.log_factor) * np.abs(ends).max()
    largest = np.abs(prices).max() + logs + np.abs(thresholds).max() + 2
    each = (d + 10 + n) * largest + 8 * radius * math.sqrt(2 * largest * high)
    lever = 1 + 4 * (np.abs(thresholds).max() + 2) / np.diff(thresholds).min()
    return UNIT * task.total * lever * each


def data_margin(task: Task) -> float:
    """Return by how much a lower bound for the centred points may be above one for those given."""
    d, radius, high = task.x.shape[1], _radius(task), float(task.pricing.high)
    fixed = float(task.pricing.log_factor) == 0
    each = high * radius**2 if fixed else math.sqrt(d * high) * radius
    # The cost itself, and the logarithm of the scale, are rounded as well.
    n = len(task.x)
    own = abs(task.cost) + abs(task.offset) + task.total * d
    return UNIT * (2 * task.total * each + (n + 8) * own)


def _radius(task: Task) -> float:
    return math.sqrt(float((task.x * task.x).sum(axis=1).max()))
