"""The weighted mean of trained arrays; the order in which they come changes no bit of it."""

import math

import numpy as np

from task.message import Arrays

BLOCK = 2**16  # numbers that are summed at once: what they need in between stays in the processor's cache


class WeightedMean:
    """sum_m w_m theta_m / sum_m w_m of dicts of float32 arrays, which are added one by one and not kept.

    Each sum is a pair of float64 arrays: the sum, and what rounding has taken from it (Knuth's TwoSum). The pair is
    exact to about 100 bits of the largest intermediate sum. So the float32 mean does not depend on the order of the
    clients, and a number that is equal at all clients stays as it is, bit for bit.

    >>> mean = WeightedMean()
    >>> mean.add({"w": np.array([1.0, 4.0], np.float32)}, weight=1)
    >>> mean.add({"w": np.array([4.0, 4.0], np.float32)}, weight=2)
    >>> mean.arrays()["w"].tolist()
    [3.0, 4.0]
    """

    def __init__(self) -> None:
        self._weights: list[float] = []
        self._sums: dict[str, np.ndarray] = {}  # float64 [2, *shape]

    @property
    def total(self) -> float:
        """Sum of the weights so far, the same in any order."""
        return math.fsum(self._weights)

    def add(self, arrays: Arrays, weight: float) -> None:
        """Add one dict, of the same names and shapes as all others; ``weight`` is not negative."""
        self._weights.append(weight)
        for name, array in arrays.items():
            if name not in self._sums:
                self._sums[name] = np.zeros((2, *array.shape))
            flat, pair = array.ravel(), self._sums[name].reshape(2, -1)
            for start in range(0, flat.size, BLOCK):
                part = slice(start, start + BLOCK)
                _add_exactly(pair[:, part], weight * flat[part].astype(np.float64))

    def arrays(self) -> Arrays:
        """The mean as float32; the weights must sum to more than 0."""
        total = self.total
        return {name: (pair.sum(axis=0) / total).astype(np.float32) for name, pair in self._sums.items()}


def _add_exactly(pair: np.ndarray, term: np.ndarray) -> None:
    total = pair[0] + term
    added = total - pair[0]
    pair[1] += (pair[0] - (total - added)) + (term - added)
    pair[0] = total
