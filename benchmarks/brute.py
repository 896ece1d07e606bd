"""Small instances whose optimum is known, because all partitions were tried.

Up to 12 points, with outliers, duplicates, two scales or heavy tails, for all three problems, and
variances of at least `FLOOR`. The optimum is the least over all partitions.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcmle as jc
from benchmarks.harness import say
from benchmarks.tables import Table, source

FLOOR = 1e-3
BETA = 0.7
PROBLEMS: dict[str, jc.Problem] = {"CMLE": jc.CMLE(), "WKM": jc.WKM(BETA), "UCMLE": jc.UCMLE()}
FAMILIES = ("gaussian", "outlier", "rounded", "two scales", "Cauchy")
SIZES = (8, 10, 12)
COUNT = 500
OPTIMAL = 1e-4
AIM = 0.99


@functools.cache
def partitions(n: int, k: int) -> np.ndarray:
    """Return every partition of n points into k clusters as bit masks `[p, k]`.

    Clusters are in the order of their first points, so that none comes twice.
    """
    masks, used = np.zeros((1, k), np.int32), np.zeros(1, np.int32)
    for point in range(n):
        # A point joins a cluster that has points, or founds the next.
        rows, clusters = np.nonzero(np.arange(k) <= used[:, None])
        masks, used = masks[rows], np.maximum(used[rows], clusters + 1)
        masks[np.arange(len(rows)), clusters] |= 1 << point
        possible = k - used <= n - point - 1
        masks, used = masks[possible], used[possible]
    return masks


def subset_costs(x: np.ndarray, problem: str, min_size: int) -> np.ndarray:
    """Return the cost of every subset as a cluster, `[2^n]`; infinity if it is too small."""
    x = x.astype(np.float64)
    n, d = x.shape
    inside = ((np.arange(2**n)[:, None] >> np.arange(n)) & 1).astype(np.float64)
    distances = ((x[:, None] - x) ** 2).sum(axis=2)
    count = inside.sum(axis=1)
    size = np.maximum(count, 1)
    scatter = ((inside @ distances) * inside).sum(axis=1) / (2 * size)
    variance = np.maximum(scatter / (d * size), FLOOR)
    costs = size * d / 2 * np.log(2 * math.pi * variance) + scatter / (2 * variance)
    if problem == "WKM":
        costs = BETA * scatter
    if problem != "UCMLE":
        costs = costs - size * np.log(size / n)
    return np.where(count >= max(1, min_size), costs, math.inf)


def small_data(rng: np.random.Generator, family: str, n: int, d: int, k: int) -> np.ndarray:
    """Return few points, of which at least k are distinct."""
    while True:
        x = rng.normal(size=(n, d))
        if family == "outlier":
            x[0] += rng.choice([-1, 1], size=d) * rng.uniform(5, 50)
        elif family == "rounded":
            x = np.round(2 * x) / 2
        elif family == "two scales":
            x *= np.where(np.arange(n) % 2, 0.05, 2.0)[:, None]
        elif family == "Cauchy":
            x = rng.standard_cauchy(size=(n, d))
        x = x.astype(np.float32)
        if len(np.unique(x, axis=0)) >= k:
            return x


class Instance(NamedTuple):
    """What is drawn for a seed: the problem, the data and what is asked for."""

    seed: int
    problem: str
    family: str
    x: np.ndarray
    k: int
    min_size: int


def draw(seed: int) -> Instance:
    rng = np.random.default_rng(seed)
    problem, family = str(rng.choice(list(PROBLEMS))), str(rng.choice(FAMILIES))
    n, d, k = int(rng.choice(SIZES)), int(rng.integers(1, 3)), int(rng.integers(2, 5))
    min_size = int(rng.choice([1, 2, n // k]))
    return Instance(seed, problem, family, small_data(rng, family, n, d, k), k, min_size)


def solve(instance: Instance) -> dict[str, Any]:
    seed, problem, family, x, k, min_size = instance
    n, d = x.shape
    solution = jc.fit(
        jnp.asarray(x),
        k,
        key=jax.random.key(seed),
        problem=PROBLEMS[problem],
        min_size=min_size,
        min_variance=FLOOR,
        progress=False,
    )
    labels = np.asarray(solution.labels)
    costs = subset_costs(x, problem, min_size)
    best = float(costs[partitions(n, k)].sum(axis=1).min())
    masks = ((labels == np.arange(k)[:, None]) << np.arange(n)).sum(axis=1)
    cost = float(costs[masks].sum())
    return {
        "seed": seed,
        "problem": problem,
        "family": family,
        "n": n,
        "d": d,
        "k": k,
        "min_size": min_size,
        "cost": cost,
        "optimum": best,
        "reached": cost <= best + OPTIMAL * max(1.0, abs(best)),
    }


def measure(quick: bool) -> dict[str, Any]:
    instances = [draw(seed) for seed in range(COUNT)]
    if quick:
        # Of one shape and problem, which takes one program.
        instances = [
            one
            for one in instances
            if one.problem == "CMLE" and one.x.shape == (12, 2) and one.k == 3
        ]
    results = []
    for place, instance in enumerate(instances):
        if place % 50 == 0:
            say("quality brute", place)
        results.append(solve(instance))
    return {"instances": results}


def table(found: dict[str, Any]) -> Table:
    instances = found["results"]["instances"]
    rows = []
    for problem in (*PROBLEMS, "all"):
        own = [one for one in instances if problem in (one["problem"], "all")]
        if own:
            rows.append((problem, f"{sum(one['reached'] for one in own)} of {len(own)}"))
    before = (
        f"Instances of up to {max(SIZES)} points, with outliers, duplicates, heavy tails and tight "
        f"minimum sizes: how many are solved to the optimum that brute force finds (aim {AIM:.0%})."
    )
    return Table(before, ("problem", "solved"), tuple(rows), source(found))
