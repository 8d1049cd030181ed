"""Whole runs through Flower: the same results as in process, how they fail, how they are stopped."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from flwr.app import Context, RecordDict

from client_app.app import app as client
from server_app.app import app as server
from server_app.rounds.run import run_experiment
from server_app.run_files import paths as places
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from tests.helpers.flower import LoopbackGrid
from tests.helpers.runs import TWO, comparable, settings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"method": "joint", "clients-per-round": 1},
        {"method": "fedprok", "partition": "consensus"},
        {"method": "ncm", "partition": "split-ratio"},
        {"method": "fedavg", "secure-aggregation": "pairwise"},
        {"method": "afcl", "secure-aggregation": "pairwise"},
    ],
    ids=lambda more: " ".join(map(str, more.values())) or "defaults",
)
def test_same_results_through_both_transports(tmp_path, more):
    context = Context(1, 0, {}, RecordDict(), settings(tmp_path, "grid") | more)
    server(LoopbackGrid(client, 2), context)
    values = settings(tmp_path, "here") | more
    run_experiment(parse(values), InProcessTransport(2))
    assert comparable(tmp_path / "grid") == comparable(tmp_path / "here")


class Fcil:
    """One ``fcil run`` through Flower in a process of its own, and what it leaves behind."""

    def __init__(self, tmp_path: Path, temporary: Path, *words: str) -> None:
        self._mark = f"FCIL_TEST={uuid.uuid4().hex}"
        self._temporary = temporary
        name, _, value = self._mark.partition("=")
        self.directory = tmp_path / "run"
        given = {**TWO, "output-dir": tmp_path, "run-name": "run"} | dict(word.split("=") for word in words)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server_app.cli", "run", *(f"{k}={v}" for k, v in given.items())],
            cwd=ROOT,
            env={**os.environ, name: value, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # whoever runs the tests in the background has them ignore Ctrl-C, and what they start too
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out, err

    def left_behind(self) -> list[str]:
        """Files, and processes that carry our mark: the environment is inherited by all."""
        return [*map(str, self._temporary.iterdir()), *self._processes()]

    def _processes(self) -> Iterator[str]:
        name, _, value = self._mark.partition("=")
        for process in psutil.process_iter(["environ", "cmdline"]):
            if (process.info["environ"] or {}).get(name) == value:
                yield " ".join(process.info["cmdline"])


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path: Ray's sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.ci
@pytest.mark.flower
def test_a_run_through_flower(tmp_path, temporary):
    run = Fcil(tmp_path, temporary)
    code, out, err = run.end()
    assert (code, err) == (0, "")
    assert out.count("round 1/1") == 2
    assert out.endswith(f"{run.directory / 'report.html'}\n")
    assert (run.directory / "flower.log").exists()
    assert run.left_behind() == []
    values = settings(tmp_path, "here")
    run_experiment(parse(values), InProcessTransport(2))
    assert comparable(run.directory) == comparable(tmp_path / "here")


@pytest.mark.flower
@pytest.mark.slow
def test_a_run_that_fails_in_flower(tmp_path, temporary):
    run = Fcil(tmp_path, temporary, "learning-rate=1e30")
    code, _, err = run.end()
    assert code == 1
    assert "the run failed: task 1, round 1: 0 of 2 clients answered" in err
    assert "lower learning-rate" in err
    assert "Traceback" not in err
    assert run.left_behind() == []


@pytest.mark.flower
@pytest.mark.slow
def test_a_run_that_is_stopped(tmp_path, temporary):
    run = Fcil(tmp_path, temporary, "rounds-per-task=500")
    for line in run.process.stdout:
        if line.startswith("task 1/2, round 1/500"):
            break
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 128 + signal.SIGINT
    assert "stopped" in err
    assert run.left_behind() == []
    assert places.read_results(run.directory)["status"] == "failed"


@pytest.mark.flower
@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_process_and_is_seen_to_be_interrupted(tmp_path, temporary):
    run = Fcil(tmp_path, temporary, "rounds-per-task=500")
    for line in run.process.stdout:
        if line.startswith("task 1/2, round 1/500"):
            break
    assert len(run.left_behind()) > 5
    run.process.kill()
    run.end()
    deadline = time.monotonic() + 60
    while run.left_behind():
        assert time.monotonic() < deadline, run.left_behind()
        time.sleep(0.5)
    assert places.read_results(run.directory)["status"] == "interrupted"
