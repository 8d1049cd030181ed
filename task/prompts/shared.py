"""One prompt for all tasks and images (HGP)."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from task.config.schema import Config
from task.prompts.base import Prompt, Prompted
from task.utils.seeding import torch_rng


class SharedPrompt(Prompt):
    """One prefix pair per block, shared by all tasks and images (HGP section 3.2, appendix B.1).

    Parameter ``prefix``: [blocks, 2, L_p, D], keys then values, small random at the start.
    """

    def __init__(self, blocks: Sequence[int], length: int, dim: int, seed: int) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        start = torch.randn(len(self.blocks), 2, length, dim, generator=torch_rng(seed, "prompt"))
        self.prefix = nn.Parameter(0.02 * start)

    @classmethod
    def build(cls, config: Config, dim: int) -> Self:
        """L_p, blocks and seed from the run keys."""
        return cls(config.blocks(), config.prompt_length, dim, config.seed)

    def forward(self, query: Tensor | None) -> Prompted:
        """Prefixes [1, 2, L_p, D], the same for every image."""
        return {block: self.prefix[i : i + 1] for i, block in enumerate(self.blocks)}
