"""Accuracy against what it costs: one point for each group, the Pareto front, and a label at each point."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, NullFormatter

from server_app.report.compare import Group, pareto_front
from server_app.report.figures import INK, MUTED, grid, group_styles, make_figure, over_seeds, plain, style_axes
from server_app.report.labels import place_labels

_RADIUS = 4.5  # of a marker, in points


def communication_figure(groups: Sequence[Group]) -> Figure | None:
    """Final average accuracy in % against the traffic of the whole run in MB; None if no run has recorded any."""
    subtitle = f"all clients, both directions, whole run; {over_seeds(groups)}"
    costs = [group.megabytes for group in groups]
    return _tradeoff_figure(groups, costs, "Final average accuracy against traffic", subtitle, "Traffic, MB")


def core_minutes_figure(groups: Sequence[Group]) -> Figure | None:
    """Final average accuracy in % against the core-minutes of the whole run; None if no run has recorded any."""
    finished = [group for group in groups if group.finished]
    by_clock = [group for group in finished if not group.has_core_time and group.core_minutes[0] > 0]
    subtitle = f"all processor cores together, whole run; {over_seeds(groups)}"
    if by_clock:
        which = "all" if len(by_clock) == len(finished) else ", ".join(dict.fromkeys(g.label for g in by_clock))
        subtitle = f"minutes of the clock, where no processor time was recorded: {which}"
    costs = [group.core_minutes for group in groups]
    return _tradeoff_figure(groups, costs, "Final average accuracy against computation", subtitle, "Core-minutes")


def _tradeoff_figure(
    groups: Sequence[Group], costs: Sequence[tuple[float, float]], title: str, subtitle: str, axis: str
) -> Figure | None:
    styles = group_styles(groups)
    shown = [(g, c, g.mean_sd("final_average_accuracy")) for g, c in zip(groups, costs, strict=True) if c[0] > 0]
    shown = [point for point in shown if not math.isnan(point[2][0])]
    settings = list(dict.fromkeys(group.setting for group, _, _ in shown))
    if not settings:
        return None
    columns = min(2, len(settings))
    rows = math.ceil(len(settings) / columns)
    figure = make_figure(9.6 if columns == 1 else 13.6, 0.9 + (5.9 if columns == 1 else 5.0) * rows, title, subtitle)
    panels, drawn = grid(figure, len(settings), columns), []
    for axes, setting in zip(panels, settings, strict=True):
        points = [point for point in shown if point[0].setting == setting]
        _draw_points(axes, points, styles)
        _cost_axes(axes, axis)
        axes.set_title(plain(setting, 60), loc="left", fontsize=10.5, color=INK)
        drawn.append((axes, points))
    for axes in panels[::columns]:
        axes.set_ylabel("Final average accuracy, %")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # labels are placed by pixels
    for axes, points in drawn:
        _draw_labels(axes, points, styles)
    return figure


def _draw_points(axes: Axes, points: Sequence[tuple[Group, Any, Any]], styles: Any) -> None:
    for group, (x, x_sd), (y, y_sd) in points:
        style = styles[group.label] | {"linestyle": "none", "ms": 2 * _RADIUS, "zorder": 3}
        fill = {"mfc": "white", "mew": 1.8} if group.theirs or group.pooled else {"mec": "white", "mew": 0.8}
        spread = {"xerr": np.nan_to_num(min(x_sd, 0.9 * x)), "yerr": 100 * np.nan_to_num(y_sd)}
        axes.errorbar(x, 100 * y, **spread, **style | fill, elinewidth=1, ecolor=(style["color"], 0.45))
    able = [(x, 100 * y) for group, (x, _), (y, _) in points if not group.pooled]
    front = np.array([able[i] for i in pareto_front(able)])
    notes = []
    if len(front) > 1:
        axes.step(*front.T, where="post", color=INK, lw=1.2, alpha=0.45, zorder=1.5, gid="front")
        notes += ["line: Pareto front"]
    if any(group.theirs or group.pooled for group, _, _ in points):
        notes += ["hollow: other people's code, or all images in one place"]
    axes.annotate(
        "; ".join(notes), (1, 0.01), xycoords="axes fraction", ha="right", va="bottom", fontsize=8, color=MUTED
    )


def _draw_labels(axes: Axes, points: Sequence[tuple[Group, Any, Any]], styles: Any) -> None:
    pixels = axes.figure.dpi / 72  # per point of type
    where = axes.transData.transform([(x, 100 * y) for _, (x, _), (y, _) in points])
    texts = [axes.text(0, 0, plain(group.label, 40), fontsize=8.5, color=INK, zorder=5) for group, _, _ in points]
    for text in texts:
        text.set_path_effects([withStroke(linewidth=2.2, foreground="white")])
    sizes = np.array([text.get_window_extent().size for text in texts])
    box = axes.get_window_extent()
    corners = place_labels(where, sizes, (*box.p0, *box.p1), _RADIUS * pixels)
    inverse = axes.transData.inverted()
    for text, corner, size, point, (group, _, _) in zip(texts, corners, sizes, where, points, strict=True):
        text.set(position=inverse.transform(corner), va="bottom", ha="left")
        nearest = np.clip(point, corner, corner + size)
        if np.hypot(*(nearest - point)) > 2.2 * _RADIUS * pixels:
            ends = inverse.transform([nearest, point])
            axes.plot(
                *ends.T, color=styles[group.label]["color"], lw=0.7, alpha=0.8, zorder=2.5, scalex=False, scaley=False
            )


def _cost_axes(axes: Axes, label: str) -> None:
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.5, high * 2.2)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom - 0.07 * (top - bottom), top + 0.1 * (top - bottom))
    axes.set_yticks([tick for tick in axes.get_yticks() if bottom <= tick <= min(100, axes.get_ylim()[1])])
    decades = math.log10(high / low)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 3 else (1.0,)))
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"{label} (log scale)")
    style_axes(axes)
