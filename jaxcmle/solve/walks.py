"""The candidates of sampling and pruning (ABS), in steps that the host can watch and stop."""

import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcmle import numerics
from jaxcmle.candidates import grids, leaves, sampling, scoring
from jaxcmle.candidates.leaves import Found, Tuples
from jaxcmle.candidates.plan import Plan
from jaxcmle.candidates.scoring import Pruning
from jaxcmle.problem.types import UCMLE, WKM, Mixture
from jaxcmle.solve.sources import MAX_BYTES, Setting, Source, Step, paced, useful_values

__all__ = ["make_tuples", "pruned_walks"]


def pruned_walks(
    setting: Setting, plan: Plan, key: Array, limit: float, pruning: Pruning, known_cost: float
) -> Source:
    """Return the walks of many repetitions, as many as the plan has or the limit allows.

    `known_cost` is that of an admissible solution, in the user's units, or infinity.
    """
    points = numerics.prepare(setting.points, None)
    k, prunings = plan.n_clusters, plan.prunings
    n, d = points.x.shape
    values = useful_values(setting, plan, pruning, known_cost)
    if not isinstance(setting.problem, WKM):
        # Variances of the scale are not below: this only takes off slack for rounding.
        values = np.maximum(values, 1.0)
    tuples, places, powers = make_tuples(setting, plan, values)
    ratio = grids.weight_ratio(k, plan.balance, plan.weight_exponents)
    per_repetition = plan.walks * len(values) ** k * plan.weight_tuples
    count = min(plan.repetitions, int(min(limit, 1e18) // per_repetition))
    if count == 0:
        raise ValueError(
            f"max_candidates = {limit:g} is less than the {per_repetition:,} candidates of one "
            "repetition: raise it, or eps or eta"
        )
    if plan.peak_bytes > MAX_BYTES:
        raise ValueError(f"this search takes {plan.peak_bytes / 2**30:.1f} GiB; raise eps or eta")
    blocks = scoring.point_blocks(points.x, points.weight)
    last = tuples.last_slope.shape[0] * tuples.last_mass.shape[0]
    batch = leaves.branches_together(n, d, k, last, prunings, points.x.dtype.itemsize)
    # All of them powers of two, so that few programs serve all plans.
    together = min(batch, tuples.slope.shape[0])
    repetitions = min(batch // together, 1 << (count - 1).bit_length())
    batches = -(-len(places) // together)

    def nothing(n_best: int) -> Found:
        return leaves.nothing_found(n_best, k, d, points.x.dtype)

    def steps(n_best: int, last: Step | None) -> Iterator[Step]:
        found = nothing(n_best)
        before = begun = 0
        if last is not None:
            found, (before, begun, *form) = last.best, last.place
            if form != [repetitions, together]:
                # Batches have another form: repetitions that are begun are begun anew.
                found, begun = leaves.found_before(found, divmod(before, sampling.NUMBERS)), 0
        while before < count:
            first, second = divmod(before, sampling.NUMBERS)
            end = min(sampling.NUMBERS, second + count - before)
            done, total = begun, -(-(end - second) // repetitions) * batches

            def run(steps: int, first: int = first, second: int = second, end: int = end) -> None:
                nonlocal found, done
                round_, batch = divmod(done, batches)
                start = (first, second + round_ * repetitions, batch * together)
                new = leaves.next_branches(
                    key,
                    points.x,
                    blocks,
                    tuples,
                    found,
                    start,
                    steps,
                    end,
                    k=k,
                    m=plan.m,
                    prunings=prunings,
                    repetitions=repetitions,
                    together=together,
                    pruning=pruning,
                )
                found, done = jax.block_until_ready(new), done + steps

            for _ in paced(run, total - done, 1, total, setting.mesh):
                share = (end - second) * done // total
                rounds, batch = divmod(done, batches)
                at = min(before + rounds * repetitions, before + end - second)
                place = (at, batch, repetitions, together)
                yield Step((before + share) * per_repetition, found, place)
            before, begun = before + end - second, 0

    def mixtures(found: Found, chosen: np.ndarray) -> Mixture:
        index = np.asarray(found.best.choice)[chosen]
        value = np.concatenate([places[index[:, 2], :, 0], index[:, 4:5]], axis=1)
        power = np.concatenate([places[index[:, 2], :, 1], powers[index[:, 5:6]]], axis=1)
        mass = ratio ** power.astype(np.float64)
        dtype = points.x.dtype
        return Mixture(
            weights=jnp.asarray(mass / mass.sum(axis=1, keepdims=True), dtype),
            means=found.means[index[:, 6]] + points.shift,
            variances=jnp.asarray(setting.variances(values[value]), dtype),
        )

    return Source(count * per_repetition, steps, mixtures, nothing)


def make_tuples(
    setting: Setting, plan: Plan, values: np.ndarray
) -> tuple[Tuples, np.ndarray, np.ndarray]:
    """Return all tuples of variances and weights.

    Weights are in proportion to powers of a ratio. Only differences of powers count, so that of the
    first component is 0; no two of a tuple differ by as much as there are exponents.

    Returns:
        The tuples; int `[t, k - 1, 2]`, the place of the value and the power of each of the first
        components; int `[e]`, the powers of the last.
    """
    k, spread = plan.n_clusters, plan.weight_exponents - 1
    dtype = setting.points.dtype
    slope, constant = (np.asarray(part, np.float64) for part in setting.costs(values))
    if (constant < 0).any():
        raise ValueError(
            "pruning takes costs that are not negative: every ln(2 pi e variance) of the grid must "
            f"be 1 or more, and the smallest is {values.min():g}; rescale the points"
        )
    weighs = not isinstance(setting.problem, UCMLE)
    log_ratio = math.log(grids.weight_ratio(k, plan.balance, plan.weight_exponents))
    others = range(-spread, spread + 1)
    powers = np.array(others if k > 1 else [0])
    free = [range(len(values))] * (k - 1)
    relative = [
        power
        for power in itertools.product(*([[0], *[others] * (k - 2)] if k > 1 else []))
        if not power or max(power) - min(power) <= spread
    ]
    places = np.array(
        [
            list(zip(value, power, strict=True))
            for value in itertools.product(*free)
            for power in relative
        ],
        np.int64,
    ).reshape(len(values) ** (k - 1) * len(relative), k - 1, 2)
    # Padded to a power of two with repetitions that do not count.
    padded = 1 << (len(places) - 1).bit_length()
    value, power = np.moveaxis(places[np.arange(padded) % len(places)], -1, 0)

    def mass_cost(power: np.ndarray) -> np.ndarray:
        """Return minus the logarithm of a mass, which is 1 at most so that no cost is negative."""
        return (spread - power) * log_ratio

    def mass(power: np.ndarray) -> np.ndarray:
        return np.exp(-mass_cost(power)) if weighs else np.zeros(power.shape)

    most = mass_cost(powers).max()
    tuples = Tuples(
        slope=jnp.asarray(slope[value], dtype),
        constant=jnp.asarray(constant[value] + mass_cost(power), dtype),
        # Without weights there is nothing to normalise: the sum is 1.
        mass=jnp.asarray(mass(power).sum(axis=1) + (not weighs), dtype),
        low=jnp.asarray(power.min(axis=1, initial=2 * spread), jnp.int32),
        high=jnp.asarray(power.max(axis=1, initial=-2 * spread), jnp.int32),
        n_tuples=jnp.int32(len(places)),
        last_slope=jnp.asarray(slope, dtype),
        last_constant=jnp.asarray(constant + most, dtype),
        last_mass=jnp.asarray(mass(powers), dtype),
        last_shift=jnp.asarray(mass_cost(powers) - most, dtype),
        last_power=jnp.asarray(powers, jnp.int32),
        spread=jnp.int32(spread),
    )
    return tuples, places, powers
