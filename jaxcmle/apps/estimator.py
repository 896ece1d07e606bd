"""Hard clustering as a scikit-learn estimator. Works without scikit-learn, too."""

# Data is called X, as scikit-learn has it.
# ruff: noqa: N803, N806

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxcmle import numerics
from jaxcmle.apps.contract import settings, to_key, to_numpy, to_problem
from jaxcmle.apps.starts import Data, possible_clusters
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import assign, point_costs
from jaxcmle.problem.types import Mixture, Problem, Solution, Status
from jaxcmle.proof.certify import certify
from jaxcmle.refine.cem import cem_restarts
from jaxcmle.refine.iterations import least_variance
from jaxcmle.solve.criteria import Criteria, criteria, log_densities
from jaxcmle.solve.effort import EFFORTS, Effort, to_effort
from jaxcmle.solve.fit import fit

try:
    from sklearn.base import (
        BaseEstimator,
        ClassNamePrefixFeaturesOutMixin,
        ClusterMixin,
        TransformerMixin,
    )
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    from jaxcmle.apps.contract import (
        BaseEstimator,
        ClassNamePrefixFeaturesOutMixin,
        ClusterMixin,
        ConvergenceWarning,
        TransformerMixin,
        check_is_fitted,
        validate_data,
    )

__all__ = ["HardGaussianMixture"]

# What is neither is computed in the first.
DTYPES = [np.float64, np.float32]
# Without a global search: how many starts, and how many iterations from each.
LOCAL_STARTS = 10
LOCAL_ITERATIONS = 300


class HardGaussianMixture(
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]
    TransformerMixin,  # type: ignore[misc]
    ClusterMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """Hard clustering with spherical Gaussians: `jaxcmle.fit` with scikit-learn's contract.

    Computes in the precision of the data, as scikit-learn does, whatever the settings of JAX are:
    float32 stays float32, everything else is float64. On most GPUs float32 is many times faster:
    pass `X.astype("float32")`.

    `fit_predict(X)` is `fit(X).predict(X)`, unless `min_size` keeps a point from its cheapest
    cluster; `consistent_` tells.

    Args:
        n_clusters: the number of clusters.
        problem: `"cmle"` (weights, means and variances are free), `"ucmle"` (equal weights), or
            one of `jaxcmle.CMLE()`, `jaxcmle.UCMLE()`, `jaxcmle.WKM(beta=...)`.
        effort: how hard the global search tries: `"quick"`, `"default"`, `"thorough"` or a
            `jaxcmle.Effort`. `"local"` does not search: it returns the best admissible end of
            Classification EM from `n_init` starts by k-means++.
        n_init: the number of starts. Default: that of the effort; 10 for `"local"`.
        init: what is known to begin with: a `jaxcmle.Mixture`, a `jaxcmle.Solution`, labels `[n]`
            or means `[k, d]` (for equal weights, and the variance of the data). A search has other
            starts besides; `"local"` has no others, and takes a stack of mixtures as well.
        min_size: the least weight of a cluster. Default: a tenth of the average, but 2 points at
            least, if there are so many.
        min_variance: floor under every variance. Default: the rounding error of the data, squared.
        random_state: an int, NumPy's `RandomState` or `Generator`, or a key of JAX. None is as
            good as 0: the same call gives the same answer.
        warm_start: begin with the mixture of the last `fit`, in place of `init`, if it has the same
            numbers of clusters and features.
        verbose: more than 0 shows the progress of the search.
        max_iter: the most rounds of a search, by default those of the effort; for `"local"`
            iterations from each start, by default 300.
        certify: prove how good the answer is, as `jaxcmle.certify` does. Without, a search of up
            to 4096 points comes with a quick lower bound, which is loose.
        time_limit: seconds for the search and the proof.
        device: where to compute: `"cpu"`, `"gpu"`, `"gpu:1"`, or a `jax.Device` (which can be
            neither cloned nor pickled). Default: as JAX is set.

    Attributes:
        weights_: `[k]`.
        means_: `[k, d]`.
        variances_: `[k]`, the same in every direction.
        covariances_: `variances_`, under the name it has in a spherical `GaussianMixture`.
        labels_: int32 `[n]`, the clusters of the points of `fit`.
        cost_: what they cost there in nats, which is what is minimised.
        n_iter_: rounds of the search, or iterations of `"local"`.
        converged_: whether `status_` is `CONVERGED`.
        status_: a `jaxcmle.Status`.
        lower_bound_: no clustering with clusters of `min_size` costs less; minus infinity if that
            is not known. (In `GaussianMixture` this is a mean log-likelihood.)
        gap_: how far from optimal the cost can be, in nats per point; infinite if not known.
        consistent_: whether `labels_` is `predict(X)`.
        solution_: all of it, and the guarantee, as a `jaxcmle.Solution` of NumPy arrays.
        n_features_in_: the number of features.
        feature_names_in_: their names, if `fit` was given a table whose columns have names.

    Example:
        >>> import jaxcmle as jc
        >>> X = [[0.0], [2.0], [9.0], [11.0], [20.0], [22.0]]
        >>> model = jc.HardGaussianMixture(n_clusters=3, effort="quick").fit(X)
        >>> model.labels_.tolist(), model.means_[:, 0].tolist()
        ([0, 0, 1, 1, 2, 2], [1.0, 10.0, 21.0])
        >>> model.predict([[3.0], [18.0]]).tolist()
        [0, 2]
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        # A name, as scikit-learn wants defaults to be plain values.
        problem: str | Problem = "cmle",
        effort: str | Effort = "default",
        n_init: int | None = None,
        init: Any = None,
        min_size: float | None = None,
        min_variance: float | None = None,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: int = 0,
        max_iter: int | None = None,
        certify: bool = False,
        time_limit: float | None = None,
        device: Any = None,
    ) -> None:
        """Store the parameters; `fit` looks at them."""
        self.n_clusters = n_clusters
        self.problem = problem
        self.effort = effort
        self.n_init = n_init
        self.init = init
        self.min_size = min_size
        self.min_variance = min_variance
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose
        self.max_iter = max_iter
        self.certify = certify
        self.time_limit = time_limit
        self.device = device

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Cluster the points.

        Args:
            X: points `[n, d]`.
            y: ignored.
            sample_weight: `[n]`, default ones. A weight of 2 is as good as a point given twice
                (which a minimum size could part).

        Returns:
            The estimator. A `ConvergenceWarning` says if the clusters are smaller than asked for,
            or if `"local"` ended before it had converged.
        """
        X = validate_data(self, X, dtype=DTYPES)
        if sample_weight is not None and not np.asarray(sample_weight).any():
            raise ValueError("sample_weight is zero for every point; at least one must be positive")
        problem, key = to_problem(self.problem), to_key(self.random_state)
        local = isinstance(self.effort, str) and self.effort == "local"
        with settings(X.dtype, self.device):
            points, weight = inputs.to_points(X, sample_weight)
            wanted = inputs.to_n_clusters(self.n_clusters, len(points))
            k = possible_clusters(wanted, points, weight)
            if k < wanted:
                message = f"X has only {k} distinct points: there will be as many clusters, not "
                warnings.warn(f"{message}{wanted}", ConvergenceWarning, stacklevel=2)
            data = Data(points, weight, k, problem)
            start = self._start(data)
            solution = to_numpy((self._climb if local else self._search)(data, key, start))

        self.solution_ = solution
        self.weights_ = solution.mixture.weights
        self.means_ = solution.mixture.means
        self.variances_ = self.covariances_ = solution.mixture.variances
        self.labels_ = solution.labels
        self.cost_ = float(solution.cost)
        self.n_iter_ = max(int(solution.n_iter), 1)
        self.status_ = Status(int(solution.status))
        self.converged_ = self.status_ == Status.CONVERGED
        self.lower_bound_ = float(solution.guarantee.lower_bound)
        self.gap_ = float(solution.guarantee.gap)
        self.consistent_ = bool(solution.consistent)
        self._warn(local)
        return self

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> NDArray[np.int32]:
        """Cluster the points and return their labels, `[n]`; see `fit`."""
        return self.fit(X, sample_weight=sample_weight).labels_

    def fit_transform(self, X: Any, y: Any = None, sample_weight: Any = None) -> NDArray[Any]:
        """Cluster the points and return what they cost in every cluster; see `transform`."""
        return self.fit(X, sample_weight=sample_weight).transform(X)

    def predict(self, X: Any) -> NDArray[np.int32]:
        """Return the cheapest cluster of every point, `[n]`; ties go to the lowest.

        Args:
            X: points `[n, d]`.
        """
        return self._evaluate(assign, X)

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return the probability of every cluster given the point, `[n, k]`.

        Args:
            X: points `[n, d]`.
        """
        return self._evaluate(_posterior, X)

    def transform(self, X: Any) -> NDArray[Any]:
        """Return what every point costs in every cluster, `[n, k]`, in nats.

        That is minus the logarithm of weight times density, without the terms that are the same
        for all clusters of `"ucmle"` and `WKM`.

        Args:
            X: points `[n, d]`.
        """
        return self._evaluate(point_costs, X)

    def score_samples(self, X: Any) -> NDArray[Any]:
        """Return the logarithm of the density of the mixture at every point, `[n]`.

        Args:
            X: points `[n, d]`.
        """
        return self._evaluate(log_densities, X)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the mean logarithm of the density of the mixture; higher is better.

        Args:
            X: points `[n, d]`.
            y: ignored.
            sample_weight: `[n]`, default ones.
        """
        return self._evaluate(_mean_log_density, X, sample_weight=sample_weight)

    def aic(self, X: Any, sample_weight: Any = None) -> float:
        """Return Akaike's criterion on points; lower is better.

        Args:
            X: points `[n, d]`.
            sample_weight: `[n]`, default ones.
        """
        return self._criteria(X, sample_weight).aic

    def bic(self, X: Any, sample_weight: Any = None) -> float:
        """Return the Bayesian information criterion on points; lower is better.

        Args:
            X: points `[n, d]`.
            sample_weight: `[n]`, default ones.
        """
        return self._criteria(X, sample_weight).bic

    def icl(self, X: Any, sample_weight: Any = None) -> float:
        """Return the integrated completed likelihood on points; lower is better.

        It is that of points *and* labels, and so the criterion of the very thing that is fitted:
        choose the number of clusters by it.

        Args:
            X: points `[n, d]`, each with its cheapest label.
            sample_weight: `[n]`, default ones.
        """
        return self._criteria(X, sample_weight).icl

    def sample(self, n_samples: int = 1) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Draw points from the mixture, ordered by cluster.

        Args:
            n_samples: how many. The same call draws the same points, unless `random_state` is a
                generator of NumPy.

        Returns:
            Points `[n_samples, d]` and their labels.
        """
        check_is_fitted(self, "solution_")
        count = inputs.to_whole(n_samples, "n_samples")
        generator = np.random.default_rng(
            np.asarray(jax.random.key_data(to_key(self.random_state))).tolist()
        )
        weights = self.weights_.astype(np.float64)
        sizes = generator.multinomial(count, weights / weights.sum())
        labels = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        noise = generator.standard_normal((count, self.means_.shape[1]))
        points = self.means_[labels] + noise * np.sqrt(self.variances_[labels, None])
        return points.astype(self.means_.dtype), labels

    @property
    def _n_features_out(self) -> int:
        return len(self.weights_)

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that float32 stays float32."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _search(self, data: Data, key: Array, start: Any) -> Solution:
        """Search globally."""
        if isinstance(self.effort, str) and self.effort not in EFFORTS:
            raise ValueError(
                f"effort must be one of {(*EFFORTS, 'local')} or a jaxcmle.Effort, got "
                f"{self.effort!r}"
            )
        effort = to_effort(self.effort, self.time_limit)
        given = {"starts": self.n_init, "rounds": self.max_iter}
        changes: Any = {name: value for name, value in given.items() if value is not None}
        return fit(
            data.points,
            data.k,
            key=key,
            problem=data.problem,
            sample_weight=data.weight,
            effort=dataclasses.replace(effort, **changes),
            init=start,
            min_size=self.min_size,
            min_variance=self.min_variance,
            certify=bool(self.certify),
            progress=bool(self.verbose),
        )

    def _climb(self, data: Data, key: Array, start: Any) -> Solution:
        """Run Classification EM from every start, and return the best admissible end."""
        min_size = data.least_size(self.min_size)
        floor = partial(_floor, data, self.min_variance)
        count = LOCAL_STARTS if self.n_init is None else inputs.to_whole(self.n_init, "n_init")
        limit = LOCAL_ITERATIONS if self.max_iter is None else self.max_iter
        options: dict[str, Any] = {
            "problem": data.problem,
            "sample_weight": data.weight,
            "min_size": min_size,
        }
        solution = cem_restarts(
            data.points,
            data.drawn(key, count) if start is None else data.stack(start, floor),
            max_iter=inputs.to_whole(limit, "max_iter"),
            min_variance=self.min_variance,
            **options,
        )
        if not self.certify or min_size <= 0:
            return solution
        options["min_variance"] = floor()
        options.update(time_limit=self.time_limit, progress=bool(self.verbose))
        guarantee = certify(data.points, solution, **options)
        if guarantee.better is None:
            return dataclasses.replace(solution, guarantee=guarantee)
        # As `fit` does it: what the proof came across is the answer.
        return dataclasses.replace(guarantee.better, n_iter=solution.n_iter)

    def _start(self, data: Data) -> Any:
        """Return what is known to begin with, means made into a mixture."""
        shape = (data.k, data.points.shape[1])
        if self.warm_start and hasattr(self, "means_") and self.means_.shape == shape:
            return self._mixture()
        if isinstance(self.init, Mixture | Solution) or np.ndim(self.init) != 2:
            return self.init
        return data.around(self.init)

    def _mixture(self) -> Mixture:
        # NumPy arrays are as good as those of JAX: all functions take them.
        parts: Any = {"weights": self.weights_, "means": self.means_, "variances": self.variances_}
        return Mixture(**parts)

    def _evaluate(self, function: Callable[..., Any], X: Any, **options: Any) -> Any:
        """Return a function of points and the mixture, as NumPy arrays."""
        check_is_fitted(self, "solution_")
        X = validate_data(self, X, dtype=DTYPES, reset=False)
        with settings(X.dtype, self.device):
            problem = to_problem(self.problem)
            return to_numpy(function(X, self._mixture(), problem=problem, **options))

    def _criteria(self, X: Any, sample_weight: Any) -> Criteria:
        return self._evaluate(criteria, X, sample_weight=sample_weight)

    def _warn(self, local: bool) -> None:
        """Warn of an answer that is not what was asked for."""
        if self.status_ == Status.INADMISSIBLE:
            message = (
                "no clustering was found whose clusters all have min_size: lower n_clusters or "
                "min_size" + (", or search globally (effort='default')" if local else "")
            )
        elif local and self.status_ == Status.MAX_ITER:
            message = "Classification EM has not converged: raise max_iter"
        else:
            return
        warnings.warn(message, ConvergenceWarning, stacklevel=3)


def _floor(data: Data, min_variance: Any) -> float:
    """Return the floor under variances, by default the rounding error."""
    return float(least_variance(numerics.prepare(data.points, data.weight), min_variance))


def _posterior(x: Any, mixture: Mixture, *, problem: Problem) -> Array:
    """Return the probabilities of clusters given points."""
    return jax.nn.softmax(-point_costs(x, mixture, problem=problem), axis=1)


def _mean_log_density(x: Any, mixture: Mixture, *, problem: Problem, sample_weight: Any) -> float:
    """Return the mean of `log_densities`."""
    points, weight = inputs.to_points(x, sample_weight)
    densities = np.asarray(log_densities(points, mixture, problem=problem), np.float64)
    return float(np.average(densities, weights=weight))
