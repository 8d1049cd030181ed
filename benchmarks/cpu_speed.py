"""How much faster Vision Transformers are on this CPU by what the project does instead of the obvious.

    python -m benchmarks.cpu_speed

Each pair of ways in turn, with one thread and random weights of DeiT-Ti: milliseconds of processor time for an image.
The second way is the project's:

- linear maps of tokens by PyTorch's linear maps, or by oneDNN's convolutions: features, and local training of HGP's
  prefixes and of LoRA;
- attention by PyTorch's kernel, or by plain products: local training of HGP's prefixes in bf16;
- images of 32 pixels made ready by F.interpolate, or by two matrix products.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from task.models.load import load_backbone
from task.models.preprocessing import normalise, prepare
from task.models.vit import Backbone

Way = Callable[[], object]
_IMAGES = 64  # of each way
_CONVOLUTIONS = "task.models.linear.by_convolution"


def pairs(vit: Backbone, pixels: np.ndarray) -> dict[str, tuple[Way, Way]]:
    """What is measured by name; each way is for the images ``pixels``, uint8 [N, H, W, 3]."""
    images = prepare(pixels, vit)
    prefixes = {block: torch.randn(1, 2, 10, vit.dim, requires_grad=True) for block in range(5)}
    lora = {block: (torch.randn(3 * vit.dim, vit.dim) / 100).requires_grad_() for block in range(5)}

    def train(prompt: dict[int, Tensor]) -> None:
        for batch in images.split(16):
            vit(batch, prompt).square().sum().backward()

    def train_in_bf16() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            train(prefixes)

    return {
        "linear maps, features": _without_and_with(_CONVOLUTIONS, torch.no_grad()(lambda: vit(images))),
        "linear maps, prefixes": _without_and_with(_CONVOLUTIONS, lambda: train(prefixes)),
        "linear maps, LoRA": _without_and_with(_CONVOLUTIONS, lambda: train(lora)),
        "attention in bf16": _without_and_with("task.models.vit._by_products", train_in_bf16),
        "images made ready": (lambda: _interpolated(pixels, vit), lambda: prepare(pixels, vit)),
    }


def _without_and_with(condition: str, run: Way) -> tuple[Way, Way]:
    """``run`` where the condition, a function of the project, never holds, and as it is."""

    def without() -> None:
        with patch(condition, lambda tokens: False):
            run()

    return without, run


def _interpolated(pixels: np.ndarray, vit: Backbone) -> Tensor:
    side, x = vit.image_size, torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float().div_(255)
    return normalise(F.interpolate(x, (side, side), mode="bicubic").clamp_(0, 1), vit)


def compare(ways: Mapping[str, tuple[Way, Way]], repeats: int) -> dict[str, tuple[float, float]]:
    """Milliseconds an image of both ways; the first run of each is not counted."""
    spent = defaultdict[tuple[str, int], float](float)
    for repeat in range(repeats + 1):
        for name, pair in ways.items():
            for i, run in enumerate(pair):
                start = time.process_time()
                run()
                spent[name, i] += (time.process_time() - start) * bool(repeat)
    scale = 1000 / repeats / _IMAGES
    return {name: (scale * spent[name, 0], scale * spent[name, 1]) for name in ways}


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image-size", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    vit = load_backbone("deit_tiny_patch16_224", "random", args.image_size, "cpu")
    pixels = np.random.default_rng(0).integers(0, 256, (_IMAGES, 32, 32, 3), np.uint8)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; ms an image")
    for name, (before, now) in compare(pairs(vit, pixels), args.repeats).items():
        print(f"{name:<22} {before:6.2f}   {now:6.2f}   {before / now:.2f} times as fast")


if __name__ == "__main__":
    _main()
