"""The local training loop that every method shares."""

import math
from typing import Any

import torch
from torch import nn

from client_app.objectives.base import LocalData, Objective
from client_app.request import DivergedError
from task.config.schema import Config
from task.models.feature_cache import cached_query, load_inputs
from task.models.model import Model


def train_locally(
    model: Model, objective: Objective, data: LocalData, config: Config, rng: torch.Generator
) -> tuple[float, float]:
    """E epochs with a fresh optimiser and step sizes by the run's schedule; ``model`` changes in place.

    Returns:
        mean loss and accuracy over the last epoch's images, measured while training.

    Raises:
        DivergedError: the loss is not finite.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    optimiser = _optimiser(model, config)
    steps = config.local_epochs * math.ceil(len(data.rows) / config.batch_size)
    schedule = _schedule(optimiser, config, steps)
    known = model.trains_on_query and data.augmentation == "none"
    query = cached_query(model, data.images, data.positions) if known else None
    for epoch in range(config.local_epochs):
        objective.begin_epoch(model, data, epoch, rng)
        sums = torch.zeros(2, device=model.device)  # of loss and correct predictions
        for batch in torch.randperm(len(data.rows), generator=rng).split(config.batch_size):
            indices = batch.numpy()  # a tensor of one element would index NumPy as a scalar
            rows = torch.from_numpy(data.rows[indices]).to(model.device)
            batch_query = None if query is None else query[batch]
            inputs = load_inputs(model, data.images, data.positions[indices], batch_query, data.augmentation, rng)
            loss, logits = objective.loss(model, inputs, rows)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            if config.gradient_clip:
                nn.utils.clip_grad_norm_(parameters, config.gradient_clip)
            optimiser.step()
            schedule.step()
            correct = logits.detach().argmax(dim=1) == model.local_targets(rows)
            sums += torch.stack([loss.detach() * len(rows), correct.sum()])
        if not sums[0].isfinite():  # once an epoch, because reading a value in every step would stall a GPU
            loss_sum, step_size = sums[0].item(), config.learning_rate
            raise DivergedError(f"the loss is {loss_sum}; lower learning-rate (now {step_size:g})")
    model.eval()
    mean_loss, accuracy = (sums / len(data.rows)).tolist()
    return mean_loss, accuracy


def _schedule(optimiser: torch.optim.Optimizer, config: Config, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Step sizes of ``steps`` steps: a cosine down to 0, or constant."""
    if config.learning_rate_schedule == "constant":
        return torch.optim.lr_scheduler.ConstantLR(optimiser, factor=1.0)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)


def _optimiser(model: Model, config: Config) -> torch.optim.Optimizer:
    """Prompt and head have the step size learning-rate, a trained backbone backbone-learning-rate."""
    backbone = [] if model.trained_backbone is None else list(model.trained_backbone.parameters())
    ids = {id(p) for p in backbone}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": backbone, "lr": config.backbone_learning_rate}]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.learning_rate, momentum=0.9)
    return torch.optim.Adam(groups, config.learning_rate)
