"""FedSLCA: a slow backbone and a fast head; its calibration is CCVR's, tested there."""

import copy

import numpy as np
import torch
import torch.nn.functional as F

from client_app.objectives.base import LocalData, Objective
from client_app.training import train_locally
from task.config.parsing import parse
from task.message import Packet
from tests.helpers.trained_backbone import small_model, some_images


def test_backbone_and_head_have_step_sizes_of_their_own():
    """One step of plain SGD without momentum history: the change is step size times gradient."""
    values = {"method": "fedslca", "local-epochs": 1, "gradient-clip": 0.0, "batch-size": 6}
    config = parse(values | {"learning-rate": 0.01, "backbone-learning-rate": 0.0001})
    model = small_model()
    before = copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})
    twin = small_model()
    images = (torch.from_numpy(some_images(6)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    F.cross_entropy(twin(images)[:, 2:], torch.tensor([0, 1, 2, 0, 1, 2])).backward()
    data = LocalData(some_images(6), np.arange(6), np.array([2, 3, 4, 2, 3, 4]), "none")
    train_locally(model, Objective(config, Packet()), data, config, torch.Generator().manual_seed(0))
    for name, p in model.named_parameters():
        rate = 0.0001 if name.startswith("trained_backbone.") else 0.01
        gradient = dict(twin.named_parameters())[name].grad
        assert torch.allclose(p, before[name] - rate * gradient, atol=1e-6), name
    assert (model.trained_backbone.vit.cls_token != before["trained_backbone.vit.cls_token"]).any()
