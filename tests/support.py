"""What several tests share: the problems with their oracle names, instances, comparisons."""

import jax
import jax.numpy as jnp
import numpy as np
import reference

import jaxcmle as jc

BETA = 0.7
PROBLEMS = {"cmle": jc.CMLE(), "wkm": jc.WKM(beta=BETA), "ucmle": jc.UCMLE()}
NAMES = tuple(PROBLEMS)
# Problem, points, features, clusters, kind of weights: one feature, one cluster, one point per
# cluster, and more than are unrolled. Every program takes a second to compile: not all with all.
CASES = (
    ("cmle", 12, 1, 3, "fraction"),
    ("cmle", 9, 2, 1, "none"),
    ("cmle", 4, 3, 4, "none"),
    ("cmle", 40, 30, 5, "whole"),
    ("wkm", 12, 1, 3, "whole"),
    ("wkm", 40, 30, 5, "none"),
    ("ucmle", 12, 2, 3, "fraction"),
    ("ucmle", 4, 3, 4, "none"),
)


def random_mixture(rng, k, d, scale=3.0):
    weights = rng.dirichlet(np.full(k, 3.0))
    return weights, rng.normal(size=(k, d)) * scale, rng.uniform(0.3, 3.0, size=k)


def as_mixture(parameters, dtype):
    """Return a Mixture in the given dtype, and the same numbers as float64 for the oracle."""
    rounded = [np.asarray(value, dtype) for value in parameters]
    mixture = jc.Mixture(weights=rounded[0], means=rounded[1], variances=rounded[2])
    return mixture, tuple(value.astype(np.float64) for value in rounded)


def parameters(mixture):
    """Return the numbers of a Mixture as float64."""
    fields = (mixture.weights, mixture.means, mixture.variances)
    return tuple(np.asarray(value, np.float64) for value in fields)


def random_weights(rng, n, kind):
    """Return point weights: None, whole numbers with zeros among them, or fractions."""
    if kind == "none":
        return None
    if kind == "whole":
        weights = rng.integers(0, 4, size=n)
        weights[: max(2, n // 2)] += 1
        return weights.astype(float)
    return rng.uniform(0.1, 2.0, size=n)


def stack(mixtures):
    return jax.tree.map(
        lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *mixtures
    )


def tolerance(dtype):
    """Return the relative error allowed in a cost."""
    return 1e-5 if np.dtype(dtype) == np.float32 else 1e-12


def assert_cost(actual, expected, n, d, dtype):
    """Compare costs relative to their size, and no finer than to d/2 nats a point."""
    scale = max(abs(expected), n * d / 2)
    assert abs(float(actual) - expected) <= tolerance(dtype) * scale, (float(actual), expected)


def assert_labels(actual, x, mixture_parameters, problem, dtype):
    """Labels are those of the oracle, except where two clusters are tied to rounding."""
    arguments = (x, *mixture_parameters, problem, BETA)
    costs = reference.point_costs(*arguments)
    n = len(x)
    excess = costs[np.arange(n), np.asarray(actual)] - costs.min(axis=1)
    finest = tolerance(dtype) * np.maximum(1, np.abs(costs.min(axis=1)))
    assert (excess <= finest).all(), excess.max()
