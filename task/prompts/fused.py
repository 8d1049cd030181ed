"""FPPL's prompt: one per task, fused by weights that depend on the image (He et al. 2024, eq. 2)."""

import torch
from torch import Tensor, nn

from task.config.schema import Config
from task.prompts.base import Prompt, PromptVectors, draw_uniform
from task.prompts.decomposed import cosines
from task.utils.seeding import torch_rng


class FusedPrompt(Prompt):
    """Tokens p = sum_i softmax(scale * cos(q, psi))_i p_i over the prompts p_i of all tasks so far (eq. 2).

    Parameters: ``prompts.i`` [J, L_p, D] of task i, ``psi`` [tasks, D] and ``scale`` [1]. The first prompt starts
    uniform(-1, 1), each other one as a copy of the previous one; a prompt is frozen when its task has ended. The scale
    starts at 1. The paper does not give the start of a row of psi: here it is uniform(-1, 1), and only its direction
    counts.

    >>> from task.config.parsing import parse
    >>> prompt = FusedPrompt(parse({"method": "fppl", "prompt-length": 4}), dim=16)
    >>> prompt.begin_task(0)
    >>> prompt(torch.ones(7, 16))[0].shape
    torch.Size([7, 4, 16])
    """

    needs_query = True

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.shape = len(self.blocks), config.prompt_length, dim
        self.prompts = nn.ParameterList()
        self.psi = nn.Parameter(torch.empty(0, dim))
        self.scale = nn.Parameter(torch.ones(1))

    def begin_task(self, task: int) -> None:
        """Freeze the earlier prompts and add one, with its row of psi."""
        if task:
            start = self.prompts[-1].detach().clone()
        else:
            start = draw_uniform(*self.shape, rng=torch_rng(self.seed, "prompt")).to(self.psi.device)
        self.prompts.requires_grad_(False)
        self.prompts.append(nn.Parameter(start))
        row = draw_uniform(1, self.psi.shape[1], rng=torch_rng(self.seed, "psi", task)).to(self.psi.device)
        self.psi = nn.Parameter(torch.cat([self.psi.detach(), row]))
        # the softmax over a single prompt is 1 whatever psi and scale are: nothing to learn, nothing to send
        self.psi.requires_grad_(task > 0)
        self.scale.requires_grad_(task > 0)

    def forward(self, query: Tensor) -> PromptVectors:
        """Query [B, D] -> tokens [B, L_p, D] by block."""
        weights = (self.scale * cosines(query, self.psi)).softmax(dim=1)  # [B, tasks]
        fused = torch.einsum("bt,tjld->jbld", weights, torch.stack(tuple(self.prompts)))
        return dict(zip(self.blocks, fused.unbind(), strict=True))
