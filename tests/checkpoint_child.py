"""Calls with a checkpoint that a test kills: run as a program, and imported for the calls."""

import dataclasses
import math
import sys

import jax
import numpy as np

import jaxcmle as jc
from jaxcmle.solve import batches, checkpoint, sources


def points(n, d, seed):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


# The same programs for both.
EFFORT = jc.Effort(sample=400, rounds=40, patience=10, restarts=2, agreeing=3)


def fit(path):
    return jc.fit(points(400, 2, 0), 6, effort=EFFORT, checkpoint=path)


def sampled(path):
    effort = dataclasses.replace(EFFORT, rounds=20)
    return jc.fit(points(40_000, 2, 1), 6, effort=effort, checkpoint=path)


def sampling(path):
    return jc.approximate(points(24, 1, 2), 2, eta=0.15, certificate=False, checkpoint=path)


def pruning(path):
    return jc.approximate(
        points(24, 1, 3),
        2,
        eta=0.6,
        algorithm="abs",
        balance=math.inf,
        certificate=False,
        checkpoint=path,
    )


def many(path):
    xs = [points(n, 2, n) for n in range(40, 64)]
    return jc.fit_many(xs, 4, effort="quick", checkpoint=path)


CALLS = {call.__name__: call for call in (fit, sampled, sampling, pruning, many)}


def bits(answer):
    """Return everything in an answer, as text."""
    leaves, structure = jax.tree.flatten(answer)
    arrays = [np.asarray(leaf) for leaf in leaves]
    return [str(structure), *(f"{array.dtype} {array.tobytes().hex()}" for array in arrays)]


# Save at every opportunity, and make many of them.
SETTINGS = (
    (checkpoint, "EVERY", 0.0),
    (checkpoint, "SHARE", math.inf),
    (sources, "LOOK_UP", 0.002),
    (batches, "POINTS", {"cpu": 128}),
)


def main(name, path, programs):
    # As the fixture `shared_programs` has it.
    jax.config.update("jax_compilation_cache_dir", programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    for module, setting, value in SETTINGS:
        setattr(module, setting, value)
    print("begin", flush=True)
    CALLS[name](path)


if __name__ == "__main__":
    main(*sys.argv[1:])
