"""Waiting for nodes at the start of a run, and asking them who they are."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from server_app.clients.client_info import ClientInfo, read_hello
from server_app.errors import RunError, one_line
from server_app.transport.base import Transport, sort_replies
from task.config.schema import Config
from task.data.images import Dataset
from task.message import Packet

log = logging.getLogger(__name__)

START_TIMEOUT = 60.0  # seconds for a first node to connect
SETTLED = 2.0  # seconds without a new node after which no more are waited for, where no number is given


@dataclass(frozen=True)
class AbsentNode:
    """A node that cannot take part, and why; ``answered`` is whether it said so itself."""

    node: int
    name: str
    reason: str
    answered: bool
    said: ClientInfo | None = None  # what it said of itself, where its hello can be read


def wait_for_nodes(transport: Transport, expected: int, patience: float, minimum: int | None = None) -> list[int]:
    """Wait for ``expected`` nodes to connect; with 0, until no further one has come for SETTLED seconds.

    Waiting ends after ``patience`` seconds without a new node, at least START_TIMEOUT for the first one; with
    ``minimum`` given, so many are enough then. Returns the nodes' handles.

    Raises:
        RunError: too few nodes.
    """
    seen, since, settled = 0, time.monotonic(), min(SETTLED, patience)
    while True:
        nodes, now = list(transport.nodes()), time.monotonic()
        if len(nodes) > seen:
            seen, since = len(nodes), now
        if (expected and len(nodes) >= expected) or (not expected and nodes and now - since >= settled):
            return nodes
        if now - since > (patience if seen else max(patience, START_TIMEOUT)):
            if minimum and len(nodes) >= minimum:
                log.warning("going on with %d of %d nodes; the others may join later", len(nodes), expected)
                return nodes
            raise RunError(
                f"num-clients = {expected or 'as many as connect'}, but {len(nodes)} nodes are connected and for "
                f"{now - since:.0f} s no more have come. In a simulation, add --federation-config "
                f"num-supernodes={expected or 2}; nodes elsewhere may need a longer start-timeout."
            )
        time.sleep(0.1)


def say_hello(
    transport: Transport, nodes: Sequence[int], config: Config, dataset: Dataset | None
) -> tuple[list[ClientInfo], list[AbsentNode]]:
    """Ask nodes who they are and what they hold; returns those that can take part, sorted by name, and the others."""
    packets = dict.fromkeys(nodes, Packet(config={"run-config": json.dumps(config.for_clients())}))
    replies = sort_replies(transport.exchange("hello", packets, config.round_timeout), packets)
    clients, absent = [], []
    for reply in replies:
        try:
            clients.append(read_hello(reply, dataset))
        except Exception as error:  # a wrong answer of one node must not end the run
            reason = one_line(str(error) or type(error).__name__)
            log.warning("node %s does not take part: %s", reply.node, reason)
            absent.append(AbsentNode(reply.node, f"node {reply.node}", reason, answered=reply.packet is not None))
    return sorted(clients, key=lambda client: client.name), absent
