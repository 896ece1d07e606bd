"""How many clusters: the search for all of them in one run, and a criterion to choose by."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxcmle import numerics
from jaxcmle.problem import inputs
from jaxcmle.problem.types import CMLE, Problem, Solution, Status
from jaxcmle.refine.polish import variance_limits
from jaxcmle.solve.criteria import Criterion, criteria_of_many
from jaxcmle.solve.effort import Effort, EffortName, to_effort
from jaxcmle.solve.many import fit_numbers
from jaxcmle.solve.progress import Progress, ProgressOption

__all__ = ["Selection", "SelectionTable", "least_spread", "select"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SelectionTable:
    """What each number of clusters comes to: `print` it, or take its columns, or `to_dict()`.

    Attributes:
        n_clusters: `[r]`, the numbers that were tried, in order.
        cost: `[r]`, of the best solution, in nats; NaN where there is none.
        aic: `[r]`, Akaike's criterion; as for the others, lower is better.
        bic: `[r]`, the Bayesian information criterion.
        icl: `[r]`, the integrated completed likelihood.
        gap: `[r]`, nats per point that the solution can be above the optimum; infinite where
            nothing is proved.
        smallest: `[r]`, the weight of the smallest cluster.
        degenerate: `[r]`, whether a cluster has no spread at all, as a single point: its cost is
            only that of the floor under variances, and says nothing. Such a row is chosen only if
            there is no other. Not with a `min_variance`, nor for `WKM`.
        status: `[r]`, a `Status` for each.
        criterion: what was chosen by.
        best: the row that was chosen.
        solutions: `[r]`, the solutions.
    """

    n_clusters: np.ndarray
    cost: np.ndarray
    aic: np.ndarray
    bic: np.ndarray
    icl: np.ndarray
    gap: np.ndarray
    smallest: np.ndarray
    degenerate: np.ndarray
    status: np.ndarray
    criterion: Criterion
    best: int
    solutions: tuple[Solution, ...]

    def __len__(self) -> int:
        """Return how many numbers of clusters there are."""
        return len(self.n_clusters)

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the columns as lists, as for a DataFrame or JSON; None for what there is not."""
        columns = ("cost", "aic", "bic", "icl", "gap", "smallest")
        numbers = {
            name: [
                value if math.isfinite(value) else None for value in getattr(self, name).tolist()
            ]
            for name in columns
        }
        names = [Status(status).name for status in self.status.tolist()]
        flags = self.degenerate.tolist()
        return {
            "n_clusters": self.n_clusters.tolist(),
            **numbers,
            "degenerate": flags,
            "status": names,
        }

    def __repr__(self) -> str:
        """Return the choice in a line: solutions would fill pages."""
        return (
            f"SelectionTable(n_clusters={self.n_clusters.tolist()}, "
            f"criterion={self.criterion!r}, best={self.best})"
        )

    def __str__(self) -> str:
        """Return the table, the chosen row marked."""
        lines = ["   clusters         cost          bic          icl      gap  smallest  status"]
        for i, k in enumerate(self.n_clusters):
            numbers = "".join(f" {_cell(getattr(self, name)[i]):>12}" for name in _WIDE)
            gap = f"{self.gap[i]:.3f}" if math.isfinite(self.gap[i]) else "-"
            small = f"{self.smallest[i]:g}" if math.isfinite(self.smallest[i]) else "-"
            status = Status(int(self.status[i])).name
            status += ", a cluster has no spread" if self.degenerate[i] else ""
            mark = "*" if i == self.best else " "
            lines.append(f"{mark} {k:>9}{numbers} {gap:>8} {small:>9}  {status}")
        return "\n".join(lines)


_WIDE = ("cost", "bic", "icl")


def _cell(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


class Selection(NamedTuple):
    """The answer of `select`.

    Attributes:
        solution: the best one.
        table: what each number of clusters comes to.
    """

    solution: Solution
    table: SelectionTable


def select(
    x: Any,
    n_clusters: Iterable[int],
    *,
    criterion: Criterion = "icl",
    key: Array | None = None,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    effort: EffortName | Effort = "default",
    min_size: ArrayLike | None = None,
    min_variance: ArrayLike | None = None,
    time_limit: float | None = None,
    progress: ProgressOption = None,
) -> Selection:
    """Choose the number of clusters: search for all in one run, and take the best by a criterion.

    ICL is twice the cost plus `ln n` for every free parameter. `CMLE` minimises just that cost, the
    negative log-likelihood of points and labels together, so ICL judges the very thing that was
    fitted: it rewards clusters that can be told apart. BIC has the likelihood of the mixture in
    place of the cost: it rewards a good fit of the density, and takes more clusters that overlap.

    The searches for all numbers share the points, one compiled program (up to 8192 points) and all
    cores and devices.

    Args:
        x: points `[n, d]`.
        n_clusters: the numbers to try, as `range(1, 11)`. One that the points do not allow for
            (more clusters than distinct points, say) has a row without numbers.
        criterion: `"icl"`, `"bic"` or `"aic"`; lower is better. Ties go to fewer clusters.
        key: default `jax.random.key(0)`. What is found for k clusters is what `fit` finds with this
            key, to rounding.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones. For the criteria, n is the sum of the weights.
        effort: as in `fit`.
        min_size: the least weight of a cluster; default as in `fit`, `n / (10 k)`.
        min_variance: floor under every variance; default as in `fit`.
        time_limit: seconds. What has begun is finished; numbers that have not are left out.
        progress: True shows a line on standard error, False nothing, None a line on terminals and
            in notebooks; or a function of a report.

    Returns:
        A `Selection`: `solution, table = select(...)`.

    Raises:
        ValueError: no number has an answer; the message says why the first has none.
        TimeoutError: none had one before the time limit.

    Example:
        >>> import jaxcmle as jc
        >>> x = [[0.0], [1.0], [2.0], [9.0], [10.0], [11.0], [20.0], [21.0], [22.0]]
        >>> solution, table = jc.select(x, range(1, 5))
        >>> table.n_clusters[table.best].item(), sorted(solution.mixture.means[:, 0].tolist())
        (3, [1.0, 10.0, 21.0])
    """
    inputs.check_on_host("select")
    if criterion not in get_args(Criterion):
        raise ValueError(f"criterion must be one of {get_args(Criterion)}, got {criterion!r}")
    numbers = _to_numbers(n_clusters)
    problem = inputs.to_problem(problem)
    key = jax.random.key(0) if key is None else inputs.to_key(key)
    points, weight = inputs.to_points(x, sample_weight)
    solutions = fit_numbers(
        points,
        numbers,
        key=key,
        problem=problem,
        sample_weight=weight,
        effort=to_effort(effort, time_limit),
        min_size=None if min_size is None else inputs.to_limit(min_size, "min_size"),
        min_variance=None
        if min_variance is None
        else inputs.to_limit(min_variance, "min_variance"),
        progress=Progress(progress, "numbers of clusters"),
    )
    least = least_spread(points, weight, min_variance, problem)
    table = _table(points, weight, numbers, solutions, criterion, problem, least)
    return Selection(solutions[table.best], table)


def least_spread(
    points: Array, weight: Array | None, min_variance: ArrayLike | None, problem: Problem
) -> float:
    """Return the variance up to which a cluster has no spread; negative where none matters."""
    return float(variance_limits(numerics.prepare(points, weight), min_variance, problem)[1])


def _to_numbers(n_clusters: Any) -> list[int]:
    """Return the numbers to try, in order and each once."""
    if isinstance(n_clusters, str | bytes) or not isinstance(n_clusters, Iterable):
        raise TypeError(
            "n_clusters must be the numbers to try, as range(1, 11) or [2, 4, 8], got "
            f"{n_clusters!r}"
        )
    numbers = sorted({inputs.to_whole(k, "every number in n_clusters") for k in n_clusters})
    if not numbers:
        raise ValueError("n_clusters is empty; give some numbers to try, as range(1, 11)")
    return numbers


def _table(
    points: Array,
    weight: Array | None,
    numbers: list[int],
    solutions: list[Solution],
    criterion: Criterion,
    problem: Problem,
    least: float,
) -> SelectionTable:
    """Return what is known of every number, and which is the best."""
    rows = [i for i, solution in enumerate(solutions) if not solution.error]
    if not rows:
        raise _no_answer(solutions)
    found = criteria_of_many(
        points,
        [solutions[i].mixture for i in rows],
        problem=problem,
        sample_weight=weight,
        partition_costs=[float(solutions[i].cost) for i in rows],
    )
    weight = jnp.ones(len(points), points.dtype) if weight is None else weight
    columns = {
        name: np.full(len(numbers), np.nan) for name in ("cost", "smallest", "aic", "bic", "icl")
    }
    gap = np.full(len(numbers), np.inf)
    degenerate = np.zeros(len(numbers), bool)
    status = np.array([int(solution.status) for solution in solutions])
    for i, criteria in zip(rows, found, strict=True):
        solution = solutions[i]
        sizes = np.bincount(np.asarray(solution.labels), np.asarray(weight), numbers[i])
        degenerate[i] = (np.asarray(solution.mixture.variances) <= least).any()
        columns["cost"][i], columns["smallest"][i] = float(solution.cost), sizes.min()
        gap[i] = np.asarray(solution.guarantee.gap).item()
        columns["aic"][i], columns["bic"][i], columns["icl"][i] = criteria
    # An inadmissible solution is the best only if there is no other.
    values = np.where(np.isfinite(columns[criterion]), columns[criterion], np.inf)
    bad = np.isin(status, (Status.INADMISSIBLE, Status.NONFINITE)) | np.isinf(values)
    best = int(np.lexsort((np.array(numbers), values, degenerate, bad))[0])
    return SelectionTable(
        n_clusters=np.array(numbers),
        gap=gap,
        degenerate=degenerate,
        status=status,
        criterion=criterion,
        best=best,
        solutions=tuple(solutions),
        **columns,
    )


def _no_answer(solutions: list[Solution]) -> Exception:
    """Return the error to raise where no number of clusters has an answer."""
    failed = [one for one in solutions if int(one.status) != Status.INTERRUPTED]
    if failed:
        return ValueError(f"no number of clusters has an answer; for the least: {failed[0].error}")
    return TimeoutError(
        "no number of clusters was done before the time limit or Ctrl-C; allow more time, or "
        'use effort="quick"'
    )
