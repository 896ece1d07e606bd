"""Run by `test_devices.py` with eight simulated devices: is every answer that of one device?

Prints one line of JSON for each check, with what was found on one device and on several.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcmle as jc
from jaxcmle.problem.placement import place, to_host
from jaxcmle.refine import sharded
from jaxcmle.refine.iterations import Limits

PROBLEMS = {"cmle": jc.CMLE(), "wkm": jc.WKM(beta=0.7), "ucmle": jc.UCMLE()}


def data(n, d, k, seed=0, offset=0.0):
    random = np.random.default_rng(seed)
    centres = 6 * random.normal(size=(k, d)) + offset
    label = random.integers(k, size=n)
    spread = 0.5 + label[:, None] / k
    return (centres[label] + spread * random.normal(size=(n, d))).astype(np.float32)


def meshes():
    devices = np.array(jax.devices())
    return {
        "points": Mesh(devices, ("points",)),
        "points and starts": Mesh(devices.reshape(4, 2), ("points", "starts")),
        "starts first": Mesh(devices.reshape(2, 4), ("starts", "points")),
        "explicit": jax.make_mesh((8,), ("x",)),
        "three of them": Mesh(devices[:3], ("points",)),
    }


def report(name, one, several, **more):
    print(json.dumps({"name": name, "one": one, "several": several, **more}), flush=True)


def solution_of(solution):
    return {
        "labels": to_host(solution.labels).tolist(),
        "cost": float(solution.cost),
        "status": int(solution.status),
        "kind": solution.guarantee.kind,
        "bound": float(solution.guarantee.lower_bound),
    }


def stack_of_starts(x, k, count):
    keys = jax.random.split(jax.random.key(1), count)
    return jax.vmap(lambda key: jc.seed(key, x, k))(keys)


WEIGHTS = np.random.default_rng(5).integers(0, 3, 1003).astype(np.float32)
# Numbers of points that eight devices cannot share equally, and once fewer than there are devices.
CASES = (
    (1003, 3, 4, 1e4, WEIGHTS),
    (1003, 3, 4, 0.0, None),
    (7, 1, 2, 0.0, None),
    (4001, 8, 20, 0.0, None),
)


def check_cem_and_score(mesh, problem, name, cases):
    for n, d, k, offset, weight in cases:
        x = data(n, d, k, offset=offset)
        given = {"problem": problem, "sample_weight": weight}
        starts = stack_of_starts(x, k, 5)
        first = jax.tree.map(lambda leaf: leaf[0], starts)
        label = f"{name}, {n} points in {d}-D"
        one, several = jc.cem(x, first, **given), jc.cem(x, first, mesh=mesh, **given)
        report(f"cem, {label}", solution_of(one), solution_of(several))
        one = jc.cem_restarts(x, starts, **given)
        several = jc.cem_restarts(x, starts, mesh=mesh, **given)
        report(f"cem_restarts, {label}", solution_of(one), solution_of(several))
        one, several = jc.score(x, starts, **given), jc.score(x, starts, mesh=mesh, **given)
        report(f"score, {label}", {"costs": one.tolist()}, {"costs": several.tolist()})


def check_bound(mesh, problem, name):
    for n in (8, 403):
        x = data(n, 3, 3)
        for weight in (None, np.random.default_rng(1).uniform(1, 2, n).astype(np.float32)):
            given = {"problem": problem, "sample_weight": weight, "min_size": 2}
            one, several = jc.lower_bound(x, 3, **given), jc.lower_bound(x, 3, mesh=mesh, **given)
            report(f"lower_bound, {name}, {n} points", {"costs": [one]}, {"costs": [several]})


def check_fit(mesh, problem, name):
    small = jc.Effort(rounds=3, patience=1, restarts=1, methods=("kmeans++",), sample=1000)
    for n in (401, 2003):
        x = data(n, 3, 4)
        given = {"problem": problem, "effort": small, "key": jax.random.key(3)}
        one, several = jc.fit(x, 4, **given), jc.fit(x, 4, mesh=mesh, **given)
        report(f"fit, {name}, {n} points", solution_of(one), solution_of(several))
        if name != "cmle":
            continue
        with tempfile.TemporaryDirectory() as folder:
            given |= {"mesh": mesh, "checkpoint": Path(folder, "work")}
            cut = jc.fit(x, 4, time_limit=0, **given)
            assert int(cut.status) == jc.Status.INTERRUPTED
            resumed = jc.fit(x, 4, **given)
        # To the last bit.
        assert float(resumed.cost) == float(several.cost)
        report(f"fit resumed, {name}, {n} points", solution_of(several), solution_of(resumed))


def check_approximate(mesh, problem, name):
    x = data(41, 2, 2, seed=3)
    # A claim that few candidates are enough for.
    eta = 15.0 if name == "wkm" else 3.0
    for given in ({"eta": eta}, {"eta": eta, "certificate": False}):
        one = jc.approximate(x, 2, problem=problem, **given)
        several = jc.approximate(x, 2, problem=problem, mesh=mesh, **given)
        report(f"approximate, {name}, {given}", solution_of(one), solution_of(several))


def check_points_that_are_split_already():
    mesh = jax.make_mesh((8,), ("x",))
    x = data(1600, 3, 4)
    start = jc.seed(jax.random.key(0), x, 4)
    for spec in (PartitionSpec("x"), PartitionSpec(None), PartitionSpec()):
        split = jax.device_put(x, NamedSharding(mesh, spec))
        report(f"cem on {spec}", solution_of(jc.cem(x, start)), solution_of(jc.cem(split, start)))
        one = {"costs": [float(jc.cost(x, start))], "labels": jc.assign(x, start).tolist()}
        several = {
            "costs": [float(jc.cost(split, start))],
            "labels": jc.assign(split, start).tolist(),
        }
        report(f"cost and assign on {spec}", one, several)


def check_collectives():
    """Count what a compiled iteration exchanges."""
    found = meshes()
    for name in ("points", "points and starts"):
        placed = place(data(4001, 8, 20), None, found[name])
        starts = stack_of_starts(data(4001, 8, 20), 20, 4)
        program = sharded._cem.lower(
            placed.x, placed.weight, starts, jc.CMLE(), Limits(300, 2, None), placed.placement, True
        )
        text = program.compile().as_text()
        exchanges = r"= .*\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
        bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
        inside, current = [], ""
        for line in text.splitlines():
            begins = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
            current = begins.group(1) if begins else current
            found_here = re.search(exchanges + r"(-start)?\(", line)
            if found_here and current in bodies:
                inside.append(found_here.group(1))
        report(f"collectives, {name}", {"inside": ["all-reduce"]}, {"inside": inside})


def main(part):
    if part == "cem":
        for name, mesh in meshes().items():
            check_cem_and_score(mesh, jc.CMLE(), f"cmle on {name}", CASES[:1])
        for name, problem in PROBLEMS.items():
            cases = CASES if name == "cmle" else CASES[::2]
            check_cem_and_score(meshes()["points and starts"], problem, name, cases)
        check_points_that_are_split_already()
        check_collectives()
        return
    mesh = meshes()["points and starts"]
    for name, problem in PROBLEMS.items():
        check_bound(mesh, problem, name)
        check_fit(mesh, problem, name)
        check_approximate(mesh, problem, name)


if __name__ == "__main__":
    main(sys.argv[1])
