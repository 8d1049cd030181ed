"""FedAvg, weighted by images or plain."""

from strategies.base import Strategy, Update
from task.method_options import FedAvgOptions


class FedAvg(Strategy):
    """Mean of the clients, weighted by images (McMahan et al. 2017) or plain (the baselines of Ma'sum et al. 2024)."""

    options: FedAvgOptions

    def weight(self, update: Update) -> float:
        """n_m, or 1 for every client."""
        return self.options.client_weight(update.num_examples)
