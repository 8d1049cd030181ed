"""The Flower ClientApp: messages to packets for :func:`client_app.client.handle`, and its packets back to messages."""

import logging
from functools import partial

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from client_app.flower_records import QUERIES, from_records, to_records
from task.message import Kind, Packet

log = logging.getLogger(__name__)


def _answer(kind: Kind, message: Message, context: Context) -> Message:
    """The answer, or an error as an answer: a node that gives none gets no more work until it is restarted."""
    try:
        # imported here: Ray starts its workers while the server is still importing torch
        from client_app.client import handle
        from client_app.node import Node

        memory = dict(context.state.get("memory", ConfigRecord()))
        node = Node(context.node_config, str(context.run_id), memory)
        packet = handle(kind, from_records(message.content), node)
        context.state["memory"] = ConfigRecord(node.memory)
        return Message(to_records(packet), reply_to=message)
    except Exception as error:
        log.exception("no answer to a %s message", kind)
        failed = Packet(config={"error": f"{type(error).__name__}: {error}"})
        return Message(to_records(failed), reply_to=message)


app = ClientApp()
app.train()(partial(_answer, "train"))
app.evaluate()(partial(_answer, "evaluate"))
for action in QUERIES:
    app.query(action)(partial(_answer, action))
