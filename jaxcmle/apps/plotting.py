"""Pictures of clusters, of a search, of a proof, and of how far an answer can be trusted.

Every function draws onto the axes it is given, or onto a new figure, and returns the axes. Needs
matplotlib (`pip install 'jaxcmle[plot]'`), which is imported with the first picture.

No picture relies on colour alone: up to eight clusters have the colours of Okabe and Ito
(https://jfly.uni-koeln.de/color/), more have shades of viridis, and all have markers or numbers.
"""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxcmle.apps import drawing
from jaxcmle.atomic import atomic_path
from jaxcmle.problem import inputs
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
    clusters = drawing.to_clusters(x, solution, labels, problem)
    n, d = clusters.points.shape
    names = drawing.to_feature_names(x, feature_names, d)
    limit = inputs.to_whole(max_points, "max_points")
    drawn = np.arange(n) if n <= limit else np.random.default_rng(0).choice(n, limit, False)
    axes = drawing.to_axes(ax)
    notes = []
    if d == 1:
        names.append("density")
        drawing.draw_line(axes, clusters, drawn)
    else:
        if d > 2:
            clusters, shares = drawing.project(clusters)
            names = [
                f"principal component {i} ({100 * share:.0f} % of the variance)"
                for i, share in enumerate(shares, start=1)
            ]
            notes.append(f"{100 * shares.sum():.0f} % of the variance is shown")
        drawing.draw_plane(axes, clusters, drawn)
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
    axes = drawing.to_axes(ax)
    rounds, costs = np.array(kept, dtype=float).T
    axes.plot(rounds, costs, color=drawing.BLUE, **drawing.STEPS)
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
    axes = drawing.to_axes(ax)
    cells, gaps = np.array(kept, dtype=float).T
    bottom = min((value for value in (*gaps, limit) if value > 0), default=1.0) / 10
    axes.plot(cells, np.maximum(gaps, bottom), color=drawing.BLUE, **drawing.STEPS)
    axes.set(xlabel="cells looked at", ylabel="gap (nats per point)", yscale="log")
    words: dict[str, Any] = {"textcoords": "offset points", "fontsize": "small"}
    if gaps.min() == 0:
        at = (cells[gaps.argmin()], bottom)
        axes.annotate("0: optimal", at, (-7, 0), ha="right", va="center", **words)
    if 0 < limit < math.inf:
        axes.axhline(limit, color=drawing.VERMILLION, linestyle="--")
        at = (cells[0], limit)
        axes.annotate(f"tolerance {limit:g}", at, (0, 4), color=drawing.VERMILLION, **words)
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
    axes = drawing.to_axes(ax)
    for name in dict.fromkeys((table.criterion, "icl", "bic")):
        values = np.asarray(getattr(table, name), dtype=float)
        values = np.where(np.isfinite(values), values, np.nan)
        if name == table.criterion:
            style: dict[str, Any] = {
                "color": drawing.BLUE,
                "linewidth": 2,
                "marker": "o",
                "zorder": 3,
            }
            known = np.isfinite(values[table.best])
        else:
            style = {"color": "0.45", "linewidth": 1, "marker": "s", "linestyle": "--"}
        axes.plot(numbers, values, label=name.upper(), markersize=5, **style)
    if known:
        drawing.mark(axes, numbers[table.best], f"best: K = {numbers[table.best]}")
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
    clusters = drawing.to_clusters(x, solution, None, problem)
    k = len(clusters.sizes)
    if k == 1:
        raise ValueError("a margin compares two clusters, and this solution has only one")
    margins = drawing.to_margins(x, solution, clusters.labels, problem)
    # Infinite where no other cluster has any weight.
    finite = margins[np.isfinite(margins)]
    most = finite.max(initial=0)
    groups = [np.sort(np.minimum(margins[clusters.labels == j], most))[::-1] for j in range(k)]
    axes = drawing.to_axes(ax, height=max(4.8, 1.2 + 0.24 * k))
    for j, (group, look) in enumerate(zip(groups, drawing.to_looks(k), strict=True)):
        values = group[drawing.spread(len(group))]
        edges = np.linspace(j - 0.4, j + 0.4, len(values) + 1)
        axes.stairs(values, edges, orientation="horizontal", fill=True, color=look.colour)
    axes.axvline(0, color="black", linewidth=0.8)
    if len(finite):
        drawing.mark(axes, finite.mean(), f"mean {finite.mean():.3g}")
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
    drawn = order[drawing.spread(n)]
    axes = drawing.to_axes(ax)
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
    drawing.draw_borders(axes, labels)
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
        drawing.import_late("matplotlib").rc_context({"svg.hashsalt": "jaxcmle"}),
        atomic_path(path) as temporary,
    ):
        figure.savefig(temporary, format=suffix[1:], dpi=200, bbox_inches="tight", metadata=fixed)
