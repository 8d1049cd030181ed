"""The Flower ClientApp: it passes messages on and always answers."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

import client_app.client
from client_app.app import app as client
from client_app.flower_records import from_records, to_records
from task.message import Packet
from tests.helpers.flower import LoopbackGrid, N, echo, packet, through_wire


def answer_of(handle: object, monkeypatch: pytest.MonkeyPatch, kind: str = "train") -> Packet:
    LoopbackGrid(echo)
    monkeypatch.setattr(client_app.client, "handle", handle)
    message = Message(to_records(packet(7)), N[0], kind)
    answer = client(message, Context(1, N[0], {"partition-id": 3}, RecordDict(), {"seed": 5}))
    return from_records(through_wire(answer).content)


def test_handlers_pass_kind_packet_and_settings(monkeypatch):
    for kind, name in {"query.hello": "hello", "train": "train", "evaluate": "evaluate"}.items():
        seen = []
        answer_of(lambda *given, seen=seen: seen.append(given) or Packet(), monkeypatch, kind)
        [(got, sent, node)] = seen
        assert (got, sent.config, dict(node.settings)) == (name, {"mark": 7}, {"partition-id": 3})


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
