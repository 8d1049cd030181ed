"""Federated bias: how far the local models of a task are apart before aggregation (HGP sections 2 and 4.3)."""

import math
from collections.abc import Sequence

import numpy as np

from strategies.base import Update
from task.data.images import Dataset
from task.metrics import prototype_distance, response_entropy
from task.models.evaluation import confusion_counts
from task.models.model import Model


def response_entropies(model: Model, update: Update, dataset: Dataset, order: np.ndarray) -> list[float]:
    """Entropy, in nats, of the classes that a local model predicts for the test images of all seen classes.

    The model holds the update's arrays meanwhile; ``order`` int64 [seen] is the class id of each head row. Empty where
    no test image is of a seen class.
    """
    before = model.export()
    model.load(update.arrays)
    counts = confusion_counts(model, dataset, order, np.arange(len(dataset.test_labels)))
    model.load(before)
    return [response_entropy(counts.sum(axis=0))] if counts.any() else []


def local_distance(updates: Sequence[Update]) -> float:
    """Distance between the clients' prototypes of a class, see :func:`task.metrics.prototype_distance`.

    NaN where the method sends no class means, or no two clients hold the same class.
    """
    statistics = [u.statistics for u in updates if "means" in u.statistics]
    if not statistics:
        return math.nan
    class_ids, means = (np.concatenate([s[name] for s in statistics]) for name in ("class_ids", "means"))
    return prototype_distance(class_ids, means)
