"""What the scripts share that draw as many images of each class: the arrays of the file, and the command line."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np


def labelled(images: Sequence[np.ndarray], classes: int, train: int, test: int) -> dict[str, np.ndarray]:
    """Arrays of an .npz file: images uint8 [N, H, W, 3], class by class, labels and split (1 = test).

    Of each class the first ``train`` images are for training, and ``test`` others for the test.
    """
    return {
        "images": np.stack(images),
        "labels": np.repeat(np.arange(classes), train + test),
        "split": np.tile(np.repeat([0, 1], [train, test]), classes),
    }


def save_set(make: Callable[[int, int, int], dict[str, np.ndarray]], about: str | None, seed: int) -> None:
    """Write what ``make`` gives for the train and test images of each class and the seed; ``about`` is the help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--train", type=int, default=60, help="images of each class for training")
    parser.add_argument("--test", type=int, default=20, help="images of each class for the test")
    parser.add_argument("--seed", type=int, default=seed)
    args = parser.parse_args()
    arrays = make(args.train, args.test, args.seed)
    np.savez(args.target, allow_pickle=False, **arrays)
    print(f"{args.target}: {len(np.unique(arrays['labels']))} classes, {args.train} + {args.test} images of each")
