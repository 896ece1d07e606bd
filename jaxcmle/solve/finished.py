"""Chunks that are done, in a checkpoint: they are not run again."""

from collections.abc import Sequence

import numpy as np

from jaxcmle.problem.types import Status
from jaxcmle.solve.answers import Part
from jaxcmle.solve.batches import Chunk
from jaxcmle.solve.checkpoint import Checkpoint

__all__ = ["Finished"]


class Finished:
    """Answers as they come, and those that a checkpoint has."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Begin with what a checkpoint has."""
        self._checkpoint = checkpoint
        saved = checkpoint.get("parts") or ()
        self.parts = [Part(list(places), solution) for places, solution in saved]

    def rest(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks without the instances that are done."""
        done = {place for part in self.parts for place in part.places}
        left = []
        for chunk in chunks:
            pairs = zip(chunk.places, chunk.instances, strict=True)
            waiting = [(place, instance) for place, instance in pairs if place not in done]
            if waiting:
                places, instances = zip(*waiting, strict=True)
                left.append(chunk._replace(places=list(places), instances=list(instances)))
        return left

    def keep(self, part: Part, late: bool) -> None:
        """Take the answers of a chunk, unless it was cut short, and save them when it is time.

        `late` is whether the call is to stop: then a bad answer may be one that was cut short.
        """
        status = np.asarray(part.solution.status)
        if (status == Status.INTERRUPTED).any() or (late and (status != Status.CONVERGED).any()):
            return
        self.parts.append(part)
        self._checkpoint.save_if_due(parts=tuple(self.parts))

    def save(self) -> None:
        """Save what there is."""
        self._checkpoint.save(parts=tuple(self.parts))
