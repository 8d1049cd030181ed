"""What every prompt has in common; by itself the prompt "none"."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from task.config.schema import Config

# Block, counted from 0 -> prefix [B or 1, 2, L_p, D] (keys, then values), or prompt tokens [B or 1, L_p, D], or a
# change [3 D, D] of the weights that make queries, keys and values
PromptVectors = Mapping[int, Tensor]


class Prompt(nn.Module):
    """No prompt: the base of all. Made from the run keys and D = ``dim``.

    A parameter of a task that has ended is frozen (requires_grad False): clients get it and do not send it back.

    Attributes:
        blocks: the J prompted blocks, counted from 0.
        needs_query: whether the backbone must first compute q(x), the features without prompt.
        penalty: the term of the local loss that the last forward pass in training mode has set.
    """

    needs_query = False
    penalty: Tensor | float = 0.0

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.blocks, self.seed = tuple(config.blocks()), config.seed

    def begin_task(self, task: int) -> None:
        """Make room for task ``task`` (counted from 0); called once per task, in order."""

    def forward(self, query: Any) -> PromptVectors:
        """Query, a tensor [B, D], or None where it is not needed -> vectors by block, counted from 0."""
        return {}


def draw_uniform(*shape: int, rng: torch.Generator) -> Tensor:
    """Numbers from uniform(-1, 1), the start of L2P's, DualPrompt's and FPPL's parameters."""
    return 2 * torch.rand(shape, generator=rng) - 1
