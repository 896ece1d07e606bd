"""The free energy and tempered EM, against the oracle and scikit-learn."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from support import (
    BETA,
    NAMES,
    PROBLEMS,
    as_mixture,
    assert_cost,
    parameters,
    random_mixture,
    random_weights,
    stack,
    tolerance,
)

import jaxcmle as jc
from jaxcmle import numerics
from jaxcmle.problem import objective
from jaxcmle.refine import tempered as tempered_module
from jaxcmle.refine.tempered import free_energy, tempered_em

PRECISIONS = ("float32",)
# One shape for most tests, and weights always: every other program takes a second to compile.
N, D, K = 60, 2, 4


def instance(seed, precision, n=N, d=D, k=K, kind="fraction"):
    """Return points, a mixture, the same as numbers for the oracle, and point weights."""
    rng = np.random.default_rng(seed)
    x, _ = reference.random_mixture_data(rng, n, d, k, 3.0)
    mixture, values = as_mixture(random_mixture(rng, k, d), precision)
    return x.astype(precision), mixture, values, random_weights(rng, n, kind).astype(precision)


@jax.jit
def _differentiate(x, mixture, temperature, problem, weights):
    def energy(mixture, x, temperature):
        return free_energy(x, mixture, temperature, problem=problem, sample_weight=weights)

    return jax.value_and_grad(energy, argnums=(0, 1, 2))(mixture, x, temperature)


def differentiate(x, mixture, temperature, name, weights):
    """Return the free energy, and its gradients by the mixture, the points, the temperature."""
    return _differentiate(x, mixture, np.asarray(temperature, x.dtype), PROBLEMS[name], weights)


@jax.jit
def _em(x, mixture, temperature, problem, weights, floor):
    points = numerics.prepare(x, weights)
    shifted = objective.shift_means(problem.constrained(mixture), -points.shift)
    result = tempered_em(points, shifted, problem, temperature[None], floor)
    return objective.shift_means(result, points.shift)


def em(x, mixture, temperature, name, weights, floor=0.0):
    """Do one iteration of `tempered_em` in the user's coordinates."""
    temperature = np.asarray(temperature, x.dtype)
    return _em(x, mixture, temperature, PROBLEMS[name], weights, np.asarray(floor, x.dtype))


def finite_differences(function, values, step=1e-5):
    """Return the gradient of a float64 function of several arrays."""
    gradients = []
    for i, value in enumerate(values):
        gradient = np.empty_like(value)
        for index in np.ndindex(value.shape):
            ends = []
            for sign in (1, -1):
                moved = [part.copy() for part in values]
                moved[i][index] += sign * step
                ends.append(function(*moved))
            gradient[index] = (ends[0] - ends[1]) / (2 * step)
        gradients.append(gradient)
    return gradients


def check_value_and_gradient(name, temperature, kind, precision):
    x, mixture, values, weights = instance(0, precision, kind=kind)

    def oracle(w, means, variances, x, temperature):
        return reference.free_energy(
            x, w, means, variances, float(temperature), name, BETA, weights
        )

    value, (by_mixture, by_x, by_temperature) = differentiate(
        x, mixture, temperature, name, weights
    )
    assert value.dtype == precision
    exact = (*values, x.astype(np.float64), np.asarray(temperature, precision).astype(np.float64))
    assert_cost(value, oracle(*exact), N, D, precision)
    wanted = finite_differences(oracle, exact)
    found = (*parameters(by_mixture), by_x, by_temperature)
    loose = 2e-4 if precision == np.float32 else 1e-6
    for gradient, expected in zip(found, wanted, strict=True):
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(gradient, expected, rtol=loose, atol=loose * scale)


@pytest.mark.parametrize(
    "case", [("cmle", 1.0, "fraction"), ("wkm", 0.7, "whole"), ("ucmle", 0.5, "fraction")]
)
def test_value_and_gradient_equal_the_oracle(case, precision):
    check_value_and_gradient(*case, precision)


def check_em(name, kind, precision):
    x, _, _, weights = instance(7, precision, kind=kind)
    # Wide enough that no share is too small for float32.
    mixture, values = as_mixture((np.full(K, 1 / K), x[:K], np.full(K, 3.0 * D)), precision)
    for temperature in np.asarray((1.0, 0.6, 0.3), precision):
        mixture = em(x, mixture, temperature, name, weights, floor=0.05)
        values = reference.tempered_em_step(
            x, *values, float(temperature), name, BETA, weights, min_variance=0.05
        )
    assert mixture.means.dtype == precision
    assert_equal(mixture, values, 100 * tolerance(precision))


def assert_equal(mixture, values, loose):
    for value, wanted in zip(parameters(mixture), values, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=loose, atol=loose)


@pytest.mark.parametrize("case", [("cmle", "fraction"), ("wkm", "whole"), ("ucmle", "whole")])
def test_em_equals_the_oracle(case, precision):
    check_em(*case, precision)


def test_both_equal_the_oracle_in_float64():
    with jax.enable_x64(True):
        check_value_and_gradient("cmle", 0.7, "whole", np.dtype(np.float64))
        check_em("cmle", "fraction", np.dtype(np.float64))


def test_at_temperature_one_it_is_the_likelihood_of_scikit_learn(precision):
    mixture_module = pytest.importorskip("sklearn.mixture")
    x, mixture, (weights, means, variances), _ = instance(1, precision)
    peer = mixture_module.GaussianMixture(K, covariance_type="spherical")
    peer.weights_, peer.means_ = weights / weights.sum(), means
    peer.covariances_, peer.precisions_cholesky_ = variances, 1 / np.sqrt(variances)
    expected = -peer.score(x.astype(np.float64)) * N
    assert_cost(free_energy(x, mixture, 1.0), expected, N, D, precision)


@pytest.mark.parametrize("name", NAMES)
def test_it_rises_to_the_cost_as_the_temperature_falls(name, precision):
    x, mixture, values, weights = instance(2, precision)
    hard = reference.model_cost(x, *values, name, BETA, weights)
    temperatures = (2.0, 1.0, 0.3, 0.01, 1e-6, 1e-30)
    answers = [differentiate(x, mixture, tau, name, weights) for tau in temperatures]
    energies = [float(energy) for energy, _ in answers]
    slack = tolerance(precision) * abs(hard)
    assert (np.diff([*energies, hard]) >= -slack).all()
    np.testing.assert_allclose(energies[-2:], hard, rtol=tolerance(precision))
    for _, gradients in answers[:-1]:
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", NAMES)
def test_it_does_so_however_the_compiler_rounds(name):
    """Without optimisation costs that are computed twice come out differently."""
    script = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]}; import test_tempered, numpy;"
        "test_tempered.test_it_rises_to_the_cost_as_the_temperature_falls"
        f"({name!r}, numpy.dtype('float32'))"
    )
    flags = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"

    def run(code):
        given = {"env": {**os.environ, "XLA_FLAGS": flags}, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, "-c", code], timeout=120, check=False, **given)

    if run("import jax; jax.devices()").returncode != 0:
        pytest.skip("this compiler has other flags")
    done = run(script)
    assert done.returncode == 0, done.stderr


def test_zero_weights_are_finite_and_padding_changes_nothing(precision):
    x, mixture, (weights, means, variances), amounts = instance(3, precision)
    weights[3], amounts[50:] = 0, 0
    mixture = dataclasses.replace(mixture, weights=weights.astype(precision))
    plain, gradients = differentiate(x, mixture, 0.5, "cmle", amounts)
    without = (weights[:3], means[:3], variances[:3])
    expected = reference.free_energy(x[:50], *without, 0.5, sample_weight=amounts[:50])
    assert_cost(plain, expected, N, D, precision)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert (np.asarray(gradients[1][50:]) == 0).all()
    for junk in (np.nan, 1e30):
        x[50:] = junk
        answer = differentiate(x, mixture, 0.5, "cmle", amounts)
        jax.tree.map(np.testing.assert_array_equal, answer, (plain, gradients))


def test_bad_values_under_jit_give_nan(precision):
    x, mixture, _, weights = instance(3, precision)
    for temperature in (0.0, -1.0, np.nan, np.inf):
        assert np.isnan(differentiate(x, mixture, temperature, "cmle", weights)[0])
    negative = dataclasses.replace(mixture, variances=-mixture.variances)
    assert np.isnan(differentiate(x, negative, 1.0, "cmle", weights)[0])


def test_errors_say_what_to_do(precision):
    x, mixture, _, _ = instance(3, precision)
    for temperature in (0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="temperature must be"):
            free_energy(x, mixture, temperature)
    with pytest.raises(TypeError, match="temperature must be a number"):
        free_energy(x, mixture, "hot")


def test_blocks_do_not_show_and_bound_the_memory_of_the_gradient(precision, monkeypatch):
    """With many batches of blocks, and features too many to unroll."""
    n, d, k, temperature = 20_000, 6, 40, 0.5
    x, mixture, values, weights = instance(4, precision, n, d, k)
    function = jax.value_and_grad(tempered_module._free_energy.__wrapped__, argnums=2)
    monkeypatch.setattr(numerics, "tile_bytes", lambda: 2**20)
    arguments = (x, weights, mixture, jc.CMLE(), np.asarray(temperature, precision))
    program = jax.jit(function).lower(*arguments).compile()
    # A few copies of the points, and not one array [n, k].
    assert program.memory_analysis().temp_size_in_bytes < 4 * x.nbytes

    value, gradient = program(*arguments)
    assert_cost(
        value,
        reference.free_energy(x, *values, temperature, "cmle", BETA, weights),
        n,
        d,
        precision,
    )
    costs = reference.point_costs(x, *values)
    shares = np.exp((costs.min(axis=1, keepdims=True) - costs) / temperature)
    amounts = weights[:, None] * shares / shares.sum(axis=1, keepdims=True)
    w, means, variances = values
    size = amounts.sum(axis=0)
    square = np.stack([amounts[:, j] @ ((x - means[j]) ** 2).sum(axis=1) for j in range(k)])
    by_means = (size[:, None] * means - amounts.T @ x) / variances[:, None]
    by_variances = size * d / (2 * variances) - square / (2 * variances**2)
    for found, wanted in zip(
        parameters(gradient), (-size / w, by_means, by_variances), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_free_energy_maps_over_mixtures_and_temperatures(precision):
    x, first, _, weights = instance(5, precision)
    second = instance(6, precision)[1]
    temperatures = np.asarray([1.0, 0.2], precision)
    mapped = jax.jit(
        jax.vmap(lambda mixture, tau: free_energy(x, mixture, tau, sample_weight=weights))
    )(stack([first, second]), temperatures)
    alone = [
        differentiate(x, mixture, tau, "cmle", weights)[0]
        for mixture, tau in zip((first, second), temperatures, strict=True)
    ]
    np.testing.assert_allclose(mapped, alone, rtol=tolerance(precision))


@pytest.mark.parametrize("name", NAMES)
def test_em_never_raises_the_free_energy(name, precision):
    x, mixture, _, weights = instance(8, precision)
    for temperature in (1.0, 0.1):
        energies = []
        for _ in range(12):
            energies.append(float(differentiate(x, mixture, temperature, name, weights)[0]))
            mixture = em(x, mixture, temperature, name, weights, floor=1e-2)
        assert (np.diff(energies) <= tolerance(precision) * abs(energies[0])).all()
        assert energies[-1] < energies[0]


def test_em_on_a_stack(precision, monkeypatch):
    """At several temperatures, in batches of two blocks, with features too many to unroll."""
    n, d, k = 1300, 40, 4
    x, _, _, weights = instance(9, precision, n, d, k)
    starts = [(np.full(k, 1 / k), x[i : i + k], np.full(k, 3.0 * d)) for i in (0, 50)]
    mixtures = stack([as_mixture(start, precision)[0] for start in starts])
    monkeypatch.setattr(numerics, "tile_bytes", lambda: 2 * 16 * 512 * d)

    def run(mixture):
        points = numerics.prepare(jnp.asarray(x), weights)
        return tempered_em(points, mixture, jc.CMLE(), jnp.asarray([1.0, 0.5], precision), 1e-6)

    found = jax.jit(jax.vmap(run))(mixtures)
    for i, values in enumerate(starts):
        for temperature in (1.0, 0.5):
            values = reference.tempered_em_step(x, *values, temperature, sample_weight=weights)
        assert_equal(jax.tree.map(lambda leaf, i=i: leaf[i], found), values, 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_cluster_that_loses_everything_stays_finite(name, precision):
    x, _, _, weights = instance(11, precision)
    far = np.array([[1e4, 1e4], [0.0, 0.0], [1e4, -1e4], [1.0, 0.0]])
    mixture, _ = as_mixture((np.full(K, 1 / K), far, np.full(K, 0.1)), precision)
    for _ in range(3):
        mixture = em(x, mixture, 0.05, name, weights)
        assert all(np.isfinite(value).all() for value in parameters(mixture))


def test_narrow_clusters_far_apart_survive_float32(precision):
    """Variances are sums of differences: a common centre would lose them."""
    rng = np.random.default_rng(12)
    corners = np.array([[0, 0], [5, 5], [0, 5], [5, 0]])
    x = np.repeat(corners, N // K, axis=0) + rng.normal(size=(N, D)) * 1e-3
    x = x.astype(precision)
    start = (np.full(K, 1 / K), corners + 0.5, np.ones(K))
    mixture, values = as_mixture(start, precision)
    for _ in range(6):
        mixture = em(x, mixture, 1.0, "cmle", np.ones(N, precision))
        values = reference.tempered_em_step(x, *values, 1.0)
    for value, wanted in zip(parameters(mixture), values, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())
