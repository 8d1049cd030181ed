"""Building a plain ViT with the weights of the run key ``backbone-weights``, or an error."""

import base64
import json
import socket
import warnings
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub.constants
import safetensors.torch
import timm
import torch
from timm.layers import Attention
from timm.models import VisionTransformer
from torch import Tensor, nn

from task.config.schema import FROM_SCRATCH, NO_FILE
from task.keys import AUTO, ConfigError
from task.models.bundled import BUNDLED, read_description
from task.utils.paths import expand_home

Normalisation = tuple[float, ...]  # per channel


def build_vit(name: str, weights: str, seed: int = 0) -> tuple[Any, Normalisation, Normalisation]:
    """A timm VisionTransformer without classifier, and the mean and standard deviation of its images.

    ``weights``: "auto" (bundled, or timm's pre-trained), a file, or "random" (drawn with ``seed``).

    Raises:
        ConfigError: unknown or unsuitable architecture; weights missing, broken or of another architecture.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vit, mean, std = _bundled(name, weights) if name in BUNDLED else _from_timm(name, weights)
    if weights not in NO_FILE:
        load_strictly(vit, read_weights(weights), weights)
    return vit, mean, std


def _bundled(name: str, weights: str) -> tuple[VisionTransformer, Normalisation, Normalisation]:
    description = read_description(name)
    vit = VisionTransformer(num_classes=0, **description["architecture"])
    if weights == AUTO:
        parts = [json.loads((BUNDLED[name].parent / part).read_text()) for part in description["parts"]]
        load_strictly(vit, safetensors.torch.load(b"".join(map(base64.b64decode, parts))), f"bundled {name}")
    return vit, description["mean"], description["std"]


def _from_timm(name: str, weights: str) -> tuple[nn.Module, Normalisation, Normalisation]:
    if not timm.is_model(name.split(".")[0]):
        start = "".join(c for c in name[:8] if c.isalnum() or c == "_")
        near = ", ".join([*BUNDLED, *FROM_SCRATCH, *timm.list_models(f"*{start}*", module="vision_transformer")[:3]])
        raise ConfigError(f"backbone = {name!r} does not exist: use {near}, or any plain ViT of timm.")
    vit = _create(name, pretrained=False)
    if not isinstance(vit, VisionTransformer) or not all(
        type(getattr(block, "attn", None)) is Attention and getattr(block.attn, "gate", None) is None
        for block in vit.blocks
    ):  # before anything is fetched
        raise ConfigError(f"backbone = {name!r} is not a plain ViT of timm; vit_base_patch16_224, for example, is one.")
    if weights == AUTO:
        _go_offline_if_unreachable()
        vit = _create(name, pretrained=True)
    return vit, vit.pretrained_cfg["mean"], vit.pretrained_cfg["std"]


def _create(name: str, pretrained: bool) -> Any:
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0)
    except Exception as error:
        reason = f"({type(error).__name__}: {' '.join(str(error).split())[:200]})."
        if not pretrained:
            raise ConfigError(f"backbone = {name!r} cannot be built by timm {reason}") from error
        raise ConfigError(
            f"backbone-weights = {AUTO!r}: no pre-trained weights of {name!r} could be had from timm {reason} "
            "Name a file: backbone-weights=FILE."
        ) from error


def _go_offline_if_unreachable() -> None:
    """Without a network, tell the hub's client to use its cache at once: it would retry for most of a minute."""
    if getproxies().keys() - {"no"}:  # "no": hosts without a proxy
        return
    url = urlsplit(huggingface_hub.constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname, url.port or {"http": 80}.get(url.scheme, 443)), timeout=5).close()
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def read_weights(weights: str) -> dict[str, Tensor]:
    """State dict of a .safetensors file or of a PyTorch one that holds tensors by name and nothing else.

    Raises:
        ConfigError: the file is missing, cannot be read, or holds something else.
    """
    path = expand_home(weights, "backbone-weights")
    if not path.is_file():
        raise ConfigError(f"backbone-weights = {str(path)!r}: there is no such file; auto, random, or a file's path.")
    try:
        is_safe = path.suffix == ".safetensors"
        with warnings.catch_warnings(action="ignore"):  # the error below says all
            state = safetensors.torch.load_file(path) if is_safe else torch.load(path, "cpu", weights_only=True)
        if not all(isinstance(n, str) and isinstance(v, Tensor) for n, v in state.items()):
            raise TypeError("no tensors by name")
        return dict(state)
    except Exception as error:  # whose text is left out: torch's advises to run the code that a file may hold
        raise ConfigError(
            f"backbone-weights = {str(path)!r} is damaged, of another format, or holds more than tensors by name: "
            "save them anew, by torch.save(model.state_dict(), PATH) or as .safetensors."
        ) from error


def find_misfits(expected: Mapping[str, Tensor], given: Mapping[str, Any]) -> list[str]:
    """Names of arrays that only one of both has, or if there are none, of those with another shape than expected."""
    either = sorted(expected.keys() ^ given.keys())
    return either or [name for name, value in expected.items() if value.shape != given[name].shape]


def load_strictly(network: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict of which every array but a classifier's must fit by name and shape.

    Raises:
        ConfigError: an array is missing, too many, of another shape or not finite; ``source`` is named.
    """
    expected = network.state_dict()
    state = {name: value.float() for name, value in state.items() if not name.startswith(("head.", "fc."))}
    if misfits := find_misfits(expected, state):
        raise ConfigError(
            f"backbone-weights = {source!r} are of another architecture: {len(misfits)} of {len(expected)} arrays do "
            f"not fit, the first is {misfits[0]!r}."
        )
    if not all(bool(value.isfinite().all()) for value in state.values()):
        raise ConfigError(f"backbone-weights = {source!r} hold NaN or infinite values.")
    network.load_state_dict(state)
