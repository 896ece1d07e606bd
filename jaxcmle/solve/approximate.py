"""The guaranteed search: a certificate where one suffices, the candidates of a plan otherwise."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxcmle import memory
from jaxcmle.candidates import grids
from jaxcmle.candidates.choices import VarianceGrid
from jaxcmle.candidates.claim import Scale, Target, measure, to_scale, to_target
from jaxcmle.candidates.plan import Plan
from jaxcmle.candidates.planning import Algorithm, make_plan, to_grid
from jaxcmle.candidates.scoring import NO_PRUNING, PRUNING, Pruning
from jaxcmle.candidates.seeding import seed
from jaxcmle.problem import inputs
from jaxcmle.problem.bounds import with_certificate
from jaxcmle.problem.pairs import MAX_POINTS
from jaxcmle.problem.placement import (
    Placed,
    agreed,
    everywhere,
    from_first,
    is_placed,
    on_host,
    on_one_device,
    place,
    placement_of,
    tells_lost_processes,
)
from jaxcmle.problem.types import CMLE, WKM, Guarantee, Mixture, Problem, Solution, Status
from jaxcmle.proof.certify import certify
from jaxcmle.refine.iterations import Limits, best_admissible, cem_stack
from jaxcmle.refine.sharded import cem_placed
from jaxcmle.solve.advice import too_many
from jaxcmle.solve.checkpoint import Checkpoint, PathOption, instance_parts, open_checkpoint
from jaxcmle.solve.padding import for_all_points
from jaxcmle.solve.progress import CtrlC, Progress, ProgressOption
from jaxcmle.solve.sizes import refine_with_sizes
from jaxcmle.solve.sources import (
    Setting,
    Source,
    Step,
    all_subsets,
    paper_candidates,
    repetitions,
)
from jaxcmle.solve.walks import pruned_walks

__all__ = [
    "MAX_FILLING",
    "N_KEPT",
    "Answers",
    "Candidates",
    "TooManyCandidatesError",
    "approximate",
    "cost_of",
    "entry_of",
    "is_admissible",
]

# What the grids aim at when nothing is claimed and nothing was asked for.
DEFAULT_ETA = 1.0
DEFAULT_EPS = 0.5
# Candidates kept, at least: where small clusters pay, balanced ones are looked for among them.
N_KEPT = 64
# Clusters that are too small are filled up if this many points times places are enough.
MAX_FILLING = 10**8
# What the cost of a solution may be off by, in units of rounding.
ROUNDINGS = 4
# Iterations of CEM, at most.
MAX_ITER = 300


class TooManyCandidatesError(ValueError):
    """A guarantee takes more candidates than were allowed.

    Attributes:
        plan: what it takes.
        solution: the best found before that was known, with its certificate; or None.
    """

    def __init__(self, message: str, plan: Plan, solution: Solution | None) -> None:
        """Keep what was found out."""
        super().__init__(message)
        self.plan = plan
        self.solution = solution


@tells_lost_processes
def approximate(
    x: Any,
    n_clusters: int,
    *,
    eps: float | None = None,
    eta: float | None = None,
    delta: float = 0.1,
    balance: float | None = None,
    algorithm: Algorithm = "sampling",
    scale: Scale = "tight",
    grid: VarianceGrid = "reduced",
    problem: Problem = CMLE(),
    key: Array | None = None,
    sample_weight: Any = None,
    max_candidates: float = 10**8,
    certificate: bool = True,
    guarantee: bool = True,
    n_starts: int = 64,
    n_polish: int = 16,
    prune: bool | Pruning = True,
    time_limit: float | None = None,
    progress: ProgressOption = None,
    max_points: int = MAX_POINTS,
    checkpoint: PathOption = None,
    mesh: Mesh | None = None,
) -> Solution:
    r"""Return a solution that is provably near the best one with balanced clusters.

    Balanced are partitions whose clusters weigh at least $N / f$. The claim is a cost of at most
    `eta` nats per point above the best of them; or, with `eps`, of at most $1 + \epsilon$ times
    it, when x is on the given scale (see `rescale`).

    First many starts of CEM are held against lower bounds, the quick one and then the tight one of
    `certify`: if they prove the claim, the answer is `kind="certificate"`. Otherwise the candidates
    of the plan are enumerated, the best of them are polished by CEM, and the claim holds with
    probability $1 - \delta$ (`kind="probabilistic"`), or for certain with `delta=0`
    (`kind="deterministic"`).

    Args:
        x: points `[n, d]`.
        n_clusters: k.
        eps: the factor, less 1.
        eta: nats per point.
        delta: the probability with which the claim may fail; 0 to leave nothing to chance.
        balance: f; clusters weigh at least `N / f`. Default: `2 * n_clusters`; infinity for
            all clusters of two points and more.
        algorithm: `"sampling"`; `"abs"`, which prunes between draws, for clusters of very unequal
            sizes; `"auto"`, the one that takes less; or `"paper"`, the candidates of the paper's
            first algorithm, of which only some can ever be looked at: with `guarantee=False`.
        scale: `"tight"` or `"paper"`: where `eps` holds.
        grid: for ABS, the grid of variances: `"reduced"`, or `"loglog"`, the paper's, repaired.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        key: default `jax.random.key(0)`. The same key gives the same answer.
        sample_weight: `[n]`, default ones.
        max_candidates: raise, before enumerating, if the plan has more than this.
        certificate: False goes straight to the enumeration.
        guarantee: False draws up to `max_candidates` of the candidates and claims nothing
            (`kind="none"`); `eps` and `eta` may be left out.
        n_starts: how many starts of CEM.
        n_polish: how many of the best candidates are polished.
        prune: False looks at every candidate to the end, for comparison.
        time_limit: seconds. The step at hand is finished; the best so far is returned with the
            status `INTERRUPTED`, and no claim, as after Ctrl-C.
        progress: True shows a line on standard error, False nothing, None a line on terminals; or a
            function of a report.
        max_points: refuse more points than this: bounds take quadratic time.
        checkpoint: a file to save the work to, every few seconds, at Ctrl-C and at the time limit,
            as in `fit`. The same call goes on from there; a certificate that was not finished is
            computed again.
        mesh: devices to split the starts, the pairs of the quick bound and the repetitions of
            `"sampling"` over; an x that is on several needs none. The rest is done on one. In
            several processes all make the same call.

    Returns:
        A `Solution`; `guarantee` says what is proved, and on which scale. Where every candidate
        that keeps the claim has a cluster under the minimum size, the best of those is returned
        with the status `INADMISSIBLE`: the claim holds all the same. Ctrl-C during the enumeration
        returns the best so far with the status `INTERRUPTED`, and no claim.

    Raises:
        TooManyCandidatesError: the plan has more than `max_candidates`. It names what would fit.

    Example:
        >>> import jaxcmle as jc
        >>> x = [[0.0], [2.0], [4.0], [90.0], [92.0], [94.0]]
        >>> solution = jc.approximate(x, 2, eta=0.5)
        >>> print(sorted(solution.mixture.means[:, 0].tolist()), solution.guarantee.kind)
        [2.0, 92.0] certificate
    """
    inputs.check_on_host("approximate")
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"algorithm must be one of {get_args(Algorithm)}, got {algorithm!r}")
    grid = to_grid(grid)
    if algorithm == "paper" and guarantee:
        raise ValueError(
            "the paper's own candidates are too many to enumerate (see plan with "
            'algorithm="paper"): use algorithm="sampling" or "abs", which make the same claim, or '
            "guarantee=False to look at some of them"
        )
    coarsen = eps is None and eta is None and not guarantee
    if coarsen:
        eps, eta = (DEFAULT_EPS, None) if algorithm == "paper" else (None, DEFAULT_ETA)
    target = to_target(eps, eta, delta)
    scale = to_scale(scale, target)
    problem = inputs.to_problem(problem)
    key = jax.random.key(0) if key is None else inputs.to_key(key)
    limit = inputs.to_limit(max_candidates, "max_candidates", positive=True)
    n_starts = inputs.to_whole(n_starts, "n_starts")
    n_polish = inputs.to_whole(n_polish, "n_polish")
    if not isinstance(prune, bool | Pruning):
        raise TypeError(f"prune must be True or False, got {prune!r}")
    pruning = prune if isinstance(prune, Pruning) else PRUNING if prune else NO_PRUNING
    shown = Progress(progress)
    seconds = math.inf if time_limit is None else inputs.to_limit(time_limit, "time_limit")
    end = time.monotonic() + seconds
    if is_placed(x, mesh):
        placed = place(x, sample_weight, mesh)
        mesh = placed.placement.mesh
        x, sample_weight = on_host(placed, sample_weight is not None)

    everything, weight = inputs.to_points(x, sample_weight)
    # Points of weight 0 are padding: they take no part, and get a label at the end.
    points, weight, present = inputs.without_padding(everything, weight)
    instance = measure(points, weight, n_clusters, balance, scale, problem, max_points)
    inputs.check_enough_points(points, weight, instance.n_clusters)
    answers = Answers(Setting(points, weight, problem, instance, target, mesh), max_points)
    saved = open_checkpoint(
        checkpoint,
        lambda: instance_parts(
            "approximate",
            everything,
            (weight, present),
            key,
            problem,
            mesh,
            n_clusters=instance.n_clusters,
            target=tuple(target),
            balance=instance.balance,
            algorithm=algorithm,
            scale=scale,
            grid=grid,
            max_candidates=limit,
            certificate=certificate,
            guarantee=guarantee,
            coarsen=coarsen,
            n_starts=n_starts,
            n_polish=n_polish,
            prune=tuple(pruning),
        ),
        mesh,
    )
    answer = saved.answer()
    if answer is not None:
        return answer

    incumbent = None
    if certificate and guarantee:
        incumbent, known_before = saved.get("incumbent") or (None, False)
        if incumbent is None:
            incumbent = answers.local(jax.random.fold_in(key, 1), n_starts)
        if known_before:
            answers.proved = saved.get("proved")
        elif not answers.prove(incumbent):
            saved.save(incumbent=(incumbent, False))
            incumbent = from_first(answers.tight(incumbent, progress, end), mesh)
            saved.save(incumbent=(incumbent, True), proved=answers.proved)
        if answers.prove(incumbent):
            solution = for_all_points(everything, present, answers.certified(incumbent), problem)
            return saved.finished(solution, cut=False)
        proved = answers.proved
        answers = Answers(answers.tightened(incumbent), max_points)
        answers.proved = proved
    setting = answers.setting

    def planned(target: Target) -> Plan:
        # The paper's own candidates have no plan that could be carried out.
        way: Algorithm = "sampling" if algorithm == "paper" else algorithm
        return make_plan(setting.instance, target, problem, way, grid)

    plan = planned(target)
    if guarantee and plan.tuples > limit:
        if incumbent is not None:
            incumbent = for_all_points(everything, present, incumbent, problem)
        message = too_many(plan, limit, setting, algorithm, grid)
        raise TooManyCandidatesError(message, plan, incumbent)
    if not guarantee:
        plan = _affordable(plan, limit, planned, target, coarsen)

    draws = jax.random.fold_in(key, 0)
    known = math.inf if incumbent is None else _cost_if_admissible(incumbent)

    def source() -> Source:
        if algorithm == "paper":
            return paper_candidates(setting, draws, limit, pruning)
        if plan.algorithm == "abs":
            return pruned_walks(setting, plan, draws, limit, pruning, known)
        if plan.delta == 0:
            return all_subsets(setting, plan, pruning, known)
        return repetitions(setting, plan, draws, limit, pruning, known)

    # A repetition goes on from the last step, which the checkpoint holds, file or not.
    n_best = max(n_polish, N_KEPT)
    found, finished = memory.within(
        lambda: _enumerate(source(), n_best, setting, shown, end, saved)
    )
    if found is None and not finished and incumbent is None:
        raise KeyboardInterrupt
    solution = answers.best(found, incumbent, n_polish, restricted=plan.algorithm != "abs")
    if not finished:
        solution = dataclasses.replace(solution, status=jnp.int32(Status.INTERRUPTED))
    solution = answers.with_claim(solution, finished and guarantee)
    solution = for_all_points(everything, present, solution, problem)
    return saved.finished(solution, cut=not finished)


def _affordable(
    plan: Plan,
    limit: float,
    planned: Callable[[Target], Plan],
    target: Target,
    coarsen: bool,
) -> Plan:
    """Return a plan to draw from where nothing is claimed.

    All subsets of the points are only for claims. Where no accuracy was asked for, the grids are
    made coarse enough for some draws of means.
    """
    if target.delta == 0 and plan.tuples > limit:
        target = target._replace(delta=0.1)
        plan = planned(target)
    while coarsen and target.eta is not None and target.eta < 100:
        if 64 * plan.walks * plan.grid_values**plan.n_clusters * plan.weight_tuples <= limit:
            break
        target = target._replace(eta=1.5 * target.eta)
        plan = planned(target)
    return plan


class Candidates(NamedTuple):
    """The best candidates, best first, and what each costs; fewer only if there are no more."""

    mixtures: Mixture
    costs: list[float]
    complete: bool


def _enumerate(
    source: Source, n_best: int, setting: Setting, progress: Progress, end: float, saved: Checkpoint
) -> tuple[Candidates | None, bool]:
    """Return the best candidates, and whether all have been looked at."""
    last, finished, offset = None, False, setting.offset
    if saved.get("place") is not None:
        done, place = saved.get("place")
        last = Step(done, saved.resumed("best", source.nothing(n_best)), place)
    try:
        with CtrlC() as ctrl_c:
            for step in source.steps(n_best, last):
                last = step
                progress.update(last.done, source.total, float(last.best.cost[0]) - offset)
                saved.save_if_due(best=last.best, place=(last.done, last.place))
                stopped = agreed(ctrl_c.pressed or time.monotonic() >= end, setting.mesh)
                if stopped and last.done < source.total:
                    raise KeyboardInterrupt
        finished = True
    except KeyboardInterrupt:
        pass
    finally:
        progress.close()
    saved.save()
    if last is None:
        return None, finished
    best = last.best
    costs = [float(cost) - offset for cost in best.cost if cost < jnp.inf]
    if not costs:
        raise ValueError("no candidate has a finite cost: rescale x, or enable float64")
    # Always as many as asked for, so that one program polishes all: the last is repeated.
    index = np.minimum(np.arange(n_best), len(costs) - 1)
    mixtures = source.mixtures(best, index)
    return Candidates(mixtures, costs, len(costs) < n_best), finished


class Answers:
    """From mixtures to a solution and what is claimed of it. Costs are in the user's units."""

    def __init__(self, setting: Setting, max_points: int) -> None:
        """Begin with what is known of the instance alone."""
        self.setting, self.max_points = setting, max_points
        # The tight lower bound, where it was computed.
        self.proved = Guarantee()
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
        left = max(end - time.monotonic(), 0.0)
        known = certify(
            self.setting.points,
            solution,
            tolerance=tolerance,
            time_limit=left if math.isfinite(left) else None,
            progress=progress,
            **self.options,
        )
        better, self.proved = known.better, dataclasses.replace(known, better=None)
        if better is not None:
            return better
        # The gap is that of the exact cost: where one point costs millions of nats, the rounding of
        # the solution's own is more than the claim allows.
        return dataclasses.replace(solution, guarantee=self.proved)

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
        known = (_cost_if_admissible(incumbent) + self.setting.offset) / instance.total
        instance = instance._replace(known_cost=known + 1e-4 * (abs(known) + instance.d))
        if isinstance(self.setting.problem, WKM):
            entropy = grids.least_entropy(instance.n_clusters, instance.balance)
            spread = (_cost_if_admissible(incumbent) / instance.total - entropy) * (1 + 1e-4)
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


def _cost_if_admissible(solution: Solution) -> float:
    return cost_of(solution) if is_admissible(solution) else math.inf


def _float(value: Any) -> float:
    return float(value)
