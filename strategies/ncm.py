"""Nearest class mean of frozen features: the floor that any training must beat."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strategies.base import Moment, Strategy, Update
from task.config.schema import Config
from task.message import Arrays
from task.models.model import Model
from task.prototypes.gaussians import merge_means

NEVER = -1e30  # bias of a class that nobody has reported


class NearestMean(Strategy):
    """Means merged by counts, written into the head: w_c = mu_c, b_c = -|mu_c|^2 / 2.

    The largest logit is then the nearest mean, since |x - mu_c|^2 = |x|^2 - 2 (w_c x + b_c).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reported: dict[tuple[int, str], Arrays] = {}  # (task, client): a client counts once, whatever the rounds

    def refine(self, model: Model, updates: Sequence[Update], moment: Moment) -> dict[str, float]:
        """Merge the means of all classes reported so far and overwrite their rows; old ones may have grown."""
        if moment.round == 0:
            _silence(model, model.current_rows())
        self.reported = self.reported | {(moment.task, u.client): u.prototypes for u in updates if u.prototypes}
        if self.reported:
            classes, _, means = merge_means(*_joined(list(self.reported.values())))
            order = moment.schedule.seen_classes(moment.task)
            rows = torch.tensor([order.index(c) for c in classes.tolist()], device=model.device)
            model.head.weight.data[rows] = means.to(model.device)
            model.head.bias.data[rows] = -0.5 * means.square().sum(dim=1).to(model.device)
        return {}


def _silence(model: Model, rows: Tensor) -> None:
    """A class that nobody has reported must never win."""
    model.head.weight.data[rows] = 0
    model.head.bias.data[rows] = NEVER


def _joined(statistics: Sequence[Arrays]) -> list[Tensor]:
    return [
        torch.from_numpy(np.concatenate([s[name] for s in statistics])) for name in ("class_ids", "counts", "means")
    ]
