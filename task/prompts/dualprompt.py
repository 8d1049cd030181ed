"""DualPrompt: general prefixes for what all tasks share, expert prefixes for each task (Wang et al., ECCV 2022)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from task.config.schema import Config
from task.prompt_kinds import PROMPTS
from task.prompts.base import Prompt, PromptVectors, draw_uniform
from task.utils.seeding import torch_rng

# the first of the prompted blocks take the general prefix, the others, at least one, the expert
GENERAL = PROMPTS["dualprompt"].fewest_blocks - 1


class DualPrompt(Prompt):
    """One general prefix for all tasks, one expert prefix with a key for each task.

    Wang et al. 2022, "DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning". A prefix (P_k, P_v)
    is put in front of a block's keys and values: attention(Q, [P_k; K], [P_v; V]) (prefix tuning, PIP eq. 3). The
    expert at test is that of task argmax_t cos(q(x), k_t), for the query q(x) [D] and the keys k_t [D]. The keys are
    trained by the penalty -lambda mean_x cos(q(x), k_t) of the current task t (PIP eq. 9).

    Parameters, uniform(-1, 1) at the start: ``general`` [2, 2, L_p, D]; for each task t ``experts.t``
    [J - 2, 2, L_p, D] and ``keys.t`` [D]. The second dimension is keys, then values.

    Expert and key of a task that has ended are frozen. In training every image takes the current task's expert. At
    test an image takes the expert whose key is nearest to its query.

    >>> from task.config.parsing import parse
    >>> prompt = DualPrompt(parse({"method": "pip", "prompt-length": 4}), dim=16)
    >>> prompt.begin_task(0)
    >>> prompt(torch.ones(7, 16))[4].shape
    torch.Size([1, 2, 4, 16])
    """

    needs_query = True

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.matching, rng = config.prompt_matching, torch_rng(self.seed, "prompt")
        self.general = nn.Parameter(draw_uniform(GENERAL, 2, config.prompt_length, dim, rng=rng))
        self.experts, self.keys = nn.ParameterList(), nn.ParameterList()

    def begin_task(self, task: int) -> None:
        """Freeze the earlier experts and their keys, and add a new pair."""
        self.experts.requires_grad_(False)
        self.keys.requires_grad_(False)
        rng, (_, _, length, dim) = torch_rng(self.seed, "prompt", task), self.general.shape
        self.experts.append(nn.Parameter(draw_uniform(len(self.blocks) - GENERAL, 2, length, dim, rng=rng)))
        self.keys.append(nn.Parameter(draw_uniform(dim, rng=rng)))

    def forward(self, query: Tensor) -> PromptVectors:
        """Query [B, D] -> prefixes [1, 2, L_p, D] of general blocks, [1 or B, 2, L_p, D] of expert blocks.

        In training the penalty is the matching loss of PIP eq. 9: -lambda times the mean cosine of queries and the
        current key.
        """
        if self.training:
            self.penalty = -self.matching * F.cosine_similarity(query, self.keys[-1], dim=-1).mean()
            expert = self.experts[-1][None]  # [1, J - 2, 2, L_p, D]
        else:
            similarity = F.cosine_similarity(query[:, None], torch.stack(list(self.keys)), dim=-1)  # [B, tasks]
            expert = torch.stack(list(self.experts))[similarity.argmax(dim=1)]  # [B, J - 2, 2, L_p, D]
        return dict(zip(self.blocks, [*self.general[:, None], *expert.unbind(1)], strict=True))
