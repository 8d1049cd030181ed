"""Results of other people's code, read from small JSON files as docs/guides/suites.md shows them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_app.report.runs import Run, build_run, is_number
from task.keys import ConfigError
from task.metrics import crop_to_finished

_NEEDED = ("label", "source", "accuracy_matrix")
_COUNTS = ("bytes_up", "bytes_down", "seconds", "cpu_seconds")
_ALLOWED = (*_NEEDED, "partition", "seed", "per_task_seen_accuracy", "samples_per_task", *_COUNTS)


@dataclass(frozen=True)
class OtherResult:
    """One result: its label in tables, where it comes from, and the partition of the suite that it belongs to."""

    label: str
    source: str
    partition: str
    path: Path
    content: dict[str, Any]

    def run(self, dataset: str) -> Run:
        """The result as a finished run on a data set."""
        content = self.content
        return build_run(
            self.path,
            {
                "status": "finished",
                "method": self.label,
                "dataset": dataset,
                "seed": content.get("seed"),
                "num_tasks": len(content["accuracy_matrix"]),
                "accuracy_matrix": content["accuracy_matrix"],
                "per_task_seen_accuracy": content.get("per_task_seen_accuracy"),
                "samples_per_task": content.get("samples_per_task"),
                "communication": {name: content.get(name) for name in ("bytes_up", "bytes_down")},
                "seconds": {"total": content.get("seconds"), "cpu_total": content.get("cpu_seconds")},
            },
        )


def read_others(paths: Sequence[Path], partitions: Sequence[str]) -> list[OtherResult]:
    """The results in JSON files, and in all those of folders, in the order of ``paths`` and of names.

    ``partitions`` are those of the suite; each file names one of them, or none where there is none.

    Raises:
        ConfigError: a file is not there or not what the format says; names the file and what to change.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if paths and not files:
        raise ConfigError(f"others: there is no .json file in {', '.join(map(str, paths))}.")
    return [_read(file, partitions) for file in files]


def _read(path: Path, partitions: Sequence[str]) -> OtherResult:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it is a {type(content).__name__}, not an object")
        _check(content, partitions)
        other = OtherResult(
            f"{content['label']} (theirs)", content["source"], content.get("partition", ""), path, content
        )
        other.run("")  # what else a results.json must be
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"others: {path} cannot be used: {error}") from error
    return other


def _check(content: Mapping[str, Any], partitions: Sequence[str]) -> None:
    """Raise ValueError at the first entry that is not as it must be."""
    if unknown := [name for name in content if name not in _ALLOWED]:
        raise ValueError(f"entry {unknown[0]!r} does not exist; allowed: {', '.join(_ALLOWED)}")
    if missing := [name for name in _NEEDED if name not in content]:
        raise ValueError(f"entry {missing[0]!r} is missing")
    for name in ("label", "source"):
        if not isinstance(content[name], str) or not content[name].strip():
            raise ValueError(f"{name} = {content[name]!r} must be a text")
    for name in _COUNTS:
        value = content.get(name)
        if value is not None and not (is_number(value) and 0 <= value < math.inf):
            raise ValueError(f"{name} = {value!r} must be a number, 0 or more")
    _check_accuracies(content)
    partition = content.get("partition", "")
    if partition not in (partitions or [""]):
        there = f"one of {', '.join(partitions)}" if partitions else "left out, as the suite has no partitions"
        raise ValueError(f"partition = {partition!r} must be {there}")


def _check_accuracies(content: Mapping[str, Any]) -> None:
    rows = content["accuracy_matrix"]
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError("accuracy_matrix must be a list of lists, one for each task")
    tasks = len(rows)
    values = [value for row in rows for value in row if value is not None]
    seen = content.get("per_task_seen_accuracy")
    if not values or not all(is_number(value) and 0 <= value <= 1 for value in [*values, *(seen or [])]):
        raise ValueError("accuracies must be fractions in 0..1, with null above the diagonal")
    if any(len(row) != tasks for row in rows) or len(crop_to_finished(rows)) < tasks:
        raise ValueError(
            f"accuracy_matrix must be square and complete: {tasks} rows of {tasks}, null above the diagonal"
        )
    for name in ("per_task_seen_accuracy", "samples_per_task"):
        if content.get(name) is not None and len(content[name]) != tasks:
            raise ValueError(f"{name} must have {tasks} numbers, as accuracy_matrix has {tasks} rows")
