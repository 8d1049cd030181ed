"""Where runs lie, their locks, and how one that was killed is marked."""

import re
import threading
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from server_app.run_files import locks, paths, status
from task.config.parsing import parse
from task.keys import ConfigError


def test_runs_are_placed_by_home_then_project(tmp_path, monkeypatch):
    config = parse({"run-name": "r"})
    monkeypatch.delenv("FCIL_HOME", raising=False)
    assert paths.run_directory(config) == paths.project_folder() / "runs" / "r"
    monkeypatch.setenv("FCIL_HOME", str(tmp_path))
    assert paths.run_directory(config) == tmp_path / "runs" / "r"
    monkeypatch.setenv("FCIL_HOME", "")
    assert paths.run_directory(config) == paths.project_folder() / "runs" / "r"
    assert paths.run_directory(parse({"run-name": "r", "output-dir": "/elsewhere"})) == Path("/elsewhere/r")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))  # the shell leaves the ~ in output-dir=~/runs as it is
    assert paths.run_directory(parse({"run-name": "r", "output-dir": "~/runs"})) == tmp_path / "me" / "runs" / "r"
    monkeypatch.setenv("FCIL_HOME", "~/work")
    assert paths.run_directory(config) == tmp_path / "me" / "work" / "runs" / "r"
    assert re.fullmatch(r"hgp-digits-seed0-\d{8}-\d{6}-[0-9a-f]{4}", paths.run_directory(parse({})).name)


def test_without_a_project_the_message_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "site-packages" / "server_app" / "run_files" / "paths.py"))
    with pytest.raises(paths.LaunchError, match="--in-process"):
        paths.project_folder()


def test_a_killed_run_is_marked_as_failed(tmp_path):
    (tmp_path / "results.json").write_text('{"status": "running", "rounds": []}')
    status.mark_failed(tmp_path, "out of memory")
    assert status.read_results(tmp_path) == {"status": "failed", "rounds": [], "error": "out of memory"}
    status.mark_failed(tmp_path, "another reason")
    assert status.read_results(tmp_path)["error"] == "out of memory"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    status.mark_failed(tmp_path / "absent", "no matter")


def test_results_of_another_kind_are_no_results(tmp_path):
    path = tmp_path / "results.json"
    for content in ("[]", "{"):
        path.write_text(content)
        assert status.read_results(tmp_path) == {}


def test_a_run_that_was_killed_is_seen_not_to_run(tmp_path):
    (tmp_path / "results.json").write_text('{"status": "running"}')
    with locks.lock_run(tmp_path):
        assert locks.is_locked(tmp_path)
        assert status.read_results(tmp_path) == {"status": "running"}
    results = status.read_results(tmp_path)
    assert results["status"] == "interrupted"
    assert results["error"].endswith("killed; there is no checkpoint: start it anew")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "000001.ckpt").touch()
    assert status.read_results(tmp_path)["error"].endswith(f"killed; go on with resume={tmp_path}")
    assert not locks.is_locked(tmp_path)  # asking has not locked it
    (tmp_path / "results.json").write_text('{"status": "finished"}')
    assert status.read_results(tmp_path) == {"status": "finished"}


def test_who_asks_for_the_lock_keeps_nobody_out(tmp_path):
    (tmp_path / ".lock").touch()
    asking = FileLock(tmp_path / ".lock", thread_local=False)
    asking.acquire()
    threading.Timer(0.3, asking.release).start()
    with locks.lock_folder(tmp_path):
        assert locks.is_locked(tmp_path)


def test_a_locked_folder_is_free_again_and_file_systems_without_locks_are_named(tmp_path, monkeypatch, caplog):
    with locks.lock_folder(tmp_path / "new"):
        with pytest.raises(Timeout), locks.lock_folder(tmp_path / "new"):
            pass
        with pytest.raises(ConfigError, match="another process is at"), locks.lock_run(tmp_path / "new"):
            pass
    with locks.lock_run(tmp_path / "new"):
        assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]

    def refuse(lock: FileLock, **_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with locks.lock_folder(tmp_path), locks.lock_folder(tmp_path):
        assert "start no second run there" in caplog.text
    (tmp_path / ".lock").touch()
    assert locks.is_locked(tmp_path)  # which nobody can know there, so what is recorded counts


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), locks.lock_run(tmp_path / "file" / "run"):
        pass
