"""The local training loop that every method shares."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from client_app.objectives.base import LocalData, Objective
from task.config.schema import Config
from task.models.feature_cache import cached_query, load_inputs
from task.models.model import Model


class DivergedError(RuntimeError):
    """The local loss became NaN or infinite."""


def train_locally(
    model: Model, objective: Objective, data: LocalData, config: Config, rng: torch.Generator
) -> tuple[float, float]:
    """E epochs with a fresh optimiser and a cosine schedule over all steps.

    Args:
        model: changed in place; prompt and head train, and the backbone if the model trains one.
        objective: gives the loss of each step.
        data: at least one image.
        config: epochs, batch size, optimiser, step size, gradient norm.
        rng: order of the images and augmentation.

    Returns:
        mean loss and accuracy over the last epoch's images, measured while training.

    Raises:
        DivergedError: the loss is not finite.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    optimiser = _optimiser(model, config)
    steps = config.local_epochs * math.ceil(len(data.rows) / config.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    query = cached_query(model, data.images, data.positions) if data.augmentation == "none" else None
    for epoch in range(config.local_epochs):
        objective.begin_epoch(model, data, epoch, rng)
        sums = torch.zeros(2, device=model.device)  # of loss and correct predictions
        for batch in torch.randperm(len(data.rows), generator=rng).split(config.batch_size):
            indices = batch.numpy()  # a tensor of one element would index NumPy as a scalar
            rows = torch.from_numpy(data.rows[indices]).to(model.device)
            batch_query = None if query is None else query[batch]
            inputs = load_inputs(model, data.images, data.positions[indices], batch_query, data.augmentation, rng)
            loss, logits = objective.loss(model, inputs, rows)
            _step(loss, parameters, optimiser, config.gradient_clip)
            schedule.step()
            correct = logits.detach().argmax(dim=1) == model.local_targets(rows)
            sums += torch.stack([loss.detach() * len(rows), correct.sum()])
        _require_finite(sums[0], config)
    model.eval()
    mean_loss, accuracy = (sums / len(data.rows)).tolist()
    return mean_loss, accuracy


def _optimiser(model: Model, config: Config) -> torch.optim.Optimizer:
    """Prompt and head have the step size learning-rate, a trained backbone backbone-learning-rate."""
    backbone = [] if model.trained_backbone is None else list(model.trained_backbone.parameters())
    ids = {id(p) for p in backbone}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": backbone, "lr": config.backbone_learning_rate}]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.learning_rate, momentum=0.9)
    return torch.optim.Adam(groups, config.learning_rate)


def _step(loss: Tensor, parameters: list[nn.Parameter], optimiser: torch.optim.Optimizer, clip: float) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(parameters, clip)
    optimiser.step()


def _require_finite(total: Tensor, config: Config) -> None:
    """Called once an epoch, because reading a value in every step would stall a GPU."""
    if not total.isfinite():
        raise DivergedError(f"the loss is {total.item()}; lower learning-rate (now {config.learning_rate:g})")
