"""Everything that knows Flower: packets on the wire, the Grid transport, the Strategy adapter, the fcil command."""

# ruff: noqa: E402

import hashlib
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

flwr = pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import InflatableObject, get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

import client_app.client
from client_app.app import app as client
from client_app.flower_records import from_records, to_records
from server_app.app import RunFailed
from server_app.app import app as server
from server_app.cli import main as cli
from server_app.cli import run as run_command
from server_app.cli.progress import Progress
from server_app.flower_strategy import HGP, FCILStrategy, FedAvg
from server_app.rounds.run import run_experiment
from server_app.run_files import paths as places
from server_app.simulation import processes
from server_app.simulation import superlink as launcher
from server_app.transport import flower_grid
from server_app.transport.base import Reply, in_order
from server_app.transport.flower_grid import GridTransport, readable_reason, serialised_bytes
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.config.schema import defaults
from task.keys import ConfigError
from task.message import Packet, copy_packet
from tests.conftest import TINY

TWO = TINY | {"num-clients": 2}
KEYS = {key.replace("-", "_"): value for key, value in TWO.items() if key != "rounds-per-task"}
ROOT = Path(__file__).parents[2]
N = [2**64 - 1 - i for i in range(4)]  # node ids


def through_wire(message: Message) -> Message:
    """As Ray's workers get it (pickled) and as the SuperLink stores it (object by object)."""
    message = pickle.loads(pickle.dumps(message))
    contents = {name: nested.deflate() for name, nested in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


def counted_bytes(thing: InflatableObject) -> int:
    """Independent of the product's count: walk the tree, tell equal objects apart by a digest of our own."""
    sizes: dict[bytes, int] = {}

    def walk(one: InflatableObject) -> None:
        for child in (one.children or {}).values():
            walk(child)
        content = one.deflate()
        sizes[hashlib.md5(content).digest()] = len(content)

    walk(thing)
    return sum(sizes.values())


class LoopbackGrid(Grid):
    """Runs a ClientApp in place of the network, as strict as the real grids are, with faults to order."""

    def __init__(self, app: Callable[[Message, Context], object], nodes: int = 3) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 2**64 - 1
        self._app = app
        self._contexts = {N[i]: self._context(i, nodes) for i in range(nodes)}
        self.delay: dict[int, float] = {}  # seconds that a node works
        self.silent: set[int] = set()
        self.refused: set[int] = set()
        self.reason: dict[int, str] = {}
        self.log: list[tuple[int, int, int]] = []  # node, bytes down, bytes up
        self._working: dict[str, int] = {}
        self._answers: dict[str, tuple[float, Message]] = {}
        self._run = Run.create_empty(1)

    @staticmethod
    def _context(place: int, nodes: int) -> Context:
        settings = {"partition-id": place, "num-partitions": nodes}
        return Context(1, N[place], settings, RecordDict(), dict(defaults()))

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise AssertionError("polls every 3 s over HTTP")

    def get_node_ids(self) -> list[int]:
        return list(reversed(self._contexts))

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=n, last_activated_at=self.started(n)) for n in self.get_node_ids()]

    def started(self, node: int) -> str:
        return "yesterday"

    def push_messages(self, messages: Iterable[Message]) -> list[str | None]:
        assert isinstance(messages, list), "generators fail over HTTP"
        return [self._push(message) for message in messages if message.metadata.dst_node_id not in self.refused]

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        assert node not in self._working.values(), "two messages at once"
        message.metadata.__dict__["_message_id"] = key = uuid.uuid4().hex
        self._working[key] = node
        if node not in self.silent:
            arrived = through_wire(message)
            answer = through_wire(self._answer(arrived))
            self.log.append((node, counted_bytes(arrived), counted_bytes(answer)))
            self._answers[key] = (time.monotonic() + self.delay.get(node, 0.0), answer)
        return key

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node in self.reason:
            return Message(Error(2, self.reason[node]), reply_to=message)
        answer = self._app(message, self._contexts[node])
        assert isinstance(answer, Message)
        return answer

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = list(message_ids)
        assert all(key in self._working for key in asked), "KeyError in a simulation"
        ready = [key for key in asked if key in self._answers and self._answers[key][0] <= time.monotonic()]
        for key in ready:
            del self._working[key]
        return [self._answers.pop(key)[1] for key in ready]


def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


def packet(mark: int) -> Packet:
    return Packet(arrays={"w": np.full((2, 3), mark, np.float32)}, metrics={"mark": mark}, config={"mark": mark})


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# packets on the wire

ARRAYS = [
    *(np.arange(12).reshape(3, 4).astype(kind) for kind in "?bBhHiIlLefdFD"),
    np.array(1.5, np.float32),
    np.zeros((0, 768), np.float32),
    np.zeros((0,), np.int64),
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)[::2],
    np.arange(4, dtype=">i4"),
    np.array([np.nan, np.inf, -0.0]),
    np.array(["a", "straße"]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_arrays_arrive_alike_by_wire_and_in_process(array):
    LoopbackGrid(echo)
    sent = Packet(arrays={"a.b": array}, statistics={"π": array})
    arrived = from_records(through_wire(Message(to_records(sent), 1, "train")).content)
    for one in (arrived, copy_packet(sent)):
        assert list(one.arrays) == ["a.b"]
        assert list(one.statistics) == ["π"]
        assert same_array(one.arrays["a.b"], np.ascontiguousarray(array).reshape(array.shape))
        assert one.arrays["a.b"].flags.c_contiguous
        assert one.arrays["a.b"].flags.writeable
        assert not np.shares_memory(one.arrays["a.b"], array)


whole = st.integers(-(2**63), 2**64 - 1)
scalars = st.one_of(st.booleans(), whole, st.floats(), st.text())
lists = st.one_of(*(st.lists(kind, max_size=4) for kind in (st.booleans(), whole, st.floats(), st.text())))
small = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)


@given(
    st.dictionaries(st.text(max_size=5), scalars | lists.filter(lambda v: not mixed_signs(v))),
    st.dictionaries(st.text(max_size=5), whole | st.floats()),
)
def test_scalars_arrive_alike_by_wire_and_in_process(config, metrics):
    LoopbackGrid(echo)
    sent = Packet(config=config, metrics=metrics)
    arrived = from_records(through_wire(Message(to_records(sent), 1, "train")).content)
    for one in (arrived, copy_packet(sent)):
        assert repr(one.config) == repr(config)  # tells True from 1, and NaN is like NaN
        assert repr(one.metrics) == repr(metrics)


def mixed_signs(values: list) -> bool:
    """Flower has no list for both negative numbers and numbers above 2**63."""
    numbers = [v for v in values if type(v) is int]
    return bool(numbers) and min(numbers) < 0 and max(numbers) >= 2**63


def test_numpy_scalars_become_pythons():
    sent = Packet(metrics={"a": np.float32(0.5), "b": np.int64(3), "c": np.True_}, config={"d": np.bool_(False)})
    for one in (from_records(to_records(sent)), copy_packet(sent)):
        assert repr(one) == "Packet(arrays={}, statistics={}, metrics={'a': 0.5, 'b': 3, 'c': 1}, config={'d': False})"


@pytest.mark.parametrize(
    "bad",
    [
        Packet(arrays={"bad": np.array([{}])}),
        Packet(arrays={"bad": [1.0]}),
        Packet(metrics={"bad": "text"}),
        Packet(metrics={"bad": 2**64}),
        Packet(config={"bad": None}),
        Packet(config={"bad": {}}),
        Packet(config={"bad": [1, 2.0]}),
        Packet(config={"bad": [[1]]}),
        Packet(config={"bad": np.zeros(2)}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("convert", [to_records, copy_packet])
def test_what_cannot_travel_is_refused_by_name(convert, bad):
    with pytest.raises((TypeError, ValueError), match="'bad'"):
        convert(bad)


def test_text_that_is_no_unicode_travels():
    arrived = from_records(to_records(Packet(config={"error": "no file /data/\udcff"}))).config
    assert arrived == {"error": r"no file /data/\udcff"}


def test_records_have_fixed_names_and_empty_ones_stay_at_home():
    full = Packet(arrays={"a": np.zeros(1)}, statistics={"p": np.zeros(1)}, metrics={"m": 1}, config={"c": 1})
    assert list(to_records(full)) == ["arrays", "prototypes", "metrics", "config"]
    assert list(to_records(Packet())) == []
    assert from_records(RecordDict({"other": MetricRecord({"m": 1})})) == Packet()


# the ClientApp


def answer_of(handle: object, monkeypatch: pytest.MonkeyPatch, kind: str = "train") -> Packet:
    LoopbackGrid(echo)
    monkeypatch.setattr(client_app.client, "handle", handle)
    message = Message(to_records(packet(7)), N[0], kind)
    answer = client(message, Context(1, N[0], {"partition-id": 3}, RecordDict(), {"seed": 5}))
    return from_records(through_wire(answer).content)


def test_handlers_pass_kind_packet_settings_and_run_config(monkeypatch):
    for kind, name in {"query.hello": "hello", "train": "train", "evaluate": "evaluate"}.items():
        seen = []
        answer_of(lambda *given, seen=seen: seen.append(given) or Packet(), monkeypatch, kind)
        [(got, sent, node)] = seen
        assert (got, sent.config, dict(node.settings), dict(node.values)) == (
            name,
            {"mark": 7},
            {"partition-id": 3},
            {"seed": 5},
        )


def boom(*_: object) -> Packet:
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize(
    ("handle", "error"),
    [
        (boom, "ZeroDivisionError: boom"),
        (lambda *_: None, "AttributeError"),
        (lambda *_: Packet(config={"x": None}), "TypeError: 'x'"),
        (lambda *_: Packet(metrics={"x": 2**70}), "ValueError: 'x'"),
        (lambda *_: Packet(arrays={"x": np.array([None])}), "TypeError: array 'x'"),
    ],
)
def test_client_always_answers(monkeypatch, caplog, handle, error):
    answer = answer_of(handle, monkeypatch)
    assert str(answer.config["error"]).startswith(error)
    assert "Traceback" in caplog.text


def test_client_answers_when_the_message_cannot_be_read():
    LoopbackGrid(echo)
    message = Message(RecordDict({"arrays": ConfigRecord()}), N[0], "train")
    answer = client(message, Context(1, N[0], {}, RecordDict(), {}))
    assert from_records(answer.content).config == {
        "error": "TypeError: record 'arrays' is a ConfigRecord, not a ArrayRecord"
    }


# the Grid transport


def asked(transport: GridTransport, packets: dict[int, Packet], timeout: float) -> list[Reply]:
    """All replies to a train message, in the order of ``packets``."""
    return in_order(transport.exchange("train", packets, timeout), packets)


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
    monkeypatch.setattr(flower_grid, "_LOOK", 0.1)
    found = []
    for reply in GridTransport(grid).exchange("train", {n: packet(n) for n in N[:2]}, 5):
        found.append((reply.node, reply.error))
        time.sleep(0.6)
    assert found == [(N[0], ""), (N[1], "")]


def test_a_busy_caller_does_not_shorten_the_waiting_for_a_node_that_is_busy_too():
    """The first node owes an older answer for 0.4 s; the caller spends more than the timeout on another's."""
    grid = LoopbackGrid(echo, 3)
    transport = GridTransport(grid)
    grid.delay[N[0]] = 0.5
    asked(transport, {N[0]: packet(1)}, 0.1)
    grid.delay = {N[0]: 0.1, N[2]: 0.3}
    found = {}
    for reply in transport.exchange("train", {n: packet(2) for n in N[:3]}, 0.5):
        found[reply.node] = reply.error, reply.packet.metrics["mark"]
        time.sleep(0.6)
    assert found == dict.fromkeys(N[:3], ("", 2))


def test_a_few_answers_are_in_memory_at_once(monkeypatch):
    """All four have come; two are pulled together, and one that the caller has seen may still be in its hand."""
    grid, alive, most = LoopbackGrid(echo, 4), [], 0
    monkeypatch.setattr(flower_grid, "_AT_ONCE", 2)
    original = grid.pull_messages

    def pull(message_ids):
        found = original(message_ids)
        alive.extend(weakref.ref(message) for message in found)
        return found

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
    assert [r.bytes_up > 0 for r in replies] == [True, False, False, True]


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
    monkeypatch.setattr(flower_grid, "_LOOK", 0.1)
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
    ],
)
def test_unreadable_answers_are_failures(answer):
    grid = LoopbackGrid(lambda message, context: Message(answer, reply_to=message), 1)
    [reply] = asked(GridTransport(grid), {N[0]: packet(1)}, 5)
    assert reply.packet is None
    assert reply.error.startswith("unreadable answer: ")


MEBI = 2**20
PAYLOADS = {
    "empty": {},
    "scalar": {"a": np.array(1.0)},
    "equal arrays under two names": {"a": np.ones(1000), "b": np.ones(1000)},
    "three chunks, two of them equal": {"a": np.zeros(12 * MEBI, np.uint8)},
    "chunks": {"a": np.arange(3 * MEBI // 2, dtype=np.int32), "b": np.zeros((0, 5))},
}


@pytest.mark.parametrize("arrays", PAYLOADS.values(), ids=PAYLOADS)
def test_bytes_are_those_of_the_serialised_messages(arrays):
    grid = LoopbackGrid(echo, 2)
    config = {"classes": [1, 2, 3], "text": "", "none": []}
    sent = {
        N[0]: Packet(arrays, {"p": np.ones(7)}, {"m": 0.5}, config),
        N[1]: Packet(arrays, config={"other": "longer text"}),
    }
    replies = asked(GridTransport(grid), sent, 30)
    assert [(r.node, r.bytes_down, r.bytes_up) for r in replies] == grid.log
    least = sum(len(np.unique(a)) > 1 and a.nbytes for a in arrays.values())
    assert all(down > least for _, down, _ in grid.log)


def test_random_ids_do_not_change_the_count():
    LoopbackGrid(echo)
    few, many = (Message(to_records(packet(1)), node, "train") for node in (1, 2**64 - 1))
    assert serialised_bytes(few) == serialised_bytes(many) == counted_bytes(many)
    assert few.metadata.dst_node_id == 1


def test_shared_arrays_are_serialised_once(monkeypatch):
    count = []
    original = Array.from_numpy_ndarray.__func__
    monkeypatch.setattr(
        Array, "from_numpy_ndarray", classmethod(lambda cls, a: count.append(a.shape) or original(cls, a))
    )
    shared = np.ones((5, 5))
    sent = {N[i]: Packet(arrays={"w": shared, "own": np.zeros(i)}) for i in range(3)}
    asked(GridTransport(LoopbackGrid(echo, 3)), sent, 5)
    assert sorted(count) == [(0,), (1,), (2,), (5, 5)]


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


# whole runs: the ServerApp and the Strategy adapter


def settings(tmp_path: Path, name: str) -> dict:
    return {**TWO, "output-dir": str(tmp_path), "run-name": name}


def comparable(directory: Path) -> dict:
    """results.json without what the clock, the transport or the name of the machine decides."""
    results = json.loads((directory / "results.json").read_text())
    for name in ("seconds", "environment", "communication"):
        del results[name]
    for line in results["rounds"]:
        for name in ("seconds", "bytes_up", "bytes_down"):
            del line[name]
    return results


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"method": "joint", "clients-per-round": 1},
        {"method": "fedprok", "partition": "consensus"},
        {"method": "ncm", "partition": "split-ratio"},
    ],
    ids=lambda more: " ".join(map(str, more.values())) or "defaults",
)
def test_same_results_through_both_transports(tmp_path, more):
    context = Context(1, 0, {}, RecordDict(), settings(tmp_path, "grid") | more)
    server(LoopbackGrid(client, 2), context)
    values = settings(tmp_path, "here") | more
    run_experiment(parse(values), InProcessTransport(values, 2))
    assert comparable(tmp_path / "grid") == comparable(tmp_path / "here")


@pytest.mark.parametrize(
    ("values", "message"),
    [({"seed": "one"}, "seed"), ({"round-timeout": 0.2, "quorum": 2}, "quorum")],
)
def test_a_failed_run_is_one_readable_line_in_flowers_log(tmp_path, values, message):
    grid = LoopbackGrid(client, 2)
    grid.silent.add(N[0])
    context = Context(1, 0, {}, RecordDict(), settings(tmp_path, "bad") | values)
    with pytest.raises(RunFailed, match=message) as caught:
        server(grid, context)
    record = logging.LogRecord("flwr", logging.ERROR, "", 0, "Simulation raised an exception", None, None)
    error = caught.value
    record.exc_info = (type(error), error, error.__traceback__)  # as logging makes it from an exception
    assert logging.Formatter().format(record).splitlines()[1] == f"server_app.app.RunFailed: {error}"
    assert len(logging.Formatter().format(record).splitlines()) == 2
    assert len(traceback.format_exception(error)) == 1


def test_strategy_runs_in_anybodys_server_app(tmp_path):
    strategy = HGP(**KEYS, output_dir=str(tmp_path), run_name="adapter")
    evaluated = []
    result = strategy.start(
        grid=LoopbackGrid(client, 2),
        initial_arrays=ArrayRecord(),
        num_rounds=2,
        evaluate_fn=lambda number, arrays: evaluated.append((number, list(arrays))) or MetricRecord({"mine": 1.0}),
    )
    results = json.loads((tmp_path / "adapter" / "results.json").read_text())
    assert results["rounds_per_task"] == 1
    assert [results["method"], results["status"]] == ["hgp", "finished"]
    assert evaluated == [(2, list(result.arrays))]
    assert result.arrays
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert result.train_metrics_clientapp[1]["train_loss"] == results["rounds"][0]["train_loss"]
    assert result.train_metrics_clientapp[1]["participants"] == 2
    assert result.evaluate_metrics_serverapp == {
        1: {"accuracy": results["per_task_seen_accuracy"][0]},
        2: {"accuracy": results["per_task_seen_accuracy"][1], "mine": 1.0},
    }
    assert "accuracy" in str(result)


def test_strategy_starts_from_given_arrays(tmp_path):
    def start(name: str, arrays: ArrayRecord) -> ArrayRecord:
        keys = KEYS | {"num_tasks": 1, "rounds_per_task": 1, "learning_rate": 1e-9}
        strategy = FedAvg(**keys, output_dir=str(tmp_path), run_name=name)
        return strategy.start(LoopbackGrid(client, 2), arrays).arrays

    seeded = start("seeded", ArrayRecord())
    [name] = [k for k in seeded if "prompt" in k]
    first = {k: a.numpy() for k, a in seeded.items()}
    first[name] = np.full_like(first[name], 0.125)
    moved = start("given", to_records(Packet(arrays=first))["arrays"])
    np.testing.assert_allclose(moved[name].numpy(), 0.125, atol=1e-4)
    assert not np.allclose(seeded[name].numpy(), 0.125, atol=1e-4)


def test_strategy_refuses_what_it_cannot_do():
    grid = LoopbackGrid(client, 2)
    with pytest.raises(ConfigError, match="num-task"):
        HGP(num_task=5)
    with pytest.raises(ValueError, match="num_rounds = 7 does not fit: num_tasks = 5 times rounds_per_task = 5 is 25"):
        HGP(num_tasks=5).start(grid, ArrayRecord(), num_rounds=7)
    with pytest.raises(ValueError, match="num_rounds = 10 does not fit"):
        HGP(num_tasks=5, rounds_per_task=3).start(grid, ArrayRecord(), num_rounds=10)
    with pytest.raises(ValueError, match="lr"):
        HGP().start(grid, ArrayRecord(), train_config=ConfigRecord({"lr": 0.1}))
    strategy = FCILStrategy(method="head-only")
    assert strategy.config.method == "head-only"
    strategy.summary()
    for step in (strategy.configure_train, strategy.configure_evaluate):
        with pytest.raises(NotImplementedError, match="start"):
            step(1, ArrayRecord(), ConfigRecord(), grid)
    for step in (strategy.aggregate_train, strategy.aggregate_evaluate):
        with pytest.raises(NotImplementedError, match="start"):
            step(1, [])


# the fcil command


def test_nodes_in_process_are_faulty_to_order():
    values = {**defaults(), **TWO}
    transport = InProcessTransport(
        values,
        3,
        {"name": "same"},
        tamper=lambda node, kind, answer: Packet(config={"node": node, "kind": kind}),
        broken=lambda node, kind: node == 1,
    )
    assert transport.nodes() == [0, 1, 2]
    replies = list(transport.exchange("hello", {2: packet(0), 1: packet(0), 9: packet(0)}, 4))
    assert replies[0].packet.config == {"node": 2, "kind": "hello"}
    assert [r.error for r in replies] == ["", "no answer within 4 s", "there is no such node"]
    assert replies[0].bytes_down == 24 + 8 + len('{"mark": 0}')


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "metod=hgp"], "Did you mean 'method'"),
        (["run", "seed=x"], "seed = 'x'"),
        (["run", "datasets"], "write dataset=... instead"),
        (["run", "clients-per-round=11"], "more than num-clients = 10"),
        (["run", "--in-process", "seed=1", "quorum=0"], "quorum = 0"),
    ],
)
def test_mistakes_end_at_once_with_one_message(capsys, words, message):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fcil: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["run", "--workers=0"], ["run", "--bogus"], ["report"], ["report", "x", "-y"]])
def test_command_lines_without_a_meaning(words):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2


def test_settings_may_stand_on_both_sides_of_an_option(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    seen = []
    monkeypatch.setattr(run_command, "_run_here", lambda values, progress: seen.append(values) or 1)
    cli.main(
        ["run", "seed=3", "--in-process", f"output-dir={tmp_path}", "data-dir=data", "dataset=folder", "run-name=r"]
    )
    assert seen == [
        {
            "seed": 3,
            "output-dir": str(tmp_path),
            "data-dir": str(tmp_path / "data"),
            "dataset": "folder",
            "run-name": "r",
            "num-clients": 10,
        }
    ]
    assert capsys.readouterr().out == f"results go to {tmp_path / 'r'}\n"


@pytest.mark.pictures
def test_run_in_process_shows_progress_and_results(tmp_path, capsys):
    words = [f"{key}={value}" for key, value in settings(tmp_path, "shown").items()]
    assert cli.main(["run", "--in-process", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"task 1/2, round 1/1  2 clients  loss \d\.\d+  accuracy on all seen classes \d+\.\d%  "
        r"\d:\d\d, about \d:\d\d left",
        lines[1],
    )
    assert re.fullmatch(r"final average accuracy \d+\.\d%, forgetting -?\d+\.\d%", lines[3])
    shown = [tmp_path / "shown" / n for n in ("results.json", "accuracy.png", "forgetting.png", "report.html")]
    assert [Path(line) for line in lines[4:]] == shown
    assert all(path.exists() for path in shown)
    assert cli.main(["run", "--in-process", *words]) == 2
    assert "taken" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "shown")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert set(shown[1:]) < set(written)
    assert all(path.exists() for path in written)
    assert cli.main(["report", str(tmp_path / "nothing")]) == 1


def test_a_run_that_fails_in_process(tmp_path, capsys, monkeypatch):
    words = [f"{key}={value}" for key, value in settings(tmp_path, "bad").items()]
    assert cli.main(["run", "--in-process", *words, "dataset=npz", f"data-dir={tmp_path}/none.npz"]) == 2
    monkeypatch.setattr(client_app.client, "_hello", boom)
    monkeypatch.setitem(client_app.client._HANDLERS, "hello", boom)
    assert cli.main(["run", "--in-process", *words]) == 1
    assert "fcil: the run failed: " in capsys.readouterr().err


def test_progress_shows_what_the_run_warns_of(tmp_path, capsys):
    progress = Progress(tmp_path)
    progress.log = tmp_path / "flower.log"
    yellow = "\x1b[93mWARNING \x1b[0m:   "
    progress.log.write_text(
        f"{yellow}default simulated SuperNodes\nINFO :      results go to /runs/a\n{yellow}no image of b\n"
    )
    progress.show()
    with open(progress.log, "a") as file:
        file.write(f"\x1b[36m(ClientAppActor pid=5)\x1b[0m {yellow}terminating\nWARNING :   c is damaged\n")
    progress.show()
    progress.show()
    assert capsys.readouterr().out.splitlines() == ["warning: no image of b", "warning: c is damaged"]


def test_progress_names_failures_and_ignores_half_a_line(tmp_path, capsys):
    line = {
        "task": 2,
        "round": 1,
        "num_tasks": 2,
        "rounds_per_task": 2,
        "participants": ["a", "b"],
        "failures": [{"name": "a", "reason": "gone"}],
        "train_loss": None,
        "seen_accuracy": None,
        "elapsed": 3700.0,
    }
    (tmp_path / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    progress = Progress(tmp_path)
    with open(tmp_path / "rounds.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n" + json.dumps(line)[:20])
    progress.show()
    progress.show()
    assert capsys.readouterr().out.splitlines() == [
        "task 2/2, round 1/2  2 clients, 1 failed  1:01:40, about 1:01:40 left",
        "    a: gone",
    ]
    with open(tmp_path / "rounds.jsonl", "a") as file:
        file.write("\n" + json.dumps(line) + "\n")  # after half a line that a crash has left
    progress.show()
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["task 2/2", "    a: gone"]
    (tmp_path / "rounds.jsonl").write_text("")  # resumed before the first round
    progress.show()
    (tmp_path / "rounds.jsonl").write_text(json.dumps(line | {"failures": [], "elapsed": 60.0}) + "\n")
    progress.show()
    assert capsys.readouterr().out.splitlines() == ["task 2/2, round 1/2  2 clients  1:00, about 3:00 left"]


def test_a_killed_run_is_marked_as_failed(tmp_path):
    (tmp_path / "results.json").write_text('{"status": "running", "rounds": []}')
    places.mark_failed(tmp_path, "out of memory")
    assert places.read_results(tmp_path) == {"status": "failed", "rounds": [], "error": "out of memory"}
    places.mark_failed(tmp_path, "another reason")
    assert places.read_results(tmp_path)["error"] == "out of memory"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    places.mark_failed(tmp_path / "absent", "no matter")


# processes of our own


def test_runs_are_placed_by_home_then_project(tmp_path, monkeypatch):
    config = parse({"run-name": "r"})
    monkeypatch.delenv("FCIL_HOME", raising=False)
    assert places.run_directory(config) == places.project_folder() / "runs" / "r"
    monkeypatch.setenv("FCIL_HOME", str(tmp_path))
    assert places.run_directory(config) == tmp_path / "runs" / "r"
    assert places.run_directory(parse({"run-name": "r", "output-dir": "/elsewhere"})) == Path("/elsewhere/r")
    assert re.fullmatch(r"hgp-digits-seed0-\d{8}-\d{6}-[0-9a-f]{4}", places.run_directory(parse({})).name)


def test_without_flower_the_message_names_the_way_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["run", f"output-dir={tmp_path}"]) == 1
    assert "--in-process" in capsys.readouterr().err
    imported = "import server_app.cli.main, sys; sys.exit(any(m in sys.modules for m in ('flwr', 'ray', 'torch')))"
    assert subprocess.run([sys.executable, "-c", imported], cwd=ROOT, check=False).returncode == 0


def test_in_process_runs_need_no_flower(tmp_path):
    words = ["run", "--in-process", *(f"{key}={value}" for key, value in settings(tmp_path, "bare").items())]
    script = "import sys; sys.modules |= dict(flwr=None, ray=None); from server_app.cli.main import main; "
    script += f"sys.exit(main({words}))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_without_a_project_the_message_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "__file__", str(tmp_path / "site-packages" / "server_app" / "run_files" / "paths.py"))
    with pytest.raises(places.LaunchError, match="--in-process"):
        places.project_folder()


def test_workers_fit_cores_clients_and_memory(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    workers = [launcher.default_workers(parse(v)) for v in ({}, {"threads": 4}, {"threads": 99}, {"num-clients": 2})]
    assert workers == [8, 3, 1, 2]


def test_a_superlink_that_does_not_start_is_shown(tmp_path, monkeypatch):
    fake = tmp_path / "flower-superlink"
    fake.write_text("#!/bin/sh\necho no such option\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(launcher.sysconfig, "get_path", lambda name: str(tmp_path))
    run = launcher.FlowerRun(ROOT, lambda: None)
    with pytest.raises(launcher.LaunchError, match="no such option"), run:
        pass
    assert not run.log.parent.exists()


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = "import time; print('up', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
time.sleep(60)
"""


@pytest.mark.parametrize("orphans", [False, True])
def test_whole_families_are_ended(orphans):
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", STUBBORN]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "MARK": mark})
    assert parent.stdout.readline() == b"up\n"
    family = {pid for pid, ancestor in processes._parents().items() if ancestor == parent.pid} | {parent.pid}
    assert len(family) == 2
    if orphans:
        parent.kill()
        parent.wait()
    processes.end_processes([parent], f"MARK={mark}" if orphans else "MARK=none", patience=0.3)
    assert not family & processes._parents().keys()
    assert parent.wait(1) == -signal.SIGKILL
    processes.end_processes([parent], f"MARK={mark}")
    parent.stdout.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_signals_interrupt_where_it_is_safe(at_once):
    before = signal.getsignal(signal.SIGTERM)
    reached = []

    def be_stopped() -> None:
        with processes.interruptible(at_once) as check:
            signal.raise_signal(signal.SIGTERM)
            reached.append("the next line")
            check()

    with pytest.raises(processes.Interrupted) as caught:
        be_stopped()
    assert bool(reached) is not at_once
    assert caught.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


# Flower itself


class Fcil:
    """One ``fcil run`` through Flower in a process of its own, and what it leaves behind."""

    def __init__(self, tmp_path: Path, temporary: Path, *words: str) -> None:
        self._mark = f"FCIL_TEST={uuid.uuid4().hex}"
        self._temporary = temporary
        name, _, value = self._mark.partition("=")
        self.directory = tmp_path / "run"
        given = {**TWO, "output-dir": tmp_path, "run-name": "run"} | dict(word.split("=") for word in words)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server_app.cli", "run", *(f"{k}={v}" for k, v in given.items())],
            cwd=ROOT,
            env={**os.environ, name: value, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # whoever runs the tests in the background has them ignore Ctrl-C, and what they start too
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out, err

    def left_behind(self) -> list[str]:
        """Files, and processes that carry our mark: the environment is inherited by all."""
        return [*map(str, self._temporary.iterdir()), *self._processes()]

    def _processes(self) -> Iterator[str]:
        for pid in processes._parents():
            try:
                if self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    yield Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path: Ray's sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.flower
def test_a_run_through_flower(tmp_path, temporary):
    run = Fcil(tmp_path, temporary)
    code, out, err = run.end()
    assert (code, err) == (0, "")
    assert out.count("round 1/1") == 2
    assert out.endswith(f"{run.directory / 'report.html'}\n")
    assert (run.directory / "flower.log").exists()
    assert run.left_behind() == []
    values = settings(tmp_path, "here")
    run_experiment(parse(values), InProcessTransport(values, 2))
    assert comparable(run.directory) == comparable(tmp_path / "here")


@pytest.mark.flower
@pytest.mark.slow
def test_a_run_that_fails_in_flower(tmp_path, temporary):
    run = Fcil(tmp_path, temporary, "dataset=npz", f"data-dir={tmp_path}/none.npz")
    code, _, err = run.end()
    assert code == 1
    assert "the run failed: data-dir = " in err
    assert "Traceback" not in err
    assert run.left_behind() == []


@pytest.mark.flower
@pytest.mark.slow
def test_a_run_that_is_stopped(tmp_path, temporary):
    run = Fcil(tmp_path, temporary, "rounds-per-task=500")
    for line in run.process.stdout:
        if line.startswith("task 1/2, round 1/500"):
            break
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 128 + signal.SIGINT
    assert "stopped" in err
    assert run.left_behind() == []
    assert places.read_results(run.directory)["status"] == "failed"
