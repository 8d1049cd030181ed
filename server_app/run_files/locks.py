"""Locks of folders against other processes."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from task.keys import ConfigError

log = logging.getLogger(__name__)

LOCK = ".lock"


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
