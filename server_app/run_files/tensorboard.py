"""Optional event files for TensorBoard, in the folder ``tensorboard`` of a run."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from task.config.schema import Config
from task.keys import ConfigError

FOLDER = "tensorboard"


def require_tensorboard(config: Config) -> None:
    """Check that TensorBoard is installed if the run key ``tensorboard`` asks for it.

    Raises:
        ConfigError: the package is not installed.
    """
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("tensorboard = True needs a package that is not installed: pip install tensorboard.")


class TensorBoardWriter:
    """Writes scalars of every round if the run key ``tensorboard`` asks for it."""

    def __init__(self, config: Config, directory: Path, finished_rounds: int) -> None:
        """Open the event file; events of an interrupted run after its finished rounds are removed."""
        self._writer = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory / FOLDER), purge_step=finished_rounds + 1)

    def add(self, line: Mapping[str, Any], accuracies: Sequence[float | None], number: int) -> None:
        """Note a round, counted from 1: its line of rounds.jsonl, and the accuracies on each task so far."""
        if self._writer is None:
            return
        scalars = {
            "train/loss": line["train_loss"],
            "train/accuracy": line["train_accuracy"],
            "accuracy/seen classes": line["seen_accuracy"],
            **{f"accuracy/task {task}": accuracy for task, accuracy in enumerate(accuracies, start=1)},
            "bytes/up": line["bytes_up"],
            "bytes/down": line["bytes_down"],
            "round/seconds": line["seconds"],
            "round/failures": len(line["failures"]),
        }
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, number)
        self._writer.flush()  # so that it can be seen while the run goes on

    def close(self) -> None:
        """End the thread that writes."""
        if self._writer is not None:
            self._writer.close()
