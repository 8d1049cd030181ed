"""What happens to real nodes at night, done to small deployments; each run ends as one in which nothing happened.

A reference runs in one process and leaves out of each round whom the deployment has named in it.
"""

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server_app.rounds.run import run_experiment
from server_app.transport.base import Reply
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.message import Kind, Packet, Scalar
from tests.conftest import TINY
from tests.helpers.deployment import Deployment, Network, rounds_in, send, until
from tests.helpers.own_data import NAMES, OWN, Changing, store
from tests.helpers.runs import comparable, results_of

pytestmark = [pytest.mark.flower, pytest.mark.slow]

Values = dict[str, Scalar]
NODES = 3
GONE = "Node Unavailable"  # begins what Flower says for a node without heartbeats
LONGER = {"rounds-per-task": 2, "local-epochs": 60}  # some seconds of training, to strike in


def node_settings(number: int, nodes: int = NODES) -> str:
    return f"partition-id={number} num-partitions={nodes}"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment"), NODES) as running:
        for i in range(NODES):
            running.register(i)
            running.start_node(i, node_settings(i))
        yield running


def failed_in(folder: Path) -> list[list[str]]:
    """Names of the nodes that failed in each round."""
    return [[f["name"] for f in line["failures"]] for line in results_of(folder)["rounds"]]


class Failing(InProcessTransport):
    """Nodes that fail to train in given rounds, by name."""

    def __init__(self, nodes: int, failed: list[list[str]]) -> None:
        super().__init__(nodes)
        self._failed = failed

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterable[Reply]:
        replies = super().exchange(kind, packets, timeout, largest_answer)
        if kind != "train" or not packets:
            return replies
        failed = self._failed[int(next(iter(packets.values())).config["server-round"]) - 1]  # type: ignore[arg-type]
        # a message to a node that is gone was sent and counts
        return [
            Reply(r.node, None, "failed", r.bytes_down, 0) if f"client-{r.node:04d}" in failed else r for r in replies
        ]


def without_reasons(folder: Path) -> dict[str, Any]:
    results = comparable(folder)
    for line in results["rounds"]:
        line["failures"] = [f["name"] for f in line["failures"]]
    return results


def assert_as_in_one_process(folder: Path, values: Values) -> None:
    there = folder.with_name("here")
    values = values | {"run-name": there.name}
    run_experiment(parse(values), Failing(int(values["num-clients"]), failed_in(folder)))
    assert without_reasons(folder) == without_reasons(there)


def test_killed_clients_and_nodes_are_named_and_come_back(deployment: Deployment, tmp_path: Path) -> None:
    """A client and a node are killed in the first round; in the second a node is away while the server looks away."""
    values = TINY | LONGER | {"num-clients": NODES, "output-dir": str(tmp_path), "run-name": "run"}
    run, folder = deployment.submit(values), tmp_path / "run"
    deployment.await_training(1, before=0)
    deployment.kill("supernode-1")
    os.kill(deployment.await_training(0, before=0), signal.SIGKILL)
    deployment.await_training(2, before=1)
    [server] = deployment.workers("superexec", "flwr-serverapp")
    os.kill(server, signal.SIGSTOP)
    deployment.end("supernode-2")
    deployment.restart_node(2, node_settings(2))
    os.kill(server, signal.SIGCONT)
    until(lambda: rounds_in(folder) == 2, deployment.report())
    deployment.restart_node(1, node_settings(1))
    assert deployment.status(run) == "finished:completed", deployment.report()

    first, second, _, last = (line["failures"] for line in results_of(folder)["rounds"])
    assert [f["name"] for f in first] == ["client-0000", "client-0001"]
    assert first[0]["reason"] == "ClientApp stopped responding."
    assert GONE in first[1]["reason"]
    restarted = {"name": "client-0002", "reason": "was restarted or out of reach before it answered"}
    assert second == [first[1], restarted]
    assert last == []
    assert_as_in_one_process(folder, values)


def test_a_run_that_ended_is_resumed_and_survives_its_superlink(deployment: Deployment, tmp_path: Path) -> None:
    """Nodes stop below the quorum, then the server app is killed, then the SuperLink."""
    values = TINY | LONGER | {"num-clients": NODES, "quorum": 2, "output-dir": str(tmp_path), "run-name": "run"}
    run, folder = deployment.submit(values), tmp_path / "run"
    until(lambda: rounds_in(folder) == 1, deployment.report())
    stopped = [deployment.processes[f"{role}-{i}"] for role in ("superexec", "supernode") for i in (1, 2)]
    for process in stopped:
        send(process, signal.SIGSTOP)
    assert deployment.status(run) == "finished:failed"
    assert "1 of 3 clients answered, the quorum is 2. client-0001: " in results_of(folder)["error"]
    assert failed_in(folder)[1] == ["client-0001", "client-0002"]
    assert (folder / "model.safetensors").exists()
    for process in stopped:
        send(process, signal.SIGCONT)

    trained = deployment.count_in_log("supernode-0", "Receiving: train message")
    run = deployment.submit({"resume": str(folder)})
    deployment.await_training(0, trained)
    [server] = deployment.workers("superexec", "flwr-serverapp")
    os.kill(server, signal.SIGKILL)
    assert results_of(folder)["status"] == "running"

    trained = deployment.count_in_log("supernode-0", "Receiving: train message")
    run = deployment.submit({"resume": str(folder)})
    deployment.await_training(0, trained)
    deployment.kill("superlink")
    deployment.start_superlink()
    assert deployment.status(run) == "finished:completed", deployment.report()
    assert failed_in(folder) == [[]] * 4
    assert_as_in_one_process(folder, values)


def test_a_run_whose_superexec_dies_says_so_and_is_resumed(deployment: Deployment, tmp_path: Path) -> None:
    values = TINY | LONGER | {"num-clients": NODES, "output-dir": str(tmp_path), "run-name": "run"}
    trained = deployment.count_in_log("supernode-0", "Receiving: train message")
    run, folder = deployment.submit(values), tmp_path / "run"
    until(lambda: rounds_in(folder) == 1, deployment.report())
    deployment.await_training(0, trained + 1)
    superexec = deployment.processes["superexec"]
    superexec.kill()  # not what it has started
    superexec.wait()
    assert deployment.status(run) == "finished:failed"
    assert results_of(folder)["error"].startswith("its process was told to end")
    deployment.start_superexec()
    run = deployment.submit({"resume": str(folder)})
    assert deployment.status(run) == "finished:completed", deployment.report()
    assert_as_in_one_process(folder, values)


def test_nodes_without_keys_and_a_superlink_that_takes_the_run_with_it(tmp_path: Path) -> None:
    values = TINY | LONGER | {"num-clients": 2, "output-dir": str(tmp_path), "run-name": "run"}
    folder = tmp_path / "run"
    with Network(tmp_path) as network:
        for i in range(2):
            network.start_node(i, node_settings(i, 2))
        run = network.submit(values)
        network.await_training(1, before=0)
        network.kill("supernode-1")
        network.start_node(1, node_settings(1, 2))
        until(lambda: rounds_in(folder) == 2, network.report())
        network.await_training(0, before=2)
        network.processes["superlink"].kill()
        network.processes["superlink"].wait()
        until(lambda: not network.workers("superlink", "flwr-serverapp"), "the server app outlives its SuperLink")
        network.start_superlink()
        assert network.status(run) == "finished:failed"
        run = network.submit({"resume": str(folder)})
        assert network.status(run) == "finished:completed", network.report()
        assert network.count_in_log("supernode-1", "SuperNode ID") == 2
    assert failed_in(folder) == [["client-0001"], [], [], []]
    assert results_of(folder)["absent"] == []
    assert_as_in_one_process(folder, values)


BEGIN = {"north": (0, 1, 2), "south": (0, 1, 2), "west": (2, 3)}  # who holds which patterns at first


def own_settings(folder: Path, name: str) -> str:
    return f'name="{name}" data-dir="{folder / name}" state-dir="{folder}/state/{name}"'


def test_nodes_with_images_of_their_own(deployment: Deployment, patterns: list[np.ndarray], tmp_path: Path) -> None:
    """One joins late and brings a class, another finds one, the late one hangs while it trains."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, (name, classes) in product((here, there), BEGIN.items()):
        for c in classes:
            store(folder / name, c, patterns[c])
    values = OWN | LONGER | {"class-order": "appearing", "num-clients": 2, "round-timeout": 120.0}
    values |= {"output-dir": str(tmp_path / "runs")}
    for i in range(NODES):
        deployment.end(f"supernode-{i}")
    for i in range(2):
        deployment.restart_node(i, own_settings(there, list(BEGIN)[i]))
    trained, folder = deployment.count_in_log("supernode-0", "Receiving: train message"), tmp_path / "runs" / "nodes"
    run = deployment.submit(values | {"run-name": "nodes"})
    deployment.await_training(0, trained)
    [server] = deployment.workers("superexec", "flwr-serverapp")
    os.kill(server, signal.SIGSTOP)  # no round may end before the third node is there
    deployment.restart_node(2, own_settings(there, "west"))
    os.kill(server, signal.SIGCONT)
    until(lambda: rounds_in(folder) == 1, deployment.report())
    store(there / "north", 4, patterns[4])
    until(lambda: rounds_in(folder) == 3, deployment.report())
    trained = deployment.count_in_log("supernode-2", "Receiving: train message")
    os.kill(deployment.await_training(2, trained), signal.SIGSTOP)
    assert deployment.status(run) == "finished:completed", deployment.report()

    rounds = results_of(folder)["rounds"]
    assert [r["participants"] for r in rounds] == [["north", "south"], *[["north", "south", "west"]] * 3]
    assert [f["reason"] for r in rounds for f in r["failures"]] == ["ClientApp stopped responding."]
    values |= {"run-name": "here"}
    transport = Changing(
        {
            1: lambda: transport.hidden.clear(),
            2: lambda: store(here / "north", 4, patterns[4]),
            4: lambda: setattr(transport, "broken", lambda node, kind: node == 2 and kind == "train"),
        },
        [{"name": name, "data-dir": str(here / name)} for name in BEGIN],
    )
    transport.hidden = {2}
    run_experiment(parse(values), transport)
    assert without_reasons(folder) == without_reasons(folder.with_name("here"))
    assert results_of(folder)["class_names"] == list(NAMES[:5])
