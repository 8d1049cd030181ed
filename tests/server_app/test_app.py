"""The Flower ServerApp: how a run that fails ends."""

import errno
import json
import logging
import shlex
import traceback

import pytest
from flwr.app import Context, RecordDict

from client_app.app import app as client
from server_app.app import RunFailed
from server_app.app import app as server
from tests.helpers.flower import LoopbackGrid, N
from tests.helpers.runs import settings


@pytest.mark.parametrize(
    ("values", "message"),
    [({"seed": "one"}, "seed"), ({"round-timeout": 0.2, "quorum": 2}, "quorum")],
)
def test_a_failed_run_is_one_readable_line_in_flowers_log(tmp_path, values, message):
    grid = LoopbackGrid(client, 2)
    grid.silent.add(N[0])
    context = Context(1, 0, {}, RecordDict(), settings(tmp_path, "bad") | values)
    with pytest.raises(RunFailed, match=message) as caught:
        server(grid, context)
    record = logging.LogRecord("flwr", logging.ERROR, "", 0, "Simulation raised an exception", None, None)
    error = caught.value
    record.exc_info = (type(error), error, error.__traceback__)  # as logging makes it from an exception
    assert logging.Formatter().format(record).splitlines()[1] == f"server_app.app.RunFailed: {error}"
    assert len(logging.Formatter().format(record).splitlines()) == 2
    assert len(traceback.format_exception(error)) == 1


def test_progress_appears_where_flower_logs(tmp_path, monkeypatch):
    loggers = [logging.getLogger(name) for name in ("server_app", "strategies", "task")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logging.NOTSET)
        monkeypatch.setattr(logger, "handlers", [])
    with pytest.raises(RunFailed):
        server(None, Context(1, 0, {}, RecordDict(), settings(tmp_path, "bad") | {"seed": "one"}))
    assert logging.getLogger("flwr").handlers
    for logger in loggers:
        assert (logger.level, logger.handlers) == (logging.INFO, logging.getLogger("flwr").handlers)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"output-dir": "file"}, "output-dir = '.*' cannot be used: '.*file' is a file"),
        ({"resume": "empty"}, "no folder of a run"),
    ],
)
def test_folders_that_cannot_be_used_are_refused_before_a_node_is_asked(tmp_path, values, message):
    (tmp_path / "file").write_text("")
    values = {name: str(tmp_path / value) for name, value in values.items()}
    context = Context(1, 0, {}, RecordDict(), settings(tmp_path, "bad") | values)
    with pytest.raises(RunFailed, match=message):
        server(None, context)


def test_the_operator_is_told_of_keys_that_cannot_be_used(tmp_path):
    command = shlex.join(["sh", "-c", f"cat > {tmp_path}/event"])
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "results.json").write_text("{}")
    cases = {"bad": {"seed": "-3"}, "gone": {"resume": str(tmp_path / "gone")}}
    cases |= {"taken": {"run-name": "taken", "output-dir": str(tmp_path / "runs")}, "": {"seed": "-3", "run-name": ""}}
    for name, values in cases.items():
        context = Context(1, 0, {}, RecordDict(), settings(tmp_path, "bad") | values | {"on-end": command})
        with pytest.raises(RunFailed) as caught:
            server(None, context)
        event = json.loads((tmp_path / "event").read_text())
        assert (event["run"], event["status"], event["error"]) == (name, "failed", str(caught.value))


def test_a_full_disk_is_a_failed_run_with_the_path(tmp_path, monkeypatch):
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    context = Context(1, 0, {}, RecordDict(), settings(tmp_path, "full"))
    with pytest.raises(RunFailed, match=f"^the disk is full, {tmp_path}/full/.* make room") as caught:
        server(LoopbackGrid(client, 2), context)
    assert len(traceback.format_exception(caught.value)) == 1
