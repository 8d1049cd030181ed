"""The server half of a method; the base of all is FedAvg."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from task.config.schema import Config
from task.message import Arrays
from task.method_options import Options
from task.models.model import Model
from task.scenario.class_stream import Schedule


@dataclass(frozen=True)
class Update:
    """A client's answer to a train message, after the server has checked it."""

    client: str  # its name
    num_examples: int  # n_m, its training images of this round
    arrays: Arrays  # what it trained; empty in a round without training, and once they are in the mean
    statistics: Arrays  # what it sent beside the arrays, as the method's row in the table says; may be empty
    metrics: Mapping[str, int | float] = field(default_factory=dict)  # loss, accuracy, seconds of the local training


def join_statistics(reports: Iterable[Arrays]) -> Arrays:
    """The statistics of several clients as one report; empty if all of them are.

    >>> join_statistics([{"counts": np.array([3])}, {}, {"counts": np.array([1, 2])}])
    {'counts': array([3, 1, 2])}
    """
    sent = [report for report in reports if report]
    return {name: np.concatenate([report[name] for report in sent]) for name in (sent[0] if sent else ())}


def replace_classes(stored: Arrays, reported: Arrays) -> Arrays:
    """The reported prototypes, and the stored ones of all other classes.

    So a class that no client reports in a round keeps its last prototypes.

    >>> replace_classes({"class_ids": np.array([7, 2, 7])}, {"class_ids": np.array([7, 5])})
    {'class_ids': array([2, 7, 5])}

    Both are class_ids int64 [P] and arrays [P, ...]; ``stored`` may be empty.
    """
    if not stored:
        return reported
    kept = ~np.isin(stored["class_ids"], reported["class_ids"])
    return {name: np.concatenate([stored[name][kept], reported[name]]) for name in reported}


@dataclass(frozen=True)
class RoundContext:
    """Which round of the run this is, and which classes are known in it.

    ``task`` and ``round`` count from 0; ``server_round`` counts from 1 over the whole run. Classes are named by id, in
    stream order: row i of the head belongs to ``seen_classes[i]``.

    >>> context = RoundContext(Schedule([[4, 0], [2]], rounds_per_task=3), server_round=4)
    >>> context.task, context.round
    (1, 0)
    >>> context.old_classes, context.current_classes, context.seen_classes
    ([4, 0], [2], [4, 0, 2])
    """

    schedule: Schedule
    server_round: int

    @property
    def task(self) -> int:
        """The current task."""
        return self.schedule.locate(self.server_round)[0]

    @property
    def round(self) -> int:
        """The round within the task."""
        return self.schedule.locate(self.server_round)[1]

    @property
    def ends_task(self) -> bool:
        """Whether this is the task's last round."""
        return self.schedule.is_last_round(self.server_round)

    @property
    def seen_classes(self) -> list[int]:
        """Classes of this task and all earlier ones."""
        return self.schedule.seen_classes(self.task)

    @property
    def current_classes(self) -> list[int]:
        """Classes that this task brings."""
        return self.schedule.current_classes(self.task)

    @property
    def old_classes(self) -> list[int]:
        """Classes of earlier tasks; the first rows of the head belong to them."""
        return self.schedule.seen_classes(self.task - 1) if self.task else []

    def head_rows(self, class_ids: Tensor) -> Tensor:
        """Head row of each class id, int64 of the shape and on the device of ``class_ids``.

        >>> RoundContext(Schedule([[4, 0], [2]], rounds_per_task=1), server_round=2).head_rows(torch.tensor([2, 4]))
        tensor([2, 0])
        """
        return torch.from_numpy(self.schedule.head_rows).to(class_ids.device)[class_ids]


class Strategy:
    """The weighted mean of the clients' arrays, and no refinement (FedAvg, McMahan et al. 2017; HGP eq. 3).

    theta = sum_m w_m theta_m / sum_m w_m, array by array, over the clients m of a round; w_m is ``weight``.

    A method overrides the hooks it needs, and declares the type of its ``options``. What it remembers from round to
    round lies in attributes. It replaces them and never changes them in place: to undo a failed round, the server puts
    back the attributes from before the round. A checkpoint saves all of them but ``config`` and ``options``.
    """

    options: Options

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options = config.options

    def broadcast(self, context: RoundContext) -> Arrays:
        """Arrays that go to the clients in addition to the model's own."""
        return {}

    def weight(self, update: Update) -> float:
        """How much an update counts in the mean of its round; called before ``refine``, in any order."""
        return self.options.client_weight(update.num_examples)

    def receive(self, model: Model, update: Update, context: RoundContext) -> None:
        """Look at an accepted update while its arrays are still there; called in any order, with the model as sent.

        A method may keep the arrays until ``refine``, and may take large statistics out of the update to free their
        memory. The result must not depend on the order of the calls. An attribute that is changed in place here must
        be created in this round and dropped in ``refine``, or a failed round could not be undone.
        """

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Improve the model in place, without images; it already holds the round's weighted mean.

        The updates come in the order in which the clients were drawn, without their arrays. Returns metrics for the
        results.
        """
        return {}
