"""A client's answer to hello, checked field by field."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from server_app.errors import one_line
from server_app.transport.base import Reply
from task.data.class_names import class_ids, find_same_class
from task.data.images import Dataset
from task.message import Packet

MAX_IMAGES = 10**9  # of one class on one node
MAX_NAME = 200  # characters
MAX_CLASSES = 2000  # of all nodes together: a server counts pairs of classes, 8 bytes each, in several matrices
MAX_VERSIONS = 10
MAX_SIDE = 100_000  # pixels


@dataclass(frozen=True)
class ClientInfo:
    """A client that has answered hello, and what it computes with."""

    name: str  # stable over the run and beyond
    node: int  # handle of the transport
    classes: tuple[str, ...]  # names of the run's data set, or of the node's own images in its spelling
    own_counts: np.ndarray  # int64 [len(classes)], its training images; a round may use fewer of them
    test_counts: np.ndarray  # int64 [len(classes)], held-out images, where a node has images of its own; else 0
    class_counts: np.ndarray  # int64 [classes of the run], own_counts in the order of the run's class ids
    unreadable: int  # number of image files, and of folders, that the node leaves out
    unreadable_classes: tuple[str, ...]  # classes of which the node leaves out a folder
    image_shape: tuple[int, ...]  # height and width of its own images in pixels
    backbone_sha256: str
    code_sha256: str
    versions: tuple[str, ...]
    device: str
    free_disk: int  # bytes, when it answered
    partition: int = -1  # its part of a registered data set; -1 where it has images of its own
    answered_at: float = field(default_factory=time.time)  # seconds since 1970

    def by_class_id(self, counts: np.ndarray, class_names: Sequence[str]) -> np.ndarray:
        """``own_counts`` or ``test_counts`` by the ids of ``class_names``, int64 [ids]; of other classes nothing."""
        ids = class_ids(self.classes, class_names)
        by_id = np.zeros(len(class_names), np.int64)
        by_id[ids[ids >= 0]] = counts[ids >= 0]
        return by_id


def failure(reply: Reply) -> str:
    """Why a reply cannot be used, or an empty text."""
    if reply.packet and not reply.error and not reply.packet.config.get("error"):
        return ""
    said = reply.error or str(reply.packet.config["error"] if reply.packet else "")
    return one_line(said) or "it failed without a reason"


def read_hello(reply: Reply, dataset: Dataset | None) -> ClientInfo:
    """The client that gave this answer to hello; ``dataset`` is None where each node has images of its own.

    Raises:
        ValueError: it failed, or its answer makes no sense; the message is the reason.
    """
    if reason := failure(reply):
        raise ValueError(reason)
    packet = reply.packet or Packet()
    config, counts = packet.config, packet.arrays.get("class_counts", np.empty(0))
    classes = dataset.class_names if dataset else _read_names(config, "classes", MAX_CLASSES)
    if dataset and config.get("classes") != list(classes):
        raise ValueError(f"its classes {config.get('classes')} are not those of the run")
    test_counts = packet.arrays.get("test_counts", np.zeros(len(classes), np.int64))
    for name, array in {"class_counts": counts, "test_counts": test_counts}.items():
        if array.dtype != np.int64 or array.shape != (len(classes),) or (array < 0).any():
            raise ValueError(
                f"{name} are {array.dtype} {list(array.shape)}; {len(classes)} counts from 0, int64, were expected"
            )
    if dataset and (counts > np.bincount(dataset.train_labels, minlength=len(classes))).any():
        raise ValueError("class_counts are above those of the whole data set")
    images: dict[str, Any] = {"unreadable": 0, "unreadable_classes": (), "image_shape": ()}
    if not dataset:
        images = _read_own_images(classes, counts + test_counts, config)
    texts = {"name": "name", "backbone_sha256": "backbone-sha256", "code_sha256": "code-sha256", "device": "device"}
    said: dict[str, Any] = {attribute: _read_name(config, name) for attribute, name in texts.items()}
    return ClientInfo(
        **said,
        **images,
        node=reply.node,
        classes=classes,
        own_counts=counts,
        test_counts=test_counts,
        class_counts=counts,
        versions=_read_names(config, "versions", MAX_VERSIONS),
        free_disk=_read_number(config, "free-disk"),
        partition=_read_number(config, "partition-id") if dataset else -1,
    )


def _read_own_images(classes: Sequence[str], counts: np.ndarray, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read what only nodes with images of their own send; returns values by attribute of :class:`ClientInfo`."""
    if ((counts < 1) | (counts > MAX_IMAGES)).any():
        raise ValueError(f"its class_counts are not 1 to {MAX_IMAGES} images of each class")
    if len(set(classes)) < len(classes) or find_same_class(classes):
        raise ValueError("its classes are not distinct")
    shape = config.get("image-shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n <= MAX_SIDE for n in shape):
        raise ValueError(f"its image-shape is {shape!r}; height and width were expected")
    return {
        "unreadable": _read_number(config, "unreadable"),
        "unreadable_classes": _read_names(config, "unreadable-classes", MAX_CLASSES),
        "image_shape": tuple(shape),
    }


def _read_number(config: Mapping[str, Any], name: str) -> int:
    number = config.get(name)
    if type(number) is not int or number < 0:
        raise ValueError(f"its {name} is {number!r}; a whole number from 0 was expected")
    return number


def _read_name(config: Mapping[str, Any], name: str) -> str:
    text = config.get(name)
    if not _is_name(text):
        raise ValueError(f"its {name} is {_shown(text)}; a printable text of 1 to {MAX_NAME} characters was expected")
    return str(text)


def _read_names(config: Mapping[str, Any], name: str, max_length: int) -> tuple[str, ...]:
    texts = config.get(name)
    if not isinstance(texts, list) or len(texts) > max_length:
        raise ValueError(f"its {name} are no list of at most {max_length} texts")
    for text in texts:
        if not _is_name(text):
            expected = f"printable texts of 1 to {MAX_NAME} characters were expected"
            raise ValueError(f"among its {name} is {_shown(text)}; {expected}")
    return tuple(texts)


def _shown(text: Any) -> str:
    return ascii(text if not isinstance(text, str) else text[:40])[:60]


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and bool(text.strip()) and text.isprintable() and len(text) <= MAX_NAME
