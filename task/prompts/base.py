"""What every prompt has in common; by itself the prompt "none"."""

from typing import Self

from torch import Tensor, nn

from task.config.schema import Config
from task.models.vit import Prompted


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
