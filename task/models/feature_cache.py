"""Features of images without augmentation, computed once: per process in memory, queries also for all runs on disk.

q(x) depends on the image and the frozen backbone only, so test images, statistics and training without augmentation
need it once. Its last bits depend on the batch in which it is computed. In memory, therefore, whole batches are cached,
and callers ask for the same batches again. On disk are the queries of all images of a data set, computed in the order
of the images, BATCH at once; a run that uses the disk takes every query from there, also the run that computes them.
So results do not depend on what is cached. Beside the last feature, two mean patch tokens of earlier blocks are stored:
they cost no further pass, and FedRDA with prompt=none reads all three. Models that read other features have a file of
their own. Where a prompt learns in the first task only, f(x) of test images is kept in memory too.
"""

import hashlib
import logging
import platform
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from task.data.images import Dataset, ImageFiles, Images, resolve_source
from task.method_options import FedRDAOptions
from task.models.feature_store import is_stored, stored_features
from task.models.linear import is_amd
from task.models.model import Model, early_features, to_arrays
from task.models.preprocessing import prepare
from task.models.vit import Backbone, Early
from task.utils.versions import package_version

log = logging.getLogger(__name__)

BATCH = 64  # images of one pass without gradient; of more, the activations leave the cache of a processor
CACHE_BYTES = 2**28  # of cached queries in a process: 87,000 queries at D = 768
WORTH_STORING = 1000  # images of a data set: the queries of fewer are computed in seconds
# shares of the blocks after which the mean patch token is stored too, as FedRDA reads it
EARLY_DEPTHS = (FedRDAOptions.depth, FedRDAOptions.frozen_depth)
PROGRESS = 10.0  # seconds between two lines in the log
# a change of one of these files may change q(x)
CODE = ("models/preprocessing.py", "models/vit.py", "models/linear.py", "data/images.py")

BatchKey = tuple[int, int, str, tuple[Early, ...], bytes]  # ids, precision, parts of q(x), positions and prompt


class Inputs(NamedTuple):
    """Prepared images [B, 3, H, W], empty if the features are q(x), and q(x) [B, D * query_parts] if it is known."""

    images: Tensor
    query: Tensor | None = None


@dataclass(frozen=True)
class CachedBatch:
    """Features of a batch or of all images, and the images and the backbone that they belong to.

    The cache finds them by the objects' ids. A new object may get the id of a deleted one, so the objects are compared
    too.
    """

    images: weakref.ref[Images]
    backbone: weakref.ref[Backbone]
    features: Tensor

    def belongs_to(self, images: Images, backbone: Backbone) -> bool:
        """Whether they are features of these images by this backbone."""
        return self.images() is images and self.backbone() is backbone


class BatchCache:
    """Features of the batches that were used last, at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._batches: dict[BatchKey, CachedBatch] = {}  # the last used at the end

    def get(
        self, model: Model, images: Images, positions: np.ndarray, compute: Callable[[], Tensor], prompt: bytes = b""
    ) -> Tensor:
        """What ``compute`` gives for the images at ``positions``, int64 [B] -> [B, width]; read only.

        ``prompt`` is a digest of the prompt, where the features depend on it.
        """
        digest = hashlib.sha256(positions.tobytes()).digest() + prompt
        key = (id(images), id(model.backbone), model.precision, model.query_parts, digest)
        batch = self._pop(key)
        if not batch or not batch.belongs_to(images, model.backbone):
            batch = CachedBatch(weakref.ref(images), weakref.ref(model.backbone), compute())
        self._batches[key] = batch
        self.size += batch.features.nbytes
        while self.size > self.limit:
            self._pop(next(iter(self._batches)))
        return batch.features

    def _pop(self, key: BatchKey) -> CachedBatch | None:
        batch = self._batches.pop(key, None)
        self.size -= batch.features.nbytes if batch else 0
        return batch


CACHE = BatchCache(CACHE_BYTES)
# of data sets that are stored on disk: their features, and which parts of q(x) these are
_TABLES: dict[tuple[int, int, str, tuple[Early, ...], int], tuple[CachedBatch, tuple[Early, ...]]] = {}


@torch.no_grad()
def cached_query(model: Model, images: Images, positions: np.ndarray) -> Tensor | None:
    """q(x) of images without augmentation, ``positions`` int64 [N] -> [N, D * query_parts]; None if nothing reads it.

    Equal positions give equal bits.

    Raises:
        ConfigError: the queries are to be stored on disk and cannot be.
    """
    if not model.reuses_query or not len(positions):
        return None
    source, of_source = resolve_source(images, positions)
    if _kept_on_disk(model, source):
        table, stored = _table(model, source)
        read = [stored.index(part) for part in model.query_parts]
        parts = table.unflatten(1, (-1, model.backbone.dim))
        return parts[torch.from_numpy(of_source)[:, None], read].flatten(1).to(model.device)
    return torch.cat([_query(model, images, batch) for batch in batches(positions)])


def _query(model: Model, images: Images, batch: np.ndarray) -> Tensor:
    return CACHE.get(model, images, batch, lambda: model.query(prepare(images[batch], model.backbone)))


@torch.no_grad()
def adapted_features(model: Model, images: Images, batch: np.ndarray) -> Tensor:
    """f(x) of a batch without augmentation, for a model that :attr:`~task.models.model.Model.adapts`: [B, width]."""
    arrays = to_arrays(model.prompt.state_dict())
    shapes = [array.shape for array in arrays.values()]
    kind = repr((type(model.prompt), shapes, model.prompt.blocks, model.projects, model.early, model.unprompted))
    prompt = hashlib.sha256(kind.encode() + b"".join(array.tobytes() for array in arrays.values())).digest()

    def compute() -> Tensor:
        return model.features(*cached_inputs(model, images, batch))

    return CACHE.get(model, images, batch, compute, prompt)


def cached_inputs(model: Model, images: Images, batch: np.ndarray) -> Inputs:
    """What the model needs of a batch without augmentation; its query is taken from the cache."""
    return load_inputs(model, images, batch, cached_query(model, images, batch))


def batches(positions: np.ndarray) -> list[np.ndarray]:
    """``positions``, int64 [N], in parts of BATCH, the last one smaller."""
    return [positions[start : start + BATCH] for start in range(0, len(positions), BATCH)]


def store_queries(model: Model, dataset: Dataset) -> bool:
    """Compute and store what is not on disk yet of the queries that a model reuses; returns whether any lie there.

    Raises:
        ConfigError: they cannot be stored.
    """
    parts = [resolve_source(images, np.empty(0, np.int64))[0] for images in (dataset.train_images, dataset.test_images)]
    stored = [images for images in parts if _kept_on_disk(model, images)]
    for images in stored:
        _table(model, images)
    return bool(stored)


def _kept_on_disk(model: Model, source: Images) -> bool:
    """Whether the queries of these images are kept on disk: the run allows it, and there are enough images."""
    return bool(model.stored_as) and len(source) >= WORTH_STORING


def _stored_parts(model: Model, identity: dict[str, str]) -> tuple[Early, ...]:
    """The features that are stored: one file for all models that read no others than the last and those beside it.

    A model that does not read the last one needs less than a whole pass. It has a file of its own if the shared file is
    not there.
    """
    last, parts = model.backbone.last, model.query_parts
    shared = (last, *early_features(EARLY_DEPTHS, True, model.backbone))
    fits = set(parts) <= set(shared)
    return shared if fits and (last in parts or is_stored(identity | _features(shared))) else parts


def _features(parts: tuple[Early, ...]) -> dict[str, str]:
    return {"features": str([tuple(feature) for feature in parts])}


def _table(model: Model, source: Images) -> tuple[Tensor, tuple[Early, ...]]:
    """What is stored of all images, memory-mapped [N, D * parts] on the CPU, and these parts."""
    key = (id(source), id(model.backbone), model.precision, model.query_parts, torch.get_num_threads())
    table, parts = _TABLES.get(key, (None, ()))
    if not table or not table.belongs_to(source, model.backbone):
        for other in [other for other, (known, _) in _TABLES.items() if known.images() is None]:
            del _TABLES[other]  # its file stays mapped, and on the disk, until then
        identity = _identity(model, source)
        parts = _stored_parts(model, identity)
        blocks = ", ".join(f"{part.block + 1}{' (patches)' * part.patches}" for part in parts)
        about = {"belongs-to": model.stored_as, "number": str(len(source)), "blocks": blocks}
        shape = (len(source), model.backbone.dim * len(parts))
        identity |= _features(parts)
        features = stored_features(identity, about, shape, lambda: _compute_all(model, source, parts))
        table = CachedBatch(weakref.ref(source), weakref.ref(model.backbone), features)
        _TABLES[key] = table, parts
    return table.features, parts


def _identity(model: Model, source: Images) -> dict[str, str]:
    """All values that the bits of stored queries depend on, beside which parts they are."""
    backbone = model.backbone
    normalisation = [backbone.mean.flatten().tolist(), backbone.std.flatten().tolist()]
    instructions = torch.backends.cpu.get_cpu_capability() + " AMD" * is_amd()  # torch names both makers' alike
    processor = f"{platform.machine()} {instructions}, threads={torch.get_num_threads()}"
    code = b"".join((Path(__file__).parents[1] / name).read_bytes() for name in CODE)
    return {
        "images": image_digest(source),
        "backbone": model.backbone_name,
        "backbone-sha256": backbone.sha256,  # of the weights: two architectures may have the same
        "image-size": str(backbone.image_size),
        "normalisation": str(normalisation),
        "precision": model.precision,
        "batch": str(BATCH),
        "processor": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else processor,
        "versions": " ".join(f"{name} {package_version(name)}" for name in ("torch", "timm", "pillow")),
        "code": hashlib.sha256(code).hexdigest(),
    }


def image_digest(images: Images) -> str:
    """SHA-256 of all pixels. For images that are read from files on access: of the files' paths, sizes and times."""
    total = hashlib.sha256()
    if isinstance(images, ImageFiles | np.memmap):
        paths = list(images.paths) if isinstance(images, ImageFiles) else [str(images.filename)]
        reading = (images.side, images.max_pixels) if isinstance(images, ImageFiles) else 0
        stats = ((path, Path(path).stat()) for path in paths)
        total.update(repr((reading, [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])).encode())
        return total.hexdigest()
    for batch in batches(np.arange(len(images))):
        pixels = images[batch]
        total.update(f"{pixels.shape}".encode() + pixels.tobytes())
    return total.hexdigest()


@torch.no_grad()
def _compute_all(model: Model, source: Images, parts: tuple[Early, ...]) -> Tensor:
    """These ``parts`` of q(x) of all images, in batches of BATCH, float32 [N, D * parts]; logs how far it is."""
    table = torch.empty(len(source), model.backbone.dim * len(parts))
    log.info("features of %d images are computed once, for all runs on %s", len(source), model.stored_as)
    logged = started = time.monotonic()
    for batch in batches(np.arange(len(source))):
        table[batch] = model.query(prepare(source[batch], model.backbone), parts).cpu()
        if time.monotonic() > logged + PROGRESS:
            logged = time.monotonic()
            log.info("features of %d images: %d done after %.0f s", len(source), batch[-1] + 1, logged - started)
    return table


def load_inputs(
    model: Model,
    images: Images,
    positions: np.ndarray,
    query: Tensor | None,
    augmentation: str = "none",
    rng: torch.Generator | None = None,
) -> Inputs:
    """Inputs of the images at ``positions``; the images are not read if the model needs their query only.

    ``positions`` int64 [B]; ``query`` is their q(x) [B, D * query_parts] if known, None for augmented images.
    ``augmentation`` and ``rng`` as in :func:`task.models.preprocessing.prepare`.
    """
    if query is not None and not model.prompted:
        return Inputs(torch.empty(0), query)
    return Inputs(prepare(images[positions], model.backbone, augmentation, rng), query)
