"""Where runs lie, and how one that was killed is marked."""

import re
from pathlib import Path

import pytest

from server_app.run_files import paths as places
from task.config.parsing import parse


def test_runs_are_placed_by_home_then_project(tmp_path, monkeypatch):
    config = parse({"run-name": "r"})
    monkeypatch.delenv("FCIL_HOME", raising=False)
    assert places.run_directory(config) == places.project_folder() / "runs" / "r"
    monkeypatch.setenv("FCIL_HOME", str(tmp_path))
    assert places.run_directory(config) == tmp_path / "runs" / "r"
    assert places.run_directory(parse({"run-name": "r", "output-dir": "/elsewhere"})) == Path("/elsewhere/r")
    assert re.fullmatch(r"hgp-digits-seed0-\d{8}-\d{6}-[0-9a-f]{4}", places.run_directory(parse({})).name)


def test_without_a_project_the_message_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "__file__", str(tmp_path / "site-packages" / "server_app" / "run_files" / "paths.py"))
    with pytest.raises(places.LaunchError, match="--in-process"):
        places.project_folder()


def test_a_killed_run_is_marked_as_failed(tmp_path):
    (tmp_path / "results.json").write_text('{"status": "running", "rounds": []}')
    places.mark_failed(tmp_path, "out of memory")
    assert places.read_results(tmp_path) == {"status": "failed", "rounds": [], "error": "out of memory"}
    places.mark_failed(tmp_path, "another reason")
    assert places.read_results(tmp_path)["error"] == "out of memory"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    places.mark_failed(tmp_path / "absent", "no matter")
