"""The local objective; the base of all is cross-entropy over the client's current classes."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from task.config.schema import Config
from task.data.images import Images
from task.message import Packet
from task.method_options import Options
from task.models.feature_cache import Inputs
from task.models.model import Model


@dataclass(frozen=True)
class LocalData:
    """Images of one client and task: N positions in ``images``, and the head row of each, int64 [N].

    ``augmentation`` as in :func:`task.models.preprocessing.prepare`.
    """

    images: Images
    positions: np.ndarray
    rows: np.ndarray
    augmentation: str


class Objective:
    """Softmax cross-entropy over the logits of the client's current classes (FedAvg; HGP, HePCo and others).

    Rows of other classes get no gradient, see :meth:`learned_rows`. A method overrides the hooks it needs, and declares
    the type of its ``options``. ``statistics`` are the arrays that the method's strategy broadcasts; there may
    be none, as in a task's first round or in the whole first task.
    """

    options: Options

    def __init__(self, config: Config, packet: Packet) -> None:
        self.config = config
        self.options = config.options
        self.statistics = {name: torch.from_numpy(array) for name, array in packet.statistics.items()}

    def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
        """Called before each local epoch, counted from 0; here it moves the statistics to the model's device."""
        self.statistics = {name: value.to(model.device) for name, value in self.statistics.items()}

    def learned_rows(self, model: Model) -> Tensor:
        """Head rows that the loss can move, int64 [n]; with privacy-noise the others are sent back as they came."""
        return model.current_rows()

    def loss(self, model: Model, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of one step.

        Args:
            model: the local model.
            inputs: prepared images [B, 3, H, W], their queries [B, D], or both; ``model`` and ``model.features`` take
                them as ``*inputs``.
            rows: int64 [B], the head row of each image's class.

        Returns:
            scalar loss and logits [B, current classes].
        """
        logits = model(*inputs)[:, model.current_rows()]
        return F.cross_entropy(logits, model.local_targets(rows)) + model.prompt.penalty, logits
