"""HePCo's decomposed prompt: a weighted sum over a pool, with no hard choice (Halbe et al. 2024, section 4)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from task.config.schema import Config
from task.prompts.base import Prompt, PromptVectors
from task.utils.seeding import torch_rng


class DecomposedPrompt(Prompt):
    """prompt = sum_i cos(q(x), k_i) P_i (section 4), keys and pool per block, shared by all tasks.

    Parameters: ``keys`` [J, N, D] and ``pool`` [J, N, 2, L_p, D], uniform(0, 1) at the start. The paper's length of 20
    is L_p = 10 here: ten key and ten value vectors.

    >>> from task.config.parsing import parse
    >>> prompt = DecomposedPrompt(parse({"method": "hepco", "prompt-length": 4}), dim=16)
    >>> prompt(torch.ones(7, 16))[0].shape
    torch.Size([7, 2, 4, 16])
    """

    needs_query = True

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        J, N, rng = len(self.blocks), config.prompt_pool, torch_rng(self.seed, "prompt")
        self.keys = nn.Parameter(torch.rand(J, N, dim, generator=rng))
        self.pool = nn.Parameter(torch.rand(J, N, 2, config.prompt_length, dim, generator=rng))

    def forward(self, query: Tensor) -> PromptVectors:
        """Query [B, D] -> prefixes [B, 2, L_p, D]."""
        prefixes = combine(cosines(query, self.keys), self.pool)
        return dict(zip(self.blocks, prefixes.unbind(), strict=True))


def cosines(query: Tensor, keys: Tensor) -> Tensor:
    """Queries [B, D] and keys [..., N, D] -> cosine of each pair [..., B, N].

    >>> cosines(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    tensor([[0.6000, 0.8000]])
    """
    return F.normalize(query, dim=-1) @ F.normalize(keys, dim=-1).mT


def combine(weights: Tensor, pool: Tensor) -> Tensor:
    """sum_i w_i P_i as a matrix product: weights [J, B, N], pool [J, N, 2, L_p, D] -> [J, B, 2, L_p, D].

    An elementwise product with a sum over the pool would need J B N L_p D numbers at once.
    """
    return (weights @ pool.flatten(2)).unflatten(-1, pool.shape[2:])
