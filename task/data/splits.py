"""Reproducible splits of a data set into training, validation and test images."""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from task.data.images import Dataset, Images, Subset
from task.utils.seeding import numpy_rng

log = logging.getLogger(__name__)

HELD_OUT = 0.2  # test share of a data set that comes without a test split


def draw_held_out(
    labels: np.ndarray, share: float, seed: int, purpose: str, groups: np.ndarray | None = None
) -> np.ndarray:
    """Mark a random ``share`` of every class; bool [N], the same for equal ``seed`` and ``purpose``.

    Of a class with two images or more at least one is marked, and at least one is not; the only one of a class is not.

    Args:
        labels: int64 [N].
        share: of the images of a class, 0 to 1.
        seed: of the draw.
        purpose: another one gives another draw.
        groups: int64 [N]; images with the same number, such as those of one patient, are all marked or none is. Then
            the share of a class may be up to twice as large, or its smallest group if that is more. If its groups are
            those of other classes too, it may be larger still, or a class may have none. Classes whose images are all
            of one group are divided by images; the log warns of them.
    """
    counts = np.bincount(labels)
    wanted = np.clip(np.round(share * counts), np.minimum(counts - 1, 1), counts - 1).astype(np.int64)
    rng = numpy_rng(seed, purpose)
    if groups is not None:
        return _draw_groups(labels, _split_single_groups(labels, groups), wanted, rng)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    mask = np.zeros(len(labels), dtype=bool)
    mask[by_class] = rank < np.repeat(wanted, counts)
    return mask


def _split_single_groups(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The groups [N], but each image its own group in a class whose images are all of one."""
    first, last = np.full(labels.max() + 1, groups.max()), np.full(labels.max() + 1, groups.min())
    np.minimum.at(first, labels, groups)
    np.maximum.at(last, labels, groups)
    single = np.unique(labels[(first == last)[labels]])
    single = single[np.bincount(labels)[single] > 1]
    if len(single):
        log.warning(
            "%d of %d classes have images of one group only, which are divided image by image",
            len(single),
            len(np.unique(labels)),
        )
    return np.where((first == last)[labels], groups.max() + 1 + np.arange(len(groups)), groups)


def _draw_groups(labels: np.ndarray, groups: np.ndarray, wanted: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mark groups in random order, each if that brings its classes nearer to the ``wanted`` numbers [C] of images.

    None takes more than twice that number of a class. A class that has none then gets, of the groups that it can spare,
    the one that takes the smallest share of any class.
    """
    _, groups = np.unique(groups, return_inverse=True)
    members = np.split(np.argsort(groups, kind="stable"), np.cumsum(np.bincount(groups))[:-1])
    parts = [np.unique(labels[positions], return_counts=True) for positions in members]
    counts, held, mask = np.bincount(labels), np.zeros_like(wanted), np.zeros(len(labels), bool)

    def hold_out(group: int) -> None:
        classes, sizes = parts[group]
        held[classes] += sizes
        mask[members[group]] = True

    def spares(group: int) -> bool:
        classes, sizes = parts[group]
        return not mask[members[group][0]] and bool((held[classes] + sizes < counts[classes]).all())

    def largest_share(group: int) -> float:
        classes, sizes = parts[group]
        return float(((held[classes] + sizes) / counts[classes]).max())

    of_class: dict[int, list[int]] = defaultdict(list)
    for group in rng.permutation(len(members)).tolist():
        classes, sizes = parts[group]
        for c in classes.tolist():
            of_class[c].append(group)
        gap, few = wanted[classes] - held[classes], held[classes] + sizes <= 2 * wanted[classes]
        if spares(group) and few.all() and np.abs(gap - sizes).sum() < np.abs(gap).sum():
            hold_out(group)
    for c in np.flatnonzero(wanted).tolist():
        if not held[c] and (able := [group for group in of_class[c] if spares(group)]):
            hold_out(min(able, key=largest_share))
    return mask


def select_by_digest(contents: Iterable[bytes]) -> np.ndarray:
    """Mark about ``HELD_OUT`` of the contents by their SHA-256; bool [N]. Each mark depends on one content only."""
    digests = [int.from_bytes(hashlib.sha256(content).digest()[:6]) for content in contents]
    return np.array(digests, np.int64) < HELD_OUT * 2**48


def split_dataset(
    mask: np.ndarray,
    images: Images,
    labels: np.ndarray,
    names: tuple[str, ...],
    augmentation: str = "crop-flip",
    groups: np.ndarray | None = None,
) -> Dataset:
    """A data set whose test part is where ``mask``, bool [N], is true; ``groups`` as :func:`draw_held_out` has them."""
    train, test = np.flatnonzero(~mask), np.flatnonzero(mask)
    parts = Subset(images, train), labels[train], Subset(images, test), labels[test]
    return Dataset(names, *parts, augmentation, None if groups is None else groups[train])


def split_validation(dataset: Dataset, share: float, seed: int) -> Dataset:
    """Hold out ``share`` of the training images of each class; they replace the test set."""
    labels, groups = dataset.train_labels, dataset.train_groups
    mask = draw_held_out(labels, share, seed, "validation", groups)
    return split_dataset(mask, dataset.train_images, labels, dataset.class_names, dataset.augmentation, groups)
