"""Samples of a stream, in one pass: for the search a coreset, for the certificate equal points."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcmle.stream.sources import Source
from jaxcmle.stream.survey import Survey

__all__ = ["Samples", "draw_samples"]

# Steps, over the spread of a feature, that the centre of the coreset is rounded to: so that what
# is drawn does not depend on how the mean is rounded.
STEPS = 1024
# Binary digits that the scatter is rounded to, for the same reason; and how far beyond the end of
# the running sum draws may therefore fall.
DIGITS = 10
BEYOND = 1 + 2.0 ** (1 - DIGITS)


class Samples(NamedTuple):
    """What was drawn.

    Attributes:
        x: `[c, d]`, the coreset.
        weight: `[c]`; sums over the coreset are about those over all points.
        equal: `[e, d]`, points drawn in proportion to their weights.
    """

    x: np.ndarray
    weight: np.ndarray
    equal: np.ndarray


class _Draws:
    """Draws points in proportion to masses that come in parts, by sorted uniform numbers.

    The running sum is in float64, term by term, so that parts do not show in it.
    """

    def __init__(self, uniform: np.ndarray) -> None:
        self._targets = np.sort(uniform)
        self._done = 0
        self._sum = 0.0

    def draw(self, masses: np.ndarray) -> np.ndarray:
        """Return the rows of this part that are drawn, as often as they are."""
        sums = np.cumsum(np.concatenate([[self._sum], masses]))
        self._sum = float(sums[-1])
        end = int(np.searchsorted(self._targets, self._sum, side="left"))
        targets, self._done = self._targets[self._done : end], end
        return np.searchsorted(sums[1:], targets, side="right")


def draw_samples(key: Array, source: Source, known: Survey, size: int, equal_size: int) -> Samples:
    """Draw both samples.

    The coreset is that of Bachem, Lucic and Krause ("lightweight"): a point is drawn with
    probability `q = 1/2 a/A + 1/2 a |x - mean|^2 / scatter`, a its weight and A that of all, and
    counts `1 / (size q)`. Points drawn more than once become one.

    Args:
        key: the same gives the same samples, whatever the chunks.
        source: the points.
        known: of a first pass.
        size: points to draw for the coreset.
        equal_size: points to draw in proportion to their weights.
    """
    rng = np.random.default_rng(_words(key))
    far = _Draws(BEYOND * rng.random(size))
    near = _Draws(known.total * rng.random(equal_size))
    centre, scatter = _about(known)
    rows: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    equal: list[np.ndarray] = []
    for chunk in source.chunks():
        weight = chunk.weight[: chunk.length].astype(np.float64)
        x = chunk.x[: chunk.length]
        difference = x - centre
        square = np.einsum("nd,nd->n", difference, difference)
        distant = np.where(weight > 0, square / scatter, 0)
        mass = weight / 2 * (1 / known.total + distant)
        drawn, times = np.unique(far.draw(mass), return_counts=True)
        rows.append(x[drawn])
        weights.append(times * weight[drawn] * BEYOND / (size * mass[drawn]))
        equal.append(x[near.draw(weight)])
    weight = np.concatenate(weights)
    # As much as all points weigh: then sizes of clusters mean the same.
    weight *= known.total / weight.sum()
    return Samples(np.concatenate(rows), weight.astype(source.dtype), np.concatenate(equal))


def _about(known: Survey) -> tuple[np.ndarray, float]:
    """Return the centre of the coreset and the scatter about it, both rounded."""
    low, high = known.low.astype(np.float64), known.high.astype(np.float64)
    mean = np.asarray(known.moments.mean[0], np.float64) + known.shift.astype(np.float64)
    step = np.where(high > low, (high - low) / STEPS, 1.0)
    centre = low + np.round((mean - low) / step) * step
    move = mean - centre
    scatter = float(known.moments.scatter[0]) + known.total * float(move @ move)
    fraction, exponent = np.frexp(max(scatter, np.finfo(np.float64).tiny))
    # Rounded up: so the masses add up to one at most, and by rounding alone to more.
    return centre, float(np.ldexp(np.ceil(fraction * 2**DIGITS) / 2**DIGITS, exponent))


def _words(key: Any) -> np.ndarray:
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if typed else key)
