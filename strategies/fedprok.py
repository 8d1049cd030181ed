"""FedProK, server half: plain averaging and prototype fusion (Gao et al. 2024)."""

from collections.abc import Sequence

import numpy as np
import torch

from strategies.base import RoundContext, Strategy, Update, join_statistics, replace_classes
from task.config.schema import Config
from task.message import Arrays
from task.method_options import FedProKOptions
from task.models.model import Model
from task.prototypes.gaussians import merge_means


class FedProK(Strategy):
    """Plain mean of the weights (algorithm 1, line 13); fused prototypes (eq. 9) go out to be translated (eq. 7, 8).

    Eq. 9 mixes what a task reports of a class with the class's prototype from earlier tasks, mu^{t-1}: in asynchronous
    runs clients meet a class in different tasks. A later round of the same task replaces an earlier one; with
    ``fedprok-fusion=rounds`` it is mixed in too. A class that no client reports in a round keeps its prototype.

    ``prototypes`` and ``earlier``, those at the end of the last task, have ``class_ids`` int64 [K], ``means`` [K, D].
    """

    options: FedProKOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.task = 0
        self.prototypes: Arrays = {}
        self.earlier: Arrays = {}

    def broadcast(self, context: RoundContext) -> Arrays:
        """Prototypes of earlier tasks: head ``rows`` int64 [P] and ``means`` [P, D]; nothing in the first task."""
        if not self.prototypes:
            return {}
        class_ids = self.prototypes["class_ids"]
        old = np.isin(class_ids, context.old_classes)
        if not old.any():
            return {}
        rows = context.head_rows(torch.from_numpy(class_ids[old])).numpy()
        return {"rows": rows, "means": self.prototypes["means"][old]}

    def weight(self, update: Update) -> float:
        """1 for every client."""
        return 1.0

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Fuse the round's prototypes with those of earlier tasks."""
        if context.task != self.task:
            self.task, self.earlier = context.task, self.prototypes
        joined = join_statistics(u.statistics for u in updates)
        if joined:
            class_ids, means = merge_means(joined)
            old = self.earlier if self.options.fusion == "tasks" else self.prototypes
            fused = fuse(old, {"class_ids": class_ids.numpy(), "means": means.numpy()}, self.options.beta)
            self.prototypes = replace_classes(self.prototypes, fused)
        return {"prototypes": float(len(self.prototypes.get("class_ids", ())))}


def fuse(old: Arrays, reported: Arrays, beta: float) -> Arrays:
    """Prototype fusion (eq. 9): a new class takes its mean, a known one beta * new + (1 - beta) * old.

    >>> old = {"class_ids": np.array([3]), "means": np.array([[1.0]])}
    >>> fuse(old, {"class_ids": np.array([5, 3]), "means": np.array([[7.0], [2.0]])}, beta=0.5)["means"].tolist()
    [[7.0], [1.5]]

    Both have class_ids int64 [K] and means [K, D], each class once; ``old`` may be empty. The result is of the
    reported classes, in their order.
    """
    if not old:
        return reported
    repeated, means = np.isin(reported["class_ids"], old["class_ids"]), reported["means"].copy()
    same = reported["class_ids"][repeated, None] == old["class_ids"]  # [repeated, old]
    means[repeated] = beta * means[repeated] + (1 - beta) * old["means"][same.argmax(axis=1)]
    return reported | {"means": means}
