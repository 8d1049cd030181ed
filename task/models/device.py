"""The torch device of the run key ``device``, or an error."""

import re

import torch

from task.keys import ConfigError


def resolve_device(name: str) -> torch.device:
    """Device of the run key ``device``: auto takes a GPU when there is one.

    Raises:
        ConfigError: no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise ConfigError(f"device = {name!r} is not possible: it must be auto, cpu, cuda or cuda:N.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device = {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices.")
    return device
