"""Models of a small size, or of a head alone, for tests of what servers and clients do with them."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.models import VisionTransformer

from task.models.head import Head
from task.models.model import Model
from task.models.vit import ViT
from task.prompts.base import Prompt
from tests.helpers.prompts import prompt_config


def head_alone(dim: int, classes: int) -> Any:
    """All that refinement needs of a model."""
    head = Head(dim, 0)
    head.grow(classes)
    return type("Model", (), {"head": head, "device": torch.device("cpu")})()


def frozen_model(dim: int, tasks: Sequence[Sequence[int]]) -> Model:
    """A ViT of one block for images of 8 pixels, without prompt, whose head has the rows of the tasks' classes."""
    vit = VisionTransformer(img_size=8, patch_size=4, embed_dim=dim, depth=1, num_heads=2, num_classes=0)
    model = Model(ViT(vit, (0.5,) * 3, (0.5,) * 3), Prompt(prompt_config(), 0), Head(dim, 0), "fp32")
    for classes in tasks:
        model.begin_task(len(classes))
    return model
