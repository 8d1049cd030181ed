"""The Flower ClientApp: messages to packets for :func:`client_app.client.handle`, and its packets back to messages."""

import logging

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.flower_records import from_records, to_records
from task.message import Kind, Packet

log = logging.getLogger(__name__)

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Answer who this node is, what it holds and what it runs."""
    return _answer("hello", message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer with trained arrays and statistics."""
    return _answer("train", message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Answer with correct and total counts per class."""
    return _answer("evaluate", message, context)


def _answer(kind: Kind, message: Message, context: Context) -> Message:
    """The answer, or an error as an answer: a node that gives none gets no more work until it is restarted."""
    try:
        # imported here: Ray starts its workers while the server is still importing torch
        from client_app.client import handle
        from client_app.node import Node

        node = Node(context.run_config, context.node_config, str(context.run_id))
        packet = handle(kind, from_records(message.content), node)
        return Message(to_records(packet), reply_to=message)
    except Exception as error:
        log.exception("no answer to a %s message", kind)
        failed = Packet(config={"error": f"{type(error).__name__}: {error}"})
        return Message(to_records(failed), reply_to=message)
