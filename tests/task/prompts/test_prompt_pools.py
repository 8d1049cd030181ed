"""L2P and DualPrompt: choice by query, matching loss, frozen experts; numbers in float64 NumPy."""

import numpy as np
import pytest
import torch

from client_app.client import Node, handle
from task.config.parsing import parse
from task.keys import ConfigError
from task.models.model import build_model
from task.prompts.dualprompt import DualPrompt
from task.prompts.l2p import L2P
from task.scenario.scenario import build_scenario
from tests.helpers.prompts import prompt_config
from tests.helpers.runs import train_message

D = 16


def queries(number=9, seed=0):
    return torch.randn(number, D, generator=torch.Generator().manual_seed(seed))


def cosines(q, keys):
    q, keys = q.detach().double().numpy(), keys.detach().double().numpy()
    return (q @ keys.T) / np.linalg.norm(q, axis=1, keepdims=True) / np.linalg.norm(keys, axis=1)


def l2p(pool=10, matching=0.1, seed=0):
    return L2P(prompt_config([1], 3, pool, seed=seed, prompt_matching=matching), D)


def dual(tasks=3, blocks=(0, 1, 2, 4, 5), seed=0):
    prompt = DualPrompt(prompt_config(blocks, 3, seed=seed, prompt_matching=0.1), D)
    for task in range(tasks):
        prompt.begin_task(task)
    return prompt


def spread(values):
    """Whether many values look uniform on (-1, 1)."""
    return bool(values.min() >= -1 and values.max() < 1 and abs(values.std() - 3**-0.5) < 0.05)


def test_l2p_gives_each_image_the_five_nearest_prompts():
    prompt, q = l2p().eval(), queries()
    given = prompt(q)
    assert list(given) == [1]
    assert given[1].shape == (9, 5 * 3, D)
    nearest = np.argsort(-cosines(q, prompt.keys), axis=1)[:, :5]
    for image, chosen in enumerate(nearest):
        expected = prompt.pool.detach()[chosen.tolist()].reshape(15, D)
        assert torch.equal(given[1][image], expected)
    assert len({tuple(sorted(chosen)) for chosen in nearest.tolist()}) > 1  # so that a wrong image would show
    assert prompt.penalty == 0.0  # not in training


def test_l2p_matching_loss_is_minus_lambda_mean_cosine():
    prompt, q = l2p(matching=0.3).train(), queries()
    prompt(q)
    similarity = cosines(q, prompt.keys)
    assert float(prompt.penalty.detach()) == pytest.approx(-0.3 * np.sort(similarity, axis=1)[:, -5:].mean(), rel=1e-5)


def test_l2p_keys_move_towards_queries():
    prompt, q = l2p().train(), queries(1)
    prompt(q)
    before = cosines(q, prompt.keys)[0]
    prompt.penalty.backward()
    with torch.no_grad():
        prompt.keys -= 10 * prompt.keys.grad
    after, chosen = cosines(q, prompt.keys)[0], np.argsort(-before)[:5]
    assert (after[chosen] > before[chosen]).all()
    others = np.setdiff1d(np.arange(10), chosen)
    assert np.array_equal(after[others], before[others])


def test_l2p_starts_uniform_and_by_seed_alone():
    prompt = l2p()
    assert (prompt.pool.shape, prompt.keys.shape) == ((10, 3, D), (10, D))
    assert spread(prompt.pool.detach())
    assert spread(prompt.keys.detach())
    assert torch.equal(prompt.pool, l2p().pool)
    assert not torch.equal(prompt.pool, l2p(seed=1).pool)


def test_l2p_uses_a_small_pool_whole():
    assert l2p(pool=2).eval()(queries())[1].shape == (9, 2 * 3, D)


def test_dualprompt_trains_the_current_expert_whatever_the_query():
    prompt, q = dual().train(), queries()
    given = prompt(q)
    assert list(given) == [0, 1, 2, 4, 5]
    assert all(vectors.shape == (1, 2, 3, D) for vectors in given.values())
    for i, block in enumerate((0, 1)):
        assert torch.equal(given[block][0], prompt.general[i])
    for i, block in enumerate((2, 4, 5)):
        assert torch.equal(given[block][0], prompt.experts[2][i])
    expected = -0.1 * cosines(q, prompt.keys[2][None]).mean()
    assert float(prompt.penalty.detach()) == pytest.approx(expected, rel=1e-5)


def test_dualprompt_tests_each_image_with_the_nearest_experts_prefix():
    prompt, q = dual().eval(), queries()
    given = prompt(q)
    nearest = cosines(q, torch.stack(list(prompt.keys))).argmax(axis=1)
    assert len(set(nearest.tolist())) == 3  # so that a wrong image would show
    for i, block in enumerate((2, 4, 5)):
        assert given[block].shape == (9, 2, 3, D)
        for image, expert in enumerate(nearest):
            assert torch.equal(given[block][image], prompt.experts[expert][i])


def test_dualprompt_freezes_what_has_ended():
    prompt = dual(2)
    trained = {name for name, p in prompt.named_parameters() if p.requires_grad}
    assert trained == {"general", "experts.1", "keys.1"}
    assert {name for name, _ in prompt.named_parameters()} == trained | {"experts.0", "keys.0"}


def test_dualprompt_starts_uniform_each_task_its_own():
    prompt, again = dual(), dual()
    assert all(torch.equal(a, b) for a, b in zip(prompt.parameters(), again.parameters(), strict=True))
    assert (prompt.general.shape, prompt.experts[0].shape, prompt.keys[0].shape) == ((2, 2, 3, D), (3, 2, 3, D), (D,))
    assert spread(torch.cat([e.detach() for e in prompt.experts]))
    assert not torch.equal(prompt.experts[0], prompt.experts[1])
    assert not torch.equal(prompt.experts[0].flatten()[: prompt.general.numel()], prompt.general.flatten())


def test_dualprompt_needs_a_block_for_experts():
    with pytest.raises(ConfigError, match=r"prompt-blocks.*'1-2'.*at least 3"):
        parse({"method": "fedavg", "prompt": "dualprompt", "prompt-blocks": "1-2"})


def test_earlier_experts_stay_on_the_server(tiny):
    """Task 2: everything goes down, the current expert, its key and what is shared come back, the rest stays."""
    config = parse(tiny | {"method": "fedavg", "prompt": "dualprompt"})
    model = build_model(config, build_scenario(config).task_sizes(1))
    sent = train_message(config, task=1)
    answer = handle("train", sent, Node({"partition-id": 0}))
    shared = {"head.weight", "head.bias", "prompt.general"}
    assert set(sent.arrays) == shared | {f"prompt.{name}.{t}" for name in ("experts", "keys") for t in (0, 1)}
    assert set(answer.arrays) == shared | {"prompt.experts.1", "prompt.keys.1"}
    before = {name: model.shared_state()[name].clone() for name in ("prompt.experts.0", "prompt.keys.0")}
    model.load(answer.arrays)
    assert all(torch.equal(model.shared_state()[name], value) for name, value in before.items())
    assert np.array_equal(model.shared_state()["prompt.experts.1"], answer.arrays["prompt.experts.1"])


def test_a_model_that_nobody_trains_chooses_experts_by_the_query(tiny):
    """Its first key asked for, it takes the first expert, though the second task is the current one."""
    model = build_model(parse(tiny | {"method": "fedavg", "prompt": "dualprompt"}), [6, 6])
    prompt = model.prompt
    *_, last = model.prompt(prompt.keys[0].detach()[None]).values()
    assert torch.equal(last[0], prompt.experts[0][-1])
    model.train()
    *_, last = model.prompt(prompt.keys[0].detach()[None]).values()
    assert torch.equal(last[0], prompt.experts[1][-1])
