"""L2P (Wang et al. 2022): a pool of prompts, of which every image gets those whose keys are nearest to its query."""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from task.config.schema import Config
from task.prompts.base import Prompt, Prompted
from task.utils.seeding import torch_rng

NEAREST = 5  # prompts per image


class L2P(Prompt):
    """Prompt tuning at the input (PIP eq. 2): tokens for the first prompted block, the other blocks stay as they are.

    Parameters ``pool`` [P, L_p, D] and ``keys`` [P, D], uniform(-1, 1) at the start, shared by all tasks. The public
    code lets a batch vote on its prompts; here each image has its own. A pool smaller than 5 is used whole.
    """

    needs_query = True

    def __init__(self, block: int, pool: int, length: int, dim: int, seed: int, matching: float) -> None:
        super().__init__()
        self.block, self.matching = block, matching
        start = 2 * torch.rand(pool, length + 1, dim, generator=torch_rng(seed, "prompt")) - 1
        self.pool, self.keys = nn.Parameter(start[:, 1:].clone()), nn.Parameter(start[:, 0].clone())

    @classmethod
    def build(cls, config: Config, dim: int) -> Self:
        """Pool size, L_p, first block, seed and lambda from the run keys."""
        block = config.blocks()[0]
        return cls(block, config.prompt_pool, config.prompt_length, dim, config.seed, config.prompt_matching)

    def forward(self, query: Tensor | None) -> Prompted:
        """Query [B, D] -> tokens [B, 5 L_p, D]; the penalty is -lambda times the mean cosine to the chosen keys.

        Raises:
            ValueError: no query.
        """
        if query is None:
            raise ValueError("L2P chooses prompts by the query, and there is none")
        similarity = F.cosine_similarity(query[:, None], self.keys, dim=-1)  # [B, P]
        nearest, chosen = similarity.topk(min(NEAREST, len(self.keys)), dim=1)
        if self.training:
            self.penalty = -self.matching * nearest.mean()
        return {self.block: self.pool[chosen].flatten(1, 2)}
