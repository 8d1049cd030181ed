"""The backbone: a frozen plain Vision Transformer of timm with room for prefixes in its attention."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models import VisionTransformer
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from task.keys import ConfigError
from task.models.linear import linear, use_faster_parts
from task.models.weights import build_vit
from task.prompts.base import PromptVectors

_MOST_TOKENS = 256  # with which attention is by plain products
MOST_PATCHES = 64  # along a side: 1,024 pixels with patches of 16; attention holds the square of their number


class Early(NamedTuple):
    """A feature taken after a block: its class token, or the mean of its patch tokens; normalised.

    That of the last block, without ``patches``, stands for the backbone's own feature.
    """

    block: int  # counted from 0
    patches: bool = False


class PrefixAttention(nn.Module):
    """timm's attention with key and value vectors put in front of the projected ones.

    Prefix tuning (HGP section 3.2, PIP eq. 3): keys [P_k; K], values [P_v; V], queries unchanged. The prefix is split
    over heads as K and V are, and has no position embedding. With ``projects`` it is projected as the block does its
    tokens, as in PIP's equations. With ``first_only`` only the first token's output is computed. Without prefix and
    ``first_only`` this is timm's own forward, but for the attention of :func:`attend`.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.prefix: Tensor | None = None
        self.change: Tensor | None = None  # [3 D, D], of the weights that make queries, keys and values
        self.projects = self.first_only = False

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens [B, N, D] -> [B, N, D], or [B, 1, D] of the first token only."""
        inner = self.attention
        unchanged = self.prefix is None and self.change is None and not self.first_only
        if unchanged and not _by_products(x):
            return inner(x, attn_mask=attn_mask, is_causal=is_causal)
        B, N, _ = x.shape
        weight = inner.qkv.weight if self.change is None else inner.qkv.weight + self.change
        qkv = linear(x, weight, inner.qkv.bias).reshape(B, N, 3, inner.num_heads, inner.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, N, D / heads]
        q, k = inner.q_norm(q[:, :, :1] if self.first_only else q), inner.k_norm(k)
        if self.prefix is not None:
            front_k, front_v = self._front(self.prefix.to(q.dtype), B)
            k, v = torch.cat([front_k, k], dim=2), torch.cat([front_v, v], dim=2)
        x = attend(q, k, v)
        return inner.proj(inner.norm(x.transpose(1, 2).flatten(2)))

    def _front(self, prefix: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a prefix [B or 1, 2, L_p, D], each [B, heads, L_p, D / heads]."""
        inner = self.attention
        if self.projects:  # by the frozen weights that project the tokens
            weight, bias = inner.qkv.weight.unflatten(0, (3, -1))[1:], inner.qkv.bias
            prefix = torch.einsum("bsld,sed->bsle", prefix, weight)
            prefix = prefix if bias is None else prefix + bias.unflatten(0, (3, 1, -1))[1:]
        front = prefix.unflatten(-1, (inner.num_heads, inner.head_dim)).expand(batch, -1, -1, -1, -1)
        keys, values = front.permute(1, 0, 3, 2, 4).unbind(0)
        return inner.k_norm(keys) if self.projects else keys, values


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(D / heads)) V, each [B, heads, N, D / heads]."""
    if not _by_products(queries):
        return F.scaled_dot_product_attention(queries, keys, values)
    scores = (queries / math.sqrt(queries.shape[-1])) @ keys.mT
    return scores.softmax(dim=-1) @ values


def _by_products(x: Tensor) -> bool:
    """Whether plain products of tokens [..., N, D] are faster: where gradients are wanted in bf16 on a CPU.

    There PyTorch's own kernel was seen to take four times as long. With many tokens it is the faster one, and products
    need much memory.
    """
    few = x.shape[-2] <= _MOST_TOKENS
    return few and x.device.type == "cpu" and torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


class PromptedBlock(nn.Module):
    """timm's block with prompt tokens appended to its input and dropped at its output (prompt tuning, PIP eq. 2).

    With ``first_only`` only the first token's output is computed.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        self.tokens: Tensor | None = None
        self.first_only = False

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, D] -> [B, N, D], or [B, 1, D] of the first token only."""
        B, N, _ = x.shape
        if self.tokens is not None:
            x = torch.cat([x, self.tokens.to(x.dtype).expand(B, -1, -1)], dim=1)
        if not self.first_only:
            return self.block(x)[:, :N]
        block = self.block  # timm's forward pass for the first token only
        first = x[:, :1] + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        return first + block.drop_path2(block.ls2(block.mlp(block.norm2(first))))


class Backbone(nn.Module):
    """Images to features; frozen, unless it is a model's own copy to train. Called as :meth:`ViT.forward`.

    Attributes:
        dim: D, length of a feature.
        depth: number of blocks that can be prompted.
        image_size: side of the square input in pixels.
        mean, std: per-channel normalisation, [1, 3, 1, 1], that the weights were trained with.
        sha256: digest of all weights, to compare server and clients.
        has_class_token: whether the first token of the blocks stands for the whole image.
        max_norm: no feature has a larger L2 norm, whatever the image and the prompt; infinite if no bound is known.
    """

    has_class_token = False
    max_norm = math.inf
    mean: Tensor
    std: Tensor

    def __init__(
        self, dim: int, depth: int, image_size: int, mean: tuple[float, ...], std: tuple[float, ...], sha256: str
    ) -> None:
        super().__init__()
        self.dim, self.depth, self.image_size, self.sha256 = dim, depth, image_size, sha256
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)

    @property
    def last(self) -> Early:
        """The feature of the last block, which stands for the backbone's own."""
        return Early(self.depth - 1)

    def early_feature(self, images: Tensor, early: Early) -> Tensor:
        """``early`` alone, without prompt, [B, D]; later blocks are not computed."""
        raise NotImplementedError(f"{type(self).__name__} has no such blocks")


class ViT(Backbone):
    """A plain Vision Transformer of timm, always in evaluation mode."""

    def __init__(
        self, vit: VisionTransformer, mean: tuple[float, ...], std: tuple[float, ...], sha256: str = ""
    ) -> None:
        size = vit.patch_embed.img_size[0]
        super().__init__(vit.embed_dim, len(vit.blocks), size, mean, std, sha256 or digest(vit))
        use_faster_parts(vit.blocks)
        for i, block in enumerate(vit.blocks):
            block.attn = PrefixAttention(block.attn)
            vit.blocks[i] = PromptedBlock(block)
        self.vit, self.has_class_token = vit.requires_grad_(False), vit.cls_token is not None
        self.max_norm = _max_output_norm(vit)
        self.train()

    def train(self, mode: bool = True) -> "ViT":
        """Stay in evaluation mode: no drop-out and drop-path."""
        return super().train(False)

    def forward(
        self,
        images: Tensor,
        prompted: PromptVectors | None = None,
        projects: bool = False,
        early: Sequence[Early] = (),
    ) -> Tensor:
        """Normalised images [B, 3, H, W] -> features [B, D (1 + early)]: the class token after the final norm.

        Behind it comes each of ``early``, normalised to mean 0 and variance 1: such features help where images are far
        from those of pre-training.

        A ViT for which timm has another pooling gives that pooled feature. ``projects``: see :class:`PrefixAttention`.

        Without ``prompted`` this is q(x): timm's forward_features and pre-logits head. With it, the last block computes
        the class token only, as nothing reads the others: the same feature but for rounding.
        """
        with self._reading(early) as read, self._prompting(prompted or {}, projects):
            feature = self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)
        return torch.cat([feature, *(read[each] for each in early)], dim=1)

    def early_feature(self, images: Tensor, early: Early) -> Tensor:
        """As :meth:`Backbone.early_feature`."""
        with self._reading([early]) as read:
            self.vit.forward_intermediates(images, indices=[early.block], stop_early=True, intermediates_only=True)
        return read[early]

    @contextmanager
    def _reading(self, early: Sequence[Early]) -> Iterator[dict[Early, Tensor]]:
        """Fills the dictionary with each of ``early``, [B, D], as its block is computed."""
        read = dict[Early, Tensor]()

        def keep(feature: Early, tokens: Tensor) -> None:
            token = tokens[:, self.vit.num_prefix_tokens :].mean(dim=1) if feature.patches else tokens[:, 0]
            read[feature] = F.layer_norm(token, token.shape[-1:])

        with ExitStack() as stack:
            for feature in early:
                block = self.vit.blocks[feature.block]
                hook = block.register_forward_hook(lambda _, __, tokens, feature=feature: keep(feature, tokens))
                stack.callback(hook.remove)
            yield read

    @contextmanager
    def _prompting(self, prompted: PromptVectors, projects: bool) -> Iterator[None]:
        """For one pass: give each prompted block its vectors, and leave out what nothing reads of the last one."""
        blocks, last = [self.vit.blocks[i] for i in prompted], self.vit.blocks[-1]
        try:
            plain = type(self.vit) is VisionTransformer and type(last.block) is Block
            first_only = bool(prompted) and self.vit.global_pool == "token" and plain
            last.first_only = last.block.attn.first_only = first_only
            for block, vectors in zip(blocks, prompted.values(), strict=True):
                *outer, dim = vectors.shape
                if dim == self.dim and len(outer) == 3 and outer[1] == 2:
                    block.block.attn.prefix, block.block.attn.projects = vectors, projects
                elif dim == self.dim and len(outer) == 2:
                    block.tokens = vectors
                elif dim == self.dim and outer == [3 * dim]:
                    block.block.attn.change = vectors
                else:
                    shapes = "a prefix [B or 1, 2, L_p, D], tokens [B or 1, L_p, D], a change of weights [3 D, D]"
                    raise ValueError(f"what a prompt gives a block is {list(vectors.shape)} instead of {shapes}")
            yield
        finally:
            last.first_only = last.block.attn.first_only = False
            for block in blocks:
                block.block.attn.prefix = block.block.attn.change = block.tokens = None


def _max_output_norm(vit: VisionTransformer) -> float:
    """Bound of the L2 norm of what the last normalisation gives: z has norm sqrt(D) there, and a feature is g z + b."""
    norms = [norm for norm in (vit.norm, vit.fc_norm) if isinstance(norm, nn.LayerNorm)]
    if not norms or vit.attn_pool is not None:
        return math.inf
    return math.sqrt(vit.embed_dim) * float(norms[-1].weight.abs().max()) + float(norms[-1].bias.norm())


def digest(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of a module's state."""
    total = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def load_vit(name: str, weights: str, image_size: int, seed: int) -> ViT:
    """A ViT with its weights, for images of side ``image_size`` (0 = its own); ``seed`` draws random weights.

    Raises:
        ConfigError: unknown or unsuitable architecture; weights missing, broken or of another architecture.
    """
    vit, mean, std = build_vit(name, weights, seed)
    patch, default_size = vit.patch_embed.patch_size[0], vit.patch_embed.img_size[0]
    if image_size % patch:
        raise ConfigError(f"image-size = {image_size} is not possible: {name!r} needs a multiple of {patch}.")
    if image_size > MOST_PATCHES * patch:
        raise ConfigError(
            f"image-size = {image_size} is not possible: {name!r} has patches of {patch} x {patch} pixels, "
            f"and memory grows with the square of their number: at most {MOST_PATCHES * patch}."
        )
    sha256 = digest(vit)  # before resizing, which rounds differently on different processors
    if image_size and image_size != default_size:
        vit.set_input_size(img_size=(image_size, image_size))
    return ViT(vit, mean, std, sha256)
