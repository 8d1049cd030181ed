"""Test images that are training images too."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from task.data.digests import count_copies, describe_copies
from task.data.images import resolve_source
from task.data.load import load_dataset
from tests.helpers.own_data import paint


def test_files_with_the_same_bytes_are_counted(tmp_path: Path) -> None:
    """Two of six test images are copies, one of another class; a file of equal size but other content is none."""
    folders = [tmp_path / part / name for part in ("train", "test") for name in ("cat", "dog")]
    for shade in range(12):
        paint(folders[shade // 3], 1, first=shade % 3, shade=100 + shade)
    shutil.copy(tmp_path / "train/cat/000.png", tmp_path / "test/cat/001.png")
    shutil.copy(tmp_path / "train/dog/001.png", tmp_path / "test/cat/000.png")
    of_dogs = [{file.stat().st_size for file in folders[part].iterdir()} for part in (1, 3)]
    assert of_dogs[0] & of_dogs[1]
    copies = count_copies(load_dataset("folder", str(tmp_path), 32, 0.0, 0), "folder")
    assert copies == 2
    told = describe_copies(copies, 6)
    assert told.startswith("2 of the 6 images to evaluate are training images too, byte by byte,")


@pytest.mark.parametrize("copies", [0, 3])
def test_arrays_are_counted_image_by_image(copies: int, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)
    images[17 : 17 + copies] = images[:copies]
    arrays = {"images": images, "labels": np.arange(20) % 2, "split": np.arange(20) >= 10}
    np.savez(tmp_path / "a.npz", **arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    assert count_copies(load_dataset("npz", str(tmp_path / "a.npz"), 32, 0.0, 0), "npz") == copies
    assert count_copies(load_dataset("npz", str(tmp_path), 32, 0.0, 0), "npz") == 0


def test_the_parts_of_a_folder_without_a_split_are_compared(tmp_path: Path) -> None:
    """All images are different, until one is there twice, in both parts."""
    for shade in range(20):
        paint(tmp_path / ("cat", "dog")[shade % 2], 1, first=shade, shade=100 + shade)
    dataset = load_dataset("folder", str(tmp_path), 32, 0.0, 0)
    assert count_copies(dataset, "folder") == 0
    files = [resolve_source(part, np.arange(2)) for part in (dataset.train_images, dataset.test_images)]
    of_train, of_test = (Path(source.paths[positions[0]]) for source, positions in files)
    shutil.copy(of_train, of_test)
    assert count_copies(dataset, "folder") == 1


def test_published_images_are_not_looked_at(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            paint(tmp_path / part / name, 1)
    dataset = load_dataset("folder", str(tmp_path), 32, 0.0, 0)
    assert count_copies(dataset, "folder")
    assert not count_copies(dataset, "imagenet-r")
