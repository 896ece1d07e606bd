"""Searches on points that are read in chunks go on from their checkpoint."""

import jax
import numpy as np
import pytest

import jaxcmle as jc
from jaxcmle.solve import checkpoint as checkpoint_module
from jaxcmle.solve.checkpoint import Checkpoint
from jaxcmle.stream import fit, sources

PRECISIONS = ("float32",)
EFFORT = jc.Effort(
    rounds=3, patience=2, restarts=1, methods=("kmeans++",), population=4, sample=500
)


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def x(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1)
    monkeypatch.setattr(sources, "ROWS", 512)
    monkeypatch.setattr(sources, "LEAST_ROWS", 512)
    monkeypatch.setattr(checkpoint_module, "EVERY", 0.0)
    monkeypatch.setattr(checkpoint_module, "SHARE", 1e9)
    rng = np.random.default_rng(0)
    return (rng.normal(size=(3001, 2)) + rng.integers(0, 4, 3001)[:, None]).astype(np.float32)


def bits(solution):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(solution)]
    return [(leaf.dtype, leaf.tobytes()) for leaf in leaves]


@pytest.mark.parametrize(("least_gain", "status"), [(1e-6, "CONVERGED"), (1e-3, "MAX_ITER")])
def test_a_streamed_search_goes_on_wherever_it_was_killed(
    x, tmp_path, monkeypatch, least_gain, status
):
    monkeypatch.setattr(fit, "LEAST_GAIN", least_gain)
    options = {"effort": EFFORT, "min_size": 2}
    path, undisturbed = tmp_path / "work", jc.fit(lambda: iter([x]), 4, **options)
    saves, written = [], Checkpoint._write

    def counted(self):
        saves.append(sorted(self._entries))
        written(self)

    monkeypatch.setattr(Checkpoint, "_write", counted)
    whole = jc.fit(lambda: iter([x]), 4, **options, checkpoint=path)
    assert bits(whole) == bits(undisturbed)
    assert int(whole.status) == jc.Status[status]
    # The search, the comparison, and iterations of CEM.
    assert any("search" in names for names in saves)
    assert any(name.startswith("refined") for names in saves for name in names)
    for moment in sorted({1, 2, len(saves) // 2, len(saves) - 2, len(saves) - 1}):
        path.unlink()
        left = moment

        def killed(self):
            nonlocal left
            left -= 1
            written(self)
            if left == 0:
                raise KilledError

        monkeypatch.setattr(Checkpoint, "_write", killed)
        with pytest.raises(KilledError):
            jc.fit(lambda: iter([x]), 4, **options, checkpoint=path)
        left = -1
        resumed = jc.fit(lambda: iter([x]), 4, **options, checkpoint=path)
        assert bits(resumed) == bits(undisturbed), moment
    again = jc.fit(lambda: iter([x]), 4, **options, checkpoint=path)
    assert bits(again) == bits(undisturbed)


def test_a_search_among_mixtures_of_cem_goes_on_too(x, tmp_path, monkeypatch):
    """Where the minimum size binds, what CEM alone comes to on the sample is refined, too."""
    monkeypatch.setattr(fit, "RESTARTS", 2)
    monkeypatch.setattr(fit, "is_usable", lambda solution: False)
    options = {"effort": EFFORT, "min_size": 2}
    path, undisturbed = tmp_path / "work", jc.fit(lambda: iter([x]), 4, **options)
    saves, written = [], Checkpoint._write

    def killed(self):
        saves.append(sorted(self._entries))
        written(self)
        if any(name.startswith("refined") and name.endswith("of CEM") for name in saves[-1]):
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "_write", killed)
        with pytest.raises(KilledError):
            jc.fit(lambda: iter([x]), 4, **options, checkpoint=path)
    assert "order of CEM" in saves[-1]
    resumed = jc.fit(lambda: iter([x]), 4, **options, checkpoint=path)
    assert bits(resumed) == bits(undisturbed)


def test_a_checkpoint_of_other_points_is_refused(x, tmp_path):
    path = tmp_path / "work"
    jc.fit(lambda: iter([x]), 4, effort=EFFORT, checkpoint=path, time_limit=0)
    other, swapped = x.copy(), x.copy()
    other[17, 1] += 0.25
    # What sums over all points do not show.
    swapped[[3, 5]] = x[[5, 3]]
    for points in (other, swapped):
        with pytest.raises(ValueError, match="x differs"):
            jc.fit(lambda points=points: iter([points]), 4, effort=EFFORT, checkpoint=path)
    weights = 1.0 + (np.arange(len(x)) == 3)
    with pytest.raises(ValueError, match="sample_weight differs"):
        jc.fit(lambda: iter([x]), 4, effort=EFFORT, checkpoint=path, sample_weight=weights)
    # Other chunks of the same points are the same points.
    again = jc.fit(lambda: iter(np.split(x, [700])), 4, effort=EFFORT, checkpoint=path)
    assert bits(again) == bits(jc.fit(lambda: iter([x]), 4, effort=EFFORT))
    with pytest.raises(ValueError, match="n_clusters was 4 and is 5"):
        jc.fit(lambda: iter([x]), 5, effort=EFFORT, checkpoint=path)


def test_chunks_go_through_one_device(x):
    mesh = jax.make_mesh((1,), ("points",))
    with pytest.raises(ValueError, match="leave mesh out"):
        jc.fit(lambda: iter([x]), 4, mesh=mesh)
