"""Shared pieces of the tests: a small run that trains in about a second, and paths of its own for every test."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from task.data.load import load_dataset
from task.message import Scalar

torch.set_num_threads(1)

# 12 synthetic classes of 40 images at 4 tokens each: a whole run takes about a second
TINY: dict[str, Scalar] = {
    "dataset": "synthetic",
    "image-size": 16,
    "num-tasks": 2,
    "rounds-per-task": 1,
    "local-epochs": 1,
    "num-clients": 3,
    "partition": "iid",
    "device": "cpu",
}

# what a method needs besides to be as quick
QUICK: dict[str, dict[str, Scalar]] = {
    "hepco": {"hepco-generator-steps": 5, "hepco-prompt-steps": 5, "hepco-head-steps": 20, "prompt-pool": 10},
    "fedrda": {"fedrda-adaptation-rounds": 1},
}


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process draw no pictures, which take longer than all else, unless the test is about them."""
    if not request.node.get_closest_marker("pictures"):
        monkeypatch.setattr("server_app.rounds.report_drawer.write_report", lambda folders: [])


@pytest.fixture(autouse=True)
def feature_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for what a test's runs keep on disk, never the user's."""
    monkeypatch.setenv("FCIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Scalar]:
    """Run keys of a run of seconds, of the ``method`` that a test is given if any; results go to its own folder."""
    method = getattr(request.node, "callspec", None) and request.node.callspec.params.get("method")
    return {**TINY, **QUICK.get(str(method), {}), "output-dir": str(tmp_path / "runs"), "run-name": "run"}


@pytest.fixture(scope="session")
def patterns() -> list[np.ndarray]:
    """Images of six classes, for nodes that have images of their own."""
    data = load_dataset("synthetic", "", 16, 0.0, 0)
    return [data.train_images[np.flatnonzero(data.train_labels == c)[:20]] for c in range(6)]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts this test, also where a shell has started pytest with & and so has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
