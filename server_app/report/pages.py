"""The reports as HTML files that refer to nothing outside themselves."""

import base64
import inspect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from server_app.report.compare import NOTE, Group, comparison_table
from server_app.report.runs import Run, flat, is_number
from task.metrics import METRICS

# Nothing in the page may load or run anything, even if a name in it slipped through unescaped.
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>
body { margin: 0; background: #f6f7f9; color: #1c2430; font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 24px 64px; }
section { background: #fff; border: 1px solid #dde2e8; border-radius: 10px; padding: 20px 24px; margin-top: 20px; }
h1 { font-size: 28px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 12px; }
.badge { border-radius: 99px; padding: 3px 12px; font-size: 13px; vertical-align: 5px; background: #dcebf7; }
.finished { background: #d8f0e6; } .failed { background: #fbe0d0; }
.sub, .hint, th { color: #5b6675; } .sub { margin: 6px 0 0; overflow-wrap: anywhere; } .hint { font-size: 13px; }
.lead { font-size: 18px; margin: 20px 0 0; max-width: 46em; }
.notice { border-left: 5px solid #d55e00; background: #fff7f2; }
.notice p { margin: 10px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.scroll { overflow: auto; max-height: 540px; } @media print { .scroll { max-height: none; } }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; min-width: 40%; }
th, td { text-align: right; padding: 5px 12px; border-bottom: 1px solid #dde2e8; vertical-align: top; }
td { white-space: nowrap; } th { position: sticky; top: 0; background: #fff; }
.t { text-align: left; white-space: normal; overflow-wrap: break-word; }
.t:first-child:nth-last-child(n+5) { min-width: 11em; }
</style>
"""
PICTURES = {
    "accuracy.png": "Accuracy after each task",
    "forgetting.png": "What was forgotten",
    "matrices.png": "Accuracy matrices",
    "confusion.png": "What is taken for what",
    "clients.png": "Who holds what",
    "federated_bias.png": "How local models differ",
    "communication.png": "Accuracy against traffic",
}
AVERAGES = ("all seen", "mean")  # over the samples of all seen classes, and over their tasks


class Fragment(str):
    """HTML made here, which needs no escaping."""


def single_page(run: Run, pictures: Mapping[str, bytes]) -> str:
    """The report of one run; ``pictures`` are PNGs by file name."""
    results = run.results
    names = dict(enumerate(results["class_names"]))
    tasks = [(i, [names.get(c, c) for c in task]) for i, task in enumerate(results["tasks"], 1)]
    matrix = [[i + 1, *map(_percent, [*row, run.seen[i], np.nanmean(row)])] for i, row in enumerate(run.matrix)]
    ranked = sorted((a, name) for name, a in results["per_class_accuracy"].items() if is_number(a))
    classes = ((name, _percent(a)) for a, name in ranked)
    failures = [
        [entry.get("task"), entry.get("round"), failure.get("name"), failure.get("reason")]
        for entry in results["rounds"]
        for failure in entry.get("failures") or []
    ]
    tables = {
        "Metrics": _metrics_table(run),
        "Accuracy matrix, %": _table(["After task", *(f"on {row[0]}" for row in matrix), *AVERAGES], matrix),
        "Accuracy of each class, worst first": _table(["Class", "Accuracy, %"], classes, text=1),
        "Tasks": _table(["Task", "Classes"], tasks, text=2),
        "Rounds": _rounds_table(results["rounds"]),
        f"Failures ({len(failures)})": _table(["Task", "Round", "Client", "Reason"], failures, text=4),
        **({"Privacy": _pairs(results["privacy"])} if results.get("privacy") else {}),
        "Communication": _pairs(results["communication"]),
        "Seconds": _pairs(results["seconds"]),
        "Settings": _pairs(run.settings),
        "Environment": _pairs(flat(results["environment"])),
    }
    return _page(run.title, _heading(run) + _notice(run) + _lead(run), _images(pictures) | tables)


def comparison_page(groups: Sequence[Group], pictures: Mapping[str, bytes], title: str) -> str:
    """The comparison of several runs; ``pictures`` are PNGs by file name."""
    runs = [run for group in groups for run in group.runs]
    table = _table(*comparison_table(groups), text=3) + f'<p class="hint">{escape(NOTE)}</p>'
    listed = ((r.folder, r.results["method"], r.results["dataset"], r.results.get("seed"), r.status) for r in runs)
    run_table = _table(["Folder", "Method", "Data set", "Seed", "Status"], listed, text=5)
    return _page(title, f"<h1>{escape(title)}</h1>", {"Results": table} | _images(pictures) | {"Runs": run_table})


def _page(title: str, top: str, sections: Mapping[str, str]) -> str:
    parts = (f"<section><h2>{escape(name)}</h2>\n{text or 'none'}</section>\n" for name, text in sections.items())
    return f"{HEAD}<title>{escape(title)}</title></head>\n<body><main>\n{top}{''.join(parts)}</main></body></html>\n"


def _heading(run: Run) -> str:
    status = escape(run.results["status"])
    badge = f'<span class="badge {status}">{status}</span>'
    facts = " · ".join([*run.facts, f"{len(run.seen)} tasks", str(run.folder)])
    return f'<h1>{escape(run.title)} {badge}</h1>\n<p class="sub">{escape(facts)}</p>\n'


def _notice(run: Run) -> str:
    """Why the numbers are not those of a whole run; empty for a finished one."""
    if run.finished:
        return ""
    k = len(run.matrix)
    words = "This run failed." if run.results["status"] == "failed" else "This run has not finished."
    reason = f"<p>{escape(str(run.results['error']))}</p>" if run.results.get("error") else ""
    covered = "The numbers cover the finished tasks only." if k else "No task is finished yet, so there is no accuracy."
    text = f"<strong>{words}</strong> {k} of {len(run.seen)} tasks are finished. {covered}"
    return f'<section class="notice">{text}{reason}</section>\n'


def _lead(run: Run) -> str:
    """The outcome in one sentence for a newcomer; empty before the first finished task."""
    k = len(run.matrix)
    if not k:
        return ""
    right, lost = (100 * run.metrics[name] for name in ("final_average_accuracy", "forgetting"))
    text = f"the model recognises <strong>{right:.1f} %</strong> of the test images"
    if k == 1:
        return f'<p class="lead">After learning one task, {text}.</p>\n'
    change = f"<strong>{abs(lost):.1f} percentage points</strong> {'below' if lost >= 0 else 'above'} its earlier best"
    verdict = "that much it has forgotten" if lost >= 0 else "it has forgotten nothing"
    text += f", averaged over the tasks; on the tasks before the last it is {change}: {verdict}."
    return f'<p class="lead">After learning {k} tasks one after another, {text}</p>\n'


def _images(pictures: Mapping[str, bytes]) -> dict[str, str]:
    encoded = {name: base64.b64encode(content).decode("ascii") for name, content in pictures.items()}
    return {PICTURES[n]: f'<img alt="{PICTURES[n]}" src="data:image/png;base64,{d}">' for n, d in encoded.items()}


def _metrics_table(run: Run) -> str:
    known = {"last_accuracy": "Accuracy over all test samples after the last task."} | {
        name: (inspect.getdoc(metric) or "").split("\n")[0] for name, metric in METRICS.items()
    }
    rows = ([n, known.get(n), f"{100 * v:.2f} %" if n in known else v] for n, v in run.metrics.items())
    return _table(["Metric", "Formula", "Value"], rows, text=2)


def _rounds_table(rounds: Sequence[Mapping[str, Any]]) -> str:
    """One row for each round, with a column for all that any of them recorded, the server's own metrics last."""
    rows = [{**entry, **(entry.get("server") or {})} for entry in rounds]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "server"))
    head = [name.replace("_", " ").replace("-", " ").capitalize() for name in names]
    return _table(head, ([_shown(name, row.get(name)) for name in names] for row in rows))


def _pairs(values: Mapping[str, Any]) -> str:
    return _table(["Name", "Value"], ((name, _shown(name, value)) for name, value in values.items()), text=2)


def _shown(name: str, value: Any) -> object:
    """Bytes in MB or kB, accuracies in %, and of people how many there are, with their names for a resting pointer."""
    if name in ("participants", "idle", "failures") and isinstance(value, list):
        names = ", ".join(str(one.get("name") if isinstance(one, dict) else one) for one in value)
        return Fragment(f'<span title="{escape(names)}">{len(value)}</span>')
    if name.startswith("bytes") and is_number(value):
        return f"{value / 1e6:,.2f} MB" if value >= 1e6 else f"{value / 1e3:,.2f} kB"
    return f"{_percent(value)} %" if name.endswith("accuracy") and is_number(value) else value


def _percent(fraction: float) -> str:
    return "" if math.isnan(fraction) else f"{100 * fraction:.1f}"


def _table(head: Iterable[object], rows: Iterable[Iterable[object]], text: int = 0) -> str:
    """A table whose first ``text`` columns are aligned left, the others, numbers, right; empty without a row."""
    body = "\n".join(_line("td", row, text) for row in rows)
    return f'<div class="scroll"><table>\n{_line("th", head, text)}\n{body}\n</table></div>' if body else ""


def _line(tag: str, cells: Iterable[object], text: int) -> str:
    left = (' class="t"' if i < text else "" for i in itertools.count())
    return "<tr>" + "".join(f"<{tag}{t}>{_cell(x)}</{tag}>" for x, t in zip(cells, left, strict=False)) + "</tr>"


def _cell(value: object) -> str:
    if isinstance(value, Fragment):
        return value
    if isinstance(value, list | tuple):
        return escape(", ".join(map(str, value)))
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else escape(str(value))
