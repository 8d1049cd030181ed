"""CODA-Prompt: attended keys weigh prompt components, and each task adds some (Smith et al. 2023)."""

from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task.config.schema import Config
from task.prompts.base import Prompt, PromptVectors
from task.prompts.decomposed import combine
from task.utils.seeding import torch_rng


class CodaPrompt(Prompt):
    """prompt = sum_m cos(q(x) * A_m, K_m) P_m over the components of all tasks so far (section 4).

    Parameters, one of each per task: ``keys`` K and ``attention`` A [J, M, D], ``prompts`` P [J, M, 2, L_p, D]. Each
    task adds M = pool // tasks components per block and trains them; those of earlier tasks are frozen. All
    components of the pool start orthogonal, as in the public code. The paper's length of 8 is L_p = 4 here: four key
    and four value vectors.

    >>> from task.config.parsing import parse
    >>> prompt = CodaPrompt(parse({"prompt": "coda", "method": "fedavg", "prompt-length": 4}), dim=16)
    >>> prompt.begin_task(0)
    >>> prompt(torch.ones(7, 16))[0].shape
    torch.Size([7, 2, 4, 16])
    """

    needs_query = True

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.weight, length = config.prompt_orthogonality, config.prompt_length
        self.keys, self.attention, self.prompts = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        components = config.prompt_pool // config.num_tasks
        rng, J, size = torch_rng(self.seed, "prompt"), len(self.blocks), components * config.num_tasks
        starts = [torch.empty(J, size, width) for width in (dim, dim, 2 * length * dim)]
        for block in chain(*starts):  # orthonormal rows, or columns where there are more rows than dimensions
            nn.init.orthogonal_(block, generator=rng)
        starts[2] = starts[2].unflatten(2, (2, length, dim))
        self.starts = [start.split(components, dim=1) for start in starts]

    def begin_task(self, task: int) -> None:
        """Freeze the components of earlier tasks and add those of this one."""
        self.requires_grad_(False)
        for parameters, start in zip((self.keys, self.attention, self.prompts), self.starts, strict=True):
            parameters.append(nn.Parameter(start[task].clone()))

    def forward(self, query: Tensor) -> PromptVectors:
        """Query [B, D] -> prefixes [B, 2, L_p, D]; in training it sets the penalty, see :func:`orthogonality`."""
        keys, attention, prompts = (torch.cat(list(p), dim=1) for p in (self.keys, self.attention, self.prompts))
        if self.training:
            parts = (keys, attention, prompts.flatten(2))
            self.penalty = self.weight * torch.stack([orthogonality(part) for part in parts]).sum()
        prefixes = combine(attended_cosines(query, attention, keys), prompts)
        return dict(zip(self.blocks, prefixes.unbind(), strict=True))


def attended_cosines(query: Tensor, attention: Tensor, keys: Tensor) -> Tensor:
    """cos(q * A_m, K_m) for queries [B, D], attention and keys [J, M, D] -> [J, B, M].

    Because |q * A|^2 = q^2 . A^2 and (q * A) . K = q . (A * K), no tensor of B M D numbers is needed.
    """
    lengths = (query.square() @ attention.square().mT).clamp(min=1e-12).sqrt()
    return query @ (attention * F.normalize(keys, dim=-1)).mT / lengths


def orthogonality(rows: Tensor) -> Tensor:
    """Mean over blocks of the mean square of B B^T - I; B [J, M, V] -> scalar.

    The paper has the norm of B B^T - I. The mean square does not depend on the number of blocks and components; the
    public code adds it up over blocks, times 1e-6.

    >>> orthogonality(torch.tensor([[[1.0, 0.0], [1.0, 2.0]]]))  # B B^T - I = [[0, 1], [1, 4]]
    tensor(4.5000)
    """
    return (rows @ rows.mT - torch.eye(rows.shape[1], device=rows.device)).square().mean()
