"""The server half of a method; the base of all is FedAvg."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from task.config import Config
from task.model import Model
from task.packet import Arrays
from task.stream import Schedule

BLOCK = 2**16  # numbers that are summed at once, so that what is needed meanwhile stays in the processor's cache


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


class WeightedMean:
    """sum_m w_m theta_m / sum_m w_m of dicts of float32 arrays, which come one by one and are not kept.

    Each sum is a pair of float64 arrays, what rounding takes from the first being added to the second (Knuth's
    TwoSum). That is exact to some 100 bits of the largest sum on the way, so that in float32 the mean is the same in
    whatever order they come, and what is equal everywhere stays so bit for bit.
    """

    def __init__(self) -> None:
        self._weights: list[float] = []
        self._sums: dict[str, np.ndarray] = {}  # float64 [2, numbers]
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def total(self) -> float:
        """Sum of the weights so far, in no order either."""
        return math.fsum(self._weights)

    def add(self, arrays: Arrays, weight: float) -> None:
        """Take in one dict, of the same names and shapes as all others; ``weight`` is not negative."""
        self._weights.append(weight)
        for name, array in arrays.items():
            self._shapes[name], flat = array.shape, array.ravel()
            if name not in self._sums:
                self._sums[name] = np.zeros((2, flat.size))
            pair = self._sums[name]
            for start in range(0, flat.size, BLOCK):
                part = slice(start, start + BLOCK)
                _add_exactly(pair[:, part], weight * flat[part].astype(np.float64))

    def arrays(self) -> Arrays:
        """The mean as float32, if the weights sum to more than 0."""
        total = self.total
        return {
            name: (pair.sum(axis=0) / total).astype(np.float32).reshape(self._shapes[name])
            for name, pair in self._sums.items()
        }


def _add_exactly(pair: np.ndarray, term: np.ndarray) -> None:
    high = pair[0] + term
    kept = high - pair[0]
    pair[1] += (pair[0] - (high - kept)) + (term - kept)
    pair[0] = high
