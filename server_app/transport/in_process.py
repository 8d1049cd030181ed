"""The transport without Flower: every client in this process, one after another."""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from client_app.client import handle
from client_app.node import Node
from server_app.transport.base import Reply
from task.message import Kind, Packet, Scalar, detached, payload_bytes

log = logging.getLogger(__name__)

Tamper = Callable[[int, Kind, Packet], Packet]
Broken = Callable[[int, Kind], bool]


class InProcessTransport:
    """Nodes 0 to ``num_clients`` - 1, whose partition-ids are these numbers, as in Flower's simulation.

    Packets are copied both ways and checked as on the wire, so that nothing is shared.
    """

    def __init__(
        self,
        values: Mapping[str, Scalar],
        num_clients: int,
        node_settings: Mapping[str, Scalar] | Sequence[Mapping[str, Scalar]] | None = None,
        *,
        tamper: Tamper | None = None,
        broken: Broken | None = None,
    ) -> None:
        """Build the nodes; nothing runs yet.

        Args:
            values: the run's flat configuration, as every node gets it.
            num_clients: how many nodes there are.
            node_settings: node config of every node, or of each, beside its partition-id and num-partitions.
            tamper: gets node, kind and answer; returns the answer that arrives instead. For tests.
            broken: gets node and kind; returns whether this node does not answer. For tests.
        """
        settings = node_settings or {}
        by_node = [settings] * num_clients if isinstance(settings, Mapping) else settings
        run = secrets.token_hex(8)
        self._nodes = {
            i: Node(values, {**own, "num-partitions": num_clients, "partition-id": i}, run)
            for i, own in enumerate(by_node)
        }
        self._tamper = tamper
        self._broken = broken

    def nodes(self) -> list[int]:
        """All of them, always connected."""
        return list(self._nodes)

    def busy(self) -> set[int]:
        """None: each node answers before the next one is asked."""
        return set()

    def exchange(self, kind: Kind, packets: Mapping[int, Packet], timeout: float) -> Iterable[Reply]:
        """Hand one packet to each node in turn; yields one reply per addressed node, in the order of ``packets``.

        ``timeout`` (seconds) only appears in the error of a broken node: no node can be late.

        Raises:
            TypeError, ValueError: a packet holds something that cannot travel.
        """
        return (self._ask(kind, node, packet, timeout) for node, packet in packets.items())

    def _ask(self, kind: Kind, node: int, packet: Packet, timeout: float) -> Reply:
        sent = detached(packet)
        down = payload_bytes(sent)
        if node not in self._nodes:
            return Reply(node, None, "there is no such node", 0, 0)
        if self._broken is not None and self._broken(node, kind):
            return Reply(node, None, f"no answer within {timeout:g} s", down, 0)
        try:
            answer = detached(handle(kind, sent, self._nodes[node]))
        except Exception as error:  # as Flower's glue does, which must always answer
            log.exception("no answer to a %s message", kind)
            answer = Packet(config={"error": f"{type(error).__name__}: {error}"})
        if self._tamper is not None:
            answer = self._tamper(node, kind, answer)
        return Reply(node, answer, "", down, payload_bytes(answer))
