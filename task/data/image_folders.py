"""Folders of image files: which files count, and which folder names a class."""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from task.data.images import ImageFiles
from task.keys import ConfigError

_MADE_BY_SYSTEMS = ("@eaDir", "__MACOSX")  # folders with copies of images
_NO_PHOTOS = {"BUFR", "EMF", "GRIB", "HDF5", "MPEG", "WMF"}  # formats that Pillow knows of and cannot read
_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}


def images_by_class(folders: Sequence[Path], side: int) -> tuple[ImageFiles, np.ndarray]:
    """Every image file below each folder, sorted by name; hidden files and folders are left out.

    Args:
        folders: one per class, in the order of the class ids; one that does not exist counts as empty.
        side: of the decoded images, in pixels.

    Returns:
        the N images and their class ids, int64 [N].
    """
    found = [sorted(_image_files(folder)) for folder in folders]
    labels = np.repeat(np.arange(len(folders)), np.array([len(files) for files in found], np.int64))
    return ImageFiles(tuple(f for files in found for f in files), side), labels


def _image_files(folder: Path) -> Iterator[str]:
    for place, inside, files in os.walk(folder):  # links to folders may lead anywhere, so they are not followed
        inside[:] = [name for name in inside if not _hidden(name)]
        yield from (os.path.join(place, f) for f in files if f.lower().endswith(_endings()) and not _hidden(f))


@lru_cache(maxsize=1)
def _endings() -> tuple[str, ...]:
    """Of image files that can be read."""
    known = Image.registered_extensions()  # first: it loads the formats
    readable = Image.OPEN.keys() - _NO_PHOTOS
    return tuple(ending for ending, kind in known.items() if kind in readable)


def class_folders(path: Path) -> list[Path]:
    """Folders directly below ``path``, sorted by name, hidden ones left out; empty if there is no such path."""
    inside = sorted(path.iterdir(), key=lambda p: p.name) if path.is_dir() else []
    return [p for p in inside if p.is_dir() and not _hidden(p.name)]


def require_classes(folders: Sequence[Path]) -> None:
    """Refuse train/ and val/ and the like as names of classes: such a folder holds folders and no image.

    Raises:
        ConfigError: names one.
    """
    for folder in folders:
        inside = class_folders(folder) if folder.name.casefold() in _PARTS else []
        if inside and len(images_by_class(inside, side=1)[0]) == len(images_by_class([folder], side=1)[0]):
            raise ConfigError(
                f"{str(folder)!r} looks like a part of the data and not like a class: data-dir holds a folder per "
                "class, or train/ and test/, both, so written, with a folder per class each."
            )


def _hidden(name: str) -> bool:
    return name.startswith((".", *_MADE_BY_SYSTEMS))
