"""The models that HePCo distils from, in latent space (Halbe et al. 2024, section 4).

Shapes: J prompted blocks, C models, B samples, N prompts in a pool, V = 2 L_p D numbers in a prompt, S head rows, S' of
them that some teacher knows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from strategies.base import WeightedMean
from task.prompt_decomposed import cosines

Gap = Callable[[Tensor, Tensor], Tensor]  # samples [B, D] and their head rows [B] -> [B]


@dataclass(frozen=True)
class Heads:
    """Of C models: weight [C, S, D], bias [C, S]."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, models: Iterable[Mapping[str, Tensor]]) -> "Heads":
        """Copies of those among the models' travelling arrays."""
        weight, bias = zip(*((model["head.weight"], model["head.bias"]) for model in models), strict=True)
        return Heads(torch.stack(weight), torch.stack(bias))

    def log_softmax(self, z: Tensor, rows: int) -> Tensor:
        """Log-probabilities of samples [B, D] over the first ``rows`` head rows, [C, B, rows]."""
        return (z @ self.weight[:, :rows].mT + self.bias[:, None, :rows]).log_softmax(dim=-1)


@dataclass(frozen=True)
class Latent(Heads):
    """C models of equal shape as the latent space sees them: query in, prompts or logits out; nothing is trained.

    Beside the heads keys [J, C, N, D] and pools [J, C, N, V].
    """

    keys: Tensor
    pools: Tensor

    @classmethod
    def stack(cls, models: Iterable[Mapping[str, Tensor]], number: int = 1) -> Self:
        """Copies of the travelling arrays of C = ``number`` models, each of which may go once the next one comes."""
        places = {"head.weight": 0, "head.bias": 0, "prompt.keys": 1, "prompt.pool": 1}  # of C among the dimensions
        made = dict[str, Tensor]()
        for c, model in zip(range(number), models, strict=True):
            for name, place in places.items():
                shape = model[name].shape
                if name not in made:
                    made[name] = model[name].new_empty(*shape[:place], number, *shape[place:])
                made[name].select(place, c).copy_(model[name])
        weight, bias, keys, pools = made.values()
        return cls(weight, bias, keys, pools.flatten(3))

    def blocks(self, part: slice) -> Self:
        """The same models with the keys and pools of some blocks only."""
        return replace(self, keys=self.keys[part], pools=self.pools[part])

    @cached_property
    def _unit_keys(self) -> Tensor:
        return F.normalize(self.keys, dim=-1)

    def blend(self, z: Tensor, weights: Tensor) -> Tensor:
        """sum_c w_c rho(z; c): samples [B, D], weights [C, B] -> [J, B, V]; one product over all pools."""
        shares = weights[:, :, None] * (F.normalize(z, dim=1) @ self._unit_keys.mT)  # [J, C, B, N]
        return shares.permute(0, 2, 1, 3).flatten(2) @ self.pools.flatten(1, 2)

    def blend_map(self, weights: Tensor) -> Tensor:
        """The matrix by which :meth:`blend` acts on z / |z| with S kinds of weights, [C, S] -> [J, S D, V].

        rho(z; c) = sum_i (z / |z|) . (k_i / |k_i|) P_i is linear in z / |z|.
        """
        keys = self._unit_keys.flatten(1, 2)  # [J, C N, D]
        shares = weights.T.repeat_interleave(self.keys.shape[2], dim=1)  # [S, C N]
        return (shares[:, :, None] * keys[:, None]).mT.flatten(1, 2) @ self.pools.flatten(1, 2)

    def map(self) -> Tensor:
        """Of a single model, [J, D, V]."""
        return self.blend_map(self.bias.new_ones(1, 1))


class PromptGap:
    """|rho(z; server) - rho(z; teacher)|^2 of eq. 4 as a quadratic form in the cosine weights.

    With a, b the weights and P, Q the pools of server and teacher, a P - b Q = [a - b, b] [P; P - Q], so the square is
    u G u^T with the Gram matrix G of [P; P - Q], which is computed once. The difference of the pools, rather than Q
    itself, keeps float32 exact enough: both models are close to each other and far from zero.
    """

    def __init__(self, server: Latent, teachers: Latent) -> None:
        self.server, self.teachers = server.keys, teachers.keys
        blocks, models, prompts, _ = teachers.pools.shape
        self.gram = server.pools.new_empty(blocks, models, 2 * prompts, 2 * prompts)
        for j, c in product(range(blocks), range(models)):  # one basis at a time: bounds the memory
            own = server.pools[j, 0]
            basis = torch.cat([own, own - teachers.pools[j, c]])  # [2 N, V]
            torch.mm(basis, basis.mT, out=self.gram[j, c])

    def __call__(self, z: Tensor) -> Tensor:
        """Samples [B, D] -> summed over blocks and the numbers of a prompt, [C, B]."""
        own, other = cosines(z, self.server), cosines(z, self.teachers)
        u = torch.cat([own - other, other], dim=-1)  # [J, C, B, 2 N]
        return ((u @ self.gram) * u).sum(dim=(0, 3))


@dataclass(frozen=True)
class Teachers(ABC):
    """C models and how much each counts for each head row: shares [C, S], w_cy; rows that nobody knows are zero."""

    heads: Heads
    shares: Tensor

    @abstractmethod
    def target(self, z: Tensor, labels: Tensor) -> Tensor:
        """sum_c w_cy rho(z; c) of samples [B, D] and their head rows y [B] -> [J, B, V]."""

    @abstractmethod
    def gap(self, server: Latent) -> Gap:
        """What gives sum_c w_cy |rho(z; server) - rho(z; c)|^2 (eq. 4), with its gradient."""

    @abstractmethod
    def blocks(self, part: slice) -> Self:
        """The same with the prompts of some blocks only."""

    @cached_property
    def _known(self) -> Tensor:
        return self.shares.any(dim=0)  # bool [S], S' of them true

    def _at_rows(self, z: Tensor, labels: Tensor) -> Tensor:
        """Samples [B, D] -> [B, S' D]: z / |z| where its head row is, and else zero."""
        chosen = F.one_hot(labels, len(self._known))[:, self._known]
        return (chosen[:, :, None] * F.normalize(z, dim=1)[:, None]).flatten(1)


@dataclass(frozen=True)
class Pooled(Teachers):
    """Few models, each as it is."""

    heads: Latent

    def target(self, z: Tensor, labels: Tensor) -> Tensor:
        """By one matrix for each row where that is smaller than the pools."""
        if self._map is None:
            return self.heads.blend(z, self.shares[:, labels])
        return self._at_rows(z, labels) @ self._map

    def gap(self, server: Latent) -> Gap:
        """From the pools' Gram matrices."""
        each = PromptGap(server, self.heads)
        return lambda z, labels: (self.shares[:, labels] * each(z)).sum(dim=0)

    def blocks(self, part: slice) -> Self:
        """Views."""
        return replace(self, heads=self.heads.blocks(part))

    @cached_property
    def _map(self) -> Tensor | None:
        _, models, prompts, dim = self.heads.keys.shape
        smaller = int(self._known.sum()) * dim < models * prompts
        return self.heads.blend_map(self.shares[:, self._known]) if smaller else None


@dataclass(frozen=True)
class Folded(Teachers):
    """Models whose prompts take a memory that does not depend on how many they are.

    In a block rho(z; c) = u M_c with u = z / |z| and M_c = sum_i (k_i / |k_i|)^T P_i. For a head row y the losses ask
    for no more than mean_y = sum_c w_cy M_c and spread_y = sum_c w_cy (M_c - mean_y) (M_c - mean_y)^T, since
    sum_c w_cy |u M_server - u M_c|^2 = u (spread_y + (M_server - mean_y) (M_server - mean_y)^T) u^T.

    mean [J, S' D, V]; spread [J, S', D, D].
    """

    mean: Tensor
    spread: Tensor

    def target(self, z: Tensor, labels: Tensor) -> Tensor:
        """One product."""
        return self._at_rows(z, labels) @ self.mean

    def gap(self, server: Latent) -> Gap:
        """A quadratic form in z / |z|."""
        apart = self.mean.unflatten(1, self.spread.shape[1:3]) - server.map()[:, None]  # [J, S', D, V]
        form = (self.spread + apart @ apart.mT).sum(dim=0).flatten(0, 1)
        return lambda z, labels: (self._at_rows(z, labels) @ form * F.normalize(z, dim=1)).sum(dim=1)

    def blocks(self, part: slice) -> Self:
        """Views."""
        return replace(self, mean=self.mean[part], spread=self.spread[part])


class Folding:
    """Takes in models one by one, in any order, and lets them go."""

    def __init__(self, start: Latent) -> None:
        self._start = start.map()  # what the models have in common is left out, for it would hide where they differ
        self._means: dict[int, WeightedMean] = {}

    def add(self, model: Latent, counts: np.ndarray) -> None:
        """A single model, which counts n_cy [S] for the head rows."""
        apart = model.map() - self._start
        arrays = {"apart": apart.cpu().numpy(), "square": (apart @ apart.mT).cpu().numpy()}
        for row in np.flatnonzero(counts):
            self._means.setdefault(int(row), WeightedMean()).add(arrays, float(counts[row]))

    def teachers(self, heads: Heads, shares: Tensor) -> Folded:
        """Those that have been taken in, of these heads and shares n_cy / n_y; the sums are let go."""
        blocks, dim, numbers = self._start.shape
        mean = self._start.new_empty(blocks, len(self._means), dim, numbers)
        spread = self._start.new_empty(blocks, len(self._means), dim, dim)
        for i, row in enumerate(sorted(self._means)):
            found = {name: torch.from_numpy(a).to(mean) for name, a in self._means.pop(row).arrays().items()}
            mean[:, i] = self._start + found["apart"]
            spread[:, i] = found["square"] - found["apart"] @ found["apart"].mT
        return Folded(heads, shares, mean.flatten(1, 2), spread)
