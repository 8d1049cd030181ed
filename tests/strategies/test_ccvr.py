"""CCVR: merging per class against the pooled samples themselves, when it calibrates, and on what."""

import numpy as np
import pytest
import torch

import strategies.ccvr
from strategies.base import RoundContext, Update, join_statistics
from strategies.ccvr import CCVR, pool_gaussians
from task.config.parsing import parse
from task.scenario.class_stream import Schedule
from tests.helpers.small_models import head_alone

D = 5
SCHEDULE = Schedule([[7, 2], [5, 0]], 2)  # class of head row 0, 1, 2, 3 = 7, 2, 5, 0


def samples(seed=0):
    """By client, then class: feature rows [n, D], one of them a single row; class 0 has one row in all."""
    rng = np.random.default_rng(seed)
    sizes = [{7: 4, 2: 6}, {2: 1, 5: 3}, {7: 9, 2: 5, 0: 1}]
    return [{c: rng.normal(loc=c, size=(n, D)) for c, n in one.items()} for one in sizes]


def report(by_class, packing="full"):
    """What a client would send, computed by NumPy."""
    row, column = np.triu_indices(D)
    spread = {c: np.cov(x, rowvar=False) if len(x) > 1 else np.zeros((D, D)) for c, x in by_class.items()}
    statistics = {
        "class_ids": np.array(list(by_class)),
        "counts": np.array([len(x) for x in by_class.values()]),
        "means": np.array([x.mean(axis=0) for x in by_class.values()], np.float32),
    }
    if packing == "full":
        return statistics | {"covariances": np.array([s[row, column] for s in spread.values()], np.float32)}
    return statistics | {"variances": np.array([s.diagonal() for s in spread.values()], np.float32)}


@pytest.mark.parametrize("packing", ["full", "diagonal"])
def test_merging_gives_mean_and_covariance_of_the_pooled_samples(packing):
    clients = samples()
    merged = pool_gaussians(join_statistics(report(one, packing) for one in clients))
    assert merged["class_ids"].tolist() == [0, 2, 5, 7]
    assert merged["counts"].tolist() == [1, 12, 3, 13]
    assert [merged[n].dtype for n in ("class_ids", "counts", "means")] == [np.int64, np.int64, np.float32]
    row, column = np.triu_indices(D) if packing == "full" else np.diag_indices(D)
    spread = merged["covariances" if packing == "full" else "variances"]
    for i, c in enumerate(merged["class_ids"]):
        pooled = np.concatenate([one[c] for one in clients if c in one])
        covariance = np.cov(pooled, rowvar=False) if len(pooled) > 1 else np.zeros((D, D))
        assert np.allclose(merged["means"][i], pooled.mean(axis=0), atol=1e-5)
        assert np.allclose(spread[i], covariance[row, column], atol=1e-4)


def test_two_images_of_a_class_give_a_covariance_by_hand():
    """Features 1 and 4, at two clients or one: mean 2.5, variance (1.5^2 + 1.5^2) / (2 - 1) = 4.5."""
    first, second = np.full((1, D), 1.0), np.full((1, D), 4.0)
    for clients in ([{7: first}, {7: second}], [{7: np.concatenate([first, second])}]):
        merged = pool_gaussians(join_statistics(report(one, "diagonal") for one in clients))
        assert merged["counts"].tolist() == [2]
        assert merged["means"].tolist() == [[2.5] * D]
        assert merged["variances"].tolist() == [[4.5] * D]


def only(by_class, *classes):
    return {c: x for c, x in by_class.items() if c in classes}


def test_it_calibrates_after_a_task_on_one_gaussian_per_seen_class(monkeypatch):
    """Client a reports in round 1 only and still counts in round 2; b's second report replaces its first."""
    seen, losses = [], []
    real = strategies.ccvr.rebalance

    def spy(head, bank, *rest):
        seen.append((bank, *rest))
        losses.append(real(head, bank, *rest))
        return losses[-1]

    monkeypatch.setattr("strategies.ccvr.rebalance", spy)
    strategy, a, b = CCVR(parse({"method": "ccvr"})), samples(1)[0], only(samples(2)[2], 7, 2)
    first = [Update("a", 10, {}, report(a)), Update("b", 14, {}, report(only(samples(4)[2], 7, 2)))]
    head = head_alone(D, 2)
    assert strategy.refine(head, first, RoundContext(SCHEDULE, 1)) == {}
    told = strategy.refine(head, [Update("b", 14, {}, report(b))], RoundContext(SCHEDULE, 2))
    assert told == {"calibration-loss": losses[0]}
    assert losses[0] > 0
    bank, rows, options, _ = seen[0]
    assert (bank.class_ids.tolist(), bank.counts.tolist(), rows.tolist()) == ([2, 7], [11, 13], [1, 0])
    pooled = np.concatenate([a[7], b[7]])
    assert np.allclose(bank.means[1], pooled.mean(axis=0), atol=1e-5)
    factor = bank.factors[1].double().numpy()
    assert np.allclose(factor.T @ factor, np.cov(pooled, rowvar=False), atol=1e-4)
    assert (options.scale, options.draw, options.samples_per_class) == (1.0, "once", 256)

    task_2 = {5: a[7] + 1, 0: a[2] - 1}
    head = head_alone(D, 4)
    before = head.head.weight.detach().clone()
    assert strategy.refine(head, [Update("a", 10, {}, report(task_2))], RoundContext(SCHEDULE, 3)) == {}
    assert torch.equal(before, head.head.weight)
    strategy.refine(head, [], RoundContext(SCHEDULE, 4))
    assert seen[1][0].class_ids.tolist() == [2, 7, 0, 5]
    assert torch.equal(seen[1][0].means[:2], bank.means)  # earlier tasks stay as they were
    assert ((before != head.head.weight).any(dim=1)).all()


def test_calibration_learns_the_classes():
    """Two far classes and a head with swapped rows: afterwards each mean belongs to its own class."""
    strategy, head = CCVR(parse({"method": "ccvr", "ccvr-learning-rate": 0.1})), head_alone(D, 2)
    head.head.weight.data = -torch.eye(2, D)
    rng = np.random.default_rng(0)
    by_class = {7: 4 * np.eye(2, D)[:1] + rng.normal(size=(9, D)), 2: 4 * np.eye(2, D)[1:] + rng.normal(size=(9, D))}
    for server_round in (1, 2):
        strategy.refine(head, [Update("a", 18, {}, report(by_class))], RoundContext(SCHEDULE, server_round))
    assert head.head(4 * torch.eye(2, D)).argmax(dim=1).tolist() == [0, 1]


def test_an_undone_calibration_keeps_the_classes_of_its_task(monkeypatch):
    """Task 1 ends in a round that is undone; its classes come with task 2, though client a has reported again."""
    seen = []
    monkeypatch.setattr("strategies.ccvr.rebalance", lambda _, bank, *rest: seen.append(bank.class_ids.tolist()) or 0.0)
    strategy, by_class = CCVR(parse({"method": "ccvr"})), samples()[0]
    a, b = (Update(name, 4, {}, report(only(by_class, c))) for name, c in (("a", 7), ("b", 2)))
    strategy.refine(head_alone(D, 2), [a, b], RoundContext(SCHEDULE, 1))
    before = dict(vars(strategy))
    strategy.refine(head_alone(D, 2), [a, b], RoundContext(SCHEDULE, 2))
    vars(strategy).update(before)
    strategy.refine(head_alone(D, 4), [Update("a", 4, {}, report({5: by_class[7]}))], RoundContext(SCHEDULE, 4))
    assert seen == [[2, 7], [2, 5, 7]]


def test_nothing_reported_changes_nothing():
    strategy, head = CCVR(parse({"method": "ccvr"})), head_alone(D, 2)
    before = head.head.weight.detach().clone()
    assert strategy.refine(head, [Update("a", 5, {}, {})], RoundContext(SCHEDULE, 2)) == {}
    assert torch.equal(before, head.head.weight)


def test_every_calibration_and_seed_draws_its_own_features() -> None:
    def after(rounds: int, seed: int = 0) -> torch.Tensor:
        """The weight after a calibration on the same Gaussians, at the end of a task that ends with this round."""
        strategy, model = CCVR(parse({"method": "ccvr", "seed": seed})), head_alone(D, 2)
        schedule = Schedule([[7, 2], []][:rounds], 1)
        strategy.refine(model, [Update("a", 10, {}, report(samples()[0]))], RoundContext(schedule, rounds))
        return model.head.weight.detach()

    assert torch.equal(after(1), after(1))
    assert not torch.equal(after(1), after(2))
    assert not torch.equal(after(1), after(1, seed=1))
