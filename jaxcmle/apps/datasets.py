"""The built-in data set."""

import csv
from importlib import resources
from typing import NamedTuple

import numpy as np

__all__ = ["Iris", "load_iris"]


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
    with resources.files("jaxcmle.apps").joinpath("iris.csv").open(encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    names = sorted({row[-1] for row in rows})
    x = np.array([[float(value) for value in row[:-1]] for row in rows])
    species = np.array([names.index(row[-1]) for row in rows])
    return Iris(x, header[:-1], species, names)
