"""FedProK, client half: features of old classes translated from those of new ones (Gao et al. 2024)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.message import Packet
from task.models.evaluation import extract_features
from task.models.feature_cache import Inputs
from task.models.model import Model
from task.prototypes.gaussians import class_means


class FedProKObjective(Objective):
    """Cross-entropy over all seen classes on real features and on pseudo features of old classes (eq. 7 and 8).

    The packet's prototypes are those of earlier tasks: head ``rows`` int64 [P] and ``means`` [P, D]. Every image of a
    batch gives one pseudo feature to each old class whose nearest local class is the image's own: over an epoch an old
    class gets as many as that class has local images, and no further pass through the backbone is needed. They are
    constants, which train the head and not the prompt (as in FeTrIL; the paper leaves it open). Without
    prototypes nothing is replayed, and the objective is that of the base.

    In an asynchronous run a class that is old to the server may be current here, where it has real images and is not
    translated; one that comes with this task to other clients only has not been seen here, and its row takes no part.
    """

    def __init__(self, config: Config, packet: Packet) -> None:
        super().__init__(config, packet)
        self.sent = {name: torch.from_numpy(array) for name, array in packet.prototypes.items()}
        self.nearest = self.shifts = self.seen = torch.empty(0)

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Once a round: the local class means, the nearest of each old class and the way to it."""
        if epoch or not self.sent:
            return
        current, earlier = model.current_rows(), torch.arange(sum(model.task_sizes[:-1]), device=model.device)
        self.seen = torch.cat([earlier, current]).unique()
        old = ~torch.isin(self.sent["rows"], current.cpu())
        self.sent = {name: value[old].to(model.device) for name, value in self.sent.items()} if old.any() else {}
        if not self.sent:
            return
        features = extract_features(model, data.images, data.positions)
        present, _, means = class_means(features, torch.from_numpy(data.rows).to(model.device))
        place = nearest_class(self.sent["means"], means)
        self.nearest, self.shifts = present[place], self.sent["means"] - means[place]

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy over the batch's real and pseudo features together."""
        if not self.sent:
            return super().loss(model, inputs, rows)
        features = model.features(*inputs)
        image, old = (rows[:, None] == self.nearest).nonzero(as_tuple=True)
        pseudo = features.detach()[image] + self.shifts[old]  # eq. 8
        logits = model.head(torch.cat([features, pseudo]))
        targets = torch.searchsorted(self.seen, torch.cat([rows, self.sent["rows"][old]]))
        loss = F.cross_entropy(logits[:, self.seen], targets) + model.prompt.penalty
        return loss, logits[: len(rows), model.current_rows()]


def nearest_class(old: Tensor, new: Tensor) -> Tensor:
    """Place of the prototype in ``new`` [N, D] that is nearest to each in ``old`` [P, D], int64 [P].

    Nearest by cosine, so the argmax: eq. 7 prints argmin of the similarity, against the paper's own text.
    """
    return (F.normalize(old, dim=1) @ F.normalize(new, dim=1).T).argmax(dim=1)
