"""The reports as HTML files that refer to nothing outside themselves. Importing this module loads Jinja."""

import inspect
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from server_app.report.compare import NOTE, Group, comparison_table
from server_app.report.runs import SavedRun, flat, is_number
from server_app.report.templates import TEMPLATES
from task.metrics import METRICS

PICTURES = {
    "accuracy.png": "Accuracy after each task",
    "forgetting.png": "What was forgotten",
    "matrices.png": "Accuracy matrices",
    "confusion.png": "Confusion of classes",
    "clients.png": "Training images of each client",
    "federated_bias.png": "How local models differ",
    "communication.png": "Accuracy against traffic",
    "core_minutes.png": "Accuracy against computation",
}


ROUNDS = (
    "Idle: clients without images of the task. Trained: an answer of a client was used. "
    "Dropped: the new model could not be used, and the one before was kept."
)
SECONDS = (
    "By the clock, but for cpu: processor time of this process. Those of clients are sums over clients, which may have "
    "trained side by side."
)


@dataclass(frozen=True)
class Section:
    """A picture (``png``, in base64) or a table, whose first ``text`` columns are text and the others numbers."""

    name: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    text: int = 0
    png: str = ""
    note: str = ""


def single_page(run: SavedRun, pictures: Mapping[str, bytes]) -> str:
    """The report of one run; ``pictures`` are PNGs by file name."""
    results = run.results
    names = dict(enumerate(results["class_names"]))
    tasks = [(number, [names.get(c, c) for c in class_ids]) for number, class_ids in enumerate(results["tasks"], 1)]
    facts = " · ".join([*run.facts, f"{len(run.seen)} tasks", str(run.folder)])
    sections = [
        *_picture_sections(pictures),
        _metrics_section(run),
        _matrix_section(run),
        _classes_section(results["per_class_accuracy"]),
        Section("Tasks", ["Task", "Classes"], tasks, text=2),
        _rounds_section(results["rounds"]),
        _failures_section(results["rounds"]),
        *([_pairs_section("Privacy", results["privacy"])] if results.get("privacy") else []),
        _pairs_section("Communication", results["communication"]),
        replace(_pairs_section("Seconds", results["seconds"]), note=SECONDS),
        _pairs_section("Settings", run.settings),
        _pairs_section("Environment", flat(results["environment"])),
    ]
    return _render("run", title=run.title, sections=sections, run=run, facts=facts)


def comparison_page(
    groups: Sequence[Group], pictures: Mapping[str, bytes], title: str, notes: Mapping[str, Sequence[str]]
) -> str:
    """The comparison of several runs; ``pictures`` are PNGs by file name, ``notes`` lines of text by heading."""
    rows = [(r.folder, g.label, g.setting, r.results.get("seed"), r.status) for g in groups for r in g.runs]
    sections = [
        Section("Results", *comparison_table(groups), text=3, note=NOTE),
        *(Section(head, rows=[[line] for line in lines], text=1) for head, lines in notes.items()),
        *_picture_sections(pictures),
        Section("Runs", ["Folder", "Method", "Setting", "Seed", "Status"], rows, text=5),
    ]
    return _render("page", title=title, sections=sections)


def _render(template: str, **values: object) -> str:
    environment = Environment(
        loader=DictLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["as_text"] = _as_text
    return environment.get_template(template).render(values)


def _as_text(cell: object) -> object:
    if isinstance(cell, list | tuple):
        return ", ".join(map(str, cell))
    return "-" if cell is None else f"{cell:.5g}" if isinstance(cell, float) else cell


def _picture_sections(pictures: Mapping[str, bytes]) -> list[Section]:
    return [Section(PICTURES[name], png=b64encode(png).decode("ascii")) for name, png in pictures.items()]


def _matrix_section(run: SavedRun) -> Section:
    tested = np.flatnonzero(run.samples)
    on_seen = [row[tested[tested <= i]] for i, row in enumerate(run.matrix)]
    means = [float(accuracies.mean()) if accuracies.size else math.nan for accuracies in on_seen]
    rows = [[i + 1, *map(_percent, [*row, run.seen[i], means[i]])] for i, row in enumerate(run.matrix)]
    # the averages are over the samples of all seen classes, and over their tasks
    return Section("Accuracy matrix, %", ["After task", *(f"on {row[0]}" for row in rows), "all seen", "mean"], rows)


def _classes_section(accuracies: Mapping[str, Any]) -> Section:
    ranked = sorted((accuracy, name) for name, accuracy in accuracies.items() if is_number(accuracy))
    rows = [(name, _percent(accuracy)) for accuracy, name in ranked]
    return Section("Accuracy of each class, worst first", ["Class", "Accuracy, %"], rows, text=1)


def _failures_section(rounds: Sequence[Mapping[str, Any]]) -> Section:
    rows = [
        (entry.get("task"), entry.get("round"), failure.get("name"), failure.get("reason"))
        for entry in rounds
        for failure in entry.get("failures") or []
    ]
    return Section(f"Failures ({len(rows)})", ["Task", "Round", "Client", "Reason"], rows, text=4)


def _metrics_section(run: SavedRun) -> Section:
    formulas = {name: (inspect.getdoc(metric) or "").split("\n")[0] for name, metric in METRICS.items()}
    formulas["last_accuracy"] = f"Accuracy over all {run.evaluated} samples after the last task."
    formulas["average_seen_accuracy"] = (
        f"Mean over time of the accuracy over all {run.evaluated} samples of seen classes; their numbers are those of "
        "the end."
    )
    rows = [(n, formulas.get(n), f"{100 * v:.2f} %" if n in formulas else v) for n, v in run.metrics.items()]
    return Section("Metrics", ["Metric", "Formula", "Value"], rows, text=2)


def _rounds_section(rounds: Sequence[Mapping[str, Any]]) -> Section:
    """One row for each round, one column for each value that any round recorded; the server's metrics come last."""
    entries = [{**entry, **(entry.get("server") or {})} for entry in rounds]
    names = list(dict.fromkeys(name for entry in entries for name in entry if name != "server"))
    head = [name.replace("_", " ").replace("-", " ").capitalize() for name in names]
    rows = [[_with_unit(name, entry.get(name)) for name in names] for entry in entries]
    return Section("Rounds", head, rows, note=ROUNDS if rows else "")


def _pairs_section(title: str, values: Mapping[str, Any]) -> Section:
    return Section(title, ["Name", "Value"], [(name, _with_unit(name, value)) for name, value in values.items()], 2)


def _with_unit(name: str, value: Any) -> object:
    """Bytes in MB or kB, accuracies in %; clients as their number, with their names as a tooltip."""
    if name in ("participants", "idle", "failures") and isinstance(value, list):
        names = ", ".join(str(client.get("name") if isinstance(client, dict) else client) for client in value)
        return Markup('<span title="{}">{}</span>').format(names, len(value))
    if name.startswith("bytes") and is_number(value):
        return f"{value / 1e6:,.2f} MB" if value >= 1e6 else f"{value / 1e3:,.2f} kB"
    return f"{_percent(value)} %" if name.endswith("accuracy") and is_number(value) else value


def _percent(fraction: float) -> str:
    return "" if math.isnan(fraction) else f"{100 * fraction:.1f}"
