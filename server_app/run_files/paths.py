"""Folders of the project and of its runs."""

import os
import secrets
import time
from pathlib import Path

from server_app.errors import LaunchError
from server_app.run_files.locks import is_locked
from server_app.run_files.status import FINISHED, has_checkpoint, read_results
from task.config.schema import APPEARING, Config
from task.keys import ConfigError
from task.utils.paths import expand_home, nearest_existing


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


def _other_advice(directory: Path, config: Config, checkpoints: bool) -> str:
    results = read_results(directory)
    finished = results.get("status") == FINISHED
    open_ended = config.class_order == APPEARING and results.get("num_tasks", 0) < config.num_tasks
    if checkpoints and (directory / "config.yaml").exists() and (open_ended or not finished):
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
