"""What a process needs of a run beside the model: data set and class stream, computed once."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from task.config.schema import Config
from task.data.images import Dataset
from task.data.load import load_dataset
from task.data.node_images import Inventory, open_inventory
from task.keys import ConfigError
from task.models.device import resolve_device
from task.models.load import load_backbone
from task.scenario.class_stream import Schedule, class_order, split_tasks, stages
from task.scenario.partition import consensus_tasks
from task.scenario.task_plan import TaskPlan

Streams = list[list[list[int]]]


@dataclass(frozen=True)
class Scenario:
    """A run's data and schedule, equal in every process; where nodes have data of their own, a node's view of them.

    Attributes:
        dataset: images and labels; a label is -1 where the class of a node's image is not in the run's plan.
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


@lru_cache(maxsize=16)
def build_scenario(config: Config, plan: TaskPlan | None = None, inventory: Inventory | None = None) -> Scenario:
    """Load the data and lay out the tasks.

    Args:
        config: the run keys.
        plan: what was agreed on, if nodes have data of their own.
        inventory: then this node's; on the server there is none, and no image.

    Raises:
        ConfigError: data missing or unusable, or more tasks than classes.
    """
    if plan:
        dataset = (
            _node_dataset(plan, open_inventory(inventory, image_size(config))) if inventory else _empty_dataset(plan)
        )
        return _lay_out(dataset, Schedule(plan.tasks, config.rounds_per_task))
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
        raise ConfigError(f"{use_run_key_names(config, error)} of {config.dataset!r}.") from error
    return _lay_out(dataset, Schedule(stages(streams, order) if streams else tasks, config.rounds_per_task), streams)


def _lay_out(dataset: Dataset, schedule: Schedule, streams: Streams | None = None) -> Scenario:
    coming = [c for classes in schedule.tasks for c in classes]
    return Scenario(dataset, schedule, np.argsort(np.array(coming)), streams or [])


def _node_dataset(plan: TaskPlan, holdings: Dataset) -> Dataset:
    """A node's images under the class ids of the plan."""
    ids = {name: c for c, name in enumerate(plan.class_names)}
    place = np.array([ids.get(name, -1) for name in holdings.class_names], np.int64)
    labels = {"train_labels": place[holdings.train_labels], "test_labels": place[holdings.test_labels]}
    return replace(holdings, class_names=plan.class_names, **labels)


def _empty_dataset(plan: TaskPlan) -> Dataset:
    images, labels = np.empty((0, *plan.image_shape, 3), np.uint8), np.empty(0, np.int64)
    return Dataset(plan.class_names, images, labels, images, labels)


def _streams(config: Config, tasks: list[list[int]]) -> Streams:
    return consensus_tasks(tasks, config.num_clients, config.seed, **config.partition_parameters)


def use_run_key_names(config: Config, error: ValueError) -> str:
    """What a partition complains of, in the names of the run keys: its parameters have underscores for hyphens."""
    text = str(error)
    for name in config.partition_parameters:
        text = text.replace(name, name.replace("_", "-"))
    return text


def image_size(config: Config) -> int:
    """Side of the backbone's input in pixels."""
    device = str(resolve_device(config.device))
    return load_backbone(config.backbone, config.backbone_weights, config.image_size, device).image_size
