"""The Flower ServerApp: one run over the Grid that Flower provides."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from server_app.errors import RunError, describe_os_error
from server_app.run_files.on_end import tell_operator
from server_app.run_files.paths import run_directory
from server_app.run_files.resume import load_resumed_keys
from server_app.transport.flower_grid import GridTransport
from task.config.parsing import parse
from task.config.schema import Config
from task.keys import ConfigError
from task.message import Scalar


class RunFailed(RuntimeError):
    """A run that failed, with a message for people.

    Flower logs the exception with its traceback, which would hide the message; so this one has no traceback.
    """

    __traceback__: Any = property(lambda self: None, lambda self, value: None)


app = ServerApp()


def _read_keys(values: Mapping[str, Scalar]) -> Config:
    """The run's settings, or those of the run that is resumed; the operator is told of keys that cannot be used.

    Raises:
        ConfigError: a key, or the folder of the run to resume, cannot be used.
    """
    try:
        values = load_resumed_keys(values)
        config = parse(values)
        run_directory(config)
        return config
    except ConfigError as error:
        folder = Path(str(values.get("output-dir", "")), name) if (name := str(values.get("run-name", ""))) else Path()
        tell_operator(str(values.get("on-end", "")), Path(str(values.get("resume") or folder)), error)
        raise


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
        run_experiment(_read_keys(context.run_config), GridTransport(grid))
    except (ConfigError, RunError) as error:
        raise RunFailed(str(error)) from None
    except OSError as error:
        raise RunFailed(describe_os_error(error)) from None
