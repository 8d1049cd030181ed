"""Federated averaging, weighted or plain."""

from collections.abc import Sequence

import numpy as np

from strategies.base import Strategy, Update
from task.config import Config
from task.methods import FedAvgOptions


class FedAvg(Strategy):
    """The mean of all clients, weighted by images (McMahan et al. 2017) or plain (Ma'sum et al. 2024's baselines)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options: FedAvgOptions = config.options  # type: ignore[assignment]  # the table's options of FedAvg

    def weights(self, updates: Sequence[Update]) -> np.ndarray:
        """n_m, or 1 for everyone."""
        return np.ones(len(updates)) if self.options.mean == "plain" else super().weights(updates)
