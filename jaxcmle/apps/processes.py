"""Several devices and several processes, on one machine or on many, that work as one."""

import argparse
import os
import sys

import jax
from jax.sharding import Mesh

from jaxcmle.apps.exits import ProgramError
from jaxcmle.problem.placement import POINTS

__all__ = ["is_first", "join", "mesh_of"]

# Seconds without a sign of life after which a process counts as lost.
HEARTBEAT = 20
# Seconds to wait for the others at the beginning.
PATIENCE = 120
# Where the others are, if no option says so.
COORDINATOR = "JAX_COORDINATOR_ADDRESS"
PROCESS_ID = "JAX_PROCESS_ID"
PROCESSES = "JAX_NUM_PROCESSES"


def join(options: argparse.Namespace) -> None:
    """Meet the other processes, if there are any; before anything is computed.

    What is not given comes from the environment, or from the cluster's own, as JAX finds it.
    """
    given = (options.coordinator, options.process_id, options.processes)
    if not options.distributed:
        if any(value is not None for value in given):
            raise ProgramError("--coordinator, --process-id and --processes go with --distributed")
        return
    if options.data == "-":
        raise ProgramError("--distributed: every process reads the data, so give a file")
    coordinator = options.coordinator or os.environ.get(COORDINATOR)
    number = _whole_number(PROCESS_ID) if options.process_id is None else options.process_id
    count = _whole_number(PROCESSES) if options.processes is None else options.processes
    if count is not None and number is not None and not 0 <= number < count:
        raise ProgramError(
            f"--process-id must lie from 0 to --processes - 1 = {count - 1}, got {number}"
        )
    _keep_standard_output()
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            number,
            initialization_timeout=PATIENCE,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except (RuntimeError, ValueError) as error:
        raise ProgramError(
            "the other processes cannot be met: give --coordinator HOST:PORT (where process 0 "
            f"runs), --process-id and --processes, or set {COORDINATOR}, {PROCESS_ID} and "
            f"{PROCESSES} ({error})"
        ) from None


def _keep_standard_output() -> None:
    """Keep standard output for what this program prints: libraries for networks print there, too.

    What they print goes to standard error.
    """
    try:
        own = os.dup(sys.stdout.fileno())
    except (OSError, ValueError):
        # Not a file, as in tests; then it is not theirs either.
        return
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = open(own, "w", encoding=sys.stdout.encoding, errors="backslashreplace")  # noqa: SIM115


def _whole_number(variable: str) -> int | None:
    text = os.environ.get(variable)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ProgramError(f"{variable} must be a whole number, got {text!r}") from None


def mesh_of(options: argparse.Namespace) -> Mesh | None:
    """Return all devices that are to work together, or None for one."""
    if options.distributed or options.all_devices:
        return jax.make_mesh((jax.device_count(),), (POINTS,))
    return None


def is_first() -> bool:
    """Tell whether this is the process that prints and writes."""
    return jax.process_index() == 0
