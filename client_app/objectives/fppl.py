"""FPPL, client half: cross-entropy and a unified representation (He et al. 2024)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.method_options import FPPLOptions
from task.models.feature_cache import Inputs
from task.models.model import Model


class FPPLObjective(Objective):
    """L = L_ur + L_ce (eq. 8): a unified representation, which pulls features to global prototypes, and cross-entropy.

    L_ur = -log softmax_a(cos(f(x), G^a) / tau)_y (eq. 6), with the prototypes G of the current task's classes a.

    ``statistics`` are the prototypes of the current task: head ``rows`` int64 [K] and ``means`` [K, D]. An image whose
    class has no prototype has L_ur = 0. In a task's first round no class has one.
    """

    options: FPPLOptions

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Look up the prototype of each head row: ``prototype_of`` int64 [seen]."""
        super().begin_epoch(model, data, epoch, rng)
        if self.statistics:
            rows = self.statistics["rows"]
            self.prototype_of = torch.full((len(model.head.bias),), -100, device=model.device)  # ignored by the loss
            self.prototype_of[rows] = torch.arange(len(rows), device=model.device)

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the current classes, plus L_ur; logits [B, current classes]."""
        features = model.features(*inputs)
        logits = model.head(features)[:, model.current_rows()]
        loss = F.cross_entropy(logits, model.local_targets(rows)) + model.prompt.penalty
        if self.statistics:
            loss = loss + unified_loss(features, self.statistics["means"], self.prototype_of[rows], self.options.tau)
        return loss, logits


def unified_loss(features: Tensor, prototypes: Tensor, targets: Tensor, tau: float) -> Tensor:
    """Batch mean of L_ur = -log [exp(cos(f, G^y) / tau) / sum_a exp(cos(f, G^a) / tau)] (eq. 6).

    >>> unified_loss(torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([0]), tau=1.0)  # -ln [e / (e + 1)]
    tensor(0.3133)

    Features f [B, D], prototypes G [K, D]; targets int64 [B] are the prototypes of the images' own classes, and -100
    counts as a loss of zero.
    """
    similarity = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T / tau
    return F.cross_entropy(similarity, targets, reduction="sum") / len(features)
