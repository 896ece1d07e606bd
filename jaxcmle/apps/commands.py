"""What the subcommands of the command line do."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxcmle as jc
from jaxcmle.apps import machine, plotting
from jaxcmle.apps.demo import demo
from jaxcmle.apps.exits import Exit, ProgramError, reason
from jaxcmle.apps.models import Model, Scaling, read_model, standardize, write_model
from jaxcmle.apps.outputs import (
    axes,
    check_outputs,
    print_result,
    write,
    write_labels,
    write_report,
)
from jaxcmle.apps.processes import is_first, mesh_of
from jaxcmle.apps.reports import (
    claim_lines,
    cluster_lines,
    counted,
    finite,
    result_lines,
    solution_record,
)
from jaxcmle.apps.tables import DataError, Table, name_of, read_table
from jaxcmle.problem.inputs import to_points
from jaxcmle.problem.placement import on_one_device
from jaxcmle.solve.criteria import criteria
from jaxcmle.solve.select import least_spread

__all__ = ["COMMANDS"]


@dataclasses.dataclass(frozen=True)
class _Data:
    """The points of a file, ready to use: in the precision to compute in, and standardised."""

    file: str
    table: Table
    x: np.ndarray
    scaling: Scaling | None

    @property
    def weight(self) -> np.ndarray | None:
        """The weights of the points."""
        return self.table.weight

    @property
    def total(self) -> float:
        """The weight of all points."""
        return float(len(self.x) if self.weight is None else self.weight.sum())

    def line(self) -> str:
        """Return what the data is, in words."""
        n, d = self.x.shape
        words = f"{self.file}: {counted(n, 'point')}, {counted(d, 'feature')}"
        if self.table.dropped:
            words += f", {self.table.dropped:,} rows with missing values left out"
        return words + (", standardized" if self.scaling is not None else "")

    def record(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return what a report begins with."""
        n, d = self.x.shape
        return {
            "jaxcmle": jc.__version__,
            "command": options.command,
            "data": {
                "file": self.file,
                "points": n,
                "features": d,
                "columns": self.table.names,
                "weighted": self.weight is not None,
                "dropped_rows": self.table.dropped,
                "standardized": self.scaling is not None,
            },
            "device": str(jax.devices()[0]),
            "precision": str(self.x.dtype),
            "seed": options.seed,
        }


def _fit(options: argparse.Namespace) -> int:
    def search(data: _Data, problem: jc.Problem) -> jc.Solution:
        given = _search_options(options, data, problem)
        given |= _scale(options)
        return jc.fit(data.x, options.clusters, certify=options.certify, **given)

    return _solve(options, search)


def _approximate(options: argparse.Namespace) -> int:
    def search(data: _Data, problem: jc.Problem) -> jc.Solution:
        return jc.approximate(
            data.x,
            options.clusters,
            key=jax.random.key(options.seed),
            problem=problem,
            sample_weight=data.weight,
            max_candidates=options.max_candidates,
            certificate=options.certificate,
            guarantee=options.guarantee,
            time_limit=options.time_limit,
            progress=_progress(options),
            **_scale(options),
            **_claim(options),
        )

    return _solve(options, search)


def _select(options: argparse.Namespace) -> int:
    def search(data: _Data, problem: jc.Problem) -> jc.Selection:
        given = _search_options(options, data, problem)
        return jc.select(data.x, options.clusters, criterion=options.criterion, **given)

    return _solve(options, search)


def _plan(options: argparse.Namespace) -> int:
    if (options.data is None) == (options.shape is None):
        raise ProgramError("give a data file, or --shape N,D for points that are not at hand")
    data = None if options.data is None else _read(options)
    plan = jc.plan(
        None if data is None else data.x,
        options.clusters,
        problem=_problem(options),
        sample_weight=None if data is None else data.weight,
        shape=options.shape,
        variance_ratio=options.variance_ratio,
        **_claim(options),
    )
    print_result(options, [str(plan)], plan.to_dict())
    return Exit.DONE


def _score(options: argparse.Namespace) -> int:
    check_outputs(options)
    try:
        model = read_model(options.model_file)
    except OSError as error:
        raise ProgramError(f"{options.model_file}: {reason(error)}") from None
    except ValueError as error:
        raise ProgramError(str(error)) from None
    data = _read(options, model)
    mixture, problem = model.mixture, model.problem
    cost = float(jc.cost(data.x, mixture, problem=problem, sample_weight=data.weight))
    labels = np.asarray(jc.assign(data.x, mixture, problem=problem))
    found = criteria(
        data.x, mixture, problem=problem, sample_weight=data.weight, partition_cost=cost
    )
    sizes = np.bincount(labels, data.weight, len(mixture.weights)).tolist()
    record = {
        **data.record(options),
        "model": options.model_file,
        "cost": finite(cost),
        "cost_per_point": finite(cost / data.total),
        **{name: finite(value) for name, value in found._asdict().items()},
        "sizes": sizes,
    }
    lines = [
        data.line(),
        f"model        {options.model_file}: {type(problem).__name__}, {len(sizes)} clusters",
        f"cost         {cost:.3f} nats ({cost / data.total:.4f} per point)",
        f"BIC, ICL     {found.bic:.2f}, {found.icl:.2f}",
        f"points       {', '.join(f'{size:.8g}' for size in sizes)}",
    ]
    write(options.labels, lambda path: write_labels(path, data.table, labels))
    write(options.report, lambda path: write_report(path, record))
    print_result(options, lines, record)
    return Exit.DONE


def _info(options: argparse.Namespace) -> int:
    if options.clear_cache:
        print(f"removed {machine.clear_cache() / 1e6:.1f} MB", file=sys.stderr)
    found = machine.describe()
    devices = [f"{one['platform']}:{one['id']} ({one['kind']})" for one in found["devices"]]
    packages = [f"{name} {version}" for name, version in found["packages"].items()]
    optional = [name for name, is_there in found["optional"].items() if is_there]
    lines = [
        f"jaxcmle   {found['jaxcmle']}, Python {found['python']}, {found['system']}",
        f"packages  {', '.join(packages)}",
        f"optional  {', '.join(optional) or 'none'}",
        f"devices   {', '.join(devices)}; {found['cores']} cores",
        f"cache     {found['cache']['folder']} ({found['cache']['bytes'] / 1e6:.1f} MB)",
    ]
    print_result(options, lines, found)
    return Exit.DONE


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "fit": _fit,
    "plan": _plan,
    "approximate": _approximate,
    "select": _select,
    "score": _score,
    "demo": demo,
    "info": _info,
}


def _solve(
    options: argparse.Namespace,
    search: Callable[[_Data, jc.Problem], jc.Solution | jc.Selection],
) -> int:
    """Read, search, write and print; returns the exit code."""
    check_outputs(options)
    problem = _problem(options)
    data = _read(options)
    begin = time.monotonic()
    found = search(data, problem)
    seconds = time.monotonic() - begin
    table = None
    if isinstance(found, jc.Selection):
        found, table = found
    found = on_one_device(found)
    if is_first():
        _write_solution(options, data, problem, found, table, seconds)

    statuses = [int(found.status)] if table is None else table.status.tolist()
    if int(found.status) in (jc.Status.INADMISSIBLE, jc.Status.NONFINITE):
        raise ProgramError(
            f"{data.file}: every solution found has a cluster under the minimum size, this one "
            "too: ask for fewer clusters, or smaller ones",
            Exit.NO_ANSWER,
        )
    in_time = options.time_limit is None or seconds < options.time_limit
    if in_time and jc.Status.INTERRUPTED in statuses:
        raise ProgramError("interrupted: this is the best so far", Exit.INTERRUPTED)
    return Exit.DONE


def _write_solution(
    options: argparse.Namespace,
    data: _Data,
    problem: jc.Problem,
    solution: jc.Solution,
    table: jc.SelectionTable | None,
    seconds: float,
) -> None:
    """Write and print a solution, and the table it was chosen from, if there is one."""
    worth = criteria(
        data.x,
        solution.mixture,
        problem=problem,
        sample_weight=data.weight,
        partition_cost=float(solution.cost),
    )
    record = {
        **data.record(options),
        "problem": type(problem).__name__,
        **solution_record(solution, data.total),
        **{name: finite(value) for name, value in worth._asdict().items()},
        "seconds": round(seconds, 3),
    }
    least = least_spread(*to_points(data.x, data.weight), options.min_variance, problem)
    points = np.flatnonzero(np.asarray(solution.mixture.variances) <= least).tolist()
    record["clusters_without_spread"] = points
    lines = [data.line()]
    if table is not None:
        record |= {"criterion": table.criterion, "table": table.to_dict()}
        lines += ["", *str(table).splitlines(), f"* has the least {table.criterion.upper()}", ""]
    lines += [*cluster_lines(solution, data.weight), "", *result_lines(solution, data.total)]
    lines += [f"BIC, ICL     {worth.bic:.2f}, {worth.icl:.2f}", *claim_lines(solution)]
    if points:
        which = ", ".join(map(str, points[:10])) + (", ..." if len(points) > 10 else "")
        lines.append(
            f"no spread    in {which}: what such a cluster costs says nothing; set --min-variance"
        )

    def draw(path: str) -> None:
        if table is not None:
            drawn = plotting.plot_criterion(table, ax=axes())
        else:
            names = data.table.names
            drawn = plotting.plot_clusters(data.x, solution, ax=axes(), feature_names=names)
        plotting.save_picture(drawn, path)

    names, scaling = data.table.names, data.scaling
    labels = np.asarray(solution.labels)
    write(options.labels, lambda path: write_labels(path, data.table, labels))
    write(options.model, lambda path: write_model(path, solution, problem, names, scaling))
    write(options.report, lambda path: write_report(path, record))
    write(options.picture, draw)
    print_result(options, lines, record)


def _read(options: argparse.Namespace, model: Model | None = None) -> _Data:
    """Return the data, and set the precision to compute in.

    A model says which columns it is for, unless others are chosen, and how to standardise.
    """
    table = _read_table(options, None if model is None else model.columns)
    x = table.x
    scaling = None if model is None else model.scaling
    if model is not None and x.shape[1] != (d := model.mixture.means.shape[1]):
        raise ProgramError(
            f"{options.data}: has {x.shape[1]} columns, and the model {options.model_file} is for "
            f"{d}; choose them with --columns"
        )
    if table.weight is not None and not table.weight.any():
        raise ProgramError(f"{options.data}: the weights are all 0; at least one must be positive")
    if model is None and options.standardize:
        scaling = standardize(x, table.weight)
    if scaling is not None:
        x = scaling.apply(x)
    double = options.precision == "float64" or (
        options.precision == "auto" and machine.needs_double(x)
    )
    jax.config.update("jax_enable_x64", double)
    x = x.astype(np.float64 if double else np.float32, copy=False)
    return _Data(name_of(options.data), table, x, scaling)


def _read_table(options: argparse.Namespace, expected: list[str] | None) -> Table:
    """Return the table; of one with names, the columns that are expected."""
    given: dict[str, Any] = {
        "kind": options.kind,
        "delimiter": options.delimiter,
        "header": options.header,
        "exclude": options.exclude,
        "weight_column": options.weight_column,
        "array": options.array,
        "drop_missing": options.drop_missing,
    }
    # Standard input can be read only once.
    if expected is None or options.columns is not None or options.data == "-":
        return read_table(options.data, columns=options.columns, **given)
    try:
        return read_table(options.data, columns=expected, **given)
    except DataError:
        table = read_table(options.data, **given)
        if table.names is None:
            return table
        missing = [name for name in expected if name not in table.names]
        if not missing:
            raise
        raise ProgramError(
            f"{options.data}: the model {options.model_file} is for a column {missing[0]!r}, which "
            "is not there; choose the columns to take with --columns"
        ) from None


def _problem(options: argparse.Namespace) -> jc.Problem:
    if options.problem == "wkm":
        if options.beta is None:
            raise ProgramError("--problem wkm needs --beta, which is 1 / (2 variance)")
        return jc.WKM(beta=options.beta)
    if options.beta is not None:
        raise ProgramError("--beta goes with --problem wkm")
    return jc.UCMLE() if options.problem == "ucmle" else jc.CMLE()


def _search_options(
    options: argparse.Namespace, data: _Data, problem: jc.Problem
) -> dict[str, Any]:
    """Return what `fit` and `select` have in common."""
    return {
        "key": jax.random.key(options.seed),
        "problem": problem,
        "sample_weight": data.weight,
        "effort": options.effort,
        "min_size": options.min_size,
        "min_variance": options.min_variance,
        "time_limit": options.time_limit,
        "progress": _progress(options),
    }


def _claim(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `plan` and `approximate` have in common."""
    names = ("eps", "eta", "delta", "balance", "algorithm", "scale")
    return {name: getattr(options, name) for name in names}


def _scale(options: argparse.Namespace) -> dict[str, Any]:
    """Return where to work, and where to keep what has been done."""
    return {"mesh": mesh_of(options), "checkpoint": options.checkpoint}


def _progress(options: argparse.Namespace) -> bool | None:
    return False if options.quiet or not is_first() else None
