"""What a process needs of a run beside the model: data set and class stream, computed once."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from task.backbones import load_backbone
from task.config import Config
from task.data import Dataset, load_dataset
from task.device import resolve_device
from task.keys import ConfigError
from task.stream import Schedule, class_order, split_tasks


@dataclass(frozen=True)
class World:
    """A run's data and schedule, equal in every process.

    Attributes:
        dataset: images and labels.
        schedule: tasks and rounds.
        rows: int64 [classes]; head row of each class id, that is its place in the class order.
    """

    dataset: Dataset
    schedule: Schedule
    rows: np.ndarray

    def task_sizes(self, task: int) -> list[int]:
        """Number of classes of each task up to ``task``, counted from 0."""
        return [len(classes) for classes in self.schedule.tasks[: task + 1]]


@lru_cache(maxsize=2)
def build_world(config: Config) -> World:
    """Load the data and lay out the tasks.

    Raises:
        ConfigError: data missing or unusable, or more tasks than classes.
    """
    side = image_size(config)
    dataset = load_dataset(config.dataset, config.data_dir, side, config.validation_share, config.seed)
    order = class_order(len(dataset.class_names), config.seed, config.class_order)
    try:
        schedule = Schedule(split_tasks(order, config.num_tasks), config.rounds_per_task)
    except ValueError as error:
        raise ConfigError(f"{error} of {config.dataset!r}.") from error
    return World(dataset, schedule, np.argsort(np.array(order)))


def image_size(config: Config) -> int:
    """Side of the backbone's input in pixels."""
    device = str(resolve_device(config.device))
    return load_backbone(config.backbone, config.backbone_weights, config.image_size, device).image_size


@lru_cache(maxsize=1)
def code_sha256() -> str:
    """Digest of the code that clients run: a simulation may import another copy than the one that was meant."""
    total = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(p for folder in ("task", "client_app") for p in (root / folder).glob("*.py")):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()
