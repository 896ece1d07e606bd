"""The command line: `jaxcmle`, also `python -m jaxcmle`."""

import _thread
import argparse
import io
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import jaxcmle as jc
from jaxcmle.apps import machine
from jaxcmle.apps.commands import COMMANDS
from jaxcmle.apps.exits import Exit, ProgramError, reason
from jaxcmle.apps.options import make_parser
from jaxcmle.apps.processes import join
from jaxcmle.apps.tables import DataError, name_of

__all__ = ["main"]

# What the library calls them, and what they are called here.
WORDS = {
    'jax.config.update("jax_enable_x64", True)': "--precision float64",
    "n_clusters": "--clusters",
    "min_size": "--min-size",
    "min_variance": "--min-variance",
    "max_candidates": "--max-candidates",
    "time_limit": "--time-limit",
    "sample_weight": "--weight-column",
    "guarantee=False": "--no-guarantee",
    "checkpoint": "--checkpoint",
    ", or raise balance": "",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    sys.unraisablehook = _deliver_again
    if sys.stdout is None:
        # Closed, as by `>&-`: there is nowhere to print to.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    options = make_parser().parse_args(arguments)
    code = _run(options)
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is left to print goes nowhere, also when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Whoever reads, as in `| head`, may have seen enough.
        if not isinstance(error, BrokenPipeError):
            code = _complain(f"cannot print: {reason(error)}", Exit.NOT_WRITTEN)
    alone = code and getattr(options, "distributed", False)
    if alone or code in (Exit.INTERRUPTED, Exit.PROCESS_LOST):
        # At once: where a compilation is going on in another thread, or where others are waited
        # for that are no more, or still at work, Python could not end well.
        sys.stderr.flush()
        os._exit(code)
    return code


def _deliver_again(unraisable: Any) -> None:
    """Do not let a Ctrl-C get lost that came where Python drops exceptions, as in a callback."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


def _run(options: argparse.Namespace) -> int:
    """Run a command; errors become a line on standard error and an exit code."""
    try:
        if options.cache:
            machine.set_up_cache()
        if hasattr(options, "distributed"):
            join(options)
        machine.use_device(options.device)
        return COMMANDS[options.command](options)
    except BrokenPipeError:
        return Exit.DONE
    except ProgramError as error:
        problem, code = str(error), error.code
    except DataError as error:
        # It names the file itself.
        problem, code = str(error), Exit.UNUSABLE
    except KeyboardInterrupt:
        problem, code = "interrupted", Exit.INTERRUPTED
    except TimeoutError as error:
        problem, code = str(error), Exit.NO_ANSWER
    except OSError as error:
        # Outputs have been taken care of: a checkpoint, or what is printed.
        problem, code = f"{error.filename or 'cannot print'}: {reason(error)}", Exit.NOT_WRITTEN
    except (ValueError, TypeError) as error:
        # What the library has to say about data and options.
        file = getattr(options, "data", None)
        problem, code = _in_options(str(error)), Exit.UNUSABLE
        if isinstance(error, jc.TooManyCandidatesError):
            # The plan follows, which has a command of its own.
            problem, code = problem.split("\nplan:")[0], Exit.NO_ANSWER
        if file is not None:
            problem = f"{name_of(file)}: {problem}"
        if options.debug:
            traceback.print_exc()
    except jc.ProcessLostError as error:
        problem, code = _in_options(str(error)), Exit.PROCESS_LOST
        if options.debug:
            traceback.print_exc()
    except Exception as error:
        problem, code = f"{type(error).__name__}: {error}", Exit.INTERNAL
        if "RESOURCE_EXHAUSTED" in problem or isinstance(error, MemoryError):
            problem = "out of memory: use fewer points or clusters, or another --device"
        if options.debug:
            traceback.print_exc()
        else:
            problem += " (--debug shows where)"
    return _complain(problem, code)


def _complain(problem: str, code: Exit) -> Exit:
    """Say what is wrong, in one line."""
    print(f"jaxcmle: {' '.join(problem.split())}", file=sys.stderr)
    return code


def _in_options(words: str) -> str:
    """Return what the library says with the options of the command line for its arguments."""
    for name, option in WORDS.items():
        words = words.replace(name, option)
    return words
