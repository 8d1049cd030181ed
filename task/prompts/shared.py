"""One prompt for all tasks and images (Salami et al. 2024, HGP)."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from task.config.schema import Config
from task.prompts.base import Prompt, PromptVectors
from task.utils.seeding import torch_rng


class SharedPrompt(Prompt):
    """One prefix pair per block, shared by all tasks and images (HGP section 3.2, appendix B.1).

    Parameter ``prefix``: [J, 2, L_p, D], keys then values, normal with deviation 0.02 at the start.

    >>> prompt = SharedPrompt(blocks=[0, 1], length=8, dim=16, seed=0)
    >>> {block: tuple(prefixes.shape) for block, prefixes in prompt(None).items()}
    {0: (1, 2, 8, 16), 1: (1, 2, 8, 16)}
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

    def forward(self, query: Tensor | None) -> PromptVectors:
        """Prefixes [1, 2, L_p, D], the same for every image."""
        return {block: self.prefix[i : i + 1] for i, block in enumerate(self.blocks)}
