"""Values as arrays and text in JSON, and back, bit for bit; nothing is pickled."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcmle.problem.types import Guarantee, Mixture, Solution

__all__ = ["described", "restored"]

TYPES: dict[str, Any] = {kind.__name__: kind for kind in (Solution, Mixture, Guarantee)}
# Whole numbers are stored in fewer bytes if there are so many of them.
MANY = 1024


def described(value: Any, name: str, arrays: dict[str, np.ndarray], *, exact: bool = False) -> Any:
    """Return a value as JSON; arrays are put aside under their names.

    Args:
        value: a solution, a mixture, a guarantee, an array, a number, a text, None; or a tuple, a
            list or a dictionary of such.
        name: what to call it.
        arrays: where to put arrays.
        exact: also tell arrays of JAX from those of NumPy, and store whole numbers in as few bytes
            as they take.
    """
    if type(value).__name__ in TYPES:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, "fields": _each(fields, name, arrays, exact)}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        if not exact:
            arrays[name] = array
            return {"array": name}
        arrays[name] = _narrowed(array)
        return {"array": name, "dtype": array.dtype.name, "jax": isinstance(value, jax.Array)}
    if isinstance(value, tuple | list):
        items = {str(i): one for i, one in enumerate(value)}
        return {"items": list(_each(items, name, arrays, exact).values())}
    if isinstance(value, Mapping):
        return {"entries": _each(value, name, arrays, exact)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot save {name}, which is a {type(value).__name__}")


def restored(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return what `described` was given; lists and named tuples come back as tuples."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        array = arrays[value["array"]]
        if "dtype" in value:
            array = array.astype(value["dtype"])
        # Numbers without axes come back as NumPy's numbers.
        return jnp.asarray(array) if value.get("jax") else array[()]
    if "items" in value:
        return tuple(restored(one, arrays) for one in value["items"])
    if "entries" in value:
        return {name: restored(one, arrays) for name, one in value["entries"].items()}
    fields = {name: restored(one, arrays) for name, one in value["fields"].items()}
    return TYPES[value["type"]](**fields)


def _each(
    values: Mapping[str, Any], name: str, arrays: dict[str, np.ndarray], exact: bool
) -> dict[str, Any]:
    return {
        key: described(one, f"{name}.{key}" if name else key, arrays, exact=exact)
        for key, one in values.items()
    }


def _narrowed(array: np.ndarray) -> np.ndarray:
    """Return whole numbers in the smallest type that holds them."""
    if array.size < MANY or not np.issubdtype(array.dtype, np.integer):
        return array
    kind = np.result_type(np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))
    return array.astype(kind) if kind.itemsize < array.dtype.itemsize else array
