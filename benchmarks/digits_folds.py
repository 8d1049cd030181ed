"""Cut the digits into five folds, so that each of the 1,797 images is a test image once.

    python -m benchmarks.digits_folds FOLDER

writes digits-fold-0.npz to digits-fold-4.npz for suites/digits-folds.yaml. Each class is spread evenly; which image is
in which fold is drawn from seed 0.
"""

import argparse
from pathlib import Path

import numpy as np

from task.data.builtin import digits
from task.utils.seeding import numpy_rng

FOLDS = 5


def draw_folds(labels: np.ndarray) -> np.ndarray:
    """Fold of each image, int [N], from 0 to FOLDS - 1."""
    shuffled = numpy_rng(0, "folds").permutation(len(labels))
    folds = np.empty(len(labels), np.int64)
    folds[shuffled[np.argsort(labels[shuffled], kind="stable")]] = np.arange(len(labels)) % FOLDS
    return folds


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    data = digits(folder, side=8, max_pixels=64)
    parts = (data.train_images, data.test_images)
    images = np.concatenate([part[np.arange(len(part))] for part in parts])
    labels = np.concatenate([data.train_labels, data.test_labels])
    folds = draw_folds(labels)
    for fold in range(FOLDS):
        arrays = {"images": images, "labels": labels, "class_names": np.array(data.class_names)}
        np.savez(folder / f"digits-fold-{fold}.npz", allow_pickle=False, split=(folds == fold).astype(int), **arrays)


if __name__ == "__main__":
    _main()
