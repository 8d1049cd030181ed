"""The model that clients train: a backbone, a prompt and a linear head with one row per seen class."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from task.config.schema import Config
from task.keys import ConfigError
from task.message import Arrays
from task.methods import load_class
from task.models.device import resolve_device
from task.models.load import load_backbone
from task.models.vit import Backbone
from task.prompt_kinds import PROMPTS
from task.prompts.base import Prompt
from task.utils.seeding import torch_rng

P = TypeVar("P", bound=Prompt)


class Head(nn.Module):
    """Linear classifier that grows with the tasks: weight [seen, D], bias [seen].

    With ``projection`` > 0 its inputs are D = ``projection`` random features max(0, x W), W ~ N(0, 1) drawn from the
    seed (RanPAC, McDonnell et al. 2023).

    ``init`` is how new rows start: "normal", with deviation 0.02 and bias 0; or "linear", weight and bias uniform in
    +-1/sqrt(D) as in torch's Linear, whose deviation is 0.021 at D = 768 and 0.055 at D = 112.
    """

    projection: Tensor | None

    def __init__(self, dim: int, seed: int, projection: int = 0, init: str = "normal") -> None:
        super().__init__()
        self.seed, self.init = seed, init
        drawn = torch.randn(dim, projection, generator=torch_rng(seed, "projection")) if projection else None
        self.register_buffer("projection", drawn, persistent=False)
        dim = projection or dim
        self.weight = nn.Parameter(torch.empty(0, dim))
        self.bias = nn.Parameter(torch.empty(0))

    def grow(self, classes: int) -> None:
        """Add rows; the initial value of a row depends on the seed and the number of rows before."""
        weight, bias = self._start(classes)
        self.weight = nn.Parameter(torch.cat([self.weight.data, weight.to(self.weight.device)]))
        self.bias = nn.Parameter(torch.cat([self.bias.data, bias.to(self.bias.device)]))

    def _start(self, classes: int) -> tuple[Tensor, Tensor]:
        seen, dim = self.weight.shape
        rng = torch_rng(self.seed, "head", seen)
        if self.init == "normal":
            return 0.02 * torch.randn(classes, dim, generator=rng), torch.zeros(classes)
        start = torch.empty(classes, dim + 1).uniform_(-(dim**-0.5), dim**-0.5, generator=rng)
        return start[:, :-1], start[:, -1]

    def project(self, features: Tensor) -> Tensor:
        """Inputs of the linear layer: features [B, backbone's D] themselves, or their random projection [B, D]."""
        return features if self.projection is None else (features @ self.projection).relu()

    def forward(self, features: Tensor) -> Tensor:
        """Features of the backbone -> logits [B, seen]."""
        return F.linear(self.project(features), self.weight, self.bias)


class Model(nn.Module):
    """Class-incremental model. Rows of the head follow the class order of the run, task by task.

    Args:
        backbone: shared by all models of the process; frozen.
        prompt: makes prefixes or prompt tokens of queries.
        seed: of the head's initial values and projection.
        precision: fp32 or bf16, of the backbone's arithmetic.
        projection: random features under the head; 0 = none.
        trains_backbone: train, and send, a copy of the backbone.
        projects: whether the backbone projects prefixes as it does tokens.
        head_init: how new rows of the head start.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompt: Prompt,
        seed: int,
        precision: str,
        projection: int = 0,
        trains_backbone: bool = False,
        projects: bool = False,
        head_init: str = "normal",
    ) -> None:
        super().__init__()
        self._shared = [backbone]  # in a list, so that it is no sub-module: all models of the process share it
        self.trained_backbone = copy.deepcopy(backbone).requires_grad_(True) if trains_backbone else None
        self.prompt, self.head = prompt, Head(backbone.dim, seed, projection, head_init)
        self.task_sizes: list[int] = []
        self._rows: Tensor
        self.register_buffer("_rows", torch.empty(0, dtype=torch.int64), persistent=False)
        self.precision, self.projects = precision, projects
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
        """Grow head (and prompt) for the next task of ``classes`` new classes."""
        self.prompt.begin_task(len(self.task_sizes))
        self.head.grow(classes)
        self.task_sizes.append(classes)
        seen = sum(self.task_sizes)
        self._rows = torch.arange(seen - classes, seen)
        self.to(self.device)

    def set_active_rows(self, rows: np.ndarray) -> None:
        """Set the head rows, int64 [C], of the classes among which the local loss chooses."""
        self._rows = torch.from_numpy(np.sort(rows)).to(self.device)

    def current_rows(self) -> Tensor:
        """Head rows among which the local loss chooses, int64 [C] ascending; by default those of the current task."""
        return self._rows

    def local_targets(self, rows: Tensor) -> Tensor:
        """Index of each head row in :meth:`current_rows`, int64 like ``rows``."""
        return torch.searchsorted(self._rows, rows)

    def query(self, images: Tensor) -> Tensor:
        """q(x): normalised images [B, 3, H, W] -> features without prompt [B, D]; no gradient."""
        with torch.no_grad(), self._autocast():
            return self.backbone(images).float()

    @property
    def prompted(self) -> bool:
        """Whether f(x) differs from q(x)."""
        return type(self.prompt) is not Prompt

    @property
    def reuses_query(self) -> bool:
        """Whether a cached q(x) is of use: the prompt reads it, or it is f(x). False if the backbone is trained."""
        return self.trained_backbone is None and (self.prompt.needs_query or not self.prompted)

    def features(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """f(x): normalised images [B, 3, H, W] -> features with the current prompt [B, D], float32.

        ``query`` is q(x) [B, D] of the images, if known; without prompt it is f(x), and the images are not read.
        """
        if query is not None and not self.prompted:
            return query
        if query is None and self.prompt.needs_query:
            query = self.query(images)
        with self._autocast():
            return self.backbone(images, self.prompt(query), self.projects).float()

    def forward(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """As :meth:`features`, then the head -> logits [B, seen classes]; each row depends on its own image only."""
        return self.head(self.features(images, query))

    def shared_state(self) -> dict[str, Tensor]:
        """Arrays sent to clients, by stable names: prompt and head.

        A trained backbone is one array more, ``backbone`` [P], because sending hundreds of small ones is slow.
        """
        return {name: p.detach() for name, p in self._small_parameters()} | self._packed()

    def trained_state(self) -> dict[str, Tensor]:
        """Arrays of :meth:`shared_state` that the current task trains: what clients send back."""
        return {name: p.detach() for name, p in self._small_parameters() if p.requires_grad} | self._packed()

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Overwrite all arrays of :meth:`shared_state`, or all of :meth:`trained_state`, in place.

        Raises:
            ValueError: names or shapes are of neither of the two.
        """
        state = self.shared_state() if arrays.keys() != self.trained_state().keys() else self.trained_state()
        got, expected = ({name: tuple(a.shape) for name, a in part.items()} for part in (arrays, state))
        if got != expected:
            raise ValueError(f"arrays {got} do not fit {expected}")
        for name, target in state.items():
            target.copy_(torch.from_numpy(np.ascontiguousarray(arrays[name])))
        if self.trained_backbone is not None:
            weights = self._backbone_state()
            for weight, part in zip(weights, state["backbone"].split([w.numel() for w in weights]), strict=True):
                weight.detach().copy_(part.view_as(weight))

    def export(self) -> Arrays:
        """Copies of :meth:`shared_state` as float32 NumPy arrays."""
        return to_arrays(self.shared_state())

    @contextmanager
    def backbone_eval(self) -> Iterator[None]:
        """Context with the backbone in evaluation mode: features do not depend on the batch or change running means."""
        training = self.backbone.training
        self.backbone.eval()
        yield
        self.backbone.train(training)

    def _small_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.named_parameters() if not name.startswith("trained_backbone.")]

    def packed_backbone(self) -> Tensor:
        """Weights and running statistics of the trained backbone in a fixed order, [P]; differentiable."""
        return torch.cat([value.flatten() for value in self._backbone_state()])

    def _packed(self) -> dict[str, Tensor]:
        return {} if self.trained_backbone is None else {"backbone": self.packed_backbone().detach()}

    def _backbone_state(self) -> list[Tensor]:
        """Tensors that :meth:`packed_backbone` joins; counters are left out."""
        state = self.trained_backbone.state_dict(keep_vars=True) if self.trained_backbone is not None else {}
        return [value for value in state.values() if value.is_floating_point()]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


def to_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Copies as NumPy arrays."""
    return {name: value.cpu().numpy().copy() for name, value in tensors.items()}


def prompt_of(model: Model, kind: type[P]) -> P:
    """The model's prompt as ``kind``, the one that the table gives the method.

    Raises:
        TypeError: it is another one: the row of a method from outside names a prompt that its halves do not fit.
    """
    if not isinstance(model.prompt, kind):
        raise TypeError(f"the prompt is {type(model.prompt).__name__}, the method needs {kind.__name__}")
    return model.prompt


def build_model(config: Config, task_sizes: Sequence[int], backbone: Backbone | None = None) -> Model:
    """The model of a run after tasks of ``task_sizes`` classes have begun; equal on every machine for one seed.

    ``backbone`` is used instead of the process's shared one.

    Raises:
        ConfigError: the backbone or its weights cannot be used, or a prompted block does not exist.
    """
    backbone = backbone or load_backbone(
        config.backbone, config.backbone_weights, config.image_size, str(resolve_device(config.device))
    )
    if config.prompt != "none" and config.blocks()[-1] >= backbone.depth:
        raise ConfigError(
            f"prompt-blocks = {config.prompt_blocks!r} is not possible: {config.backbone} has {backbone.depth} blocks."
        )
    prompt = load_class(PROMPTS[config.prompt].path).build(config, backbone.dim)
    model = Model(
        backbone,
        prompt,
        config.seed,
        config.precision,
        config.options.projection,
        config.trains_backbone,
        config.prompt_projected,
        config.head_init,
    )
    for classes in task_sizes:
        model.begin_task(classes)
    return model
