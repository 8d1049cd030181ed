"""Federated averaging, weighted or plain."""

from strategies.base import Strategy, Update
from task.config.schema import Config
from task.method_options import FedAvgOptions


class FedAvg(Strategy):
    """The mean of all clients, weighted by images (McMahan et al. 2017) or plain (Ma'sum et al. 2024's baselines)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options: FedAvgOptions = config.options  # type: ignore[assignment]  # the table's options of FedAvg

    def weight(self, update: Update) -> float:
        """n_m, or 1 for everyone."""
        return 1.0 if self.options.mean == "plain" else super().weight(update)
