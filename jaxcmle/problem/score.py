"""Many mixtures on the same points: the costs of a stack in one compiled pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcmle import memory, numerics
from jaxcmle.numerics import Coefficients
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import is_valid, model_inputs, shift_means
from jaxcmle.problem.placement import (
    Placed,
    Placement,
    everywhere,
    is_placed,
    padded_stack,
    place,
    takes_mesh,
)
from jaxcmle.problem.types import CMLE, Mixture, Problem

__all__ = ["score", "score_placed", "score_points"]

# The error a matmul may cause, in roundings of the d nats or so that a point costs: a few 1e-6 of
# them in float32.
ROUNDINGS = 32
# Points per step, against a chunk of the mixtures.
BLOCK = 4096


@takes_mesh
def score(
    x: Any,
    mixtures: Mixture,
    *,
    problem: Problem = CMLE(),
    sample_weight: Any = None,
    mesh: Mesh | None = None,
) -> Array:
    r"""Return $L_X(\theta)$ for each of a stack of mixtures, in one compiled pass.

    Memory stays within a fixed budget whatever the number of points and mixtures. Where the data
    is narrow enough, costs come from a matrix product; in float32 they are within 1e-5 of `cost`.

    Args:
        x: points `[n, d]`.
        mixtures: weights `[m, k]`, means `[m, k, d]`, variances `[m, k]`.
        problem: `CMLE()`, `WKM(beta=...)` or `UCMLE()`.
        sample_weight: `[n]`, default ones.
        mesh: devices to split the points over, along the axis `"points"` (or the first one), and
            the mixtures along all others; an x that is split already needs none.

    Returns:
        Costs `[m]`, in nats; infinity for a mixture with NaN in it (possible only under `jit`).

    Example:
        >>> import jaxcmle as jc
        >>> mixtures = jc.Mixture(
        ...     weights=[[1.0], [1.0]], means=[[[0.0]], [[1.0]]], variances=[[1.0], [1.0]]
        ... )
        >>> print(jc.score([[0.0], [2.0]], mixtures).round(2))
        [3.84 2.84]
    """
    if is_placed(x, mesh):
        placed = place(x, sample_weight, mesh)
        problem = inputs.to_problem(problem)
        mixtures = inputs.to_mixture(
            mixtures, placed.x.shape[1], placed.x.dtype, problem, stack=True
        )
        return memory.within(lambda: score_placed(placed, mixtures, problem))
    problem, points, weight, mixtures = model_inputs(
        x, mixtures, sample_weight, problem, stack=True
    )
    return memory.within(lambda: score_points(points, weight, mixtures, problem))


def score_placed(placed: Placed, mixtures: Mixture, problem: Problem) -> Array:
    """Return the costs `[m]` of a stack of mixtures, for points on several devices."""
    placement, m = placed.placement, mixtures.weights.shape[0]
    stack = everywhere(padded_stack(mixtures, placement.lanes), placement.mesh)
    return _score_placed(placed.x, placed.weight, stack, problem, placement, m)


@partial(jax.jit, static_argnames=("placement", "m"))
def _score_placed(
    x: Array,
    weight: Array | None,
    mixtures: Mixture,
    problem: Problem,
    placement: Placement,
    m: int,
) -> Array:
    def local(x: Array, weight: Array | None, mixtures: Mixture, problem: Problem) -> Array:
        return lax.psum(score_points(x, weight, mixtures, problem), placement.points)

    same = PartitionSpec()
    costs = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(placement.along_points, placement.along_points, placement.along_others, same),
        out_specs=placement.along_others,
        check_vma=False,
    )(x, weight, mixtures, problem)
    return lax.with_sharding_constraint(costs[:m], NamedSharding(placement.mesh, same))


@jax.jit
def score_points(x: Array, weight: Array | None, mixtures: Mixture, problem: Problem) -> Array:
    """Return the costs `[m]` of a stack of mixtures; arguments are checked already."""
    points = numerics.prepare(x, weight)
    (n, d), (m, k) = points.x.shape, mixtures.weights.shape
    small = numerics.is_small(k, d)
    width = min(n, BLOCK)

    # As many mixtures at once as make a full tile with a block of points.
    bytes_each = points.x.dtype.itemsize * width * (1 if small else k)
    chunks = -(-m // max(1, numerics.tile_bytes() // bytes_each))
    chunk = -(-m // chunks)
    index = jnp.minimum(jnp.arange(chunks * chunk), m - 1).reshape(chunks, chunk)

    valid = is_valid(mixtures, problem)
    mixtures = shift_means(mixtures, -points.shift)
    weights = _blocks(points.weight[:, None], width)[:, 0]
    columns = _blocks(points.x, width)

    def directly(stack: Mixture) -> Array:
        coefficients = jax.vmap(problem.coefficients)(stack)

        def block_costs(columns: Array) -> Array:
            def one(coefficients: Coefficients) -> Array:
                return numerics.assign_directly(columns[None], coefficients, width)[0]

            return jax.vmap(one)(coefficients)

        return _total(block_costs, columns, weights)

    if small:
        costs = lax.map(
            lambda rows: directly(jax.tree.map(lambda leaf: leaf[rows], mixtures)), index
        )
        return jnp.where(valid, costs.reshape(-1)[:m], jnp.inf)

    centred, centre = numerics.centred(points)
    features = _blocks(numerics.matmul_features(centred), width)
    largest_norm = features[:, d].max()

    def by_matmul(stack: Mixture) -> Array:
        coefficients = jax.vmap(problem.coefficients)(shift_means(stack, -centre))
        matrix = numerics.matmul_coefficients(coefficients).reshape(chunk * k, d + 2)

        def block_costs(columns: Array) -> Array:
            costs = jnp.matmul(matrix, columns, precision=numerics.PRECISION)
            return numerics.smallest(costs.reshape(chunk, k, width).transpose(1, 0, 2))[0]

        return _total(block_costs, features, weights)

    def chunk_costs(rows: Array) -> Array:
        stack = jax.tree.map(lambda leaf: leaf[rows], mixtures)
        slope = jax.vmap(problem.coefficients)(stack).slope
        tolerance = ROUNDINGS * d * jnp.finfo(slope.dtype).eps
        safe = numerics.matmul_is_safe(largest_norm, slope, tolerance).all()
        return lax.cond(safe, by_matmul, directly, stack)

    return jnp.where(valid, lax.map(chunk_costs, index).reshape(-1)[:m], jnp.inf)


def _blocks(rows: Array, width: int) -> Array:
    """Return rows `[n, c]` as blocks `[b, c, width]`, the last one padded with zeros."""
    n, columns = rows.shape
    count = -(-n // width)
    padded = jnp.pad(rows, ((0, count * width - n), (0, 0)))
    return padded.reshape(count, width, columns).transpose(0, 2, 1)


def _total(block_costs: Callable[[Array], Array], blocks: Array, weights: Array) -> Array:
    """Return the weighted sums of `block_costs(block)`, `[m, width]`, over all blocks."""

    def add_block(carry: tuple[Array, Array], block: tuple[Array, Array]) -> Any:
        columns, weight = block
        costs = numerics.silence(weight, block_costs(columns))
        # Kahan's compensated sum, so that float32 does not drift over many blocks.
        total, lost = carry
        part = jnp.matmul(costs, weight, precision=numerics.PRECISION) - lost
        new = total + part
        return (new, jnp.where(jnp.isfinite(new), (new - total) - part, 0)), None

    m = jax.eval_shape(block_costs, blocks[0]).shape[0]
    start = jnp.zeros(m, blocks.dtype)
    return lax.scan(add_block, (start, start), (blocks, weights))[0][0]
