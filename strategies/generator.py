"""HePCo's latent generator and the models it is trained against, all in latent space (Halbe et al. 2024, section 4).

Shapes: J prompted blocks, C models, B samples, N prompts in a pool, V = 2 L_p D numbers in a prompt, S head rows.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product, takewhile
from threading import Event
from typing import Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from task.methods import HePCoOptions
from task.prompt_decomposed import cosines

T = TypeVar("T")


class Generator(nn.Module):
    """Latent samples of given classes: label embedding ++ noise -> two hidden layers with batch normalisation -> D."""

    def __init__(self, classes: int, dim: int, options: HePCoOptions, rng: torch.Generator) -> None:
        super().__init__()
        sizes = [options.embedding + options.noise, options.hidden_first, options.hidden_second, dim]
        first, second, last = (nn.utils.skip_init(nn.Linear, a, b) for a, b in pairwise(sizes))
        self.embedding = nn.Embedding.from_pretrained(torch.randn(classes, options.embedding, generator=rng), False)
        hidden = [first, nn.BatchNorm1d(sizes[1]), nn.ReLU(), second, nn.BatchNorm1d(sizes[2]), nn.ReLU()]
        self.net, self.noise = nn.Sequential(*hidden, last), options.noise
        for layer in (first, second, last):  # torch's own start, drawn from the run's seed
            for value in layer.parameters():
                nn.init.uniform_(value, -(layer.in_features**-0.5), layer.in_features**-0.5, generator=rng)

    def forward(self, labels: Tensor, rng: torch.Generator) -> Tensor:
        """Head rows int64 [B] -> samples [B, D]; the noise comes from ``rng``, on the device of the labels."""
        noise = torch.randn(len(labels), self.noise, generator=rng, device=rng.device)
        return self.net(torch.cat([noise, self.embedding(labels)], dim=1))


@dataclass(frozen=True)
class Latent:
    """C models of equal shape as the latent space sees them: query in, prompts or logits out; nothing is trained.

    keys [J, C, N, D], pools [J, C, N, V], weight [C, S, D], bias [C, S].
    """

    keys: Tensor
    pools: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def stack(cls, models: Iterable[Mapping[str, Tensor]], number: int = 1) -> Self:
        """Copies of the travelling arrays of C = ``number`` models, each of which may go once the next one comes."""
        places = {"prompt.keys": 1, "prompt.pool": 1, "head.weight": 0, "head.bias": 0}  # of C among the dimensions
        made = dict[str, Tensor]()
        for c, model in zip(range(number), models, strict=True):
            for name, place in places.items():
                shape = model[name].shape
                if name not in made:
                    made[name] = model[name].new_empty(*shape[:place], number, *shape[place:])
                made[name].select(place, c).copy_(model[name])
        keys, pools, weight, bias = made.values()
        return cls(keys, pools.flatten(3), weight, bias)

    def blocks(self, part: slice) -> Self:
        """The same models with the keys and pools of some blocks only."""
        return replace(self, keys=self.keys[part], pools=self.pools[part])

    def log_softmax(self, z: Tensor, rows: int) -> Tensor:
        """Log-probabilities of samples [B, D] over the first ``rows`` head rows, [C, B, rows]."""
        return (z @ self.weight[:, :rows].mT + self.bias[:, None, :rows]).log_softmax(dim=-1)

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


def generator_loss(
    z: Tensor,
    labels: Tensor,
    shares: Tensor,
    server: Latent,
    teachers: Latent,
    gap: PromptGap | None,
    options: HePCoOptions,
) -> Tensor:
    """Eq. 2 to 5: right for every teacher, and where server and teachers disagree; a sum over samples and teachers.

    CE(teacher, y) - lambda_KL KL(server || teacher) - lambda_MSE |rho(server) - rho(teacher)|^2. Logits are those of
    the teachers' head rows (the previous server has fewer than the current one). By default the query of rho is not
    differentiated, as in the public code, so that the last term is reported but trains nothing; with its gradient, a
    sum over thousands of numbers, the generator seeks disagreement instead of the right classes (measured).

    Args:
        z: samples [B, D].
        labels: their head rows, int64 [B].
        shares: weight of each teacher for each head row, [C, S].
        server: the provisional server, C = 1.
        teachers: C models.
        gap: of these two; None leaves out the last term, which costs most and by default changes no gradient.
        options: the lambdas and whether the query has a gradient.
    """
    rows = teachers.bias.shape[1]
    q, p = teachers.log_softmax(z, rows), server.log_softmax(z, rows)
    cross_entropy = -q.gather(2, labels.expand(len(q), -1)[:, :, None])[:, :, 0]  # [C, B], as are the other two
    divergence = (p.exp() * (p - q)).sum(dim=2)
    each = cross_entropy - options.lambda_kl * divergence
    if gap:
        each = each - options.lambda_mse * gap(z if options.query_gradient else z.detach())
    return (shares[:, labels] * each).sum()


@dataclass(frozen=True)
class Source:
    """Teachers, how much each counts for each head row, how often each row is drawn, and where the samples come from.

    shares [C, S]; histogram [S], not negative, sum above 0. The generator's chance is its own, so that sources can be
    drawn from side by side.
    """

    teachers: Latent
    shares: Tensor
    histogram: Tensor
    generator: Generator
    rng: torch.Generator

    def blocks(self, part: slice) -> Self:
        """The same with the teachers' prompts of some blocks only."""
        return replace(self, teachers=self.teachers.blocks(part))

    def draw(self, number: int) -> tuple[Tensor, Tensor]:
        """Samples [number, D], with the gradient of the generator, and their head rows [number]."""
        labels = torch.multinomial(self.histogram, number, replacement=True, generator=self.rng)
        return self.generator(labels, self.rng), labels

    @cached_property
    def _map(self) -> Tensor | None:
        """Of the S' head rows that are drawn, [J, S' D, V]; None where that is larger than the teachers' pools."""
        drawn, (_, clients, prompts, dim) = self.histogram > 0, self.teachers.keys.shape
        smaller = int(drawn.sum()) * dim < clients * prompts
        return self.teachers.blend_map(self.shares[:, drawn]) if smaller else None

    def target(self, z: Tensor, labels: Tensor) -> Tensor:
        """sum_c w_c rho(z; c) of samples [B, D] and their head rows [B] -> [J, B, V]."""
        if self._map is None:
            return self.teachers.blend(z, self.shares[:, labels])
        chosen = F.one_hot(labels, len(self.histogram))[:, self.histogram > 0]  # [B, S']
        return (chosen[:, :, None] * F.normalize(z, dim=1)[:, None]).flatten(1) @ self._map


def until(stop: Event, items: Iterable[T]) -> Iterator[T]:
    """The items, as long as nobody says stop."""
    return takewhile(lambda item: not stop.is_set(), items)


def train_generator(source: Source, server: Latent, options: HePCoOptions, stop: Event) -> float:
    """Train the source's generator against its teachers (step 2); returns the last batch's loss per sample."""
    gap = PromptGap(server, source.teachers)
    optimiser = torch.optim.Adam(source.generator.parameters(), options.generator_learning_rate, fused=True)
    loss = torch.zeros(())
    for left in until(stop, reversed(range(options.generator_steps))):
        z, labels = source.draw(options.batch_size)
        needed = gap if options.query_gradient or not left else None
        loss = generator_loss(z, labels, source.shares, server, source.teachers, needed, options)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    source.generator.eval()  # distillation uses the running statistics, as in the public code
    return float(loss.detach()) / options.batch_size
