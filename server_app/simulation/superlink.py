"""One run through Flower's programs: a private SuperLink, one submitted run, and the end of all processes.

Flower itself is not imported: help and errors appear at once, and a machine without Flower gets a message.
"""

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from server_app.errors import LaunchError
from server_app.run_files.on_end import SUPERVISED
from server_app.simulation.cluster import ADDRESS, Cluster
from server_app.simulation.processes import POLL, end_processes, last_lines, start_process
from server_app.simulation.watchdog import start_watchdog
from task.config.schema import Config
from task.message import Scalar
from task.utils.cores import cores
from task.utils.versions import package_version

DEFAULT_CLIENTS = 10
MAX_WORKERS = 8  # a worker holds about 1 GB
MAX_ON_GPU = 2  # each has its own backbone in the GPU's memory; fcil doctor says how many fit
START_TIMEOUT = 60.0  # seconds for the SuperLink to answer
RAY_PATIENCE = "300"  # seconds for Ray's own programs to start; its default is 30 to 60, too few on a busy machine
RAY_TIMED_OUT = (
    "Ray, which runs the simulated clients, did not start in time, as happens when the machine is too busy. "
    "Run again when it is not, with fewer --workers, or with --in-process."
)
# messages of Ray 2.55: node.py waits 30 s, which no setting changes; the core worker names its setting
_RAY_TIMEOUTS = ("timed out during startup", "RAY_raylet_start_wait_time_s", "RAY_worker_register_timeout_seconds")


def fitting_workers(config: Config) -> int:
    """Number of clients that can train at once: each has ``threads`` cores, and there are at most ``MAX_WORKERS``."""
    return max(1, min(cores() // config.threads, config.num_clients or DEFAULT_CLIENTS, MAX_WORKERS))


def default_workers(config: Config) -> int:
    """Number of clients that train at once where nothing is said: fewer if the machine seems to have a GPU for them."""
    return min(fitting_workers(config), MAX_ON_GPU) if _seems_on_gpu(config.device) else fitting_workers(config)


def _seems_on_gpu(device: str) -> bool:
    """Whether clients will use a GPU; torch, which would know, takes seconds to import."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or "+cpu" in package_version("torch")
    return device != "cpu" and not hidden and shutil.which("nvidia-smi") is not None


class FlowerRun:
    """A private SuperLink and one run on it; a context manager that ends every process it started.

    When this process is killed, its watchdog ends them.

    Ray's workers import the clients' code from ``project``, the folder of the Flower app. ``check`` is called while
    waiting; an exception that it raises ends the wait. Without a ``cluster``, Flower starts a Ray for the run.
    """

    def __init__(self, project: Path, check: Callable[[], None], cluster: Cluster | None = None) -> None:
        self._project, self._check, self._cluster = project, check, cluster
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Start the SuperLink and wait until it answers.

        Raises:
            LaunchError: Flower is not installed, or its SuperLink does not start.
        """
        for package, source in (("flwr", "flwr[simulation]"), ("ray", "flwr[simulation]"), ("psutil", "psutil")):
            if importlib.util.find_spec(package) is None:
                raise LaunchError(f"{package} is not installed: pip install '{source}', or add --in-process.")
        # Ray appends about 70 characters for its sockets, whose paths may have about 100
        short = "/tmp" if len(tempfile.gettempdir()) > 20 and os.path.isdir("/tmp") else None
        self._home = Path(tempfile.mkdtemp(prefix="fcil-", dir=short))
        self.log = self._home / "flower.log"  # of the run and of Flower; removed when the context ends
        self._watchdog = start_watchdog(f"FLWR_HOME={self._home}", self._home)
        try:
            self._start_superlink()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes and remove all files."""
        end_processes(self._processes, f"FLWR_HOME={self._home}")
        shutil.rmtree(self._home, ignore_errors=True)
        self._watchdog.communicate()

    def submit(self, values: Mapping[str, Scalar], clients: int, workers: int) -> None:
        """Submit a run with the keys ``values`` to the SuperLink, for a number of simulated clients and of workers.

        A cluster has as many workers as it has room for.
        """
        config = self._home / "run.toml"
        # strings, numbers and booleans look the same in JSON and TOML
        config.write_text("".join(f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in values.items()))
        federation = f"num-supernodes={clients} {_resources(workers, self._cluster)}"
        # with --stream the program prints the log and ends when the run ends
        command = ["flwr", "run", str(self._project), "fcil", "--stream", "--run-config", str(config)]
        self._submission = self._start([*command, "--federation-config", federation], self.log)

    def is_running(self) -> bool:
        """Whether the submitted run has not ended yet."""
        self._check()
        return self._submission.poll() is None

    def status(self) -> tuple[str, str]:
        """Flower's final status, such as ``finished:completed``, and its details.

        Raises:
            LaunchError: Flower did not accept the run, or does not answer any more.
        """
        answer = self._home / "list.json"
        while True:
            answer.unlink(missing_ok=True)  # the next answer would be appended
            listed = self._start(["flwr", "list", "fcil", "--format", "json"], answer)
            while listed.poll() is None:
                self._check()
                time.sleep(POLL)
            runs = _json_object(answer).get("runs") or []
            if not runs:
                raise LaunchError(f"Flower does not know of the run:\n{last_lines(self.log)}")
            if str(runs[0]["status"]).startswith("finished"):
                return str(runs[0]["status"]), str(runs[0]["status-details"])
            time.sleep(1)  # the log can end a little before the run does

    def _start_superlink(self) -> None:
        port = _free_port()
        connection = f'[superlink.fcil]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        (self._home / "config.toml").write_text('[superlink]\ndefault = "fcil"\n' + connection)
        log = self._home / "superlink.log"
        address = ["--host", "127.0.0.1", "--port", str(port)]
        superlink = self._start(["flower-superlink", "--insecure", "--simulation", *address], log)
        deadline = time.monotonic() + START_TIMEOUT
        while not _healthy(port):
            self._check()
            if superlink.poll() is not None or time.monotonic() > deadline:
                raise LaunchError(f"Flower's SuperLink does not start:\n{last_lines(log)}")
            time.sleep(POLL / 2)

    def _start(self, command: list[str], output: Path) -> "subprocess.Popen[bytes]":
        self._processes.append(start_process(command, self._project, _environment(self._home, self._cluster), output))
        return self._processes[-1]


def _resources(workers: int, cluster: Cluster | None) -> str:
    """Flower's settings for the resources of a client. To join a cluster, Ray must not be told its number of CPUs."""
    if cluster:
        return f"client-resources-num-cpus={cluster.client_cpus} client-resources-num-gpus={cluster.client_gpus:f}"
    return f"client-resources-num-cpus=1 init-args-num-cpus={workers}"


def _environment(home: Path, cluster: Cluster | None = None) -> dict[str, str]:
    """Environment of Flower's programs: they write below ``home`` and use no network but this machine's own."""
    own = {
        "FLWR_HOME": str(home),
        SUPERVISED: "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(POLL),
        "RAY_TMPDIR": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": RAY_PATIENCE,
        "RAY_worker_register_timeout_seconds": RAY_PATIENCE,
        "PYTHONUNBUFFERED": "1",
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]),
    }
    for name in ("NO_PROXY", "no_proxy"):
        own[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    if cluster:
        own[ADDRESS] = cluster.address
    return {name: value for name, value in os.environ.items() if name != ADDRESS} | own


def ray_timed_out(log: Path) -> bool:
    """Whether the log of a run says that Ray did not start in time."""
    with contextlib.suppress(OSError):
        text = log.read_text(errors="replace")
        return any(words in text for words in _RAY_TIMEOUTS)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def _json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a program's output, between other lines; empty when there is none."""
    text = path.read_text(errors="replace")
    with contextlib.suppress(ValueError):
        return json.loads(text[text.index("{") : text.rindex("}") + 1])
    return {}
