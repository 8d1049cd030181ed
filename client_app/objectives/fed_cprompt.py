"""Fed-CPrompt, client half: the local task prompt stays near the global one and off those of older tasks."""

import torch
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.message import Packet
from task.method_options import FedCPromptOptions
from task.models.feature_cache import Inputs
from task.models.model import Model


class FedCPrompt(Objective):
    """Cross-entropy + weight * contrastive loss on the CODA components of the current task (Bagwe et al. 2023).

    A triplet form; distances are per vector, so that its margin does not depend on the number of components. The public
    code contrasts features instead, at three forward passes a step. Margin 1 is that code's; weight and push are ours:
    orthonormal prompts are sqrt(2) apart, so that a push of 1 would leave nothing of the loss at a task's start.
    """

    def __init__(self, config: Config, packet: Packet) -> None:
        super().__init__(config, packet)
        self.options: FedCPromptOptions = config.options  # type: ignore[assignment]  # the table gives it these
        self.received = torch.empty(0)

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Before the first step, keep the global task prompt that the round began with."""
        if epoch == 0:
            self.received = task_prompts(model)[-1].detach().clone()

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As the base says, and the contrast."""
        loss, logits = super().loss(model, inputs, rows)
        *older, local = task_prompts(model)
        return loss + self.options.weight * contrast(local, self.received, older, self.options), logits


def task_prompts(model: Model) -> list[Tensor]:
    """Components of every task so far, [blocks, M, 2, L_p, D] each."""
    return list(model.prompt.prompts)  # type: ignore[arg-type]  # the table gives Fed-CPrompt a CODA prompt


def contrast(local: Tensor, received: Tensor, older: list[Tensor], options: FedCPromptOptions) -> Tensor:
    """max(d(local, global) - push * min_i d(local, older_i) + margin, 0); in the first task d(local, global) alone.

    d is the root mean square, over blocks and components, of the distance of two component vectors.

    Args:
        local: the task prompt in training, [blocks, M, 2, L_p, D].
        received: the global one at the start of the round.
        older: those of earlier tasks.
        options: margin and push.
    """
    per_vector = (local.shape[0] * local.shape[1]) ** -0.5
    pull = per_vector * torch.linalg.vector_norm(local - received)
    if not older:
        return pull
    nearest = per_vector * torch.stack([torch.linalg.vector_norm(local - other) for other in older]).min()
    return (pull - options.push * nearest + options.margin).clamp(min=0)
