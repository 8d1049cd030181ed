"""The Flower ServerApp: one run over the Grid that Flower provides."""

import logging
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from server_app.errors import RunError
from server_app.run_files.resume import continued
from server_app.transport.flower_grid import GridTransport
from task.config.parsing import parse
from task.keys import ConfigError


class RunFailed(RuntimeError):
    """What ends a run early, in words for people.

    Flower takes nothing but an exception for a failed run and logs it with its traceback, which here would only bury
    the message: there is none to show.
    """

    __traceback__: Any = property(lambda self: None, lambda self, value: None)


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config says.

    Raises:
        RunFailed: a bad run config, or a run that could not go on.
    """
    # here and not above: the clients' side of a simulation starts while this thread imports torch
    from server_app.rounds.run import execute

    _log_where_flower_logs()
    try:
        execute(parse(continued(context.run_config)), GridTransport(grid))
    except (ConfigError, RunError) as error:
        raise RunFailed(str(error)) from None


def _log_where_flower_logs() -> None:
    """Progress goes into ``flwr log``; without a handler of their own our loggers would show warnings only."""
    for name in ("server_app", "strategies", "task"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = list(logging.getLogger("flwr").handlers)
