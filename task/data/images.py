"""Data sets of images and labels, and image files that are decoded on access."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Protocol

import numpy as np
from PIL import Image

from task.keys import ConfigError

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
    """Labels are int64 and index ``class_names``; ``augmentation`` is the default for these images."""

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
    """Image files, decoded to ``side`` x ``side`` pixels on access.

    The last ``CACHE_BYTES`` of decoded pixels are cached, because a client reads the same images in every epoch.
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
    return fit_image(read_rgb(path), side, side)


def read_rgb(path: str) -> Image.Image:
    """An image file in RGB, at its own size; see :func:`to_rgb`.

    Raises:
        UnreadableImage: the file is missing, truncated or no image.
    """
    try:
        with Image.open(path) as image:
            return to_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise many types
        raise UnreadableImage(f"{path!r} cannot be read as an image ({error}); replace it or take it away.") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB; grey of more than 8 bits is scaled so that its pixels span 0 .. 255.

    (Scanners use any part of 16 bits, and Pillow's own conversion clips at 255.)

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


def fit_image(image: Image.Image, height: int, width: int) -> np.ndarray:
    """An RGB image as uint8 [height, width, 3]: the smallest (bicubic) scaling that covers this size, centre crop."""
    scale = max(height / image.height, width / image.width)
    image = image.resize((max(width, round(image.width * scale)), max(height, round(image.height * scale))))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return np.asarray(image.crop((left, top, left + width, top + height)))
