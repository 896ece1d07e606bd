"""Work on many instances, bucket by bucket and chunk by chunk, on all devices.

A chunk has a fixed capacity and is filled as far as there is something to fill it with, so that a
bucket has one program. Between chunks the host looks up: for progress, Ctrl-C and time limits.

On accelerators a chunk is spread over all local devices. A CPU is one device whatever its number of
cores, and a loop over small instances keeps one core busy: there, several threads work on chunks.
"""

import math
import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from jaxcmle import memory
from jaxcmle.solve.instances import Bucket, Instance, bucket_of
from jaxcmle.solve.progress import CtrlC, Progress

__all__ = [
    "Chunk",
    "Form",
    "Layout",
    "Watch",
    "capacity_of",
    "chunks_of",
    "each_first",
    "layout_of",
    "over_devices",
    "run_chunks",
    "spread",
]

# How the instances of a chunk are worked on: one after the other, or several at once, of which
# those that are finished make room for others.
Form = Literal["map", "lanes"]
AXIS = "devices"

# Points in a chunk: few enough on a CPU that the host can look up several times a second.
POINTS = {"cpu": 2**14}
POINTS_ELSEWHERE = 2**21
MOST_INSTANCES = {"cpu": 64}
MOST_ELSEWHERE = 4096
# How often the host looks up while it waits, in seconds.
LOOK_UP = 0.1

# Programs that have run, with their buckets.
_compiled: set[Any] = set()


class Layout(NamedTuple):
    """Where and how chunks run; hashable, as it is part of the programs.

    Attributes:
        form: how a device works on its instances.
        mesh: the devices.
        workers: threads that run chunks.
    """

    form: Form
    mesh: Mesh
    workers: int

    @property
    def devices(self) -> int:
        """How many devices a chunk is spread over."""
        return self.mesh.size


class Chunk(NamedTuple):
    """Instances of one bucket that run together: their places among all, and themselves."""

    bucket: Bucket
    places: list[int]
    instances: list[Instance]


class Watch:
    """Counts what is done, shows it, and tells when to stop."""

    def __init__(self, progress: Progress, seconds: float | None, total: int) -> None:
        """Begin to count, for so many seconds at most; None or infinity for no limit."""
        self._total, self._done, self._progress = total, 0, progress
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._ctrl_c = CtrlC()

    def __enter__(self) -> "Watch":
        """Listen for Ctrl-C."""
        self._ctrl_c.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave everything as it was."""
        self._ctrl_c.__exit__()
        self._progress.close()

    def stops(self) -> bool:
        """Tell whether somebody pressed Ctrl-C, or time is up."""
        return self._ctrl_c.pressed or time.monotonic() >= self._end

    def left(self) -> float | None:
        """Return the seconds that are left, None for no limit."""
        left = max(self._end - time.monotonic(), 0.0)
        return left if math.isfinite(left) else None

    def add(self, count: int) -> None:
        """Report that so many more are done."""
        self._done += count
        self._progress.update(self._done, self._total, math.nan)


def layout_of(form: Form | None = None) -> Layout:
    """Return how to work on this machine: the backend decides, unless a form is given."""
    chosen = _default_device()
    devices = jax.local_devices() if chosen is None else [chosen]
    cpu = devices[0].platform == "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = max(1, (cores or 1) // len(devices)) if cpu else 1
    return Layout(form or ("map" if cpu else "lanes"), _mesh(tuple(devices)), workers)


@lru_cache
def _mesh(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


def capacity_of(bucket: Bucket, work: float = 1.0) -> int:
    """Return how many instances of a bucket a chunk has on each device.

    `work` is what there is to do for a point, where the search of `fit` has 1.
    """
    platform = jax.local_devices()[0].platform
    points = POINTS.get(platform, POINTS_ELSEWHERE) / work
    most = MOST_INSTANCES.get(platform, MOST_ELSEWHERE) / work
    return max(1, int(min(most, points // bucket.n)))


def chunks_of(
    instances: Sequence[Instance | None],
    alike: bool,
    layout: Layout,
    work: float = 1.0,
    clusters: int = 0,
) -> list[Chunk]:
    """Return instances cut into chunks, those with most work first; None is left out.

    `clusters` is how many all are made ready for, so that they share a program; by default each
    for about as many as it has.
    """
    buckets: dict[Bucket, list[int]] = {}
    for place, instance in enumerate(instances):
        if instance is not None:
            bucket = bucket_of(len(instance.x), max(instance.k, clusters), alike)
            buckets.setdefault(bucket, []).append(place)
    chunks = []
    for bucket in sorted(buckets, key=lambda bucket: (bucket.n * bucket.k, bucket), reverse=True):
        places = buckets[bucket]
        # Chunks of equal sizes, for all workers to have something to do.
        most = capacity_of(bucket, work) * layout.devices
        count = -(-len(places) // most)
        if len(places) > count:
            count = -(-count // layout.workers) * layout.workers
        for part in np.array_split(np.array(places), min(count, len(places))):
            own = part.tolist()
            chunks.append(Chunk(bucket, own, [instances[i] for i in own]))
    return chunks


def run_chunks(
    chunks: Sequence[Chunk],
    run: Callable[[Chunk], Any],
    program: Hashable,
    layout: Layout,
    watch: Watch,
    keep: Callable[[Any], None] = lambda _: None,
) -> list[Any]:
    """Return what comes of the chunks, as they are done.

    When the watch says to stop, chunks that have begun are finished. A second Ctrl-C raises at
    once.

    Args:
        chunks: what to do, about in this order.
        run: does a chunk, in any thread.
        program: what a compiled program depends on beside the bucket. As long as that of a bucket
            has not been compiled, it has one worker: two would compile it twice. Others turn to
            other buckets.
        layout: how many workers there are.
        watch: tells when to stop.
        keep: gets what comes of each chunk, in this thread.
    """
    results: list[Any] = []
    run = _with_settings(run)
    waiting = list(chunks)
    running: dict[Future[Any], Chunk] = {}
    pool = ThreadPoolExecutor(layout.workers)

    def next_chunk() -> Chunk | None:
        busy = {chunk.bucket for chunk in running.values()}
        for i, chunk in enumerate(waiting):
            if chunk.bucket not in busy or (program, chunk.bucket) in _compiled:
                return waiting.pop(i)
        return None

    try:
        while running or (waiting and not watch.stops()):
            while len(running) < layout.workers and not watch.stops():
                chunk = next_chunk()
                if chunk is None:
                    break
                running[pool.submit(run, chunk)] = chunk
            # Not without end: a signal is only seen between two steps of the interpreter.
            done, _ = wait(running, timeout=LOOK_UP, return_when=FIRST_COMPLETED)
            for future in done:
                chunk = running.pop(future)
                found = future.result()
                _compiled.add((program, chunk.bucket))
                results.append(found)
                keep(found)
                watch.add(len(chunk.places))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return results


def _default_device() -> Any:
    """Return the device that the user has chosen, or None."""
    chosen: Any = jax.config.values["jax_default_device"]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def _with_settings(run: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
    """Return the function for other threads: what this one has set by `with` is not theirs."""
    double = jnp.result_type(float) == jnp.float64
    device = _default_device()

    def wrapped(chunk: Chunk) -> Any:
        with jax.enable_x64(double), jax.default_device(device):
            return memory.within(lambda: run(chunk))

    return wrapped


def over_devices(function: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Return a function of stacks, counts `[devices]` and what all share, on every device.

    Each device gets its part of the leading axis of the stacks, and its own count; nothing is
    exchanged between them. One device takes the same way as several, and so rounds alike.
    """
    along, same = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(
        lambda stack, counts, shared: function(stack, counts[0], shared),
        mesh=layout.mesh,
        in_specs=(along, along, same),
        out_specs=along,
        check_vma=False,
    )


def spread(count: int, capacity: int, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return how many instances each device gets, and where each is in the stack of all."""
    devices = layout.devices
    counts = np.full(devices, count // devices, np.int32)
    counts[: count % devices] += 1
    places = [device * capacity + i for device in range(devices) for i in range(counts[device])]
    return counts, np.array(places)


def each_first(function: Callable[[Any], Any], stack: Any, count: Array) -> Any:
    """Apply a function to the first `count` entries of a stack, one after the other.

    The others cost nothing, and come out as zeros.
    """
    size = jax.tree.leaves(stack)[0].shape[0]
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack)
    shapes = jax.eval_shape(function, one)
    results = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), shapes)

    def body(i: Array, results: Any) -> Any:
        result = function(jax.tree.map(lambda leaf: leaf[i], stack))
        return jax.tree.map(lambda all_, new: all_.at[i].set(new), results, result)

    return lax.fori_loop(jnp.int32(0), count, body, results)
