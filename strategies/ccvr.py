"""CCVR, server half: calibrate the head on virtual features of one Gaussian per class (Luo et al. 2021).

FedSLCA is served by the same class: SLCA's classifier alignment (Zhang et al. 2023) is much like this calibration with
normalised logits.
"""

from collections.abc import Sequence

import numpy as np

from strategies.base import RoundContext, Strategy, Update, join_statistics
from strategies.rebalancing import RebalanceSettings, rebalance, replace_class_gaussians
from task.config.schema import Config
from task.message import Arrays
from task.method_options import CCVROptions
from task.models.model import Model
from task.prototypes.gaussians import Gaussians, prepare_gaussians
from task.utils.seeding import torch_rng


class CCVR(Strategy):
    """FedAvg, and after each task's last round a calibration of the head on all seen classes (Luo et al. 2021).

    Step 1: the Gaussian N(mu_c, Sigma_c) of each class c over all clients, see ``pool_gaussians``. Step 2: draw virtual
    features z ~ N(mu_c, Sigma_c) [D] and train the head [S, D] on their cross-entropy, see ``rebalance``.
    ``prototypes`` are the Gaussians of the K classes reported so far: means and deviations [K, D], factors [K, R, D].

    What differs from HGP: one Gaussian per class instead of a mixture over clients, covariances as they are (s = 1),
    one set of virtual features, and only when a task ends. The statistics of a client are the last ones that it sent
    in the task. The paper calibrates once, after a training without tasks.
    """

    options: CCVROptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reports: dict[tuple[int, str], Arrays] = {}  # the last of each (task, client), until they are merged
        self.prototypes: Gaussians | None = None  # on the CPU, so that a checkpoint can be read on any machine

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Collect statistics; when the task ends, merge them and calibrate the head."""
        self.reports = self.reports | {(context.task, u.client): u.statistics for u in updates if u.statistics}
        if not context.ends_task:
            return {}
        if self.reports:
            pooled = pool_gaussians(join_statistics(self.reports.values()))
            reported = prepare_gaussians(pooled, self.options.covariance)
            self.prototypes, self.reports = replace_class_gaussians(self.prototypes, reported), {}
        if self.prototypes is None:
            return {}
        rng = torch_rng(self.config.seed, "calibrate", context.server_round, device=model.device)
        prototypes, settings = self.prototypes.to(model.device), RebalanceSettings.from_options(self.options)
        rows = context.head_rows(prototypes.class_ids.unique())
        return {"calibration-loss": rebalance(model.head, prototypes, rows, settings, rng)}


def pool_gaussians(joined: Arrays) -> Arrays:
    """Statistics of the union of all clients' samples, for each of K classes (Luo et al. 2021).

    mu = sum_m n_m mu_m / N;  Sigma = sum_m [(n_m - 1) Sigma_m + n_m (mu_m - mu) (mu_m - mu)^T] / (N - 1)

    A class with one sample in all keeps a covariance of zero. Each report has class_ids, counts [K_m], means [K_m, D],
    and variances [K_m, D] or covariances [K_m, D (D + 1) / 2]; the result has one row per class, class ids ascending.
    """
    spread = "covariances" if "covariances" in joined else "variances"
    classes, index = np.unique(joined["class_ids"], return_inverse=True)
    of_class = (np.arange(len(classes))[:, None] == index).astype(np.float64)  # [K, rows of all reports]
    counts = joined["counts"].astype(np.float64)
    total = of_class @ counts
    means = of_class * counts @ joined["means"].astype(np.float64) / total[:, None]
    centred = joined["means"] - means[index]
    row, column = np.triu_indices(means.shape[1]) if spread == "covariances" else np.diag_indices(means.shape[1])
    scatter = of_class * (counts - 1) @ joined[spread] + of_class * counts @ (centred[:, row] * centred[:, column])
    return {
        "class_ids": classes,
        "counts": total.astype(np.int64),
        "means": means.astype(np.float32),
        spread: (scatter / np.maximum(total - 1, 1)[:, None]).astype(np.float32),
    }
