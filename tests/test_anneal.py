"""Annealing by EM and by optimisers, against the oracle and each other."""

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
    "wkm": optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(15)),
    "ucmle": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(SCHEDULE, momentum=0.9)),
}


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
def test_both_ways_end_in_the_same_fixed_point(name, precision):
    x, start, weights = blobs(precision)
    options = {"problem": PROBLEMS[name], "sample_weight": weights}
    solution = anneal(x, start, **options)
    assert int(solution.status) == jc.Status.CONVERGED
    assert np.bincount(solution.labels).tolist() == [40, 40, 40]
    cost = reference.model_cost(x, *parameters(solution.mixture), name, BETA, weights)
    assert_cost(solution.cost, cost, 120, 2, precision)
    # Without CEM at the end: the optimiser alone leads there.
    driven = anneal(x, start, optimizer=OPTIMIZERS[name], max_iter=0, **options)
    np.testing.assert_allclose(driven.cost, solution.cost, rtol=1e-3)


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


def test_minibatches_of_a_million_points_end_where_all_points_do(precision):
    rng = np.random.default_rng(14)
    x, _ = reference.random_mixture_data(rng, 10**6, 2, 5, 4.0)
    x = x.astype(precision)
    start, _ = as_mixture((np.full(5, 1 / 5), x[:5], np.full(5, 4.0)), precision)
    full = anneal(x, start, temperatures=(1.0, 0.5, 0.1), steps=4, max_iter=10)
    # Without CEM at the end: the batches alone lead there.
    driven = anneal(x, start, optimizer=optax.adam(0.03), batch_size=512, max_iter=0)
    np.testing.assert_allclose(driven.cost, full.cost, rtol=5e-3)


def test_batches_follow_the_key_and_are_unbiased(precision):
    """The mean of many small steps of plain gradient descent is the step on all points."""
    x, start, _ = blobs(precision)
    weights = np.random.default_rng(16).integers(0, 4, 120).astype(precision)
    optimizer = optax.sgd(1e-2)

    def means(key, batch_size):
        arguments = (x, weights, start, jc.CMLE(), jnp.ones(1, precision), 1, None)
        return anneal_module._anneal(
            key, *arguments, optimizer=optimizer, batch_size=batch_size
        ).means

    keys = jax.random.split(jax.random.key(0), 400)
    drawn = jax.vmap(lambda key: means(key, 10))(keys)
    drawn = np.asarray(drawn, np.float64) - start.means
    assert (drawn[0] != drawn[1]).any()
    whole = np.asarray(means(keys[0], None), np.float64) - start.means
    error = 5 * drawn.std(axis=0) / np.sqrt(len(keys)) + 1e-6
    assert (np.abs(drawn.mean(axis=0) - whole) <= error).all()


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
def test_edges_are_finite(optimizer, precision):
    x = blobs(precision)[0]
    pairs = np.repeat(np.array([[0, 0], [5, 5], [0, 9]], precision), 40, axis=0)
    # Near 1e4 float32 has 1e-3 between its numbers: the same data at both places.
    there = x + np.asarray(1e4, precision)
    here = there - np.asarray(1e4, precision)
    constant = np.ones((120, 1), precision)
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


def test_an_optimizer_that_diverges_does_no_harm(precision):
    x, start, weights = blobs(precision)
    broken = optax.stateless(lambda updates, _: jax.tree.map(lambda leaf: leaf * jnp.nan, updates))
    solution = anneal(x, start, optimizer=broken, sample_weight=weights)
    np.testing.assert_allclose(
        solution.cost, jc.cem(x, start, sample_weight=weights).cost, rtol=1e-6
    )
    solution = anneal(x, start, optimizer=optax.sgd(1e30), sample_weight=weights)
    assert np.isfinite(solution.cost)
    assert all(np.isfinite(value).all() for value in parameters(solution.mixture))


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


def test_values_do_not_retrace(precision, monkeypatch):
    x, start, weights = blobs(precision)
    chex.clear_trace_counter()
    limited = jax.jit(
        chex.assert_max_traces(anneal_module._anneal.__wrapped__, n=1),
        static_argnames=("optimizer", "batch_size"),
    )
    monkeypatch.setattr(anneal_module, "_anneal", limited)
    for beta, steps, temperatures in ((1.0, 5, [1.0, 0.5]), (2.0, 9, (0.7, 0.2))):
        options = {"problem": jc.WKM(beta=beta), "steps": steps, "temperatures": temperatures}
        anneal(x + steps, start, min_variance=0.1 * beta, sample_weight=weights, **options)
    chex.clear_trace_counter()


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
