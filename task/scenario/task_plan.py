"""Classes and tasks that the server makes of what its nodes say to hold, where each node has data of its own."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from task.config.schema import APPEARING, Config
from task.keys import ConfigError
from task.scenario.class_stream import class_order, split_tasks


@dataclass(frozen=True)
class TaskPlan:
    """What nodes with data of their own have to agree on.

    Attributes:
        class_names: by class id; an id never changes, new classes come at the end.
        tasks: class ids of each task.
        image_shape: height and width in pixels of the nodes' images, before they are resized for the backbone.
    """

    class_names: tuple[str, ...]
    tasks: tuple[tuple[int, ...], ...]
    image_shape: tuple[int, int]

    def add_task(self, names: Iterable[str]) -> Self:
        """The same with one more task, of new classes in the order of their names."""
        new = sorted(set(names) - set(self.class_names))
        ids = range(len(self.class_names), len(self.class_names) + len(new))
        return replace(self, class_names=(*self.class_names, *new), tasks=(*self.tasks, tuple(ids)))

    def message(self) -> dict[str, Any]:
        """What travels to the nodes of it, for :meth:`read`."""
        return {"class-names": list(self.class_names), "tasks": json.dumps(self.tasks), "shape": list(self.image_shape)}

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`message`."""
        tasks = tuple(tuple(task) for task in json.loads(str(config["tasks"])))
        return cls(tuple(config["class-names"]), tasks, tuple(config["shape"]))


def first_task_plan(config: Config, names: Iterable[str], image_shape: tuple[int, int]) -> TaskPlan:
    """The plan at the start of a run: class ids follow the names, tasks the run keys class-order and num-tasks.

    Raises:
        ConfigError: more tasks than classes.
    """
    known = tuple(sorted(set(names)))
    if config.class_order == APPEARING:
        return TaskPlan((), (), image_shape).add_task(known)
    try:
        tasks: Sequence[Sequence[int]] = split_tasks(
            class_order(len(known), config.seed, config.class_order), config.num_tasks
        )
    except ValueError as error:
        raise ConfigError(f"{error} that the nodes hold together: {', '.join(known)}.") from error
    return TaskPlan(known, tuple(map(tuple, tasks)), image_shape)
