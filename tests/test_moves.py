"""Single-point moves and exchanges, against differences of the oracle's partition costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from support import BETA, NAMES, PROBLEMS, random_weights, tolerance

import jaxcmle as jc
from jaxcmle import numerics
from jaxcmle.refine.exchange import exchanged
from jaxcmle.refine.polish import Limits, ready
from jaxcmle.refine.workspace import partitions_of

UNIT = np.sqrt(4 / np.pi)
N, D, K = 14, 2, 3


def instance(seed, precision, family=0, n=N, d=D, k=K):
    """Return points and labels with at least two points in every cluster."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * 3
    if family == 1:
        x[0] *= 50
    elif family == 2:
        x = np.round(x)
    elif family == 3:
        x[: n // 2] *= 0.02
    elif family == 4:
        x += 1e4
    labels = rng.permutation(
        np.concatenate([np.repeat(np.arange(k), 2), rng.integers(0, k, n - 2 * k)])
    )
    return rng, x.astype(precision), labels.astype(np.int32)


def oracle(x, labels, name, weights=None, floor=0.0, k=K):
    return reference.partition_cost(x, labels, k, name, BETA, weights, min_variance=floor)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("cmle", "none"), ("cmle", "fraction"), ("wkm", "whole"), ("ucmle", "fraction")],
)
def test_deltas_are_differences_of_partition_costs(name, kind, precision):
    floor = 1e-2
    for seed in range(12):
        rng, x, labels = instance(seed, precision, family=seed % 4)
        weights = random_weights(rng, N, kind)
        deltas = np.asarray(
            jc.move_deltas(
                x, labels, K, problem=PROBLEMS[name], sample_weight=weights, min_variance=floor
            )
        )
        before = oracle(x, labels, name, weights, floor)
        scale = abs(before) + N * D
        # What leaves a cluster that is dominated by it takes most of the scatter with it.
        slack = 30 * tolerance(precision) * scale
        for i in range(N):
            for k in range(K):
                other = labels.copy()
                other[i] = k
                wanted = oracle(x, other, name, weights, floor) - before
                assert abs(deltas[i, k] - wanted) <= slack, (seed, i, k, deltas[i, k], wanted)


def test_deltas_are_sharp_in_float32_where_costs_are_large():
    """Half a million points of two clusters: costs of a million nats, changes of one."""
    rng = np.random.default_rng(0)
    n = 400_000
    x = rng.normal(size=(n, 1)).astype(np.float32)
    labels = (rng.random(n) < 0.5).astype(np.int32)
    with jax.enable_x64(False):
        deltas = np.asarray(jc.move_deltas(x, labels, 2), np.float64)
    wide = x[:, 0].astype(np.float64)
    moments = []
    for k in range(2):
        members = wide[labels == k]
        moments.append((len(members), members.mean(), ((members - members.mean()) ** 2).sum()))

    def part(size, scatter):
        return size / 2 * (np.log(2 * np.pi * scatter / size) + 1) - size * np.log(size / n)

    for i in range(0, n, 40_001):
        (a, mean_a, s_a), (b, mean_b, s_b) = moments[labels[i]], moments[1 - labels[i]]
        leaving = part(a - 1, s_a - a * (wide[i] - mean_a) ** 2 / (a - 1)) - part(a, s_a)
        entering = part(b + 1, s_b + b * (wide[i] - mean_b) ** 2 / (b + 1)) - part(b, s_b)
        assert abs(deltas[i, 1 - labels[i]] - (leaving + entering)) < 1e-4


def test_a_cluster_without_spread_gains_infinity_without_a_floor(precision):
    deltas = np.asarray(jc.move_deltas([[0.0], [2.0], [4.0], [9.0]], [0, 0, 1, 1], 2))
    assert (deltas[[0, 1], 1] == -np.inf).all()
    assert (deltas[[0, 1, 2, 3], [0, 0, 1, 1]] == 0).all()


@pytest.mark.parametrize(("name", "kind"), [("cmle", "none"), ("wkm", "whole"), ("ucmle", "whole")])
def test_polish_ends_where_no_move_improves(name, kind, precision):
    floor, size = 1e-2, 2
    for seed in range(15):
        rng, x, labels = instance(seed, precision, family=seed % 5)
        weights = random_weights(rng, N, kind)
        solution = jc.polish(
            x,
            labels,
            K,
            problem=PROBLEMS[name],
            sample_weight=weights,
            min_size=size,
            min_variance=floor,
        )
        assert int(solution.status) == jc.Status.CONVERGED
        end = np.asarray(solution.labels)
        before = oracle(x, labels, name, weights, floor)
        after = oracle(x, end, name, weights, floor)
        slack = 30 * tolerance(precision) * (abs(before) + N * D)
        assert after <= before + slack
        assert abs(float(solution.cost) - after) <= slack
        present = np.ones(N) if weights is None else weights
        sizes = np.bincount(end, present, K)
        assert sizes.min() >= size
        for i in np.flatnonzero(present):
            if sizes[end[i]] - present[i] < size:
                continue
            for k in range(K):
                other = end.copy()
                other[i] = k
                assert oracle(x, other, name, weights, floor) >= after - slack


def test_polish_is_never_worse_than_a_fixed_point_of_cem(precision):
    better = 0
    for seed in range(30):
        _, x, _ = instance(seed, precision)
        solution = jc.cem(x, jc.seed(jax.random.key(seed), x, K), min_variance=1e-2)
        if int(solution.status) != jc.Status.CONVERGED:
            continue
        end = jc.polish(x, solution.labels, K, min_variance=1e-2)
        assert float(end.cost) <= float(solution.cost) + tolerance(precision) * N * D
        better += float(end.cost) < float(solution.cost) - 0.01
        if bool(end.consistent):
            again = jc.cem(x, end.mixture, min_variance=1e-2)
            np.testing.assert_array_equal(again.labels, end.labels)
    assert better > 3


def test_the_example_of_the_specification_is_solved_from_everywhere(precision):
    """X = {0, u, 2u, 100}: CEM leaves the optimum, 15.082, and moves alone do not reach it."""
    x = np.array([[0.0], [UNIT], [2 * UNIT], [100.0]])
    for labels in (
        [0, 0, 1, 1],
        [0, 1, 0, 1],
        [0, 1, 1, 0],
        [0, 0, 0, 1],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
    ):
        solution = jc.polish(x, labels, 2)
        assert abs(float(solution.cost) - 15.082) < 1e-3
        assert not bool(solution.consistent)
        assert int(solution.status) == jc.Status.CONVERGED


def test_the_best_move_of_two_points_is_the_oracles(precision):
    """Two points change places, or one takes the place of another that goes on to a third."""
    size, n = 3, 11
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x = (rng.normal(size=(n, D)) * 3).astype(precision)
        labels = rng.permutation(np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2])).astype(np.int32)
        name = NAMES[seed % 3]
        space = ready(
            numerics.prepare(jnp.asarray(x), None),
            jnp.ones(K, bool),
            Limits(size, 1e-2),
            PROBLEMS[name],
        )
        partitions = partitions_of(space, jnp.asarray(labels)[None], K, PROBLEMS[name])
        found = exchanged(space, partitions, jnp.array([True]), PROBLEMS[name], True)[0]
        best = oracle(x, labels, name, floor=1e-2)
        for i in range(n):
            for j in range(n):
                for k in set(range(K)) - {labels[i]}:
                    other = labels.copy()
                    other[i], other[j] = k, labels[i]
                    if labels[i] == labels[j] or np.bincount(other, minlength=K).min() < size:
                        continue
                    best = min(best, oracle(x, other, name, floor=1e-2))
        assert np.bincount(np.asarray(found), minlength=K).min() >= size
        assert abs(oracle(x, np.asarray(found), name, floor=1e-2) - best) < 1e-3 * abs(best)


def test_too_small_clusters_are_filled_up(precision):
    for seed in range(5):
        _, x, _ = instance(seed, precision)
        solution = jc.polish(x, np.zeros(N, int), K, min_size=4)
        assert int(solution.status) == jc.Status.CONVERGED
        assert np.bincount(np.asarray(solution.labels), minlength=K).min() >= 4
    impossible = jc.polish(x, np.zeros(N, int), K, min_size=6)
    assert int(impossible.status) == jc.Status.INADMISSIBLE


def test_no_move_leaves_a_cluster_without_spread(precision):
    """Two points coincide: as a cluster they would cost minus infinity, and must not win."""
    _, x, labels = instance(3, precision)
    x[1] = x[0]
    labels[:3], labels[3:5] = 0, 1
    labels[5:] = np.arange(N - 5) % 2 + 1
    solution = jc.polish(x, labels, K)
    sizes = np.bincount(np.asarray(solution.labels), minlength=K)
    assert not (sizes[solution.labels[0]] == 2 and solution.labels[0] == solution.labels[1])


@pytest.mark.parametrize("name", ["cmle"])
def test_padding_changes_nothing(name, precision):
    _, x, labels = instance(1, precision)
    plain = jc.polish(x, labels, K, problem=PROBLEMS[name], min_variance=1e-2)
    weights = np.concatenate([np.ones(N), np.zeros(5)])
    padded = np.concatenate([x, np.full((5, D), np.nan, precision)])
    longer = np.concatenate([labels, np.zeros(5, np.int32)])
    options = {"problem": PROBLEMS[name], "sample_weight": weights, "min_variance": 1e-2}
    solution = jc.polish(padded, longer, K, **options)
    np.testing.assert_array_equal(solution.labels[:N], plain.labels)
    np.testing.assert_allclose(solution.cost, plain.cost, rtol=1e-5)
    deltas = jc.move_deltas(padded, longer, K, **options)
    assert (np.asarray(deltas[N:]) == 0).all()
    assert np.isfinite(deltas).all()


@pytest.mark.parametrize(("n", "d", "k"), [(5, 1, 1), (6, 2, 6), (40, 60, 4)])
def test_edges(n, d, k, precision):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(n, d)) * 1e-3 + 7).astype(precision)
    labels = np.arange(n) % k
    solution = jc.polish(x, labels, k, min_size=1)
    assert np.isfinite(solution.cost)
    assert int(solution.status) == jc.Status.CONVERGED
    same = jc.polish(np.ones((n, d), precision), labels, k, min_size=1)
    assert np.isfinite(same.cost)


def test_an_offset_does_not_matter(precision):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        # Multiples of 1/64 stay exact at an offset.
        x = (rng.integers(-640, 640, size=(N, D)) / 64).astype(precision)
        labels = (np.arange(N) % K).astype(np.int32)
        plain = jc.polish(x, labels, K)
        moved = jc.polish(x + np.asarray(10240, precision), labels, K)
        np.testing.assert_array_equal(moved.labels, plain.labels)


def test_jit_and_vmap(precision):
    several = [instance(seed, precision)[1:] for seed in range(3)]

    def run(x, labels):
        return jc.polish(x, labels, K, min_variance=1e-2), jc.move_deltas(x, labels, K)

    xs, labels = (jnp.stack(list(values)) for values in zip(*several, strict=True))
    batched, deltas = jax.jit(jax.vmap(run))(xs, labels)
    for i, (x, label) in enumerate(several):
        single, own = run(x, label)
        np.testing.assert_array_equal(batched.labels[i], single.labels)
        np.testing.assert_allclose(deltas[i], own, rtol=1e-3, atol=1e-3)


def test_bad_values_under_jit_have_a_status(precision):
    _, x, labels = instance(0, precision)
    x[2, 1] = np.nan
    solution = jax.jit(lambda x: jc.polish(x, labels, K))(x)
    assert int(solution.status) == jc.Status.NONFINITE


def test_errors():
    x = np.zeros((4, 1))
    with pytest.raises(ValueError, match="labels must lie from 0"):
        jc.polish(x, [0, 1, 2, 3], 2)
    with pytest.raises(ValueError, match="one label per point"):
        jc.move_deltas(x, [0, 1], 2)
    with pytest.raises(ValueError, match="min_size must be 0 or more"):
        jc.polish(x, [0, 1, 0, 1], 2, min_size=-1)
