"""Flower's programs as plain processes on 127.0.0.1, as docker/README.md starts them, and what may befall them."""

import contextlib
import json
import os
import signal
import ssl
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psutil

from server_app.simulation.processes import end_processes, last_lines
from server_app.simulation.superlink import _environment
from task.message import Scalar
from tests.helpers.proxy import free_port, make_keys, proxy

ROOT = Path(__file__).parents[2]
PATIENCE = 600  # seconds; every message starts a process that imports PyTorch
Process = subprocess.Popen  # of bytes


def until(true: Callable[[], object], what: str, pause: float = 0.1) -> None:
    """Wait for something to be true."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(pause)


class Programs:
    """Programs below one folder, each with a home and a log of its own; all end with the context.

    Attributes:
        processes: the last one started under each name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, dict[str, Process[bytes]]()
        self._mark = f"FCIL_TEST={uuid.uuid4().hex}"
        self._started: list[Process[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            send(process, signal.SIGCONT)
        end_processes(self._started, self._mark)

    def start(self, name: str, *command: str) -> "Process[bytes]":
        (self.folder / name).mkdir(exist_ok=True)
        with open(self.log(name), "ab") as log:
            process = Process(
                command,
                cwd=self.folder / name,
                env=self._variables(name),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        self.processes[name] = process
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def count_in_log(self, name: str, words: str) -> int:
        """How often a program's log has these words."""
        return self.log(name).read_text(errors="replace").count(words)

    def workers(self, name: str, program: str) -> list[int]:
        """Processes of one of Flower's programs that work for what was started under this name."""
        home = str(self.folder / name)
        return [
            process.pid
            for process in psutil.process_iter(["environ", "cmdline"])
            if (process.info["environ"] or {}).get("FLWR_HOME") == home and program in " ".join(process.info["cmdline"])
        ]

    def kill(self, name: str) -> None:
        """SIGKILL to a program and to what it has started itself."""
        self.end(name, signal.SIGKILL)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End a program and what it has started itself, as a service manager does."""
        send(self.processes[name], number)
        self.processes[name].wait(PATIENCE)

    def flower(self, *words: str) -> str:
        """One of people's commands; what it prints."""
        done = self.try_flower(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def try_flower(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The same where a failure is no error."""
        return self._run(["flwr", *words])

    def people(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as people on the server do."""
        done = self._run(command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self._variables("people"),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def _variables(self, name: str) -> dict[str, str]:
        mark, _, value = self._mark.partition("=")
        return _environment(self.folder / name) | {mark: value}


def send(process: "Process[bytes]", number: signal.Signals) -> None:
    """A signal to a process and its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class Network(Programs):
    """A SuperLink on its database, and nodes; nobody is known and nothing is encrypted, and it starts all processes."""

    isolation = "subprocess"
    trains = "supernode"  # the program below which clients train

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self._ports: dict[int, int] = {}

    def __enter__(self) -> Self:
        try:
            self.start_superlink()
            (self.folder / "people").mkdir()
            connection = f'[superlink.fcil]\naddress = "127.0.0.1:{self.port}"\n{self._trust()}\n'
            (self.folder / "people" / "config.toml").write_text(connection)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _trust(self) -> str:
        return "insecure = true"

    def _security(self) -> list[str]:
        """Flags of the SuperLink."""
        return ["--insecure"]

    def start_superlink(self) -> None:
        """Start it, or start it again on its database."""
        flags = ["--host=127.0.0.1", f"--port={self.port}", f"--database={self.folder}/state.db"]
        self.start("superlink", "flower-superlink", *flags, f"--isolation={self.isolation}", *self._security())
        until(self._answers, last_lines(self.log("superlink")))

    def _answers(self) -> bool:
        try:
            self._open("/health")
            return True
        except OSError:
            return False

    def _open(self, path: str) -> None:
        urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5).close()

    def start_node(self, number: int, settings: str) -> "Process[bytes]":
        """Start a node with this node config, on the port that it had before if any; its process."""
        port = self._ports.setdefault(number, free_port())
        flags = [f"--port={port}", f"--node-config={settings}"]
        return self.start(f"supernode-{number}", "flower-supernode", *flags, *self._fleet(number))

    def _fleet(self, number: int) -> list[str]:
        """Flags by which a node reaches the SuperLink."""
        return [f"--superlink=127.0.0.1:{self.port}", "--insecure"]

    def restart_node(self, number: int, settings: str) -> None:
        """Until it connects, as a service manager would: Flower refuses a key whose last holder may still be there."""
        name = f"supernode-{number}"
        before = self.count_in_log(name, "SuperNode ID")

        def connected() -> bool:
            if self.processes[name].poll() is not None:
                self.start_node(number, settings)
            return self.count_in_log(name, "SuperNode ID") > before

        until(connected, self.report(), pause=0.5)

    def submit(self, values: Mapping[str, Scalar]) -> str:
        """Start a run; its id."""
        started = self.flower("run", ".", "fcil", "--format", "json", "--run-config", run_config(values))
        return str(json.loads(started)["run-id"])

    def status(self, run_id: str) -> str:
        """Flower's word on a run, once it has ended."""
        statuses: list[str] = []

        def ended() -> bool:
            done = self.try_flower("list", "fcil", "--run-id", run_id, "--format", "json")
            with contextlib.suppress(ValueError, LookupError):  # on a busy machine the command fails now and then
                statuses.append(str(json.loads(done.stdout)["runs"][0]["status"]))
            return bool(statuses) and statuses[-1].startswith("finished")

        until(ended, self.report(), pause=8)  # each costs a program its start
        return statuses[-1]

    def report(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"== {path.name}\n{last_lines(path)}" for path in sorted(self.folder.glob("*.log")))

    def await_training(self, number: int, before: int) -> int:
        """Wait until a node has got more train messages than ``before`` and is at work on it; the process that is."""
        name, earlier, training = f"supernode-{number}", set[int](), list[int]()

        def at_work() -> bool:
            clients = set(self.workers(f"{self.trains}-{number}", "flwr-clientapp"))
            if self.count_in_log(name, "Receiving: train message") <= before:
                earlier.update(clients)  # some take their time to end
            training[:] = [pid for pid in clients - earlier if _trains(pid)]
            return bool(training)

        until(at_work, self.report(), pause=0.05)
        return training[0]


class Deployment(Network):
    """The same as docker/README.md has it: TLS, nodes known by their keys, and the proxy where it is installed."""

    isolation = "process"
    trains = "superexec"

    def __init__(self, folder: Path, nodes: int) -> None:
        super().__init__(folder)
        self.keys = folder / "keys"
        self._stack = ExitStack()
        make_keys.main([str(self.keys), "--nodes", str(nodes)])

    def __enter__(self) -> Self:
        super().__enter__()
        self.start_superexec()
        port = self._stack.enter_context(proxy(self.folder, self.keys, self.port))
        self._address = f"127.0.0.1:{port}"
        return self

    def start_superexec(self) -> None:
        """Start the server's, or start it again."""
        root = f"--root-certificates={self.keys}/ca.crt"
        secret = f"--superexec-auth-secret-file={self.keys}/server.secret"
        self.start("superexec", "flower-superexec", f"--runtime-api-address=127.0.0.1:{self.port}", root, secret)

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        super().__exit__()

    def _trust(self) -> str:
        return f'root-certificates = "{self.keys}/ca.crt"'

    def _security(self) -> list[str]:
        files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
        tls = [f"--ssl-{flag}={self.keys / name}" for flag, name in files.items()]
        return [*tls, "--enable-supernode-auth", f"--superexec-auth-secret-file={self.keys}/server.secret"]

    def _open(self, path: str) -> None:
        context = ssl.create_default_context(cafile=self.keys / "ca.crt")
        urllib.request.urlopen(f"https://127.0.0.1:{self.port}{path}", context=context, timeout=5).close()

    def register(self, number: int) -> None:
        key = self.keys / f"node-{number}.pub"
        self.flower("supernode", "register", str(key), "fcil", "--name", f"node-{number}")

    def start_node(self, number: int, settings: str, authority: Path | None = None) -> "Process[bytes]":
        """Also starts what trains for it, unless that waits for it already; ``authority`` is another ca.crt."""
        self._authority = authority or self.keys / "ca.crt"
        node = super().start_node(number, settings)
        if f"superexec-{number}" not in self.processes:
            where = f"--runtime-api-address=127.0.0.1:{self._ports[number]}"
            self.start(f"superexec-{number}", "flower-superexec", "--insecure", where, self._secret(number))
        return node

    def _secret(self, number: int) -> str:
        return f"--superexec-auth-secret-file={self.keys}/node-{number}.secret"

    def _fleet(self, number: int) -> list[str]:
        return [
            f"--superlink={self._address}",
            f"--root-certificates={self._authority}",
            f"--auth-supernode-private-key={self.keys}/node-{number}",
            "--isolation=process",
            self._secret(number),
        ]


def _trains(pid: int) -> bool:
    """Whether a client is past its imports, of which safetensors is among the last, and a little into its training."""
    try:
        if "safetensors" not in Path(f"/proc/{pid}/maps").read_text():
            return False
        before = _seconds(pid)
        while _seconds(pid) < before + 0.7:
            time.sleep(0.02)
    except OSError:
        return False
    return True


def _seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_config(values: Mapping[str, Scalar]) -> str:
    """Run keys as ``flwr run`` takes them."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())


def rounds_in(folder: Path) -> int:
    """Whole rounds that a run has written."""
    with contextlib.suppress(OSError):
        return len((folder / "rounds.jsonl").read_text().splitlines())
    return 0
