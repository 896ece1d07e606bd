"""Well-definedness, scales, balance and the range of variances."""

import math

import jax
import numpy as np
import pytest
import reference

import jaxcmle as jc

FAMILIES = ("plain", "outlier", "nested")


@pytest.mark.parametrize("d", [1, 3])
def test_instance_tools_equal_the_oracle(d, precision):
    loose = 1e-4 if precision == np.float32 else 1e-10
    for seed in range(30):
        rng = np.random.default_rng(seed)
        x = reference.well_defined_instance(rng, 10, d, FAMILIES[seed % 3]).astype(precision)
        report = jc.check_instance(x)
        assert report.min_distance_sq == pytest.approx(reference.min_distance_sq(x), rel=loose)
        assert report.required == pytest.approx(4 * d / math.pi, rel=1e-6)
        assert report.duplicates == 0
        size = 2 + seed % 4
        floor = reference.variance_floor(x, size)
        assert jc.variance_floor(x, size) == pytest.approx(floor, rel=loose)
        low, high = jc.y_range(x, size)
        assert (low, high) == pytest.approx(reference.y_range(x, size), rel=loose, abs=loose)


def test_weights_are_repeated_points(precision):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 2)).astype(precision)
    counts = rng.integers(1, 4, size=8)
    counts[2] = 0
    repeated = np.repeat(x, counts, axis=0)
    for size in (4, 7):
        floor = jc.variance_floor(x, size, sample_weight=counts)
        assert floor == pytest.approx(jc.variance_floor(repeated, size), rel=1e-4, abs=1e-6)
        weighted = jc.y_range(x, size, sample_weight=counts)
        assert weighted == pytest.approx(jc.y_range(repeated, size), rel=1e-4)


def test_check_instance_counts_duplicates():
    x = np.array([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    report = jc.check_instance(x)
    assert not report.well_defined
    assert report.duplicates == 2
    assert report.min_distance_sq == 0
    assert report.scale == math.inf


def test_rescale(precision):
    rng = np.random.default_rng(1)
    for seed in range(5):
        x = rng.normal(size=(20, 2)).astype(precision) * 10.0 ** (seed - 2)
        scaled, factor = jc.rescale(x, scale="paper")
        assert jc.check_instance(scaled).well_defined
        np.testing.assert_allclose(scaled, x * factor, rtol=1e-6)
        distance = reference.min_distance_sq(scaled)
        assert distance == pytest.approx(8 / math.pi, rel=1e-5)
        scaled, _ = jc.rescale(x, scale="tight", balance=4)
        floor = jc.variance_floor(scaled, 5)
        assert floor == pytest.approx(1 / (2 * math.pi), rel=1e-5)
        assert jc.y_range(scaled, 5).low == pytest.approx(1, abs=1e-4)


def test_rescaled_instances_are_well_defined_in_spite_of_rounding(precision):
    for seed in range(20):
        for offset in (0, 100):
            x = np.random.default_rng(seed).normal(size=(20, 1)) + offset
            x = x.astype(precision)
            assert jc.check_instance(jc.rescale(x, scale="paper")[0]).well_defined
            floor = jc.variance_floor(jc.rescale(x)[0], 2)
            assert floor >= 1 / (2 * math.pi)


def test_rescale_refuses_duplicates():
    x = np.array([[0.0], [0.0], [1.0], [2.0], [5.0]])
    for scale in ("paper", "tight"):
        with pytest.raises(ValueError, match="coincide; remove duplicates"):
            jc.rescale(x, scale=scale)
        with pytest.raises(ValueError, match="the points weigh only 1"):
            jc.rescale([[5.0]], scale=scale)
    with pytest.raises(ValueError, match="the points weigh only 5"):
        jc.variance_floor(x, 6)
    _, factor = jc.rescale(x, scale="tight", balance=5 / 3)
    assert math.isfinite(factor)
    with pytest.raises(ValueError, match='"tight" or "paper"'):
        jc.rescale(x, scale="loose")


def test_balance(precision):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x = reference.well_defined_instance(rng, 12, 2, FAMILIES[seed % 3]).astype(precision)
        labels = np.concatenate([np.arange(3).repeat(2), rng.integers(0, 3, 6)])
        for f in (3, 4, 6):
            for g in (None, 4.0):
                expected = reference.is_balanced(x, labels, 3, f, g)
                assert jc.is_balanced(x, labels, 3, f=f, g=g) == expected


def test_too_many_points_are_refused_before_any_work():
    x = np.zeros((2001, 1))
    x[:, 0] = np.arange(2001)
    for call in (
        lambda: jc.check_instance(x, max_points=2000),
        lambda: jc.rescale(x, max_points=2000),
        lambda: jc.rescale(x, scale="paper", max_points=2000),
        lambda: jc.variance_floor(x, 2, max_points=2000),
        lambda: jc.y_range(x, 2, max_points=2000),
        lambda: jc.lower_bound(x, 2, max_points=2000),
    ):
        with pytest.raises(ValueError, match="raise max_points"):
            call()


def test_tools_work_under_jit():
    x = np.array([[0.0], [2.0], [10.0], [13.0]])
    report = jax.jit(jc.check_instance)(x)
    assert bool(report.well_defined)
    scaled, factor = jax.jit(lambda x: jc.rescale(x, scale="paper"))(x)
    np.testing.assert_allclose(scaled, x * float(factor), rtol=1e-6)
    assert bool(jax.jit(lambda labels: jc.is_balanced(x, labels, 2, f=2))(np.array([0, 0, 1, 1])))
    assert float(jax.jit(jc.variance_floor)(x, 2)) == pytest.approx(jc.variance_floor(x, 2))
