"""Starting Flower, ending whole families of processes, and being ended in order."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from server_app.cli.main import main
from server_app.simulation import processes
from server_app.simulation import superlink as launcher
from task.config.parsing import parse

ROOT = Path(__file__).parents[2]


def test_workers_fit_cores_clients_and_memory(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    workers = [launcher.default_workers(parse(v)) for v in ({}, {"threads": 4}, {"threads": 99}, {"num-clients": 2})]
    assert workers == [8, 3, 1, 2]


def test_a_superlink_that_does_not_start_is_shown(tmp_path, monkeypatch):
    fake = tmp_path / "flower-superlink"
    fake.write_text("#!/bin/sh\necho no such option\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(launcher.sysconfig, "get_path", lambda name: str(tmp_path))
    run = launcher.FlowerRun(ROOT, lambda: None)
    with pytest.raises(launcher.LaunchError, match="no such option"), run:
        pass
    assert not run.log.parent.exists()


def test_ray_gets_time_to_start():
    environment = launcher._environment(Path("/home/of/flower"))
    assert environment["RAY_raylet_start_wait_time_s"] == environment["RAY_worker_register_timeout_seconds"] == "300"


RAY_LOG = """
ERROR :     An exception occurred !! The current node timed out during startup. This could happen because some of the
raylet failed to startup or the GCS has become overloaded.
RuntimeError: An error was encountered. Ending simulation.
"""


class FakeRun:
    """A run through Flower that ends as ``ends`` say, one after another: status, details, log."""

    ends: list[tuple[str, str, str]]

    def __init__(self, project: Path, check, cluster=None) -> None:
        self.log = Path(tempfile.mkdtemp()) / "flower.log"

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.log.parent)

    def submit(self, *_: object) -> None:
        self.status_, self.details, text = self.ends.pop(0)
        self.log.write_text(text)

    def is_running(self) -> bool:
        return False

    def status(self) -> tuple[str, str]:
        return self.status_, self.details


FAILED = ("finished:failed", "Simulation failed with exception: An error was encountered. Ending simulation.")
DONE = ("finished:completed", "", "fine")


@pytest.mark.parametrize(
    ("ends", "code", "said", "tries"),
    [
        ([(*FAILED, RAY_LOG), DONE], 0, "Ray did not start in time; trying once more", 2),
        (
            [(*FAILED, RAY_LOG)] * 2,
            1,
            "the run failed: Ray, which runs the simulated clients, did not start in time",
            2,
        ),
        ([(*FAILED, "ValueError: no"), DONE], 1, "the run failed: An error was encountered. Ending simulation.", 1),
        ([(*DONE[:2], RAY_LOG), DONE], 0, "", 1),
    ],
)
def test_ray_that_does_not_start_in_time_is_started_once_more(ends, code, said, tries, tiny, monkeypatch, capsys):
    left = list(ends)
    monkeypatch.setattr(FakeRun, "ends", left, raising=False)
    monkeypatch.setattr("server_app.cli.run.FlowerRun", FakeRun)
    assert main(["run", *(f"{name}={value}" for name, value in tiny.items())]) == code
    assert len(ends) - len(left) == tries
    assert said in capsys.readouterr().err


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = "import time; print('up', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
time.sleep(60)
"""


@pytest.mark.parametrize("orphans", [False, True])
def test_whole_families_are_ended(orphans):
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", STUBBORN]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "MARK": mark})
    assert parent.stdout.readline() == b"up\n"
    family = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children()]
    assert len(family) == 2
    if orphans:
        parent.kill()
        parent.wait()
    processes.end_processes([parent], f"MARK={mark}" if orphans else "MARK=none", patience=0.3)
    assert not any(map(processes._is_alive, family))
    assert parent.wait(1) == -signal.SIGKILL
    processes.end_processes([parent], f"MARK={mark}")
    parent.stdout.close()


KILLED = """
import os, signal, subprocess, sys
from pathlib import Path
from server_app.simulation.warden import start_warden
mark, folder = sys.argv[1:]
start_warden(f"MARK={mark}", Path(folder))
command = [sys.executable, "-c", sys.stdin.read()]
subprocess.Popen(command, env={**os.environ, "MARK": mark}, start_new_session=True).wait()
"""


@pytest.mark.parametrize("whole_group", [False, True])
def test_what_a_killed_process_has_started_is_ended(whole_group, tmp_path):
    """Its child ignores SIGTERM and has a child in a session of its own, as Ray's have."""
    mark, folder = uuid.uuid4().hex, tmp_path / "home"
    folder.mkdir()
    command = [sys.executable, "-c", KILLED, mark, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as parent:
        parent.stdin.write(STUBBORN.encode())
        parent.stdin.close()
        assert parent.stdout.readline() == b"up\n"
        assert len(processes.find_marked(f"MARK={mark}")) == 2
        os.killpg(parent.pid, signal.SIGKILL) if whole_group else parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while processes.find_marked(f"MARK={mark}") or folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("at_once", [False, True])
def test_signals_interrupt_where_it_is_safe(at_once):
    before = signal.getsignal(signal.SIGTERM)
    reached = []

    def be_stopped() -> None:
        with processes.interruptible(at_once) as check:
            signal.raise_signal(signal.SIGTERM)
            reached.append("the next line")
            check()

    with pytest.raises(processes.Interrupted) as caught:
        be_stopped()
    assert bool(reached) is not at_once
    assert caught.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
