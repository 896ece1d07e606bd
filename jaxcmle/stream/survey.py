"""The first pass over a stream: checks, and what every later pass has to know beforehand."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcmle import numerics
from jaxcmle.numerics import Moments
from jaxcmle.problem import inputs
from jaxcmle.refine.iterations import rounding_variance
from jaxcmle.stream.sources import Chunk, Source
from jaxcmle.stream.totals import Total

__all__ = ["Survey", "over_chunks", "survey"]

# Chunks that the device has in hand: one at work, two waiting. Their memory must not be used again
# in the meantime, see `sources.BUFFERS`.
AT_WORK = 3


class Survey(NamedTuple):
    """What is known of all points of positive weight.

    Attributes:
        n: points, those of weight 0 among them.
        total: weight.
        whole_weights: whether all weights are whole numbers.
        low: `[d]`, the least value of every feature.
        high: `[d]`, the largest.
        shift: `[d]`, what `numerics.prepare` takes off.
        moments: of all points as one cluster, less the shift; float64.
        floor: the variance that rounding alone makes.
    """

    n: int
    total: float
    whole_weights: bool
    low: np.ndarray
    high: np.ndarray
    shift: np.ndarray
    moments: Moments
    floor: float


def over_chunks(
    source: Source,
    shift: np.ndarray | None,
    function: Callable[[Array, Any], Any],
    *,
    plain: bool = False,
) -> Iterator[tuple[Chunk, Any]]:
    """Yield every chunk with what a compiled function gives for it, as NumPy arrays.

    Calls return before the device is done, so that the next chunk is read in the meantime. A
    function that is `plain` gets None for weights that are all 1.
    """
    waiting: deque[tuple[Chunk, Any]] = deque()
    for chunk in source.chunks(shift):
        without = plain and not source.weighted and chunk.length == source.rows
        x, weight = jax.device_put((chunk.x, None if without else chunk.weight))
        waiting.append((chunk, function(x, weight)))
        if len(waiting) == AT_WORK:
            first, result = waiting.popleft()
            yield first, jax.device_get(result)
    for chunk, result in waiting:
        yield chunk, jax.device_get(result)


class _Part(NamedTuple):
    """What one chunk contributes."""

    bad: Array
    row: Array
    low: Array
    high: Array
    lightest: Array
    heaviest: Array
    finite_weight: Array
    whole_weights: Array
    size: Array
    near: Array
    drift: Array
    square: Array


@jax.jit
def _look(x: Array, weight: Array, about: Array) -> _Part:
    amount = weight.astype(x.dtype)
    present = amount > 0
    bad = ~jnp.isfinite(x).all(axis=1) & present
    inside = present[:, None]
    size = numerics.blocked_sum(amount)
    # Sums about a point of its own, near the mean of the chunk: `about` may be far from all others.
    move = numerics.blocked_sum(amount[:, None] * jnp.where(inside, x - about, 0))
    near = about + move / jnp.where(size > 0, size, 1)
    difference = jnp.where(inside, x - near, 0)
    return _Part(
        bad=bad.sum(),
        row=jnp.argmax(bad),
        low=jnp.min(x, axis=0, where=inside, initial=jnp.inf),
        high=jnp.max(x, axis=0, where=inside, initial=-jnp.inf),
        lightest=amount.min(),
        heaviest=amount.max(),
        finite_weight=jnp.isfinite(amount).all(),
        whole_weights=(amount == jnp.round(amount)).all(),
        size=size,
        near=near,
        drift=numerics.blocked_sum(amount[:, None] * difference),
        square=numerics.blocked_sum(amount * numerics.row_sum(difference * difference)),
    )


def survey(source: Source, n_clusters: int | None) -> Survey:
    """Read all points once; raise where they, or their weights, are not what they should be.

    Args:
        source: the points.
        n_clusters: how many of them must be distinct.
    """
    d, dtype = source.d, source.dtype
    about = _first_point(source)
    distinct = np.empty((0, d), dtype)
    n, bad, row, heaviest, whole_weights = 0, 0, -1, 0.0, True
    low, high = np.full(d, np.inf, dtype), np.full(d, -np.inf, dtype)
    merged = _Merged()

    for chunk, part in over_chunks(source, None, partial(_look, about=about)):
        n += chunk.length
        if not part.finite_weight:
            raise ValueError(
                "sample_weight holds NaN or infinity (in the points from row "
                f"{chunk.first}); use 0 to leave a point out"
            )
        if part.lightest < 0:
            raise ValueError(
                f"sample_weight must not be negative, got {part.lightest} (in the points from row "
                f"{chunk.first}); use 0 to leave a point out"
            )
        if part.bad and not bad:
            row = chunk.first + int(part.row)
        bad += int(part.bad)
        heaviest = max(heaviest, float(part.heaviest))
        whole_weights &= bool(part.whole_weights)
        low, high = np.minimum(low, part.low), np.maximum(high, part.high)
        merged.add(part)
        if n_clusters is not None and len(distinct) < n_clusters:
            distinct = _more_distinct(distinct, chunk, n_clusters)
    if heaviest == 0:
        raise ValueError("sample_weight is 0 for every point; at least one must be positive")
    if bad:
        # What is in the file may be wider than the arithmetic.
        wider = np.dtype(source.raw).itemsize > dtype.itemsize
        raise ValueError(
            f"x holds NaN or infinity{f', or what is too large for {dtype},' if wider else ''} in "
            f"{bad} of {n} points (first in row {row}); drop or impute them, or give them "
            "sample_weight 0"
        )
    spread = (high - low).max()
    inputs.check_ranges(n, d, dtype, float(spread), heaviest)
    if n_clusters is not None and len(distinct) < n_clusters:
        raise ValueError(
            f"x has {len(distinct)} distinct points of positive weight, fewer than the "
            f"{n_clusters} clusters asked for; lower n_clusters"
        )
    shift = numerics.exact_shift(jnp.asarray(low), jnp.asarray(high))
    moments = merged.moments(np.asarray(shift, np.float64))
    size = float(moments.size[0])
    floor = float(rounding_variance(jnp.asarray(spread)))
    return Survey(n, size, whole_weights, low, high, np.asarray(shift), moments, floor)


class _Merged:
    """The weight, the mean and the scatter of all chunks so far, in float64.

    Never a difference of large sums, so that one point far from the others takes nothing away.
    """

    def __init__(self) -> None:
        self._size, self._scatter = Total(), Total()
        self._mean: np.ndarray = np.zeros(())

    def add(self, part: _Part) -> None:
        """Add a chunk; what is not finite makes all of it so, as any sum."""
        size, before = float(part.size), float(self._size.value)
        if size == 0:
            return
        # For the caller to see.
        with np.errstate(over="ignore", invalid="ignore"):
            move = np.asarray(part.drift, np.float64) / size
            mean = np.asarray(part.near, np.float64) + move
            away = mean - self._mean if before else np.zeros_like(mean)
            share = size / (before + size)
            self._scatter.add(max(float(part.square) - size * float(move @ move), 0.0))
            self._scatter.add(before * share * float(away @ away))
            self._mean = self._mean + share * away if before else mean
        self._size.add(size)

    def moments(self, shift: np.ndarray) -> Moments:
        """Return them as one cluster, less the shift."""
        size, scatter = np.array([self._size.value]), np.array([self._scatter.value])
        mean = (self._mean - shift)[None]
        return Moments(size, mean, scatter)  # type: ignore[arg-type]


def _first_point(source: Source) -> np.ndarray:
    """Return a point near all others, as far as one knows: the first that there is."""
    for chunk in source.chunks():
        present = np.flatnonzero(chunk.weight > 0)
        if len(present):
            return np.nan_to_num(chunk.x[present[0]], posinf=0, neginf=0)
    return np.zeros(source.d, source.dtype)


def _more_distinct(distinct: np.ndarray, chunk: Chunk, wanted: int) -> np.ndarray:
    """Return the distinct points so far with those of a chunk, as many as are wanted."""
    rows = chunk.x[: chunk.length][chunk.weight[: chunk.length] > 0]
    length = 4 * wanted
    while True:
        found = np.unique(np.concatenate([distinct, rows[:length]]), axis=0)
        if len(found) >= wanted or length >= len(rows):
            return found[:wanted]
        length *= 4
