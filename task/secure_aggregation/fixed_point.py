"""Real numbers as integers modulo 2^64, whose sums are exact in any order."""

import math

import numpy as np


def fraction_bits(largest: float, clients: int) -> int:
    """b: with steps of 2^-b a sum over ``clients`` of numbers up to ``largest`` cannot overflow.

    The sum stays below 2^62 steps, half of what fits, so rounding cannot reach the limit either.

    >>> fraction_bits(1e9, clients=10)
    28
    """
    return 62 - math.frexp(clients * largest)[1]


def encode(values: np.ndarray, largest: float, clients: int) -> np.ndarray:
    """float64 numbers as uint64, negative ones as 2^64 - |x|; each is rounded by 2^(-b-1) at most.

    Raises:
        ValueError: a number is above ``largest`` in magnitude, infinite or NaN; nothing is ever cut off.
    """
    if not (np.abs(values) <= largest).all():
        raise ValueError(f"a number is not within -{largest:g} .. {largest:g}")
    return np.rint(np.ldexp(values, fraction_bits(largest, clients))).astype(np.int64).view(np.uint64)


def decode(total: np.ndarray, largest: float, clients: int) -> np.ndarray:
    """The numbers, float64, that a sum of encoded ones stands for."""
    return np.ldexp(total.view(np.int64).astype(np.float64), -fraction_bits(largest, clients))
