"""Federated EWC, client half: what mattered to earlier tasks moves less (Kirkpatrick et al. 2017)."""

import torch
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.message import Packet
from task.method_options import FedEWCOptions
from task.models.feature_cache import Inputs
from task.models.model import Model


class FedEWCObjective(Objective):
    """Cross-entropy + lambda / 2 sum_i F_i (theta_i - theta*_i)^2 over the backbone (Kirkpatrick et al. 2017, eq. 3).

    F and theta* come from the server, none in the first task. Rows of earlier classes do not train, so they need no
    protection.
    """

    def __init__(self, config: Config, packet: Packet) -> None:
        super().__init__(config, packet)
        self.options: FedEWCOptions = config.options  # type: ignore[assignment]  # the table's options of FedEWC
        self.sent = {name: torch.from_numpy(array) for name, array in packet.prototypes.items()}

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Move what came from the server to the model."""
        self.sent = {name: value.to(model.device) for name, value in self.sent.items()}

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the current task's classes and the penalty."""
        loss, logits = super().loss(model, inputs, rows)
        if self.sent:
            apart = model.packed_backbone() - self.sent["anchor"]
            loss = loss + 0.5 * self.options.strength * (self.sent["fisher"] * apart.square()).sum()
        return loss, logits
