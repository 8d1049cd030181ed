"""Cut a smaller data set out of an .npz file: some classes, some images of each.

    python -m benchmarks.slice_npz cifar100.npz slice.npz --classes 20 --train 200 --seed 0

Which classes and images is drawn from the seed; the file's own split (0 = train, 1 = test) stays. With ``--smallest``
classes are uneven: from ``--train`` training images down to that many, each class the same share of the one before.
"""

import argparse
from itertools import product
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from server_app.cli.common import positive
from task.utils.seeding import numpy_rng


def cut(
    arrays: dict[str, np.ndarray], classes: int, train: int, test: int, seed: int, smallest: int = 0
) -> dict[str, np.ndarray]:
    """``classes`` classes with at most ``train`` training images and ``test`` test images each.

    All arrays of images are cut alike, groups too.

    With ``smallest`` the number of training images falls from class to class, in geometric steps and in a drawn order,
    from ``train`` to it.
    """
    rng = numpy_rng(seed, "slice")
    chosen = np.sort(rng.choice(len(arrays["class_names"]), classes, replace=False))
    shuffled = rng.permutation(len(arrays["labels"]))
    rank = np.zeros(len(shuffled), np.int64)
    for c, part in product(chosen, (0, 1)):
        members = shuffled[(arrays["labels"][shuffled] == c) & (arrays["split"][shuffled] == part)]
        rank[members] = np.arange(len(members))
    sizes = np.zeros(len(arrays["class_names"]))
    sizes[rng.permutation(chosen)] = np.geomspace(train, smallest or train, classes).round()
    keep = np.isin(arrays["labels"], chosen) & (rank < np.where(arrays["split"] == 1, test, sizes[arrays["labels"]]))
    names = arrays["class_names"][chosen]
    kept = {name: array[keep] for name, array in arrays.items() if name != "class_names"}
    return kept | {"labels": np.searchsorted(chosen, kept["labels"]), "class_names": names}


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--classes", type=positive, default=20)
    parser.add_argument("--train", type=positive, default=200)
    parser.add_argument("--test", type=positive, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smallest", type=int, default=0, help="training images of the smallest class; 0: all even")
    args = parser.parse_args()
    try:
        with np.load(args.source) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, BadZipFile) as error:
        parser.error(f"{args.source} cannot be read as an .npz file ({error})")
    if missing := {"images", "labels", "split", "class_names"} - set(arrays):
        parser.error(f"{args.source} has no {' and no '.join(sorted(missing))}")
    if args.classes > len(arrays["class_names"]):
        parser.error(f"--classes {args.classes}: {args.source} has {len(arrays['class_names'])}")
    arrays = cut(arrays, args.classes, args.train, args.test, args.seed, args.smallest)
    np.savez(args.target, allow_pickle=False, **arrays)
    train, test = ((arrays["split"] == part).sum() for part in (0, 1))
    names = len(arrays["class_names"])
    print(f"{args.target}: {names} classes, {train} training and {test} test images, seed {args.seed}")


if __name__ == "__main__":
    _main()
