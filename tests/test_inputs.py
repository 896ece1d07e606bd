"""Bad input: an error that says what was expected, what came and what to do."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcmle as jc

X = np.array([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0], [6.0, 5.0]])
LABELS = np.array([0, 0, 1, 1])
MIXTURE = jc.Mixture(
    weights=np.array([0.5, 0.5]), means=np.array([[0.0, 0.0], [5.0, 5.0]]), variances=np.ones(2)
)
STACK = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), MIXTURE)
KEY = jax.random.key(0)

# Every public function that takes points.
CALLS = {
    "point_costs": lambda x: jc.point_costs(x, MIXTURE),
    "cost": lambda x: jc.cost(x, MIXTURE),
    "assign": lambda x: jc.assign(x, MIXTURE),
    "score": lambda x: jc.score(x, STACK),
    "estimate": lambda x: jc.estimate(x, LABELS, 2),
    "partition_cost": lambda x: jc.partition_cost(x, LABELS, 2),
    "cem": lambda x: jc.cem(x, MIXTURE),
    "cem_restarts": lambda x: jc.cem_restarts(x, STACK),
    "seed": lambda x: jc.seed(KEY, x, 2),
    "check_instance": jc.check_instance,
    "rescale": jc.rescale,
    "is_balanced": lambda x: jc.is_balanced(x, LABELS, 2, f=2),
    "variance_floor": lambda x: jc.variance_floor(x, 2),
    "y_range": lambda x: jc.y_range(x, 2),
    "upper_bound": lambda x: jc.upper_bound(x, 2),
    "lower_bound": lambda x: jc.lower_bound(x, 2),
}
WEIGHTED = {
    "cost": lambda a: jc.cost(X, MIXTURE, sample_weight=a),
    "score": lambda a: jc.score(X, STACK, sample_weight=a),
    "estimate": lambda a: jc.estimate(X, LABELS, 2, sample_weight=a),
    "partition_cost": lambda a: jc.partition_cost(X, LABELS, 2, sample_weight=a),
    "cem": lambda a: jc.cem(X, MIXTURE, sample_weight=a),
    "seed": lambda a: jc.seed(KEY, X, 2, sample_weight=a),
    "lower_bound": lambda a: jc.lower_bound(X, 2, sample_weight=a),
}


def with_value(value):
    bad = X.copy()
    bad[2, 1] = value
    return bad


BAD_POINTS = [
    (with_value(np.nan), ValueError, r"NaN or infinity in 1 of 4 points \(first in row 2\)"),
    (with_value(-np.inf), ValueError, "NaN or infinity"),
    (X[:, 0], ValueError, r"reshape\(-1, 1\)"),
    (X[None], ValueError, r"shape \[n, d\]"),
    (np.zeros((0, 2)), ValueError, "at least one point"),
    (np.zeros((4, 0)), ValueError, "one feature"),
    (X.astype(object), TypeError, "real numbers, got dtype object"),
    ([["a", "b"]], TypeError, "numeric columns"),
    (X + 1j, TypeError, "complex"),
    ([[0.0, 1.0], [2.0]], ValueError, "not a rectangular array"),
    (np.ma.masked_array(X, X > 5), TypeError, "masked"),
    (None, TypeError, "real numbers"),
    (X.astype("timedelta64[s]"), TypeError, "real numbers"),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD_POINTS)
@pytest.mark.parametrize("name", CALLS)
def test_bad_points(name, bad, error, message):
    with pytest.raises(error, match=message):
        CALLS[name](bad)


@pytest.mark.parametrize("path", ["x.npy", Path("x.npy")])
def test_paths_are_for_those_who_read_files(path):
    calls = (
        lambda: jc.lower_bound(path, 2),
        lambda: jc.approximate(path, 2, eta=1.0),
        lambda: jc.fit_many([path], 2),
        lambda: jc.cost(path, MIXTURE),
    )
    for call in calls:
        with pytest.raises(TypeError, match=r"must be an array, got the path 'x\.npy'; load it"):
            call()


@pytest.mark.parametrize("name", CALLS)
def test_points_of_any_kind_are_taken(name):
    plain = CALLS[name](X)
    half = X.astype(np.float16)
    if name == "seed":  # a key draws other points in another dtype
        assert CALLS[name](half).means.dtype == np.float32
        half = X
    kinds = (int, np.longdouble, ">f8", ">i4")
    for x in (X.tolist(), jnp.asarray(X), half, np.asfortranarray(X), *map(X.astype, kinds)):
        other = CALLS[name](x)
        for value, wanted in zip(jax.tree.leaves(other), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([1.0, 1.0, -1.0, 1.0], ValueError, "not be negative, got -1.0"),
        ([1.0, np.nan, 1.0, 1.0], ValueError, "use 0 to leave a point out"),
        ([0.0] * 4, ValueError, "0 for every point"),
        ([1.0] * 3, ValueError, r"shape \(4,\), got \(3,\)"),
        (["a"] * 4, TypeError, "real numbers"),
    ],
)
@pytest.mark.parametrize("name", WEIGHTED)
def test_bad_weights(name, bad, error, message):
    with pytest.raises(error, match=message):
        WEIGHTED[name](bad)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (0, ValueError, "from 1 to the number of points, 4, got 0"),
        (5, ValueError, "from 1 to the number of points, 4, got 5"),
        (2.0, TypeError, "Python int"),
        ("2", TypeError, "Python int"),
    ],
)
def test_bad_n_clusters(bad, error, message):
    for call in (
        lambda k: jc.seed(KEY, X, k),
        lambda k: jc.estimate(X, LABELS, k),
        lambda k: jc.partition_cost(X, LABELS, k),
        lambda k: jc.upper_bound(X, k),
    ):
        with pytest.raises(error, match=message):
            call(bad)


def test_more_clusters_than_distinct_points():
    x = np.repeat(X[:2], 50, axis=0)
    with pytest.raises(ValueError, match=r"2 distinct points .* 3 clusters"):
        jc.seed(KEY, x, 3)
    mixture = jc.Mixture(weights=np.ones(3) / 3, means=np.zeros((3, 2)), variances=np.ones(3))
    with pytest.raises(ValueError, match="2 distinct points"):
        jc.cem(x, mixture)
    with pytest.raises(ValueError, match="2 distinct points of positive weight"):
        jc.seed(KEY, X, 3, sample_weight=[1.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([0, 0, 1, 2], ValueError, "got 0 to 2"),
        ([0, 0, 1, -1], ValueError, "got -1 to 1"),
        ([0, 0, 1], ValueError, "one label per point"),
        ([0.0, 0.0, 1.0, 1.0], TypeError, "astype"),
    ],
)
def test_bad_labels(bad, error, message):
    for function in (jc.estimate, jc.partition_cost):
        with pytest.raises(error, match=message):
            function(X, bad, 2)


def changed(**fields):
    values = {"weights": MIXTURE.weights, "means": MIXTURE.means, "variances": MIXTURE.variances}
    return jc.Mixture(**(values | fields))


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (changed(means=np.zeros((2, 3))), ValueError, r"means \[k, 2\]"),
        (changed(weights=np.ones(3)), ValueError, "got"),
        (STACK, ValueError, "a mixture for points with 2 features"),
        (changed(variances=np.array([1.0, 0.0])), ValueError, "positive and finite"),
        (changed(variances=np.array([1.0, np.nan])), ValueError, "positive and finite"),
        (changed(weights=np.array([0.5, -0.5])), ValueError, "not negative"),
        (changed(weights=np.zeros(2)), ValueError, "at least one positive"),
        (changed(means=np.full((2, 2), np.nan)), ValueError, "NaN"),
        (None, TypeError, "jaxcmle.Mixture"),
        (X, TypeError, "jaxcmle.Mixture"),
    ],
)
def test_bad_mixtures(bad, error, message):
    for function in (jc.cost, jc.assign, jc.point_costs, jc.cem):
        with pytest.raises(error, match=message):
            function(X, bad)


def test_a_single_mixture_is_no_stack():
    for function in (jc.score, jc.cem_restarts):
        with pytest.raises(ValueError, match="leading axis of length 1"):
            function(X, MIXTURE)


def test_what_a_problem_ignores_is_not_checked():
    jc.cost(X, changed(variances=np.zeros(2)), problem=jc.WKM(beta=1.0))
    jc.cost(X, changed(weights=np.zeros(2)), problem=jc.UCMLE())


@pytest.mark.parametrize("bad", ["cmle", jc.CMLE, None])
def test_bad_problems(bad):
    for call in (
        lambda: jc.cost(X, MIXTURE, problem=bad),
        lambda: jc.cem(X, MIXTURE, problem=bad),
        lambda: jc.lower_bound(X, 2, problem=bad),
        lambda: jc.estimate(X, LABELS, 2, problem=bad),
    ):
        with pytest.raises(TypeError, match=r"problem must be jaxcmle.CMLE\(\)"):
            call()


@pytest.mark.parametrize("beta", [0.0, -1.0, np.nan, np.inf, "a", None, [1.0, 2.0]])
def test_bad_beta(beta):
    with pytest.raises((TypeError, ValueError), match="WKM's beta"):
        jc.cost(X, MIXTURE, problem=jc.WKM(beta=beta))


def test_large_integers_do_not_wrap():
    x = np.array([[1_700_000_000_000], [1_700_000_002_000]])
    np.testing.assert_allclose(jc.estimate(x, [0, 0], 1).means, [[1.700000001e12]], rtol=1e-6)
    weights = np.array([5_000_000_000, 1_000_000_000])
    mixture = jc.estimate([[0.0], [1.0]], [0, 1], 2, sample_weight=weights, min_variance=1.0)
    np.testing.assert_allclose(mixture.weights, [5 / 6, 1 / 6], rtol=1e-6)
    far = jc.Mixture(weights=[1], means=[[2**33, 0]], variances=[1])
    assert float(jc.cost([[0.0, 0.0]], far)) > 1e18
    assert int(jc.cem(X, MIXTURE, max_iter=2**40, min_size=0).status) == jc.Status.CONVERGED
    assert np.isfinite(jc.cost(X, MIXTURE, problem=jc.WKM(beta=10**10)))


def test_scalars_of_any_dtype_are_taken():
    x = X.astype(np.float32)
    for kind in (float, np.float32, np.float64, np.array, jnp.asarray):
        solution = jc.cem(x, MIXTURE, min_variance=kind(0.1), problem=jc.CMLE())
        assert solution.cost.dtype == np.float32
        solution = jc.cem(x, MIXTURE, problem=jc.WKM(beta=kind(2.0)))
        assert solution.mixture.variances.dtype == np.float32
        assert jc.estimate(x, LABELS, 2, min_variance=kind(0.1)).variances.dtype == np.float32


def test_weights_out_of_range():
    for weight in (2e38, 1e-37):
        with pytest.raises(ValueError, match="multiply all weights by a constant"):
            jc.estimate(X.astype(np.float32), LABELS, 2, sample_weight=np.full(4, weight))


def test_other_wrong_things():
    with pytest.raises(TypeError, match=r"jaxcmle\.Solution"):
        jc.with_certificate(X, MIXTURE)
    with pytest.raises(ValueError, match="g must be positive"):
        jc.is_balanced(X, LABELS, 2, f=2, g=-1)
    with pytest.raises(TypeError, match="Python int"):
        jc.lower_bound(X, 1.5)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("min_size", -1, ValueError),
        ("min_variance", np.nan, ValueError),
        ("max_iter", -5, ValueError),
        ("max_iter", "many", TypeError),
        ("max_iter", "3", TypeError),
        ("min_size", [1, 2], TypeError),
    ],
)
def test_bad_limits(option, value, error):
    with pytest.raises(error, match=option):
        jc.cem(X, MIXTURE, **{option: value})


def test_bad_seed_arguments():
    with pytest.raises(ValueError, match="kmeans"):
        jc.seed(KEY, X, 2, method="magic")
    with pytest.raises(ValueError, match="subset_size"):
        jc.seed(KEY, X, 2, method="subsets", subset_size=0)
    for key in (0, np.zeros(3), "key"):
        with pytest.raises(TypeError, match=r"jax\.random\.key"):
            jc.seed(key, X, 2)
    old = jax.random.PRNGKey(0)
    np.testing.assert_array_equal(jc.seed(old, X, 2).means, jc.seed(KEY, X, 2).means)


def test_squares_out_of_range(precision):
    huge = 1e30 if precision == np.float32 else 1e200
    for scale in (huge, 1 / huge):
        with pytest.raises(ValueError, match="leave the range of"):
            jc.seed(KEY, X * scale, 2)
    if precision == np.float32:
        with pytest.raises(ValueError, match="does not fit in float32"):
            jc.seed(KEY, X * 1e60, 2)


def test_concrete_points_inside_jit_are_checked_when_traced():
    with pytest.raises(ValueError, match="NaN"):
        jax.jit(lambda mixture: jc.cost(with_value(np.nan), mixture))(MIXTURE)
    assert np.isfinite(jax.jit(lambda mixture: jc.cost(X, mixture))(MIXTURE))
