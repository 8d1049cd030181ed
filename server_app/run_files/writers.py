"""Files of a run; a crash while one is written leaves its previous version."""

import errno
import json
import logging
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.numpy
import yaml

from server_app.errors import LaunchError
from server_app.run_files.paths import project_folder
from task.config.schema import Config
from task.data.images import Dataset
from task.data.load import default_augmentation
from task.message import Arrays
from task.models.metadata import ModelMetadata
from task.utils.atomic import naming, write_atomically
from task.utils.versions import code_and_versions

if TYPE_CHECKING:
    from task.models.model import Model


log = logging.getLogger(__name__)


def append_line(path: Path, value: Any) -> None:
    """Add one line of JSON; an incomplete last line, as a power cut leaves it, is replaced.

    Raises:
        OSError: the disk is full; the lines before stay whole.
    """
    line = (json.dumps(value, allow_nan=False) + "\n").encode()
    with naming(path), open(path, "ab", buffering=0) as file:
        file.truncate(size := len(b"".join(_complete_lines(path))))
        if file.write(line) < len(line):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[Any]:
    """The lines that :func:`append_line` has written; none if there is no such file."""
    return [json.loads(line) for line in _complete_lines(path)]


def keep_lines(path: Path, count: int) -> None:
    """Cut a file after its first ``count`` lines; the log warns if it has fewer."""
    lines = _complete_lines(path)
    if len(lines) < count:
        log.warning("%s has %d of %d lines", path, len(lines), count)
    write_atomically(path, b"".join(lines[:count]))


def _complete_lines(path: Path) -> list[bytes]:
    content = path.read_bytes() if path.exists() else b""
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def write_config(
    directory: Path, config: Config, model: "Model", data_sha256: str, adaptation_rounds: int, dataset: Dataset
) -> None:
    """Write config.yaml: run keys, what was used for auto, SHA-256 of backbone and images, and :func:`origin`."""
    used = {"device": str(model.device), "image-size": model.backbone.image_size}
    used |= {"augmentation": default_augmentation(dataset, config.augmentation)}
    content = {
        **config.flat(),
        "used": used | ({"adaptation-rounds": adaptation_rounds} if adaptation_rounds else {}),
        "backbone-sha256": model.backbone.sha256,
        "data-sha256": data_sha256,
        **origin(),
    }
    write_atomically(directory / "config.yaml", yaml.safe_dump(content, sort_keys=False).encode())


def origin() -> dict[str, Any]:
    """SHA-256 of the clients' and the server's code, commit and versions of this process, as config.yaml has them."""
    return code_and_versions() | {"git-revision": _revision()}


def _revision() -> str:
    """Commit of the code, empty when it is no git checkout."""
    try:
        root = project_folder()
        git = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except (LaunchError, OSError):
        return ""
    return git.stdout.strip() if git.returncode == 0 and (root / ".git").exists() else ""


def write_model(path: Path, arrays: Arrays, metadata: ModelMetadata) -> None:
    """Write a model as a safetensors file with its metadata in the header."""
    write_atomically(path, safetensors.numpy.save(arrays, metadata.as_header()))
