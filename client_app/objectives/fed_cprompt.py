"""Fed-CPrompt, client half: the local task prompt stays near the global one and off those of older tasks."""

import torch
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.method_options import FedCPromptOptions
from task.models.feature_cache import Inputs
from task.models.model import Model, prompt_of
from task.prompts.coda import CodaPrompt


class FedCPrompt(Objective):
    """Cross-entropy + weight * contrastive loss on the CODA components of the current task (Bagwe et al. 2023).

    L = CE + w max(d(P, P_global) - push min_i d(P, P_i) + margin, 0), with the client's prompt P of the current task
    [J, M, 2, L_p, D], the one it received P_global, and those of older tasks P_i. In the first task it is L = CE + w
    d(P, P_global). This is a triplet loss on prompts; d is per vector, so that the margin does not depend on the number
    of components M.

    The public code contrasts features instead, which takes three forward passes a step. Its margin is 1, as here.
    Weight and push are ours: orthonormal prompts are sqrt(2) apart, so a push of 1 would leave nothing of the loss at a
    task's start.
    """

    options: FedCPromptOptions

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Before the first epoch, keep the global prompt of the current task."""
        if epoch == 0:
            self.global_prompt = prompt_of(model, CodaPrompt).prompts[-1].detach().clone()

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the current classes and the contrastive loss; logits [B, current classes]."""
        loss, logits = super().loss(model, inputs, rows)
        *older, local = prompt_of(model, CodaPrompt).prompts
        return loss + self.options.weight * contrast(local, self.global_prompt, older, self.options), logits


def contrast(local: Tensor, received: Tensor, older: list[Tensor], options: FedCPromptOptions) -> Tensor:
    """max(d(local, global) - push * min_i d(local, older_i) + margin, 0); in the first task d(local, global) alone.

    d is the root mean square, over blocks and components, of the distance of two component vectors. ``local`` is the
    task prompt in training, [J, M, 2, L_p, D]: J blocks, M components; ``received`` is what the round began with.
    """
    per_vector = (local.shape[0] * local.shape[1]) ** -0.5
    pull = per_vector * torch.linalg.vector_norm(local - received)
    if not older:
        return pull
    nearest = per_vector * torch.stack([torch.linalg.vector_norm(local - prompt) for prompt in older]).min()
    return (pull - options.push * nearest + options.margin).clamp(min=0)
