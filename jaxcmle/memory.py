"""How much memory a pass may take at once, and what happens when that is too much.

Passes go over their work in tiles of so many bytes. Where the device tells how much memory it has,
tiles are a share of it. When memory runs out all the same, tiles are halved, from then on and for
the whole process, and the pass is repeated: answers do not depend on the tile. Where several
processes work as one, all must make the same steps: tiles are the same whatever the device has, and
are not halved.

Sizes are read while programs are traced: after a change, all programs are compiled anew.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.core import Tracer

__all__ = [
    "OutOfMemoryError",
    "SmallerTilesWarning",
    "halved",
    "pair_bytes",
    "reset",
    "tile_bytes",
    "within",
]

T = TypeVar("T")

# On the CPU a tile is to fit into a cache, whatever the memory.
CPU_TILE = 2**21
# Elsewhere: a share of the memory, between limits; and what it is where the device does not tell.
TILE_SHARE, TILE_LIMITS, TILE = 64, (2**24, 2**30), 2**27
PAIR_SHARE, PAIR_LIMITS, PAIR = 32, (2**25, 2**31), 2**28
# Tiles are not halved any further than to this.
LEAST = 2**15

_lock = threading.Lock()
_halvings = 0


class SmallerTilesWarning(UserWarning):
    """Memory ran out: from now on passes go in smaller tiles, and take somewhat longer."""


class OutOfMemoryError(MemoryError):
    """Memory runs out even with the smallest tiles."""


def tile_bytes() -> int:
    """Return the bytes that one tile of work may take."""
    device = _device()
    if device.platform == "cpu":
        return halved(CPU_TILE)
    return halved(_share(device, TILE_SHARE, TILE_LIMITS, TILE))


def pair_bytes(given: int | None = None) -> int:
    """Return the bytes that a pass over all pairs may take, where the user has given none."""
    if given is None:
        given = _share(_device(), PAIR_SHARE, PAIR_LIMITS, PAIR)
    return halved(int(given))


def within(work: Callable[[], T]) -> T:
    """Return what some work gives; when memory runs out, repeat it with smaller tiles.

    Raises:
        OutOfMemoryError: the tiles are as small as they get, or other processes would not know.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcmle import memory
        >>> memory.within(lambda: jnp.arange(3).sum().item())
        3
    """
    while True:
        before = _halvings
        try:
            result = work()
            # What is traced takes no memory yet, and cannot be waited for.
            if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(result)):
                jax.block_until_ready(result)
            return result
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            message = str(error).strip().partition("\n")[0]
        # Not within `except`: the error holds on to all that the work has allocated.
        _halve(before, message)


def reset() -> None:
    """Forget that memory has run out."""
    global _halvings
    with _lock:
        if _halvings:
            _halvings = 0
            jax.clear_caches()


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OutOfMemoryError):
        return False
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _halve(before: int, message: str) -> None:
    """Halve the tiles, unless another thread has done so since `before`."""
    global _halvings
    with _lock:
        if _halvings != before:
            return
        several = jax.process_count() > 1
        if several or tile_bytes() <= LEAST:
            even = "in one of several processes" if several else "even"
            raise OutOfMemoryError(
                f"out of memory {even} with tiles of {tile_bytes():,} bytes ({message}): use fewer "
                "points or clusters at once, float32 instead of float64, or devices with more "
                "memory"
            )
        _halvings += 1
        jax.clear_caches()
        warnings.warn(
            f"out of memory ({message}): repeated with tiles of {tile_bytes():,} bytes, half as "
            "many as before",
            SmallerTilesWarning,
            stacklevel=4,
        )


def halved(size: int) -> int:
    """Return what is left of a tile of so many bytes, after memory has run out or not."""
    return max(min(size, LEAST), size >> _halvings)


def _share(device: Any, share: int, limits: tuple[int, int], otherwise: int) -> int:
    """Return a share of a device's memory, as a power of two."""
    tells = device.platform != "cpu" and jax.process_count() == 1
    stats = device.memory_stats() if tells else None
    most = (stats or {}).get("bytes_limit", 0)
    if not most:
        return otherwise
    low, high = limits
    size: int = min(max(most // share, low), high)
    return 1 << (size.bit_length() - 1)


def _device() -> Any:
    """Return the device that programs run on."""
    chosen: Any = jax.config.values["jax_default_device"]
    if chosen is None or isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen
