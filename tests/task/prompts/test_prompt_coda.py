"""CODA-Prompt; numbers by hand or in float64 NumPy."""

import numpy as np
import pytest
import torch

from task.config.parsing import parse
from task.keys import ConfigError
from task.prompts.coda import CodaPrompt, orthogonality
from tests.helpers.coda import BLOCKS, QUERY, D, J, L, M, T, coda, drawn


def components(prompt, block):
    """(A_m, K_m, P_m) of every task in turn, float64."""
    for keys, attention, prompts in zip(prompt.keys, prompt.attention, prompt.prompts, strict=True):
        yield from zip(*(p[block].detach().double().numpy() for p in (attention, keys, prompts)), strict=True)


def test_prompt_is_the_attended_sum_over_all_tasks_per_image():
    prompt = coda(tasks=3).eval()
    with torch.no_grad():
        prefixes = prompt(QUERY)
    assert tuple(prefixes) == BLOCKS
    for j, block in enumerate(BLOCKS):
        for image, q in enumerate(QUERY.double().numpy()):
            expected = np.zeros((2, L, D))
            for a, k, p in components(prompt, j):
                expected += (q * a) @ k / (np.linalg.norm(q * a) * np.linalg.norm(k)) * p
            assert np.allclose(prefixes[block][image], expected, atol=1e-5)


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
