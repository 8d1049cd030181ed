"""A method that is not the project's: features are drawn to their class mean, and the head is made of the means.

Everything that it takes to add one: a row, a dataclass of keys, a client half and a server half.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from client_app.objectives.base import Objective
from strategies.base import Strategy
from task.keys import key
from task.method_options import Options
from task.methods import Method
from task.prototypes.gaussians import merge_means


@dataclass(frozen=True)
class PulledOptions(Options):
    pull: float = key(0.1, "weight of the distance between a feature and its class mean", minimum=0)


class Pulled(Objective):
    def __init__(self, config, packet):
        super().__init__(config, packet)
        self.means = {name: torch.from_numpy(a) for name, a in packet.prototypes.items()}

    def loss(self, model, inputs, rows):
        loss, logits = super().loss(model, inputs, rows)
        if self.means:
            image, place = (rows[:, None] == self.means["rows"].to(model.device)).nonzero(as_tuple=True)
            apart = model.features(*inputs)[image] - self.means["means"].to(model.device)[place]
            loss = loss + self.config.options.pull * apart.square().sum() / apart.shape[1] / len(rows)
        return loss, logits


class MeansAsHead(Strategy):
    def __init__(self, config):
        super().__init__(config)
        self.known = {}

    def broadcast(self, moment):
        order = moment.schedule.seen_classes(moment.task)
        rows = torch.tensor([order.index(c) for c in self.known])
        return {"rows": rows.numpy(), "means": torch.stack(list(self.known.values())).numpy()} if self.known else {}

    def refine(self, model, updates, moment):
        for sent in (u.prototypes for u in updates):
            classes, _, means = merge_means(*(torch.from_numpy(sent[n]) for n in ("class_ids", "counts", "means")))
            self.known = {**self.known, **dict(zip(classes.tolist(), means, strict=True))}
        order = moment.schedule.seen_classes(moment.task)
        for c, mean in self.known.items():
            model.head.weight.data[order.index(c)] = F.normalize(mean, dim=0)
        return {"means": float(len(self.known))}


here = __name__
ROW = Method(
    "pulled", ("shared",), f"{here}:Pulled", "task.prototypes.statistics:Means", f"{here}:MeansAsHead", PulledOptions
)
