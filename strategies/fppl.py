"""FPPL, server half: global prototypes and debiasing of the head on local ones (He et al. 2024)."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from strategies.base import Moment, Strategy, Update
from task.config.schema import Config
from task.message import Arrays
from task.method_options import FPPLOptions
from task.models.model import Head, Model
from task.prototypes.gaussians import class_means
from task.utils.seeding import torch_rng


class FPPL(Strategy):
    """FedAvg, then the head is debiased on the clients' prototypes (eq. 4); their means go out again (eq. 5).

    ``rows`` int64 [P] and ``means`` [P, D] are the pool: for every class the local prototypes of the last round that
    reported it. With all clients in every round that is the paper's union of the finished tasks' pool with this round;
    otherwise a class of the current task that nobody reports now keeps its last prototypes.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options: FPPLOptions = config.options  # type: ignore[assignment]  # the table gives FPPL these options
        self.rows, self.means = torch.empty(0, dtype=torch.int64), torch.empty(0, 0)

    def broadcast(self, moment: Moment) -> Arrays:
        """Global prototypes of the current task, a plain mean over the clients that hold the class (eq. 5)."""
        schedule = moment.schedule
        first = len(schedule.seen_classes(moment.task)) - len(schedule.current_classes(moment.task))
        current = self.rows >= first
        if not current.any():
            return {}
        rows, _, means = class_means(self.means[current], self.rows[current])
        return {"rows": rows.cpu().numpy(), "means": means.cpu().numpy()}

    def refine(self, model: Model, updates: Sequence[Update], moment: Moment) -> dict[str, float]:
        """Renew the pool and debias the head on all of it."""
        order = moment.schedule.seen_classes(moment.task)
        for report in _joined(updates):
            rows = torch.tensor([order.index(c) for c in report["class_ids"]], device=model.device)
            self._remember(rows, torch.from_numpy(report["means"]).to(model.device))
        if not len(self.rows):
            return {}
        rng = torch_rng(self.config.seed, "debias", moment.server_round)
        loss = debias(model.head, self.means, self.rows, self.options, rng)
        return {"debias-loss": loss, "prototypes": float(len(self.rows))}

    def _remember(self, rows: Tensor, means: Tensor) -> None:
        kept = ~torch.isin(self.rows.to(rows.device), rows)
        self.rows = torch.cat([self.rows.to(rows.device)[kept], rows])
        self.means = torch.cat([self.means.to(means)[kept], means]) if kept.any() else means


def _joined(updates: Sequence[Update]) -> list[Arrays]:
    """All clients' statistics as one report, or none."""
    found = [u.prototypes for u in updates if u.prototypes]
    return [{name: np.concatenate([f[name] for f in found]) for name in ("class_ids", "means")}] if found else []


def debias(head: Head, prototypes: Tensor, rows: Tensor, options: FPPLOptions, rng: torch.Generator) -> float:
    """Cross-entropy of the head over all seen classes on prototypes (eq. 4), by Adam, in place.

    Args:
        head: one row per seen class.
        prototypes: [P, D].
        rows: int64 [P], the head row of each.
        options: epochs, batch size, step size.
        rng: CPU generator of the order.

    Returns:
        mean loss over the last epoch.
    """
    optimiser = torch.optim.Adam(head.parameters(), options.debias_learning_rate)
    total = torch.zeros((), device=prototypes.device)
    for _ in range(options.debias_epochs):
        total.zero_()
        for some in torch.randperm(len(rows), generator=rng).to(rows.device).split(options.debias_batch_size):
            loss = F.cross_entropy(head(prototypes[some]), rows[some])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            total += loss.detach() * len(some)
    return float(total) / len(rows)
