"""The transport without Flower: faults to order, and what is counted."""

from server_app.transport.in_process import InProcessTransport
from task.config.schema import defaults
from task.message import Packet
from tests.helpers.flower import packet
from tests.helpers.runs import TWO


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
    assert replies[0].bytes_down == len("w") + 128 + 24 + 2 * (len("mark") + 8)
