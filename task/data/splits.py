"""Reproducible splits of a data set into training, validation and test images."""

import hashlib
from collections.abc import Iterable

import numpy as np

from task.data.images import Dataset, Images, Subset
from task.utils.seeding import numpy_rng

HELD_OUT = 0.2  # test share of a data set that comes without a test split


def draw_held_out(labels: np.ndarray, share: float, seed: int, purpose: str) -> np.ndarray:
    """Mark a random ``share`` of every class; bool [N], the same for equal ``seed`` and ``purpose``.

    Of a class with two images or more at least one is marked, and at least one is not; the only one of a class is not.
    """
    shuffled = numpy_rng(seed, purpose).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels)
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    mask = np.zeros(len(labels), dtype=bool)
    mask[by_class] = rank < np.repeat(np.clip(np.round(share * counts), np.minimum(counts - 1, 1), counts - 1), counts)
    return mask


def select_by_digest(contents: Iterable[bytes]) -> np.ndarray:
    """Mark about ``HELD_OUT`` of the contents by their SHA-256; bool [N]. Each mark depends on one content only."""
    digests = [int.from_bytes(hashlib.sha256(content).digest()[:6]) for content in contents]
    return np.array(digests, np.int64) < HELD_OUT * 2**48


def split_dataset(
    mask: np.ndarray, images: Images, labels: np.ndarray, names: tuple[str, ...], augmentation: str = "crop-flip"
) -> Dataset:
    """A data set whose test part is where ``mask``, bool [N], is true."""
    train, test = np.flatnonzero(~mask), np.flatnonzero(mask)
    return Dataset(names, Subset(images, train), labels[train], Subset(images, test), labels[test], augmentation)


def split_validation(dataset: Dataset, share: float, seed: int) -> Dataset:
    """Hold out ``share`` of the training images of each class; they replace the test set."""
    mask = draw_held_out(dataset.train_labels, share, seed, "validation")
    return split_dataset(mask, dataset.train_images, dataset.train_labels, dataset.class_names, dataset.augmentation)
