"""The torch device of the run key ``device``, or an error."""

import logging
import os
import re
import shutil
from functools import lru_cache

import torch

from task.keys import ConfigError

log = logging.getLogger(__name__)


def resolve_device(name: str) -> torch.device:
    """Device of the run key ``device``: auto takes a GPU when there is one.

    Raises:
        ConfigError: no such device on this machine, or PyTorch cannot compute on it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if torch.version.cuda and has_unusable_gpu():
            _warn_of_unusable_gpu()
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise ConfigError(f"device = {name!r} is not possible: it must be auto, cpu, cuda or cuda:N.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        hidden = ", as CUDA_VISIBLE_DEVICES hides them (Ray sets it: --gpus-per-client)" * gpus_are_hidden()
        found = f"{torch.cuda.device_count()} CUDA devices{hidden}"
        raise ConfigError(f"device = {name!r} is not there: this machine has {found}.")
    if device.type == "cuda":
        _require_kernels(device)
    return device


@lru_cache
def has_unusable_gpu() -> bool:
    """Whether the machine seems to have a GPU that PyTorch cannot use; looked up once in a process."""
    return not torch.cuda.is_available() and shutil.which("nvidia-smi") is not None


def gpus_are_hidden() -> bool:
    """Whether a person, or Ray for a client that it gives no share of a GPU, hides all of them from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


@lru_cache
def _warn_of_unusable_gpu() -> None:
    reason = "CUDA_VISIBLE_DEVICES hides it" if gpus_are_hidden() else "too old a driver?"
    log.warning("PyTorch cannot use this machine's GPU (%s) and computes on the CPU: fcil doctor", reason)


@lru_cache
def _require_kernels(device: torch.device) -> None:
    try:
        torch.zeros(1, device=device) + 1
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"PyTorch cannot compute on {device} ({reason}): a build of PyTorch for this GPU and its driver is needed, "
            "see pytorch.org/get-started; device = 'cpu' does without the GPU."
        ) from error
