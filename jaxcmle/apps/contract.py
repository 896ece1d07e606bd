"""scikit-learn's contract, in two parts: its parameters as JAX wants them, and its base classes.

The classes, with the same names and, as far as they are used, the same meanings, are for where
scikit-learn is not installed.
"""

# Data is called X, as scikit-learn has it.
# ruff: noqa: N803

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxcmle.problem import inputs
from jaxcmle.problem.types import CMLE, UCMLE, Problem

__all__ = [
    "BaseEstimator",
    "ClassNamePrefixFeaturesOutMixin",
    "ClusterMixin",
    "ConvergenceWarning",
    "NotFittedError",
    "TransformerMixin",
    "check_is_fitted",
    "settings",
    "to_key",
    "to_numpy",
    "to_problem",
    "validate_data",
]


PROBLEMS: dict[str, Problem] = {"cmle": CMLE(), "ucmle": UCMLE()}


@contextlib.contextmanager
def settings(dtype: Any, device: Any) -> Iterator[None]:
    """Compute in a precision and on a device; what others have set is left alone."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(np.dtype(dtype) == np.float64))
        if device is not None:
            stack.enter_context(jax.default_device(_to_device(device)))
        yield


def _to_device(device: Any) -> Any:
    """Return the device of a name such as "gpu" or "gpu:1"."""
    if not isinstance(device, str):
        return device
    platform, _, number = device.partition(":")
    try:
        return jax.local_devices(backend=platform)[int(number or 0)]
    except (RuntimeError, IndexError, ValueError) as error:
        known = ["cpu", *(f"{each.platform}:{i}" for i, each in enumerate(jax.local_devices()))]
        raise ValueError(f"device must be one of {known}, got {device!r}") from error


def to_problem(problem: Any) -> Problem:
    """Return the problem of a name."""
    if isinstance(problem, str):
        if problem.lower() not in PROBLEMS:
            raise ValueError(
                f"problem must be one of {tuple(PROBLEMS)}, or jaxcmle.CMLE(), jaxcmle.UCMLE() or "
                f"jaxcmle.WKM(beta=...), got {problem!r}"
            )
        problem = PROBLEMS[problem.lower()]
    return inputs.to_problem(problem)


def to_key(random_state: Any) -> Array:
    """Return the key of a random state; a generator moves on."""
    if isinstance(random_state, jax.Array):
        return inputs.to_key(random_state)
    if isinstance(random_state, np.random.RandomState):
        random_state = random_state.randint(2**31)
    elif isinstance(random_state, np.random.Generator):
        random_state = random_state.integers(2**31)
    number = 0 if random_state is None else random_state
    if not isinstance(number, int | np.integer) or not 0 <= number < 2**32:
        raise ValueError(
            "random_state must be None, an int from 0 to 2**32 - 1, a RandomState or Generator of "
            f"NumPy, or a key of JAX, got {random_state!r}"
        )
    return jax.random.key(int(number))


def to_numpy(tree: Any) -> Any:
    """Return NumPy arrays that can be written to, and do not depend on the settings of JAX."""
    return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, Array) else leaf, tree)


class NotFittedError(ValueError, AttributeError):
    """Raised by what needs a fitted estimator."""


class ConvergenceWarning(UserWarning):
    """An answer that could be better, or does not keep to what was asked for."""


class BaseEstimator:
    """Parameters are the arguments of `__init__`, stored under their names."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Any:
        """Set parameters by name, and return the estimator."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(
                    f"{type(self).__name__} has no parameter {name!r}; it has {list(known)}"
                )
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        """Show the parameters that are not the default."""
        defaults = inspect.signature(type(self)).parameters
        shown = (
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if repr(value) != repr(defaults[name].default)
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class ClusterMixin:
    """A mark that scikit-learn's tools look for."""


class TransformerMixin:
    """A mark that scikit-learn's tools look for."""


class ClassNamePrefixFeaturesOutMixin:
    """Names of what `transform` returns."""

    _n_features_out: int

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """Return a name for every column: that of the class, in lower case, and a number."""
        check_is_fitted(self, "_n_features_out")
        prefix = type(self).__name__.lower()
        return np.asarray([f"{prefix}{i}" for i in range(self._n_features_out)], dtype=object)


def check_is_fitted(estimator: Any, attribute: str) -> None:
    """Raise unless `fit` has set the attribute."""
    if not hasattr(estimator, attribute):
        raise NotFittedError(
            f"This {type(estimator).__name__} instance is not fitted yet: call fit first"
        )


def validate_data(estimator: Any, X: Any, *, dtype: list[Any], reset: bool = True) -> NDArray[Any]:
    """Return the points as an array of one of the dtypes, the first if they have none of them.

    With `reset` the number and the names of the features are noted, else compared.
    """
    names = _feature_names(X)
    array = inputs.to_array(X, "X")
    array = np.asarray(array, array.dtype if array.dtype in dtype else dtype[0])
    with jax.enable_x64(True):
        inputs.to_points(array)
    if reset:
        estimator.n_features_in_ = array.shape[1]
        vars(estimator).pop("feature_names_in_", None)
        if names is not None:
            estimator.feature_names_in_ = names
        return array
    if array.shape[1] != estimator.n_features_in_:
        raise ValueError(
            f"X has {array.shape[1]} features, and {type(estimator).__name__} was fitted with "
            f"{estimator.n_features_in_}"
        )
    known = getattr(estimator, "feature_names_in_", None)
    if names is not None and known is not None and list(names) != list(known):
        raise ValueError(
            f"the features of X are named {list(names)}, and those of fit {list(known)}: bring "
            "them into the same order"
        )
    return array


def _feature_names(X: Any) -> NDArray[Any] | None:
    """Return the names of the columns of a table, if they are text."""
    columns = getattr(X, "columns", None)
    if columns is None or not all(isinstance(name, str) for name in columns):
        return None
    return np.asarray(list(columns), dtype=object)
