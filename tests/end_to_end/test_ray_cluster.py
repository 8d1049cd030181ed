"""Runs on a Ray cluster of two nodes on this machine, which goes on when they have ended."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from server_app.rounds.run import run_experiment
from server_app.simulation.processes import end_processes, find_marked
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from tests.helpers.runs import TWO, comparable, settings

ROOT = Path(__file__).parents[2]
MARK = f"FCIL_RAY_TEST={uuid.uuid4().hex}"
pytestmark = [pytest.mark.flower, pytest.mark.slow]


def free_port() -> int:
    """Outside of 10002 to 19999, which Ray gives its workers."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            if (port := probe.getsockname()[1]) >= 20000:
                return port


def may_mount() -> bool:
    """Whether a process may have another view of the files, as a machine of its own has."""
    command = ["unshare", "--mount", "true"]
    return bool(shutil.which(command[0])) and not subprocess.run(command, capture_output=True, check=False).returncode


def start_node(home: Path, *options: str, without: Path | None = None) -> None:
    """One node of one CPU, whose clients have ``home`` as home folder; the folder ``without`` is empty there."""
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', without] if without else []
    name, _, value = MARK.partition("=")
    patient = {"RAY_raylet_start_wait_time_s": "300", "RAY_worker_register_timeout_seconds": "300"}
    with open(home / "start.log", "w") as log:  # a pipe would stay open as long as the node lives
        subprocess.run(
            [
                *hide,
                Path(sysconfig.get_path("scripts")) / "ray",
                "start",
                *options,
                "--num-cpus=1",
                "--num-gpus=0",
                f"--dashboard-agent-listen-port={free_port()}",
                "--object-store-memory=100000000",
                "--disable-usage-stats",
            ],
            env={**os.environ, **patient, name: value, "HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=400,
            check=True,
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, Path]]:
    """Its address, and the folder in which the home folders ``first`` and ``second`` of its nodes are.

    The folder ``data`` in it is empty on the second node, where a process may have its own view of the files.
    """
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as name:
        folder, port = Path(name), free_port()
        for name in ("first", "second", "data"):
            (folder / name).mkdir()
        try:
            head = ["--head", f"--port={port}", f"--ray-client-server-port={free_port()}", f"--temp-dir={folder}/t"]
            start_node(folder / "first", *head, "--include-dashboard=false")
            address = (folder / "t" / "ray_current_cluster").read_text().strip()
            start_node(folder / "second", f"--address={address}", without=folder / "data" if may_mount() else None)
            yield address, folder
        finally:
            end_processes([], MARK)  # ray stop would end other people's too


def fcil(cluster: tuple[str, Path], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server_app.cli", *words]
    environment = {**os.environ, "RAY_ADDRESS": cluster[0], "HOME": str(cluster[1] / "first")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


def words(tmp_path: Path, **more: str) -> list[str]:
    keys = {**TWO, "output-dir": tmp_path, "run-name": "run"} | {k.replace("_", "-"): v for k, v in more.items()}
    return [f"{name}={value}" for name, value in keys.items()]


def test_a_run_on_two_nodes_equals_the_one_in_process(tmp_path, cluster):
    nodes = {process.pid for process in find_marked(MARK) if process.name() == "raylet"}
    assert len(nodes) == 2
    done = fcil(cluster, "run", *words(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"up to 2 at a time, on the Ray cluster {cluster[0]} (2 nodes, 2 CPUs, 0 GPUs)\n" in done.stdout
    # the first job asked the nodes, the second ran the clients: a worker each, as a node has one CPU
    logs = [path.name.split("-") for path in (cluster[1] / "t" / "session_latest" / "logs").glob("worker-*.out")]
    assert sorted(job for _, _, job, _ in logs if not job.startswith("f")) == ["01000000"] * 2 + ["02000000"] * 2
    values = settings(tmp_path, "here")
    run_experiment(parse(values), InProcessTransport(2))
    assert comparable(tmp_path / "run") == comparable(tmp_path / "here")
    assert {process.pid for process in find_marked(MARK) if process.name() == "raylet"} == nodes


@pytest.mark.skipif(not may_mount(), reason="needs a node that sees other files")
def test_a_node_without_the_data_is_named(tmp_path, cluster):
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    path = cluster[1] / "data" / "images.npz"
    np.savez(path, images=images, labels=np.arange(40) % 4)
    done = fcil(cluster, "run", *words(tmp_path, dataset="npz", data_dir=str(path)))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "fcil: the Ray cluster cannot run this:"
    assert len(lines) == 2  # the first node has them
    assert lines[1].startswith(f"  node {cluster[0].split(':')[0]} (")
    assert "images.npz" in lines[1]
    assert not (tmp_path / "run").exists()
