"""What every strategy is given: the round's classes and their head rows, by hand."""

import pytest
import torch

from strategies.base import RoundContext
from task.config.parsing import parse
from task.scenario.class_stream import Schedule
from task.scenario.scenario import build_scenario

SHUFFLED = Schedule([[7, 2], [5, 0, 3], []], 2)  # class of head row 0, 1, 2, 3, 4 = 7, 2, 5, 0, 3


@pytest.mark.parametrize(
    ("server_round", "old", "current"),
    [(2, [], [7, 2]), (3, [7, 2], [5, 0, 3]), (4, [7, 2], [5, 0, 3]), (5, [7, 2, 5, 0, 3], [])],
)
def test_classes_of_a_round_in_stream_order(server_round: int, old: list[int], current: list[int]) -> None:
    context = RoundContext(SHUFFLED, server_round)
    assert (context.old_classes, context.current_classes, context.seen_classes) == (old, current, old + current)


def test_head_rows_of_a_shuffled_stream_by_hand() -> None:
    context = RoundContext(SHUFFLED, 3)
    assert context.head_rows(torch.tensor([0, 7, 7, 3, 2, 5])).tolist() == [3, 0, 0, 4, 1, 2]
    assert context.head_rows(torch.tensor([[5], [2]])).tolist() == [[2], [1]]
    assert context.head_rows(torch.empty(0, dtype=torch.int64)).tolist() == []
    assert context.head_rows(torch.tensor(context.seen_classes)).tolist() == [0, 1, 2, 3, 4]
    assert SHUFFLED.head_rows.tolist() == [3, -1, 1, 4, -1, 2, -1, 0]


def test_clients_and_server_use_the_same_rows(tiny: dict) -> None:
    scenario = build_scenario(parse(tiny))
    class_ids = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    rows = RoundContext(scenario.schedule, 2).head_rows(class_ids)
    assert rows.tolist() == scenario.schedule.head_rows[class_ids.numpy()].tolist()
    assert rows.tolist() != class_ids.tolist()  # the stream is shuffled
