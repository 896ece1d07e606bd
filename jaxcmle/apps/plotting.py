"""Pictures of clusters, of a search, of a proof, and of how far an answer can be trusted.

Every function draws onto the axes it is given, or onto a new figure, and returns the axes. Needs
matplotlib (`pip install 'jaxcmle[plot]'`), which is imported with the first picture.

No picture relies on colour alone: up to eight clusters have the colours of Okabe and Ito
(https://jfly.uni-koeln.de/color/), more have shades of viridis, and all have markers or numbers.
"""

import importlib
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxcmle.apps.atomic import atomic_path
from jaxcmle.problem import inputs
from jaxcmle.problem.objective import assign, point_costs
from jaxcmle.problem.types import CMLE, Mixture, Problem, Solution
from jaxcmle.solve.progress import Report
from jaxcmle.solve.select import SelectionTable
from jaxcmle.solve.stability import Stability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "plot_agreement",
    "plot_clusters",
    "plot_criterion",
    "plot_gap",
    "plot_history",
    "plot_margins",
    "save_picture",
]

BLUE, VERMILLION = "#0072B2", "#D55E00"
# Okabe and Ito's, with what is hard to see on white last.
PALETTE = (BLUE, "#E69F00", "#009E73", VERMILLION, "#CC79A7", "#56B4E9", "#000000", "#F0E442")
MARKERS = "os^DvPX*"
# More bars, or more rows of a matrix, are too fine to see.
FINEST = 1000
# A report holds until the next one.
STEPS = {"drawstyle": "steps-post", "marker": "o", "markersize": 3}


class _Clusters(NamedTuple):
    """What pictures need to know of points and clusters: NumPy arrays in float64."""

    points: np.ndarray  # [n, d]
    labels: np.ndarray  # [n]
    weights: np.ndarray  # [k]
    means: np.ndarray  # [k, d]
    sigmas: np.ndarray  # [k]
    sizes: np.ndarray  # [k], in points


class _Look(NamedTuple):
    """How a cluster is told from the others; the dark shade is for its lines."""

    colour: tuple[float, ...]
    dark: tuple[float, ...]
    marker: str


def plot_clusters(
    x: Any,
    solution: Solution | Mixture,
    *,
    problem: Problem = CMLE(),
    labels: Any = None,
    feature_names: Sequence[str] | None = None,
    max_points: int = 20_000,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw points in the colours of their clusters, and the clusters at 1 and 2 sigma.

    Two features are drawn as they are, on one scale. More are projected onto the two principal
    components of the points, where spheres of 1 and 2 sigma are circles of the same radius; the
    title says how much of the variance is shown. A single feature is drawn as a strip of points
    below the curves of weight times density, filled up to 1 and 2 sigma.

    Args:
        x: points `[n, d]`.
        solution: a `Solution`, or a `Mixture`: then every point is in its cheapest cluster.
        problem: says which cluster of a `Mixture` is cheapest.
        labels: `[n]`, to draw instead of those of the solution.
        feature_names: `[d]`, for the axes where there are one or two features; by default the
            columns of a DataFrame.
        max_points: of more points a random sample is drawn, always the same; the title says so.
        ax: where to draw; default a new figure.

    Example:
        >>> import jaxcmle as jc
        >>> from matplotlib.figure import Figure
        >>> from jaxcmle.apps.plotting import plot_clusters
        >>> mixture = jc.Mixture(weights=[0.5, 0.5], means=[[0, 0], [5, 0]], variances=[1, 0.25])
        >>> ax = plot_clusters([[0, 1], [0, -1], [5, 0]], mixture, ax=Figure().subplots())
        >>> [float(circle.radius) for circle in ax.patches]
        [1.0, 2.0, 0.5, 1.0]
    """
    clusters = _clusters(x, solution, labels, problem)
    n, d = clusters.points.shape
    names = _feature_names(x, feature_names, d)
    limit = inputs.to_whole(max_points, "max_points")
    drawn = np.arange(n) if n <= limit else np.random.default_rng(0).choice(n, limit, False)
    axes = _axes(ax)
    notes = []
    if d == 1:
        names.append("density")
        _draw_line(axes, clusters, drawn)
    else:
        if d > 2:
            clusters, shares = _projected(clusters)
            names = [
                f"principal component {i} ({100 * share:.0f} % of the variance)"
                for i, share in enumerate(shares, start=1)
            ]
            notes.append(f"{100 * shares.sum():.0f} % of the variance is shown")
        _draw_plane(axes, clusters, drawn)
    if n > limit:
        notes.append(f"{limit:,} of {n:,} points are drawn")
    axes.set(xlabel=names[0], ylabel=names[1])
    if notes:
        axes.set_title("; ".join(notes), fontsize="medium")
    return axes


def plot_history(reports: Iterable[Report], *, ax: "Axes | None" = None) -> "Axes":
    """Draw the best cost over the rounds of a search.

    Args:
        reports: what `fit(..., progress=reports.append)` collects. Reports without a finite cost,
            and those of a certificate, are left out.
        ax: where to draw; default a new figure.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from jaxcmle.apps.plotting import plot_history
        >>> from jaxcmle.solve.progress import Report
        >>> reports = [Report(1, 3, 10.0, 52.5), Report(2, 3, 10.0, 48.0), Report(3, 3, 10.0, 48.0)]
        >>> plot_history(reports, ax=Figure().subplots()).lines[0].get_ydata().tolist()
        [52.5, 48.0, 48.0]
    """
    kept = [
        (report.done, report.cost)
        for report in reports
        if report.gap is None and math.isfinite(report.cost)
    ]
    if not kept:
        raise ValueError(
            "no report with a finite cost: pass what jaxcmle.fit(..., progress=reports.append) "
            "collects"
        )
    axes = _axes(ax)
    rounds, costs = np.array(kept, dtype=float).T
    axes.plot(rounds, costs, color=BLUE, **STEPS)
    axes.set(xlabel="round", ylabel="best cost (nats)")
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return axes


def plot_gap(
    reports: Iterable[Report], *, tolerance: float | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draw how far from optimal an answer can be, over the cells that a proof has looked at.

    Args:
        reports: what `certify(..., progress=reports.append)` collects. Reports without a finite gap
            are left out.
        tolerance: the gap asked for, drawn as a dashed line.
        ax: where to draw; default a new figure. The axis of gaps is logarithmic; a gap of 0, the
            proof that nothing is better, is drawn at its lower end, with a note.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from jaxcmle.apps.plotting import plot_gap
        >>> from jaxcmle.solve.progress import Report
        >>> reports = [Report(8, 0, 1e3, 48.0, 0.5), Report(64, 0, 1e3, 48.0, 0.02)]
        >>> plot_gap(reports, tolerance=0.01, ax=Figure().subplots()).lines[0].get_ydata().tolist()
        [0.5, 0.02]
    """
    kept = [
        (report.done, max(report.gap, 0.0))
        for report in reports
        if report.gap is not None and math.isfinite(report.gap)
    ]
    if not kept:
        raise ValueError(
            "no report with a finite gap: pass what jaxcmle.certify(..., progress=reports.append) "
            "collects"
        )
    limit = 0.0 if tolerance is None else inputs.to_limit(tolerance, "tolerance")
    axes = _axes(ax)
    cells, gaps = np.array(kept, dtype=float).T
    bottom = min((value for value in (*gaps, limit) if value > 0), default=1.0) / 10
    axes.plot(cells, np.maximum(gaps, bottom), color=BLUE, **STEPS)
    axes.set(xlabel="cells looked at", ylabel="gap (nats per point)", yscale="log")
    words: dict[str, Any] = {"textcoords": "offset points", "fontsize": "small"}
    if gaps.min() == 0:
        at = (cells[gaps.argmin()], bottom)
        axes.annotate("0: optimal", at, (-7, 0), ha="right", va="center", **words)
    if 0 < limit < math.inf:
        axes.axhline(limit, color=VERMILLION, linestyle="--")
        at = (cells[0], limit)
        axes.annotate(f"tolerance {limit:g}", at, (0, 4), color=VERMILLION, **words)
    return axes


def plot_criterion(table: SelectionTable, *, ax: "Axes | None" = None) -> "Axes":
    """Draw ICL and BIC over the number of clusters, and mark the best.

    Args:
        table: the table of `select`. Numbers of clusters without a finite value are left out.
        ax: where to draw; default a new figure.

    Example:
        >>> from types import SimpleNamespace
        >>> from matplotlib.figure import Figure
        >>> from jaxcmle.apps.plotting import plot_criterion
        >>> table = SimpleNamespace(n_clusters=[1, 2, 3], icl=[90.0, 70.0, 75.0],
        ...                         bic=[90.0, 69.0, 68.0], criterion="icl", best=1)
        >>> [text.get_text() for text in plot_criterion(table, ax=Figure().subplots()).texts]
        ['best: K = 2']
    """
    numbers = np.asarray(table.n_clusters)
    axes = _axes(ax)
    for name in dict.fromkeys((table.criterion, "icl", "bic")):
        values = np.asarray(getattr(table, name), dtype=float)
        values = np.where(np.isfinite(values), values, np.nan)
        if name == table.criterion:
            style: dict[str, Any] = {"color": BLUE, "linewidth": 2, "marker": "o", "zorder": 3}
            known = np.isfinite(values[table.best])
        else:
            style = {"color": "0.45", "linewidth": 1, "marker": "s", "linestyle": "--"}
        axes.plot(numbers, values, label=name.upper(), markersize=5, **style)
    if known:
        _mark(axes, numbers[table.best], f"best: K = {numbers[table.best]}")
    axes.set(xlabel="number of clusters K", ylabel="criterion (lower is better)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    return axes


def plot_margins(
    x: Any,
    solution: Solution | Mixture,
    *,
    problem: Problem = CMLE(),
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw how clearly each point belongs to its cluster, as in a silhouette plot.

    The margin of a point is what it would cost more, in nats, in the best other cluster: 0 on the
    border, and negative where a minimum size keeps a point from its cheapest cluster. Clusters are
    equally high whatever their size, and their points are sorted. Where some margins are huge the
    axis is logarithmic beyond 1 nat; its label says so.

    Args:
        x: points `[n, d]`.
        solution: a `Solution`, or a `Mixture`, with at least two clusters.
        problem: what the solution solves.
        ax: where to draw; default a new figure.

    Example:
        >>> import jaxcmle as jc
        >>> from matplotlib.figure import Figure
        >>> from jaxcmle.apps.plotting import plot_margins
        >>> mixture = jc.Mixture(weights=[0.5, 0.5], means=[[0.0], [2.0]], variances=[1.0, 1.0])
        >>> ax = plot_margins([[0.0], [0.5], [2.0]], mixture, ax=Figure().subplots())
        >>> ax.texts[0].get_text()
        'mean 1.67'
    """
    clusters = _clusters(x, solution, None, problem)
    k = len(clusters.sizes)
    if k == 1:
        raise ValueError("a margin compares two clusters, and this solution has only one")
    mixture = solution.mixture if isinstance(solution, Solution) else solution
    costs = np.asarray(point_costs(x, mixture, problem=problem), np.float64)
    rows = np.arange(len(costs))
    own = costs[rows, clusters.labels]
    costs[rows, clusters.labels] = np.inf
    margins = costs.min(axis=1) - own
    # Infinite where no other cluster has any weight.
    finite = margins[np.isfinite(margins)]
    most = finite.max(initial=0)
    groups = [np.sort(np.minimum(margins[clusters.labels == j], most))[::-1] for j in range(k)]
    axes = _axes(ax, height=max(4.8, 1.2 + 0.24 * k))
    for j, (group, look) in enumerate(zip(groups, _looks(k), strict=True)):
        values = group[_spread(len(group))]
        edges = np.linspace(j - 0.4, j + 0.4, len(values) + 1)
        axes.stairs(values, edges, orientation="horizontal", fill=True, color=look.colour)
    axes.axvline(0, color="black", linewidth=0.8)
    if len(finite):
        _mark(axes, finite.mean(), f"mean {finite.mean():.3g}")
    axes.set_yticks(range(k), [f"{j} ({size:,})" for j, size in enumerate(clusters.sizes)])
    unit = "nats"
    # Else the clusters with small margins could not be seen.
    if most > 50 * max(1, min(np.median(group) for group in groups if len(group))):
        axes.set_xscale("symlog", linthresh=1)
        unit = "nats; logarithmic beyond 1"
    label = f"margin to the next cluster ({unit})"
    axes.set(ylim=(k - 0.5, -0.5), xlabel=label, ylabel="cluster (points)")
    return axes


def plot_agreement(stability: Stability, *, ax: "Axes | None" = None) -> "Axes":
    """Draw for all pairs of points how often resamples put them into one cluster.

    Points are ordered by cluster, and within clusters by how stable they are. Lines are drawn
    between clusters. Of more than 1,000 points that many, evenly spread, are drawn; the title says
    so.

    Args:
        stability: what `stability` returns.
        ax: where to draw; default a new figure.

    Example:
        >>> from types import SimpleNamespace
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from jaxcmle.apps.plotting import plot_agreement
        >>> found = SimpleNamespace(agreement=np.eye(3), points=np.ones(3), n_resamples=20,
        ...                         solution=SimpleNamespace(labels=np.array([1, 0, 1])))
        >>> plot_agreement(found, ax=Figure().subplots()).images[0].get_array().tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    labels = np.asarray(stability.solution.labels)
    n = len(labels)
    order = np.lexsort((-np.asarray(stability.points), labels))
    drawn = order[_spread(n)]
    axes = _axes(ax)
    if len(drawn) < n:
        axes.set_title(f"{len(drawn):,} of {n:,} points are drawn", fontsize="medium")
    image = axes.imshow(
        stability.agreement[np.ix_(drawn, drawn)],
        cmap="Blues",
        vmin=0,
        vmax=1,
        extent=(0, n, n, 0),
        interpolation="nearest",
    )
    present, sizes = np.unique(labels, return_counts=True)
    ends = np.cumsum(sizes)
    for end in ends[:-1]:
        axes.axhline(end, color="black", linewidth=0.6)
        axes.axvline(end, color="black", linewidth=0.6)
    # The numbers of narrow clusters would run into each other.
    wide = sizes > 0.03 * n
    ticks, names = (ends - sizes / 2)[wide], present[wide]
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    axes.tick_params(length=0)
    axes.set(xlabel="points, by cluster", ylabel="points, by cluster")
    text = f"share of {stability.n_resamples} resamples with both in one cluster"
    axes.get_figure().colorbar(image, ax=axes, label=text)
    return axes


def save_picture(picture: Any, path: str | os.PathLike[str]) -> None:
    """Write a picture to a PNG or SVG file, whole or not at all.

    The same picture gives the same file, whenever it is written.

    Args:
        picture: a figure, or axes: then the figure they are in.
        path: ends in `.png` or `.svg`. A file that is there is replaced when the new one is
            complete.

    Example:
        >>> import pathlib, tempfile
        >>> from matplotlib.figure import Figure
        >>> from jaxcmle.apps.plotting import save_picture
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_picture(Figure().subplots(), pathlib.Path(folder, "empty.svg"))
        ...     [path.name for path in pathlib.Path(folder).iterdir()]
        ['empty.svg']
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise ValueError(f"a picture is written to a .png or .svg file, got {os.fspath(path)!r}")
    if not hasattr(picture, "figure"):
        raise TypeError(f"expected matplotlib axes or a figure, got {type(picture).__name__}")
    # Axes may be in a part of a figure; the figure of a figure is itself.
    figure = picture.figure.figure
    fixed = {"Date": None} if suffix == ".svg" else None
    with (
        _import("matplotlib").rc_context({"svg.hashsalt": "jaxcmle"}),
        atomic_path(path) as temporary,
    ):
        figure.savefig(temporary, format=suffix[1:], dpi=200, bbox_inches="tight", metadata=fixed)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError("install matplotlib: pip install 'jaxcmle[plot]'") from error


def _axes(ax: "Axes | None", height: float = 4.8) -> Any:
    if ax is not None:
        return ax
    # Through pyplot, so that notebooks show it.
    return _import("matplotlib.pyplot").subplots(figsize=(6.4, height), layout="constrained")[1]


def _clusters(x: Any, solution: Any, labels: Any, problem: Problem) -> _Clusters:
    """Return what is to be drawn, checked."""
    if not isinstance(solution, Solution | Mixture):
        raise TypeError(
            f"expected a jaxcmle.Solution or jaxcmle.Mixture, got {type(solution).__name__}"
        )
    problem = inputs.to_problem(problem)
    points, _ = inputs.to_points(x)
    n, d = points.shape
    mixture = solution.mixture if isinstance(solution, Solution) else solution
    mixture = inputs.to_mixture(mixture, d, points.dtype, problem, stack=False)
    if labels is None and isinstance(solution, Solution):
        labels = solution.labels
    elif labels is None:
        labels = assign(points, mixture, problem=problem)
    k = len(mixture.weights)
    labels = np.asarray(inputs.to_labels(labels, n, k))
    mixture = problem.constrained(mixture)
    return _Clusters(
        points=np.asarray(points, np.float64),
        labels=labels,
        weights=np.asarray(mixture.weights, np.float64),
        means=np.asarray(mixture.means, np.float64),
        sigmas=np.sqrt(np.asarray(mixture.variances, np.float64)),
        sizes=np.bincount(labels, minlength=k),
    )


def _feature_names(x: Any, names: Any, d: int) -> list[str]:
    if names is None:
        names = getattr(x, "columns", [f"feature {i}" for i in range(d)])
    if len(names) != d:
        raise ValueError(f"feature_names must name the {d} features of x, got {len(names)} names")
    return [str(name) for name in names]


def _projected(clusters: _Clusters) -> tuple[_Clusters, np.ndarray]:
    """Return the clusters on the two principal components, and their shares of the variance."""
    middle = clusters.points.mean(axis=0)
    # The triangle has the components of all points; that of a single one lacks a second row.
    triangle: Any = np.linalg.qr(clusters.points - middle, mode="r")
    padded = np.pad(triangle, ((0, 1), (0, 0)))
    _, lengths, components = np.linalg.svd(padded, full_matrices=False)
    plane = components[:2]
    # Else a picture could come out mirrored on another machine.
    plane *= np.sign(plane[[0, 1], np.abs(plane).argmax(axis=1)])[:, None]
    projected = clusters._replace(
        points=(clusters.points - middle) @ plane.T, means=(clusters.means - middle) @ plane.T
    )
    return projected, lengths[:2] ** 2 / ((lengths**2).sum() or 1)


def _draw_plane(axes: Any, clusters: _Clusters, drawn: np.ndarray) -> None:
    """Draw points and circles."""
    circle, line = _import("matplotlib.patches").Circle, _import("matplotlib.lines").Line2D
    looks = _looks(len(clusters.sizes))
    _draw_points(axes, clusters.points[drawn], clusters.labels[drawn], looks)
    exist = np.flatnonzero(clusters.weights > 0)
    for j in exist:
        for sigmas, style in ((1, "-"), (2, "--")):
            ring = circle(clusters.means[j], sigmas * clusters.sigmas[j], fill=False)
            ring.set(edgecolor=looks[j].dark, linestyle=style, path_effects=_outline(1.8))
            axes.add_patch(ring)
    if len(looks) > len(PALETTE):
        _write_numbers(axes, exist, clusters.means, "center")
    else:
        cross = {"marker": "+", "markersize": 9, "markeredgewidth": 1.5, "linestyle": ""}
        axes.plot(*clusters.means[exist].T, color="black", path_effects=_outline(3), **cross)
    # Where several axes share both scales, none can stretch one of them.
    shares = (axes.get_shared_x_axes(), axes.get_shared_y_axes())
    shared = all(len(group.get_siblings(axes)) > 1 for group in shares)
    axes.set_aspect("equal", adjustable="box" if shared else "datalim")
    axes.autoscale_view()
    lines = [line([], [], color="0.3", linestyle=style) for style in ("-", "--")]
    _draw_legend(axes, clusters, looks, lines)


def _draw_line(axes: Any, clusters: _Clusters, drawn: np.ndarray) -> None:
    """Draw weight times density of each cluster, and the points in a strip below."""
    looks = _looks(len(clusters.sizes))
    peaks = clusters.weights / (clusters.sigmas * math.sqrt(2 * math.pi))
    top = peaks.max()
    steps = np.linspace(-4, 4, 401)
    bell = np.exp(-(steps**2) / 2)
    exist = np.flatnonzero(clusters.weights > 0)
    for j in exist:
        at = clusters.means[j, 0] + clusters.sigmas[j] * steps
        axes.plot(at, peaks[j] * bell, color=looks[j].dark)
        for sigmas in (1, 2):
            within, fill = np.abs(steps) <= sigmas, {"alpha": 0.3, "linewidth": 0}
            axes.fill_between(at[within], peaks[j] * bell[within], color=looks[j].colour, **fill)
    depths = np.random.default_rng(0).uniform(-0.19, -0.05, len(drawn)) * top
    strip = np.column_stack([clusters.points[drawn, 0], depths])
    _draw_points(axes, strip, clusters.labels[drawn], looks)
    if len(looks) > len(PALETTE):
        _write_numbers(axes, exist, np.column_stack([clusters.means, peaks]), "bottom")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylim(-0.24 * top, 1.1 * top)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    patch = _import("matplotlib.patches").Patch
    _draw_legend(axes, clusters, looks, [patch(color="0.3", alpha=alpha) for alpha in (0.5, 0.3)])


def _draw_points(axes: Any, points: np.ndarray, labels: np.ndarray, looks: list[_Look]) -> None:
    n = len(points)
    size = float(np.clip(12_000 / n, 4, 25))
    for j, look in enumerate(looks):
        # Edges show light colours on white, and would darken a crowd.
        edge = {"edgecolor": look.dark, "linewidths": 0.3 if n < 2000 else 0}
        own = points[labels == j]
        axes.scatter(*own.T, s=size, marker=look.marker, color=look.colour, alpha=0.7, **edge)


def _write_numbers(axes: Any, numbers: np.ndarray, places: np.ndarray, va: str) -> None:
    style = {"ha": "center", "va": va, "fontsize": "x-small", "fontweight": "bold"}
    for j in numbers:
        axes.text(*places[j], str(j), path_effects=_outline(2), **style)


def _draw_legend(axes: Any, clusters: _Clusters, looks: list[_Look], sigmas: list[Any]) -> None:
    """Explain the looks beside the picture, where no point is hidden."""
    line = _import("matplotlib.lines").Line2D
    entries = {}
    if len(looks) <= len(PALETTE):
        for j, (look, size) in enumerate(zip(looks, clusters.sizes, strict=True)):
            marker = line([], [], linestyle="", marker=look.marker, color=look.colour)
            entries[f"cluster {j} ({size:,} points)"] = marker
    entries |= {"1 σ": sigmas[0], "2 σ": sigmas[1]}
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
    axes.legend(entries.values(), entries.keys(), frameon=False, fontsize="small", **place)


def _looks(k: int) -> list[_Look]:
    colours = _import("matplotlib.colors").to_rgba_array(PALETTE[:k])
    if k > len(PALETTE):
        # The lightest end is hard to see on white. Neighbours in shade differ in their markers.
        colours = _import("matplotlib").colormaps["viridis"](np.linspace(0, 0.92, k))
    return [
        _Look(tuple(colour[:3]), tuple(0.7 * colour[:3]), MARKERS[j % len(MARKERS)])
        for j, colour in enumerate(colours)
    ]


def _outline(width: float) -> list[Any]:
    """Return what keeps dark lines and letters legible on dark points."""
    return [_import("matplotlib.patheffects").withStroke(linewidth=width, foreground="white")]


def _mark(axes: Any, x: float, text: str) -> None:
    """Mark a place on the x axis by a line, with a text above the frame."""
    axes.axvline(x, color="black", linestyle="--", linewidth=1, path_effects=_outline(2))
    style = {"ha": "center", "va": "bottom", "fontsize": "small"}
    axes.text(x, 1.01, text, transform=axes.get_xaxis_transform(), **style)


def _spread(n: int) -> np.ndarray:
    """Return up to 1,000 of n places, evenly spread, with the first and the last."""
    return np.linspace(0, n - 1, min(n, FINEST)).round().astype(int)
