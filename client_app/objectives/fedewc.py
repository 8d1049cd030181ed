"""Federated EWC, client half: weights that mattered to earlier tasks move less (Kirkpatrick et al. 2017)."""

from torch import Tensor

from client_app.objectives.base import Objective
from task.method_options import FedEWCOptions
from task.models.feature_cache import Inputs
from task.models.model import Model


class FedEWCObjective(Objective):
    """Cross-entropy + lambda / 2 sum_i F_i (theta_i - theta*_i)^2 over the backbone (Kirkpatrick et al. 2017, eq. 3).

    ``statistics`` are ``fisher`` F and ``anchor`` theta*, float32 [P] for P numbers of the backbone; none in the first
    task. Head rows of earlier classes do not train, so they need no penalty.
    """

    options: FedEWCOptions

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the current classes and the penalty; logits [B, current classes]."""
        loss, logits = super().loss(model, inputs, rows)
        if self.statistics:
            change = model.packed_backbone() - self.statistics["anchor"]
            loss = loss + 0.5 * self.options.strength * (self.statistics["fisher"] * change.square()).sum()
        return loss, logits
