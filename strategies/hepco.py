"""HePCo, server half: heterogeneous prompt consolidation (Halbe et al., TMLR 2024, section 4)."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Event

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.base import RoundContext, Strategy, Update
from strategies.hepco_generator import Generator, SampleSource, StackedModels, Teachers, minimise, train_generator
from task.config.schema import Config
from task.keys import ConfigError
from task.message import Arrays
from task.method_options import HePCoOptions
from task.models.head import Head
from task.models.model import Model, prompt_of
from task.prompts.decomposed import DecomposedPrompt, cosines
from task.utils.memory import available_memory
from task.utils.seeding import torch_rng
from task.utils.threads import run_in_threads

Sources = Sequence[SampleSource]
Pairs = Iterable[tuple[Tensor, Tensor]]  # of each step: samples [B, D], and their head rows [B]
Steps = Iterable[tuple[Tensor, Tensor, Tensor]]  # samples [B, D], their targets [B, V] and their importance [B]
MARGIN = 1.2  # memory that a teacher takes, over that of its arrays, their copy and Gram matrices; measured: 1.0 to 1.1


class HePCo(Strategy):
    """Plain mean of the clients, then their knowledge and the previous server's is distilled into it, without an image.

    Step 1: mean. Step 2: a generator learns features z [B, D] of given classes (eq. 2 to 5, ``generator_loss``).
    Step 3: a second one does so for earlier tasks, with the previous server as its only teacher. Step 4: features of
    both train prompts and keys by eq. 6 (``prompt_loss``), and the head [S, D] by cross-entropy.
    """

    options: HePCoOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.counts = torch.zeros(0)  # how many images of each head row have been reported, over all rounds, [S]
        self.previous: Teachers | None = None  # the last task's final server, and ``counts`` at that time
        self.answers: dict[str, Arrays] = {}  # of a round's clients, until its refinement
        self.memory_checked = False  # with the first answer of the run

    def weight(self, update: Update) -> float:
        """All clients count alike (step 1)."""
        return 1.0

    def receive(self, model: Model, update: Update, context: RoundContext) -> None:
        """Keep the client as a teacher; raises a ConfigError if the teachers of a round do not fit in memory."""
        old = len(context.old_classes)
        if self.counts[:old].any() and (not self.previous or self.previous.models.bias.shape[1] < old):
            self._remember(model, old)  # the last round of the last task was undone
        if not update.statistics:
            return
        if not self.memory_checked:  # once: memory that an earlier round has freed does not always count as free
            clients = self.config.clients_per_round or self.config.num_clients
            require_memory(model.shared_state(), clients, model.device)
            self.memory_checked = True
        self.answers[update.client] = update.arrays

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Train the generators and distil (steps 2 to 4); remember the server when a task ends."""
        metrics = self._consolidate(model, [u for u in updates if u.statistics], context) if self.answers else {}
        self.answers = {}
        if context.ends_task and self.counts.any():  # a server that nobody has taught teaches nothing
            self._remember(model, len(context.seen_classes))
        return metrics

    def _remember(self, model: Model, rows: int) -> None:
        """Make the model with its first head ``rows`` the teacher of the coming task."""
        server = StackedModels.stack([model.shared_state()])
        server = replace(server, weight=server.weight[:, :rows], bias=server.bias[:, :rows])
        cpu = torch.device("cpu")  # a checkpoint may go to a machine without a GPU
        self.previous = Teachers(server, self.counts[None]).to(cpu)

    def _consolidate(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        own, counts = self.options, class_counts(updates, context)
        self.counts = counts.sum(dim=0) + F.pad(self.counts, (0, counts.shape[1] - len(self.counts)))
        arrays = [self.answers.pop(update.client) for update in updates]
        models = [{name: torch.from_numpy(a).to(model.device) for name, a in shared.items()} for shared in arrays]
        first_row = len(context.old_classes) if own.rows == "current" else 0
        of_round = own.sample_weights == "round"
        clients = Teachers(StackedModels.stack(models), counts.to(model.device), of_round, first_row)
        del arrays, models  # as large as their copies
        sources = [self._source(model, clients, context)]
        if self.previous and own.replay_size:
            previous = self.previous.to(model.device)
            previous = with_new_rows(previous, model.head) if own.replay_rows == "seen" else previous
            sources.append(self._source(model, previous, context, replay=True))
        server = StackedModels.stack([model.shared_state()])
        losses = run_in_threads([partial(train_generator, s, server, own) for s in sources], model.device)
        metrics = dict(zip(("generator-loss", "replay-generator-loss"), losses, strict=False))
        prompts, head = distil(prompt_of(model, DecomposedPrompt), model.head, sources, own)
        return metrics | {"prompt-distillation-loss": prompts, "head-distillation-loss": head}

    def _source(self, model: Model, teachers: Teachers, context: RoundContext, replay: bool = False) -> SampleSource:
        own, stream = self.options, int(replay)
        start = torch_rng(self.config.seed, "generator", context.server_round, stream)
        rng = torch_rng(self.config.seed, "latent", context.server_round, stream, device=model.device)
        generator = Generator(teachers.counts.shape[1], model.backbone.dim, start).to(model.device)
        size, further = (own.replay_size, own.replay_steps * context.task) if replay else (own.batch_size, 0)
        return SampleSource(teachers, generator, rng, size, further)


def with_new_rows(previous: Teachers, head: Head) -> Teachers:
    """The previous server with a head of as many rows as ``head``: the rows of the new classes are untrained."""
    models, grown = previous.models, copy.deepcopy(head)
    grown.weight, grown.bias = nn.Parameter(models.weight[0]), nn.Parameter(models.bias[0])
    grown.grow(len(head.bias) - len(grown.bias))
    return replace(previous, models=replace(models, weight=grown.weight.data[None], bias=grown.bias.data[None]))


def class_counts(updates: Sequence[Update], context: RoundContext) -> Tensor:
    """n_{c,y} of each client and head row, float32 [C, S]."""
    counts = torch.zeros(len(updates), len(context.seen_classes))
    for row, update in zip(counts, updates, strict=True):
        rows = context.head_rows(torch.from_numpy(update.statistics["class_ids"]))
        row[rows] = torch.from_numpy(update.statistics["counts"]).float()
    return counts


def distil(prompt: DecomposedPrompt, head: Head, sources: Sources, options: HePCoOptions) -> tuple[float, float]:
    """Distil prompts and head in place (step 4); returns the last batch's loss per sample of each.

    The head and each block are distilled side by side: they share nothing but the sources of samples.
    """
    batches, blocks = [*draw_batches(sources, options.prompt_steps)], range(len(prompt.blocks))
    jobs = [partial(distil_block, prompt, j, block_steps(sources, batches, j), options) for j in blocks]
    jobs.append(partial(distil_head, head, draw_batches(sources, options.head_steps), options))
    *prompt_losses, head_loss = run_in_threads(jobs, prompt.pool.device)
    return sum(prompt_losses) / sum(source.size for source in sources), head_loss


def draw_batches(sources: Sources, steps: int) -> Pairs:
    """For each step samples of all sources [B, D], without gradient, and their head rows [B]."""
    for _ in range(steps):
        with torch.no_grad():
            samples, labels = zip(*(source.draw(source.size) for source in sources), strict=True)
        yield torch.cat(samples), torch.cat(labels)


def block_steps(sources: Sources, batches: Pairs, block: int) -> Steps:
    """For each batch: samples [B, D], what their own sources want of a block [B, V], and their importance [B]."""
    sizes = [source.size for source in sources]
    for z, labels in batches:
        targets, importance = [], []
        for source, x, y in zip(sources, z.split(sizes), labels.split(sizes), strict=True):
            targets.append(source.teachers.target(block, x, y))
            importance.append(source.teachers.importance[y])
        yield z, torch.cat(targets), torch.cat(importance)


def distil_block(prompt: DecomposedPrompt, block: int, steps: Steps, options: HePCoOptions, stop: Event) -> float:
    """Distil keys and prompts of a block in place, on :func:`block_steps`; returns the last batch's loss."""
    keys = prompt.keys.detach()[block].clone().requires_grad_()
    pool = prompt.pool.detach()[block].flatten(1).clone().requires_grad_()
    losses = (prompt_loss(keys, pool, *step) for step in steps)
    loss = minimise([keys, pool], losses, options.distillation_learning_rate, stop)
    prompt.keys.data[block], prompt.pool.data[block] = keys.detach(), pool.detach().view_as(prompt.pool[block])
    return loss


def prompt_loss(keys: Tensor, pool: Tensor, z: Tensor, target: Tensor, importance: Tensor) -> Tensor:
    """Eq. 6 in a block but for a constant: a |rho(z; server) - sum_c w_c rho(z; c)|^2, summed over samples z [B, D].

    As the weights w of a sample sum to 1, one target sum_c w_c rho(z; c) [B, V] gives the same gradients as all terms
    of a sum_c w_c |rho(z; server) - rho(z; c)|^2; a is the sample's importance [B]. Keys [N, D] and pool [N, V] are
    the server's.
    """
    root = importance.sqrt()[:, None]
    return F.mse_loss((root * cosines(z, keys)) @ pool, root * target, reduction="sum")


def distil_head(head: Head, batches: Pairs, options: HePCoOptions, stop: Event) -> float:
    """Distil the head in place, by cross-entropy over all seen classes; returns the last batch's loss per sample."""
    losses = (F.cross_entropy(head(z), labels) for z, labels in batches)
    return minimise(head.parameters(), losses, options.distillation_learning_rate, stop)


def require_memory(arrays: Mapping[str, Tensor], clients: int, device: torch.device) -> None:
    """A ConfigError, which says how many would fit, if so many teachers with arrays like these do not fit in memory."""
    blocks, prompts, _ = arrays["prompt.keys"].shape
    numbers = 2 * sum(array.numel() for array in arrays.values()) + blocks * (2 * prompts) ** 2  # the Gram matrices
    each, free = int(MARGIN * 4 * numbers), int(available_memory())
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by PyTorch, which keeps it
        free = min(free, torch.cuda.mem_get_info(device)[0] + unused)
    if clients * each > free:
        needed, left = (f"{size / 2**30:.3g} GiB" for size in (clients * each, free))
        raise ConfigError(
            f"hepco keeps the prompts of all clients of a round in memory: {clients} clients need {needed}, {left} are "
            f"free, enough for {free // each}: lower clients-per-round, prompt-pool or prompt-length."
        )
