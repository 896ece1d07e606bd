"""The package as such: what importing does, and that imports go one way."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxcmle as jc

PRECISIONS = ("float32",)
ROOT = Path(jc.__file__).parent
# From the foundations up; a module imports only from those before it.
ORDER = (
    "jaxcmle.atomic",
    "jaxcmle.memory",
    "jaxcmle.numerics",
    "jaxcmle.selection",
    "jaxcmle.problem.types",
    "jaxcmle.problem.archive",
    "jaxcmle.problem.inputs",
    "jaxcmle.problem.placement",
    "jaxcmle.problem.objective",
    "jaxcmle.problem.score",
    "jaxcmle.problem.pairs",
    "jaxcmle.problem.instance",
    "jaxcmle.problem.bounds",
    "jaxcmle.stream.kinds",
    "jaxcmle.refine.iterations",
    "jaxcmle.refine.passes",
    "jaxcmle.refine.sharded",
    "jaxcmle.refine.cem",
    "jaxcmle.refine.folds",
    "jaxcmle.refine.lanes",
    "jaxcmle.refine.tempered",
    "jaxcmle.refine.anneal",
    "jaxcmle.refine.workspace",
    "jaxcmle.refine.moves",
    "jaxcmle.refine.exchange",
    "jaxcmle.refine.improve",
    "jaxcmle.refine.variation",
    "jaxcmle.refine.polish",
    "jaxcmle.candidates.seeding",
    "jaxcmle.candidates.grids",
    "jaxcmle.candidates.scoring",
    "jaxcmle.candidates.claim",
    "jaxcmle.candidates.sampling",
    "jaxcmle.candidates.pruning",
    "jaxcmle.candidates.leaves",
    "jaxcmle.candidates.choices",
    "jaxcmle.candidates.plan",
    "jaxcmle.candidates.planning",
    "jaxcmle.solve.checkpoint",
    "jaxcmle.solve.progress",
    "jaxcmle.solve.padding",
    "jaxcmle.solve.sizes",
    "jaxcmle.solve.sources",
    "jaxcmle.solve.walks",
    "jaxcmle.solve.advice",
    "jaxcmle.proof.pricing",
    "jaxcmle.proof.task",
    "jaxcmle.proof.cells",
    "jaxcmle.proof.branch",
    "jaxcmle.proof.duals",
    "jaxcmle.proof.rounding",
    "jaxcmle.proof.space",
    "jaxcmle.proof.groups",
    "jaxcmle.proof.span",
    "jaxcmle.proof.triangle",
    "jaxcmle.proof.prove",
    "jaxcmle.proof.certify",
    "jaxcmle.solve.claims",
    "jaxcmle.solve.approximate",
    "jaxcmle.solve.effort",
    "jaxcmle.solve.population",
    "jaxcmle.solve.evolution",
    "jaxcmle.solve.searching",
    "jaxcmle.solve.fit",
    "jaxcmle.stream.sources",
    "jaxcmle.stream.totals",
    "jaxcmle.stream.survey",
    "jaxcmle.stream.cem",
    "jaxcmle.stream.sampling",
    "jaxcmle.stream.fit",
    "jaxcmle.solve.instances",
    "jaxcmle.solve.batches",
    "jaxcmle.solve.answers",
    "jaxcmle.solve.finished",
    "jaxcmle.solve.stacks",
    "jaxcmle.solve.bounding",
    "jaxcmle.solve.searches",
    "jaxcmle.solve.many",
    "jaxcmle.solve.pieces",
    "jaxcmle.solve.measuring",
    "jaxcmle.solve.enumerating",
    "jaxcmle.solve.known",
    "jaxcmle.solve.approximate_many",
    "jaxcmle.solve.stability",
    "jaxcmle.solve.criteria",
    "jaxcmle.solve.select",
    "jaxcmle.stream.predict",
    "jaxcmle.apps.saving",
    "jaxcmle.apps.contract",
    "jaxcmle.apps.starts",
    "jaxcmle.apps.estimator",
    "jaxcmle",
    "jaxcmle.apps.datasets",
    "jaxcmle.apps.columns",
    "jaxcmle.apps.text",
    "jaxcmle.apps.tables",
    "jaxcmle.apps.drawing",
    "jaxcmle.apps.plotting",
    "jaxcmle.apps.exits",
    "jaxcmle.apps.machine",
    "jaxcmle.apps.processes",
    "jaxcmle.apps.reports",
    "jaxcmle.apps.models",
    "jaxcmle.apps.outputs",
    "jaxcmle.apps.demo",
    "jaxcmle.apps.commands",
    "jaxcmle.apps.options",
    "jaxcmle.apps.cli",
    "jaxcmle.__main__",
)
PACKAGES = (
    "jaxcmle",
    "jaxcmle.problem",
    "jaxcmle.refine",
    "jaxcmle.candidates",
    "jaxcmle.proof",
    "jaxcmle.solve",
    "jaxcmle.stream",
    "jaxcmle.apps",
)


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("jaxcmle", *path.relative_to(ROOT).with_suffix("").parts)
        yield ".".join(part for part in parts if part != "__init__"), path


def imports(path):
    """Yield the names of the jaxcmle modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("jaxcmle"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxcmle"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in ORDER else node.module


def test_every_module_has_its_place():
    assert {name for name, _ in modules()} == set(ORDER) | set(PACKAGES)


@pytest.mark.parametrize(("name", "path"), [pair for pair in modules() if pair[0] in ORDER])
def test_imports_go_one_way(name, path):
    allowed = ORDER[: ORDER.index(name)]
    assert [module for module in imports(path) if module not in allowed] == []


def test_public_names_exist_and_have_an_example():
    for name in jc.__all__:
        value = getattr(jc, name)
        assert value.__doc__, name
        if inspect.isfunction(value) or name == "HardGaussianMixture":
            assert ">>>" in value.__doc__, name


def test_importing_touches_no_device_and_no_setting():
    code = """
import jax
before = dict(jax.config.values)
import jaxcmle, sys
assert dict(jax.config.values) == before
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was started"
assert "optax" not in sys.modules and "sklearn" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_problems_are_values():
    assert jc.CMLE() == jc.CMLE()
    assert hash(jc.WKM(beta=2.0)) == hash(jc.WKM(beta=2.0))
    assert jc.WKM(beta=2.0) != jc.WKM(beta=3.0)
    assert jc.UCMLE() != jc.CMLE()


def test_problems_have_structures_of_their_own():
    """Else jit may run the program of one problem for another."""
    problems = (jc.CMLE(), jc.UCMLE(), jc.WKM(beta=1.0))
    assert len({str(jax.tree.structure(problem)) for problem in problems}) == 3
    for one in problems:
        assert jax.tree.map(lambda leaf: leaf, one) == one
        for other in problems:
            same = jax.tree.structure(one) == jax.tree.structure(other)
            assert same == (one is other)
