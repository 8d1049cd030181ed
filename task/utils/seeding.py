"""Independent random streams from the run's one seed, one stream per purpose.

Class order, partition, initialisation, client sampling and so on each draw from their own stream. So one more draw in
one place changes nothing elsewhere, and two methods with the same seed have the same class order, data and clients.
"""

import hashlib
import json
import operator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def numpy_rng(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """NumPy generator of the stream (seed, purpose, indices).

    The stream depends on nothing else: equal arguments give an equal stream in every process and Python version, and
    any difference in any argument gives an independent one.

    Args:
        seed: the run's seed.
        purpose: what is drawn, for example "class-order".
        indices: integers of any size, for example task, round, client; (1,) and (1, 0) differ.
    """
    # PCG64 by name: what default_rng() stands for may change between NumPy releases.
    return np.random.Generator(np.random.PCG64(_stream_key(seed, purpose, indices)))


def torch_rng(seed: int, purpose: str, *indices: int, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """Generator of torch on ``device`` for the stream (seed, purpose, indices); arguments as ``numpy_rng``.

    Draws on a GPU differ from those on the CPU.
    """
    import torch  # here: a client with nothing to train needs NumPy's streams only

    # The high bits: torch's generators take 64 bits at most.
    return torch.Generator(device).manual_seed(_stream_key(seed, purpose, indices) >> 192)


def _stream_key(seed: int, purpose: str, indices: tuple[int, ...]) -> int:
    # Hashed as one text: SeedSequence([seed, *indices]) would pad with zeros, so that (1,) and (1, 0) would collide,
    # and split integers into 32-bit words, so that (2**32,) and (0, 1) would.
    text = json.dumps([operator.index(seed), purpose, *map(operator.index, indices)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
