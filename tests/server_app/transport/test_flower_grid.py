"""The transport over Flower's Grid: late, lost and unreadable answers, bytes, readable reasons."""

import time
import weakref

import numpy as np
import pytest
from flwr.app import DEFAULT_TTL, Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from client_app.flower_records import to_records
from server_app.transport import flower_grid
from server_app.transport.answers import WholeAnswers
from server_app.transport.base import Reply, sort_replies
from server_app.transport.flower_grid import GridTransport, _envelopes, readable_reason
from task.message import Packet, payload_bytes
from tests.helpers.flower import LoopbackGrid, N, echo, packet

EMPTY_ZIP = b"PK\x05\x06" + bytes(18)  # of which numpy.load makes no array


def asked(transport: GridTransport, packets: dict[int, Packet], timeout: float) -> list[Reply]:
    """All replies to a train message, in the order of ``packets``."""
    return sort_replies(transport.exchange("train", packets, timeout), packets)


def test_an_answer_is_there_before_the_others_have_come():
    """The second one needs half a second, the first nothing; whoever takes time over the first loses no other."""
    grid = LoopbackGrid(echo, 3)
    grid.delay[N[1]], grid.silent = 0.5, {N[2]}
    replies, began = GridTransport(grid).exchange("train", {n: packet(n) for n in N[:3]}, 1.0), time.monotonic()
    assert next(replies).node == N[0]
    assert time.monotonic() < began + 0.4
    time.sleep(1.5)  # beyond the timeout
    second, third = replies
    assert (second.node, second.error) == (N[1], "")
    assert (third.node, third.error) == (N[2], "no answer within 1 s")


def test_an_answer_is_not_lost_when_its_node_is_restarted_while_the_caller_is_busy(monkeypatch):
    """It answers after 0.2 s and is started anew after 0.4 s; the caller spends 0.6 s on the first answer."""
    grid, began = LoopbackGrid(echo, 2), time.monotonic()
    grid.delay[N[1]] = 0.2
    late = {N[1]: lambda: time.monotonic() > began + 0.4}
    monkeypatch.setattr(grid, "started", lambda node: "now" if late.get(node, bool)() else "yesterday")
    monkeypatch.setattr(flower_grid, "_CHECK_INTERVAL", 0.1)
    replies = []
    for reply in GridTransport(grid).exchange("train", {n: packet(n) for n in N[:2]}, 5):
        replies.append((reply.node, reply.error))
        time.sleep(0.6)
    assert replies == [(N[0], ""), (N[1], "")]


def test_a_busy_caller_does_not_shorten_the_waiting_for_a_node_that_is_busy_too():
    """The first node owes an older answer for 0.4 s; the caller spends more than the timeout on another's."""
    grid = LoopbackGrid(echo, 3)
    transport = GridTransport(grid)
    grid.delay[N[0]] = 0.5
    asked(transport, {N[0]: packet(1)}, 0.1)
    grid.delay = {N[0]: 0.1, N[2]: 0.3}
    replies = {}
    for reply in transport.exchange("train", {n: packet(2) for n in N[:3]}, 0.5):
        replies[reply.node] = reply.error, reply.packet.metrics["mark"]
        time.sleep(0.6)
    assert replies == dict.fromkeys(N[:3], ("", 2))


def test_a_few_answers_are_in_memory_at_once(monkeypatch):
    """All four have come; two are pulled together, and one that the caller has seen may still be in its hand."""
    grid, alive, most = LoopbackGrid(echo, 4), [], 0
    monkeypatch.setattr(WholeAnswers, "batch", 2)
    original = grid.pull_messages

    def pull(message_ids):
        pulled = original(message_ids)
        alive.extend(weakref.ref(message) for message in pulled)
        return pulled

    monkeypatch.setattr(grid, "pull_messages", pull)
    for _ in GridTransport(grid).exchange("train", {n: packet(n) for n in N}, 5):
        most = max(most, sum(ref() is not None for ref in alive))
    assert len(alive) == 4
    assert most <= 2


def test_whoever_ends_an_exchange_early_is_owed_what_has_not_come():
    """Two of three answers have been pulled together: their nodes are free, though the second was never looked at."""
    grid = LoopbackGrid(echo, 3)
    transport = GridTransport(grid)
    grid.silent = {N[1]}
    replies = transport.exchange("train", {n: packet(n) for n in N[:3]}, 5)
    next(replies)
    replies.close()
    assert transport.busy() == {N[1]}
    assert [r.error for r in asked(transport, {n: packet(n) for n in (N[0], N[2])}, 5)] == ["", ""]


def test_each_node_gets_its_own_packet_and_replies_keep_the_order():
    transport = GridTransport(LoopbackGrid(echo, 4))
    nodes = [N[2], N[0], N[3]]
    replies = asked(transport, {n: packet(n) for n in nodes}, 5)
    assert [r.node for r in replies] == nodes
    assert [r.packet.metrics["mark"] for r in replies] == nodes
    assert [r.packet.arrays["w"][0, 0] for r in replies] == nodes
    assert [r.error for r in replies] == ["", "", ""]
    assert sorted(transport.nodes()) == sorted(N)
    assert asked(transport, {}, 5) == []


def test_failures_have_reasons_and_spare_the_others():
    grid = LoopbackGrid(echo, 4)
    grid.reason[N[0]] = "<class 'ValueError'>:<'shapes differ'>"
    grid.silent.add(N[1])
    grid.refused.add(N[2])
    replies = asked(GridTransport(grid), {n: packet(1) for n in N}, 0.3)
    assert [r.error for r in replies] == [
        "ValueError: shapes differ",
        "no answer within 0.3 s",
        "Flower did not accept the message: the node is gone or the message too large",
        "",
    ]
    assert [r.packet is None for r in replies] == [True, True, True, False]
    assert [r.bytes_down > 0 for r in replies] == [True, True, False, True]
    assert [r.bytes_up > 0 for r in replies] == [False, False, False, True]


def test_late_answer_is_never_taken_for_a_new_one():
    grid = LoopbackGrid(echo, 2)
    transport = GridTransport(grid)
    grid.delay[N[0]] = 0.5
    first = asked(transport, {N[0]: packet(1), N[1]: packet(1)}, 0.2)
    assert [r.error for r in first] == ["no answer within 0.2 s", ""]
    grid.delay.clear()
    # held back until the node is free, which the grid checks; its own answer comes, not the late one
    [second] = asked(transport, {N[0]: packet(2)}, 5)
    assert second.packet.metrics == {"mark": 2}
    [third] = asked(transport, {N[0]: packet(3)}, 5)
    assert third.packet.metrics == {"mark": 3}


def test_a_busy_node_holds_up_nobody():
    grid = LoopbackGrid(echo, 2)
    transport = GridTransport(grid)
    grid.silent.add(N[0])
    asked(transport, {N[0]: packet(1)}, 0.1)
    started = time.monotonic()
    replies = asked(transport, {N[0]: packet(2), N[1]: packet(2)}, 60)
    assert time.monotonic() - started < 5
    assert [r.error for r in replies] == ["still busy with an earlier message", ""]
    assert replies[0].bytes_down == 0


def test_a_message_that_flower_has_forgotten_is_not_asked_for(monkeypatch):
    grid = LoopbackGrid(echo, 1)
    transport = GridTransport(grid)
    grid.silent.add(N[0])
    asked(transport, {N[0]: packet(1)}, 0.1)
    grid.silent.clear()
    grid._working.clear()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 13 * 3600)
    [reply] = asked(transport, {N[0]: packet(2)}, 5)
    assert reply.error == ""


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> LoopbackGrid:
    """A node that gets its message, and forgets it as it is started anew half a second later."""
    grid, began = LoopbackGrid(echo, 2), time.monotonic()
    grid.silent.add(N[0])
    late = {N[0]: lambda: time.monotonic() > began + 0.5}
    monkeypatch.setattr(grid, "started", lambda node: "now" if late.get(node, bool)() else "yesterday")
    monkeypatch.setattr(flower_grid, "_CHECK_INTERVAL", 0.1)
    return grid


def test_a_node_that_was_restarted_is_not_waited_for(restarted):
    began = time.monotonic()
    replies = asked(GridTransport(restarted), {n: packet(1) for n in N[:2]}, 60)
    assert [r.error for r in replies] == ["was restarted or out of reach before it answered", ""]
    assert time.monotonic() - began < 5


def test_a_node_that_was_restarted_owes_nothing(restarted):
    transport = GridTransport(restarted)
    asked(transport, {N[0]: packet(1)}, 0.1)
    time.sleep(0.5)
    restarted.silent.clear()
    restarted._working.clear()
    [reply] = asked(transport, {N[0]: packet(2)}, 5)
    assert reply.packet.metrics == {"mark": 2}


@pytest.mark.parametrize(
    "answer",
    [
        RecordDict({"arrays": MetricRecord({"x": 1})}),
        RecordDict({"arrays": ArrayRecord({"x": Array("float32", (2,), "numpy.ndarray", b"rubbish")})}),
        RecordDict({"arrays": ArrayRecord({"x": Array("float32", (2,), "pickle", b"rubbish")})}),
        RecordDict({"arrays": ArrayRecord({"x": Array("float32", (2,), "numpy.ndarray", EMPTY_ZIP)})}),
    ],
)
def test_unreadable_answers_are_failures(answer):
    grid = LoopbackGrid(lambda message, context: Message(answer, reply_to=message), 1)
    [reply] = asked(GridTransport(grid), {N[0]: packet(1)}, 5)
    assert reply.packet is None
    assert reply.error.startswith("unreadable answer: ")


def test_bytes_are_those_of_the_packets():
    """Also where Flower would send equal arrays only once."""
    sent = {
        N[0]: Packet({"a": np.ones(1000), "b": np.ones(1000)}, {"p": np.ones(7)}, {"m": 0.5}, {"classes": [1, 2]}),
        N[1]: Packet({"a": np.asfortranarray(np.ones((2, 3)))}, config={"other": "longer text", "scalar": np.int64(3)}),
    }
    sizes = [payload_bytes(p) for p in sent.values()]
    replies = asked(GridTransport(LoopbackGrid(echo, 2)), sent, 30)
    assert [(r.bytes_down, r.bytes_up) for r in replies] == [(size, size) for size in sizes]


def test_what_flower_adds_to_a_packet_is_little():
    LoopbackGrid(echo)
    sent = packet(7)
    message = Message(to_records(sent), N[0], "train")
    travelling = sum(len(nested.deflate()) for nested in get_all_nested_objects(message).values())
    assert 0 < travelling - payload_bytes(sent) < 2000


def test_flower_keeps_a_message_for_longer_than_its_answer_is_waited_for():
    LoopbackGrid(echo)
    [envelope] = _envelopes("train", {N[0]: packet(1)}, 7200.0)
    assert envelope.message.metadata.ttl == DEFAULT_TTL + 7200


def test_shared_packets_are_serialised_once(monkeypatch):
    count = []
    original = Array.from_numpy_ndarray.__func__
    monkeypatch.setattr(
        Array, "from_numpy_ndarray", classmethod(lambda cls, a: count.append(a.shape) or original(cls, a))
    )
    shared, own = Packet({"w": np.ones((5, 5))}), Packet({"w": np.ones(1)})
    asked(GridTransport(LoopbackGrid(echo, 3)), {N[0]: shared, N[1]: own, N[2]: shared}, 5)
    assert sorted(count) == [(1,), (5, 5)]


RAY = """<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=1)
                  ^^^^^^^^^
  File "client_app.py", line 161, in __call__
    return self._registered_funcs[full_name](message, context)
ValueError: shapes differ:
  (3, 4)
  (5,)

The above exception was the direct cause of the following exception:

\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=1, ip=x)
  File "ray_actor.py", line 65, in run
    raise ClientAppException(str(ex)) from ex
flwr.clientapp.client_app.ClientAppException:
Exception ClientAppException occurred. Message: shapes differ:
  (3, 4)
  (5,)'>"""


DIED = """<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing this task.
	class_name: ClientAppActor
	pid: 4716
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: long'>"""


@pytest.mark.parametrize(
    ("reason", "readable"),
    [
        (RAY, "ValueError: shapes differ: (3, 4) (5,)"),
        (
            DIED,
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
            "Worker exit detail: long",
        ),
        ("<class 'KeyError'>:<''w''>", "KeyError: 'w'"),
        ("ClientApp stopped responding.", "ClientApp stopped responding."),
        ("", "Flower error 8"),
        ("\n \n", ""),
        ("x" * 1000, "x" * 299 + "…"),
    ],
)
def test_reasons_are_readable(reason, readable):
    assert readable_reason(Error(8, reason)) == readable


@pytest.mark.parametrize("text", ["<class '" + "a" * 20_000, "<class '" + "a." * 10_000, "<class 'a(" + "a" * 20_000])
def test_a_reason_that_only_begins_as_one_of_flower_is_read_at_once(text: str) -> None:
    """A node may send any; one of 20,000 letters took seconds, one of a megabyte would have taken hours."""
    began = time.process_time()
    assert readable_reason(Error(8, text)).startswith("<class 'a")
    assert time.process_time() - began < 1
