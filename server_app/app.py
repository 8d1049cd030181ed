"""The Flower ServerApp: one run over the Grid that Flower provides."""

import logging
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from server_app.errors import RunError, describe_os_error
from server_app.run_files.resume import load_resumed_keys
from server_app.transport.flower_grid import GridTransport
from task.config.parsing import parse
from task.keys import ConfigError


class RunFailed(RuntimeError):
    """A run that failed, with a message for people.

    Flower logs the exception with its traceback, which would hide the message; so this one has no traceback.
    """

    __traceback__: Any = property(lambda self: None, lambda self, value: None)


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config says.

    Raises:
        RunFailed: a bad run config, or a run that could not go on.
    """
    # not at the top: in a simulation the clients' side starts while this thread imports torch
    from server_app.rounds.run import run_experiment

    for name in ("server_app", "strategies", "task"):  # Flower's handlers, so that progress appears in flwr log
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = list(logging.getLogger("flwr").handlers)
    try:
        run_experiment(parse(load_resumed_keys(context.run_config)), GridTransport(grid))
    except (ConfigError, RunError) as error:
        raise RunFailed(str(error)) from None
    except OSError as error:
        raise RunFailed(describe_os_error(error)) from None
