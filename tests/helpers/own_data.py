"""Nodes that each have images of their own: their folders, and a transport on which they come and go."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from server_app.transport.base import Reply
from task.message import Kind, Packet, Scalar
from tests.helpers.runs import FaultyTransport, Values

OWN: Values = {"dataset": "own", "evaluate": "clients", "image-size": 16, "num-tasks": 2, "rounds-per-task": 1}
OWN |= {"local-epochs": 1, "device": "cpu", "class-order": "given", "run-name": "run"}
NAMES = ("ant", "bee", "cow", "doe", "elk", "fox")


def paint(folder: Path, count: int, first: int = 0, shade: int = 128) -> None:
    """Image files ``first`` to ``first + count`` of one shade."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(first, first + count):
        Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(folder / f"{i:03d}.png")


def store(folder: Path, c: int, images: np.ndarray) -> None:
    """Save images of class ``c`` as a node has them."""
    (folder / NAMES[c]).mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / NAMES[c] / f"{i}.png")


class Changing(FaultyTransport):
    """Nodes that connect, vanish or find data just before a train message of a server round, or while nothing goes on.

    ``before`` maps server rounds to what happens; ``hidden`` are nodes that are not connected.
    """

    def __init__(
        self,
        before: Mapping[int, Callable[[], object]] | None = None,
        node_settings: Sequence[Mapping[str, Scalar]] = (),
    ) -> None:
        super().__init__(3, node_settings)
        self.before, self.hidden, self.aliases = dict(before or {}), set[int](), dict[int, int]()

    def nodes(self) -> list[int]:
        return [n for n in [*super().nodes(), *self.aliases] if n not in self.hidden]

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterable[Reply]:
        server_round = next(iter(packets.values())).config.get("server-round", 0) if packets else 0
        if kind == "train" and server_round in self.before:
            self.before.pop(server_round)()  # type: ignore[call-overload]
        replies = []
        for node, packet in packets.items():
            if node in self.hidden:
                replies.append(Reply(node, None, "gone", 0, 0))
            else:
                [reply] = super().exchange(kind, {self.aliases.get(node, node): packet}, timeout, largest_answer)
                replies.append(Reply(node, reply.packet, reply.error, reply.bytes_down, reply.bytes_up))
        return replies
