from collections import Counter
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from task.scenario.class_stream import Schedule, class_order, split_tasks, stages


@given(st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_shuffled_order_is_a_permutation_of_plain_integers(num_classes, seed):
    order = class_order(num_classes, seed, "shuffled")
    assert sorted(order) == list(range(num_classes))
    assert all(type(c) is int for c in order)
    assert order == class_order(num_classes, seed, "shuffled")


def test_orders_of_two_seeds_differ():
    assert class_order(100, 0, "shuffled") != class_order(100, 1, "shuffled")


def test_every_class_comes_first_equally_often():
    # 2,000 seeds and 5 classes: 400 expected, standard deviation sqrt(2000 x 0.2 x 0.8) = 18; five of them are 90.
    first = Counter(class_order(5, seed, "shuffled")[0] for seed in range(2000))
    assert all(abs(first[c] - 400) < 90 for c in range(5))


def test_given_order_ignores_the_seed():
    assert class_order(4, 9, "given") == [0, 1, 2, 3]


@given(st.integers(1, 200), st.data())
def test_split_keeps_the_order_and_is_as_even_as_possible(num_classes, data):
    num_tasks = data.draw(st.integers(1, num_classes))
    order = class_order(num_classes, 3, "shuffled")
    tasks = split_tasks(order, num_tasks)
    sizes = [len(t) for t in tasks]
    assert [c for t in tasks for c in t] == order
    assert len(tasks) == num_tasks
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("kind", ["appearing", "Given", ""])
def test_another_kind_of_order_is_refused(kind):
    with pytest.raises(ValueError, match=f"class-order='{kind}': allowed are 'shuffled' and 'given'"):
        class_order(4, 0, kind)


@pytest.mark.parametrize("order", [np.array([3, 1, 0]), torch.tensor([3, 1, 0])], ids=["numpy", "torch"])
def test_tasks_of_an_array_are_plain_integers(order):
    tasks = split_tasks(order, 2)
    assert tasks == [[3, 1], [0]]
    assert {type(c) for task in tasks for c in task} == {int}


@pytest.mark.parametrize("num_tasks", [-1, 0, 4])
def test_impossible_splits_are_refused(num_tasks):
    with pytest.raises(ValueError, match=f"num-tasks={num_tasks}: allowed are 1 to 3"):
        split_tasks([0, 1, 2], num_tasks)


def test_stages_by_hand():
    """Client 1 has class 3 early and class 1 again; in the last stage both only meet what the other has had."""
    streams = [[[0, 1], [2], [3]], [[1], [3, 0], [2]]]
    assert stages(streams, [3, 2, 1, 0]) == [[1, 0], [3, 2], []]
    assert stages(streams[:1], [3, 2, 1, 0]) == [[1, 0], [2], [3]]


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 99), st.data())
def test_after_each_stage_the_server_has_seen_what_any_client_has(num_classes, num_clients, seed, data):
    num_tasks = data.draw(st.integers(1, num_classes))
    streams = [split_tasks(class_order(num_classes, seed + m, "shuffled"), num_tasks) for m in range(num_clients)]
    order = class_order(num_classes, seed, "shuffled")
    schedule = Schedule(stages(streams, order), 1)
    for t in range(num_tasks):
        assert set(schedule.seen_classes(t)) == {c for own in streams for task in own[: t + 1] for c in task}
        assert [c for c in order if c in schedule.current_classes(t)] == schedule.current_classes(t)


def test_schedule_by_hand():
    schedule = Schedule([[4, 0], [3, 1], [2]], rounds_per_task=3)
    assert (schedule.num_tasks, schedule.total_rounds) == (3, 9)
    assert [schedule.locate(r) for r in (1, 3, 4, 9)] == [(0, 0), (0, 2), (1, 0), (2, 2)]
    assert [r for r in range(1, 10) if schedule.locate(r)[1] == 0] == [1, 4, 7]
    assert [r for r in range(1, 10) if schedule.is_last_round(r)] == [3, 6, 9]
    assert [schedule.current_classes(t) for t in range(3)] == [[4, 0], [3, 1], [2]]
    assert [schedule.seen_classes(t) for t in range(3)] == [[4, 0], [4, 0, 3, 1], [4, 0, 3, 1, 2]]


@given(st.integers(1, 20), st.integers(1, 50))
def test_rounds_come_task_by_task(num_tasks, rounds):
    schedule = Schedule([[t] for t in range(num_tasks)], rounds)
    places = [schedule.locate(r) for r in range(1, schedule.total_rounds + 1)]
    assert places == [(t, r) for t in range(num_tasks) for r in range(rounds)]
    assert [schedule.is_last_round(n) for n, _ in enumerate(places, start=1)] == [r == rounds - 1 for _, r in places]
    assert schedule.total_rounds == num_tasks * rounds


def test_nobody_changes_a_schedule():
    schedule = Schedule([[0], [1]], 1)
    schedule.current_classes(0).append(8)
    assert schedule.seen_classes(1) == [0, 1]
    with pytest.raises(FrozenInstanceError):
        schedule.rounds_per_task = 2


def test_adaptation_comes_before_all_other_rounds_of_the_first_task() -> None:
    """Three rounds of adaptation, then two for each of three tasks, counted by hand."""
    schedule = Schedule([[1, 2], [3], [0]], rounds_per_task=2, adaptation_rounds=3)
    assert schedule.total_rounds == 9
    assert [schedule.rounds_of(task) for task in range(3)] == [5, 2, 2]
    places = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [schedule.locate(server_round) for server_round in range(1, 10)] == places
    assert [r for r in range(1, 10) if schedule.is_last_round(r)] == [5, 7, 9]
