"""HGP, server half: class Gaussians, hierarchical sampling, classifier rebalancing (Salami et al. 2024).

Clients train by the plain objective (client_app/objectives/base.py) and send GaussianStatistics
(task/prototypes/statistics.py). The prompt is task/prompts/shared.py, the run keys are HGPOptions in
task/method_options.py.
"""

from collections.abc import Sequence

import torch

from strategies.base import RoundContext, Strategy, Update, join_statistics
from strategies.rebalancing import RebalanceSettings, rebalance, replace_class_gaussians
from task.config.schema import Config
from task.method_options import HGPOptions
from task.models.model import Model
from task.prototypes.gaussians import Gaussians, prepare_gaussians
from task.utils.seeding import torch_rng


class HGP(Strategy):
    """FedAvg, then the head is retrained on features drawn from the class mixtures (Salami et al. 2024).

    - Eq. 3, mean over the clients m with n_m images: theta = sum_m n_m theta_m / sum_m n_m.
    - Eq. 6, mixture of class c: Q_c = sum_m pi_mc N(mu_mc, s Sigma_mc), pi_mc = n_mc / sum_m n_mc, over the clients m
      that reported n_mc images of it, with mean mu_mc [D], covariance Sigma_mc [D, D] in the run's packing, scale s.
      A class is drawn with weight omega_c, see :func:`strategies.rebalancing.mixture_weights`.
    - Eq. 7, with N drawn features h_i [D] of classes y_i: minimise - 1/N sum_i log softmax(W h_i + b)_{y_i} over the
      head W [K, D], b [K], see :func:`strategies.rebalancing.rebalance`.

    ``prototypes`` are the Gaussians of each seen class, from the last round in which any client reported it: P of them,
    one for each class and client, with means and deviations [P, D] and factors [P, R, D]. They stay on the CPU, so that
    a checkpoint can be read on any machine.
    """

    options: HGPOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.prototypes: Gaussians | None = None

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Store the round's Gaussians and rebalance the head on samples of them."""
        joined = join_statistics(u.statistics for u in updates)
        if joined:
            reported = prepare_gaussians(joined, self.options.covariance)
            self.prototypes = replace_class_gaussians(self.prototypes, reported)
        if self.prototypes is None:
            return {}
        # all is the paper's method, the others are ablations of its table 3
        classes = {
            "all": context.seen_classes,
            "current": context.current_classes,
            "old": context.old_classes,
            "off": [],
        }[self.options.rebalance]
        class_ids = torch.tensor(classes, dtype=torch.int64)
        chosen = self.prototypes.pick(torch.isin(self.prototypes.class_ids, class_ids)).to(model.device)
        if not len(chosen):
            return {}
        rng = torch_rng(self.config.seed, "rebalance", context.server_round, device=model.device)
        rows = context.head_rows(chosen.class_ids.unique())
        loss = rebalance(model.head, chosen, rows, RebalanceSettings.from_options(self.options), rng)
        return {"rebalance-loss": loss, "prototypes": float(len(self.prototypes))}
