"""PIP, client half: prototypes injected into every local batch (Ma'sum et al. 2024, eq. 9 and 11)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.message import Arrays, Packet
from task.method_options import PIPOptions
from task.methods import load_class
from task.models.evaluation import extract_features
from task.models.feature_cache import Inputs
from task.models.model import Model


class InjectedPrototypes(Objective):
    """Cross-entropy over the features of the images united with injected prototypes, plus the matching loss (eq. 9).

    ``prototypes`` are class_ids int64 [K], means and variances [K, D]. They are of the current task only, so the loss
    chooses among its classes alone: no older class is replayed. In a task's first round none arrives; then the client
    takes its own, computed once after its first epoch (algorithm 1, line 20).
    """

    options: PIPOptions

    def __init__(self, config: Config, packet: Packet) -> None:
        super().__init__(config, packet)
        self.prototypes: Arrays = packet.statistics
        self.targets = np.empty(0, np.int64)  # of each prototype, its place among the current classes
        self.injected_set: tuple[Tensor, Tensor] | None = None  # features and their targets
        if self.prototypes:
            current_classes = np.array(packet.config["classes"])  # in stream order
            self.targets = (self.prototypes["class_ids"][:, None] == current_classes).argmax(axis=1)

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Draw the epoch's injected set (eq. 11)."""
        if not self.prototypes and epoch > 0:
            self.prototypes = self._compute_own(model, data)
            self.targets = self.prototypes["class_ids"]
        if self.prototypes:
            copies = choose_copies(data.rows, self.config.batch_size, self.options.copies)
            means, variances = (torch.from_numpy(self.prototypes[name]) for name in ("means", "variances"))
            features = inject(means, variances.sqrt(), copies, rng)
            targets = torch.from_numpy(self.targets).repeat(1 + copies)
            self.injected_set = features.to(model.device), targets.to(model.device)

    def _compute_own(self, model: Model, data: LocalData) -> Arrays:
        """Statistics of the local images; ``class_ids`` are places among the current classes here."""
        features = extract_features(model, data.images, data.positions)
        targets = model.local_targets(torch.from_numpy(data.rows).to(model.device))
        return load_class(self.config.method_row.statistics)().compute(features, targets, self.options)

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean over images and injected prototypes alike; logits [B, current classes] are those of the images."""
        features, targets = model.features(*inputs), model.local_targets(rows)
        if self.injected_set:
            features, targets = torch.cat([features, self.injected_set[0]]), torch.cat([targets, self.injected_set[1]])
        logits = model.head(features)
        image_logits = logits[: len(rows), model.current_rows()]
        if self.options.logits == "current":
            logits = logits[:, model.current_rows()]
        else:
            targets = model.current_rows()[targets]
        return F.cross_entropy(logits, targets) + model.prompt.penalty, image_logits


def choose_copies(rows: np.ndarray, batch_size: int, largest: int) -> int:
    """The m in 1..``largest`` that makes an injected class weigh about as much as a present one.

    A present class has (images per batch) / (local classes) images in a batch on average; an injected one has 1 + m
    vectors. The paper only says that m is in 1..5.

    >>> choose_copies(np.array([3, 3, 4, 4, 5, 5]), batch_size=6, largest=5)  # 2 images of each class
    1

    ``rows`` is the head row of each local image, [N], N at least 1; ``largest`` = 0 injects the prototypes alone.
    """
    per_class = min(batch_size, len(rows)) / len(np.unique(rows))
    return min(max(round(per_class) - 1, 1), largest)


def inject(means: Tensor, deviations: Tensor, copies: int, rng: torch.Generator) -> Tensor:
    """mu_c, then mu_c + b_i sigma_c for i = 1..m, with b_i ~ U(0, 1) drawn for each class and i (eq. 11).

    Means mu and deviations sigma [K, D], ``copies`` m -> [(1 + m) K, D]: the K means, then K vectors for each i.
    """
    steps = torch.rand(1 + copies, len(means), 1, generator=rng)
    steps[0] = 0
    return (means + steps * deviations).flatten(0, 1)
