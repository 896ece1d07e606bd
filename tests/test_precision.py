"""Float32 against the float64 oracle on the same float32 input: offsets, mixed scales, many d."""

import numpy as np
import pytest
import reference
from support import as_mixture, assert_cost, assert_labels, parameters, stack

import jaxcmle as jc

PRECISIONS = ("float32",)
K = 5
N = 300
FEATURES = (1, 2, 8, 64)
KINDS = ("plain", "offset", "offsets of each sign", "mixed scales")


def instance(kind, d, n=N, k=K, seed=0):
    """Return float32 points of k clusters, their labels, and the mixture they came from."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % k
    sigma = np.ones(k) if kind != "mixed scales" else np.geomspace(1e-3, 1e3, k)
    spread = 4 if kind != "mixed scales" else 1e3
    centres = rng.normal(size=(k, d)) * spread
    if kind == "offset":
        centres += 1e4
    if kind == "offsets of each sign":
        centres += np.where(np.arange(d) % 2, -1e4, 3e4)
    x = centres[labels] + sigma[labels, None] * rng.normal(size=(n, d))
    return x.astype(np.float32), labels, (np.full(k, 1 / k), centres, sigma**2)


@pytest.mark.parametrize("d", FEATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_objective_in_float32(kind, d):
    for seed in range(5):
        x, labels, values = instance(kind, d, seed=seed)
        mixture, values = as_mixture(values, np.float32)
        expected = reference.model_cost(x, *values)
        assert_cost(jc.cost(x, mixture), expected, N, d, np.float32)
        assert_cost(jc.score(x, stack([mixture]))[0], expected, N, d, np.float32)
        assert_labels(jc.assign(x, mixture), x, values, "cmle", np.float32)
        partition = jc.partition_cost(x, labels, K)
        assert_cost(partition, reference.partition_cost(x, labels, K), N, d, np.float32)
        weights, _, variances = parameters(jc.estimate(x, labels, K))
        wanted = reference.estimate(x, labels, K)
        np.testing.assert_allclose(weights, wanted[0], rtol=1e-6)
        np.testing.assert_allclose(variances, wanted[2], rtol=1e-5)


@pytest.mark.parametrize("d", FEATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_cem_in_float32(kind, d):
    for seed in range(3):
        x, _, values = instance(kind, d, seed=seed)
        start, values = as_mixture(values, np.float32)
        solution = jc.cem(x, start)
        found = parameters(solution.mixture)
        assert_cost(solution.cost, reference.model_cost(x, *found), N, d, np.float32)
        assert_labels(solution.labels, x, found, "cmle", np.float32)
        oracle = reference.cem(x, *values)
        assert (np.asarray(solution.labels) == oracle.labels).mean() > 0.99
        # With sigma = 1e-3 at 1e3, a float32 mean is itself off by up to sigma / 30.
        slack = 1e-3 if kind == "mixed scales" else 1e-5
        assert float(solution.cost) == pytest.approx(oracle.costs[-1], rel=slack)


@pytest.mark.parametrize(("d", "k"), [(2, 3), (64, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_cem_on_many_points_in_float32(kind, d, k):
    """Enough points for fast iterations, in the unrolled and in the matmul form."""
    n = 20_000
    x, labels, values = instance(kind, d, n, k)
    start, _ = as_mixture(values, np.float32)
    solution = jc.cem(x, start)
    assert int(solution.status) == jc.Status.CONVERGED
    labels_found, found = np.asarray(solution.labels), parameters(solution.mixture)
    assert (labels_found == labels).mean() > 0.8
    assert_cost(solution.cost, reference.model_cost(x, *found), n, d, np.float32)
    assert_labels(labels_found, x, found, "cmle", np.float32)
    # A fixed point: estimating from the labels gives the mixture back.
    again = reference.estimate(x, labels_found, k)
    # At 3e4 a float32 mean is off by a thousandth of sigma, enough to turn a point or two.
    slack = 1e-3 if kind == "offsets of each sign" else 1e-5
    for value, wanted in zip(found, again, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=slack, atol=1e-5)


def test_an_offset_does_not_change_the_partition():
    """The same points, exactly representable with and without the offset."""
    rng = np.random.default_rng(0)
    x = (rng.integers(0, 40, size=(400, 3)) * 0.25).astype(np.float32)
    x[:200] += 12
    start = jc.Mixture(
        weights=np.full(2, 0.5, np.float32), means=x[[0, -1]], variances=np.ones(2, np.float32)
    )
    moved = jc.Mixture(weights=start.weights, means=start.means + 1e4, variances=start.variances)
    near, far = jc.cem(x, start), jc.cem(x + np.float32(1e4), moved)
    np.testing.assert_array_equal(near.labels, far.labels)
    np.testing.assert_allclose(near.cost, far.cost, rtol=1e-6)


def test_sums_do_not_drift_over_many_points():
    n = 2_000_000
    x = np.full((n, 1), 0.1, np.float32)
    x[::2] = -0.1
    cost = jc.partition_cost(x, np.zeros(n, int), 1)
    expected = n / 2 * (np.log(2 * np.pi * float(np.float32(0.1)) ** 2) + 1)
    assert float(cost) == pytest.approx(expected, rel=1e-5)
