"""L2P (Wang et al., CVPR 2022): a pool of prompts; every image gets those whose keys are nearest to its query."""

import torch.nn.functional as F
from torch import Tensor, nn

from task.config.schema import Config
from task.prompts.base import Prompt, PromptVectors, draw_uniform
from task.utils.seeding import torch_rng

NEAREST = 5  # prompts per image


class L2P(Prompt):
    """Prompt tuning at the first prompted block; the other blocks stay as they are.

    Wang et al. 2022, "Learning to Prompt for Continual Learning". The block takes its tokens x [B, tokens, D] and the
    prompt p [B, 5 L_p, D] together: block([x; p]) (PIP eq. 2). p are the 5 prompts of the pool with the largest
    cos(q(x), k_i), for the query q(x) [D] and the prompts' keys k_i [D].

    Parameters, shared by all tasks: ``pool`` [N, L_p, D] and ``keys`` [N, D], uniform(-1, 1) at the start. The public
    code lets a batch vote on its prompts; here each image has its own. A pool of fewer than 5 is used whole.

    >>> import torch
    >>> from task.config.parsing import parse
    >>> prompt = L2P(parse({"method": "pip", "prompt": "l2p", "prompt-length": 4}), dim=16)
    >>> prompt(torch.ones(7, 16))[0].shape
    torch.Size([7, 20, 16])
    """

    needs_query = True

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.matching, rng = config.prompt_matching, torch_rng(self.seed, "prompt")
        start = draw_uniform(config.prompt_pool, config.prompt_length + 1, dim, rng=rng)
        self.pool, self.keys = nn.Parameter(start[:, 1:].clone()), nn.Parameter(start[:, 0].clone())

    def forward(self, query: Tensor) -> PromptVectors:
        """Query [B, D] -> tokens [B, 5 L_p, D].

        In training the penalty is the matching loss of PIP eq. 9: -lambda times the mean cosine of queries and chosen
        keys.
        """
        similarity = F.cosine_similarity(query[:, None], self.keys, dim=-1)  # [B, N]
        nearest, indices = similarity.topk(min(NEAREST, len(self.keys)), dim=1)
        if self.training:
            self.penalty = -self.matching * nearest.mean()
        return {self.blocks[0]: self.pool[indices].flatten(1, 2)}
