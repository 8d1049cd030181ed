"""The measurements of a run so far, and results.json, which has them."""

import contextlib
import logging
import math
import platform
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from server_app.run_files.status import RUNNING, SCHEMA
from server_app.run_files.writers import append_line, keep_lines
from task.config.schema import Config
from task.metrics import summarize_measured
from task.scenario.class_stream import Schedule
from task.scenario.partition import consensus_sizes
from task.scenario.scenario import Scenario
from task.utils.atomic import write_json
from task.utils.versions import versions

log = logging.getLogger(__name__)


# of ``seconds``, named from the start; others come with what a run does
PARTS = ("client_train", "client_statistics", "server_aggregate", "server_refine", "evaluate")


@dataclass
class RoundReport:
    """One round, filled in while it runs; task and round count from 1."""

    task: int
    round: int
    participants: list[str]
    failures: list[dict[str, str]] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    train_loss: float | None = None
    train_accuracy: float | None = None
    server: dict[str, float] = field(default_factory=dict)
    trained: bool = False  # whether any client's answer was used
    dropped: bool = False  # the model before was kept: the new one was not finite or absurdly large, or the sum wrong
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0


class Results:
    """Collects what a run measures and writes results.json and rounds.jsonl into its ``directory``."""

    def __init__(self, directory: Path, config: Config, scenario: Scenario) -> None:
        tasks = [list(classes) for classes in scenario.schedule.tasks]
        self.directory, self.config, self.tasks = directory, config, tasks
        self.class_names, self.sharing = scenario.dataset.class_names, dict[str, int]()
        if scenario.streams:  # clients have class sequences of their own: common, private and repeated private classes
            sizes = consensus_sizes(len(self.class_names), config.num_clients, config.consensus_rate)
            self.sharing = sizes._asdict()
        self.matrix: list[list[float | None]] = [[None] * len(tasks) for _ in tasks]
        self.seen: list[float | None] = [None] * len(tasks)
        self.per_class: dict[str, float | None] = {}
        self.confusion: list[list[int]] = []
        self.correct_images: list[str] = []  # see note_correct
        self.clients: list[dict[str, Any]] = []
        self.entropies: list[list[float]] = [[] for _ in tasks]
        self.distances: list[float | None] = [None] * len(tasks)
        # by client: its node, and its own test images of each class id, as it last said
        self.holders: dict[str, tuple[int, np.ndarray]] = {}
        self.copies = 0  # test images that are training images too, as far as was looked
        self.samples: list[int] = []  # test images of each task so far, as last counted
        self.counted: list[list[int]] = []  # row i: test images of each task so far that were evaluated after task i
        self.away: list[list[int]] = []  # row i: those that nobody evaluated after task i, as nodes were away
        self.rounds: list[RoundReport] = []
        self.seconds = defaultdict(float, dict.fromkeys(PARTS, 0.0))
        self.started, self.status, self.error = time.perf_counter(), RUNNING, ""
        self.cpu_started: float | None = None  # set by start_cpu_clock
        self.absent: list[dict[str, str]] = []
        self.privacy: dict[str, Any] = {}
        self.environment: dict[str, Any] = {"versions": versions(), "machine": platform.machine()}

    def export_state(self) -> dict[str, Any]:
        """All that was measured, for :meth:`restore`."""
        not_measured = {"directory", "config", "tasks", "class_names", "environment", "absent"}
        not_measured |= {"status", "error", "started", "cpu_started"}
        return {name: value for name, value in vars(self).items() if name not in not_measured}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to an exported state; later lines of rounds.jsonl are removed."""
        vars(self).update(state)
        self.started = time.perf_counter() - self.seconds["total"]
        if self.cpu_started is not None:
            self.start_cpu_clock()
        if self.cpu_started is None:
            self.seconds.pop("cpu_total", None)  # of a part of the run only
        keep_lines(self.directory / "rounds.jsonl", len(self.rounds))

    def start_cpu_clock(self) -> None:
        """Record the processor time of this process, all threads, as ``cpu_total``, beside what was recorded before.

        Nothing is recorded where an earlier part of the run has none: a sum of the rest would look too small.
        """
        complete = "cpu_total" in self.seconds or not self.rounds
        self.cpu_started = time.process_time() - self.seconds.get("cpu_total", 0.0) if complete else None

    def leave_out_cpu(self, seconds: float) -> None:
        """Take processor time, in seconds, that is no part of the method's work out of ``cpu_total``."""
        if self.cpu_started is not None:
            self.cpu_started += seconds

    def extend(self, scenario: Scenario) -> None:
        """Make room for one more task, of new classes."""
        self.tasks = [list(classes) for classes in scenario.schedule.tasks]
        self.class_names = scenario.dataset.class_names
        self.matrix = [[*row, None] for row in self.matrix] + [[None] * len(self.tasks)]
        self.seen, self.distances = [*self.seen, None], [*self.distances, None]
        self.entropies = [*self.entropies, []]
        if self.confusion:  # until the next evaluation nothing is counted of the new classes
            more = len(self.class_names) - len(self.confusion)
            self.confusion = np.pad(np.array(self.confusion), (0, more)).tolist()

    def add_training(self, metrics: Sequence[Mapping[str, int | float]], report: RoundReport) -> None:
        """Note the measurements of a round; ``metrics`` are those of each client that has trained."""
        trained = [m for m in metrics if math.isfinite(m.get("loss", math.nan))]
        sizes = [m["num-examples"] for m in trained]
        report.train_loss = mean_or_none([m["loss"] for m in trained], sizes)
        report.train_accuracy = mean_or_none([m.get("accuracy", math.nan) for m in trained], sizes)
        for key in ("train", "statistics"):
            self.seconds[f"client_{key}"] += sum(float(m.get(f"seconds-{key}", 0.0)) for m in metrics)

    @contextlib.contextmanager
    def measure_seconds(self, name: str) -> Iterator[None]:
        """Add the seconds that something takes to ``seconds``."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def note_holders(self, holders: Mapping[str, tuple[int, np.ndarray]]) -> None:
        """Note each client's node and its own test images of each class id, int64 [C].

        A node that comes back under another name is not counted twice.
        """
        nodes = {node for node, _ in holders.values()}
        self.holders = {name: (n, held) for name, (n, held) in self.holders.items() if n not in nodes} | dict(holders)

    def note_clients(self, clients: Sequence[tuple[str, np.ndarray]]) -> None:
        """Note names and training images of each class; the log tells of clients that have others than before.

        Holders of images that a resumed run goes on without are still named.
        """
        before = {client["name"]: np.array(client["class_counts"], np.int64) for client in self.clients}
        for known in before.values():
            known.resize(len(self.class_names), refcheck=False)  # classes may have come since
        now = dict(clients)
        away = {name: known for name, known in before.items() if name in self.holders and name not in now}
        both = sorted((now | away).items())
        self.clients = [{"name": name, "class_counts": counts.tolist()} for name, counts in both]
        for name, counts in clients:
            known = before.get(name, counts)
            if (known != counts).any():
                log.info(
                    "%s has other images than before: %d to train on, they were %d", name, counts.sum(), known.sum()
                )

    def held_by_others(self, evaluated: Collection[str]) -> np.ndarray:
        """Test images of each class, int64 [C], of the holders that are not among those that ``evaluated``."""
        away = np.zeros(len(self.class_names), np.int64)
        for held in (held for name, (_, held) in self.holders.items() if name not in evaluated):
            away[: len(held)] += held
        return away

    def add_evaluation(self, task: int, confusion: np.ndarray, away: np.ndarray) -> None:
        """Note the accuracy after ``task`` (from 0); int64 [C, C], rows the true class.

        ``away``, int64 [C], are test images that nobody evaluated. There is no accuracy of a task of which a whole
        class was away: that of the other classes would look like one of the whole task.
        """
        correct, total = confusion.diagonal(), confusion.sum(axis=1)
        self.confusion = confusion.tolist()
        for j, classes in enumerate(self.tasks[: task + 1]):
            known = not ((total == 0) & (away > 0))[classes].any()
            self.matrix[task][j] = _accuracy(correct[classes].sum(), total[classes].sum()) if known else None
        for history, counts in ((self.counted, total), (self.away, away)):
            history.append([int(counts[classes].sum()) for classes in self.tasks[: task + 1]])
        # where nobody answered, the images are still a part of the problem
        numbers = zip(self.counted[-1], self.away[-1], [*self.samples, 0], strict=True)
        self.samples = [now or others or before for now, others, before in numbers]
        self.seen[task] = _accuracy(correct.sum(), total.sum())
        # earlier ones too: of a task without test images some may have come since
        for i, row in enumerate(self.matrix[: task + 1]):
            if any(row[j] is None and self.samples[j] for j in range(i + 1)):
                self.seen[i] = None
        self._warn_of_images(task)
        if task == 0 and self.cpu_started is not None:
            self.seconds["cpu_first_task"] = time.process_time() - self.cpu_started
        self.per_class = {name: _accuracy(*n) for name, *n in zip(self.class_names, correct, total, strict=True)}

    def note_correct(self, labels: np.ndarray, correct: np.ndarray) -> None:
        """Note which of the server's test images the latest model classifies correctly, so that runs can be compared.

        ``correct`` is bool [N], of images of classes ``labels`` [N]. Of each task it makes a text of 1 and 0.
        """
        marks = np.where(correct, "1", "0")
        texts = ["".join(marks[np.isin(labels, classes)]) for classes in self.tasks]
        self.correct_images = texts[: len(self.samples) + 1]

    def _warn_of_images(self, task: int) -> None:
        """Say which tasks were measured after ``task`` (from 0) without images of clients that were away."""
        numbers = enumerate(zip(self.counted[-1], self.away[-1], strict=True), start=1)
        if fewer := [f"task {j} on {now} of {now + away}" for j, (now, away) in numbers if away]:
            log.warning(
                "after task %d not all test images were evaluated, as nodes that hold some were away: %s",
                *(task + 1, ", ".join(fewer)),
            )

    def is_not_learned(self, task: int) -> bool:
        """Whether a ``task``, counted from 1, has classes, and no client has trained in a round of it that was kept."""
        rounds = [r for r in self.rounds if r.task == task]
        return bool(self.tasks[task - 1]) and not any(r.trained and not r.dropped for r in rounds)

    def add_bias(self, task: int, entropies: Sequence[float], distance: float) -> None:
        """Note the federated bias of the local models of ``task`` (from 0).

        The entropies of their responses, in nats, may not be measured; the distance of their prototypes may be NaN.
        """
        self.entropies[task] = list(entropies)
        self.distances[task] = distance if math.isfinite(distance) else None

    def write(self) -> None:
        """Write results.json."""
        self.seconds["total"] = time.perf_counter() - self.started
        if self.cpu_started is not None:
            self.seconds["cpu_total"] = time.process_time() - self.cpu_started
        write_json(self.directory / "results.json", self.as_dict())

    def write_round(self) -> dict[str, Any]:
        """Write both files after a round and its evaluation; returns its line of rounds.jsonl."""
        last = self.rounds[-1]
        schedule = Schedule(self.tasks, self.config.rounds_per_task, self.config.adaptation_rounds)
        line = vars(last) | {
            "num_tasks": len(self.tasks),
            "rounds_per_task": schedule.rounds_of(last.task - 1),
            "total_rounds": schedule.total_rounds,
            "seen_accuracy": self.seen[last.task - 1],
            "elapsed": time.perf_counter() - self.started,
        }
        append_line(self.directory / "rounds.jsonl", line)
        self.write()
        return line

    def as_dict(self) -> dict[str, Any]:
        """The contents of results.json."""
        return {
            "schema": SCHEMA,
            "status": self.status,
            **({"error": self.error} if self.error else {}),
            **{key: getattr(self.config, key) for key in ("method", "prompt", "dataset", "seed")},
            "num_tasks": len(self.tasks),
            "rounds_per_task": self.config.rounds_per_task,
            "class_order": [c for classes in self.tasks for c in classes],
            "class_names": list(self.class_names),
            "tasks": self.tasks,
            **({"stream": self.sharing} if self.sharing else {}),
            **({"validation_share": share} if (share := self.config.validation_share) else {}),
            "samples_per_task": self.samples,
            **({"copied_test_images": self.copies} if self.copies else {}),
            "samples_after_task": self.counted,
            "samples_away_after_task": self.away,
            "accuracy_matrix": self.matrix,
            "per_task_seen_accuracy": self.seen,
            "per_task_mean_accuracy": self._task_means(),
            "per_class_accuracy": self.per_class,
            "confusion": self.confusion,
            **({"correct_images": self.correct_images} if self.correct_images else {}),
            "federated_bias": {"response_entropies": self.entropies, "prototype_distance": self.distances},
            "clients": self.clients,
            "metrics": self._metrics(),
            "communication": self._communication(),
            "seconds": dict(self.seconds) | self._efficiency(),
            "absent": self.absent,
            "tasks_not_learned": [t for t in range(1, len(self.samples) + 1) if self.is_not_learned(t)],
            **({"privacy": self.privacy} if self.privacy else {}),
            "rounds": [vars(r) for r in self.rounds],
            "environment": self.environment,
        }

    def _task_means(self) -> list[float | None]:
        """After each task, the mean of the accuracies on the tasks so far; None where one of them is missing."""
        tested = [j for j, number in enumerate(self.samples) if number]
        rows = [[row[j] for j in tested if j <= i] for i, row in enumerate(self.matrix)]
        known = [[a for a in row if a is not None] for row in rows]
        return [mean_or_none(k) if len(k) == len(r) else None for k, r in zip(known, rows, strict=True)]

    def _metrics(self) -> dict[str, float]:
        tasks = len(self.samples)
        finished = [row[:tasks] for row in self.matrix[:tasks]]
        return summarize_measured(finished, self.samples, [len(classes) for classes in self.tasks])

    def _efficiency(self) -> dict[str, float]:
        """E of FedProK (Gao et al. 2024, eq. 3): seconds of communication and computation in a round, on average."""
        return {"per_round": sum(r.seconds for r in self.rounds) / len(self.rounds)} if self.rounds else {}

    def _communication(self) -> dict[str, float]:
        up, down = sum(r.bytes_up for r in self.rounds), sum(r.bytes_down for r in self.rounds)
        exchanges = max(1, sum(len(r.participants) for r in self.rounds))
        return {
            "bytes_up": up,
            "bytes_down": down,
            "bytes_up_per_client_round": up / exchanges,
            "bytes_down_per_client_round": down / exchanges,
        }


def _accuracy(correct: int, total: int) -> float | None:
    """None without a test image."""
    return float(correct / total) if total else None


def mean_or_none(values: Sequence[float], weights: Sequence[float] | None = None) -> float | None:
    """Mean, weighted if ``weights`` are given; None if there are no values or it is not finite."""
    total = float(np.average(values, weights=weights)) if values else math.nan
    return total if math.isfinite(total) else None
