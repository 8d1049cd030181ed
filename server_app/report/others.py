"""Results of other people's code, read from small JSON files as docs/guides/suites.md shows them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_app.report.runs import SavedRun, build_run, is_number
from task.keys import ConfigError
from task.metrics import check_matrix

_NEEDED = {"label": str, "source": str, "accuracy_matrix": list}
_WORDS = {str: "a text", list: "a list of lists"}
_ROUNDED = 0.006  # accuracies may be of two decimals
_COUNTS = ("bytes_up", "bytes_down", "seconds", "cpu_seconds")
_ALLOWED = (*_NEEDED, "partition", "seed", "per_task_seen_accuracy", "samples_per_task", *_COUNTS)


@dataclass(frozen=True)
class OtherResult:
    """One result: its label in tables, where it comes from, the partition of the suite that it belongs to, its run."""

    label: str
    source: str
    partition: str
    run: SavedRun


def read_others(paths: Sequence[Path], datasets: Mapping[str, str]) -> list[OtherResult]:
    """The results in JSON files, and in all those of folders, in the order of ``paths`` and of names.

    ``datasets`` are those of the suite by partition, of one called "" if it has none; each file names one partition.

    Raises:
        ConfigError: a file is not there or not what the format says; names the file and what to change.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if paths and not files:
        raise ConfigError(f"others: there is no .json file in {', '.join(map(str, paths))}.")
    results, first = list[OtherResult](), dict[tuple[object, ...], Path]()
    for file in dict.fromkeys(files):  # one that is named and in a folder too counts once
        other = _read(file, datasets)
        place = (other.label, other.partition, other.run.results.get("seed", file))
        if place in first:
            raise ConfigError(f"others: {first[place]} and {file} have the same label and seed: a seed counts once.")
        first[place] = file
        results.append(other)
    return results


def _read(path: Path, datasets: Mapping[str, str]) -> OtherResult:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it is a {type(content).__name__}, not an object")
        _check(content, list(datasets))
        label, partition = f"{content['label']} (theirs)", content.get("partition", "")
        recorded = {
            "status": "finished",
            "method": label,
            "dataset": datasets[partition],
            "num_tasks": len(content["accuracy_matrix"]),
            "communication": {name: content.get(name) for name in ("bytes_up", "bytes_down")},
            "seconds": {"total": content.get("seconds"), "cpu_total": content.get("cpu_seconds")},
        }
        return OtherResult(label, content["source"], partition, build_run(path, {**content, **recorded}))
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"others: {path} cannot be used: {error}") from error


def _check(content: Mapping[str, Any], partitions: Sequence[str]) -> None:
    """Raise ValueError at the first entry that is not as it must be."""
    if unknown := [name for name in content if name not in _ALLOWED]:
        raise ValueError(f"entry {unknown[0]!r} does not exist; allowed: {', '.join(_ALLOWED)}")
    for name, kind in _NEEDED.items():
        value = content.get(name)
        if not isinstance(value, kind) or not (value.strip() if isinstance(value, str) else value):
            raise ValueError(f"{name} = {content.get(name)!r} must be {_WORDS[kind]}")
    if (seed := content.get("seed")) is not None and not _is_count(seed):
        raise ValueError(f"seed = {seed!r} must be a whole number, 0 or more")
    for name in _COUNTS:
        value = content.get(name)
        if value is not None and not (is_number(value) and 0 <= value < math.inf):
            raise ValueError(f"{name} = {value!r} must be a number, 0 or more")
    if not all(isinstance(row, list) for row in content["accuracy_matrix"]):
        raise ValueError("accuracy_matrix must be a list of lists, one for each task")
    check_matrix(content["accuracy_matrix"])
    tasks = len(content["accuracy_matrix"])
    for name in ("per_task_seen_accuracy", "samples_per_task"):
        value = content.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != tasks):
            raise ValueError(f"{name} must have {tasks} numbers, as accuracy_matrix has {tasks} rows")
    if not all(map(_is_count, content.get("samples_per_task") or [])):
        raise ValueError("samples_per_task must have whole numbers, 0 or more")
    values = [value for row in content["accuracy_matrix"] for value in row if value is not None]
    values += content.get("per_task_seen_accuracy") or []
    if not all(is_number(value) and 0 <= value <= 1 for value in values):
        raise ValueError("accuracies must be fractions in 0..1, with null above the diagonal")
    _check_above_and_means(content["accuracy_matrix"], content.get("per_task_seen_accuracy") or [])
    if content.get("partition", "") not in partitions:
        there = " or ".join(filter(None, partitions)) or "left out, as the suite has no partitions"
        raise ValueError(f"partition = {content.get('partition', '')!r} must be {there}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_above_and_means(matrix: Sequence[Sequence[float | None]], seen: Sequence[float]) -> None:
    for task, row in enumerate(matrix):
        if any(value is not None for value in row[task + 1 :]):
            raise ValueError(f"row {task + 1} of accuracy_matrix must have null behind its first {task + 1} numbers")
        known = [value for value in row if value is not None]
        if seen and known and not min(known) - _ROUNDED <= seen[task] <= max(known) + _ROUNDED:
            raise ValueError(
                f"per_task_seen_accuracy has {seen[task]} after task {task + 1}, which is no mean of {known}"
            )
