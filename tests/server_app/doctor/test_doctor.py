"""`fcil doctor`: every line true, every problem named together with what to do, and exit codes that say the same."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from packaging.requirements import Requirement
from PIL import Image

from server_app.cli import main as cli
from server_app.doctor import dry_run, machine
from server_app.doctor.finding import Finding
from server_app.doctor.machine import OPTIONAL, examine
from server_app.run_files.locks import lock_run
from task.config.parsing import parse
from task.data.load import load_dataset
from task.methods import METHODS
from task.utils import memory as memory_module
from task.utils.memory import available_memory, peak_memory
from tests.conftest import QUICK
from tests.helpers.bare_python import ABSENT, BLOCK

TINY = ["dataset=synthetic", "image-size=16", "num-tasks=2", "num-clients=2", "batch-size=8", "device=cpu"]


def run_doctor(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, list[str]]:
    code = cli.main(["doctor", *TINY, *words])
    return code, capsys.readouterr().out.splitlines()


def test_a_machine_that_can(capsys: pytest.CaptureFixture) -> None:
    code, lines = run_doctor(capsys)
    assert code == 0
    assert not [line for line in lines if line.startswith("problem")]
    text = "\n".join(lines)
    for part in (
        f"ok       torch {version('torch')}",
        "device cpu, threads=1",
        "backbone vit_glyphs: 0.9 million weights, 16 pixels",
        "384 training and 96 test images, pattern 0: 32, pattern 1: 32",
        "2 tasks; in the first, 2 clients learn from",
        "a forward pass of 8 images takes",
        "a local step of 8 images takes",
        "--workers ",
    ):
        assert part in text


@pytest.mark.ci
def test_without_flower_a_run_in_process_is_possible() -> None:
    block = BLOCK.replace(
        "from server_app.cli.main",
        "import importlib.metadata as metadata\n"
        "version = metadata.version\n"
        f"metadata.version = lambda name: version('absent' if name in {ABSENT!r} else name)\n"
        "from server_app.cli.main",
    )
    command = [sys.executable, "-c", block, "doctor", *TINY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning")]
    absent = ["cryptography", "flwr", "jinja2", "matplotlib", "psutil", "pycryptodome", "ray"]
    assert [line.split()[1] for line in warnings] == absent
    assert "--in-process" in warnings[1]
    assert "pip install 'flwr[simulation]>=" in warnings[1]
    assert "a local step" in done.stdout


def test_missing_data_and_weights_are_both_named(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    keys = ["dataset=folder", f"data-dir={tmp_path / 'pets'}", f"backbone-weights={tmp_path / 'vit.pt'}"]
    assert cli.main(["doctor", *TINY[1:], *keys]) == 1
    lines = capsys.readouterr().out.splitlines()
    problems = [line for line in lines if line.startswith("problem")]
    assert len(problems) == 2
    assert "vit.pt" in problems[0]
    assert "pets" in problems[1]
    assert problems[1] == lines[-1]  # nothing is timed


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.new("RGB", (20, 20)).save(tmp_path / name / f"{i}.png")
    config = parse({"dataset": "folder", "data-dir": str(tmp_path), "image-size": 16, "device": "cpu", "num-tasks": 2})
    finding = dry_run._read_data(config)
    assert "cat: 4, dog: 4" in finding.text
    assert finding.level == "warning"
    assert finding.advice.startswith("2 of the 2 images to evaluate are training images too")  # all of one shade
    for i in range(5):
        (tmp_path / "dog" / f"{i}.png").write_bytes(b"no image")
    load_dataset.cache_clear()  # which keeps decoded images
    finding = dry_run._run_stage(dry_run._read_data, config)
    assert finding.level == "problem"
    assert str(tmp_path / "dog") in finding.text


def test_packages_of_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_version", lambda name: "0.1")
    findings = list(examine(parse({})))
    levels = {finding.text.split()[0]: finding.level for finding in findings}
    assert levels["torch"] == levels["timm"] == "problem"
    assert levels["flwr"] == "warning"
    assert [f.advice for f in findings if f.text.startswith("torch ")] == ["pip install 'torch>=2.5'"]
    assert not [f for f in findings if f.text.startswith("device")]  # nothing is tried with such packages


@pytest.mark.parametrize(
    ("device", "visible", "said"),
    [
        ("auto", None, "though the machine seems to have a GPU; this torch was built without CUDA"),
        ("auto", "", "though the machine seems to have a GPU; CUDA_VISIBLE_DEVICES hides it"),
        ("cpu", None, "ok       device cpu, threads=1"),
    ],
)
def test_a_gpu_that_is_not_used(device: str, visible: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(dry_run, "resolve_device", lambda name: torch.device("cpu"))  # this machine may have one
    monkeypatch.setattr(dry_run, "has_unusable_gpu", lambda: True)
    assert said in str(dry_run._check_device(parse({"device": device})))


def test_every_dependency_is_looked_at() -> None:
    names = {Requirement(text).name for text in machine._requirements()}
    assert {"torch", "timm", "safetensors", "pyyaml", "flwr"} <= names
    assert OPTIONAL.keys() <= names | {"ray"}


def test_peak_memory_is_at_least_what_is_held_also_without_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process holds now is read by psutil; ``peak_wset`` is its name for the peak on Windows."""
    held = psutil.Process().memory_info().rss
    assert held / 2 < peak_memory() < 100 * held
    monkeypatch.setitem(sys.modules, "resource", None)
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=12345))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    assert peak_memory() == 12345.0


def test_memory_is_what_the_container_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_module, "_CONTAINER_LIMITS", ())
    free = available_memory()
    for name, text in (("none", "max\n"), ("limit", "1000000\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory_module, "_CONTAINER_LIMITS", (str(tmp_path / "absent"), str(tmp_path / "none")))
    assert available_memory() == pytest.approx(free, rel=0.2)
    monkeypatch.setattr(memory_module, "_CONTAINER_LIMITS", (str(tmp_path / "none"), str(tmp_path / "limit")))
    assert available_memory() == 1e6
    assert machine._memory().level == "warning"
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    assert available_memory() == 4e5


def test_runs_that_were_killed_are_named(tmp_path: Path) -> None:
    for name, status in (("a", "running"), ("b", "finished"), ("c", "running")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({"status": status}))
    with lock_run(tmp_path / "c"):
        [early] = machine._interrupted(parse({"output-dir": str(tmp_path)}))
        (tmp_path / "a" / "checkpoint").mkdir()
        (tmp_path / "a" / "checkpoint" / "000001.ckpt").touch()
        [finding] = machine._interrupted(parse({"output-dir": str(tmp_path)}))
    assert early.advice == "remove it"  # it cannot be resumed
    assert (finding.level, finding.text) == ("warning", f"{tmp_path / 'a'} was interrupted")
    assert f"resume={tmp_path / 'a'}" in finding.advice


def test_a_place_that_cannot_be_written_or_has_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    new = parse({"output-dir": str(tmp_path / "new" / "runs")})
    assert machine._disk(parse({"output-dir": str(tmp_path / "file" / "runs")})).level == "problem"
    assert machine._disk(new).level == "ok"
    monkeypatch.setattr(machine, "SCARCE_DISK", 2**80)
    assert machine._disk(new).level == "warning"


@pytest.mark.parametrize(
    ("memory", "expected"), [(3.5e9, "--workers 3"), (50e9, "--workers 5"), (0.5e9, "--workers 1")]
)
def test_workers_by_memory_and_cores(memory: float, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "available_memory", lambda: memory)
    monkeypatch.setattr(dry_run, "fitting_workers", lambda config: 5)
    monkeypatch.setattr(dry_run, "peak_memory", lambda: 1e9)
    finding = dry_run._suggest_workers(parse({"device": "cpu"}))
    assert finding.text == f"a client takes about 1.0 GB of memory: {expected}"
    assert finding.level == ("warning" if memory < 1e9 else "ok")


def test_of_many_classes_the_extremes() -> None:
    names = tuple(f"class {i}" for i in range(20))
    counts = np.full(20, 7)
    counts[[3, 5]] = 2, 9
    assert dry_run._describe_counts(names, counts) == "20 classes from class 3 (2) to class 5 (9)"
    assert dry_run._describe_counts(names, np.full(20, 7)) == "20 classes with 7 of each"


@pytest.mark.parametrize(("train", "counts"), [((0, 1), "a: 2, b: 2, c: 0"), ((1, 2), "a: 0, b: 2, c: 2")])
def test_a_nodes_class_may_have_test_images_alone(train: tuple[int, int], counts: str, tmp_path: Path) -> None:
    """The tasks are a, b, c: in the first one the second node has no image to train on."""
    labels = np.repeat([*train, 0, 1, 2], 2)
    images = np.random.default_rng(0).integers(0, 255, (10, 16, 16, 3), np.uint8)
    split = np.repeat([0, 1], [4, 6])
    np.savez(tmp_path / "node.npz", images=images, labels=labels, split=split, class_names=np.array(["a", "b", "c"]))
    keys = {"dataset": "own", "data-dir": str(tmp_path / "node.npz"), "evaluate": "clients", "class-order": "given"}
    config = parse(keys | {"num-tasks": 3, "device": "cpu"})
    assert dry_run._read_data(config).text.endswith(f"4 training and 6 test images, {counts}")
    assert "is for digits" in str(dry_run._load_weights(config))
    finding = dry_run._time_step(config)
    assert finding.level == ("warning" if train[0] else "ok")
    assert finding.text.startswith("no training image" if train[0] else "a local step of 2 images")


@pytest.mark.parametrize("method", METHODS)
def test_every_methods_step_can_be_timed(method: str) -> None:
    keys = {"dataset": "synthetic", "image-size": 16, "num-tasks": 2, "batch-size": 8, "device": "cpu"}
    config = parse(keys | {"method": method} | QUICK.get(method, {}))
    finding = dry_run._time_step(config)
    assert ("no training step" in finding.text) == (method in ("ncm", "afcl"))
    assert config.trains_locally == (method not in ("ncm", "afcl"))


def test_what_goes_wrong_in_a_step_is_a_problem() -> None:
    keys = {"dataset": "synthetic", "image-size": 16, "batch-size": 8, "device": "cpu", "partition": "iid"}
    config = parse(keys | {"learning-rate": 1e30, "gradient-clip": 0.0, "optimizer": "sgd"})
    assert dry_run._run_stage(dry_run._time_step, config).level == "problem"


def test_a_mistyped_key_is_a_mistake(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["doctor", "metod=hgp"]) == 2
    assert "'method'" in capsys.readouterr().err


def test_advice_stands_behind_the_finding() -> None:
    assert str(Finding("warning", "no flwr", "install it")) == "warning  no flwr; install it"
