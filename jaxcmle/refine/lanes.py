"""Classification EM on many small instances at once, each in a lane of its own.

The lanes are the minor axis of every array, so that all work is elementwise over them and no
arithmetic crosses from one instance to another. A lane whose instance is finished takes the next
one that waits: slow instances hold nobody up, and every instance is loaded and stored once.

One pass over the points assigns them and sums, for every cluster, the weights, the differences to
its mean and their squares. That gives the next mixture, and the cost of the present one: a pass
that changes no label has found both the answer and what it costs.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.numerics import Coefficients, Moments
from jaxcmle.problem.objective import fill_empty, is_valid, shift_means
from jaxcmle.problem.types import UCMLE, Mixture, Problem, Solution, Status
from jaxcmle.refine.folds import Part, branches_of, fold
from jaxcmle.refine.iterations import is_finite, rounding_variance

__all__ = ["cem_lanes"]

# Lanes are refilled as soon as this share of them has nothing to do.
IDLE_SHARE = 0.375
# The scatter is a difference of squares about the old mean. Where it is less than this share of
# them, the mean has moved so far that it is taken once more, about the new mean.
LEAST_SCATTER = 1 / 64


class _Instances(NamedTuple):
    """What the lanes work on, one instance in each.

    Attributes:
        x: `[n, d, lanes]`, less `shift`.
        weight: `[n, lanes]`, 0 for padding.
        shift: `[d, lanes]`, as `numerics.prepare` has it.
        exists: `[k, lanes]`, False for clusters that are padding.
        floor: `[lanes]`, the least variance.
        enough: `[lanes]`, the least weight of a cluster.
        valid: `[lanes]`, whether the start holds no NaN and nothing out of range.
    """

    x: Array
    weight: Array
    shift: Array
    exists: Array
    floor: Array
    enough: Array
    valid: Array


class _State(NamedTuple):
    """Where every lane stands.

    Attributes:
        instance: `[lanes]`, its number; c where there is none.
        active: `[lanes]`, whether there is work to do.
        mixture: in the user's coordinates, lanes last.
        coefficients: of the mixture, about `shift`.
        labels: `[n, lanes]`, less k where the weight is 0.
        unseen: `[lanes]`, whether the labels are not yet those of this instance.
        held: `[lanes]`, whether the mixture is to be estimated from these labels once more.
        n_iter: `[lanes]`.
        cost: `[lanes]`, of the mixture, once the lane is through.
        status: `[lanes]`.
    """

    instance: Array
    active: Array
    mixture: Mixture
    coefficients: Coefficients
    labels: Array
    unseen: Array
    held: Array
    n_iter: Array
    cost: Array
    status: Array


class _Sums(NamedTuple):
    """Sums about the old means: weight `[k, lanes]`, differences `[k, d, lanes]`, squares."""

    size: Array
    first: Array
    square: Array


class _Found(NamedTuple):
    """What is known of the instances: the fields of a `Solution` that CEM fills in."""

    mixture: Mixture
    labels: Array
    cost: Array
    status: Array
    n_iter: Array


def cem_lanes(
    x: Array,
    weight: Array,
    starts: Mixture,
    exists: Array,
    problem: Problem,
    max_iter: ArrayLike,
    min_size: Array,
    min_variance: Array | None,
    count: ArrayLike,
    *,
    lanes: int,
    tile: int,
) -> Solution:
    """Run `cem` on each of c instances from its own start.

    What comes out for an instance does not depend on the others, nor on their order or number.

    Args:
        x: points `[c, n, d]`.
        weight: their weights `[c, n]`; where 0, the point may be anything, even NaN.
        starts: a stack of mixtures, one for each instance.
        exists: bool `[c, k]`. Where False, the cluster is padding: it wins no point, has weight 0
            and need not reach the minimum size.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`, whose weights are 1 over the number of
            clusters that exist.
        max_iter: the most iterations to do on each.
        min_size: `[c]`, the weight every cluster must reach for a solution to be admissible.
        min_variance: `[c]`, floor under every variance, positive; None for the rounding error of
            each data set, squared, as in `cem`.
        count: only the first so many instances are solved. The others take no time, and come out
            with their start, an infinite cost and the status `NONFINITE`.
        lanes: how many instances to work on at a time; best a multiple of 16.
        tile: how many points to add up in one expression, 16 for the CPU; n or more leaves the
            sums over the points to the compiler, which is right for accelerators.

    Returns:
        A stack of solutions.
    """
    return _cem_lanes(
        x,
        weight,
        starts,
        exists,
        problem,
        jnp.asarray(max_iter, jnp.int32),
        min_size.astype(x.dtype),
        None if min_variance is None else min_variance.astype(x.dtype),
        jnp.minimum(jnp.asarray(count, jnp.int32), x.shape[0]),
        lanes=lanes,
        tile=tile,
    )


@partial(jax.jit, static_argnames=("lanes", "tile"))
def _cem_lanes(
    x: Array,
    weight: Array,
    starts: Mixture,
    exists: Array,
    problem: Problem,
    max_iter: Array,
    min_size: Array,
    min_variance: Array | None,
    count: Array,
    *,
    lanes: int,
    tile: int,
) -> Solution:
    c, n, d = x.shape
    k = exists.shape[1]
    branches = branches_of(n, tile)
    starts = _constrained(starts, exists, problem)
    # Sums of fractional weights round: a size that is short by rounding alone is enough.
    enough = min_size * (1 - 16 * jnp.finfo(x.dtype).eps)
    limits = (exists, min_variance, enough, is_valid(starts, problem))

    def refill(state: _State, following: Array) -> tuple[_State, _Instances, Array]:
        """Give every idle lane the next instance that waits, if any."""
        idle = ~state.active
        rank = jnp.cumsum(idle.astype(jnp.int32)) - 1
        index = jnp.where(idle, following + rank, state.instance)
        index = jnp.where(index < count, index, c)
        fresh = idle & (index < c)
        instances = _load(x, weight, limits, index, branches)
        mixture = _take(starts, index)
        coefficients = _coefficients(mixture, instances, problem)
        new = state._replace(
            instance=index,
            active=state.active | fresh,
            mixture=_select(fresh, mixture, state.mixture),
            coefficients=_select(fresh, coefficients, state.coefficients),
            unseen=state.unseen | fresh,
            held=state.held & ~fresh,
            n_iter=jnp.where(fresh, 0, state.n_iter),
        )
        return new, instances, jnp.minimum(following + idle.sum(dtype=jnp.int32), count)

    def turn(carry: tuple[_State, Array, _Found]) -> tuple[_State, Array, _Found]:
        state, following, found = carry
        state, instances, following = refill(state, following)
        waiting = following < count

        def busy(state: _State) -> Array:
            active = state.active.sum(dtype=jnp.int32)
            full = active > int(lanes * (1 - IDLE_SHARE))
            return jnp.where(waiting, full, active > 0)

        state = lax.while_loop(
            busy, lambda state: _pass(state, instances, problem, max_iter, branches), state
        )
        return state, following, _store(state, found)

    def unfinished(carry: tuple[_State, Array, _Found]) -> Array:
        state, following, _ = carry
        return state.active.any() | (following < count)

    nobody = jnp.full(lanes, c, jnp.int32)
    blank = jnp.zeros((k, lanes), x.dtype)
    state = _State(
        instance=nobody,
        active=jnp.zeros(lanes, bool),
        mixture=_take(starts, nobody),
        coefficients=Coefficients(jnp.zeros((k, d, lanes), x.dtype), blank, blank),
        labels=jnp.zeros((math.prod(branches) if branches else n, lanes), jnp.int32),
        unseen=jnp.ones(lanes, bool),
        held=jnp.zeros(lanes, bool),
        n_iter=jnp.zeros(lanes, jnp.int32),
        cost=jnp.full(lanes, jnp.inf, x.dtype),
        status=jnp.full(lanes, Status.NONFINITE, jnp.int32),
    )
    found = _Found(
        mixture=starts,
        labels=jnp.zeros((c, n), jnp.int32),
        cost=jnp.full(c, jnp.inf, x.dtype),
        status=jnp.full(c, Status.NONFINITE, jnp.int32),
        n_iter=jnp.zeros(c, jnp.int32),
    )
    carry = (state, jnp.zeros((), jnp.int32), found)
    found = lax.while_loop(unfinished, turn, carry)[2]
    return jax.vmap(lambda found: Solution(**found._asdict()))(found)


def _constrained(starts: Mixture, exists: Array, problem: Problem) -> Mixture:
    """Return the starts as the problem has them, with harmless numbers for padded clusters."""
    starts = Mixture(
        weights=starts.weights,
        means=jnp.where(exists[..., None], starts.means, 0),
        variances=jnp.where(exists, starts.variances, 1),
    )
    return _weightless(problem.constrained(starts), exists, problem)


def _weightless(mixture: Mixture, exists: Array, problem: Problem) -> Mixture:
    """Return the mixture, or stack of them, without the weights of padded clusters."""
    weights = mixture.weights
    if isinstance(problem, UCMLE):
        weights = 1 / exists.sum(axis=-1, keepdims=True).astype(weights.dtype)
    weights = jnp.where(exists, weights, 0)
    return dataclasses.replace(mixture, weights=weights)


def _take(stack: Any, index: Array) -> Any:
    """Return what the lanes need of a stack of instances, lanes last."""
    return jax.tree.map(
        lambda leaf: jnp.moveaxis(jnp.take(leaf, index, axis=0, mode="clip"), 0, -1), stack
    )


def _select(mask: Array, new: Any, old: Any) -> Any:
    """Choose between trees lane by lane."""
    return jax.tree.map(lambda new, old: jnp.where(mask, new, old), new, old)


def _load(
    x: Array, weight: Array, limits: Any, index: Array, branches: tuple[int, ...]
) -> _Instances:
    """Return the instances with these numbers, ready for arithmetic."""
    c, n, _ = x.shape
    extra = math.prod(branches) - n if branches else 0
    x, weight = _take((x, weight), index)
    x = jnp.pad(x, ((0, extra), (0, 0), (0, 0)))
    weight = jnp.pad(weight, ((0, extra), (0, 0)))

    def present(x: Array, weight: Array, otherwise: float) -> Array:
        return jnp.where((weight > 0)[..., None, :], x, otherwise)

    parts = [
        Part(partial(present, otherwise=jnp.inf), (x, weight), jnp.minimum),
        Part(partial(present, otherwise=-jnp.inf), (x, weight), jnp.maximum),
        Part(lambda weight: weight >= 0, (weight,), jnp.logical_and),
    ]
    busy = (index < c).any() if branches else None
    low, high, proper = fold(parts, branches, busy)
    # The shift depends on nothing but the extremes.
    shift = jax.vmap(lambda x: numerics.prepare(x, None).shift, -1, -1)(jnp.stack([low, high]))

    def adjust(x: Array, weight: Array, shift: Array, proper: Array) -> tuple[Array, Array]:
        return x - shift, jnp.where(proper, weight, jnp.nan)

    x, weight = numerics.apart(adjust, busy, x, weight, shift, proper)
    exists, floor, enough, valid = _take(limits, index)
    if floor is None:
        floor = rounding_variance((high - low).max(axis=0))
    return _Instances(x, weight, shift, exists, floor, enough, valid)


def _coefficients(mixture: Mixture, instances: _Instances, problem: Problem) -> Coefficients:
    """Return the costs as functions of the squared distance, infinite for padded clusters."""
    means, slope, constant = jax.vmap(problem.coefficients, -1, -1)(mixture)
    return Coefficients(
        means - instances.shift, slope, jnp.where(instances.exists, constant, jnp.inf)
    )


def _pass(
    state: _State,
    instances: _Instances,
    problem: Problem,
    max_iter: Array,
    branches: tuple[int, ...],
) -> _State:
    """Assign the points of every lane, and re-estimate its mixture or find that it is done."""
    x, weight = instances.x, instances.weight
    means = state.coefficients.means
    k, d, _ = means.shape
    # Few are cheaper to work out again than to write and read.
    distances = None if numerics.is_small(k, d) else _squared_distances(x, means)
    labels = _assign(x, weight, distances, state)
    parts = [
        *_sums(x, weight, distances, labels, means),
        Part(lambda new, old: (new != old) & (new >= 0), (labels, state.labels), jnp.logical_or),
    ]
    busy = state.active.any() if branches else None
    *sums, moved = fold(parts, branches, busy)
    advance = partial(_advance, problem=problem, max_iter=max_iter)
    given = (state._replace(labels=labels), _Sums(*sums), moved, instances)
    return numerics.apart(advance, busy, *given)


def _advance(
    state: _State,
    sums: _Sums,
    moved: Array,
    instances: _Instances,
    problem: Problem,
    max_iter: Array,
) -> _State:
    """Decide which lanes are through, and give the others their next mixture."""
    valid = instances.valid
    last = ~valid | (state.n_iter >= max_iter)
    converged = ~last & ~state.unseen & ~moved
    mixture, precise, finite = jax.vmap(partial(_estimate, problem=problem), -1, -1)(
        sums, state.coefficients.means, instances.shift, instances.exists, instances.floor
    )
    coefficients = _coefficients(mixture, instances, problem)
    # Labels that are held are not those of the mixture: nothing ends with them.
    stops = state.active & ~state.held & (last | converged | ~finite)
    taken = state.active & ~stops & finite

    cost = _cost(sums, state.coefficients)
    small = ((sums.size < instances.enough) & instances.exists).any(axis=0)
    broken = ~last & ~converged & ~finite
    status = jnp.where(converged, Status.CONVERGED, Status.MAX_ITER)
    status = jnp.where(small, Status.INADMISSIBLE, status)
    status = jnp.where(jnp.isfinite(cost) & valid & ~broken, status, Status.NONFINITE)
    return state._replace(
        active=state.active & ~stops,
        mixture=_select(taken, mixture, state.mixture),
        coefficients=_select(taken, coefficients, state.coefficients),
        unseen=jnp.zeros_like(state.unseen),
        held=taken & ~state.held & ~precise,
        n_iter=state.n_iter + (taken & ~state.held).astype(jnp.int32),
        cost=jnp.where(stops, cost, state.cost),
        status=jnp.where(stops, status, state.status).astype(jnp.int32),
    )


def _assign(x: Array, weight: Array, distances: Array | None, state: _State) -> Array:
    """Return the cheapest cluster of every point, less k where its weight is 0."""
    means, slope, constant = state.coefficients
    k = means.shape[0]
    if distances is None:
        best = jnp.full(weight.shape, jnp.inf, x.dtype)
        labels = jnp.zeros(weight.shape, jnp.int32)
        for j in range(k):
            cost = _squared_distance(x, means[j]) * slope[j] + constant[j]
            less = cost < best
            best, labels = jnp.where(less, cost, best), jnp.where(less, jnp.int32(j), labels)
    else:
        costs = distances * slope + constant
        labels = numerics.smallest(jnp.moveaxis(costs, 1, 0))[1]
    labels = jnp.where(weight == 0, labels - k, labels)
    return jnp.where(state.held, state.labels, labels)


def _squared_distance(x: Array, mean: Array) -> Array:
    """Return `|x - mean|^2`, unrolled over the features; they and the lanes are the last axes."""
    total = (x[..., 0, :] - mean[..., 0, :]) ** 2
    for feature in range(1, x.shape[-2]):
        total = total + (x[..., feature, :] - mean[..., feature, :]) ** 2
    return total


def _squared_distances(x: Array, means: Array) -> Array:
    """Return `|x - means[k]|^2` as `[n, k, lanes]`."""

    def add_feature(j: Array, total: Array) -> Array:
        return total + (x[:, None, j] - means[:, j]) ** 2

    n, d, lanes = x.shape
    return lax.fori_loop(0, d, add_feature, jnp.zeros((n, means.shape[0], lanes), x.dtype))


def _sums(
    x: Array, weight: Array, distances: Array | None, labels: Array, means: Array
) -> list[Part]:
    """Return how to sum per cluster. Labels below 0 are of points of weight 0, and do not count."""
    clusters = jnp.arange(means.shape[0], dtype=labels.dtype)[:, None]

    def size(labels: Array, weight: Array) -> Array:
        return jnp.where(labels[..., None, :] == clusters, weight[..., None, :], 0)

    def first(labels: Array, weight: Array, x: Array) -> Array:
        mine = (labels[..., None, :] == clusters)[..., None, :]
        return jnp.where(mine, weight[..., None, None, :] * (x[..., None, :, :] - means), 0)

    def square(labels: Array, weight: Array, x: Array) -> Array:
        return given(labels, weight, _squared_distance(x[..., None, :, :], means))

    def given(labels: Array, weight: Array, distances: Array) -> Array:
        mine = labels[..., None, :] == clusters
        return jnp.where(mine, weight[..., None, :] * distances, 0)

    squares = Part(square, (labels, weight, x), jnp.add)
    if distances is not None:
        squares = Part(given, (labels, weight, distances), jnp.add)
    return [
        Part(size, (labels, weight), jnp.add),
        Part(first, (labels, weight, x), jnp.add),
        squares,
    ]


def _estimate(
    sums: _Sums, means: Array, shift: Array, exists: Array, floor: Array, problem: Problem
) -> tuple[Mixture, Array, Array]:
    """Return one instance's next mixture, whether it is precise, and whether it is finite.

    The mixture is in the user's coordinates and rounded there: what converges is what is returned.
    """
    size, first, square = sums
    d = means.shape[1]
    drift = first / jnp.where(size > 0, size, 1)[:, None]
    scatter = jnp.maximum(square - size * (drift * drift).sum(axis=1), 0)
    mean = means + drift
    # A variance under the floor need not be precise.
    known = jnp.maximum(scatter, size * d * floor) >= LEAST_SCATTER * square
    total = size.sum()
    centre = (size[:, None] * mean).sum(axis=0) / total
    apart = mean - centre
    whole = (scatter + size * (apart * apart).sum(axis=1)).sum()
    moments = fill_empty(
        Moments(size, mean, scatter), Moments(total[None], centre[None], whole[None])
    )
    mixture = _weightless(problem.mixture(moments, floor), exists, problem)
    mixture = shift_means(mixture, shift)
    return mixture, known.all(), is_finite(mixture)


def _cost(sums: _Sums, coefficients: Coefficients) -> Array:
    """Return the cost of the mixture that the points were assigned by; infinity if not finite."""
    _, slope, constant = coefficients
    costs = sums.size * constant + slope * sums.square
    total = jnp.where(sums.size == 0, 0, costs).sum(axis=0)
    return jnp.where(jnp.isfinite(total), total, jnp.inf)


def _store(state: _State, found: _Found) -> _Found:
    """Write what the lanes have found for instances that they are through with."""
    c, n = found.labels.shape
    k = state.mixture.weights.shape[0]
    labels = state.labels[:n]
    labels = jnp.where(labels < 0, labels + k, labels)
    index = jnp.where(state.active, c, state.instance)
    new = _Found(state.mixture, labels, state.cost, state.status, state.n_iter)
    return jax.tree.map(
        lambda old, new: old.at[index].set(jnp.moveaxis(new, -1, 0), mode="drop"), found, new
    )
