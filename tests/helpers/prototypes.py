"""Class statistics as a client sends them."""

from torch import Tensor

from task.message import Arrays
from task.method_options import HGPOptions
from task.prototypes.statistics import GaussianStatistics


def gaussian_statistics(features: Tensor, labels: Tensor, packing: str, rank: int) -> Arrays:
    """Counts, means and packed covariances of features [N, D] with labels [N], as they travel without noise."""
    return GaussianStatistics().compute(features, labels, HGPOptions(covariance=packing, rank=rank))
