"""FedRDA: a prompt is trained first, then the head is the centralised one; who sends what in which round."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from server_app.rounds.run import run_experiment
from server_app.transport.base import Reply
from task.config.parsing import parse
from task.message import Arrays, Kind, Packet
from tests.helpers.marks import rest_in_ci
from tests.helpers.pooled import PARTITIONS, Pooled, check_regularised
from tests.helpers.runs import FaultyTransport, Values, model_of, results_of


@pytest.mark.parametrize("prompt", rest_in_ci(["shared", "lora"], ["lora"]))
def test_regularised_features_are_those_of_the_adapted_prompt(prompt: str, tiny: Values) -> None:
    keys = {"fedrda-dtype": "fp64", "fedrda-rank": 40, "fedrda-adaptation-rounds": 2, "local-epochs": 2}
    check_regularised(Pooled(tiny | PARTITIONS["dirichlet"] | keys | {"method": "fedrda", "prompt": prompt}), 1e-3)


class Recording(FaultyTransport):
    """Notes, by server round, the arrays that go down and what comes up."""

    def __init__(self, *arguments: Any, **faults: Any) -> None:
        super().__init__(*arguments, **faults)
        self.down: dict[int, list[Arrays]] = defaultdict(list)
        self.up: dict[int, list[Packet]] = defaultdict(list)

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterable[Reply]:
        for reply in super().exchange(kind, packets, timeout, largest_answer):
            if kind == "train":
                server_round = int(str(packets[reply.node].config["server-round"]))
                self.down[server_round].append({n: a.copy() for n, a in packets[reply.node].arrays.items()})
                assert reply.packet
                self.up[server_round].append(reply.packet)
            yield reply


MOVING = {"prompt.down", "prompt.up", "local_head.weight", "local_head.bias"}


def test_clients_train_first_and_send_statistics_then(tiny: Values) -> None:
    """Two rounds of adaptation, then two rounds for each of two tasks."""
    values = tiny | {"method": "fedrda", "fedrda-adaptation-rounds": 2, "rounds-per-task": 2, "local-epochs": 2}
    config = parse(values)
    transport = Recording(3)
    results = results_of(run_experiment(config, transport))
    assert [(r["task"], r["round"]) for r in results["rounds"]] == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)]
    assert not any(r["failures"] or r["dropped"] for r in results["rounds"])
    assert [r["train_loss"] is not None for r in results["rounds"]] == [True] * 2 + [False] * 4
    for server_round in range(1, 7):
        adapts = server_round <= 2
        assert len(transport.up[server_round]) == 3
        for packet in transport.up[server_round]:
            assert set(packet.arrays) == (MOVING if adapts else set())
            sent = {"class_ids", "counts", "means", "factors", "scatter"}
            assert set(packet.statistics) == (set() if adapts else sent)
        for arrays in transport.down[server_round]:
            assert set(arrays) == MOVING  # the head never travels down
            last = transport.down[3][0]
            assert all((arrays[n] == last[n]).all() for n in MOVING) == (not adapts)
    saved = model_of(values)
    assert all((saved[n] == transport.down[3][0][n]).all() for n in MOVING)


def test_arrays_in_a_round_of_statistics_are_refused(tiny: Values) -> None:
    """And statistics in a round of training; the other clients' count."""

    def tamper(node: int, kind: Kind, answer: Packet) -> Packet:
        if kind == "train" and node == 1:
            if answer.statistics:
                answer.arrays = {"prompt.down": np.zeros((5, 4, 112), np.float32)}
            else:
                answer.statistics = {"means": np.zeros((1, 112), np.float32)}
        return answer

    config = parse(tiny | {"method": "fedrda", "fedrda-adaptation-rounds": 1})
    results = results_of(run_experiment(config, FaultyTransport(3, tamper=tamper)))
    reasons = [[(f["name"], f["reason"]) for f in r["failures"]] for r in results["rounds"]]
    assert reasons == [
        [("client-0001", "statistics ['means'] came; none were expected")],
        [("client-0001", "arrays ['prompt.down'] came; [] were expected")],
        [("client-0001", "arrays ['prompt.down'] came; [] were expected")],
    ]
    assert results["status"] == "finished"


def test_without_a_prompt_there_is_no_round_of_adaptation(tiny: Values) -> None:
    config = parse(tiny | {"method": "fedrda", "prompt": "none"})
    assert (config.adaptation_rounds, config.trains_locally, config.trains_in(1)) == (0, False, False)
    config = parse(tiny | {"method": "fedrda", "fedrda-adaptation-rounds": 3})
    assert config.adaptation_rounds == 3
    assert [config.trains_in(server_round) for server_round in (1, 3, 4, 9)] == [True, True, False, False]
    assert parse(tiny | {"method": "fedavg"}).adaptation_rounds == 0
    assert parse(tiny | {"method": "fedavg"}).trains_in(99)
    assert not parse(tiny | {"method": "ncm"}).trains_in(1)
