"""What one run directory says."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from task.metrics import crop_to_finished, summarize

SCHEMA = 1
WORDS = {str: "text", int: "a whole number", list: "a list", dict: "an object of named values"}
REQUIRED = {"status": str, "method": str, "dataset": str, "num_tasks": int}
TABLES = ("accuracy_matrix", "per_task_seen_accuracy", "samples_per_task", "confusion")
LISTS = (*TABLES, "tasks", "class_names", "clients", "rounds")
OBJECTS = ("metrics", "per_class_accuracy", "federated_bias", "communication", "seconds", "environment")
OPTIONAL: dict[str, type] = dict.fromkeys(LISTS, list) | dict.fromkeys(OBJECTS, dict)


class ReportError(ValueError):
    """A run directory cannot be reported on; the message is meant for the person who named it."""


@dataclass(frozen=True)
class Run:
    """Of T tasks, k are finished. All accuracies are fractions.

    Attributes:
        results: results.json, with an empty value for each optional part that is missing.
        settings: run keys by their own names: single values of results.json, then config.yaml.
        matrix: [k, k], after task i on task j; NaN above the diagonal, and for a task without test images.
        seen: [T], over all test samples of the classes seen so far; NaN where there is none yet.
        confusion: [C, C] test images by true class id (row) and predicted one, after task k; [0, 0] if not recorded.
        holdings: training images of each class, [C], by client.
        entropies: of each task, response entropies of its local models in nats; empty where not measured.
        distances: [T], of the clients' prototypes; NaN where not measured.
    """

    folder: Path
    results: dict[str, Any]
    settings: dict[str, Any]
    matrix: np.ndarray
    seen: np.ndarray
    confusion: np.ndarray
    holdings: dict[str, np.ndarray]
    entropies: list[np.ndarray]
    distances: np.ndarray

    @property
    def tasks(self) -> list[list[int]]:
        """Class ids of each task."""
        return self.results["tasks"]

    @property
    def finished(self) -> bool:
        """Whether all tasks are done and the run said so."""
        return self.results["status"] == "finished" and len(self.matrix) == len(self.seen)

    @property
    def title(self) -> str:
        """Method and data set."""
        return f"{self.results['method']} on {self.results['dataset']}"

    @property
    def status(self) -> str:
        """The recorded status and, unless all is done, how far the run has come."""
        progress = "" if self.finished else f", {len(self.matrix)} of {len(self.seen)} tasks"
        return f"{self.results['status']}{progress}"

    @property
    def facts(self) -> list[str]:
        """What a title adds: prompt and seed, as far as they are known."""
        return [f"{name} {self.settings[name]}" for name in ("prompt", "seed") if name in self.settings]

    @property
    def metrics(self) -> dict[str, float]:
        """By name: what the run recorded, completed from the finished tasks; empty before the first of them."""
        k = len(self.matrix)
        computed = summarize(self.matrix, self.samples) if k else {}
        seen = self.seen[:k]
        computed |= {"last_accuracy": float(seen[-1]), "average_seen_accuracy": float(seen.mean())} if k else {}
        both = [*computed.items(), *self.results["metrics"].items()]
        return {name: value for name, value in both if is_number(value)}

    @property
    def samples(self) -> list[int]:
        """Test images of each finished task; ones where they were not recorded."""
        return self.results["samples_per_task"] or [1] * len(self.matrix)

    @property
    def megabytes(self) -> float:
        """Bytes sent and received by all clients in the whole run, in units of 10^6; NaN if not recorded."""
        sent = [self.results["communication"].get(name) for name in ("bytes_up", "bytes_down")]
        return sum(sent) / 1e6 if all(map(is_number, sent)) else math.nan


def load_run(folder: Path) -> Run:
    """Read results.json, and config.yaml where there is one.

    Raises:
        ReportError: a file is missing or broken; the message names its path and what is wrong with it.
    """
    path, config = folder / "results.json", folder / "config.yaml"
    results = _parsed(path, json.loads)
    settings = {name.replace("_", "-"): v for name, v in results.items() if isinstance(v, str | int | float)}
    settings |= flat(_parsed(config, yaml.safe_load)) if config.exists() else {}
    try:
        _check(results)
        matrix = crop_to_finished(results["accuracy_matrix"], results["samples_per_task"] or None)
        recorded = (_seen(results), _confusion(results), _holdings(results), *_bias(results))
        return Run(folder, results, settings, matrix, *recorded)
    except (TypeError, ValueError) as error:
        raise ReportError(f"{path}: {error}") from error


def _parsed(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ReportError(f"{path} does not exist: no run has written anything there") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ReportError(f"{path} cannot be read: it holds a {type(content).__name__} instead of named values")
    return content


def _check(results: dict[str, Any]) -> None:
    """Refuse what this version cannot read; give optional parts that are absent or null their empty value."""
    if results.get("schema") != SCHEMA:
        raise ValueError(f"schema is {results.get('schema')!r}; this version reads schema {SCHEMA}")
    results |= {name: kind() for name, kind in OPTIONAL.items() if results.get(name) is None}
    for name, kind in (REQUIRED | OPTIONAL).items():
        if not isinstance(results.get(name), kind):
            raise ValueError(f"{name} is {results.get(name)!r}; it must be {WORDS[kind]}")
    tasks, rows, rounds = results["num_tasks"], results["accuracy_matrix"], results["rounds"]
    if tasks < 1:
        raise ValueError(f"num_tasks is {tasks}; at least 1 is needed")
    if len(rows) not in (0, tasks):
        raise ValueError(f"accuracy_matrix has {len(rows)} rows, but num_tasks is {tasks}")
    if not all(isinstance(task, list) for task in results["tasks"]):
        raise ValueError("tasks must hold one list of class ids for each task")
    drawn = results["confusion"] or results["clients"]
    if drawn and not {c for task in results["tasks"] for c in task} <= set(range(len(results["class_names"]))):
        raise ValueError("tasks must hold ids of the classes in class_names")
    if not all(isinstance(entry, dict) for entry in rounds):
        raise ValueError("rounds must hold one object of named values for each round")
    if not all(isinstance(failure, dict) for entry in rounds for failure in entry.get("failures") or []):
        raise ValueError("failures of a round must hold one object of named values for each failure")


def _seen(results: dict[str, Any]) -> np.ndarray:
    num_tasks = results["num_tasks"]
    seen = np.array(results["per_task_seen_accuracy"] or [None] * num_tasks, dtype=np.float64)
    if seen.shape != (num_tasks,) or ((seen < 0) | (seen > 1)).any():
        raise ValueError(f"per_task_seen_accuracy must be {num_tasks} fractions in 0..1 or null, not {seen.tolist()}")
    return seen


def _confusion(results: dict[str, Any]) -> np.ndarray:
    classes = len(results["class_names"])
    counts = np.array(results["confusion"] or np.empty((0, 0)), dtype=np.float64)
    if counts.shape not in ((0, 0), (classes, classes)) or not (counts >= 0).all():
        raise ValueError(f"confusion must be counts [{classes}, {classes}], not {list(counts.shape)}")
    return counts


def _holdings(results: dict[str, Any]) -> dict[str, np.ndarray]:
    found = {}
    for entry in results["clients"]:
        whole = isinstance(entry, dict) and {"name", "class_counts"} <= entry.keys()
        counts = np.array(entry["class_counts"] if whole else None, dtype=np.float64)
        if counts.shape != (len(results["class_names"]),) or not (counts >= 0).all():
            raise ValueError(f"clients must each have a name and class_counts [{len(results['class_names'])}]")
        found[str(entry["name"])] = counts
    return found


def _bias(results: dict[str, Any]) -> tuple[list[np.ndarray], np.ndarray]:
    num_tasks, bias = results["num_tasks"], results["federated_bias"]
    entropies = [np.array(found, dtype=np.float64) for found in bias.get("response_entropies", [[]] * num_tasks)]
    distances = np.array(bias.get("prototype_distance", [None] * num_tasks), dtype=np.float64)
    if len(entropies) != num_tasks or any(found.ndim != 1 for found in entropies) or distances.shape != (num_tasks,):
        raise ValueError(f"federated_bias must have response_entropies and prototype_distance of {num_tasks} tasks")
    return entropies, distances


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested mappings under their names joined by dots."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def is_number(value: object) -> bool:
    """Whether the value is one that can be calculated with; NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
