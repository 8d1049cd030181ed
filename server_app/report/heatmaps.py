"""Pictures of classes, clients and tasks: confusion, images of each client, federated bias."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from server_app.report.figures import COLOURS, INK, MUTED, numbered_tasks, plain, run_figure, style_axes, write_numbers
from server_app.report.runs import SavedRun

NAMED = 30  # rows or columns that still have room for their names
WRITTEN = 20  # rows and columns whose cells still have room for a number


def recorded_figures(run: SavedRun) -> dict[str, Figure]:
    """The pictures below by file name, as far as the run has recorded their data."""
    figures: dict[str, Figure] = {}
    if run.confusion.size and any(run.tasks[: len(run.matrix)]):
        figures["confusion.png"] = confusion_figure(run)
    if run.client_counts and any(run.tasks):
        figures["clients.png"] = clients_figure(run)
    if _measured_biases(run):
        figures["federated_bias.png"] = bias_figure(run)
    return figures


def confusion_figure(run: SavedRun) -> Figure:
    """Share of the test images of each seen class (row) that were predicted as each class (column), in %.

    Classes are in order of arrival.
    """
    tasks = run.tasks[: len(run.matrix)]
    order = [c for classes in tasks for c in classes]
    counts = run.confusion[np.ix_(order, order)]
    percent = 100 * counts / counts.sum(axis=1, keepdims=True).clip(1)
    side = min(10.0, 4.8 + 0.26 * len(order))
    after = f"after task {len(tasks)}: % of the images of a class (row) that were predicted as a class (column)"
    figure = run_figure(side + 2.0, side + 0.8, "confusion", run, after)
    axes = figure.subplots()
    _draw_counts(axes, percent, 100, "% of the class, square root scale")
    _name_classes(axes.xaxis, run, tasks)
    _name_classes(axes.yaxis, run, tasks)
    _separate(axes, tasks, both=True)
    axes.set_xlabel("Predicted; lines part the tasks")
    axes.set_ylabel("True")
    return figure


def clients_figure(run: SavedRun) -> Figure:
    """Training images of each client (row) by class (column), and their sum at the right."""
    order = [c for classes in run.tasks for c in classes]
    counts = np.array(list(run.client_counts.values()))[:, order]
    clients, classes = counts.shape
    width, height = min(12.0, 6.8 + 0.2 * classes), min(11.0, 3.6 + 0.2 * clients)
    subtitle = "training images that a client may learn from, by class"
    figure = run_figure(width, height, "who holds what", run, subtitle)
    axes, total = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    _draw_counts(axes, counts, counts.max(initial=1), "images, square root scale", beside=total)
    if classes <= NAMED:
        _name_classes(axes.xaxis, run, run.tasks)
    else:
        axes.set_xticks([])
    axes.set_xlabel("Class, in order of arrival")
    above = axes.secondary_xaxis("top")
    above.set_xticks(*_task_ticks(run.tasks, "task " if len(run.tasks) <= 10 else ""))
    above.tick_params(length=0, labelcolor=INK, labelsize=8.5)
    above.spines[:].set_visible(False)
    _separate(axes, run.tasks)
    step = -(-clients // NAMED)
    names = [plain(name, 18) for name in run.client_counts]
    axes.set_yticks(range(0, clients, step), names[::step])
    total.barh(range(clients), counts.sum(axis=1), color=COLOURS[0], height=0.8)
    total.set_xlabel("images, all tasks")
    total.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    style_axes(total)
    total.tick_params(left=False, labelsize=8.5)
    return figure


def bias_figure(run: SavedRun) -> Figure:
    """Federated bias by task: response entropy of local models, and the distance between their prototypes."""
    drawings = _measured_biases(run)
    subtitle = "local models of a task's last round, before aggregation"
    figure = run_figure(max(7.0, 4.8 * len(drawings)), 4.4, "federated bias", run, subtitle)
    for axes, draw in zip(figure.subplots(1, len(drawings), squeeze=False)[0], drawings, strict=True):
        draw(axes, run)
        axes.set_xlim(0.6, len(run.seen) + 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
        axes.set_xlabel("Task")
        style_axes(axes)
    return figure


def _measured_biases(run: SavedRun) -> list[Callable[[Axes, SavedRun], None]]:
    measured = {_draw_entropies: any(map(len, run.entropies)), _draw_distances: np.isfinite(run.distances).any()}
    return [draw for draw, recorded in measured.items() if recorded]


def _draw_entropies(axes: Axes, run: SavedRun) -> None:
    """Entropy of each local model's answers as a share of the largest possible, and the mean."""
    seen = np.cumsum([len(classes) for classes in run.tasks])
    tasks = enumerate(zip(run.entropies, seen, strict=True), 1)
    measured = [(t, entropies / np.log(classes)) for t, (entropies, classes) in tasks if classes > 1]  # ln 1 = 0
    for t, shares in measured:
        axes.scatter(np.full(len(shares), t), shares, color=COLOURS[0], s=14, alpha=0.45, lw=0)
    means = [(t, shares.mean()) for t, shares in measured if len(shares)]
    axes.scatter([], [], color=COLOURS[0], s=14, alpha=0.45, lw=0, label="one local model")
    axes.plot([t for t, _ in means], [m for _, m in means], color=INK, lw=2.2, marker="o", ms=5.5, label="mean")
    axes.axhline(1, color=MUTED, lw=1, ls=":")
    axes.set_ylim(-0.03, 1.06)
    axes.set_ylabel("Entropy of answers / ln(seen classes)")
    axes.set_title("1: all classes answered alike; 0: one class only", loc="left", fontsize=9.5, color=MUTED)
    axes.legend(frameon=False, fontsize=9, loc="lower left")


def _draw_distances(axes: Axes, run: SavedRun) -> None:
    axes.plot(range(1, len(run.distances) + 1), run.distances, color=COLOURS[1], lw=2.2, marker="o", ms=5.5)
    axes.set_ylim(0, 1.12 * np.nanmax(run.distances) or 1)
    axes.set_ylabel("Distance of local prototypes")
    axes.set_title("same class, different clients; mean over pairs", loc="left", fontsize=9.5, color=MUTED)


def _draw_counts(axes: Axes, values: np.ndarray, largest: float, label: str, beside: Axes | None = None) -> None:
    """A heat map of [rows, columns] from 0, which stays white, to ``largest``, on a square root scale."""
    image = axes.imshow(values, cmap="Blues", norm=PowerNorm(0.5, 0, largest), aspect="auto", interpolation="nearest")
    if max(values.shape) <= WRITTEN:
        write_numbers(axes, image, values >= 0.5, digits=0, size=8)
    panels = [axes, beside] if beside else axes
    ticks = MaxNLocator(nbins=6, integer=True)
    bar = axes.figure.colorbar(image, ax=panels, fraction=0.05, pad=0.02, aspect=40, ticks=ticks, format="{x:g}")
    bar.set_label(label, color=INK)
    for panel in (axes, bar.ax):
        panel.tick_params(length=0, labelcolor=INK, labelsize=8.5)
        panel.spines[:].set_color("#c9cfd8")


def _name_classes(axis: Any, run: SavedRun, tasks: Sequence[Sequence[int]]) -> None:
    """Names of up to 30 classes, turned below a picture if they are long; of more, the numbers of their tasks."""
    order = [c for classes in tasks for c in classes]
    if len(order) <= NAMED:
        names = [plain(str(run.results["class_names"][c]), 20) for c in order]
        turned = axis.axis_name == "x" and max(map(len, names)) > 2
        axis.set_ticks(range(len(order)), names, rotation=90 if turned else 0)
    else:
        axis.set_ticks(*_task_ticks(tasks, "task "))


def _task_ticks(tasks: Sequence[Sequence[int]], word: str) -> tuple[list[float], list[str]]:
    """The middle of each task's classes, and ``word`` with the task's number."""
    sizes = np.array([len(classes) for classes in tasks])
    middles = np.cumsum(sizes) - sizes / 2 - 0.5
    shown = [t for t in numbered_tasks(len(tasks)) if sizes[t]]  # a task may bring no class
    return [middles[t] for t in shown], [f"{word}{t + 1}" for t in shown]


def _separate(axes: Axes, tasks: Sequence[Sequence[int]], both: bool = False) -> None:
    """Lines between tasks."""
    for position in np.cumsum([len(classes) for classes in tasks])[:-1] - 0.5:
        axes.axvline(position, color=MUTED, lw=0.7)
        if both:
            axes.axhline(position, color=MUTED, lw=0.7)
