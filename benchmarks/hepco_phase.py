"""HePCo's server phase at published size, against the direct form of it that public code uses.

python -m benchmarks.hepco_phase            pool 100, length 20, D = 768, 5 blocks, 5 clients; takes minutes
python -m benchmarks.hepco_phase --quick    pool 40, D = 192; seconds
python -m benchmarks.hepco_phase --clients 50    ours alone: its time and memory with so many teachers

The direct form multiplies cosines and pool into [B, pool, length, D] and sums over the pool, for server and client anew
in every pair, block and step. Both forms have the same losses, checked at the start on the same samples; generator,
optimisers and head distillation are the same code in the same process. Ours is timed whole, as a run does it: torch has
one thread, and blocks are distilled side by side. The direct form's torch has a thread for each core; a few steps of
each phase are timed and extrapolated linearly to all steps.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import strategies.hepco
from strategies.base import RoundContext, Update
from strategies.hepco import HePCo, distil, distil_head, draw_batches, prompt_loss
from strategies.hepco_generator import Generator, PromptGap, SampleSource, StackedModels, Teachers, generator_loss
from task.config.parsing import parse
from task.config.schema import Config
from task.message import Arrays, Scalar
from task.method_options import HePCoOptions
from task.models.head import Head
from task.prompts.decomposed import DecomposedPrompt
from task.scenario.class_stream import Schedule
from task.utils.cores import cores
from task.utils.memory import peak_memory
from task.utils.seeding import torch_rng

CLASSES, BLOCKS, LENGTH = 10, 5, 10  # ten classes a task; a length of 20 is ten keys and ten values
REQUIRED = 150.0  # times faster than the direct form
PHASES = ("generators", "distillation", "whole")


@dataclass(frozen=True)
class Size:
    """Prompts in a pool, D, clients, and steps of the direct form that are timed; by default as published."""

    pool: int = 100
    dim: int = 768
    clients: int = 5
    timed: int = 2


class Server:
    """The server's model and the answers of the second task's clients; what HePCo needs of a model, no backbone."""

    device = torch.device("cpu")

    def __init__(self, size: Size) -> None:
        self.clients, self.backbone = size.clients, SimpleNamespace(dim=size.dim)
        keys: dict[str, Scalar] = {"prompt-blocks": f"1-{BLOCKS}", "prompt-pool": size.pool, "prompt-length": LENGTH}
        self.prompt = DecomposedPrompt(parse({"method": "hepco"} | keys), size.dim)
        self.head = Head(size.dim, 0)
        self.head.grow(CLASSES)
        self.previous = StackedModels.stack([self.shared_state()])
        self.head.grow(CLASSES)

    def shared_state(self) -> dict[str, Tensor]:
        """Copies by the names that a model has for them."""
        parts = {"prompt": self.prompt, "head": self.head}
        return {f"{k}.{n}": p.detach().clone() for k, part in parts.items() for n, p in part.named_parameters()}

    def answers(self) -> Iterator[Update]:
        """One client after the other: arrays near the server's, counts of about half of the task's classes."""
        rng = np.random.default_rng(0)
        for m in range(self.clients):
            arrays = {
                n: a.numpy() + 0.02 * rng.normal(size=a.shape).astype(np.float32)
                for n, a in self.shared_state().items()
            }
            class_ids = np.unique([CLASSES + m % CLASSES, *rng.integers(CLASSES, 2 * CLASSES, 6)])
            statistics: Arrays = {"class_ids": class_ids, "counts": rng.integers(5, 50, len(class_ids))}
            yield Update(f"client {m}", 1, arrays, statistics)


def ours(size: Size, config: Config) -> tuple[dict[str, float], list[SampleSource]]:
    """Seconds of each phase of a whole refinement in the second task's last round; the sources that it trained."""
    server, strategy, sources, seconds = Server(size), HePCo(config), list[SampleSource](), dict[str, float]()
    strategy.previous, strategy.counts = Teachers(server.previous, torch.ones(1, CLASSES)), torch.ones(CLASSES)
    answers, context = list[Update](), RoundContext(Schedule([range(CLASSES), range(CLASSES, 2 * CLASSES)], 1), 2)

    def timed(prompt: DecomposedPrompt, head: Head, trained: list[SampleSource], *rest: Any) -> Any:
        sources.extend(trained)
        started = time.perf_counter()
        distilled = distil(prompt, head, trained, *rest)
        seconds["distillation"] = time.perf_counter() - started
        return distilled

    strategies.hepco.distil = timed  # type: ignore[assignment]  # has the same arguments
    try:
        spent = 0.0
        for answer in server.answers():
            started = time.perf_counter()
            strategy.receive(server, answer, context)  # type: ignore[arg-type]  # all that it needs of a model
            spent += time.perf_counter() - started
            answers.append(replace(answer, arrays={}))
        started = time.perf_counter()
        strategy.refine(server, answers, context)  # type: ignore[arg-type]  # the same
        seconds["whole"] = spent + time.perf_counter() - started
    finally:
        strategies.hepco.distil = distil
    return seconds | {"generators": seconds["whole"] - seconds["distillation"]}, sources


def direct_rho(z: Tensor, keys: Tensor, pool: Tensor) -> Tensor:
    """[B, D], [N, D], [N, V] -> [B, V] by way of [B, N, V]."""
    cosine = F.normalize(z, dim=1) @ F.normalize(keys, dim=1).T
    return (cosine[:, :, None] * pool).sum(dim=1)


def direct_gap(z: Tensor, labels: Tensor, keys: Tensor, pools: Tensor, teachers: Teachers) -> Tensor:
    """sum_b sum_c w_cb |rho(z; server) - rho(z; c)|^2, server and teacher anew in every block and pair."""
    total, models = z.new_zeros(()), teachers.models
    for c, weight in enumerate(teachers.shares[:, labels]):
        for j in range(BLOCKS):
            difference = direct_rho(z, keys[j], pools[j]) - direct_rho(z, models.keys[j, c], models.pools[j, c])
            total = total + (weight[:, None] * difference.square()).sum()
    return total


def direct_generator_loss(
    z: Tensor, labels: Tensor, source: SampleSource, server: StackedModels, options: HePCoOptions
) -> Tensor:
    """Eq. 2 to 5 teacher by teacher."""
    heads, rows = source.teachers.models, source.teachers.models.bias.shape[1]
    total = -options.lambda_mse * direct_gap(z, labels, server.keys[:, 0], server.pools[:, 0], source.teachers)
    for c, weight in enumerate(source.teachers.shares[:, labels]):
        p = F.linear(z, server.weight[0, :rows], server.bias[0, :rows]).log_softmax(dim=1)
        q = F.linear(z, heads.weight[c], heads.bias[c]).log_softmax(dim=1)
        kl = F.kl_div(q, p, reduction="none", log_target=True).sum(dim=1)
        total = total + (weight * (F.nll_loss(q, labels, reduction="none") - options.lambda_kl * kl)).sum()
    return total


def direct_prompt_loss(prompt: DecomposedPrompt, z: Tensor, labels: Tensor, teachers: Teachers) -> Tensor:
    """Eq. 6 teacher by teacher."""
    return direct_gap(z, labels, prompt.keys, prompt.pool.flatten(2), teachers)


def seconds_per_step(step: Callable[[], Tensor], parameters: list[Tensor], steps: int) -> float:
    """Mean over ``steps`` steps of Adam on the loss that ``step`` gives."""
    optimiser = torch.optim.Adam(parameters, 1e-4)
    started = time.perf_counter()
    for _ in range(steps):
        optimiser.zero_grad(set_to_none=True)
        step().backward()
        optimiser.step()
    return (time.perf_counter() - started) / steps


def direct(size: Size, options: HePCoOptions, sources: Sequence[SampleSource]) -> dict[str, float]:
    """Seconds of each phase of the direct form, extrapolated but for the head, whose distillation is ours."""
    server = Server(size)
    latent = StackedModels.stack([server.shared_state()])
    seconds = dict.fromkeys(PHASES, 0.0)
    started = time.perf_counter()
    distil_head(server.head, draw_batches(sources, options.head_steps), options, Event())
    seconds["distillation"] += time.perf_counter() - started
    for source in sources:
        source.generator.train()

        def generate(source: SampleSource = source) -> Tensor:
            return direct_generator_loss(*source.draw(options.batch_size), source, latent, options)

        def follow(source: SampleSource = source) -> Tensor:
            z, labels = source.draw(source.size)
            return direct_prompt_loss(server.prompt, z.detach(), labels, source.teachers)

        parameters = list(source.generator.parameters())
        each = seconds_per_step(generate, parameters, size.timed)  # type: ignore[arg-type]  # Parameters are Tensors
        seconds["generators"] += options.generator_steps * each
        each = seconds_per_step(follow, [*server.prompt.parameters()], size.timed)
        seconds["distillation"] += options.prompt_steps * each
    return seconds | {"whole": sum(seconds.values())}


def check(size: Size, options: HePCoOptions) -> None:
    """Print how far apart the two forms are on the same samples: relative difference of gradients."""
    server, rng = Server(size), torch_rng(0, "check")
    latent = StackedModels.stack([server.shared_state()])
    arrays = [{n: torch.from_numpy(a) for n, a in u.arrays.items()} for u in server.answers()]
    teachers = Teachers(StackedModels.stack(arrays), torch.ones(size.clients, 2 * CLASSES))
    source = SampleSource(teachers, Generator(2 * CLASSES, size.dim, rng), rng, 8)
    z, labels = source.draw(source.size)
    z = z.detach().requires_grad_()
    pair = [
        generator_loss(z, labels, latent, teachers, PromptGap(latent, teachers.models), options),
        direct_generator_loss(z, labels, source, latent, options),
    ]
    slopes = [torch.autograd.grad(loss, z) for loss in pair]
    print(f"gradient of the generator's loss: {_apart(*slopes):.1e} apart, relative")
    z, keys, pool = z.detach(), server.prompt.keys, server.prompt.pool
    expected = torch.autograd.grad(direct_prompt_loss(server.prompt, z, labels, teachers), [keys, pool])
    ones = torch.ones(len(z))
    losses = [prompt_loss(keys[j], pool[j].flatten(1), z, teachers.target(j, z, labels), ones) for j in range(BLOCKS)]
    gradients = torch.autograd.grad(sum(losses, z.new_zeros(())), [keys, pool])
    print(f"gradient of keys and prompts: {_apart(gradients, expected):.1e} apart, relative")


def _apart(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    a, b = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in (first, second))
    return float((a - b).norm() / b.norm())


def _print_head() -> None:
    print(f"{'form':<8}" + "".join(f"{phase + ' s':>14}" for phase in PHASES) + f"{'peak GiB':>10}", flush=True)


def _print_row(form: str, seconds: dict[str, float]) -> None:
    peak = peak_memory() / 2**30
    print(f"{form:<8}" + "".join(f"{seconds[phase]:>14.2f}" for phase in PHASES) + f"{peak:>10.2f}", flush=True)


def compare(size: Size, config: Config) -> float:
    """Print both forms' rows; returns how many times faster ours is."""
    options = HePCo(config).options
    check(size, options)
    _print_head()
    seconds, sources = ours(size, config)
    _print_row("ours", seconds)
    torch.set_num_threads(cores())
    direct_seconds = direct(size, options, sources)
    _print_row("direct", direct_seconds)
    ratio = direct_seconds["whole"] / seconds["whole"]
    print(f"direct: {size.timed} steps of each phase, times the number of steps; its head distillation is ours")
    print(f"ratio {ratio:.1f}x; at full size {REQUIRED:g}x is required")
    return ratio


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="pool 40, D = 192")
    parser.add_argument("--clients", type=int, help="ours alone, with so many and the default of eq. 4")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the default of a run
    size = Size(40, 192) if args.quick else Size()
    size = replace(size, clients=args.clients or size.clients)
    # in both forms all of eq. 4, and the softmax over all seen classes
    compared: dict[str, Scalar] = {} if args.clients else {"hepco-query-gradient": True, "hepco-rows": "seen"}
    config = parse({"method": "hepco", **compared})
    options = HePCo(config).options
    print(
        f"pool {size.pool}, length {2 * LENGTH}, D = {size.dim}, {BLOCKS} blocks, {size.clients} clients and the ",
        end="",
    )
    print(f"previous server; {options.generator_steps} + {options.prompt_steps} + {options.head_steps} steps, ", end="")
    print(f"batch {options.batch_size} + {options.replay_size}; {cores()} cores")
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, {platform.machine()}"
    )
    if not args.clients:
        return 0 if compare(size, config) >= REQUIRED or args.quick else 1
    _print_head()
    _print_row("ours", ours(size, config)[0])
    return 0


if __name__ == "__main__":
    sys.exit(_main())
