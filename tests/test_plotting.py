"""Pictures: what they hold, what they say, and that they leave everything else alone."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import matplotlib
import numpy as np
import pandas as pd
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import reference
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from support import BETA, PROBLEMS, as_mixture, parameters, random_mixture

import jaxcmle as jc
from jaxcmle.apps.plotting import (
    plot_agreement,
    plot_clusters,
    plot_criterion,
    plot_gap,
    plot_history,
    plot_margins,
    save_picture,
)
from jaxcmle.solve.progress import Report

PRECISIONS = ("float32",)
# Machado, Oliveira and Fernandes (2009), on linear RGB.
BLINDNESS = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
}


def instance(n, d, k, seed=0):
    """Return points, a mixture and a solution with labels that are not all the cheapest."""
    rng = np.random.default_rng(seed)
    mixture, _ = as_mixture(random_mixture(rng, k, d), np.float32)
    x = rng.normal(size=(n, d)).astype(np.float32) * 4
    labels = rng.permutation(np.arange(n) % k).astype(np.int32)
    solution = jc.Solution(
        mixture=mixture, labels=labels, cost=0.0, status=jnp.int32(0), n_iter=jnp.int32(1)
    )
    return x, mixture, solution


def axes():
    return Figure().subplots()


def texts(ax):
    return [text.get_text() for text in ax.texts]


def legend_texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def every_picture():
    """Return functions that draw each kind of picture on given axes."""
    x, _, solution = instance(30, 2, 3)
    stability = SimpleNamespace(
        agreement=np.eye(30), points=np.ones(30), n_resamples=5, solution=solution
    )
    return {
        "clusters": lambda ax: plot_clusters(x, solution, ax=ax),
        "history": lambda ax: plot_history([Report(1, 2, 1.0, 5.0)], ax=ax),
        "gap": lambda ax: plot_gap([Report(1, 2, 1.0, 5.0, 0.5)], tolerance=0.1, ax=ax),
        "criterion": lambda ax: plot_criterion(criterion_table(), ax=ax),
        "margins": lambda ax: plot_margins(x, solution, ax=ax),
        "agreement": lambda ax: plot_agreement(stability, ax=ax),
    }


def criterion_table(**changes):
    columns = {
        "n_clusters": np.array([1, 2, 3, 4]),
        "icl": np.array([90.0, 70.0, np.nan, 75.0]),
        "bic": np.array([90.0, 69.0, 68.0, np.inf]),
        "aic": np.array([80.0, 60.0, 50.0, 40.0]),
        "criterion": "icl",
        "best": 1,
    }
    return SimpleNamespace(**{**columns, **changes})


@pytest.mark.parametrize("name", every_picture())
def test_given_axes_are_used_and_nothing_else_is_touched(name):
    draw, before, ax = every_picture()[name], dict(matplotlib.rcParams), axes()
    assert draw(ax) is ax
    ax.figure.draw_without_rendering()
    assert plt.get_fignums() == []
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", every_picture())
def test_without_axes_there_is_one_new_figure(name):
    try:
        ax = every_picture()[name](None)
        assert [plt.figure(number) for number in plt.get_fignums()] == [ax.figure]
        assert ax.get_xlabel()
        assert ax.get_ylabel()
    finally:
        plt.close("all")


@pytest.mark.parametrize("k", [3, 20])
def test_clusters_in_the_plane(k):
    x, mixture, solution = instance(200, 2, k)
    ax = plot_clusters(x, solution, feature_names=["length", "width"], ax=axes())
    _, means, variances = parameters(mixture)
    radii = [[times * np.sqrt(variance) for times in (1, 2)] for variance in variances]
    np.testing.assert_allclose([circle.radius for circle in ax.patches], np.ravel(radii))
    centres = np.repeat(means, 2, axis=0)
    np.testing.assert_allclose([circle.center for circle in ax.patches], centres)
    assert [circle.get_linestyle() for circle in ax.patches] == ["-", "--"] * k
    for j, scatter in enumerate(ax.collections):
        np.testing.assert_array_equal(scatter.get_offsets(), x[solution.labels == j])
    assert len(ax.collections) == k
    assert ax.get_aspect() == 1
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("length", "width")
    assert ax.get_title() == ""


@pytest.mark.parametrize("k", [8, 20])
def test_clusters_differ_in_more_than_colour(k):
    x, mixture, solution = instance(200, 2, k)
    ax = plot_clusters(x, solution, ax=axes())
    looks = [
        (tuple(scatter.get_facecolor()[0]), scatter.get_paths()[0].vertices.tobytes())
        for scatter in ax.collections
    ]
    assert len({colour for colour, _ in looks}) == k
    assert all(one[1] != other[1] for one, other in itertools.pairwise(looks))
    if k == 8:
        assert len({marker for _, marker in looks}) == 8
        entries = [f"cluster {j} (25 points)" for j in range(8)]
        assert legend_texts(ax) == [*entries, "1 σ", "2 σ"]
        assert texts(ax) == []
        np.testing.assert_allclose(ax.lines[0].get_xydata(), mixture.means)
    else:
        assert legend_texts(ax) == ["1 σ", "2 σ"]
        assert texts(ax) == [str(j) for j in range(20)]
        places = [text.get_position() for text in ax.texts]
        np.testing.assert_allclose(places, mixture.means)


def distances(colours, blindness):
    """Return the pairwise distances, in CIE Lab, of colours as somebody sees them."""
    srgb = np.array([to_rgb(colour) for colour in colours])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(BLINDNESS[blindness]).T, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = seen @ np.array(to_xyz).T / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    lab = np.stack(
        [116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1
    )
    apart = np.linalg.norm(lab[:, None] - lab, axis=-1)
    return apart[np.triu_indices(len(lab), 1)]


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_of_up_to_eight_clusters_can_be_told_apart(blindness):
    x, _, solution = instance(40, 2, 8)
    ax = plot_clusters(x, solution, ax=axes())
    colours = [scatter.get_facecolor()[0, :3] for scatter in ax.collections]
    # Twice as far as matplotlib's own, and then some.
    usual = distances(matplotlib.colormaps["tab10"].colors[:8], blindness)
    assert distances(colours, blindness).min() > max(10, 2 * usual.min())


@pytest.mark.parametrize("k", [3, 20])
def test_more_features_are_projected(k):
    x, mixture, solution = instance(200, 10, k)
    x *= np.linspace(1, 3, 10, dtype=np.float32)
    ax = plot_clusters(x, solution, ax=axes())
    centred = x.astype(float) - x.mean(axis=0, dtype=float)
    _, lengths, components = np.linalg.svd(centred, full_matrices=False)
    shares = 100 * lengths**2 / (lengths**2).sum()
    assert ax.get_xlabel() == f"principal component 1 ({shares[0]:.0f} % of the variance)"
    assert ax.get_ylabel() == f"principal component 2 ({shares[1]:.0f} % of the variance)"
    assert ax.get_title() == f"{shares[:2].sum():.0f} % of the variance is shown"
    drawn = np.concatenate([scatter.get_offsets() for scatter in ax.collections])
    order = np.argsort(solution.labels, kind="stable")
    expected = centred[order] @ components[:2].T
    signs = np.sign((drawn * expected).sum(axis=0))
    np.testing.assert_allclose(drawn, expected * signs, atol=1e-5)
    means = (mixture.means - x.mean(axis=0, dtype=float)) @ components[:2].T * signs
    np.testing.assert_allclose([c.center for c in ax.patches[::2]], means, atol=1e-5)
    radii = np.sqrt(mixture.variances)
    np.testing.assert_allclose([c.radius for c in ax.patches[::2]], radii, rtol=1e-6)


def test_a_projection_is_not_mirrored_by_chance():
    x, mixture, _ = instance(50, 3, 2)
    one = plot_clusters(x, mixture, ax=axes()).collections[0].get_offsets()
    # The same points in another order: the components have whatever sign they like.
    labels = np.asarray(jc.assign(x, mixture))
    other = plot_clusters(x[::-1], mixture, ax=axes()).collections[0].get_offsets()
    assert (labels == 0).sum() > 1
    np.testing.assert_allclose(one, other[::-1], atol=1e-5)


def test_a_single_point_of_many_features():
    mixture = jc.Mixture(weights=[1.0], means=[[0.0, 0.0, 0.0]], variances=[1.0])
    ax = plot_clusters([[1, 2, 3]], mixture, ax=axes())
    assert ax.get_title() == "0 % of the variance is shown"
    assert np.isfinite(ax.collections[0].get_offsets()).all()


@pytest.mark.parametrize("k", [3, 20])
def test_clusters_on_a_line(k):
    x, mixture, solution = instance(100, 1, k)
    ax = plot_clusters(x, solution, ax=axes())
    weights, means, variances = parameters(mixture)
    for j in range(k):
        at, curve = ax.lines[j].get_data()
        densities = np.exp(-((at - means[j]) ** 2) / (2 * variances[j]))
        densities *= weights[j] / np.sqrt(2 * np.pi * variances[j])
        np.testing.assert_allclose(curve, densities, rtol=1e-4, atol=1e-7)
        for times, fill in zip((1, 2), ax.collections[2 * j : 2 * j + 2], strict=True):
            ends = fill.get_paths()[0].vertices[:, 0]
            half = times * np.sqrt(variances[j])
            np.testing.assert_allclose(
                [ends.min(), ends.max()], [means[j, 0] - half] + half * np.array([0, 2]), rtol=1e-4
            )
        points = ax.collections[2 * k + j].get_offsets()
        np.testing.assert_array_equal(points[:, 0], x[solution.labels == j, 0])
        assert (points[:, 1] < 0).all()
    assert ax.get_ylabel() == "density"
    assert min(ax.get_yticks()) >= 0
    assert texts(ax) == ([str(j) for j in range(k)] if k > 8 else [])


def test_a_mixture_assigns_and_the_problem_counts():
    x, mixture, _ = instance(80, 2, 3)
    for problem in PROBLEMS.values():
        ax = plot_clusters(x, mixture, problem=problem, ax=axes())
        labels = np.asarray(jc.assign(x, mixture, problem=problem))
        for j in range(3):
            np.testing.assert_array_equal(ax.collections[j].get_offsets(), x[labels == j])
    ax = plot_clusters(x, mixture, problem=PROBLEMS["wkm"], ax=axes())
    np.testing.assert_allclose(ax.patches[0].radius, np.sqrt(0.5 / BETA), rtol=1e-6)


def test_a_cluster_without_weight_is_not_drawn():
    mixture = jc.Mixture(weights=[0, 1], means=[[9.0, 9.0], [0.0, 0.0]], variances=[1, 1])
    ax = plot_clusters([[0, 1], [1, 0]], mixture, ax=axes())
    assert [tuple(circle.center) for circle in ax.patches] == [(0, 0), (0, 0)]
    assert ax.lines[0].get_xydata().tolist() == [[0, 0]]


def test_labels_and_other_kinds_of_points():
    x, _, solution = instance(12, 2, 3)
    frame = pd.DataFrame(x.astype(np.float16), columns=["a", "b"])
    array = frame.to_numpy()
    for points in (frame, array, array.tolist(), jnp.asarray(array)):
        ax = plot_clusters(points, solution, labels=[2] * 12, ax=axes())
        np.testing.assert_array_equal(ax.collections[2].get_offsets(), array)
        assert ax.get_xlabel() == ("a" if points is frame else "feature 0")


def test_of_many_points_a_sample_is_drawn():
    x, _, solution = instance(90, 2, 3)
    first, second = (plot_clusters(x, solution, max_points=40, ax=axes()) for _ in range(2))
    drawn = [np.concatenate([c.get_offsets() for c in ax.collections]) for ax in (first, second)]
    assert len(np.unique(drawn[0], axis=0)) == 40
    assert {tuple(row) for row in drawn[0]} <= {tuple(row) for row in x.tolist()}
    np.testing.assert_array_equal(*drawn)
    assert first.get_title() == "40 of 90 points are drawn"
    assert legend_texts(first)[0] == "cluster 0 (30 points)"
    x, _, solution = instance(90, 3, 3)
    ax = plot_clusters(x, solution, max_points=40, ax=axes())
    assert ax.get_title().endswith("% of the variance is shown; 40 of 90 points are drawn")


def test_two_pictures_on_shared_scales():
    x, _, solution = instance(30, 2, 3)
    figure = Figure()
    for ax in figure.subplots(1, 2, sharex=True, sharey=True):
        plot_clusters(x, solution, ax=ax)
    figure.draw_without_rendering()


def test_bad_inputs_of_clusters_and_margins():
    x, mixture, solution = instance(20, 2, 3)
    for draw in (plot_clusters, plot_margins):
        with pytest.raises(ValueError, match="points with 3 features needs"):
            draw(np.ones((20, 3)), solution, ax=axes())
        with pytest.raises(ValueError, match=r"one label per point, shape \(19,\)"):
            draw(x[:19], solution, ax=axes())
        with pytest.raises(TypeError, match="expected a jaxcmle"):
            draw(x, "solution", ax=axes())
        with pytest.raises(TypeError, match="problem must be"):
            draw(x, mixture, problem="cmle", ax=axes())
        with pytest.raises(ValueError, match="1-D"):
            draw(x[:, 0], solution, ax=axes())
    with pytest.raises(ValueError, match="one label per point"):
        plot_clusters(x, solution, labels=[0, 1], ax=axes())
    with pytest.raises(ValueError, match="must name the 2 features of x, got 1 names"):
        plot_clusters(x, solution, feature_names=["only"], ax=axes())
    with pytest.raises(ValueError, match="max_points"):
        plot_clusters(x, solution, max_points=0, ax=axes())
    one = jc.Mixture(weights=[1.0], means=[[0.0, 0.0]], variances=[1.0])
    with pytest.raises(ValueError, match="has only one"):
        plot_margins(x, one, ax=axes())
    assert plt.get_fignums() == []


def test_history_leaves_out_what_is_no_cost():
    costs = [np.inf, 9.0, np.nan, 7.5]
    reports = [Report(done, 9, 1.0, cost) for done, cost in enumerate(costs, start=1)]
    reports.append(Report(1000, 0, 1.0, 7.5, 0.1))
    ax = plot_history(iter(reports), ax=axes())
    assert ax.lines[0].get_xydata().tolist() == [[2, 9.0], [4, 7.5]]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("round", "best cost (nats)")
    for bad in ([], reports[:1], reports[-1:]):
        with pytest.raises(ValueError, match="no report with a finite cost"):
            plot_history(bad, ax=axes())


def test_gap_is_logarithmic_and_may_be_zero():
    gaps = [None, np.inf, 0.5, 0.02, 0.0]
    reports = [Report(10 * i, 0, 1.0, 7.5, gap) for i, gap in enumerate(gaps)]
    ax = plot_gap(reports[:-1], tolerance=0.04, ax=axes())
    assert ax.lines[0].get_xydata().tolist() == [[20, 0.5], [30, 0.02]]
    assert ax.lines[1].get_ydata() == [0.04, 0.04]
    assert ax.get_yscale() == "log"
    assert ax.get_ylabel() == "gap (nats per point)"
    assert texts(ax) == ["tolerance 0.04"]
    ax = plot_gap(reports, ax=axes())
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [0.5, 0.02, 0.002])
    assert texts(ax) == ["0: optimal"]
    assert ax.texts[0].xy == (40, 0.002)
    for last in (reports[-1:], [Report(1, 0, 1.0, 7.5, -1e-9)]):
        ax = plot_gap(last, tolerance=0, ax=axes())
        ax.figure.draw_without_rendering()
        assert texts(ax) == ["0: optimal"]
    for bad in ([], reports[:2]):
        with pytest.raises(ValueError, match="no report with a finite gap"):
            plot_gap(bad, ax=axes())
    with pytest.raises(ValueError, match="tolerance must be 0 or more"):
        plot_gap(reports, tolerance=-1)
    assert plt.get_fignums() == []


def test_criterion_marks_the_best():
    ax = plot_criterion(criterion_table(), ax=axes())
    icl, bic, best = ax.lines
    np.testing.assert_array_equal(icl.get_ydata(), [90, 70, np.nan, 75])
    np.testing.assert_array_equal(bic.get_ydata(), [90, 69, 68, np.nan])
    np.testing.assert_array_equal(bic.get_xdata(), [1, 2, 3, 4])
    assert icl.get_linewidth() > bic.get_linewidth()
    assert best.get_xdata() == [2, 2]
    assert texts(ax) == ["best: K = 2"]
    assert legend_texts(ax) == ["ICL", "BIC"]


def test_criterion_that_was_chosen_is_drawn():
    ax = plot_criterion(criterion_table(criterion="aic", best=3), ax=axes())
    assert legend_texts(ax) == ["AIC", "ICL", "BIC"]
    assert texts(ax) == ["best: K = 4"]
    ax = plot_criterion(criterion_table(criterion="bic", best=3), ax=axes())
    assert legend_texts(ax) == ["BIC", "ICL"]
    assert texts(ax) == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_margins_are_what_the_next_cluster_costs_more(name):
    x, mixture, solution = instance(60, 2, 4)
    ax = plot_margins(x, solution, problem=PROBLEMS[name], ax=axes())
    costs = reference.point_costs(x.astype(float), *parameters(mixture), name, BETA)
    margins = np.array(
        [
            np.delete(row, own).min() - row[own]
            for row, own in zip(costs, solution.labels, strict=True)
        ]
    )
    assert margins.min() < 0 < margins.max()
    for j, bars in enumerate(ax.patches):
        expected = np.sort(margins[solution.labels == j])[::-1]
        np.testing.assert_allclose(bars.get_data().values, expected, rtol=1e-3, atol=1e-3)
        edges = bars.get_data().edges
        assert j - 0.5 < edges[0] < edges[-1] < j + 0.5
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"{j} (15)" for j in range(4)]
    np.testing.assert_allclose(ax.lines[1].get_xdata(), margins.mean(), rtol=1e-3)
    assert texts(ax) == [f"mean {margins.mean():.3g}"]


def test_margins_that_are_huge_say_so():
    mixture = jc.Mixture(weights=[0.4, 0.3, 0.3], means=[[0], [3], [1e5]], variances=[1, 1, 1])
    x = [[0.0], [0.5], [3.0], [1e5]]
    ax = plot_margins(x, mixture, ax=axes())
    assert ax.get_xscale() == "symlog"
    assert ax.get_xlabel() == "margin to the next cluster (nats; logarithmic beyond 1)"
    ax = plot_margins(x[:3], mixture, ax=axes())
    assert ax.get_xscale() == "linear"
    assert ax.get_xlabel() == "margin to the next cluster (nats)"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0 (2)", "1 (1)", "2 (0)"]


def test_margins_without_another_cluster_and_of_many_points():
    mixture = jc.Mixture(weights=[1.0, 0.0], means=[[0.0], [3.0]], variances=[1.0, 1.0])
    ax = plot_margins([[0.0], [0.5]], mixture, ax=axes())
    ax.figure.draw_without_rendering()
    assert texts(ax) == []
    mixture = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [3.0]], variances=[1.0, 1.0])
    x = np.linspace(-1, 1, 3001)[:, None]
    values = plot_margins(x, mixture, ax=axes()).patches[0].get_data().values
    assert len(values) == 1000
    np.testing.assert_allclose(values[[0, -1]], [7.5, 1.5], rtol=1e-3)


def test_agreement_is_ordered_by_cluster_and_stability():
    rng = np.random.default_rng(0)
    labels, points = np.array([1, 0, 3, 0, 1]), np.array([0.5, 0.7, 1.0, 0.9, 0.6])
    agreement = rng.uniform(size=(5, 5))
    found = SimpleNamespace(
        agreement=agreement, points=points, n_resamples=20, solution=SimpleNamespace(labels=labels)
    )
    ax = plot_agreement(found, ax=axes())
    order = [3, 1, 4, 0, 2]
    np.testing.assert_array_equal(ax.images[0].get_array(), agreement[order][:, order])
    assert ax.images[0].get_clim() == (0, 1)
    assert [line.get_xydata()[0].tolist() for line in ax.lines[1::2]] == [[2, 0], [4, 0]]
    assert [line.get_xydata()[0].tolist() for line in ax.lines[::2]] == [[0, 2], [0, 4]]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "3"]
    np.testing.assert_allclose(ax.get_xticks(), [1, 3, 4.5])
    bar = ax.figure.axes[1]
    assert bar.get_ylabel() == "share of 20 resamples with both in one cluster"


def test_agreement_of_many_points_is_thinned():
    n = 2500
    labels = np.repeat([0, 1, 2], [1250, 1225, 25])
    together = (labels[:, None] == labels).astype(np.float32)
    found = SimpleNamespace(
        agreement=together,
        points=np.ones(n),
        n_resamples=20,
        solution=SimpleNamespace(labels=labels),
    )
    ax = plot_agreement(found, ax=axes())
    assert ax.images[0].get_array().shape == (1000, 1000)
    assert ax.images[0].get_extent() == [0, n, n, 0]
    assert ax.get_title() == "1,000 of 2,500 points are drawn"
    np.testing.assert_allclose(ax.images[0].get_array().mean(), together.mean(), atol=2e-3)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1"]


def drawn_figure():
    x, _, solution = instance(30, 2, 3)
    return plot_clusters(x, solution, ax=axes()).figure


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")])
def test_pictures_are_saved_and_reproducible(tmp_path, name, start):
    before = dict(matplotlib.rcParams)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        save_picture(drawn_figure(), tmp_path / folder / name)
    one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
    assert one.startswith(start)
    assert one == two
    assert [path.name for path in (tmp_path / "one").iterdir()] == [name]
    assert dict(matplotlib.rcParams) == before


def test_axes_save_the_whole_figure(tmp_path):
    figure = Figure()
    left, right = figure.subfigures(1, 2)
    ax = left.subplots()
    right.subplots().set_title("somewhere else")
    for i, picture in enumerate((figure, left, ax)):
        save_picture(picture, str(tmp_path / f"{i}.png"))
    files = [(tmp_path / f"{i}.png").read_bytes() for i in range(3)]
    assert files[0] == files[1] == files[2]


def test_a_failing_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_text("old")

    def fails(self, temporary, **_):
        temporary.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fails)
    with pytest.raises(OSError, match="disk full"):
        save_picture(axes(), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_saved(tmp_path):
    for name in ("a.pdf", "a"):
        with pytest.raises(ValueError, match=r"a \.png or \.svg file, got"):
            save_picture(axes(), tmp_path / name)
    with pytest.raises(TypeError, match="expected matplotlib axes or a figure, got list"):
        save_picture([1], tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_imported_late_and_may_be_missing():
    code = """
import sys
from jaxcmle.apps import plotting
from jaxcmle.solve.progress import Report
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
try:
    plotting.plot_history([Report(1, 2, 1.0, 5.0)])
except ImportError as error:
    assert str(error) == "install matplotlib: pip install 'jaxcmle[plot]'", error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
