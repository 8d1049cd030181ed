"""PIP, server half: participation-weighted averaging and merged prototypes (Ma'sum et al. 2024, eq. 12 to 15)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from strategies.base import RoundContext, Strategy, Update
from task.config.schema import Config
from task.message import Arrays
from task.models.model import Model
from task.prototypes.gaussians import fill_singletons


class PIP(Strategy):
    """Client l weighs omega_l = rho_l |T_l|: the rounds in which it has trained so far, this one included, times n_l.

    rho counts over the whole run. Merged prototypes of the current task go to the clients of its next rounds; a class
    that nobody reports in a round keeps the one it had, on which the paper is silent.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rounds: Counter[str] = Counter()  # rho by client
        self.task = -1  # that the known prototypes belong to
        self.known: Arrays = {}

    def broadcast(self, context: RoundContext) -> Arrays:
        """class_ids int64 [K], means and variances float32 [K, D] of the current task; nothing in its first round."""
        return self.known if context.task == self.task else {}

    def weight(self, update: Update) -> float:
        """omega_l (eq. 12), before the round is counted."""
        return (self.rounds[update.client] + 1) * update.num_examples

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Merge the round's prototypes and count it for everyone who trained in it; the model stays as it is."""
        if context.task != self.task:
            self.task, self.known = context.task, {}
        reported = [u for u in updates if u.statistics]
        if reported:
            weights = np.array([self.weight(u) for u in reported], np.float64)
            self.known = _updated(self.known, _merge_reported(reported, weights))
        self.rounds = self.rounds + Counter(u.client for u in updates)
        return {"prototypes": float(len(self.known.get("class_ids", ())))}


def _merge_reported(updates: Sequence[Update], weights: np.ndarray) -> Arrays:
    """One prototype per class; a client's single image has no variance and borrows one (methods.md section 0)."""
    joined = {name: np.concatenate([u.statistics[name] for u in updates]) for name in updates[0].statistics}
    class_ids, means = joined["class_ids"], joined["means"]
    variances = fill_singletons(class_ids, joined["counts"], joined["variances"])
    per_row = np.repeat(weights, [len(u.statistics["class_ids"]) for u in updates])
    classes, merged_means, merged_variances = merge_by_class(class_ids, per_row, means, variances)
    return {
        "class_ids": classes,
        "means": merged_means.astype(np.float32),
        "variances": merged_variances.astype(np.float32),
    }


def merge_by_class(
    class_ids: np.ndarray, weights: np.ndarray, means: np.ndarray, variances: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One diagonal Gaussian for each class, from those of several clients (PIP eq. 14 and 15).

    mu = sum_l w_l mu_l / sum_l w_l;  sigma2 = sum_l w_l (mu_l^2 + sigma2_l) / sum_l w_l - mu^2.

    Args:
        class_ids: int64 [P], one row per client and class.
        weights: omega_l of the row's client, [P], above 0.
        means: [P, D].
        variances: [P, D].

    Returns:
        class ids [K] ascending, means and variances float64 [K, D].
    """
    classes, place = np.unique(class_ids, return_inverse=True)
    shares = weights / np.bincount(place, weights)[place]
    wide = means.astype(np.float64)
    moments = np.zeros((len(classes), 2 * means.shape[1]))
    np.add.at(moments, place, shares[:, None] * np.concatenate([wide, wide**2 + variances], axis=1))
    mean, square = np.split(moments, 2, axis=1)
    return classes, mean, (square - mean**2).clip(0)


def _updated(known: Arrays, fresh: Arrays) -> Arrays:
    """``fresh``, and of ``known`` the classes that it lacks."""
    if not known:
        return fresh
    kept = ~np.isin(known["class_ids"], fresh["class_ids"])
    return {name: np.concatenate([known[name][kept], fresh[name]]) for name in fresh}
