"""Linear maps of tokens against float64 NumPy, with all gradients; GELU that writes over its input."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from task.models import linear as module
from task.models.linear import OverwritingGELU, TokenLinear, linear, use_faster_parts

HAS_ONEDNN = module._has_onednn
SHAPES = [(1, 40), (3, 17), (4, 15), (4, 16), (5, 17), (16, 37), (64, 20)]


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions are computed on every processor, of small tokens too."""
    monkeypatch.setattr(module, "_has_onednn", lambda: True)
    monkeypatch.setattr(module, "_FEWEST_NUMBERS", 1)


def drawn(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)).requires_grad_()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("frozen", ["", "weight", "weight and bias"])
def test_values_and_gradients(shape: tuple[int, int], with_bias: bool, frozen: str) -> None:
    tokens, weight, given = drawn(*shape, 12), drawn(7, 12).requires_grad_(not frozen), drawn(*shape, 7)
    bias = drawn(7).requires_grad_("bias" not in frozen) if with_bias else None
    answer = linear(tokens, weight, bias)
    answer.backward(given.detach())
    x, w, g = (tensor.detach().double().numpy() for tensor in (tokens, weight, given))
    b = 0.0 if bias is None else bias.detach().double().numpy()
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(answer.detach().numpy(), x @ w.T + b, **close)
    np.testing.assert_allclose(tokens.grad.numpy(), g @ w, **close)
    if weight.requires_grad:
        np.testing.assert_allclose(weight.grad.numpy(), np.einsum("bne,bnd->ed", g, x), **close)
    if bias is not None and bias.requires_grad:
        np.testing.assert_allclose(bias.grad.numpy(), g.sum(axis=(0, 1)), **close)


@pytest.mark.parametrize(
    ("shape", "fewest", "onednn", "convolves"),
    [
        ((3, 40), 1, True, False),
        ((4, 15), 1, True, False),
        ((4, 16), 1, True, True),
        ((4, 16), 4 * 16 * 12, True, True),
        ((4, 16), 4 * 16 * 12 + 1, True, False),
        ((4, 16), 1, False, False),
    ],
)
def test_few_tokens_and_other_processors_are_left_to_the_other_library(
    shape: tuple[int, int], fewest: int, onednn: bool, convolves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_has_onednn", lambda: onednn)
    monkeypatch.setattr(module, "_FEWEST_NUMBERS", fewest)
    calls = []
    plain = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: calls.append(args) or plain(*args))
    linear(drawn(*shape, 12), drawn(7, 12), None)
    assert bool(calls) == convolves


@pytest.mark.parametrize(
    ("vendor", "capability", "convolves"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD \xe9", "AVX512", True),
        ("", "AVX512", False),
    ],
)
def test_convolutions_are_for_processors_of_amd(
    vendor: str, capability: str, convolves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vendor:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n", encoding="latin-1")
    monkeypatch.setattr(module, "_PROCESSOR", tmp_path / "cpuinfo")
    monkeypatch.setattr(module, "_has_onednn", HAS_ONEDNN)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(module, "is_amd", module.is_amd.__wrapped__)  # without what it knows of this processor
    assert module.by_convolution(drawn(4, 16, 12)) == convolves


def test_tokens_of_four_dimensions_and_functional_transforms_are_possible() -> None:
    tokens, weight = drawn(4, 2, 16, 12).detach(), drawn(7, 12).detach()
    torch.testing.assert_close(linear(tokens, weight, None), F.linear(tokens, weight))
    images = drawn(3, 4, 16, 12).detach()
    gradients = torch.func.vmap(torch.func.grad(lambda x: linear(x, weight, None).square().sum()))(images)
    expected = torch.func.grad(lambda x: F.linear(x, weight).square().sum())(images)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["float64", "autocast"])
def test_other_precisions_are_those_of_torch(kind: str) -> None:
    tokens, weight, bias = (drawn(*shape).detach() for shape in [(8, 20, 12), (7, 12), (7,)])
    if kind == "float64":
        tokens, weight, bias = tokens.double(), weight.double(), bias.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        assert torch.equal(linear(tokens, weight, bias), F.linear(tokens, weight, bias))


def test_a_module_keeps_its_weights_and_their_names() -> None:
    network = nn.Sequential(nn.Linear(12, 7), nn.GELU(), nn.Bilinear(2, 2, 2))
    before = dict(network.state_dict())
    use_faster_parts(network)
    assert [type(part) for part in network] == [TokenLinear, OverwritingGELU, nn.Bilinear]
    assert all(value.data_ptr() == before[name].data_ptr() for name, value in network.state_dict().items())
    tokens = drawn(5, 17, 12)
    assert torch.equal(network[0](tokens), linear(tokens, network[0].weight, network[0].bias))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_overwrites_its_input_only_where_no_gradient_is_wanted(approximate: str) -> None:
    gelu, tokens = OverwritingGELU(approximate), drawn(5, 17, 12).detach()
    wanted = tokens.clone().requires_grad_()
    answer = gelu(wanted)
    answer.sum().backward()
    assert torch.equal(wanted, tokens)
    assert wanted.grad is not None
    assert torch.equal(answer, F.gelu(tokens, approximate=approximate))
    with torch.no_grad():
        overwritten = gelu(tokens)
    assert torch.equal(overwritten, answer)
    assert overwritten.data_ptr() == tokens.data_ptr()
