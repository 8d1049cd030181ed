"""Answers as the objects, bytes under their hashes, in which they travel: whole, mutated, or held back by a node."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from tests.helpers.flower import N

DIVIDER = b"\x00"
TYPES = [b"ArrayChunk", b"Array", b"ArrayRecord", b"ConfigRecord", b"Message", b"MetricRecord", b"RecordDict"]
BODIES = [
    b"",
    b"not json at all",
    b"{}",
    b"[]",
    b"null",
    b"\xff" * 40,
    b"PK\x05\x06" + bytes(18),  # an empty zip file
    b'{"arrays": 1}',
    b'{"dtype": "float32", "shape": [99999999, 99999], "stype": "numpy.ndarray", "arraychunk_ids": []}',
    b"[" * 20_000,
    b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999, 9), }".ljust(128) + b"\n",
]


@dataclass
class Objects:
    """An answer as it travels: the ids of its objects as a tree, and their bytes by id."""

    tree: ObjectTree
    contents: dict[str, bytes]


def answered(kind: str) -> Callable[[Message, Context], Message]:
    """A client app whose answer has all that a node sends to such a message, in little."""

    def answer(message: Message, context: Context) -> Message:
        arrays = ArrayRecord({"class_counts": _array(), "w": _array()})
        config = ConfigRecord({"name": "north", "classes": ["a", "b"], "image-shape": [28, 28], "ends": True})
        records = {"arrays": arrays, "config": config}
        if kind != "hello":
            records |= {"prototypes": ArrayRecord({"means": _array()}), "metrics": MetricRecord({"loss": 0.5, "n": 3})}
        return Message(RecordDict(records), reply_to=message)

    return answer


def _array() -> Array:
    return Array(np.arange(6, dtype=np.float32).reshape(2, 3))


def objects_of(answer: Message) -> Objects:
    """The objects of an honest answer."""
    answer.metadata.__dict__["_message_id"] = answer.object_id
    contents = {name: nested.deflate() for name, nested in get_all_nested_objects(answer).items()}
    return Objects(get_object_tree(answer), contents)


def replaced(objects: Objects, old: str, content: bytes) -> Objects:
    """The same with one object of other bytes, and so of another id, as all above it then are too."""
    renamed, contents = {old: get_object_id(content)}, {get_object_id(content): content}
    for name in dict.fromkeys(node.object_id for node in iterate_object_tree(objects.tree)):
        if name == old:
            continue
        text = objects.contents[name]
        for before, after in renamed.items():  # children come before their parents
            text = text.replace(before.encode(), after.encode())
        contents[renamed.setdefault(name, get_object_id(text))] = text

    def copied(tree: ObjectTree) -> ObjectTree:
        return ObjectTree(object_id=renamed[tree.object_id], children=[copied(child) for child in tree.children])

    return Objects(copied(objects.tree), contents)


def mutated(objects: Objects, chance: random.Random) -> Objects:
    """One of the objects with other bytes, such as the SuperLink still takes: the head must fit the body's length."""
    while True:
        old = chance.choice(sorted(objects.contents))
        content = _mutated_content(objects.contents[old], chance)
        try:
            validate_object_content(content)
        except Exception:
            continue
        if content != objects.contents[old]:
            return replaced(objects, old, content)


def _mutated_content(content: bytes, chance: random.Random) -> bytes:
    head, _, body = content.partition(DIVIDER)
    kind, children, _ = head.split(b" ")
    for _ in range(chance.randint(1, 3)):
        body = _mutated_body(body, chance)
    if chance.random() < 0.1:
        kind = chance.choice(TYPES)
    if chance.random() < 0.1:
        children = b",".join(children.split(b",")[: chance.randint(0, 2)])
    return b" ".join([kind, children, b"%d" % len(body)]) + DIVIDER + body


def _mutated_body(body: bytes, chance: random.Random) -> bytes:
    start, end = sorted(chance.randint(0, len(body)) for _ in range(2))
    noise = chance.randbytes(chance.randint(1, 8))
    return chance.choice(
        [
            lambda: chance.choice(BODIES),
            lambda: body[:start] + noise + body[start:],
            lambda: body[:start] + noise + body[start + len(noise) :],
            lambda: body[:start],
            lambda: body[:start] + body[end:],
            lambda: body[:end] + body[start:],
            lambda: body[:start] + bytes(b ^ (1 << chance.randint(0, 7)) for b in body[start:end]) + body[end:],
            lambda: body.replace(b"float32", chance.choice([b"float64", b"object", b"<U9999", b"xxx"])),
            lambda: body.replace(b"numpy.ndarray", b"pickle"),
            lambda: body[::-1],
        ]
    )()


class ObjectGrid(HttpGrid):
    """Flower's own grid, before a SuperLink in this process whose nodes answer at once, with what bytes they like.

    Attributes:
        spoil: changes the objects of a node's answer, by node.
        held: whether an object of a node's answer has not come yet, by node.
        calls: what the SuperLink was asked.
    """

    def __init__(self, app: Callable[[Message, Context], Message], nodes: int = 3) -> None:
        super().__init__(token="none", insecure=True)
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.set_run(Run.create_empty(1))
        self._app, self._nodes = app, N[:nodes]
        self.spoil: dict[int, Callable[[Objects], Objects]] = {}
        self.held: dict[int, Callable[[str, Objects], bool]] = {}
        self.calls: list[str] = []
        self._answers: dict[str, tuple[int, Message, Objects]] = {}
        self._sending: dict[str, tuple[int, Objects]] = {}

    @property
    def _runtime_client(self):
        return self

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = key = message.object_id
            answer = self._app(message, Context(1, node, {}, RecordDict(), {}))
            objects = objects_of(answer)
            self._answers[key] = node, answer, self.spoil.get(node, lambda o: o)(objects)
            ids.append(key)
        return ids

    def PullMessages(self, request):
        self.calls.append("PullMessages")
        messages, trees = [], []
        for key in request.message_ids:
            if key in self._answers:
                node, answer, objects = self._answers.pop(key)
                answer.metadata.__dict__["_message_id"] = objects.tree.object_id
                answer.metadata.__dict__["_reply_to_message_id"] = key
                messages.append(message_to_proto(remove_content_from_message(answer)))
                trees.append(objects.tree)
                self._sending |= dict.fromkeys(objects.contents, (node, objects))
        return PullAppMessagesResponse(messages_list=messages, message_object_trees=trees)

    def PullObject(self, request):
        self.calls.append("PullObject")
        if request.object_id not in self._sending:
            return PullObjectResponse(object_found=False)
        node, objects = self._sending[request.object_id]
        if self.held.get(node, lambda name, o: False)(request.object_id, objects):
            return PullObjectResponse(object_found=True, object_available=False)
        content = objects.contents[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        self.calls.append("ConfirmMessageReceived")

    def GetNodes(self, request):
        self.calls.append("GetNodes")
        return GetNodesResponse(nodes=[NodeInfo(node_id=n, last_activated_at="yesterday") for n in self._nodes])

    def close(self) -> None:
        pass
