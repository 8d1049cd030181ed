"""The transport over Flower's Grid: the same for Ray's simulated nodes and for SuperNodes on other machines."""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import DEFAULT_TTL, Array, Error, Message
from flwr.serverapp import Grid

from client_app.flower_records import MESSAGE_TYPES, Encode, from_records, to_records
from server_app.errors import one_line
from server_app.transport.base import Reply
from task.message import Kind, Packet, payload_bytes

_LOOK = 10.0  # seconds between two looks for nodes that were started anew
_AT_ONCE = 16  # answers that are pulled together, and so in memory together
_WRAPPED = re.compile(r"<class '(?P<module>[\w.]*?)\.?(?P<kind>\w+)(?:\(\w+\))?'>:<'(?P<text>.*)'>", re.DOTALL)
_COLOURS = re.compile(r"\x1b\[\d*m")


class GridTransport:
    """Nodes, send and receive over a Grid.

    A node gets one message at a time, for Flower may run two at once. While it owes the answer to a message that an
    earlier exchange has given up, its next one is held back; the late answer is thrown away when it comes. A node that
    is started anew has forgotten its message, and Flower does not say so: it is looked for.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._owed: dict[str, _Envelope] = {}

    def nodes(self) -> list[int]:
        """Ids of the connected nodes; Flower draws them at random for every run and lists them in any order."""
        return list(self._grid.get_node_ids())

    def busy(self) -> set[int]:
        """Those that owed an answer when the last exchange ended."""
        return {envelope.node for envelope in self._owed.values()}

    def exchange(self, kind: Kind, packets: Mapping[int, Packet], timeout: float) -> Iterator[Reply]:
        """Send one packet to each node; yields one reply per addressed node as they come.

        Args:
            kind: which handler of the client answers.
            packets: by node id; left as they are. An array that several packets share is serialised once.
            timeout: seconds of waiting; what the caller does between two replies does not count. A node that is still
                busy with an earlier message gets this one as soon as it is free; when all the others have answered, it
                is not waited for.

        Raises:
            TypeError, ValueError: a packet holds something that cannot travel.
        """
        started = time.monotonic()
        exchange = _Exchange(self._grid, self._owed, _envelopes(kind, packets, timeout))
        try:
            while not exchange.finished() and (waited := time.monotonic() - started - exchange.busy) < timeout:
                exchange.send()
                yield from exchange.collect()
                if not exchange.finished():
                    time.sleep(min(timeout - waited, _pause(waited)))
        finally:
            failed = exchange.close(timeout)
        yield from failed


def readable_reason(error: Error) -> str:
    """The last useful line of Flower's reason for a failure, which may hold a whole traceback of Ray's workers."""
    text, prefix = _COLOURS.sub("", error.reason or f"Flower error {error.code}"), ""
    if wrapped := _WRAPPED.fullmatch(text.strip()):
        text = wrapped["text"]
        prefix = "" if wrapped["module"].startswith("ray") else f"{wrapped['kind']}: "
    cause = text.split("\n\nThe above exception")[0].splitlines()
    last = max((i for i, line in enumerate(cause) if line.strip() and not line[0].isspace()), default=0)
    return one_line(prefix + " ".join(cause[last:]))


@dataclass(frozen=True)
class _Envelope:
    """A message of an exchange, which is dropped once sent: it may be large, and its answer may never come.

    ``started`` is when its node had last come online when it was sent, empty where that is unknown.
    """

    node: int
    size: int
    expires: float
    message: Message | None
    started: str = ""


class _Exchange:
    """The state of one exchange: each envelope is held, sent, or replied to.

    ``busy`` is how many seconds the caller has spent on replies.
    """

    def __init__(self, grid: Grid, owed: dict[str, _Envelope], envelopes: list[_Envelope]) -> None:
        self._grid = grid
        self._owed = owed
        self._held = {envelope.node: envelope for envelope in envelopes}
        self._sent: dict[str, _Envelope] = {}
        self._failed: list[Reply] = []
        self._replied = False
        self.busy = 0.0
        self._starts: dict[int, str] = {}
        self._next_look = 0.0

    def finished(self) -> bool:
        """Whether nothing is left that is worth waiting for."""
        return not self._sent and not self._free() and (not self._held or self._replied)

    def _free(self) -> list[_Envelope]:
        """What is held back for nodes that owe nothing."""
        owing = {owed.node for owed in self._owed.values()}
        return [envelope for envelope in self._held.values() if envelope.node not in owing]

    def send(self) -> None:
        """Push what is held back for nodes that are free; all in one list, as a generator fails over HTTP."""
        self._look()
        free = [self._held.pop(envelope.node) for envelope in self._free()]
        messages = [envelope.message for envelope in free if envelope.message is not None]
        accepted = set(self._grid.push_messages(messages)) if messages else set()
        for envelope, message in zip(free, messages, strict=True):
            # refused messages are missing from the answer or None in it, so it cannot be matched by position
            if message.metadata.message_id in accepted:
                started = self._starts.get(envelope.node, "")
                self._sent[message.metadata.message_id] = replace(envelope, message=None, started=started)
            else:
                self._fail(envelope, "Flower did not accept the message: the node is gone or the message too large", 0)

    def _look(self) -> None:
        """Give up what was sent to a node that has been started anew since, or was out of reach so long that it may."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK
        self._starts = {node.node_id: node.last_activated_at for node in self._grid.get_nodes()}
        for awaited in (self._owed, self._sent):
            anew = [k for k, e in awaited.items() if e.started and self._starts.get(e.node, e.started) != e.started]
            for lost in map(awaited.pop, anew):
                if awaited is self._sent:
                    self._fail(lost, "was restarted or out of reach before it answered", lost.size)

    def collect(self) -> Iterator[Reply]:
        """Pull the answers that have come, a few at a time, until no more have come while the caller was busy."""
        came = True
        while came:
            came, awaited = False, [*self._sent, *self._owed]
            for start in range(0, len(awaited), _AT_ONCE):
                answers = self._pulled(awaited[start : start + _AT_ONCE])
                came = came or bool(answers)
                while answers:
                    reply, began = _reply(*answers.pop()), time.monotonic()
                    yield reply
                    del reply
                    self.busy += time.monotonic() - began

    def _pulled(self, awaited: list[str]) -> list[tuple[_Envelope, Message]]:
        """Answers to those of this exchange's messages; late ones to messages still owed are thrown away."""
        answers = []
        # asking for a message whose time is over raises KeyError in a simulation
        for over in [known for known, envelope in self._owed.items() if envelope.expires < time.time()]:
            del self._owed[over]
        awaited = [known for known in awaited if known in self._sent or known in self._owed]
        for message in self._grid.pull_messages(awaited) if awaited else []:
            # not by sender: the SuperLink itself answers for nodes that are gone
            answered = message.metadata.reply_to_message_id
            self._owed.pop(answered, None)
            if envelope := self._sent.pop(answered, None):
                self._replied = True
                answers.append((envelope, message))
        return answers

    def close(self, timeout: float) -> list[Reply]:
        """Give up what is still open; the replies of all that failed."""
        for envelope in self._held.values():
            self._fail(envelope, "still busy with an earlier message", 0)
        for envelope in self._sent.values():
            self._fail(envelope, f"no answer within {timeout:g} s", envelope.size)
        self._owed |= self._sent
        return self._failed

    def _fail(self, envelope: _Envelope, reason: str, bytes_down: int) -> None:
        self._replied = True
        self._failed.append(Reply(envelope.node, None, reason, bytes_down, 0))


def _envelopes(kind: Kind, packets: Mapping[int, Packet], timeout: float) -> list[_Envelope]:
    encode, envelopes = _shared_encoder(), []
    for node, packet in packets.items():
        # a late answer must still be accepted, or the node would seem free while it works
        ttl = DEFAULT_TTL + timeout
        message = Message(to_records(packet, encode), node, MESSAGE_TYPES[kind], ttl=ttl)
        expires = message.metadata.created_at + ttl - 60
        envelopes.append(_Envelope(node, payload_bytes(packet), expires, message))
    return envelopes


def _shared_encoder() -> Encode:
    """Serialises each array once, however many nodes get it."""
    encoded: dict[int, tuple[np.ndarray, Array]] = {}

    def encode(array: np.ndarray) -> Array:
        if id(array) not in encoded:
            # the array is kept too: no other one can get its id
            encoded[id(array)] = array, Array.from_numpy_ndarray(array)
        return encoded[id(array)][1]

    return encode


def _reply(envelope: _Envelope, message: Message) -> Reply:
    if message.has_error():
        return Reply(envelope.node, None, readable_reason(message.error), envelope.size, 0)
    try:
        packet = from_records(message.content)
    except Exception as error:  # whatever a client sends must not end the run
        return Reply(envelope.node, None, f"unreadable answer: {error}", envelope.size, 0)
    return Reply(envelope.node, packet, "", envelope.size, payload_bytes(packet))


def _pause(waited: float) -> float:
    """Seconds until the next poll: a twentieth of the waiting so far, so that polling neither delays nor burdens."""
    return min(2.0, max(0.1, waited / 20))
