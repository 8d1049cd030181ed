"""Data sets of images and labels, and image files that are decoded on access."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from threading import Condition
from typing import Protocol

import numpy as np
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin

from task.keys import ConfigError

CACHE_BYTES = 2**29  # decoded images kept by one ImageFiles: 3,500 of 224 x 224, or 43,000 of 64 x 64
MAX_PIXELS = 50_000_000  # default of the run key max-image-pixels
# others hide an image of another size in their own (ICO), or decode before they say how large it is
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
# of these Pillow reads whole files, or parts of any length, before it says how many pixels there are; of TIFF too, but
# one with many pages may rightly be large
_READ_AT_ONCE = ("AVIF", "JPEG2000", "PNG", "WEBP")
_FILE_BYTES = 10  # of such a file, at most, for each pixel of max-image-pixels; 16-bit RGBA without compression has 8
_LONGEST = 10  # a scaled image is at most so many sides of the result long; of a longer strip only the middle is scaled
_STRIP = 2**20  # pixels that are stretched at a time
Image.MAX_IMAGE_PIXELS = None  # max-image-pixels is the limit; Pillow's own would also warn below it


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
    """Labels are int64 and index ``class_names``; ``augmentation`` is the default for these images.

    ``train_groups``, int64, has the same number for training images that belong together, such as those of one patient;
    None if nothing is known of that.
    """

    class_names: tuple[str, ...]
    train_images: Images
    train_labels: np.ndarray
    test_images: Images
    test_labels: np.ndarray
    augmentation: str = "crop-flip"
    train_groups: np.ndarray | None = None

    @cached_property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images in pixels, before they are prepared for the backbone."""
        height, width = self.test_images[np.zeros(0, np.int64)].shape[1:3]
        return height, width

    def test_positions(self, order: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Choose the test images whose class is in ``order``, the class ids by head row.

        ``positions`` are int64 [N]; returns those of the chosen images. They are sorted by head row, so that images of
        earlier tasks stay in the batches whose queries are cached.
        """
        rows = np.full(len(self.class_names), len(order))
        rows[order] = np.arange(len(order))
        by_row = positions[np.argsort(rows[self.test_labels[positions]], kind="stable")]
        return by_row[rows[self.test_labels[by_row]] < len(order)]


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
    max_pixels: int = MAX_PIXELS  # see :func:`read_rgb`

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
            batch[row] = self.decoded(self.paths[position])
        return batch

    @cached_property
    def decoded(self) -> Callable[[str], np.ndarray]:
        """Reads the file at a path, and keeps what it has read while that fits."""
        return lru_cache(CACHE_BYTES // (3 * self.side**2))(partial(decode, side=self.side, max_pixels=self.max_pixels))


def resolve_source(images: Images, positions: np.ndarray) -> tuple[Images, np.ndarray]:
    """The source that ``images`` are a part of, and their positions in it, int64 [N]."""
    source = images
    while isinstance(source, Subset):
        positions = source.positions[positions]
        source = source.source
    return source, positions


def find_unreadable(images: Images) -> list[str]:
    """Decode every image file once and say which cannot be read, and why; what fits stays decoded for the run."""
    source, positions = resolve_source(images, np.arange(len(images)))
    if not isinstance(source, ImageFiles):
        return []
    return list(find_problems(source.decoded, [source.paths[position] for position in positions]).values())


def find_problems(read: Callable[[str], object], paths: Sequence[str]) -> dict[str, str]:
    """The files that ``read`` cannot read, and why, in their order."""

    def problem(path: str) -> str:
        try:
            read(path)
        except UnreadableImage as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as pool:
        return {path: why for path, why in zip(paths, pool.map(problem, paths), strict=True) if why}


class _PixelBudget:
    """Makes threads wait so that together they do not hold too many pixels; one image alone never waits."""

    def __init__(self) -> None:
        self._changed, self._taken = Condition(), 0

    @contextmanager
    def take(self, pixels: int, limit: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + pixels <= limit)
            self._taken += pixels
        try:
            yield
        finally:
            with self._changed:
                self._taken -= pixels
                self._changed.notify_all()


_decoding = _PixelBudget()


@lru_cache(maxsize=1)
def readable_formats() -> tuple[str, ...]:
    """Pillow's names of the image formats that are read."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def decode(path: str, side: int, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """An image file as uint8 [side, side, 3]: shorter side to ``side`` pixels (bicubic), centre crop, RGB.

    Raises:
        UnreadableImage: as :func:`read_rgb`.
    """
    return fit_image(read_rgb(path, max_pixels), side, side)


def read_rgb(path: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An image file in RGB, see :func:`to_rgb`, at its own size.

    A JPEG of more than ``max_pixels`` is decoded at a half, a quarter or an eighth of its sides, which takes the memory
    of the small image only. The threads of a process together decode no more than ``max_pixels`` at a time; no format
    takes more than 20 bytes for each of them. For the size of files see :func:`_require_bounded`.

    Raises:
        UnreadableImage: the file is missing, truncated, not of :func:`readable_formats`, or too large.
    """
    try:
        _require_bounded(path, max_pixels)
        # given the path, Pillow maps some files, and then scrambles those that are to be turned
        with open(path, "rb") as file, Image.open(file, formats=readable_formats()) as image:
            _shrink_to(image, max_pixels)
            with _decoding.take(image.width * image.height, max_pixels):
                return to_rgb(image)
    except MemoryError:
        raise
    except FileNotFoundError as error:
        raise UnreadableImage(f"{path!r} does not exist.") from error
    except Exception as error:  # Pillow's readers raise many types
        raise UnreadableImage(f"{path!r} cannot be read as an image ({error}); replace it or take it away.") from error


def _require_bounded(path: str, max_pixels: int) -> None:
    """A ValueError if a file of a format that is read at once has too many bytes for ``max_pixels``."""
    size, limit = os.path.getsize(path), _FILE_BYTES * max_pixels + 2**20
    if size <= limit:
        return
    with open(path, "rb") as file:
        start = file.read(16)  # as much as Pillow knows a format by
    known_by = [Image.OPEN[name][1] for name in _READ_AT_ONCE if name in readable_formats()]
    if any(accepts and accepts(start) for accepts in known_by):
        raise ValueError(f"it has {size} bytes, above the {limit} that go with max-image-pixels = {max_pixels}")


def _shrink_to(image: Image.Image, max_pixels: int) -> None:
    """Have a JPEG of more than ``max_pixels`` decoded at a smaller scale; a ValueError if it still has more."""
    width, height = image.size
    # the decoder rounds a scaled side up
    factor = next((n for n in (1, 2, 4) if -(-width // n) * -(-height // n) <= max_pixels), 8)
    if factor > 1 and "progressive" not in image.info:  # a progressive one is held in memory at full size
        image.draft(None, (max(1, width // factor), max(1, height // factor)))
    if image.width * image.height > max_pixels:
        raise ValueError(f"it has {width} x {height} pixels, above max-image-pixels = {max_pixels}")


def _upright(image: Image.Image) -> Image.Image:
    """Turn or mirror an image as its EXIF orientation says; damaged EXIF data counts as none."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow raises many types
        orientation = 1
    return ImageOps.exif_transpose(image) if orientation in range(2, 9) else image


def _read_tags(file: Image.Image, picture: Image.Image) -> Image.Image:
    """The ``picture`` of a file; that of a TIFF with grey of more than 8 bits is read as its tags say.

    Pillow ignores these tags: white may be the lowest number, and numbers of 32 bits may have no sign.
    """
    if not isinstance(file, TiffImagePlugin.TiffImageFile) or not file.mode.startswith(("I", "F")):
        return picture
    values, tags = np.asarray(picture), file.tag_v2
    if file.mode == "I" and tags.get(ExifTags.Base.SampleFormat, (1,)) == (1,):
        values = values.view(np.uint32)
    grey = Image.fromarray(_stretch(values))
    return ImageOps.invert(grey) if tags.get(ExifTags.Base.PhotometricInterpretation) == 0 else grey


def to_rgb(image: Image.Image) -> Image.Image:
    """An image in RGB, the way up that viewers show it, on white where it is transparent.

    Grey of more than 8 bits is scaled to span 0 .. 255: scanners use any part of 16 bits, and Pillow's own conversion
    clips at 255.

    Raises:
        ValueError: it holds NaN or infinite values.
    """
    image = _read_tags(image, _upright(image))
    if image.mode == "RGB":
        image.load()
        return image
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_stretch(np.asarray(image))).convert("RGB")
    if image.has_transparency_data:
        picture = image if image.mode == "RGBA" else image.convert("RGBA")
        ground = Image.new("RGB", image.size, "white")
        ground.paste(picture, mask=picture)
        return ground
    return image.convert("RGB")


def _stretch(values: np.ndarray) -> np.ndarray:
    """Numbers [H, W] as uint8 [H, W] that span 0 .. 255; some rows at a time, as float64 takes 8 bytes a pixel."""
    low, high = float(values.min()), float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("it holds NaN or infinite values")
    grey, rows = np.empty(values.shape, np.uint8), max(1, _STRIP // values.shape[1])
    for top in range(0, len(values), rows):
        part = values[top : top + rows].astype(np.float64)
        grey[top : top + rows] = np.round((part - low) * (255 / ((high - low) or 1)))
    return grey


def fit_image(image: Image.Image, height: int, width: int) -> np.ndarray:
    """An RGB image as uint8 [height, width, 3]: the smallest (bicubic) scaling that covers this size, centre crop."""
    scale = max(height / image.height, width / image.width)
    # scaled as a whole, a strip of 50,000 x 1 pixels would take gigabytes
    image = _centre(image, math.ceil(_LONGEST * height / scale), math.ceil(_LONGEST * width / scale))
    image = image.resize((max(width, round(image.width * scale)), max(height, round(image.height * scale))))
    return np.asarray(_centre(image, height, width))


def _centre(image: Image.Image, height: int, width: int) -> Image.Image:
    """The middle of an image, of at most this size."""
    height, width = min(height, image.height), min(width, image.width)
    if image.size == (width, height):
        return image
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
