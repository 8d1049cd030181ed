"""The transport over Flower's Grid: the same for Ray's simulated nodes and for SuperNodes on other machines."""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flwr.app import DEFAULT_TTL, Error, Message
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid

from client_app.flower_records import from_records, message_type, to_records
from server_app.errors import one_line
from server_app.transport.answers import Answer, Answers, HttpAnswers, WholeAnswers, patiently
from server_app.transport.base import SMALL_ANSWER, Reply
from task.message import Kind, Packet, payload_bytes

_CHECK_INTERVAL = 10.0  # seconds between two checks for restarted nodes
_GRACE = 3.0  # seconds after the timeout in which answers that have arrived may still be fetched
_TURN = 2.0  # seconds of fetching one answer, which may have any number of objects, before the others have their turn
_EXCEPTION = re.compile(r"<class '(?P<module>(?:\w+\.)*)(?P<kind>\w+)(?:\(\w+\))?'>:<'(?P<text>.*)'>", re.DOTALL)
_ANSI_COLOURS = re.compile(r"\x1b\[\d*m")


class GridTransport:
    """Nodes, send and receive over a Grid.

    A node gets one message at a time, because Flower may run two at once. When an exchange ends without a node's
    answer, the node's next message waits until that late answer has come, which is thrown away. A restarted node has
    lost its message, and Flower does not report that: the transport checks when each node was last started.
    """

    one_process = False

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._answers: Answers = HttpAnswers(grid) if isinstance(grid, HttpGrid) else WholeAnswers(grid)
        self._unanswered: dict[str, _Envelope] = {}  # of earlier exchanges, by id of the message

    def nodes(self) -> list[int]:
        """Ids of the connected nodes; Flower draws them at random for every run and lists them in any order."""
        return list(patiently(self._grid.get_node_ids))

    def busy(self) -> set[int]:
        """Nodes without an answer when the last exchange ended."""
        return {envelope.node for envelope in self._unanswered.values()}

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = SMALL_ANSWER
    ) -> Iterator[Reply]:
        """Send one packet to each node; yields one reply per addressed node as they come.

        A packet that several nodes get is serialised once. The time that the caller spends between two replies does
        not count for the timeout. A node that is still busy with an earlier message gets this one as soon as it is
        free; the exchange ends without it when all others have answered. It ends within ``timeout`` and five seconds,
        also while nodes are still sending their answers.

        Raises:
            TypeError, ValueError: a packet holds something that cannot travel.
            RunError: the SuperLink fails again and again.
        """
        envelopes = _envelopes(kind, packets, timeout)
        exchange = _Exchange(self._grid, self._answers, self._unanswered, envelopes, timeout, largest_answer)
        try:
            while not exchange.finished() and (waited := exchange.seconds_waited()) < timeout:
                exchange.send()
                yield from exchange.collect()
                if not exchange.finished():  # the next poll is after a twentieth of the time waited so far, 0.1 to 2 s
                    time.sleep(min(timeout - waited, 2.0, max(0.1, waited / 20)))
        finally:
            failed = exchange.close()
        yield from failed


def readable_reason(error: Error) -> str:
    """The last useful line of Flower's reason for a failure, which may hold a whole traceback of Ray's workers."""
    text, prefix = _ANSI_COLOURS.sub("", error.reason or f"Flower error {error.code}"), ""
    if match := _EXCEPTION.fullmatch(text.strip()):
        text = match["text"]
        prefix = "" if match["module"].startswith("ray") else f"{match['kind']}: "
    cause = text.split("\n\nThe above exception")[0].splitlines()
    last = max((i for i, line in enumerate(cause) if line.strip() and not line[0].isspace()), default=0)
    return one_line(prefix + " ".join(cause[last:]))


@dataclass(frozen=True)
class _Envelope:
    """A message to a node and what is known of it."""

    node: int  # its id
    size: int  # bytes of the packet
    expires: float  # time after which Flower no longer knows the message, in seconds since 1970
    message: Message | None  # None once it is sent, to free its memory
    started: str = ""  # when the node was last started before the message was sent; empty where that is unknown


class _Exchange:
    """The state of one exchange: each envelope is waiting, sent, or replied to."""

    def __init__(
        self,
        grid: Grid,
        answers: Answers,
        unanswered: dict[str, _Envelope],
        envelopes: list[_Envelope],
        timeout: float,
        largest_answer: int,
    ) -> None:
        self._grid, self._answers, self._timeout, self._largest_answer = grid, answers, timeout, largest_answer
        self._unanswered = unanswered
        self._waiting = {envelope.node: envelope for envelope in envelopes}
        self._sent: dict[str, _Envelope] = {}  # by id of the message
        self._failed: list[Reply] = []
        self._any_reply = False
        self._started, self._caller_seconds = time.monotonic(), 0.0
        self._starts: dict[int, str] = {}  # when each node was last started
        self._next_check = 0.0

    def finished(self) -> bool:
        """Whether no further reply is to be waited for."""
        return not self._sent and not self._ready() and (not self._waiting or self._any_reply)

    def seconds_waited(self) -> float:
        """Seconds since the start, without those that the caller has spent on replies."""
        return time.monotonic() - self._started - self._caller_seconds

    def _ready(self) -> list[_Envelope]:
        """Envelopes of nodes that are free."""
        busy = {envelope.node for envelope in self._unanswered.values()}
        return [envelope for envelope in self._waiting.values() if envelope.node not in busy]

    def send(self) -> None:
        """Push the messages to nodes that are free; all in one list, as a generator fails over HTTP."""
        self._drop_restarted()
        ready = [self._waiting.pop(envelope.node) for envelope in self._ready()]
        messages = [envelope.message for envelope in ready if envelope.message is not None]
        accepted = set(patiently(self._grid.push_messages, messages)) if messages else set()
        for envelope, message in zip(ready, messages, strict=True):
            # by id and not by position: refused messages are missing from the answer, or None in it
            if message.metadata.message_id in accepted:
                started = self._starts.get(envelope.node, "")
                self._sent[message.metadata.message_id] = replace(envelope, message=None, started=started)
            else:
                self._fail(envelope, "Flower did not accept the message: the node is gone or the message too large", 0)

    def _drop_restarted(self) -> None:
        """Do not wait for a node that was restarted, or was offline for long, since its message was sent."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _CHECK_INTERVAL
        self._starts = {node.node_id: node.last_activated_at for node in patiently(self._grid.get_nodes)}
        for envelopes in (self._unanswered, self._sent):
            lost = [k for k, e in envelopes.items() if e.started and self._starts.get(e.node, e.started) != e.started]
            for envelope in map(envelopes.pop, lost):
                if envelopes is self._sent:
                    self._fail(envelope, "was restarted or out of reach before it answered", envelope.size)

    def collect(self) -> Iterator[Reply]:
        """Take the answers that are there, a few at a time; again if more may have come while the caller was busy."""
        any_answers = True
        while any_answers:
            any_answers = False
            # in a simulation, asking for the answer to an expired message raises KeyError
            for message_id in [i for i, envelope in self._unanswered.items() if envelope.expires < time.time()]:
                del self._unanswered[message_id]
            message_ids = self._answers.look([*self._sent, *self._unanswered])
            for start in range(0, len(message_ids), self._answers.batch):
                answers = self._take(message_ids[start : start + self._answers.batch])
                any_answers = any_answers or bool(answers)
                while answers:
                    reply, yielded = _reply(*answers.pop()), time.monotonic()
                    yield reply
                    del reply
                    self._caller_seconds += time.monotonic() - yielded

    def _take(self, message_ids: list[str]) -> list[tuple["_Envelope", Answer]]:
        """Answers to messages of this exchange; late answers to earlier messages are thrown away."""
        answers = []
        message_ids = [i for i in message_ids if i in self._sent or i in self._unanswered]
        until = time.monotonic() + min(_TURN, self._timeout + _GRACE - self.seconds_waited())
        for message_id, answer in self._answers.take(message_ids, until, self._largest_answer) if message_ids else []:
            self._unanswered.pop(message_id, None)
            if envelope := self._sent.pop(message_id, None):
                self._any_reply = True
                answers.append((envelope, answer))
        return answers

    def close(self) -> list[Reply]:
        """End the exchange; returns a reply with an error for each node that has failed or not answered."""
        for envelope in self._waiting.values():
            self._fail(envelope, "still busy with an earlier message", 0)
        for envelope in self._sent.values():
            self._fail(envelope, f"no answer within {self._timeout:g} s", envelope.size)
        self._unanswered |= self._sent
        return self._failed

    def _fail(self, envelope: _Envelope, reason: str, bytes_down: int) -> None:
        self._any_reply = True
        self._failed.append(Reply(envelope.node, None, reason, bytes_down, 0))


def _envelopes(kind: Kind, packets: Mapping[int, Packet], timeout: float) -> list[_Envelope]:
    # each packet is serialised once, however many nodes get it
    once = {id(packet): packet for packet in packets.values()}
    contents = {i: (to_records(packet), payload_bytes(packet)) for i, packet in once.items()}
    # Flower must accept a late answer too, or the node would seem free while it works
    envelopes, ttl = [], DEFAULT_TTL + timeout
    for node, packet in packets.items():
        records, size = contents[id(packet)]
        message = Message(records, node, message_type(kind), ttl=ttl)
        envelopes.append(_Envelope(node, size, message.metadata.created_at + ttl - 60, message))
    return envelopes


def _reply(envelope: _Envelope, answer: Answer) -> Reply:
    try:
        if isinstance(answer, Exception):
            raise answer
        if answer.has_error():
            return Reply(envelope.node, None, readable_reason(answer.error), envelope.size, 0)
        packet = from_records(answer.content)
        return Reply(envelope.node, packet, "", envelope.size, payload_bytes(packet))
    except ConnectionError as error:
        return Reply(envelope.node, None, str(error), envelope.size, 0)
    except Exception as error:  # an unreadable answer must not end the run
        reason = one_line(f"unreadable answer: {type(error).__name__}: {error}")
        return Reply(envelope.node, None, reason, envelope.size, 0)
