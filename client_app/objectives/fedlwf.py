"""Federated LwF, client half, in the multi-class form LwF.MC (Li and Hoiem 2016; Rebuffi et al. 2017)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.message import Packet
from task.models.feature_cache import Inputs
from task.models.model import Model, build_model


class FedLwFObjective(Objective):
    """Binary cross-entropy of every class's sigmoid: current classes against labels, old ones against the teacher.

    L = - mean_x { sum_{c current} [y_c log s_c + (1 - y_c) log(1 - s_c)] + sum_{c old} [q_c log s_c + (1 - q_c)
    log(1 - s_c)] }. y is the one-hot label, s = sigmoid(logits of the local model) [B, seen classes] and
    q = sigmoid(logits of the teacher) [B, old classes]. This is LwF.MC: the idea is of Li and Hoiem (2016, Learning
    without Forgetting), the loss is that of iCaRL's algorithm 3 (Rebuffi et al. 2017) without stored images.

    The packet's statistics are the teacher: all arrays of the global model at the end of the last task. In the first
    task there is none, and the loss has its first sum only.
    """

    def __init__(self, config: Config, packet: Packet) -> None:
        super().__init__(config, packet)
        self.teacher_arrays = packet.statistics
        self.teacher: Model | None = None

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Before the first epoch, build the teacher."""
        if self.teacher_arrays and epoch == 0:
            self.teacher = build_model(self.config, model.task_sizes[:-1]).eval()
            self.teacher.load(self.teacher_arrays)

    def learned_rows(self, model: Model) -> Tensor:
        """All head rows."""
        return torch.arange(len(model.head.weight))

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over classes, mean over images; logits [B, current classes]."""
        logits, current = model(*inputs), model.current_rows()
        targets = F.one_hot(rows, logits.shape[1]).to(logits.dtype)
        loss = binary_loss(logits[:, current], targets[:, current])
        if self.teacher:
            with torch.no_grad():
                old_targets = self.teacher(*inputs).sigmoid()
            loss = loss + binary_loss(logits[:, : old_targets.shape[1]], old_targets)
        return loss, logits[:, current]


def binary_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """-sum_c [q_c log s_c + (1 - q_c) log(1 - s_c)] with s = sigmoid(logits); logits and q [B, C], mean over B.

    >>> binary_loss(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))  # 2 ln 2
    tensor(1.3863)
    """
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)
