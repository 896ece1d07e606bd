"""The command line: `jaxcmle`, also `python -m jaxcmle`."""

import argparse
import sys
from collections.abc import Sequence

import jax
import numpy as np

import jaxcmle as jc
from jaxcmle.apps.datasets import load_iris

__all__ = ["main"]


# Seconds for the certificate.
TIME_LIMIT = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="jaxcmle", description="Hard clustering with Gaussian mixtures, with a certificate."
    )
    parser.add_argument("--version", action="version", version=f"jaxcmle {jc.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="cluster the built-in iris data and print the result")
    demo.add_argument("--clusters", type=_positive, default=3, metavar="K", help="default: 3")
    demo.add_argument("--eta", type=float, default=1.0, help="nats per point to claim, default: 1")
    demo.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args(arguments)
    try:
        print(_demo(options.clusters, options.eta, options.seed))
    except ValueError as error:
        print(f"jaxcmle: {error}", file=sys.stderr)
        return 2
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def _demo(n_clusters: int, eta: float, seed: int) -> str:
    """Cluster iris with a guarantee, and describe the plan, the solution and what is proved."""
    iris = load_iris()
    n, d = iris.x.shape
    plan = jc.plan(iris.x, n_clusters, eta=eta)
    lines = [
        f"iris: {n} points, {d} features ({', '.join(iris.feature_names)})",
        f"CMLE, {n_clusters} clusters of at least {plan.min_size:g} points, on {jax.devices()[0]}",
        "",
        str(plan),
        "",
    ]
    key = jax.random.key(seed)
    try:
        solution = jc.approximate(iris.x, n_clusters, eta=eta, key=key, certificate=False)
    except jc.TooManyCandidatesError:
        solution = jc.fit(iris.x, n_clusters, min_size=plan.min_size, key=key)
        lines += ["That is too many: here is what the practical search finds.", ""]
    claimed = solution.guarantee.kind == "probabilistic"
    guarantee = jc.certify(iris.x, solution, min_size=plan.min_size, time_limit=TIME_LIMIT)
    if guarantee.better is not None:
        solution = guarantee.better
        guarantee = solution.guarantee
    mixture = solution.mixture
    labels = np.asarray(solution.labels)

    lines.append(f"{'cluster':>7} {'points':>6} {'weight':>6} {'sigma':>6}  mean")
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
        f"gap          {guarantee.gap:.4f} nats per point: no such partition is better by more "
        f"(proof by {guarantee.method})",
    ]
    if claimed:
        lines.append(
            f"claim        {eta:g} nats per point: none is better by more, with probability "
            f"{1 - plan.delta:g}"
        )
    return "\n".join(lines)
