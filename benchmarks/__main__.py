"""Measure, print the tables, and keep the numbers: `python -m benchmarks`.

Tables go to standard output, how far it is to standard error. Without `--save` nothing is written.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.harness import as_json, machine_limits, provenance, say
from benchmarks.peers import absent
from benchmarks.suites import PARTS, SUITES, file_name
from benchmarks.tables import compare


def chosen_parts(only: list[str]) -> list[str]:
    """Return the names of the parts that a list of suites and parts stands for."""
    unknown = [name for name in only if name not in SUITES and name not in PARTS]
    if unknown:
        raise SystemExit(
            f"there is no benchmark {', '.join(unknown)}: --only takes {', '.join(SUITES)}, "
            f"or one part of a suite: {', '.join(PARTS)}"
        )
    return [name for name in PARTS if name in only or name.split(".")[0] in only]


def older_runs(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Return older results by part, from files or folders."""
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])
    ]
    result = {}
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            result[found["part"]] = found
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f"{file} is not a file of results of `python -m benchmarks`: {error}"
            ) from error
    if unknown := set(result) - set(PARTS):
        raise SystemExit(f"there is no benchmark {', '.join(sorted(unknown))} any more")
    return result


class Options(NamedTuple):
    """What to measure, how, and what to do with it."""

    parts: list[str]
    older: dict[str, dict[str, Any]]
    quick: bool
    save: Path | None


def parsed(arguments: list[str] | None) -> Options:
    """Return what the command line asks for, and what it is held against."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, for all in 5 minutes")
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(SUITES)}, or a part of one, as in quality.peers",
    )
    parser.add_argument(
        "--compare",
        action="extend",
        nargs="+",
        type=Path,
        metavar="OLD.json",
        help="files of an older run (or their folder); without --only, just these parts run",
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the numbers as JSON")
    options = parser.parse_args(arguments)
    older = older_runs(options.compare or [])
    parts = chosen_parts(options.only or list(older) or list(SUITES))
    return Options(parts, older, options.quick, options.save)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmarks that are asked for."""
    options = parsed(arguments)
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
    for name, why in absent().items():
        say(f"without {name}: {why}")
    if options.quick:
        harness.SETTLE = harness.QUICK_SETTLE
    source = provenance()
    print(", ".join(f"{name} {value}" for name, value in source.items()))
    begin = time.perf_counter()
    limits = machine_limits()
    for name in options.parts:
        start = time.perf_counter()
        part = PARTS[name]
        found = {
            "part": name,
            "quick": options.quick,
            "provenance": source,
            "limits": limits,
            "results": part.measure(options.quick),
        }
        text = as_json(found)
        # What is shown is what a reader of the file would see.
        table = part.table(json.loads(text))
        print(f"\n## {name}\n\n{table.markdown()}", flush=True)
        if options.save:
            (options.save / file_name(name)).write_text(text, encoding="utf-8")
        if name in options.older:
            old = options.older[name]
            if old["quick"] != options.quick:
                say(f"{name}: one of the two runs is a quick one, so sizes differ")
            print(f"\n### {name}: before → now\n\n{compare(part.table(old), table)}", flush=True)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
    say(f"all: {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
