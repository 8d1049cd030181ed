"""Every method as a Flower Strategy, for people with a ServerApp of their own.

    strategy = HGP(dataset="digits", num_tasks=5, rounds_per_task=3)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(), num_rounds=15)

The nodes run this project's ClientApp, ``client_app.app:app``; what they need to know travels in the messages.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import safetensors.numpy
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from client_app.flower_records import arrays_of, record_of
from server_app.rounds.run import run_experiment
from server_app.run_files.resume import load_resumed_keys
from server_app.run_files.writers import read_lines
from server_app.transport.flower_grid import GridTransport
from task.config.parsing import parse
from task.config.schema import Config
from task.message import Scalar

log = logging.getLogger(__name__)

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]


class FCILStrategy(Strategy):
    """Any method of the table; ``method`` is one of the run keys. Subclasses fix it.

    Its ``start`` is a whole run: the loop of Flower's base class has no tasks, hello, quorum or checks.
    """

    method: str | None = None

    def __init__(self, **run_keys: Scalar) -> None:
        """Check the run keys, which are written with underscores here; ``resume`` takes those of the run it names.

        Raises:
            ConfigError: an unknown key, a bad value, a combination that cannot work, or a run that cannot be resumed;
                a ValueError.
        """
        values = {key.replace("_", "-"): value for key, value in run_keys.items()}
        if self.method:
            values["method"] = self.method
        self._values = load_resumed_keys(values)
        self.config: Config = parse(self._values)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
    ) -> Result:
        """Run all tasks, and write the run's files as every run does.

        Args:
            grid: Flower's, as the ServerApp's main function gets it.
            initial_arrays: what the global model starts from, named and shaped as it travels in the first task; empty
                for the seeded start.
            num_rounds: of the whole run, num_tasks times rounds_per_task and those of adaptation. It sets
                rounds_per_task when that was not given.
            timeout: seconds to wait for the answers of a round; by default the run key round_timeout.
            train_config: must be empty, and evaluate_config too: settings are run keys here.
            evaluate_config: see train_config.
            evaluate_fn: called once with the last round's number and the final arrays; the accuracies of every task
                are measured without it.

        Returns:
            the final arrays, and metrics by round from 1: of training, and of evaluation at the end of each task.

        Raises:
            ValueError: num_rounds does not fit the tasks, or a config has contents.
            RunError: no quorum, or clients that cannot work together.
        """
        if extra := [*(train_config or {}), *(evaluate_config or {})]:
            raise ValueError(f"{extra} would not be read: give run keys to {type(self).__name__}(...) instead")
        config = self._fit_config(num_rounds, timeout)
        directory = run_experiment(config, GridTransport(grid), arrays_of(initial_arrays) or None)
        result = read_result(directory, config)
        last = len(result.train_metrics_clientapp)  # fewer than planned where fewer tasks came
        if evaluate_fn is not None and (metrics := evaluate_fn(last, result.arrays)) is not None:
            result.evaluate_metrics_serverapp.setdefault(last, MetricRecord()).update(metrics)
        return result

    def _fit_config(self, num_rounds: int | None, timeout: float | None) -> Config:
        """The run keys with the arguments of :meth:`start`."""
        values = dict(self._values)
        tasks, rounds = self.config.num_tasks, self.config.rounds_per_task
        if num_rounds is not None and self.config.leaves_adaptation_open:
            raise ValueError(
                f"num_rounds = {num_rounds} cannot be divided among the tasks, as the number of rounds of adaptation "
                f"depends on the clients' images: give {self.config.method_row.name}_adaptation_rounds a number"
            )
        first = self.config.adaptation_rounds
        if num_rounds is not None and num_rounds != first + tasks * rounds:
            if "rounds-per-task" in values or num_rounds <= first or (num_rounds - first) % tasks:
                before = f"{first} rounds of adaptation and " if first else ""
                raise ValueError(
                    f"num_rounds = {num_rounds} does not fit: {before}num_tasks = {tasks} times rounds_per_task = "
                    f"{rounds} is {first + tasks * rounds}"
                )
            values["rounds-per-task"] = (num_rounds - first) // tasks
        if timeout is not None:
            values["round-timeout"] = float(timeout)
        return parse(values)

    def summary(self) -> None:
        """Log the resolved run keys."""
        for key, value in self.config.flat().items():
            log.info("\t├── %s: %s", key, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: a run is one whole, see :meth:`start`."""
        raise NotImplementedError(f"{type(self).__name__} runs as a whole: call its start method")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _refuse


class HGP(FCILStrategy):
    """Hierarchical Generative Prototypes (Salami et al. 2024)."""

    method = "hgp"


class FedAvg(FCILStrategy):
    """Weighted means of prompt and head (McMahan et al. 2017)."""

    method = "fedavg"


def read_result(directory: Path, config: Config) -> Result:
    """A finished run's files as Flower's Result; rounds count from 1."""
    result = Result(arrays=record_of(safetensors.numpy.load_file(directory / "model.safetensors")))
    evaluated = result.evaluate_metrics_clientapp if config.evaluate == "clients" else result.evaluate_metrics_serverapp
    for number, line in enumerate(read_lines(directory / "rounds.jsonl"), start=1):
        if line["seen_accuracy"] is not None:
            evaluated[number] = MetricRecord({"accuracy": line["seen_accuracy"]})
        result.train_metrics_clientapp[number] = MetricRecord(_numbers(line))
    return result


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    """The numbers in a line of rounds.jsonl, the server's metrics among them; a list counts as its length."""
    flat = {name: len(value) if isinstance(value, list) else value for name, value in line.items()} | line["server"]
    return {name: value for name, value in flat.items() if type(value) in (int, float)}
