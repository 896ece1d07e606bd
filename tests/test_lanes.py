"""CEM in lanes: the same answers as one instance at a time, whatever the company."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import export
from support import (
    BETA,
    NAMES,
    PROBLEMS,
    assert_cost,
    assert_labels,
    parameters,
    random_weights,
    tolerance,
)

import jaxcmle as jc
from jaxcmle import numerics
from jaxcmle.refine.folds import branches_of
from jaxcmle.refine.iterations import default_min_variance
from jaxcmle.refine.lanes import cem_lanes

N, D, K, LANES, TILE = 50, 2, 4, 16, 16
# Kinds of instance that follow each other in a batch; `HARD` ones may differ by a tie.
KINDS = (
    "plain",
    "fraction",
    "whole",
    "padded points",
    "offset",
    "scales",
    "duplicates",
    "two clusters",
    "one cluster",
    "empty",
    "few points",
    "NaN start",
    "large minimum",
    "far start",
)
COUNT = 16 * len(KINDS)
HARD = ("scales", "duplicates", "few points", "empty", "far start", "offset")


def instance(kind, seed, precision, n=N):
    """Return points, weights, a start, which clusters exist, and the minimum size."""
    rng = np.random.default_rng(seed)
    x, labels = reference.random_mixture_data(rng, n, D, K, 4.0)
    weight, exists, min_size = np.ones(n), np.ones(K, bool), 2.0
    if kind in ("fraction", "whole"):
        weight = random_weights(rng, n, kind)
    if kind == "offset":
        x += 1e4
    if kind == "scales":
        x = (
            np.array([[0, 0], [1, 0], [0, 2000], [5000, 5000]])[labels]
            + rng.normal(size=(n, D)) * np.array([1e-3, 1e-3, 1e2, 1e3])[labels, None]
        )
    if kind == "duplicates":
        x = rng.integers(0, 3, size=(n, D)).astype(float)
    present = 4 if kind == "few points" else n - 13 if kind == "padded points" else n
    start = x[rng.choice(present, K, replace=False)]
    variances = np.full(K, x.var())
    if kind == "two clusters":
        exists[[0, 2]] = False
    if kind == "one cluster":
        exists[:3] = False
    if kind == "empty":
        start[rng.integers(K)] = 1e3
    if kind == "far start":
        start = 1e3 + 100 * rng.normal(size=(K, D))
    if kind == "NaN start":
        start[rng.integers(K), 0] = np.nan
    if kind == "large minimum":
        min_size = n / 3
    x[present:], weight[present:] = np.nan, 0
    mixture = jc.Mixture(weights=np.full(K, 1 / exists.sum()), means=start, variances=variances)
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, bool if np.asarray(leaf).dtype == bool else precision),
        (x, weight, mixture, exists, min_size),
    )


def batch(kinds, precision, n=N, first_seed=0):
    drawn = [instance(kind, first_seed + i, precision, n) for i, kind in enumerate(kinds)]
    x, weight, starts, exists, min_size = jax.tree.map(
        lambda *leaves: jnp.asarray(np.stack(leaves)), *drawn
    )
    floor = jax.vmap(lambda x, w: default_min_variance(numerics.prepare(x, w)))(x, weight)
    return {
        "x": x,
        "weight": weight,
        "starts": starts,
        "exists": exists,
        "min_size": min_size,
        "min_variance": jnp.maximum(floor, 1e-8),
    }


def in_lanes(given, problem, max_iter=100, count=None, lanes=LANES, tile=TILE):
    count = len(given["x"]) if count is None else count
    found = cem_lanes(
        **given, problem=problem, max_iter=max_iter, count=count, lanes=lanes, tile=tile
    )
    return found if isinstance(found.cost, jax.core.Tracer) else jax.device_get(found)


def one_by_one(given, problem, max_iter=100):
    def one(x, weight, start, min_size, min_variance):
        return jc.cem(
            x,
            start,
            problem=problem,
            sample_weight=weight,
            max_iter=max_iter,
            min_size=min_size,
            min_variance=min_variance,
        )

    names = ("x", "weight", "starts", "min_size", "min_variance")
    return jax.device_get(jax.vmap(one)(*(given[name] for name in names)))


def rows(tree, index):
    return jax.tree.map(lambda leaf: leaf[np.asarray(index)], tree)


def assert_same(actual, expected):
    """Bit by bit."""
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_alike(actual, expected, precision, share):
    """Where labels are the same, so is all the rest; and they are, but for a share of ties."""
    same = (np.asarray(actual.labels) == np.asarray(expected.labels)).all(axis=1)
    assert same.mean() >= 1 - share, same.mean()
    actual, expected = rows(actual, same), rows(expected, same)
    np.testing.assert_array_equal(actual.status, expected.status)
    if share == 0:
        np.testing.assert_array_equal(actual.n_iter, expected.n_iter)
    valid = np.isfinite(expected.mixture.means).all(axis=(1, 2))
    for name in ("weights", "means", "variances"):
        mine, other = (np.asarray(getattr(s.mixture, name))[valid] for s in (actual, expected))
        scale = np.abs(other).max(axis=tuple(range(1, other.ndim)), keepdims=True)
        assert (np.abs(mine - other) <= 10 * tolerance(precision) * scale).all(), name


@pytest.mark.parametrize("name", NAMES)
def test_equals_cem(name, precision):
    problem = PROBLEMS[name]
    kinds = KINDS * 16
    given = batch(kinds, precision)
    found = in_lanes(given, problem)
    full = np.asarray(given["exists"]).all(axis=1)
    easy = np.array([kind not in HARD for kind in kinds])
    expected = one_by_one(given, problem)
    # Where one cluster has all points, those without any are its equals under this problem.
    ties = 0.2 if name == "ucmle" else 0.05
    assert_alike(rows(found, full & easy), rows(expected, full & easy), precision, 0)
    assert_alike(rows(found, full & ~easy), rows(expected, full & ~easy), precision, ties)

    statuses = {kind: set() for kind in kinds}
    for i, kind in enumerate(kinds):
        solution = rows(found, i)
        statuses[kind].add(jc.Status(int(solution.status)).name)
        there = np.asarray(given["exists"][i])
        values = tuple(value[there] for value in parameters(solution.mixture))
        finite = np.isfinite(given["x"][i]).all(axis=1)
        if kind == "NaN start":
            continue
        x, weight = (np.asarray(given[key][i], np.float64) for key in ("x", "weight"))
        labels = np.cumsum(there)[solution.labels] - 1
        assert_labels(labels[finite], x[finite], values, name, precision)
        assert not solution.labels[~finite].any()
        cost = reference.model_cost(x[finite], *values, name, BETA, weight[finite])
        # Rounded, a mean is off by this: it tells where clusters are narrow and far away.
        shown = np.abs(x[finite]).max() ** 2 * np.finfo(precision).eps ** 2 / values[2].min()
        assert abs(solution.cost - cost) <= tolerance(precision) * max(abs(cost), N * D / 2) + (
            N * shown
        )
    assert statuses["NaN start"] == {"NONFINITE"}
    assert statuses["plain"] <= {"CONVERGED", "INADMISSIBLE"}
    assert "INADMISSIBLE" in statuses["large minimum"]
    assert statuses["few points"] == {"INADMISSIBLE"}


def test_missing_clusters_are_missing(precision):
    given = batch(["two clusters"] * COUNT, precision)
    found = in_lanes(given, jc.UCMLE())
    np.testing.assert_array_equal(found.mixture.weights[:, ::2], 0)
    np.testing.assert_array_equal(found.labels % 2, 1)
    starts = jax.tree.map(lambda leaf: leaf[:, 1::2], given["starts"])
    expected = one_by_one({**given, "starts": starts}, jc.UCMLE())
    mixture = jax.tree.map(lambda leaf: leaf[:, 1::2], found.mixture)
    found = dataclasses.replace(found, mixture=mixture, labels=found.labels // 2)
    assert_alike(found, expected, precision, 0)


@pytest.mark.parametrize("max_iter", [0, 1, 2])
def test_stops_at_max_iter(max_iter, precision):
    given = batch(["plain", "fraction", "padded points", "far start"] * (COUNT // 4), precision)
    found = in_lanes(given, jc.CMLE(), max_iter)
    assert_alike(found, one_by_one(given, jc.CMLE(), max_iter), precision, 0)
    assert (np.asarray(found.n_iter) <= max_iter).all()


def test_does_not_depend_on_company(precision):
    given = batch(KINDS * 16, precision)
    found = in_lanes(given, jc.CMLE())
    order = np.random.default_rng(0).permutation(COUNT)
    assert_same(in_lanes(rows(given, order), jc.CMLE()), rows(found, order))
    assert_same(in_lanes(given, jc.CMLE(), lanes=48), found)
    few = in_lanes(given, jc.CMLE(), count=31)
    assert_same(rows(few, range(31)), rows(found, range(31)))
    np.testing.assert_array_equal(few.cost[31:], np.inf)
    np.testing.assert_array_equal(few.status[31:], jc.Status.NONFINITE)
    np.testing.assert_array_equal(in_lanes(given, jc.CMLE(), count=0).cost, np.inf)


def test_padding_and_tiles_show_only_in_rounding(precision):
    """More points of weight 0, more clusters that do not exist; sums left to the compiler."""
    easy = [kind for kind in KINDS if kind not in HARD]
    given = batch((easy * COUNT)[:COUNT], precision)
    found = in_lanes(given, jc.UCMLE())
    assert_alike(in_lanes(given, jc.UCMLE(), tile=N), found, precision, 0)

    def pad(leaf, extra, value, axis=1):
        widths = [(0, 0)] * leaf.ndim
        widths[axis] = (0, extra)
        return jnp.pad(leaf, widths, constant_values=value)

    padded = {
        "x": pad(given["x"], 30, np.nan),
        "weight": pad(given["weight"], 30, 0),
        "starts": jax.tree.map(lambda leaf: pad(leaf, 3, np.nan), given["starts"]),
        "exists": pad(given["exists"], 3, False),
        "min_size": given["min_size"],
        "min_variance": given["min_variance"],
    }
    wide = in_lanes(padded, jc.UCMLE())
    np.testing.assert_array_equal(wide.mixture.weights[:, K:], 0)
    assert np.isfinite(wide.mixture.means[:, K:]).all()
    narrow = dataclasses.replace(
        wide,
        mixture=jax.tree.map(lambda leaf: leaf[:, :K], wide.mixture),
        labels=wide.labels[:, :N],
    )
    assert_alike(narrow, found, precision, 0)


def test_bad_values_show(precision):
    given = batch(["plain"] * COUNT, precision)
    x = given["x"].at[0, 3, 1].set(jnp.nan).at[1, 4, 0].set(jnp.inf)
    weight = given["weight"].at[2, 5].set(-1).at[3, 6].set(jnp.nan)
    found = in_lanes({**given, "x": x, "weight": weight}, jc.CMLE())
    np.testing.assert_array_equal(found.status[:4], jc.Status.NONFINITE)
    assert not np.isfinite(found.cost[:4]).any()
    clean = in_lanes(given, jc.CMLE())
    assert_same(rows(found, range(4, 200)), rows(clean, range(4, 200)))


def test_many_points_and_features(precision):
    """Sums of many terms of one sign lose nothing; more features than are unrolled."""
    rng = np.random.default_rng(0)
    n, d, k = 6000, 26, 5
    centres = 10 * rng.normal(size=(3, k, d))
    labels = rng.integers(0, k, size=(3, n))
    x = np.take_along_axis(centres, labels[..., None], axis=1) + 0.1 * rng.normal(size=(3, n, d))
    x = jnp.asarray(x, precision)
    ones = jnp.ones((3, k), precision)
    starts = jc.Mixture(weights=ones / k, means=jnp.asarray(centres, precision), variances=ones)
    limit = jnp.ones(3, precision)
    found = cem_lanes(
        x,
        jnp.ones((3, n), precision),
        starts,
        jnp.ones((3, k), bool),
        jc.CMLE(),
        10,
        limit,
        1e-6 * limit,
        3,
        lanes=4,
        tile=TILE,
    )
    np.testing.assert_array_equal(found.labels, labels)
    for i in range(3):
        exact = reference.estimate(np.asarray(x[i], np.float64), labels[i], k, "cmle")
        for value, other in zip(parameters(rows(found.mixture, i)), exact, strict=True):
            np.testing.assert_allclose(value, other, rtol=0, atol=tolerance(precision) / 4)
        cost = reference.model_cost(x[i], *parameters(rows(found.mixture, i)), "cmle", BETA)
        assert_cost(found.cost[i], cost, n, d, precision)


@pytest.mark.parametrize(("n", "tile"), [(17, 16), (200, 16), (5000, 16), (10**6, 16), (33, 8)])
def test_trees_hold_all_points(n, tile):
    branches = branches_of(n, tile)
    assert branches[0] == tile
    assert max(branches) <= 32
    assert n <= np.prod(branches) <= 1.3 * n + tile


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for_accelerators(platform, precision):
    given = batch(["plain"] * 3, precision)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), given)
    for tile in (TILE, N):
        program = jax.jit(lambda given, tile=tile: in_lanes(given, jc.CMLE(), tile=tile))
        assert export.export(program, platforms=[platform])(shapes).platforms == (platform,)
