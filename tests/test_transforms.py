"""jit = eager, vmap = loop, nothing retraced for a value, and programs for other platforms."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support import PROBLEMS, as_mixture, random_mixture, stack

import jaxcmle as jc
from jaxcmle.candidates import seeding
from jaxcmle.problem import bounds, instance, objective, score
from jaxcmle.problem.placement import placement_of
from jaxcmle.refine import cem as public_cem
from jaxcmle.refine import iterations as cem_module
from jaxcmle.refine import sharded
from jaxcmle.refine.polish import Limits
from jaxcmle.solve import evolution, population
from jaxcmle.stream import cem as stream_cem

N, D, K = 30, 2, 3


def data(seed, precision):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, D)).astype(precision)
    x[: N // 2] += 6
    mixture, _ = as_mixture(random_mixture(rng, K, D), precision)
    mixture = jax.tree.map(jnp.asarray, mixture)
    return jnp.asarray(x), mixture, jnp.asarray(rng.integers(0, K, N), jnp.int32)


FUNCTIONS = {
    "point_costs": lambda x, mixture, labels: jc.point_costs(x, mixture),
    "cost": lambda x, mixture, labels: jc.cost(x, mixture),
    "assign": lambda x, mixture, labels: jc.assign(x, mixture),
    "estimate": lambda x, mixture, labels: jc.estimate(x, labels, K),
    "partition_cost": lambda x, mixture, labels: jc.partition_cost(x, labels, K),
    "score": lambda x, mixture, labels: jc.score(x, stack([mixture, mixture])),
    "cem": lambda x, mixture, labels: jc.cem(x, mixture),
    "seed": lambda x, mixture, labels: jc.seed(jax.random.key(0), x, K),
    "lower_bound": lambda x, mixture, labels: jc.lower_bound(x, K),
    "upper_bound": lambda x, mixture, labels: jc.upper_bound(x, K),
    "y_range": lambda x, mixture, labels: jc.y_range(x, 3),
}


def assert_same(actual, expected, precision):
    loose = 1e-4 if precision == np.float32 else 1e-9
    for value, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=loose, atol=loose)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jit_and_vmap_equal_eager(name, precision):
    function = FUNCTIONS[name]
    several = [data(seed, precision) for seed in range(4)]
    eager = [function(*arguments) for arguments in several]
    assert_same(jax.jit(function)(*several[0]), eager[0], precision)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
    batched = jax.vmap(function)(*stacked)
    for i, single in enumerate(eager):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], batched), single, precision)


def test_vmap_over_beta(precision):
    x, mixture, _ = data(0, precision)
    betas = jnp.asarray([0.2, 1.0, 3.0], precision)
    costs = jax.vmap(lambda beta: jc.cost(x, mixture, problem=jc.WKM(beta=beta)))(betas)
    for beta, cost in zip(betas, costs, strict=True):
        single = jc.cost(x, mixture, problem=jc.WKM(beta=float(beta)))
        np.testing.assert_allclose(cost, single, rtol=1e-5)


def retraced(function, name, monkeypatch, module, calls, **static):
    """Run the calls with a program that may be traced once only."""
    limited = jax.jit(chex.assert_max_traces(function.__wrapped__, n=1), **static)
    monkeypatch.setattr(module, name, limited)
    for call in calls:
        jax.block_until_ready(call())


def test_values_do_not_retrace(precision, monkeypatch):
    x, mixture, labels = data(0, precision)
    other, second, _ = data(1, precision)
    starts = stack([mixture, second])
    chex.clear_trace_counter()
    retraced(
        cem_module.cem_stack,
        "cem_stack",
        monkeypatch,
        public_cem,
        [
            lambda: jc.cem_restarts(x, starts, problem=jc.WKM(beta=1.0), min_variance=0.1),
            lambda: jc.cem_restarts(
                other, starts, problem=jc.WKM(beta=2.5), min_variance=0.4, max_iter=7, min_size=5
            ),
        ],
    )
    retraced(
        bounds.bound_terms,
        "bound_terms",
        monkeypatch,
        bounds,
        [
            lambda: jc.lower_bound(x, 2, balance=5.0),
            lambda: jc.lower_bound(other, 3, balance=7.5, min_variance=0.1),
            lambda: jc.lower_bound(other, 3, min_size=4),
        ],
        static_argnames="byte_budget",
    )
    retraced(
        score.score_points,
        "score_points",
        monkeypatch,
        score,
        [
            lambda: jc.score(x, starts, problem=jc.WKM(beta=1.0)),
            lambda: jc.score(other, starts, problem=jc.WKM(beta=2.0)),
        ],
    )
    retraced(
        objective._estimate,
        "_estimate",
        monkeypatch,
        objective,
        [
            lambda: jc.estimate(x, labels, K, min_variance=0.1),
            lambda: jc.estimate(other, labels, K, min_variance=0.7),
        ],
        static_argnames="k",
    )
    retraced(
        instance.variance_at_least,
        "variance_at_least",
        monkeypatch,
        instance,
        [lambda: jc.variance_floor(x, 2), lambda: jc.variance_floor(other, 5)],
        static_argnames="byte_budget",
    )
    chex.clear_trace_counter()


def shapes(*trees):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), trees)


def search_round(x, weight, starts, k, problem):
    space = population.workspace(x, weight, jnp.ones(k, bool), Limits(2, None), problem)
    pace = evolution.Pace(10, 5, 2, 1)
    search = evolution.begin(space, None, 4, 2, pace, problem)
    return evolution.advance(jax.random.key(0), search, space, starts, pace, problem)


@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
@pytest.mark.parametrize("name", ["cmle", "wkm"])
def test_hot_functions_lower_for_accelerators(name, platform, precision):
    """From this CPU: the programs contain nothing that another platform cannot run."""
    rng = np.random.default_rng(0)
    n, d, k, m = 20_000, 8, 20, 4
    problem = PROBLEMS[name]
    x, weight = np.zeros((n, d), precision), np.ones(n, precision)
    starts = stack([as_mixture(random_mixture(rng, k, d), precision)[0] for _ in range(m)])
    limits = cem_module.Limits(300, 2, None)
    key, size = jax.random.key(0), np.asarray(2, precision)
    split = placement_of(None, jax.make_mesh((1, 1), ("points", "starts")))
    words, means = np.zeros(n, np.uint32), starts.means
    first = jax.tree.map(lambda leaf: leaf[0], starts)
    programs = (
        (lambda *given: cem_module.cem_stack(*given, problem, limits), (x, weight, starts)),
        (lambda *given: score.score_points(*given, problem), (x, weight, starts)),
        (lambda x: bounds.bound_terms(x, None, k, size, problem, 0.0, 2**28), (x,)),
        (lambda x: seeding._seed(key, x, None, k, "kmeans++", 3), (x,)),
        (lambda *given: search_round(*given, k, problem), (x, weight, starts)),
        (lambda *given: sharded._cem(*given, problem, limits, split, True), (x, weight, starts)),
        (lambda *given: stream_cem._chunk_pass(*given, problem), (x, weight, words, starts, means)),
        (lambda *given: stream_cem._quick_chunk(*given, problem), (x, None, first, x[0])),
    )
    for function, arguments in programs:
        exported = export.export(jax.jit(function), platforms=[platform])(*shapes(*arguments))
        assert exported.platforms == (platform,)
