"""What a process needs of a run beside the model: data set and class stream, computed once."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from task.backbones import load_backbone
from task.config import Config
from task.data import Dataset, load_dataset
from task.device import resolve_device
from task.keys import ConfigError
from task.partition import consensus_tasks
from task.stream import Schedule, class_order, split_tasks, stages

Streams = list[list[list[int]]]


@dataclass(frozen=True)
class World:
    """A run's data and schedule, equal in every process.

    Attributes:
        dataset: images and labels.
        schedule: tasks and rounds.
        rows: int64 [classes]; head row of each class id, that is its place among the classes as they come.
        streams: in an asynchronous run each client's own tasks, class ids; else empty.
    """

    dataset: Dataset
    schedule: Schedule
    rows: np.ndarray
    streams: Streams

    def task_sizes(self, task: int) -> list[int]:
        """Number of classes of each task up to ``task``, counted from 0."""
        return [len(classes) for classes in self.schedule.tasks[: task + 1]]


@lru_cache(maxsize=2)
def build_world(config: Config) -> World:
    """Load the data and lay out the tasks.

    Raises:
        ConfigError: data missing or unusable, or more tasks than classes.
    """
    if config.asynchronous and not config.num_clients:
        raise ConfigError(
            f"num-clients = 0 is not possible with partition {config.partition!r}: "
            "which classes a client has depends on the number of clients, so it must be given."
        )
    side = image_size(config)
    dataset = load_dataset(config.dataset, config.data_dir, side, config.validation_share, config.seed)
    order = class_order(len(dataset.class_names), config.seed, config.class_order)
    try:
        tasks = split_tasks(order, config.num_tasks)
        streams = _streams(config, tasks) if config.asynchronous else []
    except ValueError as error:
        raise ConfigError(f"{error} of {config.dataset!r}.") from error
    schedule = Schedule(stages(streams, order) if streams else tasks, config.rounds_per_task)
    coming = [c for classes in schedule.tasks for c in classes]
    return World(dataset, schedule, np.argsort(np.array(coming)), streams)


def _streams(config: Config, tasks: list[list[int]]) -> Streams:
    return consensus_tasks(tasks, config.num_clients, config.seed, **config.partition_parameters)


def image_size(config: Config) -> int:
    """Side of the backbone's input in pixels."""
    device = str(resolve_device(config.device))
    return load_backbone(config.backbone, config.backbone_weights, config.image_size, device).image_size
