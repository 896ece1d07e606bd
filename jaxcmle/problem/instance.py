"""What an instance is like: well-definedness, scale, balance, and the range of its variances.

What looks at all pairs of points takes quadratic time, and memory within a budget (see `pairs`).
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxcmle import memory, numerics
from jaxcmle.problem import inputs
from jaxcmle.problem.pairs import (
    MAX_POINTS,
    check_pairs_affordable,
    first_sums,
    over_pairs,
    sorted_rows,
    spare_part,
    unless_nan,
)
from jaxcmle.problem.types import CMLE

__all__ = [
    "InstanceReport",
    "YRange",
    "check_instance",
    "is_balanced",
    "rescale",
    "smallest_size",
    "variance_at_least",
    "variance_at_most",
    "variance_floor",
    "y_range",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class InstanceReport:
    """What `check_instance` found.

    Attributes:
        well_defined: every pair of points is at least `required` apart (squared).
        min_distance_sq: the smallest squared distance between two points.
        required: `4 d / pi`, the paper's requirement on it.
        duplicates: points that coincide with an earlier one.
        scale: multiply x by this to make the instance well-defined (infinite with duplicates).
    """

    well_defined: bool | Array
    min_distance_sq: float | Array
    required: float | Array
    duplicates: int | Array
    scale: float | Array


class YRange(NamedTuple):
    """The range of `y = ln(2 pi e variance)` over all clusters of at least the minimum size."""

    low: float | Array
    high: float | Array


def check_instance(
    x: Any, *, max_points: int = MAX_POINTS, byte_budget: int | None = None
) -> InstanceReport:
    """Tell whether an instance is well-defined (`def:well-defined` in the paper), and how far off.

    Args:
        x: points `[n, d]`.
        max_points: refuse more points than this: time is quadratic.
        byte_budget: bytes that the pass over all pairs may take; by default a share of the
            memory of the device.

    Returns:
        An `InstanceReport`.

    Example:
        >>> import jaxcmle as jc
        >>> report = jc.check_instance([[0.0], [1.0], [3.0]])
        >>> report.well_defined, report.min_distance_sq, round(report.required, 3)
        (False, 1.0, 1.273)
    """
    points, _ = inputs.to_points(x)
    check_pairs_affordable(points, max_points, "check_instance")
    return inputs.to_python(_in_pairs(_report, points, byte_budget=byte_budget))


def rescale(
    x: Any,
    *,
    scale: Literal["tight", "paper"] = "tight",
    balance: float | None = None,
    max_points: int = MAX_POINTS,
    byte_budget: int | None = None,
) -> tuple[Array, float | Array]:
    """Return x times a factor that makes the instance well-defined, and the factor.

    Scaling by c adds `n d ln c` to every CMLE and UCMLE cost, and changes no labels.

    Args:
        x: points `[n, d]`.
        scale: `"paper"` puts the closest pair at a squared distance of `4 d / pi`; `"tight"` puts
            the smallest variance that a cluster of the minimum size can have, as `variance_floor`
            bounds it, at `1 / (2 pi)`.
        balance: f, for `"tight"`: clusters hold at least `n / f` points. Default: at least two.
        max_points: refuse more points than this: time is quadratic.
        byte_budget: bytes that the pass over all pairs may take; by default a share of the
            memory of the device.

    Returns:
        `(x * factor, factor)`.

    Example:
        >>> import jaxcmle as jc
        >>> x, factor = jc.rescale([[0.0], [1.0], [3.0]], scale="paper")
        >>> jc.check_instance(x).well_defined, round(factor, 3)
        (True, 1.128)
    """
    points, _ = inputs.to_points(x)
    check_pairs_affordable(points, max_points, "rescale")
    n = points.shape[0]
    if scale == "paper":
        size: ArrayLike = 2.0
        wanted, reason = 4 * points.shape[1] / math.pi, "two points coincide"
    elif scale == "tight":
        size = 2.0
        if balance is not None:
            limit = inputs.to_limit(balance, "balance", positive=True)
            size = smallest_size(points, None, limit)
        wanted, reason = 1 / (2 * math.pi), "as many points as a cluster must hold coincide"
    else:
        raise ValueError(f'scale must be "tight" or "paper", got {scale!r}')
    inputs.check_partition_exists(1, size, n)

    def found(points: Array) -> Any:
        if scale == "paper":
            report = _in_pairs(_report, points, byte_budget=byte_budget)
            return inputs.to_python(report.min_distance_sq)
        return inputs.to_python(
            _in_pairs(variance_at_least, points, None, size, byte_budget=byte_budget)
        )

    # A hair more than asked for; then, as the product rounds, as often as that takes.
    hair = 1 + 4 * float(jnp.finfo(points.dtype).eps)
    value = found(points)
    if isinstance(value, Array):
        factor = hair * jnp.sqrt(wanted / value)
        return points * factor, factor
    if value <= 0:
        raise ValueError(
            f"no factor makes this instance well-defined: {reason}; remove duplicates"
            + (", or lower balance" if scale == "tight" else "")
        )
    product = 1.0
    for _ in range(20):
        product *= hair * math.sqrt(wanted / value)
        scaled = points * product
        value = found(scaled)
        if value >= wanted:
            break
    return scaled, product


def is_balanced(
    x: Any,
    labels: Any,
    n_clusters: int,
    *,
    f: ArrayLike,
    g: ArrayLike | None = None,
    sample_weight: Any = None,
) -> bool | Array:
    r"""Tell whether a partition is f-balanced, or (f, g)-balanced (`def:well-balanced`).

    Every cluster holds at least $N / f$ points; with g, also
    $OPT(C_k, 1) \ge \frac{1}{g} \sum_j OPT(C_j, 1)$.

    Args:
        x: points `[n, d]`.
        labels: int `[n]`, from 0 to `n_clusters - 1`.
        n_clusters: k; a Python int.
        f: the balance of sizes.
        g: the balance of costs, or None.
        sample_weight: `[n]`, default ones.

    Returns:
        A boolean scalar.

    Example:
        >>> import jaxcmle as jc
        >>> bool(jc.is_balanced([[0.0], [2.0], [9.0], [11.0]], [0, 0, 1, 1], 2, f=2))
        True
    """
    points, weight = inputs.to_points(x, sample_weight)
    k = inputs.to_n_clusters(n_clusters, points.shape[0])
    labels = inputs.to_labels(labels, points.shape[0], k)
    f = inputs.to_limit(f, "f", positive=True)
    g = None if g is None else inputs.to_limit(g, "g", positive=True)
    return inputs.to_python(_is_balanced(points, weight, labels, k, f, g))


@jax.jit
def smallest_size(x: Array, weight: Array | None, balance: ArrayLike) -> Array:
    """Return the smallest weight of a cluster in an f-balanced partition.

    That is `max(2, ceil(N / f))` for points of whole weights, which stand for repeated points and
    only add up to whole sizes, and `N / f` otherwise.
    """
    total = jnp.asarray(x.shape[0], x.dtype) if weight is None else numerics.blocked_sum(weight)
    share = total / balance
    # The slack keeps a quotient that is whole but for rounding from being rounded up.
    whole = jnp.maximum(2, jnp.ceil(share * (1 - 4 * jnp.finfo(x.dtype).eps)))
    if weight is None:
        return whole
    return jnp.where((weight == jnp.round(weight)).all(), whole, share)


def variance_floor(
    x: Any,
    min_size: ArrayLike,
    *,
    sample_weight: Any = None,
    max_points: int = MAX_POINTS,
    byte_budget: int | None = None,
) -> float | Array:
    r"""Return a variance that no cluster of at least `min_size` points can be below.

    With $q(x) = \frac{1}{2 d n} S_{n-1}(x)$, $S_j(x)$ the sum of the j smallest squared distances
    from x to the other points, it is the mean of the n smallest $q(x)$, $n$ the minimum size.

    Args:
        x: points `[n, d]`.
        min_size: the smallest weight of a cluster.
        sample_weight: `[n]`, default ones.
        max_points: refuse more points than this: time is quadratic.
        byte_budget: bytes that the pass over all pairs may take; by default a share of the
            memory of the device.

    Returns:
        A scalar, in the square of the units of x.

    Example:
        >>> import jaxcmle as jc
        >>> float(jc.variance_floor([[0.0], [2.0], [10.0]], 2))
        1.0
    """
    points, weight, min_size = _size_inputs(x, sample_weight, min_size)
    check_pairs_affordable(points, max_points, "variance_floor")
    floor = _in_pairs(variance_at_least, points, weight, min_size, byte_budget=byte_budget)
    return inputs.to_python(floor)


def y_range(
    x: Any,
    min_size: ArrayLike,
    *,
    sample_weight: Any = None,
    max_points: int = MAX_POINTS,
    byte_budget: int | None = None,
) -> YRange:
    r"""Return the range of $y = \ln(2 \pi e \sigma^2)$ over clusters of at least `min_size` points.

    Below it is bounded by `variance_floor`, above by
    $V = \min(\frac{\Delta^2}{2(d+1)}, \frac{1}{d} \cdot$ mean of the n largest $|x - c|^2)$,
    $\Delta$ the diameter (Jung's theorem) and c the mean of the data.

    Args:
        x: points `[n, d]`.
        min_size: the smallest weight of a cluster.
        sample_weight: `[n]`, default ones.
        max_points: refuse more points than this: time is quadratic.
        byte_budget: bytes that the pass over all pairs may take; by default a share of the
            memory of the device.

    Returns:
        `(low, high)`; low is minus infinity where that many points can coincide.

    Example:
        >>> import jaxcmle as jc
        >>> low, high = jc.y_range([[0.0], [2.0], [10.0]], 2)
        >>> round(float(low), 3), round(float(high), 3)
        (2.838, 6.057)
    """
    points, weight, min_size = _size_inputs(x, sample_weight, min_size)
    check_pairs_affordable(points, max_points, "y_range")
    floor = _in_pairs(variance_at_least, points, weight, min_size, byte_budget=byte_budget)
    ceiling = _in_pairs(variance_at_most, points, weight, min_size, byte_budget=byte_budget)
    offset = math.log(2 * math.pi * math.e)
    return inputs.to_python(YRange(offset + jnp.log(floor), offset + jnp.log(ceiling)))


def _size_inputs(
    x: Any, sample_weight: Any, min_size: ArrayLike
) -> tuple[Array, Array | None, ArrayLike]:
    points, weight = inputs.to_points(x, sample_weight)
    min_size = inputs.to_limit(min_size, "min_size", positive=True)
    inputs.check_partition_exists(1, min_size, len(points) if weight is None else weight.sum())
    return points, weight, min_size


def _in_pairs(function: Any, *arguments: Any, byte_budget: int | None) -> Any:
    """Return what a function of pairs gives, in tiles that fit into memory."""
    return memory.within(lambda: function(*arguments, memory.pair_bytes(byte_budget)))


@partial(jax.jit, static_argnames="byte_budget")
def _report(x: Array, byte_budget: int) -> InstanceReport:
    points = numerics.prepare(x, None)
    position = jnp.arange(x.shape[0])

    def row(index: Array, distances: Array) -> tuple[Array, Array]:
        earlier = jnp.where(position[None] < index[:, None], distances, jnp.inf)
        return earlier.min(axis=1), (earlier == 0).any(axis=1)

    nearest, repeats = over_pairs(points, row, 2, byte_budget)
    smallest = unless_nan(points, nearest.min())
    required = jnp.asarray(4 * x.shape[1] / math.pi, x.dtype)
    return InstanceReport(
        well_defined=smallest >= required,
        min_distance_sq=smallest,
        required=required,
        duplicates=repeats.sum(),
        scale=jnp.sqrt(required / smallest),
    )


@partial(jax.jit, static_argnames="k")
def _is_balanced(
    x: Array, weight: Array | None, labels: Array, k: int, f: ArrayLike, g: ArrayLike | None
) -> Array:
    points = numerics.prepare(x, weight)
    moments = numerics.cluster_moments(points, numerics.moment_rows(points), labels, k)
    size = moments.size
    slack = 1 - 16 * jnp.finfo(x.dtype).eps
    balanced = (size >= slack * size.sum() / f).all()
    if g is None:
        return balanced
    mixture = CMLE().mixture(moments, 0.0)
    half_d = x.shape[1] / 2
    costs = size * half_d * (jnp.log(2 * math.pi * mixture.variances) + 1)
    costs = jnp.where(size > 0, costs, 0)
    return balanced & (costs >= costs.sum() / g).all()


@partial(jax.jit, static_argnames="byte_budget")
def variance_at_least(x: Array, weight: Array | None, size: ArrayLike, byte_budget: int) -> Array:
    """Return what no cluster of this weight has a variance below; see `variance_floor`."""
    points = numerics.prepare(x, weight)
    spare = spare_part(weight, x.shape[0], x.dtype)

    def row(index: Array, distances: Array) -> Array:
        sums = first_sums(*sorted_rows(distances, weight), size, spare)
        return sums / (2 * x.shape[1] * size)

    spreads = over_pairs(points, row, 4 if weight is None else 8, byte_budget)
    spreads = jnp.where(points.weight > 0, spreads, jnp.inf)
    floor = first_sums(*sorted_rows(spreads[None], weight), size, spare)[0] / size
    return unless_nan(points, floor)


@partial(jax.jit, static_argnames="byte_budget")
def variance_at_most(x: Array, weight: Array | None, size: ArrayLike, byte_budget: int) -> Array:
    """Return what no cluster of this weight has a variance above; see `y_range`."""
    points = numerics.prepare(x, weight)
    d = x.shape[1]

    def row(index: Array, distances: Array) -> Array:
        finite = jnp.where(jnp.isfinite(distances), distances, 0).max(axis=1)
        return jnp.where(points.weight[index] > 0, finite, 0)

    diameter = over_pairs(points, row, 2, byte_budget).max()
    centred, _ = numerics.centred(points)
    square = jnp.where(points.weight > 0, (centred * centred).sum(axis=1), 0)
    order = jnp.argsort(-square)
    largest = first_sums(square[order][None], points.weight[order][None], size)[0]
    return unless_nan(points, jnp.minimum(diameter / (2 * (d + 1)), largest / (d * size)))
