"""The Flower ClientApp: messages to packets for :func:`client_app.client.handle`, and its packets back to messages."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from client_app.flower_records import from_records, to_records
from task.message import SECURE_SUM, Kind, Packet

if TYPE_CHECKING:
    from client_app.node import Node

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


@app.query("keys")
def keys(message: Message, context: Context) -> Message:
    """Answer this node's public keys for a secure sum."""
    return _answer("keys", message, context)


@app.query("shares")
def shares(message: Message, context: Context) -> Message:
    """Answer sealed shares of this node's secrets, one for each client."""
    return _answer("shares", message, context)


@app.query("unmask")
def unmask(message: Message, context: Context) -> Message:
    """Answer the shares that take the masks off a sum."""
    return _answer("unmask", message, context)


def _answer(kind: Kind, message: Message, context: Context) -> Message:
    """The answer, or an error as an answer: a node that gives none gets no more work until it is restarted."""
    try:
        # imported here: Ray starts its workers while the server is still importing torch
        from client_app.node import Node

        memory = {name: str(text) for name, text in context.state.get("memory", ConfigRecord()).items()}
        node = Node(context.run_config, context.node_config, str(context.run_id), memory)
        packet = _handler(kind)(kind, from_records(message.content), node)
        if node.memory or "memory" in context.state:
            context.state["memory"] = ConfigRecord(dict(node.memory))
        return Message(to_records(packet), reply_to=message)
    except Exception as error:
        log.exception("no answer to a %s message", kind)
        failed = Packet(config={"error": f"{type(error).__name__}: {error}"})
        return Message(to_records(failed), reply_to=message)


def _handler(kind: Kind) -> Callable[[Kind, Packet, "Node"], Packet]:
    """What answers a message; a secure sum's needs no torch, whose import takes seconds."""
    if kind in SECURE_SUM:
        from client_app.secure_aggregation import handle
    else:
        from client_app.client import handle
    return handle
