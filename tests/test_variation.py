"""New mixtures from old partitions: what they are made of, against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from support import BETA, NAMES, PROBLEMS

from jaxcmle import numerics
from jaxcmle.refine.polish import Limits, ready
from jaxcmle.refine.variation import _pairs, _removal_costs, crossover, swap, swap_keys
from jaxcmle.refine.workspace import fitted, partitions_of

N, D, M = 240, 2, 6
FEW, MANY = 4, 40
FLOOR = 1e-3


def population(precision, k, name="cmle", min_size=2.0):
    """Return the points, a workspace, and partitions by k points drawn at random."""
    rng = np.random.default_rng(k)
    x = reference.random_mixture_data(rng, N, D, 3, 4.0)[0].astype(precision)
    labels = np.array([nearest(x, x[rng.choice(N, k, replace=False)]) for _ in range(M)])
    problem = PROBLEMS[name]
    points = numerics.prepare(jnp.asarray(x), None)
    space = ready(points, jnp.ones(k, bool), Limits(min_size, FLOOR), problem)
    return x, space, partitions_of(space, jnp.asarray(labels, jnp.int32), k, problem)


def nearest(x, means):
    return ((x[:, None].astype(float) - means) ** 2).sum(axis=2).argmin(axis=1)


def rows(mixture, i):
    """Return the clusters of one mixture of a stack: their means and variances, `[k, d + 1]`."""
    return np.concatenate([mixture.means[i], mixture.variances[i][:, None]], axis=1)


def test_a_child_has_clusters_of_two_parents(precision):
    _, space, partitions = population(precision, FEW)
    parents = fitted(space, partitions.moments, PROBLEMS["cmle"])
    known = [{tuple(row) for row in rows(parents, i)} for i in range(M)]
    several = 0
    for seed in range(10):
        children = crossover(jax.random.key(seed), parents, space.exists)
        np.testing.assert_allclose(children.weights.sum(axis=1), 1, rtol=1e-5)
        for i in range(M):
            child = [tuple(row) for row in rows(children, i)]
            pairs = [
                (a, b)
                for a in range(M)
                for b in range(M)
                if a != b and set(child) <= known[a] | known[b]
            ]
            assert pairs
            several += not any(set(child) <= each for each in known)
    assert several > 5 * M


@pytest.mark.parametrize("name", NAMES)
def test_giving_up_a_cluster_costs_what_its_points_pay_elsewhere(name, precision):
    x, space, partitions = population(precision, FEW, name)
    mixtures = fitted(space, partitions.moments, PROBLEMS[name])
    costs = _removal_costs(space, mixtures, partitions.labels, PROBLEMS[name], jnp.array(False))
    shift = np.asarray(space.points.shift, float)
    for i in range(M):
        weights, means, variances = (
            np.asarray(leaf[i], float)
            for leaf in (mixtures.weights, mixtures.means, mixtures.variances)
        )
        each = reference.point_costs(x.astype(float), weights, means + shift, variances, name, BETA)
        for j in range(FEW):
            own = np.asarray(partitions.labels[i]) == j
            elsewhere = np.delete(each, j, axis=1)[own].min(axis=1)
            expected = (elsewhere - each[own, j]).sum()
            np.testing.assert_allclose(costs[i, j], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("name", "k"), [("cmle", FEW), ("wkm", FEW), ("cmle", MANY)])
def test_a_swap_divides_clusters_in_two_and_keeps_the_rest(name, k, precision):
    _, space, partitions = population(precision, k, name, min_size=1.0)
    before = fitted(space, partitions.moments, PROBLEMS[name])
    swapped, changes = jax.jit(swap), []
    for seed in range(4):
        keys = swap_keys(jax.random.key(seed), partitions.labels.shape[0])
        after, possible = swapped(keys, space, partitions, PROBLEMS[name])
        for i in np.flatnonzero(possible):
            old, new = rows(before, i), rows(after, i)
            changed = np.flatnonzero((old != new).any(axis=1))
            weights = np.asarray(after.weights[i], float)
            pairs = [[a, b] for a in changed for b in changed if a < b]
            merged = [weights[pair] @ new[pair, :D] / weights[pair].sum() for pair in pairs]
            slack = 1e-3 if precision == np.float32 else 1e-9
            divided = [
                j
                for j in changed
                if any(np.abs(old[j, :D] - mean).max() < slack for mean in merged)
            ]
            assert len(divided) >= len(changed) / 2 >= 1
            changes.append(len(changed) // 2)
    assert len(changes) > M
    assert (max(changes) > 1) == (k == MANY)


def greedy_pairs(loss, gain, limit):
    """Choose pairs one after the other, as `_pairs` does."""
    k = len(loss)
    free, found = set(range(k)), []
    while free:
        scores = [(loss[a] - gain[b], a, b) for a in free for b in free if a != b]
        score, a, b = min(scores, default=(np.inf, 0, 0))
        if not np.isfinite(score) or (found and (score >= 0 or len(found) >= limit)):
            break
        found.append((a, b))
        free -= {a, b}
    return found


@pytest.mark.parametrize("k", [2, 5, 33, 64])
def test_pairs_are_chosen_greedily(k, precision):
    rng = np.random.default_rng(k)
    loss, gain = rng.uniform(1, 3, (2, M, k))
    gain[rng.random((M, k)) < 0.3] = -np.inf
    gain[-1] = -np.inf
    draw = np.linspace(0, 0.999, M)
    given = (jnp.asarray(each, precision) for each in (loss, gain, draw))
    swaps = _pairs(*given, jnp.int32(loss.shape[1]))
    most = max(1, k // 16)
    limits = np.round(np.exp(draw * np.log(most)))
    for i in range(M):
        expected = greedy_pairs(loss[i].astype(precision), gain[i].astype(precision), limits[i])
        found = [(int(a[i]), int(b[i])) for a, b, made in zip(*swaps, strict=True) if made[i]]
        assert found == expected
