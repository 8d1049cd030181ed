"""Low-rank changes of the attention's weights: as few parameters as a prompt has (Hu et al. 2022, LoRA)."""

import torch
from torch import Tensor, nn

from task.config.schema import Config
from task.prompts.base import Prompt, PromptVectors
from task.utils.seeding import torch_rng


class LoRA(Prompt):
    """Queries, keys and values of a block come from W + B A instead of W [3 D, D], the same for every image.

    Parameters for J blocks: ``down`` A [J, r, D], normal with deviation 0.02 at the start, and ``up`` B [J, 3 D, r],
    zero at the start, so that training begins at the frozen backbone. The rank r is the run key prompt-length.

    >>> from task.config.parsing import parse
    >>> prompt = LoRA(parse({"method": "fedrda", "prompt-length": 4}), dim=16)
    >>> prompt(None)[0].shape
    torch.Size([48, 16])
    """

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        J, rank = len(self.blocks), config.prompt_length
        self.down = nn.Parameter(0.02 * torch.randn(J, rank, dim, generator=torch_rng(self.seed, "prompt")))
        self.up = nn.Parameter(torch.zeros(J, 3 * dim, rank))

    def forward(self, query: Tensor | None) -> PromptVectors:
        """Changes B A of the weights [3 D, D]."""
        return dict(zip(self.blocks, self.up @ self.down, strict=True))
