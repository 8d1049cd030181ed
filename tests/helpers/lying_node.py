"""A node that says to a real SuperLink what bytes it likes; and a server app in the test's own process."""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self, cast

from flwr.app import Context, Message, RecordDict
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.fleet_http_connection import http_request_response

from tests.helpers.objects import Objects, objects_of

App = Callable[[Message, Context], Message]


class LyingNode:
    """A node in a thread; ends with the context.

    Args:
        address: of the SuperLink.
        app: gives the honest answer.
        spoil: gets the message's type and the answer's objects; what it returns is sent, objects without bytes are not.
        settings: the node config.
        pause: seconds before each object.
        reads: whether it fetches what the message of the server holds.
        idle: seconds between two questions for work, unless ``wake`` is set.
    """

    def __init__(
        self,
        address: str,
        app: App,
        spoil: Callable[[str, Objects], Objects],
        settings: dict[str, object] | None = None,
        pause: float = 0.0,
        reads: bool = True,
        idle: float = 0.7,
    ) -> None:
        self._address, self._app, self._spoil, self._settings = address, app, spoil, settings or {}
        self._pause, self._reads = pause, reads
        self._end, self._ready, self.wake = threading.Event(), threading.Event(), threading.Event()
        self._idle = idle
        self._thread = threading.Thread(target=self._live, daemon=True)
        self.failures: list[str] = []  # tracebacks; it goes on, as a node of Flower's does
        self.sent = 0  # objects
        self.refused = 0  # of them, by the SuperLink

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(60)

    def _live(self) -> None:
        with http_request_response(self._address, insecure=True, max_wait_time=60) as connection:
            self._ready.set()
            while not self._end.is_set():
                self.wake.wait(self._idle)  # one that asked more often would keep the SuperLink busy
                self.wake.clear()
                try:
                    self._look_for_work(*connection)
                except Exception:
                    self.failures.append(traceback.format_exc())

    def _look_for_work(
        self,
        node: int,
        receive: Callable,
        send: Callable,
        _: object,
        __: object,
        pull: Callable,
        push: Callable,
        confirm: Callable,
    ) -> None:
        if not (received := receive()):
            return
        message, tree = received
        if self._reads:
            run, ids = message.metadata.run_id, [part.object_id for part in iterate_object_tree(tree)]
            contents = pull_objects(list(dict.fromkeys(ids)), partial(pull, run), initial_backoff=0.1)
            confirm(run, tree.object_id)
            message = cast(Message, inflate_object_from_contents(tree.object_id, contents))
        message.metadata.__dict__["_message_id"] = tree.object_id
        self._answer(message, Context(message.metadata.run_id, node, self._settings, RecordDict(), {}), send, push)

    def _answer(self, message: Message, context: Context, send: Callable, push: Callable) -> None:
        answer = self._app(message, context)
        answer.metadata.__dict__["_src_node_id"] = context.node_id
        objects = self._spoil(message.metadata.message_type, objects_of(answer))
        answer.metadata.__dict__["_message_id"] = objects.tree.object_id
        wanted, session = send(answer, objects.tree, 0.0)
        for part in iterate_object_tree(objects.tree):
            if part.object_id in wanted and part.object_id in objects.contents:
                wanted.remove(part.object_id)
                self._end.wait(self._pause)
                self.sent += 1
                try:
                    push(message.metadata.run_id, session, part.object_id, objects.contents[part.object_id])
                except Exception:
                    self.refused += 1


@contextmanager
def server_app(address: str) -> Iterator[HttpGrid]:
    """The grid of the run that was submitted last, as the server app of a SuperLink in process isolation has it."""
    with RuntimeHttpClient.from_server_address(address, True, None, []) as client:
        acquired = client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
    grid = HttpGrid(address, insecure=True, token=acquired.token)
    heart = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
    heart.start()
    try:
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        grid.set_run(run_from_proto(given.run))
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        yield grid
    finally:
        heart.stop()
        grid.close()
