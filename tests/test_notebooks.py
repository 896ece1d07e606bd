"""The notebooks run from top to bottom, and the outputs kept in them are what they print.

Cells tagged "timing" print what differs between machines or versions: there only the kinds of
outputs are compared.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

PRECISIONS = ("float32",)
FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = ["01_quickstart", "02_the_guarantee", "03_many_instances", "04_as_a_jax_library"]
LARGEST = 300_000
# Of this and other machines, and of package registries.
PRIVATE = ("/root", "/tmp", "/work", "/home", "/usr", "/var", "pypi.org", "pythonhosted")
# Seconds for a cell, and for a notebook on a busy machine.
CELL, NOTEBOOK = 600, 1200

# In a process of its own: a kernel leaves threads, event loops and warnings behind.
RUN = """
import sys
import nbformat
from nbclient import NotebookClient

source, target, folder, seconds = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
client = NotebookClient(
    notebook,
    timeout=int(seconds),
    kernel_name="python3",
    resources={"metadata": {"path": folder}},
)
client.execute()
nbformat.write(notebook, target)
"""


def load(path):
    return nbformat.read(path, as_version=4)


def stored(name):
    return load(FOLDER / f"{name}.ipynb")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    """Return what a cell prints to standard output, and what its last line shows."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            parts.append(output.text)
        elif output.output_type == "execute_result":
            parts.append(output.data["text/plain"])
    return "".join(parts)


def pictures(cell):
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def troubles(notebook):
    """Return errors, and what was written to standard error."""
    return [
        output
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


def environment(folder):
    """Return the variables for a kernel: on the CPU, without settings of this process."""
    foreign = ("JAX_", "XLA_", "MPLBACKEND", "PYTEST_", "PYTHONWARNINGS", "COLUMNS")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    folders = {
        "IPYTHONDIR": "ipython",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "TMPDIR": "temporary",
    }
    for path in folders.values():
        (folder / path).mkdir()
    own = {key: str(folder / path) for key, path in folders.items()}
    return {**kept, **own, "JAX_PLATFORMS": "cpu"}


def test_these_are_the_notebooks():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_whole_and_fit_to_publish(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < LARGEST
    text = path.read_text(encoding="utf-8")
    assert [word for word in PRIVATE if word in text] == []
    raw = json.loads(text)
    assert (raw["nbformat"], raw["nbformat_minor"]) == (4, 5)
    notebook = stored(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].cell_type == "markdown"
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert troubles(notebook) == []
    assert sum(map(pictures, cells)) >= 1
    for cell in cells:
        assert "print(" not in cell.source or printed(cell)


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_prints_what_is_stored(name, tmp_path):
    before = sorted(FOLDER.iterdir())
    place, target = tmp_path / "here", tmp_path / "done.ipynb"
    place.mkdir()
    arguments = [str(FOLDER / f"{name}.ipynb"), str(target), str(place), str(CELL)]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
        timeout=NOTEBOOK,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(place.iterdir()) == []
    assert sorted(FOLDER.iterdir()) == before
    again = load(target)
    assert troubles(again) == []
    for cell, kept in zip(code_cells(again), code_cells(stored(name)), strict=True):
        assert cell.source == kept.source
        assert pictures(cell) == pictures(kept), cell.source
        if "timing" in kept.metadata.get("tags", ()):
            assert bool(printed(cell)) == bool(printed(kept)), cell.source
        else:
            assert printed(cell) == printed(kept), cell.source
