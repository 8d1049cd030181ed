"""Every backbone by name, one instance of each per process."""

from functools import lru_cache

import torch

from task.config.schema import FROM_SCRATCH, Config
from task.models.device import resolve_device
from task.models.resnet import load_resnet18
from task.models.vit import Backbone, load_vit


def build_backbone(name: str, weights: str, image_size: int, device: str, seed: int = 0) -> Backbone:
    """A new backbone; the arguments are the run keys of the same names.

    Raises:
        ConfigError: unknown or unsuitable architecture; weights missing, broken or of another architecture.
    """
    # precision = fp32 would else mean 10 bits in a GPU's convolutions, in some images also in its matrix products
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if name in FROM_SCRATCH:
        return load_resnet18(weights, image_size, seed).to(device)
    return load_vit(name, weights, image_size, seed).to(device)


# one instance for all clients of this process
load_backbone = lru_cache(maxsize=2)(build_backbone)


def configured_backbone(config: Config) -> Backbone:
    """The process's one instance of a run's backbone, on the run's device; errors as those of build_backbone.

    Raises:
        ConfigError: also if this machine has no such device.
    """
    arguments = config.backbone, config.backbone_weights, config.image_size, str(resolve_device(config.device))
    if config.backbone_weights == "random":
        return load_backbone(*arguments, config.seed)
    return load_backbone(*arguments)  # one instance for all seeds
