"""The transport without Flower: every client in this process, one after another."""

import logging
import secrets
from collections.abc import Iterable, Mapping

from client_app.client import handle
from client_app.node import Node
from server_app.transport.base import SMALL_ANSWER, Reply
from task.message import Kind, Packet, copy_packet, payload_bytes

log = logging.getLogger(__name__)


class InProcessTransport:
    """Nodes 0 to ``num_clients`` - 1, whose partition-ids are these numbers, as in Flower's simulation.

    Packets are copied both ways and checked as on the wire, so that nothing is shared.
    """

    one_process = True

    def __init__(self, num_clients: int) -> None:
        """Build the nodes; nothing runs yet."""
        run = secrets.token_hex(8)
        self._nodes = {i: Node({"num-partitions": num_clients, "partition-id": i}, run) for i in range(num_clients)}

    def nodes(self) -> list[int]:
        """All of them, always connected."""
        return list(self._nodes)

    def busy(self) -> set[int]:
        """None: each node answers before the next one is asked."""
        return set()

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = SMALL_ANSWER
    ) -> Iterable[Reply]:
        """Hand one packet to each node in the order of ``packets``; none can be late, so ``timeout`` is not used.

        Raises:
            TypeError, ValueError: a packet holds something that cannot travel.
        """
        return (self._ask(kind, node, packet) for node, packet in packets.items())

    def _ask(self, kind: Kind, node: int, packet: Packet) -> Reply:
        sent = copy_packet(packet)
        bytes_down = payload_bytes(sent)
        try:
            answer = copy_packet(handle(kind, sent, self._nodes[node]))
        except Exception as error:  # as Flower's glue does, which must always answer
            log.exception("no answer to a %s message", kind)
            answer = Packet(config={"error": f"{type(error).__name__}: {error}"})
        return Reply(node, answer, "", bytes_down, payload_bytes(answer))
