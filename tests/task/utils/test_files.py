"""Small files that people name: pipes, devices, endless and deeply nested ones are refused in words."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from server_app.bench.suite import read_suite
from server_app.doctor.certificates import check_certificates
from server_app.errors import ReportError
from server_app.report.others import read_others
from server_app.report.runs import load_run
from server_app.run_files.resume import load_resumed_keys
from server_app.run_keys import read_file
from task.inference import ModelError, load_predictor
from task.keys import ConfigError
from task.utils.files import parse_small, read_small

SETTINGS: dict[str, Callable[[Path], object]] = {
    "settings.toml": read_file,
    "suite.yaml": lambda path: read_suite(path, {}),
    "results.json": lambda path: load_run(path.parent),
    "config.yaml": lambda path: load_run(path.parent),
    "resumed/config.yaml": lambda path: load_resumed_keys({"resume": str(path.parent)}),
    "theirs.json": lambda path: read_others([path], {"": "digits"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_device_is_not_read(name: str, tmp_path: Path) -> None:
    """One that ends at once stands for those that never do, and for pipes."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/null")
    with pytest.raises((ConfigError, ReportError), match=f"{path.name} is a folder, a pipe, a socket or a device"):
        SETTINGS[name](path)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_nested_too_deeply_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(("a = " if path.suffix == ".toml" else "") + "[" * 100_000)
    with pytest.raises((ConfigError, ReportError), match=f"{path.name} is nested too deeply"):
        SETTINGS[name](path)


def test_a_certificate_is_read_from_a_small_file(tmp_path: Path) -> None:
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**24 + 1)
    [device, large] = check_certificates([str(tmp_path / "device"), str(tmp_path / "large")])
    assert device.text.endswith("no certificate can be read: device is a folder, a pipe, a socket or a device")
    assert large.text.endswith("no certificate can be read: large has more than 16777216 bytes")


def test_a_model_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/dev/null")
    with pytest.raises(ModelError, match="is a folder, a pipe, a socket or a device"):
        load_predictor(tmp_path)


def test_at_most_so_many_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_small(path, 5) == b"12345"
    assert parse_small(path, json.loads) == 12345
    with pytest.raises(ValueError, match="a has more than 4 bytes"):
        read_small(path, 4)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "absent")
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        parse_small(path, json.loads)
