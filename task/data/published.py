"""Loaders of the published data sets.

Nothing is downloaded at run time: people fetch an archive and unpack it below data-dir. Images are decoded on access,
but for CIFAR, which is one small array.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from task.data.image_folders import class_folders, images_by_class
from task.data.images import Dataset, ImageFiles
from task.data.splits import HELD_OUT, draw_held_out, split_dataset

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
TINY_SIDE = 64  # pixels of Tiny-ImageNet's own images; they are resized for the backbone later, batch by batch


class IncompleteError(Exception):
    """Files of a published data set are missing; the message is a clause of the error of ``load.read_source``."""


def cifar(name: str, root: Path, side: int, max_pixels: int) -> Dataset:
    """CIFAR-10 or CIFAR-100 (Krizhevsky 2009), 32 x 32, its own split, read and checksummed by torchvision."""
    import torchvision.datasets  # here, as torchvision imports torch, and data of other kinds need neither

    kind = getattr(torchvision.datasets, name)
    try:
        train, test = (kind(root.parent, train=part, download=False) for part in (True, False))
    except RuntimeError as error:
        files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
        bad = [name for name, md5 in files if not torchvision.datasets.utils.check_integrity(root / name, md5)]
        raise IncompleteError(f"missing or damaged (by checksum) in {str(root)!r}: {', '.join(bad)}") from error
    labels, test_labels = np.array(train.targets, np.int64), np.array(test.targets, np.int64)
    return Dataset(tuple(train.classes), train.data, labels, test.data, test_labels)


def tiny_imagenet(root: Path, side: int, max_pixels: int) -> Dataset:
    """Tiny-ImageNet (Stanford CS231n): 64 x 64, 500 training images per class; the test set is val/, 50 per class.

    The archive's own test/ has no labels. Class ids follow the sorted WordNet numbers.
    """
    numbers = sorted((root / "wnids.txt").read_text().split())
    ids = {number: c for c, number in enumerate(numbers)}
    side = min(side, TINY_SIDE)
    train, train_labels = images_by_class([root / "train" / number for number in numbers], side, max_pixels)
    rows = [line.split("\t")[:2] for line in _read_lines(root / "val" / "val_annotations.txt")]
    test = _list_images(root, [f"val/images/{file}" for file, _ in rows], side, max_pixels)
    test_labels = np.array([ids[number] for _, number in rows], np.int64)
    return Dataset(_word_of_each(numbers), train, train_labels, test, test_labels)


def mini_imagenet(root: Path, side: int, max_pixels: int) -> Dataset:
    """Mini-ImageNet (Vinyals et al. 2016) by the lists of Ravi and Larochelle (2017): 100 classes of 600 images.

    Those lists divide the classes, for few-shot learning. Class-incremental papers use all classes with 500 training
    and 100 test images each, but no list of them is published with the data: here 100 images of each class are drawn
    for the test set, always the same ones (not those of any paper). Class ids follow the sorted WordNet numbers. The
    images may have any size; 84 x 84 is usual, and a backbone of 224 x 224 sees more in ImageNet's own.
    """
    lists = [_read_lines(root / f"{part}.csv")[1:] for part in ("train", "val", "test")]
    rows = sorted([field.strip() for field in line.split(",")] for lines in lists for line in lines)
    numbers, labels = np.unique([number for _, number in rows], return_inverse=True)
    images = _list_images(root, [f"images/{file}" for file, _ in rows], side, max_pixels)
    test = draw_held_out(labels, 1 / 6, 0, "mini-imagenet")
    return split_dataset(test, images, labels, _word_of_each(numbers.tolist()))


def cub200(root: Path, side: int, max_pixels: int) -> Dataset:
    """Caltech-UCSD Birds-200-2011 (Wah et al. 2011) with its own split; whole images, bounding boxes are not used."""
    names, files, labels, training = (
        dict(line.split(maxsplit=1) for line in _read_lines(root / f"{name}.txt"))
        for name in ("classes", "images", "image_class_labels", "train_test_split")
    )
    images = _list_images(root, [f"images/{file}" for file in files.values()], side, max_pixels)
    test = np.array([training[image] == "0" for image in files], bool)
    ids = np.array([int(labels[image]) - 1 for image in files], np.int64)
    return split_dataset(test, images, ids, tuple(names[str(c + 1)] for c in range(len(names))))


def imagenet_r(root: Path, side: int, max_pixels: int) -> Dataset:
    """ImageNet-R (Hendrycks et al. 2021): 30,000 renditions of 200 ImageNet classes, unevenly many of each.

    The archive has no split. L2P, DualPrompt and CODA-Prompt divide it 80 : 20 by lists or draws of their own code;
    here a fifth of each class is drawn for the test set, always the same images (not those of any paper).
    """
    folders = class_folders(root)
    images, labels = images_by_class(folders, side, max_pixels)
    test = draw_held_out(labels, HELD_OUT, 0, "imagenet-r")
    return split_dataset(test, images, labels, _word_of_each([p.name for p in folders]))


def domainnet(root: Path, side: int, max_pixels: int) -> Dataset:
    """DomainNet (Peng et al. 2019), cleaned version with its own lists: a class is an object, from all six domains.

    HePCo's public code draws an 80 : 20 split of its own from the .jpg files instead, which leaves out quickdraw.
    """
    parts = [
        [line.rsplit(maxsplit=1) for domain in DOMAINS for line in _read_lines(root / f"{domain}_{part}.txt")]
        for part in ("train", "test")
    ]
    names = {int(label): file.split("/")[1] for part in parts for file, label in part}  # clipart/ant/1.jpg 6 -> 6: ant
    train, test = (_list_images(root, [file for file, _ in part], side, max_pixels) for part in parts)
    train_labels, test_labels = (np.array([int(label) for _, label in part], np.int64) for part in parts)
    return Dataset(tuple(names[c] for c in range(len(names))), train, train_labels, test, test_labels)


def _read_lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _list_images(root: Path, files: Sequence[str], side: int, max_pixels: int) -> ImageFiles:
    """Image files of a published list, relative to ``root``; an IncompleteError if some are missing."""
    present: set[str] = set()  # by listing each folder once, which is faster than a check per file
    for folder in {file.rpartition("/")[0] for file in files}:
        with suppress(FileNotFoundError):
            present.update(f"{folder}/{name}" for name in os.listdir(root / folder))
    missing = [file for file in files if file not in present]
    if missing:
        raise IncompleteError(f"{len(missing):,} of {len(files):,} listed images are missing, such as {missing[0]}")
    return ImageFiles(tuple(os.path.join(root, file) for file in files), side, max_pixels)


def _word_of_each(numbers: Sequence[str]) -> tuple[str, ...]:
    """WordNet's first word for each ImageNet class, its number added where two classes share the word."""
    from timm.data import ImageNetInfo  # here, as timm imports torch

    info = ImageNetInfo()
    words = [info.label_name_to_description(number).split(",")[0] for number in numbers]
    return tuple(w if words.count(w) == 1 else f"{w} ({n})" for w, n in zip(words, numbers, strict=True))
