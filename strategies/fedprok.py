"""FedProK, server half: plain averaging and prototype fusion (Gao et al. 2024)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strategies.base import Moment, Strategy, Update
from task.config.schema import Config
from task.message import Arrays
from task.method_options import FedProKOptions
from task.models.model import Model
from task.prototypes.gaussians import merge_means


class FedProK(Strategy):
    """Plain mean of the weights (algorithm 1, line 13); prototypes of old classes go out to be translated.

    ``class_ids`` int64 [K], ascending, and ``means`` [K, D] are the fused prototypes. A class is known from the round
    after its first report on, so that eq. 9 mixes the rounds of one task too.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options: FedProKOptions = config.options  # type: ignore[assignment]  # the table's options of FedProK
        self.class_ids, self.means = torch.empty(0, dtype=torch.int64), torch.empty(0, 0)

    def broadcast(self, moment: Moment) -> Arrays:
        """Prototypes of earlier tasks: their head rows and means."""
        old = moment.schedule.seen_classes(moment.task - 1) if moment.task else []
        known = torch.isin(self.class_ids, torch.tensor(old, dtype=torch.int64))
        if not known.any():
            return {}
        rows = np.array([old.index(c) for c in self.class_ids[known].tolist()])
        return {"rows": rows, "means": self.means[known].numpy()}

    def weight(self, update: Update) -> float:
        """Every client counts the same."""
        return 1.0

    def refine(self, model: Model, updates: Sequence[Update], moment: Moment) -> dict[str, float]:
        """Fuse the round's prototypes with the known ones."""
        found = [u.prototypes for u in updates if u.prototypes]
        if found:
            names = ("class_ids", "counts", "means")
            joined = (torch.from_numpy(np.concatenate([f[name] for f in found])) for name in names)
            classes, _, means = merge_means(*joined)
            self.class_ids, self.means = fuse(self.class_ids, self.means, classes, means, self.options.beta)
        return {"prototypes": float(len(self.class_ids))}


def fuse(known: Tensor, old: Tensor, classes: Tensor, means: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Prototype fusion: a new class takes its mean, a known one beta * mean + (1 - beta) * old (eq. 9).

    Args:
        known: class ids [K], ascending, of ``old`` [K, D].
        old: prototypes so far.
        classes: class ids [N], ascending, of ``means`` [N, D].
        means: this round's means over clients, weighted by counts.
        beta: share of the new mean.

    Returns:
        class ids ascending and prototypes of the union.
    """
    if not len(known):
        return classes, means
    again, kept = torch.isin(classes, known), ~torch.isin(known, classes)
    before = old[torch.searchsorted(known, classes[again])]
    means = means.clone()
    means[again] = beta * means[again] + (1 - beta) * before
    union, order = torch.cat([known[kept], classes]).sort()
    return union, torch.cat([old[kept], means])[order]
