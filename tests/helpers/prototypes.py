"""Class statistics as a client sends them."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from strategies.base import Update
from task.message import Arrays
from task.method_options import HGPOptions
from task.prototypes.statistics import GaussianStatistics


def gaussian_statistics(features: Tensor, labels: Tensor, packing: str, rank: int) -> Arrays:
    """Counts, means and packed covariances of features [N, D] with labels [N], as they travel without noise."""
    return GaussianStatistics().compute(features, labels, HGPOptions(covariance=packing, rank=rank))


def mean_update(client: str, class_ids: Sequence[int], means: object, counts: Sequence[int] = ()) -> Update:
    """A client's answer with class means [K, D], one image of each class unless ``counts`` are given."""
    counts = counts or [1] * len(class_ids)
    statistics = {"class_ids": np.array(class_ids), "counts": np.array(counts), "means": np.array(means, np.float32)}
    return Update(client, sum(counts), {}, statistics)
