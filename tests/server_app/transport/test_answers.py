"""Answers from a SuperLink, object by object: malformed, held back, or asked for while its database is locked."""

import json
import random
import time

import httpx
import pytest
from flwr.app import Message
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.superlink.grid import HttpGrid

from server_app.errors import MAX_REASON, RunError
from server_app.transport import answers, flower_grid
from server_app.transport.base import SMALL_ANSWER, Reply, sort_replies
from server_app.transport.flower_grid import GridTransport
from tests.helpers.flower import N, echo, packet
from tests.helpers.objects import DIVIDER, ObjectGrid, Objects, answered, mutated, replaced


def asked(
    transport: GridTransport,
    timeout: float = 5,
    nodes: int = 3,
    mark: int = 1,
    largest_answer: int = SMALL_ANSWER,
) -> list[Reply]:
    packets = {n: packet(mark + i) for i, n in enumerate(N[:nodes])}  # equal ones would share their objects
    return sort_replies(transport.exchange("train", packets, timeout, largest_answer), packets)


def spoilt(kind: bytes, body: bytes):
    """Other bytes in the first object of a type."""

    def spoil(objects: Objects) -> Objects:
        name, content = next((n, c) for n, c in objects.contents.items() if c.startswith(kind + b" "))
        head, children, _ = content.partition(b"\x00")[0].split(b" ")
        return replaced(objects, name, b" ".join([head, children, b"%d" % len(body)]) + b"\x00" + body)

    return spoil


def test_flowers_grid_has_what_is_used_of_it():
    assert isinstance(HttpGrid._runtime_client, property)


def test_answers_come_as_they_were_sent():
    replies = asked(GridTransport(ObjectGrid(echo)))
    assert [r.error for r in replies] == ["", "", ""]
    assert replies[0].packet.metrics == {"mark": 1}
    assert replies[0].packet.arrays["w"].tolist() == [[1.0] * 3] * 2
    assert replies[0].bytes_up == replies[0].bytes_down > 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (b"ArrayRecord", "unreadable answer: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (b"Array", "unreadable answer: JSONDecodeError: Expecting value"),
        (b"ConfigRecord", "unreadable answer: DecodeError: "),
        (b"RecordDict", "unreadable answer: JSONDecodeError: Expecting value"),
        (b"Message", "unreadable answer: DecodeError: "),
    ],
)
def test_bytes_that_are_not_what_they_say_fail_their_node_alone_and_are_asked_for_once(kind, reason):
    grid = ObjectGrid(echo)
    grid.spoil[N[1]] = spoilt(kind, b"not json at all")
    transport = GridTransport(grid)
    replies = asked(transport)
    assert [r.error == "" for r in replies] == [True, False, True]
    assert replies[1].error.startswith(reason)
    assert grid.calls.count("ConfirmMessageReceived") == 3
    assert transport.busy() == set()
    grid.spoil.clear()
    assert [r.error for r in asked(transport, mark=7)] == ["", "", ""]


def test_an_answer_that_is_no_message_fails_its_node_alone():
    def spoil(objects: Objects) -> Objects:
        [record] = objects.tree.children
        return Objects(record, objects.contents)

    grid = ObjectGrid(echo)
    grid.spoil[N[0]] = spoil
    errors = [r.error for r in asked(GridTransport(grid))]
    assert errors == ["unreadable answer: TypeError: a RecordDict and no message", "", ""]


def test_an_answer_that_names_anothers_message_is_its_nodes_own(monkeypatch):
    """What an answer says of itself inside counts for nothing: the SuperLink has checked what it answers."""
    grid, whole = ObjectGrid(echo), answers.inflate_object_from_contents

    def lying(*arguments: object) -> Message:
        answer = whole(*arguments)
        answer.metadata.__dict__["_reply_to_message_id"] = next(iter(grid.ids))
        return answer

    push = grid.push_messages
    monkeypatch.setattr(grid, "push_messages", lambda messages: setattr(grid, "ids", push(messages)) or grid.ids)
    monkeypatch.setattr(answers, "inflate_object_from_contents", lying)
    transport = GridTransport(grid)
    replies = sort_replies(transport.exchange("train", {n: packet(n) for n in N[:3]}, 5), N[:3])
    assert [r.packet.metrics["mark"] for r in replies] == N[:3]


@pytest.mark.parametrize("kind", ["hello", "train", "evaluate"])
def test_mutated_bytes_fail_their_node_or_are_some_packet(kind):
    """The full dose, through a real SuperLink, is in tests/end_to_end/test_lying_nodes.py."""
    chance, grid = random.Random(kind), ObjectGrid(answered(kind), 2)
    grid.spoil[N[1]] = lambda objects: mutated(objects, chance)
    transport, refused = GridTransport(grid), 0
    for mark in range(150):
        packets = {n: packet(mark + i) for i, n in enumerate(N[:2])}
        honest, lying = sort_replies(transport.exchange(kind, packets, 5), packets)
        assert (honest.node, honest.error) == (N[0], "")
        assert (lying.packet is None) == bool(lying.error)
        assert lying.error.isprintable()
        assert len(lying.error) <= MAX_REASON
        refused += bool(lying.error)
    assert refused > 75


def held(after: int):
    """Keep all objects back but so many."""
    given = []

    def hold(name: str, objects: Objects) -> bool:
        given.append(name)
        return len(given) > after

    return hold


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_node_that_never_ends_to_send_is_waited_for_no_longer_than_the_timeout(after):
    """Flower's own pull_messages would wait for two hours."""
    grid, began = ObjectGrid(echo), time.monotonic()
    grid.held[N[1]] = held(after)
    transport = GridTransport(grid)
    assert [r.error for r in asked(transport, 0.5)] == ["", "no answer within 0.5 s", ""]
    assert time.monotonic() - began < 2
    assert transport.busy() == {N[1]}
    grid.held.clear()  # its late answer comes whole, and is not taken for the next one
    assert [r.packet.metrics["mark"] for r in asked(transport, mark=7)] == [7, 8, 9]


def test_an_answer_that_ends_within_the_timeout_is_used():
    grid, began = ObjectGrid(echo), time.monotonic()
    grid.held[N[1]] = lambda name, objects: time.monotonic() < began + 0.5
    assert [r.error for r in asked(GridTransport(grid), 5)] == ["", "", ""]
    assert len(grid.calls) < 60


def test_fetching_ends_soon_after_the_timeout(monkeypatch):
    """Each object takes 0.3 s on its way: a large answer over a slow disk."""
    monkeypatch.setattr(flower_grid, "_GRACE", 0.2)
    grid, began = ObjectGrid(echo, 1), time.monotonic()
    grid.held[N[0]] = lambda name, objects: time.sleep(0.3) or False
    assert [r.error for r in asked(GridTransport(grid), 0.4, 1)] == ["no answer within 0.4 s"]
    assert time.monotonic() - began < 1.2


def in_crumbs(objects: Objects) -> Objects:
    """The same answer with 20,000 objects more, of eight bytes each."""
    contents = [b"ArrayChunk  8" + DIVIDER + b"%08d" % i for i in range(20_000)]
    crumbs = {get_object_id(content): content for content in contents}
    tree = ObjectTree(object_id=objects.tree.object_id, children=objects.tree.children)
    tree.children.extend(ObjectTree(object_id=name) for name in crumbs)
    return Objects(tree, crumbs | objects.contents)


@pytest.mark.ci
def test_an_answer_of_very_many_objects_does_not_hold_up_the_others(monkeypatch):
    """All of them are there, and fetching one takes a millisecond: 20 s."""
    monkeypatch.setattr(flower_grid, "_TURN", 0.3)
    grid = ObjectGrid(echo)
    grid.spoil[N[0]] = in_crumbs
    grid.held[N[0]] = lambda name, objects: time.sleep(0.001) or False
    transport = GridTransport(grid)
    assert [r.error for r in asked(transport, 1.5)] == ["no answer within 1.5 s", "", ""]
    began = time.monotonic()  # nor does the next exchange wait for it
    assert [r.error for r in asked(transport, 10, mark=7)] == ["still busy with an earlier message", "", ""]
    assert time.monotonic() - began < 5


def test_an_answer_larger_than_the_runs_messages_fails_its_node_and_is_not_kept():
    grid = ObjectGrid(echo)
    grid.spoil[N[0]] = in_crumbs  # 20,000 objects; of a thousand bytes each beside their content
    transport = GridTransport(grid)
    errors = [r.error for r in asked(transport, largest_answer=2_000_000)]
    assert errors[1:] == ["", ""]
    assert errors[0] == "unreadable answer: ValueError: it has more than the 2 MB that the run's messages can have"
    assert grid.calls.count("PullObject") < 2100
    assert grid.calls.count("ConfirmMessageReceived") == 3
    assert not transport.busy()
    assert not transport._answers._uploads


def named_again(kind: bytes):
    """The same answer, in which one chunk, or one array, is named a thousand times; no object is larger for it."""

    def spoil(objects: Objects) -> Objects:
        name, content = next((n, c) for n, c in objects.contents.items() if c.startswith(kind + b" "))
        head, _, body = content.partition(DIVIDER)
        said = json.loads(body)
        if kind == b"Array":
            said["arraychunk_ids"] *= 1000
        else:
            said |= {f"w{i}": array for i, array in enumerate([*said.values()] * 1000)}
        body = json.dumps(said).encode()
        return replaced(objects, name, b" ".join([*head.split(b" ")[:2], b"%d" % len(body)]) + DIVIDER + body)

    return spoil


@pytest.mark.parametrize("kind", [b"Array", b"ArrayRecord"])
def test_what_is_named_again_and_again_is_not_copied(kind: bytes) -> None:
    grid = ObjectGrid(echo)
    grid.spoil[N[0]] = named_again(kind)
    transport = GridTransport(grid)
    assert [r.error for r in asked(transport, largest_answer=150_000)] == [
        "unreadable answer: ValueError: it has more than the 0.15 MB that the run's messages can have",
        *("", ""),
    ]
    assert grid.calls.count("ConfirmMessageReceived") == 3
    assert not transport.busy()


def test_an_upload_that_breaks_off_is_named():
    grid = ObjectGrid(echo)
    grid.spoil[N[2]] = lambda objects: Objects(objects.tree, dict(list(objects.contents.items())[1:]))
    assert [r.error for r in asked(GridTransport(grid))] == ["", "", "the node broke off while it sent its answer"]


def failing(times: int, status: int = 500):
    """What SuperLinks answer to a few requests."""
    left = [times]

    def fail(call):
        def wrapped(*arguments: object):
            if left[0]:
                left[0] -= 1
                request = httpx.Request("POST", "http://127.0.0.1/v1/runtime/x")
                raise httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))
            return call(*arguments)

        return wrapped

    return fail


CALLS = ["get_node_ids", "push_messages", "GetNodes", "PullMessages", "PullObject", "ConfirmMessageReceived"]


@pytest.mark.parametrize("name", CALLS)
def test_a_superlink_whose_database_is_locked_is_asked_again(name, monkeypatch):
    monkeypatch.setattr(answers, "PAUSES", (0.01,) * 5)
    grid = ObjectGrid(echo)
    monkeypatch.setattr(grid, name, failing(5)(getattr(grid, name)))
    transport = GridTransport(grid)
    assert sorted(transport.nodes()) == sorted(N[:3])
    assert [r.error for r in asked(transport)] == ["", "", ""]


@pytest.mark.parametrize("name", CALLS)
def test_a_superlink_that_fails_for_good_ends_the_run_in_words(name, monkeypatch):
    monkeypatch.setattr(answers, "PAUSES", (0.01,) * 5)
    grid = ObjectGrid(echo)
    monkeypatch.setattr(grid, name, failing(6)(getattr(grid, name)))
    with pytest.raises(RunError, match=r"answers 500 to /v1/runtime/x, 6 times in 0\.05 s\. .*'database is locked'"):
        GridTransport(grid).nodes(), asked(GridTransport(grid))


def test_what_the_superlink_refuses_is_not_asked_for_again(monkeypatch):
    grid = ObjectGrid(echo)
    monkeypatch.setattr(grid, "GetNodes", failing(1, 403)(grid.GetNodes))
    with pytest.raises(httpx.HTTPStatusError):
        GridTransport(grid).nodes()


@pytest.mark.parametrize("name", CALLS)
def test_a_superlink_that_is_gone_ends_the_run_in_words(name, monkeypatch):
    def unreachable(*arguments: object):
        raise httpx.ConnectTimeout("The handshake operation timed out")

    grid = ObjectGrid(echo)
    monkeypatch.setattr(grid, name, unreachable)
    with pytest.raises(RunError, match=r"does not answer \(The handshake operation timed out\)\. Resume the run"):
        GridTransport(grid).nodes(), asked(GridTransport(grid))
