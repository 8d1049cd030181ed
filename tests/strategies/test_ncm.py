"""The nearest-class-mean baseline against brute force over the raw features."""

import itertools

import numpy as np
import pytest
import torch

from strategies.base import RoundContext, Update
from strategies.ncm import NearestMean
from task.config.parsing import parse
from task.scenario.class_stream import Schedule
from tests.helpers.small_models import frozen_model

D = 8
SCHEDULE = Schedule([[7, 2], [5, 0, 3]], 2)
ORDER = np.array([7, 2, 5, 0, 3])


def clients_of(task, seed=0, clients=4):
    """Raw float32 features per client: class id -> [n, D]; not every client holds every class."""
    rng = np.random.default_rng([seed, task])
    centres = {c: rng.normal(3, 1, D) for c in SCHEDULE.tasks[task]}
    class_counts = [{c: int(rng.integers(0, 6)) + (m == 0) for c in centres} for m in range(clients)]
    return [
        {c: (centres[c] + rng.normal(size=(n, D))).astype(np.float32) for c, n in by_class.items() if n}
        for by_class in class_counts
    ]


def answers(clients):
    """What each client sends; means by NumPy in float64."""
    return [
        Update(
            f"client {m}",
            sum(map(len, by_class.values())),
            {},
            {
                "class_ids": np.array(list(by_class), np.int64),
                "counts": np.array([len(x) for x in by_class.values()], np.int64),
                "means": np.stack([x.mean(axis=0, dtype=np.float64) for x in by_class.values()]).astype(np.float32),
            },
        )
        for m, by_class in enumerate(clients)
        if by_class
    ]


def head_after(updates_by_round):
    """Head after the rounds 1, 2, ... of the schedule, tasks beginning as in a run."""
    strategy, model = NearestMean(parse({"method": "ncm"})), frozen_model(D, [])
    for server_round, updates in enumerate(updates_by_round, start=1):
        task, round_in_task = SCHEDULE.locate(server_round)
        if round_in_task == 0:
            model.begin_task(len(SCHEDULE.tasks[task]))
        strategy.refine(model, updates, RoundContext(SCHEDULE, server_round))
    return model.head


def nearest_mean(queries, clients):
    """The class whose mean over the pooled raw samples is nearest, in float64."""
    classes = sorted({c for by_class in clients for c in by_class})
    means = [
        np.concatenate([by_class[c] for by_class in clients if c in by_class]).mean(axis=0, dtype=np.float64)
        for c in classes
    ]
    return np.array(classes)[np.square(queries[:, None] - np.stack(means)).sum(axis=2).argmin(axis=1)]


def predict(head, queries):
    with torch.no_grad():
        return ORDER[head(torch.from_numpy(queries)).argmax(dim=1).numpy()]


def queries(number=400, spread=2.0):
    return (3 + spread * np.random.default_rng(5).normal(size=(number, D))).astype(np.float32)


def test_it_is_the_nearest_mean_of_the_pooled_samples():
    first, second = clients_of(0), clients_of(1)
    head = head_after([answers(first), answers(first), answers(second), answers(second)])
    expected = nearest_mean(queries(), first + second)
    assert set(expected) == set(ORDER)
    assert np.array_equal(predict(head, queries()), expected)
    assert np.array_equal(predict(head_after([answers(first)]), queries()), nearest_mean(queries(), first))


def test_rows_by_hand():
    """Class 7: (1 * 4 + 3 * 0) / 4 = 1 in every dimension, so w = 1 and b = -8 / 2; class 2: w = 2, b = -16."""
    row = lambda ids, counts, means: {  # noqa: E731
        "class_ids": np.array(ids),
        "counts": np.array(counts),
        "means": np.array(means, np.float32)[:, None].repeat(D, axis=1),
    }
    updates = [Update("a", 3, {}, row([2, 7], [2, 1], [2, 4])), Update("b", 3, {}, row([7], [3], [0]))]
    head = head_after([updates])
    assert head.weight.tolist() == [[1.0] * D, [2.0] * D]
    assert head.bias.tolist() == [-4.0, -16.0]


def test_the_order_of_clients_does_not_matter():
    updates = answers(clients_of(0))
    heads = [head_after([list(permuted)]) for permuted in itertools.permutations(updates)]
    assert len(heads) == 24
    for head in heads[1:]:
        assert torch.allclose(head.weight, heads[0].weight, rtol=1e-6, atol=0)
        assert torch.allclose(head.bias, heads[0].bias, rtol=1e-6, atol=0)


def test_further_rounds_change_nothing():
    """Clients that have answered before count once, as those do that answer in the second round only."""
    updates = answers(clients_of(0))
    once, twice = head_after([updates]), head_after([updates[:2], updates])
    assert torch.equal(once.weight, twice.weight)
    assert torch.equal(once.bias, twice.bias)


def test_clients_that_answer_in_different_rounds_all_count():
    """Half of them in each round is the same as all of them in one."""
    updates = answers(clients_of(0))
    together, apart = head_after([updates]), head_after([updates[:2], updates[2:]])
    assert torch.allclose(together.weight, apart.weight, rtol=1e-6, atol=0)
    assert torch.allclose(together.bias, apart.bias, rtol=1e-6, atol=0)


def test_reports_of_both_tasks_count_where_a_class_comes_in_both():
    """Client streams of their own: a client's report of the second task is one more, not in place of the first."""
    first, second = clients_of(0), clients_of(1)
    second[0] |= {7: np.full((4, D), 9, np.float32)}
    head = head_after([answers(first), [], answers(second)])
    samples = np.concatenate([by_class[7] for by_class in [*first, second[0]] if 7 in by_class])
    assert head.weight[0].detach().numpy() == pytest.approx(samples.mean(axis=0, dtype=np.float64), rel=1e-5)


def test_a_later_task_leaves_earlier_rows_alone():
    first, second = answers(clients_of(0)), answers(clients_of(1))
    before, after = head_after([first, first]), head_after([first, first, second])
    assert torch.equal(after.weight[:2], before.weight)
    assert torch.equal(after.bias[:2], before.bias)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_class_that_nobody_reported_is_never_predicted(sign):
    """Brute force knows the means of class 2 alone; its row must win wherever the query lies, even opposite to it."""
    clients = [{c: x for c, x in by_class.items() if c == 2} for by_class in clients_of(0)]
    head = head_after([answers([by_class for by_class in clients if by_class])])
    assert set(predict(head, sign * queries())) == {2}
