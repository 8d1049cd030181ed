"""Images of a node: read once and listed in a file of the node; only class names and counts are sent."""

import fnmatch
import hashlib
import json
import logging
import os
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from task.data.class_names import find_same_class, require_printable
from task.data.custom import npz
from task.data.image_folders import class_folders, image_files, require_classes
from task.data.images import MAX_PIXELS, Dataset, ImageFiles, find_problems, read_rgb
from task.data.splits import select_by_digest, split_dataset
from task.keys import ConfigError
from task.utils.atomic import write_atomically
from task.utils.paths import expand_home

log = logging.getLogger(__name__)

PARTS = ("train", "test")
_LISTS = ("readable", "unreadable", "held-out", "trained")
_LOGGED = 20  # unreadable files that the log names
_LIFETIME = 60 * 86_400  # seconds until the list of a run is deleted
Stamps = Mapping[str, list[int]]  # by file: size in bytes and time of its last change in nanoseconds


@dataclass(frozen=True)
class Inventory:
    """Image files of a node at its last scan; paths are relative to ``data_dir``, with slashes.

    Attributes:
        data_dir: a folder per class, or train/ and test/ with a folder per class each, or an .npz file.
        readable: readable files; none for an .npz file.
        unreadable: files that are left out, and folders, which end with a slash and count as one file each.
        held_out: those of the readable files that are not trained on.
        split: whether data_dir has train/ and test/.
        stamp: size and time of an .npz file, so that one that has changed is opened anew.
    """

    data_dir: str
    readable: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    split: bool = False
    stamp: tuple[int, ...] = ()


def scan_images(
    data_dir: str,
    state: Path,
    unreadable_share: float,
    run: str = "",
    previous: Inventory | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Inventory:
    """List a node's images in a file in ``state``. Only files that are new or have changed are read.

    Args:
        data_dir: see :class:`Inventory`.
        state: the node's state folder, made if it does not exist.
        unreadable_share: share of the image files that may be unreadable, 0 to 1; they are named in the log.
        run: the list belongs to this run; later scans of other runs do not change it.
        previous: list only its readable files, to go on without those that have been lost since.
        max_pixels: a file of more pixels is unreadable, see :func:`task.data.images.read_rgb`.

    Raises:
        ConfigError: no such folder, one that cannot be read, or too many unreadable files, which it does not name, as
            the error may be sent.
    """
    root = expand_home(data_dir, "data-dir")
    if os.path.isfile(root):  # Path.is_file raises an error without the right to look
        return Inventory(str(root), stamp=tuple(_stamp(root)))
    if not os.path.isdir(root):
        raise ConfigError(f"data-dir = {data_dir!r}: this node has no such folder or .npz file, or may not read it.")
    newest = max(
        _list_paths(state, root), key=lambda path: (_stamp(path)[1], path.name), default=_list_path(state, root, run)
    )
    before = _read_list(newest, root)
    split = previous.split if previous else all(os.path.isdir(root / part) for part in PARTS)
    files, folders = (previous.readable, []) if previous else _list_files(root, split)
    stamps = {name: _stamp(root / name) for name in files}
    # with ``previous`` all are read again: a damaged disk does not change a file's stamp
    to_read = [name for name, stamp in stamps.items() if previous or before["readable"].get(name) != stamp]
    lost = previous.unreadable if previous else tuple(folders)
    unreadable = _find_unreadable(root, to_read, max_pixels) | set(lost)
    readable = {name: stamp for name, stamp in stamps.items() if name not in unreadable}
    total = len({*stamps, *lost})
    if len(unreadable) > unreadable_share * total:
        raise ConfigError(
            f"{len(unreadable)} of {total} image files below data-dir = {data_dir!r} cannot be read; at most a share "
            f"of {unreadable_share:g} may be (unreadable-share). This node's log names them."
        )
    held_out = _choose_held_out(split, tuple(readable), before["trained"].keys())
    inventory = Inventory(str(root), tuple(readable), tuple(sorted(unreadable)), held_out, split)
    if stamps:  # an unmounted disk must not delete the list
        trained = before["trained"].keys() | (readable.keys() - set(held_out))
        _write_list(_list_path(state, root, run), inventory, readable, trained)
    return inventory


def load_inventory(data_dir: str, state: Path, run: str = "") -> Inventory | None:
    """The inventory of the node's last scan for ``run``; None if there is no list of it."""
    root = expand_home(data_dir, "data-dir")
    if os.path.isfile(root):
        return Inventory(str(root), stamp=tuple(_stamp(root)))
    lists = _read_list(_list_path(state, root, run), root)
    readable, unreadable, held_out = (tuple(lists[part]) for part in _LISTS[:3])
    return Inventory(str(root), readable, unreadable, held_out, lists["split"]) if readable else None


@lru_cache(maxsize=8)  # simulated nodes share a process; each keeps up to CACHE_BYTES of decoded images
def open_inventory(inventory: Inventory, side: int, max_pixels: int = MAX_PIXELS) -> Dataset:
    """The images of an inventory with the node's own class names and ids.

    Without train/ and test/ about a fifth of the files is held out, by a digest of their names, but none that was
    trained on before. At least one file of each class is trained on.

    Raises:
        ConfigError: an .npz file that cannot be used, or a class name that is not printable.
    """
    root = Path(inventory.data_dir)
    if os.path.isfile(root):
        dataset = npz(root, side, max_pixels, by_content=True)
        return replace(dataset, class_names=tuple(_normalise_names(dataset.class_names, root)))
    class_of_file = _normalise_names(_classes_of(inventory.split, inventory.readable), root)
    names, labels = np.unique(np.array(class_of_file, np.str_), return_inverse=True)
    held_out = set(inventory.held_out)
    test = np.array([name in held_out for name in inventory.readable], bool)
    images = ImageFiles(tuple(str(root / name) for name in inventory.readable), side, max_pixels)
    return split_dataset(test, images, labels, tuple(map(str, names)))


def _normalise_names(names: Sequence[str], root: Path) -> list[str]:
    """Class names in Unicode's NFC, as two systems may write one letter in two ways."""
    require_printable(names, str(root))
    normalised = [unicodedata.normalize("NFC", name) for name in names]
    if same := find_same_class(normalised):
        raise ConfigError(
            f"data-dir = {str(root)!r}: the classes {same[0]!r} and {same[1]!r} differ only in case, punctuation or "
            "white space, which makes them one class: rename or merge one of the folders."
        )
    return normalised


def _classes_of(split: bool, files: Sequence[str]) -> list[str]:
    """Name of the class folder of each file."""
    return [PurePosixPath(name).parts[int(split)] for name in files]


def _choose_held_out(split: bool, files: tuple[str, ...], trained: AbstractSet[str]) -> tuple[str, ...]:
    if split:
        return tuple(name for name in files if name.startswith("test/"))
    marked = select_by_digest([os.fsencode(name) for name in files])
    held_out = [name for name, mark in zip(files, marked, strict=True) if mark and name not in trained]
    # each class needs a training file: if all would be held out, the first one is trained on
    for class_name in set(_classes_of(split, files)) - set(_classes_of(split, sorted(set(files) - set(held_out)))):
        held_out.remove(min(name for name in held_out if name.startswith(f"{class_name}/")))
    return tuple(held_out)


def _list_files(root: Path, split: bool) -> tuple[list[str], list[str]]:
    """Image files and the folders that cannot be read, which the log names; relative to root, the folders with a /."""
    parts = [root / part for part in PARTS] if split else [root]
    try:
        folders = [folder for part in parts for folder in class_folders(part)]
        require_classes(folders)
    except OSError as error:
        raise ConfigError(f"data-dir = {str(root)!r} cannot be read by this node: {error}.") from error
    files: list[str] = []
    problems: dict[str, str] = {}
    for folder in folders:
        errors: list[OSError] = []
        found = sorted(image_files(folder, errors.append))
        files += found
        problems |= {f"{_relative(error.filename or folder, root)}/": str(error) for error in errors}
        if not found and not errors:
            log.warning("the class folder %s holds no image: is its disk there?", folder)
    _log_left_out(
        [f"{problem}: a link to nowhere, or this node's user may not read it" for problem in problems.values()]
    )
    return [_relative(path, root) for path in files], sorted(problems)


def _relative(path: str | Path, root: Path) -> str:
    return Path(path).relative_to(root).as_posix()


def _log_left_out(problems: Sequence[str]) -> None:
    for problem in problems[:_LOGGED]:
        log.warning("left out: %s", problem)
    if len(problems) > _LOGGED:
        log.warning("and %d more that cannot be read", len(problems) - _LOGGED)


def unreadable_classes(inventory: Inventory) -> list[str]:
    """Names of the classes of which a folder cannot be read.

    Raises:
        ConfigError: a name is not printable.
    """
    folders = [name for name in inventory.unreadable if name.endswith("/")]
    return _normalise_names(sorted(set(_classes_of(inventory.split, folders))), Path(inventory.data_dir))


def _stamp(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError:  # a broken link, or a file that was just deleted: reading it fails later with a message
        return [0, 0]
    return [status.st_size, status.st_mtime_ns]


def _find_unreadable(root: Path, names: Sequence[str], max_pixels: int) -> set[str]:
    problems = find_problems(lambda name: read_rgb(str(root / name), max_pixels), names)
    _log_left_out([problems[name] for name in sorted(problems)])
    return set(problems)


def _list_path(state: Path, root: Path, run: str) -> Path:
    """Path of a run's list; it differs between data-dirs, so that nodes may share a state folder."""
    return state / f"inventory-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}-{run}.json"


def _list_paths(state: Path, root: Path) -> list[Path]:
    """Paths of the lists of all runs."""
    with _usable(state), suppress(FileNotFoundError):
        names = os.listdir(state)  # glob would take a folder that may not be read for an empty one
        return [state / name for name in fnmatch.filter(names, _list_path(state, root, "*").name)]
    return []


@contextmanager
def _usable(state: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"state-dir = {str(state)!r} of this node cannot be read or written: {error}. The user of the node's "
            "training process must own all of it, and its disk must have room."
        ) from error


def _read_list(path: Path, root: Path) -> dict[str, Any]:
    """Content of a list of this data-dir, see :func:`_write_list`; empty lists if it is missing or damaged."""
    # one that may not be read is an error: without it, what was trained on could be held out
    with _usable(path.parent):
        text = path.read_bytes() if path.exists() else b""
    try:
        content = json.loads(text)
        if content["data-dir"] == str(root):
            return {part: dict(content[part]) for part in _LISTS} | {"split": content["split"]}
    except (ValueError, LookupError, TypeError):
        log.debug("no inventory in %s", path)
    return {part: {} for part in _LISTS} | {"split": False}


def _write_list(path: Path, inventory: Inventory, stamps: Stamps, trained: Iterable[str]) -> None:
    """Write the list of a run; ``trained`` are all files that any run may have trained on."""
    lists: dict[str, Stamps] = {
        "readable": stamps,
        "unreadable": {name: [] for name in inventory.unreadable},
        "held-out": {name: [] for name in inventory.held_out},
        "trained": {name: [] for name in sorted(trained)},
    }
    content = {"data-dir": inventory.data_dir, "split": inventory.split, **lists}
    with _usable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content).encode(), private=True)  # names of files may be those of patients
        for other in _list_paths(path.parent, Path(inventory.data_dir)):
            if _stamp(other)[1] < (time.time() - _LIFETIME) * 1e9:
                other.unlink(missing_ok=True)
