"""Folders of the project and of its runs, their locks, and what results.json says of how a run ended.

Imports nothing heavy.
"""

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from server_app.errors import LaunchError
from task.config.schema import APPEARING, Config
from task.keys import ConfigError
from task.utils.atomic import write_json
from task.utils.paths import expand_home, nearest_existing

log = logging.getLogger(__name__)

LOCK = ".lock"
SCHEMA = 1  # of results.json
RUNNING, FINISHED = "running", "finished"
INTERRUPTED = "interrupted"  # nobody records it: :func:`true_status` finds it out


def project_folder() -> Path:
    """The checkout of this very code, or the one that the working directory is in.

    A copy that Flower installed from an app bundle, which has no Makefile, is not one.

    Raises:
        LaunchError: there is none, as after a plain installation.
    """
    for folder in (Path(__file__).parents[2], Path.cwd(), *Path.cwd().parents):
        if (folder / "Makefile").is_file() and (folder / "server_app" / "app.py").is_file():
            return folder.resolve()
    raise LaunchError(
        "Flower runs a project's folder, and this is no such folder: go to a checkout, or add --in-process."
    )


def run_directory(config: Config) -> Path:
    """Absolute folder of a run: a new one, or that of the run to resume.

    A run without a name is called after method, data set, seed and local time.

    Raises:
        ConfigError: the folder holds another run already.
    """
    # two runs may start in the same second
    unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    name = config.run_name or f"{config.method_row.name}-{config.dataset}-seed{config.seed}-{unique}"
    directory = resolve_output_dir(config.output_dir) / name
    try:
        checkpoints = has_checkpoint(directory)
        taken = checkpoints or any((directory / name).exists() for name in ("results.json", "rounds.jsonl"))
    except OSError as error:
        raise ConfigError(f"output-dir or run-name cannot be used: {error}.") from error
    if taken and not config.resume:
        advice = f"Give another name{_other_advice(directory, config, checkpoints)}."
        raise ConfigError(f"run-name = {config.run_name!r} is taken: {directory} holds results already. {advice}")
    return directory


def has_checkpoint(directory: Path) -> bool:
    """Whether a run's folder holds a checkpoint, whole or damaged."""
    return any((directory / "checkpoint").glob("*.ckpt"))


def _other_advice(directory: Path, config: Config, checkpoints: bool) -> str:
    finished = read_results(directory).get("status") == FINISHED
    if checkpoints and (directory / "config.yaml").exists() and (config.class_order == APPEARING or not finished):
        return f", or go on there with resume={directory}"
    return "" if finished or is_locked(directory) else f", or delete {directory}"


def require_writable(directory: Path) -> None:
    """Check, before anything is started, that a run's folder can be made or written.

    Raises:
        ConfigError: a file is in its way, or the right to write is missing.
    """
    existing = nearest_existing(directory)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "may not be written" if existing.is_dir() else "is a file, not a folder"
        raise ConfigError(f"output-dir = {str(directory.parent)!r} cannot be used: {str(existing)!r} {reason}.")


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a folder if need be and lock it against other processes; the lock ends with this process at the latest.

    Where the file system has no locks, there is none, and the log says so.

    Raises:
        Timeout: another process has the lock.
        OSError: the folder cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=1)  # :func:`is_locked` holds the lock for a moment
    except Timeout:
        raise
    except (OSError, NotImplementedError) as error:
        log.warning("%s cannot be locked (%s): start no second run there", folder, error)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def lock_run(directory: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder; see :func:`lock_folder`.

    Raises:
        ConfigError: it cannot be written, or another process writes it.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(directory))
            (directory / "results.json.part").touch()
            (directory / "results.json.part").unlink()
        except Timeout as error:
            raise ConfigError(f"{str(directory)!r} is the folder of a run that another process is at.") from error
        except OSError as error:
            raise ConfigError(f"output-dir = {str(directory.parent)!r} cannot be written: {error}.") from error
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process has locked a folder, see :func:`lock_folder`; true also where that cannot be known."""
    if not (folder / LOCK).exists():
        return False
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except (Timeout, OSError, NotImplementedError):
        return True
    lock.release()
    return False


def true_status(directory: Path, results: dict[str, Any]) -> dict[str, Any]:
    """The content of results.json with the true status: a process that was killed could not record its end."""
    if results.get("status") != RUNNING or is_locked(directory):
        return results
    error = f"its process ended without saying why, as when it is killed; go on with resume={directory}"
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


def resolve_output_dir(output_dir: str) -> Path:
    """The run key ``output-dir`` as an absolute path.

    A relative one is below the environment variable FCIL_HOME, else the project's folder, else the working directory.

    Raises:
        ConfigError: it is empty, or it or FCIL_HOME begins with a home that is not there.
    """
    if not output_dir.strip():
        raise ConfigError("output-dir = '' is not possible: name a folder for the results.")
    folder = expand_home(output_dir, "output-dir")
    if home := os.environ.get("FCIL_HOME"):
        return expand_home(home, "FCIL_HOME").resolve() / folder
    try:
        return project_folder() / folder
    except LaunchError:
        return Path.cwd() / folder
