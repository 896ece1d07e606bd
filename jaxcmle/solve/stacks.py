"""A chunk of instances as compiled passes take it, and a function applied to each of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array, lax

from jaxcmle import memory
from jaxcmle.solve.batches import Chunk, Layout, capacity_of, each_first, over_devices, spread
from jaxcmle.solve.instances import Bucket, pack

__all__ = ["Batch", "over_instances"]


class Batch:
    """A chunk whose instances have the same number of clusters, as padded stacks.

    Attributes:
        bucket: what they are padded to.
        size: the length of the stacks.
        counts: how much of them counts, on each device.
        places: where each instance is in the stacks.
        packed: the instances.
    """

    def __init__(self, chunk: Chunk, layout: Layout) -> None:
        """Pack a chunk."""
        # All have the same number of clusters: there is none to pad.
        self.bucket = Bucket(chunk.bucket.n, chunk.instances[0].k)
        capacity = capacity_of(self.bucket)
        self.size = capacity * layout.devices
        self.counts, self.places = spread(len(chunk.instances), capacity, layout)
        self.packed = pack(chunk.instances, self.bucket, self.places, self.size)

    def stack(self, values: Any, dtype: Any = None) -> Any:
        """Return values of the instances, in their places."""
        each = np.asarray(values, self.packed.x.dtype if dtype is None else dtype)
        result = np.zeros((self.size, *each.shape[1:]), each.dtype)
        result[self.places] = each
        return result


def over_instances(
    one: Callable[[Any, Any], Any], stack: Any, counts: Any, shared: Any, layout: Layout, cost: int
) -> Any:
    """Apply a function of an instance and of what all share; `cost` is the bytes that it takes."""

    def local(stack: Any, count: Array, shared: Any) -> Any:
        if layout.form == "map":
            return each_first(lambda given: one(given, shared), stack, count)
        at_once = max(1, memory.pair_bytes() // cost)
        return lax.map(lambda given: one(given, shared), stack, batch_size=at_once)

    return over_devices(local, layout)(stack, counts, shared)
