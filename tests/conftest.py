"""Every test runs twice, with float32 and with float64 as the default, unless its module opts out.

A module opts out with `PRECISIONS = ("float32",)`.
"""

import jax
import numpy as np
import pytest

PRECISIONS = ("float32", "float64")

# A silent promotion to another dtype is an error. Python scalars take the dtype they meet.
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_generate_tests(metafunc):
    if "precision" in metafunc.fixturenames:
        precisions = getattr(metafunc.module, "PRECISIONS", PRECISIONS)
        metafunc.parametrize("precision", precisions, indirect=True, scope="session")


@pytest.fixture(scope="session", autouse=True)
def precision(request):
    """Return the default float dtype, after switching it on."""
    name = getattr(request, "param", "float32")
    with jax.enable_x64(name == "float64"):
        yield np.dtype(name)
