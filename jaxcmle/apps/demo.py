"""The demo of the command line: a plan, a solution with its claim, a proof and a picture."""

import argparse
import dataclasses
import importlib.util

import jax
import numpy as np

import jaxcmle as jc
from jaxcmle.apps import plotting
from jaxcmle.apps.datasets import Iris, load_iris, save_iris
from jaxcmle.apps.exits import Exit
from jaxcmle.apps.outputs import axes, check_outputs, print_result, write
from jaxcmle.apps.reports import cluster_lines, result_lines, solution_record

__all__ = ["demo"]

# Seconds for the certificate.
TIME_LIMIT = 30.0


def demo(options: argparse.Namespace) -> int:
    """Cluster iris with a guarantee; or hand out the data, for other commands to try."""
    if options.save_data is not None:
        write(options.save_data, save_iris)
        return Exit.DONE
    # By default there is a picture if there can be one.
    drawable = importlib.util.find_spec("matplotlib") is not None
    picture = options.picture or ("jaxcmle-demo.png" if drawable else None)
    check_outputs(argparse.Namespace(data=None, picture=picture))
    iris = load_iris()
    n, d = iris.x.shape
    k, eta, key = options.clusters, options.eta, jax.random.key(options.seed)
    progress = False if options.quiet else None
    plan = jc.plan(iris.x, k, eta=eta)
    lines = [
        f"iris: {n} points, {d} features ({', '.join(iris.feature_names)})",
        f"CMLE, {k} clusters of at least {plan.min_size:g} points, on {jax.devices()[0]}",
        "",
        str(plan),
        "",
    ]
    try:
        solution = jc.approximate(iris.x, k, eta=eta, key=key, certificate=False, progress=progress)
    except jc.TooManyCandidatesError:
        solution = jc.fit(iris.x, k, min_size=plan.min_size, key=key, progress=progress)
        lines += ["That is too many: here is what the practical search finds.", ""]
    claimed = solution.guarantee.kind == "probabilistic"
    guarantee = jc.certify(
        iris.x, solution, min_size=plan.min_size, time_limit=TIME_LIMIT, progress=progress
    )
    solution = guarantee.better or dataclasses.replace(solution, guarantee=guarantee)

    species = [_species(iris, np.asarray(solution.labels) == j) for j in range(k)]
    lines += [*cluster_lines(solution, None, species), "", *result_lines(solution, n)]
    if claimed:
        lines.append(
            f"claim        {eta:g} nats per point: none is better by more, with probability "
            f"{1 - plan.delta:g}"
        )

    def draw(path: str) -> None:
        drawn = plotting.plot_clusters(
            iris.x, solution, ax=axes(), feature_names=iris.feature_names
        )
        plotting.save_picture(drawn, path)

    write(picture, draw)
    lines.append(f"picture      {picture or 'none: pip install matplotlib'}")
    record = {
        "plan": plan.to_dict(),
        **solution_record(solution, n),
        "species": species,
        "picture": picture,
    }
    print_result(options, lines, record)
    return Exit.DONE


def _species(iris: Iris, members: np.ndarray) -> str:
    counts = np.bincount(iris.species[members], minlength=len(iris.species_names))
    named = zip(counts, iris.species_names, strict=True)
    return ", ".join(f"{count} {name}" for count, name in named if count)
