"""Federated LwF, client half, in the multi-class form of iCaRL's comparison (LwF.MC, Rebuffi et al. 2017)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.message import Packet
from task.models.feature_cache import Inputs
from task.models.model import Model, build_model


class FedLwFObjective(Objective):
    """Binary cross-entropy of every class's sigmoid: new classes against labels, old ones against the teacher's.

    The packet's prototypes are the teacher, the global model as the last task ended: none in the first task, where
    the first sum is all there is.
    """

    def __init__(self, config: Config, packet: Packet) -> None:
        super().__init__(config, packet)
        self.sent = packet.prototypes
        self.teacher: Model | None = None

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Before the first step, build the teacher."""
        if self.sent and epoch == 0:
            self.teacher = build_model(self.config, model.task_sizes[:-1]).eval()
            self.teacher.load(self.sent)

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over classes, mean over images; the logits are those of the current task."""
        logits, current = model(*inputs), model.current_rows()
        targets = F.one_hot(rows, logits.shape[1]).to(logits.dtype)
        loss = binary_loss(logits[:, current], targets[:, current])
        if self.teacher:
            with torch.no_grad():
                old = self.teacher(*inputs).sigmoid()
            loss = loss + binary_loss(logits[:, : old.shape[1]], old)
        return loss, logits[:, current]


def binary_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """-sum_c [q_c log s_c + (1 - q_c) log(1 - s_c)], s = sigmoid of the logits; mean over the rows of [B, C]."""
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)
