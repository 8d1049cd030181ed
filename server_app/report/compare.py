"""Comparison of several runs; runs that differ in nothing but the seed are averaged."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from server_app.report.runs import Run, is_number
from task.config.schema import SAME_RESULT, keys_affecting, known_keys

COMPARED = {
    "final_average_accuracy": "Final average accuracy, %",
    "average_incremental_accuracy": "Average incremental accuracy, %",
    "last_accuracy": "Last accuracy, %",
    "forgetting": "Forgetting, points",
}
COSTS = {  # column of the table: part and name in results.json, factor from the recorded unit
    "kB up per client and round": ("communication", "bytes_up_per_client_round", 1e-3),
    "kB down per client and round": ("communication", "bytes_down_per_client_round", 1e-3),
    "Seconds": ("seconds", "total", 1.0),
}
NOTE = (
    "Mean ± sample standard deviation over seeds. Only finished runs are included: one that stopped early has had "
    "fewer tasks to forget. Traffic is that of all clients in both directions over the whole run, 1 MB = 1,000,000 "
    "bytes; seconds are those of the whole run."
)


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed.

    Attributes:
        setting: the data set, and the partition where a suite has several; groups of one setting are compared.
        label: the method, with the keys in which groups differ.
    """

    setting: str
    label: str
    runs: list[Run]

    @property
    def finished(self) -> list[Run]:
        """The runs that are averaged."""
        return [run for run in self.runs if run.finished]

    def mean_sd(self, metric: str) -> tuple[float, float]:
        """Mean and sample standard deviation over the finished runs."""
        return mean_sd(run.metrics.get(metric, math.nan) for run in self.finished)

    @property
    def matrix(self) -> np.ndarray:
        """Accuracy after task i on task j, [T, T], averaged over the finished runs, at least one."""
        return np.mean([run.matrix for run in self.finished], axis=0)

    @property
    def megabytes(self) -> tuple[float, float]:
        """Mean and standard deviation of the traffic of a run, in units of 10^6 bytes."""
        return mean_sd(run.megabytes for run in self.finished)

    def cost(self, column: str) -> tuple[float, float]:
        """Mean and standard deviation of one of ``COSTS``; NaN if not recorded."""
        part, name, unit = COSTS[column]
        recorded = [run.results[part].get(name) for run in self.finished]
        return mean_sd(unit * value for value in recorded if is_number(value))


def mean_sd(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of all values but NaN; NaN for too few values."""
    numbers = [value for value in values if not math.isnan(value)]
    mean = float(np.mean(numbers)) if numbers else math.nan
    return mean, float(np.std(numbers, ddof=1)) if len(numbers) > 1 else math.nan


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group by data set, method and the run keys of the protocol; the best final average accuracy comes first.

    Within one data set and method, the keys that differ (prompt, partition's parameter) become part of the label.
    """
    families: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        families.setdefault((run.results["dataset"], run.results["method"]), []).append(run)
    groups: dict[tuple[str, str], Group] = {}
    same_protocol = keys_affecting("seed", *SAME_RESULT)
    for (dataset, method), family in families.items():
        values = {name: {str(run.settings.get(name)) for run in family} for name in known_keys()}
        differing = [name for name, found in values.items() if len(found) > 1 and name not in same_protocol]
        for run in family:
            settings = ", ".join(f"{name} {run.settings.get(name, 'unknown')}" for name in differing)
            label = f"{method} ({settings})" if settings else method
            groups.setdefault((dataset, label), Group(dataset, label, [])).runs.append(run)
    average = "final_average_accuracy"
    return sorted(groups.values(), key=lambda g: (g.setting, -np.nan_to_num(g.mean_sd(average)[0], nan=-1), g.label))


def comparison_table(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, the first three columns text: method, setting, seeds, the metrics, traffic and time."""
    head = ["Method", "Setting", "Seeds", *COMPARED.values(), "Traffic, MB", *COSTS]
    return head, [_row(group) for group in groups]


def _row(group: Group) -> list[str]:
    seeds = ", ".join(str(run.results.get("seed", "?")) for run in group.finished) or "-"
    unfinished = len(group.runs) - len(group.finished)
    seeds += f" (and {unfinished} unfinished)" if unfinished else ""
    percent = [(100 * mean, 100 * sd) for mean, sd in map(group.mean_sd, COMPARED)]
    hundredths = [_number(*pair, digits=2) for pair in [*percent, group.megabytes]]
    tenths = [_number(*group.cost(column), digits=1) for column in COSTS]
    return [group.label, group.setting, seeds, *hundredths, *tenths]


def _number(mean: float, sd: float, digits: int) -> str:
    if math.isnan(mean):
        return "-"
    return f"{mean:.{digits}f}" + ("" if math.isnan(sd) else f" ± {sd:.{digits}f}")


def comparison_markdown(groups: Sequence[Group]) -> str:
    """The table of ``comparison_table`` in Markdown, with its note."""
    head, rows = comparison_table(groups)
    escaped = [[re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(cell.split())) for cell in row] for row in rows]
    lines = [head, ["---"] * 3 + ["---:"] * (len(head) - 3), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{NOTE}\n"
