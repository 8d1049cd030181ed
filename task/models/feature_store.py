"""Features of whole data sets on disk, for all runs and processes of a user: one memory-mapped file each.

The folder is that of the environment variable FCIL_CACHE, else fcil in XDG_CACHE_HOME, else ~/.cache/fcil. Its files
take at most FCIL_CACHE_GB gigabytes (10 if it is not set); those that were unused for longest make room.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor

from task.keys import ConfigError
from task.utils.atomic import write_atomically
from task.utils.paths import expand_home

log = logging.getLogger(__name__)

GB = 10**9
REMEDY = "set FCIL_CACHE to another folder, or feature-cache=off"


@dataclass(frozen=True)
class StoredFeatures:
    """One file: its size in bytes, when it was last used (seconds since 1970), and what its features belong to."""

    path: Path
    size: int
    used: float
    about: Mapping[str, str]


def store_folder() -> Path:
    """Where the files are; the folder need not be there."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fcil"
    return expand_home(os.environ.get("FCIL_CACHE") or str(default), "FCIL_CACHE")


def size_limit() -> float:
    """Bytes that all files may take.

    Raises:
        ConfigError: FCIL_CACHE_GB is no number above 0.
    """
    text = os.environ.get("FCIL_CACHE_GB") or "10"
    with suppress(ValueError):
        if float(text) > 0:
            return float(text) * GB
    raise ConfigError(f"the environment variable FCIL_CACHE_GB = {text!r} must be a number of gigabytes above 0.")


def stored_features(
    identity: Mapping[str, str], about: Mapping[str, str], shape: tuple[int, int], compute: Callable[[], Tensor]
) -> Tensor:
    """Features [N, D] of N images, memory-mapped; never write to them.

    The first process that asks computes and writes them, others wait for it.

    Args:
        identity: all that their bits depend on.
        about: what people want to know of them beside that.
        shape: N and D.
        compute: float32 [N, D] on the CPU.

    Raises:
        ConfigError: no room, or a folder or file that cannot be used.
    """
    path = _path(identity)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path):
            if not path.exists():
                _make_room(path.parent, 4 * shape[0] * shape[1])
                features = compute().contiguous()
                write_atomically(path, safetensors.torch.save({"features": features}, {**about, **identity}))
            os.utime(path)
            with safe_open(path, framework="pt") as file:
                return file.get_tensor("features")
    except (OSError, NotImplementedError) as error:
        raise ConfigError(f"the feature cache {path.parent} cannot be used ({error}): {REMEDY}.") from error
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({error}): delete it, or all by fcil cache clear.") from error


def is_stored(identity: Mapping[str, str]) -> bool:
    """Whether there is a file of these features."""
    return _path(identity).exists()


def _path(identity: Mapping[str, str]) -> Path:
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return store_folder() / f"{name}.safetensors"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = _lock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log.info("features of these images are being computed by another process, waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _lock(path: Path) -> FileLock:
    return FileLock(path.with_name(path.name.partition(".")[0] + ".lock"))


def _make_room(folder: Path, needed: int) -> None:
    """Delete the files that were unused for longest until ``needed`` bytes more are within the limit and the disk."""
    limit, free, files = size_limit(), shutil.disk_usage(folder).free, list_stored()
    held = sum(file.size for file in files)
    if needed > min(limit, free + held):
        raise ConfigError(
            f"the features of this data set take {needed / GB:.2g} GB; FCIL_CACHE_GB allows {limit / GB:.2g}, and the "
            f"disk of {folder} has {(free + held) / GB:.2g} for them: raise the limit, {REMEDY}."
        )
    for file in files:
        if (held + needed > limit or needed > free) and _remove(file):
            held, free = held - file.size, free + file.size


def list_stored() -> list[StoredFeatures]:
    """All files, the one that was unused for longest first; also those that a crash has left half written."""
    files = []
    for path in store_folder().glob("*.safetensors*"):
        with suppress(OSError):  # another process may delete it
            stat, about = path.stat(), dict[str, str]()
            with suppress(SafetensorError), safe_open(path, framework="pt") as content:  # none if it is damaged
                about = content.metadata() or about
            files.append(StoredFeatures(path, stat.st_size, stat.st_mtime, about))
    return sorted(files, key=lambda file: file.used)


def clear_store() -> list[StoredFeatures]:
    """Delete all files that no process is opening or writing; returns those. A run that reads them goes on."""
    return [file for file in list_stored() if _remove(file)]


def _remove(file: StoredFeatures) -> bool:
    """Delete a file, unless a process is opening or writing it; its empty lock stays."""
    try:
        with _lock(file.path).acquire(blocking=False):
            file.path.unlink(missing_ok=True)
    except Timeout:
        return False
    return True
