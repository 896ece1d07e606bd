"""The estimator: scikit-learn's contract, and the same answers as the functions underneath."""

import dataclasses
import math
import pickle
import subprocess
import sys
import threading
import warnings

import jax
import joblib
import numpy as np
import pandas as pd
import pytest
import reference
from joblib.externals.loky import get_reusable_executor
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks
from support import BETA, PROBLEMS, parameters, tolerance

import jaxcmle as jc
from jaxcmle.apps.estimator import HardGaussianMixture

# The estimator computes in the precision of the data, whatever the default is.
PRECISIONS = ("float32",)
DTYPES = (np.float32, np.float64)
UNIT = math.sqrt(4 / math.pi)
# Few shapes, so that few programs are compiled.
N, K = 60, 3
LIGHT = jc.Effort(rounds=3, restarts=1, population=4, methods=("kmeans++",))
# Every new shape takes a search seconds to compile: of the checks, those that have the most to say.
SEARCHED = (
    "check_clustering",
    "check_fit2d_1sample",
    "check_fit2d_predict1d",
    "check_methods_subset_invariance",
)


def blobs(dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    centres = np.repeat([[0.0, 0.0], [6.0, 1.0], [2.0, 7.0]], N // K, axis=0)
    spread = np.repeat([0.5, 1.0, 1.5], N // K)[:, None]
    return (rng.permutation(centres + spread * rng.normal(size=(N, 2)))).astype(dtype)


def local(n_clusters=K, **options):
    return HardGaussianMixture(n_clusters, effort="local", **options)


def start(seed=0, k=K, d=2):
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(k, d)) * 3 + 3
    return jc.Mixture(weights=np.full(k, 1 / k), means=means, variances=rng.uniform(1, 3, k))


def starts(count):
    return jax.tree.map(lambda *parts: np.stack(parts), *(start(seed) for seed in range(count)))


def model_parameters(model):
    return model.weights_, model.means_, model.variances_


def test_parameters_and_attributes_are_documented():
    model = local().fit(pd.DataFrame(blobs(), columns=["a", "b"]))
    for name in (*model.get_params(), *(name for name in vars(model) if name.endswith("_"))):
        assert f"        {name}: " in HardGaussianMixture.__doc__, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_local_is_cem(dtype):
    x = blobs(dtype)
    with jax.enable_x64(dtype == np.float64):
        solution = jax.device_get(jc.cem(x, start()))
        among = jax.device_get(jc.cem_restarts(x, starts(10)))
    model = local(init=start()).fit(x)
    for attribute, expected in (
        (model.labels_, solution.labels),
        (model.cost_, solution.cost),
        (model.means_, solution.mixture.means),
        (model.variances_, solution.mixture.variances),
        (model.weights_, solution.mixture.weights),
        (model.n_iter_, solution.n_iter),
    ):
        np.testing.assert_array_equal(attribute, expected)
    assert model.means_.dtype == model.transform(x).dtype == dtype
    assert model.status_ == jc.Status.CONVERGED
    assert model.converged_
    # A solution, its labels and its means are other ways to say it.
    for init in (solution, solution.labels, model.means_):
        np.testing.assert_array_equal(local(init=init).fit(x).labels_, model.labels_)
    model = local(init=starts(10)).fit(x)
    np.testing.assert_array_equal(model.labels_, among.labels)
    assert model.cost_ == among.cost


def test_more_local_starts_are_not_worse():
    x = blobs(seed=1)
    one, ten = (
        [local(n_init=n, min_size=1, random_state=seed).fit(x).cost_ for seed in range(8)]
        for n in (1, 10)
    )
    assert (np.array(ten) <= one).all()
    assert min(one) < max(one)


def test_a_search_is_fit():
    x = blobs()
    with jax.enable_x64(True):
        solution = jax.device_get(jc.fit(x, K, key=jax.random.key(7), effort=LIGHT))
    model = HardGaussianMixture(K, effort=LIGHT, random_state=7).fit(x)
    np.testing.assert_array_equal(model.labels_, solution.labels)
    np.testing.assert_array_equal(model.means_, solution.mixture.means)
    assert model.cost_ == solution.cost
    assert model.n_iter_ == solution.n_iter
    assert model.lower_bound_ == solution.guarantee.lower_bound
    assert model.gap_ == solution.guarantee.gap < math.inf
    assert (model.predict(x) == model.labels_).all()


def test_what_a_search_is_told():
    x = blobs()
    effort = dataclasses.replace(LIGHT, rounds=1, starts=4)
    same = HardGaussianMixture(K, effort=effort).fit(x)
    model = HardGaussianMixture(K, effort=LIGHT, max_iter=1, n_init=4).fit(x)
    assert (model.n_iter_, model.cost_) == (same.n_iter_, same.cost_) == (1, model.cost_)
    for init in (model.means_, model.labels_, model.solution_, model.solution_.mixture):
        assert HardGaussianMixture(K, effort=effort, init=init).fit(x).cost_ <= model.cost_


def test_labels_differ_from_predictions_only_where_the_size_binds():
    x = np.array([[0.0], [UNIT], [2 * UNIT], [100.0]])
    model = HardGaussianMixture(2, effort=LIGHT, min_size=2)
    assert model.fit_predict(x).tolist() == [0, 0, 1, 1]
    assert not model.consistent_
    assert model.predict(x).tolist() == [0, 0, 0, 1]
    assert model.cost_ == pytest.approx(15.082, abs=1e-3)
    with pytest.warns(ConvergenceWarning, match="min_size"):
        model = local(2, min_size=2).fit(x)
    assert model.status_ == jc.Status.INADMISSIBLE
    model = local().fit(blobs())
    assert model.consistent_
    assert (model.predict(blobs()) == model.labels_).all()


@pytest.mark.parametrize("effort", ["local", LIGHT], ids=["local", "search"])
def test_whole_weights_are_repetitions(effort):
    x, weight = blobs(), np.ones(N, int)
    weight[::20], weight[1::20] = 0, 2
    model = HardGaussianMixture(K, effort=effort, init=start(), min_size=5)
    repeated = clone(model).fit(np.repeat(x, weight, axis=0))
    weighted = clone(model).fit(x, sample_weight=weight)
    assert weighted.cost_ == pytest.approx(repeated.cost_, rel=1e-12)
    np.testing.assert_allclose(weighted.means_, repeated.means_, rtol=1e-12)
    np.testing.assert_allclose(weighted.variances_, repeated.variances_, rtol=1e-12)
    np.testing.assert_array_equal(np.repeat(weighted.labels_, weight), repeated.labels_)
    np.testing.assert_array_equal(weighted.labels_, weighted.predict(x))
    # Points of weight 0 may be anywhere.
    far = np.where(weight[:, None] > 0, x, 1e3)
    np.testing.assert_array_equal(
        clone(model).fit(far, sample_weight=weight).means_, weighted.means_
    )


def test_weights_count_in_scores():
    x = blobs()
    weight = np.random.default_rng(0).integers(0, 3, size=N)
    model, repeated = local().fit(x), np.repeat(x, weight, axis=0)
    for name in ("score", "aic", "bic", "icl"):
        evaluate = getattr(model, name)
        assert evaluate(x, sample_weight=weight) == pytest.approx(evaluate(repeated), rel=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_costs_probabilities_and_densities_by_the_oracle(name):
    x = blobs()
    model = local(problem=PROBLEMS[name]).fit(x)
    costs = reference.point_costs(x, *model_parameters(model), name, BETA)
    inner = np.exp(-(costs - costs.min(axis=1, keepdims=True)))
    probabilities = model.predict_proba(x)
    np.testing.assert_allclose(model.transform(x), costs, rtol=1e-12)
    np.testing.assert_allclose(probabilities, inner / inner.sum(axis=1)[:, None], atol=1e-14)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-14)
    np.testing.assert_array_equal(model.predict(x), costs.argmin(axis=1))
    assert model.cost_ == pytest.approx(costs.min(axis=1).sum(), rel=1e-12)

    # The same model in scikit-learn; every density is that of the mixture with its weights.
    peer = GaussianMixture(K, covariance_type="spherical")
    peer.weights_, peer.means_, peer.covariances_ = model_parameters(model)
    peer.precisions_cholesky_ = 1 / np.sqrt(model.variances_)
    np.testing.assert_allclose(model.score_samples(x), peer.score_samples(x), rtol=1e-11)
    np.testing.assert_allclose(probabilities, peer.predict_proba(x), atol=1e-12)
    assert model.score(x) == pytest.approx(peer.score(x), rel=1e-12)
    fixed = {"cmle": 0, "wkm": K, "ucmle": K - 1}[name]
    assert model.aic(x) == pytest.approx(peer.aic(x) - 2 * fixed, rel=1e-12)
    assert model.bic(x) == pytest.approx(peer.bic(x) - fixed * math.log(N), rel=1e-12)
    complete = reference.model_cost(x, *model_parameters(model), "cmle")
    free = K - 1 + K * 2 + K - fixed
    assert model.icl(x) == pytest.approx(2 * complete + free * math.log(N), rel=1e-12)


def test_samples_have_the_moments_of_the_mixture():
    model = local(random_state=0).fit(blobs())
    x, labels = model.sample(40_000)
    assert x.shape == (40_000, 2)
    weights, means, variances = parameters(jc.estimate(x.astype(np.float32), labels, K))
    np.testing.assert_allclose(weights, model.weights_, atol=0.02)
    np.testing.assert_allclose(means, model.means_, atol=0.1)
    np.testing.assert_allclose(variances, model.variances_, rtol=0.05)
    np.testing.assert_array_equal(model.sample(7)[0], model.sample(7)[0])
    model.set_params(random_state=np.random.default_rng(0))
    assert (model.sample(7)[0] != model.sample(7)[0]).any()


def test_pipeline_and_grid_search():
    x = blobs()
    pipeline = make_pipeline(StandardScaler(), local())
    grid = {"hardgaussianmixture__n_clusters": [1, 3]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(x)
    assert search.best_params_ == {"hardgaussianmixture__n_clusters": 3}
    labels = search.predict(x)
    expected = local().fit_predict(StandardScaler().fit_transform(x))
    np.testing.assert_array_equal(labels, expected)
    pipeline.fit(x, hardgaussianmixture__sample_weight=np.ones(N))
    np.testing.assert_array_equal(pipeline.predict(x), expected)


def test_tables_keep_their_names():
    frame = pd.DataFrame(blobs(), columns=["width", "height"])
    model = local().set_output(transform="pandas").fit(frame)
    assert model.feature_names_in_.tolist() == ["width", "height"]
    costs = model.transform(frame)
    names = [f"hardgaussianmixture{i}" for i in range(K)]
    assert costs.columns.tolist() == model.get_feature_names_out().tolist() == names
    assert model.fit_transform(frame).equals(costs)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["height", "width"]])
    assert (model.predict(frame) == local().fit_predict(blobs())).all()


@pytest.mark.parametrize("effort", ["local", LIGHT], ids=["local", "search"])
def test_copies_predict_the_same(effort):
    x = blobs()
    problem, key = jc.CMLE(), jax.random.key(3)
    model = HardGaussianMixture(K, effort=effort, problem=problem, random_state=key, init=start())
    model.fit(x)
    copy = pickle.loads(pickle.dumps(model))
    for name in ("predict", "predict_proba", "transform", "score_samples"):
        np.testing.assert_array_equal(getattr(copy, name)(x), getattr(model, name)(x))
    assert copy.means_.dtype == copy.solution_.mixture.means.dtype == np.float64
    other = clone(model)
    assert not hasattr(other, "means_")
    np.testing.assert_array_equal(other.fit_predict(x), model.labels_)


@pytest.mark.parametrize("prefer", ["processes", "threads"])
def test_fits_in_parallel(prefer):
    x = blobs()
    jobs = (joblib.delayed(local(random_state=seed).fit)(x) for seed in (0, 1))
    models = joblib.Parallel(n_jobs=2, prefer=prefer)(jobs)
    get_reusable_executor().shutdown(wait=True)
    for seed, model in enumerate(models):
        np.testing.assert_array_equal(model.labels_, local(random_state=seed).fit(x).labels_)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_common_offset_changes_no_label(dtype):
    # A grid that float32 holds at this offset.
    x = (np.round(blobs() * 8) / 8).astype(dtype)
    model, far = local(init=start()), local(init=start())
    far.init = dataclasses.replace(start(), means=start().means + 1e6)
    np.testing.assert_array_equal(far.fit_predict(x + dtype(1e6)), model.fit_predict(x))
    assert far.cost_ == pytest.approx(model.cost_, rel=100 * tolerance(dtype))


@pytest.mark.parametrize("effort", ["local", LIGHT], ids=["local", "search"])
def test_edges(effort):
    def fitted(x, k, **options):
        return HardGaussianMixture(k, effort=effort, **options).fit(x)

    line = np.array([[0.0], [1.0], [2.0], [10.0], [11.0], [13.0]])
    for x in (line, np.repeat(line, 2, axis=0)):
        assert sorted(fitted(x, 2).means_[:, 0]) == pytest.approx([1, 34 / 3])
    one = fitted(line, 1)
    assert (one.means_.item(), one.variances_.item()) == pytest.approx((line.mean(), line.var()))
    assert one.n_iter_ >= 1
    every = fitted(line[:2], 2, min_size=1)
    assert sorted(every.labels_) == [0, 1]
    assert np.isfinite(every.cost_)
    copies = np.repeat(line[:2], 3, axis=0)
    with pytest.warns(ConvergenceWarning, match="2 distinct points"):
        few = fitted(copies, 4, min_size=1)
    assert few.means_.shape == (2, 1)
    assert few.transform(copies).shape == (6, 2)


@pytest.mark.parametrize("effort", ["local", LIGHT], ids=["local", "search"])
def test_warm_start_is_not_worse(effort):
    x = blobs(seed=1)
    model = HardGaussianMixture(K, effort=effort, n_init=1, max_iter=1, warm_start=True)
    with warnings.catch_warnings():
        # What is not done is what the next one is for.
        warnings.simplefilter("ignore", ConvergenceWarning)
        costs = [model.set_params(random_state=seed).fit(x).cost_ for seed in range(3)]
    assert costs[0] >= costs[1] >= costs[2]
    if effort == "local":
        assert costs[0] > costs[1]
        # Another number of clusters starts afresh.
        model.set_params(n_clusters=2, max_iter=300)
        assert model.fit(x).means_.shape == (2, 2)


def test_a_local_answer_can_be_proved():
    x = np.array([[0.0], [2.0], [4.0], [9.0], [11.0], [13.0]])
    model = local(2).fit(x)
    assert (model.lower_bound_, model.gap_) == (-math.inf, math.inf)
    model.set_params(certify=True).fit(x)
    assert model.lower_bound_ <= model.cost_
    assert model.gap_ <= 0.01
    assert model.solution_.guarantee.kind == "certificate"


def test_too_few_iterations_warn():
    with pytest.warns(ConvergenceWarning, match="max_iter"):
        model = local(max_iter=1, init=start()).fit(blobs())
    assert model.status_ == jc.Status.MAX_ITER
    assert not model.converged_
    assert model.n_iter_ == 1


def test_precision_is_that_of_the_data_and_settings_stay():
    x = np.round(blobs() * 8)
    assert local().fit(x.astype(np.float32)).means_.dtype == np.float32
    for kind in (np.int32, np.int64, np.float16, np.float64):
        assert local().fit(x.astype(kind)).means_.dtype == np.float64
    assert local().fit(jax.numpy.asarray(x, np.float32)).means_.dtype == np.float32
    assert not jax.config.jax_enable_x64
    # Another thread has settings of its own.
    seen = []
    thread = threading.Thread(target=lambda: seen.append(local().fit(x).means_.dtype))
    thread.start()
    thread.join()
    assert seen == [np.float64]
    labels = local().fit(x).labels_
    labels[0] = 0  # arrays are the user's own


def test_random_states():
    x = blobs(seed=1)

    def means(random_state):
        return local(n_init=1, min_size=1, random_state=random_state).fit(x).means_

    np.testing.assert_array_equal(means(None), means(0))
    np.testing.assert_array_equal(means(np.int64(5)), means(jax.random.key(5)))
    assert (means(1) != means(2)).any()
    for kind in (np.random.RandomState, np.random.default_rng):
        np.testing.assert_array_equal(means(kind(1)), means(kind(1)))
        generator = kind(1)
        assert (means(generator) != means(generator)).any()


def test_devices():
    x = blobs()
    labels = local().fit_predict(x)
    for device in ("cpu:0", jax.devices("cpu")[0]):
        np.testing.assert_array_equal(local(device=device).fit_predict(x), labels)


def test_verbose_shows_progress(capsys):
    HardGaussianMixture(K, effort=LIGHT).fit(blobs())
    assert capsys.readouterr().err == ""
    HardGaussianMixture(K, effort=LIGHT, verbose=1).fit(blobs())
    assert "rounds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_clusters": 61}, "from 1 to the number of points, 60, got 61"),
        ({"problem": "wkm"}, r"jaxcmle.WKM\(beta=...\), got 'wkm'"),
        ({"effort": "hard"}, r"'local'\) or a jaxcmle.Effort, got 'hard'"),
        ({"effort": "local", "n_init": 0}, "n_init must be 1 or more"),
        ({"effort": "local", "max_iter": 0}, "max_iter must be 1 or more"),
        ({"effort": "local", "min_size": 30}, "lower n_clusters or min_size"),
        ({"init": np.zeros((2, 2))}, r"means \[k, d\], \(3, 2\), got \(2, 2\)"),
        ({"effort": "local", "init": start(k=2)}, "init has 2 clusters, and n_clusters is 3"),
        ({"random_state": -1}, "random_state must be None, an int"),
        ({"random_state": "x"}, "random_state must be None, an int"),
        ({"device": "abacus"}, "device must be one of .*'cpu'.* got 'abacus'"),
        ({"device": "cpu:99"}, "device must be one of .*'cpu'.* got 'cpu:99'"),
    ],
)
def test_errors_say_what_to_do(options, message):
    with pytest.raises(ValueError, match=message):
        HardGaussianMixture(**{"n_clusters": K, **options}).fit(blobs())


def test_bad_data_and_no_fit():
    x = blobs()
    x[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        local().fit(x)
    with pytest.raises(NotFittedError):
        local().predict(blobs())
    with pytest.raises(NotFittedError):
        local().sample()
    with pytest.raises(ValueError, match="negative"):
        local().fit(blobs(), sample_weight=-np.ones(N))


def test_names_of_problems():
    x = blobs()
    for name in ("UCMLE", "ucmle"):
        named = local(problem=name).fit(x)
        np.testing.assert_array_equal(named.labels_, local(problem=jc.UCMLE()).fit(x).labels_)


WITHOUT_SKLEARN = """
import sys
sys.modules["sklearn"] = None
import pickle
import numpy as np, pandas as pd, pytest
from jaxcmle.apps.contract import ConvergenceWarning, NotFittedError
from jaxcmle.apps.estimator import HardGaussianMixture

x = pd.DataFrame({"a": [0, 2, 9, 11, 20, 22], "b": 1})
model = HardGaussianMixture(3, effort="local", random_state=1)
assert repr(model) == "HardGaussianMixture(n_clusters=3, effort='local', random_state=1)"
assert model.get_params()["n_clusters"] == 3
with pytest.raises(NotFittedError):
    model.predict(x)
with pytest.raises(ValueError, match="no parameter"):
    model.set_params(clusters=3)
assert model.set_params(n_clusters=2) is model
model.set_params(n_clusters=3)
labels = model.fit_predict(x)
assert model.means_.dtype == np.float64 and model.n_features_in_ == 2
assert (labels == model.predict(x)).all() and len(set(labels)) == 3
assert model.fit_transform(x).shape == (6, 3)
np.testing.assert_allclose(model.predict_proba(x).sum(axis=1), 1)
assert np.isfinite([model.score(x), model.aic(x), model.bic(x), model.icl(x)]).all()
assert model.sample(4)[0].shape == (4, 2) and model.score_samples(x).shape == (6,)
assert model.feature_names_in_.tolist() == ["a", "b"]
assert model.get_feature_names_out()[2] == "hardgaussianmixture2"
assert (pickle.loads(pickle.dumps(model)).predict(x) == labels).all()
for bad, message in ((x[["b", "a"]], "named"), (x[["a"]], "1 features"), (x * np.nan, "NaN")):
    with pytest.raises(ValueError, match=message):
        model.predict(bad)
with pytest.warns(ConvergenceWarning, match="max_iter"):
    model.set_params(max_iter=1, init=[[0, 1], [9, 1], [20, 1]]).fit(x.astype("float32"))
assert model.means_.dtype == np.float32
assert not any(name.startswith("sklearn.") for name in sys.modules)
"""


def test_works_without_sklearn():
    command = [sys.executable, "-W", "error", "-c", WITHOUT_SKLEARN]
    subprocess.run(command, check=True, timeout=300)


# Last, as they have so many shapes that programs of other tests are dropped.
def expected_failures(estimator):
    return {
        "check_sample_weight_equivalence_on_dense_data": (
            "the check shuffles the points, and clusters are numbered by their order, or that of "
            "the draws of k-means++; in test_whole_weights_are_repetitions the order stays"
        )
    }


@parametrize_with_checks([local()], expected_failed_checks=expected_failures)
def test_contract(estimator, check):
    check(estimator)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{check.func.__name__}{check.keywords or ''}")
        for _, check in estimator_checks_generator(HardGaussianMixture())
        if check.func.__name__ in SEARCHED
    ],
)
def test_contract_of_a_search(check):
    check(HardGaussianMixture(K, effort=LIGHT))
