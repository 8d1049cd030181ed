"""What a suite's runs on validation images have chosen, and its log: selection.json and selection.md."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from server_app.bench.suite import PlannedRun, Selection, Suite
from server_app.report.compare import escape
from server_app.report.runs import Run
from server_app.run_keys import complete_run_keys
from task.message import Scalar
from task.utils.atomic import write_atomically


@dataclass(frozen=True)
class Choice:
    """What was chosen for one variant.

    Attributes:
        accuracies: final average accuracy of every finished seed, by label of the point.
        chosen: label of the best point; empty while runs are left, and if none has finished.
        values: its keys.
        edges: chosen keys whose value is the smallest or largest of the grid.
    """

    accuracies: dict[str, list[float]]
    chosen: str
    values: dict[str, Scalar]
    edges: list[str]


def choose(selection: Selection, finished: dict[str, Run], failed: Collection[str]) -> dict[str, Choice]:
    """The best point of each variant by final average accuracy, averaged over seeds; of equal ones the first.

    A point counts if every one of its seeds has finished.

    Args:
        selection: what was to be run.
        finished: runs by their name in it.
        failed: names of the runs that will not finish.
    """
    choices = {}
    for variant, points in selection.points.items():
        planned = {
            label: [r for r in selection.suite.runs if (r.variant, r.partition) == (variant, label)] for label in points
        }
        accuracies = {
            label: [finished[r.name].metrics["final_average_accuracy"] for r in runs if r.name in finished]
            for label, runs in planned.items()
        }
        left = [r for runs in planned.values() for r in runs if r.name not in finished and r.name not in failed]
        whole = [label for label, runs in planned.items() if len(accuracies[label]) == len(runs)]
        chosen = max(whole, key=lambda label: sum(accuracies[label])) if whole and not left else ""
        values = points.get(chosen, {})
        choices[variant] = Choice(accuracies, chosen, values, _edges(values, list(points.values())))
    return choices


def _edges(values: dict[str, Scalar], points: Sequence[dict[str, Scalar]]) -> list[str]:
    edges = []
    for name, value in values.items():
        grid = [point[name] for point in points]
        if isinstance(value, int | float) and value in (min(grid), max(grid)):
            edges.append(name)
    return edges


def apply_choices(suite: Suite, selection: Selection, choices: dict[str, Choice]) -> Suite:
    """The suite with the chosen keys; runs of a variant for which no value could be chosen are left out."""
    lost = [variant for variant, choice in choices.items() if selection.points[variant] and not choice.chosen]
    runs = [_with_keys(run, choices[run.variant].values) for run in suite.runs if run.variant not in lost]
    notes = describe(selection, choices)
    if lost:
        notes.append(f"Not run, as every run of the selection failed: {', '.join(lost)}.")
    return replace(suite, runs=runs, notes=notes)


def _with_keys(run: PlannedRun, values: dict[str, Scalar]) -> PlannedRun:
    return replace(run, values=complete_run_keys({**run.values, **values}))


def describe(selection: Selection, choices: dict[str, Choice]) -> list[str]:
    """The choice of each variant in words."""
    edge = {variant: f" (edge of the grid: {', '.join(c.edges)})" if c.edges else "" for variant, c in choices.items()}
    chosen = [
        f"{variant}: {', '.join(c.chosen.split('+'))}{edge[variant]}" for variant, c in choices.items() if c.chosen
    ]
    return [*chosen, *(f"{variant}: {reason}" for variant, reason in selection.left_out.items())]


def write_selection(selection: Selection, choices: dict[str, Choice], failed: Collection[str], folder: Path) -> None:
    """Write selection.json and selection.md, all figures and what they chose, into a folder."""
    content = {
        "measured_on": "validation images",
        "seeds": sorted({run.seed for run in selection.suite.runs}),
        "variants": {
            variant: {"chosen": choice.values, "accuracies": choice.accuracies, "edges": choice.edges}
            for variant, choice in choices.items()
            if selection.points[variant]
        },
        "left_out": selection.left_out,
        "failed": list(failed),
    }
    write_atomically(folder / "selection.json", (json.dumps(content, indent=1) + "\n").encode())
    write_atomically(folder / "selection.md", _table(selection, choices, failed).encode())


def _table(selection: Selection, choices: dict[str, Choice], failed: Collection[str]) -> str:
    labels = list(dict.fromkeys(label for points in selection.points.values() for label in points))
    rows = [["Variant", *labels, "Chosen", "Remark"], ["---", *["---:"] * len(labels), "---", "---"]]
    for variant, choice in choices.items():
        cells = [_cell(choice, label, f"{variant}/{label}", failed) for label in labels]
        remark = selection.left_out.get(variant, f"edge of the grid: {', '.join(choice.edges)}" if choice.edges else "")
        rows.append([escape(variant), *cells, choice.chosen or "-", remark])
    share = sorted({run.config.validation_share for run in selection.suite.runs})
    note = (
        f"Final average accuracy on validation images, %, mean over the seeds that have finished; validation-share "
        f"{', '.join(map(str, share))}. No test image was looked at. A value at the edge of the grid may have a better "
        f"one beyond it. Failed runs: {', '.join(failed) or 'none'}."
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{note}\n"


def _cell(choice: Choice, label: str, name: str, failed: Collection[str]) -> str:
    values = choice.accuracies.get(label, [])
    if any(run.startswith(f"{name}/") for run in failed):
        return "failed"
    return f"{100 * sum(values) / len(values):.2f}" if values else "-"
