"""Comparison of several runs; runs that differ in nothing but the seed are averaged."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from server_app.report.runs import SavedRun
from server_app.tables import markdown_table
from task.config.schema import APPEARING, SAME_RESULT, defaults, keys_affecting, known_keys, missing_setting
from task.keys import AUTO
from task.methods import METHODS

FINAL, INCREMENTAL = "final_average_accuracy", "average_incremental_accuracy"
COMPARED = {
    FINAL: "Final average accuracy, %",
    INCREMENTAL: "Average incremental accuracy, %",
    "last_accuracy": "Last accuracy, %",
    "forgetting": "Forgetting, points",
}
COSTS = {  # column of the table: part and name in results.json, factor from the recorded unit
    "kB up per client and round": ("communication", "bytes_up_per_client_round", 1e-3),
    "kB down per client and round": ("communication", "bytes_down_per_client_round", 1e-3),
    "Seconds": ("seconds", "total", 1.0),
}
# run keys of the problem, not of the method: with others, accuracies mean something else
PROBLEM = (
    *("num-tasks", "class-order", "validation-share", "num-clients", "clients-per-round", "backbone", "image-size"),
    *("partition", "dirichlet-beta", "dirichlet-min-size", "classes-per-client", "class-share", "split-ratio"),
    *("category-ratio", "imbalance-ratio", "consensus-rate"),
)
NO_KEYS = ("backbone-sha256", "data-sha256", "code-sha256", "server-code-sha256", "git-revision")  # of config.yaml
WALL = " (wall)"  # marks core-minutes that are minutes of the clock
NOTE = (
    "Mean ± sample standard deviation over seeds. Only finished runs are included: one that stopped early has had "
    "fewer tasks to forget. Traffic is that of all clients in both directions over all rounds, 1 MB = 1,000,000 bytes; "
    "the hellos before them are not counted. For each client and round it is over all clients that were drawn, also "
    "those without an image of the task. Seconds are those of the whole run. Core-minutes are the time of all "
    f"processor cores together, without drawing pictures;{WALL}: not recorded, minutes of the clock instead."
)


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed.

    Attributes:
        setting: the data set, and the partition where a suite has several; groups of one setting are compared.
        label: the method, with the keys in which groups differ.
        theirs: whether these are results of somebody else's code.
    """

    setting: str
    label: str
    runs: list[SavedRun]
    theirs: bool = False

    @property
    def pooled(self) -> bool:
        """Whether all images were in one place. Such a group shows what can be reached; it is no federated method."""
        rows = [METHODS.get(run.results["method"]) for run in self.runs]
        return any(row is not None and row.pooled for row in rows)

    @property
    def finished(self) -> list[SavedRun]:
        """The finished runs; averages are over these."""
        return [run for run in self.runs if run.finished]

    @property
    def measured(self) -> list[SavedRun]:
        """The finished runs whose accuracy at the end is known: no test images were missing."""
        return [run for run in self.finished if FINAL in run.metrics]

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

    @property
    def has_core_time(self) -> bool:
        """Whether every finished run has recorded its processor time."""
        return not any(math.isnan(run.cost("seconds", "cpu_total")) for run in self.finished)

    @property
    def core_minutes(self) -> tuple[float, float]:
        """Mean and standard deviation of the processor time of a run, or of its time by the clock, in minutes."""
        name = "cpu_total" if self.has_core_time else "total"
        return mean_sd(run.cost("seconds", name) / 60 for run in self.finished)

    def cost(self, column: str) -> tuple[float, float]:
        """Mean and standard deviation of one of ``COSTS``; NaN if not recorded."""
        part, name, unit = COSTS[column]
        return mean_sd(unit * run.cost(part, name) for run in self.finished)


def mean_sd(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of all values but NaN; NaN for too few values."""
    numbers = [value for value in values if not math.isnan(value)]
    mean = float(np.mean(numbers)) if numbers else math.nan
    return mean, float(np.std(numbers, ddof=1)) if len(numbers) > 1 else math.nan


def group_runs(runs: Sequence[SavedRun]) -> list[Group]:
    """Group by data set, method and the run keys of the protocol; of each data set the most accurate group comes first.

    Runs of a suite have its labels. Others are named by their method, and by the keys that differ: those of the problem
    (number of tasks, partition) between any two runs on a data set, all others (prompt) between runs of one method.
    """
    groups = _group_by_folder(runs) or _group_by_keys(runs)
    return sorted(groups, key=lambda g: (g.setting, -np.nan_to_num(g.mean_sd(FINAL)[0], nan=-1), g.label))


def _group_by_folder(runs: Sequence[SavedRun]) -> list[Group]:
    """Groups of runs that all lie in a suite's folders LABEL/seed0, LABEL/seed1, ...; empty if they do not.

    Empty too if runs of a label are of several methods or numbers of tasks, as no suite has them. Of the labels the
    parts that all have in common are left out.
    """
    if not all(re.fullmatch(r"seed\d+", run.folder.name) for run in runs):
        return []
    labels = [run.folder.resolve().parent.parts for run in runs]
    start = _shared(labels)
    end = _shared([label[start:][::-1] for label in labels])
    groups: dict[tuple[str, str], Group] = {}
    for run, parts in zip(runs, labels, strict=True):
        label = "/".join(parts[start : len(parts) - end]) or run.results["method"]
        groups.setdefault((run.setting, label), Group(run.setting, label, [])).runs.append(run)
    mixed = any(len({(r.results["method"], len(r.seen)) for r in group.finished}) > 1 for group in groups.values())
    return [] if mixed else list(groups.values())


def _shared(labels: Sequence[tuple[str, ...]]) -> int:
    """How many parts at the beginning of all labels are the same."""
    return len(list(takewhile(lambda parts: len(set(parts)) == 1, zip(*labels, strict=False))))


def _group_by_keys(runs: Sequence[SavedRun]) -> list[Group]:
    families: dict[tuple[str, str], list[SavedRun]] = {}
    for run in runs:
        families.setdefault((run.data_name, run.results["method"]), []).append(run)
    groups: dict[tuple[str, str], Group] = {}
    same_protocol = keys_affecting("seed", *SAME_RESULT)
    for (dataset, method), family in families.items():
        rivals = [run for run in runs if run.data_name == dataset]
        differing = [
            *(name for name in PROBLEM if _differ(name, [run for run in rivals if _reads(run, name)])),
            *(name for name in _run_keys(family) if name not in (*PROBLEM, *same_protocol) and _differ(name, family)),
        ]
        for run in family:
            read = [name for name in differing if name not in PROBLEM or _reads(run, name)]
            settings = ", ".join(f"{name} {_key_value(run, name)}" for name in read)
            label = f"{method} ({settings})" if settings else method
            groups.setdefault((run.setting, label), Group(run.setting, label, [])).runs.append(run)
    return list(groups.values())


def _run_keys(family: Sequence[SavedRun]) -> list[str]:
    """All run keys; of a method from outside that is unknown here, those too that its runs have recorded."""
    known = list(known_keys())
    if family[0].results["method"] in METHODS:
        return known
    recorded = dict.fromkeys(name for run in family for name in run.settings if "." not in name)
    return [*known, *(name for name in recorded if name not in known and name not in NO_KEYS)]


def _reads(run: SavedRun, name: str) -> bool:
    """Whether a run key is recorded, and the run has the partition, say, that reads it."""
    keys = known_keys()
    return name in run.settings and not missing_setting(keys[name], defaults() | run.settings, keys)


def _differ(name: str, runs: Sequence[SavedRun]) -> bool:
    return len({str(_key_value(run, name)) for run in runs}) > 1


def _key_value(run: SavedRun, name: str) -> object:
    """A run key's value, for comparing runs.

    Of num-tasks, which is only a limit where classes appear, it is how many tasks there were. Rounds of adaptation are
    "none" without a prompt to adapt. What each run chooses by its images is "auto".
    """
    if name == "num-tasks" and run.settings.get("class-order") == APPEARING:
        return run.results["num_tasks"]
    row = METHODS.get(run.results["method"])  # one from outside may be unknown here
    if row and name == f"{row.name}-adaptation-rounds" and run.settings.get("prompt") == "none":
        return "none"
    value = run.settings.get(name, "unknown")
    chooses = row and name in row.own_keys() and known_keys()[name].rule.auto == 0  # each run by its images
    return AUTO if chooses and value == 0 else value


def comparison_table(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, the first three columns text: method, setting, seeds, the metrics, traffic and time."""
    head = ["Method", "Setting", "Seeds", *COMPARED.values(), "Traffic, MB", *COSTS, "Core-minutes"]
    return head, [_row(group) for group in groups]


def _row(group: Group) -> list[str]:
    seeds = ", ".join(str(run.results.get("seed", "?")) for run in group.finished) or "-"
    unfinished = len(group.runs) - len(group.finished)
    seeds += f" (and {unfinished} unfinished)" if unfinished else ""
    incomplete = sum(bool(run.gaps or run.untested_tasks) or FINAL not in run.metrics for run in group.finished)
    seeds += f" ({incomplete} with accuracies missing)" if incomplete else ""
    fewer = sum(bool(run.incomplete) for run in group.finished)
    seeds += f" ({fewer} measured on fewer test images, as nodes were away)" if fewer else ""
    percent = [(100 * mean, 100 * sd) for mean, sd in map(group.mean_sd, COMPARED)]
    hundredths = [_number(*pair, digits=2) for pair in [*percent, group.megabytes]]
    tenths = [_number(*group.cost(column), digits=1) for column in COSTS]
    minutes = _number(*group.core_minutes, digits=3)
    minutes += "" if group.has_core_time or minutes == "-" else WALL
    return [group.label, group.setting, seeds, *hundredths, *tenths, minutes]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices, by rising cost, of the points (cost, accuracy) that no other point beats.

    A point beats another if it costs no more, is at least as accurate, and is better in one of the two.

    >>> pareto_front([(3, 0.9), (1, 0.5), (2, 0.4), (3, 0.8)])
    [1, 0]
    """
    front: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front


def _number(mean: float, sd: float, digits: int) -> str:
    if math.isnan(mean):
        return "-"
    return f"{mean:.{digits}f}" + ("" if math.isnan(sd) else f" ± {sd:.{digits}f}")


def comparison_markdown(groups: Sequence[Group], notes: Mapping[str, Sequence[str]]) -> str:
    """The table of ``comparison_table`` in Markdown, with its note and further ones, lines by their heading."""
    head, rows = comparison_table(groups)
    table = markdown_table(head, ([escape(cell) for cell in row] for row in rows), text=range(3))
    further = ["\n".join([f"## {head}\n", *(f"- {escape(line)}" for line in lines)]) for head, lines in notes.items()]
    return "\n\n".join([table, NOTE, *further]) + "\n"


def escape(text: str) -> str:
    """``text`` as one line in which Markdown's characters are escaped; an underscore within a word is none of them."""
    return re.sub(r"([\\`*|<>\[\]]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", " ".join(text.split()))
