"""The guaranteed search: a certificate where one suffices, the candidates of a plan otherwise."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxcmle import memory
from jaxcmle.candidates.choices import VarianceGrid
from jaxcmle.candidates.claim import Scale, Target, measure, to_scale, to_target
from jaxcmle.candidates.plan import Plan
from jaxcmle.candidates.planning import Algorithm, make_plan, to_grid
from jaxcmle.candidates.scoring import NO_PRUNING, PRUNING, Pruning
from jaxcmle.problem import inputs
from jaxcmle.problem.pairs import MAX_POINTS
from jaxcmle.problem.placement import (
    agreed,
    is_placed,
    on_host,
    place,
    spans_processes,
    takes_mesh,
)
from jaxcmle.problem.types import CMLE, Problem, Solution, Status
from jaxcmle.solve.advice import too_many
from jaxcmle.solve.checkpoint import Checkpoint, PathOption, instance_parts, open_checkpoint
from jaxcmle.solve.claims import Answers, Candidates, cost_if_admissible
from jaxcmle.solve.padding import for_all_points
from jaxcmle.solve.progress import CtrlC, Progress, ProgressOption
from jaxcmle.solve.sources import (
    Setting,
    Source,
    Step,
    all_subsets,
    paper_candidates,
    repetitions,
)
from jaxcmle.solve.walks import pruned_walks

__all__ = ["N_KEPT", "TooManyCandidatesError", "approximate"]

# What the grids aim at when nothing is claimed and nothing was asked for.
DEFAULT_ETA = 1.0
DEFAULT_EPS = 0.5
# Candidates kept, at least: where small clusters pay, balanced ones are looked for among them.
N_KEPT = 64


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


@takes_mesh
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
        with the status `INADMISSIBLE`: the claim holds all the same. Ctrl-C returns the best so far
        with the status `INTERRUPTED`, and no claim.

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
            incumbent = answers.tight(incumbent, progress, end)
            if not answers.cut_short:
                saved.save(incumbent=(incumbent, True), proved=answers.proved)
        if answers.prove(incumbent):
            solution = for_all_points(everything, present, answers.certified(incumbent), problem)
            return saved.finished(solution, cut=False)
        if answers.cut_short:
            # The next call tries again: what it enumerates depends on what is proved.
            solution = dataclasses.replace(incumbent, status=jnp.int32(Status.INTERRUPTED))
            return for_all_points(
                everything, present, answers.with_claim(solution, claimed=False), problem
            )
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
    known = math.inf if incumbent is None else cost_if_admissible(incumbent)

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
                    break
            else:
                finished = True
    except KeyboardInterrupt:
        # A second Ctrl-C, which other processes know nothing of: this one cannot go on with them.
        if spans_processes(setting.mesh):
            raise
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
