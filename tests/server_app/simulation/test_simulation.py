"""Starting Flower, ending whole families of processes, and being ended in order."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from server_app.cli.main import main
from server_app.cli.progress import Progress
from server_app.errors import LaunchError
from server_app.run_files.status import mark_failed
from server_app.simulation import cluster, processes
from server_app.simulation import superlink as launcher
from server_app.simulation.cluster import Cluster
from server_app.simulation.watchdog import start_watchdog
from task.config.parsing import parse
from task.config.schema import defaults
from task.utils.versions import code_sha256
from tests.helpers.runs import interrupt

ROOT = Path(__file__).parents[3]


def test_workers_fit_cores_clients_and_a_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    settings = ({}, {"threads": 4}, {"threads": 99}, {"num-clients": 2})
    monkeypatch.setattr(launcher.shutil, "which", lambda name: None)
    assert [launcher.default_workers(parse(v)) for v in settings] == [8, 3, 1, 2]
    monkeypatch.setattr(launcher.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert [launcher.default_workers(parse(v)) for v in settings] == [2, 2, 1, 2]
    assert launcher.default_workers(parse({"device": "cpu"})) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launcher.default_workers(parse({})) == 8
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(launcher, "package_version", lambda name: "2.14.1+cpu")
    assert launcher.default_workers(parse({})) == 8


def test_a_superlink_that_does_not_start_is_shown(tmp_path, monkeypatch):
    fake = tmp_path / "flower-superlink"
    fake.write_text("#!/bin/sh\necho no such option\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(launcher.sysconfig, "get_path", lambda name: str(tmp_path))
    run = launcher.FlowerRun(ROOT, lambda: None)
    with pytest.raises(launcher.LaunchError, match="no such option"), run:
        pass
    assert not run.log.parent.exists()


def test_a_run_that_ends_a_little_after_its_log_is_asked_for_again(tmp_path, monkeypatch):
    answers = [{"status": "running", "status-details": ""}, {"status": "finished:completed", "status-details": "well"}]
    for n, answer in enumerate(answers):
        (tmp_path / f"{n}.json").write_text(json.dumps({"success": True, "runs": [answer]}, indent=2))
    fake = tmp_path / "flwr"
    fake.write_text(f'#!/bin/sh\ncd "{tmp_path}"; cat 0.json; cp 1.json 0.json\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(launcher.sysconfig, "get_path", lambda name: str(tmp_path))
    run = launcher.FlowerRun(ROOT, lambda: None)
    run._home, run.log = tmp_path, tmp_path / "flower.log"
    assert run.status() == ("finished:completed", "well")


def test_ray_gets_time_to_start():
    environment = launcher._environment(Path("/flower-home"))
    assert environment["RAY_raylet_start_wait_time_s"] == environment["RAY_worker_register_timeout_seconds"] == "300"


CLUSTER = Cluster("10.0.0.7:6379", nodes=2, cpus=9.0, gpus=1.0, workers=4, client_cpus=2, client_gpus=0.25)


@pytest.mark.parametrize(
    ("address", "joined"),
    [(None, ""), ("", ""), ("local", ""), ("10.0.0.7:6379", "10.0.0.7:6379"), (" head:6379 ", "head:6379")],
)
def test_the_cluster_that_ray_address_names(address, joined, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert cluster.cluster_address() == joined


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "head", "head:port", "head:"])
def test_other_words_in_ray_address_are_refused(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(launcher.LaunchError, match=r"RAY_ADDRESS = .*: HOST:PORT of the cluster's head was expected"):
        cluster.cluster_address()


@pytest.mark.parametrize("address", [None, "127.0.0.1:99999", "..:6379"])
def test_nothing_at_the_address_is_said_at_once(address, tiny, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", address or f"127.0.0.1:{launcher._free_port()}")
    assert main(["run", *(f"{name}={value}" for name, value in tiny.items())]) == 1
    assert re.search(r"fcil: RAY_ADDRESS = '[\d.]*:\d+': nothing answers there \(.*Start the", capsys.readouterr().err)


def test_flower_is_told_to_join_a_cluster_and_else_keeps_to_itself(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:1")
    assert launcher._environment(Path("/flower-home"), CLUSTER)["RAY_ADDRESS"] == "10.0.0.7:6379"
    assert "RAY_ADDRESS" not in launcher._environment(Path("/flower-home"))
    # told how many CPUs there are, Ray refuses to join
    assert launcher._resources(3, CLUSTER) == "client-resources-num-cpus=2 client-resources-num-gpus=0.250000"
    assert launcher._resources(3, None) == "client-resources-num-cpus=1 init-args-num-cpus=3"
    assert str(CLUSTER) == "the Ray cluster 10.0.0.7:6379 (2 nodes, 9 CPUs, 1 GPUs)"


@pytest.mark.parametrize(
    ("resources", "cpus", "gpus", "clients"),
    [
        ({"CPU": 5.0}, 2, 0.0, 2),
        ({"CPU": 5.0, "GPU": 1.0}, 1, 0.5, 2),
        ({"CPU": 1.0, "GPU": 4.0}, 1, 0.5, 1),
        ({"CPU": 8.0}, 1, 0.5, 0),
        ({"memory": 1e9}, 1, 0.0, 0),
    ],
)
def test_room_for_clients_on_a_node(resources, cpus, gpus, clients):
    assert cluster.room({"Alive": True, "Resources": resources}, cpus, gpus) == clients
    assert cluster.room({"Alive": False, "Resources": resources}, cpus, gpus) == 0


HERE = {"code": "c", "versions": "python 3.11.2, torch 2.9", "weights": "w", "data": "d"}


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (HERE, ""),
        ({"problem": "no such file"}, "no such file"),
        (HERE | {"code": "x"}, "its code in /code is not that of this machine: copy the folder there"),
        (
            HERE | {"versions": "python 3.11.2"},
            "its versions are not those of this machine (python 3.11.2 there; python 3.11.2, torch 2.9 here): install",
        ),
        (HERE | {"weights": "x"}, "its weights are not those of this machine: copy backbone-weights there"),
        (HERE | {"data": "x"}, "its images or labels are not those of this machine: copy data-dir there"),
    ],
)
def test_what_hinders_a_node(node, said):
    assert cluster.compare(node, HERE, "/code").startswith(said)
    assert bool(cluster.compare(node, HERE, "/code")) == bool(said)


def test_what_a_node_says_of_itself(tiny):
    values = defaults() | tiny
    said = cluster.describe_node(values)
    assert cluster.compare(said, cluster.describe_node(values), "/code") == ""
    assert f"torch {version('torch')}" in said["versions"]
    assert said["code"] == code_sha256()
    other = cluster.describe_node(values | {"seed": 1, "backbone-weights": "random"})
    assert other["weights"] != said["weights"]
    assert other["data"] == said["data"] != cluster.describe_node(values | {"dataset": "digits"})["data"]
    missing = cluster.describe_node(values | {"dataset": "npz", "data-dir": "/nowhere.npz"})
    assert "/nowhere.npz" in missing["problem"]


def test_a_server_that_cannot_run_it_is_named_and_no_node_is_asked(tiny, monkeypatch):
    """Its own problem is not that of the nodes."""
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": "n", "Alive": True, "Resources": {"CPU": 1.0}}])
    monkeypatch.setattr("ray.remote", lambda **_: pytest.fail("a node is asked"))
    values = defaults() | tiny | {"dataset": "npz", "data-dir": "/nowhere.npz"}
    said = cluster._ask_nodes("head:6379", values, (1, 0.0))
    (problem,) = said["problems"]
    assert problem.startswith("this machine: ")
    assert "/nowhere.npz" in problem


@pytest.mark.parametrize(
    ("address", "words", "said"),
    [
        ("head:6379", ["run", "--workers", "2"], "--workers is for one machine"),
        ("", ["run", "--in-process", "--workers", "2"], "--workers is for Flower's simulation"),
        ("", ["run", "--gpus-per-client", "0.5"], "--gpus-per-client is for a Ray cluster"),
        ("head:6379", ["run", "--in-process", "--gpus-per-client", "0.5"], "--gpus-per-client is for a Ray cluster"),
        ("head:6379", ["bench", "suites/digits.yaml", "--flower", "--jobs", "2"], "--jobs 2: each run takes all"),
        ("head:6379", ["bench", "suites/digits.yaml", "--gpus-per-client", "1"], "--gpus-per-client is for a Ray"),
    ],
)
def test_options_that_do_not_go_together(address, words, said, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(words) == 1
    assert said in capsys.readouterr().err


RAY_LOG = """
ERROR :     An exception occurred !! The current node timed out during startup. This could happen because some of the
raylet failed to startup or the GCS has become overloaded.
RuntimeError: An error was encountered. Ending simulation.
"""


class FakeRun:
    """A run through Flower that ends as ``ends`` say, one after another: status, details, log."""

    ends: list[tuple[str, str, str]]

    def __init__(self, project: Path, check, cluster=None) -> None:
        self.check, self.log = check, Path(tempfile.mkdtemp()) / "flower.log"

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


@pytest.mark.parametrize(
    ("words", "said"), [([], True), (["device=cpu"], False), (["--gpus-per-client", "0.25"], False)]
)
def test_gpus_of_a_cluster_that_nobody_uses_are_named(words, said, tiny, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    monkeypatch.setattr("server_app.cli.run.examine_cluster", lambda *_: CLUSTER)
    monkeypatch.setattr(FakeRun, "ends", [DONE], raising=False)
    monkeypatch.setattr("server_app.cli.run.FlowerRun", FakeRun)
    assert main(["run", *(f"{name}={value}" for name, value in tiny.items() if name != "device"), *words]) == 0
    assert ("no client is given a GPU of the cluster: --gpus-per-client" in capsys.readouterr().out) == said


@pytest.mark.parametrize("gpus", ["0", "0.00009", "-1", "1.5", "nan", "inf"])
def test_gpus_that_ray_gives_to_no_client_are_refused(gpus, capsys):
    with pytest.raises(SystemExit):
        main(["run", f"--gpus-per-client={gpus}"])
    assert f"{gpus} is no share of a GPU from 0.0001 to 1, no whole number" in capsys.readouterr().err


@pytest.mark.parametrize("told", [True, False])
def test_the_operator_is_told_of_a_run_that_a_signal_ends(told, tiny, tmp_path, monkeypatch):
    def be_stopped(run: FakeRun, *_: object) -> None:
        run.log.write_text("")
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(FakeRun, "submit", be_stopped)
    monkeypatch.setattr(FakeRun, "is_running", lambda run: bool(run.check()))
    monkeypatch.setattr("server_app.cli.run.FlowerRun", FakeRun)
    values = tiny | ({"on-end": f"sh -c 'cat > {tmp_path}/event'"} if told else {})
    assert main(["run", *(f"{name}={value}" for name, value in values.items())]) == 128 + signal.SIGTERM
    if not told:
        return
    event = json.loads((tmp_path / "event").read_text())
    assert (event["status"], event["error"]) == ("failed", "stopped by SIGTERM")


@pytest.mark.parametrize("options", [["--in-process"], []])
def test_the_operator_is_told_of_a_resumed_run_that_a_signal_ends_before_it_goes_on(
    options, tiny, tmp_path, monkeypatch, capsys
):
    """Its results.json says failed already, of the first time."""
    folder = interrupt(tiny | {"output-dir": str(tmp_path), "run-name": "a run"}, cut_in_round=2)
    mark_failed(folder, "a power cut")

    def be_stopped(run: FakeRun | Progress, *_: object) -> None:
        if isinstance(run, FakeRun):
            run.log.write_text("")
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Progress, "in_background", be_stopped)
    monkeypatch.setattr(FakeRun, "submit", be_stopped)
    monkeypatch.setattr(FakeRun, "is_running", lambda run: bool(run.check()))
    monkeypatch.setattr("server_app.cli.run.FlowerRun", FakeRun)
    words = [f"resume={folder}", f"on-end=sh -c 'cat >> {tmp_path}/event'"]
    assert main(["run", *options, *words]) == 128 + signal.SIGTERM
    assert f"; go on with: fcil {' '.join(['run', *options])} 'resume={folder}'\n" in capsys.readouterr().err
    assert json.loads((tmp_path / "event").read_text())["error"] == "stopped by SIGTERM"


def test_the_operator_is_told_once_of_a_run_that_a_signal_ends_while_it_is_set_up(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("server_app.rounds.run.build_model", lambda *_: signal.raise_signal(signal.SIGTERM))
    values = tiny | {"on-end": f"sh -c 'cat >> {tmp_path}/event'"}
    assert main(["run", "--in-process", *(f"{k}={v}" for k, v in values.items())]) == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "event").read_text())["error"] == "stopped by SIGTERM"


@pytest.mark.parametrize(
    ("ends", "code", "status", "error"),
    [
        ([DONE], 0, "finished", ""),
        ([(*FAILED, RAY_LOG), DONE], 0, "finished", ""),
        ([(*FAILED, RAY_LOG)] * 2, 1, "failed", launcher.RAY_TIMED_OUT),
        (LaunchError("no SuperLink:\n a line of its log"), 1, "failed", "no SuperLink:"),
        (OSError("no usable temporary folder"), 1, "failed", "no usable temporary folder"),
    ],
)
def test_the_operator_is_told_once_how_flower_ended_a_run(ends, code, status, error, tiny, tmp_path, monkeypatch):
    def be_missing(run: FakeRun) -> None:
        raise ends

    monkeypatch.setattr("server_app.cli.run.FlowerRun", FakeRun)
    if isinstance(ends, list):
        monkeypatch.setattr(FakeRun, "ends", list(ends), raising=False)
    else:
        monkeypatch.setattr(FakeRun, "__enter__", be_missing)
    values = tiny | {"on-end": f"sh -c 'cat >> {tmp_path}/event'"}
    assert main(["run", *(f"{name}={value}" for name, value in values.items())]) == code
    event = json.loads((tmp_path / "event").read_text())
    assert (event["status"], event["error"]) == (status, error)


@pytest.mark.parametrize(
    ("recorded", "code", "status", "error"),
    [({"status": "finished"}, 0, "finished", ""), ({"status": "failed", "error": "too few"}, 1, "failed", "too few")],
)
@pytest.mark.parametrize("stopped", [False, True])
def test_the_end_that_a_run_has_recorded_comes_before_what_ends_flower(
    recorded, code, status, error, stopped, tiny, tmp_path, monkeypatch, capsys
):
    def end(run: FakeRun, values: dict, *_: object) -> None:
        run.log.write_text("")
        run.status_, run.details = FAILED
        folder = Path(values["output-dir"], values["run-name"])
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(recorded))
        if stopped:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(FakeRun, "submit", end)
    monkeypatch.setattr(FakeRun, "is_running", lambda run: bool(run.check()))
    monkeypatch.setattr("server_app.cli.run.FlowerRun", FakeRun)
    values = tiny | {"on-end": f"sh -c 'cat >> {tmp_path}/event'"}
    expected = 128 + signal.SIGTERM if stopped else code
    assert main(["run", *(f"{name}={value}" for name, value in values.items())]) == expected
    told = f"the run finished, but then Flower says: {FAILED[1]}" in capsys.readouterr().err
    assert told == (status == "finished" and not stopped)
    event = json.loads((tmp_path / "event").read_text())
    assert (event["status"], event["error"]) == (status, error)


def test_the_operator_is_told_of_a_cluster_that_does_not_answer(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{launcher._free_port()}")
    values = tiny | {"on-end": f"sh -c 'cat >> {tmp_path}/event'"}
    assert main(["run", *(f"{name}={value}" for name, value in values.items())]) == 1
    assert "nothing answers there" in json.loads((tmp_path / "event").read_text())["error"]


def test_the_reason_of_an_earlier_failure_is_not_that_of_a_run_that_did_not_go_on(tiny, tmp_path, monkeypatch, capsys):
    folder = interrupt(tiny | {"output-dir": str(tmp_path), "run-name": "run"}, cut_in_round=2)
    mark_failed(folder, "a power cut")
    monkeypatch.setattr(FakeRun, "ends", [(*FAILED, RAY_LOG)] * 2, raising=False)
    monkeypatch.setattr("server_app.cli.run.FlowerRun", FakeRun)
    assert main(["run", f"resume={folder}"]) == 1
    assert f"the run failed: {launcher.RAY_TIMED_OUT}" in capsys.readouterr().err


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
from server_app.simulation.watchdog import start_watchdog
mark, folder = sys.argv[1:]
start_watchdog(f"MARK={mark}", Path(folder))
command = [sys.executable, "-c", sys.stdin.read()]
subprocess.Popen(command, env={**os.environ, "MARK": mark}, start_new_session=True).wait()
"""


def test_the_watchdog_is_this_projects_also_in_the_folder_of_another_flower_app(tmp_path, monkeypatch):
    (tmp_path / "server_app.py").touch()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    watchdog = start_watchdog(f"MARK={uuid.uuid4().hex}", tmp_path / "home")
    watchdog.communicate()
    assert watchdog.returncode == 0
    assert not (tmp_path / "home").exists()


@pytest.mark.ci
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
