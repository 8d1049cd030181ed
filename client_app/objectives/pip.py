"""PIP, client half: prototypes injected into every local batch (Ma'sum et al. 2024, eq. 9 and 11)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.message import Packet
from task.method_options import PIPOptions
from task.methods import load_class
from task.models.evaluation import extract_features
from task.models.feature_cache import Inputs
from task.models.model import Model


class InjectedPrototypes(Objective):
    """Cross-entropy over the features of the images united with injected prototypes, plus the matching loss (eq. 9).

    ``statistics`` are the prototypes of the current task: head ``rows`` int64 [K], ``means`` and ``variances`` [K, D].
    They are of no other task, so the loss chooses among its classes alone: no older class is replayed. In a task's
    first round none arrives; then the client takes its own, computed once after its first epoch (algorithm 1, line 20).
    """

    options: PIPOptions

    def __init__(self, config: Config, packet: Packet) -> None:
        super().__init__(config, packet)
        self.injected_set: tuple[Tensor, Tensor] | None = None  # features and their targets

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Draw the epoch's injected set (eq. 11)."""
        if not self.statistics and epoch > 0:
            self.statistics = self._compute_own(model, data)
        super().begin_epoch(model, data, epoch, rng)
        if self.statistics:
            copies = choose_copies(data.rows, self.config.batch_size, self.options.copies)
            means, variances = self.statistics["means"], self.statistics["variances"]
            targets = model.local_targets(self.statistics["rows"]).repeat(1 + copies)
            self.injected_set = inject(means, variances.sqrt(), copies, rng), targets

    def _compute_own(self, model: Model, data: LocalData) -> dict[str, Tensor]:
        """Prototypes of the local images, in the form in which the server sends its own."""
        features, rows = extract_features(model, data.images, data.positions), torch.from_numpy(data.rows)
        own = load_class(self.config.method_row.statistics)().compute(features, rows.to(model.device), self.options)
        names = {"rows": "class_ids", "means": "means", "variances": "variances"}
        return {name: torch.from_numpy(own[field]) for name, field in names.items()}

    def learned_rows(self, model: Model) -> Tensor:
        """Rows of the classes among which the loss chooses."""
        seen = torch.arange(len(model.head.weight))
        return model.current_rows() if self.options.logits == "current" else seen

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
    """The m in 1..``largest`` with which a class has about as many injected vectors as a local class has images.

    In a batch a local class has (images per batch) / (local classes) images on average; injected are 1 + m vectors of
    every class, also of those that have images. The paper only says that m is in 1..5.

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
    return (means + steps.to(means.device) * deviations).flatten(0, 1)
