"""Memory: tiles follow the device, are halved when it runs out, and do not show in answers."""

import importlib
import math
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_child import bits, points

import jaxcmle as jc
from jaxcmle import memory, numerics

PRECISIONS = ("float32",)
pytestmark = pytest.mark.usefixtures("shared_programs")
QUICK = jc.Effort(rounds=8, patience=3, restarts=2, population=4, starts=4, sample=64)
SMALL = points(12, 1, 0)
# More clusters than are unrolled, so that there are tiles at all.
WIDE = points(3000, 8, 0)
STARTS = jc.Mixture(
    weights=np.full((5, 20), 0.05, np.float32),
    means=points(100, 8, 1).reshape(5, 20, 8),
    variances=np.ones((5, 20), np.float32),
)


def streamed(function, **options):
    return function(lambda: iter([WIDE]), jax.tree.map(lambda leaf: leaf[0], STARTS), **options)


CALLS = {
    "score": ("problem.score.score_points", lambda: jc.score(WIDE, STARTS)),
    "cem": (
        "refine.cem.cem_stack",
        lambda: jc.cem(WIDE, jax.tree.map(lambda leaf: leaf[0], STARTS), max_iter=5),
    ),
    "cem_restarts": ("refine.cem.cem_stack", lambda: jc.cem_restarts(WIDE, STARTS, max_iter=5)),
    "lower_bound": ("problem.bounds.bound_terms", lambda: jc.lower_bound(WIDE[:500], 3)),
    "variance_floor": (
        "problem.instance.variance_at_least",
        lambda: jc.variance_floor(WIDE[:500], min_size=3),
    ),
    "fit": ("solve.searching.advance", lambda: jc.fit(points(64, 2, 0), 2, effort=QUICK)),
    "repetitions": (
        "candidates.sampling.next_repetitions",
        lambda: jc.approximate(SMALL, 2, eta=0.5, certificate=False),
    ),
    "subsets": (
        "candidates.scoring.walk_product",
        lambda: jc.approximate(SMALL, 2, eta=0.5, delta=0, certificate=False),
    ),
    "walks": (
        "candidates.leaves.next_branches",
        lambda: jc.approximate(
            SMALL, 2, algorithm="abs", eta=1.0, balance=math.inf, certificate=False
        ),
    ),
    "fit of a stream": (
        "solve.searching.advance",
        lambda: jc.fit(lambda: iter([points(200, 2, 0)]), 2, effort=QUICK),
    ),
    "cem of a stream": ("stream.cem._quick_chunk", lambda: streamed(jc.cem, max_iter=5)),
    "the end of a stream": ("stream.cem._chunk_labels", lambda: streamed(jc.cem, max_iter=5)),
    "predict": ("stream.predict._chunk_labels", lambda: streamed(jc.predict)),
    "fit_many": (
        "solve.many.search_all",
        lambda: jc.fit_many([points(n, 2, n) for n in range(8, 16)], 2, effort=QUICK),
    ),
    "score_many": (
        "solve.pieces._score_all",
        lambda: jc.score_many(WIDE.reshape(6, 500, 8), [STARTS] * 6),
    ),
}


@pytest.fixture(autouse=True)
def _as_before():
    memory.reset()
    yield
    memory.reset()


def exhausted(monkeypatch, name, size, calls=0):
    """Let a function run out of memory as long as tiles are larger than a size.

    The first few calls go well.
    """
    module, _, function = name.rpartition(".")
    module = importlib.import_module(f"jaxcmle.{module}")
    original, seen = getattr(module, function), []

    def raises(*arguments, **options):
        seen.append(memory.tile_bytes())
        if len(seen) > calls and memory.tile_bytes() > size:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying")
        return original(*arguments, **options)

    monkeypatch.setattr(module, function, raises)
    return seen


# With more clusters than are unrolled, how many starts or mixtures go together shows in the last
# bits of a sum.
ROUNDED = ("score", "cem_restarts", "score_many")


@pytest.mark.parametrize("name", CALLS)
def test_tiles_are_halved_and_the_answer_is_the_same(name, monkeypatch):
    function, call = CALLS[name]
    expected = call()
    size = memory.CPU_TILE // 4
    seen = exhausted(
        monkeypatch, function, size, calls=int(name.startswith("fit") and name != "fit_many")
    )
    with pytest.warns(memory.SmallerTilesWarning, match="repeated with tiles of") as notes:
        answer = call()
    notes = [str(note.message) for note in notes if note.category is memory.SmallerTilesWarning]
    assert len(notes) == 2
    assert f"{size:,} bytes" in notes[-1]
    assert "RESOURCE_EXHAUSTED" in notes[0]
    assert memory.tile_bytes() == numerics.tile_bytes() == size
    assert seen[-1] == size
    if name not in ROUNDED:
        assert bits(answer) == bits(expected)
    for one, other in zip(jax.tree.leaves(answer), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_rounds_that_are_done_are_not_repeated(monkeypatch):
    call = CALLS["fit"][1]
    whole = exhausted(monkeypatch, "solve.searching.advance", math.inf)
    call()
    rounds = len(whole)
    monkeypatch.undo()
    seen = exhausted(monkeypatch, "solve.searching.advance", memory.CPU_TILE // 2, calls=3)
    with pytest.warns(memory.SmallerTilesWarning):
        call()
    assert len(seen) == rounds + 1


def test_tiles_do_get_smaller(monkeypatch):
    """The programs are compiled anew, with the new size."""
    lengths = []
    tiles = numerics.point_tiles

    def noted(rows, k):
        result = tiles(rows, k)
        lengths.append(result.shape[-1])
        return result

    monkeypatch.setattr(numerics, "point_tiles", noted)
    start = jax.tree.map(lambda leaf: leaf[0], STARTS)
    x = np.concatenate([WIDE] * 12)
    jc.cem(x, start, max_iter=1)
    assert memory.CPU_TILE // 2 < 20 * 4 * max(lengths) <= memory.CPU_TILE
    lengths.clear()
    exhausted(monkeypatch, "refine.cem.cem_stack", memory.CPU_TILE // 2)
    with pytest.warns(memory.SmallerTilesWarning):
        jc.cem(x, start, max_iter=1)
    assert 0 < 20 * 4 * max(lengths) <= memory.CPU_TILE // 2


def test_there_is_an_end_to_it(monkeypatch):
    exhausted(monkeypatch, "problem.score.score_points", 0)
    with (
        pytest.warns(memory.SmallerTilesWarning) as notes,
        pytest.raises(memory.OutOfMemoryError, match=r"tiles of 32,768 bytes .*fewer points"),
    ):
        jc.score(WIDE, STARTS)
    assert len(notes) == int(math.log2(memory.CPU_TILE / memory.LEAST))
    assert issubclass(memory.OutOfMemoryError, MemoryError)


def test_one_of_several_processes_does_not_repeat_alone(monkeypatch):
    """The others would not know: they would be at another step."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    exhausted(monkeypatch, "problem.score.score_points", 0)
    with pytest.raises(memory.OutOfMemoryError, match="in one of several processes"):
        jc.score(WIDE, STARTS)
    assert memory.tile_bytes() == memory.CPU_TILE
    # Nor do tiles depend on the device, which others may have another one of.
    monkeypatch.setattr(memory, "_device", lambda: Fake("gpu", {"bytes_limit": 2**28}))
    assert (memory.tile_bytes(), memory.pair_bytes()) == (memory.TILE, memory.PAIR)


def test_memory_of_the_host_counts_as_well_and_other_errors_do_not():
    def host():
        if memory.tile_bytes() == memory.CPU_TILE:
            raise MemoryError
        return 3

    with pytest.warns(memory.SmallerTilesWarning):
        assert memory.within(host) == 3

    def broken():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
            memory.within(broken)


def test_several_threads_halve_once():
    barrier = threading.Barrier(2)
    results = []

    def work():
        if memory.tile_bytes() == memory.CPU_TILE:
            barrier.wait(timeout=60)
            raise MemoryError
        return memory.tile_bytes()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [
            threading.Thread(target=lambda: results.append(memory.within(work))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [memory.CPU_TILE // 2] * 2


def test_passes_under_jit_are_traced_as_ever():
    start = jax.tree.map(lambda leaf: leaf[0], STARTS)
    inside = jax.jit(lambda x: jc.cem(x, start, max_iter=2).cost)(WIDE[:100])
    assert inside == pytest.approx(float(jc.cem(WIDE[:100], start, max_iter=2).cost), rel=1e-5)
    assert jax.jit(lambda x: jc.score(x, STARTS))(jnp.asarray(WIDE[:100])).shape == (5,)
    assert jnp.isfinite(jax.jit(lambda x: jc.lower_bound(x, 2))(jnp.asarray(WIDE[:100])))


class Fake:
    """A device with so much memory."""

    def __init__(self, platform, stats):
        self.platform, self._stats = platform, stats

    def memory_stats(self):
        return self._stats


@pytest.mark.parametrize(
    ("device", "tile", "pairs"),
    [
        (Fake("gpu", {"bytes_limit": 16 * 2**30}), 2**28, 2**29),
        (Fake("gpu", {"bytes_limit": 12 * 10**9}), 2**27, 2**28),
        (Fake("tpu", {"bytes_limit": 90 * 2**30}), 2**30, 2**31),
        (Fake("gpu", {"bytes_limit": 2**28}), 2**24, 2**25),
        (Fake("gpu", {"bytes_in_use": 5}), 2**27, 2**28),
        (Fake("gpu", None), 2**27, 2**28),
        (Fake("cpu", {"bytes_limit": 2**40}), 2**21, 2**28),
    ],
)
def test_the_budget_follows_the_device(device, tile, pairs, monkeypatch):
    monkeypatch.setattr(memory, "_device", lambda: device)
    assert (memory.tile_bytes(), memory.pair_bytes()) == (tile, pairs)
    assert memory.pair_bytes(12345) == 12345
    monkeypatch.setattr(memory, "_halvings", 2)
    assert (memory.tile_bytes(), memory.pair_bytes()) == (tile // 4, pairs // 4)
    assert memory.pair_bytes(5) == 5
    monkeypatch.setattr(memory, "_halvings", 50)
    assert memory.tile_bytes() == memory.pair_bytes() == memory.LEAST
    monkeypatch.setattr(memory, "_halvings", 0)


def test_the_chosen_device_counts():
    device = jax.local_devices()[0]
    with jax.default_device(device):
        assert memory._device() is device
    assert memory._device() is device
