"""Features and confusion counts of images; every accuracy of the papers follows from the counts."""

import numpy as np
import torch
from torch import Tensor

from task.data.images import Dataset, Images
from task.models.feature_cache import adapted_features, batches, cached_inputs
from task.models.model import Model


@torch.no_grad()
def extract_features(model: Model, images: Images, positions: np.ndarray) -> Tensor:
    """f(x) of the images at ``positions`` [N] -> float32 [N, width] on the model's device, no augmentation."""
    training = model.backbone.training
    model.backbone.eval()  # so that features neither depend on the batch nor change running means
    features = [model.features(*cached_inputs(model, images, batch)) for batch in batches(positions)]
    model.backbone.train(training)
    return torch.cat(features) if features else torch.empty(0, model.width, device=model.device)


def _logits(model: Model, images: Images, batch: np.ndarray) -> Tensor:
    if model.adapts:
        return model.head(adapted_features(model, images, batch))
    return model(*cached_inputs(model, images, batch))


@torch.no_grad()
def predict_classes(model: Model, dataset: Dataset, order: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Class ids that the model predicts for the test images at ``positions``, int64 [N] -> [N].

    ``order`` is the class id of each head row, int64 [seen].
    """
    rows = [_logits(model, dataset.test_images, batch).argmax(dim=1).cpu().numpy() for batch in batches(positions)]
    return order[np.concatenate(rows)] if rows else np.empty(0, np.int64)


def count_pairs(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Confusion matrix, int64 [C, C], of images of true ``labels`` [N] (row) and ``predicted`` classes [N] (column)."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (labels, predicted), 1)
    return counts


def confusion_counts(model: Model, dataset: Dataset, order: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Confusion matrix of the test images at ``positions``, int64 [N]; classes not seen yet are left out.

    ``order`` is the class id of each head row, int64 [seen]. The matrix is int64 [C, C] over all classes of the data
    set by id: rows the true class, columns the predicted one.
    """
    tested = dataset.test_positions(order, positions)
    predicted = predict_classes(model, dataset, order, tested)
    return count_pairs(dataset.test_labels[tested], predicted, len(dataset.class_names))
