"""The transport without Flower: every client in this process, one after another."""

import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from client_app.client import handle
from client_app.node import Node
from server_app.transport.base import Reply
from task.message import Kind, Packet, Scalar, copy_packet

log = logging.getLogger(__name__)

Tamper = Callable[[int, Kind, Packet], Packet]
Broken = Callable[[int, Kind], bool]


class InProcessTransport:
    """Nodes 0 to ``num_clients`` - 1, which know their partition-id as simulated nodes do.

    Packets are copied both ways, so that nothing is shared, and what cannot travel by wire cannot travel here.
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
            tamper: (node, kind, answer) to the answer that arrives instead; for tests of what clients may do wrong.
            broken: (node, kind) to whether this node never answers.
        """
        given = node_settings or {}
        each = [given] * num_clients if isinstance(given, Mapping) else given
        place, run = {"num-partitions": num_clients}, secrets.token_hex(8)
        self._nodes = {i: Node(values, {**own, **place, "partition-id": i}, run) for i, own in enumerate(each)}
        self._tamper = tamper
        self._broken = broken

    def nodes(self) -> list[int]:
        """All of them, always connected."""
        return list(self._nodes)

    def busy(self) -> set[int]:
        """None: a node that never answers does not even start."""
        return set()

    def exchange(self, kind: Kind, packets: Mapping[int, Packet], timeout: float) -> Iterable[Reply]:
        """Hand one packet to each node in turn; yields one reply per addressed node, in the order of ``packets``.

        ``timeout`` (seconds) only words the error of a broken node: as each waits for the one before, none is late.
        Bytes are those of the arrays and of the scalars as JSON.

        Raises:
            TypeError, ValueError: a packet holds something that cannot travel.
        """
        return (self._ask(kind, node, packet, timeout) for node, packet in packets.items())

    def _ask(self, kind: Kind, node: int, packet: Packet, timeout: float) -> Reply:
        sent = copy_packet(packet)
        down = _size(sent)
        if node not in self._nodes:
            return Reply(node, None, "there is no such node", 0, 0)
        if self._broken is not None and self._broken(node, kind):
            return Reply(node, None, f"no answer within {timeout:g} s", down, 0)
        try:
            answer = copy_packet(handle(kind, sent, self._nodes[node]))
        except Exception as error:  # as Flower's glue does, which must always answer
            log.exception("no answer to a %s message", kind)
            answer = Packet(config={"error": f"{type(error).__name__}: {error}"})
        if self._tamper is not None:
            answer = self._tamper(node, kind, answer)
        return Reply(node, answer, "", down, _size(answer))


def _size(packet: Packet) -> int:
    arrays = [*packet.arrays.values(), *packet.statistics.values()]
    # eight bytes a number, as on the wire: the text of a float would make the size depend on how long a round took
    return sum(array.nbytes for array in arrays) + 8 * len(packet.metrics) + len(json.dumps(packet.config))
