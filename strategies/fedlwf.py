"""Federated LwF, server half: the model of the last finished task teaches (Li and Hoiem 2016)."""

from collections.abc import Sequence

from strategies.base import Moment, Strategy, Update
from task.config.schema import Config
from task.message import Arrays
from task.models.model import Model


class FedLwF(Strategy):
    """FedAvg; clients keep nothing, so the teacher travels to them in every round."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.teacher: Arrays = {}

    def broadcast(self, moment: Moment) -> Arrays:
        """The global model as the last task ended; nothing in the first task."""
        return self.teacher

    def refine(self, model: Model, updates: Sequence[Update], moment: Moment) -> dict[str, float]:
        """Keep the model when a task ends."""
        if moment.ends_task:
            self.teacher = model.export()
        return {}
