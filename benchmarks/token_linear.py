"""How much faster a Vision Transformer is on this CPU by oneDNN's convolutions than by PyTorch's linear maps.

    python -m benchmarks.token_linear --batch-size 32

Both forms in turn, with one thread and random weights of DeiT-Ti: milliseconds of processor time for an image.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor

from task.models import linear
from task.models.load import load_backbone
from task.models.vit import Backbone

Pass = Callable[[], object]


def passes(vit: Backbone, images: Tensor) -> dict[str, Pass]:
    """What is measured by name: a pass without gradient, and local training of HGP's prefixes and of LoRA."""
    prefixes = {block: torch.randn(1, 2, 10, vit.dim, requires_grad=True) for block in range(5)}
    lora = {block: (torch.randn(3 * vit.dim, vit.dim) / 100).requires_grad_() for block in range(5)}
    return {
        "features": torch.no_grad()(lambda: vit(images)),
        "training, prefixes": lambda: vit(images, prefixes).square().sum().backward(),
        "training, LoRA": lambda: vit(images, lora).square().sum().backward(),
    }


def compare(vit: Backbone, images: Tensor, repeats: int) -> dict[str, tuple[float, float]]:
    """Of each pass the milliseconds an image by linear maps and by convolutions; the first of each is not counted."""
    runs, spent = passes(vit, images), defaultdict[tuple[str, bool], float](float)
    by_linear_maps = patch.object(linear, "by_convolution", lambda tokens: False)
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            for convolves in (False, True):
                with nullcontext() if convolves else by_linear_maps:
                    start = time.process_time()
                    run()
                    spent[name, convolves] += (time.process_time() - start) * bool(repeat)
    scale = 1000 / repeats / len(images)
    return {name: (scale * spent[name, False], scale * spent[name, True]) for name in runs}


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    vit = load_backbone("deit_tiny_patch16_224", "random", args.image_size, "cpu")
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; ms an image")
    for name, (plain, fast) in compare(vit, images, args.repeats).items():
        print(f"{name:<20} linear {plain:6.2f}   convolution {fast:6.2f}   ratio {plain / fast:.2f}")


if __name__ == "__main__":
    _main()
