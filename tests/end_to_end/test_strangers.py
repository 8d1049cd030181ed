"""What somebody without a key can do to a real SuperLink through the proxy: fill no memory, hold no connection."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from tests.helpers.deployment import Deployment

pytestmark = pytest.mark.flower

BODY = 400_000_000  # bytes
ROOM = 50_000_000  # bytes by which the SuperLink may grow


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment"), 1) as running:
        yield running


@contextmanager
def connected(deployment: Deployment) -> Iterator[ssl.SSLSocket]:
    """A connection to the proxy."""
    host, port = deployment._address.split(":")
    context = ssl.create_default_context(cafile=deployment.keys / "ca.crt")
    near = socket.create_connection((host, int(port)), timeout=60)
    with context.wrap_socket(near, server_hostname="localhost") as connection:
        yield connection


def head(path: str, size: int) -> bytes:
    lines = [f"POST /v1/fleet/{path} HTTP/1.1", "Host: x", f"Content-Type: {PROTOBUF_MEDIA_TYPE}"]
    return "\r\n".join([*lines, f"Content-Length: {size}", "", ""]).encode()


def post(deployment: Deployment, path: str, size: int) -> int:
    """The answer to a body of zeros, which is sent until the proxy closes the connection."""
    with connected(deployment) as connection:
        with suppress(OSError):
            connection.sendall(head(path, size))
            for _ in range(size >> 20):
                connection.sendall(bytes(1 << 20))
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.ci
@pytest.mark.parametrize("path", ["push-messages", "push-object", "activate-node"])
def test_400_mb_from_a_stranger_do_not_reach_the_memory_of_the_superlink(path: str, deployment: Deployment) -> None:
    superlink = psutil.Process(deployment.processes["superlink"].pid)
    before = superlink.memory_info().rss
    answer = post(deployment, path, BODY)
    assert superlink.memory_info().rss - before < ROOM
    assert answer == 413
    assert post(deployment, path, 0) == 401  # it still answers


@pytest.mark.ci
def test_strangers_who_send_slowly_keep_nobody_out(deployment: Deployment) -> None:
    """More of them than requests are served at once; each has sent a header and the first byte of a body."""
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connected(deployment)).sendall(head("push-object", 5_000_000) + b"x")
        time.sleep(2)
        began = time.monotonic()
        assert post(deployment, "push-messages", 0) == 401
        assert time.monotonic() - began < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beginning", "seconds"),
    [(b"", 10), (head("push-object", 9)[:60], 10), (head("push-object", 5_000_000), 120)],
)
def test_a_stranger_who_does_not_go_on_is_dropped(beginning: bytes, seconds: float, deployment: Deployment) -> None:
    """Nothing or half a header: after ten seconds. A byte of the body a second: after two minutes."""
    began = time.monotonic()
    with connected(deployment) as connection:
        connection.settimeout(1)
        connection.sendall(beginning)
        while time.monotonic() - began < 200:
            try:
                if seconds > 10:
                    connection.sendall(b"x")
                if not connection.recv(1000):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert seconds - 5 < time.monotonic() - began < seconds + 10
