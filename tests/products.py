"""What the tests of scoring share: random products and repetitions."""

import jax.numpy as jnp
import numpy as np

from jaxcmle.candidates import scoring
from jaxcmle.candidates.scoring import PRUNING, Grid


def random_columns(rng, sizes, n, dtype, kind):
    columns = [rng.gamma(2.0, size=(size, n)) for size in sizes]
    if kind == "ties":
        columns = [np.round(column).clip(0, 2) for column in columns]
    if kind == "padding":
        weight = rng.integers(0, 3, size=n)
        columns = [column * weight for column in columns]
    return [column.astype(dtype) for column in columns]


def walk(columns, masses, total, m, tile_rows=None, pruning=PRUNING, per_call=None):
    """Walk all of a product, in one call or in several."""
    dtype = columns[0].dtype
    as_arrays = tuple(jnp.asarray(column) for column in columns)
    mass = None if masses is None else tuple(jnp.asarray(mass, dtype) for mass in masses)
    product = scoring.prepare_product(as_arrays, mass, total)
    sizes = [len(column) for column in columns]
    rows = int(np.prod(sizes[:-1]))
    tile_rows = tile_rows or scoring.tile_rows(product, rows)
    best = scoring.nothing_yet(m, len(sizes), dtype)
    start = jnp.zeros(len(sizes) - 1, jnp.int32)
    tiles = -(-rows // tile_rows)
    for done in range(0, tiles, per_call or tiles):
        count = min(per_call or tiles, tiles - done)
        best, start = scoring.walk_product(
            product, best, start, count, columns=sizes[-1], tile_rows=tile_rows, pruning=pruning
        )
    return best


def random_repetitions(rng, s, n, d, k, g, w, dtype):
    """Return points, weights, means, and a grid of variances and weights."""
    x = rng.normal(size=(n, d)) * 3
    weight = rng.integers(0, 3, size=n).astype(float)
    weight[:2] = 1
    means = rng.normal(size=(s, k, d)) * 3
    variances = np.sort(rng.uniform(0.5, 9, size=g))
    weights = rng.dirichlet(np.full(k, 3.0), size=w)
    return tuple(value.astype(dtype) for value in (x, weight, means, variances, weights))


def repetition_inputs(x, weight, means, variances, weights, problem="cmle"):
    dtype, d = x.dtype, x.shape[1]
    constant = d / 2 * np.log(2 * np.pi * variances)
    grid = Grid(
        slope=jnp.asarray(0.5 / variances, dtype),
        constant=jnp.asarray(constant, dtype),
        log_weights=jnp.asarray(np.log(weights) if problem == "cmle" else weights * 0, dtype),
        n_weights=jnp.int32(len(weights)),
    )
    s = len(means)
    number = jnp.stack([jnp.full(s, 5), jnp.arange(100, 100 + s)], axis=1).astype(jnp.int32)
    blocks = scoring.point_blocks(jnp.asarray(x), jnp.asarray(weight))
    return blocks, jnp.asarray(means), number, jnp.ones(s, bool), grid
