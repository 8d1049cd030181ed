"""Class statistics as a client sends them, and merges of them for one class by the formulas of the papers."""

from typing import Any

from torch import Tensor

from task.message import Arrays
from task.method_options import HGPOptions
from task.prototypes.statistics import GaussianStatistics


def gaussian_statistics(features: Tensor, labels: Tensor, packing: str, rank: int) -> Arrays:
    """Counts, means and packed covariances of features [N, D] with labels [N], as they travel without noise."""
    return GaussianStatistics().compute(features, labels, HGPOptions(covariance=packing, rank=rank))


def merge_diagonal(means: Any, variances: Any, weights: Any) -> tuple[Any, Any]:
    """One diagonal Gaussian for weighted ones (PIP eq. 14-15); NumPy or torch in, the same out.

    mu = sum_l w_l mu_l / sum_l w_l;  sigma2 = sum_l w_l (mu_l^2 + sigma2_l) / sum_l w_l - mu^2.

    Args:
        means: [L, D].
        variances: [L, D].
        weights: [L], not negative, sum above 0.

    Returns:
        mean [D] and variance [D].
    """
    weights = 0 * means[:, 0] + weights  # whole numbers would divide in torch's default type, whatever the means'
    share = (weights / weights.sum())[:, None]
    mean = (share * means).sum(0)
    # eq. 15's E[x^2] - mu^2 cancels digits; this is the same sum, and never negative
    return mean, (share * (variances + (means - mean) ** 2)).sum(0)


def merge_gaussians(means: Any, covariances: Any, counts: Any) -> tuple[Any, Any]:
    """Mean and covariance (divided by N - 1) of the union of L sample sets; NumPy or torch in, the same out.

    Args:
        means: [L, D].
        covariances: [L, D, D], each divided by n_l - 1; anything finite where n_l = 1.
        counts: [L], N = their sum, at least 2.

    Returns:
        mean [D] and covariance [D, D].
    """
    total = counts.sum()
    mean = (counts[:, None] * means).sum(0) / total
    apart = means - mean
    within = ((counts - 1)[:, None, None] * covariances).sum(0)
    between = (counts[:, None] * apart).T @ apart
    return mean, (within + between) / (total - 1)
