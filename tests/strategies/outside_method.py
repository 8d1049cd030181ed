"""A method that is not the project's: features are drawn to their class mean, and the head is made of the means.

Everything that it takes to add one: a row, a dataclass of keys, a client half and a server half.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from client_app.objectives.base import Objective
from strategies.base import Strategy, join_statistics
from task.keys import key
from task.method_options import Method, Options
from task.prototypes.gaussians import merge_means


@dataclass(frozen=True)
class PulledOptions(Options):
    pull: float = key(0.1, "weight of the distance between a feature and its class mean", minimum=0)


class Pulled(Objective):
    options: PulledOptions

    def loss(self, model, inputs, rows):
        loss, logits = super().loss(model, inputs, rows)
        if self.statistics:
            means = {name: value.to(model.device) for name, value in self.statistics.items()}
            image, index = (rows[:, None] == means["rows"]).nonzero(as_tuple=True)
            difference = model.features(*inputs)[image] - means["means"][index]
            loss = loss + self.options.pull * difference.square().sum() / difference.shape[1] / len(rows)
        return loss, logits


class MeansAsHead(Strategy):
    def __init__(self, config):
        super().__init__(config)
        self.means = {}  # by head row

    def broadcast(self, context):
        rows = torch.tensor(list(self.means))
        return {"rows": rows.numpy(), "means": torch.stack(list(self.means.values())).numpy()} if self.means else {}

    def refine(self, model, updates, context):
        sent = join_statistics(u.statistics for u in updates)
        classes, means = merge_means(sent)
        self.means = self.means | dict(zip(context.head_rows(classes).tolist(), means, strict=True))
        for row, mean in self.means.items():
            model.head.weight.data[row] = F.normalize(mean, dim=0)
        return {"means": float(len(self.means))}


here = __name__
MEANS = "task.prototypes.statistics:MeanStatistics"
ROW = Method("pulled", ("shared",), f"{here}:Pulled", MEANS, f"{here}:MeansAsHead", PulledOptions)
