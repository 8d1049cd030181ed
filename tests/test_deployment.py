"""A deployment as docker/README.md describes it, as plain processes: TLS, known nodes, process isolation."""

import shutil
import ssl
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from server_app.in_process import InProcessTransport
from server_app.launcher import _environment, end_processes, last_lines
from server_app.run import execute
from task.config import parse
from task.packet import Scalar
from tests.conftest import TINY
from tests.test_docker import free_port, proxy
from tests.test_flower_glue import comparable
from tests.test_make_keys import make_keys

pytestmark = [pytest.mark.flower, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
NODES = 2
PATIENCE = 600  # seconds; every message starts a process that imports PyTorch


class Deployment:
    """Flower's programs below one folder, each with a home of its own; nodes come through the proxy if there is one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder, folder / "keys"
        self._mark = f"FCIL_TEST={uuid.uuid4().hex}"
        self._started: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        self._port = free_port()
        make_keys.main([str(self.keys), "--nodes", str(NODES + 1)])

    def __enter__(self) -> "Deployment":
        try:
            self._start_server()
            for i in range(NODES):
                self.flower("supernode", "register", str(self.keys / f"node-{i}.pub"), "fcil", "--name", f"node-{i}")
                self.start_node(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        end_processes(self._started, self._mark)

    def _start_server(self) -> None:
        secret = f"--superexec-auth-secret-file={self.keys}/server.secret"
        files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
        tls = [f"--ssl-{flag}={self.keys / name}" for flag, name in files.items()]
        place = [
            "--host=127.0.0.1",
            f"--port={self._port}",
            "--isolation=process",
            f"--database={self.folder}/state.db",
        ]
        self.start("superlink", "flower-superlink", *place, *tls, "--enable-supernode-auth", secret)
        address = f"127.0.0.1:{self._port}"
        (self.folder / "people").mkdir()
        connection = f'[superlink.fcil]\naddress = "{address}"\nroot-certificates = "{self.keys}/ca.crt"\n'
        (self.folder / "people" / "config.toml").write_text(connection)
        self._await_superlink()
        root = f"--root-certificates={self.keys}/ca.crt"
        self.start("superexec", "flower-superexec", f"--runtime-api-address={address}", root, secret)
        has_proxy = shutil.which("caddy")
        port = self._stack.enter_context(proxy(self.folder, self.keys, self._port)) if has_proxy else self._port
        self._fleet = f"127.0.0.1:{port}"

    def start_node(self, number: int, authority: Path | None = None) -> "subprocess.Popen[bytes]":
        """A node and what trains for it; the node's process."""
        port, secret = free_port(), f"--superexec-auth-secret-file={self.keys}/node-{number}.secret"
        node = self.start(
            f"supernode-{number}",
            "flower-supernode",
            f"--superlink={self._fleet}",
            f"--root-certificates={authority or self.keys / 'ca.crt'}",
            f"--auth-supernode-private-key={self.keys}/node-{number}",
            "--isolation=process",
            secret,
            f"--port={port}",
            f"--node-config=partition-id={number} num-partitions={NODES}",
        )
        where = f"--runtime-api-address=127.0.0.1:{port}"
        self.start(f"superexec-{number}", "flower-superexec", "--insecure", where, secret)
        return node

    def start(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        (self.folder / name).mkdir(exist_ok=True)
        with open(self.log(name), "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder / name,
                env=self._variables(name),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _await_superlink(self) -> None:
        context = ssl.create_default_context(cafile=self.keys / "ca.crt")
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"https://127.0.0.1:{self._port}/health", context=context, timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, last_lines(self.log("superlink"))
                time.sleep(0.2)

    def flower(self, *words: str) -> str:
        """One of people's commands; what it prints."""
        done = subprocess.run(
            ["flwr", *words], cwd=ROOT, env=self._variables("people"), capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _variables(self, name: str) -> dict[str, str]:
        mark, _, value = self._mark.partition("=")
        return _environment(self.folder / name) | {mark: value}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment")) as running:
        yield running


def settings(folder: Path, name: str) -> dict[str, Scalar]:
    return TINY | {"num-clients": NODES, "output-dir": str(folder), "run-name": name}


def test_nodes_end_with_the_numbers_of_a_run_in_one_process(deployment, tmp_path):
    values = settings(tmp_path, "nodes")
    words = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in values.items())
    said = deployment.flower("run", ".", "fcil", "--stream", "--run-config", words)
    assert (tmp_path / "nodes" / "results.json").exists(), said
    values = settings(tmp_path, "here")
    execute(parse(values), InProcessTransport(values, NODES))
    assert comparable(tmp_path / "nodes") == comparable(tmp_path / "here")


def end_of(deployment: Deployment, process: "subprocess.Popen[bytes]") -> str:
    assert process.wait(PATIENCE) != 0
    return deployment.log(f"supernode-{NODES}").read_text()


def test_a_node_that_nobody_registered_is_refused(deployment):
    assert "Failed to activate SuperNode" in end_of(deployment, deployment.start_node(NODES))


def test_a_server_of_another_authority_is_refused(deployment, tmp_path):
    make_keys.main([str(tmp_path), "--nodes", "0"])
    assert "CERTIFICATE_VERIFY_FAILED" in end_of(deployment, deployment.start_node(NODES, tmp_path / "ca.crt"))
