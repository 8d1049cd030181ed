"""Run keys from the command line, where there is no project's folder."""

from functools import lru_cache
from pathlib import Path

import pytest

from server_app import run_keys
from server_app.errors import LaunchError
from server_app.run_keys import load_datasets
from task.config.parsing import parse
from task.data import load as load_module
from task.data.images import Dataset
from task.keys import ConfigError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that is no checkout, with code that is installed elsewhere."""

    def nowhere() -> Path:
        raise LaunchError("no such folder")

    monkeypatch.setattr(run_keys, "project_folder", nowhere)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_needs_no_file_needs_no_project(installed: Path) -> None:
    (installed / "node").mkdir()
    run_keys.require_files({"dataset": "own", "data-dir": "."})
    with pytest.raises(ConfigError, match=r"data-dir = 'node' holds no folder: fcil run simulates a node for each"):
        run_keys.require_files({"dataset": "own", "data-dir": "node"})
    with pytest.raises(
        ConfigError, match=r"needs data-dir here: .* A run of real nodes is started, and resumed, by: flwr"
    ):
        run_keys.require_files({"dataset": "own", "data-dir": "", "resume": "runs/night"})
    run_keys.require_files({"method": "hgp", "dataset": "digits", "backbone-weights": "auto"})


def test_files_count_from_the_working_directory_then(installed: Path) -> None:
    (installed / "weights.pt").touch()
    run_keys.require_files({"backbone-weights": "weights.pt"})
    with pytest.raises(ConfigError, match=r"'others.pt': there is no such file or folder here"):
        run_keys.require_files({"backbone-weights": "others.pt"})


def test_data_are_read_with_the_draws_of_validation_images_that_the_runs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*arguments: object) -> Dataset:
        asked.append(arguments[3:5])
        return plain(*arguments)

    plain = load_module.load_dataset.__wrapped__
    monkeypatch.setattr(load_module, "load_dataset", lru_cache(load))
    draws = [(0.0, 0), (0.0, 1), (0.2, 1), (0.2, 4)]
    configs = [parse({"dataset": "synthetic", "validation-share": share, "seed": seed}) for share, seed in draws]
    ((source, dataset),) = load_datasets(configs)
    assert sorted(asked) == [(0.0, 0), (0.2, 1), (0.2, 4)]
    assert (source, len(dataset.test_labels)) == (("synthetic", ""), 96)
    assert [len(data.test_labels) for _, data in load_datasets(configs[3:])] == [12 * 6]  # of 32 of each class
