"""What others offer: each of them takes points and returns labels. All are optional.

A peer gets the same points, the same number of starts and a seed; where it takes one start at a
time, the best by its own criterion counts. Nothing of theirs is tuned but the number of starts and,
for faiss, the sampling of points, which is off. gmmx has no spherical clusters: its are diagonal.
"""

import functools
import importlib
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAX_ITER = 300


class Peer(NamedTuple):
    """Somebody else's method: what it needs to be there, and how its labels are had."""

    name: str
    what: str
    labels: Callable[[np.ndarray, int, int, int], np.ndarray]
    missing: Callable[[], str]


def _lacks(module: str, extra: str = "install the extra `bench`") -> str:
    try:
        with quiet():
            importlib.import_module(module)
    except ImportError:
        return f"{module} is not installed: {extra}"
    return ""


def sklearn_kmeans(x: np.ndarray, k: int, seed: int, starts: int) -> np.ndarray:
    from sklearn.cluster import KMeans

    with quiet():
        return np.asarray(KMeans(k, n_init=starts, random_state=seed).fit_predict(x))


def sklearn_mixture(x: np.ndarray, k: int, seed: int, starts: int) -> np.ndarray:
    from sklearn.mixture import GaussianMixture

    model = GaussianMixture(k, covariance_type="spherical", n_init=starts, random_state=seed)
    with quiet():
        return np.asarray(model.fit_predict(x))


def gmmx_mixture(x: np.ndarray, k: int, seed: int, starts: int) -> np.ndarray:
    from gmmx import GaussianMixtureSKLearn

    best, labels = -np.inf, np.zeros(len(x), np.int32)
    random = np.random.RandomState(seed)
    for _ in range(starts):
        with quiet():
            model = GaussianMixtureSKLearn(k, covariance_type="diag", random_state=random)
            model.fit(x)
            score = float(model.score(x))
        if score > best:
            best, labels = score, np.asarray(model.predict(x)).reshape(-1)
    return labels


def ott_kmeans(x: np.ndarray, k: int, seed: int, starts: int) -> np.ndarray:
    import jax

    return np.asarray(_ott_program(k, starts)(jax.numpy.asarray(x), jax.random.key(seed)))


@functools.cache
def _ott_program(k: int, starts: int) -> Any:
    """Return its k-means, compiled: by itself it would trace anew in every call."""
    import jax
    from ott.tools.k_means import k_means

    return jax.jit(lambda x, key: k_means(x, k, n_init=starts, rng=key).assignment)


def faiss_kmeans(x: np.ndarray, k: int, seed: int, starts: int) -> np.ndarray:
    import faiss

    model = faiss.Kmeans(
        x.shape[1],
        k,
        niter=MAX_ITER,
        nredo=starts,
        seed=seed + 1,
        min_points_per_centroid=1,
        max_points_per_centroid=len(x),
    )
    model.train(x)
    return np.asarray(model.index.search(x, 1)[1][:, 0])


def torch_cem_steps(x: Any, means: Any, steps: int) -> tuple[Any, Any, int]:
    """Run plain CEM in torch until no label changes: labels, the cost and the iterations."""
    import torch

    n, d = x.shape
    k = len(means)
    weights = torch.full((k,), 1 / k)
    square = torch.cdist(x, means) ** 2
    variances = torch.full((k,), float(square.min(dim=1).values.mean()) / d)
    labels = torch.full((n,), -1)
    done = 0
    while done < steps:
        done += 1
        costs = d / 2 * torch.log(2 * torch.pi * variances) - torch.log(weights)
        costs = costs + square / (2 * variances)
        least, new = costs.min(dim=1)
        if torch.equal(new, labels):
            break
        labels = new
        counts = torch.bincount(labels, minlength=k).to(x.dtype)
        means = torch.zeros_like(means).index_add_(0, labels, x) / counts.clamp(min=1)[:, None]
        square = torch.cdist(x, means) ** 2
        own = square.gather(1, labels[:, None])[:, 0]
        scatter = torch.zeros(k).index_add_(0, labels, own)
        variances = (scatter / (d * counts.clamp(min=1))).clamp(min=1e-6)
        weights = (counts / n).clamp(min=1e-12)
    return labels, least.sum(), done


def torch_cem(x: np.ndarray, k: int, seed: int, starts: int) -> np.ndarray:
    import torch
    from sklearn.cluster import kmeans_plusplus

    points = torch.from_numpy(np.asarray(x, np.float32))
    best, chosen = np.inf, np.zeros(len(x), np.int64)
    for start in range(starts):
        means, _ = kmeans_plusplus(x, k, random_state=1000 * seed + start)
        labels, cost, _ = torch_cem_steps(points, torch.from_numpy(means), MAX_ITER)
        if float(cost) < best:
            best, chosen = float(cost), labels.numpy()
    return chosen


def mclust(x: np.ndarray, k: int, seed: int, starts: int) -> np.ndarray:
    """Run R's mclust once: it starts from its hierarchical clustering, and has no seed."""
    del seed, starts
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        np.savetxt(path / "x.csv", x, delimiter=",")
        code = (
            "suppressMessages(library(mclust)); x <- as.matrix(read.csv('x.csv', header=FALSE)); "
            f"m <- Mclust(x, G={k}, modelNames='VII', verbose=FALSE); "
            "write(if (is.null(m)) rep(1, nrow(x)) else m$classification, 'labels.txt', 1)"
        )
        run = subprocess.run(
            ["Rscript", "-e", code], cwd=path, capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"Rscript failed: {run.stderr.strip()}")
        return np.loadtxt(path / "labels.txt", dtype=int) - 1


def _mclust_missing() -> str:
    if shutil.which("Rscript") is None:
        return "there is no Rscript on the path"
    check = ["Rscript", "-e", "library(mclust)"]
    if subprocess.run(check, capture_output=True, check=False).returncode:
        return "R has no package mclust"
    return ""


PEERS = (
    Peer("scikit-learn KMeans", "k-means", sklearn_kmeans, functools.partial(_lacks, "sklearn")),
    Peer(
        "scikit-learn GaussianMixture",
        "EM, spherical",
        sklearn_mixture,
        functools.partial(_lacks, "sklearn"),
    ),
    Peer("gmmx", "EM, diagonal, JAX", gmmx_mixture, functools.partial(_lacks, "gmmx")),
    Peer("OTT", "k-means, JAX", ott_kmeans, functools.partial(_lacks, "ott")),
    Peer("faiss", "k-means, C++", faiss_kmeans, functools.partial(_lacks, "faiss")),
    Peer("torch", "plain CEM", torch_cem, functools.partial(_lacks, "torch")),
    Peer("mclust", "EM, spherical, R", mclust, _mclust_missing),
)
# Tried, and why they never run here.
IMPOSSIBLE = {
    "hgmeans": "its last release, 3.0, does not build with Python 3.11 or later, which we need"
}


class quiet(warnings.catch_warnings):  # noqa: N801
    """Silence what peers say about convergence and duplicates."""

    def __enter__(self) -> None:
        """Begin to be silent."""
        super().__enter__()
        warnings.simplefilter("ignore")


@functools.cache
def present() -> tuple[Peer, ...]:
    """Return the peers that can run here."""
    return tuple(peer for peer in PEERS if not peer.missing())


@functools.cache
def absent() -> dict[str, str]:
    """Return why the others cannot."""
    reasons = {peer.name: peer.missing() for peer in PEERS}
    return {name: why for name, why in reasons.items() if why} | IMPOSSIBLE
