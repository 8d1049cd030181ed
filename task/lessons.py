"""Who learns from which training images in which round."""

from functools import lru_cache

import numpy as np

from task.config import Config
from task.keys import ConfigError
from task.partition import REDRAWN, Partition, partition
from task.world import build_world


def local_positions(config: Config, task: int, round: int) -> list[np.ndarray]:
    """Sorted positions of the training images of every client in one round; an empty array is legal.

    Args:
        config: the run keys; ``num_clients`` must be known, not 0.
        task: counted from 0.
        round: within the task, counted from 0.

    Raises:
        ConfigError: the partition's parameters cannot work with this data.
    """
    if config.partition in REDRAWN:
        return _redrawn(config, task, round)
    return [own[task] for own in _dealt(config)]


def ever_held(config: Config, client: int) -> np.ndarray:
    """Positions of all training images from which a client may learn in any round: no report of it can exceed them.

    Raises:
        ConfigError: the partition's parameters cannot work with this data.
    """
    if config.partition in REDRAWN:
        return np.arange(len(build_world(config).dataset.train_labels))
    return np.concatenate(_dealt(config)[client])


@lru_cache(maxsize=2)
def _dealt(config: Config) -> Partition:
    """Positions by client, then task."""
    return _partition(config, [list(classes) for classes in build_world(config).schedule.tasks])


@lru_cache(maxsize=2)
def _redrawn(config: Config, task: int, round: int) -> list[np.ndarray]:
    """Positions by client in one round; the other tasks are left empty, so that nothing is drawn for them."""
    tasks = build_world(config).schedule.tasks
    only = [list(classes) if t == task else [] for t, classes in enumerate(tasks)]
    return [own[task] for own in _partition(config, only, round=round)]


def _partition(config: Config, tasks: list[list[int]], **more: int) -> Partition:
    labels, parameters = build_world(config).dataset.train_labels, config.partition_parameters | more
    try:
        return partition(config.partition, labels, config.num_clients, tasks, config.seed, **parameters)
    except ValueError as error:
        raise ConfigError(str(error)) from error
