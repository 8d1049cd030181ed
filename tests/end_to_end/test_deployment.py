"""A deployment as docker/README.md describes it, as plain processes: TLS, known nodes, process isolation."""

import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_app.rounds.run import run_experiment
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.message import Scalar
from tests.conftest import TINY
from tests.helpers.deployment import PATIENCE, Deployment, Process, rounds_in, run_config, until
from tests.helpers.proxy import make_keys
from tests.helpers.runs import comparable

pytestmark = [pytest.mark.flower, pytest.mark.slow]

NODES = 3


def node_settings(number: int) -> str:
    return f"partition-id={number} num-partitions={NODES}"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment"), NODES + 1) as running:
        for i in range(NODES):
            running.register(i)
            running.start_node(i, node_settings(i))
        yield running


def settings(folder: Path, name: str) -> dict[str, Scalar]:
    return TINY | {"num-clients": NODES, "output-dir": str(folder), "run-name": name}


@pytest.mark.parametrize("more", [{}, {"method": "afcl", "secure-aggregation": "pairwise"}], ids=["plain", "sums"])
def test_nodes_end_with_the_numbers_of_a_run_in_one_process(deployment, tmp_path, more):
    """A node's secrets of a secure sum outlive the processes that answer its messages."""
    words = run_config(settings(tmp_path, "nodes") | more)
    said = deployment.flower("run", ".", "fcil", "--stream", "--run-config", words)
    assert (tmp_path / "nodes" / "results.json").exists(), said
    values = settings(tmp_path, "here") | more
    run_experiment(parse(values), InProcessTransport(NODES))
    assert comparable(tmp_path / "nodes") == comparable(tmp_path / "here")
    check_listed(list_nodes(deployment, tmp_path))


def list_nodes(deployment: Deployment, runs: Path) -> list[dict[str, Any]]:
    """What fcil nodes says of the deployment."""
    command = ["fcil", "nodes", "fcil", "--json", "--runs", str(runs)]
    return json.loads(deployment.people(command).stdout)


def check_listed(nodes: list[dict[str, Any]]) -> None:
    assert [node["registered_as"] for node in nodes] == [f"node-{i}" for i in range(NODES)]
    assert [node["name"] for node in nodes] == [f"client-000{i}" for i in range(NODES)]
    now = datetime.datetime.now(datetime.UTC)
    for node in nodes:
        assert node["status"] == "online"
        seen = datetime.datetime.fromisoformat(node["last_seen"])
        assert datetime.datetime.fromisoformat(node["since"]) <= seen
        assert now - datetime.timedelta(seconds=60) < seen <= now
        assert node["last_round"] == "nodes: task 2, round 1"
        assert node["free_disk"] > 0
        assert node["versions"][0].startswith("torch ")


def test_the_health_check_of_the_services_finds_the_superlink(deployment):
    authority, port = str(deployment.keys / "ca.crt"), str(deployment.port)
    deployment.people([sys.executable, "docker/systemd/health.py", authority, "--port", port])


def end_of(deployment: Deployment, process: "Process[bytes]") -> str:
    assert process.wait(PATIENCE) != 0
    return deployment.log(f"supernode-{NODES}").read_text()


def test_a_node_that_nobody_registered_is_refused(deployment):
    assert "Failed to activate SuperNode" in end_of(deployment, deployment.start_node(NODES, node_settings(NODES)))


def test_a_server_of_another_authority_is_refused(deployment, tmp_path):
    make_keys.main([str(tmp_path), "--nodes", "0"])
    stranger = deployment.start_node(NODES, node_settings(NODES), tmp_path / "ca.crt")
    assert "CERTIFICATE_VERIFY_FAILED" in end_of(deployment, stranger)


def test_a_revoked_node_is_refused_and_the_run_goes_on(deployment, tmp_path):
    """As docs/guides/operations.md has it; the last test, as the node stays away."""
    lost = NODES - 1
    run_id = deployment.submit(settings(tmp_path, "revoked") | {"rounds-per-task": 2})
    until(lambda: rounds_in(tmp_path / "revoked") > 0, deployment.report())
    [node] = [n for n in list_nodes(deployment, tmp_path) if n["registered_as"] == f"node-{lost}"]
    deployment.flower("supernode", "unregister", node["node_id"], "fcil")
    assert deployment.status(run_id) == "finished:completed"
    # it says 401 if a heartbeat or a pull is refused first, and nothing if it is the sending of an answer
    assert deployment.processes[f"supernode-{lost}"].wait(PATIENCE) is not None
    rounds = [json.loads(line) for line in (tmp_path / "revoked" / "rounds.jsonl").read_text().splitlines()]
    missing = [[failure["name"] for failure in r["failures"]] for r in rounds]
    assert len(missing) == 4
    assert missing[-1] == [f"client-000{lost}"]
    assert all(names in ([], missing[-1]) for names in missing)

    deployment.log(f"supernode-{lost}").write_text("")
    assert deployment.start_node(lost, node_settings(lost)).wait(PATIENCE) != 0
    assert "Failed to activate SuperNode" in deployment.log(f"supernode-{lost}").read_text()
    again = deployment.try_flower("supernode", "register", f"{deployment.keys}/node-{lost}.pub", "fcil", "--name", "x")
    assert "Public key already in use" in again.stdout + again.stderr
    assert [n["registered_as"] for n in list_nodes(deployment, tmp_path)] == [f"node-{i}" for i in range(lost)]
