"""Many instances as users pass them: checked one by one, and packed into buckets that fit.

Instances of different lengths and numbers of clusters are padded, with points of weight 0 and with
clusters that do not exist, to a few sizes. Which sizes depends on the instance alone, so that its
answer does not depend on its company.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcmle.problem import inputs
from jaxcmle.problem.types import Status

__all__ = [
    "Bucket",
    "Failure",
    "Instance",
    "Instances",
    "Packed",
    "bucket_of",
    "each_of",
    "pack",
    "raise_failures",
    "to_instances",
    "to_keys",
]

# Numbers of points are rounded up to powers of two, and to this at least.
LEAST_POINTS = 16
# Data with numbers beyond this, or nearer to each other, is looked at more closely.
WIDE, NARROW = 1e12, 1e-12
# Instances that an error names, at most.
NAMED = 5


class Instance(NamedTuple):
    """One of many instances, on the host.

    Attributes:
        x: points `[n, d]`, those of weight 0 last.
        weight: `[n]`, or None where all weights are 1.
        k: clusters.
        order: which of the user's points these are, or None for all of them as they came.
    """

    x: np.ndarray
    weight: np.ndarray | None
    k: int
    order: np.ndarray | None

    @property
    def total(self) -> float:
        """The weight of all points."""
        return float(len(self.x) if self.weight is None else self.weight.sum(dtype=np.float64))

    @property
    def whole(self) -> bool:
        """Whether weights are whole numbers, which stand for copies of points."""
        return self.weight is None or bool((self.weight == np.round(self.weight)).all())

    @property
    def unweighted(self) -> bool:
        """Whether every weight is 0 or 1."""
        return inputs.are_zeros_and_ones(self.weight)


class Failure(NamedTuple):
    """Why there is no answer for an instance."""

    status: Status
    error: str


class Instances(NamedTuple):
    """Instances in order, `None` for those that cannot be solved, whose failures are listed.

    Attributes:
        each: the instances.
        failures: by index.
        lengths: how many points each came with.
        clusters: how many clusters each was asked for.
        d: features.
        dtype: of the points.
        stacked: whether they came as one array `[b, n, d]`.
    """

    each: list[Instance | None]
    failures: dict[int, Failure]
    lengths: list[int]
    clusters: list[int]
    d: int
    dtype: Any
    stacked: bool


class Bucket(NamedTuple):
    """The shape that instances are padded to: so many points, so many clusters."""

    n: int
    k: int


class Packed(NamedTuple):
    """A stack of padded instances: points `[c, n, d]`, weights `[c, n]`, clusters `[c, k]`."""

    x: np.ndarray
    weight: np.ndarray
    exists: np.ndarray


def to_instances(xs: Any, n_clusters: Any, sample_weight: Any) -> Instances:
    """Return instances from what the user gave.

    What is wrong with the call as a whole raises; what is wrong with the values of one instance
    becomes its failure.
    """
    arrays, stacked = _to_arrays(xs)
    b = len(arrays)
    counts = each_of(n_clusters, b, "n_clusters")
    weights = _to_weights(sample_weight, b)
    d = arrays[0].shape[1]
    for i, array in enumerate([] if stacked else arrays):
        if array.ndim != 2 or array.shape[1] != d or d == 0:
            raise ValueError(
                f"every instance must have shape [n, d] with the same d, here {d} as in instance "
                f"0; instance {i} has shape {array.shape}"
            )
    kinds = {array.dtype for array in (arrays[:1] if stacked else arrays)}
    dtype = np.result_type(*(np.dtype(inputs.float_dtype(kind)) for kind in kinds))
    # A number of clusters that is no number is a mistake of the call.
    whole = {count: inputs.to_whole(count, "n_clusters") for count in set(counts)}
    clusters = [whole[count] for count in counts]
    each: list[Instance | None] = [None] * b
    failures: dict[int, Failure] = {}
    doubtful: Iterable[int] = range(b)
    if stacked and sample_weight is None:
        # All at once: thousands of small checks take longer than the work.
        stack = np.asarray(xs).astype(dtype, copy=False)
        each = [Instance(x, None, k, None) for x, k in zip(stack, clusters, strict=True)]
        doubtful = np.flatnonzero(~_are_ordinary(stack, clusters)).tolist()
    for i in doubtful:
        made = _to_instance(arrays[i], clusters[i], weights[i], dtype)
        each[i] = made if isinstance(made, Instance) else None
        if isinstance(made, Failure):
            failures[i] = made
    return Instances(each, failures, [len(a) for a in arrays], clusters, d, dtype, stacked)


def _to_arrays(xs: Any) -> tuple[list[np.ndarray], bool]:
    if hasattr(xs, "ndim") and hasattr(xs, "dtype"):
        if xs.ndim != 3 or 0 in xs.shape:
            raise ValueError(
                "xs must be a list of arrays [n, d], or one array [b, n, d] with none of these 0, "
                f"got shape {tuple(xs.shape)}; for a single instance use fit, or xs[None]"
            )
        return list(np.asarray(inputs.to_array(xs, "xs"))), True
    if isinstance(xs, str | bytes | dict) or not isinstance(xs, Iterable):
        raise TypeError(
            f"xs must be a list of arrays [n, d], or one array [b, n, d], got {type(xs).__name__}"
        )
    arrays = [np.asarray(inputs.to_array(x, f"instance {i}")) for i, x in enumerate(xs)]
    if not arrays:
        raise ValueError("xs is empty; there must be at least one instance")
    if arrays[0].ndim != 2:
        raise ValueError(
            f"every instance must have shape [n, d], and instance 0 has shape {arrays[0].shape}; "
            "for a single instance use fit, or [x]"
        )
    return arrays, False


def each_of(value: Any, b: int, name: str) -> list[Any]:
    """Return one value for each of b instances, from one for all or one for each."""
    if np.ndim(value) == 0:
        return [value] * b
    values = list(value) if not isinstance(value, jax.Array) else np.asarray(value).tolist()
    if len(values) != b:
        raise ValueError(
            f"{name} must be one for all or one for each of the {b} instances, got {len(values)}"
        )
    return [each.item() if isinstance(each, np.generic) else each for each in values]


def _to_weights(sample_weight: Any, b: int) -> Sequence[Any]:
    if sample_weight is None:
        return [None] * b
    if len(sample_weight) != b:
        raise ValueError(
            f"sample_weight must hold weights for each of the {b} instances, got "
            f"{len(sample_weight)}; use None for an instance without"
        )
    return list(sample_weight)


def _to_instance(array: np.ndarray, k: int, weight: Any, dtype: Any) -> Instance | Failure:
    """Return the instance, or why it cannot be solved."""
    n = len(array)
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(array, dtype)
    order = None
    if weight is not None:
        weight = np.asarray(inputs.to_array(weight, "sample_weight"))
        if weight.shape != (n,):
            raise ValueError(
                f"sample_weight must have one weight per point, shape ({n},), got {weight.shape}"
            )
        weight = weight.astype(dtype)
        absent = weight == 0
        if absent.any():
            order = np.argsort(absent, kind="stable")
            array, weight = array[order], weight[order]
            # Padding may hold anything.
            x = np.where((weight > 0)[:, None], x[order], np.nan_to_num(x[order]))
        if (weight == 1).all():
            weight = None
    if not _is_ordinary(x, weight, k):
        failure = _failure(array, weight, k)
        if failure is not None:
            return failure
    return Instance(x, weight, k, order)


def _is_ordinary(x: np.ndarray, weight: np.ndarray | None, k: int) -> bool:
    """Tell, at once, of data that there is nothing wrong with it; not of all such data."""
    if weight is not None:
        if not (np.isfinite(weight).all() and weight.min() >= 0 and NARROW < weight.max() < WIDE):
            return False
        x = x[: int((weight > 0).sum())]
    return len(x) >= k and bool(_are_ordinary(x[None], [k])[0])


def _are_ordinary(x: np.ndarray, clusters: list[int]) -> np.ndarray:
    """Tell of each of a stack of points `[b, n, d]` whether it is ordinary."""
    flat = x.reshape(len(x), -1)
    with np.errstate(invalid="ignore"):
        moderate = np.isfinite(flat).all(axis=1) & (flat.max(axis=1) < WIDE)
        moderate &= flat.min(axis=1) > -WIDE
        # Different values in one column are different points.
        values = np.sort(x[:, : 4 * max(clusters) + 8, 0], axis=1)
        different = 1 + (values[:, 1:] > values[:, :-1]).sum(axis=1)
        spread = values[:, -1] - values[:, 0]
    return moderate & ((spread > NARROW) | (different == 1)) & (different >= clusters)


def _failure(array: np.ndarray, weight: np.ndarray | None, k: int) -> Failure | None:
    """Return what is wrong with the values of an instance, in the words of other functions."""
    if len(array) == 0:
        return Failure(Status.INADMISSIBLE, "x has no points")
    try:
        points, weights = inputs.to_points(array, weight)
    except ValueError as error:
        return Failure(Status.NONFINITE, str(error))
    try:
        inputs.to_n_clusters(k, len(array))
        inputs.check_enough_points(points, weights, k)
    except ValueError as error:
        return Failure(Status.INADMISSIBLE, str(error))
    return None


def raise_failures(failures: dict[int, Failure]) -> None:
    """Raise an error that names the instances that cannot be solved, if there are any."""
    if not failures:
        return
    named = sorted(failures.items())[:NAMED]
    more = len(failures) - len(named)
    lines = [f"instance {i}: {failure.error}" for i, failure in named]
    lines += [f"and {more} more"] if more else []
    raise ValueError("\n".join([*lines, 'errors="status" solves the others']))


def to_keys(key: Any, b: int) -> Array:
    """Return a key for each instance: its own, or one for all with the index folded in."""
    if key is None:
        key = jax.random.key(0)
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if typed and key.ndim == 1:
        if len(key) != b:
            raise ValueError(f"key must be one key, or one for each of the {b}, got {len(key)}")
        return key
    key = inputs.to_key(key)
    if not typed:
        key = jax.random.wrap_key_data(key)
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(b, dtype=jnp.uint32))


@lru_cache(maxsize=2**16)
def bucket_of(n: int, k: int, alike: bool) -> Bucket:
    """Return the size that an instance is padded to.

    Lengths are powers of two; for instances that are all `alike` and so need one program only, 16
    lengths for each. Numbers of clusters are kept up to 4; two for each power of two follow: 6, 8,
    12, 16, 24, ...
    """
    power = 1 << (k - 1).bit_length()
    clusters = k if k <= 4 else power * 3 // 4 if k <= power * 3 // 4 else power
    length = max(LEAST_POINTS, 1 << (n - 1).bit_length())
    if alike:
        step = max(8, length // 32)
        length = max(LEAST_POINTS, -(-n // step) * step)
    return Bucket(length, clusters)


def pack(instances: Sequence[Instance], bucket: Bucket, places: np.ndarray, size: int) -> Packed:
    """Return instances padded to a bucket, in these places of a stack; the others are empty."""
    d, dtype = instances[0].x.shape[1], instances[0].x.dtype
    x = np.zeros((size, bucket.n, d), dtype)
    weight = np.zeros((size, bucket.n), dtype)
    exists = np.zeros((size, bucket.k), bool)
    if len({(len(each.x), each.k) for each in instances if each.weight is None}) == 1 and all(
        each.weight is None for each in instances
    ):
        # All alike: at once.
        n = len(instances[0].x)
        x[places, :n] = np.stack([each.x for each in instances])
        weight[places, :n] = 1
        exists[places, : instances[0].k] = True
        return Packed(x, weight, exists)
    for i, instance in zip(places, instances, strict=True):
        n = len(instance.x)
        x[i, :n] = instance.x
        weight[i, :n] = 1 if instance.weight is None else instance.weight
        exists[i, : instance.k] = True
    return Packed(x, weight, exists)
