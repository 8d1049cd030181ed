"""PIP, server half: participation-weighted averaging and merged prototypes (Ma'sum et al. 2024, eq. 12 to 15)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from strategies.base import RoundContext, Strategy, Update, join_statistics, replace_classes
from task.config.schema import Config
from task.message import Arrays
from task.models.model import Model
from task.prototypes.gaussians import fill_singletons


class PIP(Strategy):
    """Client l weighs omega_l = rho_l |T_l| (eq. 12, 13): its rounds of training so far, this one included, times n_l.

    rho counts over the whole run. The merged prototypes of the current task (eq. 14, 15), means and variances [K, D] of
    its K classes, go to the clients of its next rounds. A class that no client reports in a round keeps its prototype;
    the paper does not treat this case.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rounds: Counter[str] = Counter()  # rho by client, without the present round
        self.task = -1  # whose prototypes these are
        self.prototypes: Arrays = {}

    def broadcast(self, context: RoundContext) -> Arrays:
        """Head ``rows`` int64 [K], ``means`` and ``variances`` float32 [K, D]; nothing in a task's first round."""
        if context.task != self.task or not self.prototypes:
            return {}
        rows = context.head_rows(torch.from_numpy(self.prototypes["class_ids"])).numpy()
        return {"rows": rows, "means": self.prototypes["means"], "variances": self.prototypes["variances"]}

    def weight(self, update: Update) -> float:
        """omega_l (eq. 12)."""
        return (self.rounds[update.client] + 1) * update.num_examples

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Merge the round's prototypes and count it for every client that trained; the model stays as it is."""
        if context.task != self.task:
            self.task, self.prototypes = context.task, {}
        reporting = [u for u in updates if u.statistics]
        if reporting:
            weights = np.array([self.weight(u) for u in reporting], np.float64)
            self.prototypes = replace_classes(self.prototypes, _merge_reports(reporting, weights))
        self.rounds = self.rounds + Counter(u.client for u in updates)
        return {"prototypes": float(len(self.prototypes.get("class_ids", ())))}


def _merge_reports(updates: Sequence[Update], weights: np.ndarray) -> Arrays:
    """One prototype per class; the variance of a client's only image of a class is that of ``fill_singletons``."""
    joined = join_statistics(u.statistics for u in updates)
    variances = fill_singletons(joined["class_ids"], joined["counts"], joined["variances"])
    per_row = np.repeat(weights, [len(u.statistics["class_ids"]) for u in updates])
    class_ids, means, variances = merge_by_weight(joined["class_ids"], per_row, joined["means"], variances)
    return {"class_ids": class_ids, "means": means.astype(np.float32), "variances": variances.astype(np.float32)}


def merge_by_weight(
    class_ids: np.ndarray, weights: np.ndarray, means: np.ndarray, variances: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One diagonal Gaussian for each class, from those of several clients (PIP eq. 14 and 15).

    mu = sum_l w_l mu_l / sum_l w_l;  sigma2 = sum_l w_l (mu_l^2 + sigma2_l) / sum_l w_l - mu^2, at least 0.

    Ids int64 [P], one row per client and class, omega_l > 0 of the row's client [P], means and variances [P, D] ->
    class ids [K] ascending, means and variances float64 [K, D].
    """
    classes, index = np.unique(class_ids, return_inverse=True)
    shares = weights / np.bincount(index, weights)[index]
    wide = means.astype(np.float64)
    moments = np.zeros((len(classes), 2 * means.shape[1]))
    np.add.at(moments, index, shares[:, None] * np.concatenate([wide, wide**2 + variances], axis=1))
    mean, square = np.split(moments, 2, axis=1)
    return classes, mean, (square - mean**2).clip(0)
