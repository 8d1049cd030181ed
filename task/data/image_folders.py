"""Folders of image files: which files count, and which folder names a class."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from task.data.images import MAX_PIXELS, ImageFiles, readable_formats
from task.keys import ConfigError

log = logging.getLogger(__name__)

_SYSTEM_FOLDERS = ("@eaDir", "__MACOSX")  # made by operating systems, with copies of images
_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}


def images_by_class(folders: Sequence[Path], side: int, max_pixels: int = MAX_PIXELS) -> tuple[ImageFiles, np.ndarray]:
    """Every image file below each class's folder, sorted by name, and the class ids, int64 [N].

    Hidden files and folders are left out; a missing folder counts as empty. ``side`` and ``max_pixels`` as
    :class:`ImageFiles` has them.

    Raises:
        OSError: a folder cannot be read.
    """
    by_class = [sorted(image_files(folder, _refuse)) for folder in folders]
    labels = np.repeat(np.arange(len(folders)), np.array([len(files) for files in by_class], np.int64))
    return ImageFiles(tuple(f for files in by_class for f in files), side, max_pixels), labels


def image_files(folder: Path, on_error: Callable[[OSError], object]) -> Iterator[str]:
    """Every image file below a folder; ``on_error`` gets the error of each folder that is missing or unreadable."""
    for parent, folders, files in os.walk(folder, onerror=on_error):  # links to folders are not followed
        folders[:] = [name for name in folders if not _hidden(name)]
        yield from (os.path.join(parent, f) for f in files if _is_image(f))


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@lru_cache(maxsize=1)
def _endings() -> tuple[str, ...]:
    """File name endings of the images that are read."""
    readable = readable_formats()
    return tuple(ending for ending, kind in Image.registered_extensions().items() if kind in readable)


def class_folders(path: Path) -> list[Path]:
    """Folders directly below ``path``, sorted by name, hidden ones left out; empty if there is no such path.

    A link that leads nowhere is one too: the folder may be on a disk that is not there.
    """
    entries = sorted(path.iterdir(), key=lambda p: p.name) if path.is_dir() else []
    return [p for p in entries if (p.is_dir() or (p.is_symlink() and not p.exists())) and not _hidden(p.name)]


def require_classes(folders: Sequence[Path]) -> None:
    """Refuse folders such as train/ and val/, which hold folders and no images, as classes.

    The log warns where all folders hold the same folders and no image themselves: these may be the classes.

    Raises:
        ConfigError: names one.
    """
    for folder in folders:
        subfolders = class_folders(folder) if folder.name.casefold() in _PARTS else []
        if subfolders and len(images_by_class(subfolders, side=1)[0]) == len(images_by_class([folder], side=1)[0]):
            raise ConfigError(
                f"{str(folder)!r} looks like a part of the data and not like a class: data-dir holds a folder per "
                "class, or train/ and test/, both, so written, with a folder per class each."
            )
    with contextlib.suppress(OSError):  # a folder without the right to read it: the caller finds and names it
        _warn_of_level(folders)


def _warn_of_level(folders: Sequence[Path]) -> None:
    if len(folders) < 2 or any(map(_holds_image, folders)):
        return
    inside = [{folder.name for folder in class_folders(folder)} for folder in folders]
    if shared := set[str].intersection(*inside):
        log.warning(
            "the class folders of %s hold no image, but each has a folder %r: if that is a class, data-dir is a folder "
            "too high",
            folders[0].parent,
            min(shared),
        )


def _holds_image(folder: Path) -> bool:
    return folder.is_dir() and any(_is_image(path.name) for path in folder.iterdir() if path.is_file())


def _is_image(name: str) -> bool:
    return name.lower().endswith(_endings()) and not _hidden(name)


def _hidden(name: str) -> bool:
    return name.startswith((".", *_SYSTEM_FOLDERS))
