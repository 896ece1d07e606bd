"""Where the candidates of a search come from, in steps that the host can watch and stop."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxcmle import numerics
from jaxcmle.candidates import grids, sampling, scoring
from jaxcmle.candidates.claim import Instance, Target
from jaxcmle.candidates.plan import Plan
from jaxcmle.candidates.planning import make_plan
from jaxcmle.candidates.scoring import Best, Grid, Pruning
from jaxcmle.problem.bounds import lower_bound_terms
from jaxcmle.problem.placement import agreed, everywhere
from jaxcmle.problem.types import UCMLE, WKM, Mixture, Problem

__all__ = [
    "MAX_BYTES",
    "Setting",
    "Source",
    "Step",
    "all_subsets",
    "paced",
    "paper_candidates",
    "repetitions",
    "sound_pruning",
    "useful_values",
]

# How long the device may work before the host looks up, in seconds.
LOOK_UP = 0.25
# Memory for the columns of a product.
MAX_BYTES = 2**32


class Setting(NamedTuple):
    """One instance, and what is to be claimed of it; and devices to split the work over."""

    points: Array
    weight: Array | None
    problem: Problem
    instance: Instance
    target: Target
    mesh: Mesh | None = None

    @property
    def offset(self) -> float:
        """What scaling adds to every cost."""
        return self.instance.total * self.instance.d * math.log(self.instance.factor)

    def variances(self, values: Any) -> Any:
        """Return the variances of `v = ln(2 pi e variance)`, from the scale to the user's units."""
        if isinstance(self.problem, WKM):
            return np.full(np.shape(values), 0.5 / float(self.problem.beta))  # type: ignore[arg-type]
        return np.exp(np.asarray(values) - 1) / (2 * math.pi * self.instance.factor**2)

    def costs(self, values: Any) -> tuple[Array, Array]:
        """Return slope and constant of the costs, on the scale, without the weights."""
        values = np.asarray(values, np.float64)
        dtype = self.points.dtype
        constant = self.instance.d / 2 * (values - 1)
        if isinstance(self.problem, WKM):
            constant = np.zeros(len(values))
        slope = 0.5 / self.variances(values)
        return jnp.asarray(slope, dtype), jnp.asarray(constant, dtype)


class Step(NamedTuple):
    """How far an enumeration has come. What follows depends on nothing else, nor on the pace.

    Attributes:
        done: how many candidates have been looked at.
        best: the best of them: something with a `cost`, ascending and on the scale.
        place: where to go on, in the numbers of the source.
    """

    done: int
    best: Any
    place: tuple[int, ...]


class Source(NamedTuple):
    """Candidates to enumerate.

    Attributes:
        total: how many there are.
        steps: a function of how many to keep, and of the last `Step` to go on from or None. It
            yields the next ones.
        mixtures: the way back from some of the best to a stack of mixtures, in the user's units:
            a function of what `steps` yields, and of places in it.
        nothing: a function of how many to keep: the best of no candidates.
    """

    total: int
    steps: Callable[[int, "Step | None"], Iterator["Step"]]
    mixtures: Callable[[Any, np.ndarray], Mixture]
    nothing: Callable[[int], Any]


def paced(
    run: Callable[[int], None], remaining: int, first: int, most: int, mesh: Mesh | None
) -> Iterator[None]:
    """Call `run(count)` with ever more at once, as long as it returns soon enough to look up.

    By the clock of the first process, where a mesh spans several: all of them have to make the same
    steps, after each of which they agree on whether to stop.
    """
    count = first
    while remaining > 0:
        count = min(count, remaining, most)
        begin = time.monotonic()
        run(count)
        seconds = agreed(time.monotonic() - begin, mesh)
        remaining -= count
        yield
        if seconds < LOOK_UP:
            count *= 2
        elif seconds > 4 * LOOK_UP:
            count = max(1, count // 2)


def repetitions(
    setting: Setting,
    plan: Plan,
    key: Array,
    limit: float,
    pruning: Pruning,
    known_cost: float,
) -> Source:
    """Return the block means of many repetitions, as many as the plan has or the limit allows.

    `known_cost` is that of an admissible solution, in the user's units, or infinity.
    """
    points = numerics.prepare(setting.points, setting.weight)
    k = plan.n_clusters
    values = useful_values(setting, plan, pruning, known_cost)
    weights = np.full((1, k), 1 / k)
    if plan.weight_exponents > 1:
        weights = grids.geometric_weights(k, plan.balance, plan.weight_exponents)
    log_weights = np.zeros((1, k)) if isinstance(setting.problem, UCMLE) else np.log(weights)
    # Padded to powers of two, so that few programs serve all plans.
    padded = 1 << (len(weights) - 1).bit_length()
    slope, constant = setting.costs(values)
    pruning = sound_pruning(pruning, constant)
    grid = Grid(
        slope=slope,
        constant=constant,
        log_weights=jnp.asarray(np.resize(log_weights, (padded, k)), points.x.dtype),
        n_weights=jnp.int32(len(weights)),
    )
    pool = sampling.make_pool(points.x, setting.weight)
    blocks = scoring.point_blocks(points.x, points.weight)
    tuples = len(values) ** k * len(weights)
    count = min(plan.repetitions, int(min(limit, 1e18) // tuples))
    if count > 0 and plan.peak_bytes > MAX_BYTES:
        raise ValueError(
            f"trying {tuples:,} tuples of variances and weights with every draw of means takes "
            f"{plan.peak_bytes / 2**30:.1f} GiB; raise eps or eta"
        )
    if count == 0:
        raise ValueError(
            f"max_candidates = {limit:g} is less than the {tuples:,} tuples of variances and "
            "weights that every draw of means is tried with: raise it, or eps or eta"
        )
    chunk = 64 if count <= 64 else scoring.CHUNK
    mesh, draws, drawn_from = setting.mesh, key, pool
    if mesh is not None:
        key, drawn_from, blocks, grid = everywhere((key, pool, blocks, grid), mesh)

    def nothing(n_best: int) -> Best:
        best = scoring.nothing_yet(n_best, 3 + k, points.x.dtype)
        return best if mesh is None else everywhere(best, mesh)

    def steps(n_best: int, last: Step | None) -> Iterator[Step]:
        best, done = nothing(n_best), 0
        if last is not None:
            best, (done,) = last.best, last.place

        def run(count: int) -> None:
            nonlocal best, done
            new = sampling.next_repetitions(
                key,
                drawn_from,
                blocks,
                grid,
                best,
                divmod(done, sampling.NUMBERS),
                count,
                k=k,
                m=plan.m,
                chunk=chunk,
                pruning=pruning,
                mesh=mesh,
            )
            best, done = jax.block_until_ready(new), done + count

        while done < count:
            left = min(count - done, sampling.NUMBERS - done % sampling.NUMBERS)
            first = chunk if mesh is None else chunk * mesh.size
            for _ in paced(run, left, first, left, mesh):
                yield Step(done * tuples, best, (done,))

    def mixtures(best: Best, places: np.ndarray) -> Mixture:
        index = np.asarray(best.choice)[places]
        means = sampling.repetition_means(draws, jnp.asarray(index[:, :2]), pool, k, plan.m)
        variances = setting.variances(values[index[:, 3:]])
        return Mixture(
            weights=jnp.asarray(weights[index[:, 2]], points.x.dtype),
            means=means + points.shift,
            variances=jnp.asarray(variances, points.x.dtype),
        )

    return Source(count * tuples, steps, mixtures, nothing)


def useful_values(setting: Setting, plan: Plan, pruning: Pruning, known_cost: float) -> np.ndarray:
    """Return the variances to try, without those that cannot matter.

    A partition with a cluster that a value has to serve costs at least so much; where what is
    known is already as near to that as is claimed, the value need not be tried.
    """
    values = np.asarray(plan.variance_values)
    if plan.scale is None or not pruning.variances or not math.isfinite(known_cost):
        return values
    total = setting.instance.total
    cost = known_cost + setting.offset
    near = cost - plan.eta * total if plan.eta is not None else cost / (1 + (plan.eps or 0.0))
    useful = int((_least_costs(setting, plan) < near).sum())
    return values[: max(1, useful)]


def sound_pruning(pruning: Pruning, constant: Array) -> Pruning:
    """Return the pruning without that of partial sums if points can have negative costs."""
    return pruning if (constant >= 0).all() else pruning._replace(partial_sums=False)


def _least_costs(setting: Setting, plan: Plan) -> np.ndarray:
    """Return the least cost of a partition with a cluster that each value has to serve.

    That cluster, of some size, costs what its variance says; all other points at least what
    `lower_bound` has for them, of which the smallest are taken. Ascending with the values.
    """
    instance, starts = setting.instance, np.asarray(plan.variance_starts)
    n, d, k, size = instance.n, instance.d, instance.n_clusters, instance.min_size
    entropy = 0.0 if isinstance(setting.problem, UCMLE) else grids.least_entropy(k, plan.balance)
    # One cluster of the smallest size needs the value, all others have the smallest y.
    lowest = plan.y_min
    trivial = instance.total * (entropy + d / 2 * (lowest + (starts - lowest) / plan.balance))
    if setting.weight is not None:
        return trivial
    terms, margin = lower_bound_terms(setting.points, None, k, size, setting.problem)
    others = np.cumsum(np.sort(np.asarray(terms, np.float64) + d * math.log(instance.factor)))
    sizes = np.arange(int(size), n - (k - 1) * int(size) + 1)
    weight_cost = 0.0 if isinstance(setting.problem, UCMLE) else np.log(n / sizes)
    rest = np.where(sizes < n, others[n - 1 - sizes], 0.0)
    least = sizes * (d / 2 * starts[:, None] + weight_cost) + rest
    return np.maximum(trivial, least.min(axis=1) - float(margin))


def all_subsets(setting: Setting, plan: Plan, pruning: Pruning, known_cost: float) -> Source:
    """Return the means of all m-subsets of the points, for every cluster."""
    if plan.peak_bytes > MAX_BYTES:
        raise ValueError(
            f"all {plan.m}-subsets of {plan.n} points take {plan.peak_bytes / 2**30:.1f} GiB; give "
            "a delta, or raise eps or eta"
        )
    points = numerics.prepare(setting.points, setting.weight)
    k, exponents = plan.n_clusters, plan.weight_exponents
    values = useful_values(setting, plan, pruning, known_cost)
    means = sampling.subset_means(points.x, plan.m)
    slope, constant = setting.costs(values)
    pruning = sound_pruning(pruning, constant)
    columns = scoring.component_columns(points.x, points.weight, means, slope, constant)
    weighs = not isinstance(setting.problem, UCMLE)
    ratio = grids.weight_ratio(k, plan.balance, exponents)

    def component(powers: range) -> _Component:
        """Return the columns of a component whose weight is one of these powers of the ratio."""
        # At most 1, so that no cost is negative.
        mass = ratio ** (np.arange(powers.start, powers.stop) - (exponents - 1.0))
        offset = -np.log(mass)[:, None, None] * np.asarray(points.weight)[None, None]
        shifted = columns[None] + jnp.asarray(offset, columns.dtype) if weighs else columns[None]
        return _Component(
            columns=shifted.reshape(-1, columns.shape[1]),
            mean=np.tile(np.repeat(np.arange(means.shape[0]), len(values)), len(mass)),
            variance=setting.variances(np.tile(values, means.shape[0] * len(mass))),
            mass=np.repeat(mass, columns.shape[0]),
        )

    # Tuples of powers that differ by a common shift are the same: one of them has to be 0. So
    # cases by the first that is: those before it are larger, those after it anything.
    zero, positive, every = range(1), range(1, exponents), range(exponents)
    cases = []
    for j in range(k if exponents > 1 else 1):
        kinds = [positive] * j + [zero] + [every] * (k - 1 - j)
        made = {kind: component(kind) for kind in set(kinds)}
        cases.append([made[kind] for kind in kinds])
    return _products(setting, [means] * k, cases, weighs, pruning)


def paper_candidates(setting: Setting, key: Array, limit: float, pruning: Pruning) -> Source:
    """Return some of the paper's own candidates: superset means, its sizes and its variances."""
    plan = make_plan(setting.instance, setting.target, setting.problem, "paper")
    points = numerics.prepare(setting.points, setting.weight)
    k, eps = plan.n_clusters, plan.e_m
    most = MAX_BYTES // scoring.product_bytes(k, 1, plan.n)
    count = int(min(limit, 1e18) ** (1 / k) * (1 + 1e-12))
    count = max(1, min(count, most // 4, 2**16))
    pool = sampling.make_pool(points.x, setting.weight)
    shares = grids.printed_shares(plan.balance, eps)
    gamma = plan.y_max + 2 / plan.d * math.log(k)
    values = grids.printed_variances(shares, gamma, gamma * plan.balance, eps)
    values = np.clip(values, max(1.0, plan.y_min), plan.y_max)
    weighs = not isinstance(setting.problem, UCMLE)
    sample_size = math.ceil(plan.m * plan.balance - 1e-9)
    all_means, components = [], []
    for j in range(k):
        means_key, pick_key = jax.random.split(jax.random.fold_in(key, j))
        means = sampling.superset_means(means_key, pool, sample_size, plan.m, count)
        shape = (means.shape[0], *values.shape)
        total = math.prod(shape)
        pick = np.arange(total)
        if total > count:
            picked = jax.random.choice(pick_key, total, (count,), replace=False)
            pick = np.sort(np.asarray(picked))
        mean, size, value = np.unravel_index(pick, shape)
        slope, constant = setting.costs(values[size, value])
        square = numerics.squared_distances(points.x.T, means[mean])
        cost = square * slope[:, None] + constant[:, None]
        mass = shares[size] / shares.max()
        if weighs:
            cost = cost - jnp.asarray(np.log(mass), cost.dtype)[:, None]
        components.append(
            _Component(
                columns=cost * points.weight,
                mean=mean,
                variance=setting.variances(values[size, value]),
                mass=mass,
            )
        )
        all_means.append(means)
    return _products(setting, all_means, [components], weighs, pruning)


class _Component(NamedTuple):
    """The columns of a component, and what each stands for."""

    columns: Array
    mean: np.ndarray
    variance: np.ndarray
    mass: np.ndarray


def _products(
    setting: Setting,
    means: list[Array],
    cases: list[list[_Component]],
    weighs: bool,
    pruning: Pruning,
) -> Source:
    """Return the candidates of a few products of columns, one after the other."""
    points = numerics.prepare(setting.points, setting.weight)
    dtype, k = points.x.dtype, len(means)
    total_weight = setting.instance.total
    sizes = [[len(component.mass) for component in case] for case in cases]
    totals = [math.prod(size) for size in sizes]

    def nothing(n_best: int) -> Best:
        # The first of the indices is the case.
        return scoring.nothing_yet(n_best, 1 + k, dtype)

    def steps(n_best: int, last: Step | None) -> Iterator[Step]:
        best = nothing(n_best)
        first, row, before = 0, 0, 0
        if last is not None:
            best, (first, row) = last.best, last.place
        for i, case in enumerate(cases):
            if i < first:
                before += totals[i]
                continue
            # What has dropped out of the best of all cases will not come back.
            start, best = _divided(best, i) if i == first else (None, best)
            columns = tuple(component.columns for component in case)
            mass = tuple(jnp.asarray(component.mass, dtype) for component in case)
            product = scoring.prepare_product(columns, mass if weighs else None, total_weight)
            merged = best
            place = row if i == first else 0
            walked = _walk(product, sizes[i], n_best, pruning, start, place, setting.mesh)
            for rows, found in walked:
                case_index = jnp.full((n_best, 1), i, jnp.int32)
                choice = jnp.concatenate([case_index, found.choice], axis=1)
                merged = scoring.merge(best, found.cost, choice)
                yield Step(before + rows * sizes[i][-1], merged, (i, rows))
            best, before = merged, before + totals[i]

    def mixtures(best: Best, places: np.ndarray) -> Mixture:
        index = np.asarray(best.choice)[places]
        parts: dict[str, list[Any]] = {"mean": [], "variance": [], "mass": []}
        for case, *columns in index:
            chosen = [cases[case][j] for j in range(k)]
            parts["mean"].append([chosen[j].mean[c] for j, c in enumerate(columns)])
            parts["variance"].append([chosen[j].variance[c] for j, c in enumerate(columns)])
            parts["mass"].append([chosen[j].mass[c] for j, c in enumerate(columns)])
        mean = np.asarray(parts["mean"])
        mass = np.asarray(parts["mass"]) if weighs else np.ones(mean.shape)
        return Mixture(
            weights=jnp.asarray(mass / mass.sum(axis=1, keepdims=True), dtype),
            means=jnp.stack([means[j][mean[:, j]] for j in range(k)], axis=1) + points.shift,
            variances=jnp.asarray(np.asarray(parts["variance"]), dtype),
        )

    return Source(sum(totals), steps, mixtures, nothing)


def _divided(best: Best, case: int) -> tuple[Best, Best]:
    """Return the best of a case, without its number, and those of the cases before it."""
    mine, earlier = best.choice[:, 0] == case, best.choice[:, 0] < case
    m, length = best.choice.shape
    empty = scoring.nothing_yet(m, length, best.cost.dtype)

    def only(which: Array, columns: slice) -> Best:
        chosen = empty._replace(choice=empty.choice[:, columns])
        cost = jnp.where(which, best.cost, jnp.inf)
        choice = jnp.where(which[:, None], best.choice[:, columns], chosen.choice)
        return scoring.merge(chosen, cost, choice)

    return only(mine, slice(1, None)), only(earlier, slice(None))


def _walk(
    product: scoring.Product,
    sizes: list[int],
    n_best: int,
    pruning: Pruning,
    known: Best | None,
    done: int,
    mesh: Mesh | None,
) -> Iterator[tuple[int, Best]]:
    """Walk one product; yield how many rows are done, and the best candidates of them.

    `known` are the best of the rows that are done already.
    """
    *first, columns = sizes
    rows = math.prod(first)
    tile = scoring.tile_rows(product, rows)
    best = scoring.nothing_yet(n_best, len(sizes), product.last.dtype) if known is None else known
    start = jnp.asarray(_digits(done, first), jnp.int32)

    def run(tiles: int) -> None:
        nonlocal best, start, done
        state = scoring.walk_product(
            product, best, start, tiles, columns=columns, tile_rows=tile, pruning=pruning
        )
        best, start = jax.block_until_ready(state)
        done = min(rows, done + tiles * tile)

    if done >= rows:
        # Nothing is left, but for those who want to know the best.
        yield done, best
    for _ in paced(run, -(-(rows - done) // tile), 1, 2**20, mesh):
        yield done, best


def _digits(number: int, sizes: list[int]) -> list[int]:
    """Return a number as digits, one for each size, the last one the fastest."""
    digits: list[int] = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        digits.insert(0, digit)
    return digits
