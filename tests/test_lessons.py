"""Who learns from what in which round, and that nobody can report more than the server was told at hello."""

from collections.abc import Sequence

import numpy as np
import pytest

from client_app.client import Node, handle
from task import lessons
from task.config import Config, parse
from task.lessons import ever_held, local_positions
from task.model import build_model
from task.packet import Packet
from task.partition import partition
from task.world import build_world
from tests.test_invariants import run

STATELESS = {"partition": "split-ratio", "num-clients": 4, "rounds-per-task": 3, "imbalance-ratio": 0.5}
EACH = {
    "iid": {"partition": "iid"},
    "dirichlet": {"partition": "dirichlet", "dirichlet-beta": 0.1},
    "quantity": {"partition": "quantity", "classes-per-client": 2},
    "class-share": {"partition": "class-share"},
    "split-ratio": STATELESS,
}


def counts(config: Config, positions: np.ndarray) -> list[int]:
    dataset = build_world(config).dataset
    return np.bincount(dataset.train_labels[positions], minlength=len(dataset.class_names)).tolist()


def ask(config: Config, client: int, task: int = 0, round: int = 0) -> Packet:
    """A client's answer to the train message of a round."""
    model = build_model(config, build_world(config).task_sizes(task))
    place = {"task": task + 1, "round": round + 1, "server-round": task * config.rounds_per_task + round + 1}
    return handle("train", Packet(arrays=model.export(), config=place), Node(config.flat(), {"partition-id": client}))


@pytest.mark.parametrize("name", EACH)
def test_nobody_ever_holds_more_than_hello_said(name: str, tiny: dict) -> None:
    config = parse(tiny | EACH[name])
    classes = build_world(config).schedule.tasks
    for client in range(config.num_clients):
        said = handle("hello", Packet(), Node(config.flat(), {"partition-id": client})).arrays["class_counts"].tolist()
        assert said == counts(config, ever_held(config, client))
        for task in range(2):
            for round in range(config.rounds_per_task):
                mine = local_positions(config, task, round)[client]
                assert all(n <= most for n, most in zip(counts(config, mine), said, strict=True))
                assert {c for c, n in enumerate(counts(config, mine)) if n} <= set(classes[task])


def test_split_ratio_draws_anew_in_every_round(tiny: dict) -> None:
    """Of 6 classes 4 (0.6 x 6 = 3.6), of 32 images 3.2, 2.5, 2.0 and 1.6 (0.1 x 32 x 0.5^(i/3))."""
    config = parse(tiny | STATELESS)
    rounds = [[local_positions(config, task, round) for round in range(3)] for task in range(2)]
    sizes = [
        sorted(filter(None, counts(config, mine)), reverse=True) for task in rounds for round in task for mine in round
    ]
    assert sizes == [[3, 3, 2, 2]] * 24
    assert len({mine.tobytes() for task in rounds for round in task for mine in round}) == 24


def test_a_round_draws_for_its_own_task_only(tiny: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(tiny | STATELESS | {"seed": 7})  # a seed of its own: nothing of it has been kept
    asked: list[Sequence[Sequence[int]]] = []
    spy = lambda name, labels, clients, tasks, *rest, **more: (  # noqa: E731
        asked.append(tasks) or partition(name, labels, clients, tasks, *rest, **more)
    )
    monkeypatch.setattr(lessons, "partition", spy)
    for client in range(4):
        ask(config, client, task=1, round=2)
    assert [[len(classes) for classes in tasks] for tasks in asked] == [[0, 6]]
    whole = partition(
        "split-ratio",
        build_world(config).dataset.train_labels,
        4,
        build_world(config).schedule.tasks,
        7,
        round=2,
        **config.partition_parameters,
    )
    assert all((own[1] == mine).all() for own, mine in zip(whole, local_positions(config, 1, 2), strict=True))


def test_clients_train_on_the_draw_of_the_messages_round(tiny: dict) -> None:
    config = parse(tiny | STATELESS | {"method": "ncm"})
    for task, round in ((0, 0), (0, 2), (1, 0)):
        answer = ask(config, 3, task, round)
        expected = counts(config, local_positions(config, task, round)[3])
        assert answer.metrics["num-examples"] == sum(expected) == 10
        found = dict(zip(answer.prototypes["class_ids"].tolist(), answer.prototypes["counts"].tolist(), strict=True))
        assert found == {c: n for c, n in enumerate(expected) if n}


@pytest.mark.parametrize("method", ["hepco", "fedavg", "ncm", "pip"])
def test_stateless_clients_take_part_without_failures(method: str, tiny: dict) -> None:
    results = run(tiny | STATELESS | {"method": method, "num-clients": 8, "clients-per-round": 3})
    assert results["status"] == "finished"
    assert not any(r["failures"] or r["idle"] for r in results["rounds"])
    assert len({tuple(r["participants"]) for r in results["rounds"]}) > 1
