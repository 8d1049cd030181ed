"""Parts of a transformer block, computed faster than by PyTorch's modules of the same names."""

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEWEST_IMAGES, _FEWEST_TOKENS, _FEWEST_NUMBERS = 4, 16, 2**15  # for fewer F.linear was faster
_PROCESSOR = Path("/proc/cpuinfo")


class TokenLinear(nn.Linear):
    """``nn.Linear`` whose forward is :func:`linear`."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, N, D] -> [B, N, E]."""
        return linear(tokens, self.weight, self.bias)


def linear(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of tokens [B, N, D] with weights [E, D] and bias [E] -> [B, N, E]; the same but for rounding.

    On a CPU PyTorch leaves ``F.linear`` to MKL, which was seen to reach half the speed of oneDNN on an AMD processor
    with AVX-512, and convolutions to oneDNN. So this is a 1 x 1 convolution there, if the tokens are many enough. On
    Intel's processors MKL was the faster one in local training.
    """
    if not by_convolution(tokens):
        return F.linear(tokens, weight, bias)
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return _convolve(tokens, weight, bias)
    mapped: Tensor = _FrozenLinear.apply(tokens, weight, bias)
    return mapped


class _FrozenLinear(torch.autograd.Function):
    """A linear map whose weights are frozen: unlike a convolution it keeps no tokens for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _convolve(tokens, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

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
    """Whether :func:`linear` of these tokens [B, N, D] is a convolution."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):  # an exported model has any number of images
        return False
    if tokens.device.type != "cpu" or tokens.dtype != torch.float32 or not _has_onednn():
        return False
    enough = tokens.numel() >= _FEWEST_NUMBERS
    return tokens.dim() == 3 and len(tokens) >= _FEWEST_IMAGES and tokens.shape[1] >= _FEWEST_TOKENS and enough


def _has_onednn() -> bool:
    """Whether PyTorch computes convolutions by oneDNN, on an AMD processor with AVX-512."""
    enabled = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(enabled) and torch.backends.cpu.get_cpu_capability() == "AVX512" and is_amd()


@cache
def is_amd() -> bool:
    """Whether Linux says that the processor is AMD's."""
    with suppress(OSError):
        return b"AuthenticAMD" in _PROCESSOR.read_bytes()
    return False


class OverwritingGELU(nn.GELU):
    """``nn.GELU`` that writes over its input unless gradients are wanted: there the input is needed once more.

    A second array of that size, the largest of a block, costs time: the system clears the memory of large arrays.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Any shape; nothing else may read ``input`` afterwards."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(input)
        written: Tensor = torch.ops.aten.gelu_(input, approximate=self.approximate)
        return written


def use_faster_parts(blocks: nn.Module) -> None:
    """Turn each ``nn.Linear`` of timm's blocks into a :class:`TokenLinear`, each ``nn.GELU`` into an overwriting one.

    The weights stay the same. In timm's blocks nothing but GELU reads what is given to it.
    """
    faster: dict[type, type] = {nn.Linear: TokenLinear, nn.GELU: OverwritingGELU}
    for part in blocks.modules():
        part.__class__ = faster.get(type(part), type(part))
