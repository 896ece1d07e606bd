"""Data that more than one benchmark uses."""

import math

import numpy as np

LEAST_SIZE = 20
SEPARATION = (3.0, 6.0)
DRAWS = 10


def real_data() -> dict[str, np.ndarray]:
    """Return iris and digits, and wine and breast cancer standardised."""
    from sklearn import datasets

    def standardised(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(axis=0)) / x.std(axis=0)

    sets = {
        "iris": datasets.load_iris().data,
        "wine": standardised(datasets.load_wine().data),
        "breast cancer": standardised(datasets.load_breast_cancer().data),
        "digits": datasets.load_digits().data,
    }
    return {name: x.astype(np.float32) for name, x in sets.items()}


def mixture_data(n: int, d: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points, and the labels they were drawn with.

    Sizes and variances are log-uniform over a decade. The separation of two clusters is
    |mean - mean'| / sqrt((variance + variance') / 2). Every mean is, of ten normal draws, the one
    with the largest separation from the means before it, lest clusters be nested; then all are
    scaled for the median separation of a cluster from its nearest one to be uniform from 3 to 6. So
    there is structure, and clusters overlap.
    """
    rng = np.random.default_rng(seed)
    shares, variances = np.exp(rng.uniform(0, math.log(10), size=(2, k)))
    sizes = np.maximum(LEAST_SIZE, n * shares / shares.sum()).astype(int)
    sizes[sizes.argmax()] += n - sizes.sum()
    means = rng.normal(size=(k, d))
    nearest = np.full(k, math.inf)
    for j in range(1, k):
        draws = rng.normal(size=(DRAWS, d))
        distances = np.sqrt(((draws[:, None] - means[:j]) ** 2).sum(axis=2))
        separations = distances / np.sqrt((variances[:j] + variances[j]) / 2)
        chosen = separations.min(axis=1).argmax()
        means[j] = draws[chosen]
        nearest[j] = separations[chosen].min()
        nearest[:j] = np.minimum(nearest[:j], separations[chosen])
    means *= rng.uniform(*SEPARATION) / np.median(nearest)
    labels = rng.permutation(np.repeat(np.arange(k), sizes))
    x = means[labels] + np.sqrt(variances[labels])[:, None] * rng.normal(size=(n, d))
    return x.astype(np.float32), labels


def slow_data(n: int, d: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return overlapping clusters, and rough means, so that all methods need many iterations."""
    rng = np.random.default_rng(0)
    centres = 4 * rng.normal(size=(k, d)) / d
    labels = rng.integers(0, k, size=n)
    x = centres[labels] + rng.normal(size=(n, d))
    start = centres + rng.normal(size=(k, d)) / d
    return x.astype(np.float32), start.astype(np.float32)
