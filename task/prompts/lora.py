"""Low-rank changes of the attention's weights: as few parameters as a prompt has (Hu et al. 2022, LoRA)."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from task.config.schema import Config
from task.prompts.base import Prompt, PromptVectors
from task.utils.seeding import torch_rng


class LoRA(Prompt):
    """Queries, keys and values of a block come from W + B A instead of W [3 D, D], the same for every image.

    Parameters for J blocks: ``down`` A [J, r, D], normal with deviation 0.02 at the start, and ``up`` B [J, 3 D, r],
    zero at the start, so that training begins at the frozen backbone.

    >>> changes = LoRA(blocks=[0, 1], rank=4, dim=16, seed=0)(None)
    >>> {block: tuple(change.shape) for block, change in changes.items()}
    {0: (48, 16), 1: (48, 16)}
    """

    def __init__(self, blocks: Sequence[int], rank: int, dim: int, seed: int) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        start = torch.randn(len(self.blocks), rank, dim, generator=torch_rng(seed, "prompt"))
        self.down = nn.Parameter(0.02 * start)
        self.up = nn.Parameter(torch.zeros(len(self.blocks), 3 * dim, rank))

    @classmethod
    def build(cls, config: Config, dim: int) -> Self:
        """Rank (prompt-length), blocks and seed from the run keys."""
        return cls(config.blocks(), config.prompt_length, dim, config.seed)

    def forward(self, query: Tensor | None) -> PromptVectors:
        """Changes B A of the weights [3 D, D]."""
        return dict(zip(self.blocks, self.up @ self.down, strict=True))
