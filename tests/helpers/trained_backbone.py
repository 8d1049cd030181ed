"""A small model whose backbone is trained, and images for it."""

import numpy as np
import torch
from timm.models import VisionTransformer

from task.models.head import Head
from task.models.model import Model
from task.models.vit import ViT
from task.prompts.base import Prompt
from tests.helpers.prompts import prompt_config


def small_model(classes: tuple[int, ...] = (2, 3)) -> Model:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=3, num_classes=0)
    model = Model(
        ViT(vit, (0.5,) * 3, (0.25,) * 3), Prompt(prompt_config(), 0), Head(12, 0), "fp32", trains_backbone=True
    )
    for number in classes:
        model.begin_task(number)
    return model


def some_images(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
