"""The files of one run, read for its report."""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from server_app.errors import ReportError
from server_app.run_files.paths import resolve_output_dir
from server_app.run_files.status import FINISHED, SCHEMA, incomplete_tests, true_status, untested_classes
from task.keys import ConfigError
from task.metrics import crop_to_finished, fold, gaps, summarize_measured, untested_tasks

REQUIRED = ("status", "method", "dataset", "num_tasks")
MATRICES = ("accuracy_matrix", "per_task_seen_accuracy", "samples_per_task", "confusion")
LISTS = (*MATRICES, "tasks", "class_names", "clients", "rounds")
NO_SETTINGS = ("schema", "status", "error", "copied_test_images")  # of results.json: single values, but no run keys
MARKS = {"1": 1.0, "0": 0.0}  # of correct_images
OBJECTS = ("metrics", "per_class_accuracy", "federated_bias", "communication", "seconds", "environment")


def data_name(dataset: str, data_dir: str) -> str:
    """What tables and pictures call a data set.

    >>> data_name("npz", "/data/scans.npz"), data_name("folder", "/data/pets.v2/"), data_name("digits", "")
    ('scans', 'pets.v2', 'digits')
    """
    return Path(data_dir).name.removesuffix(".npz") or dataset if dataset in ("npz", "folder") else dataset


def name_setting(*parts: str, validation_share: float) -> str:
    """The parts that are not empty, and a word about accuracies that are not of test images."""
    return ", ".join(filter(None, [*parts, "validation images" * bool(validation_share)]))


@dataclass(frozen=True)
class SavedRun:
    """A run, read for its report. Of its T tasks, k are finished. All accuracies are fractions.

    Attributes:
        results: content of results.json; optional parts that are missing are empty.
        settings: run keys by name, from results.json and config.yaml.
        matrix: [k, k], after task i on task j; NaN above the diagonal, for a task without test images, and where nodes
            with test images were away.
        seen: [T], over all test samples of the classes seen so far; NaN where there is none yet.
        confusion: [C, C] test images by true class id (row) and predicted one, after task k; [0, 0] if not recorded.
        correct: of each task [N], whether its test images were classified correctly after task k, 1 or 0; empty if not
            recorded, as where nodes keep the test images.
        client_counts: training images of each class, [C], by name of the client.
        entropies: response entropies of the local models of each task, in nats; empty if not measured.
        distances: [T], between the prototypes of different clients; NaN if not measured.
    """

    folder: Path
    results: dict[str, Any]
    settings: dict[str, Any]
    matrix: np.ndarray
    seen: np.ndarray
    confusion: np.ndarray
    correct: list[np.ndarray]
    client_counts: dict[str, np.ndarray]
    entropies: list[np.ndarray]
    distances: np.ndarray

    @property
    def tasks(self) -> list[list[int]]:
        """Class ids of each task."""
        return self.results["tasks"]

    @property
    def data_name(self) -> str:
        """Name of the data set; of images of one's own that of their file or folder."""
        return data_name(self.results["dataset"], str(self.settings.get("data-dir", "")))

    @property
    def setting(self) -> str:
        """Data set, and a word about validation images."""
        return name_setting(self.data_name, validation_share=self.settings.get("validation-share", 0))

    @property
    def evaluated(self) -> str:
        """Which images the accuracies are of: "test" ones, or "validation" images in their place."""
        return "validation" if self.settings.get("validation-share") else "test"

    @property
    def has_run_keys(self) -> bool:
        """Whether its run keys are recorded: results.json alone has a few of them."""
        return "learning-rate" in self.settings

    @property
    def finished(self) -> bool:
        """Whether the run is recorded as finished and has all its tasks."""
        return self.results["status"] == FINISHED and len(self.matrix) == len(self.seen)

    @property
    def title(self) -> str:
        """Method and data set."""
        return f"{self.results['method']} on {self.setting}"

    @property
    def status(self) -> str:
        """The recorded status and, unless all is done, how far the run has come."""
        progress = "" if self.finished else f", {len(self.matrix)} of {len(self.seen)} tasks"
        return f"{self.results['status']}{progress}"

    @property
    def facts(self) -> list[str]:
        """Prompt and seed, if recorded."""
        return [f"{name} {self.settings[name]}" for name in ("prompt", "seed") if name in self.settings]

    @property
    def effective_images(self) -> float:
        """Test images of one task that would give an accuracy the noise of this one; NaN if there are none.

        Tasks count alike, so that the images of a small task count more than others: with n_t images of each of T tasks
        it is T^2 / sum of 1 / n_t.
        """
        by_task = [n for n in self.results["samples_per_task"] if n]
        return len(by_task) ** 2 / sum(1 / n for n in by_task) if by_task else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics by name, recorded or computed from the finished tasks; empty before the first one."""
        metrics, seen = {}, self.seen[: len(self.matrix)]
        if len(seen):
            metrics = summarize_measured(self.matrix, self.samples, self._new_classes)
            known = {"last_accuracy": float(seen[-1]), "average_seen_accuracy": float(seen.mean())}
            counted = bool(self.results["samples_per_task"])  # without counts the matrix does not tell these two
            metrics |= {name: value for name, value in known.items() if is_number(value) or not counted}
        recorded = self.results["metrics"]
        if self.untested_tasks:  # an earlier version recorded what cannot be known
            recorded = {name: value for name, value in recorded.items() if name in metrics}
        items = [*metrics.items(), *recorded.items()]  # a recorded metric wins
        return {name: value for name, value in items if is_number(value)}

    @property
    def samples(self) -> list[int]:
        """Test images of each finished task; ones where they were not recorded."""
        return self.results["samples_per_task"] or [1] * len(self.matrix)

    @property
    def copies(self) -> int:
        """Test images that are training images too, as far as was recorded."""
        return self.results.get("copied_test_images", 0)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Where an accuracy is missing that other tasks have: after which task, on which task, counted from 1."""
        matrix, kept = fold(self.matrix, self.samples)
        ends = np.append(kept[1:], len(self.matrix))  # counted from 1, as a folded task ends before the next begins
        return [(int(ends[i]), int(kept[j]) + 1) for i, j in gaps(matrix)]

    @property
    def untested(self) -> list[str]:
        """Names of the classes so far of which no test image was there at the end."""
        return untested_classes(self.results)

    @property
    def untested_tasks(self) -> list[int]:
        """Tasks with new classes, counted from 1, of which no test image was there at the end."""
        return untested_tasks(self.samples, self._new_classes)

    @property
    def _new_classes(self) -> list[int]:
        return [len(classes) for classes in self.tasks]

    @property
    def incomplete(self) -> list[tuple[int, int, int]]:
        """Evaluations without images of nodes that were away, as :func:`incomplete_tests` has them."""
        return incomplete_tests(self.results)

    def cost(self, part: str, name: str) -> float:
        """A number of the part ``communication`` or ``seconds`` of the results; NaN if not recorded."""
        value = self.results[part].get(name)
        return value if is_number(value) else math.nan

    @property
    def megabytes(self) -> float:
        """Bytes sent and received by all clients in the whole run, in units of 10^6; NaN if not recorded."""
        return (self.cost("communication", "bytes_up") + self.cost("communication", "bytes_down")) / 1e6


def malformed(folder: Path, error: Exception) -> ReportError:
    """The error for people: the folder's results.json has not the right content; ``error`` says why."""
    return ReportError(
        f"{folder / 'results.json'} is no results.json of schema {SCHEMA} ({type(error).__name__}: {error})"
    )


def load_run(folder: Path) -> SavedRun:
    """Read results.json, of a run in any state, and config.yaml where there is one.

    Raises:
        ReportError: a file is missing or is not what its name says; the message names its path.
    """
    path, settings = folder / "results.json", _read_config(folder / "config.yaml")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["schema"] != SCHEMA:
            raise ValueError(f"its schema is {results['schema']!r}")
        return build_run(folder, true_status(folder, results), settings)
    except FileNotFoundError as error:
        raise ReportError(f"{path} does not exist: no run has written anything there{_hint(folder)}") from error
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise malformed(folder, error) from error


def _hint(folder: Path) -> str:
    """Runs go to the project's folder, and whoever asks for a report may be elsewhere."""
    with contextlib.suppress(ConfigError):  # a home that is not there
        own = resolve_output_dir(str(folder))
        return f"; did you mean {own}?" if (own / "results.json").exists() else ""
    return ""


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return flat(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error


def build_run(folder: Path, recorded: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> SavedRun:
    """The run in the content of results.json; parts that are absent or null are empty.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: a part is not what its name says.
    """
    values = {name: value for name, value in recorded.items() if value is not None}
    empty: dict[str, Any] = {name: [] for name in LISTS} | {name: {} for name in OBJECTS}
    results = empty | values | {name: values[name] for name in REQUIRED}
    for name, kind in (*((name, dict) for name in OBJECTS), ("method", str), ("dataset", str)):
        if not isinstance(results[name], kind):
            raise TypeError(f"{name!r} is {results[name]!r}")
    told = {name: value for name, value in results.items() if name not in NO_SETTINGS}
    single = {name.replace("_", "-"): v for name, v in told.items() if isinstance(v, str | int | float)}
    num_tasks, classes, bias = results["num_tasks"], len(results["class_names"]), results["federated_bias"]
    return SavedRun(
        folder=folder,
        results=results,
        settings=single | dict(settings or {}),
        matrix=crop_to_finished(results["accuracy_matrix"], results["samples_per_task"]),
        seen=_floats(results["per_task_seen_accuracy"] or [None] * num_tasks, num_tasks),
        confusion=_floats(results["confusion"], classes, classes) if results["confusion"] else np.empty((0, 0)),
        correct=[np.array([MARKS[mark] for mark in marks]) for marks in results.get("correct_images", [])],
        client_counts={str(client["name"]): _floats(client["class_counts"], classes) for client in results["clients"]},
        entropies=[_floats(values, -1) for values in bias.get("response_entropies", [[]] * num_tasks)],
        distances=_floats(bias.get("prototype_distance", [None] * num_tasks), num_tasks),
    )


def _floats(values: list[Any], *shape: int) -> np.ndarray:
    """Null becomes NaN; another number of values than that of ``shape`` raises ValueError."""
    return np.array(values, dtype=np.float64).reshape(shape)


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested mappings under their names joined by dots."""
    values: dict[str, Any] = {}
    for name, value in nested.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values


def is_number(value: object) -> bool:
    """Whether the value is an int or float, not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
