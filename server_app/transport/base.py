"""The interface through which the round loop reaches its clients; it has two implementations."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from task.message import Kind, Packet

log = logging.getLogger(__name__)

SILENCE = 30.0  # seconds
SMALL_ANSWER = 2**24  # bytes that every answer may have, beside the arrays that a train message asks for


@dataclass(frozen=True)
class Reply:
    """The answer of one node, or the reason why there is none.

    ``error`` is empty exactly when ``packet`` is set. Bytes are those of :func:`task.message.payload_bytes`: 0 up
    if no packet came, 0 down if none could be sent.
    """

    node: int
    packet: Packet | None
    error: str
    bytes_down: int
    bytes_up: int


class Transport(Protocol):
    """Nodes, send and receive; ``one_process`` says whether the nodes compute in the server's own process."""

    one_process: bool

    def nodes(self) -> list[int]:
        """Handles of the connected nodes, in any order; a node keeps its handle while it stays connected."""

    def busy(self) -> set[int]:
        """Handles of nodes that have not answered a message of an earlier exchange yet."""

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = SMALL_ANSWER
    ) -> Iterable[Reply]:
        """Send one packet to each node; yields one reply per addressed node as they come, in any order.

        The messages are sent when the first reply is requested, and the caller must iterate to the end. Replies are
        not kept here. A node that failed, vanished, did not answer within ``timeout`` seconds or sends more than
        ``largest_answer`` bytes (where answers come over a network) yields a reply with ``error``.
        """


def sort_replies(replies: Iterable[Reply], nodes: Iterable[int]) -> list[Reply]:
    """All replies of an exchange, in the order of ``nodes``, which it addressed."""
    by_node = {reply.node: reply for reply in replies}
    return [by_node[node] for node in nodes]


def count_answers(replies: Iterable[Reply], expected: int) -> Iterator[Reply]:
    """The replies as they come; the log says how many of the ``expected`` ones have come, twice a minute at most."""
    said = time.perf_counter()
    for number, reply in enumerate(replies, start=1):
        if number < expected and time.perf_counter() - said >= SILENCE:
            said = time.perf_counter()
            log.info("answers of %d of %d clients", number, expected)
        yield reply
