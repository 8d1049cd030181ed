"""Data sets that come with the code: handwritten digits, and synthetic patterns for tests."""

import base64
import json
import zlib
from pathlib import Path

import numpy as np

from task.data.images import Dataset
from task.data.splits import HELD_OUT, draw_held_out, split_dataset
from task.utils.assets import ASSETS
from task.utils.seeding import numpy_rng


def digits(path: Path, side: int, max_pixels: int) -> Dataset:
    """The 1,797 handwritten digits of scikit-learn (UCI Optical Recognition of Handwritten Digits), 8 x 8 pixels."""
    texts = json.loads((ASSETS / "digits.json").read_text())
    pixels = np.frombuffer(zlib.decompress(base64.b64decode(texts["pixels"])), np.uint8).reshape(-1, 8, 8, 1)
    labels = np.frombuffer(base64.b64decode(texts["labels"]), np.uint8).astype(np.int64)
    images = np.round(pixels * (255 / 16)).astype(np.uint8)
    test = draw_held_out(labels, HELD_OUT, 0, "digits")
    return split_dataset(test, images, labels, tuple("0123456789"), augmentation="none")


def synthetic(path: Path, side: int, max_pixels: int) -> Dataset:
    """12 classes of 16 x 16 noise around a class pattern, 40 images each: for tests and load tests."""
    rng = numpy_rng(0, "synthetic")
    labels = np.repeat(np.arange(12), 40)
    patterns = rng.integers(0, 256, (12, 4, 4, 3)).repeat(4, axis=1).repeat(4, axis=2)
    noise = rng.normal(0, 40, (len(labels), 16, 16, 3))
    images = np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8)
    names = tuple(f"pattern {i}" for i in range(12))
    test = draw_held_out(labels, HELD_OUT, 0, "synthetic")
    return split_dataset(test, images, labels, names, augmentation="none")
