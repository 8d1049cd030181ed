"""LoRA: low-rank changes of the attention's weights, against timm's own model with the changed weights."""

import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor

from task.config.parsing import parse
from task.models.model import build_model
from task.models.vit import ViT
from task.models.weights import build_vit
from task.prompts.lora import LoRA
from tests.helpers.prompts import prompt_config

GREY = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
BLOCKS = [0, 2]


def images(number: int = 5) -> Tensor:
    return torch.randn(number, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def plain(changes: dict[int, Tensor] | None = None) -> VisionTransformer:
    """The bundled ViT as timm has it, with other weights of the attention."""
    vit = build_vit("vit_glyphs", "auto")[0]
    vit.set_input_size(img_size=(32, 32))
    for block, change in (changes or {}).items():
        vit.blocks[block].attn.qkv.weight.data += change
    return vit.eval()


def features(vit: VisionTransformer) -> Tensor:
    with torch.no_grad():
        return vit.forward_head(vit.forward_features(images()), pre_logits=True)


def drawn(deviation: float) -> LoRA:
    prompt = LoRA(prompt_config(BLOCKS, 3), 112)
    torch.nn.init.normal_(prompt.up, std=deviation, generator=torch.Generator().manual_seed(1))
    return prompt


def test_its_start_changes_nothing() -> None:
    prompt = LoRA(prompt_config(BLOCKS, 3), 112)
    assert prompt.down.shape == (2, 3, 112)
    assert prompt.up.shape == (2, 336, 3)
    assert prompt.down.std().item() == pytest.approx(0.02, rel=0.1)
    assert not prompt.up.any()
    with torch.no_grad():
        output = ViT(plain(), *GREY)(images(), prompt(None))
    assert torch.allclose(output, features(plain()), atol=1e-5)


def test_features_are_those_of_the_changed_weights() -> None:
    """Queries, keys and values by W + B A; all tokens but the last block's class token alone, which is as exact."""
    prompt = drawn(1.0)
    with torch.no_grad():
        changes = {block: prompt.up[i] @ prompt.down[i] for i, block in enumerate(BLOCKS)}
        output = ViT(plain(), *GREY)(images(), prompt(None))
    expected = features(plain(changes))
    assert torch.allclose(output, expected, atol=1e-4)
    assert (expected - features(plain())).abs().max() > 0.1  # the change matters


@pytest.mark.parametrize("part", range(3))
def test_queries_keys_and_values_are_changed(part: int) -> None:
    change = torch.zeros(336, 112)
    change[112 * part : 112 * (part + 1)] = 0.05 * torch.randn(112, 112, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        output = ViT(plain(), *GREY)(images(), {1: change})
    expected = features(plain({1: change}))
    assert torch.allclose(output, expected, atol=1e-4)
    assert (expected - features(plain())).abs().max() > 0.01


def test_the_change_is_gone_after_the_pass() -> None:
    backbone = ViT(plain(), *GREY)
    with torch.no_grad():
        before = backbone(images())
        backbone(images(), drawn(1.0)(None))
        assert torch.equal(backbone(images()), before)


def test_both_halves_get_gradients_and_the_backbone_none() -> None:
    backbone, prompt = ViT(plain(), *GREY), drawn(0.1)
    backbone(images(), prompt(None)).square().sum().backward()
    assert prompt.up.grad is not None
    assert prompt.down.grad is not None
    assert all(grad.flatten(1).any(dim=1).all() for grad in (prompt.up.grad, prompt.down.grad))
    assert all(p.grad is None for p in backbone.parameters())


def test_run_keys_reach_it() -> None:
    config = parse(
        {"method": "fedavg", "prompt": "lora", "prompt-length": 2, "prompt-blocks": "1,3", "seed": 4, "device": "cpu"}
    )
    prompt = build_model(config, [3]).prompt
    assert isinstance(prompt, LoRA)
    assert prompt.blocks == (0, 2)
    assert prompt.down.shape == (2, 2, 112)
    assert not torch.equal(prompt.down, LoRA(prompt_config([0, 2], 2, seed=5), 112).down)
    assert torch.equal(prompt.down, LoRA(prompt_config([0, 2], 2, seed=4), 112).down)
