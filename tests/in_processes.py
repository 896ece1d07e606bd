"""One of several processes that `test_processes.py` starts: works with the others, prints JSON."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

import jaxcmle as jc
from jaxcmle.candidates import leaves
from jaxcmle.problem.placement import to_host
from jaxcmle.solve import checkpoint, sources

SMALL = jc.Effort(rounds=3, patience=1, restarts=1, methods=("kmeans++",), population=4, sample=600)
LONG = jc.Effort(rounds=30, patience=30, restarts=1, methods=("kmeans++",), population=4)
# Seconds that a round of a long search takes at least.
SLOW = 0.5


def data(n, seed=0):
    random = np.random.default_rng(seed)
    label = random.integers(3, size=n)
    centres = np.array([[0, 0], [6, 1], [2, 7]])
    return (centres[label] + random.normal(size=(n, 2))).astype(np.float32)


def record(solution):
    return {
        "labels": to_host(solution.labels).tolist(),
        "cost": float(solution.cost),
        "means": to_host(solution.mixture.means).tolist(),
        "status": int(solution.status),
        "kind": solution.guarantee.kind,
    }


def all_answers(mesh):
    """Return what the entry points say; None for a mesh is one process alone."""
    x, few = data(1201), data(41)
    start = jc.seed(jax.random.key(1), x, 3)
    stack = jax.tree.map(lambda leaf: leaf[None], start)
    return {
        "score": {"cost": float(jc.score(x, stack, mesh=mesh)[0])},
        "lower_bound": {"cost": jc.lower_bound(few, 3, min_size=2, mesh=mesh)},
        "cem": record(jc.cem(x, start, mesh=mesh)),
        # So few that the search for distinct points looks at all of them.
        "cem, few": record(jc.cem(few, jc.seed(jax.random.key(2), few, 11), mesh=mesh)),
        "fit, few": record(jc.fit(few, 3, effort=SMALL, mesh=mesh)),
        "fit, many": record(jc.fit(x, 3, effort=SMALL, mesh=mesh)),
        "fit, known": record(jc.fit(x, 3, effort=SMALL, init=start, mesh=mesh)),
        "fit, proved": record(jc.fit(few, 3, effort=SMALL, certify=True, mesh=mesh)),
        "approximate": record(jc.approximate(few, 2, eta=3.0, certificate=False, mesh=mesh)),
        "all subsets": record(
            jc.approximate(few[:20], 2, eta=0.5, delta=0, certificate=False, mesh=mesh)
        ),
        "abs": record(
            jc.approximate(few[:20], 2, algorithm="abs", eta=0.8, certificate=False, mesh=mesh)
        ),
    }


def long_search(mesh, path, slow):
    def wait(report):
        if slow:
            print(f"round {report.done}", flush=True)
            time.sleep(SLOW)

    checkpoint.EVERY = 0.0
    return record(
        jc.fit(data(301, seed=4), 5, effort=LONG, mesh=mesh, checkpoint=path, progress=wait)
    )


def be_slow():
    """Let all steps seem to take a thousand times as long: machines differ, too."""
    sources.time = SimpleNamespace(monotonic=lambda: 1000 * time.monotonic())


def refused(mesh, path, damaged):
    """Return what is said where one process sees another file than the other."""
    if damaged:
        path.write_text("of somebody else")
    try:
        jc.fit(data(41), 3, effort=SMALL, mesh=mesh, checkpoint=path)
    except ValueError as error:
        return str(error)


def main(number, port, task, folder):
    # As the command line keeps them: nobody compiles twice.
    jax.config.update("jax_compilation_cache_dir", str(Path(folder, "programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", 2, int(number), heartbeat_timeout_seconds=20, initialization_timeout=90
    )
    mesh = jax.make_mesh((2,), ("points",))
    try:
        if task == "answers":
            # Many steps, of which each process would take another number at a time.
            leaves.MOST_LEAVES = 64
            if number == "1":
                be_slow()
            found = all_answers(mesh)
            for victim in "10":
                path = Path(folder, f"checkpoint {victim} of {number}")
                print("refused " + refused(mesh, path, damaged=number == victim))
        else:
            path = Path(folder, f"{task.removeprefix('slow ')}.checkpoint")
            found = long_search(mesh, path, slow=task.startswith("slow"))
    except jc.ProcessLostError as error:
        print(f"lost: {error}", file=sys.stderr, flush=True)
        os._exit(5)
    print("found " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
