"""What the benchmarks share: where their numbers come from, and how they are kept."""

import json
import math
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


def report(results: dict[str, Any], path: Path | None, *packages: str) -> None:
    """Print where the numbers come from, and write both to a file if one is given."""
    source = provenance(*packages)
    print(", ".join(f"{name} {value}" for name, value in source.items()))
    if path:
        text = json.dumps(_plain({"provenance": source, **results}), indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return the value with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
