"""FPPL: the fused prompt, L_ur, the prototype pool and debiasing; numbers by hand or in float64 NumPy."""

import numpy as np
import pytest
import torch
from scipy.special import softmax

from client_app.objectives.base import LocalData, Objective
from client_app.objectives.fppl import FPPLObjective, unified_loss
from strategies.base import RoundContext, Update
from strategies.fppl import FPPL, debias
from task.config.parsing import parse
from task.message import Packet
from task.method_options import FPPLOptions
from task.models.feature_cache import Inputs
from task.models.head import Head
from task.models.model import build_model
from task.prompts.fused import FusedPrompt
from task.scenario.class_stream import Schedule
from tests.helpers.prompts import prompt_config
from tests.helpers.prototypes import mean_update
from tests.helpers.small_models import head_alone

D = 6
SCHEDULE = Schedule([[7, 2], [5, 0]], 2)  # class of head row 0, 1, 2, 3 = 7, 2, 5, 0


def fused(tasks, blocks=(0, 2), length=3):
    prompt = FusedPrompt(prompt_config(blocks, length), D)
    for task in range(tasks):
        prompt.begin_task(task)
    return prompt


def names(prompt):
    return {name for name, p in prompt.named_parameters() if p.requires_grad}


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def rows(places):
    """One-hot means [len(places), D]."""
    return np.eye(D)[places]


def test_fused_prompt_equals_float64_numpy():
    """Eq. 2 with a scale of 3 and three tasks, per image."""
    prompt, rng = fused(3), np.random.default_rng(0)
    pool, psi, query = rng.normal(size=(3, 2, 3, D)), rng.normal(size=(3, D)), rng.normal(size=(5, D))
    for p, value in zip(prompt.prompts, pool, strict=True):
        p.data = torch.tensor(value, dtype=torch.float32)
    prompt.psi.data, prompt.scale.data = torch.tensor(psi, dtype=torch.float32), torch.tensor([3.0])
    prefixes = prompt(torch.tensor(query, dtype=torch.float32))
    g = softmax(3 * unit(query) @ unit(psi).T, axis=1)
    assert list(prefixes) == [0, 2]
    for j, block in enumerate((0, 2)):
        expected = np.array([sum(g[b, i] * pool[i, j] for i in range(3)) for b in range(5)])
        assert np.allclose(prefixes[block].detach(), expected, atol=1e-5)


def test_prompts_start_uniform_then_as_copies_and_freeze_when_their_task_ends():
    prompt = fused(1, length=500)
    first = prompt.prompts[0].detach().clone()
    assert first.shape == (2, 500, D)
    assert first.min() >= -1
    assert first.max() <= 1
    assert first.var() == pytest.approx(1 / 3, rel=0.05)  # of uniform(-1, 1)
    assert names(prompt) == {"prompts.0"}  # with one prompt the weights are 1 whatever psi and the scale are
    prompt.prompts[0].data += 1
    prompt.begin_task(1)
    assert torch.equal(prompt.prompts[1], first + 1)
    assert torch.equal(prompt.prompts[0], first + 1)
    assert names(prompt) == {"prompts.1", "psi", "scale"}
    before = prompt.psi.detach().clone()
    prompt.psi.data[0] += 1
    prompt.begin_task(2)
    assert names(prompt) == {"prompts.2", "psi", "scale"}
    assert prompt.psi.shape == (3, D)
    assert torch.equal(prompt.psi[0], before[0] + 1)
    assert torch.equal(prompt.psi[1], before[1])
    assert prompt.scale.tolist() == [1]


def test_prompts_repeat_with_the_seed():
    def start(seed):
        prompt = FusedPrompt(prompt_config([0], 2, seed=seed), D)
        prompt.begin_task(0)
        return torch.cat([prompt.prompts[0].flatten(), prompt.psi.flatten()])

    assert torch.equal(start(3), start(3))
    assert not torch.equal(start(3), start(4))


def test_unified_loss_equals_float64_numpy():
    """Eq. 6 with tau = 0.2; the third image's class has no prototype: its loss is 0 and it still counts in the mean."""
    rng = np.random.default_rng(1)
    f, G, places = rng.normal(size=(4, D)), rng.normal(size=(3, D)), np.array([2, 0, -100, 2])
    p = softmax(unit(f) @ unit(G).T / 0.2, axis=1)
    expected = -(np.log(p[0, 2]) + np.log(p[1, 0]) + np.log(p[3, 2])) / 4
    loss = unified_loss(torch.tensor(f), torch.tensor(G), torch.tensor(places), 0.2)
    assert float(loss) == pytest.approx(expected, rel=1e-10)


def test_the_local_loss_adds_both_terms(tiny):
    """Eq. 8 on a real model in its second task: prototypes of rows 6 and 8 only, images of rows 6, 7, 8; tau = 0.5."""
    config = parse(tiny | {"method": "fppl", "fppl-tau": 0.5})
    model = build_model(config, [6, 6])
    rng = np.random.default_rng(2)
    sent = {"rows": np.array([8, 6]), "means": rng.normal(size=(2, model.backbone.dim)).astype(np.float32)}
    objective = FPPLObjective(config, Packet(statistics=sent))
    targets = torch.tensor([6, 7, 8])
    objective.begin_epoch(model, LocalData(np.empty(0), np.empty(0), targets.numpy(), "none"), 0, torch.Generator())
    torch.manual_seed(0)
    images = torch.randn(3, 3, 16, 16)
    loss, logits = objective.loss(model, Inputs(images), targets)
    with torch.no_grad():
        f = model.features(images).double().numpy()
        z = model(images).double().numpy()[:, 6:]
    cross_entropy = -np.log(softmax(z, axis=1)[np.arange(3), [0, 1, 2]]).mean()
    p = softmax(unit(f) @ unit(sent["means"].astype(np.float64)).T / 0.5, axis=1)
    assert float(loss.detach()) == pytest.approx(cross_entropy - (np.log(p[0, 1]) + np.log(p[2, 0])) / 3, rel=1e-4)
    assert logits.shape == (3, 6)
    bare, _ = FPPLObjective(config, Packet()).loss(model, Inputs(images), targets)
    plain, _ = Objective(config, Packet()).loss(model, Inputs(images), targets)
    assert torch.equal(bare, plain)


def test_global_prototypes_are_a_plain_mean_over_holders():
    """Eq. 5: class 7 from 1 and 99 images is the mid-point; counts play no part."""
    strategy, model = FPPL(parse({"method": "fppl"})), head_alone(D, 2)
    assert strategy.broadcast(RoundContext(SCHEDULE, 1)) == {}
    updates = [mean_update("a", [7, 2], rows([0, 1]), [1, 5]), mean_update("b", [7], rows([2]), [99])]
    strategy.refine(model, updates, RoundContext(SCHEDULE, 1))
    sent = strategy.broadcast(RoundContext(SCHEDULE, 2))
    assert sent["rows"].tolist() == [0, 1]
    assert sent["means"].tolist() == [[0.5, 0, 0.5, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert (sent["rows"].dtype, sent["means"].dtype) == (np.int64, np.float32)
    assert strategy.broadcast(RoundContext(SCHEDULE, 3)) == {}  # no prototype of the new task has come


def test_the_pool_keeps_each_finished_tasks_last_local_prototypes(monkeypatch):
    """Rounds 1 and 2 are task 1, rounds 3 and 4 task 2; in round 4 nobody reports class 5."""
    seen = []
    monkeypatch.setattr("strategies.fppl.debias", lambda head, means, rows, *_: seen.append((means, rows)) or 0.25)
    strategy, model = FPPL(parse({"method": "fppl"})), head_alone(D, 4)
    reports = [
        [mean_update("a", [7, 2], rows([0, 1]))],
        [mean_update("a", [7], rows([2])), mean_update("b", [2, 7], rows([3, 4]))],
        [mean_update("a", [5], rows([0])), mean_update("c", [0, 5], rows([1, 2]))],
        [Update("a", 4, {}, {}), mean_update("b", [0], rows([5]))],
    ]
    for server_round, updates in enumerate(reports, start=1):
        told = strategy.refine(model, updates, RoundContext(SCHEDULE, server_round))
        assert told == {"debias-loss": 0.25, "prototypes": len(seen[-1][1])}
    pools = [sorted(zip(r.tolist(), m.argmax(1).tolist(), strict=True)) for m, r in seen]
    task_1 = [(0, 2), (0, 4), (1, 3)]
    assert pools == [
        [(0, 0), (1, 1)],
        task_1,
        [*task_1, (2, 0), (2, 2), (3, 1)],
        [*task_1, (2, 0), (2, 2), (3, 5)],
    ]


def test_refining_without_any_prototype_changes_nothing():
    model = head_alone(D, 2)
    before = model.head.weight.detach().clone()
    assert FPPL(parse({"method": "fppl"})).refine(model, [], RoundContext(SCHEDULE, 1)) == {}
    assert torch.equal(before, model.head.weight)


def test_debiasing_equals_float64_numpy():
    """Eq. 4: two epochs of 3 steps (4, 4, 2 prototypes) of Adam, over the three rows that have prototypes."""
    options = FPPLOptions(debias_epochs=2, debias_batch_size=4, debias_learning_rate=0.05)
    rng = np.random.default_rng(5)
    x, y, head = rng.normal(size=(10, D)).astype(np.float32), rng.integers(0, 3, 10), Head(D, 1)
    head.grow(4)
    w = np.hstack([head.weight.detach().double().numpy(), np.zeros((4, 1))])
    loss = debias(head, torch.tensor(x), torch.tensor(y), options, torch.Generator().manual_seed(7))

    order, losses = torch.Generator().manual_seed(7), []
    m, v, wide = np.zeros_like(w), np.zeros_like(w), np.hstack([x.astype(np.float64), np.ones((10, 1))])
    for epoch in range(2):
        shuffled = torch.randperm(10, generator=order).numpy()
        for i, batch in enumerate((shuffled[:4], shuffled[4:8], shuffled[8:])):
            p = np.pad(softmax(wide[batch] @ w[:3].T, axis=1), ((0, 0), (0, 1)))
            losses.append(-np.log(p[np.arange(len(batch)), y[batch]]).sum())
            p[np.arange(len(batch)), y[batch]] -= 1
            g, step = p.T @ wide[batch] / len(batch), 3 * epoch + i + 1
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            w = w - 0.05 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    assert loss == pytest.approx(sum(losses[3:]) / 10, rel=1e-4)
    assert np.allclose(head.weight.detach(), w[:, :-1], atol=1e-4)
    assert np.allclose(head.bias.detach(), w[:, -1], atol=1e-4)


def test_a_class_without_prototype_does_not_compete():
    """Class 2, head row 1, is reported by nobody: its row stays, and the others learn as if it were not there."""
    options, prototypes = FPPLOptions(), torch.randn(4, D, generator=torch.Generator().manual_seed(0))
    three, two = head_alone(D, 3).head, head_alone(D, 3).head
    two.weight.data, two.bias.data = two.weight.data[[0, 2]], two.bias.data[[0, 2]]
    start = three.weight.detach()[1].clone()
    losses = [
        debias(head, prototypes, rows, options, torch.Generator().manual_seed(1))
        for head, rows in ((three, torch.tensor([0, 2, 2, 0])), (two, torch.tensor([0, 1, 1, 0])))
    ]
    assert losses[0] == losses[1]
    assert torch.equal(three.weight[[0, 2]], two.weight)
    assert torch.equal(three.weight[1], start)


def test_every_round_and_seed_debiases_in_an_order_of_its_own() -> None:
    def after(server_round: int, seed: int = 0) -> torch.Tensor:
        strategy, model = FPPL(parse({"method": "fppl", "fppl-debias-batch-size": 1, "seed": seed})), head_alone(D, 2)
        updates = [mean_update("a", [7, 2], rows([0, 1])), mean_update("b", [7, 2], rows([2, 3]))]
        strategy.refine(model, updates, RoundContext(SCHEDULE, server_round))
        return model.head.weight.detach()

    assert torch.equal(after(1), after(1))
    assert not torch.equal(after(1), after(2))
    assert not torch.equal(after(1), after(3))  # the first round of the next task
    assert not torch.equal(after(1), after(1, seed=1))
