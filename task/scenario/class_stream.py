"""The class stream: order of the classes, their split into tasks, and which server round belongs to which task."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from task.utils.seeding import numpy_rng


def class_order(num_classes: int, seed: int, kind: str) -> list[int]:
    """Order in which the classes 0 .. num_classes - 1 arrive.

    ``kind`` is "shuffled" (a permutation drawn from the seed) or "given" (the data set's own order).

    Raises:
        ValueError: another kind.
    """
    if kind not in ("shuffled", "given"):
        raise ValueError(f"class-order={kind!r}: allowed are 'shuffled' and 'given'")
    if kind == "given":
        return list(range(num_classes))
    return numpy_rng(seed, "class-order").permutation(num_classes).tolist()


def split_tasks(order: Sequence[int], num_tasks: int) -> list[list[int]]:
    """Cut the class order into consecutive tasks, as evenly as possible; earlier tasks are the larger ones.

    >>> split_tasks([4, 0, 3, 1, 2], 2)
    [[4, 0, 3], [1, 2]]

    Raises:
        ValueError: fewer than one task, or more tasks than classes (every task brings at least one class).
    """
    if not 1 <= num_tasks <= len(order):
        raise ValueError(f"num-tasks={num_tasks}: allowed are 1 to {len(order)}, the number of classes")
    size, larger = divmod(len(order), num_tasks)
    starts = [t * size + min(t, larger) for t in range(num_tasks + 1)]
    return [[int(c) for c in order[a:b]] for a, b in pairwise(starts)]  # also from arrays


def stages(streams: Sequence[Sequence[Sequence[int]]], order: Sequence[int]) -> list[list[int]]:
    """New classes of each stage of an asynchronous run: those that no client has had before.

    >>> stages([[[0, 1], [2], [3]], [[1], [3, 0], [2]]], [3, 2, 1, 0])
    [[1, 0], [3, 2], []]

    ``streams`` are class ids by client and task, T tasks each; the classes of a stage are sorted by ``order``. Of the T
    lists all but the first may be empty.
    """
    first_stage: dict[int, int] = {}
    for stage, classes_by_client in enumerate(zip(*streams, strict=True)):
        for c in chain.from_iterable(classes_by_client):
            first_stage.setdefault(c, stage)
    return [[c for c in order if first_stage.get(c) == stage] for stage in range(len(streams[0]))]


@dataclass(frozen=True)
class Schedule:
    """Which round belongs to which task, and which classes each task brings.

    ``server_round`` counts from 1 over the whole run, as Flower does; ``task`` and the round within a task count from
    0. In an asynchronous run a task is the new classes of a stage, see ``stages``.

    ``tasks`` are the class ids of each task, no class twice; a task may be empty. Each has R = ``rounds_per_task``, and
    the first task ``adaptation_rounds`` more, which come first.

    >>> schedule = Schedule([[4, 0], [2]], rounds_per_task=1, adaptation_rounds=2)
    >>> [schedule.locate(server_round) for server_round in (1, 2, 3, 4)]
    [(0, 0), (0, 1), (0, 2), (1, 0)]
    """

    tasks: Sequence[Sequence[int]]
    rounds_per_task: int
    adaptation_rounds: int = 0

    @property
    def num_tasks(self) -> int:
        """Number of tasks T."""
        return len(self.tasks)

    @property
    def total_rounds(self) -> int:
        """Number of rounds of the run, T x R and those of adaptation; also the last valid ``server_round``."""
        return self.adaptation_rounds + self.num_tasks * self.rounds_per_task

    def locate(self, server_round: int) -> tuple[int, int]:
        """(task, round within the task) of a server round."""
        task = max(server_round - 1 - self.adaptation_rounds, 0) // self.rounds_per_task
        first = task * self.rounds_per_task + (self.adaptation_rounds if task else 0)
        return task, server_round - 1 - first

    def rounds_of(self, task: int) -> int:
        """Number of rounds of a task."""
        return self.rounds_per_task + (0 if task else self.adaptation_rounds)

    def is_last_round(self, server_round: int) -> bool:
        """Whether a task ends with this server round."""
        task, round = self.locate(server_round)
        return round == self.rounds_of(task) - 1

    def current_classes(self, task: int) -> list[int]:
        """C^t: the class ids that the task brings, in stream order."""
        return list(self.tasks[task])

    def seen_classes(self, task: int) -> list[int]:
        """C^{1:t}: the class ids of this task and all earlier ones, in stream order; row i of the head is entry i."""
        return [c for classes in self.tasks[: task + 1] for c in classes]

    @cached_property
    def head_rows(self) -> np.ndarray:
        """Head row of each class id, int64 [largest id + 1]; -1 for an id that no task brings.

        >>> Schedule([[4, 0], [2]], rounds_per_task=1).head_rows.tolist()
        [1, -1, 2, -1, 0]
        """
        classes = np.array(self.seen_classes(self.num_tasks - 1), np.int64)
        rows = np.full(classes.max(initial=-1) + 1, -1)
        rows[classes] = np.arange(len(classes))
        return rows
