"""What a client says of itself in its answer to hello, checked field by field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from server_app.transport.base import Reply
from task.data.images import Dataset
from task.message import Packet

MOST_IMAGES = 10**9  # of one class on one node
LONGEST_NAME = 200  # characters of a name
MOST_CLASSES = 10_000
MOST_VERSIONS = 100
MOST_SIDE = 100_000  # pixels


@dataclass(frozen=True)
class Member:
    """A client that answered hello.

    Attributes:
        name: stable over the run and beyond.
        node: handle of the transport.
        classes: names, those of the run's data set or of the node's own images.
        own_counts: int64 [len(classes)], training images at most.
        test_counts: likewise of held-out images, where a node has images of its own.
        class_counts: int64 [classes of the run], ``own_counts`` under the run's class ids.
        unreadable: image files that the node leaves out.
        image_shape: height and width of its own images in pixels.
        backbone_sha256, code_sha256, versions, device: what it computes with.
    """

    name: str
    node: int
    classes: tuple[str, ...]
    own_counts: np.ndarray
    test_counts: np.ndarray
    class_counts: np.ndarray
    unreadable: int
    image_shape: tuple[int, ...]
    backbone_sha256: str
    code_sha256: str
    versions: tuple[str, ...]
    device: str

    def placed(self, class_names: Sequence[str]) -> "Member":
        """The same with its counts under the ids of ``class_names``; what has no id counts nothing."""
        return replace(self, class_counts=self._by_id(self.own_counts, class_names))

    def held_out(self, class_names: Sequence[str]) -> np.ndarray:
        """Its held-out images under the ids of ``class_names``, int64 [classes]."""
        return self._by_id(self.test_counts, class_names)

    def _by_id(self, counts: np.ndarray, class_names: Sequence[str]) -> np.ndarray:
        held = dict(zip(self.classes, counts.tolist(), strict=True))
        return np.array([held.get(name, 0) for name in class_names], np.int64)


def failure(reply: Reply) -> str:
    """Why a reply cannot be used, or an empty text."""
    return reply.error or str((reply.packet and reply.packet.config.get("error", "")) or "")


def _member(reply: Reply, dataset: Dataset | None) -> Member:
    """What a node said of itself; ValueError with the reason if it failed or makes no sense."""
    if reason := failure(reply):
        raise ValueError(reason)
    packet = reply.packet or Packet()
    said, counts = _said(packet.config), packet.arrays.get("class_counts", np.empty(0))
    classes = said["classes"]
    test_counts = packet.arrays.get("test_counts", np.zeros(len(classes), np.int64))
    if dataset and classes != dataset.class_names:
        raise ValueError(f"its classes {list(classes)} are not those of the run")
    _check_counts(classes, counts, test_counts)
    if dataset and (counts > np.bincount(dataset.train_labels, minlength=len(classes))).any():
        raise ValueError("class_counts are above those of the whole data set")
    own = {"unreadable": 0, "image_shape": ()} if dataset else _own_facts(classes, counts + test_counts, packet.config)
    return Member(node=reply.node, own_counts=counts, test_counts=test_counts, class_counts=counts, **said, **own)


def _said(config: Mapping[str, Any]) -> dict[str, Any]:
    """What every node says of itself in words, by the attributes of :class:`Member`."""
    words = {name: config.get(name.replace("_", "-")) for name in ("name", "backbone_sha256", "code_sha256", "device")}
    missing = sorted(name for name in ("classes", "versions") if name not in config)
    missing += sorted(name for name, word in words.items() if word is None)
    if missing:
        raise ValueError(f"its hello lacks {missing}")
    classes, versions = _texts(config["classes"], MOST_CLASSES), _texts(config["versions"], MOST_VERSIONS)
    if not all(isinstance(word, str) and _is_name(word) for word in (*words.values(), *versions)):
        raise ValueError(f"what it says of itself is no printable text of 1 to {LONGEST_NAME} characters")
    return {**words, "classes": classes, "versions": versions}


def _check_counts(classes: Sequence[str], *counts: np.ndarray) -> None:
    for found in counts:
        if found.dtype != np.int64 or found.shape != (len(classes),) or (found < 0).any():
            raise ValueError(f"class_counts are {found.dtype} {list(found.shape)}; {len(classes)} counts were expected")


def _texts(found: Any, most: int) -> tuple[str, ...]:
    if not isinstance(found, list) or len(found) > most or not all(isinstance(text, str) for text in found):
        raise ValueError(f"its classes or versions are no list of at most {most} texts")
    return tuple(found)


def _own_facts(classes: Sequence[str], counts: np.ndarray, config: Mapping[str, Any]) -> dict[str, Any]:
    """What only nodes with images of their own say."""
    if ((counts < 1) | (counts > MOST_IMAGES)).any():
        raise ValueError(f"its class_counts are not 1 to {MOST_IMAGES} images of each class")
    if len(set(classes)) < len(classes) or not all(map(_is_name, classes)):
        raise ValueError(f"its class names are not distinct texts of 1 to {LONGEST_NAME} printable characters")
    shape, unreadable = config.get("image-shape"), config.get("unreadable")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n <= MOST_SIDE for n in shape):
        raise ValueError(f"its image-shape is {shape!r}; height and width were expected")
    if type(unreadable) is not int or unreadable < 0:
        raise ValueError(f"its number of unreadable files is {unreadable!r}")
    return {"unreadable": unreadable, "image_shape": tuple(shape)}


def _is_name(text: str) -> bool:
    return bool(text.strip()) and text.isprintable() and len(text) <= LONGEST_NAME
