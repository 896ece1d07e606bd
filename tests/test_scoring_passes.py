"""Scoring in passes: no tile or pruning shows, memory is bounded, accelerators can run it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import random_repetitions, repetition_inputs, walk

from jaxcmle.candidates import sampling, scoring
from jaxcmle.candidates.scoring import NO_PRUNING, PRUNING, Grid, Pruning

PRECISIONS = ("float32",)
ONLY = {
    "partial sums": Pruning(False, True, False),
    "completions": Pruning(False, False, True),
    "all": PRUNING,
}


@pytest.mark.parametrize("name", ONLY)
def test_no_tile_and_no_pruning_shows_in_a_product(name):
    rng = np.random.default_rng(4)
    # Columns of very different quality, and blocks of points: there is something to give up on.
    columns = [rng.gamma(2.0, size=(23, 1100)) for _ in range(3)]
    columns = [(c * rng.uniform(1, 9, size=(23, 1))).astype(np.float32) for c in columns]
    masses = [rng.uniform(0.1, 1, 23) for _ in range(3)]
    for mass in (None, masses):
        plain = walk(columns, mass, 1100.0, 8, pruning=NO_PRUNING)
        pruned = walk(columns, mass, 1100.0, 8, tile_rows=16, pruning=ONLY[name], per_call=7)
        np.testing.assert_array_equal(plain.cost, pruned.cost)
        np.testing.assert_array_equal(plain.choice, pruned.choice)


def test_many_points_do_not_drift():
    """Constant columns round the same way at every addition."""
    columns = [np.full((2, 30_000), value, np.float32) for value in (1.1, 2.3)]
    best = walk(columns, None, 30_000.0, 1)
    assert abs(float(best.cost[0]) / (30_000 * float(np.float32(1.1))) - 1) <= 1e-5


@pytest.mark.parametrize("name", ONLY)
def test_no_tile_and_no_pruning_shows_in_repetitions(name):
    rng = np.random.default_rng(6)
    x, weight, means, variances, weights = random_repetitions(rng, 200, 300, 2, 3, 3, 7, np.float32)
    means[:150] += rng.uniform(0, 20, size=(150, 1, 1)).astype(np.float32)
    # On a scale where no cost is negative.
    variances = variances + np.float32(1)
    inputs = repetition_inputs(x, weight, means, variances, weights)
    nothing = scoring.nothing_yet(16, 6, np.float32)
    plain = scoring.score_repetitions(*inputs, nothing, pruning=NO_PRUNING)
    for tile in (16, 128):
        pruned = scoring.score_repetitions(*inputs, nothing, pruning=ONLY[name], tile=tile)
        np.testing.assert_array_equal(plain.cost, pruned.cost)
        np.testing.assert_array_equal(plain.choice, pruned.choice)


def test_repetitions_do_not_depend_on_chunks_or_calls():
    rng = np.random.default_rng(7)
    x, weight, _, variances, weights = random_repetitions(rng, 1, 90, 2, 2, 2, 1, np.float32)
    blocks, _, _, _, grid = repetition_inputs(
        x, weight, np.zeros((1, 2, 2), np.float32), variances + np.float32(1), weights
    )
    pool = sampling.make_pool(jnp.asarray(x), None)
    key = jax.random.key(3)

    def search(parts, chunk):
        best, done = scoring.nothing_yet(8, 5, np.float32), 0
        for count in parts:
            best = sampling.next_repetitions(
                key, pool, blocks, grid, best, (2, done), count, k=2, m=3, chunk=chunk
            )
            done += count
        return best

    expected = search([300], 64)
    for parts, chunk in (([300], 256), ([100, 7, 193], 64)):
        found = search(parts, chunk)
        np.testing.assert_array_equal(expected.cost, found.cost)
        np.testing.assert_array_equal(expected.choice, found.choice)
    means = sampling.repetition_means(key, expected.choice[:, :2], pool, 2, 3)
    one = sampling.repetition_means(key, expected.choice[3:4, :2], pool, 2, 3)
    np.testing.assert_array_equal(means[3], one[0])


def test_values_that_are_not_shapes_compile_nothing():
    """More or fewer repetitions, points to a mean (up to a power of two), weights, tiles."""
    rng = np.random.default_rng(8)
    x, weight, _, variances, weights = random_repetitions(rng, 1, 90, 2, 2, 2, 1, np.float32)
    blocks, _, _, _, grid = repetition_inputs(
        x, weight, np.zeros((1, 2, 2), np.float32), variances, weights
    )
    pool = sampling.make_pool(jnp.asarray(x), None)
    best = scoring.nothing_yet(8, 5, np.float32)

    def search(seed, start, count, m, slope):
        changed = grid._replace(slope=grid.slope * slope)
        key = jax.random.key(seed)
        return sampling.next_repetitions(
            key, pool, blocks, changed, best, start, count, k=2, m=m, chunk=64
        )

    search(0, (0, 0), 300, 3, 1)
    before = sampling.traced_repetitions._cache_size()
    search(1, (3, 77), 1000, 4, 2)
    assert sampling.traced_repetitions._cache_size() == before

    columns = [np.ones((5, 32), np.float32), np.ones((6, 32), np.float32)]
    walk(columns, None, 32.0, 4, tile_rows=2)
    before = scoring._walk_product._cache_size()
    walk([2 * column for column in columns], None, 32.0, 4, tile_rows=2, per_call=1)
    assert scoring._walk_product._cache_size() == before


# Memory and other devices.


def test_a_product_of_2048_cubed_stays_within_its_budget():
    """Read off the compiled program; a slice of it is run by the benchmark."""
    count, n, k = 2048, 8192, 3
    column = jax.ShapeDtypeStruct((count, n), jnp.float32)
    mass = jax.ShapeDtypeStruct((count,), jnp.float32)
    total = jax.ShapeDtypeStruct((), jnp.float32)
    product = jax.eval_shape(scoring.prepare_product, (column,) * k, (mass,) * k, total)
    best = jax.eval_shape(lambda: scoring.nothing_yet(64, k, jnp.float32))
    index = jax.ShapeDtypeStruct((k - 1,), jnp.int32)
    tiles = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = scoring._walk_product.lower(
        product, best, index, tiles, count, PRUNING, scoring.tile_rows(product, count**2)
    ).compile()
    memory = compiled.memory_analysis()
    arguments = 3 * count * n * 4
    assert memory.temp_size_in_bytes + arguments <= scoring.product_bytes(k, count, n)
    assert memory.temp_size_in_bytes <= 2**26


def test_repetitions_stay_within_their_budget():
    k, g, d, n, s = 3, 5, 8, 50_000, scoring.CHUNK
    array = jax.ShapeDtypeStruct
    blocks = (
        array((-(-n // scoring.LOOK), scoring.LOOK, d), jnp.float32),
        array((-(-n // scoring.LOOK), scoring.LOOK), jnp.float32),
    )
    grid = Grid(*(array((g,), jnp.float32),) * 2, array((1, k), jnp.float32), array((), jnp.int32))
    best = jax.eval_shape(lambda: scoring.nothing_yet(64, 3 + k, jnp.float32))
    compiled = jax.jit(scoring.score_repetitions).lower(
        blocks,
        array((s, k, d), jnp.float32),
        array((s, 2), jnp.int32),
        array((s,), jnp.bool_),
        grid,
        best,
    )
    memory = compiled.compile().memory_analysis()
    assert memory.temp_size_in_bytes <= scoring.repetition_bytes(k, g, d, n)


@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
def test_the_passes_lower_for_accelerators(platform):
    array = jax.ShapeDtypeStruct
    columns, mass = array((40, 96), jnp.float32), array((40,), jnp.float32)
    product = jax.eval_shape(
        scoring.prepare_product, (columns,) * 3, (mass,) * 3, array((), jnp.float32)
    )
    best = jax.eval_shape(lambda: scoring.nothing_yet(8, 3, jnp.float32))

    def whole_product(product, best, start):
        return scoring.walk_product(product, best, start, 4, columns=40, tile_rows=64)

    exported = jax.export.export(jax.jit(whole_product), platforms=[platform])(
        product, best, array((2,), jnp.int32)
    )
    assert exported.platforms == (platform,)

    grid = Grid(*(array((3,), jnp.float32),) * 2, array((2, 3), jnp.float32), array((), jnp.int32))
    blocks = (array((2, 64, 2), jnp.float32), array((2, 64), jnp.float32))
    best = jax.eval_shape(lambda: scoring.nothing_yet(8, 6, jnp.float32))
    for ends in (None, array((99,), jnp.uint32)):

        def repetitions(x, blocks, grid, best, ends=ends):
            return sampling.next_repetitions(
                jax.random.key(0), sampling.Pool(x, ends), blocks, grid, best, (0, 0), 300, k=3, m=2
            )

        def weighted(x, ends, blocks, grid, best):
            return sampling.next_repetitions(
                jax.random.key(0), sampling.Pool(x, ends), blocks, grid, best, (0, 0), 300, k=3, m=2
            )

        x = array((100, 2), jnp.float32)
        function = repetitions if ends is None else weighted
        arguments = (x, blocks, grid, best) if ends is None else (x, ends, blocks, grid, best)
        exported = jax.export.export(jax.jit(function), platforms=[platform])(*arguments)
        assert exported.platforms == (platform,)


def test_the_unroll_divides_what_it_walks():
    assert scoring.LOOK % scoring.UNROLL == 0
    for n in (1, 16, 17, 1024, 1025, 5000):
        padded = scoring._padded(n)
        assert n <= padded < n + 16 * (1 + n // 1000)
        assert padded // -(-padded // scoring.BLOCK) % scoring.UNROLL == 0
    assert all(len(set(pair)) == 2 for pair in itertools.combinations(ONLY.values(), 2))
