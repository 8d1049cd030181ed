"""HePCo's latent generator and how it is trained (Halbe et al. 2024, section 4).

Shapes: B samples of D numbers, S head rows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile
from threading import Event
from typing import TypeVar

import torch
from torch import Tensor, nn

from strategies.teachers import Gap, Latent, Teachers
from task.method_options import HePCoOptions

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


def generator_loss(
    z: Tensor, labels: Tensor, server: Latent, teachers: Teachers, gap: Gap | None, options: HePCoOptions
) -> Tensor:
    """Eq. 2 to 5: right for every teacher, and where server and teachers disagree; a sum over samples and teachers.

    CE(teacher, y) - lambda_KL KL(server || teacher) - lambda_MSE |rho(server) - rho(teacher)|^2. Logits are those of
    the teachers' head rows (the previous server has fewer than the current one). By default the query of rho is not
    differentiated, as in the public code, so that the last term is reported but trains nothing; with its gradient, a
    sum over thousands of numbers, the generator seeks disagreement instead of the right classes (measured).

    Args:
        z: samples [B, D].
        labels: their head rows, int64 [B].
        server: the provisional server, C = 1.
        teachers: C models and their shares.
        gap: of these two; None leaves out the last term, which costs most and by default changes no gradient.
        options: the lambdas and whether the query has a gradient.
    """
    rows = teachers.heads.bias.shape[1]
    q, p = teachers.heads.log_softmax(z, rows), server.log_softmax(z, rows)
    cross_entropy = -q.gather(2, labels.expand(len(q), -1)[:, :, None])[:, :, 0]  # [C, B], as are the other two
    divergence = (p.exp() * (p - q)).sum(dim=2)
    total = (teachers.shares[:, labels] * (cross_entropy - options.lambda_kl * divergence)).sum()
    if gap:
        total = total - options.lambda_mse * gap(z if options.query_gradient else z.detach(), labels).sum()
    return total


@dataclass(frozen=True)
class Source:
    """Teachers, how often each head row is drawn, and where the samples come from.

    histogram [S], not negative, sum above 0. The generator's chance is its own, so that sources can be drawn from side
    by side.
    """

    teachers: Teachers
    histogram: Tensor
    generator: Generator
    rng: torch.Generator

    def draw(self, number: int) -> tuple[Tensor, Tensor]:
        """Samples [number, D], with the gradient of the generator, and their head rows [number]."""
        labels = torch.multinomial(self.histogram, number, replacement=True, generator=self.rng)
        return self.generator(labels, self.rng), labels


def until(stop: Event, items: Iterable[T]) -> Iterator[T]:
    """The items, as long as nobody says stop."""
    return takewhile(lambda item: not stop.is_set(), items)


def train_generator(source: Source, server: Latent, options: HePCoOptions, stop: Event) -> float:
    """Train the source's generator against its teachers (step 2); returns the last batch's loss per sample."""
    gap = source.teachers.gap(server)
    optimiser = torch.optim.Adam(source.generator.parameters(), options.generator_learning_rate, fused=True)
    loss = torch.zeros(())
    for left in until(stop, reversed(range(options.generator_steps))):
        z, labels = source.draw(options.batch_size)
        needed = gap if options.query_gradient or not left else None
        loss = generator_loss(z, labels, server, source.teachers, needed, options)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    source.generator.eval()  # distillation uses the running statistics, as in the public code
    return float(loss.detach()) / options.batch_size
