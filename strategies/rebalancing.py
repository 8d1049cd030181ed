"""Retraining the head on features drawn from class Gaussians (HGP eq. 6 and 7), shared by HGP, CCVR and FedSLCA."""

import math
from dataclasses import dataclass, fields
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from task.method_options import Options
from task.models.head import Head
from task.prototypes.gaussians import Gaussians


@dataclass(frozen=True)
class RebalanceSettings:
    """How the head is retrained. The defaults are for CCVR: covariances as they are, and one synthetic set."""

    samples_per_class: int  # synthetic features, on average
    epochs: int  # over the synthetic set
    learning_rate: float  # of SGD, at the start of the cosine schedule
    logit_temperature: float  # see normalise_logits
    scale: float = 1.0  # s of HGP eq. 6, multiplies every covariance
    class_weights: str = "uniform"  # see mixture_weights
    draw: str = "once"  # or a new synthetic set for each "epoch"
    batch_size: int = 256  # synthetic features per step
    momentum: float = 0.9  # of SGD

    @classmethod
    def from_options(cls, options: Options) -> Self:
        """The settings that are also keys of a method, by name; those that are not keep their defaults."""
        return cls(**{f.name: getattr(options, f.name) for f in fields(cls) if hasattr(options, f.name)})


def replace_class_gaussians(stored: Gaussians | None, reported: Gaussians) -> Gaussians:
    """The reported Gaussians, and the stored ones of all other classes; ``stored`` is None before the first report.

    So a class that no client reports in a round keeps its last ones; the papers do not treat this case.
    """
    if stored is None:
        return reported
    return stored.pick(~torch.isin(stored.class_ids, reported.class_ids)).join(reported)


def mixture_weights(prototypes: Gaussians, kind: str) -> Tensor:
    """omega_c pi_{m,c} of HGP eq. 6 for each of P prototypes, float64 [P], sum 1.

    pi_{m,c} = n_{m,c} / sum_m n_{m,c}; omega_c is 1 / classes ("uniform") or sum_m n_{m,c} / n ("count").
    """
    counts = prototypes.counts.double()
    if kind == "count":
        return counts / counts.sum()
    _, index = prototypes.class_ids.unique(return_inverse=True)
    per_class = counts.new_zeros(int(index.max()) + 1).index_add_(0, index, counts)
    return counts / per_class[index] / len(per_class)


def rebalance(
    head: Head, prototypes: Gaussians, rows: Tensor, settings: RebalanceSettings, rng: torch.Generator
) -> float:
    """Retrain the head in place on synthetic features: cross-entropy (HGP eq. 7), SGD with a cosine schedule.

    Only the head rows of the prototypes' K classes are in the softmax and learn: ``rows`` int64 [K], by ascending
    class id. Head, prototypes and generator are on one device. Returns the mean loss over the last epoch.
    """
    classes = prototypes.class_ids.unique()
    weights, total = mixture_weights(prototypes, settings.class_weights), settings.samples_per_class * len(classes)
    optimiser = torch.optim.SGD(head.parameters(), settings.learning_rate, settings.momentum)
    steps = settings.epochs * math.ceil(total / settings.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    loss_sum = torch.zeros((), device=head.weight.device)
    for epoch in range(settings.epochs):
        if epoch == 0 or settings.draw == "epoch":
            features, class_ids = prototypes.sample(weights, total, settings.scale, rng)
            targets = torch.searchsorted(classes, class_ids)
        loss_sum.zero_()
        for batch in torch.randperm(total, generator=rng, device=rng.device).split(settings.batch_size):
            logits = normalise_logits(head(features[batch])[:, rows], settings.logit_temperature)
            loss = F.cross_entropy(logits, targets[batch])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
            loss_sum += loss.detach() * len(batch)
    return float(loss_sum) / total


def normalise_logits(logits: Tensor, temperature: float) -> Tensor:
    """L2-normalise each row of logits [B, K] and divide by the temperature; 0 leaves them as they are.

    >>> normalise_logits(torch.tensor([[3.0, 4.0]]), temperature=0.1)
    tensor([[6., 8.]])
    """
    return logits if temperature == 0 else F.normalize(logits, dim=1) / temperature
