"""How hard a search tries."""

import dataclasses
import math
from typing import Any, Literal, get_args

from jaxcmle.candidates.seeding import SeedMethod
from jaxcmle.problem import inputs

__all__ = ["EFFORTS", "Effort", "EffortName", "StartMethod", "to_effort", "to_seed_method"]

StartMethod = Literal["kmeans++", "farthest", "random", "subsets", "abs", "em", "annealed"]
EffortName = Literal["quick", "default", "thorough"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard `fit` tries.

    Attributes:
        starts: how many starts a search has; they come in groups of `population`.
        rounds: how many rounds there are, at most, those with starts among them.
        patience: how many rounds without a better solution end a search.
        restarts: how many searches there are at most, each with starts of its own; if more than
            one, the best of all meet in a last one.
        agreeing: if so many of them find the same best cost, neither more searches nor a last one
            follow. Not for up to 64 points: there all of them take next to no time.
        methods: where starts come from, a method for each group in turn: those of `seed`, and
            `"em"` and `"annealed"`, k-means++ followed by iterations of soft EM at temperature 1
            or falling from there.
        population: how many solutions are kept, and how many children a round has.
        sample: search on a random sample of so many points, where there are more; the best of the
            search are then refined on all points.
        seconds: stop after this time; None for no limit.
    """

    starts: int = 8
    rounds: int = 100
    patience: int = 5
    restarts: int = 3
    agreeing: int = 2
    methods: tuple[StartMethod, ...] = ("kmeans++", "abs")
    population: int = 8
    sample: int = 32768
    seconds: float | None = None


EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        rounds=6, patience=2, restarts=1, methods=("kmeans++",), population=4, sample=8192
    ),
    "default": Effort(),
    "thorough": Effort(
        starts=16,
        rounds=2000,
        patience=40,
        restarts=6,
        agreeing=4,
        methods=("kmeans++", "abs", "annealed", "em", "subsets", "farthest", "random"),
        sample=131072,
    ),
}


def to_effort(effort: Any, time_limit: Any) -> Effort:
    """Return the effort that a name stands for, or that was given, with the tighter time limit."""
    if isinstance(effort, str):
        if effort not in EFFORTS:
            raise ValueError(
                f"effort must be one of {tuple(EFFORTS)} or a jaxcmle.Effort, got {effort!r}"
            )
        effort = EFFORTS[effort]
    if not isinstance(effort, Effort):
        raise TypeError(
            f"effort must be one of {tuple(EFFORTS)} or a jaxcmle.Effort, got {effort!r}"
        )
    for name in ("starts", "rounds", "patience", "restarts", "agreeing", "population", "sample"):
        inputs.to_whole(getattr(effort, name), f"Effort.{name}")
    methods: Any = effort.methods
    known = isinstance(methods, tuple | list) and set(methods) <= set(get_args(StartMethod))
    if not known or not methods:
        raise ValueError(
            f"Effort.methods must be some of {get_args(StartMethod)}, got {effort.methods!r}"
        )
    limits = [
        inputs.to_limit(value, name)
        for name, value in (("time_limit", time_limit), ("Effort.seconds", effort.seconds))
        if value is not None
    ]
    return dataclasses.replace(
        effort, methods=tuple(methods), seconds=min(limits, default=math.inf)
    )


def to_seed_method(method: StartMethod) -> SeedMethod:
    """Return the method of `seed` that a start begins with."""
    if method == "em" or method == "annealed":
        return "kmeans++"
    return method
