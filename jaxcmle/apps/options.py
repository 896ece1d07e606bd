"""The options of the command line, and what each may be."""

import argparse
from typing import Any, NoReturn

import jaxcmle as jc
from jaxcmle.apps.exits import Exit

__all__ = ["make_parser"]

EPILOGUE = """\
exit codes:
{codes}

examples:
  jaxcmle demo
  jaxcmle fit data.csv -k 3 --labels labels.csv --model model.json --picture clusters.png
  jaxcmle select data.csv -k 1-10 --standardize
  jaxcmle score new.csv --model model.json --labels labels.csv
  jaxcmle plan data.csv -k 3 --eta 0.5"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave."""
        self.exit(Exit.UNUSABLE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    codes = "\n".join(f"  {code.value:>3}  {code.meaning}" for code in Exit)
    parser = _Parser(
        prog="jaxcmle",
        description="Hard clustering with Gaussian mixtures, globally and with a certificate.",
        epilog=EPILOGUE.format(codes=codes),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxcmle {jc.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, words: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=f"{words.capitalize()}.")
        _add_running(made)
        return made

    fit = command("fit", "find the best clustering that a global search can find")
    _add_data(fit)
    _add_clusters(fit)
    _add_problem(fit)
    _add_search(fit)
    fit.add_argument("--certify", action="store_true", help="prove how good the answer is")
    _add_scale(fit)
    _add_outputs(fit, "labels", "model", "report", "picture")

    plan = command("plan", "tell what a guarantee takes, before anything runs")
    _add_data(plan, optional=True)
    _add_clusters(plan)
    _add_problem(plan)
    _add_claim(plan, "sampling", "abs", "auto", "paper")
    plan.add_argument("--shape", type=_shape, metavar="N,D", help="instead of data that exists")
    plan.add_argument(
        "--variance-ratio",
        type=_positive_float,
        default=1e4,
        metavar="R",
        help="with --shape: the largest variance over the smallest, default 10000",
    )

    approximate = command("approximate", "find a clustering that is provably near the best")
    _add_data(approximate)
    _add_clusters(approximate)
    _add_problem(approximate)
    _add_claim(approximate, "sampling", "abs", "auto")
    _add_time_limit(approximate)
    # Its floor is that of balanced clusters.
    approximate.set_defaults(min_variance=None)
    approximate.add_argument(
        "--max-candidates",
        type=_positive_float,
        default=1e8,
        metavar="M",
        help="refuse a plan with more than this, default 1e8",
    )
    approximate.add_argument(
        "--no-certificate",
        dest="certificate",
        action="store_false",
        help="go straight to the enumeration",
    )
    approximate.add_argument(
        "--no-guarantee",
        dest="guarantee",
        action="store_false",
        help="look at no more candidates than allowed, and claim nothing",
    )
    _add_scale(approximate)
    _add_outputs(approximate, "labels", "model", "report", "picture")

    select = command("select", "choose the number of clusters")
    _add_data(select)
    select.add_argument(
        "-k",
        "--clusters",
        type=_numbers,
        default=range(1, 11),
        metavar="RANGE",
        help="the numbers to try, as 1-10 or 2,4,8; default 1-10",
    )
    select.add_argument(
        "--criterion", choices=("icl", "bic", "aic"), default="icl", help="default icl"
    )
    _add_problem(select)
    _add_search(select)
    _add_outputs(select, "labels", "model", "report", "picture")

    score = command("score", "hold data against a model: its cost, and a label for every row")
    _add_data(score, scaled=True)
    score.add_argument(
        "--model",
        dest="model_file",
        required=True,
        metavar="FILE",
        help="what fit has written, .json or .npz",
    )
    _add_outputs(score, "labels", "report")

    demo = command("demo", "cluster the built-in iris data, prove the result and draw it")
    demo.add_argument("-k", "--clusters", type=_positive, default=3, metavar="K", help="default 3")
    demo.add_argument(
        "--eta", type=_positive_float, default=1.0, help="nats per point to claim, default 1"
    )
    demo.add_argument(
        "--picture",
        metavar="FILE",
        help=".png or .svg; default jaxcmle-demo.png, if matplotlib is there",
    )

    demo.add_argument("--save-data", metavar="FILE", help="only write the data, as CSV")

    info = command("info", "show devices, versions and the compilation cache")
    info.add_argument("--clear-cache", action="store_true", help="remove the compiled programs")
    return parser


def _add_running(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("running")
    group.add_argument("--seed", type=_seed, default=0, help="the same seed, the same answer")
    group.add_argument("--device", choices=("cpu", "gpu", "tpu"), help="default: what JAX finds")
    group.add_argument("--quiet", action="store_true", help="no progress, not even on a terminal")
    group.add_argument("--json", action="store_true", help="print the report as JSON")
    group.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    group.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help="do not keep compiled programs for the next time",
    )


def _add_scale(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several devices, and long work")
    group.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="where the search is kept; the same command goes on from there",
    )
    group.add_argument(
        "--all-devices", action="store_true", help="split the work over all devices of the machine"
    )
    group.add_argument(
        "--distributed",
        action="store_true",
        help="be one of several processes, which all run the same command; the first one prints",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where the first process runs; default: JAX_COORDINATOR_ADDRESS, or the cluster's",
    )
    group.add_argument(
        "--process-id",
        type=_whole,
        metavar="I",
        help="from 0; default: JAX_PROCESS_ID, or the cluster's",
    )
    group.add_argument(
        "--processes",
        type=_positive,
        metavar="N",
        help="how many; default: JAX_NUM_PROCESSES, or the cluster's",
    )


def _add_data(
    parser: argparse.ArgumentParser, *, optional: bool = False, scaled: bool = False
) -> None:
    group = parser.add_argument_group("data")
    words = "CSV, TSV, NPY, NPZ or Parquet; - for standard input"
    group.add_argument("data", nargs="?" if optional else None, help=words)
    group.add_argument(
        "--kind",
        choices=("csv", "tsv", "npy", "npz", "parquet"),
        help="default: what the name or the content says",
    )
    group.add_argument("--delimiter", metavar="CHARACTER", help="default: found out")
    group.add_argument(
        "--header",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether the first row has names; default: found out",
    )
    group.add_argument(
        "--columns", metavar="LIST", help="names, numbers from 1, ranges as 2-5; default: all"
    )
    group.add_argument("--exclude", metavar="LIST", help="columns to leave out")
    group.add_argument(
        "--weight-column", metavar="COLUMN", help="the column with weights of the rows"
    )
    group.add_argument("--array", metavar="NAME", help="which array of an NPZ file")
    group.add_argument(
        "--drop-missing", action="store_true", help="leave out rows with missing values"
    )
    group.add_argument(
        "--precision",
        choices=("auto", "float32", "float64"),
        default="auto",
        help="default: float32, and float64 for data that float32 cannot hold",
    )
    if not scaled:
        group.add_argument(
            "--standardize",
            action="store_true",
            help="give every column mean 0 and standard deviation 1",
        )


def _add_clusters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-k", "--clusters", type=_positive, required=True, metavar="K", help="how many clusters"
    )


def _add_problem(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("problem")
    group.add_argument(
        "--problem",
        choices=("cmle", "wkm", "ucmle"),
        default="cmle",
        help="cmle: all is free (default); wkm: one fixed variance; ucmle: uniform weights",
    )
    group.add_argument(
        "--beta", type=_positive_float, help="for wkm: 1 / (2 variance) of every cluster"
    )


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--effort",
        choices=("quick", "default", "thorough"),
        default="default",
        help="how hard to try",
    )
    group.add_argument(
        "--min-size",
        type=_not_negative,
        metavar="SIZE",
        help="the least weight of a cluster; default: a tenth of the average",
    )
    group.add_argument(
        "--min-variance", type=_not_negative, metavar="V", help="floor under every variance"
    )
    _add_time_limit(group)


def _add_claim(parser: argparse.ArgumentParser, *algorithms: str) -> None:
    group = parser.add_argument_group("guarantee")
    either = group.add_mutually_exclusive_group(required=True)
    either.add_argument("--eta", type=_positive_float, help="nats per point above the best")
    either.add_argument("--eps", type=_positive_float, help="the factor on the best, less 1")
    group.add_argument(
        "--delta", type=_not_negative, default=0.1, help="probability of failure, default 0.1"
    )
    group.add_argument(
        "--balance",
        type=_positive_float,
        metavar="F",
        help="clusters hold at least n/F points; default 2 K; inf for any",
    )
    group.add_argument(
        "--algorithm",
        choices=algorithms,
        default="sampling",
        help="default sampling",
    )
    group.add_argument(
        "--scale", choices=("tight", "paper"), default="tight", help="where eps holds"
    )


def _add_time_limit(group: Any) -> None:
    group.add_argument(
        "--time-limit",
        type=_not_negative,
        metavar="SECONDS",
        help="take the best found by then",
    )


def _add_outputs(parser: argparse.ArgumentParser, *names: str) -> None:
    group = parser.add_argument_group("output files")
    words = {
        "labels": "a label for every row, .csv or .npy",
        "model": "the mixture, .json or .npz",
        "report": "all but labels, .json",
        "picture": ".png or .svg",
    }
    for name in names:
        group.add_argument(f"--{name}", metavar="FILE", help=words[name])


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def _seed(text: str) -> int:
    value = _whole(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"must lie from 0 to {2**32 - 1}, got {text}")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def _positive_float(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be more than 0, got 0")
    return value


def _shape(text: str) -> tuple[int, int]:
    parts = [_positive(part) for part in text.replace("x", ",").split(",")]
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"must be two numbers as 1000,2, got {text!r}")
    return parts[0], parts[1]


def _numbers(text: str) -> list[int]:
    """Return the numbers in `1-10` or `2,4,8-10`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _positive(first)
        high = _positive(last) if dash else low
        if high < low:
            raise argparse.ArgumentTypeError(f"the range {part} is empty")
        numbers += range(low, high + 1)
    return numbers
