"""CCVR, server half: calibrate the head on virtual features of one Gaussian per class (Luo et al. 2021)."""

from collections.abc import Sequence

import numpy as np

from strategies.base import RoundContext, Strategy, Update
from strategies.rebalancing import rebalance, remember
from task.config.schema import Config
from task.message import Arrays
from task.method_options import CCVROptions, HGPOptions
from task.models.model import Model
from task.prototypes.gaussians import Gaussians, prepare_gaussians
from task.utils.seeding import torch_rng


class CCVR(Strategy):
    """FedAvg, and after each task's last round a calibration on all seen classes.

    Beside HGP: one Gaussian per class instead of a mixture over clients, covariances as they are (s = 1), one virtual
    set, and once per task. A client that took part in the task counts with its latest statistics. The paper does this
    once, after a training that knows no tasks.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options: CCVROptions = config.options  # type: ignore[assignment]  # the table gives CCVR these options
        own = self.options
        self.sampling = HGPOptions(
            samples_per_class=own.samples_per_class,
            epochs=own.epochs,
            learning_rate=own.learning_rate,
            scale=1.0,
            draw="once",
            logit_temperature=own.logit_temperature,
        )
        self.latest: dict[str, Arrays] = {}  # the current task's, by client
        self.bank: Gaussians | None = None

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Collect statistics; when the task ends merge them and calibrate the head."""
        self.latest = self.latest | {u.client: u.statistics for u in updates if u.statistics}
        if not context.ends_task:
            return {}
        if self.latest:
            merged = merge_by_class(list(self.latest.values()))
            fresh = prepare_gaussians([merged], self.options.packing).to(model.device)
            self.bank, self.latest = remember(self.bank, fresh), {}
        if self.bank is None:
            return {}
        rng = torch_rng(self.config.seed, "calibrate", context.server_round, device=model.device)
        order = context.schedule.seen_classes(context.task)
        return {"calibration-loss": rebalance(model.head, self.bank, order, self.sampling, rng)}


def merge_by_class(reports: Sequence[Arrays]) -> Arrays:
    """Statistics of the union of all clients' samples, per class.

    mu = sum_m n_m mu_m / N;  Sigma = sum_m [(n_m - 1) Sigma_m + n_m (mu_m - mu) (mu_m - mu)^T] / (N - 1)

    (Luo et al. 2021). A class with one sample in all keeps a covariance of zero.

    Args:
        reports: what clients sent, in the full or the diagonal packing.

    Returns:
        the same arrays with one row per class, class ids ascending.
    """
    joined = {name: np.concatenate([r[name] for r in reports]) for name in reports[0]}
    spread = "covariances" if "covariances" in joined else "variances"
    classes, place = np.unique(joined["class_ids"], return_inverse=True)
    member = (np.arange(len(classes))[:, None] == place).astype(np.float64)  # [classes, P]
    counts = joined["counts"].astype(np.float64)
    total = member @ counts
    means = member * counts @ joined["means"].astype(np.float64) / total[:, None]
    apart = joined["means"] - means[place]
    row, column = np.triu_indices(apart.shape[1]) if spread == "covariances" else np.diag_indices(apart.shape[1])
    scatter = member * (counts - 1) @ joined[spread] + member * counts @ (apart[:, row] * apart[:, column])
    return {
        "class_ids": classes,
        "counts": total.astype(np.int64),
        "means": means.astype(np.float32),
        spread: (scatter / np.maximum(total - 1, 1)[:, None]).astype(np.float32),
    }
