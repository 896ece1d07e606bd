"""The built-in data set."""

import csv
import os
from importlib import resources
from typing import NamedTuple

import numpy as np

from jaxcmle.atomic import atomic_path

__all__ = ["Iris", "load_iris", "save_iris"]


class Iris(NamedTuple):
    """Fisher's iris data: 150 flowers of three species.

    Attributes:
        x: `[150, 4]`, in centimetres.
        feature_names: what the columns are.
        species: the species of each flower, as ints.
        species_names: what the ints stand for.
    """

    x: np.ndarray
    feature_names: list[str]
    species: np.ndarray
    species_names: list[str]


def load_iris() -> Iris:
    """Return Fisher's iris data (R. A. Fisher, Annals of Eugenics, 1936).

    Example:
        >>> from jaxcmle.apps.datasets import load_iris
        >>> load_iris().x.shape
        (150, 4)
    """
    header, *rows = csv.reader(_text().splitlines())
    names = sorted({row[-1] for row in rows})
    x = np.array([[float(value) for value in row[:-1]] for row in rows])
    species = np.array([names.index(row[-1]) for row in rows])
    return Iris(x, header[:-1], species, names)


def save_iris(path: str | os.PathLike[str]) -> None:
    """Write the data to a CSV file, the species in its last column.

    Example:
        >>> import pathlib, tempfile
        >>> from jaxcmle.apps.datasets import save_iris
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "iris.csv")
        ...     save_iris(path)
        ...     path.read_text().splitlines()[1]
        '5.1,3.5,1.4,0.2,setosa'
    """
    with atomic_path(path) as temporary:
        temporary.write_text(_text(), encoding="utf-8")


def _text() -> str:
    return resources.files("jaxcmle.apps").joinpath("iris.csv").read_text(encoding="utf-8")
