"""What pictures are made of: points and clusters as plain arrays, their looks, and strokes.

Matplotlib is imported with the first picture, by `import_late`.
"""

import importlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxcmle.problem import inputs
from jaxcmle.problem.objective import assign, point_costs
from jaxcmle.problem.types import Mixture, Problem, Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "BLUE",
    "STEPS",
    "VERMILLION",
    "Clusters",
    "Look",
    "draw_borders",
    "draw_line",
    "draw_plane",
    "import_late",
    "mark",
    "project",
    "spread",
    "to_axes",
    "to_clusters",
    "to_feature_names",
    "to_looks",
    "to_margins",
]

BLUE, VERMILLION = "#0072B2", "#D55E00"
# Okabe and Ito's, with what is hard to see on white last.
PALETTE = (BLUE, "#E69F00", "#009E73", VERMILLION, "#CC79A7", "#56B4E9", "#000000", "#F0E442")
MARKERS = "os^DvPX*"
# More bars, or more rows of a matrix, are too fine to see.
FINEST = 1000
# A report holds until the next one.
STEPS = {"drawstyle": "steps-post", "marker": "o", "markersize": 3}


class Clusters(NamedTuple):
    """What pictures need to know of points and clusters: NumPy arrays in float64."""

    points: np.ndarray  # [n, d]
    labels: np.ndarray  # [n]
    weights: np.ndarray  # [k]
    means: np.ndarray  # [k, d]
    sigmas: np.ndarray  # [k]
    sizes: np.ndarray  # [k], in points


class Look(NamedTuple):
    """How a cluster is told from the others; the dark shade is for its lines."""

    colour: tuple[float, ...]
    dark: tuple[float, ...]
    marker: str


def import_late(module: str) -> Any:
    """Return a module of matplotlib, or raise with how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError("install matplotlib: pip install 'jaxcmle[plot]'") from error


def to_axes(ax: "Axes | None", height: float = 4.8) -> Any:
    """Return where to draw: the axes that are given, or those of a new figure."""
    if ax is not None:
        return ax
    # Through pyplot, so that notebooks show it.
    return import_late("matplotlib.pyplot").subplots(figsize=(6.4, height), layout="constrained")[1]


def to_clusters(x: Any, solution: Any, labels: Any, problem: Problem) -> Clusters:
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
    return Clusters(
        points=np.asarray(points, np.float64),
        labels=labels,
        weights=np.asarray(mixture.weights, np.float64),
        means=np.asarray(mixture.means, np.float64),
        sigmas=np.sqrt(np.asarray(mixture.variances, np.float64)),
        sizes=np.bincount(labels, minlength=k),
    )


def to_margins(
    x: Any, solution: Solution | Mixture, labels: np.ndarray, problem: Problem
) -> np.ndarray:
    """Return what every point would cost more in the best other cluster, `[n]`."""
    mixture = solution.mixture if isinstance(solution, Solution) else solution
    costs = np.array(point_costs(x, mixture, problem=problem), np.float64)
    rows = np.arange(len(costs))
    own = costs[rows, labels]
    costs[rows, labels] = np.inf
    return costs.min(axis=1) - own


def to_feature_names(x: Any, names: Any, d: int) -> list[str]:
    """Return the names for the axes, checked; by default the columns of a DataFrame."""
    if names is None:
        names = getattr(x, "columns", [f"feature {i}" for i in range(d)])
    if len(names) != d:
        raise ValueError(f"feature_names must name the {d} features of x, got {len(names)} names")
    return [str(name) for name in names]


def project(clusters: Clusters) -> tuple[Clusters, np.ndarray]:
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


def draw_plane(axes: Any, clusters: Clusters, drawn: np.ndarray) -> None:
    """Draw points and circles."""
    circle, line = import_late("matplotlib.patches").Circle, import_late("matplotlib.lines").Line2D
    looks = to_looks(len(clusters.sizes))
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


def draw_line(axes: Any, clusters: Clusters, drawn: np.ndarray) -> None:
    """Draw weight times density of each cluster, and the points in a strip below."""
    looks = to_looks(len(clusters.sizes))
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
    patch = import_late("matplotlib.patches").Patch
    _draw_legend(axes, clusters, looks, [patch(color="0.3", alpha=alpha) for alpha in (0.5, 0.3)])


def _draw_points(axes: Any, points: np.ndarray, labels: np.ndarray, looks: list[Look]) -> None:
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


def _draw_legend(axes: Any, clusters: Clusters, looks: list[Look], sigmas: list[Any]) -> None:
    """Explain the looks beside the picture, where no point is hidden."""
    line = import_late("matplotlib.lines").Line2D
    entries = {}
    if len(looks) <= len(PALETTE):
        for j, (look, size) in enumerate(zip(looks, clusters.sizes, strict=True)):
            marker = line([], [], linestyle="", marker=look.marker, color=look.colour)
            entries[f"cluster {j} ({size:,} points)"] = marker
    entries |= {"1 σ": sigmas[0], "2 σ": sigmas[1]}
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
    axes.legend(entries.values(), entries.keys(), frameon=False, fontsize="small", **place)


def draw_borders(axes: Any, labels: np.ndarray) -> None:
    """Draw lines between clusters in a matrix of points by cluster, and write their numbers."""
    present, sizes = np.unique(labels, return_counts=True)
    ends = np.cumsum(sizes)
    for end in ends[:-1]:
        axes.axhline(end, color="black", linewidth=0.6)
        axes.axvline(end, color="black", linewidth=0.6)
    # The numbers of narrow clusters would run into each other.
    wide = sizes > 0.03 * len(labels)
    ticks, names = (ends - sizes / 2)[wide], present[wide]
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    axes.tick_params(length=0)


def to_looks(k: int) -> list[Look]:
    """Return looks for clusters that differ without colours, too."""
    colours = import_late("matplotlib.colors").to_rgba_array(PALETTE[:k])
    if k > len(PALETTE):
        # The lightest end is hard to see on white. Neighbours in shade differ in their markers.
        colours = import_late("matplotlib").colormaps["viridis"](np.linspace(0, 0.92, k))
    return [
        Look(tuple(colour[:3]), tuple(0.7 * colour[:3]), MARKERS[j % len(MARKERS)])
        for j, colour in enumerate(colours)
    ]


def _outline(width: float) -> list[Any]:
    """Return what keeps dark lines and letters legible on dark points."""
    return [import_late("matplotlib.patheffects").withStroke(linewidth=width, foreground="white")]


def mark(axes: Any, x: float, text: str) -> None:
    """Mark a place on the x axis by a line, with a text above the frame."""
    axes.axvline(x, color="black", linestyle="--", linewidth=1, path_effects=_outline(2))
    style = {"ha": "center", "va": "bottom", "fontsize": "small"}
    axes.text(x, 1.01, text, transform=axes.get_xaxis_transform(), **style)


def spread(n: int) -> np.ndarray:
    """Return up to 1,000 of n places, evenly spread, with the first and the last."""
    return np.linspace(0, n - 1, min(n, FINEST)).round().astype(int)
