"""Flower without its network: a grid that runs the client app in this process, as strict as the real ones are."""

import pickle
import time
import uuid
from collections.abc import Callable, Iterable

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from task.config.schema import defaults
from task.message import Packet

N = [2**64 - 1 - i for i in range(4)]  # node ids


def through_wire(message: Message) -> Message:
    """As Ray's workers get it (pickled) and as the SuperLink stores it (object by object)."""
    message = pickle.loads(pickle.dumps(message))
    contents = {name: nested.deflate() for name, nested in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


class LoopbackGrid(Grid):
    """Runs a ClientApp in place of the network, as strict as the real grids are, with faults to order."""

    def __init__(self, app: Callable[[Message, Context], object], nodes: int = 3) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 2**64 - 1
        self._app = app
        self._contexts = {N[i]: self._context(i, nodes) for i in range(nodes)}
        self.delay: dict[int, float] = {}  # seconds that a node works
        self.silent: set[int] = set()
        self.refused: set[int] = set()
        self.reason: dict[int, str] = {}
        self._working: dict[str, int] = {}
        self._answers: dict[str, tuple[float, Message]] = {}
        self._run = Run.create_empty(1)

    @staticmethod
    def _context(place: int, nodes: int) -> Context:
        settings = {"partition-id": place, "num-partitions": nodes}
        return Context(1, N[place], settings, RecordDict(), dict(defaults()))

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise AssertionError("polls every 3 s over HTTP")

    def get_node_ids(self) -> list[int]:
        return list(reversed(self._contexts))

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=n, last_activated_at=self.started(n)) for n in self.get_node_ids()]

    def started(self, node: int) -> str:
        return "yesterday"

    def push_messages(self, messages: Iterable[Message]) -> list[str | None]:
        assert isinstance(messages, list), "generators fail over HTTP"
        return [self._push(message) for message in messages if message.metadata.dst_node_id not in self.refused]

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        assert node not in self._working.values(), "two messages at once"
        message.metadata.__dict__["_message_id"] = key = uuid.uuid4().hex
        self._working[key] = node
        if node not in self.silent:
            arrived = through_wire(message)
            answer = through_wire(self._answer(arrived))
            self._answers[key] = (time.monotonic() + self.delay.get(node, 0.0), answer)
        return key

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node in self.reason:
            return Message(Error(2, self.reason[node]), reply_to=message)
        answer = self._app(message, self._contexts[node])
        assert isinstance(answer, Message)
        return answer

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = list(message_ids)
        assert all(key in self._working for key in asked), "KeyError in a simulation"
        ready = [key for key in asked if key in self._answers and self._answers[key][0] <= time.monotonic()]
        for key in ready:
            del self._working[key]
        return [self._answers.pop(key)[1] for key in ready]


def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


def packet(mark: int) -> Packet:
    return Packet(arrays={"w": np.full((2, 3), mark, np.float32)}, metrics={"mark": mark}, config={"mark": mark})
