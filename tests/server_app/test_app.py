"""The Flower ServerApp: how a run that fails ends."""

import logging
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
