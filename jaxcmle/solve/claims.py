"""From candidates to a solution, and to what is claimed of it."""

import dataclasses
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxcmle import memory
from jaxcmle.candidates import grids
from jaxcmle.candidates.seeding import seed
from jaxcmle.problem.bounds import with_certificate
from jaxcmle.problem.placement import (
    Placed,
    everywhere,
    from_first,
    on_one_device,
    placement_of,
)
from jaxcmle.problem.types import WKM, Guarantee, Mixture, Solution, Status
from jaxcmle.proof.certify import certify_while
from jaxcmle.proof.prove import Watch
from jaxcmle.refine.iterations import Limits, best_admissible, cem_stack
from jaxcmle.refine.sharded import cem_placed
from jaxcmle.solve.progress import Progress, ProgressOption
from jaxcmle.solve.sizes import refine_with_sizes
from jaxcmle.solve.sources import Setting

__all__ = [
    "MAX_FILLING",
    "Answers",
    "Candidates",
    "cost_if_admissible",
    "cost_of",
    "entry_of",
    "is_admissible",
]

# Clusters that are too small are filled up if this many points times places are enough.
MAX_FILLING = 10**8
# What the cost of a solution may be off by, in units of rounding.
ROUNDINGS = 4
# Iterations of CEM, at most.
MAX_ITER = 300


class Candidates(NamedTuple):
    """The best candidates, best first, and what each costs; fewer only if there are no more."""

    mixtures: Mixture
    costs: list[float]
    complete: bool


class Answers:
    """From mixtures to a solution and what is claimed of it. Costs are in the user's units."""

    def __init__(self, setting: Setting, max_points: int) -> None:
        """Begin with what is known of the instance alone."""
        self.setting, self.max_points = setting, max_points
        # The tight lower bound, where it was computed; and whether Ctrl-C or time cut that short.
        self.proved, self.cut_short = Guarantee(), False
        instance = setting.instance
        # No cluster of the minimum size is narrower: this floor changes no balanced partition.
        wkm = isinstance(setting.problem, WKM)
        self.min_variance = None if wkm else float(setting.variances(instance.y_low))
        self.options: dict[str, Any] = {
            "problem": setting.problem,
            "sample_weight": setting.weight,
            "min_size": instance.min_size,
        }

    def local(self, key: Array, n_starts: int) -> Solution:
        """Return the best of many starts of CEM, admissible if it can be had, with its gap."""
        points, weight, _, instance = self.setting[:4]

        def start(i: Array) -> Mixture:
            own = jax.random.fold_in(key, i)
            return seed(own, points, instance.n_clusters, sample_weight=weight)

        starts = jax.vmap(start)(jnp.arange(n_starts))
        solution = best_admissible(self._refined(starts))[0]
        if not is_admissible(solution):
            solution = self._filled_up(solution.mixture) or solution
        return self._bounded(solution)

    def _refined(self, starts: Mixture) -> Solution:
        """Return what CEM makes of each of a stack of starts; every device takes some of them."""
        points, weight, problem, instance, _, mesh = self.setting
        limits = Limits(MAX_ITER, instance.min_size, self.min_variance)
        if mesh is None:
            return memory.within(lambda: cem_stack(points, weight, starts, problem, limits))
        placement = placement_of(points, mesh).only_others()
        x, weight = everywhere((points, weight), mesh)
        placed = Placed(x, weight, len(points), placement)
        return on_one_device(memory.within(lambda: cem_placed(placed, starts, problem, limits)))

    def _filled_up(self, mixture: Mixture) -> Solution | None:
        """Return an admissible solution from a mixture with clusters that are too small."""
        points, weight, problem, instance = self.setting[:4]
        size = instance.min_size
        if weight is not None or instance.n * size > MAX_FILLING:
            return None
        return refine_with_sizes(points, mixture, int(size), problem, self.min_variance or 0.0)

    def _bounded(self, solution: Solution) -> Solution:
        bounded = with_certificate(
            self.setting.points,
            solution,
            max_points=self.max_points,
            mesh=self.setting.mesh,
            **self.options,
        )
        quick, tight = bounded.guarantee, self.proved
        if _float(tight.lower_bound) <= _float(quick.lower_bound):
            return bounded
        cost = float(solution.cost)
        rounding = ROUNDINGS * float(jnp.finfo(solution.cost.dtype).eps) * abs(cost)
        excess = max(cost + rounding - _float(tight.lower_bound), 0.0)
        gap = excess / self.setting.instance.total if math.isfinite(_float(quick.gap)) else math.inf
        known = dataclasses.replace(
            quick, lower_bound=tight.lower_bound, gap=gap, method=tight.method
        )
        return dataclasses.replace(solution, guarantee=known)

    def tight(self, solution: Solution, progress: ProgressOption, end: float) -> Solution:
        """Return the solution, or a better one, with the tight certificate, by a time."""
        target, total = self.setting.target, self.setting.instance.total
        tolerance = target.eta
        if target.eps is not None:
            # What may be between the cost and the bound, as a factor on the scale.
            on_scale = float(solution.cost) + self.setting.offset
            tolerance = on_scale * target.eps / (1 + target.eps) / total
        if not is_admissible(solution) or tolerance is None or not tolerance > 0:
            return solution
        watch = Watch(Progress(progress, "cells"), max(end - time.monotonic(), 0.0))
        known = certify_while(
            watch,
            self.setting.points,
            solution,
            min_variance=0.0,
            tolerance=tolerance,
            **self.options,
        )
        better, proved = known.better, dataclasses.replace(known, better=None)
        if better is None:
            # The gap is that of the exact cost: where one point costs millions of nats, the
            # rounding of the solution's own is more than the claim allows.
            better = dataclasses.replace(solution, guarantee=proved)
        # How far a proof comes in a given time differs between processes.
        found = from_first((better, proved, watch.stopped), self.setting.mesh)
        better, self.proved, self.cut_short = found
        return better

    def prove(self, solution: Solution) -> bool:
        """Tell whether the lower bound proves the claim for this solution."""
        gap, target = _float(solution.guarantee.gap), self.setting.target
        if target.eta is not None:
            return gap <= target.eta
        assert target.eps is not None
        # With a gap that is not finite nothing is proved, whatever the bound.
        bound = _float(solution.guarantee.lower_bound) + self.setting.offset
        excess = gap * self.setting.instance.total
        return math.isfinite(gap) and excess <= target.eps * bound

    def certified(self, solution: Solution) -> Solution:
        """Return the solution with the claim that its lower bound proves."""
        target, gap = self.setting.target, solution.guarantee.gap
        eta = gap if target.eta is None else target.eta
        return self._claiming(solution, "certificate", eta, 0.0)

    def with_claim(self, solution: Solution, claimed: bool) -> Solution:
        """Return the solution with its lower bound, and with the claim if there is one."""
        solution = self._bounded(solution)
        if not claimed:
            unclaimed = dataclasses.replace(solution.guarantee, kind="none")
            return dataclasses.replace(solution, guarantee=unclaimed)
        target, instance = self.setting.target, self.setting.instance
        eta = target.eta
        if target.eps is not None:
            # A factor on the scale amounts to so many nats per point in any units.
            on_scale = float(solution.cost) + self.setting.offset
            eta = max(0.0, on_scale * target.eps / (1 + target.eps) / instance.total)
        kind: Any = "deterministic" if target.delta == 0 else "probabilistic"
        return self._claiming(solution, kind, eta, target.delta)

    def _claiming(self, solution: Solution, kind: Any, eta: Any, delta: float) -> Solution:
        target, known = self.setting.target, solution.guarantee
        claim = Guarantee(
            kind=kind,
            lower_bound=known.lower_bound,
            gap=known.gap,
            min_size=known.min_size,
            method=known.method,
            eps=target.eps,
            eta=eta,
            delta=delta,
            scale=None if target.eps is None else self.setting.instance.scale,
        )
        return dataclasses.replace(solution, guarantee=claim)

    def tightened(self, incumbent: Solution) -> Setting:
        """Return the setting with what a solution tells of the best partition.

        That costs no more. WKM: so its spread is at most the cost less the entropy.
        """
        instance = self.setting.instance
        known = (cost_if_admissible(incumbent) + self.setting.offset) / instance.total
        instance = instance._replace(known_cost=known + 1e-4 * (abs(known) + instance.d))
        if isinstance(self.setting.problem, WKM):
            entropy = grids.least_entropy(instance.n_clusters, instance.balance)
            spread = (cost_if_admissible(incumbent) / instance.total - entropy) * (1 + 1e-4)
            spread = max(min(instance.spread_high, spread), instance.spread_low)
            instance = instance._replace(spread_high=spread)
        return self.setting._replace(instance=instance)

    def best(
        self, found: Candidates | None, incumbent: Solution | None, n_polish: int, restricted: bool
    ) -> Solution:
        """Polish the best candidates, and return what is `chosen` of all."""
        if found is None:
            assert incumbent is not None
            return incumbent
        first = jax.tree.map(lambda leaf: leaf[:n_polish], found.mixtures)
        stack = self._refined(first)
        polished = [entry_of(stack, i) for i in range(min(n_polish, len(found.costs)))]
        return self.chosen(found, polished, incumbent, restricted)

    def chosen(
        self,
        found: Candidates,
        polished: list[Solution],
        incumbent: Solution | None,
        restricted: bool,
    ) -> Solution:
        """Return the best admissible solution if the claim holds for it, else the best of all.

        The claim: among the candidates is one near enough that costs no more with some balanced
        partition, hence with the best balanced one for it, which costs no less than without that
        restriction. So an admissible solution keeps the claim if it costs no more than every
        candidate has been filled up to, and than every other one costs unrestricted.

        Of candidates that are not `restricted`, those of ABS, only the latter is known: points that
        were pruned wrongly are elsewhere. Then an admissible solution has to cost no more than any.
        """
        known = [] if incumbent is None else [incumbent]
        admissible = [solution for solution in known + polished if is_admissible(solution)]
        for i, cost in enumerate(found.costs):
            if cost >= min(map(cost_of, admissible), default=math.inf):
                break
            if i < len(polished) and is_admissible(polished[i]):
                continue
            filled = self._filled_up(entry_of(found.mixtures, i))
            if filled is None:
                break
            admissible.append(filled)
        else:
            if found.complete and restricted:
                return min(admissible, key=cost_of)
        instance = self.setting.instance
        slack = 1e-6 * (abs(found.costs[-1]) + instance.total * instance.d)
        limit = found.costs[i if restricted else 0] + slack
        enough = [solution for solution in admissible if cost_of(solution) <= limit]
        return min(enough or polished, key=cost_of)


def entry_of(stack: Any, i: int) -> Any:
    """Return one of a stack."""
    return jax.tree.map(lambda leaf: leaf[i], stack)


def is_admissible(solution: Solution) -> bool:
    """Tell whether every cluster of a solution has the minimum size."""
    return int(solution.status) in (Status.CONVERGED, Status.MAX_ITER)


def cost_of(solution: Solution) -> float:
    """Return what a solution costs, infinity instead of NaN."""
    cost = float(solution.cost)
    return cost if math.isfinite(cost) else math.inf


def cost_if_admissible(solution: Solution) -> float:
    """Return what a solution costs, infinity for one that is not admissible."""
    return cost_of(solution) if is_admissible(solution) else math.inf


def _float(value: Any) -> float:
    return float(value)
