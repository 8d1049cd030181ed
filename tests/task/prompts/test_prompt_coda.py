"""CODA-Prompt and Fed-CPrompt; numbers by hand or in float64 NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from client_app.objectives.base import Objective
from client_app.objectives.fed_cprompt import FedCPrompt, contrast
from task.config.parsing import parse
from task.keys import ConfigError
from task.message import Packet
from task.models.feature_cache import Inputs
from task.prompts.coda import CodaPrompt, orthogonality
from tests.helpers.prompts import prompt_config

J, M, T, L, D, B = 2, 3, 4, 2, 16, 5  # blocks, components of a task, tasks, vectors, dimension, images
BLOCKS = (0, 3)
QUERY = torch.randn(B, D, generator=torch.Generator().manual_seed(0))


def drawn(penalty, seed):
    keys = {"num_tasks": T, "prompt_orthogonality": penalty, "seed": seed}
    return CodaPrompt(prompt_config(BLOCKS, L, M * T, **keys), D)


def coda(tasks, penalty=0.1, seed=0):
    prompt = drawn(penalty, seed)
    for task in range(tasks):
        prompt.begin_task(task)
    with torch.no_grad():
        for p in prompt.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return prompt


def components(prompt, block):
    """(A_m, K_m, P_m) of every task in turn, float64."""
    for keys, attention, prompts in zip(prompt.keys, prompt.attention, prompt.prompts, strict=True):
        yield from zip(*(p[block].detach().double().numpy() for p in (attention, keys, prompts)), strict=True)


def test_prompt_is_the_attended_sum_over_all_tasks_per_image():
    prompt = coda(tasks=3).eval()
    with torch.no_grad():
        found = prompt(QUERY)
    assert tuple(found) == BLOCKS
    for j, block in enumerate(BLOCKS):
        for image, q in enumerate(QUERY.double().numpy()):
            expected = np.zeros((2, L, D))
            for a, k, p in components(prompt, j):
                expected += (q * a) @ k / (np.linalg.norm(q * a) * np.linalg.norm(k)) * p
            assert np.allclose(found[block][image], expected, atol=1e-5)


def test_only_the_current_tasks_components_train():
    prompt = coda(tasks=3)
    names = {f"{kind}.2" for kind in ("keys", "attention", "prompts")}
    assert {n for n, p in prompt.named_parameters() if p.requires_grad} == names
    sum(p.square().sum() for p in prompt(QUERY).values()).backward()
    assert {n for n, p in prompt.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0} == names


def test_components_are_shared_out_evenly():
    prompt = CodaPrompt(parse({"prompt": "coda", "method": "fedavg", "num-tasks": 10}), 16)
    prompt.begin_task(0)
    assert {n: tuple(p.shape) for n, p in prompt.named_parameters()} == {
        "keys.0": (5, 10, 16),
        "attention.0": (5, 10, 16),
        "prompts.0": (5, 10, 2, 4, 16),  # a length of 8: four key and four value vectors
    }
    with pytest.raises(ConfigError, match="prompt-pool = 3"):
        parse({"prompt": "coda", "method": "fedavg", "prompt-pool": 3})


def test_all_components_start_orthonormal_and_from_the_seed():
    starts = [drawn(0.1, seed) for seed in (0, 0, 1)]
    for prompt in starts:
        for task in range(T):
            prompt.begin_task(task)
    for parts in (starts[0].keys, starts[0].attention, starts[0].prompts):
        rows = torch.cat(list(parts), dim=1).flatten(2)
        assert torch.allclose(rows @ rows.mT, torch.eye(T * M).expand(J, -1, -1), atol=1e-5)
    assert torch.equal(starts[0].prompts[1], starts[1].prompts[1])
    assert not torch.equal(starts[0].prompts[1], starts[2].prompts[1])


def test_penalty_by_hand():
    """B B^T - I of rows [1, 0] and [1, 2] is [[0, 1], [1, 4]]: squares 0, 1, 1, 16; the second block is orthonormal."""
    rows = torch.tensor([[[1.0, 0], [1, 2]], [[0, 1], [1, 0]]])
    assert float(orthogonality(rows)) == pytest.approx(18 / 8)


def test_penalty_covers_keys_attention_and_prompts_in_training_only():
    prompt = coda(tasks=2, penalty=0.7).eval()
    prompt(QUERY)
    assert prompt.penalty == 0.0
    prompt.train()(QUERY)
    expected = 0.0
    for parts in (prompt.keys, prompt.attention, prompt.prompts):
        for j in range(J):
            b = np.concatenate([p[j].detach().double().flatten(1).numpy() for p in parts])
            expected += 0.7 * ((b @ b.T - np.eye(2 * M)) ** 2).mean() / J
    assert float(prompt.penalty.detach()) == pytest.approx(expected, rel=1e-5)
    assert parse({}).prompt_orthogonality == 0.1


def options(**keys):
    return parse({"method": "fed-cprompt", **{f"fed-cprompt-{n}": v for n, v in keys.items()}}).options


def test_keys_name_the_method_that_reads_them():
    with pytest.raises(ConfigError, match=r"fed-cprompt-weight = 2.0 would be ignored: only method 'fed-cprompt'"):
        parse({"method": "fedavg", "fed-cprompt-weight": 2.0})


def filled(value):
    """A task prompt all of whose components are the vector (value, 0, 0, ...)."""
    prompt = torch.zeros(J, M, 2, L, D)
    prompt[:, :, 0, 0, 0] = value
    return prompt


@pytest.mark.parametrize(
    ("older", "keys", "expected"),
    [
        ([], {}, 2.0),  # the first task: |3 - 5|
        ([4.0, 13.0], {}, 2.0 - 0.5 * 1.0 + 1.0),  # the nearest older one is 1 away
        ([4.0, 13.0], {"push": 2.0, "margin": 0.25}, 2.0 - 2.0 * 1.0 + 0.25),
        ([13.0], {"push": 1.0}, 0.0),  # 2 - 10 + 1 is below 0
    ],
)
def test_contrast_by_hand(older, keys, expected):
    found = contrast(filled(3.0), filled(5.0), [filled(o) for o in older], options(**keys))
    assert float(found) == pytest.approx(expected)


def test_contrast_pulls_to_the_global_prompt_and_off_the_nearest_older_one():
    local = filled(3.0).requires_grad_()
    contrast(local, filled(5.0), [filled(4.0)], options()).backward()
    # towards 5 by 1 / sqrt(J M) a component, off 4 (downwards) by half of that
    assert local.grad[:, :, 0, 0, 0].tolist() == [pytest.approx([(-1 + 0.5) / (J * M)] * M)] * J
    assert local.grad.count_nonzero() == J * M


def test_contrast_has_a_finite_gradient_where_training_starts():
    local = filled(3.0).requires_grad_()
    contrast(local, local.detach().clone(), [], options()).backward()
    assert local.grad.count_nonzero() == 0


class Tiny(nn.Module):
    """What an objective needs of a model: a CODA prompt, whose mean is all that the logits depend on."""

    def __init__(self):
        super().__init__()
        self.prompt = coda(tasks=2)

    def current_rows(self):
        return torch.tensor([2, 3])

    def local_targets(self, rows):
        return rows - 2

    def forward(self, images, query=None):
        return torch.stack([p.mean((1, 2, 3)) for p in self.prompt(images).values()] * 2, dim=1)


def test_objective_adds_the_weighted_contrast_to_the_rounds_start():
    config = parse({"method": "fed-cprompt", "fed-cprompt-weight": 3.0})
    model, rows = Tiny(), torch.tensor([2, 3, 2, 2, 3])
    objective = FedCPrompt(config, Packet())
    objective.begin_epoch(model, None, 0, torch.Generator())
    start = model.prompt.prompts[1].detach().clone()
    with torch.no_grad():
        model.prompt.prompts[1] += 0.3
    objective.begin_epoch(model, None, 1, torch.Generator())  # a later epoch keeps what the round began with
    loss, logits = objective.loss(model, Inputs(QUERY), rows)
    base, expected = Objective(config, Packet()).loss(model, Inputs(QUERY), rows)
    old, now = model.prompt.prompts[0].detach().double(), model.prompt.prompts[1].detach().double()
    scale = (J * M) ** -0.5
    away = float((now - start.double()).square().sum().sqrt()) * scale
    apart = float((now - old).square().sum().sqrt()) * scale
    assert float((loss - base).detach()) == pytest.approx(3.0 * max(away - 0.5 * apart + 1.0, 0), rel=1e-4)
    assert torch.equal(logits, expected)
