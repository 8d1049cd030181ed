"""Statistics in a task's last round only: what is sent, refused and rebalanced in the rounds before."""

from dataclasses import replace
from typing import Any

import pytest

from task.message import Kind, Packet
from tests.helpers.runs import run


@pytest.mark.parametrize("method", ["hgp", "fedprok", "ccvr"])
def test_clients_send_statistics_in_a_tasks_last_round_only(method: str, tiny: dict[str, Any]) -> None:
    """Two tasks of six classes, three rounds each, three clients: HGP knows no Gaussian in rounds 1 and 2, then 6 x 3.

    In rounds 4 and 5 it rebalances these old classes among themselves.
    """
    sent: list[bool] = []

    def note(node: int, kind: Kind, answer: Packet) -> Packet:
        sent.extend([bool(answer.statistics)] if kind == "train" else [])
        return answer

    keys = {"method": method, "rounds-per-task": 3, "statistics-rounds": "last"}
    results = run(tiny | keys, tamper=note)
    assert [any(sent[i : i + 3]) for i in range(0, 18, 3)] == [all(sent[i : i + 3]) for i in range(0, 18, 3)]
    assert sent[::3] == [False, False, True] * 2
    assert not any(r["failures"] for r in results["rounds"])
    if method == "hgp":
        assert [r["server"].get("prototypes", 0) for r in results["rounds"]] == [0, 0, 18, 18, 18, 36]


def test_statistics_that_come_too_early_are_refused(tiny: dict[str, Any]) -> None:
    """Node 0 sends in both rounds what it may send in the second only."""
    values, gaussians = tiny | {"method": "hgp", "rounds-per-task": 2, "num-tasks": 1}, dict[str, Any]()

    def keep(node: int, kind: Kind, answer: Packet) -> Packet:
        gaussians.update(answer.statistics if node == 0 else {})
        return answer

    def add(node: int, kind: Kind, answer: Packet) -> Packet:
        return replace(answer, statistics=gaussians) if kind == "train" and node == 0 else answer

    assert not any(r["failures"] for r in run(values | {"run-name": "every"}, tamper=keep)["rounds"])
    results = run(values | {"statistics-rounds": "last"}, tamper=add)
    assert ["none were expected" in str(r["failures"]) for r in results["rounds"]] == [True, False]
