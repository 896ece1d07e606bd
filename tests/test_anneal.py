"""The free energy, tempered EM and annealing, against the oracle and scikit-learn."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax import export
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
from jaxcmle.refine import anneal as anneal_module
from jaxcmle.refine.anneal import anneal, free_energy, tempered_em


@pytest.fixture
def single(precision):
    """Return float32, and leave float64 out: for what does not depend on it."""
    if precision != np.float32:
        pytest.skip("float32 is enough")
    return precision


# One for all: every new optimiser is a new program.
ADAM = optax.adam(0.05)
UNIT = jc.Mixture(weights=[1.0], means=[[0.0]], variances=[1.0])


def instance(seed, n, d, k, precision, kind="none"):
    """Return points, a mixture, the same as numbers for the oracle, and point weights."""
    rng = np.random.default_rng(seed)
    x, _ = reference.random_mixture_data(rng, n, d, k, 3.0)
    mixture, values = as_mixture(random_mixture(rng, k, d), precision)
    return x.astype(precision), mixture, values, random_weights(rng, n, kind)


def blobs(precision):
    """Return three clusters that lie apart, a point of each to start from, and point weights."""
    rng = np.random.default_rng(13)
    corners = np.repeat(np.array([[0, 0], [9, 0], [0, 9]]), 40, axis=0)
    x = (corners + rng.normal(size=(120, 2))).astype(precision)
    return x, start_at(x), rng.uniform(0.5, 2.0, 120)


def start_at(x):
    """Return a mixture about the first point of each blob."""
    return as_mixture((np.full(3, 1 / 3), x[::40], np.full(3, 2.0)), x.dtype)[0]


@jax.jit
def _tempered(x, weights, mixture, problem, temperatures, floor):
    points = numerics.prepare(x, weights)
    shifted = objective.shift_means(mixture, -points.shift)
    result = tempered_em(points, shifted, problem, temperatures, floor)
    return objective.shift_means(result, points.shift)


def tempered(x, mixture, problem, temperatures, weights=None, floor=0.0):
    """Run `tempered_em` in the user's coordinates."""
    weights = np.ones(len(x)) if weights is None else weights
    mixture = problem.constrained(jax.tree.map(jnp.asarray, mixture))
    temperatures = jnp.asarray(temperatures, x.dtype)
    return _tempered(x, jnp.asarray(weights, x.dtype), mixture, problem, temperatures, floor)


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


@pytest.mark.parametrize(
    "case",
    [
        ("cmle", 30, 2, 3, "fraction", 1.0),
        ("wkm", 20, 1, 3, "whole", 0.7),
        ("ucmle", 30, 30, 5, "fraction", 0.5),
    ],
)
def test_value_and_gradient_equal_the_oracle(case, precision):
    name, n, d, k, kind, temperature = case
    x, mixture, values, weights = instance(0, n, d, k, precision, kind)

    def energy(mixture, x, temperature):
        return free_energy(x, mixture, temperature, problem=PROBLEMS[name], sample_weight=weights)

    def oracle(w, means, variances, x, temperature):
        return reference.free_energy(
            x, w, means, variances, float(temperature), name, BETA, weights
        )

    temperature = np.asarray(temperature, precision)
    value, (by_mixture, by_x, by_temperature) = jax.value_and_grad(energy, argnums=(0, 1, 2))(
        mixture, jnp.asarray(x), jnp.asarray(temperature)
    )
    exact = (*values, x.astype(np.float64), temperature.astype(np.float64))
    assert_cost(value, oracle(*exact), n, d, precision)
    wanted = finite_differences(oracle, exact)
    found = (*parameters(by_mixture), by_x, by_temperature)
    loose = 2e-4 if precision == np.float32 else 1e-6
    for gradient, expected in zip(found, wanted, strict=True):
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(gradient, expected, rtol=loose, atol=loose * scale)


def test_at_temperature_one_it_is_the_likelihood_of_scikit_learn(single):
    mixture_module = pytest.importorskip("sklearn.mixture")
    x, mixture, (weights, means, variances), _ = instance(1, 300, 3, 4, single)
    peer = mixture_module.GaussianMixture(4, covariance_type="spherical")
    peer.weights_, peer.means_ = weights / weights.sum(), means
    peer.covariances_, peer.precisions_cholesky_ = variances, 1 / np.sqrt(variances)
    expected = -peer.score(x.astype(np.float64)) * len(x)
    mixture = dataclasses.replace(mixture, weights=np.asarray(peer.weights_, single))
    assert_cost(free_energy(x, mixture, 1.0), expected, 300, 3, single)


@pytest.mark.parametrize("name", NAMES)
def test_it_rises_to_the_cost_as_the_temperature_falls(name, single):
    x, mixture, _, weights = instance(2, 50, 2, 3, single, "fraction")
    options = {"problem": PROBLEMS[name], "sample_weight": weights}
    hard = float(jc.cost(x, mixture, **options))
    energies = [
        float(free_energy(x, mixture, tau, **options)) for tau in (2.0, 1.0, 0.3, 0.01, 1e-6, 1e-30)
    ]
    slack = tolerance(single) * abs(hard)
    assert (np.diff([*energies, hard]) >= -slack).all()
    np.testing.assert_allclose(energies[-2:], hard, rtol=tolerance(single))
    slope = jax.grad(lambda tau: free_energy(x, mixture, tau, **options))(1e-6)
    assert np.isfinite(slope)


def test_zero_weights_are_finite_and_padding_changes_nothing(single):
    x, mixture, _, _ = instance(3, 40, 2, 3, single)
    without = jax.tree.map(lambda leaf: jnp.asarray(leaf[:2]), mixture)
    mixture = dataclasses.replace(mixture, weights=mixture.weights * np.array([1, 1, 0], single))

    def energy(mixture, x, temperature, weights):
        return free_energy(x, mixture, temperature, sample_weight=weights)

    differentiate = jax.jit(jax.value_and_grad(energy, argnums=(0, 1, 2)))
    weights = np.repeat(np.array([1, 0], single), (30, 10))
    plain, gradients = differentiate(mixture, jnp.asarray(x), 0.5, weights)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    np.testing.assert_allclose(plain, free_energy(x[:30], without, 0.5), rtol=1e-5)
    for junk in (np.nan, 1e30):
        padded = x.copy()
        padded[30:] = junk
        value, others = differentiate(mixture, jnp.asarray(padded), 0.5, weights)
        np.testing.assert_array_equal(value, plain)
        assert (np.asarray(others[1][30:]) == 0).all()
        for leaf, wanted in zip(jax.tree.leaves(others), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_array_equal(leaf, wanted)


def test_bad_values_under_jit_give_nan(single):
    x, mixture, _, _ = instance(3, 40, 2, 3, single)
    run = jax.jit(free_energy)
    for temperature in (0.0, -1.0, np.nan, np.inf):
        assert np.isnan(run(x, mixture, temperature))
    assert np.isnan(run(x, dataclasses.replace(mixture, variances=-mixture.variances), 1.0))


def test_tiles_do_not_show_and_bound_the_memory_of_the_gradient(single, monkeypatch):
    n, d, k = 20_000, 24, 16
    x, mixture, _, weights = instance(4, n, d, k, single, "fraction")
    weights = weights.astype(single)

    def gradient():
        function = jax.value_and_grad(
            lambda mixture, x: anneal_module._free_energy.__wrapped__(
                x, weights, mixture, jc.CMLE(), 0.5
            )
        )
        return jax.jit(function).lower(mixture, jnp.asarray(x)).compile()

    few = gradient()
    monkeypatch.setattr(numerics, "tile_bytes", lambda: 2**18)
    many = gradient()
    for value, wanted in zip(
        jax.tree.leaves(many(mixture, x)), jax.tree.leaves(few(mixture, x)), strict=True
    ):
        loose = 10 * tolerance(single)
        np.testing.assert_allclose(value, wanted, rtol=loose, atol=loose * n)
    # A few copies of the points, and not one array [n, k, d] or two [n, k].
    assert many.memory_analysis().temp_size_in_bytes < 4 * x.nbytes


def test_free_energy_maps_over_mixtures_and_temperatures(single):
    x, first, _, _ = instance(5, 40, 2, 3, single)
    second = instance(6, 40, 2, 3, single)[1]
    temperatures = jnp.asarray([1.0, 0.2], single)
    mapped = jax.jit(jax.vmap(free_energy, in_axes=(None, 0, 0)))(
        x, stack([first, second]), temperatures
    )
    alone = [free_energy(x, first, 1.0), free_energy(x, second, 0.2)]
    np.testing.assert_allclose(mapped, alone, rtol=tolerance(single))
    assert mapped.dtype == single


@pytest.mark.parametrize(
    "case",
    [
        ("cmle", 60, 2, 4, "fraction"),
        ("wkm", 60, 1, 3, "whole"),
        ("ucmle", 60, 2, 4, "whole"),
        ("cmle", 60, 30, 5, "none"),
        ("cmle", 9, 2, 1, "none"),
    ],
)
def test_tempered_em_equals_the_oracle(case, precision):
    name, n, d, k, kind = case
    x, _, _, weights = instance(7, n, d, k, precision, kind)
    # Wide enough that no share is too small for float32.
    wide = (np.full(k, 1 / k), x[:k], np.full(k, 3.0 * d))
    mixture, values = as_mixture(wide, precision)
    temperatures = (1.0, 0.6, 0.3)
    found = tempered(x, mixture, PROBLEMS[name], temperatures, weights, floor=0.05)
    for temperature in np.asarray(temperatures, precision):
        values = reference.tempered_em_step(
            x, *values, float(temperature), name, BETA, weights, min_variance=0.05
        )
    for value, wanted in zip(parameters(found), values, strict=True):
        loose = 100 * tolerance(precision)
        np.testing.assert_allclose(value, wanted, rtol=loose, atol=loose)


@pytest.mark.parametrize("name", NAMES)
def test_tempered_em_never_raises_the_free_energy(name, single):
    x, mixture, _, weights = instance(8, 200, 2, 4, single, "fraction")
    options = {"problem": PROBLEMS[name], "sample_weight": weights}
    for temperature in (1.0, 0.1):
        energies = []
        for _ in range(12):
            energies.append(float(free_energy(x, mixture, temperature, **options)))
            mixture = tempered(x, mixture, PROBLEMS[name], [temperature], weights, floor=1e-2)
        assert (np.diff(energies) <= tolerance(single) * abs(energies[0])).all()
        assert energies[-1] < energies[0]


def test_tempered_em_on_a_stack_and_in_tiles(single, monkeypatch):
    x, first, _, _ = instance(9, 3000, 3, 4, single)
    starts = stack([first, instance(10, 3000, 3, 4, single)[1]])
    temperatures = jnp.asarray([1.0, 0.5], single)
    points = numerics.prepare(jnp.asarray(x), None)
    run = jax.vmap(lambda start: tempered_em(points, start, jc.CMLE(), temperatures, 1e-6))
    together = jax.jit(run)(starts)
    monkeypatch.setattr(numerics, "tile_bytes", lambda: 2**15)
    tiled = jax.jit(lambda starts: run(starts))(starts)
    for value, wanted in zip(parameters(tiled), parameters(together), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4)
    alone = tempered(x, first, jc.CMLE(), temperatures, floor=1e-6)
    for value, wanted in zip(parameters(alone), parameters(together), strict=True):
        np.testing.assert_allclose(value, wanted[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_cluster_that_loses_everything_stays_finite(name, single):
    x = instance(11, 30, 2, 2, single)[0]
    far = np.array([[1e4, 1e4], [0.0, 0.0], [1e4, -1e4]])
    start, _ = as_mixture((np.full(3, 1 / 3), far, np.full(3, 0.1)), single)
    mixture = tempered(x, start, PROBLEMS[name], [0.05] * 3)
    assert all(np.isfinite(value).all() for value in parameters(mixture))


def test_narrow_clusters_far_apart_survive_float32(single):
    """Variances are sums of differences: a common centre would lose them."""
    rng = np.random.default_rng(12)
    x = rng.normal(size=(400, 2)) * 1e-3
    x[200:] += 5.0
    x = x.astype(single)
    start, values = as_mixture(([0.5, 0.5], [[0.5, 0.5], [4.0, 4.0]], [1.0, 1.0]), single)
    found = tempered(x, start, jc.CMLE(), [1.0] * 6)
    for _ in range(6):
        values = reference.tempered_em_step(x, *values, 1.0)
    for value, wanted in zip(parameters(found), values, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_end_in_the_same_fixed_point(name, single):
    x, start, weights = blobs(single)
    options = {"problem": PROBLEMS[name], "sample_weight": weights}
    solution = anneal(x, start, **options)
    assert int(solution.status) == jc.Status.CONVERGED
    assert np.bincount(solution.labels).tolist() == [40, 40, 40]
    found = parameters(solution.mixture)
    cost = reference.model_cost(x, *found, name, BETA, weights)
    assert_cost(solution.cost, cost, 120, 2, single)
    driven = anneal(x, start, optimizer=ADAM, **options)
    np.testing.assert_allclose(driven.cost, solution.cost, rtol=1e-4)


def test_the_dtype_is_kept(precision):
    x, start, weights = blobs(precision)
    solution = anneal(x, start, sample_weight=weights)
    floats = (solution.cost, *jax.tree.leaves(solution.mixture))
    assert all(leaf.dtype == precision for leaf in floats)
    assert solution.labels.dtype == solution.status.dtype == jnp.int32


def test_any_optax_optimizer_drives_it(single):
    x, start, weights = blobs(single)
    closed = anneal(x, start, sample_weight=weights)
    schedule = optax.cosine_decay_schedule(0.1, 300)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(schedule, momentum=0.9))
    for optimizer in (chain, optax.lbfgs()):
        driven = anneal(x, start, optimizer=optimizer, steps=20, sample_weight=weights)
        np.testing.assert_allclose(driven.cost, closed.cost, rtol=1e-4)


def test_minibatches_of_a_million_points_end_where_all_points_do(single):
    rng = np.random.default_rng(14)
    x, _ = reference.random_mixture_data(rng, 10**6, 2, 5, 4.0)
    x = x.astype(single)
    start = jc.seed(jax.random.key(0), x, 5)
    full = anneal(x, start, steps=1, max_iter=20)
    # Without CEM at the end: the batches alone lead there.
    driven = anneal(x, start, optimizer=optax.adam(0.03), batch_size=512, max_iter=0)
    np.testing.assert_allclose(driven.cost, full.cost, rtol=5e-3)


def test_the_key_decides_the_batches(single):
    x, start, weights = blobs(single)

    def run(key):
        return anneal(
            x,
            start,
            optimizer=ADAM,
            steps=3,
            batch_size=16,
            key=key,
            max_iter=0,
            sample_weight=weights,
        ).mixture.means

    np.testing.assert_array_equal(run(None), run(jax.random.key(0)))
    assert (np.asarray(run(None)) != np.asarray(run(jax.random.key(1)))).any()


def test_batches_are_unbiased(single):
    """The mean of many small steps of plain gradient descent is the step on all points."""
    x, start, _, weights = instance(16, 50, 2, 3, single, "whole")
    optimizer = optax.sgd(1e-2)
    weights = weights.astype(single)

    def means(key, batch_size):
        arguments = (jnp.asarray(x), weights, start, jc.CMLE(), jnp.ones(1, single), 1, None)
        return anneal_module._anneal(
            key, *arguments, optimizer=optimizer, batch_size=batch_size
        ).means

    keys = jax.random.split(jax.random.key(0), 400)
    drawn = np.stack([means(key, 10) for key in keys]).astype(np.float64) - start.means
    whole = np.asarray(means(keys[0], None), np.float64) - start.means
    error = 5 * drawn.std(axis=0) / np.sqrt(len(keys)) + 1e-6
    assert (np.abs(drawn.mean(axis=0) - whole) <= error).all()


def test_padding_changes_no_answer(single):
    x, start, weights = blobs(single)
    weights[100:] = 0
    padded = x.copy()
    padded[100:] = np.nan
    for optimizer in (None, ADAM):
        options = {"optimizer": optimizer, "sample_weight": weights}
        plain, other = (anneal(data, start, **options) for data in (x, padded))
        np.testing.assert_array_equal(other.cost, plain.cost)
        np.testing.assert_array_equal(other.labels[:100], plain.labels[:100])


@pytest.mark.parametrize("optimizer", [None, ADAM], ids=["em", "adam"])
def test_edges_are_finite(optimizer, single):
    x = blobs(single)[0]
    pairs = np.repeat(np.array([[0, 0], [5, 5], [0, 9]], single), 40, axis=0)
    # Near 1e4 float32 has 1e-3 between its numbers: the same data at both places.
    there = x + np.asarray(1e4, single)
    here = there - np.asarray(1e4, single)
    constant = np.ones((120, 1), single)
    costs = []
    # Programs for another shape take seconds: by EM only.
    for data in (here, there, pairs, *([x[:, :1], constant] if optimizer is None else [])):
        start = UNIT if data.shape[1] == 1 else start_at(data)
        solution = anneal(data, start, optimizer=optimizer, sample_weight=np.ones(120))
        assert int(solution.status) == jc.Status.CONVERGED
        assert np.isfinite(solution.cost)
        assert all(np.isfinite(value).all() for value in parameters(solution.mixture))
        costs.append(float(solution.cost))
    np.testing.assert_allclose(costs[1], costs[0], rtol=1e-5)


def test_an_optimizer_that_diverges_does_no_harm(single):
    x, start, weights = blobs(single)
    broken = optax.stateless(lambda updates, _: jax.tree.map(lambda leaf: leaf * jnp.nan, updates))
    solution = anneal(x, start, optimizer=broken, sample_weight=weights)
    np.testing.assert_allclose(
        solution.cost, jc.cem(x, start, sample_weight=weights).cost, rtol=1e-6
    )
    solution = anneal(x, start, optimizer=optax.sgd(1e30), sample_weight=weights)
    assert np.isfinite(solution.cost)
    assert all(np.isfinite(value).all() for value in parameters(solution.mixture))


def test_bad_values_under_jit_have_a_status(single):
    x, start, _, _ = instance(20, 30, 2, 2, single)
    run = jax.jit(lambda x, start, temperatures: anneal(x, start, temperatures=temperatures))
    schedule = jnp.asarray([1.0, 0.5], single)
    good = run(x, start, schedule)
    assert np.isfinite(good.cost)
    bad = x.copy()
    bad[3, 1] = np.nan
    assert int(run(bad, start, schedule).status) == jc.Status.NONFINITE
    hurt = dataclasses.replace(start, means=start.means * np.asarray(np.nan, single))
    assert int(run(x, hurt, schedule).status) == jc.Status.NONFINITE
    cold = run(x, start, schedule * np.asarray(np.nan, single))
    assert np.isfinite(cold.cost)


def test_values_do_not_retrace(single, monkeypatch):
    x, start, _, _ = instance(21, 30, 2, 2, single)
    chex.clear_trace_counter()
    limited = jax.jit(
        chex.assert_max_traces(anneal_module._anneal.__wrapped__, n=1),
        static_argnames=("optimizer", "batch_size"),
    )
    monkeypatch.setattr(anneal_module, "_anneal", limited)
    anneal(x, start, temperatures=[1.0, 0.5], problem=jc.WKM(beta=1.0), min_variance=0.1)
    anneal(
        x + 1, start, temperatures=(0.7, 0.2), problem=jc.WKM(beta=2.0), min_variance=1.0, steps=9
    )
    chex.clear_trace_counter()


def test_errors_say_what_to_do(single):
    x, start, _, _ = instance(22, 20, 2, 2, single)
    for temperature in (0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="temperature must be"):
            free_energy(x, start, temperature)
    with pytest.raises(TypeError, match="temperature must be a number"):
        free_energy(x, start, "hot")
    for options, kind, message in (
        ({"temperatures": [1.0, 0.0]}, ValueError, "positive and finite"),
        ({"temperatures": [np.inf]}, ValueError, "positive and finite"),
        ({"temperatures": 1.0}, ValueError, "pass [temperature]"),
        ({"temperatures": []}, ValueError, "at least one"),
        ({"temperatures": ["hot"]}, TypeError, "1-D array of numbers"),
        ({"optimizer": "adam"}, TypeError, "optax.adam(0.05)"),
        ({"batch_size": 5}, ValueError, "needs an optimizer"),
        ({"batch_size": 0, "optimizer": optax.sgd(1.0)}, ValueError, "1 or more"),
        ({"batch_size": 1.5, "optimizer": optax.sgd(1.0)}, TypeError, "Python int"),
        ({"steps": 0}, ValueError, "steps must be 1 or more"),
        ({"min_variance": -1.0}, ValueError, "min_variance"),
        ({"key": 3}, TypeError, "jax.random.key"),
        ({"problem": "cmle"}, TypeError, "jaxcmle.CMLE()"),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            anneal(x, start, **options)
    with pytest.raises(ValueError, match="distinct points"):
        anneal(np.ones((4, 2)), start)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_it_lowers_for_accelerators(platform, single):
    """From this CPU: the programs contain nothing that another platform cannot run."""
    n, d, k = 20_000, 8, 20
    mixture, _ = as_mixture(random_mixture(np.random.default_rng(0), k, d), single)
    x, temperatures = np.zeros((n, d), single), np.ones(3, single)
    key, optimizer = jax.random.key(0), optax.adam(0.05)

    def by_em(x, mixture, temperatures):
        return anneal(x, mixture, temperatures=temperatures)

    def by_gradient(x, mixture, temperatures):
        arguments = (key, x, None, mixture, jc.CMLE(), temperatures, 5, None)
        return anneal_module._anneal(*arguments, optimizer=optimizer, batch_size=128)

    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (x, mixture, temperatures)
    )
    for function in (by_em, by_gradient):
        exported = export.export(jax.jit(function), platforms=[platform])(*arguments)
        assert exported.platforms == (platform,)
