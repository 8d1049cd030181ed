"""The weighted mean of trained arrays, the same in whatever order they come."""

import math

import numpy as np

from task.message import Arrays

BLOCK = 2**16  # numbers that are summed at once, so that what is needed meanwhile stays in the processor's cache


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
