"""Where streamed points come from, and how they are cut into chunks.

Whatever the source, chunks are of one length, the last one padded, so that one program serves all.
A chunk is a copy in the dtype of the arithmetic, in memory that the device may take over as it is;
or, of a file that has that dtype already, the file itself.
"""

import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcmle.problem import inputs

__all__ = ["Chunk", "Source", "open_source"]

# Bytes of a chunk: a few of them are in memory at once, and a program's scratch space is a few
# times as large. More would gain nothing, and above 32 MiB of scratch space the C library asks the
# system for it anew every time.
CHUNK_BYTES = 2**22
# Rows of a chunk are a multiple of this, or of the least where points are so wide that fewer fit.
ROWS = 4096
LEAST_ROWS = 64
ALIGNMENT = 64
# Chunks that are in use at once: one being filled, one at work, two waiting, one being looked at.
BUFFERS = 5


class Chunk(NamedTuple):
    """Some of the points.

    Attributes:
        first: the index of its first point among all.
        length: how many points it has; the rows after them are padding.
        x: `[rows, d]`, less the shift that was asked for.
        weight: `[rows]`: booleans where all points weigh the same, else numbers; none for padding.
    """

    first: int
    length: int
    x: np.ndarray
    weight: np.ndarray


# Rows as they come: the points, and their weights if there are any.
_Part = tuple[np.ndarray, np.ndarray | None]


class Source:
    """Points that can be read in chunks, again and again.

    Attributes:
        d: features.
        n: points; None as long as nobody has counted them.
        dtype: what chunks have, and all arithmetic.
        raw: the dtype that the data itself has.
        weighted: whether points have weights.
        rows: of a chunk.
    """

    def __init__(
        self,
        parts: Callable[[int], Iterable[_Part]],
        d: int,
        raw: np.dtype,
        n: int | None,
        weighted: bool,
        *,
        lasting: bool = False,
    ) -> None:
        """Take a function that yields the rows in order, in parts of about so many.

        `lasting` says that what it yields is not written to later on.
        """
        self._parts, self._lasting = parts, lasting
        self.d, self.n, self.raw, self.weighted = d, n, raw, weighted
        self.dtype = _float_dtype(raw)
        fit = CHUNK_BYTES // (d * self.dtype.itemsize)
        step = ROWS if fit >= ROWS else LEAST_ROWS
        self.rows = max(fit // step, 1) * step
        if n is not None:
            self.rows = min(self.rows, -(-n // step) * step)

    def chunks(self, shift: np.ndarray | None = None) -> Iterator[Chunk]:
        """Yield all chunks in order.

        The memory of a chunk is used again `BUFFERS` chunks later: new memory takes the system as
        long as to fill it.
        """
        move = None if shift is None or not shift.any() else shift.astype(self.dtype)
        as_it_is = self._lasting and not self.weighted and move is None
        first, filled = 0, 0
        buffers = itertools.cycle([self._blank() for _ in range(BUFFERS)])
        x, weight = next(buffers)
        everywhere = np.ones(self.rows, bool)
        for rows, weights in self._parts(self.rows):
            taken = 0
            whole = filled == 0 and len(rows) == self.rows and rows.dtype == self.dtype
            if as_it_is and whole and rows.flags.c_contiguous:
                yield Chunk(first, self.rows, np.asarray(rows), everywhere)
                first += self.rows
                continue
            while taken < len(rows):
                step = min(len(rows) - taken, self.rows - filled)
                here, there = slice(filled, filled + step), slice(taken, taken + step)
                self._copy(x[here], rows[there], move)
                weight[here] = True if weights is None else weights[there]
                filled, taken = filled + step, taken + step
                if filled == self.rows:
                    self._check_count(first + filled, at_end=False)
                    yield Chunk(first, filled, x, weight)
                    first, filled = first + filled, 0
                    # Not the same: the device may still be at work on that.
                    x, weight = next(buffers)
        n = first + filled
        self._check_count(n)
        if filled:
            x[filled:] = 0
            weight[filled:] = 0
            yield Chunk(first, filled, x, weight)
        self.n = n

    def load(self) -> _Part:
        """Return all points at once, and their weights; for few of them."""
        parts = [
            (part.x[: part.length].copy(), part.weight[: part.length].copy())
            for part in self.chunks()
        ]
        x = np.concatenate([part[0] for part in parts])
        return x, np.concatenate([part[1] for part in parts]) if self.weighted else None

    def _blank(self) -> tuple[np.ndarray, np.ndarray]:
        x = _aligned((self.rows, self.d), self.dtype)
        weight = np.zeros(self.rows, self.dtype if self.weighted else bool)
        return x, weight

    def _copy(self, out: np.ndarray, rows: np.ndarray, move: np.ndarray | None) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(out, rows, casting="unsafe")
            if move is not None:
                # Exact where it is not 0: see `numerics.prepare`.
                np.subtract(out, move, out=out)

    def _check_count(self, n: int, *, at_end: bool = True) -> None:
        """Raise where so many points, all of them or the first, are not those of earlier times."""
        if n == 0 and self.n is None:
            raise ValueError("x has no points: the function returned no chunk with rows in it")
        if self.n is not None and (n != self.n if at_end else n > self.n):
            now = f"{n} now" if at_end else f"more now, {n} or beyond"
            raise ValueError(
                f"x gave {self.n} points the first time and {now}: the function must return a "
                "fresh iterator over the same points each time it is called"
            )


def open_source(x: Any, sample_weight: Any = None) -> Source:
    """Return the source of a memmap, of the path of a `.npy` or Parquet file, or of a function."""
    if isinstance(x, str | os.PathLike):
        return _of_path(Path(os.fspath(x)), sample_weight)
    if callable(x):
        return _of_function(x, sample_weight)
    return _of_array(x, sample_weight)


def _of_array(x: np.ndarray, sample_weight: Any, name: str = "x") -> Source:
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(
            f"{name} must have shape [n, d] with at least one point and one feature, got {x.shape}"
        )
    _check_dtype(x.dtype, name)
    n, d = x.shape
    weight = _to_weight(sample_weight, n)

    def parts(rows: int) -> Iterator[_Part]:
        for first in range(0, n, rows):
            here = slice(first, first + rows)
            yield x[here], None if weight is None else weight[here]
            # Not the last ones: the device may still have to read them, and would map them again.
            before = slice(max(first - BUFFERS * rows, 0), max(first - (BUFFERS - 1) * rows, 0))
            _release(x, before)
            if weight is not None:
                _release(weight, before)

    return Source(parts, d, x.dtype, n, weight is not None, lasting=True)


def _of_path(path: Path, sample_weight: Any) -> Source:
    if path.suffix in (".parquet", ".pq"):
        return _of_parquet(path, sample_weight)
    if path.suffix != ".npy":
        raise ValueError(
            f"{path}: x is streamed from .npy and .parquet files, and this is neither; load it, or "
            "pass a function that returns an iterator over arrays [c, d]"
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file with numbers in it: {error}") from error
    return _of_array(array, sample_weight, str(path))


def _of_parquet(path: Path, sample_weight: Any) -> Source:
    try:
        from pyarrow import ArrowInvalid, parquet, types
    except ImportError as error:
        raise ImportError(
            f"{path}: to read Parquet install pyarrow: pip install 'jaxcmle[parquet]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            schema, n = file.schema_arrow, file.metadata.num_rows
    except ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error
    for field in schema:
        number = types.is_floating(field.type) or types.is_integer(field.type)
        if not number and not types.is_boolean(field.type):
            raise TypeError(
                f"{path}: column {field.name!r} holds {field.type}, and no numbers; pass a function"
                " that returns an iterator over arrays with the columns you want"
            )
    kinds = [np.dtype(field.type.to_pandas_dtype()) for field in schema]
    if not kinds or n == 0:
        raise ValueError(
            f"{path} must have at least one row and one column, got {n} and {len(kinds)}"
        )
    # Whole numbers become the default float; a file of float32 stays that.
    floats = all(kind.kind == "f" for kind in kinds)
    raw = np.result_type(*kinds) if floats else np.dtype(np.float64)
    weight = _to_weight(sample_weight, n)

    def parts(rows: int) -> Iterator[_Part]:
        first = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=rows):
                x = np.empty((batch.num_rows, len(kinds)), raw)
                for j, column in enumerate(batch.columns):
                    x[:, j] = column.to_numpy(zero_copy_only=False)
                here = slice(first, first + batch.num_rows)
                first = here.stop
                yield x, None if weight is None else weight[here]

    return Source(parts, len(kinds), raw, n, weight is not None)


def _of_function(function: Callable[[], Iterable[Any]], sample_weight: Any) -> Source:
    if sample_weight is not None and callable(sample_weight):
        raise TypeError("sample_weight must be an array; or let the chunks be pairs (x, weight)")

    last: Iterator[Any] | None = None

    def pieces() -> Iterator[tuple[np.ndarray, Any]]:
        nonlocal last
        try:
            iterator = iter(function())
        except TypeError as error:
            raise TypeError(
                f"x must be a function without arguments that returns an iterator over arrays "
                f"[c, d], and calling it gave: {error}"
            ) from error
        if iterator is last:
            raise ValueError(
                "x returned the same iterator twice, which can be read only once: the function "
                "must return a fresh one over the same points each time it is called"
            )
        last = iterator
        for piece in iterator:
            x, own = piece if isinstance(piece, tuple) and len(piece) == 2 else (piece, None)
            x = np.asarray(inputs.to_array(x, "a chunk of x"))
            if x.ndim != 2 or x.shape[1] == 0:
                raise ValueError(f"every chunk of x must have shape [c, d], got {x.shape}")
            yield x, own

    first = next(pieces(), None)
    if first is None:
        raise ValueError("x has no points: the function returned no chunk")
    d, raw, paired = first[0].shape[1], first[0].dtype, first[1] is not None
    if paired and sample_weight is not None:
        raise ValueError("give weights in the chunks or as sample_weight, not both")
    whole = None if sample_weight is None else _to_weight(sample_weight, None)
    dtype = _float_dtype(raw)

    def parts(rows: int) -> Iterator[_Part]:
        row = 0
        for x, own in pieces():
            if x.shape[1] != d:
                raise ValueError(
                    f"every chunk of x must have {d} features, as the first one has, got "
                    f"{x.shape[1]} in the chunk that begins with row {row}"
                )
            if x.dtype.kind == "f" and _float_dtype(x.dtype).itemsize > dtype.itemsize:
                raise TypeError(
                    f"the first chunk of x holds {raw}, and the one that begins with row {row} "
                    f"{x.dtype}, which has more digits: all of them must have one dtype"
                )
            if (own is not None) != paired:
                raise ValueError(
                    "either all chunks are pairs (x, weight) or none is; the chunk that begins "
                    f"with row {row} differs from the first"
                )
            weight = None
            if paired:
                weight = np.asarray(inputs.to_array(own, "the weights of a chunk"))
                if weight.shape != x.shape[:1]:
                    raise ValueError(
                        f"the weights of a chunk must have one for each of its {len(x)} points, "
                        f"got {weight.shape}"
                    )
            elif whole is not None:
                if row + len(x) > len(whole):
                    raise _wrong_length(whole.shape, f"more than {len(whole)}")
                weight = whole[row : row + len(x)]
            row += len(x)
            yield x, weight
        if whole is not None and row != len(whole):
            raise _wrong_length(whole.shape, str(row))

    return Source(parts, d, raw, None, paired or whole is not None)


def _to_weight(sample_weight: Any, n: int | None) -> np.ndarray | None:
    """Return the weights, or a memmap of them; None stays None."""
    if sample_weight is None:
        return None
    weight = sample_weight
    if isinstance(weight, str | os.PathLike):
        weight = np.load(weight, mmap_mode="r", allow_pickle=False)
    if not isinstance(weight, np.memmap):
        weight = np.asarray(inputs.to_array(weight, "sample_weight"))
    if weight.ndim != 1 or (n is not None and len(weight) != n):
        raise _wrong_length(weight.shape, "n" if n is None else str(n))
    _check_dtype(weight.dtype, "sample_weight")
    return weight


def _float_dtype(raw: np.dtype) -> np.dtype:
    """Return the dtype that arithmetic has, in the order of bytes of this machine."""
    return np.dtype(inputs.float_dtype(raw.newbyteorder("=")))


def _wrong_length(shape: tuple[int, ...], n: str) -> ValueError:
    return ValueError(f"sample_weight must have one weight per point, of which x has {n}: {shape}")


def _check_dtype(dtype: np.dtype, name: str) -> None:
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if dtype.kind in "mMOVSU" or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise TypeError(f"{name} must hold real numbers, got dtype {dtype}")


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return memory that JAX takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)


def _release(array: np.ndarray, rows: slice) -> None:
    """Let go of the pages of a memmap that have been read: they would count as memory in use.

    Not for a mapping that is private: there, what was written is nowhere else.
    """
    mapping = getattr(array, "_mmap", None)
    if not isinstance(mapping, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    if getattr(array, "mode", "c") not in ("r", "r+", "w+"):
        return
    start, length = 0, len(mapping)
    part = array[rows]
    if part.flags.c_contiguous and part.size:
        base = np.frombuffer(mapping, np.uint8).ctypes.data
        begin = part.ctypes.data - base
        start = begin - begin % mmap.PAGESIZE
        length = min(begin + part.nbytes, len(mapping)) - start
    mapping.madvise(mmap.MADV_DONTNEED, start, length)
