"""Random cases of the pricing problem, with the oracle's answers: what tests of the proof share."""

import math
from typing import NamedTuple

import numpy as np
import reference_proof
from support import BETA, NAMES

import jaxcmle as jc
from jaxcmle.proof.rounding import profit_margin
from jaxcmle.proof.task import Task, make_task

FAMILIES = ("plain", "outlier", "nested", "duplicates", "constant", "tiny", "huge")


class Case(NamedTuple):
    """A task, prices per unit of weight, and what the oracle wants to know."""

    task: Task
    prices: np.ndarray
    name: str

    @property
    def alpha(self):
        return self.task.weight * self.prices

    @property
    def min_size(self):
        return float(self.task.pricing.min_size)

    @property
    def beta(self):
        return float(self.task.problem.beta) if self.name == "wkm" else 1.0

    @property
    def margin(self):
        return profit_margin(self.task, self.prices)

    def price(self, means, precision, extra=0.0):
        """Return F, every unit of weight being worth more by `extra`."""
        task = self.task
        alpha = self.alpha + extra * task.weight
        options = (task.k, self.min_size, self.name, self.beta, task.weight)
        return reference_proof.price(task.x, alpha, means, precision, *options)

    def naive(self, bound, *cell):
        """Return an oracle's bound for a cell."""
        task = self.task
        options = (task.k, self.min_size, self.name, self.beta, task.weight)
        return bound(task.x, self.alpha, *cell, *options)

    def maximum(self):
        """Return the largest profit of all, and the points of the set that makes it."""
        task = self.task
        options = (task.k, self.min_size, self.name, self.beta, task.min_variance, task.weight)
        return reference_proof.pricing_maximum(task.x, self.alpha, *options)

    def cost(self, members):
        """Return the cost of a set."""
        task = self.task
        weight = task.weight[members]
        options = (task.total, self.name, self.beta, task.min_variance)
        return reference_proof.cluster_cost(task.x[members], weight, *options)

    def profit(self, members):
        """Return the profit of a set."""
        return math.fsum(self.alpha[members]) - self.cost(members)


def random_points(rng, n, d, family):
    if family == "duplicates":
        return rng.integers(0, 3, size=(n, d)).astype(float)
    x = rng.normal(size=(n, d))
    if family == "outlier":
        x[: max(1, n // 6)] *= 10.0 ** rng.uniform(1, 4)
    elif family == "nested":
        x *= rng.choice([1.0, 20.0, 400.0], size=(n, 1))
    elif family == "constant":
        x[:, -1] = 0.1 if d > 1 else x[:, -1]
    elif family == "tiny":
        x = 1e-7 * x + 0.3
    elif family == "huge":
        x = 1e9 * (x + 5)
    return x


def random_case(seed, n, d, *, family=None, name=None, weighted=None, k=None, sizes=None):
    """Return a case of the kind that the seed says, but for what is asked for."""
    rng = np.random.default_rng(seed)
    family = FAMILIES[seed % len(FAMILIES)] if family is None else family
    name = NAMES[seed % len(NAMES)] if name is None else name
    weighted = seed % 4 == 0 if weighted is None else weighted
    k = (2, 3, n // 2)[seed // 3 % 3] if k is None else k
    x = random_points(rng, n, d, family)
    sizes = [len(part) for part in np.array_split(np.arange(n), k)] if sizes is None else sizes
    labels = rng.permutation(np.repeat(np.arange(k), sizes))
    if family == "apart":
        x += rng.choice([4.0, 12.0]) * rng.normal(size=(k, d))[labels]
    if family in ("outlier", "nested") and seed % 2:
        labels = np.empty(n, int)
        labels[np.argsort((x * x).sum(axis=1))] = np.repeat(np.arange(k), sizes)
    scale = float(np.sqrt(((x - x.mean(axis=0)) ** 2).mean()))
    weight = rng.uniform(0.2, 3.0, size=n) if weighted else None
    if weighted and seed % 8 == 0:
        weight = np.ceil(weight)
    floor = 0.0
    if family == "duplicates" or weighted or seed % 5 == 0:
        floor = float(rng.choice([1e-4, 1e-2, 1.0])) * scale**2
    problem = {
        "cmle": jc.CMLE(),
        "wkm": jc.WKM(beta=rng.choice([0.05, BETA, 20.0]) / scale**2),
        "ucmle": jc.UCMLE(),
    }[name]
    min_size = float(rng.integers(2, n // k + 1))
    if weighted:
        # At times exactly the weight of a cluster.
        min_size = float(np.bincount(labels, weight).min()) * rng.choice([0.5, 0.9, 1.0])
    task = make_task(x, weight, k, labels, min_size, problem, floor)
    assert task is not None
    prices = rng.choice([0.1, 1.0, 5.0]) * rng.normal(size=n)
    if seed % 3 and np.isfinite(task.cost):
        prices = prices + task.point_costs()
    return Case(task, prices, name)
