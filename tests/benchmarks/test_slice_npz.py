"""A data set that is cut out of a larger one."""

import numpy as np

from benchmarks.slice_npz import cut


def _arrays(classes: int, images: int) -> dict[str, np.ndarray]:
    """``images`` training and as many test images of each class; every pixel of an image is its number."""
    count = 2 * classes * images
    return {
        "images": np.arange(count, dtype=np.uint8)[:, None, None, None],
        "labels": np.tile(np.arange(classes), 2 * images),
        "split": np.repeat([0, 1], classes * images),
        "class_names": np.array([f"class {c}" for c in range(classes)]),
        "groups": np.arange(count) // 2,
    }


def test_even_classes_are_cut() -> None:
    arrays = _arrays(classes=5, images=20)
    part = cut(arrays, classes=3, train=7, test=2, seed=1)
    assert np.bincount(part["labels"][part["split"] == 0]).tolist() == [7, 7, 7]
    assert np.bincount(part["labels"][part["split"] == 1]).tolist() == [2, 2, 2]
    numbers = part["images"].ravel()
    assert len(set(numbers.tolist())) == len(numbers)
    assert (arrays["class_names"][arrays["labels"][numbers]] == part["class_names"][part["labels"]]).all()
    assert (arrays["split"][numbers] == part["split"]).all()
    assert (part["groups"] == numbers // 2).all()


def test_uneven_classes_fall_in_geometric_steps() -> None:
    part = cut(_arrays(classes=5, images=20), classes=3, train=16, test=2, seed=1, smallest=4)
    assert sorted(np.bincount(part["labels"][part["split"] == 0]).tolist()) == [4, 8, 16]
    assert np.bincount(part["labels"][part["split"] == 1]).tolist() == [2, 2, 2]
