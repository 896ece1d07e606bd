"""Several devices give the answers of one: eight of them, simulated on the CPU, in a child."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcmle as jc
from jaxcmle.problem.placement import on_one_device, place, placement_of

PRECISIONS = ("float32",)
CHILD = Path(__file__).with_name("on_devices.py")


@pytest.mark.parametrize("part", ["cem", "searches"])
def test_eight_devices_give_the_answers_of_one(part):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, CHILD, part],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    checks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    # As many as the child has: none may have been left out.
    assert len(checks) == ((5 + 4 + 2 * 2) * 3 + 6 + 2 if part == "cem" else 3 * (4 + 2 + 2) + 2)
    for check in checks:
        one, several = check["one"], check["several"]
        assert one.keys() == several.keys()
        for name in set(one) - {"cost", "costs", "bound"}:
            assert one[name] == several[name], (check["name"], name)
        for name in {"cost", "costs", "bound"} & set(one):
            np.testing.assert_allclose(
                several[name], one[name], rtol=2e-6, err_msg=f"{check['name']}: {name}"
            )


def test_a_mesh_of_one_device_gives_the_same(precision):
    x = np.random.default_rng(0).normal(size=(53, 2)).astype(precision)
    mesh = jax.make_mesh((1,), ("points",))
    start = jc.seed(jax.random.key(0), x, 3)
    one, other = jc.cem(x, start), jc.cem(x, start, mesh=mesh)
    assert one.labels.tolist() == other.labels.tolist()
    np.testing.assert_allclose(other.cost, one.cost, rtol=1e-6)


def test_points_go_along_the_axis_that_is_called_so():
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    assert placement_of(None, Mesh(devices, ("starts", "points"))).points == ("points",)
    assert placement_of(None, Mesh(devices, ("a", "b"))).points == ("a",)
    assert placement_of(None, Mesh(devices, ("a", "b"))).others == ("b",)


def test_axes_are_the_compilers_wherever_a_mesh_is_set():
    x = np.random.default_rng(0).normal(size=(23, 1)).astype(np.float32)
    start = jc.seed(jax.random.key(0), x, 2)
    stack = jax.tree.map(lambda leaf: leaf[None], start)
    known = jc.cem(x, start)
    mesh = jax.make_mesh((1,), ("points",), axis_types=(AxisType.Explicit,))
    small = jc.Effort(rounds=1, patience=1, restarts=1, methods=("kmeans++",), population=2)
    calls = {
        "cem": lambda **kw: jc.cem(x, start, **kw).cost,
        "cem_restarts": lambda **kw: jc.cem_restarts(x, stack, **kw).cost,
        "score": lambda **kw: jc.score(x, stack, **kw)[0],
        "lower_bound": lambda **kw: jc.lower_bound(x, 2, min_size=2, **kw),
        "with_certificate": lambda **kw: jc.with_certificate(x, known, **kw).guarantee.lower_bound,
        "fit": lambda **kw: jc.fit(x, 2, effort=small, **kw).cost,
        "approximate": lambda **kw: jc.approximate(x, 2, eta=15.0, **kw).cost,
    }
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("points")))
    for name, call in calls.items():
        expected = float(call())
        with jax.set_mesh(mesh):
            np.testing.assert_allclose(call(mesh=mesh), expected, rtol=1e-5, err_msg=name)
            # What was set stays so.
            assert jax.sharding.get_mesh() == mesh
    with jax.set_mesh(mesh):
        for given in (x, split):
            np.testing.assert_allclose(jc.cem(given, start).cost, known.cost, rtol=1e-5)


def test_cem_runs_under_jit_on_a_mesh():
    x = np.random.default_rng(0).normal(size=(53, 2)).astype(np.float32)
    mesh = jax.make_mesh((1,), ("points",))
    start = jc.seed(jax.random.key(0), x, 3)
    inside = jax.jit(lambda x, start: jc.cem(x, start, mesh=mesh))(x, start)
    assert inside.labels.tolist() == jc.cem(x, start, mesh=mesh).labels.tolist()


def test_points_of_weight_0_hold_anything_on_a_mesh_too():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(401, 2)) + 9 * (np.arange(401) % 3)[:, None]).astype(np.float32)
    weight = np.ones(401)
    for row, value in ((3, np.nan), (200, np.inf), (399, 1e30)):
        x[row, 1], weight[row] = value, 0
    effort = jc.Effort(rounds=3, patience=1, restarts=1, methods=("kmeans++",), sample=200)
    mesh = jax.make_mesh((1,), ("points",))
    given = {"effort": effort, "sample_weight": weight, "mesh": mesh}
    found = jc.fit(x, 3, **given)
    # Clusters are numbered by their first points.
    labels = np.asarray(found.labels)
    assert labels.shape == (401,)
    assert (labels == np.arange(401) % 3)[weight > 0].all()
    again = jc.fit(x, 3, init=found.mixture, **given)
    np.testing.assert_allclose(again.cost, found.cost, rtol=1e-6)


def test_numbers_of_the_host_keep_their_digits():
    guarantee = jc.Guarantee(kind="certificate", lower_bound=-123456.7891, gap=0.1, delta=0.1)
    assert on_one_device(guarantee) == guarantee


def test_values_are_checked_on_a_mesh_too():
    mesh = jax.make_mesh((1,), ("points",))
    x = np.ones((9, 2), np.float32)
    x[4, 1] = np.nan
    with pytest.raises(ValueError, match="row 4"):
        place(x, None, mesh)
    with pytest.raises(ValueError, match=r"shape \(9,\)"):
        place(np.ones((9, 2)), np.ones(8), mesh)
    with pytest.raises(TypeError, match=r"jax\.sharding\.Mesh"):
        jc.fit(x, 2, mesh=8)
    with pytest.raises(ValueError, match="distinct"):
        jc.cem(np.ones((9, 2)), jc.seed(jax.random.key(0), np.eye(9, 2), 2), mesh=mesh)
