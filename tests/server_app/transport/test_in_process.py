"""The transport without Flower: faults to order, and what is counted."""

from server_app.transport.in_process import InProcessTransport
from task.config.schema import defaults
from task.message import payload_bytes
from tests.helpers.flower import packet
from tests.helpers.runs import TWO


def test_nodes_are_asked_in_turn_and_what_travels_is_counted():
    transport = InProcessTransport({**defaults(), **TWO}, 3)
    assert transport.nodes() == [0, 1, 2]
    assert transport.busy() == set()
    first, second = transport.exchange("hello", {1: packet(0), 2: packet(0)}, 4)
    assert [first.node, second.node] == [1, 2]
    assert first.bytes_down == len("w") + 128 + 24 + 2 * (len("mark") + 8)
    assert first.packet.config["name"] == "client-0001"
    assert first.bytes_up == payload_bytes(first.packet)
