"""One of many instances with what compiled passes found out about it, and what that proves."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jaxcmle.problem.types import Guarantee, Mixture, Solution, Status
from jaxcmle.solve.claims import MAX_FILLING, Answers, Candidates, entry_of, is_admissible
from jaxcmle.solve.instances import Failure
from jaxcmle.solve.sizes import refine_on_host
from jaxcmle.solve.sources import Setting

__all__ = ["Known"]


class Known(Answers):
    """The answers for an instance whose lower bound, starts and candidates are there already."""

    def __init__(self, setting: Setting, bound: float) -> None:
        """Begin with the lower bound."""
        super().__init__(setting, len(setting.points))
        self.bound = bound
        self.filled: dict[bytes, Solution] = {}

    def local(self, best: Solution) -> Solution:  # type: ignore[override]
        """Return the best of many starts, if it can be had admissible, with its gap or claim."""
        solution = self._unpadded(best)
        if not is_admissible(solution):
            solution = self._filled_up(solution.mixture) or solution
        solution = self._bounded(solution)
        self.filled.clear()
        return self.certified(solution) if self.prove(solution) else solution

    def answer(
        self,
        found: tuple[Mixture, Solution, np.ndarray],
        incumbent: Solution | None,
        finished: bool,
    ) -> Solution | Failure:
        """Return the best solution that the claim holds for.

        Of candidates, best first, the first of which are refined, and what they cost on the scale.
        """
        mixtures, refined, costs = found
        finite = [float(cost) - self.setting.offset for cost in costs if cost < np.inf]
        if not finite:
            error = "no candidate has a finite cost: rescale x, or enable float64"
            return Failure(Status.NONFINITE, error)
        count = min(len(refined.cost), len(finite))
        polished = [self._unpadded(entry_of(refined, i)) for i in range(count)]
        candidates = Candidates(mixtures, finite, len(finite) < len(costs))
        solution = self.chosen(candidates, polished, incumbent, restricted=True)
        self.filled.clear()
        return self.with_claim(solution, True) if finished else self.stopped(solution)

    def stopped(self, solution: Solution) -> Solution:
        """Return a solution that Ctrl-C came before, without a claim."""
        status: Any = np.int32(Status.INTERRUPTED)
        return dataclasses.replace(self.with_claim(solution, False), status=status)

    def _unpadded(self, solution: Solution) -> Solution:
        return Solution(
            mixture=jax.tree.map(np.copy, solution.mixture),
            labels=solution.labels[: len(self.setting.points)].copy(),
            cost=solution.cost,
            status=solution.status,
            n_iter=solution.n_iter,
        )

    def _bounded(self, solution: Solution) -> Solution:
        instance, weight = self.setting.instance, self.setting.weight
        sizes = np.bincount(solution.labels, weight, instance.n_clusters)
        rounding = 16 * np.finfo(self.setting.points.dtype).eps
        gap = max(float(solution.cost) - self.bound, 0.0) / instance.total
        if not (sizes.min() >= instance.min_size * (1 - rounding) and math.isfinite(gap)):
            gap = math.inf
        guarantee = Guarantee(
            kind="certificate",
            lower_bound=self.bound,
            gap=gap,
            min_size=instance.min_size,
            method="pairs",
        )
        return dataclasses.replace(solution, guarantee=guarantee)

    def _filled_up(self, mixture: Mixture) -> Solution | None:
        points, _, problem, instance = self.setting[:4]
        n, size, floor = instance.n, int(instance.min_size), self.min_variance or 0.0
        if instance.weighted or n * size > MAX_FILLING:
            return None
        x: Any = points
        return refine_on_host(x, n, mixture, size, problem, floor, self.filled)
