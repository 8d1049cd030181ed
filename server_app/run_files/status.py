"""What results.json says of how a run goes or ended. Imports nothing heavy."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server_app.run_files.locks import is_locked
from task.utils.atomic import write_json

SCHEMA = 1  # of results.json
RUNNING, FINISHED = "running", "finished"
INTERRUPTED = "interrupted"  # nobody records it: :func:`true_status` finds it out


def has_checkpoint(directory: Path) -> bool:
    """Whether a run's folder holds a checkpoint, whole or damaged."""
    return any((directory / "checkpoint").glob("*.ckpt"))


def true_status(directory: Path, results: dict[str, Any]) -> dict[str, Any]:
    """The content of results.json with the true status: a process that was killed could not record its end."""
    if results.get("status") != RUNNING or is_locked(directory):
        return results
    advice = f"go on with resume={directory}" if has_checkpoint(directory) else "there is no checkpoint: start it anew"
    error = f"its process ended without saying why, as when it is killed; {advice}"
    return results | {"status": INTERRUPTED, "error": error}


def read_results(directory: Path) -> dict[str, Any]:
    """The content of results.json, with its true status; empty if there is no such file or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        results = json.loads((directory / "results.json").read_text(encoding="utf-8"))
        return true_status(directory, results) if isinstance(results, dict) else {}
    return {}


def untested_classes(results: Mapping[str, Any]) -> list[str]:
    """Names of the classes so far of which no test image was there at the end; ``results`` is a results.json."""
    names, accuracies = results.get("class_names", []), results.get("per_class_accuracy") or {}
    finished = results.get("tasks", [])[: len(results.get("samples_per_task", []))]
    learned = [names[class_id] for classes in finished for class_id in classes]
    return [name for name in learned if name in accuracies and accuracies[name] is None]


def incomplete_tests(results: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Evaluations without images of nodes that were away: after which task, from 1, on how many, of how many.

    ``results`` is a results.json.
    """
    evaluated, away = (results.get(name, []) for name in ("samples_after_task", "samples_away_after_task"))
    numbers = zip(map(sum, evaluated), map(sum, away), strict=False)
    return [(task, now, now + missing) for task, (now, missing) in enumerate(numbers, start=1) if missing]


def mark_failed(directory: Path, reason: str) -> None:
    """Record as failed a run whose process was killed before it recorded its end; an end that is recorded stays."""
    results = read_results(directory)
    if results.get("status") in (RUNNING, INTERRUPTED):
        with contextlib.suppress(OSError):  # a full disk must not hide the reason
            write_json(directory / "results.json", results | {"status": "failed", "error": reason})
