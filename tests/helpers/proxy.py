"""docker/make_keys.py as a module, the proxy of docker/ as a plain process, and what stands behind it."""

import http.server
import importlib.util
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType

DOCKER = Path(__file__).parents[2] / "docker"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_keys", DOCKER / "make_keys.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_keys = _load()


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def proxy(folder: Path, keys: Path, superlink: int) -> Iterator[int]:
    """Caddy with docker/proxy.json, but for the places of its files and ports."""
    port = free_port()
    text = (DOCKER / "proxy.json").read_text()
    for there, here in {
        "/run/secrets": str(keys),
        '":8443"': f'"127.0.0.1:{port}"',
        "superlink:8000": f"127.0.0.1:{superlink}",
    }.items():
        assert there in text
        text = text.replace(there, here)
    (folder / "proxy.json").write_text(text)
    command = [Path(sys.executable).parent / "caddy", "run", "--config", folder / "proxy.json"]
    with open(folder / "proxy.log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        )
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the proxy does not start")


class Upstream(http.server.BaseHTTPRequestHandler):
    """Stands for the SuperLink and notes what reaches it."""

    reached: list[str]
    answer = 200

    def do_POST(self) -> None:
        self.reached.append(self.path)
        if not self._read_body():
            return
        self.send_response(self.answer)
        self.send_header("content-length", "0")
        self.end_headers()

    def _read_body(self) -> bool:
        """Whether all of it came."""
        if self.headers.get("transfer-encoding") != "chunked":
            size = int(self.headers.get("content-length") or 0)
            return len(self.rfile.read(size)) == size
        while size := int(self.rfile.readline() or b"0", 16):
            if len(self.rfile.read(size + 2)) < size + 2:
                return False
        return self.rfile.readline() == b"\r\n"

    do_GET = do_PUT = do_POST

    def log_message(self, *_: object) -> None:
        pass


class Comparing(Upstream):
    """Answers 409 to a body that is not the one that the header x-body says."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(200 if body == self.headers["x-body"].encode() else 409)
        self.send_header("content-length", "0")
        self.end_headers()


@contextmanager
def upstream(keys: Path, port: int = 0, kind: type[Upstream] = Upstream) -> Iterator[tuple[int, list[str]]]:
    """Port of a server in the SuperLink's place, and the paths that have reached it."""
    handler = type("Noted", (kind,), {"reached": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.crt", keys / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, handler.reached
    finally:
        server.shutdown()
        server.server_close()
