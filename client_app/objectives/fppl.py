"""FPPL, client half: cross-entropy and a unified representation (He et al. 2024)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.message import Packet
from task.method_options import FPPLOptions
from task.models.feature_cache import Inputs
from task.models.model import Model

_NONE = -100  # place of a class without global prototype


class FPPLObjective(Objective):
    """L = L_ur + L_ce (eq. 8); L_ur pulls features towards the global prototype of their class.

    The packet's prototypes are those of the current task: head ``rows`` int64 [K] and ``means`` [K, D]. An image whose
    class has none yet (all, in a task's first round) has L_ur = 0.
    """

    def __init__(self, config: Config, packet: Packet) -> None:
        super().__init__(config, packet)
        self.options: FPPLOptions = config.options  # type: ignore[assignment]  # the table gives FPPL these options
        self.sent = {name: torch.from_numpy(array) for name, array in packet.prototypes.items()}
        self.places = torch.empty(0)

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Move the prototypes to the model and note the place of each head row among them, int64 [seen]."""
        self.sent = {name: value.to(model.device) for name, value in self.sent.items()}
        if self.sent:
            self.places = torch.full((len(model.head.bias),), _NONE, device=model.device)
            self.places[self.sent["rows"]] = torch.arange(len(self.sent["rows"]), device=model.device)

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the current task's classes, and L_ur where prototypes have come."""
        features = model.features(*inputs)
        logits = model.head(features)[:, model.current_rows()]
        loss = F.cross_entropy(logits, model.places(rows)) + model.prompt.penalty
        if self.sent:
            loss = loss + unified_loss(features, self.sent["means"], self.places[rows], self.options.tau)
        return loss, logits


def unified_loss(features: Tensor, prototypes: Tensor, places: Tensor, tau: float) -> Tensor:
    """Batch mean of L_ur = -log [exp(cos(f, G^y) / tau) / sum_a exp(cos(f, G^a) / tau)] (eq. 6).

    Args:
        features: f, [B, D].
        prototypes: G, [K, D].
        places: int64 [B], which prototype is of the image's own class; -100 counts as a loss of zero.
        tau: temperature.
    """
    similarity = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T / tau
    return F.cross_entropy(similarity, places, ignore_index=_NONE, reduction="sum") / len(features)
