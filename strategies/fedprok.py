"""FedProK, server half: plain averaging and prototype fusion (Gao et al. 2024)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.base import RoundContext, Strategy, Update, join_statistics
from task.config.schema import Config
from task.message import Arrays
from task.method_options import FedProKOptions
from task.models.model import Model
from task.prototypes.gaussians import merge_means


class FedProK(Strategy):
    """Plain mean of the weights (algorithm 1, line 13); fused prototypes (eq. 9) go out to be translated (eq. 7, 8).

    ``class_ids`` int64 [K], ascending, and ``means`` [K, D] are the fused prototypes. From the round after its first
    report a class has an old prototype, so eq. 9 also mixes the rounds of one task.
    """

    options: FedProKOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.class_ids, self.means = torch.empty(0, dtype=torch.int64), torch.empty(0, 0)

    def broadcast(self, context: RoundContext) -> Arrays:
        """Prototypes of earlier tasks: head ``rows`` int64 [P] and ``means`` [P, D]; nothing in the first task."""
        rows = context.head_rows(self.class_ids)
        old = rows < len(context.old_classes)
        return {"rows": rows[old].numpy(), "means": self.means[old].numpy()} if old.any() else {}

    def weight(self, update: Update) -> float:
        """1 for every client."""
        return 1.0

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Fuse the round's prototypes with those of earlier rounds."""
        joined = join_statistics(u.statistics for u in updates)
        if joined:
            class_ids, _, means = merge_means(*(torch.from_numpy(joined[n]) for n in ("class_ids", "counts", "means")))
            self.class_ids, self.means = fuse(self.class_ids, self.means, class_ids, means, self.options.beta)
        return {"prototypes": float(len(self.class_ids))}


def fuse(old_ids: Tensor, old_means: Tensor, new_ids: Tensor, new_means: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Prototype fusion (eq. 9): a new class takes its mean, one that has an old mean beta * new + (1 - beta) * old.

    >>> fuse(torch.tensor([3]), torch.tensor([[1.0]]), torch.tensor([3, 5]), torch.tensor([[2.0], [7.0]]), beta=0.5)
    (tensor([3, 5]), tensor([[1.5000],
            [7.0000]]))

    Old prototypes [K, D] of ids [K], this round's means over clients [N, D] of ids [N]; all ids, also those of the
    union that is returned, ascend.
    """
    if not len(old_ids):
        return new_ids, new_means
    repeated, kept = torch.isin(new_ids, old_ids), ~torch.isin(old_ids, new_ids)
    previous = old_means[torch.searchsorted(old_ids, new_ids[repeated])]
    means = new_means.clone()
    means[repeated] = beta * means[repeated] + (1 - beta) * previous
    union, order = torch.cat([old_ids[kept], new_ids]).sort()
    return union, torch.cat([old_means[kept], means])[order]
