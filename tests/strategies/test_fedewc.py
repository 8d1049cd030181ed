"""FedEWC: the Fisher information of clients, the penalty, and what the server adds up over tasks."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from client_app.objectives.base import Objective
from client_app.objectives.fedewc import FedEWCObjective
from strategies.base import RoundContext, Update
from strategies.fedewc import FedEWC
from task.config.parsing import parse
from task.message import Packet
from task.models.feature_cache import Inputs
from task.models.head import Head
from task.models.model import Model
from task.models.resnet import load_resnet18
from task.prompts.base import Prompt
from task.prototypes import statistics
from task.prototypes.noise import GaussianMechanism, system_normal
from task.prototypes.statistics import FisherStatistics, Sample, empirical_fisher
from task.scenario.class_stream import Schedule
from tests.helpers.prompts import prompt_config
from tests.helpers.trained_backbone import small_model, some_images


@pytest.mark.parametrize("images_per_pass", [2, 5])
def test_fisher_is_the_mean_of_squared_gradients_of_single_images(
    images_per_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against one backward pass per image in float64."""
    model, images = small_model(), some_images(5)
    numbers = sum(p.numel() for p in model.backbone.parameters())
    monkeypatch.setattr(statistics, "_GRADIENTS", images_per_pass * numbers)
    rows = torch.tensor([2, 4, 3, 3, 2])
    fisher = empirical_fisher(model, Sample(images, np.arange(5), rows + 10, rows))
    twin = copy.deepcopy(model).double()
    prepared = (torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255 - 0.5) / 0.25
    expected = 0.0
    for image, row in zip(prepared, rows, strict=True):
        twin.zero_grad()
        features = twin.trained_backbone(image[None])
        F.cross_entropy(F.linear(features, twin.head.weight, twin.head.bias)[:, 2:], row[None] - 2).backward()
        expected = expected + torch.cat([p.grad.flatten() for p in twin.trained_backbone.parameters()]) ** 2 / 5
    assert fisher.shape == model.packed_backbone().shape
    assert np.allclose(fisher.numpy(), expected.numpy(), rtol=1e-3, atol=1e-9)
    assert fisher.max() > 1e-5


def test_fisher_of_a_resnet_leaves_running_statistics_alone():
    model = Model(load_resnet18("random", 8), Prompt(prompt_config(), 0), Head(512, 0), "fp32", trains_backbone=True)
    model.begin_task(2)
    model.eval()
    before = model.packed_backbone().detach().clone()
    sent = FisherStatistics().collect(
        model,
        Sample(some_images(3), np.arange(3), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1])),
        None,
        GaussianMechanism(0, 0, 0, system_normal),
    )
    assert torch.equal(model.packed_backbone(), before)
    assert sent["fisher"].shape == tuple(before.shape)
    assert sent["counts"].tolist() == [1, 2]


def test_ewc_penalty_by_hand():
    model = small_model()
    config = parse({"method": "fedewc", "fedewc-strength": 3.0})
    anchor = model.export()["backbone"]
    fisher = np.zeros_like(anchor)
    fisher[[0, 5]] = 2.0, 4.0
    anchor[0] -= 0.5
    anchor[5] += 1.0
    anchor[7] += 9.0  # no information, no penalty
    inputs, rows = Inputs(torch.zeros(2, 3, 8, 8)), torch.tensor([2, 4])
    plain = Objective(config, Packet()).loss(model, inputs, rows)[0]
    objective = FedEWCObjective(config, Packet(statistics={"fisher": fisher, "anchor": anchor}))
    objective.begin_epoch(model, None, 0, None)
    assert float((objective.loss(model, inputs, rows)[0] - plain).detach()) == pytest.approx(
        1.5 * (2 * 0.25 + 4 * 1.0), rel=1e-5
    )
    assert torch.equal(FedEWCObjective(config, Packet()).loss(model, inputs, rows)[0], plain)


def test_ewc_server_averages_by_images_and_adds_up_over_tasks():
    server, model, schedule = FedEWC(parse({"method": "fedewc"})), small_model(), Schedule([[0, 1], [2, 3, 4]], 2)
    size = model.packed_backbone().numel()

    def take(server_round: int, *values: float) -> None:
        context, sent = (
            RoundContext(schedule, server_round),
            [{"fisher": np.full(size, value, np.float32)} for value in values],
        )
        updates = [Update(str(i), images, {}, one) for i, (images, one) in enumerate(zip((10, 30), sent, strict=False))]
        for update in updates:
            server.receive(model, update, context)
        server.refine(model, updates, context)
        assert not any(update.statistics for update in updates)

    take(1, 1.0, 3.0)
    assert server.broadcast(RoundContext(schedule, 2)) == {}
    take(2, 1.0, 3.0)
    broadcast = server.broadcast(RoundContext(schedule, 3))
    assert np.allclose(broadcast["fisher"], 2.5)  # (10 * 1 + 30 * 3) / 40
    assert (broadcast["anchor"] == model.export()["backbone"]).all()
    with torch.no_grad():
        model.trained_backbone.vit.cls_token += 1.0
    take(3, 9.0)
    assert server.broadcast(RoundContext(schedule, 4)) is broadcast  # within a task both stay
    take(4, 4.0)
    renewed = server.broadcast(RoundContext(schedule, 4))
    assert np.allclose(renewed["fisher"], 6.5)
    assert np.allclose((renewed["anchor"] - broadcast["anchor"])[:12], 1.0)  # the class token is packed first
