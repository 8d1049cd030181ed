"""A deployment as docker/README.md describes it, as plain processes: TLS, known nodes, process isolation."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from server_app.rounds.run import run_experiment
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.message import Scalar
from tests.conftest import TINY
from tests.helpers.deployment import PATIENCE, Deployment, Process, run_config
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
    count_in_log = deployment.flower("run", ".", "fcil", "--stream", "--run-config", words)
    assert (tmp_path / "nodes" / "results.json").exists(), count_in_log
    values = settings(tmp_path, "here") | more
    run_experiment(parse(values), InProcessTransport(values, NODES))
    assert comparable(tmp_path / "nodes") == comparable(tmp_path / "here")


def end_of(deployment: Deployment, process: "Process[bytes]") -> str:
    assert process.wait(PATIENCE) != 0
    return deployment.log(f"supernode-{NODES}").read_text()


def test_a_node_that_nobody_registered_is_refused(deployment):
    assert "Failed to activate SuperNode" in end_of(deployment, deployment.start_node(NODES, node_settings(NODES)))


def test_a_server_of_another_authority_is_refused(deployment, tmp_path):
    make_keys.main([str(tmp_path), "--nodes", "0"])
    stranger = deployment.start_node(NODES, node_settings(NODES), tmp_path / "ca.crt")
    assert "CERTIFICATE_VERIFY_FAILED" in end_of(deployment, stranger)
