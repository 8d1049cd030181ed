"""The server half of a method; the base of all is FedAvg."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from task.config.schema import Config
from task.message import Arrays
from task.models.model import Model
from task.scenario.class_stream import Schedule


@dataclass(frozen=True)
class Update:
    """A client's checked answer: n_m training images, trained arrays (none if nothing trains), statistics, metrics.

    Once they are averaged, the arrays are let go.
    """

    client: str
    num_examples: int
    arrays: Arrays
    prototypes: Arrays
    metrics: Mapping[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """Where in the run a round is; ``task`` and ``round`` count from 0, ``server_round`` from 1 over the whole run."""

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


class Strategy:
    """Sample-weighted averaging and no refinement (FedAvg; HGP eq. 3).

    A method overrides the hooks it needs. It may keep what it knows in attributes, which it replaces and never edits in
    place: a round that fails is undone by putting back those from before its first answer.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def broadcast(self, moment: Moment) -> Arrays:
        """Arrays that go to the clients beside the model's."""
        return {}

    def weight(self, update: Update) -> float:
        """How much an update counts in the mean of its round; asked as it comes, in any order."""
        return update.num_examples

    def receive(self, model: Model, update: Update, moment: Moment) -> None:
        """Look at an accepted update as it comes, in any order, while its arrays are there.

        What the method keeps of them is its own, to be let go in ``refine``; statistics that it takes out of the update
        are let go too. Whatever comes of it must not depend on the order. What is added to in place begins and ends in
        one round, or a round that fails could not be undone.

        Args:
            model: the global one, as it was sent.
            update: of a client that has trained.
            moment: where in the run this is.
        """

    def refine(self, model: Model, updates: Sequence[Update], moment: Moment) -> dict[str, float]:
        """Improve the model, which holds the weighted mean by now, in place and without images.

        Args:
            model: the global one.
            updates: this round's, in the order in which the clients were drawn, without their arrays.
            moment: where in the run this is.

        Returns:
            metrics for the results.
        """
        return {}
