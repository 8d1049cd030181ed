"""Nearest class mean of frozen features, with nothing trained: a lower bound for every method that trains."""

from collections.abc import Sequence

from strategies.base import RoundContext, Strategy, Update, join_statistics
from task.config.schema import Config
from task.message import Arrays
from task.models.model import Model
from task.prototypes.gaussians import merge_means

NEVER = -1e30  # bias of a class that no client has reported: it is never predicted


class NearestMean(Strategy):
    """Class means over all clients, weighted by counts, become the head: w_c = mu_c [D], b_c = -|mu_c|^2 / 2.

    The largest logit then belongs to the nearest mean, because |x - mu_c|^2 = |x|^2 - 2 (w_c x + b_c). This is the
    nearest class mean classifier of Mensink et al. 2013, in Euclidean distance.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reports: dict[tuple[int, str], Arrays] = {}  # the last of each (task, client)

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Merge the means of all reports so far and overwrite the head rows of their classes."""
        weight, bias = model.head.weight.data, model.head.bias.data
        if context.round == 0:
            weight[model.current_rows()] = 0
            bias[model.current_rows()] = NEVER
        self.reports = self.reports | {(context.task, u.client): u.statistics for u in updates if u.statistics}
        if self.reports:
            class_ids, means = merge_means(join_statistics(self.reports.values()))
            rows = context.head_rows(class_ids).to(model.device)
            weight[rows] = means.to(model.device)
            bias[rows] = -0.5 * means.square().sum(dim=1).to(model.device)
        return {}
