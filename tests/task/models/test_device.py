"""The run key ``device``."""

import pytest
import torch

from task.keys import ConfigError
from task.models import device
from task.models.device import resolve_device
from tests.helpers.pretended_gpu import pretended_gpu


@pytest.mark.parametrize("name", ["cuda:1", "cuda:77", "gpu", "CUDA"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pretended_gpu(), pytest.raises(ConfigError, match=f"device = '{name}'"):
        resolve_device(name)


def test_devices_that_are_hidden_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"0 CUDA devices, as CUDA_VISIBLE_DEVICES hides them \(Ray sets it"):
        resolve_device("cuda")


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # this machine may have one
    assert resolve_device("auto") == torch.device("cpu")
    with pretended_gpu():
        assert resolve_device("auto") == torch.device("cuda")


@pytest.mark.parametrize(
    ("visible", "reason"),
    [(None, "too old a driver?"), ("0", "too old a driver?"), ("", "CUDA_VISIBLE_DEVICES hides it")],
)
def test_a_gpu_that_is_hidden_or_without_its_driver_is_warned_of(
    visible: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "has_unusable_gpu", device.has_unusable_gpu.__wrapped__)
    device._warn_of_unusable_gpu.cache_clear()
    assert resolve_device("auto") == torch.device("cpu")
    assert f"cannot use this machine's GPU ({reason})" in caplog.text


@pytest.mark.parametrize("name", ["auto", "cuda:0"])
def test_a_gpu_that_this_build_cannot_use_ends_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no reason to compute on the CPU without a word."""

    def fail(*shape: int, **where: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with")

    device._require_kernels.cache_clear()
    with pretended_gpu():
        monkeypatch.setattr(torch, "zeros", fail)
        with pytest.raises(ConfigError, match="no kernel image is available for execution on the device\\): a build"):
            resolve_device(name)
