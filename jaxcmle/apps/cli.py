"""The command line: `jaxcmle`, also `python -m jaxcmle`."""

import argparse
import sys
from collections.abc import Sequence

import jax
import numpy as np

import jaxcmle as jc
from jaxcmle.apps.datasets import load_iris

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="jaxcmle", description="Hard clustering with Gaussian mixtures, with a certificate."
    )
    parser.add_argument("--version", action="version", version=f"jaxcmle {jc.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="cluster the built-in iris data and print the result")
    demo.add_argument("--clusters", type=_positive, default=3, metavar="K", help="default: 3")
    demo.add_argument("--starts", type=_positive, default=64, metavar="M", help="default: 64")
    demo.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args(arguments)
    try:
        print(_demo(options.clusters, options.starts, options.seed))
    except ValueError as error:
        print(f"jaxcmle: {error}", file=sys.stderr)
        return 2
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def _demo(n_clusters: int, n_starts: int, seed: int) -> str:
    """Cluster iris by restarts of CEM, attach the certificate, and describe both."""
    iris = load_iris()
    n, d = iris.x.shape
    min_size = -(-n // (2 * n_clusters))
    keys = jax.vmap(lambda r: jax.random.fold_in(jax.random.key(seed), r))(np.arange(n_starts))
    starts = jax.vmap(lambda key: jc.seed(key, iris.x, n_clusters))(keys)
    solution, costs = jc.cem_restarts(iris.x, starts, min_size=min_size, return_costs=True)
    solution = jc.with_certificate(iris.x, solution, min_size=min_size)
    guarantee = solution.guarantee
    mixture, labels = solution.mixture, np.asarray(solution.labels)
    reached = np.asarray(costs)[np.isfinite(costs)]

    lines = [
        f"iris: {n} points, {d} features ({', '.join(iris.feature_names)})",
        f"CMLE, {n_clusters} clusters of at least {min_size} points, on {jax.devices()[0]}",
        f"{n_starts} starts of k-means++, refined by CEM: {reached.size} admissible, "
        f"{np.unique(reached.round(2)).size} different optima",
        "",
        f"{'cluster':>7} {'points':>6} {'weight':>6} {'sigma':>6}  mean",
    ]
    for k in range(n_clusters):
        mean = " ".join(f"{value:6.2f}" for value in np.asarray(mixture.means[k]))
        species = np.bincount(iris.species[labels == k], minlength=len(iris.species_names))
        members = ", ".join(
            f"{count} {name}"
            for count, name in zip(species, iris.species_names, strict=True)
            if count
        )
        lines.append(
            f"{k:>7} {(labels == k).sum():>6} {float(mixture.weights[k]):>6.3f} "
            f"{float(mixture.variances[k]) ** 0.5:>6.3f} {mean}   {members}"
        )
    lines += [
        "",
        f"status       {jc.Status(int(solution.status)).name} after {solution.n_iter} iterations",
        f"cost         {solution.cost:.3f} nats ({solution.cost / n:.4f} per point)",
        f"lower bound  {guarantee.lower_bound:.3f} nats, over all partitions with clusters of at "
        f"least {guarantee.min_size:g} points",
        f"gap          {guarantee.gap:.4f} nats per point: no such partition is better by more",
    ]
    return "\n".join(lines)
