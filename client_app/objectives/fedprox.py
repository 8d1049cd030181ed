"""FedProx, client half: a proximal term (Li et al. 2020)."""

import torch
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.method_options import FedProxOptions
from task.models.feature_cache import Inputs
from task.models.model import Model


class FedProxObjective(Objective):
    """Cross-entropy + mu / 2 |theta - theta_global|^2 over everything that trains (Li et al. 2020, eq. 2)."""

    options: FedProxOptions

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Before the first epoch, keep the global parameters."""
        if epoch == 0:
            self.start = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the current classes and the proximal term; logits [B, current classes]."""
        loss, logits = super().loss(model, inputs, rows)
        trained = (p for p in model.parameters() if p.requires_grad)
        distance = sum((p - start).square().sum() for p, start in zip(trained, self.start, strict=True))
        return loss + 0.5 * self.options.mu * distance, logits
