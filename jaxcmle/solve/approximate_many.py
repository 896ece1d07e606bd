"""The guaranteed search for many instances: one plan for all, its candidates in compiled passes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from jax import Array

from jaxcmle.candidates.claim import Scale, Target, to_scale, to_target
from jaxcmle.candidates.plan import Plan
from jaxcmle.problem import inputs
from jaxcmle.problem.types import CMLE, WKM, Problem, Solution, Status
from jaxcmle.solve import enumerating
from jaxcmle.solve.answers import Part, collected
from jaxcmle.solve.batches import Chunk, Layout, Watch, chunks_of, layout_of, run_chunks
from jaxcmle.solve.bounding import bound_all
from jaxcmle.solve.claims import entry_of
from jaxcmle.solve.instances import (
    Failure,
    Instance,
    Instances,
    raise_failures,
    to_instances,
    to_keys,
)
from jaxcmle.solve.known import Known
from jaxcmle.solve.many import ErrorOption
from jaxcmle.solve.measuring import covering_plan, measure_all, measured
from jaxcmle.solve.progress import Progress, ProgressOption
from jaxcmle.solve.searches import Task
from jaxcmle.solve.sizes import balanced_size
from jaxcmle.solve.sources import Setting
from jaxcmle.solve.stacks import Batch

__all__ = ["approximate_many"]

# Larger instances gain nothing from company.
MOST_POINTS = 4096


def approximate_many(
    xs: Any,
    n_clusters: int,
    *,
    eps: float | None = None,
    eta: float | None = None,
    delta: float = 0.1,
    balance: float | None = None,
    scale: Scale = "tight",
    problem: Problem = CMLE(),
    key: Array | None = None,
    sample_weight: Any = None,
    max_candidates: float = 10**8,
    certificate: bool = True,
    n_starts: int = 16,
    n_polish: int = 8,
    errors: ErrorOption = "status",
    progress: ProgressOption = None,
) -> Any:
    r"""Return solutions of many instances that are provably near the best with balanced clusters.

    What `approximate` does with `algorithm="sampling"`, for each of many instances; the claim holds
    for each of them with a probability of $1 - \delta$ of its own. First some starts of CEM are
    held against the quick lower bound (the tight one of `certify` is left out here): where that
    proves the claim, the answer is `kind="certificate"`. For all the others there is one plan,
    which covers them all, so that their candidates are enumerated by one program for each size:
    an instance of a wide range of variances makes the plan, and so the work, larger for all.

    Args:
        xs: an array `[b, n, d]`, or a list of arrays `[n, d]` with different n, of up to 4096
            points each.
        n_clusters: k, the same for all.
        eps: the factor, less 1.
        eta: nats per point.
        delta: the probability with which the claim may fail for an instance; above 0.
        balance: f; clusters weigh at least `N / f`. Default: `2 * n_clusters`.
        scale: `"tight"` or `"paper"`: where `eps` holds. Every instance has a factor of its own.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        key: one key, by default `jax.random.key(0)`: instance i has `jax.random.fold_in(key, i)`;
            or a key for each, `[b]`.
        sample_weight: `[b, n]`, or a list with weights `[n]` or None for each; default ones.
        max_candidates: raise, before enumerating, if the plan has more than this for an instance.
        certificate: False goes straight to the enumeration.
        n_starts: how many starts of CEM.
        n_polish: how many of the best candidates are polished.
        errors: `"status"`: an instance that cannot be solved (NaN, too few points, ...) gets a
            status and an `error`, and harms no other. `"raise"`: raises an error that names them,
            before anything is searched.
        progress: True shows a line on standard error, False nothing, None a line on terminals and
            in notebooks; or a function of a report.

    Returns:
        For a list, a list of `Solution`s in order, which hold NumPy arrays. For an array, one
        `Solution` with a leading axis: in its `guarantee`, `kind` is the weakest of all claims,
        `delta` is 0 where a certificate proves the claim, and where there is none, `eta` is
        infinite and `delta` 1. After Ctrl-C, instances that were not finished have the status
        `INTERRUPTED`, and no claim. `approximate` tells of `INADMISSIBLE`.

    Raises:
        TooManyCandidatesError: the plan has more than `max_candidates`. It names what would fit.

    Example:
        >>> import jaxcmle as jc
        >>> x = [[0.0], [2.0], [4.0], [90.0], [92.0], [94.0]]
        >>> first, second = jc.approximate_many([x, x[:2] + x[3:5]], 2, eta=0.5)
        >>> print(sorted(first.mixture.means[:, 0].tolist()), first.guarantee.kind)
        [2.0, 92.0] certificate
    """
    inputs.check_on_host("approximate_many")
    if errors not in get_args(ErrorOption):
        raise ValueError(f"errors must be one of {get_args(ErrorOption)}, got {errors!r}")
    if np.ndim(n_clusters) != 0:
        raise ValueError(
            "one plan is for one number of clusters: group the instances by theirs, and call "
            "approximate_many for each group"
        )
    target = to_target(eps, eta, delta)
    if target.delta == 0:
        raise ValueError("approximate_many draws at random: give a delta above 0, or approximate")
    if balance is not None:
        balance = inputs.to_limit(balance, "balance", positive=True)
    scale = to_scale(scale, target)
    problem = inputs.to_problem(problem)
    limit = inputs.to_limit(max_candidates, "max_candidates", positive=True)
    n_starts = inputs.to_whole(n_starts, "n_starts")
    n_polish = inputs.to_whole(n_polish, "n_polish")
    shown = Progress(progress, "instances")
    instances = to_instances(xs, n_clusters, sample_weight)
    longest = max(instances.lengths)
    if longest > MOST_POINTS:
        raise ValueError(
            f"approximate_many is for instances of up to {MOST_POINTS} points, and one has "
            f"{longest}: call approximate for each of those"
        )
    common = _Common(problem, target, scale, to_keys(key, len(instances.each)), layout_of())
    sizes = _sizes(instances, balance)
    if errors == "raise":
        raise_failures(instances.failures)

    watch = _Finished(shown, None, len(instances.each))
    with watch:
        many = _Many(instances, common, watch)
        many.measure(sizes)
        if errors == "raise":
            raise_failures(instances.failures)
        if certificate:
            many.certify(n_starts)
        plan = many.plan(limit)
        if plan is not None:
            many.enumerate(plan, n_polish)
    return collected(instances, many.parts(), problem)


class _Common(NamedTuple):
    """What all instances share."""

    problem: Problem
    target: Target
    scale: Scale
    keys: Array
    layout: Layout


class _Finished(Watch):
    """Counts instances that are finished, not every time that one was worked on."""

    counts = False

    def add(self, count: int) -> None:
        """Report that so many more are done, once that is for good."""
        if self.counts:
            super().add(count)


def _is_final(solution: Any) -> bool:
    """Tell whether this is the answer for an instance: something is claimed, or it was stopped."""
    if not isinstance(solution, Solution):
        return False
    stopped = int(solution.status) == Status.INTERRUPTED
    return stopped or solution.guarantee.delta is not None


def _sizes(instances: Instances, balance: float | None) -> list[float]:
    """Return the least weight of a cluster for each instance, as `measure` has it.

    Where there is no such partition, that is the failure of the instance.
    """
    sizes = []
    for i, instance in enumerate(instances.each):
        sizes.append(0.0)
        if instance is None:
            continue
        k, total = instance.k, instance.total
        size = balanced_size(total, instance.whole, 2 * k if balance is None else balance)
        try:
            inputs.check_partition_exists(k, size, total)
            sizes[i] = min(inputs.to_limit(size, "min_size", positive=True), total / k)
        except ValueError as error:
            _fail(instances, i, Failure(Status.INADMISSIBLE, str(error)))
    return sizes


def _fail(instances: Instances, i: int, failure: Failure) -> None:
    instances.failures[i] = failure
    instances.each[i] = None


class _Many:
    """The instances on their way: measured, certified, enumerated; and what was found."""

    def __init__(self, instances: Instances, common: _Common, watch: _Finished) -> None:
        self.instances, self.common, self.watch = instances, common, watch
        self.known: dict[int, Known] = {}
        self.found: dict[int, Solution] = {}

    def measure(self, sizes: list[float]) -> None:
        """Find out the numbers that the plan depends on, and the lower bounds."""
        problem, target, scale, _, layout = self.common

        def run(chunk: Chunk, batch: Batch) -> Any:
            size = batch.stack([sizes[i] for i in chunk.places])
            numbers = measure_all(batch.packed, size, batch.counts, layout)
            whole = all(instance.unweighted for instance in chunk.instances)
            floors = np.zeros_like(size)
            bounds = bound_all(batch.packed, size, floors, batch.counts, problem, layout, whole)
            numbers, bounds = jax.device_get((numbers, bounds))
            return [(entry_of(numbers, i), float(bounds[i])) for i in batch.places]

        for place, (numbers, bound) in self._run(run, list(self.instances.each), "measure"):
            instance: Any = self.instances.each[place]
            try:
                own = measured(instance, numbers, sizes[place], scale, problem)
            except ValueError as error:
                _fail(self.instances, place, Failure(Status.INADMISSIBLE, str(error)))
                continue
            setting = Setting(instance.x, instance.weight, problem, own, target)
            self.known[place] = Known(setting, bound)

    def certify(self, n_starts: int) -> None:
        """Look for solutions that the lower bounds prove to be good enough."""
        problem, layout = self.common.problem, self.common.layout

        def run(chunk: Chunk, batch: Batch) -> list[Solution]:
            task = self._task(chunk, batch)
            k = batch.bucket.k
            found = enumerating.start_all(task, batch.counts, problem, n_starts, k, layout)
            stack = jax.device_get(found)
            pairs = zip(batch.places, chunk.places, strict=True)
            return [self.known[place].local(entry_of(stack, i)) for i, place in pairs]

        self.found.update(self._run(run, self._rest(), "certify", n_starts))

    def plan(self, limit: float) -> Plan | None:
        """Return the plan for all that are not finished, if there are any."""
        each = {}
        for place, instance in enumerate(self._rest()):
            if instance is not None:
                known, incumbent = self.known[place], self.found.get(place)
                setting = known.setting if incumbent is None else known.tightened(incumbent)
                each[place] = setting.instance
        if not each or self.watch.stops():
            return None
        return covering_plan(each, limit, self.common.target, self.common.problem)

    def enumerate(self, plan: Plan, n_polish: int) -> None:
        """Draw and score the candidates of the plan, polish the best, and choose."""
        problem, layout, dtype = self.common.problem, self.common.layout, self.instances.dtype
        tables = enumerating.tables_of(plan, problem, dtype)
        draw = enumerating.draw_of(plan, tables, n_polish)

        def run(chunk: Chunk, batch: Batch) -> list[Solution | Failure]:
            known = [self.known[place] for place in chunk.places]
            variances = [each.setting.variances(plan.variance_values) for each in known]
            ends = [enumerating.ends_of(instance, batch.bucket.n) for instance in chunk.instances]
            own = enumerating.Own(
                task=self._task(chunk, batch),
                ends=batch.stack(ends, np.uint32),
                slope=batch.stack(0.5 / np.asarray(variances)),
                variances=batch.stack(variances),
            )
            best, finished = enumerating.enumerate_all(
                plan, own, batch, tables, draw, layout, self.watch
            )
            found = enumerating.polish_all(own, best, batch.counts, (tables, problem), draw, layout)
            stacks = jax.device_get((*found, best.cost))
            return [
                each.answer(entry_of(stacks, i), self.found.get(place), finished)
                for each, i, place in zip(known, batch.places, chunk.places, strict=True)
            ]

        self.watch.counts = True
        self.watch.add(sum(map(_is_final, self.found.values())))
        shapes = (draw, tables.log_weights.shape, tables.constant.shape)
        for place, found in self._run(run, self._rest(), "enumerate", *shapes):
            if isinstance(found, Failure):
                _fail(self.instances, place, found)
            else:
                self.found[place] = found

    def parts(self) -> list[Part]:
        """Return what was found, those with the same kind of claim together."""
        kinds: dict[str, dict[int, Solution]] = {}
        longest = max(self.instances.lengths)
        for place, solution in self.found.items():
            if self.instances.each[place] is None:
                continue
            if not _is_final(solution):
                solution = self.known[place].stopped(solution)
            labels: Any = np.resize(solution.labels, longest)
            padded = dataclasses.replace(solution, labels=labels)
            kinds.setdefault(solution.guarantee.kind, {})[place] = padded
        return [
            Part(list(own), jax.tree.map(lambda *leaves: np.stack(leaves), *own.values()))
            for own in kinds.values()
        ]

    def _rest(self) -> list[Instance | None]:
        """Return the instances that are measured and have no answer yet; None for the others."""
        return [
            instance if i in self.known and not _is_final(self.found.get(i)) else None
            for i, instance in enumerate(self.instances.each)
        ]

    def _run(
        self, run: Callable[[Chunk, Batch], Any], instances: list[Instance | None], *what: Any
    ) -> list[tuple[int, Any]]:
        """Return the places of instances, and what came of them."""
        layout, dtype = self.common.layout, self.instances.dtype
        problem = type(self.common.problem)
        program = ("approximate", *what, self.instances.d, dtype, problem, layout.form)
        chunks = chunks_of(instances, self.instances.stacked, layout)

        def with_places(chunk: Chunk) -> list[tuple[int, Any]]:
            return list(zip(chunk.places, run(chunk, Batch(chunk, layout)), strict=True))

        parts = run_chunks(chunks, with_places, program, layout, self.watch)
        return [pair for part in parts for pair in part]

    def _task(self, chunk: Chunk, batch: Batch) -> Task:
        known = [self.known[place] for place in chunk.places]
        floors = None
        if not isinstance(self.common.problem, WKM):
            floors = batch.stack([each.min_variance for each in known])
        # Places without an instance get the key of some other.
        keys = self.common.keys[batch.stack(chunk.places, np.int32)]
        sizes = batch.stack([each.setting.instance.min_size for each in known])
        return Task(*batch.packed, sizes, floors, keys)
