"""Answers for many instances: out of the padding, in order, and something where there are none."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcmle.problem.types import UCMLE, Guarantee, Mixture, Problem, Solution, Status
from jaxcmle.solve.instances import Failure, Instance, Instances

__all__ = ["Part", "collected"]

# From the weakest claim to the strongest, each of which implies those before it.
KINDS = ("none", "estimate", "probabilistic", "deterministic", "certificate")
INTERRUPTED = Failure(Status.INTERRUPTED, "not begun: the call was interrupted")
NUMBERS = ("lower_bound", "gap", "min_size", "eps", "eta", "delta")


class Part(NamedTuple):
    """What was found for some of the instances.

    Attributes:
        places: which instances these are.
        solution: a stack of their solutions, on the host and padded; the numbers of its guarantee
            have an axis as well.
    """

    places: Sequence[int]
    solution: Solution


def collected(instances: Instances, parts: Iterable[Part], problem: Problem) -> Any:
    """Return the answers in order, with something in place of those that there are not.

    As a list, or as one stack if the instances came as one array and have as many clusters each.
    """
    parts = list(parts)
    if instances.stacked and len(set(instances.clusters)) == 1:
        return _stack(instances, parts, problem)
    answers: list[Any] = [None] * len(instances.each)
    for part in parts:
        for i, place in enumerate(part.places):
            instance = instances.each[place]
            assert instance is not None
            answers[place] = _single(part.solution, i, instance, problem)
    return [
        _without_answer(instances, i) if answer is None else answer
        for i, answer in enumerate(answers)
    ]


def _single(stack: Solution, i: int, instance: Instance, problem: Problem) -> Solution:
    """Return one solution of a stack without what it was padded with."""
    n, k = len(instance.x), instance.k
    # Copies: a view would keep all of the stack in memory.
    mixture: Any = jax.tree.map(lambda leaf: leaf[i, :k].copy(), stack.mixture)
    if isinstance(problem, UCMLE):
        mixture = dataclasses.replace(mixture, weights=np.full_like(mixture.weights, 1 / k))
    claim = stack.guarantee
    numbers: dict[str, Any] = {
        name: float(value[i]) for name in NUMBERS if (value := _array(claim, name)) is not None
    }
    return Solution(
        mixture=mixture,
        labels=_in_order(stack.labels[i, :n], instance),
        cost=stack.cost[i],
        status=stack.status[i],
        n_iter=stack.n_iter[i],
        guarantee=dataclasses.replace(claim, **numbers),
        consistent=bool(np.asarray(stack.consistent)[i]),
    )


def _array(claim: Guarantee, name: str) -> Any:
    """Return a number of a guarantee for each of a stack, or None where there is none."""
    value = getattr(claim, name)
    return value if isinstance(value, np.ndarray) and value.ndim else None


def _in_order(labels: Any, instance: Instance) -> Any:
    """Return labels in the order of the user's points."""
    result = np.empty(len(labels), np.int32)
    result[slice(None) if instance.order is None else instance.order] = labels
    return result


def _stack(instances: Instances, parts: list[Part], problem: Problem) -> Solution:
    """Return all solutions as one."""
    b, n, k = len(instances.each), instances.lengths[0], instances.clusters[0]
    d, dtype = instances.d, instances.dtype
    nothing = _nothing(k, d, dtype)
    mixture: Any = jax.tree.map(lambda leaf: np.repeat(leaf[None], b, axis=0), nothing)
    labels, status = np.zeros((b, n), np.int32), np.full(b, INTERRUPTED.status, np.int32)
    cost, n_iter = np.full(b, np.inf, dtype), np.zeros(b, np.int32)
    consistent = np.zeros(b, bool)
    errors = [INTERRUPTED.error] * b
    numbers: dict[str, Any] = {}
    for part in parts:
        own, found = list(part.places), part.solution
        c = len(own)
        mixture.weights[own] = found.mixture.weights[:c, :k]
        mixture.means[own] = found.mixture.means[:c, :k]
        mixture.variances[own] = found.mixture.variances[:c, :k]
        labels[own] = found.labels[:c, :n]
        cost[own], status[own], n_iter[own] = found.cost[:c], found.status[:c], found.n_iter[:c]
        consistent[own] = np.asarray(found.consistent)[:c]
        for name in NUMBERS:
            value = _array(found.guarantee, name)
            if value is not None:
                numbers.setdefault(name, np.full(b, np.nan))[own] = value[:c]
        for place in own:
            errors[place] = ""
            instance = instances.each[place]
            assert instance is not None
            if instance.order is not None:
                labels[place] = _in_order(labels[place], instance)
    for place, failure in instances.failures.items():
        status[place], errors[place] = failure
    if isinstance(problem, UCMLE):
        mixture = dataclasses.replace(mixture, weights=np.full_like(mixture.weights, 1 / k))
    for name, worst in (("lower_bound", -np.inf), ("gap", np.inf)):
        value = numbers.setdefault(name, np.full(b, worst))
        value[np.isnan(value)] = worst
    guarantee = Guarantee(**_common(parts), **numbers)
    solution = Solution(
        mixture=mixture,
        labels=labels,  # type: ignore[arg-type]
        cost=cost,  # type: ignore[arg-type]
        status=status,  # type: ignore[arg-type]
        n_iter=n_iter,  # type: ignore[arg-type]
        guarantee=guarantee,
        consistent=consistent,
        error=tuple(errors),
    )
    return jax.tree.map(jnp.asarray, solution)


def _common(parts: list[Part]) -> dict[str, Any]:
    """Return what has no axis in a guarantee: what holds for every instance with an answer."""
    claims = [part.solution.guarantee for part in parts] or [Guarantee()]
    common: dict[str, Any] = {"kind": min((claim.kind for claim in claims), key=KINDS.index)}
    for name, default in (("scale", None), ("reason", ""), ("method", "")):
        values = {getattr(claim, name) for claim in claims}
        common[name] = values.pop() if len(values) == 1 else default
    return common


def _nothing(k: int, d: int, dtype: Any) -> Mixture:
    """Return the mixture of an instance without an answer."""
    shapes = {"weights": (k,), "means": (k, d), "variances": (k,)}
    values: dict[str, Any] = {name: np.full(shape, np.nan, dtype) for name, shape in shapes.items()}
    return Mixture(**values)


def _without_answer(instances: Instances, i: int) -> Solution:
    failure = instances.failures.get(i, INTERRUPTED)
    values: dict[str, Any] = {
        "labels": np.zeros(instances.lengths[i], np.int32),
        # Never the least of several.
        "cost": np.asarray(np.inf, instances.dtype)[()],
        "status": np.int32(failure.status),
        "n_iter": np.int32(0),
    }
    return Solution(
        mixture=_nothing(instances.clusters[i], instances.d, instances.dtype),
        guarantee=Guarantee(reason=failure.error),
        consistent=False,
        error=failure.error,
        **values,
    )
