"""All benchmarks by name: suites, and their parts."""

from benchmarks import cem, guarantee, many, pruning, quality, scaling, scoring

SUITES = {
    "cem": cem.PARTS,
    "scoring": scoring.PARTS,
    "pruning": pruning.PARTS,
    "quality": quality.PARTS,
    "many": many.PARTS,
    "guarantee": guarantee.PARTS,
    "scaling": scaling.PARTS,
}
PARTS = {f"{suite}.{part}": how for suite, parts in SUITES.items() for part, how in parts.items()}


def file_name(part: str) -> str:
    """Return the name of the file that holds the results of a part."""
    return f"{part.replace('.', '_')}.json"
