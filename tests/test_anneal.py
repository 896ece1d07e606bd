"""Annealing by EM and by optimisers, against the oracle and each other."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax import export
from support import BETA, NAMES, PROBLEMS, as_mixture, assert_cost, parameters, random_mixture

import jaxcmle as jc
from jaxcmle.refine import anneal as anneal_module
from jaxcmle.refine.anneal import anneal

PRECISIONS = ("float32",)
UNIT = jc.Mixture(weights=[1.0], means=[[0.0]], variances=[1.0])
SCHEDULE = optax.cosine_decay_schedule(0.1, 300)
# One for each problem: every new optimiser is a new program.
ADAM = optax.adam(0.05)
OPTIMIZERS = {
    "cmle": ADAM,
    "wkm": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
    "ucmle": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(SCHEDULE, momentum=0.9)),
}


@pytest.fixture
def no_cem(monkeypatch):
    """Leave out CEM, and its program: `anneal` returns the mixture, and the options for CEM."""
    monkeypatch.setattr(anneal_module, "cem", lambda x, mixture, **options: (mixture, options))


def blobs(precision):
    """Return three clusters that lie apart, a point of each to start from, and point weights."""
    rng = np.random.default_rng(13)
    corners = np.repeat(np.array([[0, 0], [9, 0], [0, 9]]), 40, axis=0)
    x = (corners + rng.normal(size=(120, 2))).astype(precision)
    return x, start_at(x), rng.uniform(0.5, 2.0, 120)


def start_at(x):
    """Return a mixture about the first point of each blob."""
    return as_mixture((np.full(3, 1 / 3), x[::40], np.full(3, 2.0)), x.dtype)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("no_cem")
def test_both_ways_end_at_the_same_cost(name, precision):
    x, start, weights = blobs(precision)
    options = {"problem": PROBLEMS[name], "sample_weight": weights, "max_iter": 7}
    costs = []
    for optimizer in (None, OPTIMIZERS[name]):
        mixture, passed = anneal(x, start, optimizer=optimizer, **options)
        assert (passed["problem"], passed["max_iter"]) == (PROBLEMS[name], 7)
        costs.append(reference.model_cost(x, *parameters(mixture), name, BETA, weights))
    # The blobs themselves, which every start with a point of each leads to.
    best = reference.partition_cost(x, np.repeat(range(3), 40), 3, name, BETA, weights)
    np.testing.assert_allclose(costs, best, rtol=1e-3)


def test_it_ends_in_a_fixed_point_of_cem(precision):
    x, start, weights = blobs(precision)
    for optimizer in (None, ADAM):
        solution = anneal(x, start, optimizer=optimizer, sample_weight=weights)
        assert int(solution.status) == jc.Status.CONVERGED
        assert solution.labels.tolist() == np.repeat(range(3), 40).tolist()
        cost = reference.model_cost(x, *parameters(solution.mixture), sample_weight=weights)
        assert_cost(solution.cost, cost, 120, 2, precision)


@pytest.mark.parametrize("wide", [False, True])
def test_the_dtype_is_kept(wide):
    dtype = np.dtype(np.float64 if wide else np.float32)
    with jax.enable_x64(wide):
        x, start, weights = blobs(dtype)
        for optimizer in (None, ADAM):
            solution = jax.eval_shape(
                lambda x, optimizer=optimizer: anneal(
                    x, start, optimizer=optimizer, sample_weight=weights
                ),
                x,
            )
            floats = (solution.cost, *jax.tree.leaves(solution.mixture))
            assert all(leaf.dtype == dtype for leaf in floats)
            assert solution.labels.dtype == solution.status.dtype == jnp.int32


@pytest.mark.usefixtures("no_cem")
def test_minibatches_of_a_million_points_end_where_all_points_do(precision):
    rng = np.random.default_rng(14)
    x, _ = reference.random_mixture_data(rng, 10**6, 2, 5, 4.0)
    x = x.astype(precision)
    start, _ = as_mixture((np.full(5, 1 / 5), x[:5], np.full(5, 4.0)), precision)
    full, _ = anneal(x, start, temperatures=(1.0, 0.5, 0.1), steps=4)
    driven, _ = anneal(x, start, optimizer=optax.adam(0.03), batch_size=512)
    costs = [float(jc.cost(x, mixture)) for mixture in (full, driven)]
    np.testing.assert_allclose(costs[1], costs[0], rtol=5e-3)


def test_batches_follow_the_key_and_are_unbiased(precision):
    """The mean of many small steps of plain gradient descent is the step on all points."""
    x, start, _ = blobs(precision)
    weights = np.random.default_rng(16).integers(0, 4, 120).astype(precision)
    options = {"optimizer": optax.sgd(1e-2), "batch_size": 10}
    arguments = (x, weights, start, jc.CMLE(), jnp.ones(1, precision), 1, None)
    keys = [jax.random.key(i) for i in range(400)]
    drawn = np.stack([anneal_module._anneal(key, *arguments, **options).means for key in keys])
    drawn = drawn.astype(np.float64) - start.means
    assert (drawn[0] != drawn[1]).any()

    # The gradient by the means, both in units of the overall standard deviation.
    values = parameters(start)
    costs = reference.point_costs(x, *values)
    shares = np.exp(costs.min(axis=1, keepdims=True) - costs)
    amounts = weights[:, None] * shares / shares.sum(axis=1, keepdims=True)
    gradient = amounts.sum(axis=0)[:, None] * values[1] - amounts.T @ x
    gradient /= values[2][:, None] * weights.sum()
    centre = np.average(x, axis=0, weights=weights)
    spread = np.average((x - centre) ** 2, axis=0, weights=weights).mean()
    error = 5 * drawn.std(axis=0) / np.sqrt(len(keys)) + 1e-6
    assert (np.abs(drawn.mean(axis=0) + 1e-2 * spread * gradient) <= error).all()


def test_the_default_key_is_key_0(precision, monkeypatch):
    x, start, weights = blobs(precision)
    keys = []
    monkeypatch.setattr(anneal_module, "_anneal", lambda key, *_, **__: keys.append(key) or start)
    for key in (None, jax.random.key(0), jax.random.key(1)):
        anneal(x, start, key=key, sample_weight=weights)
    default, zero, one = (jax.random.key_data(key).tolist() for key in keys)
    assert default == zero != one


def test_padding_changes_no_answer(precision):
    x, start, weights = blobs(precision)
    weights[100:] = 0
    padded = x.copy()
    padded[100:] = np.nan
    for optimizer in (None, ADAM):
        options = {"optimizer": optimizer, "sample_weight": weights}
        plain, other = (anneal(data, start, **options) for data in (x, padded))
        np.testing.assert_array_equal(other.cost, plain.cost)
        np.testing.assert_array_equal(other.labels[:100], plain.labels[:100])


@pytest.mark.parametrize("optimizer", [None, ADAM], ids=["em", "adam"])
def test_offsets_and_equal_points(optimizer, precision):
    x = blobs(precision)[0]
    pairs = np.repeat(np.array([[0, 0], [5, 5], [0, 9]], precision), 40, axis=0)
    # Near 1e4 float32 has 1e-3 between its numbers: the same data at both places.
    there = x + np.asarray(1e4, precision)
    here = there - np.asarray(1e4, precision)
    costs = []
    for data in (here, there, pairs):
        solution = anneal(data, start_at(data), optimizer=optimizer, sample_weight=np.ones(120))
        assert int(solution.status) == jc.Status.CONVERGED
        assert np.isfinite(solution.cost)
        assert all(np.isfinite(value).all() for value in parameters(solution.mixture))
        costs.append(float(solution.cost))
    np.testing.assert_allclose(costs[1], costs[0], rtol=1e-5)


@pytest.mark.usefixtures("no_cem")
def test_one_cluster_in_one_dimension(precision):
    for x in (blobs(precision)[0][:, :1], np.ones((120, 1), precision)):
        mixture, _ = anneal(x, UNIT)
        np.testing.assert_allclose(mixture.means[0], x.mean(), rtol=1e-5)
        np.testing.assert_allclose(mixture.variances[0], x.var(), rtol=1e-4, atol=1e-12)
        assert mixture.variances[0] > 0


@pytest.mark.usefixtures("no_cem")
def test_an_optimizer_that_diverges_does_no_harm(precision):
    """First far out of all bounds; then nowhere, which is not taken."""
    x, start, weights = blobs(precision)

    def update(updates, count, _):
        return jax.tree.map(lambda leaf: jnp.where(count, jnp.nan, 1e30 * leaf), updates), count + 1

    wild = optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)
    mixture, _ = anneal(x, start, optimizer=wild, sample_weight=weights)
    weights, means, variances = parameters(mixture)
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-5)
    low, high = x.min(axis=0), x.max(axis=0)
    assert (np.abs(means - (low + high) / 2) <= (high - low) / 2 + 1e-4).all()
    assert ((variances > 0) & (variances <= 1.001 * ((high - low) ** 2).sum())).all()
    assert (means != start.means).any()


def test_bad_values_under_jit_have_a_status(precision):
    x, start, _ = blobs(precision)
    run = jax.jit(lambda x, start, temperatures: anneal(x, start, temperatures=temperatures))
    schedule = jnp.asarray([1.0, 0.5], precision)
    good = run(x, start, schedule)
    assert np.isfinite(good.cost)
    bad = x.copy()
    bad[3, 1] = np.nan
    assert int(run(bad, start, schedule).status) == jc.Status.NONFINITE
    hurt = dataclasses.replace(start, means=start.means * np.asarray(np.nan, precision))
    assert int(run(x, hurt, schedule).status) == jc.Status.NONFINITE
    cold = run(x, start, schedule * np.asarray(np.nan, precision))
    assert np.isfinite(cold.cost)


@pytest.mark.usefixtures("no_cem")
def test_values_do_not_retrace(precision):
    x, start, weights = blobs(precision)
    sizes = []
    for beta, steps in ((1.0, 1), (2.0, 9)):
        temperatures = beta * np.asarray(anneal_module.TEMPERATURES)
        options = {"problem": jc.WKM(beta=beta), "steps": steps, "temperatures": temperatures}
        anneal(x + steps, start, sample_weight=weights, **options)
        sizes.append(anneal_module._anneal._cache_size())
    assert sizes[0] == sizes[1]


def test_errors_say_what_to_do(precision):
    x, start, _ = blobs(precision)
    for options, kind, message in (
        ({"temperatures": [1.0, 0.0]}, ValueError, "positive and finite"),
        ({"temperatures": [np.inf]}, ValueError, "positive and finite"),
        ({"temperatures": 1.0}, ValueError, "as [1.0, 0.5]"),
        ({"temperatures": []}, ValueError, "must be 1-D"),
        ({"temperatures": ["hot"]}, TypeError, "must be numbers"),
        ({"optimizer": "adam"}, TypeError, "optax.adam(0.05)"),
        ({"batch_size": 5}, ValueError, "needs an optimizer"),
        ({"batch_size": 0, "optimizer": optax.sgd(1.0)}, ValueError, "1 or more"),
        ({"batch_size": 1.5, "optimizer": optax.sgd(1.0)}, ValueError, "whole number"),
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
def test_it_lowers_for_accelerators(platform, precision):
    """From this CPU: the programs contain nothing that another platform cannot run."""
    n, d, k = 20_000, 8, 20
    mixture, _ = as_mixture(random_mixture(np.random.default_rng(0), k, d), precision)
    x, temperatures = np.zeros((n, d), precision), np.ones(3, precision)
    key = jax.random.key(0)

    def by_em(x, mixture, temperatures):
        return anneal(x, mixture, temperatures=temperatures)

    def by_gradient(x, mixture, temperatures):
        arguments = (key, x, None, mixture, jc.CMLE(), temperatures, 5, None)
        return anneal_module._anneal(*arguments, optimizer=ADAM, batch_size=128)

    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (x, mixture, temperatures)
    )
    for function in (by_em, by_gradient):
        exported = export.export(jax.jit(function), platforms=[platform])(*arguments)
        assert exported.platforms == (platform,)
