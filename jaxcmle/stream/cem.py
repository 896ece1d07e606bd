"""CEM over chunks: every iteration is a pass over the stream.

The sums of a pass are added up on the host, compensated, a few numbers for each chunk. Labels are
not kept from pass to pass: what tells whether one has changed is a hash of those of every chunk.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxcmle import memory
from jaxcmle.numerics import Coefficients, Moments
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import fill_empty, shift_means
from jaxcmle.problem.types import CMLE, Mixture, Problem, Solution, Status
from jaxcmle.refine.iterations import FAST_VARIANCE_TOLERANCE, is_finite
from jaxcmle.refine.passes import (
    MOST_ROUNDINGS,
    Sums,
    moments_about,
    pass_sums,
    quick_sums,
)
from jaxcmle.solve.progress import CtrlC
from jaxcmle.stream.sources import Source, open_source
from jaxcmle.stream.survey import Survey, over_chunks, survey
from jaxcmle.stream.totals import Total

__all__ = [
    "End",
    "State",
    "Stream",
    "cem_streamed",
    "costs_of",
    "open_stream",
    "pass_over",
    "refine",
    "settled",
]


# Labels that get their new numbers at once: NumPy makes indices of 8 bytes of them.
RENUMBERED = 2**20


class Stream(NamedTuple):
    """Points that have been looked at once.

    Attributes:
        source: the points.
        survey: what is known of them.
        problem: what is to be solved.
        floor: under variances.
    """

    source: Source
    survey: Survey
    problem: Problem
    floor: float


class Pass(NamedTuple):
    """What a pass over all points gives for each of m mixtures: sums, and what labels it saw."""

    sums: Sums
    seen: np.ndarray


class End(NamedTuple):
    """Where CEM has come to, in the units of the user.

    And the last mixture on the way whose clusters were all large enough, if there was one.
    """

    mixture: Mixture
    status: Status
    n_iter: int
    admissible: Mixture | None = None


def cem_streamed(
    x: Any,
    start: Mixture,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    max_iter: ArrayLike = 300,
    min_size: ArrayLike = 2,
    min_variance: ArrayLike | None = None,
) -> Solution:
    """Return what `cem` does, for points that are read in chunks."""
    inputs.check_on_host("cem of streamed points")
    problem = inputs.to_problem(problem)
    source = open_source(x, sample_weight)
    start = inputs.to_mixture(start, source.d, source.dtype, problem, stack=False)
    most = inputs.to_count(max_iter, "max_iter")
    size = inputs.to_limit(min_size, "min_size")
    with CtrlC() as ctrl_c:
        stream = open_stream(source, problem, min_variance, start.weights.shape[0])
        end = refine(stream, start, most, lambda: ctrl_c.pressed)
        return memory.within(lambda: settled(stream, end, size))


def open_stream(
    source: Source, problem: Problem, min_variance: ArrayLike | None, n_clusters: int | None
) -> Stream:
    """Look at all points once."""
    known = memory.within(lambda: survey(source, n_clusters))
    if min_variance is None:
        return Stream(source, known, problem, known.floor)
    least = 4 * float(jnp.finfo(source.dtype).tiny)
    floor = max(float(inputs.to_limit(min_variance, "min_variance")), least)
    return Stream(source, known, problem, floor)


def pass_over(
    stream: Stream, mixtures: Mixture, about: Array, stops: Callable[[], bool]
) -> Pass | None:
    """Return what one pass gives for a stack of mixtures, less the shift; None if it was stopped.

    Args:
        stream: the points.
        mixtures: a stack, in shifted coordinates.
        about: what differences are taken to, as in `pass_sums`.
        stops: tells, after every chunk, whether to stop.
    """
    words = jax.device_put(_random_words(stream.source.rows))
    run = partial(_chunk_pass, words=words, mixtures=mixtures, about=about, problem=stream.problem)
    totals, seen = [Total() for _ in Sums._fields], []
    for _, (sums, labels) in over_chunks(stream.source, stream.survey.shift, run):
        if stops():
            return None
        for total, part in zip(totals, sums, strict=True):
            total.add(part)
        seen.append(labels)
    return Pass(Sums(*(total.value for total in totals)), np.stack(seen, axis=1))


def quick_pass(
    stream: Stream, mixture: Mixture, centre: Array, stops: Callable[[], bool]
) -> Pass | None:
    """Return what `pass_over` does for one mixture, with sums about one point for all clusters.

    The sums depend on nothing but the labels: they tell whether one has changed.
    """
    run = partial(_quick_chunk, mixture=mixture, centre=centre, problem=stream.problem)
    total = Total()
    for _, sums in over_chunks(stream.source, stream.survey.shift, run, plain=True):
        if stops():
            return None
        total.add(sums)
    found = total.value
    size, drift, square = found[:, 0], found[:, 1:-1], found[:, -1]
    drift = drift - size[:, None] * np.asarray(centre, np.float64)
    return Pass(Sums(size[None], drift[None], square[None]), found)


def costs_of(found: Pass, mixtures: Mixture, problem: Problem) -> np.ndarray:
    """Return the costs `[m]` of mixtures, from the sums about their own means."""
    coefficients = jax.device_get(_coefficients(mixtures, problem))
    return _costs(found.sums, mixtures.means, coefficients)


def _costs(sums: Sums, about: Any, coefficients: Coefficients) -> np.ndarray:
    """Return the costs `[m]` of mixtures, from sums about some points; in float64.

    Not from the costs of the points: those would take a tenth of the time of a pass.
    """
    means, slope, constant = coefficients
    size, drift, square = sums
    # From sums of squares about one point to those about another.
    away = means.astype(np.float64) - np.asarray(about, np.float64)
    square = square - 2 * (away * drift).sum(axis=2) + size * (away * away).sum(axis=2)
    costs = slope * square + size * np.where(size > 0, constant, 0)
    return np.asarray(costs.sum(axis=1))


@jax.jit
def _chunk_pass(
    x: Array, weight: Array, words: Array, mixtures: Mixture, about: Array, problem: Problem
) -> tuple[Sums, Array]:
    sums, labels, _ = pass_sums(x, weight, mixtures, about, problem)
    return sums, jax.vmap(lambda row: _hash(row, weight, words))(labels)


@jax.jit
def _quick_chunk(
    x: Array, weight: Array | None, mixture: Mixture, centre: Array, problem: Problem
) -> Array:
    """Return the sums as one array `[k, d + 2]`: each has to be fetched."""
    size, drift, square = quick_sums(x, weight, mixture, centre, problem)
    return jnp.concatenate([size[:, None], drift, square[:, None]], axis=1)


@functools.cache
def _random_words(rows: int) -> np.ndarray:
    """Return an odd word for every row of a chunk."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 2**32, rows, dtype=np.uint32) | np.uint32(1)


def _hash(labels: Array, weight: Array, words: Array) -> Array:
    """Return two words that, most likely, change if any label of positive weight does.

    Each is the sum of the labels times odd random words, modulo 2^32: one label that changes always
    shows, and several cancel with a probability of about 2^-32, in both of 2^-64.
    """
    values = jnp.where(weight.astype(bool), labels, 0).astype(jnp.uint32)
    others = (words >> 16) * words | 1
    sums = [(values * each).sum(dtype=jnp.uint32) for each in (words, others)]
    return jnp.stack(sums)


class State(NamedTuple):
    """Where CEM has come to: the mixture after so many iterations, in shifted coordinates.

    The cost and the hash of the labels are those before the last iteration. Quick iterations go
    first, as in `cem`: with sums about one point for all clusters. It is over once an iteration
    has gained too little. The last mixture whose clusters were all large enough is kept.
    """

    n_iter: int
    mixture: Mixture
    cost: float
    seen: np.ndarray | None
    quick: bool
    over: bool
    admissible: Mixture | None = None


def refine(
    stream: Stream,
    start: Mixture,
    max_iter: int,
    stops: Callable[[], bool],
    report: Callable[[State], Any] | None = None,
    least_gain: float = 0.0,
    last: State | None = None,
    min_size: float = 0.0,
) -> End:
    """Run CEM until no label changes.

    Args:
        stream: the points.
        start: in the units of the user.
        max_iter: the most iterations to do.
        stops: tells whether to stop: then the answer is the last mixture, `INTERRUPTED`.
        report: is told of every iteration.
        least_gain: in nats for a unit of weight: an iteration that gains less is the last, and the
            status `MAX_ITER`. 0: costs are rounded, and labels alone tell.
        last: what was reported last, to go on from there.
        min_size: the weight that makes a cluster large enough.
    """
    shift = jnp.asarray(stream.survey.shift)
    whole = _cast(stream.survey.moments, stream.source.dtype)
    first = shift_means(stream.problem.constrained(start), -shift)
    state = State(0, first, math.inf, None, True, False) if last is None else last
    enough = least_gain * stream.survey.total
    least = _least_sum(min_size, stream.source.dtype)

    def ended(status: Status) -> End:
        kept = state.admissible
        kept = None if kept is None else shift_means(kept, shift)
        return End(shift_means(state.mixture, shift), status, state.n_iter, kept)

    while state.n_iter < max_iter and not state.over:
        step = memory.within(partial(_one_iteration, stream, state, whole, shift, stops))
        if step is None:
            return ended(Status.INTERRUPTED)
        same = state.seen is not None and np.array_equal(step.seen, state.seen)
        gain = state.cost - step.cost
        if state.quick and (same or not step.quick or gain < enough):
            # From here on to the last bit, as if from scratch.
            state = state._replace(quick=False, seen=None, cost=math.inf)
            continue
        if same:
            return ended(Status.CONVERGED)
        if not step.finite:
            return ended(Status.NONFINITE)
        state = State(
            n_iter=state.n_iter + 1,
            mixture=step.mixture,
            cost=step.cost,
            seen=step.seen,
            quick=state.quick,
            over=least_gain > 0 and gain < enough,
            admissible=state.mixture if step.smallest >= least else state.admissible,
        )
        if report is not None:
            report(state)
    return ended(Status.MAX_ITER)


class _Step(NamedTuple):
    """The next mixture, and if it is finite; what the last one cost, what labels it gave.

    And what its smallest cluster weighs, and if all that was quick.
    """

    mixture: Mixture
    finite: bool
    cost: float
    seen: np.ndarray
    smallest: float
    quick: bool


def _one_iteration(
    stream: Stream, state: State, whole: Moments, shift: Array, stops: Callable[[], bool]
) -> _Step | None:
    """Return the best mixture for the clusters of a mixture.

    Right to rounding, unless it was quick: then as precise as quick iterations of `cem` are.
    """
    stack, about, centre = _as_stack(state.mixture, whole.mean, state.quick)
    if state.quick:
        found = quick_pass(stream, state.mixture, centre, stops)
    else:
        found = pass_over(stream, stack, about, stops)
    if found is None:
        return None
    dtype, others = stream.source.dtype, (stack, whole, stream.floor, shift, stream.problem)
    roundings: float = MOST_ROUNDINGS
    if state.quick:
        roundings = FAST_VARIANCE_TOLERANCE / float(np.finfo(dtype).eps)
    new = _estimate(_cast(found.sums, dtype), about, *others, roundings)
    # All at once: each has to be fetched.
    where, precise, finite, coefficients = jax.device_get((about, *new[2:]))
    if not precise and not state.quick:
        again = pass_over(stream, stack, new.means, stops)
        if again is None:
            return None
        new = _estimate(_cast(again.sums, dtype), new.means, *others, roundings)
        finite = bool(new.finite)
    cost = float(_costs(found.sums, where, coefficients)[0])
    quick = state.quick and bool(precise)
    smallest = float(np.asarray(found.sums.size).min())
    return _Step(new.mixture, bool(finite), cost, found.seen, smallest, quick)


@partial(jax.jit, static_argnames="quick")
def _as_stack(mixture: Mixture, centre: Array, quick: bool) -> tuple[Mixture, Array, Array]:
    """Return the mixture as a stack of one, what its sums are taken about, and the centre `[d]`."""
    stack = jax.tree.map(lambda leaf: leaf[None], mixture)
    about = jnp.broadcast_to(centre, stack.means.shape) if quick else stack.means
    return stack, about, centre[0]


class _Estimate(NamedTuple):
    """A mixture, the means of its clusters `[1, k, d]`, and whether they are worth anything.

    And the coefficients of the mixture before.
    """

    mixture: Mixture
    means: Array
    precise: Array
    finite: Array
    coefficients: Coefficients


@jax.jit
def _estimate(
    sums: Sums,
    about: Array,
    before: Mixture,
    whole: Moments,
    floor: ArrayLike,
    shift: Array,
    problem: Problem,
    roundings: ArrayLike,
) -> _Estimate:
    moments, precise = moments_about(sums, about, floor, roundings)
    own = jax.tree.map(lambda leaf: leaf[0], moments)
    mixture = problem.mixture(fill_empty(own, whole), floor)
    # The means that the user will see, rounded in the user's units, as in `cem`.
    mixture = shift_means(shift_means(mixture, shift), -shift)
    coefficients = jax.vmap(problem.coefficients)(before)
    return _Estimate(mixture, moments.mean, precise[0], is_finite(mixture), coefficients)


@jax.jit
def _coefficients(mixtures: Mixture, problem: Problem) -> Coefficients:
    return jax.vmap(problem.coefficients)(mixtures)


def settled(stream: Stream, end: End, min_size: float, *, in_order: bool = False) -> Solution:
    """Return the solution: labels, cost and sizes under the mixture, by one more pass.

    Args:
        stream: the points.
        end: the mixture, and how it came about.
        min_size: the weight that every cluster must have.
        in_order: number the clusters in the order of their first points of positive weight.
    """
    k, dtype = end.mixture.weights.shape[0], stream.source.dtype
    n = stream.survey.n
    mixture = shift_means(end.mixture, -jnp.asarray(stream.survey.shift))
    labels = np.empty(n, np.int32)
    weights, costs, firsts = Total(), Total(), np.full(k, n)
    run = partial(_chunk_labels, mixture=mixture, problem=stream.problem)
    for chunk, (own, size, part, first) in over_chunks(stream.source, stream.survey.shift, run):
        labels[chunk.first : chunk.first + chunk.length] = own[: chunk.length]
        weights.add(size)
        costs.add(part)
        firsts = np.minimum(firsts, np.where(size > 0, chunk.first + first.astype(np.int64), n))
    status, sizes, cost = end.status, weights.value, float(costs.value)
    if sizes.min() < _least_sum(min_size, dtype):
        status = Status.INADMISSIBLE
    if not math.isfinite(cost):
        status = Status.NONFINITE
    solution = Solution(
        mixture=end.mixture,
        labels=labels,  # type: ignore[arg-type]
        cost=jnp.asarray(cost, dtype),
        status=jnp.int32(status),
        n_iter=jnp.int32(end.n_iter),
    )
    if not in_order:
        return solution
    order = np.argsort(firsts, kind="stable")
    number = np.empty(k, np.int32)
    number[order] = np.arange(k, dtype=np.int32)
    ordered = jax.tree.map(lambda leaf: leaf[order], end.mixture)
    for first in range(0, n, RENUMBERED):
        here = slice(first, first + RENUMBERED)
        labels[here] = number[labels[here]]
    return dataclasses.replace(solution, mixture=ordered)


def _least_sum(min_size: float, dtype: Any) -> float:
    """Return the least sum of weights that is enough: sums of fractional weights round."""
    return min_size * (1 - 16 * float(jnp.finfo(dtype).eps))


@jax.jit
def _chunk_labels(
    x: Array, weight: Array, mixture: Mixture, problem: Problem
) -> tuple[Array, Array, Array, Array]:
    """Return labels, and for the clusters their weight, what all cost, and first points."""
    stack = jax.tree.map(lambda leaf: leaf[None], mixture)
    sums, labels, costs = pass_sums(x, weight, stack, stack.means, problem)
    k = mixture.weights.shape[0]
    place = jnp.where(weight.astype(bool), jnp.arange(len(x), dtype=jnp.int32), len(x))
    mine = labels[0][None, :] == jnp.arange(k, dtype=jnp.int32)[:, None]
    return labels[0], sums.size[0], costs[0], jnp.where(mine, place, len(x)).min(axis=1)


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, dtype)), tree)
