"""Waiting for nodes, and what a node may say of itself."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from client_app.client import handle
from client_app.node import Node, partition_id
from server_app.clients import hello
from server_app.clients.client_info import read_hello
from server_app.clients.hello import wait_for_nodes
from server_app.clients.registry import log_clients
from server_app.errors import RunError
from server_app.transport.base import Reply
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.keys import ConfigError
from task.message import Kind, Packet
from task.scenario.scenario import build_scenario
from tests.helpers.marks import rest_in_ci
from tests.helpers.runs import hello_message, run

Change = Callable[[Packet], object]

HELLO: dict[str, tuple[Change, str]] = {
    "no name": (lambda p: p.config.pop("name"), "its name is None; a printable text of 1 to 200"),
    "no counts": (lambda p: p.arrays.clear(), "class_counts"),
    "counts of another length": (lambda p: p.arrays.update(class_counts=np.ones(3, np.int64)), "class_counts"),
    "negative counts": (lambda p: p.arrays.update(class_counts=-p.arrays["class_counts"]), "class_counts"),
    "absurd counts": (
        lambda p: p.arrays.update(class_counts=p.arrays["class_counts"] + 10**15),
        "class_counts are above",
    ),
    "other classes": (lambda p: p.config.update(classes=["a"]), "classes ['a']"),
    "its own error": (lambda p: p.config.update(error="no disk"), "no disk"),
    "counts of test images": (lambda p: p.arrays.update(test_counts=np.ones(3)), "test_counts are float64 [3]"),
    "a number for classes": (lambda p: p.config.update(classes=5), "its classes 5 are not those"),
    "a number for versions": (lambda p: p.config.update(versions=3), "its versions are no list"),
    "a version that clears the screen": (
        lambda p: p.config.update(versions=["\x1b[2J"]),
        r"among its versions is '\x1b[2J'; printable texts",
    ),
    "a name that clears the screen": (
        lambda p: p.config.update(name="\x1b[2Jclient-0000"),
        r"its name is '\x1b[2Jclient-0000'; a printable text",
    ),
    "no letter in its name": (lambda p: p.config.update(name=" "), "its name is ' '; a printable text"),
    "a name without end": (lambda p: p.config.update(name="x" * 10**6), f"its name is '{'x' * 40}'; a printable text"),
    "a number for a digest": (lambda p: p.config.update({"code-sha256": 5}), "its code-sha256 is 5; a printable text"),
    "a device of two lines": (
        lambda p: p.config.update(device="cpu\ncpu"),
        r"its device is 'cpu\ncpu'; a printable text",
    ),
}


@pytest.mark.parametrize("value", [-1, "one", 1.5, True])
def test_a_partition_id_is_a_number_from_0(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"partition-id = '{value}' of this node is not possible: it counts from 0"):
        partition_id(Node({"partition-id": value}))


def test_nodes_with_the_same_part_of_the_data_are_warned_of(tiny: dict, caplog: pytest.LogCaptureFixture) -> None:
    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        if node == 2 and kind == "hello":
            packet.config["partition-id"] = 1
        return packet

    run(tiny | {"method": "ncm", "num-tasks": 2}, tamper=tamper)
    warning = "client-0001, client-0002 have the same images: each needs a partition-id of its own, not 1"
    assert caplog.messages.count(warning) == 1


@pytest.mark.parametrize("name", rest_in_ci(HELLO, ["no name", "absurd counts", "a name that clears the screen"]))
def test_a_bad_hello_leaves_the_node_out_and_is_named(name: str, tiny: dict) -> None:
    change, reason = HELLO[name]

    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        if node == 1 and kind == "hello":
            change(packet)
        return packet

    values = tiny | {"method": "ncm", "num-tasks": 1}
    with pytest.raises(RunError, match=r"2 clients can take part, but 3 are needed \(num-clients\)\. 1 nodes cannot"):
        run(values, tamper=tamper)
    results = run(values | {"num-clients": 0}, tamper=tamper)  # as many as connect: four
    assert results["status"] == "finished"
    assert [a["name"] for a in results["absent"]] == ["node 1"]
    assert reason in results["absent"][0]["reason"]
    assert results["rounds"][0]["participants"] == ["client-0000", "client-0002", "client-0003"]


def test_nobody_answers_hello(tiny: dict) -> None:
    with pytest.raises(RunError, match=r"0 clients can take part, but 1 are needed \(quorum\)"):
        run(tiny, broken=lambda node, kind: True)


def test_other_backbone_or_code_at_a_client_stops_the_run(tiny: dict) -> None:
    for key, word in (("backbone-sha256", "other backbone weights"), ("code-sha256", "another copy of the code")):

        def tamper(node: int, kind: Kind, packet: Packet, key: str = key) -> Packet:
            if node == 1:
                packet.config[key] = "0" * 64
            return packet

        with pytest.raises(RunError, match=rf"1 nodes cannot; the first is client-0001: it has {word}"):
            run(tiny, tamper=tamper)


def test_waiting_for_nodes_ends_though_one_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([[1]] + [[1, 2], [1]] * 10_000)
    transport = InProcessTransport(0)
    monkeypatch.setattr(transport, "nodes", lambda: next(seen))
    with pytest.raises(RunError, match=r"num-clients = 3, but [12] nodes .* longer start-timeout"):
        wait_for_nodes(transport, 3, 0.5)
    late = iter([[1]] * 3 + [[1, 2]] * 3 + [[1, 2, 3]])  # each comes before patience, all of them after it
    monkeypatch.setattr(transport, "nodes", lambda: next(late))
    assert wait_for_nodes(transport, 3, 0.35) == [1, 2, 3]
    empty = iter([[]] * 3 + [[1]] * 9)  # the first may take longer than each further one
    monkeypatch.setattr(transport, "nodes", lambda: next(empty))
    assert wait_for_nodes(transport, 1, 0.05) == [1]


@pytest.mark.parametrize("patience", [5.0, 0.05])
def test_as_many_nodes_as_connect_are_those_that_come_before_it_gets_quiet(
    patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes after 0.3 s: with a start-timeout below that the run begins without it."""
    monkeypatch.setattr(hello, "SETTLED", 0.5)
    seen = itertools.chain([[1]] * 3, itertools.repeat([1, 2]))
    transport = InProcessTransport(0)
    monkeypatch.setattr(transport, "nodes", lambda: next(seen))
    assert wait_for_nodes(transport, 0, patience) == ([1, 2] if patience > 0.5 else [1])


def test_clients_of_other_versions_are_named_once(tiny: dict, caplog: pytest.LogCaptureFixture) -> None:
    answer = handle("hello", hello_message(tiny), Node({"partition-id": 0}))
    client = read_hello(Reply(0, answer, "", 0, 0), build_scenario(parse(tiny)).dataset)
    log_clients([client])
    assert "other versions" not in caplog.text
    old = replace(client, name="old", versions=("torch 1.0", "timm 0.4", "flwr 1.41.0"))
    log_clients([client, old, old])
    assert "have 2 clients: old, old" in caplog.text
    assert caplog.text.count("other versions than this server's (torch ") == 1


@pytest.mark.parametrize(
    ("changes", "most", "words"),
    [
        ({}, 10**9, ""),
        ({}, 10**9 + 1, "images of each class"),
        ({"classes": ["cat", "cat"]}, 1, "its classes are not distinct"),
        ({"classes": ["cat", "Cat."]}, 1, "its classes are not distinct"),
        ({"classes": ["cat", "\n"]}, 1, "among its classes is"),
        ({"image-shape": 5}, 1, "image-shape is 5"),
        ({"image-shape": [0, 16]}, 1, r"image-shape is \[0, 16\]"),
        ({"unreadable": [1]}, 1, r"unreadable is \[1\]"),
        ({"unreadable-classes": ["\n"]}, 1, "among its unreadable-classes is"),
        ({"free-disk": -1}, 1, "free-disk is -1"),
        ({"free-disk": True}, 1, "free-disk is True"),
    ],
)
def test_a_hello_of_a_node_that_has_images_of_its_own(changes: dict[str, Any], most: int, words: str) -> None:
    said = dict.fromkeys(("name", "backbone-sha256", "code-sha256", "device"), "x")
    said |= {"classes": ["cat", "dog"], "versions": ["1"], "free-disk": 1, "unreadable": 0}
    said |= {"unreadable-classes": [], "image-shape": [8, 8]}
    reply = Reply(1, Packet({"class_counts": np.array([most, 1])}, config=said | changes), "", 0, 0)
    if words:
        with pytest.raises(ValueError, match=words):
            read_hello(reply, None)
    else:
        assert read_hello(reply, None).own_counts.tolist() == [most, 1]
