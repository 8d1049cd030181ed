"""A run's data set and class stream, computed once per process."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from task.config.schema import Config
from task.data.class_names import class_ids
from task.data.images import Dataset
from task.data.load import load_dataset
from task.data.node_images import Inventory, open_inventory
from task.keys import ConfigError
from task.models.bundled import BUNDLED, read_description
from task.scenario.class_stream import Schedule, class_order, split_tasks, stages
from task.scenario.partition import consensus_tasks
from task.scenario.task_plan import TaskPlan

Streams = list[list[list[int]]]


@dataclass(frozen=True)
class Scenario:
    """A run's data and schedule, equal in every process; if nodes have their own images, ``dataset`` is the node's.

    Attributes:
        dataset: images and labels; the label is -1 for a node's image whose class is not in the task plan.
        schedule: tasks and rounds.
        streams: class ids by client and task in an asynchronous run; else empty.
    """

    dataset: Dataset
    schedule: Schedule
    streams: Streams = field(default_factory=list)

    def task_sizes(self, task: int) -> list[int]:
        """Number of classes of each task up to ``task``, counted from 0."""
        return [len(classes) for classes in self.schedule.tasks[: task + 1]]


@lru_cache(maxsize=16)
def build_scenario(
    config: Config, plan: TaskPlan | None = None, inventory: Inventory | None = None, side: int = 0
) -> Scenario:
    """Load the data set and make the schedule.

    Args:
        config: the run keys.
        plan: if nodes have their own images.
        inventory: this node's images in that case; None on the server, which then has no image.
        side: of these images in pixels; 0 = that of the backbone, which may have to be built for it.

    Raises:
        ConfigError: data missing or unusable, or more tasks than classes.
    """
    rounds = config.rounds_per_task, config.adaptation_rounds
    if plan:
        return Scenario(_node_dataset(config, plan, inventory, side), Schedule(plan.tasks, *rounds))
    if config.asynchronous and not config.num_clients:
        raise ConfigError(
            f"num-clients = 0 is not possible with partition {config.partition!r}: "
            "which classes a client has depends on the number of clients, so it must be given."
        )
    side = image_size(config)
    dataset = load_dataset(
        config.dataset, config.data_dir, side, config.validation_share, config.seed, config.max_image_pixels
    )
    order = class_order(len(dataset.class_names), config.seed, config.class_order)
    try:
        tasks = split_tasks(order, config.num_tasks)
        streams: Streams = []
        if config.asynchronous:
            streams = consensus_tasks(tasks, config.num_clients, config.seed, **config.partition_parameters)
            tasks = stages(streams, order)
    except ValueError as error:
        raise ConfigError(f"{error} of {config.dataset!r}.") from error
    return Scenario(dataset, Schedule(tasks, *rounds), streams)


def _node_dataset(config: Config, plan: TaskPlan, inventory: Inventory | None, side: int) -> Dataset:
    """A node's images under the class ids of the plan; the server has none."""
    if not inventory:
        images, labels = np.empty((0, *plan.image_shape, 3), np.uint8), np.empty(0, np.int64)
        return Dataset(plan.class_names, images, labels, images, labels)
    dataset = open_inventory(inventory, side or image_size(config), config.max_image_pixels)
    ids = class_ids(dataset.class_names, plan.class_names)
    train, test = ids[dataset.train_labels], ids[dataset.test_labels]
    return replace(dataset, class_names=plan.class_names, train_labels=train, test_labels=test)


def image_size(config: Config) -> int:
    """Side of the backbone's input in pixels; whether the backbone can have it is checked where it is built.

    Raises:
        ConfigError: the backbone itself must say it, and cannot be built.
    """
    if config.image_size:
        return config.image_size
    if config.backbone in BUNDLED:
        return int(read_description(config.backbone)["architecture"]["img_size"])
    from task.models.load import configured_backbone  # here, as it imports torch

    return configured_backbone(config).image_size
