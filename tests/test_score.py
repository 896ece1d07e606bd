"""A stack of mixtures scored in one pass."""

import jax
import numpy as np
import pytest
import reference
from support import BETA, PROBLEMS, as_mixture, assert_cost, random_mixture, stack

import jaxcmle as jc
from jaxcmle import numerics
from jaxcmle.problem import score as score_module

# Problem, points, features, clusters, mixtures, weighted or not: the unrolled kernel, the matmul,
# more rows than are unrolled, more points than a block.
CASES = (
    ("cmle", 50, 2, 3, 7, False),
    ("wkm", 50, 2, 3, 7, True),
    ("ucmle", 9000, 2, 3, 6, True),
    ("cmle", 5000, 16, 9, 4, True),
    ("wkm", 60, 8, 20, 5, False),
    ("ucmle", 40, 3, 70, 3, False),
)


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_the_oracle(case, precision):
    name, n, d, k, m, weighted = case
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(n, d)) * 3).astype(precision)
    pairs = [as_mixture(random_mixture(rng, k, d), precision) for _ in range(m)]
    weights = rng.uniform(0, 2, size=n) * (rng.random(n) < 0.8) if weighted else None
    mixtures = stack([pair[0] for pair in pairs])
    scores = jc.score(x, mixtures, problem=PROBLEMS[name], sample_weight=weights)
    assert scores.shape == (m,)
    assert scores.dtype == precision
    for value, (_, values) in zip(scores, pairs, strict=True):
        wanted = reference.model_cost(x, *values, name, BETA, weights)
        assert_cost(value, wanted, n, d, precision)


@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_wide_data_takes_the_direct_path(spread, precision):
    """Narrow clusters far apart: the matmul form would be wrong by whole nats."""
    rng = np.random.default_rng(1)
    n, d, k = 400, 8, 20
    centres = rng.normal(size=(k, d)) * spread
    labels = rng.integers(0, k, n)
    x = (centres[labels] + 0.01 * rng.normal(size=(n, d))).astype(precision)
    mixture, values = as_mixture((np.full(k, 1 / k), centres, np.full(k, 1e-4)), precision)
    value = jc.score(x, stack([mixture]))[0]
    assert_cost(value, reference.model_cost(x, *values), n, d, precision)


def test_tiles_do_not_show(monkeypatch, precision):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(9000, 4)).astype(precision)
    mixtures = stack([as_mixture(random_mixture(rng, 3, 4), precision)[0] for _ in range(10)])
    whole = jc.score(x, mixtures)
    for size in (1, 2**17):
        monkeypatch.setattr(numerics, "tile_bytes", lambda size=size: size)
        tiled = jax.jit(score_module.score_points.__wrapped__)(x, None, mixtures, jc.CMLE())
        np.testing.assert_array_equal(tiled, whole)


def test_memory_is_bounded():
    """A million points against ten thousand mixtures: the program needs tiles, not the product."""
    x = jax.ShapeDtypeStruct((10**6, 2), np.float32)
    mixtures = jc.Mixture(
        weights=jax.ShapeDtypeStruct((10**4, 8), np.float32),
        means=jax.ShapeDtypeStruct((10**4, 8, 2), np.float32),
        variances=jax.ShapeDtypeStruct((10**4, 8), np.float32),
    )
    for problem in PROBLEMS.values():
        compiled = score_module.score_points.lower(x, None, mixtures, problem).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2**27


def test_a_hopeless_mixture_never_wins():
    x = np.array([[0.0], [1.0]])
    bad_and_good = jc.Mixture(
        weights=np.array([[np.nan], [1.0]]), means=np.zeros((2, 1, 1)), variances=np.ones((2, 1))
    )
    scores = jax.jit(jc.score)(x, bad_and_good)
    assert int(np.argmin(scores)) == 1
    assert not np.isnan(scores).any()
