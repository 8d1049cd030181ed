"""What a suite's runs on validation images have chosen, and its log: selection.json and selection.md."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from server_app.bench.suite import Selection, Suite
from server_app.report.compare import FINAL, INCREMENTAL, escape
from server_app.report.runs import SavedRun, is_number
from server_app.run_keys import complete_run_keys
from server_app.tables import markdown_table
from task.message import Scalar
from task.utils.atomic import write_atomically, write_json


@dataclass(frozen=True)
class Choice:
    """What was chosen for one variant.

    Attributes:
        accuracies: final average accuracy of every finished seed, by label of the point.
        chosen: label of the best point; empty while runs are left, and if none has finished.
        values: its keys.
        edges: chosen keys whose value is the smallest or largest of the grid.
        ties: labels of the other points that are as good.
    """

    accuracies: dict[str, list[float]]
    chosen: str
    values: dict[str, Scalar]
    edges: list[str]
    ties: list[str]

    @property
    def remark(self) -> str:
        """What the edges and ties are, in words; empty if there are none."""
        remarks = {"edge of the grid": self.edges, "as good": self.ties}
        return "; ".join(f"{head}: {', '.join(names)}" for head, names in remarks.items() if names)


def choose(selection: Selection, finished: dict[str, SavedRun], failed: Collection[str]) -> dict[str, Choice]:
    """The best point of each variant by final average accuracy, averaged over seeds.

    Of equal ones, of which there are many with few validation images, it is the best by average incremental accuracy,
    and of those the middle one, or the first of the two in the middle: at the edges of a grid a method fails more
    easily. A point counts if every one of its seeds has finished.

    Args:
        selection: what was to be run.
        finished: runs by their name in it.
        failed: names of the runs that will not finish.
    """
    choices = {}
    known = {name: run.metrics for name, run in finished.items() if FINAL in run.metrics}
    for variant, points in selection.points.items():
        planned = {
            label: [r for r in selection.suite.runs if (r.variant, r.partition) == (variant, label)] for label in points
        }
        measured = {label: [known[r.name] for r in runs if r.name in known] for label, runs in planned.items()}
        accuracies = {label: [metrics[FINAL] for metrics in of_label] for label, of_label in measured.items()}
        left = [r for runs in planned.values() for r in runs if r.name not in finished and r.name not in failed]
        whole = [label for label, runs in planned.items() if len(accuracies[label]) == len(runs)]
        best = [] if left else _best(whole, accuracies)
        chosen = _break_tie(best, measured)
        values, edges = points.get(chosen, {}), []
        for name, value in values.items():
            numbers = [point[name] for point in points.values() if is_number(point[name])]
            if is_number(value) and value in (min(numbers), max(numbers)):
                edges.append(name)
        choices[variant] = Choice(accuracies, chosen, values, edges, [label for label in best if label != chosen])
    return choices


def _best(labels: Sequence[str], accuracies: Mapping[str, Sequence[float]]) -> list[str]:
    """The labels whose accuracies have the largest sum, but for rounding."""
    sums = {label: sum(accuracies[label]) for label in labels}
    return [label for label in labels if math.isclose(sums[label], max(sums.values()), abs_tol=1e-9)]


def _break_tie(labels: Sequence[str], measured: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """One of several labels that are equally good, see :func:`choose`; empty if there is none."""
    # one that is unknown, as nodes with validation images were away after an earlier task, must not lose by that
    if all(INCREMENTAL in metrics for of_label in measured.values() for metrics in of_label):
        labels = _best(labels, {label: [m[INCREMENTAL] for m in of_label] for label, of_label in measured.items()})
    return labels[(len(labels) - 1) // 2] if labels else ""


def apply_choices(suite: Suite, selection: Selection, choices: dict[str, Choice]) -> Suite:
    """The suite with the chosen keys; runs of a variant for which no value could be chosen are left out.

    So are results of other people in a partition without any run.
    """
    lost = [variant for variant, choice in choices.items() if selection.points[variant] and not choice.chosen]
    runs = [
        replace(run, values=complete_run_keys({**run.values, **choices[run.variant].values}))
        for run in suite.runs
        if run.variant not in lost
    ]
    left = {run.partition for run in runs}
    notes = []
    for variant, choice in choices.items():
        if choice.chosen:
            remark = f" ({choice.remark})" if choice.remark else ""
            notes.append(f"{variant}: {', '.join(choice.chosen.split('+'))}{remark}")
    notes += [f"{variant}: {reason}" for variant, reason in selection.left_out.items()]
    if lost:
        notes.append(f"Not run, as every run of the selection failed: {', '.join(lost)}.")
    if alone := sorted({other.label for other in suite.others if other.partition not in left}):
        notes.append(f"Not shown, as no run of their partition is left: {', '.join(alone)}.")
    return replace(suite, runs=runs, others=[o for o in suite.others if o.partition in left], notes=notes)


def write_selection(selection: Selection, finished: dict[str, SavedRun], failed: Collection[str]) -> None:
    """Write selection.json and selection.md, all figures and what they chose, into the suite's folder.

    Arguments as of :func:`choose`.
    """
    choices = choose(selection, finished, failed)
    known = [run for run in finished.values() if sum(run.results["samples_per_task"])]
    fewest = min(known, key=lambda run: run.effective_images, default=None)
    content = {
        "measured_on": "validation images",
        "seeds": sorted({run.seed for run in selection.suite.runs}),
        "variants": {
            variant: {
                "chosen": choice.values,
                "accuracies": choice.accuracies,
                "edges": choice.edges,
                "ties": choice.ties,
            }
            for variant, choice in choices.items()
            if selection.points[variant]
        },
        "left_out": selection.left_out,
        "failed": list(failed),
    }
    folder = selection.suite.folder.parent
    write_json(folder / "selection.json", content)
    write_atomically(folder / "selection.md", _table(selection, choices, fewest, failed).encode())


def _table(selection: Selection, choices: dict[str, Choice], fewest: SavedRun | None, failed: Collection[str]) -> str:
    labels = list(dict.fromkeys(label for points in selection.points.values() for label in points))
    head, rows = ["Variant", *labels, "Chosen", "Remark"], []
    for variant, choice in choices.items():
        cells = [_cell(choice, label, f"{variant}/{label}", failed) for label in labels]
        rows.append([escape(variant), *cells, choice.chosen or "-", selection.left_out.get(variant, choice.remark)])
    share = sorted({run.config.validation_share for run in selection.suite.runs})
    error = ""
    if fewest:
        images, points = sum(fewest.results["samples_per_task"]), 50 / fewest.effective_images**0.5
        error = f", {images} images, so that a standard error is up to {points:.1f} points"
    note = (
        f"Final average accuracy on validation images, %, mean over the seeds that have finished; validation-share "
        f"{', '.join(map(str, share))}{error}. No test image was looked at. A value at the edge of the grid may have "
        f"a better one beyond it. Failed runs: {', '.join(failed) or 'none'}."
    )
    return markdown_table(head, rows, text=(0, len(head) - 2, len(head) - 1)) + f"\n\n{note}\n"


def _cell(choice: Choice, label: str, name: str, failed: Collection[str]) -> str:
    values = choice.accuracies.get(label, [])
    if any(run.startswith(f"{name}/") for run in failed):
        return "failed"
    return f"{100 * sum(values) / len(values):.2f}" if values else "-"
