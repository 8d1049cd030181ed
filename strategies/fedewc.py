"""Federated EWC, server half: Fisher information of finished tasks (Kirkpatrick et al. 2017)."""

from collections.abc import Sequence

import numpy as np

from strategies.averaging import WeightedMean
from strategies.base import Moment, Strategy, Update
from task.config.schema import Config
from task.message import Arrays
from task.models.model import Model


class FedEWC(Strategy):
    """FedAvg; when a task ends, the clients' Fisher information is averaged by images and added to that of older tasks.

    It goes to the clients with the backbone that the last task ended with, one anchor for all tasks (the online form
    of Schwarz et al. 2018, without decay).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.known: Arrays = {}
        self.mean: WeightedMean | None = None  # of the Fisher information that has come in this round

    def broadcast(self, moment: Moment) -> Arrays:
        """Fisher and anchor, float32 [P] each; nothing in the first task."""
        return self.known

    def receive(self, model: Model, update: Update, moment: Moment) -> None:
        """Take the Fisher information out of the answer, since it is as large as the backbone."""
        if update.prototypes:
            self.mean = self.mean or WeightedMean()
            self.mean.add({"fisher": update.prototypes.pop("fisher")}, update.num_examples)

    def refine(self, model: Model, updates: Sequence[Update], moment: Moment) -> dict[str, float]:
        """Renew both when a task ends; the model stays as it is."""
        mean, self.mean = self.mean, None
        if moment.ends_task and mean:
            fisher = mean.arrays()["fisher"]
            anchor = model.export()["backbone"]
            self.known = {"fisher": fisher + self.known.get("fisher", np.float32(0)), "anchor": anchor}
        return {}
