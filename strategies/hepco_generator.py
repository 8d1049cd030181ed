"""HePCo in latent space: the teacher models, and the generator of their samples (Halbe et al. 2024).

Shapes: J prompted blocks, C models, B samples of D numbers, N prompts of V = 2 L_p D numbers in a pool, S head rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from threading import Event
from typing import Self

import torch
from torch import Tensor, nn

from task.method_options import HePCoOptions
from task.prompts.decomposed import cosines

EMBEDDING, NOISE, HIDDEN = 64, 64, (256, 1024)  # of the generator: lengths of what goes in, widths of its layers


@dataclass(frozen=True)
class StackedModels:
    """C models of equal shape without their backbone: a query goes in, prompts and logits come out."""

    weight: Tensor  # of the heads, [C, S, D]
    bias: Tensor  # [C, S]
    keys: Tensor  # of the prompted blocks, [J, C, N, D]
    pools: Tensor  # [J, C, N, V]

    @classmethod
    def stack(cls, models: Sequence[Mapping[str, Tensor]]) -> Self:
        """Copies of the shared arrays of C models."""
        weight, bias = (torch.stack([model[name] for model in models]) for name in ("head.weight", "head.bias"))
        keys, pools = (torch.stack([model[name] for model in models], 1) for name in ("prompt.keys", "prompt.pool"))
        return cls(weight, bias, keys, pools.flatten(3))

    def to(self, device: torch.device) -> Self:
        """The same models on a device."""
        return type(self)(*(value.to(device) for value in vars(self).values()))

    def log_softmax(self, z: Tensor, rows: slice) -> Tensor:
        """Logarithm of softmax phi(z; w_c) over R head ``rows``: samples [B, D] -> [C, B, R]."""
        return (z @ self.weight[:, rows].mT + self.bias[:, None, rows]).log_softmax(dim=-1)


class PromptGap:
    """|rho(z; server) - rho(z; teacher)|^2 of eq. 4 as a quadratic form in the cosine weights.

    With a, b the weights and P, Q the pools of server and teacher, a P - b Q = [a - b, b] [P; P - Q], so the square is
    u G u^T with the Gram matrix G of [P; P - Q], which is computed once. The difference of the pools, rather than Q
    itself, keeps float32 exact enough: both models are close to each other and far from zero.
    """

    def __init__(self, server: StackedModels, teachers: StackedModels) -> None:
        self.server, self.teachers = server.keys, teachers.keys
        blocks, models, prompts, _ = teachers.pools.shape
        self.gram = server.pools.new_empty(blocks, models, 2 * prompts, 2 * prompts)
        for j, c in product(range(blocks), range(models)):  # one basis at a time: bounds the memory
            pool = server.pools[j, 0]
            basis = torch.cat([pool, pool - teachers.pools[j, c]])  # [2 N, V]
            torch.mm(basis, basis.mT, out=self.gram[j, c])

    def __call__(self, z: Tensor) -> Tensor:
        """Samples [B, D] -> the gap to each teacher, summed over blocks and the numbers of a prompt, [C, B]."""
        server, teachers = cosines(z, self.server), cosines(z, self.teachers)
        u = torch.cat([server - teachers, teachers], dim=-1)  # [J, C, B, 2 N]
        return ((u @ self.gram) * u).sum(dim=(0, 3))


@dataclass(frozen=True)
class Teachers:
    """C models and how many images of each head row they stand for: counts n_{c,y} [C, S]."""

    models: StackedModels
    counts: Tensor
    of_round: bool = False  # divide the weights by the images of all classes, not of each
    first_row: int = 0  # of the head rows among which the generator's loss chooses

    def to(self, device: torch.device) -> "Teachers":
        """The same teachers on a device."""
        return replace(self, models=self.models.to(device), counts=self.counts.to(device))

    @cached_property
    def shares(self) -> Tensor:
        """How much each counts for a head row: w_{c,y} = n_{c,y} / sum_c n_{c,y} [C, S], 0 in rows without images."""
        return self.counts / self.counts.sum(dim=0).clamp(min=1)

    @cached_property
    def importance(self) -> Tensor:
        """Sum of the weights of all teachers by head row, [S]: 1, or the share n_y / n of the images of the round."""
        images = self.counts.sum(dim=0)
        return images / images.sum() if self.of_round else torch.ones_like(images)

    def target(self, block: int, z: Tensor, labels: Tensor) -> Tensor:
        """sum_c w_{c,y} rho(z; c) in a block, rho(z; c) = sum_i cos(z, k_i) P_i: z [B, D], head rows [B] -> [B, V]."""
        weights = self.shares[:, labels, None] * cosines(z, self.models.keys[block])  # [C, B, N]
        return weights.transpose(0, 1).flatten(1) @ self.models.pools[block].flatten(0, 1)


class Generator(nn.Module):
    """Latent samples of given classes: label embedding ++ noise -> two hidden layers with batch normalisation -> D."""

    def __init__(self, classes: int, dim: int, rng: torch.Generator) -> None:
        super().__init__()
        sizes = [EMBEDDING + NOISE, *HIDDEN, dim]
        first, second, last = (nn.utils.skip_init(nn.Linear, a, b) for a, b in pairwise(sizes))
        self.embedding = nn.Embedding.from_pretrained(torch.randn(classes, EMBEDDING, generator=rng), False)
        hidden = [first, nn.BatchNorm1d(sizes[1]), nn.ReLU(), second, nn.BatchNorm1d(sizes[2]), nn.ReLU()]
        self.net = nn.Sequential(*hidden, last)
        for layer in (first, second, last):  # torch's own start, drawn from the run's seed
            for value in layer.parameters():
                nn.init.uniform_(value, -(layer.in_features**-0.5), layer.in_features**-0.5, generator=rng)

    def forward(self, labels: Tensor, rng: torch.Generator) -> Tensor:
        """Head rows int64 [B] -> samples [B, D]; the noise comes from ``rng``, on the device of the labels."""
        noise = torch.randn(len(labels), NOISE, generator=rng, device=rng.device)
        return self.net(torch.cat([noise, self.embedding(labels)], dim=1))


def generator_loss(
    z: Tensor, labels: Tensor, server: StackedModels, teachers: Teachers, gap: PromptGap | None, options: HePCoOptions
) -> Tensor:
    """Eq. 2 to 5: w_{c,y} (CE(phi(z; c), y) - lambda_KL KL(server || c) - lambda_MSE |rho(z; server) - rho(z; c)|^2).

    Summed over samples z [B, D] of head rows y [B] and over teachers c. The softmax is over the teachers' head rows
    from ``first_row`` on. The key hepco-divergence can swap the arguments of KL. By default no gradient goes through
    the query of rho, as in the public code: then the last term trains nothing, and with ``gap`` None it is left out.
    With its gradient the generator seeks disagreement, not the right classes (measured).
    """
    rows = slice(teachers.first_row, teachers.models.bias.shape[1])
    shares, targets = (teachers.shares * teachers.importance)[:, labels], labels - teachers.first_row  # shares [C, B]
    q, p = teachers.models.log_softmax(z, rows), server.log_softmax(z, rows)
    cross_entropy = -q.gather(2, targets.expand(len(q), -1)[:, :, None])[:, :, 0]  # [C, B]
    first, second = (p, q) if options.divergence == "server-client" else (q, p)
    divergence = (first.exp() * (first - second)).sum(dim=2)  # [C, B]
    total = (shares * (cross_entropy - options.lambda_kl * divergence)).sum()
    if gap:
        total = total - options.lambda_mse * (shares * gap(z if options.query_gradient else z.detach())).sum()
    return total


@dataclass(frozen=True)
class SampleSource:
    """Teachers and the generator of the samples that they teach on."""

    teachers: Teachers
    generator: Generator
    rng: torch.Generator  # the source's own, so that it does not matter which source is drawn from first
    size: int  # samples in a batch of the distillation
    further_steps: int = 0  # of the generator's training, beyond the run key's

    def draw(self, number: int) -> tuple[Tensor, Tensor]:
        """Samples [number, D], with the generator's gradient, and head rows [number], drawn by the images of each."""
        labels = torch.multinomial(self.teachers.counts.sum(dim=0), number, replacement=True, generator=self.rng)
        return self.generator(labels, self.rng), labels


def minimise(parameters: Iterable[Tensor], losses: Iterable[Tensor], learning_rate: float, stop: Event) -> float:
    """A step of Adam on each loss until the stop event is set; returns the last loss, 0 if there is none."""
    optimiser = torch.optim.Adam(parameters, learning_rate, fused=True)
    loss = torch.zeros(())
    for each in losses:
        if stop.is_set():
            break
        loss = each
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    optimiser.zero_grad()
    return float(loss.detach())


def train_generator(source: SampleSource, server: StackedModels, options: HePCoOptions, stop: Event) -> float:
    """Train the source's generator on eq. 2 to 5 (step 2); returns the last batch's loss per sample."""
    gap, steps = PromptGap(server, source.teachers.models), options.generator_steps + source.further_steps

    def losses() -> Iterator[Tensor]:
        for step in range(1, steps + 1):
            # without a gradient the gap trains nothing: then only the loss that is returned includes it
            each = gap if options.query_gradient or step == steps else None
            yield generator_loss(*source.draw(options.batch_size), server, source.teachers, each, options)

    loss = minimise(source.generator.parameters(), losses(), options.generator_learning_rate, stop)
    source.generator.eval()  # distillation uses the running statistics, as in the public code
    return loss / options.batch_size
