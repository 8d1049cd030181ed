"""Digests of images: whether they are still those that a run began with, and whether test images are trained on."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from task.data.images import Dataset, ImageFiles, resolve_source
from task.data.load import is_published

_HASHED = 1024  # images at a time


def data_digest(dataset: Dataset, whole_files: bool) -> str:
    """SHA-256 of class names, labels and images, to tell whether they are still those that a run began with.

    Image files count with their names, those of their folders and their sizes, or with all bytes for ``whole_files``,
    which takes minutes for the largest published sets; an .npy file with its size and a thousand of its images.
    """
    total = hashlib.sha256(repr(dataset.class_names).encode())
    for images, labels in ((dataset.train_images, dataset.train_labels), (dataset.test_images, dataset.test_labels)):
        total.update(labels.tobytes())
        source, positions = resolve_source(images, np.arange(len(images)))
        if isinstance(source, ImageFiles):
            for path in (Path(source.paths[position]) for position in positions):
                about = (path.parent.name, path.name, _file_digest(path, whole_files))
                total.update(repr(about).encode("utf-8", "replace"))
            continue
        if isinstance(source, np.memmap):
            total.update(repr(Path(str(source.filename)).stat().st_size).encode())
            positions = positions[:: len(positions) // _HASHED + 1]
        for start in range(0, len(positions), _HASHED):
            total.update(source[positions[start : start + _HASHED]].tobytes())
    return total.hexdigest()


def count_copies(dataset: Dataset, name: str) -> int:
    """Test, or validation, images that are training images too, byte by byte.

    Neither published sets are looked at nor .npy files, which may be large.
    """
    parts = dataset.train_images, dataset.test_images
    (train, of_train), (test, of_test) = (resolve_source(images, np.arange(len(images))) for images in parts)
    if is_published(name) or isinstance(train, np.memmap):
        return 0
    if isinstance(train, ImageFiles) and isinstance(test, ImageFiles):
        known, tested = _digests_of_files([train.paths[i] for i in of_train], [test.paths[i] for i in of_test])
    else:
        known, tested = ([_digest(images[np.array([i])]) for i in range(len(images))] for images in parts)
    seen = set(known)
    return sum(digest in seen for digest in tested)


def describe_copies(copies: int, tested: int | None = None) -> str:
    """A sentence on :func:`count_copies` images, of those ``tested`` if known; empty if there is no copy."""
    if not copies:
        return ""
    images = "images" if tested is None else f"{tested} images"
    return (
        f"{copies} of the {images} to evaluate are training images too, byte by byte, so that accuracies are too high: "
        "keep one copy of each image"
    )


def _digest(image: np.ndarray) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def _digests_of_files(*parts: Sequence[str]) -> list[list[str]]:
    """Of the files of each part whose size a file of each other part has too: no other can have the same content."""
    sizes = [{path: Path(path).stat().st_size for path in paths} for paths in parts]
    common = set.intersection(*(set(of_part.values()) for of_part in sizes))
    return [[_file_digest(Path(path), True) for path, size in part.items() if size in common] for part in sizes]


def _file_digest(path: Path, whole: bool) -> str:
    if not path.is_file():  # a link to nowhere, or a pipe, which nobody may ever write into
        return ""
    if not whole:
        return str(path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
