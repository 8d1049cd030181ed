"""Retraining the head on features drawn from class Gaussians, shared by HGP, CCVR and FedSLCA."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from task.method_options import HGPOptions
from task.models.model import Head
from task.prototypes.gaussians import Gaussians


def remember(bank: Gaussians | None, fresh: Gaussians) -> Gaussians:
    """Replace the prototypes of every class that this round reports; those of other classes stay.

    A current class that nobody reports this round (partial participation) keeps its last ones; the text would have
    none.
    """
    if bank is None:
        return fresh
    return bank.pick(~torch.isin(bank.class_ids, fresh.class_ids)).join(fresh)


def mixture_weights(bank: Gaussians, kind: str) -> Tensor:
    """omega_c pi_{m,c} of eq. 6 for every prototype, float64 [P], sum 1.

    pi_{m,c} = n_{m,c} / sum_m n_{m,c}; omega is 1 / classes ("uniform") or sum_m n_{m,c} / n ("count").
    """
    counts = bank.counts.double()
    if kind == "count":
        return counts / counts.sum()
    _, place = bank.class_ids.unique(return_inverse=True)
    per_class = counts.new_zeros(int(place.max()) + 1).index_add_(0, place, counts)
    return counts / per_class[place] / len(per_class)


def rebalance(head: Head, bank: Gaussians, order: Sequence[int], options: HGPOptions, rng: torch.Generator) -> float:
    """Cross-entropy on synthetic features (eq. 7): SGD with momentum and a cosine schedule, in place.

    Only the rows of the bank's classes compete and learn.

    Args:
        head: one row per seen class.
        bank: prototypes to draw from, on the head's device.
        order: class id of each head row.
        options: sizes and step sizes.
        rng: generator on the device of the bank.

    Returns:
        mean loss over the last epoch.
    """
    classes = bank.class_ids.unique()
    rows = torch.tensor([order.index(c) for c in classes.tolist()], device=head.weight.device)
    weights, total = mixture_weights(bank, options.class_weights), options.samples_per_class * len(classes)
    optimiser = torch.optim.SGD(head.parameters(), options.learning_rate, options.momentum)
    steps = options.epochs * math.ceil(total / options.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    losses = torch.zeros((), device=head.weight.device)
    for epoch in range(options.epochs):
        if epoch == 0 or options.draw == "epoch":
            features, drawn = bank.sample(weights, total, options.scale, rng)
            targets = torch.searchsorted(classes, drawn)
        losses.zero_()
        for some in torch.randperm(total, generator=rng, device=rng.device).split(options.batch_size):
            logits = temper(head(features[some])[:, rows], options.logit_temperature)
            loss = F.cross_entropy(logits, targets[some])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
            losses += loss.detach() * len(some)
    return float(losses) / total


def temper(logits: Tensor, temperature: float) -> Tensor:
    """L2-normalise each row of logits [B, C] and divide by the temperature; 0 leaves them as they are."""
    return logits if temperature == 0 else F.normalize(logits, dim=1) / temperature
