"""The search of `fit` for a stack of instances, as one compiled pass.

One after the other on a CPU: there, what small arrays cost is mostly the number of operations, and
instances that wait for each other waste them. Several at once on accelerators, round by round:
after each round those that are finished make room for others.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxcmle import numerics
from jaxcmle.problem.objective import assign_points, shift_means
from jaxcmle.problem.types import Mixture, Problem, Solution, Status
from jaxcmle.refine.polish import Limits
from jaxcmle.refine.workspace import Workspace, anywhere
from jaxcmle.solve.batches import Layout, each_first, over_devices
from jaxcmle.solve.effort import Effort, StartMethod
from jaxcmle.solve.evolution import Pace, Search, advance, begin, pace_of
from jaxcmle.solve.population import make_starts, outcome, workspace

__all__ = ["Found", "Task", "search_all"]

# The axis of searches that run at once.
LANES = "lanes"
# Of the instances of a chunk, this part runs at once.
SHARE_AT_ONCE = 4


class Task(NamedTuple):
    """One instance, or a stack: padded points, their weights, clusters, limits and a key."""

    x: Any
    weight: Any
    exists: Any
    min_size: Any
    min_variance: Any
    key: Any


class Found(NamedTuple):
    """The solution of a task, and the floor under variances that it was found with."""

    solution: Solution
    floor: Array


class _Running(NamedTuple):
    """A search on its way."""

    space: Workspace
    search: Search


class _Plan(NamedTuple):
    """What of an effort changes shapes or programs; hashable."""

    m: int
    restarts: int
    methods: tuple[StartMethod, ...]


def search_all(tasks: Task, counts: Any, effort: Effort, problem: Problem, layout: Layout) -> Found:
    """Return what is found for the first of the tasks on each device, as many as `counts` says."""
    plan = _Plan(effort.population, effort.restarts, effort.methods)
    return _search_all(tasks, counts, pace_of(effort), problem, plan, layout)


@partial(jax.jit, static_argnames=("plan", "layout"))
def _search_all(
    tasks: Task, counts: Array, pace: Pace, problem: Problem, plan: _Plan, layout: Layout
) -> Found:
    def local(tasks: Task, count: Array, shared: tuple[Pace, Problem]) -> Found:
        pace, problem = shared
        if layout.form == "map":
            return each_first(lambda task: _alone(task, pace, problem, plan), tasks, count)
        return _in_lanes(tasks, count, pace, problem, plan)

    return over_devices(local, layout)(tasks, counts, (pace, problem))


def _alone(task: Task, pace: Pace, problem: Problem, plan: _Plan) -> Found:
    """Search for one instance to the end."""
    running = lax.while_loop(
        lambda running: ~running.search.finished,
        lambda running: _round(task, running, pace, problem, plan),
        _begin(task, pace, problem, plan, None),
    )
    return _end(task, running, problem)


def _in_lanes(tasks: Task, count: Array, pace: Pace, problem: Problem, plan: _Plan) -> Found:
    """Search for several instances at once, a round for each; who is finished leaves."""
    size = tasks.x.shape[0]
    lanes = max(1, size // SHARE_AT_ONCE)
    place = jnp.arange(size, dtype=jnp.int32)

    def together(function: Any) -> Any:
        return jax.vmap(function, axis_name=LANES)

    running = together(lambda task: _begin(task, pace, problem, plan, LANES))(tasks)

    def unfinished(search: Search) -> Array:
        return ~search.finished & (place < count)

    def step(search: Search) -> Search:
        # Those that have come least far first, so that all end at about the same time.
        waiting = jnp.where(unfinished(search), search.rounds, jnp.iinfo(jnp.int32).max)
        ids = jnp.argsort(waiting)[:lanes]
        mine = jax.tree.map(lambda leaf: leaf[ids], (tasks, running.space, search))

        def one(task: Task, space: Workspace, old: Search) -> Search:
            new = _round(task, _Running(space, old), pace, problem, plan).search
            return jax.tree.map(partial(jnp.where, old.finished), old, new)

        new = together(one)(*mine)
        return jax.tree.map(lambda all_, part: all_.at[ids].set(part), search, new)

    search = lax.while_loop(lambda search: unfinished(search).any(), step, running.search)
    return together(lambda task, running: _end(task, running, problem))(
        tasks, running._replace(search=search)
    )


def _begin(task: Task, pace: Pace, problem: Problem, plan: _Plan, batch: str | None) -> _Running:
    limits = Limits(task.min_size, task.min_variance)
    # Places without a task have no points; one point with a weight is as good as any.
    present = (task.weight > 0).any()
    weight = jnp.where(present, task.weight, jnp.zeros_like(task.weight).at[0].set(1))
    space = workspace(task.x, weight, task.exists, limits, problem, batch)
    return _Running(space, begin(space, None, plan.m, plan.restarts, pace, problem))


def _round(task: Task, running: _Running, pace: Pace, problem: Problem, plan: _Plan) -> _Running:
    """Do one more round, with starts from the method whose turn it is."""
    space, search = running
    start_key, round_key = jax.random.split(task.key)
    number = search.seedings

    def made_by(method: StartMethod) -> Any:
        return lambda: make_starts(start_key, number, space, plan.m, method, problem)

    def fresh() -> Mixture:
        if len(plan.methods) == 1:
            return made_by(plan.methods[0])()
        return lax.switch(number % len(plan.methods), [made_by(each) for each in plan.methods])

    def none() -> Mixture:
        shapes = jax.eval_shape(fresh)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    starts = lax.cond(anywhere(space, search.groups > 0), fresh, none)
    return _Running(space, advance(round_key, search, space, starts, pace, problem))


def _end(task: Task, running: _Running, problem: Problem) -> Found:
    """Return the best solution, with labels for points of weight 0 as well."""
    space, search = running
    points, n = space.points, space.points.x.shape[0]
    labels = search.population.labels[0]
    solution = outcome(space, labels, problem, Status.CONVERGED, search.rounds, n)
    mixture = shift_means(solution.mixture, -points.shift)
    tiles = numerics.point_tiles(task.x - points.shift, len(space.exists))
    cheapest = assign_points(points, tiles, mixture, problem)[1]
    labels = jnp.where(task.weight > 0, solution.labels, cheapest)
    return Found(dataclasses.replace(solution, labels=labels), space.floor)
