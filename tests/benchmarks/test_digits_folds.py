"""Five folds of the digits."""

import numpy as np

from benchmarks.digits_folds import FOLDS, draw_folds


def test_each_image_is_in_one_fold_and_classes_are_spread_evenly() -> None:
    labels = np.repeat([2, 0, 1], [23, 40, 11])
    folds = draw_folds(labels)
    counts = np.array([np.bincount(folds[labels == c], minlength=FOLDS) for c in range(3)])
    assert counts.sum() == len(labels)
    assert (counts.max(axis=1) - counts.min(axis=1)).max() <= 1
