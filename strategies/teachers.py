"""The models that HePCo distils from, in latent space (Halbe et al. 2024, section 4).

Shapes: J prompted blocks, C models, B samples, N prompts in a pool, V = 2 L_p D numbers in a prompt, S head rows, S' of
them that some teacher knows.
"""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from threading import Lock
from typing import Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from task.message import Arrays
from task.prompts.decomposed import cosines

Gap = Callable[[Tensor, Tensor], Tensor]  # samples [B, D] and their head rows [B] -> [B]
T = TypeVar("T")
Batches = Sequence[tuple[Tensor, Tensor]]  # of one source, a step each: samples [B, D] and their head rows [B]

FEW = 10  # models whose pools are kept in memory; those of more lie in a file
TILE = 2**20  # numbers of a block that are worked on at once where its pools lie in a file


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

    def form(self) -> Tensor:
        """The same as a quadratic form in z / |z|, summed over blocks: [C, D, D]."""
        own, other = F.normalize(self.server, dim=-1), F.normalize(self.teachers, dim=-1)
        basis = torch.cat([own - other, other], dim=2)  # [J, C, 2 N, D]
        each, weighted = (part.transpose(0, 1).flatten(1, 2) for part in (basis, self.gram @ basis))  # [C, J 2 N, D]
        return each.mT @ weighted


@dataclass(frozen=True)
class Teachers(ABC):
    """C models and how much each counts for each head row: shares [C, S], w_cy; rows that nobody knows are zero."""

    heads: Heads
    shares: Tensor

    def targets(self, batches: Batches) -> Iterator[Tensor]:
        """sum_c w_cy rho(z; c) of each batch of samples [B, D] and their head rows y [B], as [J, B, V].

        rho(z; c) = sum_i (z / |z|) . (k_i / |k_i|) P_i is linear in z / |z|: by one matrix for each head row, where
        these matrices are smaller than the pools.
        """
        if self._map is None:
            yield from self.blends(batches)
        else:
            yield from (self._at_rows(z, labels) @ self._map for z, labels in batches)

    @abstractmethod
    def blends(self, batches: Batches) -> Iterator[Tensor]:
        """The same from the pools."""

    @abstractmethod
    def gap(self, server: Latent) -> Gap:
        """What gives sum_c w_cy |rho(z; server) - rho(z; c)|^2 (eq. 4), with its gradient."""

    @abstractmethod
    def blocks(self, part: slice) -> Self:
        """The same with the prompts of some blocks only."""

    @property
    @abstractmethod
    def prompts(self) -> int:
        """How many are in a pool, N."""

    @cached_property
    def _known(self) -> Tensor:
        return self.shares.any(dim=0)  # bool [S], S' of them true

    @cached_property
    def _map(self) -> Tensor | None:
        """The targets of all unit vectors at all head rows that are known, [J, S' D, V].

        None where that is larger than the pools, or than as many of them as are kept in memory.
        """
        rows, dim = self._known.nonzero(), self.heads.weight.shape[2]
        if len(rows) * dim >= min(len(self.shares), FEW) * self.prompts:
            return None
        basis = torch.eye(dim).to(self.shares).repeat(len(rows), 1)
        return next(self.blends([(basis, rows.expand(-1, dim).flatten())]))

    def _at_rows(self, z: Tensor, labels: Tensor) -> Tensor:
        """Samples [B, D] -> [B, S' D]: z / |z| where its head row is, and else zero."""
        chosen = F.one_hot(labels, len(self._known))[:, self._known]
        return (chosen[:, :, None] * F.normalize(z, dim=1)[:, None]).flatten(1)


@dataclass(frozen=True)
class Pooled(Teachers):
    """Few models, all in memory."""

    heads: Latent

    def blends(self, batches: Batches) -> Iterator[Tensor]:
        """One product over all pools for each batch."""
        return (self.heads.blend(z, self.shares[:, labels]) for z, labels in batches)

    @property
    def prompts(self) -> int:
        """As in each of the models."""
        return self.heads.keys.shape[2]

    def gap(self, server: Latent) -> Gap:
        """From the pools' Gram matrices."""
        each = PromptGap(server, self.heads)
        return lambda z, labels: (self.shares[:, labels] * each(z)).sum(dim=0)

    def blocks(self, part: slice) -> Self:
        """Views."""
        return replace(self, heads=self.heads.blocks(part))


class PromptFile:
    """Keys and pools of models of equal shape in a temporary file without a name, which goes when nobody holds it.

    It is read and not mapped, since what is mapped counts as the process's memory.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as this is)
        self._reading = Lock()  # a file has one place at which it is read
        self.shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # J, N, D, V

    def append(self, model: Arrays) -> None:
        """Write those of a model's travelling arrays behind the others.

        Raises:
            OSError: the disk is full, say; which folder that is and how to choose another.
        """
        keys, pools = model["prompt.keys"], model["prompt.pool"]
        both = np.concatenate([keys, pools.reshape(*keys.shape[:2], -1)], axis=2, dtype=np.float32)
        self.shape = (*keys.shape, both.shape[2] - keys.shape[2])
        try:
            self._file.write(both.data)
            self._file.flush()
        except OSError as error:
            why = f"{error.strerror}: the prompts of more than {FEW} clients go there; TMPDIR names another folder"
            raise OSError(error.errno, why, tempfile.gettempdir()) from None

    def read(self, places: Sequence[int], blocks: range) -> Tensor:
        """Of the models at these places some blocks, keys [..., D] before prompts [..., V]: [J, C, N, D + V]."""
        number, prompts, *widths = self.shape
        found = torch.empty(len(blocks), len(places), prompts, sum(widths))
        for j, c in product(range(len(blocks)), range(len(places))):
            with self._reading:
                self._file.seek((places[c] * number + blocks[j]) * found[0, 0].nbytes)
                read = self._file.readinto(found[j, c].numpy().data)
            if read < found[0, 0].nbytes:
                raise OSError(f"the file of the prompts ended after {read} of {found[0, 0].nbytes} bytes")
        return found


@dataclass(frozen=True)
class Filed(Teachers):
    """Many models, of which nothing but the heads is in memory.

    Keys and pools lie in a file, and pass through memory for the gap and for as many targets as make up a tile. Beside
    the heads the file, each model's place in it, and blocks.
    """

    file: PromptFile
    places: Sequence[int]
    part: range

    def blends(self, batches: Batches) -> Iterator[Tensor]:
        """Tile by tile: prompts of some samples, pools of some models."""
        tile = max(1, TILE // self.file.shape[3])  # samples
        for some in _some(batches, tile // max((len(z) for z, _ in batches), default=1)):
            z, labels = (torch.cat(each) for each in zip(*some, strict=True))
            total = z.new_zeros(len(self.part), len(z), self.file.shape[3])
            for models, shares in self._models():
                for found, own, rows in zip(total.split(tile, dim=1), z.split(tile), labels.split(tile), strict=True):
                    found += models.blend(own, shares[:, rows])
            yield from total.split([len(each) for each, _ in some], dim=1)

    @property
    def prompts(self) -> int:
        """As in each of the models."""
        return self.file.shape[1]

    def gap(self, server: Latent) -> Gap:
        """Some models after the other; with a gradient, for which it is asked in every step, by quadratic forms."""
        form = cache(lambda: self._form(server))

        def found(z: Tensor, labels: Tensor) -> Tensor:
            if z.requires_grad:
                return (self._at_rows(z, labels) @ form() * F.normalize(z, dim=1)).sum(dim=1)
            each = ((shares[:, labels] * PromptGap(server, models)(z)).sum(dim=0) for models, shares in self._models())
            return sum(each, z.new_zeros(len(z)))

        return found

    def _form(self, server: Latent) -> Tensor:
        """The gap as a quadratic form in z / |z| for each head row that is known, [S' D, D]."""
        dim = self.heads.weight.shape[2]
        form = server.weight.new_zeros(int(self._known.sum()), dim**2)
        for models, shares in self._models():
            form.addmm_(shares[:, self._known].mT, PromptGap(server, models).form().flatten(1))
        return form.view(-1, dim)

    def blocks(self, part: slice) -> Self:
        """Of the same file."""
        return replace(self, part=self.part[part])

    def _models(self) -> Iterator[tuple[Latent, Tensor]]:
        """Some models at a time and their shares [C, S]; how many does not depend on the blocks, nor does rounding."""
        _, prompts, dim, width = self.file.shape
        numbers = max(prompts * (dim + width), (2 * prompts) ** 2, dim**2)  # in its pool, and in its quadratic forms
        for some in _some(range(len(self.places)), TILE // numbers):
            found = self.file.read([self.places[c] for c in some], self.part).to(self.shares)
            keys, pools = found.split([dim, width], dim=3)
            chosen = slice(some[0], some[-1] + 1)
            yield Latent(self.heads.weight[chosen], self.heads.bias[chosen], keys, pools), self.shares[chosen]


def _some(items: Sequence[T], number: int) -> Iterator[Sequence[T]]:
    """The items in portions of ``number``, or one by one."""
    step = max(1, number)
    return (items[start : start + step] for start in range(0, len(items), step))
