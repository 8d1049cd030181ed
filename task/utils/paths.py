"""Paths of files and folders; imports no torch."""

import os
from pathlib import Path

from task.keys import ConfigError


def expand_home(path: str, name: str) -> Path:
    """The path with the user's home in place of ~; ``name`` is the key or variable that has it.

    Raises:
        ConfigError: there is no such user, or this one has no home, as in a container that runs as a bare number.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{name} = {path!r}: there is no such home folder, write an absolute path.") from error


def nearest_existing(folder: Path) -> Path:
    """An absolute path itself, or the nearest folder above it that exists."""
    # Path.exists raises an error without the right to look
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))
