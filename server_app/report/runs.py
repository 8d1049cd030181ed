"""What one run directory says."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from task.metrics import completed, summarize

SCHEMA = 1
WORDS = {str: "text", int: "a whole number", list: "a list", dict: "an object of named values"}
REQUIRED = {"status": str, "method": str, "dataset": str, "num_tasks": int}
LISTS = ("accuracy_matrix", "per_task_seen_accuracy", "samples_per_task", "tasks", "class_names", "rounds")
OBJECTS = ("metrics", "per_class_accuracy", "communication", "seconds", "environment")
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
    """

    folder: Path
    results: dict[str, Any]
    settings: dict[str, Any]
    matrix: np.ndarray
    seen: np.ndarray

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
        computed = summarize(self.matrix, self.samples) | {"last_accuracy": float(self.seen[k - 1])} if k else {}
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
        matrix = completed(results["accuracy_matrix"], results["samples_per_task"] or None)
        return Run(folder, results, settings, matrix, _seen(results))
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


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested mappings under their names joined by dots."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def is_number(value: object) -> bool:
    """Whether the value is one that can be calculated with; NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
