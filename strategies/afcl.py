"""AFCL, server half: one ridge regression from sums that clients send, whatever their partition (Tang et al. 2025)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.base import Moment, Strategy, Update
from strategies.ncm import NEVER
from task.config.schema import Config
from task.method_options import AFCLOptions
from task.models.model import Model
from task.prototypes.gaussians import unpack_symmetric


class AFCL(Strategy):
    """W = (sum_m G_m + lambda I)^-1 (sum_m S_m)^T: the ridge regression on all images that were reported.

    G_m = sum f f^T and S_m = sum onehot(y) f^T of a client's images of a task, f being frozen features or random
    features of them. Sums know no order, so that neither partition nor the order of clients and tasks matters. A client
    is counted by its first report in a task; one that is never drawn in it, or draws its images anew, is missed.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options: AFCLOptions = config.options  # type: ignore[assignment]  # the table gives AFCL these options
        self.counted: frozenset[tuple[int, str]] = (
            frozenset()
        )  # (task, client): a client counts once, whatever the rounds
        self.gram, self.sums = torch.empty(0, 0), torch.empty(0, 0)

    def refine(self, model: Model, updates: Sequence[Update], moment: Moment) -> dict[str, float]:
        """Add what is new and solve again, for all classes."""
        order = moment.schedule.seen_classes(moment.task)
        self.gram, self.sums = _grown(self.gram, self.sums, len(order), model.head.weight.shape[1])
        for update in updates:
            if update.prototypes and (moment.task, update.client) not in self.counted:
                self._add(update, order)
                self.counted |= {(moment.task, update.client)}
        model.head.weight.data.copy_(solve_ridge(self.gram, self.sums, self.options.ridge))
        reported = self.sums.any(dim=1).to(model.device)
        model.head.bias.data.copy_(torch.where(reported, 0.0, NEVER))
        return {}

    def _add(self, update: Update, order: Sequence[int]) -> None:
        sent = update.prototypes
        rows = torch.tensor([order.index(c) for c in sent["class_ids"].tolist()])
        self.sums = self.sums.index_add(0, rows, torch.from_numpy(sent["sums"]))
        self.gram = self.gram + torch.from_numpy(unpack_symmetric(sent["gram"], len(self.gram))[0])


def _grown(gram: Tensor, sums: Tensor, classes: int, dim: int) -> tuple[Tensor, Tensor]:
    """The sums so far with a row for each of the ``classes`` seen; float64 [D, D] and [classes, D]."""
    if not len(gram):
        return torch.zeros(dim, dim, dtype=torch.float64), torch.zeros(classes, dim, dtype=torch.float64)
    return gram, torch.cat([sums, sums.new_zeros(classes - len(sums), dim)])


def solve_ridge(gram: Tensor, sums: Tensor, ridge: float) -> Tensor:
    """Weights [K, D] that minimise sum |onehot(y) - W f|^2 + lambda |W|^2.

    Args:
        gram: sum f f^T, float64 [D, D]; directions in which rounding or malice made it negative count as unseen.
        sums: sum onehot(y) f^T, float64 [K, D].
        ridge: lambda, above 0.
    """
    factor, failed = torch.linalg.cholesky_ex(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))
    if not failed:
        return torch.cholesky_solve(sums.T, factor).T
    values, directions = torch.linalg.eigh(gram)
    return sums @ directions / (values.clamp(min=0) + ridge) @ directions.T
