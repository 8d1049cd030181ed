"""Counting predictions; any accuracy of the papers follows from the counts."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from task.data.images import Dataset, Images
from task.models.feature_cache import BATCH, Inputs, cached_query, load_inputs
from task.models.model import Model


def iterate_batches(model: Model, images: Images, positions: np.ndarray) -> Iterator[tuple[np.ndarray, Inputs]]:
    """Positions [B] and the inputs there without augmentation, in order."""
    for start in range(0, len(positions), BATCH):
        some = positions[start : start + BATCH]
        yield some, load_inputs(model, images, some, cached_query(model, images, some))


@torch.no_grad()
def extract_features(model: Model, images: Images, positions: np.ndarray) -> Tensor:
    """f(x) of the images at ``positions`` [N] -> float32 [N, D] on the model's device, no augmentation."""
    with model.backbone_eval():
        features = [model.features(*batch) for _, batch in iterate_batches(model, images, positions)]
    return torch.cat(features) if features else torch.empty(0, model.backbone.dim, device=model.device)


@torch.no_grad()
def confusion_counts(model: Model, dataset: Dataset, order: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """How many test images of each seen class were taken for which class.

    Args:
        model: predicts by the largest logit over all its rows.
        dataset: its test part is used.
        order: class id of each head row, int64 [seen].
        positions: the test images to look at, int64 [N].

    Returns:
        int64 [C, C] over all classes of the data set by id: rows the true class, columns the predicted one.
    """
    labels, classes = dataset.test_labels, len(dataset.class_names)
    counts = np.zeros((classes, classes), np.int64)
    rows = np.full(classes, len(order))
    rows[order] = np.arange(len(order))
    # class after class, so that images of earlier tasks stay in the batches in which their queries are known
    by_row = positions[np.argsort(rows[labels[positions]], kind="stable")]
    wanted = by_row[rows[labels[by_row]] < len(order)]
    for some, batch in iterate_batches(model, dataset.test_images, wanted):
        predicted = order[model(*batch).argmax(dim=1).cpu().numpy()]
        np.add.at(counts, (labels[some], predicted), 1)
    return counts
