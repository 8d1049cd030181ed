"""Linear maps of tokens, by the faster of the two libraries that PyTorch has for them on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEWEST_IMAGES, _FEWEST_TOKENS = 4, 16  # oneDNN is slower for less


class TokenLinear(nn.Linear):
    """``nn.Linear`` whose forward is :func:`linear`."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, N, D] -> [B, N, E]."""
        return linear(tokens, self.weight, self.bias)


def linear(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of tokens [B, N, D] with weights [E, D] and bias [E] -> [B, N, E]; the same but for rounding.

    On a CPU PyTorch leaves ``F.linear`` to MKL, which uses half the width of AMD's AVX-512 units, and convolutions to
    oneDNN, which uses all of it. So this is a 1 x 1 convolution there, if the tokens are many enough.
    """
    if not by_convolution(tokens):
        return F.linear(tokens, weight, bias)
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return _convolve(tokens, weight, bias)
    mapped: Tensor = _FrozenLinear.apply(tokens, weight, bias)
    return mapped


class _FrozenLinear(torch.autograd.Function):
    """A linear map whose weights are frozen: unlike a convolution it keeps no tokens for the backward pass."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _convolve(tokens, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return _convolve(gradients[0], weight.T, None), None, None


def _convolve(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    B, N, D = tokens.shape
    # with one thread oneDNN needs 16 images or more: the tokens stand for those, which changes nothing for a linear map
    grouped = tokens.reshape(N, 1, B, D).permute(0, 3, 1, 2)  # channels last, so that nothing is copied
    mapped = F.conv2d(grouped, weight[:, :, None, None], bias)
    return mapped.permute(0, 2, 3, 1).reshape(B, N, -1)


def by_convolution(tokens: Tensor) -> bool:
    """Whether a convolution is the faster form for tokens [B, N, D]; it is for single precision on a CPU."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):  # an exported model has any number of images
        return False
    single = tokens.device.type == "cpu" and tokens.dtype == torch.float32
    return single and len(tokens) >= _FEWEST_IMAGES and tokens.shape[1] >= _FEWEST_TOKENS


def use_token_linear(module: nn.Module) -> None:
    """Turn each ``nn.Linear`` in the module into a :class:`TokenLinear` of the same weights."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = TokenLinear
