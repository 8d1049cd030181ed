"""HePCo: the decomposed prompt, the latent generator and the two distillations; numbers by hand or float64 NumPy."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import strategies.hepco
from strategies.base import Moment, Update
from strategies.generator import Generator, Source, generator_loss, train_generator
from strategies.hepco import HePCo, class_counts, distil, distil_blocks, prompt_gradients, side_by_side
from strategies.teachers import Filed, Heads, Latent, Pooled, PromptFile, PromptGap
from task.config.parsing import parse
from task.method_options import HePCoOptions
from task.models.model import Head, build_model
from task.prompts.decomposed import DecomposedPrompt
from task.prototypes.statistics import Counts
from task.scenario.class_stream import Schedule
from tests.conftest import QUICK

J, N, L, D, S, C, B = 2, 4, 3, 5, 6, 3, 7  # blocks, pool, vectors, dimension, head rows, clients, samples
SCHEDULE = Schedule([[7, 2], [5, 0]], 2)  # class of head row 0, 1, 2, 3 = 7, 2, 5, 0
SMALL = {"generator-steps": 2, "prompt-steps": 2, "head-steps": 2, "hidden-first": 4, "hidden-second": 8}


def options(**keys):
    return HePCoOptions(**keys)


def arrays(seed, rows=S, dtype=np.float64):
    """The travelling arrays of a model; the pool is far from zero, as the uniform(0, 1) start is."""
    rng = np.random.default_rng(seed)
    shapes = {"prompt.keys": (J, N, D), "prompt.pool": (J, N, 2, L, D), "head.weight": (rows, D), "head.bias": (rows,)}
    return {name: rng.normal(1 if "prompt" in name else 0, 1, shape).astype(dtype) for name, shape in shapes.items()}


def latent(*models):
    return Latent.stack(({n: torch.from_numpy(a) for n, a in m.items()} for m in models), len(models))


def pooled(models, shares):
    return Pooled(latent(*models), torch.from_numpy(np.asarray(shares, models[0]["head.bias"].dtype)))


def filed(models, shares, places=None):
    """The same teachers, their prompts in a file, in which each has its place."""
    file, places = PromptFile(), places or range(len(models))
    for place in range(len(models)):
        file.append(models[places.index(place)])
    heads = Heads.of({n: torch.from_numpy(a) for n, a in m.items()} for m in models)
    return Filed(heads, pooled(models, shares).shares, file, places, range(J))


def numpy_rho(model, z, block):
    """sum_i cos(z, k_i) P_i, one term after another, [2, L, D]."""
    total = np.zeros((2, L, D))
    for k, p in zip(model["prompt.keys"][block], model["prompt.pool"][block], strict=True):
        total += (z @ k) / (np.linalg.norm(z) * np.linalg.norm(k)) * p
    return total


def numpy_gap(server, teacher, z):
    return sum(((numpy_rho(server, z, j) - numpy_rho(teacher, z, j)) ** 2).sum() for j in range(J))


def numpy_log_softmax(model, z, rows):
    logits = model["head.weight"][:rows] @ z + model["head.bias"][:rows]
    return logits - np.log(np.exp(logits).sum())


SERVER, CLIENTS = arrays(0), [arrays(seed) for seed in range(1, 1 + C)]
Z = np.random.default_rng(9).normal(size=(B, D))
LABELS = np.array([3, 5, 4, 3, 5, 5, 4])  # rows 0 to 2 are of earlier tasks
COUNTS = np.array([[0, 0, 0, 4, 0, 1], [0, 0, 0, 2, 7, 1], [0, 0, 0, 2, 0, 6.0]])
SHARES = COUNTS / np.maximum(COUNTS.sum(0), 1)


def test_prompt_is_the_sum_over_the_pool_per_image():
    prompt = DecomposedPrompt([1, 4], N, L, D, seed=3)
    model = {f"prompt.{n}": p.detach().double().numpy() for n, p in prompt.named_parameters()}
    with torch.no_grad():
        found = prompt(torch.from_numpy(Z).float())
    assert list(found) == [1, 4]
    for j, prefixes in enumerate(found.values()):
        assert prefixes.shape == (B, 2, L, D)
        assert np.allclose(prefixes, [numpy_rho(model, z, j) for z in Z], atol=1e-5)


def test_prompt_starts_uniform_and_has_the_papers_size():
    config = parse({"method": "hepco", "seed": 5})
    prompt = DecomposedPrompt.build(config, 16)
    assert {n: tuple(p.shape) for n, p in prompt.named_parameters()} == {
        "keys": (5, 100, 16),
        "pool": (5, 100, 2, 10, 16),  # a length of 20: ten key and ten value vectors
    }
    for p in prompt.parameters():
        assert 0 <= p.min() < 0.01 < 0.99 < p.max() < 1
        assert float(p.detach().mean()) == pytest.approx(0.5, abs=0.02)
    other = DecomposedPrompt.build(parse({"method": "hepco", "seed": 6}), 16)
    assert not torch.equal(prompt.pool, other.pool)


def test_defaults_are_the_papers():
    own = options()
    assert (own.lambda_kl, own.lambda_mse) == (1.0, 0.1)
    assert (own.generator_steps, own.prompt_steps, own.head_steps) == (100, 200, 200)
    assert (own.generator_learning_rate, own.distillation_learning_rate) == (1e-4, 1e-4)
    assert (own.batch_size, own.replay_size) == (64, 32)
    assert [options(replay_ratio=ratio).replay_size for ratio in (0.0, 0.001, 0.25)] == [0, 1, 16]
    generator = Generator(10, 768, own, torch.Generator().manual_seed(0))
    assert [tuple(p.shape) for p in generator.net.parameters() if p.ndim == 2] == [(256, 128), (1024, 256), (768, 1024)]
    assert generator.embedding.weight.shape == (10, 64)
    assert sum(isinstance(m, torch.nn.BatchNorm1d) for m in generator.modules()) == 2


def test_statistics_are_counts_alone():
    found = Counts().compute(torch.empty(5, 0), torch.tensor([4, 2, 4, 9, 4]), options())
    assert {n: a.tolist() for n, a in found.items()} == {"class_ids": [2, 4, 9], "counts": [1, 3, 1]}
    assert all(a.dtype == np.int64 for a in found.values())
    assert Counts.carries
    assert not Counts.needs_features
    assert Counts().shapes(3, D, options()) == {}


def test_quadratic_form_equals_the_direct_difference_of_prompts():
    z = torch.from_numpy(Z).requires_grad_()
    found = PromptGap(latent(SERVER), latent(*CLIENTS))(z)
    expected = np.array([[numpy_gap(SERVER, client, one) for one in Z] for client in CLIENTS])
    assert np.allclose(found.detach(), expected, rtol=1e-12)
    found.sum().backward()
    step = 1e-6 * np.eye(D)
    slope = [sum(numpy_gap(SERVER, c, Z[2] + e) - numpy_gap(SERVER, c, Z[2] - e) for c in CLIENTS) / 2e-6 for e in step]
    assert np.allclose(z.grad[2], slope, rtol=1e-6)


def test_quadratic_form_is_exact_in_float32_where_models_are_close():
    """Prompts of size 50 that differ by 0.01: the plain form |a P|^2 - 2 a P b Q + |b Q|^2 would lose all digits."""
    rng = np.random.default_rng(4)
    near = {n: (a + 1e-4 * rng.normal(size=a.shape)) for n, a in SERVER.items()}
    single = [{n: a.astype(np.float32) for n, a in m.items()} for m in (SERVER, near)]
    found = PromptGap(latent(single[0]), latent(single[1]))(torch.from_numpy(Z).float())[0]
    wide = [{n: a.astype(np.float64) for n, a in m.items()} for m in single]
    assert np.allclose(found, [numpy_gap(*wide, z) for z in Z], rtol=1e-2)


def numpy_generator_loss(teachers, shares, labels, rows, kl, mse):
    total = 0.0
    for z, y in zip(Z, labels, strict=True):
        for teacher, share in zip(teachers, shares, strict=True):
            p, q = numpy_log_softmax(SERVER, z, rows), numpy_log_softmax(teacher, z, rows)
            divergence = (np.exp(p) * (p - q)).sum()
            total += share[y] * (-q[y] - kl * divergence - mse * numpy_gap(SERVER, teacher, z))
    return total


@pytest.mark.parametrize(("kl", "mse"), [(1.0, 0.1), (0.0, 0.0), (2.0, 0.0), (0.0, 0.3)])
def test_generator_loss_of_clients(kl, mse):
    server, teachers = latent(SERVER), pooled(CLIENTS, SHARES)
    own, labels = options(lambda_kl=kl, lambda_mse=mse), torch.from_numpy(LABELS)
    found = generator_loss(torch.from_numpy(Z), labels, server, teachers, teachers.gap(server), own)
    assert float(found) == pytest.approx(numpy_generator_loss(CLIENTS, SHARES, LABELS, S, kl, mse), rel=1e-10)


def test_the_gap_trains_the_generator_only_where_asked():
    """The difference of the two gradients is that of -lambda_MSE gap alone, weighted by the shares."""
    server, teachers = latent(SERVER), pooled(CLIENTS, SHARES)
    gap, labels = teachers.gap(server), torch.from_numpy(LABELS)
    losses, gradients = [], []
    for asked in (False, True):
        z = torch.from_numpy(Z).requires_grad_()
        own = options(query_gradient=asked)
        losses.append(generator_loss(z, labels, server, teachers, gap, own))
        gradients.append(torch.autograd.grad(losses[-1], z)[0])
    assert torch.equal(*losses)
    z = torch.from_numpy(Z).requires_grad_()
    expected = torch.autograd.grad(-0.1 * gap(z, labels).sum(), z)[0]
    assert torch.allclose(gradients[1] - gradients[0], expected)
    assert expected.abs().min() > 0


def test_generator_loss_of_the_previous_server_knows_its_rows_only():
    previous, labels = arrays(7, rows=3), np.array([0, 2, 1, 1, 0, 2, 2])
    server, teacher = latent(SERVER), pooled([previous], np.ones((1, 3)))
    found = generator_loss(
        torch.from_numpy(Z), torch.from_numpy(labels), server, teacher, teacher.gap(server), options()
    )
    assert float(found) == pytest.approx(numpy_generator_loss([previous], np.ones((1, 3)), labels, 3, 1.0, 0.1))


def test_blend_is_the_weighted_sum_of_the_teachers_prompts():
    weights = SHARES[:, LABELS]
    found = latent(*CLIENTS).blend(torch.from_numpy(Z), torch.from_numpy(weights)).unflatten(-1, (2, L, D))
    for j in range(J):
        expected = [
            sum(w * numpy_rho(c, z, j) for w, c in zip(weights[:, b], CLIENTS, strict=True)) for b, z in enumerate(Z)
        ]
        assert np.allclose(found[j], expected)


def test_one_target_gives_the_gradient_of_the_sum_over_teachers():
    """Eq. 6 teacher by teacher, with its product over the pool written out, differs by a constant only."""
    z, weights = torch.from_numpy(Z), torch.from_numpy(SHARES[:, LABELS])
    target = latent(*CLIENTS).blend(z, weights)
    differences, gradients = [], []
    for seed in (0, 1):
        prompt = DecomposedPrompt(range(J), N, L, D, seed).double()
        pool, apart = prompt.pool.detach().flatten(2), target.clone()
        prompt_gradients(prompt.keys, pool, z.flip(0), target.clone())  # a step before, of which nothing may be left
        prompt_gradients(prompt.keys, pool, z, apart)
        mine = prompt.keys.grad, pool.grad.view_as(prompt.pool)
        direct = torch.zeros((), dtype=torch.float64)
        for j in range(J):
            cosine = torch.nn.functional.cosine_similarity(z[:, None], prompt.keys[j], dim=-1)
            own = (cosine[:, :, None, None, None] * prompt.pool[j]).sum(1)
            for client, weight in zip(CLIENTS, weights, strict=True):
                theirs = torch.from_numpy(np.array([numpy_rho(client, one, j) for one in Z]))
                direct = direct + (weight * (own - theirs).square().sum((1, 2, 3))).sum()
        gradients.append((mine, torch.autograd.grad(direct, [prompt.keys, prompt.pool])))
        differences.append(float(direct.detach() - apart.square().sum()))
    assert differences[0] == pytest.approx(differences[1])
    assert all(torch.allclose(a, b) for pair in gradients for a, b in zip(*pair, strict=True))


def test_the_loss_told_is_the_last_batchs_of_each_block():
    """|rho(z; server) - target|^2 of the samples of two sources, before the step that they bring about."""
    prompt, target = DecomposedPrompt(range(J), N, L, D, 0), np.random.default_rng(3).normal(size=(J, B, 2 * L * D))
    model = {f"prompt.{n}": p.detach().double().numpy() for n, p in prompt.named_parameters()}
    own = np.array([[numpy_rho(model, z, j).ravel() for z in Z] for j in range(J)])
    z, labels, targets = torch.from_numpy(Z).float(), torch.zeros(B), torch.from_numpy(target).float()
    steps = [([(z[:4], labels[:4]), (z[4:], labels[4:])], (targets[:, :4], targets[:, 4:]))]
    assert distil_blocks(prompt, slice(0, J), steps, options()) == pytest.approx(np.square(own - target).sum((1, 2)))


@pytest.mark.parametrize("name", ["keys", "pool"])
def test_how_arrays_lie_in_memory_does_not_matter(name):
    found = []
    for lie_otherwise in (False, True):
        prompt = DecomposedPrompt(range(J), N, L, D, 0)
        own = getattr(prompt, name)
        own.data = own.data.transpose(0, 1).contiguous().transpose(0, 1) if lie_otherwise else own.data
        rng = torch.Generator().manual_seed(0)
        drawn = [[(torch.randn(B, D, generator=rng), torch.zeros(B))] for _ in range(3)]
        steps = [(batch, (torch.randn(J, B, 2 * L * D, generator=rng),)) for batch in drawn]
        distil_blocks(prompt, slice(0, J), steps, options(distillation_learning_rate=0.01))
        found.append([p.detach().clone() for p in prompt.parameters()])
    assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))


def source(models, counts, seed=0, dim=D, chance=1, **keys):
    counts = torch.tensor(counts).float()
    shares = counts / counts.sum(0).clamp(min=1)
    generator = Generator(counts.shape[1], dim, options(**keys), torch.Generator().manual_seed(seed))
    return Source(pooled(models, shares), counts.sum(0), generator, torch.Generator().manual_seed(chance))


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


@pytest.mark.parametrize("drawn", [2, 3])  # 2 rows of 5 numbers are fewer than 3 clients' pools of 4 prompts
def test_target_is_the_weighted_sum_of_the_teachers_prompts(drawn):
    rng = np.random.default_rng(drawn)
    counts = rng.integers(1, 9, (C, S)) * (np.arange(S) >= S - drawn)
    labels, shares = rng.integers(S - drawn, S, B), counts / np.maximum(counts.sum(0), 1)
    for teachers, exact in ((pooled(CLIENTS, shares), 1e-12), (filed(CLIENTS, shares, [1, 2, 0]), 1e-5)):
        batches = [(torch.from_numpy(Z[part]), torch.from_numpy(labels[part])) for part in (slice(4), slice(4, B))]
        found = torch.cat([*teachers.targets(batches)], dim=1).unflatten(-1, (2, L, D))
        for b, (z, y) in enumerate(zip(Z, labels, strict=True)):
            expected = [sum(s[y] * numpy_rho(c, z, j) for s, c in zip(shares, CLIENTS, strict=True)) for j in range(J)]
            assert np.allclose(found[:, b], expected, rtol=exact, atol=exact)


@pytest.mark.parametrize(
    ("tile", "blends"),  # models and samples at a time
    [(0, 7 * [(1, 1)]), (280, [(2, 6), (1, 6), (2, 1), (1, 1)]), (2**22, [(3, 7)])],
)
def test_a_file_is_read_tile_by_tile(tile, blends, monkeypatch):
    """A model has 4 prompts of 30 numbers with their keys of 5 in a block; a sample has one such prompt."""
    seen, blend = [], Latent.blend

    def spy(self, z, weights):
        seen.append((len(weights), len(z)))
        return blend(self, z, weights)

    monkeypatch.setattr(strategies.teachers, "TILE", tile)
    teachers, few = filed(CLIENTS, SHARES), pooled(CLIENTS, SHARES)
    batches = [(torch.from_numpy(Z[part]), torch.from_numpy(LABELS[part])) for part in np.split(np.arange(B), [4, 6])]
    expected = [*few.targets(batches)]
    with monkeypatch.context() as spied:
        spied.setattr(Latent, "blend", spy)
        found = [*teachers.targets(batches)]
    assert seen == (blends if tile else C * blends)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, expected, strict=True))
    for z in (torch.from_numpy(Z), torch.from_numpy(Z).requires_grad_()):
        pair = [each.gap(latent(SERVER))(z, torch.from_numpy(LABELS)) for each in (teachers, few)]
        assert torch.allclose(*pair, rtol=1e-5)
    assert [*teachers.targets([])] == []


@pytest.mark.parametrize(("models", "small"), [(2, False), (3, True), (11, True)])
def test_targets_come_from_a_map_where_that_is_smaller(models, small, monkeypatch):
    """10 numbers of two known rows against pools of 4 prompts; of many models no more count than are kept in memory."""
    shares = np.full((models, S), 1 / models) * (np.arange(S) < 2)
    clients = [CLIENTS[c % C] for c in range(models)]
    assert (pooled(clients, shares)._map is not None) == (filed(clients, shares)._map is not None) == small
    monkeypatch.setattr(strategies.teachers, "FEW", 2)
    assert pooled(clients, shares)._map is filed(clients, shares)._map is None


def test_gap_is_the_weighted_sum_over_the_teachers():
    """Eq. 4 from pools and from a file, with its slope."""
    server = latent(SERVER)

    def expected(z, y):
        return sum(s[y] * numpy_gap(SERVER, c, z) for s, c in zip(SHARES, CLIENTS, strict=True))

    for teachers, exact in ((pooled(CLIENTS, SHARES), 1e-12), (filed(CLIENTS, SHARES), 1e-6)):  # a file has float32
        z = torch.from_numpy(Z).requires_grad_()
        found = teachers.gap(server)(z, torch.from_numpy(LABELS))
        assert np.allclose(found.detach(), [expected(*pair) for pair in zip(Z, LABELS, strict=True)], rtol=exact)
        found.sum().backward()
        for b in (0, 2):
            steps = 1e-6 * np.eye(D)
            slope = [(expected(Z[b] + e, LABELS[b]) - expected(Z[b] - e, LABELS[b])) / 2e-6 for e in steps]
            assert np.allclose(z.grad[b], slope, rtol=1e-5)


def test_each_block_has_its_own_gap():
    z, labels, server = torch.from_numpy(Z), torch.from_numpy(LABELS), latent(SERVER)
    for teachers in (pooled(CLIENTS, SHARES), filed(CLIENTS, SHARES)):
        blocks = [teachers.blocks(slice(j, j + 1)).gap(server.blocks(slice(j, j + 1)))(z, labels) for j in range(J)]
        assert torch.allclose(sum(blocks), teachers.gap(server)(z, labels))
        assert not torch.allclose(*blocks)


def test_gap_is_exact_in_float32_where_many_models_are_close():
    """As for pools: what they have in common is left out of the form."""
    rng = np.random.default_rng(4)
    near = [{n: (a + 1e-4 * rng.normal(size=a.shape)).astype(np.float32) for n, a in SERVER.items()} for _ in range(C)]
    server = {n: a.astype(np.float32) for n, a in SERVER.items()}
    gap, z, labels = filed(near, SHARES).gap(latent(server)), torch.from_numpy(Z).float(), torch.from_numpy(LABELS)
    wide = [{n: a.astype(np.float64) for n, a in m.items()} for m in (server, *near)]
    expected = [
        sum(s[y] * numpy_gap(wide[0], c, z) for s, c in zip(SHARES, wide[1:], strict=True))
        for z, y in zip(Z, LABELS, strict=True)
    ]
    assert np.allclose(gap(z, labels), expected, rtol=1e-2)
    assert np.allclose(gap(z.requires_grad_(), labels).detach(), expected, rtol=1e-2)


def test_a_place_in_the_file_changes_nothing():
    server, batches = latent(single(0)), [(torch.from_numpy(Z).float(), torch.from_numpy(LABELS))]
    near = [single(seed) for seed in range(1, 1 + C)]
    first, *others = (filed(near, SHARES, order) for order in itertools.permutations(range(C)))
    for other in others:
        assert torch.equal(*(each.gap(server)(*batches[0]) for each in (first, other)))
        assert torch.equal(*(next(each.targets(batches)) for each in (first, other)))


def test_threads_that_read_at_the_same_time_do_not_disturb_each_other():
    rng, file = np.random.default_rng(0), PromptFile()
    shapes = {"prompt.keys": (2, 50, 40), "prompt.pool": (2, 50, 2, 10, 40)}
    models = [{n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()} for _ in range(20)]
    for model in models:
        file.append(model)

    def wrong(place):
        found = file.read([place], range(1, 2))[0, 0]
        return not np.array_equal(found[:, :40], models[place]["prompt.keys"][1])

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(wrong, 40 * [*range(20)])) == 0


def test_prompts_that_are_not_there_are_an_error():
    file = PromptFile()
    file.append(single(1))
    with pytest.raises(OSError, match="ended after 0 of 560 bytes"):
        file.read([0, 1], range(1))


def test_a_full_disk_is_an_error_at_once():
    file = PromptFile()
    file._file = open("/dev/full", "wb")  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left.*10 clients go there; TMPDIR names another folder: '/"):
        file.append(single(1))


def test_labels_follow_the_histogram():
    where = source([single(1)], [[0, 0, 0, 1, 0, 3]])
    _, labels = where.draw(4000)
    assert set(labels.tolist()) == {3, 5}
    assert (labels == 5).float().mean() == pytest.approx(0.75, abs=0.03)


def test_distillation_reaches_its_teachers():
    """One teacher: keys and prompts go to its rho, the head learns the classes that the samples carry.

    A head that knew only how often each class is drawn would stay at the entropy of (1, 2, 3) / 6, 1.01.
    """
    where = source([single(1)], [[0, 0, 0, 1, 2, 3]])
    where.generator.eval()
    prompt, head = DecomposedPrompt(range(J), N, L, D, 0), Head(D, 0)
    head.grow(S)

    def own(steps):
        return options(prompt_steps=steps, head_steps=steps, distillation_learning_rate=1e-2)

    first, last = (distil(prompt, head, [(where, 128)], own(steps)) for steps in (1, 600))
    assert last[0] < 0.01 * first[0]
    assert last[1] < 0.8
    assert all(p.grad is None for p in (*prompt.parameters(), *head.parameters()))


def test_first_head_step_by_hand():
    """Adam's first step is the step size against the sign of the gradient of a mean over the composite batch."""
    new, old = source([single(1)], [[0, 0, 0, 1, 2, 3]]), source([single(2, 3)], [[1, 1, 1]])
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
    p = np.exp(x @ before.T)
    p = p / p.sum(1, keepdims=True) - np.eye(S)[y]
    prompt, own = DecomposedPrompt(range(J), N, L, D, 0), options(head_steps=1, prompt_steps=0)
    distil(prompt, head, [(new, 8), (old, 4)], own)
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


def test_first_prompt_step_by_hand():
    """Eq. 6 teacher by teacher: clients by their share of the label, the previous server alone for earlier tasks."""
    teachers = [single(1), single(2), single(3, 3)]
    new, old = source(teachers[:2], [[0, 0, 0, 1, 2, 9], [0, 0, 0, 7, 1, 1]]), source(teachers[2:], [[1, 1, 1]])
    for where in (new, old):
        where.generator.eval()
    prompt = DecomposedPrompt(range(J), N, L, D, 0)
    with torch.no_grad():
        (x, y), (u, v) = new.draw(8), old.draw(4)
    for where in (new, old):
        where.rng.manual_seed(1)  # the same samples once more
    z, rows = np.concatenate([x, u]).astype(np.float64), np.concatenate([y, v])
    share = np.array([[0, 0, 0, 1 / 8, 2 / 3, 0.9], [0, 0, 0, 7 / 8, 1 / 3, 0.1], [1, 1, 1, 0, 0, 0]])
    theirs = [numpy_prompts(m["prompt.keys"].astype(float), m["prompt.pool"].astype(float), z) for m in teachers]

    def loss(keys, pool):
        own = numpy_prompts(keys, pool, z)
        return sum((w[rows] * ((own - t) ** 2).sum((0, 2, 3, 4))).sum() for w, t in zip(share, theirs, strict=True))

    keys, pool = (p.detach().double().numpy().copy() for p in (prompt.keys, prompt.pool))
    slopes = numpy_slope(lambda k: loss(k, pool), keys), numpy_slope(lambda p: loss(keys, p), pool)
    head, own = Head(D, 0), options(prompt_steps=1, head_steps=0)
    distil(prompt, head, [(new, 8), (old, 4)], own)
    for moved, before, slope in zip((prompt.keys, prompt.pool), (keys, pool), slopes, strict=True):
        assert np.abs(slope).min() > 1e-3  # no sign is a matter of rounding
        assert np.allclose(moved.detach().numpy() - before, -1e-4 * np.sign(slope), atol=1e-6)


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_that_are_distilled_side_by_side_learn_the_same(threads, monkeypatch, torch_threads):
    torch_threads(threads)

    def after(at_once):
        monkeypatch.setattr(strategies.hepco, "cores", lambda: at_once * threads)
        new, old = source([single(1), single(2)], COUNTS[:2]), source([single(3, 3)], [[1, 1, 1]])
        for where in (new, old):
            where.generator.eval()
        prompt, head = DecomposedPrompt(range(J), N, L, D, 0), Head(D, 0)
        head.grow(S)
        losses = distil(prompt, head, [(new, 8), (old, 4)], options(prompt_steps=20, head_steps=20))
        return [p.detach() for p in (prompt.keys, prompt.pool, head.weight)], losses

    (one, losses), (three, same) = after(1), after(3)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    assert losses == same
    assert not torch.equal(one[0], DecomposedPrompt(range(J), N, L, D, 0).keys)


@pytest.mark.parametrize("waiting", ["draw", "distil_blocks"])
def test_an_interrupted_distillation_does_not_go_on(monkeypatch, waiting):
    """Ctrl-C comes to the thread that waits for the others: for the samples, or for the blocks and the head."""
    where, steps, draws, gradients = source([single(1)], COUNTS[:1]), [], [], strategies.hepco.prompt_gradients
    where.generator.eval()
    drawn = Source.draw

    def slow(*given):
        steps.append(time.sleep(0.01))
        return gradients(*given)

    def counted(*given):
        draws.append(time.sleep(0.001))
        return drawn(*given)

    def interrupted(*_):
        raise KeyboardInterrupt

    class Interrupted(ThreadPoolExecutor):
        def submit(self, function, *given):
            future = super().submit(function, *given)
            future.result = interrupted if function.__name__ == waiting else future.result
            return future

    monkeypatch.setattr(strategies.hepco, "prompt_gradients", slow)
    monkeypatch.setattr(Source, "draw", counted)
    monkeypatch.setattr(strategies.hepco, "ThreadPoolExecutor", Interrupted)
    prompt, head = DecomposedPrompt(range(J), N, L, D, 0), Head(D, 0)
    head.grow(S)
    with pytest.raises(KeyboardInterrupt):
        distil(prompt, head, [(where, 2)], options(prompt_steps=300, head_steps=3000))
    assert len(steps) < 100
    assert len(draws) < 300 + 1000 * (waiting != "draw")


def test_an_interrupted_training_of_generators_does_not_go_on():
    """As when the server is interrupted while it waits for the other thread."""
    where, own = source([single(1)], COUNTS[:1]), options(generator_steps=10**9)
    trainings = []

    def interrupted():
        with side_by_side(torch.device("cpu")) as (threads, stop):
            trainings.append(threads.submit(train_generator, where, latent(single(0)), own, stop))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert trainings[0].done()


def test_counts_by_head_row():
    updates = [Update("a", 5, {}, {"class_ids": np.array([2, 5]), "counts": np.array([4, 1])})]
    updates += [Update("b", 3, {}, {"class_ids": np.array([0]), "counts": np.array([3])})]
    assert class_counts(updates, [7, 2, 5, 0]).tolist() == [[0, 4, 1, 0], [0, 0, 0, 3]]


class Server:
    """What a strategy needs of the model."""

    def __init__(self, tasks):
        self.device, self.backbone = torch.device("cpu"), SimpleNamespace(dim=D)
        self.prompt, self.head = DecomposedPrompt(range(J), N, L, D, 0), Head(D, 0)
        for classes in SCHEDULE.tasks[:tasks]:
            self.head.grow(len(classes))

    def travelling(self):
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
    moment = Moment(SCHEDULE, server_round)
    for update in updates:
        strategy.receive(model, update, moment)
    return strategy.refine(model, [replace(u, arrays={}) for u in updates], moment)


def test_clients_count_alike():
    assert [hepco().weight(u) for u in updates(1, {7: 100}, {2: 1})] == [1, 1]


def test_sources_and_memory_over_two_tasks(monkeypatch):
    """Clients teach their own counts; the previous task's last server joins in task 2 with all counts before it."""
    seen, composites = [], []

    def spy(source, server, options, stop):
        seen.append((source, server))
        return 0.0

    def counted(prompt, head, sources, *more):
        composites.append([n for _, n in sources])
        return distil(prompt, head, sources, *more)

    monkeypatch.setattr(strategies.hepco, "train_generator", spy)
    monkeypatch.setattr(strategies.hepco, "distil", counted)
    strategy, model = hepco(), Server(1)
    refined(strategy, model, updates(1, {7: 3, 2: 1}, {7: 1}), 1)
    assert len(seen) == 1
    assert seen[0][0].teachers.shares.tolist() == [[0.75, 1], [0.25, 0]]
    assert seen[0][0].histogram.tolist() == [4, 1]
    assert strategy.previous is None
    refined(strategy, model, updates(1, {2: 5}), 2)
    left = model.travelling()["prompt.pool"].clone()
    seen.clear()
    model = Server(2)
    for server_round in (3, 4):
        metrics = refined(strategy, model, updates(2, {5: 2}, {5: 2, 0: 1}), server_round)
        clients, past = (s for s, _ in seen[-2:])
        assert clients.teachers.shares.tolist() == [[0, 0, 0.5, 0], [0, 0, 0.5, 1]]
        assert clients.histogram.tolist() == [0, 0, 4, 1]
        assert past.histogram.tolist() == [4, 6]  # 3 + 1 and 1 + 5
        assert past.teachers.shares.tolist() == [[1, 1]]
        assert torch.equal(past.teachers.heads.pools[:, 0], left.flatten(2))
        assert past.teachers.heads.bias.shape == (1, 2)
    assert set(metrics) > {"generator-loss", "replay-generator-loss"}
    assert composites == 2 * [[64]] + 2 * [[64, 32]]
    assert strategy.known.tolist() == [4, 6, 8, 2]
    assert torch.equal(strategy.previous[0].weight[0], model.head.weight)


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
        return model.travelling()

    first, again, other, start = after(0), after(0), after(1), Server(2).travelling()
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert all(not torch.equal(first[n], other[n]) for n in first)
    assert all(not torch.equal(first[n], start[n]) for n in first)


def test_many_clients_teach_what_few_do(monkeypatch):
    """Prompts in memory and in a file lead to the same model, but for rounding, and to the same reported losses."""

    def after(few, gradient=False):
        monkeypatch.setattr(strategies.hepco, "FEW", few)
        strategy, model = hepco(**{"query-gradient": gradient, "generator-steps": 5}), Server(1)
        with torch.no_grad():
            model.prompt.pool += 1  # as far from zero as the clients'
        losses = refined(strategy, model, updates(1, {7: 3, 2: 1}, {7: 1}, {2: 6, 7: 2}), 1)
        assert strategy.arrived is None
        return model.travelling(), losses

    (few, losses), (many, same) = after(3), after(2)
    assert set(losses) == set(same) == {"generator-loss", "prompt-distillation-loss", "head-distillation-loss"}
    assert losses == pytest.approx(same, rel=1e-4)
    assert all(torch.allclose(few[n], many[n], atol=1e-5) for n in few)
    assert not any(torch.equal(few[n], Server(1).travelling()[n]) for n in few)
    # a bias before a batch normalisation has no gradient but rounding, of which Adam makes whole steps: no model alike
    few, many = (after(number, gradient=True)[1]["generator-loss"] for number in (3, 2))
    assert few == pytest.approx(many, rel=1e-5)
    assert few != pytest.approx(losses["generator-loss"], rel=1e-3)


def test_prompts_lie_in_a_file_once_more_than_ten_clients_have_come():
    strategy, model, moment = hepco(), Server(1), Moment(SCHEDULE, 1)
    all_updates = updates(1, *12 * [{7: 3}])
    for number, update in enumerate(all_updates, 1):
        strategy.receive(model, update, moment)
        assert len(strategy.arrived._models) == number
        kept = ["prompt.pool" in arrays for arrays in strategy.arrived._models.values()]
        assert kept == number * [number <= 10]
    counts = class_counts(all_updates, [7, 2])
    teachers = strategy.arrived.teachers([f"c{i}" for i in (11, 2, 0, 5)], counts[:4], model.device)
    for row, i in enumerate((11, 2, 0, 5)):
        found = teachers.file.read(teachers.places[row : row + 1], range(J))[:, 0]
        expected = all_updates[i].arrays
        assert np.array_equal(found[..., :D], expected["prompt.keys"])
        assert np.array_equal(found[..., D:], expected["prompt.pool"].reshape(J, N, -1))
        assert np.array_equal(teachers.heads.weight[row], expected["head.weight"])


def test_a_round_without_answers_leaves_the_model_alone():
    strategy, model = hepco(), Server(1)
    assert strategy.refine(model, [], Moment(SCHEDULE, 1)) == {}
    start = Server(1).travelling()
    assert all(torch.equal(a, start[n]) for n, a in model.travelling().items())


def test_a_first_task_that_nobody_trained_in_teaches_nothing():
    """Two tasks; nobody has images in the first, one client in the second."""
    schedule, config = Schedule([[0, 1], [2, 3]], 1), parse({"method": "hepco", **QUICK["hepco"]})
    model, server = build_model(config, [2]), HePCo(config)
    assert server.refine(model, [], Moment(schedule, 1)) == {}
    assert server.previous is None
    model.begin_task(2)
    statistics = {"class_ids": np.array([2, 3]), "counts": np.array([4, 1])}
    update = Update("a", 5, model.export(), statistics)
    server.receive(model, update, Moment(schedule, 2))
    losses = server.refine(model, [update], Moment(schedule, 2))
    assert set(losses) == {"generator-loss", "prompt-distillation-loss", "head-distillation-loss"}
