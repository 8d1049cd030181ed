"""The model that clients train: a backbone, a prompt and a linear head with one row per seen class."""

import copy
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from task.config.schema import FROM_PATH, Config
from task.keys import AUTO, ConfigError
from task.message import Arrays
from task.method_options import PATCHES
from task.methods import load_class
from task.models.head import Head, QuadraticHead
from task.models.load import configured_backbone
from task.models.vit import Backbone, Early
from task.models.weights import find_misfits
from task.prompt_kinds import PROMPTS
from task.prompts.base import Prompt

P = TypeVar("P", bound=Prompt)


class Model(nn.Module):
    """Class-incremental model. Rows of the head follow the class order of the run, task by task.

    Args:
        backbone: shared by all models of the process; frozen.
        prompt: makes prefixes or prompt tokens of queries.
        head: classifier of features [B, width].
        precision: fp32 or bf16, of the backbone's arithmetic.
        early: what of blocks before the last is a part of the features too.
        local_head: classifier of features [B, D] for clients that train the prompt in the first task only.
        unprompted: a feature without the prompt, put behind the others; ``backbone.last`` is the backbone's own.
        trains_backbone: train, and send, a copy of the backbone.
        projects: whether the backbone projects prefixes as it does tokens.
        freezes_features: from the second task on only the head learns and is sent back (FedProK section 5.1).
    """

    def __init__(
        self,
        backbone: Backbone,
        prompt: Prompt,
        head: Head,
        precision: str,
        early: Sequence[Early] = (),
        local_head: Head | None = None,
        unprompted: Early | None = None,
        trains_backbone: bool = False,
        projects: bool = False,
        freezes_features: bool = False,
    ) -> None:
        super().__init__()
        self.freezes_features = freezes_features
        self._shared = [backbone]  # in a list, so that it is no sub-module: all models of the process share it
        self.trained_backbone = copy.deepcopy(backbone).requires_grad_(True) if trains_backbone else None
        self.prompt, self.head = prompt, head
        self.local_head = local_head
        self.early = tuple(early)
        self.unprompted = unprompted
        self.task_sizes: list[int] = []
        self._rows: Tensor
        self.register_buffer("_rows", torch.empty(0, dtype=torch.int64), persistent=False)
        self.precision, self.projects = precision, projects
        self.backbone_name = ""  # of its architecture
        self.stored_as = ""  # names of data set and backbone, if the queries of the images are stored on disk
        self.to(backbone.mean.device)
        self.eval()  # in training mode prompts know the task, which is unknown for a test image

    @property
    def backbone(self) -> Backbone:
        """The process's frozen backbone, or the model's own copy that it trains."""
        return self._shared[0] if self.trained_backbone is None else self.trained_backbone

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.head.weight.device

    def begin_task(self, classes: int) -> None:
        """Grow head (and prompt) for the next task of ``classes`` new classes; a prompt that adapts stays as it is."""
        if self.local_head is None or not self.task_sizes:
            self.prompt.begin_task(len(self.task_sizes))
        if self.local_head is not None and not self.task_sizes:
            self.local_head.grow(classes)
        self.head.grow(classes)
        self.task_sizes.append(classes)
        seen = sum(self.task_sizes)
        self._rows = torch.arange(seen - classes, seen)
        self.to(self.device)
        if self.features_frozen:
            self.requires_grad_(False)
            self.head.requires_grad_(True)

    @property
    def features_frozen(self) -> bool:
        """Whether f(x) does not change any more: the task is not the first, and only the head learns."""
        return self.freezes_features and len(self.task_sizes) > 1

    def train(self, mode: bool = True) -> Self:
        """As in torch; a frozen backbone stays in evaluation mode, so that its running statistics do not change."""
        super().train(mode)
        if self.trained_backbone is not None and self.features_frozen:
            self.trained_backbone.eval()
        return self

    def set_active_rows(self, rows: np.ndarray) -> None:
        """Set the head rows, int64 [C], of the classes among which the local loss chooses."""
        self._rows = torch.from_numpy(np.sort(rows)).to(self.device)

    def current_rows(self) -> Tensor:
        """Head rows among which the local loss chooses, int64 [C] ascending; by default those of the current task."""
        return self._rows

    def local_targets(self, rows: Tensor) -> Tensor:
        """Index of each head row in :meth:`current_rows`, int64 like ``rows``."""
        return torch.searchsorted(self._rows, rows)

    @torch.no_grad()
    def query(self, images: Tensor, parts: Sequence[Early] | None = None) -> Tensor:
        """q(x): normalised images [B, 3, H, W] -> features without prompt [B, D * query_parts]; no gradient.

        A prompt reads its first D numbers only. ``parts``, at least one, replaces ``query_parts`` if given.
        """
        return self._unprompted_features(images, parts or self.query_parts)

    @property
    def query_parts(self) -> tuple[Early, ...]:
        """The features that make q(x). Without a prompt all parts of f(x).

        With one: the last feature if the prompt reads it, then ``unprompted`` if there is one; may be empty.
        """
        if not self.prompted:
            return (self.backbone.last, *self.early)
        read = [self.backbone.last] if self.prompt.needs_query else []
        return tuple(dict.fromkeys(read + ([] if self.unprompted is None else [self.unprompted])))

    @property
    def width(self) -> int:
        """Length of a feature: D, D more for each of ``early`` and D more for ``unprompted``."""
        return _width(self.backbone, self.early, self.unprompted)

    @cached_property
    def max_input_norm(self) -> float:
        """No input of the head's linear layer has a larger L2 norm; infinite if the backbone trains."""
        if self.trained_backbone is not None:
            return math.inf
        whole = 2 if self.unprompted == self.backbone.last else 1  # the others are of norm sqrt(D)
        others = self.width - whole * self.backbone.dim
        norm = math.sqrt(whole * self.backbone.max_norm**2 + others)
        projection = self.head.projection
        if projection is None:
            return norm
        largest = torch.linalg.eigvalsh((projection @ projection.T).double())[-1]  # the square of its spectral norm
        return norm * math.sqrt(float(largest))

    @property
    def prompted(self) -> bool:
        """Whether there is a prompt."""
        return type(self.prompt) is not Prompt

    @property
    def adapts(self) -> bool:
        """Whether the prompt learns in the first task only, so that f(x) of a test image never changes afterwards."""
        return self.local_head is not None

    @property
    def reuses_query(self) -> bool:
        """Whether a cached q(x) is of use: something reads it, and the backbone is not trained."""
        return self.trained_backbone is None and bool(self.query_parts)

    @property
    def trains_on_query(self) -> bool:
        """Whether local steps read q(x): the prompt does, or there is none."""
        return self.prompt.needs_query or not self.prompted

    def features(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """f(x): normalised images [B, 3, H, W] -> features with the current prompt [B, width], float32.

        ``query`` is q(x) [B, D * query_parts] of the images, if known; without prompt it is f(x), and the images are
        not read.
        """
        if query is not None and not self.prompted:
            return query
        if self.unprompted is None:
            return self._prompted_features(images, query)
        if query is None:
            query = self._unprompted_features(images, self.query_parts)
        return torch.cat([self._prompted_features(images, query), query[:, -self.backbone.dim :]], dim=1)

    def _prompted_features(self, images: Tensor, query: Tensor | None) -> Tensor:
        """The part of f(x) that the prompt changes, [B, D * (1 + early)]."""
        if query is None and self.prompt.needs_query:
            query = self.query(images, [self.backbone.last])
        read = query if query is None else query[:, : self.backbone.dim].detach()
        with self._autocast():
            return self.backbone(images, self.prompt(read), self.projects, self.early).float()

    def _unprompted_features(self, images: Tensor, parts: Sequence[Early]) -> Tensor:
        """Features without prompt, [B, D * parts]: the last one and earlier ones, or a single earlier one."""
        with self._autocast():
            if parts[0] == self.backbone.last:
                return self.backbone(images, early=parts[1:]).float()
            return self.backbone.early_feature(images, *parts).float()

    def forward(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """As :meth:`features`, then the head -> logits [B, seen classes]; each row depends on its own image only.

        In training mode a model that adapts takes its local head: logits of the first task's classes.
        """
        if self.local_head is None or not self.training:
            return self.head(self.features(images, query))
        return self.local_head(self._prompted_features(images, query)[:, : self.backbone.dim])

    def shared_state(self) -> dict[str, Tensor]:
        """Arrays of the model's file, by stable names: prompt and head; train messages carry :meth:`message_state`.

        A trained backbone is one array more, ``backbone`` [P], because sending hundreds of small ones is slow.
        """
        parameters = self.named_parameters()
        state = {name: p.detach() for name, p in parameters if not name.startswith("trained_backbone.")}
        return state if self.trained_backbone is None else state | {"backbone": self.packed_backbone().detach()}

    def trained_state(self) -> dict[str, Tensor]:
        """Arrays of :meth:`shared_state` that the current task trains: what clients send back."""
        fixed = {name for name, p in self.named_parameters() if not p.requires_grad}
        fixed |= {"backbone"} if self.features_frozen else set()
        return {name: a for name, a in self.shared_state().items() if name not in fixed}

    def message_state(self) -> dict[str, Tensor]:
        """Arrays of :meth:`shared_state` that a client needs for training and statistics; not a computed head."""
        return {n: a for n, a in self.shared_state().items() if self.head.trained or not n.startswith("head.")}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Overwrite all arrays of :meth:`shared_state`, :meth:`message_state` or :meth:`trained_state`, in place.

        Raises:
            ValueError: names or shapes are of none of the three.
        """
        parts = (self.trained_state(), self.message_state())
        state = next((part for part in parts if part.keys() == arrays.keys()), self.shared_state())
        overwrite(state, arrays)
        if "backbone" in state:
            weights = self._backbone_state()
            for weight, part in zip(weights, state["backbone"].split([w.numel() for w in weights]), strict=True):
                weight.detach().copy_(part.view_as(weight))

    def export(self) -> Arrays:
        """Copies of :meth:`shared_state` as float32 NumPy arrays."""
        return to_arrays(self.shared_state())

    def packed_backbone(self) -> Tensor:
        """Weights and running statistics of the trained backbone in a fixed order, [P]; differentiable."""
        return torch.cat([value.flatten() for value in self._backbone_state()])

    def _backbone_state(self) -> list[Tensor]:
        """Tensors that :meth:`packed_backbone` joins; counters are left out."""
        state = self.trained_backbone.state_dict(keep_vars=True) if self.trained_backbone is not None else {}
        return [value for value in state.values() if value.is_floating_point()]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


def overwrite(tensors: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray]) -> None:
    """Copy arrays into the tensors of the same names.

    Raises:
        ValueError: names or shapes are not those of the tensors.
    """
    if misfits := find_misfits(tensors, arrays):
        raise ValueError(f"{len(misfits)} arrays do not fit, the first is {misfits[0]!r}")
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(arrays[name])  # a mean of shape [] is no array for torch, nor is a reversed one
        tensor.copy_(torch.from_numpy(array).view(tensor.shape))


def to_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Copies as NumPy arrays."""
    return {name: value.cpu().numpy().copy() for name, value in tensors.items()}


def prompt_of(model: Model, kind: type[P]) -> P:
    """The model's prompt as ``kind``, the one that the table gives the method.

    Raises:
        TypeError: it is of another kind: the row of a method from outside names a prompt that its code does not expect.
    """
    if not isinstance(model.prompt, kind):
        raise TypeError(f"the prompt is {type(model.prompt).__name__}, the method needs {kind.__name__}")
    return model.prompt


def build_model(config: Config, task_sizes: Sequence[int], backbone: Backbone | None = None) -> Model:
    """The model of a run after tasks of ``task_sizes`` classes have begun; equal on every machine for one seed.

    ``backbone`` is used instead of the process's shared one.

    Raises:
        ConfigError: the backbone or its weights cannot be used, or a prompted block or class token does not exist.
    """
    backbone = backbone or configured_backbone(config)
    if config.prompt != "none" and config.blocks()[-1] >= backbone.depth:
        raise ConfigError(
            f"prompt-blocks = {config.prompt_blocks!r} is not possible: {config.backbone} has {backbone.depth} blocks."
        )
    prompt = load_class(PROMPTS[config.prompt].path)(config, backbone.dim)
    early, unprompted = _early(config, backbone)
    model = Model(
        backbone,
        prompt,
        _build_head(config, _width(backbone, early, unprompted)),
        config.precision,
        early,
        Head(backbone.dim, config.seed, init=config.head_init) if config.adapts else None,
        unprompted,
        config.trains_backbone,
        config.prompt_projected,
        config.options.features == "first-task",
    )
    if config.feature_cache == AUTO and config.dataset in FROM_PATH:
        model.backbone_name = config.backbone
        model.stored_as = f"{config.dataset} {config.data_dir}, {config.backbone}"
    for classes in task_sizes:
        model.begin_task(classes)
    return model


def _width(backbone: Backbone, early: Sequence[Early], unprompted: Early | None) -> int:
    return backbone.dim * (1 + len(early) + (unprompted is not None))


def _build_head(config: Config, dim: int) -> Head:
    options, row = config.options, config.method_row
    if options.class_rank:
        return QuadraticHead(dim, config.seed, options.random_features, options.class_rank)
    trained = bool(row.objective) and not row.adapts
    return Head(dim, config.seed, options.random_features, config.head_init, trained)


def _early(config: Config, backbone: Backbone) -> tuple[list[Early], Early | None]:
    """``early`` and ``unprompted`` of a model.

    ``unprompted`` is None if there is no such feature or no prompt, or if all prompted blocks come after it: then it is
    an early one.

    Raises:
        ConfigError: an early class token of a backbone that has none.
    """
    options, patches = config.options, config.options.early_feature == PATCHES
    early, frozen = (early_features([depth], patches, backbone) for depth in (options.depth, options.frozen_depth))
    if early + frozen and not patches and not backbone.has_class_token:
        name = config.method_row.name
        raise ConfigError(
            f"{name}-early-feature = {options.early_feature!r} is not possible: {config.backbone!r} has no class "
            f"token. Write {PATCHES}, or {name}-depth=0 and {name}-frozen-depth=0."
        )
    prompted = config.prompt != "none"
    if prompted and _block(options.frozen_depth, backbone) == backbone.last.block:
        return early, backbone.last
    if not frozen or not prompted or frozen[0].block < config.blocks()[0]:
        return list(dict.fromkeys(early + frozen)), None
    return early, frozen[0]


def early_features(depths: Sequence[float], patches: bool, backbone: Backbone) -> list[Early]:
    """Features after these shares of all blocks, each once; a share that rounds to no block or to all gives none."""
    blocks = dict.fromkeys(_block(depth, backbone) for depth in depths)
    return [Early(block, patches) for block in blocks if 0 <= block < backbone.last.block]


def _block(depth: float, backbone: Backbone) -> int:
    """The last of the first blocks that are the share ``depth`` of all, counted from 0; -1 if there are none."""
    return round(depth * backbone.depth) - 1
