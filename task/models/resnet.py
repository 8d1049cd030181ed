"""The backbone that FedProK trains from scratch."""

from collections.abc import Sequence

import torch
import torchvision
from torch import Tensor, nn

from task.models.vit import Backbone, Early, digest
from task.models.weights import load_strictly, read_weights
from task.prompts.base import PromptVectors


class ResNet18(Backbone):
    """ResNet-18 with the stem that is usual for images of 32 pixels: a 3 x 3 convolution and no pooling."""

    def __init__(self, network: nn.Module, image_size: int) -> None:
        super().__init__(512, 0, image_size, (0.5,) * 3, (0.5,) * 3, digest(network))
        self.network = network.requires_grad_(False)
        self.eval()

    def forward(
        self,
        images: Tensor,
        prompted: PromptVectors | None = None,
        projects: bool = False,
        early: Sequence[Early] = (),
    ) -> Tensor:
        """Normalised images [B, 3, H, W] -> features [B, 512]: the pooled last layer. It has no blocks to prompt."""
        return self.network(images)


def load_resnet18(weights: str, image_size: int, seed: int = 0) -> ResNet18:
    """ResNet-18 for images of side ``image_size`` (0 = 32), from a file or drawn with ``seed``.

    Raises:
        ConfigError: weights missing, broken or of another architecture.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = torchvision.models.resnet18()
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        network.maxpool, network.fc = nn.Identity(), nn.Identity()
    if weights != "random":
        load_strictly(network, read_weights(weights), weights)
    return ResNet18(network, image_size or 32)
