"""What counts as a stream of points, and who takes care of it.

`cem` and `fit` take streams, too, but what does the work for them is built on both. So they ask
here whether x is a stream, and hand over to the function that has been entered for them.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["enter", "is_streamed", "streamed"]

_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def is_streamed(x: Any) -> bool:
    """Tell whether x is read in chunks: a memmap, a path, or a function that returns chunks."""
    if isinstance(x, Iterator):
        raise TypeError(
            "x is an iterator, which can be read only once: pass a function without arguments that "
            "returns a fresh one each time"
        )
    return isinstance(x, np.memmap | str | os.PathLike) or callable(x)


def enter(name: str, function: Callable[..., Any]) -> None:
    """Let the function do for streams what the function of this name does for arrays."""
    _FUNCTIONS[name] = function


def streamed(name: str, mesh: Any) -> Callable[..., Any]:
    """Return the function that does it for streams, which no mesh can have."""
    if mesh is not None:
        raise ValueError(
            "points that are read in chunks go through one device at a time: leave mesh out, or "
            "pass an array"
        )
    return _FUNCTIONS[name]
