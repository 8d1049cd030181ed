"""The transport without Flower: faults to order, and what is counted."""

import json
from dataclasses import replace

from server_app.transport.in_process import InProcessTransport
from task.message import payload_bytes
from tests.helpers.flower import packet
from tests.helpers.runs import TWO, hello_message


def test_nodes_are_asked_in_turn_and_what_travels_is_counted():
    transport = InProcessTransport(3)
    assert transport.nodes() == [0, 1, 2]
    assert transport.busy() == set()
    asked = replace(packet(0), config={"mark": 0} | hello_message(TWO).config)
    first, second = transport.exchange("hello", {1: asked, 2: asked}, 4)
    assert [first.node, second.node] == [1, 2]
    assert first.bytes_down == len("w") + 128 + 24 + 2 * (len("mark") + 8) + len("run-config") + len(json.dumps(TWO))
    assert first.packet.config["name"] == "client-0001"
    assert first.bytes_up == payload_bytes(first.packet)
