"""What users pass, turned into arrays, or into an error that says what to do.

Shapes and types are always checked. Values (NaN, negative weights, labels out of range) are checked
on concrete arrays only: under `jit` and `vmap` they cannot be, and show in the status or the cost.
"""

import math
import operator
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxcmle.problem.types import CMLE, UCMLE, WKM, Mixture, Problem

__all__ = [
    "are_zeros_and_ones",
    "check_enough_points",
    "check_on_host",
    "check_partition_exists",
    "check_ranges",
    "check_values",
    "float_dtype",
    "to_array",
    "to_count",
    "to_floats",
    "to_key",
    "to_labels",
    "to_limit",
    "to_mixture",
    "to_n_clusters",
    "to_points",
    "to_problem",
    "to_python",
    "to_whole",
    "without_padding",
]

WIDER = 'enable float64 with jax.config.update("jax_enable_x64", True)'


def to_points(x: Any, sample_weight: Any = None) -> tuple[Array, Array | None]:
    """Return x as a float array `[n, d]` and the weights as `[n]` in the same dtype, or None."""
    array = _to_matrix(x)
    if _is_traced(array, sample_weight):
        points = _to_float(array)
        return points, _to_weight(sample_weight, points)
    # Inside somebody's jit, concrete points are still to be looked at now, not staged.
    with jax.ensure_compile_time_eval():
        points = _to_float(array)
        weight = _to_weight(sample_weight, points)
        check_values(array, points, weight)
    return points, weight


def to_floats(
    x: Any, sample_weight: Any, put: Callable[[Any], Array]
) -> tuple[Any, Array, Array | None]:
    """Return x as it is, and points and weights of one float dtype, where `put` puts them.

    `put` takes NumPy arrays as they are, so that no device has to hold all of them. Values are not
    checked: see `check_values`.
    """
    array = _to_matrix(x)
    dtype = float_dtype(array.dtype)
    points = put(_with_dtype(array, dtype))
    if sample_weight is None:
        return array, points, None
    return array, points, put(_with_dtype(_checked_weight(sample_weight, array.shape[0]), dtype))


def _to_matrix(x: Any) -> Any:
    """Return x as an array `[n, d]` of real numbers."""
    array = to_array(x, "x")
    if array.ndim == 1:
        raise ValueError(
            f"x must have shape [n, d], got a 1-D array of length {array.shape[0]}; use "
            "x.reshape(-1, 1) for n points with one feature, x.reshape(1, -1) for a single point"
        )
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"x must have shape [n, d] with at least one point and one feature, got {array.shape}"
        )
    return array


def without_padding(
    points: Array, weight: Array | None
) -> tuple[Array, Array | None, np.ndarray | None]:
    """Return the points of positive weight, their weights, and which they are; None for all.

    For work on the host: shapes depend on the values. Weights that are all 1 become None.
    """
    if weight is None:
        return points, None, None
    present = np.flatnonzero(np.asarray(weight) > 0)
    points, weight = points[present], weight[present]
    return points, None if (weight == 1).all() else weight, present


def are_zeros_and_ones(weight: Any) -> bool:
    """Tell whether all weights are 0 or 1, as far as can be seen: not within jit."""
    if weight is None or _is_traced(weight):
        return weight is None
    values = np.asarray(weight)
    return bool(((values == 0) | (values == 1)).all())


def check_on_host(name: str) -> None:
    """Raise inside jit, vmap and grad, for functions that need values."""
    if _is_traced(jnp.zeros(())):
        raise TypeError(
            f"{name} decides by the values of its arguments what to do: call it outside jit, vmap "
            "and grad"
        )


def to_key(key: Any) -> Array:
    """Return the key: one typed key, or two words of the old style."""
    valid = isinstance(key, jax.Array) and (
        (jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0)
        or (key.dtype == jnp.uint32 and key.shape == (2,))
    )
    if not valid:
        raise TypeError(
            "key must be one key, as from jax.random.key(0) (use jax.vmap for several), got "
            f"{getattr(key, 'shape', '')} {type(key).__name__}"
        )
    return key


def to_labels(labels: Any, n: int, n_clusters: int) -> Array:
    """Return the labels as int32 `[n]`."""
    array = to_array(labels, "labels")
    if array.shape != (n,):
        raise ValueError(f"labels must have one label per point, shape ({n},), got {array.shape}")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"labels must be integers from 0 to n_clusters - 1, got {array.dtype}; use "
            "labels.astype(int)"
        )
    if not _is_traced(array):
        # By the array itself: it may have parts that this process does not see.
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= n_clusters:
            raise ValueError(
                f"labels must lie from 0 to n_clusters - 1 = {n_clusters - 1}, got {low} to {high}"
            )
    return jnp.asarray(array).astype(jnp.int32)


def to_n_clusters(n_clusters: Any, n: int) -> int:
    """Return the number of clusters as an int from 1 to n."""
    try:
        k = operator.index(n_clusters)
    except TypeError as error:
        raise TypeError(
            f"n_clusters must be a Python int (it fixes array shapes), got {n_clusters!r}"
        ) from error
    if not 1 <= k <= n:
        raise ValueError(f"n_clusters must lie from 1 to the number of points, {n}, got {k}")
    return k


def check_enough_points(
    points: Array,
    weight: Array | None,
    n_clusters: int,
    fetch: Callable[[Array], np.ndarray] = np.asarray,
) -> None:
    """Raise unless there are at least `n_clusters` distinct points of positive weight.

    Looks at ever longer prefixes, so that ordinary data costs next to nothing. What other processes
    have takes a `fetch` of its own.
    """
    if _is_traced(points, weight):
        return
    n, length = points.shape[0], 4 * n_clusters
    while True:
        with jax.ensure_compile_time_eval():
            rows = fetch(points[:length])
            if weight is not None:
                rows = rows[fetch(weight[:length]) > 0]
        distinct = len(np.unique(rows, axis=0))
        if distinct >= n_clusters:
            return
        if length >= n:
            raise ValueError(
                f"x has {distinct} distinct points of positive weight, fewer than the {n_clusters} "
                "clusters asked for; lower n_clusters"
            )
        length *= 4


def check_partition_exists(n_clusters: Any, min_size: Any, total: Any) -> None:
    """Raise where the clusters together would weigh more than all points do."""
    if _is_traced(n_clusters, min_size, total):
        return
    k, size, available = float(n_clusters), float(min_size), float(total)
    if k * size > available * (1 + 1e-5):
        raise ValueError(
            f"{k:g} clusters of at least {size:g} each need {k * size:g}, and the points weigh "
            f"only {available:g}: lower n_clusters or min_size, or raise balance"
        )


def to_mixture(mixture: Any, d: int, dtype: Any, problem: Problem, *, stack: bool) -> Mixture:
    """Return the mixture (or a stack of them) in the given dtype, with matching shapes."""
    if not isinstance(mixture, Mixture):
        raise TypeError(
            "expected a jaxcmle.Mixture(weights=[k], means=[k, d], variances=[k]), got "
            f"{type(mixture).__name__}"
        )
    weights, means, variances = (
        _cast(to_array(value, f"mixture.{name}"), dtype)
        for name, value in (
            ("weights", mixture.weights),
            ("means", mixture.means),
            ("variances", mixture.variances),
        )
    )
    letters = "[m, k]" if stack else "[k]"
    if (
        weights.ndim != (2 if stack else 1)
        or 0 in weights.shape
        or variances.shape != weights.shape
        or means.shape != (*weights.shape, d)
    ):
        hint = " (a single mixture becomes a stack by a leading axis of length 1)" if stack else ""
        raise ValueError(
            f"{'a stack of mixtures' if stack else 'a mixture'} for points with {d} features needs "
            f"weights {letters}, variances {letters} and means {letters[:-1]}, {d}], got "
            f"{weights.shape}, {variances.shape} and {means.shape}{hint}"
        )
    result = Mixture(weights=weights, means=means, variances=variances)
    if not _is_traced(result):
        _check_mixture(np.asarray(weights), np.asarray(means), np.asarray(variances), problem)
    return result


def _check_mixture(
    weights: np.ndarray, means: np.ndarray, variances: np.ndarray, problem: Problem
) -> None:
    """Raise where a value that this problem uses is out of range."""
    if not np.isfinite(means).all():
        raise ValueError("mixture.means hold NaN or infinity")
    if not isinstance(problem, UCMLE):
        valid = np.isfinite(weights) & (weights >= 0)
        if not (valid.all() and (weights > 0).any(axis=-1).all()):
            raise ValueError(
                "mixture.weights must be finite and not negative, with at least one positive"
            )
    if not isinstance(problem, WKM) and not (np.isfinite(variances) & (variances > 0)).all():
        raise ValueError(
            f"mixture.variances must be positive and finite, got {variances.min()}; give estimate "
            "or cem a min_variance"
        )


def to_problem(problem: Any) -> Problem:
    """Return the problem, or say what one looks like."""
    if not isinstance(problem, CMLE | WKM | UCMLE):
        raise TypeError(
            f"problem must be jaxcmle.CMLE(), jaxcmle.WKM(beta=...) or jaxcmle.UCMLE(), got "
            f"{problem!r}"
        )
    if isinstance(problem, WKM) and not _is_traced(problem.beta):
        beta = to_limit(problem.beta, "WKM's beta = 1 / (2 variance)", positive=True)
        if math.isinf(beta):
            raise ValueError("WKM's beta = 1 / (2 variance) must be finite")
        return WKM(beta=beta)
    return problem


def to_limit(value: Any, name: str, *, positive: bool = False) -> Any:
    """Return a limit as a Python float, checked to be a number and not negative.

    A Python float takes the dtype it meets, and one limit traced stands for all values of it.
    """
    if _is_traced(value):
        return value
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error
    if math.isnan(number) or number < 0 or (positive and number == 0):
        bound = "positive" if positive else "0 or more"
        raise ValueError(f"{name} must be {bound}, got {value!r}")
    return number


def to_count(value: Any, name: str) -> Any:
    """Return a limit on a count as a Python int that fits in 32 bits; infinity is as good."""
    number = to_limit(value, name)
    return number if _is_traced(number) else int(min(number, 2**31 - 1))


def to_whole(value: Any, name: str) -> int:
    """Return a Python int of 1 or more."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be 1 or more, and a whole number, got {value!r}")
    return int(value)


def to_python(tree: Any) -> Any:
    """Return the scalars of a result as Python numbers; under tracing, unchanged."""
    return tree if _is_traced(tree) else jax.tree.map(lambda leaf: leaf.item(), tree)


def _is_traced(*values: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values))


def to_array(value: Any, name: str) -> Any:
    """Return a NumPy or JAX array of real numbers."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array; fill or drop the masked entries, or give those points "
            "sample_weight 0"
        )
    if isinstance(value, str | os.PathLike):
        raise TypeError(
            f"{name} must be an array, got the path {os.fspath(value)!r}; load it first, as with "
            "numpy.load (fit, cem and predict alone read files themselves)"
        )
    if _is_traced(value):
        value = jnp.asarray(value)
    elif not isinstance(value, jax.Array):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{name} is not a rectangular array: {error}") from error
    dtype = value.dtype
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if dtype.kind in "mM" or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise TypeError(
            f"{name} must hold real numbers, got dtype {dtype}; select the numeric columns, "
            f"or convert with numpy.asarray({name}, dtype=float)"
        )
    if isinstance(value, jax.Array) and not _is_traced(value):
        return _without_explicit_axes(value)
    if isinstance(value, np.ndarray):
        # What JAX does not take: extended precision, and the other byte order.
        value = value.astype(np.float64 if dtype.itemsize > 8 else dtype.newbyteorder("="))
    return value


def _without_explicit_axes(array: Array) -> Array:
    """Return the array with its mesh left to the compiler.

    On the explicit axes that `jax.make_mesh` gives, every operation would have to say where its
    result goes.
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return array
    if all(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return array
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return jax.device_put(array, NamedSharding(mesh, sharding.spec))


def _cast(array: Any, dtype: Any) -> Array:
    """Return a JAX array of a float dtype."""
    return jnp.asarray(_with_dtype(array, dtype)).astype(dtype)


def _with_dtype(array: Any, dtype: Any) -> Any:
    """Return a NumPy or JAX array of a float dtype.

    NumPy casts its own arrays: JAX would first wrap integers that do not fit in 32 bits. What
    overflows float32 becomes infinite here, and is reported with its row by `check_values`.
    """
    if isinstance(array, np.ndarray):
        with np.errstate(over="ignore"):
            return array.astype(dtype)
    return array.astype(dtype)


def float_dtype(dtype: Any) -> Any:
    """Return the float dtype that data becomes: floats keep theirs, half precision is widened.

    What is wider than the default, as `longdouble`, becomes that.
    """
    default = jnp.result_type(float)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    narrower = is_float and np.dtype(dtype).itemsize < np.dtype(default).itemsize
    return jnp.dtype(jnp.float32) if narrower else default


def _to_float(array: Any) -> Array:
    """Return a float32 or float64 array."""
    return _cast(array, float_dtype(array.dtype))


def _to_weight(sample_weight: Any, points: Array) -> Array | None:
    """Return the point weights as `[n]` in the dtype of the points; None stays None."""
    if sample_weight is None:
        return None
    return _cast(_checked_weight(sample_weight, points.shape[0]), points.dtype)


def _checked_weight(sample_weight: Any, n: int) -> Any:
    """Return the point weights as an array `[n]`."""
    array = to_array(sample_weight, "sample_weight")
    if array.shape != (n,):
        raise ValueError(
            f"sample_weight must have one weight per point, shape ({n},), got {array.shape}"
        )
    return array


@jax.jit
def _summary(points: Array, weight: Array | None) -> tuple[Array, ...]:
    """Return what `check_values` needs, in one pass over the points."""
    if weight is None:
        weight = jnp.ones(points.shape[0], points.dtype)
    present = weight > 0
    bad = ~jnp.isfinite(points).all(axis=1) & present
    low = jnp.min(points, axis=0, where=present[:, None], initial=jnp.inf)
    high = jnp.max(points, axis=0, where=present[:, None], initial=-jnp.inf)
    finite_weight = jnp.isfinite(weight).all()
    return bad.sum(), jnp.argmax(bad), (high - low).max(), weight.min(), weight.max(), finite_weight


def check_values(array: Any, points: Array, weight: Array | None) -> None:
    """Raise on bad weights, on bad points of positive weight, and on squares out of range.

    `array` is what the points were before, without padding.
    """
    bad, row, spread, lightest, heaviest, finite_weight = (
        value.item() for value in _summary(points, weight)
    )
    n, d = array.shape
    if not finite_weight:
        raise ValueError("sample_weight holds NaN or infinity; use 0 to leave a point out")
    if lightest < 0:
        raise ValueError(
            f"sample_weight must not be negative, got {lightest}; use 0 to leave a point out"
        )
    if heaviest == 0:
        raise ValueError("sample_weight is 0 for every point; at least one must be positive")

    if bad:
        values = np.asarray(array[row])
        if np.isfinite(values).all():
            raise ValueError(
                f"x does not fit in {points.dtype} (row {row}: {values}); rescale x, or {WIDER}"
            )
        raise ValueError(
            f"x holds NaN or infinity in {bad} of {n} points (first in row {row}); drop "
            "or impute them, or give them sample_weight 0"
        )
    check_ranges(n, d, points.dtype, spread, heaviest)


def check_ranges(n: int, d: int, dtype: Any, spread: float, heaviest: float) -> None:
    """Raise where squared distances, or sums of them with weights, leave the range of the dtype."""
    limits = jnp.finfo(dtype)
    largest = math.sqrt(float(limits.max) / d) / 16
    smallest = math.sqrt(float(limits.tiny)) * 16
    if spread > largest or 0 < spread < smallest:
        raise ValueError(
            f"squared distances in x leave the range of {dtype}: its features spread over "
            f"{spread:.3g}, which must lie from {smallest:.1g} to {largest:.1g}; rescale x"
            + (f", or {WIDER}" if dtype == jnp.float32 else "")
        )
    scale = max(1.0, d * spread**2)
    if heaviest * n * scale > float(limits.max) / 16 or heaviest * min(1.0, spread or 1.0) ** 2 < (
        float(limits.tiny) * 256
    ):
        raise ValueError(
            f"sample_weight up to {heaviest:.3g}, times squared distances, leaves the range of "
            f"{dtype}: multiply all weights by a constant (costs are in proportion to it)"
        )
