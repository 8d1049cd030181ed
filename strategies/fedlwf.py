"""Federated LwF, server half: the model of the last finished task teaches (Li and Hoiem 2016)."""

from collections.abc import Sequence

from strategies.base import RoundContext, Strategy, Update
from task.config.schema import Config
from task.message import Arrays
from task.models.model import Model


class FedLwF(Strategy):
    """FedAvg (McMahan et al. 2017), and the teacher of LwF (Li and Hoiem 2016) for the clients' loss.

    The mean is theta = sum_m n_m theta_m / sum_m n_m over clients m with n_m images. The teacher is theta at the end of
    the last task, all arrays of the model by name. It goes to the clients in every round, because they remember nothing
    between rounds. On old classes their loss is the binary cross-entropy between q_c = sigmoid(teacher's logit of
    class c) and s_c = sigmoid(own logit): - sum_c [q_c log s_c + (1 - q_c) log(1 - s_c)], for each image; see
    client_app/objectives/fedlwf.py.
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
