"""Images and labels as every other module sees them: the Dataset, lazily decoded files, and reproducible splits."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from task.keys import ConfigError
from task.seeding import numpy_rng

HELD_OUT = 0.2  # test share of a data set that comes without a test split
_MADE_BY_SYSTEMS = ("@eaDir", "__MACOSX")  # folders with copies of images
_NO_PHOTOS = {"BUFR", "EMF", "GRIB", "HDF5", "MPEG", "WMF"}  # formats that Pillow knows of and cannot read
_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}
CACHE_BYTES = 2**29  # decoded images kept by one ImageFiles: 3,500 of 224 x 224, or 43,000 of 64 x 64


class UnreadableImage(ConfigError):
    """An image file is missing, truncated or no image; the message names it."""


class Images(Protocol):
    """Images by position; a NumPy array is one."""

    def __len__(self) -> int:
        """Number of images."""

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """uint8 [B, H, W, 3 or 1] of int64 positions [B]."""


@dataclass(frozen=True)
class Dataset:
    """Labels are int64 and index ``class_names``; ``augmentation`` is what suits these images by default."""

    class_names: tuple[str, ...]
    train_images: Images
    train_labels: np.ndarray
    test_images: Images
    test_labels: np.ndarray
    augmentation: str = "crop-flip"

    @cached_property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images in pixels, before they are prepared for the backbone."""
        height, width = self.test_images[np.zeros(0, np.int64)].shape[1:3]
        return height, width


@dataclass(frozen=True)
class Subset:
    """Some images of another source, in the order of ``positions``."""

    source: Images
    positions: np.ndarray

    def __len__(self) -> int:
        """Number of images."""
        return len(self.positions)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """uint8 [B, H, W, 3 or 1]."""
        return self.source[self.positions[positions]]


@dataclass(frozen=True)
class ImageFiles:
    """Image files, decoded to ``side`` x ``side`` pixels when asked for.

    A client sees the same images in every epoch and round, so the last ``CACHE_BYTES`` of decoded pixels are kept. A
    task that does not fit is decoded anew, without harm but for the time.
    """

    paths: tuple[str, ...]
    side: int

    def __len__(self) -> int:
        """Number of files."""
        return len(self.paths)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """uint8 [B, side, side, 3].

        Raises:
            UnreadableImage: a file is not a readable image.
        """
        batch = np.empty((len(positions), self.side, self.side, 3), np.uint8)
        for row, position in enumerate(positions):
            batch[row] = self._decoded(self.paths[position])
        return batch

    @cached_property
    def _decoded(self) -> Callable[[str], np.ndarray]:
        return lru_cache(CACHE_BYTES // (3 * self.side**2))(partial(decode, side=self.side))


def decode(path: str, side: int) -> np.ndarray:
    """An image file as uint8 [side, side, 3]: shorter side to ``side`` pixels (bicubic), centre crop, RGB.

    Raises:
        UnreadableImage: the file is missing, truncated or no image.
    """
    return fitted(read_rgb(path), side, side)


def read_rgb(path: str) -> Image.Image:
    """An image file in RGB, at its own size; see :func:`rgb`.

    Raises:
        UnreadableImage: the file is missing, truncated or no image.
    """
    try:
        with Image.open(path) as image:
            return rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # readers of some formats raise whatever they like
        raise UnreadableImage(f"{path!r} cannot be read as an image ({error}); replace it or take it away.") from error


def rgb(image: Image.Image) -> Image.Image:
    """An image in RGB; grey of more than 8 bits is stretched from its own darkest to its brightest pixel.

    Scanners use any part of 16 bits, and Pillow's own conversion cuts everything off at 255.

    Raises:
        ValueError: it holds NaN or infinite values.
    """
    if not image.mode.startswith(("I", "F")):
        return image.convert("RGB")
    values = np.asarray(image, np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds NaN or infinite values")
    stretched = (values - values.min()) * (255 / (np.ptp(values) or 1))
    return Image.fromarray(np.round(stretched).astype(np.uint8)).convert("RGB")


def fitted(image: Image.Image, height: int, width: int) -> np.ndarray:
    """An RGB image as uint8 [height, width, 3]: scaled until it just covers that (bicubic), then its centre."""
    scale = max(height / image.height, width / image.width)
    image = image.resize((max(width, round(image.width * scale)), max(height, round(image.height * scale))))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return np.asarray(image.crop((left, top, left + width, top + height)))


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


def held_out(labels: np.ndarray, share: float, seed: int, purpose: str) -> np.ndarray:
    """Mark ``share`` of every class, at random; bool [N], reproducible from ``seed`` and ``purpose``."""
    shuffled = numpy_rng(seed, purpose).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels)
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    mask = np.zeros(len(labels), dtype=bool)
    mask[by_class] = rank < np.repeat(np.round(share * counts), counts)
    return mask


def chosen_by_digest(contents: Sequence[bytes]) -> np.ndarray:
    """Mark about ``HELD_OUT`` of them; bool [N]. Whether one is marked depends on nothing but itself."""
    digests = [int.from_bytes(hashlib.sha256(content).digest()[:6]) for content in contents]
    return np.array(digests, np.int64) < HELD_OUT * 2**48


def split_by(
    mask: np.ndarray, images: Images, labels: np.ndarray, names: tuple[str, ...], augmentation: str = "crop-flip"
) -> Dataset:
    """A data set whose test part is where ``mask``, bool [N], is true."""
    train, test = np.flatnonzero(~mask), np.flatnonzero(mask)
    return Dataset(names, Subset(images, train), labels[train], Subset(images, test), labels[test], augmentation)


def with_validation(dataset: Dataset, share: float, seed: int) -> Dataset:
    """Keep back ``share`` of the training images of each class and let them stand in for the test set."""
    mask = held_out(dataset.train_labels, share, seed, "validation")
    return split_by(mask, dataset.train_images, dataset.train_labels, dataset.class_names, dataset.augmentation)
