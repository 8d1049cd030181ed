"""PIP: statistics, injected prototypes, participation weights and merged prototypes; numbers by hand or in float64."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from client_app.client import Node, handle
from client_app.objectives import pip as client_half
from client_app.objectives.base import LocalData
from client_app.objectives.pip import InjectedPrototypes, choose_copies, inject
from strategies.averaging import WeightedMean
from strategies.base import RoundContext, Update
from strategies.pip import PIP, merge_by_weight
from task.config.parsing import parse
from task.message import Packet
from task.method_options import Options
from task.models.feature_cache import Inputs
from task.models.model import Model, build_model
from task.prototypes.statistics import VarianceStatistics
from task.scenario.class_stream import Schedule
from task.scenario.scenario import build_scenario
from tests.helpers.small_models import frozen_model

D = 8
SCHEDULE = Schedule([[7, 2, 4], [5, 0]], 3)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def update(client, n, class_ids, counts, means, variances):
    statistics = {
        "class_ids": np.array(class_ids, np.int64),
        "counts": np.array(counts, np.int64),
        "means": np.array(means, np.float32),
        "variances": np.array(variances, np.float32),
    }
    return Update(client, n, {}, statistics)


def small_model(tasks: int) -> Model:
    return frozen_model(D, SCHEDULE.tasks[:tasks])


def numpy_loss(model, features, targets, rows):
    """Mean cross-entropy over the logits ``rows``, float64."""
    w, b = (p.detach().double().numpy()[rows] for p in (model.head.weight, model.head.bias))
    return -log_softmax(features @ w.T + b, axis=1)[np.arange(len(targets)), targets].mean()


# statistics


def test_variances_are_divided_by_n():
    """Eq. 8 of [1, 5], [3, 5] is mean [2, 5] and variance [1, 0]; a single image has none."""
    features = torch.tensor([[1.0, 5.0], [9.0, 9.0], [3.0, 5.0]])
    statistics = VarianceStatistics().compute(features, torch.tensor([4, 6, 4]), Options())
    assert {n: a.tolist() for n, a in statistics.items()} == {
        "class_ids": [4, 6],
        "counts": [2, 1],
        "means": [[2, 5], [9, 9]],
        "variances": [[pytest.approx(1), 0], [0, 0]],
    }


def test_variances_against_numpy():
    features, labels = torch.randn(50, D, generator=rng()), torch.arange(50) % 3
    statistics = VarianceStatistics().compute(features, labels, Options())
    for row, c in enumerate((0, 1, 2)):
        own = features.double().numpy()[labels.numpy() == c]
        assert np.allclose(statistics["means"][row], own.mean(axis=0), atol=1e-6)
        assert np.allclose(statistics["variances"][row], own.var(axis=0), rtol=1e-5)
    shapes = VarianceStatistics().expected(np.ones(3), {}, D, parse({"method": "pip"}))
    assert {n: a.shape for n, a in statistics.items() if n in shapes} == shapes
    assert {statistics[n].dtype for n in shapes} == {np.dtype(np.float32)}


# server half


def test_merging_by_class_is_merging_each_class():
    """Eq. 14 and 15 in plain float64 sums: class 2 from four clients, 7 from two, 5 from one alone."""
    random = np.random.default_rng(0)
    class_ids, weights = np.array([7, 2, 2, 5, 2, 7, 2]), np.array([30, 30, 4, 4, 90, 90, 7.0])
    means, variances = random.normal(size=(7, D)).astype(np.float32), random.random((7, D)).astype(np.float32)
    classes, merged_means, merged_variances = merge_by_weight(class_ids, weights, means, variances)
    assert classes.tolist() == [2, 5, 7]
    for row, c in enumerate((2, 5, 7)):
        w, m, v = (x[class_ids == c].astype(np.float64) for x in (weights, means, variances))
        mean = sum(w[i] * m[i] for i in range(len(w))) / sum(w)
        variance = sum(w[i] * (m[i] * m[i] + v[i]) for i in range(len(w))) / sum(w) - mean * mean
        assert np.allclose(merged_means[row], mean, rtol=1e-12, atol=1e-14)
        assert np.allclose(merged_variances[row], variance, rtol=1e-12, atol=1e-14)
    assert np.allclose(merged_means[1], means[3], rtol=1e-12)
    assert np.allclose(merged_variances[1], variances[3], rtol=1e-7)


def test_merging_with_sample_counts_pools_the_samples():
    """With omega = n the result is mean and variance (divided by N) of all samples together."""
    samples = [np.random.default_rng(i).normal(i, 1 + i, (n, 3)) for i, n in enumerate((4, 9, 2))]
    merged = merge_by_weight(
        np.zeros(3, np.int64),
        np.array([4.0, 9, 2]),
        np.stack([s.mean(axis=0) for s in samples]),
        np.stack([s.var(axis=0) for s in samples]),
    )
    everything = np.concatenate(samples)
    assert np.allclose(merged[1][0], everything.mean(axis=0))
    assert np.allclose(merged[2][0], everything.var(axis=0))


def test_rounding_never_makes_a_variance_negative():
    means = np.tile(np.linspace(1, 9999, 500, dtype=np.float32), (3, 1))
    shares = np.array([1, 3, 7]) / 11
    unclamped = (shares[:, None] * means**2).sum(axis=0) - (shares[:, None] * means).sum(axis=0) ** 2
    assert unclamped.min() < 0  # so there was something to clamp
    _, _, variances = merge_by_weight(np.zeros(3, np.int64), np.array([1.0, 3, 7]), means, np.zeros_like(means))
    assert variances.min() == 0


def test_participation_weighs_clients_over_several_rounds():
    """Weights rho |T|. Round 1: a 1*10, b 1*30. Round 2: a 2*10 alone. Round 3: a 3*10, b 2*30.

    With arrays of 1 from a and 5 from b: (10 + 150) / 40 = 4; 1; (30 + 300) / 90 = 11/3.
    """
    strategy, model = PIP(parse({"method": "pip"})), small_model(1)
    a, b = Update("a", 10, {"w": np.float32([1])}, {}), Update("b", 30, {"w": np.float32([5])}, {})
    weights, means = [], []
    for number, updates in enumerate(([a, b], [a], [b, a]), start=1):
        mean = WeightedMean()
        for update in updates:
            mean.add(update.arrays, strategy.weight(update))
        weights.append([strategy.weight(u) for u in updates])
        means.append(float(mean.arrays()["w"][0]))
        strategy.refine(model, updates, RoundContext(SCHEDULE, number))
    assert weights == [[10, 30], [20], [60, 30]]
    assert means == pytest.approx([4, 1, 11 / 3])


def test_merged_prototypes_use_the_same_weights():
    """Round 2 of a (n = 10, rho = 2) and round 1 of b (n = 30): omega 20, for both of a's classes, and 30.

    Class 7: mean (20 * 1 + 30 * 6) / 50 = 4, square (20 * (1 + 2) + 30 * (36 + 4)) / 50 = 25.2, variance 9.2.
    """
    strategy, model = PIP(parse({"method": "pip"})), small_model(1)
    first = update("a", 10, [7, 2], [5, 5], [[3.0], [8.0]], [[1.0], [1.0]])
    second = [
        update("a", 10, [7, 4], [5, 5], [[1.0], [9.0]], [[2.0], [3.0]]),
        update("b", 30, [7], [30], [[6.0]], [[4.0]]),
    ]
    assert strategy.broadcast(RoundContext(SCHEDULE, 1)) == {}
    for number, updates in ((1, [first]), (2, second)):
        metrics = strategy.refine(model, updates, RoundContext(SCHEDULE, number))
    sent = strategy.broadcast(RoundContext(SCHEDULE, 3))
    assert metrics == {"prototypes": 3}
    assert sent["rows"].tolist() == [1, 2, 0]  # of classes 2, 4 and 7; nobody reported class 2 in round 2: it stays
    assert sent["means"].ravel().tolist() == pytest.approx([8, 9, 4])
    assert sent["variances"].ravel().tolist() == pytest.approx([1, 3, 9.2])
    assert [sent[n].dtype for n in ("rows", "means", "variances")] == [np.int64, np.float32, np.float32]


def test_prototypes_of_an_ended_task_are_not_sent():
    strategy, model = PIP(parse({"method": "pip"})), small_model(1)
    old = update("a", 4, [7, 2], [2, 2], [[3.0], [8.0]], [[1.0], [1.0]])
    strategy.refine(model, [old], RoundContext(SCHEDULE, 3))
    assert strategy.broadcast(RoundContext(SCHEDULE, 4)) == {}
    assert strategy.refine(model, [], RoundContext(SCHEDULE, 4)) == {"prototypes": 0}
    assert strategy.broadcast(RoundContext(SCHEDULE, 5)) == {}
    new = update("a", 4, [5], [4], [[1.0]], [[1.0]])
    strategy.refine(model, [new], RoundContext(SCHEDULE, 5))
    assert strategy.broadcast(RoundContext(SCHEDULE, 6))["rows"].tolist() == [3]


def test_a_single_image_borrows_its_classs_variance():
    """Client b holds one image of class 7, client a ten with variance 4: b counts as 4 too, so sigma2 = 4 + between.

    Weights are 10 and 1, means 0 and 2: mean 2/11, between = (10 * 0 + 1 * 4) / 11 - (2/11)^2 = 40/121.
    """
    strategy, model = PIP(parse({"method": "pip"})), small_model(1)
    both = [
        update("a", 10, [7], [10], [[0.0]], [[4.0]]),
        update("b", 1, [7], [1], [[2.0]], [[0.0]]),
    ]
    strategy.refine(model, both, RoundContext(SCHEDULE, 1))
    assert float(strategy.prototypes["variances"][0, 0]) == pytest.approx(4 + 40 / 121)


# client half


@pytest.mark.parametrize(
    ("per_class", "batch_size", "most", "expected"),
    [
        ([32, 32], 64, 5, 5),  # 32 images of each class in a batch
        ([4, 4, 4], 64, 5, 3),  # 4 of each class: 1 + 3
        ([40] * 10, 30, 5, 2),  # 3 of each
        ([10, 2], 64, 5, 5),  # 6 on average
        ([1, 1], 64, 5, 1),  # never fewer than one copy
        ([40, 40], 64, 2, 2),
        ([40, 40], 64, 0, 0),
    ],
)
def test_number_of_copies(per_class, batch_size, most, expected):
    rows = np.repeat(np.arange(len(per_class)), per_class)
    assert choose_copies(rows, batch_size, most) == expected


def test_injected_vectors_are_means_and_points_along_sigma():
    """Eq. 11: (x - mu) / sigma is one number in 0..1 for each copy, the same in all dimensions."""
    means, deviations = torch.randn(3, D, generator=rng(1)), 0.5 + torch.rand(3, D, generator=rng(2))
    features = inject(means, deviations, 4, rng()).unflatten(0, (5, 3))
    assert torch.equal(features[0], means)
    steps = (features[1:] - means) / deviations  # [4, 3, D]
    assert torch.allclose(steps, steps[:, :, :1].expand_as(steps), atol=1e-5)
    drawn = steps[:, :, 0].flatten()
    assert (drawn.min() >= 0) & (drawn.max() <= 1)
    assert len(drawn.unique()) == 12


def objective(prototypes, classes=(5, 0), **keys):
    config = parse({"method": "pip", "prompt": "l2p", "batch-size": 6, **keys})
    return InjectedPrototypes(config, Packet(statistics=prototypes, config={"classes": list(classes)}))


def sent_prototypes():
    """Head rows 4 and 3, the second and the first row of the second task."""
    random = np.random.default_rng(3)
    return {
        "rows": np.array([4, 3]),
        "means": random.normal(size=(2, D)).astype(np.float32),
        "variances": random.random((2, D)).astype(np.float32),
    }


@pytest.mark.parametrize(("logits", "first"), [("current", 3), ("seen", 0)])
def test_injected_features_go_through_the_head_with_their_own_classes(logits, first):
    """Loss, gradient and targets against float64; head rows 3 and 4 are classes 5 and 0."""
    model, method = small_model(2), objective(sent_prototypes(), **{"pip-logits": logits, "pip-copies": 3})
    model.head.weight.data = torch.randn(5, D, generator=rng(4))
    data = LocalData(np.empty(0), np.empty(0), np.array([3] * 6), "none")
    method.begin_epoch(model, data, 0, rng(5))
    sent, steps = sent_prototypes(), torch.rand(4, 2, 1, generator=rng(5)).double().numpy()
    steps[0] = 0  # the means themselves
    wide = sent["means"].astype(np.float64), np.sqrt(sent["variances"].astype(np.float64))
    injected = np.concatenate([wide[0] + step * wide[1] for step in steps])
    images, rows = torch.randn(6, 3, 8, 8, generator=rng(6)), torch.full((6,), 3)
    model.prompt.penalty = -0.25
    loss, answers = method.loss(model, Inputs(images), rows)
    real = model.features(images).detach().double().numpy()
    expected = numpy_loss(
        model, np.concatenate([real, injected]), np.array([0] * 6 + [1, 0] * 4) + 3 - first, slice(first, 5)
    )
    assert float(loss.detach()) == pytest.approx(expected - 0.25, rel=1e-5)
    assert answers.shape == (6, 2)
    loss.backward()
    assert (model.head.weight.grad[:3].abs().max() == 0) == (first == 3)
    assert model.head.weight.grad[3:].abs().min() > 0


def test_the_injected_set_is_new_every_epoch():
    model, method = small_model(2), objective(sent_prototypes())
    data, stream, sets = LocalData(np.empty(0), np.empty(0), np.array([3] * 6), "none"), rng(), []
    for epoch in range(2):
        method.begin_epoch(model, data, epoch, stream)
        sets.append(method.injected_set[0])
    assert torch.equal(sets[0][:2], sets[1][:2])
    assert (sets[0][2:] != sets[1][2:]).all()


def test_without_global_prototypes_its_own_after_the_first_epoch(monkeypatch):
    """Algorithm 1, line 20: plain cross-entropy in the first epoch, then means and sigma of the local features."""
    features, calls = torch.randn(6, D, generator=rng(7)), []
    monkeypatch.setattr(client_half, "extract_features", lambda *arguments: calls.append(arguments) or features)
    model, method = small_model(2), objective({})
    data = LocalData(np.empty(0), np.arange(6), np.array([4, 3, 4, 4, 3, 4]), "none")
    images, rows = torch.randn(2, 3, 8, 8, generator=rng(8)), torch.tensor([3, 4])
    method.begin_epoch(model, data, 0, rng())
    assert (method.injected_set, calls) == (None, [])
    real = model.features(images).detach().double().numpy()
    assert float(method.loss(model, Inputs(images), rows)[0].detach()) == pytest.approx(
        numpy_loss(model, real, np.array([0, 1]), slice(3, 5)), rel=1e-5
    )
    for epoch in (1, 2):
        method.begin_epoch(model, data, epoch, rng())
    assert len(calls) == 1
    injected, targets = method.injected_set
    own = features.double().numpy()
    first, second = own[[1, 4]], own[[0, 2, 3, 5]]
    assert np.allclose(injected[:2], [first.mean(axis=0), second.mean(axis=0)], atol=1e-6)
    step = (injected[2:4].double().numpy() - injected[:2].double().numpy()) / [first.std(axis=0), second.std(axis=0)]
    assert np.allclose(step, step[:, :1].repeat(D, axis=1), atol=1e-4)
    assert targets.tolist() == [0, 1] * (1 + choose_copies(data.rows, 6, 5))


# both together


def test_local_statistics_are_of_the_current_tasks_expert(tiny):
    """What a client reports is f(x) with the prompt as it is trained, even where an older key is nearer."""
    config = parse(tiny | {"method": "pip", "local-epochs": 1, "learning-rate": 1e-6})
    scenario = build_scenario(config)
    model = build_model(config, scenario.task_sizes(1))
    node = Node({"partition-id": 0})
    message = {
        "task": 2,
        "round": 1,
        "server-round": 2,
        "ends-task": False,
        "backbone-sha256": model.backbone.sha256,
        "classes": scenario.schedule.current_classes(1),
        "run-config": json.dumps(config.for_clients()),
    }
    answers = []
    for sign in (1.0, -1.0):  # with the keys at q(x) or at its opposite
        query = model.query(torch.zeros(1, 3, 16, 16))[0]
        model.prompt.keys[0].data, model.prompt.keys[1].data = sign * query, -sign * query
        answers.append(handle("train", Packet(arrays=model.export(), config=dict(message)), node))
    means = [a.statistics["means"] for a in answers]
    assert np.allclose(*means, atol=1e-3)


def test_defaults_are_the_papers():
    config = parse({"method": "pip"})
    assert (config.prompt, config.prompt_length, config.blocks()) == ("dualprompt", 5, [0, 1, 2, 3, 4])
    assert (config.prompt_matching, config.options.copies, config.learning_rate) == (0.1, 5, 0.02)
    config = parse({"method": "pip", "prompt": "l2p"})
    assert (config.prompt_pool, config.prompt_length, config.learning_rate) == (10, 5, 0.02)


def test_a_round_after_the_first_receives_what_was_merged(tiny, monkeypatch):
    """Through whole messages: in the first round of each task nothing arrives, in the others the task's classes."""
    from tests.helpers.runs import run

    seen = []
    original = InjectedPrototypes.__init__

    def spy(self, config, packet):
        original(self, config, packet)
        seen.append(SimpleNamespace(task=packet.config["task"], sent=packet.statistics))

    monkeypatch.setattr(InjectedPrototypes, "__init__", spy)
    run(tiny | {"method": "pip", "rounds-per-task": 2})
    assert [(s.task, bool(s.sent)) for s in seen[::3]] == [(1, False), (1, True), (2, False), (2, True)]
    rows = {1: [0, 1, 2, 3, 4, 5], 2: [6, 7, 8, 9, 10, 11]}
    assert all(sorted(s.sent["rows"]) == rows[s.task] for s in seen if s.sent)
