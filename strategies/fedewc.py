"""Federated EWC, server half: Fisher information of finished tasks (Kirkpatrick et al. 2017)."""

from collections.abc import Sequence

import numpy as np

from strategies.averaging import WeightedMean
from strategies.base import RoundContext, Strategy, Update
from task.config.schema import Config
from task.message import Arrays
from task.models.model import Model


class FedEWC(Strategy):
    """FedAvg; the Fisher information of all finished tasks goes out in every round after them (Kirkpatrick eq. 3).

    F of a task is the mean over clients, weighted by images; F of several tasks is their sum, with one anchor, the
    backbone at the end of the last task (the online form of Schwarz et al. 2018, without decay).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.penalty: Arrays = {}  # fisher and anchor
        self.fisher_mean: WeightedMean | None = None  # over the clients of this round

    def broadcast(self, context: RoundContext) -> Arrays:
        """``fisher`` and ``anchor``, float32 [P] for P numbers of the backbone; nothing in the first task."""
        return self.penalty

    def receive(self, model: Model, update: Update, context: RoundContext) -> None:
        """Take the Fisher information out of the update: it is as large as the backbone."""
        if update.statistics:
            self.fisher_mean = self.fisher_mean or WeightedMean()
            self.fisher_mean.add({"fisher": update.statistics.pop("fisher")}, update.num_examples)

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Renew Fisher information and anchor when a task ends; the model stays as it is."""
        fisher_mean, self.fisher_mean = self.fisher_mean, None
        if context.ends_task and fisher_mean:
            fisher = fisher_mean.arrays()["fisher"] + self.penalty.get("fisher", np.float32(0))
            self.penalty = {"fisher": fisher, "anchor": model.export()["backbone"]}
        return {}
