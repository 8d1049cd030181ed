"""FedProK, client half: features of old classes translated from those of new ones (Gao et al. 2024)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.models.evaluation import extract_features
from task.models.feature_cache import Inputs
from task.models.model import Model
from task.prototypes.gaussians import class_means


class FedProKObjective(Objective):
    """Cross-entropy over all seen classes on real features and on pseudo features of old classes (eq. 7 and 8).

    ``statistics`` are the prototypes of earlier tasks: head ``rows`` int64 [P] and ``means`` [P, D]. Without them the
    objective is the base's.

    For an old class o and the local class c whose mean mu_c is nearest to o's prototype mu_o, each image x of c gives
    one pseudo feature f(x) + mu_o - mu_c. So in an epoch an old class has as many pseudo features as its nearest local
    class has images, without another pass through the backbone. Pseudo features are constants: they train the head and
    not the prompt (as in FeTrIL; the paper does not say).

    In an asynchronous run two more cases occur. This client may have images of a class that is old to the server: such
    a class is not translated. Other clients may have a class of the current task that this one has not: its head row
    takes no part here.
    """

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Once a round: the local class means, the nearest one of each old class, and the difference of both.

        ``nearest`` int64 [P] is a head row, ``shifts`` are [P, D], and ``known_rows`` are the head rows in the softmax.
        """
        super().begin_epoch(model, data, epoch, rng)
        if epoch or not self.statistics:
            return
        current, earlier = model.current_rows(), torch.arange(sum(model.task_sizes[:-1]), device=model.device)
        self.known_rows = torch.cat([earlier, current]).unique()
        data_rows = torch.from_numpy(data.rows).to(model.device)
        old = ~torch.isin(self.statistics["rows"], data_rows)
        self.statistics = {name: value[old] for name, value in self.statistics.items()} if old.any() else {}
        if not self.statistics:
            return
        features = extract_features(model, data.images, data.positions)
        local_rows, _, means = class_means(features, data_rows)
        index = nearest_class(self.statistics["means"], means)
        self.nearest, self.shifts = local_rows[index], self.statistics["means"] - means[index]

    def learned_rows(self, model: Model) -> Tensor:
        """All head rows."""
        return torch.arange(len(model.head.weight))

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy over the batch's real and pseudo features together; logits [B, current classes]."""
        if not self.statistics:
            return super().loss(model, inputs, rows)
        features = model.features(*inputs)
        image, old = (rows[:, None] == self.nearest).nonzero(as_tuple=True)
        pseudo = features.detach()[image] + self.shifts[old]  # eq. 8
        logits = model.head(torch.cat([features, pseudo]))
        targets = torch.searchsorted(self.known_rows, torch.cat([rows, self.statistics["rows"][old]]))
        loss = F.cross_entropy(logits[:, self.known_rows], targets) + model.prompt.penalty
        return loss, logits[: len(rows), model.current_rows()]


def nearest_class(old: Tensor, new: Tensor) -> Tensor:
    """Index of the prototype in ``new`` [N, D] that is nearest to each in ``old`` [P, D] by cosine, int64 [P] (eq. 7).

    Eq. 7 prints argmin of the similarity; the text of the paper says nearest, which is the argmax.

    >>> nearest_class(old=torch.tensor([[1.0, 0.2]]), new=torch.tensor([[0.6, 0.6], [90.0, 0.9]]))
    tensor([1])
    """
    return (F.normalize(old, dim=1) @ F.normalize(new, dim=1).T).argmax(dim=1)
