"""Where the project and its runs are, and how they ended; imports nothing heavy: the command line answers at once."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any, TextIO

from server_app.errors import LaunchError
from task.config.schema import Config
from task.keys import ConfigError

log = logging.getLogger(__name__)


def project_folder() -> Path:
    """The checkout of this very code, or the one that the working directory is in.

    A copy that Flower installed from an app bundle, which has no Makefile, is not one.

    Raises:
        LaunchError: there is none, as after a plain installation.
    """
    for place in (Path(__file__).parents[2], Path.cwd(), *Path.cwd().parents):
        if (place / "Makefile").is_file() and (place / "server_app" / "app.py").is_file():
            return place.resolve()
    raise LaunchError("Flower runs a project's folder, and this is none: go to a checkout, or add --in-process.")


def run_directory(config: Config) -> Path:
    """Absolute folder of a run: one that does not exist yet, or that of the run to resume.

    A run without a name is called after method, data set, seed and local time.

    Raises:
        ConfigError: the folder holds another run already.
    """
    # two runs may start in the same second
    unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    name = config.run_name or f"{config.row.name}-{config.dataset}-seed{config.seed}-{unique}"
    directory = placed(Path(config.output_dir)) / name
    try:
        taken = (directory / "results.json").exists()
    except OSError as error:
        raise ConfigError(f"output-dir or run-name cannot be used: {error}.") from error
    if taken and not config.resume:
        raise ConfigError(f"run-name = {config.run_name!r} is taken: {directory} holds results already.")
    return directory


def locked(folder: Path) -> TextIO:
    """Make a folder if need be and take its lock, which whoever inherits the file holds too, until all have closed it.

    Where the file system knows no locks, there is none, and the log says so.

    Raises:
        OSError: BlockingIOError if another process has it, others if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "w")  # noqa: SIM115, the lock lasts as long as it is open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError as error:
        log.warning("%s cannot be locked (%s): start no second run there", folder, error)
    return file


def claim(directory: Path) -> TextIO:
    """Keep other processes out of a run's folder until the file is closed; see :func:`locked`.

    Raises:
        ConfigError: it cannot be written, or another process writes it.
    """
    try:
        lock = locked(directory)
        (directory / "results.json.part").touch()
        (directory / "results.json.part").unlink()
        return lock
    except BlockingIOError as error:
        raise ConfigError(f"{str(directory)!r} is the folder of a run that another process is at.") from error
    except OSError as error:
        raise ConfigError(f"output-dir = {str(directory.parent)!r} cannot be written: {error}.") from error


def read_results(directory: Path) -> dict[str, Any]:
    """What results.json holds; nothing when there is none or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        results = json.loads((directory / "results.json").read_text())
        return results if isinstance(results, dict) else {}
    return {}


def mark_failed(directory: Path, reason: str) -> None:
    """Note the end of a run whose process was killed before it could; another's end stays as it is."""
    results = read_results(directory)
    if results.get("status") == "running":
        part = directory / "results.json.part"
        part.write_text(json.dumps(results | {"status": "failed", "error": reason}, indent=1) + "\n")
        part.replace(directory / "results.json")


def placed(output: Path) -> Path:
    """An ``output-dir`` made absolute: a relative one counts from FCIL_HOME, the project, or the working directory."""
    if "FCIL_HOME" in os.environ:
        return Path(os.environ["FCIL_HOME"]).resolve() / output
    try:
        return project_folder() / output
    except LaunchError:
        return Path.cwd() / output
