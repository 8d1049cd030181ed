"""AFCL, server half: one ridge regression from sums that clients send, whatever their partition (Tang et al. 2025)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.base import RoundContext, Strategy, Update
from strategies.ncm import NEVER
from task.config.schema import Config
from task.method_options import AFCLOptions
from task.models.model import Model
from task.prototypes.gaussians import unpack_symmetric


class AFCL(Strategy):
    """W = (sum_m G_m + lambda I)^-1 (sum_m S_m)^T: the ridge regression on all images that were reported.

    G_m = sum f f^T [D, D] and S_m = sum onehot(y) f^T [K, D] over a client's images of a task; f [D] are frozen
    features, or random features of them. A sum has no order, so the partition and the order of clients and tasks do
    not matter. Only the first report of a client in a task counts. A client that is never drawn in a task is missing
    from the result, and so are the images that a client gets after its report.
    """

    options: AFCLOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reported: frozenset[tuple[int, str]] = frozenset()  # (task, client)
        self.gram, self.sums = torch.empty(0, 0), torch.empty(0, 0)  # float64 [D, D] and [seen, D]

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Add the new reports and solve for all seen classes."""
        classes, dim = model.head.weight.shape
        if not len(self.gram):
            self.gram, self.sums = torch.zeros(dim, dim).double(), torch.zeros(0, dim).double()
        self.sums = torch.cat([self.sums, self.sums.new_zeros(classes - len(self.sums), dim)])
        for update in updates:
            statistics = update.statistics
            if statistics and (context.task, update.client) not in self.reported:
                rows = context.head_rows(torch.from_numpy(statistics["class_ids"]))
                self.sums = self.sums.index_add(0, rows, torch.from_numpy(statistics["sums"]))
                self.gram = self.gram + torch.from_numpy(unpack_symmetric(statistics["gram"], dim)[0])
                self.reported |= {(context.task, update.client)}
        model.head.weight.data.copy_(solve_ridge(self.gram, self.sums, self.options.ridge))
        has_images = self.sums.any(dim=1).to(model.device)
        model.head.bias.data.copy_(torch.where(has_images, 0.0, NEVER))
        return {}


def solve_ridge(gram: Tensor, sums: Tensor, ridge: float) -> Tensor:
    """Weights [K, D] that minimise sum |onehot(y) - W f|^2 + lambda |W|^2 over all images.

    One feature: value 1 in class 0, value 2 in class 1.

    >>> solve_ridge(gram=torch.tensor([[5.0]]), sums=torch.tensor([[1.0], [2.0]]), ridge=3.0)
    tensor([[0.1250],
            [0.2500]])

    ``gram`` sum f f^T, float64 [D, D]: eigenvalues that rounding or a client made negative count as zero; ``sums``
    sum onehot(y) f^T, float64 [K, D]; ``ridge`` lambda > 0.
    """
    factor, failed = torch.linalg.cholesky_ex(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))
    if not failed:
        return torch.cholesky_solve(sums.T, factor).T
    values, directions = torch.linalg.eigh(gram)
    return sums @ directions / (values.clamp(min=0) + ridge) @ directions.T
