"""The frozen backbone against timm itself and against a Vision Transformer written in float64 NumPy."""

import base64
import hashlib
import json
import math
import re
import socket

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from scipy.special import erf
from timm.models import VisionTransformer
from timm.models.vision_transformer import Block
from torch import nn

from benchmarks import pretrain_glyphs
from task.config.parsing import parse
from task.keys import ConfigError
from task.models import vit as vit_module
from task.models import weights as module
from task.models.load import configured_backbone, load_backbone
from task.models.model import build_model
from task.models.vit import Early, ViT, digest, load_vit
from task.prompts.shared import SharedPrompt
from tests.helpers.prompts import prompt_config

HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
SHAPE = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "num_heads": 3, "num_classes": 0}
VARIANTS = {
    "plain": {},
    "layer scale": {"init_values": 0.1},
    "query and key norm": {"qk_norm": True},
    "register tokens": {"reg_tokens": 2, "no_embed_class": True},
    "classifier left on": {"num_classes": 5},
    "attention norm, no bias": {"scale_attn_norm": True, "qkv_bias": False},
}


@pytest.fixture(autouse=True)
def _apart_from_other_tests(monkeypatch):
    """No backbone of another test, and no network."""

    def refuse(*address, **options):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    load_backbone.cache_clear()
    yield
    load_backbone.cache_clear()


@pytest.mark.parametrize(
    ("proxies", "endpoint", "tried"),
    [
        ({}, "https://hub.example", ("hub.example", 443)),
        ({"no": "127.0.0.1"}, "http://mirror.example", ("mirror.example", 80)),  # as in the environment of Flower
        ({}, "http://mirror.example:8080", ("mirror.example", 8080)),
        ({"https": "http://proxy.example", "no": "127.0.0.1"}, "https://hub.example", None),
    ],
)
def test_the_hub_is_left_out_if_it_cannot_be_reached_at_its_own_port(proxies, endpoint, tried, monkeypatch):
    asked = []

    def refuse(address, timeout):
        asked.append(address)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(module, "getproxies", lambda: proxies)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    module._go_offline_if_unreachable()
    assert asked == [tried] * (tried is not None)
    assert huggingface_hub.constants.HF_HUB_OFFLINE is (tried is not None)


def test_a_tag_that_timm_does_not_have_is_named():
    with pytest.raises(ConfigError, match=r"^backbone = 'vit_tiny_patch16_224\.nonsense' cannot be built by timm \("):
        load_vit("vit_tiny_patch16_224.nonsense", "auto", 32, seed=0)


def test_a_backbone_that_does_not_exist_is_named_with_others_that_do():
    with pytest.raises(ConfigError, match=r"^backbone = 'resnet17' does not exist: use vit_glyphs, resnet18_cifar, "):
        load_vit("resnet17", "auto", 32, seed=0)


def tiny_vit(depth=1, seed=0, **changes):
    """A small ViT whose every parameter is drawn anew, so that no scale is 0, no norm is trivial."""
    vit = VisionTransformer(**(SHAPE | {"depth": depth} | changes))
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in vit.named_parameters():
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.data = centre + 0.4 * torch.randn(parameter.shape, generator=rng)
    return vit.eval()


def plain(name):
    """Timm's own name of a wrapped parameter."""
    return name.replace("attn.attention.", "attn.").replace(".block.", ".")


def images(batch=3, side=8, seed=1):
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))


def prefix(batch=1, length=5, dim=12, seed=2):
    return torch.randn(batch, 2, length, dim, generator=torch.Generator().manual_seed(seed))


class NumpyViT:
    """A ViT in float64 from the weights by name alone; follows Dosovitskiy et al. 2021 and HGP section 3.2."""

    def __init__(self, vit, heads=3, patch=4, projects=False):
        self.projects = projects
        self.w = {name: value.double().numpy() for name, value in vit.state_dict().items()}
        self.heads, self.patch = heads, patch
        self.depth = 1 + max(int(name.split(".")[1]) for name in self.w if name.startswith("blocks."))

    def features(self, pixels, prefixes=None, prompts=None):
        x = self.tokens(pixels.double().numpy())
        own = x.shape[1]
        for i in range(self.depth):
            prefix = (prefixes or {}).get(i)
            if i in (prompts or {}):
                prompt = prompts[i].double().numpy()
                x = np.concatenate([x, np.broadcast_to(prompt, (len(x), *prompt.shape[1:]))], axis=1)
            b = f"blocks.{i}."
            attended = self.attention(b + "attn.", self.norm(b + "norm1", x), prefix)
            x = x + attended * self.w.get(b + "ls1.gamma", 1.0)
            hidden = self.linear(b + "mlp.fc1", self.norm(b + "norm2", x))
            gelu = 0.5 * hidden * (1 + erf(hidden / np.sqrt(2)))
            x = (x + self.linear(b + "mlp.fc2", gelu) * self.w.get(b + "ls2.gamma", 1.0))[:, :own]
        return self.norm("norm", x)[:, 0]

    def tokens(self, pixels):
        B, C, H, W = pixels.shape
        p, kernel = self.patch, self.w["patch_embed.proj.weight"]
        patches = pixels.reshape(B, C, H // p, p, W // p, p).transpose(0, 2, 4, 1, 3, 5).reshape(B, -1, C * p * p)
        x = patches @ kernel.reshape(len(kernel), -1).T + self.w["patch_embed.proj.bias"]
        registers = self.w.get("reg_token")
        front = [self.w["cls_token"]] + ([registers] if registers is not None else [])
        front = np.concatenate(front, axis=1).repeat(B, axis=0)
        position = self.w["pos_embed"]
        if position.shape[1] == x.shape[1]:  # no position for class token and registers
            return np.concatenate([front, x + position], axis=1)
        return np.concatenate([front, x], axis=1) + position

    def attention(self, name, x, prefix):
        B, N, D = x.shape
        size = D // self.heads
        q, k, v = np.split(self.linear(name + "qkv", x), 3, axis=2)
        q, k, v = (t.reshape(B, N, self.heads, size) for t in (q, k, v))
        q, k = self.norm(name + "q_norm", q), self.norm(name + "k_norm", k)
        if prefix is not None:
            prefix = np.broadcast_to(prefix.double().numpy(), (B, *prefix.shape[1:]))
            if self.projects:  # PIP eq. 3-4: [P_k; h] W_k and [P_v; h] W_v, so each through its own third of qkv
                keys, values = (np.split(self.linear(name + "qkv", prefix[:, i]), 3, axis=2)[1 + i] for i in (0, 1))
                keys = self.norm(name + "k_norm", keys.reshape(B, -1, self.heads, size)).reshape(keys.shape)
                prefix = np.stack([keys, values], axis=1)
            k = np.concatenate([prefix[:, 0].reshape(B, -1, self.heads, size), k], axis=1)
            v = np.concatenate([prefix[:, 1].reshape(B, -1, self.heads, size), v], axis=1)
        out = np.empty((B, N, D))
        for b in range(B):
            for h in range(self.heads):
                scores = np.exp(q[b, :, h] @ k[b, :, h].T / np.sqrt(size))
                shares = scores / scores.sum(axis=1, keepdims=True)
                out[b, :, h * size : (h + 1) * size] = shares @ v[b, :, h]
        return self.linear(name + "proj", self.norm(name + "norm", out))

    def linear(self, name, x):
        return x @ self.w[name + ".weight"].T + self.w.get(name + ".bias", 0.0)

    def norm(self, name, x):
        if name + ".weight" not in self.w:
            return x
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
        return scaled * self.w[name + ".weight"] + self.w[name + ".bias"]


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_without_prefix_it_is_timm_bit_for_bit(changes):
    """The number to compare with is an untouched twin of the same timm model."""
    twin, backbone = tiny_vit(2, **changes), ViT(tiny_vit(2, **changes), *HALVES)
    with torch.no_grad():
        expected = twin.forward_head(twin.forward_features(images()), pre_logits=True)
    assert torch.equal(backbone(images()), expected)
    assert torch.equal(backbone(images(), {}), expected)


@pytest.mark.parametrize("shape", [(5, 12), (12,), (1, 2, 3, 5, 12), (1, 3, 5, 12), (1, 2, 5, 7), (1, 5, 7)])
def test_what_is_none_of_the_three_kinds_of_prompt_is_named(shape):
    backbone = ViT(tiny_vit(2), *HALVES)
    with pytest.raises(ValueError, match=rf"gives a block is {re.escape(str(list(shape)))} instead of a prefix"):
        backbone(images(), {0: torch.zeros(shape)})


def test_a_named_timm_model_is_timm_bit_for_bit():
    """The twin is made by timm itself and given the same weights."""
    backbone = load_backbone("deit_tiny_patch16_224", "random", 0, "cpu")
    twin = timm.create_model("deit_tiny_patch16_224", num_classes=0).eval()
    twin.load_state_dict({plain(n): v for n, v in backbone.vit.state_dict().items()})
    with torch.no_grad():
        expected = twin.forward_head(twin.forward_features(images(2, 224)), pre_logits=True)
    assert torch.equal(backbone(images(2, 224)), expected)
    assert (backbone.dim, backbone.depth, backbone.image_size) == (192, 12, 224)
    assert np.allclose(backbone.mean.flatten(), (0.485, 0.456, 0.406))  # ImageNet's, as timm documents for DeiT
    assert np.allclose(backbone.std.flatten(), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("name", ["vit_glyphs", "test_vit"])
def test_random_weights_are_equal_in_every_process(name):
    """Server and clients compare digests, so weights that follow a process's own random state can never be used."""
    torch.manual_seed(1)
    one = load_backbone.__wrapped__(name, "random", 0, "cpu")
    torch.manual_seed(2)
    assert one.sha256 == load_backbone.__wrapped__(name, "random", 0, "cpu").sha256


@pytest.mark.parametrize("batch", [1, 3], ids=["shared prefix", "prefix per image"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_prefix_equals_float64_numpy(changes, batch):
    """One block; NumPy puts P_k, P_v in front of the projected keys and values of every head."""
    vit, vectors = tiny_vit(**changes), prefix(batch)
    expected = NumpyViT(vit).features(images(), {0: vectors})
    unprefixed = NumpyViT(vit).features(images())
    backbone = ViT(vit, *HALVES)
    assert np.abs(backbone(images(), {0: vectors}).numpy() - expected).max() < 2e-5
    assert np.abs(backbone(images()).numpy() - unprefixed).max() < 2e-5
    assert np.abs(expected - unprefixed).max() > 0.05  # so the prefix is really seen


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_attention_by_plain_products_equals_float64_numpy(changes, monkeypatch):
    monkeypatch.setattr(vit_module, "_by_products", lambda _: True)
    vit = tiny_vit(2, **changes)
    written, backbone = NumpyViT(vit), ViT(vit, *HALVES)
    for prompted in ({}, {0: prefix(3)}):  # the second block has no prefix, the last one its first token only
        assert np.abs(backbone(images(), prompted).numpy() - written.features(images(), prompted)).max() < 4e-5


@pytest.mark.parametrize(
    ("bf16", "gradient", "most", "products"),
    [(True, True, 5, True), (True, True, 4, False), (True, False, 5, False), (False, True, 5, False)],
)
def test_plain_products_are_for_gradients_of_few_tokens_in_bf16(bf16, gradient, most, products, monkeypatch):
    """With the same feature and gradient as PyTorch's own attention, to the eight bits of bf16."""
    monkeypatch.setattr(vit_module, "_MOST_TOKENS", most)
    calls, attention = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **more: calls.append(1) or attention(*args, **more)
    )
    backbone, vectors = ViT(tiny_vit(2), *HALVES), prefix(3).requires_grad_(gradient)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16), torch.set_grad_enabled(gradient):
        feature = backbone(images(), {0: vectors}).float()
    assert (not calls) == products
    expected = ViT(tiny_vit(2), *HALVES)(images(), {0: (twin := prefix(3).requires_grad_())})
    torch.testing.assert_close(feature, expected, rtol=0.05, atol=0.1)
    if gradient:
        feature.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(vectors.grad, twin.grad, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_projected_prefix_equals_float64_numpy(changes):
    vit, vectors = tiny_vit(**changes), prefix(3)
    expected = NumpyViT(vit, projects=True).features(images(), {0: vectors})
    plain_prefix = NumpyViT(vit).features(images(), {0: vectors})
    backbone = ViT(vit, *HALVES)
    assert np.abs(backbone(images(), {0: vectors}, projects=True).numpy() - expected).max() < 2e-5
    assert np.abs(backbone(images(), {0: vectors}).numpy() - plain_prefix).max() < 2e-5
    assert np.abs(expected - plain_prefix).max() > 0.05


def test_prefixes_of_several_blocks_reach_their_own_block():
    vit, prefixes = tiny_vit(3), {0: prefix(seed=4), 2: prefix(3, seed=5)}
    expected = NumpyViT(vit).features(images(), prefixes)
    swapped = NumpyViT(vit).features(images(), {0: prefixes[2], 2: prefixes[0]})
    ours = ViT(vit, *HALVES)(images(), prefixes).numpy()
    assert np.abs(ours - expected).max() < 5e-5
    assert np.abs(ours - swapped).max() > 0.05


@pytest.mark.parametrize("batch", [1, 3], ids=["shared tokens", "tokens per image"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_prompt_tokens_equal_float64_numpy(changes, batch):
    """PIP eq. 2 in NumPy: tokens join the input of block 0 and 2 and leave with the output; block 1 has a prefix."""
    vit, vectors = tiny_vit(3, **changes), prefix(3)
    prompts = {0: prefix(batch, seed=8)[:, 0], 2: prefix(batch, length=2, seed=9)[:, 1]}
    expected = NumpyViT(vit).features(images(), {1: vectors}, prompts)
    without_tokens = NumpyViT(vit).features(images(), {1: vectors})
    backbone = ViT(vit, *HALVES)
    ours = backbone(images(), {1: vectors, **prompts})
    assert np.abs(ours.numpy() - expected).max() < 5e-5
    assert np.abs(expected - without_tokens).max() > 0.05
    assert np.abs(backbone(images()).numpy() - NumpyViT(tiny_vit(3, **changes)).features(images())).max() < 5e-5


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_last_block_may_have_no_prompt(changes):
    """It works out the class token alone, of which the NumPy form knows nothing."""
    vit, vectors = tiny_vit(2, **changes), prefix(3)
    expected = NumpyViT(vit).features(images(), {0: vectors})
    assert np.abs(ViT(vit, *HALVES)(images(), {0: vectors}).numpy() - expected).max() < 5e-5


class OtherBlock(Block):
    """One of which nobody knows what it does with its tokens."""


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [({}, 1), ({"global_pool": "avg"}, 5), ({"global_pool": "map"}, 5), ({"block_fn": OtherBlock}, 5)],
    ids=["class token", "mean", "attention pool", "another block"],
)
def test_tokens_are_spared_where_nothing_reads_them(changes, tokens):
    backbone, seen = ViT(tiny_vit(2, **changes), *HALVES), []
    backbone.vit.blocks[1].register_forward_hook(lambda block, given, out: seen.append(out.shape[1]))
    backbone(images(), {0: prefix()})
    backbone(images())
    assert seen == [tokens, 5]


def test_shared_prompt_goes_to_the_named_blocks():
    """NumPy reads the prompt's parameter [blocks, 2, L_p, D] itself: keys, then values."""
    vit, prompt = tiny_vit(3), SharedPrompt(prompt_config([0, 2], 4), 12)
    torch.nn.init.normal_(prompt.prefix, generator=torch.Generator().manual_seed(6))
    raw = prompt.prefix.detach()
    expected = NumpyViT(vit).features(images(), {0: raw[:1], 2: raw[1:]})
    ours = ViT(vit, *HALVES)(images(), prompt(None)).detach().numpy()
    assert np.abs(ours - expected).max() < 5e-5


def test_each_image_keeps_its_own_prefix():
    backbone, vectors = ViT(tiny_vit(2), *HALVES), prefix(3)
    together = backbone(images(), {0: vectors, 1: vectors})
    for i in range(3):
        one = vectors[i : i + 1]
        assert torch.allclose(together[i], backbone(images()[i : i + 1], {0: one, 1: one})[0], atol=1e-5)


def test_parameters_are_frozen_and_keep_no_gradient():
    backbone = ViT(tiny_vit(2), *HALVES)
    vectors = prefix().requires_grad_()
    backbone(images(), {0: vectors}).square().sum().backward()
    assert float(vectors.grad.abs().min()) > 0
    assert not any(p.requires_grad for p in backbone.parameters())
    assert all(p.grad is None for p in backbone.parameters())


def test_it_is_in_evaluation_mode_from_the_start():
    assert [name for name, part in ViT(tiny_vit(), *HALVES).named_modules() if part.training] == []


def test_train_stays_in_evaluation_mode():
    """With dropout of a half everywhere, two passes in training mode would differ."""
    dropping = {"drop_rate": 0.5, "proj_drop_rate": 0.5, "attn_drop_rate": 0.5, "drop_path_rate": 0.5}
    backbone, clean = ViT(tiny_vit(2, **dropping), *HALVES), ViT(tiny_vit(2), *HALVES)
    nn.Sequential(backbone).train()
    assert not any(part.training for part in backbone.modules())
    assert torch.equal(backbone(images()), clean(images()))
    assert torch.equal(backbone(images(), {1: prefix()}), clean(images(), {1: prefix()}))


@pytest.mark.parametrize(
    ("batch", "prefixes"),
    [
        (images(side=12), {0: prefix()}),
        (images(), {0: prefix(), 1: prefix(dim=9)}),
        (images(), {0: prefix(batch=2)}),
        (images(), {0: prefix(), 7: prefix()}),
        (images(), {1: prefix()[:, 0], 0: prefix(dim=9)[:, 0]}),
    ],
    ids=["wrong image size", "wrong width", "wrong batch", "no such block", "tokens of wrong width"],
)
def test_an_exception_leaves_no_prefix_behind(batch, prefixes):
    backbone = ViT(tiny_vit(2), *HALVES)
    before = backbone(images())
    with pytest.raises((RuntimeError, AssertionError, IndexError, ValueError)):
        backbone(batch, prefixes)
    assert [block.block.attn.prefix for block in backbone.vit.blocks] == [None, None]
    assert [block.tokens for block in backbone.vit.blocks] == [None, None]
    assert not any(block.first_only or block.block.attn.first_only for block in backbone.vit.blocks)
    assert torch.equal(backbone(images()), before)


def test_image_size_can_change():
    """The class token's position stays; patch positions that are all alike stay alike at any size."""
    small = load_backbone("vit_glyphs", "auto", 0, "cpu")
    large = load_backbone("vit_glyphs", "auto", 64, "cpu")
    assert (small.image_size, large.image_size) == (32, 64)
    assert (small.vit.pos_embed.shape[1], large.vit.pos_embed.shape[1]) == (1 + 16, 1 + 64)
    assert torch.equal(small.vit.pos_embed[:, 0], large.vit.pos_embed[:, 0])
    assert large(images(2, 64)).shape == (2, small.dim)
    with pytest.raises(AssertionError):
        large(images(2, 32))


def test_an_image_of_too_many_patches_is_refused():
    with pytest.raises(ConfigError, match=r"^image-size = 4000 .*patches of 8 x 8 pixels.*at most 512"):
        load_backbone("vit_glyphs", "auto", 4000, "cpu")


@pytest.mark.parametrize("size", [31, 33, 4])
def test_an_image_size_that_is_no_multiple_of_the_patch_is_refused(size):
    with pytest.raises(ConfigError, match=rf"^image-size = {size} .*multiple of 8"):
        load_backbone("vit_glyphs", "auto", size, "cpu")


def test_the_same_image_size_changes_nothing():
    assert load_backbone("vit_glyphs", "auto", 32, "cpu").sha256 == load_backbone("vit_glyphs", "auto", 0, "cpu").sha256


def test_digest_sees_one_weight():
    vit = tiny_vit(2)
    before = digest(vit)
    weight = vit.blocks[1].mlp.fc2.weight.data
    kept = weight[3, 5].clone()
    weight[3, 5] = torch.nextafter(kept, torch.tensor(9.0))
    assert digest(vit) != before
    weight[3, 5] = kept
    assert digest(vit) == before


def test_digest_sees_names_and_shapes():
    one, other = nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)
    other.weight.data = one.weight.data.reshape(2, 3).clone()
    assert digest(one) != digest(other)
    assert digest(nn.Sequential(one)) != digest(one)
    assert digest(nn.ModuleDict({"a": one, "b": other})) == digest(nn.ModuleDict([("b", other), ("a", one)]))


def write_state(path, change=None):
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=112, depth=6, num_heads=4, num_classes=0)
    rng = torch.Generator().manual_seed(7)
    state = {name: torch.randn(value.shape, generator=rng) for name, value in vit.state_dict().items()}
    state = change(state) if change else state
    safetensors.torch.save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


def load_glyphs(path):
    return load_backbone("vit_glyphs", str(path), 0, "cpu")


def test_digest_does_not_depend_on_the_file(tmp_path):
    backwards = lambda state: dict(reversed(state.items()))  # noqa: E731
    digests = {
        load_glyphs(write_state(tmp_path / "a.safetensors")).sha256,
        load_glyphs(write_state(tmp_path / "b.pt")).sha256,
        load_glyphs(write_state(tmp_path / "c.pth", backwards)).sha256,
    }
    assert len(digests) == 1
    other = write_state(tmp_path / "d.pt", lambda state: state | {"cls_token": state["cls_token"] + 1})
    assert load_glyphs(other).sha256 not in digests


def test_a_file_is_really_used(tmp_path):
    """Every array equals the one written to the file; a classifier in it is ignored."""
    path = write_state(tmp_path / "a.pt", lambda state: state | {"head.weight": torch.ones(5, 112)})
    backbone = load_glyphs(path)
    saved = torch.load(path, weights_only=True)
    for name, value in backbone.vit.state_dict().items():
        assert torch.equal(value, saved[plain(name)])


def spoil(name, value):
    def change(state):
        state[name].flatten()[-1] = value
        return state

    return change


WRONG = {
    "no such file": lambda folder: folder / "absent.safetensors",
    "a folder": lambda folder: folder,
    "cut short, safetensors": lambda folder: cut(write_state(folder / "w.safetensors")),
    "cut short, torch": lambda folder: cut(write_state(folder / "w.pt")),
    "empty file": lambda folder: touch(folder / "w.pt"),
    "no weights at all": lambda folder: touch(folder / "w.safetensors", b"hello, scenario" * 10),
    "one array missing": lambda folder: write_state(folder / "w.pt", lambda s: without(s, "norm.bias")),
    "one array too many": lambda folder: write_state(folder / "w.pt", lambda s: s | {"extra": torch.ones(1)}),
    "another width": lambda folder: write_state(folder / "w.pt", lambda s: s | {"norm.bias": torch.ones(113)}),
    "another image size": lambda folder: write_state(
        folder / "w.pt", lambda s: s | {"pos_embed": torch.ones(1, 5, 112)}
    ),
    "NaN": lambda folder: write_state(folder / "w.pt", spoil("blocks.5.mlp.fc2.weight", float("nan"))),
    "infinite": lambda folder: write_state(folder / "w.safetensors", spoil("cls_token", float("-inf"))),
    "wrapped in a dict": lambda folder: write_state(folder / "w.pt", lambda s: {"model": s}),
    "training checkpoint": lambda folder: write_state(folder / "w.pt", lambda s: s | {"epoch": 3}),
    "a list of tensors": lambda folder: write_state(folder / "w.pt", lambda s: list(s.values())),
    "a lone tensor": lambda folder: write_state(folder / "w.pt", lambda s: s["norm.bias"]),
    "numbers for names": lambda folder: write_state(folder / "w.pt", lambda s: dict(enumerate(s.values()))),
    "an arbitrary object": lambda folder: write_state(folder / "w.pt", lambda s: nn.Linear(2, 2)),
}


def cut(path):
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) * 2 // 3])
    return path


def touch(path, content=b""):
    path.write_bytes(content)
    return path


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_unusable_weights_are_a_config_error(make, tmp_path):
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=r"^backbone-weights = ") as caught:
        load_glyphs(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)  # False of which would run the code that a file may hold


def test_weights_may_lie_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_state(tmp_path / "w.pt", lambda state: state)
    assert load_glyphs("~/w.pt").sha256 == load_glyphs(tmp_path / "w.pt").sha256


def test_a_misfit_names_the_array(tmp_path):
    path = write_state(tmp_path / "w.pt", lambda s: without(s, "blocks.3.norm1.weight"))
    with pytest.raises(ConfigError, match=r"blocks\.3\.norm1\.weight"):
        load_glyphs(path)


@pytest.mark.parametrize(
    "name",
    ["test_resnet", "swin_tiny_patch4_window7_224", "vit_relpos_small_patch16_224", "vit_dwee_patch16_reg1_gap_256"],
)
def test_what_is_not_a_plain_vit_is_refused(name):
    with pytest.raises(ConfigError, match=rf"^backbone = '{name}' is not a plain ViT"):
        load_backbone(name, "random", 0, "cpu")


@pytest.mark.parametrize("name", ["vit_bse_patch16_224", "nothing", "", "vit_glyph", "[", "vit_[x"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"^backbone = .* does not exist.*vit_glyphs"):
        load_backbone(name, "auto", 0, "cpu")


@pytest.mark.parametrize("weights", ["auto", "random"])
def test_an_unknown_pretraining_is_refused(weights):
    with pytest.raises(ConfigError, match=r"^backbone"):
        load_backbone("vit_tiny_patch16_224.no_such_pretraining", weights, 0, "cpu")


def test_no_pretrained_weights_is_not_random_weights():
    """The library registers test_vit4 without any weights, so nothing is fetched here."""
    with pytest.raises(ConfigError, match=r"^backbone-weights = 'auto'"):
        load_backbone("test_vit4", "auto", 0, "cpu")


@pytest.mark.parametrize("error", [OSError("no route to host"), TimeoutError(), RuntimeError("a\nb")])
def test_a_failed_download_is_not_random_weights(monkeypatch, error):
    """A stand-in for timm without a network; an exception may carry no text at all."""

    def offline(name, pretrained=False, **options):
        if pretrained:
            raise error
        return VisionTransformer(**SHAPE, depth=1)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ConfigError, match=rf"^backbone-weights = 'auto'.*{type(error).__name__}"):
        load_backbone("vit_tiny_patch16_224", "auto", 0, "cpu")


def test_bundled_weights_are_the_ones_of_their_metadata():
    """Decoded here with the standard library and compared array by array."""
    metadata = json.loads(module.BUNDLED["vit_glyphs"].read_text())
    folder = module.BUNDLED["vit_glyphs"].parent
    raw = b"".join(base64.b64decode(json.loads((folder / part).read_text())) for part in metadata["parts"])
    assert hashlib.sha256(raw).hexdigest() == metadata["sha256"]
    state = load_backbone("vit_glyphs", "auto", 0, "cpu").vit.state_dict()
    saved = safetensors.torch.load(raw)
    assert {plain(n) for n in state} == set(saved)
    assert all(torch.equal(v, saved[plain(n)].float()) for n, v in state.items())


def test_pretraining_cuts_weights_into_the_bundled_parts(tmp_path):
    metadata = module.BUNDLED["vit_glyphs"]
    bundled = [json.loads((metadata.parent / f"vit_glyphs/{number}.json").read_text()) for number in (1, 2, 3)]
    names = pretrain_glyphs.write_parts(b"".join(map(base64.b64decode, bundled)), tmp_path / "vit_glyphs.json")
    assert names == json.loads(metadata.read_text())["parts"] == [f"vit_glyphs/{number}.json" for number in (1, 2, 3)]
    assert all((tmp_path / name).read_bytes() == (metadata.parent / name).read_bytes() for name in names)


def test_one_instance_per_process():
    assert load_backbone("vit_glyphs", "auto", 0, "cpu") is load_backbone("vit_glyphs", "auto", 0, "cpu")
    assert configured_backbone(parse({"seed": 1})) is configured_backbone(parse({"seed": 2}))


@pytest.mark.parametrize("name", ["vit_glyphs", "resnet18_cifar"])
def test_random_weights_are_drawn_with_the_seed(name):
    values = {"method": "fedavg", "prompt": "none", "backbone": name, "backbone-weights": "random", "device": "cpu"}
    digests = list[str]()
    for seed in (42, 1999, 42):
        load_backbone.cache_clear()
        digests.append(configured_backbone(parse(values | {"seed": seed})).sha256)
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("patches", [False, True])
@pytest.mark.parametrize("blocks", [[0], [1], [0, 1], [2]])
@pytest.mark.parametrize("variant", ["plain", "layer scale"])
def test_early_features_are_of_their_block_and_normalised(variant, blocks, patches):
    """Tokens by a hook on timm's own model; mean 0 and variance 1 in float64 NumPy. The last feature keeps its bits."""
    early = [Early(block, patches) for block in blocks]
    images, tokens = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), {}
    vit = tiny_vit(depth=3, **VARIANTS[variant])
    for i, block in enumerate(vit.blocks):
        block.register_forward_hook(lambda block, inputs, output, i=i: tokens.update({i: output}))
    with torch.no_grad():
        plain = vit.forward_head(vit.forward_features(images), pre_logits=True)
        expected = [plain.numpy().astype(np.float64)]
        for i in blocks:
            all_tokens = tokens[i].numpy().astype(np.float64)  # the class token first
            token = all_tokens[:, 1:].mean(axis=1) if patches else all_tokens[:, 0]
            centred = token - token.mean(axis=1, keepdims=True)
            expected.append(centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5))
        backbone = ViT(tiny_vit(depth=3, **VARIANTS[variant]), *HALVES)
        features, default = backbone(images, early=early), backbone(images)
        again = backbone(images)
    assert features.shape == (4, 12 * (1 + len(early)))
    assert np.allclose(features, np.concatenate(expected, axis=1), atol=1e-5)
    assert torch.equal(default, plain)
    assert torch.equal(features[:, :12], plain)
    assert torch.equal(again, default)  # no hook is left
    assert not any(block._forward_hooks for block in backbone.vit.blocks)


@pytest.mark.parametrize("patches", [False, True])
@pytest.mark.parametrize("block", [0, 1])
def test_an_early_feature_alone_is_that_of_a_whole_pass(block, patches):
    """Bit for bit; later blocks are not computed, and no hook is left."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    backbone, computed = ViT(tiny_vit(depth=3), *HALVES), []
    with torch.no_grad():
        expected = backbone(images, early=[Early(block, patches)])[:, 12:]
        hooks = [b.register_forward_hook(lambda *_, i=i: computed.append(i)) for i, b in enumerate(backbone.vit.blocks)]
        assert torch.equal(backbone.early_feature(images, Early(block, patches)), expected)
    for hook in hooks:
        hook.remove()
    assert computed == list(range(block + 1))
    assert not any(b._forward_hooks for b in backbone.vit.blocks)


def test_early_features_with_a_prompt_are_of_the_prompted_tokens():
    """As in a model that passes all tokens of the last block, which prompts cut to the class token."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    backbone, prompt = ViT(tiny_vit(depth=3), *HALVES), SharedPrompt(prompt_config([0, 2], 2), 12)
    torch.nn.init.normal_(prompt.prefix, generator=torch.Generator().manual_seed(1))
    tokens = []
    handle = backbone.vit.blocks[1].register_forward_hook(lambda block, inputs, output: tokens.append(output[:, 0]))
    with torch.no_grad():
        last = backbone(images, prompt(None))
        handle.remove()
        features, bare = (backbone(images, vectors, early=[Early(1)]) for vectors in (prompt(None), None))
    token = tokens[0].numpy().astype(np.float64)
    token -= token.mean(axis=1, keepdims=True)
    assert torch.equal(features[:, :12], last)
    assert np.allclose(features[:, 12:], token / np.sqrt((token**2).mean(axis=1, keepdims=True) + 1e-5), atol=1e-5)
    assert not torch.allclose(features, bare, atol=1e-2)


@pytest.mark.parametrize(("depth", "blocks"), [(0.0, []), (0.05, []), (0.5, [2]), (0.75, [3]), (0.9, [4]), (1.0, [])])
def test_the_share_of_the_depth_names_one_block(depth, blocks):
    """Of the bundled ViT's 6 blocks, counted from 0: round(6 share) - 1, none if it is the last; 4.5 rounds to 4."""
    keys = {"method": "afcl", "afcl-depth": depth, "dataset": "synthetic", "image-size": 16, "device": "cpu"}
    model = build_model(parse(keys), [3])
    assert model.backbone.depth == 6
    assert [feature.block for feature in model.early] == blocks


@pytest.mark.parametrize(
    ("frozen_depth", "prompt", "blocks", "unprompted"),
    [
        (0.33, "none", [2, 1], None),
        (0.5, "none", [2], None),  # the same feature is not taken twice
        (1, "none", [2], None),
        (0, "lora", [2], None),
        (0.33, "lora", [2], Early(1)),
        (0.5, "lora", [2], Early(2)),
        (0.95, "lora", [2], Early(5)),  # the last block
        (0.33, "lora 2-5", [2], Early(1)),
        (0.33, "lora 3-5", [2, 1], None),  # no prompt has reached it
        (0.5, "lora 4-5", [2], None),
    ],
)
def test_the_feature_without_prompt_is_an_early_one_where_there_is_none(frozen_depth, prompt, blocks, unprompted):
    kind, _, prompted = prompt.partition(" ")
    keys = {"method": "afcl", "afcl-depth": 0.5, "afcl-frozen-depth": frozen_depth, "prompt": kind}
    keys |= {"prompt-blocks": prompted} if prompted else {}
    model = build_model(parse(keys | {"dataset": "synthetic", "image-size": 16, "device": "cpu"}), [3])
    assert [feature.block for feature in model.early] == blocks
    assert model.unprompted == unprompted
    assert model.width == 112 * (1 + len(blocks) + bool(unprompted))


@pytest.mark.parametrize(
    ("method", "early"), [("afcl", [Early(2)]), ("fedrda", [Early(2, patches=True), Early(1, patches=True)])]
)
def test_what_an_early_feature_is_by_default(method, early):
    keys = {"method": method, f"{method}-depth": 0.5, "prompt": "none", "dataset": "synthetic", "image-size": 16}
    assert list(build_model(parse(keys | {"device": "cpu"}), [3]).early) == early


def test_an_early_class_token_needs_a_class_token():
    keys = {"method": "afcl", "afcl-depth": 0.5, "backbone": "vit_glyphs", "device": "cpu"}
    backbone = ViT(tiny_vit(depth=2, class_token=False, global_pool="avg"), *HALVES)
    with pytest.raises(ConfigError, match=r"afcl-early-feature = 'class-token' is not possible: .* Write patches, or"):
        build_model(parse(keys), [3], backbone)
    assert list(build_model(parse(keys | {"afcl-early-feature": "patches"}), [3], backbone).early) == [Early(0, True)]


def test_patches_need_no_class_token_and_leave_out_registers():
    """Mean of the patch tokens after block 0 of a ViT that has two register tokens and no class token, by a hook."""
    images, tokens = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), []
    backbone = ViT(tiny_vit(depth=2, class_token=False, reg_tokens=2, global_pool="avg"), *HALVES)
    backbone.vit.blocks[0].register_forward_hook(lambda block, inputs, output: tokens.append(output[:, 2:].mean(dim=1)))
    with torch.no_grad():
        features = backbone(images, early=[Early(0, patches=True)])
    mean = tokens[0].numpy().astype(np.float64)
    centred = mean - mean.mean(axis=1, keepdims=True)
    assert np.allclose(features[:, 12:], centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5), atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"global_pool": "avg"}, {"global_pool": "avg", "fc_norm": False}])
def test_no_feature_is_longer_than_the_last_normalisation_allows(changes):
    """Scales and shifts of the norm differ in every entry; a prompt of any size changes the images' tokens at will."""
    backbone, prompt = ViT(tiny_vit(**changes), *HALVES), SharedPrompt(prompt_config([0], 2), 12)
    torch.nn.init.normal_(prompt.prefix, std=100.0)
    with torch.no_grad():
        norms = backbone(1e3 * images(batch=64), prompt(None)).norm(dim=1)
    assert backbone.max_norm / 4 < norms.max() <= backbone.max_norm


def test_a_backbone_that_reads_two_tokens_keeps_both_with_a_prompt():
    """A distilled one averages class and distillation token; without effect of the prompt the feature is q(x)."""
    vit, mean, std = module.build_vit("deit_tiny_distilled_patch16_224", "random")
    vit.set_input_size(img_size=(32, 32))
    backbone = ViT(vit, mean, std)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    change = torch.randn(3 * backbone.dim, backbone.dim, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(backbone(images, {0: 0 * change}), backbone(images), atol=1e-5)
        assert not torch.allclose(backbone(images, {0: change}), backbone(images), atol=1e-2)


def test_the_longest_feature_by_hand():
    """Scales up to 3 of 12 entries, a shift of norm 5; no bound is known behind attention pooling."""
    vit = tiny_vit()
    vit.norm.weight.data.fill_(-3.0)
    vit.norm.bias.data[:] = torch.tensor([3.0, 4.0] + [0.0] * 10)
    assert ViT(vit, *HALVES).max_norm == pytest.approx(3 * 12**0.5 + 5)
    assert ViT(tiny_vit(global_pool="map", class_token=False), *HALVES).max_norm == math.inf


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"method": "hgp"}, (1, 0)),
        ({"method": "fedrda"}, (1, 2)),  # the mean patch tokens of two earlier blocks have norm sqrt(112)
        ({"method": "fedrda", "fedrda-frozen-depth": 1}, (2, 1)),  # the last class token with prompt and without
        ({"method": "fedrda", "fedrda-frozen-depth": 0}, (1, 1)),
        ({"method": "fedrda", "prompt": "none"}, (1, 2)),
        ({"method": "fedrda", "prompt": "none", "fedrda-frozen-depth": 1}, (1, 1)),
        ({"method": "afcl", "afcl-random-features": 30}, (1, 0)),
        ({"method": "fedavg-ft"}, None),
    ],
)
def test_the_longest_input_of_the_head(keys, parts):
    model = build_model(parse({"dataset": "synthetic", "image-size": 16, "device": "cpu"} | keys), [3])
    assert model.backbone.dim == 112
    if parts is None:
        assert model.max_input_norm == math.inf
        return
    expected = (parts[0] * model.backbone.max_norm**2 + parts[1] * 112) ** 0.5
    if keys.get("afcl-random-features"):
        expected *= np.linalg.svd(model.head.projection.numpy(), compute_uv=False)[0]
    assert model.max_input_norm == pytest.approx(expected, rel=1e-4)
