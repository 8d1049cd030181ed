"""The transport without Flower: faults to order, and what is counted."""

from server_app.transport.in_process import InProcessTransport
from task.config.schema import defaults
from task.message import payload_bytes
from tests.helpers.flower import packet
from tests.helpers.runs import TWO


def test_nodes_are_asked_in_turn_and_what_travels_is_counted():
    transport = InProcessTransport({**defaults(), **TWO}, 3, {"name": "same"})
    assert transport.nodes() == [0, 1, 2]
    assert transport.busy() == set()
    replies = list(transport.exchange("hello", {1: packet(0), 9: packet(0)}, 4))
    assert [r.node for r in replies] == [1, 9]
    assert [r.error for r in replies] == ["", "there is no such node"]
    assert [r.bytes_down for r in replies] == [len("w") + 128 + 24 + 2 * (len("mark") + 8), 0]
    assert replies[0].packet.config["name"] == "same"
    assert replies[0].bytes_up == payload_bytes(replies[0].packet)
    assert replies[1].packet is None
