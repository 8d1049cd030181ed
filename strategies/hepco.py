"""HePCo, server half: heterogeneous prompt consolidation (Halbe et al., TMLR 2024, section 4)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from strategies.base import Moment, Strategy, Update
from strategies.generator import Generator, Source, train_generator, until
from strategies.teachers import FEW, Batches, Filed, Heads, Latent, Pooled, PromptFile, Teachers
from task.config.schema import Config
from task.message import Arrays
from task.method_options import HePCoOptions
from task.models.model import Head, Model
from task.prompts.decomposed import DecomposedPrompt, cosines
from task.utils.cores import cores
from task.utils.seeding import torch_rng

Batch = Sequence[tuple[Tensor, Tensor]]  # of one step, from each source


class HePCo(Strategy):
    """Plain mean, then all clients and the previous task's server are distilled into it without a single image."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options: HePCoOptions = config.options  # type: ignore[assignment]  # the table gives HePCo these options
        self.known = np.zeros(0)  # how many images of each head row have been reported, over all rounds
        self.previous: tuple[Latent, Tensor] | None = None  # the last task's final server, and ``known`` at that time
        self.arrived: Arrived | None = None  # from a round's first answer on

    def weight(self, update: Update) -> float:
        """All clients count alike (step 1)."""
        return 1.0

    def receive(self, model: Model, update: Update, moment: Moment) -> None:
        """Keep the client as a teacher."""
        if update.prototypes:
            self.arrived = self.arrived or Arrived()
            self.arrived.add(update.client, update.arrays)

    def refine(self, model: Model, updates: Sequence[Update], moment: Moment) -> dict[str, float]:
        """Train the generators and distil (steps 2 to 4); remember the server when a task ends."""
        arrived, self.arrived = self.arrived, None
        counted = [u for u in updates if u.prototypes]
        metrics = self._consolidate(model, counted, arrived, moment) if arrived else {}
        if moment.ends_task and self.known.any():  # a server that nobody has taught teaches nothing
            known = torch.from_numpy(self.known).float().to(model.device)
            self.previous = (Latent.stack([model.travelling()]), known)
        return metrics

    def _consolidate(
        self, model: Model, updates: Sequence[Update], arrived: "Arrived", moment: Moment
    ) -> dict[str, float]:
        counts = class_counts(updates, moment.schedule.seen_classes(moment.task))
        self.known = counts.sum(axis=0) + np.pad(self.known, (0, counts.shape[1] - len(self.known)))
        histogram = torch.from_numpy(counts).float().to(model.device).sum(dim=0)
        clients = arrived.teachers([u.client for u in updates], counts, model.device)
        sources, server = self._sources(model, clients, histogram, moment), Latent.stack([model.travelling()])
        with side_by_side(model.device) as (threads, stop):
            found = threads.map(lambda of: train_generator(of[0], server, self.options, stop), sources)
            losses = dict(zip(("generator-loss", "replay-generator-loss"), found, strict=False))
        prompts, head = distil(model.prompt, model.head, sources, self.options)  # type: ignore[arg-type]  # the table gives HePCo this prompt
        return losses | {"prompt-distillation-loss": prompts, "head-distillation-loss": head}

    def _sources(self, model: Model, clients: Teachers, histogram: Tensor, moment: Moment) -> list[tuple[Source, int]]:
        """Sources with their part of a composite batch: the clients, then the previous server if any."""
        plan = [(clients, histogram, self.options.batch_size)]
        if self.previous and self.options.replay_size:
            server, known = self.previous
            plan.append((Pooled(server, (known > 0).float()[None]), known, self.options.replay_size))
        sources = []
        for i, (teachers, histogram, size) in enumerate(plan):
            start = torch_rng(self.config.seed, "generator", moment.server_round, i)
            rng = torch_rng(self.config.seed, "latent", moment.server_round, i, device=model.device)
            generator = Generator(len(histogram), model.backbone.dim, self.options, start).to(model.device)
            sources.append((Source(teachers, histogram, generator, rng), size))
        return sources


class Arrived:
    """The models of a round's clients; where they are many, their prompts lie in a file."""

    def __init__(self) -> None:
        self._models: dict[str, Arrays] = {}
        self._file: PromptFile | None = None  # from the first that makes them many; in the order of the models

    def add(self, client: str, arrays: Arrays) -> None:
        """A client's arrays.

        Raises:
            OSError: the file cannot be written.
        """
        self._models[client] = arrays
        if self._file:
            self._put_away(self._file, client)
        elif len(self._models) > FEW:
            self._file = PromptFile()
            for each in self._models:
                self._put_away(self._file, each)

    def _put_away(self, file: PromptFile, client: str) -> None:
        model = self._models[client]
        file.append(model)
        self._models[client] = {name: array for name, array in model.items() if name.startswith("head.")}

    def teachers(self, clients: Sequence[str], counts: np.ndarray, device: torch.device) -> Teachers:
        """All of them in this order, of counts n_cy [C, S]; nothing is left here."""
        found = torch.from_numpy(counts).float().to(device)
        shares = found / found.sum(dim=0).clamp(min=1)
        places = {client: place for place, client in enumerate(self._models)}
        models = (_tensors(self._models.pop(client), device) for client in clients)
        if self._file:
            part = range(self._file.shape[0])
            return Filed(Heads.of(models), shares, self._file, [places[client] for client in clients], part)
        return Pooled(Latent.stack(models, len(clients)), shares)


def _tensors(arrays: Arrays, device: torch.device) -> Mapping[str, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def class_counts(updates: Sequence[Update], order: Sequence[int]) -> np.ndarray:
    """n_{c,y} of each client and head row, float64 [C, S]; ``order`` is the class of each row."""
    counts = np.zeros((len(updates), max(order) + 1))
    for row, update in zip(counts, updates, strict=True):
        row[update.prototypes["class_ids"]] = update.prototypes["counts"]
    return counts[:, list(order)]


@contextmanager
def side_by_side(device: torch.device) -> Iterator[tuple[ThreadPoolExecutor, Event]]:
    """Threads for parts of the server's work, and what tells them to leave off: whoever interrupts a run is not kept.

    One on a GPU, else as many as there are cores beside torch's own threads; how many changes no result. Unlike torch's
    they do not wait for each other in every product, which is slow on busy cores.
    """
    stop = Event()
    with ThreadPoolExecutor(_at_once(device), "server") as threads:
        try:
            yield threads, stop
        finally:
            stop.set()


def draw_batches(sources: Sequence[tuple[Source, int]], steps: Iterable[int]) -> Iterator[Batch]:
    """For each step samples of each source, the generators as they are; drawn when they are asked for."""
    for _ in steps:
        with torch.no_grad():  # one pass for all steps would be no faster and need hundreds of MiB for its layers
            batch = [source.draw(size) for source, size in sources]
        yield batch


def distil(
    prompt: DecomposedPrompt, head: Head, sources: Sequence[tuple[Source, int]], options: HePCoOptions
) -> tuple[float, float]:
    """Prompts and head, in place; returns the last batch's loss per sample of each (step 4).

    The head and the prompts of each block share nothing but where the samples come from, so that on a CPU they are
    distilled side by side. The samples of all blocks are drawn first: batch x steps x D numbers.
    """
    blocks, losses = len(prompt.blocks), []
    with side_by_side(prompt.pool.device) as (threads, stop):

        def draw(of: tuple[Source, int]) -> Batches:
            return [own for (own,) in draw_batches([of], until(stop, range(options.prompt_steps)))]

        batches = [*threads.map(draw, sources)]
        for part in _parts(blocks, prompt.pool.device):
            targets = (s.teachers.blocks(part).targets(own) for (s, _), own in zip(sources, batches, strict=True))
            steps = zip(zip(*batches, strict=True), zip(*targets, strict=True), strict=True)
            losses.append(threads.submit(distil_blocks, prompt, part, until(stop, steps), options))
        others = draw_batches(sources, until(stop, range(options.head_steps)))
        last = threads.submit(distil_head, head, others, options)
        total = sum(loss for part in losses for loss in part.result())
        return total / sum(size for _, size in sources), last.result()


def _at_once(device: torch.device) -> int:
    return max(1, cores() // torch.get_num_threads()) if device.type == "cpu" else 1


def _parts(blocks: int, device: torch.device) -> list[slice]:
    """Blocks that are distilled together: as many as make a part for each thread, or each one alone.

    One thread of torch takes the blocks of a product one after another, so that the parts change no bit. Several share
    the work of a product, and round otherwise for each number of blocks in it.
    """
    several = device.type == "cpu" and torch.get_num_threads() > 1
    number = blocks if several else min(blocks, _at_once(device))
    return [slice(int(p[0]), int(p[-1]) + 1) for p in np.array_split(np.arange(blocks), number)]


def distil_blocks(
    prompt: DecomposedPrompt, part: slice, steps: Iterable[tuple[Batch, tuple[Tensor, ...]]], options: HePCoOptions
) -> list[float]:
    """Keys and prompts of some prompted blocks, in place; returns each one's loss, summed over the last batch.

    Args:
        prompt: the server's.
        part: which of its blocks.
        steps: a batch and what each source's teachers make of their samples in these blocks, [J, B, V].
        options: the step size.
    """
    keys = prompt.keys.detach()[part].clone().requires_grad_()
    # fused Adam takes it for given that a gradient lies as its parameter does
    pool = prompt.pool.detach()[part].flatten(2).clone(memory_format=torch.contiguous_format)
    optimiser = torch.optim.Adam([keys, pool], options.distillation_learning_rate, fused=True)
    apart = pool.new_empty(len(pool), 0)
    for drawn, targets in steps:
        torch.cat(targets, dim=1, out=apart)
        prompt_gradients(keys, pool, torch.cat([z for z, _ in drawn]), apart)
        optimiser.step()
    prompt.keys.data[part], prompt.pool.data[part] = keys.detach(), pool.view_as(prompt.pool[part])
    return torch.linalg.vecdot(apart.flatten(1), apart.flatten(1)).tolist()


def prompt_gradients(keys: Tensor, pool: Tensor, z: Tensor, apart: Tensor) -> None:
    """Set ``grad`` of keys and pool to those of eq. 6, sum_c w_c |rho(z; server) - rho(z; c)|^2 over a batch.

    As the weights of a sample sum to 1, that is |rho(z; server) - sum_c w_c rho(z; c)|^2 and a constant: one target
    instead of C, and the same gradients. They are written out, and that of the pool lies where the one before lay, as
    the passes over [J, B, V] that autograd would make, and fresh memory for each, cost as much as the products.

    Args:
        keys: the server's, [J, N, D], requiring a gradient.
        pool: the server's prompts, [J, N, V], V = 2 L_p D.
        z: samples [B, D].
        apart: the target sum_c w_c rho(z; c), [J, B, V]; becomes rho(z; server) less the target.
    """
    weights = cosines(z, keys)
    given = weights.detach()
    apart.baddbmm_(given, pool, beta=-1)
    keys.grad = None
    weights.backward(2 * (apart @ pool.mT))  # which lays the gradient out as the keys are
    pool.grad = torch.matmul((2 * given).mT, apart, out=pool.grad)


def distil_head(head: Head, batches: Iterable[Batch], options: HePCoOptions) -> float:
    """The head by cross-entropy over all seen classes, in place; returns the last batch's loss."""
    optimiser = torch.optim.Adam(head.parameters(), options.distillation_learning_rate, fused=True)
    loss = torch.zeros(())
    for drawn in batches:
        samples, labels = zip(*drawn, strict=True)
        loss = F.cross_entropy(head(torch.cat(samples)), torch.cat(labels))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return float(loss.detach())
