"""FPPL, server half: global prototypes and debiasing of the head on local ones (He et al. 2024)."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from strategies.base import RoundContext, Strategy, Update, join_statistics, replace_classes
from task.config.schema import Config
from task.message import Arrays
from task.method_options import FPPLOptions
from task.models.head import Head
from task.models.model import Model
from task.prototypes.gaussians import class_means
from task.utils.seeding import torch_rng


class FPPL(Strategy):
    """FedAvg, then the head is debiased on the clients' prototypes (eq. 4); their means go out again (eq. 5).

    Debiasing is cross-entropy of the head on the pool of prototypes. A class y goes out as the plain mean of what the
    clients that hold it report, G^y = sum_m mu_m^y / M_y.

    ``pool`` holds class_ids int64 [P] and means [P, D] of local prototypes: of every class those of the last round that
    reported it. If all clients report in every round, this is the paper's union of the finished tasks' pool with
    this round's prototypes. Otherwise a current class that no client reports keeps its last prototypes.
    """

    options: FPPLOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pool: Arrays = {}

    def broadcast(self, context: RoundContext) -> Arrays:
        """Global prototypes of the current task (eq. 5): head ``rows`` int64 [K] and ``means`` [K, D]."""
        if not self.pool:
            return {}
        rows, means = self._prototypes(context)
        current = torch.from_numpy(np.isin(self.pool["class_ids"], context.current_classes))
        rows, _, means = class_means(means[current], rows[current])
        return {"rows": rows.numpy(), "means": means.numpy()} if len(rows) else {}

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Renew the pool and debias the head on all of it."""
        report = join_statistics(u.statistics for u in updates)
        if report:
            self.pool = replace_classes(self.pool, {name: report[name] for name in ("class_ids", "means")})
        if not self.pool:
            return {}
        rows, means = (value.to(model.device) for value in self._prototypes(context))
        rng = torch_rng(self.config.seed, "debias", context.server_round)
        loss = debias(model.head, means, rows, self.options, rng)
        return {"debias-loss": loss, "prototypes": float(len(rows))}

    def _prototypes(self, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Head rows [P] and means [P, D] of the pool."""
        return context.head_rows(torch.from_numpy(self.pool["class_ids"])), torch.from_numpy(self.pool["means"])


def debias(head: Head, prototypes: Tensor, rows: Tensor, options: FPPLOptions, rng: torch.Generator) -> float:
    """Train the head in place on prototypes [P, D] of head rows int64 [P]: cross-entropy (eq. 4), Adam.

    The CPU generator gives the order. Only rows that have a prototype are in the softmax and learn, as in the authors'
    code: a class that no client has reported yet would be pushed down by all others. Returns the mean loss over the
    last epoch.
    """
    known, targets = rows.unique(return_inverse=True)
    optimiser = torch.optim.Adam(head.parameters(), options.debias_learning_rate)
    loss_sum = torch.zeros((), device=prototypes.device)
    for _ in range(options.debias_epochs):
        loss_sum.zero_()
        for batch in torch.randperm(len(rows), generator=rng).to(rows.device).split(options.debias_batch_size):
            loss = F.cross_entropy(head(prototypes[batch])[:, known], targets[batch])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            loss_sum += loss.detach() * len(batch)
    return float(loss_sum) / len(rows)
