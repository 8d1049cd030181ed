"""The backbone: a frozen plain Vision Transformer of timm with room for prefixes in its attention."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models import VisionTransformer
from torch import Tensor, nn

from task.keys import ConfigError
from task.weights import build_vit

# Block, counted from 0 -> prefix [B or 1, 2, L_p, D] (keys, then values), or prompt tokens [B or 1, L_p, D]
Prompted = Mapping[int, Tensor]


class PrefixAttention(nn.Module):
    """timm's attention with key and value vectors put in front of the projected ones.

    Prefix tuning (HGP section 3.2, PIP eq. 3): keys [P_k; K], values [P_v; V], queries unchanged. The prefix is split
    over heads as K and V are, and given no position. It is not projected, unless ``projects`` says so: then it stands
    for tokens in front of the others, as in PIP's equations. Without a prefix this is timm's own forward.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.prefix: Tensor | None = None
        self.projects = False

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens [B, N, D] -> [B, N, D]."""
        inner = self.attention
        if self.prefix is None:
            return inner(x, attn_mask=attn_mask, is_causal=is_causal)
        B, N, _ = x.shape
        qkv = inner.qkv(x).reshape(B, N, 3, inner.num_heads, inner.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, N, D / heads]
        q, k = inner.q_norm(q), inner.k_norm(k)
        front = self._projected(self.prefix) if self.projects else self.prefix
        front = front.to(q.dtype).unflatten(-1, (inner.num_heads, inner.head_dim)).expand(B, -1, -1, -1, -1)
        front_k, front_v = front.permute(1, 0, 3, 2, 4).unbind(0)  # each [B, heads, L_p, D / heads]
        if self.projects:
            front_k = inner.k_norm(front_k)
        x = F.scaled_dot_product_attention(q, torch.cat([front_k, k], dim=2), torch.cat([front_v, v], dim=2))
        return inner.proj(inner.norm(x.transpose(1, 2).reshape(B, N, inner.attn_dim)))

    def _projected(self, prefix: Tensor) -> Tensor:
        """Keys and values of prefix vectors [B or 1, 2, L_p, D], by the frozen weights that project the tokens."""
        weight = self.attention.qkv.weight.unflatten(0, (3, -1))[1:]
        front = torch.einsum("bsld,sed->bsle", prefix, weight)
        bias = self.attention.qkv.bias
        return front if bias is None else front + bias.unflatten(0, (3, 1, -1))[1:]


class PromptedBlock(nn.Module):
    """timm's block with prompt tokens appended to its input and dropped at its output (prompt tuning, PIP eq. 2)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.tokens: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, D] -> [B, N, D]."""
        if self.tokens is None:
            return self.block(x)
        B, N, _ = x.shape
        return self.block(torch.cat([x, self.tokens.to(x.dtype).expand(B, -1, -1)], dim=1))[:, :N]


class Backbone(nn.Module):
    """Images to features; frozen, unless a model holds a copy of its own to train.

    Attributes:
        dim: D, length of a feature.
        depth: number of blocks that can be prompted.
        image_size: side of the square input in pixels.
        mean, std: per-channel normalisation, [1, 3, 1, 1], that the weights were trained with.
        sha256: digest of all weights, to compare server and clients.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, dim: int, depth: int, image_size: int, mean: tuple[float, ...], std: tuple[float, ...], sha256: str
    ) -> None:
        super().__init__()
        self.dim, self.depth, self.image_size, self.sha256 = dim, depth, image_size, sha256
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)

    def forward(self, images: Tensor, prompted: Prompted | None = None, projects: bool = False) -> Tensor:
        """Normalised images [B, 3, H, W] -> features [B, D]."""
        raise NotImplementedError


class ViT(Backbone):
    """A plain Vision Transformer of timm, always in evaluation mode."""

    def __init__(
        self, vit: VisionTransformer, mean: tuple[float, ...], std: tuple[float, ...], sha256: str = ""
    ) -> None:
        size = vit.patch_embed.img_size[0]
        super().__init__(vit.embed_dim, len(vit.blocks), size, mean, std, sha256 or digest(vit))
        for i, block in enumerate(vit.blocks):
            block.attn = PrefixAttention(block.attn)
            vit.blocks[i] = PromptedBlock(block)
        self.vit = vit.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> "ViT":
        """Stay in evaluation mode: drop-out and drop-path belong to pre-training."""
        return super().train(False)

    def forward(self, images: Tensor, prompted: Prompted | None = None, projects: bool = False) -> Tensor:
        """Normalised images [B, 3, H, W] -> features [B, D]: the class token after the final norm.

        (A ViT that timm pools otherwise gives its own pooled feature.) ``projects``: see :class:`PrefixAttention`.

        Without ``prompted`` this is q(x), exactly timm's forward_features and pre-logits head.
        """
        with self._holding(prompted or {}, projects):
            return self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)

    @contextmanager
    def _holding(self, prompted: Prompted, projects: bool) -> Iterator[None]:
        blocks = [self.vit.blocks[i] for i in prompted]
        try:
            for block, vectors in zip(blocks, prompted.values(), strict=True):
                if vectors.ndim == 4:
                    block.block.attn.prefix, block.block.attn.projects = vectors, projects
                else:
                    block.tokens = vectors
            yield
        finally:
            for block in blocks:
                block.block.attn.prefix = block.tokens = None


def digest(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of a module's state, independent of the file it came from."""
    total = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def load_vit(name: str, weights: str, image_size: int) -> ViT:
    """A ViT with its weights, made for ``image_size`` (0 = its own).

    Raises:
        ConfigError: unknown or unsuitable architecture; weights missing, broken or of another architecture.
    """
    vit, mean, std = build_vit(name, weights)
    patch, own = vit.patch_embed.patch_size[0], vit.patch_embed.img_size[0]
    if image_size % patch:
        raise ConfigError(f"image-size = {image_size} is not possible: {name!r} needs a multiple of {patch}.")
    sha256 = digest(vit)  # before resizing, whose rounding differs between processors
    if image_size and image_size != own:
        vit.set_input_size(img_size=(image_size, image_size))
    return ViT(vit, mean, std, sha256)
