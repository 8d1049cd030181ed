"""HGP, server half: class Gaussians, hierarchical sampling, classifier rebalancing (Salami et al. 2024)."""

from collections.abc import Sequence

import torch

from strategies.base import Moment, Strategy, Update
from strategies.rebalancing import rebalance, remember
from task.config.schema import Config
from task.method_options import HGPOptions
from task.models.model import Model
from task.prototypes.gaussians import Gaussians, prepare_gaussians
from task.utils.seeding import torch_rng


class HGP(Strategy):
    """FedAvg, then the head is retrained on features drawn from the class mixtures (eq. 6 and 7)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options: HGPOptions = config.options  # type: ignore[assignment]  # the table gives HGP these options
        self.bank: Gaussians | None = None

    def refine(self, model: Model, updates: Sequence[Update], moment: Moment) -> dict[str, float]:
        """Store the round's Gaussians and rebalance the head on samples of them."""
        statistics = [u.prototypes for u in updates if u.prototypes]
        if statistics:
            fresh = prepare_gaussians(statistics, self.options.packing).to(model.device)
            self.bank = remember(self.bank, fresh)
        if self.bank is None or not (wanted := self._classes(moment)):
            return {}
        chosen = self.bank.pick(torch.isin(self.bank.class_ids, torch.tensor(wanted, device=model.device)))
        if not len(chosen):
            return {}
        rng = torch_rng(self.config.seed, "rebalance", moment.server_round, device=model.device)
        loss = rebalance(model.head, chosen, moment.schedule.seen_classes(moment.task), self.options, rng)
        return {"rebalance-loss": loss, "prototypes": float(len(self.bank))}

    def _classes(self, moment: Moment) -> list[int]:
        """Classes whose head rows are retrained: the paper's method, or an ablation of its table 3."""
        current = moment.schedule.current_classes(moment.task)
        seen = moment.schedule.seen_classes(moment.task)
        old = seen[: len(seen) - len(current)]
        return {"all": seen, "current": current, "old": old, "off": []}[self.options.rebalance]
