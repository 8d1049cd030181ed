"""FedProx, client half: a proximal term (Li et al. 2020)."""

import torch
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.message import Packet
from task.method_options import FedProxOptions
from task.models.feature_cache import Inputs
from task.models.model import Model


class FedProxObjective(Objective):
    """Cross-entropy + mu / 2 |theta - theta_global|^2 over everything that trains (Li et al. 2020, eq. 2)."""

    def __init__(self, config: Config, packet: Packet) -> None:
        super().__init__(config, packet)
        self.options: FedProxOptions = config.options  # type: ignore[assignment]  # the table's options of FedProx
        self.start: list[Tensor] = []

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Keep what came from the server."""
        if epoch == 0:
            self.start = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the current task's classes and the proximal term."""
        loss, logits = super().loss(model, inputs, rows)
        trained = (p for p in model.parameters() if p.requires_grad)
        apart = sum((p - old).square().sum() for p, old in zip(trained, self.start, strict=True))
        return loss + 0.5 * self.options.mu * apart, logits
