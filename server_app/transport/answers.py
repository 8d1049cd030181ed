"""Taking answers from Flower's Grid, each by itself, so that none holds up or breaks the others.

``HttpGrid.pull_messages`` of Flower 1.41 asks for all answers at once, of which the SuperLink then keeps none. It waits
up to two hours for the objects of an answer that its node has begun to send, and raises at the first answer that cannot
be decoded: the others of the call are lost. So this module makes the same requests one by one.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_children_ids_from_object_content,
    get_object_type_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid import HttpGrid

from server_app.errors import RunError

log = logging.getLogger(__name__)

Answer = Message | Exception  # an exception says why an answer cannot be read
Result = TypeVar("Result")

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between tries
_OBJECT_BYTES = 1000  # that an object takes in memory beside its content


def patiently(call: Callable[..., Result], *arguments: object) -> Result:
    """Call the SuperLink, and repeat the call while it fails, as when its database is locked for over five seconds.

    Raises:
        RunError: it has failed six times in a row, or nobody answers there.
    """
    for pause in (*PAUSES, None):
        try:
            return call(*arguments)
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500:
                raise
            answer = f"the SuperLink answers {error.response.status_code} to {error.request.url.path}"
        except httpx.TransportError as error:  # Flower has tried again for 15 seconds
            raise RunError(f"the SuperLink does not answer ({error}). Resume the run when it does.") from error
        if pause is not None:
            log.warning("%s; trying again in %g s", answer, pause)
            time.sleep(pause)
    raise RunError(
        f"{answer}, {len(PAUSES) + 1} times in {sum(PAUSES):g} s. Its log says why; 'database is locked' there means "
        "that its disk or its machine is too busy. Resume the run when it is not."
    )


class WholeAnswers:
    """Answers of a grid that keeps them whole in this process's memory, as in a simulation."""

    batch = 16  # answers that are taken, and held in memory, together

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def look(self, message_ids: Sequence[str]) -> list[str]:
        """Returns all ids, because only :meth:`take` shows which messages have an answer."""
        return list(message_ids)

    def take(self, message_ids: Sequence[str], until: float, largest: int) -> list[tuple[str, Answer]]:
        """Answers that have come, each with the id of its message; Flower itself answers for nodes that are gone.

        They are here already, so neither ``until`` nor ``largest`` is used, see :class:`HttpAnswers`.
        """
        return [(m.metadata.reply_to_message_id, m) for m in self._grid.pull_messages(message_ids)]


@dataclass
class _Upload:
    """An answer that its node has sent or is sending; ``missing`` are ids of objects that were not fetched yet."""

    message_id: str  # of the answer
    missing: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0  # bytes that the contents take


class HttpAnswers:
    """Answers from a SuperLink, which hands them out once, object by object."""

    batch = 1

    def __init__(self, grid: HttpGrid) -> None:
        self._grid = grid
        self._uploads: dict[str, _Upload] = {}  # by id of the message that is answered

    def look(self, message_ids: Sequence[str]) -> list[str]:
        """Ids of messages whose answers have come or are on their way; the SuperLink names each of them only once.

        ``message_ids`` are all whose answers are still wanted.
        """
        self._uploads = {message_id: u for message_id, u in self._uploads.items() if message_id in message_ids}
        unknown = [message_id for message_id in message_ids if message_id not in self._uploads]
        if unknown:
            request = PullAppMessagesRequest(message_ids=unknown)
            response = patiently(self._grid._runtime_client.PullMessages, request)
            for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                # the SuperLink has checked this id; the id in the answer itself may be that of another node's message
                answered = message.metadata.reply_to_message_id
                # each object once; the answer itself, which a node sends last, is the last one
                objects = cast(Iterator[ObjectTree], iterate_object_tree(tree))
                missing = list(dict.fromkeys(node.object_id for node in objects))
                self._uploads[answered] = _Upload(message.metadata.message_id, missing)
        return [message_id for message_id in message_ids if message_id in self._uploads]

    def take(self, message_ids: Sequence[str], until: float, largest: int) -> list[tuple[str, Answer]]:
        """Answers that are complete before ``until`` (monotonic time): each decoded, or the error if it cannot be.

        Of an answer of more than ``largest`` bytes nothing is kept. The next call goes on with those that are
        incomplete.
        """
        answers = [(message_id, self._fetch(self._uploads[message_id], until, largest)) for message_id in message_ids]
        whole = [(message_id, answer) for message_id, answer in answers if answer is not None]
        for message_id, _ in whole:
            del self._uploads[message_id]
        return whole

    def _fetch(self, upload: _Upload, until: float, largest: int) -> Answer | None:
        """The answer; None while something of it is missing."""
        while upload.missing and time.monotonic() < until:
            request = PullObjectRequest(
                node=self._grid.node, run_id=self._grid.run.run_id, object_id=upload.missing[-1]
            )
            response = patiently(self._grid._runtime_client.PullObject, request)
            if not response.object_found:
                return ConnectionError("the node broke off while it sent its answer")
            if not response.object_available:
                return None
            upload.contents[upload.missing.pop()] = response.object_content
            upload.size += len(response.object_content) + _OBJECT_BYTES
            if upload.size > largest:
                self._confirm(upload)
                return _too_large(largest)
        return None if upload.missing else self._decode(upload, largest)

    def _confirm(self, upload: _Upload) -> None:
        """Let the SuperLink delete the answer."""
        request = ConfirmMessageReceivedRequest(
            node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=upload.message_id
        )
        patiently(self._grid._runtime_client.ConfirmMessageReceived, request)

    def _decode(self, upload: _Upload, largest: int) -> Answer:
        self._confirm(upload)
        try:
            if _unfolded_bytes(upload.contents) > largest:
                return _too_large(largest)
            answer = inflate_object_from_contents(upload.message_id, upload.contents)
        except Exception as error:  # whatever the node has sent
            return error
        return answer if isinstance(answer, Message) else TypeError(f"a {type(answer).__name__} and no message")


def _too_large(largest: int) -> ValueError:
    return ValueError(f"it has more than the {largest / 1e6:.3g} MB that the run's messages can have")


def _unfolded_bytes(contents: Mapping[str, bytes]) -> int:
    """Bytes of all arrays of an answer, given its objects by id.

    An object travels once and can be named any number of times: a chunk in its array, an array in its record. Each name
    is a copy once the answer is decoded.

    Raises:
        Exception: an object is not what it says, as Flower's own reader would find.
    """
    sizes, records = dict.fromkeys(contents, 0), []
    for name, content in contents.items():
        kind, body = get_object_type_from_object_content(content), content.partition(b"\x00")[2]
        if kind == "ArrayRecord":
            records.append(json.loads(body))
        elif kind == "Array":
            chunks = [len(contents[chunk]) for chunk in get_object_children_ids_from_object_content(content)]
            sizes[name] = sum(chunks[i] for i in json.loads(body)["arraychunk_ids"])
    return sum(sizes[array] for record in records for array in record.values())


Answers = WholeAnswers | HttpAnswers
