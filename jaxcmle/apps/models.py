"""Models as files of the command line: a mixture and what has to be done to data before it.

A model is JSON, for people and other programs to read, or the `.npz` of `jaxcmle.save`, which also
has the labels and all the rest of a solution.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxcmle.apps.reports import cluster_records, finite, guarantee_record
from jaxcmle.apps.saving import read_archive, write_archive
from jaxcmle.atomic import atomic_path
from jaxcmle.problem.types import CMLE, UCMLE, WKM, Mixture, Problem, Solution, Status

__all__ = ["Model", "Scaling", "read_model", "standardize", "write_model"]

FORMAT = "jaxcmle model"
VERSION = 1
PROBLEMS: dict[str, Any] = {"CMLE": CMLE, "WKM": WKM, "UCMLE": UCMLE}


class Scaling(NamedTuple):
    """What standardising takes from every column, and divides it by."""

    centre: np.ndarray
    scale: np.ndarray

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Return the data standardised."""
        return (x - self.centre) / self.scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A mixture and how to use it.

    Attributes:
        mixture: in the units it was fitted in.
        problem: what was solved.
        columns: the names of the columns it was fitted to, or None.
        scaling: what to do to data first, or None.
    """

    mixture: Mixture
    problem: Problem
    columns: list[str] | None
    scaling: Scaling | None


def standardize(x: np.ndarray, weight: np.ndarray | None) -> Scaling:
    """Return what makes every column have mean 0 and standard deviation 1; constant ones 0."""
    largest = np.abs(x).max(axis=0).astype(np.float64)
    unit = np.where(largest > 0, largest, 1.0)
    # In units of the largest, so that no square overflows.
    shares = x / unit
    centre = np.average(shares, axis=0, weights=weight)
    scale = np.sqrt(np.average((shares - centre) ** 2, axis=0, weights=weight))
    # What rounding leaves of a constant column is not spread.
    return Scaling(centre * unit, np.where(scale <= 1e-12, 1.0, scale * unit))


def write_model(
    path: str | os.PathLike[str],
    solution: Solution,
    problem: Problem,
    columns: list[str] | None,
    scaling: Scaling | None,
) -> None:
    """Write a model, as JSON or `.npz` as the suffix says; whole or not at all."""
    about: dict[str, Any] = {
        "problem": {"name": type(problem).__name__},
        "columns": columns,
        "standardized": None,
    }
    if isinstance(problem, WKM):
        about["problem"]["beta"] = np.asarray(problem.beta).item()
    if scaling is not None:
        parts = {"centre": scaling.centre.tolist(), "scale": scaling.scale.tolist()}
        about["standardized"] = parts
    if Path(path).suffix == ".npz":
        write_archive(path, solution, about)
        return
    record = {
        "format": FORMAT,
        "version": VERSION,
        **about,
        "clusters": cluster_records(solution.mixture),
        "cost": finite(solution.cost),
        "status": Status(int(solution.status)).name,
        "guarantee": guarantee_record(solution.guarantee),
    }
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_model(path: str | os.PathLike[str]) -> Model:
    """Return the model in a file, or say what is wrong with the file."""
    name = os.fspath(path)
    with open(path, "rb") as file:
        archive = file.read(2) == b"PK"
    if archive:
        solution, about = read_archive(path)
        mixture = solution.mixture
        if np.ndim(mixture.weights) != 1:
            raise ValueError(f"{name} holds a stack of solutions, and not one model")
        return _model(name, mixture, {"problem": {"name": "CMLE"}, **about})
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name} is no model, neither JSON nor .npz ({error})") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{name} is no model of jaxcmle: it has no format {FORMAT!r}")
    if record.get("version") != VERSION:
        raise ValueError(
            f"{name} has version {record.get('version')!r} of the format, and this jaxcmle reads "
            f"version {VERSION}: install the jaxcmle that wrote it, or a later one"
        )
    try:
        clusters = record["clusters"]
        parts: dict[str, Any] = {
            plural: np.array([cluster[one] for cluster in clusters], float)
            for plural, one in (("weights", "weight"), ("means", "mean"), ("variances", "variance"))
        }
        if not clusters or parts["means"].ndim != 2:
            raise ValueError("no clusters, or means of different lengths")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is damaged: its clusters are not what they should be ({_words(error)})"
        ) from None
    return _model(name, Mixture(**parts), record)


def _model(name: str, mixture: Mixture, about: dict[str, Any]) -> Model:
    try:
        problem = dict(about["problem"])
        kind = PROBLEMS[problem.pop("name")]
        columns, scaling = about.get("columns"), about.get("standardized")
        if scaling is not None:
            scaling = Scaling(*(np.array(scaling[part], float) for part in ("centre", "scale")))
            if not scaling.centre.shape == scaling.scale.shape == mixture.means.shape[1:]:
                raise ValueError("standardized for another number of columns")
        if columns is not None and len(columns) != mixture.means.shape[1]:
            raise ValueError("as many columns as the means have are expected")
        model = Model(mixture=mixture, problem=kind(**problem), columns=columns, scaling=scaling)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is damaged: {_words(error)}") from None
    _check(name, model)
    return model


def _check(name: str, model: Model) -> None:
    """Raise where a number is none that a mixture can have: somebody may have edited it."""
    weights, variances = np.asarray(model.mixture.weights), np.asarray(model.mixture.variances)
    bad = ""
    if not np.isfinite(model.mixture.means).all():
        bad = "means must be finite"
    elif not ((weights >= 0).all() and abs(float(weights.sum()) - 1) < 1e-3):
        bad = f"weights must not be negative, and add up to 1, not {float(weights.sum()):g}"
    elif not (np.isfinite(variances) & (variances > 0)).all():
        bad = "variances must be positive and finite"
    if bad:
        raise ValueError(f"{name}: {bad}")


def _words(error: Exception) -> str:
    """Return what an error says of a file."""
    return f"{error} is missing or not known" if isinstance(error, KeyError) else str(error)
