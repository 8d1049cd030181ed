"""One prompt for all tasks and images (Salami et al. 2024, HGP)."""

import torch
from torch import Tensor, nn

from task.config.schema import Config
from task.prompts.base import Prompt, PromptVectors
from task.utils.seeding import torch_rng


class SharedPrompt(Prompt):
    """One prefix pair per block, shared by all tasks and images (HGP section 3.2, appendix B.1).

    Parameter ``prefix``: [J, 2, L_p, D], keys then values, normal with deviation 0.02 at the start.

    >>> from task.config.parsing import parse
    >>> prompt = SharedPrompt(parse({"method": "hgp", "prompt-length": 4}), dim=16)
    >>> prompt(None)[0].shape
    torch.Size([1, 2, 4, 16])
    """

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        shape = len(self.blocks), 2, config.prompt_length, dim
        self.prefix = nn.Parameter(0.02 * torch.randn(shape, generator=torch_rng(self.seed, "prompt")))

    def forward(self, query: Tensor | None) -> PromptVectors:
        """Prefixes [1, 2, L_p, D], the same for every image."""
        return {block: self.prefix[i : i + 1] for i, block in enumerate(self.blocks)}
