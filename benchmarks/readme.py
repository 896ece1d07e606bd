"""Put the tables into README: `python -m benchmarks.readme` (`--check` only tells).

What stands between `<!-- measured: NAME -->` and `<!-- end -->` is made from the committed results,
and so is the picture of the certificate. Nothing that was measured is typed.
"""

import argparse
import json
import re
from pathlib import Path

from benchmarks import guarantee
from benchmarks.harness import RESULTS
from benchmarks.suites import PARTS, file_name

README = Path(__file__).parent.parent / "README.md"
PLACES = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
PICTURE = RESULTS / "certificate.svg"


def filled(text: str) -> str:
    """Return the text with all tables as the results are now."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(2)
        found = json.loads((RESULTS / file_name(name)).read_text(encoding="utf-8"))
        return f"{match.group(1)}\n{PARTS[name].table(found).markdown()}\n\n{match.group(3)}"

    return PLACES.sub(fill, text)


def picture() -> str:
    """Return the picture of the bounds closing in on the costs."""
    path = RESULTS / file_name("guarantee.gaps")
    return guarantee.picture(json.loads(path.read_text(encoding="utf-8")))


def main(arguments: list[str] | None = None) -> None:
    """Rewrite what has changed, or tell that something has."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if they differ")
    options = parser.parse_args(arguments)
    for path, text in ((README, filled(README.read_text(encoding="utf-8"))), (PICTURE, picture())):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if options.check:
            raise SystemExit(
                f"{path.name} is not what the results say: python -m benchmarks.readme"
            )
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
