"""Every public function keeps the float dtype of the data, whatever the default is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcmle as jc

MIXTURE = jc.Mixture(
    weights=np.array([0.5, 0.5]), means=np.array([[0.0], [5.0]]), variances=np.ones(2)
)
STACK = jax.tree.map(lambda leaf: leaf[None], MIXTURE)
LABELS = [0, 0, 1, 1]
FUNCTIONS = {
    "point_costs": lambda x: jc.point_costs(x, MIXTURE),
    "cost": lambda x: jc.cost(x, MIXTURE),
    "score": lambda x: jc.score(x, STACK),
    "estimate": lambda x: jc.estimate(x, LABELS, 2, sample_weight=[1, 2, 1, 1]),
    "partition_cost": lambda x: jc.partition_cost(x, LABELS, 2),
    "cem": lambda x: jc.cem(x, MIXTURE),
    "cem_restarts": lambda x: jc.cem_restarts(x, STACK),
    "seed": lambda x: jc.seed(jax.random.key(0), x, 2),
    "rescale": lambda x: jc.rescale(x)[0],
    "polish": lambda x: jc.polish(x, LABELS, 2),
    "move_deltas": lambda x: jc.move_deltas(x, LABELS, 2, min_variance=0.1),
    "free_energy": lambda x: jc.free_energy(x, MIXTURE, 0.5),
    "wkm": lambda x: jc.cem(x, MIXTURE, problem=jc.WKM(beta=2)),
    "ucmle": lambda x: jc.cem(x, MIXTURE, problem=jc.UCMLE()),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "bool", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float_dtypes_are_kept_and_integers_become_the_default(name, dtype, precision):
    x = np.array([[0], [1], [0], [1]] if dtype == "bool" else [[0], [1], [5], [7]]).astype(dtype)
    if name == "rescale" and dtype == "bool":
        x = x[:2]
    if dtype == "float16":
        expected = np.dtype("float32")
    elif dtype in ("float32", "float64"):
        expected = min(np.dtype(dtype), precision, key=lambda kind: kind.itemsize)
    else:
        expected = precision
    result = FUNCTIONS[name](x)
    floats = [
        leaf
        for leaf in jax.tree.leaves(result)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if isinstance(result, jc.Solution):
        assert result.labels.dtype == result.status.dtype == result.n_iter.dtype == jnp.int32
        floats = [result.cost, *jax.tree.leaves(result.mixture)]
    assert floats
    assert all(leaf.dtype == expected for leaf in floats)
