"""Every test runs twice, with float32 and with float64 as the default, unless its module opts out.

A module opts out with `PRECISIONS = ("float32",)`.
"""

import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

PRECISIONS = ("float32", "float64")
# Of the 65,530 that are usual.
MOST_MAPS = 30_000

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


@pytest.fixture(autouse=True)
def _few_programs():
    """Drop compiled programs before they use up the memory maps that Linux allows a process.

    Every program takes a few of them; without any left the compiler crashes.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture
def double_precision():
    """Compute in float64 whatever the default is, as the proof does."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def ctrl_c_works():
    """Handle the signal as Python does; a test run in the background is started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def own_programs():
    """Compile anew, before and after: what is changed is part of the programs."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def shared_programs(tmp_path_factory):
    """Return a folder of compiled programs: what other tests or processes compiled is not compiled.

    For tests that drop programs, or start processes.
    """
    folder = str(tmp_path_factory.getbasetemp().parent / "programs")
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
