"""Starting Flower, ending whole families of processes, and being ended in order."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

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
