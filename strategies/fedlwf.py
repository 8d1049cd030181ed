"""Federated LwF, server half: the model of the last finished task teaches (Li and Hoiem 2016)."""

from collections.abc import Sequence

from strategies.base import RoundContext, Strategy, Update
from task.config.schema import Config
from task.message import Arrays
from task.models.model import Model


class FedLwF(Strategy):
    """FedAvg (McMahan et al. 2017), and the teacher of LwF (Li and Hoiem 2016) for the clients' loss.

    The teacher is the global model at the end of the last task. It goes to the clients in every round, because they
    remember nothing between rounds. Loss and equation are in client_app/objectives/fedlwf.py: FedLwFObjective and
    ``binary_loss``.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.teacher: Arrays = {}

    def broadcast(self, context: RoundContext) -> Arrays:
        """All arrays of the global model at the end of the last task; nothing in the first task."""
        return self.teacher

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Keep the model when a task ends."""
        if context.ends_task:
            self.teacher = model.export()
        return {}
