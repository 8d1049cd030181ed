"""FedProK: translated features, counts, plain mean, prototype fusion; numbers by hand or in float64 NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from client_app.client import Node, handle
from client_app.objectives.base import LocalData, Objective
from client_app.objectives.fedprok import FedProKObjective, nearest_class
from strategies.base import RoundContext, Update
from strategies.fedprok import FedProK, fuse
from task.config.parsing import parse
from task.message import Packet
from task.models.evaluation import extract_features
from task.models.feature_cache import Inputs
from task.models.model import build_model
from task.models.preprocessing import prepare
from task.scenario.class_stream import Schedule
from task.scenario.client_data import client_task_data
from task.scenario.scenario import build_scenario
from tests.helpers.prototypes import mean_update
from tests.helpers.runs import train_message

D = 4
SCHEDULE = Schedule([[7, 2], [5, 0]], 2)  # class of head row 0, 1, 2, 3 = 7, 2, 5, 0


def test_nearest_is_by_angle_and_not_by_distance():
    """[0.6, 0.6] lies closer to [1, 0.2], but [90, 0.9] points more nearly the same way."""
    old = torch.tensor([[1.0, 0.2], [0.0, 50.0], [-1.0, -1.0]])
    new = torch.tensor([[0.6, 0.6], [90.0, 0.9], [-3.0, -2.0]])
    assert nearest_class(old, new).tolist() == [1, 0, 2]


@pytest.fixture
def local(tiny):
    """A model in its second task with 10 local images of rows 6, 7 and 9, and prototypes of the old rows 1, 4, 5."""
    config = parse(tiny | {"method": "fedprok", "prompt": "shared", "fedprok-features": "every-task"})
    scenario, model = build_scenario(config), build_model(config, [6, 6])
    with torch.no_grad():
        model.head.weight.mul_(20)  # so that the losses differ clearly
    per_row = {6: 5, 7: 2, 9: 3}
    labels = [scenario.schedule.tasks[1][row - 6] for row in per_row]
    positions = [
        np.flatnonzero(scenario.dataset.train_labels == c)[:n] for c, n in zip(labels, per_row.values(), strict=True)
    ]
    data = LocalData(scenario.dataset.train_images, np.concatenate(positions), np.repeat([6, 7, 9], [5, 2, 3]), "none")
    features = extract_features(model, data.images, data.positions).double().numpy()
    means = np.array([features[data.rows == row].mean(axis=0) for row in per_row])
    noise = np.random.default_rng(0).normal(scale=0.01, size=means.shape)
    sent = {"rows": np.array([4, 1, 5]), "means": (2 * means[[0, 2, 0]] + noise).astype(np.float32)}
    objective = FedProKObjective(config, Packet(statistics=sent))
    objective.begin_epoch(model, data, 0, torch.Generator())
    return config, model, data, features, means, sent, objective


def test_the_loss_equals_float64_numpy_with_explicit_loops(local):
    """Old rows 4 and 5 lie nearest to local row 6 (5 images each), old row 1 to row 9 (3): 13 pseudo features."""
    _, model, data, features, means, sent, objective = local
    nearest = {4: 6, 1: 9, 5: 6}
    x, y = list(features), list(data.rows)
    for p, mu_p in zip(sent["rows"], sent["means"].astype(np.float64), strict=True):
        n = nearest[p]
        mu_n = means[[6, 7, 9].index(n)]
        for f, row in zip(features, data.rows, strict=True):
            if row == n:
                x.append(f + mu_p - mu_n)
                y.append(p)
    assert len(x) == 10 + 13
    w, b = model.head.weight.detach().double().numpy(), model.head.bias.detach().double().numpy()
    expected = -log_softmax(np.array(x) @ w.T + b, axis=1)[np.arange(23), y].mean()
    images = prepare(data.images[data.positions], model.backbone)
    loss, logits = objective.loss(model, Inputs(images), torch.from_numpy(data.rows))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert np.allclose(logits.detach(), (features @ w.T + b)[:, 6:], atol=1e-3)


def test_what_is_current_here_is_not_translated_and_what_others_begin_is_unknown(tiny):
    """Rows 4, 6 and 9 are this client's: old row 4 is not translated, rows 7, 8, 10 and 11 take no part.

    Old row 1 lies nearest to row 9 and old row 5 to row 4: pseudo features as many as these have images, 3 and 4.
    """
    config = parse(tiny | {"method": "fedprok", "prompt": "shared"})
    scenario, model = build_scenario(config), build_model(config, [6, 6])
    model.set_active_rows(np.array([9, 4, 6]))
    with torch.no_grad():
        model.head.weight.mul_(20)
    sizes = {4: 4, 6: 5, 9: 3}
    order = scenario.schedule.seen_classes(1)
    positions = [np.flatnonzero(scenario.dataset.train_labels == order[row])[:n] for row, n in sizes.items()]
    data = LocalData(scenario.dataset.train_images, np.concatenate(positions), np.repeat([4, 6, 9], [4, 5, 3]), "none")
    features = extract_features(model, data.images, data.positions).double().numpy()
    means = {row: features[data.rows == row].mean(axis=0) for row in sizes}
    sent = {"rows": np.array([4, 1, 5]), "means": np.array([means[6], 2 * means[9], 3 * means[4]], np.float32)}
    objective = FedProKObjective(config, Packet(statistics=sent))
    objective.begin_epoch(model, data, 0, torch.Generator())
    x, y = [*features], [*data.rows]
    for old, near in ((1, 9), (5, 4)):
        mu = sent["means"][list(sent["rows"]).index(old)].astype(np.float64)
        x += [f + mu - means[near] for f in features[data.rows == near]]
        y += [old] * sizes[near]
    known_rows = [0, 1, 2, 3, 4, 5, 6, 9]
    w, b = (p.detach().double().numpy()[known_rows] for p in (model.head.weight, model.head.bias))
    picked = log_softmax(np.array(x) @ w.T + b, axis=1)[np.arange(len(y)), [known_rows.index(row) for row in y]]
    images = prepare(data.images[data.positions], model.backbone)
    loss, logits = objective.loss(model, Inputs(images), torch.from_numpy(data.rows))
    assert len(y) == 12 + 3 + 4
    assert float(loss.detach()) == pytest.approx(-picked.mean(), rel=1e-4)
    assert logits.shape == (12, 3)
    assert torch.allclose(logits, model(images)[:, [4, 6, 9]])


def test_with_images_of_all_classes_of_the_prototypes_it_is_the_objective_of_the_base(local):
    config, model, data, *_, sent, _ = local
    model.set_active_rows(np.array([1, 4, 5, 6, 7, 9]))
    data = replace(data, rows=np.array([1, 4, 5, 6, 7, 9, 1, 4, 5, 6]))
    objective = FedProKObjective(config, Packet(statistics=sent))
    objective.begin_epoch(model, data, 0, torch.Generator())
    inputs, rows = Inputs(prepare(data.images[data.positions], model.backbone)), torch.from_numpy(data.rows)
    assert torch.equal(objective.loss(model, inputs, rows)[0], Objective(config, Packet()).loss(model, inputs, rows)[0])


def test_an_old_class_of_which_a_client_has_no_image_is_translated_though_it_is_current_here(local):
    """A class with more holders than images leaves some without: rows 1 and 4 are such ones here.

    Without a pseudo feature the loss would only push them down.
    """
    config, model, data, *_, sent, plain = local
    model.set_active_rows(np.array([1, 4, *range(6, 12)]))
    objective = FedProKObjective(config, Packet(statistics=sent))
    objective.begin_epoch(model, data, 0, torch.Generator())
    inputs, rows = Inputs(prepare(data.images[data.positions], model.backbone)), torch.from_numpy(data.rows)
    assert torch.equal(objective.loss(model, inputs, rows)[0], plain.loss(model, inputs, rows)[0])


def test_each_old_class_gets_as_many_pseudo_features_per_epoch_as_its_nearest_has_images(local, monkeypatch):
    """Batches of 4, 4 and 2 images: the counts add up to 5, 5 and 3 whatever the batches."""
    _, model, data, *_, objective = local
    targets = []
    real = torch.nn.functional.cross_entropy
    monkeypatch.setattr("torch.nn.functional.cross_entropy", lambda z, t: targets.append(t) or real(z, t))
    for batch in torch.randperm(10, generator=torch.Generator().manual_seed(1)).split(4):
        images = prepare(data.images[data.positions[batch.numpy()]], model.backbone)
        objective.loss(model, Inputs(images), torch.from_numpy(data.rows)[batch])
    counts = torch.cat(targets).bincount(minlength=12).tolist()
    assert counts == [0, 3, 0, 0, 5, 5, 5, 2, 0, 3, 0, 0]


def test_pseudo_features_train_the_head_and_not_the_prompt(local):
    """The prompt's gradient is that of the 10 real features alone, in a mean over 23."""
    _, model, data, *_, objective = local
    images, rows = prepare(data.images[data.positions], model.backbone), torch.from_numpy(data.rows)
    loss, _ = objective.loss(model, Inputs(images), rows)
    gradients = torch.autograd.grad(loss, [model.prompt.prefix, model.head.weight])
    real = torch.nn.functional.cross_entropy(model(images), rows, reduction="sum") / 23
    expected = torch.autograd.grad(real, [model.prompt.prefix, model.head.weight])
    assert torch.allclose(gradients[0], expected[0], atol=1e-6)
    assert not torch.allclose(gradients[1], expected[1], atol=1e-6)


def test_class_means_are_those_before_the_first_epoch(local):
    _, model, data, *_, objective = local
    before = objective.shifts.clone()
    with torch.no_grad():
        model.prompt.prefix.normal_(generator=torch.Generator().manual_seed(2))
    objective.begin_epoch(model, data, 1, torch.Generator())
    assert torch.equal(objective.shifts, before)
    objective.begin_epoch(model, data, 0, torch.Generator())
    assert not torch.equal(objective.shifts, before)


def test_without_prototypes_it_is_the_objective_of_the_base(local):
    config, model, data, *_ = local
    images, rows = prepare(data.images[data.positions], model.backbone), torch.from_numpy(data.rows)
    objective = FedProKObjective(config, Packet())
    objective.begin_epoch(model, data, 0, torch.Generator())
    assert torch.equal(
        objective.loss(model, Inputs(images), rows)[0], Objective(config, Packet()).loss(model, Inputs(images), rows)[0]
    )


def prototypes(class_ids, means):
    return {"class_ids": np.array(class_ids), "means": np.array(means, np.float32)[:, None]}


def test_fusion_by_hand():
    """Class 2 is known: 0.25 * 8 + 0.75 * 4 = 5; class 9 is new; class 5 is not reported (eq. 9)."""
    old = prototypes([5, 2], [6, 4])
    fused = fuse(old, prototypes([2, 9], [8, 1]), 0.25)
    assert (fused["class_ids"].tolist(), fused["means"].tolist()) == ([2, 9], [[5], [1]])
    assert old["means"].tolist() == [[6], [4]]
    assert fuse({}, fused, 0.25)["means"].tolist() == [[5], [1]]


FIRST = [
    mean_update("a", [7], [[4] * D], [1]),
    mean_update("b", [2, 7], [[1] * D, [8] * D], [2, 3]),  # the mean of class 7 is 28 / 4 = 7
]


@pytest.mark.parametrize(("fusion", "seven"), [("tasks", 3), ("rounds", 5)])
def test_rounds_of_one_task_replace_or_are_mixed(fusion, seven):
    """Class 7 comes again, as 3: alone it is 3, mixed with the round before 0.5 * 3 + 0.5 * 7 = 5.

    Class 2, which does not come again, stays. Prototypes go out in task 2 only, class 7 as head row 0.
    """
    strategy = FedProK(parse({"method": "fedprok", "fedprok-fusion": fusion}))
    model = None  # fusion does not touch it
    assert strategy.broadcast(RoundContext(SCHEDULE, 1)) == {}
    assert strategy.refine(model, FIRST, RoundContext(SCHEDULE, 1)) == {"prototypes": 2.0}
    assert strategy.broadcast(RoundContext(SCHEDULE, 2)) == {}
    strategy.refine(model, [mean_update("a", [7], [[3] * D], [9]), Update("b", 3, {}, {})], RoundContext(SCHEDULE, 2))
    sent = strategy.broadcast(RoundContext(SCHEDULE, 3))
    assert dict(zip(sent["rows"].tolist(), sent["means"].tolist(), strict=True)) == {1: [1] * D, 0: [seven] * D}
    assert (sent["rows"].dtype, sent["means"].dtype) == (np.int64, np.float32)
    strategy.refine(model, [mean_update("a", [5, 0], [[3] * D, [2] * D], [9, 1])], RoundContext(SCHEDULE, 3))
    assert sorted(strategy.broadcast(RoundContext(SCHEDULE, 4))["rows"].tolist()) == [0, 1]


def test_a_class_that_comes_in_a_later_task_is_mixed_with_its_prototype_of_the_earlier_one():
    """Class 7 has 7 after task 1. In task 2 other clients meet it, as 1 and then as 9: 0.25 * 9 + 0.75 * 7 = 7.5.

    The first of these two rounds leaves no trace; with fusion of rounds it would: 0.25 * 9 + 0.75 * 5.5 = 6.375.
    """
    for fusion, expected in (("tasks", 7.5), ("rounds", 6.375)):
        strategy = FedProK(parse({"method": "fedprok", "fedprok-beta": 0.25, "fedprok-fusion": fusion}))
        strategy.refine(None, FIRST, RoundContext(SCHEDULE, 1))
        strategy.refine(None, [], RoundContext(SCHEDULE, 2))
        for server_round, mean in ((3, 1), (4, 9)):
            strategy.refine(None, [mean_update("c", [7], [[mean] * D], [5])], RoundContext(SCHEDULE, server_round))
        sent = strategy.broadcast(RoundContext(SCHEDULE, 4))
        assert dict(zip(sent["rows"].tolist(), sent["means"][:, 0].tolist(), strict=True)) == {0: expected, 1: 1}


RESNET = {"prompt": "none", "backbone": "resnet18_cifar", "backbone-weights": "random"}


@pytest.mark.parametrize(
    ("keys", "features"), [({"prompt": "shared"}, {"prompt.prefix"}), (RESNET, {"backbone"})], ids=["prompt", "resnet"]
)
def test_from_the_second_task_on_only_the_head_learns_and_is_sent(keys, features, tiny):
    head = {"head.weight", "head.bias"}
    for task, frozen, sent_back in (
        (0, "first-task", head | features),
        (1, "first-task", head),
        (1, "every-task", None),
    ):
        config = parse(tiny | keys | {"method": "fedprok", "fedprok-features": frozen})
        message = train_message(config, task)
        answer = handle("train", message, Node({"partition-id": 0}))
        assert set(message.arrays) == head | features
        assert set(answer.arrays) == (sent_back or head | features)
        assert all((answer.arrays[name] != message.arrays[name]).any() for name in answer.arrays)
        model = build_model(config, [6, 6][: task + 1])
        model.load(answer.arrays)  # as the server does with their mean
        assert all((model.export()[name] == array).all() for name, array in answer.arrays.items())


def test_running_statistics_of_a_frozen_resnet_stay(tiny):
    config = parse(tiny | RESNET | {"method": "fedprok"})
    for sizes, same in (([6], False), ([6, 6], True)):
        model = build_model(config, sizes).train()
        before = model.packed_backbone().detach()
        model(torch.randn(4, 3, 32, 32))
        assert torch.equal(model.packed_backbone().detach(), before) == same


def test_prototypes_are_of_the_model_that_came_or_of_the_one_that_goes(tiny):
    """Algorithm 1, line 4: class means under the server's model, here computed from the message's own arrays."""
    means = {}
    for prototypes in ("before", "after"):
        config = parse(tiny | {"method": "fedprok", "prompt": "shared", "fedprok-prototypes": prototypes})
        message = train_message(config)
        answer = handle("train", message, Node({"partition-id": 0}))
        model, dataset = build_model(config, [6]), build_scenario(config).dataset
        model.load(message.arrays if prototypes == "before" else answer.arrays)
        positions = client_task_data(config, 0, 0, 0, False).positions
        features = extract_features(model, dataset.train_images, positions).double().numpy()
        labels = dataset.train_labels[positions]
        expected = [features[labels == c].mean(axis=0) for c in answer.statistics["class_ids"]]
        means[prototypes] = answer.statistics["means"]
        assert np.allclose(means[prototypes], expected, atol=1e-4)
    assert np.abs(means["before"] - means["after"]).max() > 1e-3
