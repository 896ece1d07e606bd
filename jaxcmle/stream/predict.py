"""Labels for all points of an array, a file or a stream."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcmle import memory, numerics
from jaxcmle.atomic import atomic_path
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import assign
from jaxcmle.problem.types import CMLE, Mixture, Problem, Solution
from jaxcmle.stream.kinds import is_streamed
from jaxcmle.stream.sources import Source, open_source
from jaxcmle.stream.survey import over_chunks

__all__ = ["predict"]


def predict(
    x: Any,
    model: Mixture | Solution,
    *,
    problem: Problem = CMLE(),
    out: str | os.PathLike[str] | None = None,
) -> np.ndarray:
    """Return the cheapest cluster of every point, also of more points than fit in memory.

    Args:
        x: points `[n, d]`; or, to be read in chunks, a `numpy.memmap`, the path of a `.npy` or
            Parquet file, or a function without arguments that returns a fresh iterator over arrays
            `[c, d]` each time.
        model: a mixture, or a solution that has one.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`: that which the model was fitted for.
        out: the path of a `.npy` file to write the labels to, chunk by chunk; it is there when all
            of them are. Default: labels are returned in memory, 4 bytes a point.

    Returns:
        int32 labels `[n]`, as `assign` gives them; with `out`, a read-only memmap of the file.

    Example:
        >>> import numpy as np, jaxcmle as jc
        >>> model = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [4.0]], variances=[1.0, 1.0])
        >>> jc.predict(np.array([[0.0], [3.9]]), model).tolist()
        [0, 1]
        >>> chunks = [np.array([[0.0], [3.9]]), np.array([[4.2]])]
        >>> jc.predict(lambda: iter(chunks), model).tolist()
        [0, 1, 1]
    """
    inputs.check_on_host("predict")
    problem = inputs.to_problem(problem)
    mixture = model.mixture if isinstance(model, Solution) else model
    if out is not None:
        _check_out(out, x)
    source = open_source(x) if is_streamed(x) else None

    def parts() -> Iterator[np.ndarray]:
        if source is None:
            yield np.asarray(assign(x, mixture, problem=problem))
        else:
            yield from _labels(source, mixture, problem)

    if out is None:
        return memory.within(lambda: np.concatenate(list(parts())))

    def write() -> None:
        with atomic_path(out) as temporary, open(temporary, "wb") as file:
            _write(file, parts())

    memory.within(write)
    labels: np.ndarray = np.load(out, mmap_mode="r")
    return labels


def _check_out(out: str | os.PathLike[str], x: Any) -> None:
    """Raise where labels must not go: above all, not in place of the points."""
    if Path(out).suffix != ".npy":
        raise ValueError(
            f"the name of the file for labels must end in .npy, got {os.fspath(out)!r}"
        )
    file = x if isinstance(x, str | os.PathLike) else getattr(x, "filename", None)
    if file is None or not os.path.exists(file) or not os.path.exists(out):
        return
    if os.path.samefile(file, out):
        raise ValueError(f"{os.fspath(out)} holds the points: write the labels elsewhere")


def _labels(source: Source, mixture: Mixture, problem: Problem) -> Iterator[np.ndarray]:
    """Yield the labels of every chunk."""
    mixture = inputs.to_mixture(mixture, source.d, source.dtype, problem, stack=False)
    run = partial(_chunk_labels, mixture=mixture, problem=problem)
    # Without a shift, which would take a pass of its own: differences are as exact as with it.
    for chunk, (labels, bad, row) in over_chunks(source, None, run):
        if bad:
            raise ValueError(
                f"x holds NaN or infinity in row {chunk.first + int(row)}; drop or impute such rows"
            )
        yield labels[: chunk.length]


@jax.jit
def _chunk_labels(
    x: Array, weight: Array, mixture: Mixture, problem: Problem
) -> tuple[Array, Array, Array]:
    k = mixture.weights.shape[0]
    tiles = x.T[None] if numerics.is_small(k, x.shape[1]) else numerics.point_tiles(x, k)
    labels = numerics.assign_directly(tiles, problem.coefficients(mixture), len(x))[1]
    bad = ~jnp.isfinite(x).all(axis=1) & weight.astype(bool)
    return labels, bad.any(), jnp.argmax(bad)


def _write(file: BinaryIO, parts: Iterator[np.ndarray]) -> None:
    """Write labels as `.npy`, without knowing beforehand how many there are."""
    n = 0
    _write_header(file, 0)
    begin = file.tell()
    for labels in parts:
        file.write(np.ascontiguousarray(labels, np.dtype("<i4")).tobytes())
        n += len(labels)
    file.seek(0)
    # NumPy leaves room for the number to grow.
    _write_header(file, n)
    if file.tell() != begin:
        raise RuntimeError("this version of NumPy writes .npy headers of different lengths")


def _write_header(file: BinaryIO, n: int) -> None:
    header = {"descr": "<i4", "fortran_order": False, "shape": (n,)}
    np.lib.format.write_array_header_1_0(file, header)
