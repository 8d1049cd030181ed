"""What every prompt has in common; by itself the prompt "none"."""

from collections.abc import Mapping
from typing import Self

from torch import Tensor, nn

from task.config.schema import Config

# Block, counted from 0 -> prefix [B or 1, 2, L_p, D] (keys, then values), or prompt tokens [B or 1, L_p, D]
Prompted = Mapping[int, Tensor]


class Prompt(nn.Module):
    """No prompt: the base of all.

    ``needs_query`` says whether the backbone must first compute q(x). ``penalty`` is what the last forward pass in
    training mode adds to the local loss. A parameter of a task that has ended is frozen (requires_grad False) and stays
    with the server.
    """

    needs_query = False
    penalty: Tensor | float = 0.0

    @classmethod
    def build(cls, config: Config, dim: int) -> Self:
        """From the run keys and D = ``dim``."""
        return cls()

    def begin_task(self, task: int) -> None:
        """Make room for task ``task`` (counted from 0); called once per task, in order."""

    def forward(self, query: Tensor | None) -> Prompted:
        """Query [B, D], or None where it is not needed -> vectors by block, counted from 0."""
        return {}
