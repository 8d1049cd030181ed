"""Who learns what when: the training images and the classes of every client in every round."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from task.config.schema import Config
from task.keys import ConfigError
from task.scenario.class_stream import Schedule
from task.scenario.partition import REDRAWN, Partition, partition
from task.scenario.scenario import Scenario, build_scenario, use_run_key_names


@dataclass(frozen=True)
class ClientTaskData:
    """What one client learns in one round.

    Attributes:
        positions: int64 [N], sorted positions of its training images; none is legal.
        classes: class ids among which its loss chooses.
    """

    positions: np.ndarray
    classes: list[int]


def client_task_data(config: Config, client: int, task: int, round: int, holds_pool: bool = False) -> ClientTaskData:
    """What a client learns in a round.

    Args:
        config: the run keys; ``num_clients`` must be known, not 0.
        client: its place, 0 to num-clients - 1.
        task: counted from 0.
        round: within the task, counted from 0.
        holds_pool: whether it is the round's one client with data, if the method pools all clients' data.

    Raises:
        ConfigError: the partition's parameters cannot work with this data.
    """
    scenario = build_scenario(config)
    classes = learnable_classes(config, scenario.schedule, task)
    if config.row.pooled:
        pool = np.flatnonzero(np.isin(scenario.dataset.train_labels, classes))
        return ClientTaskData(pool if holds_pool else pool[:0], classes)
    if config.partition in REDRAWN:
        return ClientTaskData(_partition_one_round(config, task, round)[client], classes)
    return ClientTaskData(
        _partition_all_tasks(config)[client][task], scenario.streams[client][task] if scenario.streams else classes
    )


def node_task_data(scenario: Scenario, task: int) -> ClientTaskData:
    """What a node with data of its own learns in every round of a task, counted from 0: all it holds of its classes."""
    classes = scenario.schedule.current_classes(task)
    return ClientTaskData(np.flatnonzero(np.isin(scenario.dataset.train_labels, classes)), classes)


def learnable_classes(config: Config, schedule: Schedule, task: int) -> list[int]:
    """Classes that some client may learn in a task, in stream order.

    They are the current ones; all seen so far where data are pooled, or where a client may come late to a class.
    """
    old_too = config.row.pooled or config.asynchronous
    return schedule.seen_classes(task) if old_too else schedule.current_classes(task)


def has_fixed_images(config: Config) -> bool:
    """Whether a client learns from images of its own: neither pooled nor dealt anew in every round."""
    return not config.row.pooled and config.partition not in REDRAWN


def all_client_positions(config: Config, client: int) -> np.ndarray:
    """Positions of all training images from which a client may learn in any round: no report of it can exceed them.

    Raises:
        ConfigError: the partition's parameters cannot work with this data.
    """
    if not has_fixed_images(config):
        return np.arange(len(build_scenario(config).dataset.train_labels))
    return np.concatenate(_partition_all_tasks(config)[client])


@lru_cache(maxsize=2)
def _partition_all_tasks(config: Config) -> Partition:
    """Positions by client, then task."""
    return _partition(config, [list(classes) for classes in build_scenario(config).schedule.tasks])


@lru_cache(maxsize=2)
def _partition_one_round(config: Config, task: int, round: int) -> list[np.ndarray]:
    """Positions by client in one round; the other tasks are left empty, so that nothing is drawn for them."""
    tasks = build_scenario(config).schedule.tasks
    only = [list(classes) if t == task else [] for t, classes in enumerate(tasks)]
    return [own[task] for own in _partition(config, only, round=round)]


def _partition(config: Config, tasks: list[list[int]], **more: int) -> Partition:
    labels, parameters = build_scenario(config).dataset.train_labels, config.partition_parameters | more
    try:
        return partition(config.partition, labels, config.num_clients, tasks, config.seed, **parameters)
    except ValueError as error:
        raise ConfigError(f"{use_run_key_names(config, error)}.") from error
