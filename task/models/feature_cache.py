"""A cache of queries q(x) of images without augmentation, in each process.

q(x) depends on the image and the frozen backbone only, so test images, statistics and training without augmentation
need it once per run. Its last bits depend on the batch in which it is computed. Therefore whole batches are cached, and
callers ask for the same batches again: results do not depend on what is in the cache.
"""

import hashlib
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from task.data.images import Images
from task.models.model import Model
from task.models.preprocessing import prepare
from task.models.vit import Backbone

BATCH = 256  # images of one pass without gradient
CACHE_BYTES = 2**28  # of cached queries in a process: 87,000 queries at D = 768


class Inputs(NamedTuple):
    """Prepared images [B, 3, H, W], empty if the features are the query, and q(x) [B, D] if it is known."""

    images: Tensor
    query: Tensor | None = None


@dataclass(frozen=True)
class CachedBatch:
    """Queries of one batch, and the objects they belong to: Python may give the id of a deleted object to another."""

    images: weakref.ref[Images]
    backbone: weakref.ref[Backbone]
    query: Tensor


class QueryCache:
    """The queries that were used last, at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._batches: OrderedDict[tuple[int, int, str, bytes], CachedBatch] = OrderedDict()

    def query(self, model: Model, images: Images, positions: np.ndarray) -> Tensor:
        """q(x) of the images at ``positions``, int64 [B] -> [B, D] on the model's device; read only."""
        digest = hashlib.sha256(positions.tobytes()).digest()
        key = (id(images), id(model.backbone), model.precision, digest)
        batch = self._pop(key)
        if not batch or batch.images() is not images or batch.backbone() is not model.backbone:
            query = model.query(prepare(images[positions], model.backbone))
            batch = CachedBatch(weakref.ref(images), weakref.ref(model.backbone), query)
        self._batches[key] = batch
        self.size += batch.query.nbytes
        while self.size > self.limit:
            self._pop(next(iter(self._batches)))
        return batch.query

    def _pop(self, key: tuple[int, int, str, bytes]) -> CachedBatch | None:
        batch = self._batches.pop(key, None)
        self.size -= batch.query.nbytes if batch else 0
        return batch


CACHE = QueryCache(CACHE_BYTES)


@torch.no_grad()
def cached_query(model: Model, images: Images, positions: np.ndarray) -> Tensor | None:
    """q(x) of the images at ``positions`` without augmentation, int64 [N] -> [N, D]; None if the model needs none.

    Equal positions give equal bits.
    """
    if not model.reuses_query or not len(positions):
        return None
    batches = [positions[start : start + BATCH] for start in range(0, len(positions), BATCH)]
    return torch.cat([CACHE.query(model, images, batch) for batch in batches])


def load_inputs(
    model: Model,
    images: Images,
    positions: np.ndarray,
    query: Tensor | None,
    augmentation: str = "none",
    rng: torch.Generator | None = None,
) -> Inputs:
    """Inputs of the images at ``positions``; the images are not read if the model needs their query only.

    ``positions`` int64 [B]; ``query`` is their q(x) [B, D] if known, None for augmented images. ``augmentation`` and
    ``rng`` as in :func:`task.models.preprocessing.prepare`.
    """
    if query is not None and not model.prompted:
        return Inputs(torch.empty(0), query)
    return Inputs(prepare(images[positions], model.backbone, augmentation, rng), query)
