"""The training images and the classes of every client in every round."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from task.config.schema import REDRAWN, Config
from task.keys import ConfigError
from task.scenario.class_stream import Schedule
from task.scenario.partition import Partition, partition
from task.scenario.scenario import Scenario, build_scenario


@dataclass(frozen=True)
class ClientTaskData:
    """Sorted positions, int64 [N], of a client's training images; the class ids among which its loss chooses."""

    positions: np.ndarray
    classes: list[int]


def client_task_data(config: Config, client: int, task: int, round: int, holds_pool: bool = False) -> ClientTaskData:
    """Training data of a client in a round; client, task and the round within the task are counted from 0.

    ``holds_pool``: whether it is the round's one client with data, if the method pools all clients' data.

    Raises:
        ConfigError: the partition's parameters cannot work with this data.
    """
    scenario = build_scenario(config)
    classes = learnable_classes(config, scenario.schedule, task)
    if config.method_row.pooled:
        pool = np.flatnonzero(np.isin(scenario.dataset.train_labels, classes))
        return ClientTaskData(pool if holds_pool else pool[:0], classes)
    if config.partition in REDRAWN:
        return ClientTaskData(_partition(config, task, round=round)[client][task], classes)
    own = scenario.streams[client][task] if scenario.streams else classes
    return ClientTaskData(_partition(config)[client][task], own)


def node_task_data(scenario: Scenario, task: int) -> ClientTaskData:
    """Training data of a node with its own images in every round of ``task`` (from 0): all images of its classes."""
    classes = scenario.schedule.current_classes(task)
    return ClientTaskData(np.flatnonzero(np.isin(scenario.dataset.train_labels, classes)), classes)


def evaluated_part(client: int, images: int, clients: int) -> np.ndarray:
    """Positions, int64 [N], of those of a data set's test ``images`` that a client evaluates: every ``clients``-th."""
    return np.arange(client, images, clients)


def learnable_classes(config: Config, schedule: Schedule, task: int) -> list[int]:
    """Classes that some client may learn in a task, in stream order.

    These are the task's classes; or all seen classes, if data are pooled or clients have class sequences of their own.
    """
    all_seen = config.method_row.pooled or config.asynchronous
    return schedule.seen_classes(task) if all_seen else schedule.current_classes(task)


def has_fixed_images(config: Config) -> bool:
    """Whether a client has the same images in every round of a task: they are neither pooled nor drawn per round."""
    return not config.method_row.pooled and config.partition not in REDRAWN


def all_client_positions(config: Config, client: int) -> np.ndarray:
    """Positions of all training images that a client may have in any round, int64 [N].

    Raises:
        ConfigError: the partition's parameters cannot work with this data.
    """
    if not has_fixed_images(config):
        return np.arange(len(build_scenario(config).dataset.train_labels))
    return np.concatenate(_partition(config)[client])


@lru_cache(maxsize=2)
def _partition(config: Config, only_task: int | None = None, **parameters: int) -> Partition:
    """Positions by client, then by task; nothing is drawn for the other tasks if only one is wanted."""
    scenario = build_scenario(config)
    tasks = [list(c) if only_task in (None, t) else [] for t, c in enumerate(scenario.schedule.tasks)]
    labels, parameters = scenario.dataset.train_labels, config.partition_parameters | parameters
    try:
        return partition(config.partition, labels, config.num_clients, tasks, config.seed, **parameters)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error
