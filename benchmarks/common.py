"""What the benchmarks share: where their numbers come from."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import jaxcmle as jc


def provenance(*packages: str) -> dict[str, Any]:
    """Return the versions of what was measured, the device and the commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "jaxcmle": jc.__version__,
        **{name: version(name) for name in ("jax", "numpy", *packages)},
        "device": str(jax.devices()[0]),
        "processor": platform.machine(),
        "dtype": "float32",
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
    }
