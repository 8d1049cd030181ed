"""The classes and tasks of a run whose nodes have their own images, made by the server from their answers to hello."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from task.config.schema import APPEARING, Config
from task.data.class_names import choose_spellings, normal_form
from task.keys import ConfigError
from task.scenario.class_stream import class_order, split_tasks


@dataclass(frozen=True)
class TaskPlan:
    """Class ids and tasks, the same for all nodes.

    Attributes:
        class_names: by class id; an id never changes, new classes are added at the end.
        tasks: class ids of each task.
        image_shape: height and width in pixels of the nodes' images, before they are resized for the backbone.
    """

    class_names: tuple[str, ...]
    tasks: tuple[tuple[int, ...], ...]
    image_shape: tuple[int, int]

    def add_task(self, names: Iterable[str]) -> Self:
        """The plan with one more task, of new classes in the order of their names; ``names`` of all nodes together."""
        known_forms = set(map(normal_form, self.class_names))
        new = sorted(name for form, name in choose_spellings(names).items() if form not in known_forms)
        ids = range(len(self.class_names), len(self.class_names) + len(new))
        return replace(self, class_names=(*self.class_names, *new), tasks=(*self.tasks, tuple(ids)))

    def message(self) -> dict[str, Any]:
        """Config entries of the message to the nodes; :meth:`read` is the inverse."""
        return {"class-names": list(self.class_names), "tasks": json.dumps(self.tasks), "shape": list(self.image_shape)}

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`message`."""
        tasks = tuple(tuple(task) for task in json.loads(str(config["tasks"])))
        return cls(tuple(config["class-names"]), tasks, tuple(config["shape"]))


def first_task_plan(config: Config, names: Iterable[str], image_shape: tuple[int, int]) -> TaskPlan:
    """The plan at the start of a run: class ids follow the sorted names, tasks follow class-order and num-tasks.

    ``names`` are the class names of all nodes together, ``image_shape`` is height and width in pixels.

    Raises:
        ConfigError: more tasks than classes.
    """
    class_names = tuple(sorted(choose_spellings(names).values()))
    if config.class_order == APPEARING:
        return TaskPlan((), (), image_shape).add_task(class_names)
    order = class_order(len(class_names), config.seed, config.class_order)
    try:
        tasks = split_tasks(order, config.num_tasks)
    except ValueError as error:
        raise ConfigError(f"{error} that the nodes hold together: {', '.join(class_names)}.") from error
    return TaskPlan(class_names, tuple(map(tuple, tasks)), image_shape)
