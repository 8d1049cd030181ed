"""Reading small files that people name: never a pipe or a device, which would be waited for or read for ever."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

SMALL = 2**24  # bytes; settings, suites and certificates have a thousandth of it

Content = TypeVar("Content")


def nearest_existing(folder: Path) -> Path:
    """An absolute path itself, or the nearest folder above it that exists."""
    # Path.exists raises an error without the right to look
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def require_file(path: Path) -> None:
    """Check that what is there, if anything is, is a file.

    Raises:
        OSError: nobody may look.
        ValueError: it is something else.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is a folder, a pipe, a socket or a device")  # opening a pipe could wait for ever


def read_small(path: Path, most: int = SMALL) -> bytes:
    """The content of a file of at most ``most`` bytes.

    Raises:
        OSError: it is not there or cannot be read.
        ValueError: it is no file, or has more bytes.
    """
    require_file(path)
    if path.stat().st_size > most:
        raise ValueError(f"{path.name} has more than {most} bytes")
    return path.read_bytes()


def parse_small(path: Path, parse: Callable[[str], Content], most: int = SMALL) -> Content:
    """What ``parse`` makes of the text of a small file.

    Raises:
        OSError: it is not there or cannot be read.
        ValueError: as :func:`read_small`, or it is no UTF-8 or nested too deeply. ``parse`` may raise others.
    """
    try:
        return parse(read_small(path, most).decode())
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
