"""FedLwF: the loss with the last task's model as teacher, and what the server keeps."""

import numpy as np
import pytest
import torch

from client_app.objectives.fedlwf import FedLwFObjective, binary_loss
from strategies.base import RoundContext
from strategies.fedlwf import FedLwF
from task.config.parsing import parse
from task.message import Packet
from task.models.feature_cache import Inputs
from task.models.model import build_model
from task.scenario.class_stream import Schedule
from tests.helpers.trained_backbone import small_model


def test_lwf_loss_by_hand():
    """One image, logits 0 and ln 3, targets 1 and 0.25: ln 2 - 0.25 ln 0.75 - 0.75 ln 0.25."""
    loss = binary_loss(torch.tensor([[0.0, np.log(3)]]).float(), torch.tensor([[1.0, 0.25]]))
    assert float(loss) == pytest.approx(np.log(2) - 0.25 * np.log(0.75) - 0.75 * np.log(0.25), rel=1e-6)


def test_lwf_teaches_old_classes_from_the_last_tasks_model_and_new_ones_from_labels(tiny):
    config = parse(tiny | {"method": "fedlwf"})
    teacher, model = build_model(config, [6]), build_model(config, [6, 6])
    with torch.no_grad():
        teacher.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    objective = FedLwFObjective(config, Packet(statistics=teacher.export()))
    objective.begin_epoch(model, None, 0, None)
    assert not objective.teacher.training  # running statistics, not those of a batch
    inputs, rows = Inputs(torch.randn(3, 3, 16, 16)), torch.tensor([6, 9, 11])
    loss, logits = objective.loss(model, inputs, rows)
    s = model(*inputs).detach().double().sigmoid().numpy()
    targets = np.concatenate([teacher(*inputs).detach().double().sigmoid().numpy(), np.eye(12)[rows][:, 6:]], axis=1)
    expected = -(targets * np.log(s) + (1 - targets) * np.log(1 - s)).sum(axis=1).mean()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert logits.shape == (3, 6)
    loss.backward()
    assert model.head.weight.grad[:6].any()
    assert all(p.grad is None for p in objective.teacher.parameters())


def test_lwf_server_keeps_the_model_of_a_tasks_end():
    server, model, schedule = FedLwF(parse({"method": "fedlwf"})), small_model((2,)), Schedule([[0, 1], [2, 3, 4]], 2)
    server.refine(model, [], RoundContext(schedule, 1))
    assert server.broadcast(RoundContext(schedule, 2)) == {}
    server.refine(model, [], RoundContext(schedule, 2))
    kept, at_the_end = server.broadcast(RoundContext(schedule, 3)), model.export()
    model.load({name: array + 1 for name, array in at_the_end.items()})
    model.begin_task(3)
    assert kept["head.weight"].shape == (2, 12)
    assert set(kept) == {"backbone", "head.weight", "head.bias"}
    assert all((kept[name] == array).all() for name, array in at_the_end.items())
