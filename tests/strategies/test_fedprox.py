"""FedProx: the proximal term and its gradient, by hand."""

import numpy as np
import pytest
import torch

from client_app.objectives.base import LocalData, Objective
from client_app.objectives.fedprox import FedProxObjective
from task.config.parsing import parse
from task.message import Packet
from task.models.feature_cache import Inputs
from task.models.model import build_model


def test_proximal_term_and_gradient_by_hand(tiny):
    """Every number of head and prompt moved by 0.5: mu / 2 * N * 0.25 in the loss, mu * 0.5 in each gradient."""
    config = parse(tiny | {"method": "fedprox", "fedprox-mu": 0.4})
    model, packet = build_model(config, [6, 6]), Packet()
    objective = FedProxObjective(config, packet)
    data = LocalData(np.empty(0), np.empty(0), np.empty(0), "none")
    objective.begin_epoch(model, data, 0, torch.Generator())
    torch.manual_seed(0)
    images, rows = torch.randn(4, 3, 16, 16), torch.tensor([6, 7, 8, 11])
    at_start, _ = objective.loss(model, Inputs(images), rows)
    assert torch.equal(at_start, Objective(config, packet).loss(model, Inputs(images), rows)[0])
    trained = list(model.parameters())
    for p in trained:
        p.data += 0.5
    objective.begin_epoch(model, data, 1, torch.Generator())  # a later epoch does not move the anchor
    loss, _ = objective.loss(model, Inputs(images), rows)
    plain, _ = Objective(config, packet).loss(model, Inputs(images), rows)
    numbers = sum(p.numel() for p in trained)
    assert numbers == 12 * (model.backbone.dim + 1) + 5 * 2 * 8 * model.backbone.dim
    assert float((loss - plain).detach()) == pytest.approx(0.2 * numbers * 0.25, rel=1e-4)
    for gradient, expected in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(plain, trained), strict=True):
        assert torch.allclose(gradient, expected + 0.4 * 0.5, atol=1e-5)


def test_what_is_frozen_is_left_out(tiny):
    """In the second task the first task's fused prompt neither trains nor counts."""
    config = parse(tiny | {"method": "fedprox", "prompt": "fused"})
    model, objective = build_model(config, [6, 6]), FedProxObjective(config, Packet())
    objective.begin_epoch(model, LocalData(np.empty(0), np.empty(0), np.empty(0), "none"), 0, torch.Generator())
    assert len(objective.start) == len(list(model.parameters())) - 1
