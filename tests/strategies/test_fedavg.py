"""The weighted mean that every method starts from, and what a client weighs in it."""

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest

from strategies.averaging import BLOCK, WeightedMean
from strategies.base import Strategy, Update
from task.config.parsing import parse
from task.message import Arrays


def mean_of(arrays: list[Arrays], weights: Iterable[float]) -> Arrays:
    mean = WeightedMean()
    for one, weight in zip(arrays, weights, strict=True):
        mean.add(one, weight)
    return mean.arrays()


def test_weighted_mean_by_hand():
    """(1 * [1, 2] + 3 * [5, -2]) / 4 = [4, -1] and (1 * 8 + 3 * 0) / 4 = 2 (eq. 3)."""
    arrays = [
        {"a": np.array([[1, 2]], np.float32), "b": np.array(8, np.float32)},
        {"a": np.array([[5, -2]], np.float32), "b": np.array(0, np.float32)},
    ]
    mean = mean_of(arrays, [1.0, 3.0])
    assert {n: a.tolist() for n, a in mean.items()} == {"a": [[4, -1]], "b": 2}
    assert {a.dtype for a in mean.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(("mean", "expected"), [("images", 2.5), ("plain", 2.0)])
def test_fedavg_weighs_by_images_or_not_at_all(mean, expected, tiny):
    """Head rows of 1 and 3, from 10 and 30 images."""
    config = parse(tiny | {"method": "fedavg", "prompt": "none", "fedavg-mean": mean})
    server = Strategy(config)
    updates = [Update(str(n), n, {"head": np.float32([value])}, {}) for n, value in ((10, 1.0), (30, 3.0))]
    assert mean_of([u.arrays for u in updates], map(server.weight, updates))["head"] == expected


def test_weighted_mean_leaves_equal_arrays_alone_bit_for_bit():
    """Shares such as 1/3 do not sum to 1 exactly; every float32, large, small or subnormal, must come out as it was.

    There are more of them than are summed at once.
    """
    rng = np.random.default_rng(0)
    number = BLOCK + 5000
    array = np.exp(rng.uniform(-100, 88, number)) * rng.choice([-1, 1], number)
    array = array.astype(np.float32)
    array[:4] = np.finfo(np.float32).max, np.finfo(np.float32).tiny, np.finfo(np.float32).smallest_subnormal, 0
    for weights in ([1, 1, 1], [3, 7, 11], rng.integers(1, 900, 49), [1e-3, 0, 1e9]):
        mean = mean_of([{"a": array.copy()} for _ in weights], np.array(weights, np.float64))["a"]
        assert np.array_equal(mean.view(np.int32), array.view(np.int32))


def test_the_weighted_mean_knows_no_order():
    """Numbers of all sizes that nearly cancel; the exact mean by fractions, rounded once, and any order of adding."""
    rng = np.random.default_rng(1)
    arrays = (np.exp(rng.uniform(-12, 12, (40, 300))) * rng.choice([-1, 1], (40, 300))).astype(np.float32)
    arrays[1::2], arrays[-1], arrays[-2] = -arrays[::2], rng.normal(0, 1e-6, 300), 0
    weights = rng.integers(1, 900, 20).repeat(2)
    exact = [sum(map(Fraction, map(float, column * weights.astype(float)))) / int(weights.sum()) for column in arrays.T]
    for order in (np.arange(40), np.arange(40)[::-1], rng.permutation(40)):
        mean = mean_of([{"a": arrays[i]} for i in order], weights[order])["a"]
        assert mean.tolist() == [np.float32(float(e)) for e in exact]
