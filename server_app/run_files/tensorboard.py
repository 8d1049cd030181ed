"""Optional event files for TensorBoard, in the folder ``tensorboard`` of a run."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from task.config.schema import Config
from task.keys import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def require_tensorboard(config: Config) -> None:
    """Check that TensorBoard is installed if the run key ``tensorboard`` asks for it.

    Raises:
        ConfigError: the package is not installed.
    """
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("tensorboard = True needs a package that is not installed: pip install tensorboard.")


def open_tensorboard(config: Config, directory: Path, finished_rounds: int) -> "SummaryWriter | None":
    """Open the event file, if the run key asks for it; events from after the finished rounds are removed."""
    if not config.tensorboard:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory / "tensorboard"), purge_step=finished_rounds + 1)


def add_round(
    writer: "SummaryWriter", line: Mapping[str, Any], accuracies: Sequence[float | None], number: int
) -> None:
    """Note a round, counted from 1: its line of rounds.jsonl, and the accuracies on each task so far."""
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
            writer.add_scalar(name, value, number)
    writer.flush()  # so that it can be seen while the run goes on
