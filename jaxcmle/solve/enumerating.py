"""The compiled passes of the guaranteed search for many instances: starts, draws, polishing."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcmle import numerics
from jaxcmle.candidates import grids, sampling, scoring
from jaxcmle.candidates.plan import Plan
from jaxcmle.candidates.sampling import Pool
from jaxcmle.candidates.scoring import PRUNING, Best, Grid, Pruning
from jaxcmle.candidates.seeding import drawn_mixture
from jaxcmle.problem.objective import shift_means
from jaxcmle.problem.types import UCMLE, WKM, Mixture, Problem, Solution
from jaxcmle.refine.iterations import Limits, best_admissible, cem_stack
from jaxcmle.solve.approximate import N_KEPT
from jaxcmle.solve.batches import Layout, Watch
from jaxcmle.solve.instances import Instance
from jaxcmle.solve.searches import Task
from jaxcmle.solve.sources import paced, sound_pruning
from jaxcmle.solve.stacks import Batch, over_instances

__all__ = [
    "Draw",
    "Own",
    "Tables",
    "draw_all",
    "draw_of",
    "ends_of",
    "enumerate_all",
    "polish_all",
    "start_all",
    "tables_of",
]

# Repetitions drawn together, at least and at most.
LEAST_TOGETHER, MOST_TOGETHER = 16, scoring.CHUNK
MAX_ITER = 300


class Tables(NamedTuple):
    """The grids that all instances share.

    Attributes:
        constant: `[g]`, the cost at no distance, on the scale.
        weights: `[w, k]`, padded to a power of two, so that few programs serve all plans.
        log_weights: what of them costs.
        n_weights: how many of them count.
        m: points to a mean.
    """

    constant: Any
    weights: Any
    log_weights: Any
    n_weights: Any
    m: Any


class Own(NamedTuple):
    """What is an instance's own: its task, where shares end, slopes and variances of the grid."""

    task: Task
    ends: Any
    slope: Any
    variances: Any


class Draw(NamedTuple):
    """What of a plan changes programs; hashable."""

    k: int
    drawn: int
    together: int
    n_best: int
    n_polish: int
    pruning: Pruning


def tables_of(plan: Plan, problem: Problem, dtype: Any) -> Tables:
    """Return the grids of a plan."""
    k = plan.n_clusters
    weights = np.full((1, k), 1 / k)
    if plan.weight_exponents > 1:
        weights = grids.geometric_weights(k, plan.balance, plan.weight_exponents)
    padded = np.resize(weights, (sampling.bucket(len(weights)), k))
    constant = plan.d / 2 * (np.asarray(plan.variance_values) - 1)
    if isinstance(problem, WKM):
        constant = np.zeros_like(constant)
    log_weights = np.zeros_like(padded) if isinstance(problem, UCMLE) else np.log(padded)
    return Tables(
        constant=constant.astype(dtype),
        weights=padded.astype(dtype),
        log_weights=log_weights.astype(dtype),
        n_weights=np.int32(len(weights)),
        m=np.int32(plan.m),
    )


def draw_of(plan: Plan, tables: Tables, n_polish: int) -> Draw:
    """Return how to draw the candidates of a plan."""
    together = max(sampling.bucket(plan.repetitions), LEAST_TOGETHER)
    return Draw(
        k=plan.n_clusters,
        drawn=sampling.bucket(plan.m),
        together=min(together, MOST_TOGETHER),
        n_best=max(n_polish, N_KEPT),
        n_polish=n_polish,
        pruning=sound_pruning(PRUNING, tables.constant),
    )


def ends_of(instance: Instance, n: int) -> np.ndarray:
    """Return where the share of each of n points but the last ends, of 2^32, as in a `Pool`.

    The shares of padding are empty, and of points of equal weight the same are drawn as by
    `places_of`: those from `ceil(i 2^32 / n)` on are past the first i.
    """
    ends = np.full(n - 1, 2**32 - 1, np.int64)
    if instance.weight is None or instance.unweighted:
        count = int(len(instance.x) if instance.weight is None else instance.weight.sum())
        ends[: count - 1] = -(-(np.arange(1, count, dtype=np.int64) << 32) // count)
    else:
        present = instance.weight[instance.weight > 0]
        pool: Any = sampling.make_pool(present, present)  # type: ignore[arg-type]
        ends[: len(present) - 1] = pool.ends
    return ends


@partial(jax.jit, static_argnames=("n_starts", "k", "layout"))
def start_all(
    task: Task, counts: Array, problem: Problem, n_starts: int, k: int, layout: Layout
) -> Solution:
    """Return the best of many starts of CEM for each instance."""

    def one(task: Task, problem: Problem) -> Solution:
        points = numerics.prepare(task.x, task.weight)
        key = jax.random.fold_in(task.key, 1)

        def start(i: Array) -> Mixture:
            own = jax.random.fold_in(key, i)
            mixture = drawn_mixture(own, points, jnp.ones(k, bool), "kmeans++")
            return shift_means(mixture, points.shift)

        return best_admissible(_refined(task, jax.vmap(start)(jnp.arange(n_starts)), problem))[0]

    return over_instances(one, task, counts, problem, layout, _cem_bytes(task, n_starts, k))


def _refined(task: Task, starts: Mixture, problem: Problem) -> Solution:
    limits = Limits(MAX_ITER, task.min_size, task.min_variance)
    return cem_stack(task.x, task.weight, starts, problem, limits)


def _cem_bytes(task: Task, starts: int, k: int) -> int:
    _, n, d = task.x.shape
    return 4 * starts * n * (k + d + 2) * task.x.dtype.itemsize


def enumerate_all(
    plan: Plan, own: Own, batch: Batch, tables: Tables, draw: Draw, layout: Layout, watch: Watch
) -> tuple[Best, bool]:
    """Return the best candidates of each instance, and whether that is of all of them."""
    shape = (batch.size, draw.n_best)
    choice: Any = np.full((*shape, 3 + draw.k), np.iinfo(np.int32).max, np.int32)
    best = Best(batch.stack(np.full(shape, np.inf)[batch.places]), choice)
    done = 0

    def run(count: int) -> None:
        nonlocal best, done
        numbers = np.array([*divmod(done, sampling.NUMBERS), count], np.int32)
        new = draw_all((own, best), batch.counts, (tables, numbers), draw, layout)
        best, done = jax.block_until_ready(new), done + count

    while done < plan.repetitions:
        left = min(plan.repetitions - done, sampling.NUMBERS - done % sampling.NUMBERS)
        for _ in paced(run, left, draw.together, left, None):
            if done < plan.repetitions and watch.stops():
                return best, False
    return best, True


@partial(jax.jit, static_argnames=("draw", "layout"))
def draw_all(
    stack: tuple[Own, Best],
    counts: Array,
    shared: tuple[Tables, Array],
    draw: Draw,
    layout: Layout,
) -> Best:
    """Draw and score the next repetitions of each instance; see `sampling.next_repetitions`."""

    def one(given: tuple[Own, Best], shared: tuple[Tables, Array]) -> Best:
        (own, best), (tables, numbers) = given, shared
        points = numerics.prepare(own.task.x, own.task.weight)
        return sampling.traced_repetitions(
            jax.random.fold_in(own.task.key, 0),
            Pool(points.x, own.ends),
            scoring.point_blocks(points.x, points.weight),
            Grid(own.slope, tables.constant, tables.log_weights, tables.n_weights),
            best,
            numbers[:2],
            numbers[2],
            tables.m,
            draw.k,
            draw.drawn,
            draw.together,
            draw.pruning,
            None,
        )

    own = stack[0]
    (_, n, d), g = own.task.x.shape, own.slope.shape[1]
    cost = scoring.repetition_bytes(draw.k, g, d, n, own.task.x.dtype.itemsize)
    return over_instances(one, stack, counts, shared, layout, cost)


@partial(jax.jit, static_argnames=("draw", "layout"))
def polish_all(
    own: Own,
    best: Best,
    counts: Array,
    shared: tuple[Tables, Problem],
    draw: Draw,
    layout: Layout,
) -> tuple[Mixture, Solution]:
    """Return the best candidates of each instance as mixtures, and the first of them refined."""

    def one(given: tuple[Own, Best], shared: tuple[Tables, Problem]) -> tuple[Mixture, Solution]:
        (own, best), (tables, problem) = given, shared
        points = numerics.prepare(own.task.x, own.task.weight)
        # Where there are not so many, the last is repeated.
        last = (best.cost < jnp.inf).sum() - 1
        choice = best.choice[jnp.minimum(jnp.arange(draw.n_best), last)]
        pool = Pool(points.x, own.ends)
        key = jax.random.fold_in(own.task.key, 0)
        means = sampling.traced_means(key, choice[:, :2], pool, draw.k, tables.m, draw.drawn)
        mixtures = Mixture(
            weights=tables.weights[choice[:, 2]],
            means=means + points.shift,
            variances=own.variances[choice[:, 3:]],
        )
        first = jax.tree.map(lambda leaf: leaf[: draw.n_polish], mixtures)
        return mixtures, _refined(own.task, first, problem)

    cost = _cem_bytes(own.task, draw.n_polish, draw.k)
    return over_instances(one, (own, best), counts, shared, layout, cost)
