"""The pictures. Importing this module loads matplotlib; pyplot is not used, as its state is global."""

import math
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from PIL import Image

from server_app.report.compare import Group, mean_sd
from server_app.report.runs import SavedRun
from task.metrics import fold, forgetting_by_task

# Okabe and Ito's palette for all kinds of colour vision, without its yellow, which vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
INK, MUTED, FAINT = "#1c2430", "#5b6675", "#e3e7ec"
Styles = Mapping[str, dict[str, Any]]  # label of a group -> how its line is drawn

# DejaVu Sans comes with matplotlib; a letter that it lacks is drawn by the first of the others that is there and has it
FONTS = ["DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "IPAexGothic", "WenQuanYi Micro Hei", "Yu Gothic"]
FONTS += ["Microsoft YaHei", "Malgun Gothic", "Hiragino Sans", "PingFang SC", "Arial Unicode MS"]
rcParams["font.family"] = [name for name in FONTS if name in fontManager.get_font_names()]
warnings.filterwarnings("ignore", "Glyph", UserWarning)  # one for each letter that no font has: docs/guides/data.md


def png(figure: Figure) -> bytes:
    """The figure as a PNG file in full colour, at 160 dots per inch."""
    return _encode(_pixels(figure))


def small_png(figure: Figure) -> bytes:
    """The same with at most 256 colours: a third of the size. For curves, not for photographs."""
    return _encode(_pixels(figure).quantize(256, dither=Image.Dither.NONE))


def _pixels(figure: Figure) -> Image.Image:
    figure.set_dpi(160)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _encode(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format="png")
    return buffer.getvalue()


def make_figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    """A figure with title and subtitle; width and height in inches."""
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    head = f"{plain(title, int(9 * width))}\n"  # the empty second line makes the layout leave room for the subtitle
    figure.suptitle(head, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.text(0.012, 1 - 0.42 / height, plain(subtitle, int(13 * width)), va="center", fontsize=10, color=MUTED)
    return figure


def plain(text: str, width: int) -> str:
    """One line of at most ``width`` letters, in which a dollar sign does not begin a formula."""
    line = " ".join(text.split())
    return (line if len(line) <= width else line[: width - 1] + "…").replace("$", r"\$")


def run_figure(width: float, height: float, what: str, run: SavedRun, subtitle: str) -> Figure:
    """A figure of one run, of ``what`` it shows; the subtitle begins with the status of a run that has not finished."""
    status = "" if run.finished else f"{run.status.upper()} · "
    return make_figure(width, height, f"{run.title}: {what}", status + subtitle)


def accuracy_figure(run: SavedRun) -> Figure:
    """Accuracy in % after each task: a thick line over all classes seen so far, a thin one for each task."""
    outcome = {"final_average_accuracy": "final average {:.1f} %", "forgetting": "forgetting {:.1f} points"}
    reached = [words.format(100 * run.metrics[name]) for name, words in outcome.items() if name in run.metrics]
    reached += ["after some tasks on fewer test images"] * bool(run.incomplete)
    figure = run_figure(7.6, 4.8, "accuracy after each task", run, " · ".join([*run.facts, *reached]))
    axes = figure.subplots()
    _draw_tasks(axes, run)
    tasks = np.arange(1, len(run.seen) + 1)
    axes.plot(tasks, 100 * run.seen, color=INK, lw=2.8, marker="o", ms=6.5, label="all classes seen so far", zorder=4)
    axes.plot([], [], color=_shades(3)[1], lw=1.3, marker=".", label="one task, numbered where it was learned")
    _task_axes(axes, len(run.seen), np.concatenate([run.matrix.ravel(), run.seen]))
    axes.set_ylabel(f"{run.evaluated.capitalize()} accuracy, %")
    if (done := np.flatnonzero(np.isfinite(run.seen))).size:
        at = (done[-1] + 1, 100 * run.seen[done[-1]])
        label = axes.annotate(f"{at[1]:.1f}", at, xytext=(9, 0), textcoords="offset points", va="center")
        label.set(color=INK, fontweight="bold")
    if not len(run.matrix):
        axes.text(0.5, 0.5, "no task finished yet", transform=axes.transAxes, ha="center", color=MUTED, fontsize=13)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9.5)
    return figure


def _draw_tasks(axes: Axes, run: SavedRun) -> None:
    k = len(run.matrix)
    for j, colour in enumerate(_shades(k)):
        percent = 100 * run.matrix[j:, j]
        axes.plot(np.arange(j, k) + 1, percent, color=colour, lw=1.3, marker=".", ms=5, label="_")
        if j in numbered_tasks(len(run.seen)) and np.isfinite(percent[0]):
            offset = (0, -9 if percent[0] < 100 * run.seen[j] else 9)
            label = axes.annotate(f"{j + 1}", (j + 1, percent[0]), xytext=offset, textcoords="offset points")
            label.set(color=INK, fontsize=9, ha="center", va="center", zorder=5)
            label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def _shades(count: int) -> list[Any]:
    """One colour for each task in their order; the light end of viridis, unreadable on white, is left out."""
    return [colormaps["viridis"](0.7 * t / max(1, count - 1)) for t in range(count)]


def numbered_tasks(num_tasks: int) -> list[int]:
    """Tasks, from 0, whose number is written: up to 25 all, else the first and every fifth."""
    return [t for t in range(num_tasks) if num_tasks <= 25 or t == 0 or t % 5 == 4]


def matrix_figure(run: SavedRun) -> Figure:
    """The accuracy matrix in % as a heat map, and below it how much of each task was forgotten."""
    count, k = len(run.seen), len(run.matrix)
    side = min(10.0, max(5.0, 2.2 + 0.56 * count))
    figure = run_figure(
        side + 0.9, side + 0.5, "forgetting", run, f"{run.evaluated} accuracy on each task after each task, %"
    )
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[max(3, count), 1])
    full = np.full((count, count), np.nan)
    full[:k, :k] = 100 * run.matrix
    image = _heat(top, full, "cividis", 0, 100)  # the same colours in the pictures of all runs
    top.set_ylabel("After learning task")
    top.tick_params(labelbottom=False)
    if k < count:
        top.axhspan(k - 0.5, count - 0.5, fc="#f4f5f7", ec="#c9cfd8", hatch="///", lw=0)
        label = top.text((count - 1) / 2, (k + count - 1) / 2, "not done", ha="center", va="center", color=MUTED)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 2.5})
    _draw_forgotten(bottom, run)
    bottom.set_xlabel("Tested on task")
    bar = figure.colorbar(image, ax=[top, bottom], fraction=0.05, pad=0.02, format="{x:g}")
    bar.ax.tick_params(length=0, labelcolor=INK)
    bar.ax.spines[:].set_visible(False)
    return figure


def _draw_forgotten(axes: Axes, run: SavedRun) -> None:
    """Best earlier minus final accuracy of each task in points; the last task stays empty."""
    forgotten = np.full((1, len(run.seen)), np.nan)
    unknown = run.gaps or run.untested_tasks
    if any(run.samples) and not unknown:
        matrix, kept = fold(run.matrix, run.samples)
        forgotten[0, kept[:-1]] = 100 * forgetting_by_task(matrix)
    _heat(axes, forgotten, "OrRd", 0, max(25.0, np.nanmax(forgotten, initial=0)))
    if np.isnan(forgotten).all():
        text = "not known" if unknown else "no earlier task yet"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)
    axes.set_yticks([0], ["forgotten,\npoints"])


def _heat(axes: Axes, percent: np.ndarray, colours: str, low: float, high: float, small: bool = False) -> Any:
    """Draw [rows, tasks] with its numbers; NaN stays empty. Beyond 25 tasks the numbers would not fit."""
    image = axes.imshow(percent, cmap=colours, vmin=low, vmax=high, aspect="auto")
    rows, tasks = percent.shape
    size, digits = (9.5, 1) if tasks <= 12 and not small else (8, 0)
    if tasks <= 25:
        write_numbers(axes, image, np.isfinite(percent), digits, size)
    for axis, count in ((axes.xaxis, tasks), (axes.yaxis, rows)):
        axis.set_ticks(numbered_tasks(count), [str(t + 1) for t in numbered_tasks(count)])
        axis.set_ticks(np.arange(count + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", lw=1.2)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=INK, which="both")
    return image


def write_numbers(axes: Axes, image: Any, cells: np.ndarray, digits: int, size: float) -> None:
    """Write the values of some cells, [rows, columns] of bool, on a heat map, in black or white."""
    for i, j in np.argwhere(cells):
        value = image.get_array()[i, j]
        red, green, blue, _ = image.cmap(image.norm(value))
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        axes.text(j, i, f"{value:.{digits}f}", ha="center", va="center", color=ink, fontsize=size)


def comparison_figure(groups: Sequence[Group]) -> Figure:
    """Accuracy in % on all classes seen so far after each task: mean over seeds, band of one standard deviation.

    One panel for each setting. A group without a finished run is dotted, since its average may rest on few tasks.
    """
    subtitle = over_seeds(groups)
    subtitle += "" if all(group.finished for group in groups) else "; dotted: unfinished"
    settings, styles = list(dict.fromkeys(group.setting for group in groups)), group_styles(groups)
    width = 2.6 + (5.6 if len(settings) == 1 else 4.4 * len(settings))
    figure = make_figure(width, max(4.8, 0.9 + 0.21 * len(styles)), "Accuracy on all classes seen so far", subtitle)
    for setting, axes in zip(settings, grid(figure, len(settings), len(settings)), strict=True):
        axes.set_title(plain(setting, 40), loc="left", fontsize=10.5, color=INK)
        shown = [group for group in groups if group.setting == setting]
        band = min(0.16, 1.2 / len(shown))  # fainter with more groups, so that lines stay visible
        for group in shown:
            _draw_curve(axes, group, styles[group.label], band)
        seen = [run.seen for group in shown for run in group.runs]
        _task_axes(axes, max(map(len, seen)), np.concatenate(seen))
    kinds = sorted({run.evaluated for group in groups if not group.theirs for run in group.runs}) or ["test"]
    figure.axes[0].set_ylabel(f"{' or '.join(kinds).capitalize()} accuracy, %")
    handles = [Line2D([], [], label=plain(label, 60), **styles[label]) for label in _best_first(groups)]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9.5, handlelength=3.2)
    return figure


def _best_first(groups: Sequence[Group]) -> list[str]:
    """Labels in the order in which curves end, so that a legend of many is found again in the picture."""
    ends: dict[str, float] = {}
    for group in groups:
        end = float(np.nan_to_num(group.mean_sd("last_accuracy")[0], nan=-1))
        ends[group.label] = max(end, ends.get(group.label, end))
    return sorted(ends, key=lambda label: -ends[label])


def over_seeds(groups: Sequence[Group]) -> str:
    """What the points of a comparison are, in words: a group of one seed has no standard deviation."""
    seeds = {len(group.finished or group.runs) for group in groups}
    if seeds == {1}:
        return "one seed each"
    return "mean and standard deviation over seeds" + ("; one seed where none is drawn" if 1 in seeds else "")


def grid(figure: Figure, count: int, columns: int) -> list[Axes]:
    """Make ``count`` panels in ``columns`` columns, row by row; the last row may have fewer."""
    panels = figure.subplots(math.ceil(count / columns), columns, squeeze=False).ravel()
    for axes in panels[count:]:
        axes.remove()
    return list(panels[:count])


def _draw_curve(axes: Axes, group: Group, style: dict[str, Any], band: float) -> None:
    curves = 100 * np.stack([run.seen for run in group.finished or group.runs])
    done = np.flatnonzero(np.isfinite(curves).any(axis=0))
    mean, sd = np.array([mean_sd(curves[:, t]) for t in done]).reshape(-1, 2).T
    axes.plot(done + 1, mean, **style if group.finished else style | {"linestyle": ":"})
    axes.fill_between(done + 1, *np.clip([mean - sd, mean + sd], 0, 100), color=style["color"], alpha=band, lw=0)


def matrices_figure(groups: Sequence[Group]) -> Figure:
    """The accuracy matrix in % of each group with a finished run, averaged over its seeds, all in the same colours."""
    done = [group for group in groups if group.finished]
    several = len({group.setting for group in done}) > 1
    side = min(5.0, max(2.4, 0.3 * max(len(group.matrix) for group in done)))
    columns = min(len(done), int(12 / side))
    rows = math.ceil(len(done) / columns)
    width, height = max(5.6, side * columns), 0.9 + (side + (0.4 if several else 0.2)) * rows
    subtitle = "row: tasks learned; column: task tested; mean over seeds, %"
    figure = make_figure(width, height, "Accuracy on each task after each task", subtitle)
    limits = _limits(np.concatenate([group.matrix.ravel() for group in done]))
    for axes, group in zip(grid(figure, len(done), columns), done, strict=True):
        _heat(axes, 100 * group.matrix, "cividis", *limits, small=True)
        names = [group.label, group.setting] if several else [group.label]
        axes.set_title("\n".join(plain(name, int(11 * side)) for name in names), fontsize=8.5, color=INK)
    return figure


def group_styles(groups: Sequence[Group]) -> Styles:
    """Colour, marker and line of each label: the same ones in every picture of the same groups."""
    styles = {}
    for i, label in enumerate(dict.fromkeys(group.label for group in groups)):
        again, n = divmod(i, len(COLOURS))
        marker = MARKERS[(n + again) % len(MARKERS)]  # points, which have no line, must differ when a colour returns
        line = ("-", "--", "-.")[again % 3]
        styles[label] = {"color": COLOURS[n], "marker": marker, "linestyle": line, "lw": 2, "ms": 5.5}
    return styles


def _task_axes(axes: Axes, num_tasks: int, fractions: np.ndarray) -> None:
    low, high = _limits(fractions)
    margin = 0.04 * (high - low)
    axes.set_xlim(0.9 - 0.03 * (num_tasks - 1), num_tasks + 0.1 + 0.06 * (num_tasks - 1))
    axes.set_ylim(low - margin, high + 1.5 * margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    axes.set_xlabel("Tasks learned")
    style_axes(axes)


def _limits(fractions: np.ndarray) -> tuple[float, float]:
    """Range in % that shows all values but NaN: multiples of 5, not wider than needed; 0 to 100 without any value."""
    percent = 100 * fractions[np.isfinite(fractions)]
    if not percent.size:
        return 0.0, 100.0
    return max(0.0, 5 * math.floor((percent.min() - 1) / 5)), min(100.0, 5 * math.ceil((percent.max() + 1) / 5))


def style_axes(axes: Axes) -> None:
    """A faint grid behind the data, two spines, dark labels."""
    axes.grid(True, color=FAINT, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(color=MUTED, labelcolor=INK, which="both")
