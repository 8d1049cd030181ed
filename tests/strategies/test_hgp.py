"""HGP's server half: averaging, mixture weights, memory, rebalancing; numbers by hand or in float64 NumPy."""

import math

import numpy as np
import pytest
import torch
from scipy.special import softmax

from strategies.base import RoundContext, Update
from strategies.hgp import HGP
from strategies.rebalancing import (
    RebalanceSettings,
    mixture_weights,
    rebalance,
    replace_class_gaussians,
)
from task.config.parsing import parse
from task.models.head import Head
from task.models.model import Model
from task.prototypes.gaussians import Gaussians
from task.scenario.class_stream import Schedule
from tests.helpers.small_models import frozen_model

D = 8
SCHEDULE = Schedule([[7, 2], [5, 0]], 2)  # class of head row 0, 1, 2, 3 = 7, 2, 5, 0


def gaussians(class_ids, counts, seed=0, dim=D):
    rng = torch.Generator().manual_seed(seed)
    P = len(class_ids)
    means = 2 * torch.randn(P, dim, generator=rng)
    deviations = torch.rand(P, dim, generator=rng)
    return Gaussians(torch.tensor(class_ids), torch.tensor(counts), means, deviations, torch.zeros(P, 0, dim))


def update(client, class_ids, counts, seed):
    """A client's answer with the statistics of the classes named; the numbers depend on ``seed``."""
    rng = np.random.default_rng(seed)
    statistics = {
        "class_ids": np.array(class_ids),
        "counts": np.array(counts),
        "means": rng.normal(size=(len(class_ids), D)).astype(np.float32),
        "variances": rng.random((len(class_ids), D)).astype(np.float32),
    }
    return Update(client, int(sum(counts)), {}, statistics)


def model_after(tasks: int) -> Model:
    """A model whose head has the rows of so many tasks."""
    return frozen_model(D, SCHEDULE.tasks[:tasks])


def hgp(**keys):
    keys = {f"hgp-{name.replace('_', '-')}": value for name, value in keys.items()}
    few = {} if keys.get("hgp-rebalance") == "off" else {"hgp-samples-per-class": 16}  # refused where nothing is drawn
    return HGP(parse({"method": "hgp", **few, **keys}))


BANK = ([7, 2, 7, 2, 5], [1, 6, 3, 2, 4])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("uniform", [1 / 12, 6 / 24, 3 / 12, 2 / 24, 1 / 3]),  # 1/3 each: 7 has 1 + 3 images, 2 has 6 + 2, 5 has 4
        ("count", [1 / 16, 6 / 16, 3 / 16, 2 / 16, 4 / 16]),
    ],
)
def test_mixture_weights_by_hand(kind, expected):
    weights = mixture_weights(gaussians(*BANK), kind)
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)


def test_whole_classes_are_replaced():
    """Class 2 came from two clients and now comes from one; class 7 is not reported and stays, class 5 is new."""
    bank, fresh = gaussians([7, 2, 2], [1, 2, 3], seed=1), gaussians([5, 2], [4, 5], seed=2)
    assert replace_class_gaussians(None, fresh) is fresh
    merged = replace_class_gaussians(bank, fresh)
    assert (merged.class_ids.tolist(), merged.counts.tolist()) == ([7, 5, 2], [1, 4, 5])
    assert torch.equal(merged.means, torch.cat([bank.means[:1], fresh.means]))
    assert torch.equal(merged.deviations, torch.cat([bank.deviations[:1], fresh.deviations]))


def numpy_loss(w, b, x, y, tau):
    """Cross-entropy of a linear layer, of plain or normalised logits, and its gradient with respect to the logits."""
    logits = x @ w.T + b
    length = np.linalg.norm(logits, axis=1, keepdims=True)
    z = logits / length / tau if tau else logits
    p = softmax(z, axis=1)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    p[np.arange(len(y)), y] -= 1
    g = p / len(y)
    if tau:
        unit = logits / length
        g = (g - (g * unit).sum(axis=1, keepdims=True) * unit) / (length * tau)
    return loss, g


def numpy_rebalance(w, b, sets, orders, options):
    """SGD with momentum (v <- mu v + g, theta <- theta - eta v), eta = eta_0 (1 + cos(pi t / T)) / 2; in place."""
    vw, vb = np.zeros_like(w), np.zeros_like(b)
    batches = [order[i : i + options.batch_size] for order in orders for i in range(0, len(order), options.batch_size)]
    per_epoch = len(batches) // len(orders)
    losses = []
    for step, batch in enumerate(batches):
        x, y = sets[step // per_epoch]
        loss, g = numpy_loss(w, b, x[batch], y[batch], options.logit_temperature)
        rate = options.learning_rate * (1 + math.cos(math.pi * step / len(batches))) / 2
        vw, vb = options.momentum * vw + g.T @ x[batch], options.momentum * vb + g.sum(axis=0)
        w -= rate * vw
        b -= rate * vb
        losses.append(loss * len(batch))
    return sum(losses[-per_epoch:]) / len(orders[0])


@pytest.mark.parametrize("tau", [0.0, 0.5])
@pytest.mark.parametrize("draw", ["epoch", "once"])
def test_rebalancing_equals_float64_numpy(monkeypatch, draw, tau):
    """Two epochs of 4 steps, the last of them smaller; classes 2, 5, 7 of 4 rows, class 0 not in the bank."""
    options = RebalanceSettings(
        samples_per_class=10, epochs=2, batch_size=8, learning_rate=0.5, draw=draw, scale=3.0, logit_temperature=tau
    )
    noise = np.random.default_rng(4)
    sets = [(noise.normal(size=(30, D)), noise.choice([2, 5, 7], 30)) for _ in range(2)]
    calls = []

    def fixed(bank, weights, total, scale, rng):
        calls.append((weights.tolist(), total, scale))
        x, y = sets[len(calls) - 1]
        return torch.tensor(x, dtype=torch.float32), torch.tensor(y)

    monkeypatch.setattr(Gaussians, "sample", fixed)
    head, bank, order = Head(D, 3), gaussians([7, 2, 7, 5], [1, 5, 3, 2]), [7, 2, 5, 0]
    head.grow(4)
    before = head.weight.detach().clone(), head.bias.detach().clone()
    w, b = before[0].double().numpy()[:3].copy(), before[1].double().numpy()[:3].copy()
    loss = rebalance(head, bank, torch.tensor([1, 2, 0]), options, torch.Generator().manual_seed(11))

    shuffling = torch.Generator().manual_seed(11)
    orders = [torch.randperm(30, generator=shuffling).numpy() for _ in range(2)]
    used = sets if draw == "epoch" else [sets[0], sets[0]]
    used = [(x.astype(np.float32).astype(np.float64), np.array([order.index(c) for c in y])) for x, y in used]
    expected = numpy_rebalance(w, b, used, orders, options)

    assert loss == pytest.approx(expected, rel=1e-5)
    assert np.allclose(head.weight.detach()[:3], w, rtol=1e-4, atol=1e-5)
    assert np.allclose(head.bias.detach()[:3], b, rtol=1e-4, atol=1e-5)
    assert np.abs(w - before[0].numpy()[:3]).max() > 0.1  # so there was something to get wrong
    assert torch.equal(head.weight[3], before[0][3])
    assert torch.equal(head.bias[3], before[1][3])
    assert calls == [(pytest.approx([1 / 12, 1 / 3, 3 / 12, 1 / 3]), 30, 3.0)] * (2 if draw == "epoch" else 1)


def refined(strategy, model, updates, server_round):
    """Rows of the head that a refinement changed, and its metrics."""
    before = torch.cat([model.head.weight.detach(), model.head.bias.detach()[:, None]], dim=1).clone()
    metrics = strategy.refine(model, updates, RoundContext(SCHEDULE, server_round))
    after = torch.cat([model.head.weight.detach(), model.head.bias.detach()[:, None]], dim=1)
    return [i for i, changed in enumerate((before != after).all(dim=1).tolist()) if changed], before, after, metrics


FIRST = [update("a", [7, 2], [4, 3], 1), update("b", [7], [5], 2)]
SECOND = [update("a", [5, 0], [4, 3], 3), update("b", [0], [5], 4)]


@pytest.mark.parametrize(
    ("kind", "in_first_task", "in_second_task"),
    [("all", [0, 1], [0, 1, 2, 3]), ("current", [0, 1], [2, 3]), ("old", [], [0, 1]), ("off", [], [])],
)
def test_ablations_change_exactly_their_rows(kind, in_first_task, in_second_task):
    strategy = hgp(rebalance=kind)
    rows, before, after, metrics = refined(strategy, model_after(1), FIRST, 2)
    kept = [i for i in range(2) if i not in rows]
    assert rows == in_first_task
    assert torch.equal(before[kept], after[kept])
    assert bool(metrics) == bool(rows)
    rows, before, after, metrics = refined(strategy, model_after(2), SECOND, 3)
    kept = [i for i in range(4) if i not in rows]
    assert rows == in_second_task
    assert torch.equal(before[kept], after[kept])
    assert bool(metrics) == bool(rows)
    assert sorted(set(strategy.prototypes.class_ids.tolist())) == [
        0,
        2,
        5,
        7,
    ]  # remembered even where nothing is retrained


@pytest.mark.parametrize(("kind", "retrained"), [("all", True), ("current", False), ("old", True)])
def test_where_a_task_brings_no_class_all_are_old(kind, retrained):
    context = RoundContext(Schedule([[7, 2], []], 1), 2)
    assert bool(hgp(rebalance=kind).refine(model_after(1), FIRST, context)) == retrained


def test_refining_keeps_the_gaussians_of_earlier_tasks():
    """Rounds 1 and 2 are task 1, rounds 3 and 4 task 2: what task 1's last round left stays to the last bit."""
    strategy = hgp()
    refined(strategy, model_after(1), [update("a", [7, 2], [9, 9], 8)], 1)
    refined(strategy, model_after(1), FIRST, 2)
    left = strategy.prototypes
    assert (left.class_ids.tolist(), left.counts.tolist()) == ([7, 2, 7], [4, 3, 5])
    means = np.concatenate([u.statistics["means"] for u in FIRST])
    assert np.array_equal(left.means, means)
    kept = {name: value.clone() for name, value in vars(left).items()}
    refined(strategy, model_after(2), [update("a", [5, 0], [1, 1], 9), update("c", [5], [6], 10)], 3)
    refined(strategy, model_after(2), SECOND, 4)
    old = strategy.prototypes.pick(torch.isin(strategy.prototypes.class_ids, torch.tensor([7, 2])))
    assert all(torch.equal(value, kept[name]) for name, value in vars(old).items())
    new = strategy.prototypes.pick(torch.isin(strategy.prototypes.class_ids, torch.tensor([5, 0])))
    assert (new.class_ids.tolist(), new.counts.tolist()) == ([5, 0, 0], [4, 3, 5])
    assert np.array_equal(new.means, np.concatenate([u.statistics["means"] for u in SECOND]))


def test_a_round_without_statistics_rebalances_on_what_is_known():
    strategy = hgp()
    assert refined(strategy, model_after(1), [], 1)[0] == []
    refined(strategy, model_after(1), FIRST, 2)
    assert refined(strategy, model_after(2), [Update("a", 5, {}, {})], 3)[0] == [0, 1]


def test_refining_repeats_with_the_seed_and_the_round_only():
    def weights(seed, server_round):
        model, strategy = model_after(1), HGP(parse({"method": "hgp", "seed": seed, "hgp-samples-per-class": 16}))
        strategy.refine(model, FIRST, RoundContext(SCHEDULE, server_round))
        return model.head.weight.detach()

    assert torch.equal(weights(0, 1), weights(0, 1))
    assert not torch.equal(weights(0, 1), weights(1, 1))
    assert not torch.equal(weights(0, 1), weights(0, 2))
    assert not torch.equal(weights(0, 1), weights(0, 3))  # the first round of the next task


def test_refining_reads_its_run_keys(monkeypatch):
    """Weights by hand, 4, 3 and 5 of 12 images; 5 draws for each of 2 classes; a draw for each of 3 epochs."""
    seen = []

    def spy(bank, weights, total, scale, rng):
        seen.append((weights.tolist(), total, scale))
        return torch.zeros(total, D), bank.class_ids[torch.arange(total) % len(bank)]

    monkeypatch.setattr(Gaussians, "sample", spy)
    strategy = hgp(scale=1.5, samples_per_class=5, class_weights="count", epochs=3)
    told = strategy.refine(model_after(1), FIRST, RoundContext(SCHEDULE, 1))
    assert told == {"rebalance-loss": pytest.approx(math.log(2), abs=0.1), "prototypes": 3}  # features of zeros
    assert seen == [(pytest.approx([4 / 12, 3 / 12, 5 / 12]), 10, 1.5)] * 3


def test_the_keys_of_a_method_become_settings_by_their_names():
    hgp_keys = {"hgp-scale": 2.0, "hgp-draw": "once", "hgp-batch-size": 7, "hgp-momentum": 0.5, "hgp-epochs": 3}
    settings = RebalanceSettings.from_options(parse({"method": "hgp", **hgp_keys}).options)
    assert settings == RebalanceSettings(256, 3, 0.01, 0.0, 2.0, "uniform", "once", 7, 0.5)
    settings = RebalanceSettings.from_options(parse({"method": "fedslca", "fedslca-samples-per-class": 9}).options)
    assert settings == RebalanceSettings(9, 5, 0.01, 0.1, 1.0, "uniform", "once", 256, 0.9)
