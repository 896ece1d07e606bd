"""What to say when a guarantee takes too many candidates."""

import math
from collections.abc import Callable

from jaxcmle.candidates.choices import VarianceGrid
from jaxcmle.candidates.claim import Instance, Target, measure
from jaxcmle.candidates.plan import Plan
from jaxcmle.candidates.planning import Algorithm, make_plan
from jaxcmle.solve.sources import Setting

__all__ = ["fitting_claim", "in_two_digits", "too_many"]

# Up to so many points, a balance that would fit is looked for.
MAX_POINTS = 5000
# More candidates than this, as a power of ten, are not advised to anybody.
MOST_LOG10 = 13
DELTAS = (0.1, 0.2, 0.3, 0.5)


def too_many(
    plan: Plan, limit: float, setting: Setting, algorithm: Algorithm, grid: VarianceGrid
) -> str:
    """Say what a plan takes, and what would fit."""
    instance, target, problem = setting.instance, setting.target, setting.problem

    def fits(instance: Instance, target: Target, algorithm: Algorithm = algorithm) -> bool:
        try:
            return make_plan(instance, target, problem, algorithm, grid).tuples <= limit
        except ValueError:
            return False

    options = []
    others: tuple[Algorithm, ...] = ("sampling", "abs")
    for other in others:
        if algorithm in others and other != algorithm and fits(instance, target, other):
            options.append(f'algorithm="{other}"')
    balance = _fitting_balance(setting, fits)
    if balance is not None:
        options.append(f"balance={balance:g}")
    larger = (delta for delta in DELTAS if delta > target.delta)
    delta = next((delta for delta in larger if fits(instance, target._replace(delta=delta))), None)
    if delta is not None:
        options.append(f"delta={delta:g}")
    options += fitting_claim(target, lambda target: fits(instance, target))
    if plan.log10_tuples < MOST_LOG10:
        options.append(f"max_candidates={in_two_digits(plan.log10_tuples)}")
    advice = f"Any of these would fit: {', '.join(options)}; or" if options else "Use"
    return (
        f"this guarantee takes 10^{plan.log10_tuples:.2f} candidates, more than max_candidates = "
        f"{limit:g}. {advice} guarantee=False, to look at some of the candidates without a claim."
        f"\n{plan}"
    )


def fitting_claim(target: Target, fits: Callable[[Target], bool]) -> list[str]:
    """Return about the smallest `eta` or `eps`, whichever was asked for, that fits; or nothing."""
    name, value = ("eta", target.eta) if target.eta is not None else ("eps", target.eps)
    assert value is not None
    enough = _smallest(lambda value: fits(target._replace(**{name: value})), value)
    return [] if enough is None else [f"{name}={enough:g}"]


def _smallest(fits: Callable[[float], bool], low: float) -> float | None:
    """Return about the smallest value above `low` that fits, in two digits."""
    high = 1000 * low
    if not fits(high):
        return None
    while high > 1.05 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    digits = 1 - math.floor(math.log10(high))
    rounded = math.ceil(high * 10**digits) / 10**digits
    return rounded if fits(rounded) else high


def _fitting_balance(setting: Setting, fits: Callable[[Instance, Target], bool]) -> float | None:
    """Return a smaller balance that would fit, if there is one and it is quick to find out."""
    instance = setting.instance
    if instance.n > MAX_POINTS:
        return None
    k, scale = instance.n_clusters, instance.scale or "tight"
    for share in (0.8, 0.6, 0.4, 0.2, 0.1):
        balance = round(k + share * (instance.balance - k), 2)
        try:
            measured = measure(setting.points, setting.weight, k, balance, scale, setting.problem)
        except ValueError:
            # Clusters this large do not go into so few points.
            return None
        if measured.min_size > instance.min_size and fits(measured, setting.target):
            return balance
    return None


def in_two_digits(log10: float) -> str:
    """Return a power of ten as a number of two digits, rounded up."""
    exponent = math.floor(log10)
    return f"{math.ceil(10 ** (log10 - exponent + 1) + 1e-6) / 10:g}e{exponent}"
