"""Turns a client's answer into the numbers that it adds to a round's sums, and the sums back into one answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from task.config.schema import Config
from task.message import Packet
from task.methods import load_class
from task.models.model import Model
from task.prototypes.statistics import ClientStatistics, SumFrame

Name = tuple[str, str]  # part of the packet, and name in it
MEASURED = ("loss", "accuracy")


@dataclass(frozen=True)
class SumLayout:
    """The numbers that all clients of a round add up, in one order that client and server both know.

    They are the client's images n_m and its weight w_m, n_m times what its training measured, w_m times its arrays, and
    the sums that its statistics are made of. ``kind`` are the statistics, None in a round without any.
    """

    config: Config
    server_round: int
    frame: SumFrame
    kind: ClientStatistics | None

    @classmethod
    def of(
        cls, config: Config, server_round: int, ends_task: bool, model: Model, classes: Sequence[int]
    ) -> "SumLayout":
        """The sums of a round (counted from 1 in the run) in which clients may learn ``classes``."""
        trained = model.trained_state() if config.trains_in(server_round) else {}
        arrays = {name: tuple(value.shape) for name, value in trained.items()}
        kind = load_class(config.method_row.statistics)()
        frame = SumFrame(tuple(classes), model.head.weight.shape[1], arrays, config.options)
        return cls(config, server_round, frame, kind if kind.due(config, server_round, ends_task) else None)

    @cached_property
    def shapes(self) -> dict[Name, tuple[int, ...]]:
        """Shape of each group of numbers, in the order in which they travel."""
        metrics = ["images", "weight"]
        if self.config.trains_in(self.server_round) and not self.config.privacy_noise:
            metrics += MEASURED
        statistics = self.kind.sums({}, 0, self.frame) if self.kind else {}
        return (
            {("metrics", name): () for name in metrics}
            | {("arrays", name): shape for name, shape in self.frame.arrays.items()}
            | {("statistics", name): array.shape for name, array in statistics.items()}
        )

    @property
    def length(self) -> int:
        """How many numbers travel."""
        return sum(map(math.prod, self.shapes.values()))

    def of_answer(self, answer: Packet) -> np.ndarray:
        """The numbers of a client's plain answer to a train message, float64 [length]; zeros if it has no images."""
        images = int(answer.metrics["num-examples"])
        weight = self.config.options.client_weight(images) if images else 0.0
        sums: dict[Name, object] = {("metrics", "images"): images, ("metrics", "weight"): weight}
        sums |= {("metrics", name): images * float(answer.metrics.get(name, 0.0)) for name in MEASURED}
        sums |= {("arrays", name): weight * array.astype(np.float64) for name, array in answer.arrays.items()}
        statistics = self.kind.sums(answer.statistics, images, self.frame) if self.kind else {}
        sums |= {("statistics", name): array for name, array in statistics.items()}
        groups = [sums.get(name, np.zeros(shape)) for name, shape in self.shapes.items()]
        return np.concatenate([np.ravel(np.asarray(group, np.float64)) for group in groups])

    def to_answer(self, total: np.ndarray) -> Packet:
        """The answer that one client with all the images would give; ``total`` is float64 [length].

        It has ``num-examples`` = 0 and nothing else if no client has images, and -1 if honest clients cannot have sent
        these numbers.
        """
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])[:-1]
        groups = zip(self.shapes.items(), np.split(total, ends), strict=True)
        sums = {name: group.reshape(shape) for (name, shape), group in groups}
        images, weight = round(float(sums["metrics", "images"])), float(sums["metrics", "weight"])
        if images <= 0 or weight <= 0:  # honest clients have both or neither
            return Packet(metrics={"num-examples": 0 if images == weight == 0 else -1})
        answer = Packet(metrics={"num-examples": images})
        answer.metrics |= {
            name: float(sums["metrics", name]) / images for name in MEASURED if ("metrics", name) in sums
        }
        answer.arrays = {name: (sums["arrays", name] / weight).astype(np.float32) for name in self.frame.arrays}
        if self.kind:
            added = {name: array for (part, name), array in sums.items() if part == "statistics"}
            answer.statistics = self.kind.of_sums(added, self.frame)
        return answer
