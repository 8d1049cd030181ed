"""HePCo: the decomposed prompt, the latent generator and the two distillations; numbers by hand or float64 NumPy."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

import strategies.hepco
import task.utils.threads
from server_app.rounds.run import run_experiment
from server_app.transport.in_process import InProcessTransport
from strategies.base import RoundContext, Update
from strategies.hepco import (
    HePCo,
    block_steps,
    class_counts,
    distil,
    distil_block,
    prompt_loss,
    require_memory,
    with_new_rows,
)
from strategies.hepco_generator import (
    Generator,
    PromptGap,
    SampleSource,
    StackedModels,
    Teachers,
    generator_loss,
    train_generator,
)
from task.config.parsing import parse
from task.keys import ConfigError
from task.method_options import HePCoOptions
from task.models.head import Head
from task.models.model import build_model
from task.prompts.decomposed import DecomposedPrompt
from task.prototypes.statistics import CountStatistics
from task.scenario.class_stream import Schedule
from task.utils.threads import run_in_threads
from tests.conftest import QUICK
from tests.helpers.prompts import prompt_config

J, N, L, D, S, C, B = 2, 4, 3, 5, 6, 3, 7  # blocks, pool, vectors, dimension, head rows, clients, samples
SCHEDULE = Schedule([[7, 2], [5, 0]], 2)  # class of head row 0, 1, 2, 3 = 7, 2, 5, 0
SMALL = {"generator-steps": 2, "prompt-steps": 2, "head-steps": 2}


def options(**keys):
    return HePCoOptions(**keys)


def arrays(seed, rows=S, dtype=np.float64):
    """The travelling arrays of a model; the pool is far from zero, as the uniform(0, 1) start is."""
    rng = np.random.default_rng(seed)
    shapes = {"prompt.keys": (J, N, D), "prompt.pool": (J, N, 2, L, D), "head.weight": (rows, D), "head.bias": (rows,)}
    return {name: rng.normal(1 if "prompt" in name else 0, 1, shape).astype(dtype) for name, shape in shapes.items()}


def latent(*models):
    return StackedModels.stack([{n: torch.from_numpy(a) for n, a in m.items()} for m in models])


def teachers(models, counts):
    return Teachers(latent(*models), torch.from_numpy(np.asarray(counts, models[0]["head.bias"].dtype)))


def numpy_rho(model, z, block):
    """sum_i cos(z, k_i) P_i, one term after another, [2, L, D]."""
    total = np.zeros((2, L, D))
    for k, p in zip(model["prompt.keys"][block], model["prompt.pool"][block], strict=True):
        total += (z @ k) / (np.linalg.norm(z) * np.linalg.norm(k)) * p
    return total


def numpy_gap(server, teacher, z):
    return sum(((numpy_rho(server, z, j) - numpy_rho(teacher, z, j)) ** 2).sum() for j in range(J))


def numpy_log_softmax(model, z, rows, first=0):
    """Of each head row; -inf before ``first``."""
    logits = model["head.weight"][:rows] @ z + model["head.bias"][:rows]
    logits[:first] = -np.inf
    return log_softmax(logits)


SERVER, CLIENTS = arrays(0), [arrays(seed) for seed in range(1, 1 + C)]
Z = np.random.default_rng(9).normal(size=(B, D))
LABELS = np.array([3, 5, 4, 3, 5, 5, 4])  # rows 0 to 2 are of earlier tasks
COUNTS = np.array([[0, 0, 0, 4, 0, 1], [0, 0, 0, 2, 7, 1], [0, 0, 0, 2, 0, 6.0]])
SHARES = COUNTS / np.maximum(COUNTS.sum(0), 1)


def test_prompt_is_the_sum_over_the_pool_per_image():
    prompt = DecomposedPrompt(prompt_config([1, 4], L, N, seed=3), D)
    model = {f"prompt.{n}": p.detach().double().numpy() for n, p in prompt.named_parameters()}
    with torch.no_grad():
        by_block = prompt(torch.from_numpy(Z).float())
    assert list(by_block) == [1, 4]
    for j, prefixes in enumerate(by_block.values()):
        assert prefixes.shape == (B, 2, L, D)
        assert np.allclose(prefixes, [numpy_rho(model, z, j) for z in Z], atol=1e-5)


def test_prompt_starts_uniform_and_has_the_papers_size():
    config = parse({"method": "hepco", "seed": 5})
    prompt = DecomposedPrompt(config, 16)
    assert {n: tuple(p.shape) for n, p in prompt.named_parameters()} == {
        "keys": (5, 100, 16),
        "pool": (5, 100, 2, 10, 16),  # a length of 20: ten key and ten value vectors
    }
    for p in prompt.parameters():
        assert 0 <= p.min() < 0.01 < 0.99 < p.max() < 1
        assert float(p.detach().mean()) == pytest.approx(0.5, abs=0.02)
    other = DecomposedPrompt(parse({"method": "hepco", "seed": 6}), 16)
    assert not torch.equal(prompt.pool, other.pool)


def test_defaults_are_the_papers():
    own = options()
    assert (own.lambda_kl, own.lambda_mse) == (1.0, 0.1)
    assert (own.generator_steps, own.prompt_steps, own.head_steps) == (100, 200, 200)
    assert (own.generator_learning_rate, own.distillation_learning_rate) == (1e-4, 1e-4)
    assert (own.batch_size, own.replay_size) == (64, 32)
    assert [options(replay_ratio=ratio).replay_size for ratio in (0.0, 0.001, 0.25)] == [0, 1, 16]
    generator = Generator(10, 768, torch.Generator().manual_seed(0))
    assert [tuple(p.shape) for p in generator.net.parameters() if p.ndim == 2] == [(256, 128), (1024, 256), (768, 1024)]
    assert generator.embedding.weight.shape == (10, 64)
    assert sum(isinstance(m, torch.nn.BatchNorm1d) for m in generator.modules()) == 2


def test_statistics_are_counts_alone():
    statistics = CountStatistics().compute(torch.empty(5, 0), torch.tensor([4, 2, 4, 9, 4]), options())
    assert {n: a.tolist() for n, a in statistics.items()} == {"class_ids": [2, 4, 9], "counts": [1, 3, 1]}
    assert all(a.dtype == np.int64 for a in statistics.values())
    assert CountStatistics.carries
    assert not CountStatistics.needs_features
    assert CountStatistics().expected(np.ones(3), {}, D, parse({"method": "hepco"})) == {}


def test_quadratic_form_equals_the_direct_difference_of_prompts():
    z = torch.from_numpy(Z).requires_grad_()
    gaps = PromptGap(latent(SERVER), latent(*CLIENTS))(z)
    expected = np.array([[numpy_gap(SERVER, client, one) for one in Z] for client in CLIENTS])
    assert np.allclose(gaps.detach(), expected, rtol=1e-12)
    gaps.sum().backward()
    step = 1e-6 * np.eye(D)
    slope = [sum(numpy_gap(SERVER, c, Z[2] + e) - numpy_gap(SERVER, c, Z[2] - e) for c in CLIENTS) / 2e-6 for e in step]
    assert np.allclose(z.grad[2], slope, rtol=1e-6)


def test_quadratic_form_is_exact_in_float32_where_models_are_close():
    """Prompts of size 50 that differ by 0.01: the plain form |a P|^2 - 2 a P b Q + |b Q|^2 would lose all digits."""
    rng = np.random.default_rng(4)
    near = {n: (a + 1e-4 * rng.normal(size=a.shape)) for n, a in SERVER.items()}
    single = [{n: a.astype(np.float32) for n, a in m.items()} for m in (SERVER, near)]
    gaps = PromptGap(latent(single[0]), latent(single[1]))(torch.from_numpy(Z).float())[0]
    wide = [{n: a.astype(np.float64) for n, a in m.items()} for m in single]
    assert np.allclose(gaps, [numpy_gap(*wide, z) for z in Z], rtol=1e-2)


def numpy_generator_loss(teachers, shares, labels, rows, kl, mse, turned=False):
    total = 0.0
    for z, y in zip(Z, labels, strict=True):
        for teacher, share in zip(teachers, shares, strict=True):
            p, q = numpy_log_softmax(SERVER, z, rows), numpy_log_softmax(teacher, z, rows)
            divergence = (np.exp(q) * (q - p)).sum() if turned else (np.exp(p) * (p - q)).sum()
            total += share[y] * (-q[y] - kl * divergence - mse * numpy_gap(SERVER, teacher, z))
    return total


def test_generator_loss_among_current_rows():
    """Rows 3 to 5 alone: the softmax of each model over these, worked out image by image and client by client."""
    server, labels = latent(SERVER), torch.from_numpy(LABELS)
    clients = replace(teachers(CLIENTS, COUNTS), first_row=3)
    loss = generator_loss(torch.from_numpy(Z), labels, server, clients, None, options())
    expected = 0.0
    for z, y in zip(Z, LABELS, strict=True):
        for client, share in zip(CLIENTS, SHARES, strict=True):
            p, q = (numpy_log_softmax(model, z, S, first=3)[3:] for model in (SERVER, client))
            expected += share[y] * (-q[y - 3] - (np.exp(p) * (p - q)).sum())
    assert float(loss) == pytest.approx(expected, rel=1e-10)
    assert float(loss) != pytest.approx(numpy_generator_loss(CLIENTS, SHARES, LABELS, S, 1.0, 0.0), rel=0.01)


@pytest.mark.parametrize(("kl", "mse"), [(1.0, 0.1), (0.0, 0.0), (2.0, 0.0), (0.0, 0.3)])
def test_generator_loss_of_clients(kl, mse):
    server, clients = latent(SERVER), teachers(CLIENTS, COUNTS)
    own, labels = options(lambda_kl=kl, lambda_mse=mse), torch.from_numpy(LABELS)
    loss = generator_loss(torch.from_numpy(Z), labels, server, clients, PromptGap(server, clients.models), own)
    assert float(loss) == pytest.approx(numpy_generator_loss(CLIENTS, SHARES, LABELS, S, kl, mse), rel=1e-10)


def test_generator_loss_with_the_public_codes_divergence_and_weights():
    """KL(client || server), and n_cy over the 23 images of the round in place of those of the class."""
    server, labels = latent(SERVER), torch.from_numpy(LABELS)
    clients = Teachers(latent(*CLIENTS), torch.from_numpy(COUNTS), of_round=True)
    own = options(divergence="client-server")
    loss = generator_loss(torch.from_numpy(Z), labels, server, clients, PromptGap(server, clients.models), own)
    assert COUNTS.sum() == 23
    expected = numpy_generator_loss(CLIENTS, COUNTS / 23, LABELS, S, 1.0, 0.1, turned=True)
    assert float(loss) == pytest.approx(expected, rel=1e-10)


def test_the_gap_trains_the_generator_only_where_asked():
    """The difference of the two gradients is that of -lambda_MSE gap alone, weighted by the shares."""
    server, clients = latent(SERVER), teachers(CLIENTS, COUNTS)
    gap, labels = PromptGap(server, clients.models), torch.from_numpy(LABELS)
    losses, gradients = [], []
    for asked in (False, True):
        z = torch.from_numpy(Z).requires_grad_()
        own = options(query_gradient=asked)
        losses.append(generator_loss(z, labels, server, clients, gap, own))
        gradients.append(torch.autograd.grad(losses[-1], z)[0])
    assert torch.equal(*losses)
    z = torch.from_numpy(Z).requires_grad_()
    expected = torch.autograd.grad(-0.1 * (clients.shares[:, labels] * gap(z)).sum(), z)[0]
    assert torch.allclose(gradients[1] - gradients[0], expected)
    assert expected.abs().min() > 0


def test_generator_loss_of_the_previous_server_knows_its_rows_only():
    previous, labels = arrays(7, rows=3), np.array([0, 2, 1, 1, 0, 2, 2])
    server, teacher = latent(SERVER), teachers([previous], [[2, 1, 5]])
    gap = PromptGap(server, teacher.models)
    loss = generator_loss(torch.from_numpy(Z), torch.from_numpy(labels), server, teacher, gap, options())
    assert float(loss) == pytest.approx(numpy_generator_loss([previous], np.ones((1, 3)), labels, 3, 1.0, 0.1))


def test_target_is_the_weighted_sum_of_the_teachers_prompts():
    z, labels, clients = torch.from_numpy(Z), torch.from_numpy(LABELS), teachers(CLIENTS, COUNTS)
    for j in range(J):
        for part in (slice(4), slice(4, B)):
            target = clients.target(j, z[part], labels[part]).unflatten(-1, (2, L, D))
            expected = [
                sum(s[y] * numpy_rho(c, one, j) for s, c in zip(SHARES, CLIENTS, strict=True))
                for one, y in zip(Z[part], LABELS[part], strict=True)
            ]
            assert np.allclose(target, expected, rtol=1e-12, atol=1e-12)


def test_one_target_gives_the_gradient_of_the_sum_over_teachers():
    """Eq. 6 teacher by teacher, with its product over the pool written out, differs by a constant only."""
    z, labels, clients = torch.from_numpy(Z), torch.from_numpy(LABELS), teachers(CLIENTS, COUNTS)
    for j in range(J):
        target, differences = clients.target(j, z, labels), []
        for seed in (0, 1):
            prompt = DecomposedPrompt(prompt_config(range(J), L, N, seed=seed), D).double()
            keys, pool = prompt.keys.detach()[j].requires_grad_(), prompt.pool.detach()[j].requires_grad_()
            ours = prompt_loss(keys, pool.flatten(1), z, target, torch.ones(B))
            cosine = torch.nn.functional.cosine_similarity(z[:, None], keys, dim=-1)
            server = (cosine[:, :, None, None, None] * pool).sum(1)
            direct = torch.zeros((), dtype=torch.float64)
            for client, weight in zip(CLIENTS, torch.from_numpy(SHARES[:, LABELS]), strict=True):
                theirs = torch.from_numpy(np.array([numpy_rho(client, one, j) for one in Z]))
                direct = direct + (weight * (server - theirs).square().sum((1, 2, 3))).sum()
            gradients = [torch.autograd.grad(loss, [keys, pool]) for loss in (ours, direct)]
            assert all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))
            differences.append(float((direct - ours).detach()))
        assert differences[0] == pytest.approx(differences[1])


def test_the_loss_told_is_the_last_batchs_of_the_block():
    """|rho(z; server) - target|^2 of the samples, before the step that they bring about."""
    for j in range(J):
        prompt = DecomposedPrompt(prompt_config(range(J), L, N), D)
        target = np.random.default_rng(3).normal(size=(B, 2 * L * D))
        model = {f"prompt.{n}": p.detach().double().numpy() for n, p in prompt.named_parameters()}
        expected = np.square([numpy_rho(model, z, j).ravel() for z in Z] - target).sum()
        steps = [(torch.from_numpy(Z).float(), torch.from_numpy(target).float(), torch.ones(B))]
        assert distil_block(prompt, j, steps, options(), Event()) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["keys", "pool"])
def test_how_arrays_lie_in_memory_does_not_matter(name):
    distilled = []
    for lie_otherwise in (False, True):
        prompt = DecomposedPrompt(prompt_config(range(J), L, N), D)
        own = getattr(prompt, name)
        own.data = own.data.transpose(1, 2).contiguous().transpose(1, 2) if lie_otherwise else own.data
        rng = torch.Generator().manual_seed(0)
        shapes = ((B, D), (B, 2 * L * D))
        steps = [(*(torch.randn(shape, generator=rng) for shape in shapes), torch.ones(B)) for _ in range(3)]
        for j in range(J):
            distil_block(prompt, j, steps, options(distillation_learning_rate=0.01), Event())
        distilled.append([p.detach().clone() for p in prompt.parameters()])
    assert all(torch.allclose(a, b) for a, b in zip(*distilled, strict=True))


def source(models, counts, size=8):
    generator = Generator(len(counts[0]), D, torch.Generator().manual_seed(0))
    return SampleSource(teachers(models, counts), generator, torch.Generator().manual_seed(1), size)


def test_the_previous_server_over_all_seen_rows_has_new_rows_as_they_started():
    """Rows 3 to 5 came since; the server has trained them, its teacher has them as they started."""
    previous, labels, head = single(7, 3), np.array([0, 2, 1, 1, 0, 2, 2]), Head(D, 0)
    head.grow(3)
    head.grow(S - 3)
    grown = {n: a.astype(np.float64) for n, a in previous.items()}
    for name, rows in (("head.weight", head.weight), ("head.bias", head.bias)):
        grown[name] = np.concatenate([grown[name], rows.detach().double().numpy()[3:]])
    trained = head.weight.data.add_(1).clone()
    teacher = with_new_rows(teachers([previous], [[2, 1, 5]]), head)
    assert torch.equal(head.weight, trained)
    assert teacher.counts.tolist() == [[2, 1, 5]]
    server = {n: a.astype(np.float32) for n, a in SERVER.items()}
    gap = PromptGap(latent(server), teacher.models)
    loss = generator_loss(
        torch.from_numpy(Z).float(), torch.from_numpy(labels), latent(server), teacher, gap, options()
    )
    assert float(loss) == pytest.approx(numpy_generator_loss([grown], np.ones((1, 3)), labels, S, 1.0, 0.1), rel=1e-4)
    assert float(loss) != pytest.approx(numpy_generator_loss([grown], np.ones((1, 3)), labels, 3, 1.0, 0.1), rel=1e-2)


def single(seed, rows=S):
    return arrays(seed, rows, np.float32)


def test_training_lowers_the_generators_loss():
    def after(steps):
        own = options(generator_steps=steps, generator_learning_rate=1e-2)
        where = source([single(1), single(2)], COUNTS[:2])
        return train_generator(where, latent(single(0)), own, Event()), where.generator

    assert after(40)[0] < after(1)[0] - 1
    assert not after(1)[1].training


def test_first_generator_step_by_hand():
    """Adam's first step is the step size against the sign of the gradient."""
    server, own = latent(single(0)), options(generator_steps=1)
    moved, still = (source([single(1), single(2)], COUNTS[:2]) for _ in range(2))
    train_generator(moved, server, own, Event())
    z, labels = still.draw(own.batch_size)
    generator_loss(z, labels, server, still.teachers, None, own).backward()
    for (name, p), q in zip(still.generator.named_parameters(), moved.generator.parameters(), strict=True):
        clear = p.grad.abs() > 1e-3  # batch normalisation takes all effect from the biases before it
        assert clear.any() or name in ("net.0.bias", "net.3.bias")
        assert torch.allclose((q - p)[clear], -1e-4 * p.grad.sign()[clear], atol=1e-6), name


def test_by_default_the_gap_is_reported_and_trains_nothing():
    def after(**keys):
        where = source([single(1), single(2)], COUNTS[:2])
        loss = train_generator(where, latent(single(0)), options(generator_steps=3, **keys), Event())
        return loss, torch.cat([p.detach().flatten() for p in where.generator.parameters()])

    (without, first), (loss, again) = after(lambda_mse=0.0), after(lambda_mse=0.3)
    assert torch.equal(first, again)
    assert loss < without - 1
    assert not torch.equal(first, after(lambda_mse=0.3, query_gradient=True)[1])


def test_labels_follow_the_histogram():
    where = source([single(1)], [[0, 0, 0, 1, 0, 3]])
    _, labels = where.draw(4000)
    assert set(labels.tolist()) == {3, 5}
    assert (labels == 5).float().mean() == pytest.approx(0.75, abs=0.03)


def test_distillation_reaches_its_teachers():
    """One teacher: keys and prompts go to its rho, the head learns the classes that the samples carry.

    A head that knew only how often each class is drawn would stay at the entropy of (1, 2, 3) / 6, 1.01.
    """
    where = source([single(1)], [[0, 0, 0, 1, 2, 3]], 128)
    where.generator.eval()
    prompt, head = DecomposedPrompt(prompt_config(range(J), L, N), D), Head(D, 0)
    head.grow(S)

    def own(steps):
        return options(prompt_steps=steps, head_steps=steps, distillation_learning_rate=1e-2)

    first, last = (distil(prompt, head, [where], own(steps)) for steps in (1, 600))
    assert last[0] < 0.01 * first[0]
    assert last[1] < 0.8
    assert all(p.grad is None for p in (*prompt.parameters(), *head.parameters()))


def test_losses_are_told_per_sample() -> None:
    """Of prompts, of the head and of a generator: four times the samples leave them where they are, but for chance."""

    def told(samples: int) -> tuple[float, ...]:
        where, other = (source([single(1)], [[0, 0, 0, 1, 2, 3]], samples) for _ in range(2))
        where.generator.eval()
        prompt, head = DecomposedPrompt(prompt_config(range(J), L, N), D), Head(D, 0)
        head.grow(S)
        own = options(prompt_steps=1, head_steps=1, generator_steps=1, batch_size=samples)
        return *distil(prompt, head, [where], own), train_generator(other, latent(single(0)), own, Event())

    assert told(400) == pytest.approx(told(1600), rel=0.3)


def test_first_head_step_by_hand():
    """Adam's first step is the step size against the sign of the gradient of a mean over the composite batch."""
    new, old = source([single(1)], [[0, 0, 0, 1, 2, 3]], 8), source([single(2, 3)], [[1, 1, 1]], 4)
    for where in (new, old):
        where.generator.eval()
    head = Head(D, 0)
    head.grow(S)
    before = head.weight.detach().double().numpy().copy()
    with torch.no_grad():
        (x, y), (u, v) = new.draw(8), old.draw(4)
    for where in (new, old):
        where.rng.manual_seed(1)  # the same samples once more
    x, y = np.concatenate([x, u]).astype(np.float64), np.concatenate([y, v])
    p = softmax(x @ before.T, axis=1) - np.eye(S)[y]
    prompt, own = DecomposedPrompt(prompt_config(range(J), L, N), D), options(head_steps=1, prompt_steps=0)
    distil(prompt, head, [new, old], own)
    assert np.allclose(head.weight.detach().numpy() - before, -1e-4 * np.sign(p.T @ x), atol=2e-6)


def numpy_prompts(keys, pool, z):
    """Prompts of samples [B, D], all blocks at once, [J, B, 2, L, D]."""
    cosine = (
        np.einsum("jnd,bd->jbn", keys, z) / np.linalg.norm(keys, axis=2)[:, None] / np.linalg.norm(z, axis=1)[:, None]
    )
    return np.einsum("jbn,jnvld->jbvld", cosine, pool)


def numpy_slope(loss, value):
    """Central differences of a loss of one float64 array."""
    slope = np.zeros_like(value)
    for place in np.ndindex(value.shape):
        step = np.zeros_like(value)
        step[place] = 1e-5
        slope[place] = (loss(value + step) - loss(value - step)) / 2e-5
    return slope


@pytest.mark.parametrize("replay", [False, True])
def test_one_target_with_the_weights_of_the_round_gives_the_gradient_of_the_sum_over_teachers(replay):
    """Weights n_cy / n: a sample of a class with few images counts less. Those of a previous server count fully."""
    models, counts, weights, labels = CLIENTS, torch.from_numpy(COUNTS), COUNTS / 23, LABELS
    if replay:
        models, counts, weights, labels = [arrays(7, 3)], torch.ones(1, 3), np.ones((1, 3)), LABELS - 3
    teach = Teachers(latent(*models), counts.double(), of_round=not replay)
    new = SampleSource(teach, Generator(S, D, torch.Generator()), torch.Generator(), B)
    (step,) = block_steps([new], [(torch.from_numpy(Z), torch.from_numpy(labels))], 1)
    keys, pool = SERVER["prompt.keys"][1], SERVER["prompt.pool"][1].reshape(N, -1)

    def loss(k, q):
        server = {"prompt.keys": k[None], "prompt.pool": q.reshape(1, N, 2, L, D)}
        gaps = [[((numpy_rho(server, z, 0) - numpy_rho(m, z, 1)) ** 2).sum() for z in Z] for m in models]
        return (weights[:, labels] * gaps).sum()

    given = [torch.tensor(a, requires_grad=True) for a in (keys, pool)]
    gradients = torch.autograd.grad(prompt_loss(*given, *step), given)
    assert np.allclose(gradients[0], numpy_slope(lambda k: loss(k, pool), keys), rtol=1e-5, atol=1e-5)
    assert np.allclose(gradients[1], numpy_slope(lambda q: loss(keys, q), pool), rtol=1e-5, atol=1e-5)


def test_first_prompt_step_by_hand():
    """Eq. 6 teacher by teacher: clients by their share of the label, the previous server alone for earlier tasks."""
    models = [single(1), single(2), single(3, 3)]
    new, old = source(models[:2], [[0, 0, 0, 1, 2, 9], [0, 0, 0, 7, 1, 1]], 8), source(models[2:], [[1, 1, 1]], 4)
    for where in (new, old):
        where.generator.eval()
    prompt = DecomposedPrompt(prompt_config(range(J), L, N), D)
    with torch.no_grad():
        (x, y), (u, v) = new.draw(8), old.draw(4)
    for where in (new, old):
        where.rng.manual_seed(1)  # the same samples once more
    z, rows = np.concatenate([x, u]).astype(np.float64), np.concatenate([y, v])
    share = np.array([[0, 0, 0, 1 / 8, 2 / 3, 0.9], [0, 0, 0, 7 / 8, 1 / 3, 0.1], [1, 1, 1, 0, 0, 0]])
    theirs = [numpy_prompts(m["prompt.keys"].astype(float), m["prompt.pool"].astype(float), z) for m in models]

    def loss(keys, pool):
        own = numpy_prompts(keys, pool, z)
        return sum((w[rows] * ((own - t) ** 2).sum((0, 2, 3, 4))).sum() for w, t in zip(share, theirs, strict=True))

    keys, pool = (p.detach().double().numpy().copy() for p in (prompt.keys, prompt.pool))
    slopes = numpy_slope(lambda k: loss(k, pool), keys), numpy_slope(lambda p: loss(keys, p), pool)
    head, own = Head(D, 0), options(prompt_steps=1, head_steps=0)
    distil(prompt, head, [new, old], own)
    for moved, before, slope in zip((prompt.keys, prompt.pool), (keys, pool), slopes, strict=True):
        assert np.abs(slope).min() > 1e-3  # no sign is a matter of rounding
        assert np.allclose(moved.detach().numpy() - before, -1e-4 * np.sign(slope), atol=1e-6)


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.ci
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_that_are_distilled_side_by_side_learn_the_same(threads, monkeypatch, torch_threads):
    torch_threads(threads)

    def after(at_once):
        monkeypatch.setattr(task.utils.threads, "cores", lambda: at_once * threads)
        new, old = source([single(1), single(2)], COUNTS[:2], 8), source([single(3, 3)], [[1, 1, 1]], 4)
        for where in (new, old):
            where.generator.eval()
        prompt, head = DecomposedPrompt(prompt_config(range(J), L, N), D), Head(D, 0)
        head.grow(S)
        losses = distil(prompt, head, [new, old], options(prompt_steps=20, head_steps=20))
        return [p.detach() for p in (prompt.keys, prompt.pool, head.weight)], losses

    (one, losses), (three, same) = after(1), after(3)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    assert losses == same
    assert not torch.equal(one[0], DecomposedPrompt(prompt_config(range(J), L, N), D).keys)


def test_an_interrupted_distillation_does_not_go_on(monkeypatch):
    """Ctrl-C comes to the thread that waits for the blocks and the head."""
    where, steps, draws, loss, draw = source([single(1)], COUNTS[:1], 2), [], [], prompt_loss, SampleSource.draw
    where.generator.eval()

    def slow(*given):
        steps.append(time.sleep(0.01))
        return loss(*given)

    def counted(*given):
        draws.append(time.sleep(0.001))
        return draw(*given)

    class Interrupted(ThreadPoolExecutor):
        def map(self, function, jobs):
            """The jobs run; whoever waits for them is interrupted."""
            self.futures = [self.submit(function, job) for job in jobs]
            raise KeyboardInterrupt

    monkeypatch.setattr(strategies.hepco, "prompt_loss", slow)
    monkeypatch.setattr(SampleSource, "draw", counted)
    monkeypatch.setattr(task.utils.threads, "ThreadPoolExecutor", Interrupted)
    prompt, head = DecomposedPrompt(prompt_config(range(J), L, N), D), Head(D, 0)
    head.grow(S)
    with pytest.raises(KeyboardInterrupt):
        distil(prompt, head, [where], options(prompt_steps=300, head_steps=3000))
    assert len(steps) < 100
    assert len(draws) < 300 + 1000


def test_an_interrupted_training_of_generators_does_not_go_on(monkeypatch):
    """One job is interrupted, as the thread that waits would be; the other ends early."""
    where, forever, training = source([single(1)], COUNTS[:1]), options(generator_steps=10**9), Event()

    def interrupted(stop):
        training.wait()
        raise KeyboardInterrupt

    def endless(stop):
        training.set()
        return train_generator(where, latent(single(0)), forever, stop)

    monkeypatch.setattr(task.utils.threads, "cores", lambda: 2 * torch.get_num_threads())
    with pytest.raises(KeyboardInterrupt):
        run_in_threads([interrupted, endless], torch.device("cpu"))


def test_counts_by_head_row():
    updates = [Update("a", 5, {}, {"class_ids": np.array([2, 5]), "counts": np.array([4, 1])})]
    updates += [Update("b", 3, {}, {"class_ids": np.array([0]), "counts": np.array([3])})]
    assert class_counts(updates, RoundContext(SCHEDULE, 3)).tolist() == [[0, 4, 1, 0], [0, 0, 0, 3]]


class Server:
    """What a strategy needs of the model."""

    def __init__(self, tasks):
        self.device, self.backbone = torch.device("cpu"), SimpleNamespace(dim=D)
        self.prompt, self.head = DecomposedPrompt(prompt_config(range(J), L, N), D), Head(D, 0)
        for classes in SCHEDULE.tasks[:tasks]:
            self.head.grow(len(classes))

    def shared_state(self):
        parts = {"prompt": self.prompt, "head": self.head}
        return {f"{k}.{n}": p.detach() for k, part in parts.items() for n, p in part.named_parameters()}


def updates(tasks, *held):
    """A client for each {class: count}, its arrays from its place."""
    return [
        Update(
            f"c{i}",
            sum(h.values()),
            single(i, 2 * tasks),
            {"class_ids": np.array([*h]), "counts": np.array([*h.values()])},
        )
        for i, h in enumerate(held)
    ]


def hepco(seed=0, **keys):
    return HePCo(parse({"method": "hepco", "seed": seed, **{f"hepco-{n}": v for n, v in (SMALL | keys).items()}}))


def refined(strategy, model, updates, server_round):
    """As in a round: what has been received is let go."""
    context = RoundContext(SCHEDULE, server_round)
    for update in updates:
        strategy.receive(model, update, context)
    return strategy.refine(model, [replace(u, arrays={}) for u in updates], context)


def test_sources_and_memory_over_two_tasks(monkeypatch):
    """Clients teach their own counts; the previous task's last server joins in task 2 with all counts before it."""
    seen, composites = [], []

    def spy(source, server, options, stop):
        seen.append(source)
        return 0.0

    def counted(prompt, head, sources, *more):
        composites.append([source.size for source in sources])
        return distil(prompt, head, sources, *more)

    monkeypatch.setattr(strategies.hepco, "train_generator", spy)
    monkeypatch.setattr(strategies.hepco, "distil", counted)
    strategy, model = hepco(**{"batch-size": 48}), Server(1)
    refined(strategy, model, updates(1, {7: 3, 2: 1}, {7: 1}), 1)
    assert len(seen) == 1
    assert seen[0].teachers.shares.tolist() == [[0.75, 1], [0.25, 0]]
    assert seen[0].teachers.counts.tolist() == [[3, 1], [1, 0]]
    assert strategy.previous is None
    refined(strategy, model, updates(1, {2: 5}), 2)
    left = model.shared_state()["prompt.pool"].clone()
    seen.clear()
    model = Server(2)
    for server_round in (3, 4):
        metrics = refined(strategy, model, updates(2, {5: 2}, {5: 2, 0: 1}), server_round)
        clients, past = sorted(seen[-2:], key=lambda source: -source.size)  # in either order: from two threads
        assert clients.teachers.shares.tolist() == [[0, 0, 0.5, 0], [0, 0, 0.5, 1]]
        assert clients.teachers.counts.sum(0).tolist() == [0, 0, 4, 1]
        assert past.teachers.counts.tolist() == [[4, 6]]  # 3 + 1 and 1 + 5
        assert past.teachers.shares.tolist() == [[1, 1]]
        assert torch.equal(past.teachers.models.pools[:, 0], left.flatten(2))
        assert past.teachers.models.bias.shape == (1, 2)
    assert set(metrics) > {"generator-loss", "replay-generator-loss"}
    assert composites == 2 * [[48]] + 2 * [[48, 24]]
    assert strategy.counts.tolist() == [4, 6, 8, 2]
    assert torch.equal(strategy.previous.models.weight[0], model.head.weight)


def test_sources_as_the_public_code_has_them(monkeypatch):
    """In task 2 the old generator takes 50 steps more and sees all four rows; weights are shares of the round."""
    seen = []
    monkeypatch.setattr(strategies.hepco, "train_generator", lambda source, *rest: seen.append(source) or 0.0)
    own = {"replay-steps": 50, "replay-rows": "seen", "sample-weights": "round"}
    strategy, model = hepco(**own), Server(1)
    refined(strategy, model, updates(1, {7: 3, 2: 1}, {7: 1}), 2)
    assert [(source.further_steps, source.teachers.importance.tolist()) for source in seen] == [
        (0, pytest.approx([0.8, 0.2]))
    ]
    left = {n: a.clone() for n, a in model.shared_state().items()}
    model.head.grow(2)
    start = model.head.weight.detach()[2:].clone()
    refined(strategy, model, updates(2, {5: 2}, {5: 2, 0: 1}), 3)
    clients, past = sorted(seen[1:], key=lambda source: -source.size)
    assert (clients.further_steps, past.further_steps) == (0, 50)
    assert clients.teachers.importance.tolist() == pytest.approx([0, 0, 0.8, 0.2])
    assert past.teachers.importance.tolist() == [1, 1]
    assert torch.equal(past.teachers.models.weight[0], torch.cat([left["head.weight"], start]))
    assert strategy.previous.models.weight.shape == (1, 2, D)


def test_the_previous_server_teaches_though_the_last_round_of_its_task_was_undone(monkeypatch):
    """Round 2, the last of task 1, leaves no trace. Then it is the model that the clients of round 3 were sent."""
    seen = []
    monkeypatch.setattr(strategies.hepco, "train_generator", lambda source, *rest: seen.append(source) or 0.0)
    strategy, model = hepco(), Server(2)
    refined(strategy, Server(1), updates(1, {7: 3, 2: 1}, {7: 1}), 1)
    assert strategy.previous is None
    sent = {n: a.clone() for n, a in model.shared_state().items()}
    for server_round in (3, 4):
        refined(strategy, model, updates(2, {5: 2}, {5: 2, 0: 1}), server_round)
        _, past = sorted(seen[-2:], key=lambda source: -source.size)
        assert past.teachers.counts.tolist() == [[4, 1]]
        assert torch.equal(past.teachers.models.pools[:, 0], sent["prompt.pool"].flatten(2))
        assert torch.equal(past.teachers.models.weight[0], sent["head.weight"][:2])
    assert torch.equal(strategy.previous.models.weight[0], model.head.weight)


@pytest.mark.parametrize(("own", "first"), [({"rows": "seen"}, 0), ({}, 2)])
def test_among_which_rows_each_generator_chooses(own, first, monkeypatch):
    """Task 2 has head rows 2 and 3; the old generator always chooses among all rows of its teacher."""
    seen = []
    monkeypatch.setattr(strategies.hepco, "train_generator", lambda source, *rest: seen.append(source) or 0.0)
    strategy = hepco(**own)
    refined(strategy, Server(1), updates(1, {7: 3, 2: 1}, {7: 1}), 2)
    refined(strategy, Server(2), updates(2, {5: 2}, {5: 2, 0: 1}), 3)
    clients, past = sorted(seen[1:], key=lambda source: -source.size)
    assert (seen[0].teachers.first_row, clients.teachers.first_row, past.teachers.first_row) == (0, first, 0)


def test_further_steps_train_the_generator():
    def after(steps, further):
        where = replace(source([single(1)], COUNTS[:1]), further_steps=further)
        train_generator(where, latent(single(0)), options(generator_steps=steps), Event())
        return torch.cat([p.detach().flatten() for p in where.generator.parameters()])

    assert torch.equal(after(2, 3), after(5, 0))
    assert not torch.equal(after(2, 3), after(2, 0))


def test_every_round_and_both_generators_have_random_numbers_of_their_own():
    strategy, model, teach = hepco(), Server(1), teachers([single(1)], COUNTS[:1])
    places = [(server_round, replay) for server_round in (1, 2, 3) for replay in (False, True)]
    drawn = [strategy._source(model, teach, RoundContext(SCHEDULE, r), replay) for r, replay in places]
    assert len({source.rng.initial_seed() for source in drawn}) == 6
    assert len({source.generator.embedding.weight[0, 0].item() for source in drawn}) == 6


def test_further_steps_grow_with_the_earlier_tasks():
    strategy, model, teach = hepco(**{"replay-steps": 50}), Server(1), teachers([single(1)], COUNTS[:1])
    three = Schedule([[7], [2], [5]], 1)
    steps = [strategy._source(model, teach, RoundContext(three, r), replay=True).further_steps for r in (1, 2, 3)]
    assert steps == [0, 50, 100]


def test_no_replay_where_its_ratio_is_zero():
    strategy = hepco(**{"replay-ratio": 0.0})
    refined(strategy, Server(1), updates(1, {7: 3, 2: 1}), 2)
    assert "replay-generator-loss" not in refined(strategy, Server(2), updates(2, {5: 2}), 3)


def test_refining_repeats_with_the_seed_and_changes_everything():
    def after(seed):
        strategy, model = hepco(seed), Server(1)
        refined(strategy, model, updates(1, {7: 3, 2: 1}, {7: 1}), 2)
        model.head.grow(2)
        refined(strategy, model, updates(2, {5: 2}), 3)
        return model.shared_state()

    first, again, other, start = after(0), after(0), after(1), Server(2).shared_state()
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert all(not torch.equal(first[n], other[n]) for n in first)
    assert all(not torch.equal(first[n], start[n]) for n in first)


def memory(monkeypatch, available):
    monkeypatch.setattr(strategies.hepco, "available_memory", lambda: float(available))


def test_more_teachers_than_fit_in_memory_are_an_error_that_says_how_many_fit(monkeypatch):
    """A model has 40 key, 240 prompt and 36 head numbers, all of them twice, its Gram matrices 2 * 8 * 8."""
    each = int(1.2 * 4 * (2 * (40 + 240 + 36) + 128))
    shared_state = {n: torch.from_numpy(a) for n, a in single(0).items()}
    memory(monkeypatch, 7 * each)
    require_memory(shared_state, 7, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"8 clients need .* are free, enough for 7: lower clients-per-round, "):
        require_memory(shared_state, 8, torch.device("cpu"))
    memory(monkeypatch, each - 1)
    with pytest.raises(ConfigError, match=r"enough for 0: lower .*, prompt-pool or prompt-length\.$"):
        require_memory(shared_state, 2, torch.device("cpu"))
    memory(monkeypatch, 5 * 2**30)
    with pytest.raises(ConfigError, match=r"10000000 clients need 34 GiB, 5 GiB are free, enough for 1471685"):
        require_memory(shared_state, 10**7, torch.device("cpu"))


@pytest.mark.parametrize(("keys", "fits"), [({"num-clients": 3}, True), ({"num-clients": 4}, False)])
def test_memory_is_checked_once_with_the_first_answer(keys, fits, monkeypatch):
    memory(monkeypatch, 3 * 4.8 * (2 * (40 + 240 + 12) + 128))
    strategy, model = HePCo(parse({"method": "hepco", "clients-per-round": 0, **keys})), Server(1)
    first, second = updates(1, {7: 3, 2: 1}, {7: 1})
    if not fits:
        with pytest.raises(ConfigError, match="4 clients need"):
            strategy.receive(model, first, RoundContext(SCHEDULE, 1))
        strategy = HePCo(parse({"method": "hepco", "clients-per-round": 3, **keys}))
    strategy.receive(model, first, RoundContext(SCHEDULE, 1))
    memory(monkeypatch, 0)  # what has come takes its part of what was free
    strategy.receive(model, second, RoundContext(SCHEDULE, 1))
    assert list(strategy.answers) == ["c0", "c1"]
    strategy.answers = {}
    strategy.receive(model, first, RoundContext(SCHEDULE, 2))


def test_a_run_whose_teachers_do_not_fit_ends_with_that_message(tiny, monkeypatch):
    config = parse(tiny | QUICK["hepco"] | {"method": "hepco"})
    memory(monkeypatch, 2_500_000)
    with pytest.raises(ConfigError, match="enough for 2: lower clients-per-round"):
        run_experiment(config, InProcessTransport(3))
    results = json.loads(next(Path(tiny["output-dir"]).glob("*/results.json")).read_text())
    assert results["status"] == "failed"
    assert results["error"].startswith("hepco keeps the prompts of all clients of a round in memory: 3 clients need ")


def test_a_round_without_answers_leaves_the_model_alone():
    strategy, model = hepco(), Server(1)
    assert strategy.refine(model, [], RoundContext(SCHEDULE, 1)) == {}
    start = Server(1).shared_state()
    assert all(torch.equal(a, start[n]) for n, a in model.shared_state().items())


def test_a_first_task_that_nobody_trained_in_teaches_nothing():
    """Two tasks; nobody has images in the first, one client in the second."""
    schedule, config = Schedule([[0, 1], [2, 3]], 1), parse({"method": "hepco", **QUICK["hepco"]})
    model, server = build_model(config, [2]), HePCo(config)
    assert server.refine(model, [], RoundContext(schedule, 1)) == {}
    assert server.previous is None
    model.begin_task(2)
    statistics = {"class_ids": np.array([2, 3]), "counts": np.array([4, 1])}
    update = Update("a", 5, model.export(), statistics)
    server.receive(model, update, RoundContext(schedule, 2))
    losses = server.refine(model, [update], RoundContext(schedule, 2))
    assert set(losses) == {"generator-loss", "prompt-distillation-loss", "head-distillation-loss"}
