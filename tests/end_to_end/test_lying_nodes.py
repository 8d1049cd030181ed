"""Nodes that lie at the level of bytes, or never end to send, on a real SuperLink; a run goes on without them."""

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import pytest
from flwr.app import Message

from client_app.app import app
from server_app.errors import MAX_REASON
from server_app.transport.base import sort_replies
from server_app.transport.flower_grid import GridTransport
from task.message import Kind
from tests.conftest import TINY
from tests.helpers.deployment import Network, until
from tests.helpers.flower import packet
from tests.helpers.lying_node import LyingNode, server_app
from tests.helpers.objects import Objects, answered, mutated
from tests.helpers.runs import results_of

pytestmark = [pytest.mark.flower, pytest.mark.slow]

log = logging.getLogger(__name__)

ANSWERS = 2000  # mutated ones of each kind
LIARS = 10


class BareNetwork(Network):
    """A SuperLink that starts no process, as the test is the server app; in memory, which is quicker."""

    isolation = "process"

    def _security(self) -> list[str]:
        return [*super()._security(), "--database=:flwr-in-memory:"]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with BareNetwork(tmp_path_factory.mktemp("network")) as running:
        yield running


def waking(push: Callable[[list[Message]], list[str]], liars: list[LyingNode]) -> Callable[[list[Message]], list[str]]:
    """Push messages, and tell the nodes at once."""

    def push_and_wake(messages: list[Message]) -> list[str]:
        ids = push(messages)
        for liar in liars:
            liar.wake.set()
        return ids

    return push_and_wake


@pytest.mark.parametrize("kind", get_args(Kind))
def test_mutated_bytes_through_a_superlink(kind: str, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, address, refused, began = random.Random(kind), f"127.0.0.1:{network.port}", 0, time.monotonic()
    silent = 0
    network.submit(TINY)

    def spoil(_: str, objects: Objects) -> Objects:
        return mutated(objects, chance)

    with ExitStack() as stack:
        liars = [LyingNode(address, answered(kind), spoil, reads=False, idle=10) for _ in range(LIARS)]
        for liar in liars:
            stack.enter_context(liar)
        grid = stack.enter_context(server_app(address))
        monkeypatch.setattr(grid, "push_messages", waking(grid.push_messages, liars))
        transport = GridTransport(grid)
        until(lambda: len(transport.nodes()) == LIARS, network.report())
        for mark in range(ANSWERS // LIARS):
            packets = {node: packet(mark) for node in transport.nodes()}
            replies = sort_replies(transport.exchange(kind, packets, 60), packets)
            assert len(replies) == LIARS
            for reply in replies:
                assert (reply.packet is None) == bool(reply.error)
                assert reply.error.isprintable()
                assert len(reply.error) <= MAX_REASON
                refused += reply.error.startswith("unreadable answer: ")
                silent += reply.error.startswith(("no answer", "still busy"))
    seconds = time.monotonic() - began
    log.info("%s: %d of %d unreadable, %d did not come, %.0f s", kind, refused, ANSWERS, silent, seconds)
    for failure in (failure for liar in liars for failure in liar.failures):
        log.info("a node failed, and went on: %s", failure)
    assert refused > ANSWERS / 2
    assert silent <= ANSWERS / LIARS  # a node may lock itself out by an answer of which the SuperLink lacks an object


def test_nodes_that_never_end_to_send_hold_no_round_up(network: Network) -> None:
    """One breaks off as if it were killed, one sends an object every three seconds, which renews its time to send."""
    address = f"127.0.0.1:{network.port}"
    network.submit(TINY)

    def break_off(_: str, objects: Objects) -> Objects:
        return Objects(objects.tree, dict(list(objects.contents.items())[:-1]))

    with ExitStack() as stack:
        stack.enter_context(LyingNode(address, answered("train"), break_off))
        stack.enter_context(LyingNode(address, answered("hello"), lambda _, objects: objects, pause=3.0))
        stack.enter_context(LyingNode(address, answered("train"), lambda _, objects: objects))
        transport = GridTransport(stack.enter_context(server_app(address)))
        until(lambda: len(transport.nodes()) == 3, network.report())
        packets, began = {node: packet(i) for i, node in enumerate(sorted(transport.nodes()))}, time.monotonic()
        replies = list(transport.exchange("train", packets, 8))
        assert time.monotonic() - began < 8 + 5
        assert sorted(r.error for r in replies) == ["", "no answer within 8 s", "no answer within 8 s"]


def test_a_run_goes_on_without_a_node_that_lies(tmp_path: Path) -> None:
    """It says hello as it should, and spoils every later answer; in the second round it never ends to send."""
    chance, rounds = random.Random(0), []

    def spoil(kind: str, objects: Objects) -> Objects:
        if kind == "query.hello":
            return objects
        rounds.append(kind)
        if rounds.count("train") == 2:
            return Objects(objects.tree, {objects.tree.object_id: objects.contents[objects.tree.object_id]})
        return mutated(objects, chance)

    values = TINY | {"num-clients": 2, "evaluate": "clients", "output-dir": str(tmp_path), "run-name": "run"}
    with Network(tmp_path) as network:
        network.start_node(0, "partition-id=0 num-partitions=2")
        settings = {"partition-id": 1, "num-partitions": 2}
        with LyingNode(f"127.0.0.1:{network.port}", app, spoil, settings):
            run = network.submit(values | {"round-timeout": 60.0})
            assert network.status(run) == "finished:completed", network.report()
    results = results_of(tmp_path / "run")
    assert results["status"] == "finished"
    assert [[f["name"] for f in r["failures"]] for r in results["rounds"]] == [["client-0001"] * 2] * 2
    assert results["rounds"][1]["failures"][0]["reason"] == "no answer within 60 s"
    assert results["rounds"][1]["seconds"] < 65
