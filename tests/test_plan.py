"""Plans against the listed cases, a naive search, and the formulas."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import reference
from support import BETA, PROBLEMS

import jaxcmle as jc
from jaxcmle.candidates import grids, scoring
from jaxcmle.candidates.planning import plan

PRECISIONS = ("float32",)
LISTED = json.loads((Path(__file__).parent / "plan_cases.json").read_text())
# Multiples of every balance, so that the smallest size is no larger than it has to be.
N = 2400


def listed_plan(case, **options):
    return plan(
        None,
        case["n_clusters"],
        eps=case["eps"],
        delta=case["delta"],
        balance=case["balance"],
        scale=case["scale"],
        shape=(N, case["d"]),
        variance_ratio=1e4,
        **options,
    )


def name(case):
    return "-".join(str(case[field]) for field in ("n_clusters", "d", "eps", "scale"))


def left_of_weights(result, problem="cmle"):
    """Return the nats per point that a claim leaves beside eps * d/2 * y (WKM: eps * V)."""
    if problem == "ucmle":
        return result.eta or 0.0
    k, f = result.n_clusters, result.balance
    entropy = reference.min_entropy(k, f)
    if result.weight_exponents == 1:
        divergence = math.log(k) - entropy
    else:
        divergence = (math.log(f - k + 1) / result.weight_exponents) ** 2 / 8
    return (result.eta if result.eps is None else result.eps * entropy) - divergence


def assert_consistent(result, problem="cmle"):
    """The numbers of a plan follow from (m, e_m), and the grid covers the range."""
    k, f, m = result.n_clusters, result.balance, result.m
    assert f == pytest.approx(result.n / result.min_size)
    product = (1 / f) ** (k - 1) * (1 - (k - 1) / f)
    if result.delta > 0:
        assert result.beta == pytest.approx(1 / (m * result.e_m))
        assert 0 < result.beta < 1
        p = math.factorial(k) * product**m * (1 - result.beta)
        assert result.p == pytest.approx(p, rel=1e-9)
        repetitions = math.log(result.delta) / math.log1p(-p) if p > 1e-12 else 0
        if 0 < repetitions < 1e12:
            assert result.repetitions in {math.floor(repetitions) + i for i in range(2)}
            assert result.repetitions * math.log1p(-p) <= math.log(result.delta) * (1 - 1e-9)
        assert result.repetitions * p >= -math.log(result.delta) * (1 - p) * (1 - 1e-9)
        assert result.mean_tuples == 1
    else:
        assert (result.beta, result.p, result.repetitions) == (0, 1, 1)
        assert result.mean_tuples == math.comb(result.n, m) ** k
        assert result.e_m == pytest.approx(1 / m)
        assert m <= result.min_size
    a = result.weight_exponents
    assert result.weight_tuples == a**k - (a - 1) ** k
    grid = result.grid_values**k
    total = result.repetitions * result.mean_tuples * grid * result.weight_tuples
    assert result.tuples == total
    assert result.log10_tuples == pytest.approx(math.log10(total))
    assert result.point_evaluations == total * result.n
    assert len(result.variance_values) == result.grid_values
    assert result.peak_bytes > 0
    if problem != "wkm":
        y = np.linspace(result.y_min, result.y_max, 4000)
        y = np.concatenate([y, result.variance_starts])
        allowed = (result.eps or 0.0, 2 / result.d * left_of_weights(result, problem))
        excess = reference.cover_excess(y, result.variance_values, result.e_m, *allowed)
        assert excess.max() <= 0


@pytest.mark.parametrize("case", LISTED, ids=name)
def test_listed_cases(case):
    result = listed_plan(case)
    k = case["n_clusters"]
    assert result.y_min == pytest.approx(case["y_min"], abs=1e-6)
    assert result.y_max == pytest.approx(case["y_max"], abs=1e-6)
    assert result.balance == case["balance"]
    assert result.tuples <= 1.05 * case["repetitions"] * case["grid_values"] ** k
    if result.weight_tuples == 1:
        assert result.grid_values <= case["grid_values"]
    assert_consistent(result)

    literal = listed_plan(case, algorithm="paper")
    assert abs(literal.log10_tuples - case["literal_log10_tuples"]) <= 1
    assert result.log10_tuples < literal.log10_tuples / 5


@pytest.mark.parametrize("case", LISTED, ids=name)
def test_no_dense_search_finds_a_smaller_plan(case):
    arguments = (case["n_clusters"], case["d"], case["eps"], None, case["delta"], case["balance"])
    best = reference.best_plan(*arguments, case["y_min"], case["y_max"])
    assert listed_plan(case).tuples <= 1.001 * best[0]


def random_options(rng, claim):
    k = int(rng.integers(2, 5))
    size = float(np.exp(rng.uniform(-1.2, 0.2)))
    return k, {
        "eps": size if claim == "eps" else None,
        "eta": 2 * size if claim == "eta" else None,
        "delta": float(rng.choice([0.01, 0.1, 0.4])),
        "balance": float(rng.uniform(1.05, 3) * k),
        "shape": (int(rng.choice([100, 997, N])), int(rng.choice([1, 2, 5]))),
        "variance_ratio": float(np.exp(rng.uniform(0, 10))),
    }


@pytest.mark.parametrize("claim", ["eps", "eta"])
@pytest.mark.parametrize("seed", range(10))
def test_random_plans_are_consistent_and_as_small_as_a_dense_search_finds(claim, seed):
    rng = np.random.default_rng([seed, claim == "eta"])
    k, options = random_options(rng, claim)
    result = plan(None, k, **options)
    assert_consistent(result)
    assert result.min_size == max(2, math.ceil(options["shape"][0] / options["balance"]))
    for exponents in (1, 2, 3, result.weight_exponents):
        best = reference.best_plan(
            k,
            options["shape"][1],
            options["eps"],
            options["eta"],
            options["delta"],
            result.balance,
            result.y_min,
            result.y_max,
            exponents,
        )
        assert result.tuples <= 1.001 * best[0]


@pytest.mark.parametrize(("k", "d"), [(2, 5), (3, 2)])
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("eps", np.arange(0.3, 1.5, 0.05)),
        ("eta", np.arange(0.78, 0.98, 0.01)),
        ("delta", (0.001, 0.01, 0.1, 0.5, 0.9)),
        ("balance", (24.0, 16.0, 12.0, 10.0, 8.0, 6.0, 4.0, 3.0)),
        ("variance_ratio", (1e6, 1e4, 1e2, 10.0, 1.0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_easier_claim_takes_no_more_candidates(k, d, option, values):
    claims = [{}] if option in ("eps", "eta") else [{"eps": 0.5}, {"eta": 1.0}]
    for claim in claims:
        counts = [
            plan(None, k, shape=(N, d), **claim, **{option: float(value)}).tuples
            for value in values
        ]
        assert all(later <= earlier for earlier, later in itertools.pairwise(counts))
        assert counts[-1] < counts[0]


def test_eta_does_not_depend_on_the_scale():
    plans = [plan(None, 3, eta=0.7, shape=(N, 2), scale=scale) for scale in ("tight", "paper")]
    assert plans[0].tuples == plans[1].tuples
    assert plans[0].e_m == pytest.approx(plans[1].e_m, rel=1e-9)


def test_one_cluster_takes_few_candidates():
    for balance, delta, claim in ((1, 0.1, "eps"), (2, 0.1, "eta"), (1, 0, "eta"), (2, 0, "eps")):
        result = plan(None, 1, **{claim: 0.5}, delta=delta, balance=balance, shape=(12, 2))
        assert_consistent(result)
        assert result.tuples < 1000


def test_a_generous_claim_takes_few_candidates():
    for claim in ({"eps": 1000.0}, {"eta": 1000.0}):
        result = plan(None, 2, **claim, shape=(100, 1))
        assert result.m == 1
        assert result.grid_values == 1
        assert result.repetitions <= 10


def test_a_narrow_claim_needs_a_grid_of_weights():
    # Uniform weights alone are off by more than this.
    result = plan(None, 2, eta=0.1, balance=8, shape=(N, 2))
    assert math.log(2) - reference.min_entropy(2, 8) > 0.1
    assert result.weight_tuples > 1
    assert_consistent(result)
    best = reference.best_plan(2, 2, None, 0.1, 0.1, 8, result.y_min, result.y_max)
    assert best[0] == math.inf


@pytest.mark.parametrize("problem", ["cmle", "ucmle", "wkm"])
def test_deterministic_plans(problem):
    # Without x nothing is known of WKM's V, so that only a factor can be claimed.
    for claim in ({"eps": 0.5}, {"eta": 1.0}) if problem != "wkm" else ({"eps": 0.5},):
        result = plan(None, 2, **claim, delta=0, shape=(24, 2), problem=PROBLEMS[problem])
        assert_consistent(result, problem)
        random = plan(None, 2, **claim, delta=0.1, shape=(24, 2), problem=PROBLEMS[problem])
        assert random.tuples < result.tuples


def test_every_cluster_has_a_subset_whose_mean_is_near():
    rng = np.random.default_rng(0)
    for m in (1, 2, 3):
        # Clusters of just as many points, and of a few more; far points among them.
        for size in range(m, m + 4):
            x = rng.normal(size=(size, 2)) * np.exp(2 * rng.normal(size=(size, 1)))
            variance = x.var(axis=0).sum()
            square = ((reference.subset_means(x, m) - x.mean(axis=0)) ** 2).sum(axis=1)
            assert square.min() <= variance / m * (1 + 1e-12)


def test_deterministic_plans_need_subsets_within_every_cluster():
    # Means of 20 points would do, but clusters of 3 have no such subsets.
    with pytest.raises(ValueError, match="clusters of 3 points"):
        plan(None, 2, eps=0.1, delta=0, balance=4, shape=(12, 2))


def test_deterministic_plans_of_many_points_come_at_once():
    # All the numbers of points to a mean are not looked at: they are too many.
    result = plan(None, 2, eta=1.0, delta=0, shape=(100_000, 2))
    assert result.m <= 3
    assert result.log10_tuples > 10


def data(rng, n=40, d=2, separation=8.0):
    x, _ = reference.random_mixture_data(rng, n, d, 2, separation)
    return x.astype(np.float32)


@pytest.mark.parametrize("scale", ["tight", "paper"])
def test_plans_of_data_have_its_range_of_variances(scale):
    x = data(np.random.default_rng(1))
    result = plan(x, 2, eps=0.5, scale=scale)
    assert (result.n, result.d, result.min_size, result.balance) == (40, 2, 10, 4)
    low, high = reference.y_range(x, 10)
    if scale == "tight":
        shift = 1 - low
    else:
        shift = math.log(4 * 2 / math.pi / reference.min_distance_sq(x))
    assert result.factor == pytest.approx(math.exp(shift / 2), rel=1e-4)
    # Wide enough, and not much wider.
    assert low + shift - 3e-4 <= result.y_min <= low + shift
    assert high + shift <= result.y_max <= high + shift + 3e-4
    scaled = reference.y_range(x * result.factor, 10)
    assert scaled == pytest.approx((result.y_min, result.y_max), abs=3e-4)
    assert_consistent(result)
    if scale == "tight":
        ratio = math.exp(result.y_max - result.y_min)
        same = plan(None, 2, eps=0.5, shape=(40, 2), variance_ratio=ratio)
        assert (same.m, same.grid_values, same.weight_tuples) == (
            result.m,
            result.grid_values,
            result.weight_tuples,
        )
        assert same.e_m == pytest.approx(result.e_m, rel=1e-3)


def test_plans_do_not_depend_on_units():
    x = data(np.random.default_rng(1))
    for claim in ({"eps": 0.5}, {"eta": 0.5}):
        plans = [plan(x * factor, 2, **claim) for factor in (np.float32(1), np.float32(1000))]
        assert plans[0].tuples == plans[1].tuples
        assert plans[0].factor == pytest.approx(1000 * plans[1].factor, rel=1e-5)


def test_whole_weights_are_repeated_points():
    x = data(np.random.default_rng(2), 20)
    weight = np.tile([1, 2, 3, 2], 5)
    weighted = plan(x, 2, eta=0.5, sample_weight=weight)
    repeated = plan(np.repeat(x, weight, axis=0), 2, eta=0.5)
    assert weighted.tuples == repeated.tuples
    assert weighted.min_size == repeated.min_size == 10
    assert weighted.y_min == pytest.approx(repeated.y_min, abs=1e-5)
    assert weighted.y_max == pytest.approx(repeated.y_max, abs=1e-5)
    with pytest.raises(ValueError, match="points without weights"):
        plan(x, 2, eta=0.5, delta=0, sample_weight=weight)


@pytest.mark.parametrize("scale", ["tight", "paper"])
def test_points_of_weight_0_change_nothing(scale):
    x = data(np.random.default_rng(3))
    padded = np.concatenate([x, x[:5] * 0, x[:3]])
    weight = np.r_[np.ones(40), np.zeros(8)]
    for options in ({"eps": 0.5}, {"eps": 0.5, "delta": 0}):
        plain = plan(x, 2, scale=scale, **options)
        other = plan(padded, 2, scale=scale, sample_weight=weight, **options)
        assert (other.n, other.m, other.tuples) == (plain.n, plain.m, plain.tuples)
        assert other.point_evaluations == plain.point_evaluations


@pytest.mark.parametrize(
    ("claim", "beta", "balance", "uniform"),
    [
        ({"eps": 0.2}, 0.05, 4, None),
        ({"eps": 0.2}, 20.0, 4, True),
        ({"eps": 0.5}, 200.0, 16, True),
        ({"eps": 0.1}, 0.3, 16, False),
        ({"eta": 0.5}, 0.02, 4, None),
        ({"eta": 0.3}, 0.5, 16, False),
    ],
)
def test_wkm_allows_just_the_errors_that_every_spread_has_room_for(claim, beta, balance, uniform):
    x = data(np.random.default_rng(4), separation=2.0)
    result = plan(x, 2, **claim, problem=jc.WKM(beta=beta), balance=balance)
    assert_consistent(result, "wkm")
    assert result.grid_values == 1
    assert result.scale is None
    assert uniform is None or (result.weight_tuples == 1) == uniform
    # V, the cost per point beside the entropy: from that of the narrowest clusters to the whole's.
    low = beta * 2 * reference.variance_floor(x, int(result.min_size))
    high = beta * ((x - x.mean(axis=0)) ** 2).sum() / len(x)
    spread = np.linspace(low, high, 1000)

    def room(e):
        allowed = (result.eps or 0.0) * spread + left_of_weights(result, "wkm")
        return (allowed - spread * e).min()

    assert room(result.e_m) >= 0
    assert room(1.001 * result.e_m) < 0


@pytest.mark.parametrize("k", [2, 3])
def test_wkm_spreads_are_those_of_partitions(k):
    rng = np.random.default_rng(5)
    x, size = rng.normal(size=(9, 2)), 2
    spreads = [
        reference.partition_cost(x, labels, k, "wkm", BETA) / 9
        + (w := np.bincount(labels) / 9) @ np.log(w)
        for labels in reference.set_partitions(9, k)
        if np.bincount(labels).min() >= size
    ]
    assert min(spreads) >= BETA * 2 * reference.variance_floor(x, size)
    assert max(spreads) <= BETA * ((x - x.mean(axis=0)) ** 2).sum() / 9


def test_wkm_without_data_and_of_points_that_coincide(monkeypatch):
    result = plan(None, 2, eps=0.5, shape=(40, 2), problem=jc.WKM(beta=1.0))
    assert_consistent(result, "wkm")
    assert result.e_m >= 0.5
    with pytest.raises(ValueError, match="give x, or eps"):
        plan(None, 2, eta=0.5, shape=(40, 2), problem=jc.WKM(beta=1.0))
    same = np.ones((40, 2), np.float32)
    for claim in ({"eps": 0.5}, {"eta": 0.5}):
        result = plan(same, 2, **claim, problem=jc.WKM(beta=1.0))
        assert (result.m, result.beta) == (1, 0)
        monkeypatch.setattr(scoring, "repetition_rate", lambda *_: 1e9)
        json.dumps(result.to_dict(), allow_nan=False)


def test_ucmle_has_one_tuple_of_weights():
    for claim in ({"eps": 0.4}, {"eta": 0.4}):
        result = plan(None, 3, **claim, shape=(N, 2), problem=jc.UCMLE())
        assert result.weight_tuples == 1
        assert_consistent(result, "ucmle")
        limit = math.expm1(result.eps * result.y_min if result.eps else result.eta)
        assert result.e_m < limit


def test_the_paper_has_its_own_counts():
    result = plan(None, 2, eps=0.5, delta=0.1, shape=(N, 2), algorithm="paper")
    eps = 1.5**0.25 - 1
    assert result.m == math.ceil(1 / (eps * 0.1))
    assert result.mean_tuples == math.comb(result.m * 4, result.m) ** 2
    assert result.log10_tuples == pytest.approx(190, abs=1)
    assert result.tuples % (result.repetitions * result.mean_tuples) == 0
    # One cluster of all points: their size is known.
    assert plan(None, 1, eps=0.5, balance=1, shape=(N, 2), algorithm="paper").tuples > 0
    for problem, at_most in ((jc.WKM(beta=1.0), result), (jc.UCMLE(), result)):
        other = plan(None, 2, eps=0.5, shape=(N, 2), algorithm="paper", problem=problem)
        assert other.tuples < at_most.tuples
    for options in ({"eta": 0.5}, {"eps": 0.5, "delta": 0}):
        with pytest.raises(ValueError, match="positive delta"):
            plan(None, 2, **options, shape=(N, 2), algorithm="paper")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, ValueError, "give eta"),
        ({"eps": 0.5, "eta": 0.5}, ValueError, "one of them"),
        ({"eps": 0.0}, ValueError, "eps must be positive"),
        ({"eps": -0.5}, ValueError, "eps must be positive"),
        ({"eta": -1}, ValueError, "eta must be positive"),
        ({"eta": math.nan}, ValueError, "eta must be positive"),
        ({"eta": math.inf}, ValueError, "eta must be finite"),
        ({"eps": "half"}, TypeError, "eps must be a number"),
        ({"eta": 0.5, "delta": 1.0}, ValueError, "must be under 1"),
        ({"eta": 0.5, "delta": 2}, ValueError, "must be under 1"),
        ({"eta": 0.5, "delta": -0.1}, ValueError, "delta must be 0 or more"),
        ({"eta": 0.5, "scale": "loose"}, ValueError, "scale must be one of"),
        ({"eta": 0.5, "algorithm": "exact"}, ValueError, "algorithm must be one of"),
        ({"eta": 0.5, "shape": None}, ValueError, r"give shape=\(n, d\)"),
        ({"eta": 0.5, "shape": (12,)}, ValueError, r"give shape=\(n, d\)"),
        ({"eta": 0.5, "shape": (0, 2)}, ValueError, "must be 1 or more"),
        ({"eta": 0.5, "balance": 1.5}, ValueError, "raise balance"),
        ({"eta": 0.5, "balance": 0}, ValueError, "balance must be positive"),
        ({"eta": 0.5, "balance": -4}, ValueError, "balance must be positive"),
        ({"eta": 0.5, "variance_ratio": 0.5}, ValueError, "variance_ratio must be 1 or more"),
        ({"eta": 0.5, "variance_ratio": math.inf}, ValueError, "finite"),
        ({"eta": 0.5, "problem": "kmeans"}, TypeError, "problem"),
        ({"eta": 1e-5, "balance": 8}, ValueError, "raise it"),
    ],
)
def test_errors(options, error, match):
    with pytest.raises(error, match=match):
        plan(None, 2, **{"shape": (48, 2), **options})


def test_errors_of_data():
    # Ten places with four points each.
    x = np.repeat(data(np.random.default_rng(6))[:10], 4, axis=0)
    with pytest.raises(ValueError, match="x or shape, not both"):
        plan(x, 2, eta=0.5, shape=(40, 2))
    with pytest.raises(ValueError, match=r"not well-defined on the tight scale.*coincide"):
        plan(x, 4, eta=0.5, balance=10)
    with pytest.raises(ValueError, match=r"not well-defined on the paper scale.*coincide"):
        plan(x, 4, eps=0.5, balance=8, scale="paper")
    # Larger clusters cannot be of one place only.
    assert plan(x, 4, eta=0.5, balance=8).tuples > 0
    with pytest.raises(ValueError, match="raise balance"):
        plan(x, 4, eta=0.5, balance=3.5)


def test_errors_of_heavy_points():
    # A point can be a cluster of its own: its variance is 0, on any scale.
    x, weight = data(np.random.default_rng(7), 20), np.full(20, 5.0)
    for scale in ("tight", "paper"):
        with pytest.raises(ValueError, match=f"not well-defined on the {scale} scale"):
            plan(x, 2, eps=0.5, balance=20, scale=scale, sample_weight=weight)


@pytest.mark.parametrize("algorithm", ["sampling", "paper"])
def test_absurd_plans_can_be_printed(algorithm):
    result = plan(None, 4, eps=0.01, shape=(N, 2), algorithm=algorithm)
    assert result.log10_tuples > 100
    numbers = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert numbers["log10_tuples"] == pytest.approx(result.log10_tuples)
    assert numbers["seconds"] is None
    assert "10^" in str(result)
    assert "candidates" in str(result)
    # Python does not write out integers of so many digits.
    assert "Plan" in repr(result)


def test_plans_can_be_printed():
    result = plan(None, 2, eta=0.7, shape=(1200, 2))
    numbers = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert numbers["tuples"] == result.tuples
    assert numbers["variance_values"] == list(result.variance_values)
    assert numbers["seconds"] > 0
    lines = str(result).splitlines()
    assert "1,200 points, 2 features, 2 clusters of at least 300" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == [
        "claim",
        "y",
        "means",
        "success",
        "grids",
        "candidates",
        "memory",
        "time",
    ]
    assert "0.7 nats per point" in lines[1]
    assert "with probability 0.9" in lines[1]
    assert f"{result.tuples:,} tuples" in str(result)


def test_claims_in_words():
    options = {"shape": (24, 2), "delta": 0}
    assert plan(None, 2, eta=1.0, **options).claim.endswith("for certain")
    claim = plan(None, 2, eps=0.5, shape=(24, 2), scale="paper").claim
    assert "1.5 times the best balanced one on the paper scale" in claim
    claim = plan(None, 2, eps=0.5, shape=(24, 2), problem=jc.WKM(beta=1.0)).claim
    assert "scale" not in claim


def test_the_grid_of_a_plan_is_that_of_its_error():
    result = plan(None, 3, eps=0.5, shape=(N, 2))
    allowance = grids.Allowance(result.eps, 2 / result.d * left_of_weights(result))
    cover = grids.cover_variances(result.y_min, result.y_max, result.e_m, allowance)
    np.testing.assert_allclose(cover.values, result.variance_values, rtol=1e-12)
    np.testing.assert_allclose(cover.starts, result.variance_starts, rtol=1e-12)


@pytest.mark.parametrize("algorithm", ["sampling", "abs"])
def test_absurd_plans_come_back_and_can_be_printed(algorithm):
    # Millions of nats a point beside the one that is allowed: a count of millions of digits.
    x = 60000 + 20000 * np.random.default_rng(0).normal(size=(50, 1))
    plan_ = plan(x, 2, eta=1.0, problem=jc.WKM(), algorithm=algorithm)
    assert plan_.log10_tuples > 1000
    assert "10^" in str(plan_)
    with pytest.raises(jc.TooManyCandidatesError):
        jc.approximate(x, 2, eta=1.0, problem=jc.WKM(), algorithm=algorithm, certificate=False)
    # Memory beyond any float.
    assert "bytes" in str(plan(None, 1000, eps=0.5, shape=(10**7, 2), algorithm=algorithm))
