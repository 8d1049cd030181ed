"""Federated bias: what the local models of a task say before they become one (HGP sections 2 and 4.3)."""

import math
from collections.abc import Sequence

import numpy as np

from strategies.base import Update
from task.data.images import Dataset
from task.metrics import prototype_distance, response_entropy
from task.models.evaluation import confusion_counts
from task.models.model import Model


def response_entropies(model: Model, updates: Sequence[Update], dataset: Dataset, order: np.ndarray) -> list[float]:
    """Entropy in nats of what each local model answers to the test images of all seen classes.

    Args:
        model: the global one, which holds the local arrays one after another and is left as it was.
        updates: those of clients that have trained.
        dataset: its test part is used.
        order: class id of each head row, int64 [seen].

    Returns:
        one for each update; none where no test image is of a seen class.
    """
    before, found = model.export(), []
    for update in updates:
        model.load(update.arrays)
        counts = confusion_counts(model, dataset, order, np.arange(len(dataset.test_labels)))
        found += [response_entropy(counts.sum(axis=0))] if counts.any() else []
    model.load(before)
    return found


def local_distance(updates: Sequence[Update]) -> float:
    """How far the clients' prototypes of a class are apart, see :func:`task.metrics.prototype_distance`.

    NaN where the method sends no class means, or no two clients hold the same class.
    """
    sent = [u.prototypes for u in updates if "means" in u.prototypes]
    if not sent:
        return math.nan
    class_ids, means = (np.concatenate([found[name] for found in sent]) for name in ("class_ids", "means"))
    return prototype_distance(class_ids, means)
