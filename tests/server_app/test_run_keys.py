"""Run keys from the command line, where there is no project's folder."""

from pathlib import Path

import pytest

from server_app import run_keys
from server_app.errors import LaunchError
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
    run_keys.require_files({"dataset": "own", "data-dir": "."})
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
