"""Queries q(x): computed once per image in each process, and reused wherever the image is not augmented.

q(x) depends on the image, its plain transform and the frozen backbone alone: test images, statistics and training
without augmentation need it once per run. Its last bits depend on the batch that it was computed in, so what is kept
are whole batches, and the same images are always asked for in the same ones: results do not depend on what a process
happened to have at hand.
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
CACHE_BYTES = 2**28  # queries kept by a process: 87,000 at D = 768


class Inputs(NamedTuple):
    """What a forward pass starts from.

    Attributes:
        images: prepared, [B, 3, H, W]; empty where the features are the query.
        query: q(x) [B, D] where it is known already.
    """

    images: Tensor
    query: Tensor | None = None


@dataclass(frozen=True)
class CachedBatch:
    """Queries of one batch, and whose they are: an id alone may belong to another object by now."""

    images: weakref.ref[Images]
    backbone: weakref.ref[Backbone]
    query: Tensor


class QueryCache:
    """The queries used last, up to ``limit`` bytes of them."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._kept: OrderedDict[tuple[int, int, str, bytes], CachedBatch] = OrderedDict()

    def query(self, model: Model, images: Images, positions: np.ndarray) -> Tensor:
        """q(x) of the images at ``positions``, int64 [B] -> [B, D] on the model's device; not to be written to."""
        digest = hashlib.sha256(positions.tobytes()).digest()
        key = (id(images), id(model.backbone), model.precision, digest)
        kept = self._take(key)
        if not kept or kept.images() is not images or kept.backbone() is not model.backbone:
            query = model.query(prepare(images[positions], model.backbone))
            kept = CachedBatch(weakref.ref(images), weakref.ref(model.backbone), query)
        self._kept[key] = kept
        self.size += kept.query.nbytes
        while self.size > self.limit:
            self._take(next(iter(self._kept)))
        return kept.query

    def _take(self, key: tuple[int, int, str, bytes]) -> CachedBatch | None:
        kept = self._kept.pop(key, None)
        self.size -= kept.query.nbytes if kept else 0
        return kept


CACHE = QueryCache(CACHE_BYTES)


@torch.no_grad()
def cached_query(model: Model, images: Images, positions: np.ndarray) -> Tensor | None:
    """q(x) of the images at ``positions`` without augmentation, int64 [N] -> [N, D]; None where it would save nothing.

    Equal positions give equal bits, whatever has been asked for before.
    """
    if not model.reuses_query or not len(positions):
        return None
    batches = [positions[start : start + BATCH] for start in range(0, len(positions), BATCH)]
    return torch.cat([CACHE.query(model, images, some) for some in batches])


def load_inputs(
    model: Model,
    images: Images,
    positions: np.ndarray,
    query: Tensor | None,
    augmentation: str = "none",
    rng: torch.Generator | None = None,
) -> Inputs:
    """Inputs of the images at ``positions`` [B], which are not even read where their query says all.

    Args:
        model: takes the inputs.
        images: source of the images.
        positions: int64 [B].
        query: theirs, [B, D], if known; must be None for augmented images.
        augmentation: as in :func:`task.models.preprocessing.prepare`.
        rng: likewise.
    """
    if query is not None and not model.prompted:
        return Inputs(torch.empty(0), query)
    return Inputs(prepare(images[positions], model.backbone, augmentation, rng), query)
