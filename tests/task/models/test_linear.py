"""Linear maps of tokens against float64 NumPy, with all gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from task.models.linear import TokenLinear, linear, use_token_linear

SHAPES = [(1, 40), (3, 17), (4, 15), (4, 16), (5, 17), (16, 37), (64, 20)]


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


@pytest.mark.parametrize(("shape", "convolves"), [((3, 40), False), ((4, 15), False), ((4, 16), True)])
def test_few_tokens_and_few_images_are_left_to_the_other_library(
    shape: tuple[int, int], convolves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    plain = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: calls.append(args) or plain(*args))
    linear(drawn(*shape, 12), drawn(7, 12), None)
    assert bool(calls) == convolves


@pytest.mark.parametrize("kind", ["float64", "autocast"])
def test_other_precisions_are_those_of_torch(kind: str) -> None:
    tokens, weight, bias = (drawn(*shape).detach() for shape in [(8, 20, 12), (7, 12), (7,)])
    if kind == "float64":
        tokens, weight, bias = tokens.double(), weight.double(), bias.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        assert torch.equal(linear(tokens, weight, bias), F.linear(tokens, weight, bias))


def test_a_module_keeps_its_weights_and_their_names() -> None:
    module = nn.Sequential(nn.Linear(12, 7), nn.GELU(), nn.Bilinear(2, 2, 2))
    before = dict(module.state_dict())
    use_token_linear(module)
    assert [type(part) for part in module] == [TokenLinear, nn.GELU, nn.Bilinear]
    assert all(value.data_ptr() == before[name].data_ptr() for name, value in module.state_dict().items())
    tokens = drawn(5, 17, 12)
    assert torch.equal(module[0](tokens), linear(tokens, module[0].weight, module[0].bias))
