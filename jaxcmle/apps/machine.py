"""The machine that the command line runs on: its devices, its precision, its compilation cache."""

import os
import platform
import shutil
import sys
import warnings
from importlib import metadata, util
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcmle.apps.exits import ProgramError

__all__ = ["cache_folder", "clear_cache", "describe", "needs_double", "set_up_cache", "use_device"]

# What rounding to float32 may change, in standard deviations of a column.
TOLERABLE = 1e-5
# Beyond these, squares leave the range of float32.
WIDEST, NARROWEST = 1e16, 1e-16
PACKAGES = ("jax", "jaxlib", "numpy", "optax")
OPTIONAL = ("matplotlib", "pyarrow", "sklearn")


def cache_folder() -> Path:
    """Return where compiled programs are kept: where JAX was told to, or the folder of our own."""
    configured = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return Path(configured) if configured else _own_folder()


def set_up_cache() -> None:
    """Keep compiled programs for the next time; without a folder to write to, do without."""
    # A damaged file, as after a crash, or a full disk: it is compiled anew, and nobody need know.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # The many small programs, too: together they take as long as the large ones.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def clear_cache() -> int:
    """Remove the programs in our own folder; returns how many bytes that were.

    Not those in a folder that the user has named for JAX: others may use it, too.
    """
    folder = _own_folder()
    size = _size(folder)
    if folder.exists():
        shutil.rmtree(folder)
    return size


def _own_folder() -> Path:
    """Return our part of the user's cache folder, as the system has it."""
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "jaxcmle"


def use_device(kind: str | None) -> None:
    """Compute on the first device of a kind, `"cpu"`, `"gpu"` or `"tpu"`; by default JAX chooses.

    Raises:
        ProgramError: there is no such device.
    """
    if kind is None:
        return
    if kind == "cpu":
        # Not even started: another process may be using the others.
        jax.config.update("jax_platforms", "cpu")
        return
    try:
        device = jax.local_devices(backend=kind)[0]
    except RuntimeError:
        there = sorted({device.platform for device in jax.local_devices()})
        raise ProgramError(
            f"there is no {kind} that JAX can use, only {', '.join(there)}; install jaxcmle with "
            "the extra cuda12, cuda13 or tpu"
        ) from None
    jax.config.update("jax_default_device", device)


def needs_double(x: np.ndarray) -> bool:
    """Tell whether float32 is too coarse for the data: numbers far larger than they differ."""
    if x.dtype == np.float32:
        return False
    largest = np.abs(x).max(axis=0)
    # In units of the largest, so that no square overflows.
    spread = (x / np.where(largest > 0, largest, 1)).std(axis=0)
    varies = spread > 0
    coarse = np.finfo(np.float32).eps / 2 > TOLERABLE * spread
    with np.errstate(over="ignore", under="ignore"):
        extreme = (largest > WIDEST) | (spread * largest < NARROWEST)
    return bool(((coarse | extreme) & varies).any())


def describe() -> dict[str, Any]:
    """Return versions, devices and the cache."""
    folder = cache_folder()
    return {
        "jaxcmle": metadata.version("jaxcmle"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "optional": {name: util.find_spec(name) is not None for name in OPTIONAL},
        "cores": os.cpu_count(),
        "devices": [
            {"kind": device.device_kind, "platform": device.platform, "id": device.id}
            for device in jax.local_devices()
        ],
        "cache": {"folder": str(folder), "bytes": _size(folder)},
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
