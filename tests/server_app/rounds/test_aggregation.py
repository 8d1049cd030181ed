"""Answers of a round as they come: any order gives the same run, and what has been averaged is let go."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from server_app.clients.client_info import ClientInfo
from server_app.errors import RunError
from server_app.rounds.aggregation import RoundAggregator
from server_app.rounds.measurement import sum_hidden_counts
from server_app.rounds.run import Run, run_experiment
from server_app.run_files.results import RoundReport
from server_app.run_files.writers import read_lines
from server_app.secure_aggregation.secure_sum import SecureSum
from server_app.transport.base import SMALL_ANSWER, Reply
from server_app.transport.in_process import InProcessTransport
from strategies.base import RoundContext, Update
from task.config.parsing import parse
from task.keys import ConfigError
from task.message import Kind, Packet
from task.scenario.class_stream import Schedule
from task.scenario.scenario import build_scenario
from tests.conftest import QUICK
from tests.helpers.marks import rest_in_ci
from tests.helpers.own_data import NAMES, OWN
from tests.helpers.runs import FaultyTransport, Values, folder_of, results_of, run, without_times


class Backwards(FaultyTransport):
    """The last node that is asked answers first."""

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterator[Reply]:
        yield from reversed(list(super().exchange(kind, packets, timeout, largest_answer)))


class Counting(InProcessTransport):
    """Counts the train answers that are alive when the next one comes."""

    alive: list[weakref.ref[np.ndarray]]
    most = 0

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterator[Reply]:
        self.alive = []
        for reply in super().exchange(kind, packets, timeout, largest_answer):
            if kind == "train" and reply.packet:
                self.alive.append(weakref.ref(max(reply.packet.arrays.values(), key=np.size)))
                self.most = max(self.most, sum(ref() is not None for ref in self.alive))
            yield reply


class Measuring(InProcessTransport):
    """Compares each answer with the largest one that the run allows beside what every answer may have."""

    spare: dict[Kind, list[int]]

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterator[Reply]:
        allowed = largest_answer - SMALL_ANSWER
        for reply in super().exchange(kind, packets, timeout, largest_answer):
            self.spare.setdefault(kind, []).append(allowed - reply.bytes_up)
            yield reply


@pytest.mark.parametrize(
    ("method", "secure"), [("hgp", "off"), ("afcl", "off"), ("fedavg", "pairwise"), ("afcl", "pairwise")]
)
def test_the_run_says_how_large_an_answer_can_be(method: str, secure: str, tiny: Values) -> None:
    """Names and metrics come on top, and are few."""
    config = parse(tiny | {"method": method, "secure-aggregation": secure, "num-clients": 4})
    transport = Measuring(config.num_clients)
    transport.spare = {}
    run_experiment(config, transport)
    assert transport.spare["hello"][0] < 0  # nothing is allowed beside it yet
    assert all(-10_000 < spare < 30_000 for spare in transport.spare["train"])


class Asked(InProcessTransport):
    """Notes which nodes get train messages; ``late`` ones owe an answer all the time."""

    nodes_asked: list[list[int]]
    late: set[int]

    def busy(self) -> set[int]:
        return self.late

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterable[Reply]:
        if kind == "train":
            self.nodes_asked.append(list(packets))
        return super().exchange(kind, packets, timeout, largest_answer)


def asked_nodes(values: Values, late: set[int] | None = None) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Nodes that get a train message in each exchange, and the lines of rounds.jsonl."""
    config = parse(values)
    transport = Asked(config.num_clients)
    transport.nodes_asked, transport.late = [], late or set()
    run_experiment(config, transport)
    return transport.nodes_asked, read_lines(folder_of(values) / "rounds.jsonl")


UNEVEN: Values = {"num-clients": 7, "partition": "dirichlet", "dirichlet-beta": 0.02}
ONE_DRAWN = UNEVEN | {"clients-per-round": 1, "rounds-per-task": 4, "seed": 1}


def test_where_one_client_has_something_to_train_on_all_are_asked(tiny: Values) -> None:
    """Their answers show that they are there, and give a node that is gone time to come back."""
    asked, rounds = asked_nodes(tiny | UNEVEN)
    assert asked == [list(range(7))] * len(rounds)
    assert rounds[0]["idle"] == ["client-0001", "client-0003", "client-0005"]


def test_where_nobody_has_anything_to_train_on_nobody_is_asked(tiny: Values) -> None:
    asked, rounds = asked_nodes(tiny | ONE_DRAWN)
    empty = [line for line in rounds if line["idle"] == line["participants"]]
    assert 0 < len(empty) < len(rounds)
    assert all(line["bytes_down"] == line["bytes_up"] == 0 for line in empty)
    assert len(asked) == len(rounds) - len(empty)


def test_while_a_node_owes_an_answer_no_round_is_skipped(tiny: Values) -> None:
    """Exchanges take late answers, and a round without any would be over before one can come."""
    asked, rounds = asked_nodes(tiny | ONE_DRAWN, late={6})
    assert len(asked) == len(rounds)


def test_in_a_secure_sum_every_client_is_asked(tiny: Values) -> None:
    """Whoever adds nothing must not be told from the others."""
    asked, _ = asked_nodes(tiny | UNEVEN | {"method": "fedavg", "secure-aggregation": "pairwise"})
    assert all(nodes == list(range(7)) for nodes in asked)


def backwards(values: Values, **faults: Any) -> Values:
    """Results of the same run in another folder, whose nodes answer in the opposite order."""
    config = parse(values | {"run-name": "backwards"})
    return run(config.flat(), Backwards(config.num_clients, **faults))


@pytest.mark.parametrize(
    "method", rest_in_ci(["hgp", "pip", "fppl", "hepco", "fedprok", "ccvr", "afcl", "fedrda"], ["hgp", "afcl"])
)
def test_a_run_does_not_depend_on_the_order_of_the_answers(method: str, tiny: Values) -> None:
    values = tiny | {"method": method, "num-clients": 4}
    assert without_times(run(values)) == without_times(backwards(values))


def test_failures_of_a_secure_sum_do_not_depend_on_the_order_of_the_answers(tiny: Values) -> None:
    values = tiny | {"method": "fedavg", "num-tasks": 1, "num-clients": 6, "secure-aggregation": "pairwise"}
    faults = {"broken": lambda node, kind: kind == "train" and node in (1, 3)}
    forwards = run(values, **faults)
    assert [failed["name"] for failed in forwards["rounds"][0]["failures"]] == ["client-0001", "client-0003"]
    assert without_times(forwards) == without_times(backwards(values, **faults))


@pytest.mark.parametrize("bound", [{}, {"max-update-norm": 50.0}, {"max-update-ratio": 5.0}])
def test_failures_and_entropies_do_not_depend_on_the_order_of_the_answers(
    bound: Values, tiny: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the method receives what has been accepted, nothing else."""
    received = set[str]()
    monkeypatch.setattr("strategies.base.Strategy.receive", lambda self, model, update, at: received.add(update.client))

    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        if kind == "train" and node == 2:
            packet.metrics["num-examples"] = -1
        if "head.weight" in packet.arrays and node == 4:
            packet.arrays["head.weight"] += np.float32(100)
        return packet

    values = tiny | bound | {"num-clients": 7, "partition": "dirichlet", "dirichlet-beta": 0.02, "federated-bias": True}
    forwards = run(values, tamper=tamper)
    assert without_times(forwards) == without_times(backwards(values, tamper=tamper))
    first, refused = forwards["rounds"][0], ["client-0002", *(["client-0004"] if bound else [])]
    assert [f["name"] for f in first["failures"]] == refused
    assert first["idle"] == ["client-0001", "client-0003", "client-0005"]
    assert received.isdisjoint(refused)
    assert {"client-0000", "client-0006"} <= received
    assert len(forwards["federated_bias"]["response_entropies"][0]) == 4 - len(refused)


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({}, 2),
        ({"method": "hepco", **QUICK["hepco"]}, 6),
        ({"max-update-ratio": 9.0}, 6),
        ({"max-update-norm": 9.0}, 2),
    ],
)
def test_an_answer_is_let_go_once_it_is_averaged(keys: Values, most: int, tiny: Values) -> None:
    """The one that comes and the one before it; a median over all needs all six, and HePCo's teachers are all six."""
    config = parse(tiny | {"num-clients": 6, "partition": "iid"} | keys)
    transport = Counting(6)
    run_experiment(config, transport)
    assert transport.most == most


def test_whoever_measures_sees_the_arrays(tiny: Values, tmp_path: Path) -> None:
    config = parse(tiny)
    going = Run(config, InProcessTransport(3), tmp_path / "run", None, ExitStack())
    clients, context = going.registry.clients, RoundContext(going.scenario.schedule, 1)
    aggregator, seen = RoundAggregator(config, going.strategy, going.model, context, clients), list[Update]()

    def measure(update: Update) -> list[float]:
        seen.append(update)
        return [float(len(seen)), 0.5]

    replies = reversed(list(going.exchange("train", context, clients, aggregator.sent_arrays)))
    aggregator.collect(replies, RoundReport(1, 1, [m.name for m in clients]), measure)
    assert aggregator.entropies == {update.client: [i, 0.5] for i, update in enumerate(seen, 1)}
    seen.reverse()
    assert [u.client for u in seen] == [u.client for u in aggregator.updates] == [m.name for m in clients]
    assert not any(u.arrays for u in aggregator.updates)
    weights = np.array([u.num_examples for u in seen], np.float64)
    for name, mean in aggregator.mean.arrays().items():
        stacked = np.stack([u.arrays[name] for u in seen], axis=-1).astype(np.float64)
        np.testing.assert_allclose(mean, stacked @ weights / weights.sum(), rtol=1e-6, atol=1e-12)


class KnownSum(SecureSum):
    """A sum of confusion matrices that stands already, of two clients that have so many test images of each class."""

    def __init__(self, total: np.ndarray, held: tuple[int, ...] = ()) -> None:
        self.total, self.held = total, held

    def collect(self, *_: Any, **__: Any) -> tuple[np.ndarray, list[ClientInfo]]:
        classes, held = NAMES[: len(self.held)], np.array(self.held)
        of_each = [held // 2, held - held // 2]
        return self.total, [
            ClientInfo(name, i, classes, held, test, held, 0, (), (), "", "", (), "", 0)
            for i, (name, test) in enumerate(zip(("north", "south"), of_each, strict=True))
        ]


def test_a_hidden_confusion_matrix_with_a_negative_count_is_refused(tiny: Values) -> None:
    """Each row still has as many images as there are."""
    config = parse(tiny)
    scenario = build_scenario(config)
    context = RoundContext(scenario.schedule, 1)
    right = np.diag(np.bincount(scenario.dataset.test_labels)[context.seen_classes]).astype(np.float64)
    sum_hidden_counts(KnownSum(right.ravel()), Packet(), scenario.dataset, context, config)
    right[0, 1:3] = 5, -5
    with pytest.raises(RunError, match="the sum is no count of the images"):
        sum_hidden_counts(KnownSum(right.ravel()), Packet(), scenario.dataset, context, config)


def test_a_hidden_confusion_matrix_of_more_images_than_the_nodes_hold_out_is_refused() -> None:
    config = parse(OWN | {"data-dir": "/data", "method": "ncm"})
    dataset, context = SimpleNamespace(class_names=NAMES[:2]), RoundContext(Schedule([[0, 1]], 1), 1)

    def counts(*cells: float) -> tuple[np.ndarray, set[str]]:
        return sum_hidden_counts(KnownSum(np.array(cells), held=(2, 1)), Packet(), dataset, context, config)

    summed, names = counts(2, 0, 1, 0)
    assert (summed.tolist(), names) == ([[2, 0], [1, 0]], {"north", "south"})
    with pytest.raises(RunError, match="the sum is no count of the images"):
        counts(2, 1, 1, 0)


@pytest.mark.parametrize("secure", ["off", "pairwise"])
def test_an_evaluation_by_as_many_as_the_quorum_is_enough(secure: str, tiny: Values) -> None:
    keys = {"method": "fedavg", "evaluate": "clients", "quorum": 3, "secure-aggregation": secure}
    assert run(tiny | keys)["status"] == "finished"


def test_an_evaluation_by_fewer_than_the_quorum_ends_the_run(tiny: Values) -> None:
    with pytest.raises(RunError, match="1 clients evaluated task 1, the quorum is 2"):
        run(tiny | {"evaluate": "clients", "quorum": 2}, broken=lambda node, kind: kind == "evaluate" and node > 0)


def test_the_seconds_of_the_server_are_a_part_of_those_of_the_run(tiny: Values) -> None:
    config = parse(tiny)
    run_experiment(config, FaultyTransport(3))
    seconds = results_of(folder_of(tiny))["seconds"]
    parts = [seconds[name] for name in ("server_aggregate", "server_refine", "evaluate")]
    assert min(parts) > 0
    assert sum(parts) < seconds["total"]


def test_more_nodes_than_a_sum_can_have_are_refused_when_they_come(tiny: Values) -> None:
    begun = Run.__new__(Run)
    begun.config = parse(tiny)
    with pytest.raises(ConfigError, match="a sum of 301 clients"):
        begun._secure_sum([None] * 301, RoundReport(1, 1, []))


def test_the_bytes_of_a_run_are_those_of_all_its_messages(tiny: Values) -> None:
    """2 tasks of one round, 3 nodes that train and evaluate: 12 answers. The first hello is counted apart."""
    bytes_up, bytes_down = [], []

    class Weighing(FaultyTransport):
        def exchange(self, kind: Kind, *args: Any, **more: Any) -> Iterator[Reply]:
            for reply in super().exchange(kind, *args, **more):
                if kind != "hello":
                    bytes_up.append(reply.bytes_up)
                    bytes_down.append(reply.bytes_down)
                yield reply

    config = parse(tiny | {"evaluate": "clients"})
    run_experiment(config, Weighing(3))
    recorded = results_of(folder_of(tiny))["communication"]
    assert len(bytes_up) == 12
    assert min(bytes_up + bytes_down) > 0
    assert (recorded["bytes_up"], recorded["bytes_down"]) == (sum(bytes_up), sum(bytes_down))
