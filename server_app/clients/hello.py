"""The start of a run: waiting for nodes, and the hello round."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from server_app.clients.client_info import Member, _member
from server_app.errors import RunError, one_line
from server_app.transport.base import Transport, in_order
from task.config.schema import Config
from task.data.images import Dataset
from task.message import Packet

log = logging.getLogger(__name__)

START_TIMEOUT = 60.0  # seconds for a first node to connect
SETTLED = 2.0  # seconds without a new node after which the connected ones are taken for all


@dataclass(frozen=True)
class Absence:
    """A node that cannot take part: its handle, its name as far as known, why, and whether it gave that answer."""

    node: int
    name: str
    reason: str
    answered: bool


def wait_for_nodes(transport: Transport, expected: int, patience: float, least: int | None = None) -> list[int]:
    """Handles of the connected nodes: at least ``expected``, or when that is 0 all there are once no more appear.

    Args:
        transport: reaches them.
        expected: how many there should be, 0 for as many as connect.
        patience: seconds without a new node after which the missing ones are given up; START_TIMEOUT at least for the
            first one.
        least: with how many to make do when no more appear; none but ``expected`` if not given.

    Raises:
        RunError: too few nodes.
    """
    seen, since = 0, time.monotonic()
    while True:
        nodes, now = list(transport.nodes()), time.monotonic()
        if len(nodes) > seen:
            seen, since = len(nodes), now
        if (expected and len(nodes) >= expected) or (not expected and nodes and now - since >= SETTLED):
            return nodes
        if now - since > (patience if seen else max(patience, START_TIMEOUT)):
            if least and len(nodes) >= least:
                log.warning("going on with %d of %d nodes; the others may join later", len(nodes), expected)
                return nodes
            raise RunError(
                f"num-clients = {expected or 'as many as connect'}, but {len(nodes)} nodes are connected and for "
                f"{now - since:.0f} s no more have come. In a simulation, add --federation-config "
                f"num-supernodes={expected or 2}; nodes elsewhere may need a longer start-timeout."
            )
        time.sleep(0.1)


def greet(
    transport: Transport, nodes: Sequence[int], config: Config, dataset: Dataset | None
) -> tuple[list[Member], list[Absence]]:
    """Say hello to some nodes; those that can take part by name, and why each of the others cannot.

    Args:
        transport: reaches them.
        nodes: their handles.
        config: the run keys.
        dataset: the run's, or None where each node has its own.
    """
    packet = Packet(config={"run-config": json.dumps(config.for_clients())})
    packets = dict.fromkeys(nodes, packet)
    replies = in_order(transport.exchange("hello", packets, config.round_timeout), packets)
    members, absent = [], []
    for reply in replies:
        try:
            members.append(_member(reply, dataset))
        except Exception as error:  # whatever a node says of itself must not end the run
            reason = one_line(str(error) or type(error).__name__)
            log.warning("node %s does not take part: %s", reply.node, reason)
            absent.append(Absence(reply.node, f"node {reply.node}", reason, answered=reply.packet is not None))
    return sorted(members, key=lambda m: m.name), absent


def mismatch(member: Member, backbone: str, code: str) -> str:
    """Why a client would compute something else than the server, with what to do about it; else an empty text."""
    if member.backbone_sha256 != backbone:
        return "other backbone weights than the server: give every node the same backbone-weights"
    if member.code_sha256 != code:
        return (
            "another copy of the code than the server: a simulation imports it from the folder in which the local "
            "SuperLink was started: stop that SuperLink, or use 'fcil run', which starts its own"
        )
    return ""
