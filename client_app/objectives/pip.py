"""PIP, client half: prototypes injected into every local batch (Ma'sum et al. 2024, eq. 9 and 11)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.message import Arrays, Packet
from task.method_options import PIPOptions
from task.methods import load_half
from task.models.evaluation import extract_features
from task.models.feature_cache import Inputs
from task.models.model import Model


class InjectedPrototypes(Objective):
    """Cross-entropy over the features of the images united with injected prototypes, plus the matching loss (eq. 9).

    Only prototypes of the current task arrive, so the loss chooses among its classes alone: nothing of older
    ones is replayed. While none has arrived, the client's own, computed once after its
    first epoch, take their place (algorithm 1, line 20).
    """

    def __init__(self, config: Config, packet: Packet) -> None:
        super().__init__(config, packet)
        self.options: PIPOptions = config.options  # type: ignore[assignment]  # the table gives PIP these options
        self.known: Arrays = packet.prototypes
        if self.known:
            classes: list[int] = packet.config["classes"]  # type: ignore[assignment]  # current task's, in stream order
            self.targets = np.array([classes.index(c) for c in self.known["class_ids"]])
        self.injected: tuple[Tensor, Tensor] | None = None

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Draw the epoch's injected set (eq. 11)."""
        if not self.known and epoch > 0:
            self.known = self._own(model, data)
            self.targets = self.known["class_ids"]
        if self.known:
            copies = choose_copies(data.rows, self.config.batch_size, self.options.copies)
            means, variances = (torch.from_numpy(self.known[name]) for name in ("means", "variances"))
            features = inject(means, variances.sqrt(), copies, rng)
            targets = torch.from_numpy(self.targets).repeat(1 + copies)
            self.injected = features.to(model.device), targets.to(model.device)

    def _own(self, model: Model, data: LocalData) -> Arrays:
        """Statistics of the local images, with places in the current task for class ids."""
        features = extract_features(model, data.images, data.positions)
        places = model.places(torch.from_numpy(data.rows).to(model.device))
        return load_half(self.config.row.statistics)().compute(features, places, self.options)

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean over images and injected prototypes alike; the logits are those of the images."""
        features, targets = model.features(*inputs), model.places(rows)
        if self.injected:
            features, targets = torch.cat([features, self.injected[0]]), torch.cat([targets, self.injected[1]])
        logits = model.head(features)
        current = logits[: len(rows), model.current_rows()]
        if self.options.logits == "current":
            logits = logits[:, model.current_rows()]
        else:
            targets = model.current_rows()[targets]
        return F.cross_entropy(logits, targets) + model.prompt.penalty, current


def choose_copies(rows: np.ndarray, batch_size: int, most: int) -> int:
    """The m in 1..``most`` with which the 1 + m vectors of an injected class come nearest to a present one's images.

    A present class has (images per batch) / (local classes) of them on average. The paper only says that m is in 1..5.

    Args:
        rows: class of each local image, [N], N at least 1.
        batch_size: images per step.
        most: the largest m; 0 leaves the prototypes alone.
    """
    per_class = min(batch_size, len(rows)) / len(np.unique(rows))
    return min(max(round(per_class) - 1, 1), most)


def inject(means: Tensor, deviations: Tensor, copies: int, rng: torch.Generator) -> Tensor:
    """mu_c, then mu_c + b_i sigma_c for i = 1..m, each b_i ~ U(0, 1) of its own (eq. 11).

    Args:
        means: [K, D].
        deviations: sigma [K, D].
        copies: m.
        rng: generator on the device of the means.

    Returns:
        [(1 + m) K, D], all classes of one i after another.
    """
    steps = torch.rand(1 + copies, len(means), 1, generator=rng)
    steps[0] = 0
    return (means + steps * deviations).flatten(0, 1)
