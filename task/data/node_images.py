"""What a node holds: images of its own, read once and listed in a file of the node; only names and counts leave it."""

import hashlib
import json
import logging
import os
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from task.data.custom import npz
from task.data.image_folders import class_folders, images_by_class, require_classes
from task.data.images import Dataset, ImageFiles, read_rgb
from task.data.splits import select_by_digest
from task.keys import ConfigError
from task.utils.atomic import write_atomically

log = logging.getLogger(__name__)

PARTS = ("train", "test")
_LISTS = ("readable", "unreadable", "held-out", "trained")
_NAMED = 20  # unreadable files that the log names
_KEPT = 60 * 86_400  # seconds that the list of a run is kept
Stamps = Mapping[str, list[int]]  # by file: size in bytes and time of its last change in nanoseconds


@dataclass(frozen=True)
class Inventory:
    """Image files that a node found when it last took stock; paths are relative to ``data_dir``, with slashes.

    Attributes:
        data_dir: a folder per class, or train/ and test/ with a folder per class each, or an .npz file.
        readable: none for an .npz, whose arrays are opened as they are.
        unreadable: left out of everything.
        held_out: those of the readable that nobody trains on.
        split: whether train/ and test/ were there.
    """

    data_dir: str
    readable: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    split: bool = False


def scan_images(
    data_dir: str, state: Path, unreadable_share: float, run: str = "", known: Inventory | None = None
) -> Inventory:
    """List a node's images and read every file that is new or has changed; the list is kept in ``state``.

    Args:
        data_dir: see :class:`Inventory`.
        state: the node's folder, made if need be.
        unreadable_share: of the image files that may be unreadable, 0 to 1; they are named in the log.
        run: whose list it is: what another run finds later does not change it.
        known: list no other files than its readable ones, so as to go on without those that have been lost.

    Raises:
        ConfigError: no such place, or too many unreadable files; names none, for this may travel.
    """
    root = Path(data_dir).expanduser()
    if root.is_file():
        return Inventory(str(root))
    if not root.is_dir():
        raise ConfigError(f"data-dir = {data_dir!r}: this node has no such folder or .npz file.")
    before = _kept(_newest(state, root), root)
    split = known.split if known else all((root / part).is_dir() for part in PARTS)
    stamps = {name: _stamp(root / name) for name in (known.readable if known else _listed(root, split))}
    # one that is lost may look as before: a damaged disk does not change its stamp
    fresh = [name for name, stamp in stamps.items() if known or before["readable"].get(name) != stamp]
    lost = known.unreadable if known else ()
    bad = _unreadable(root, fresh) | set(lost)
    good = {name: stamp for name, stamp in stamps.items() if name not in bad}
    whole = len({*stamps, *lost})
    if len(bad) > unreadable_share * whole:
        raise ConfigError(
            f"{len(bad)} of {whole} image files below data-dir = {data_dir!r} cannot be read; at most a share of "
            f"{unreadable_share:g} may be (unreadable-share). This node's log names them."
        )
    held_out = _held_out(split, tuple(good), before["trained"].keys())
    found = Inventory(str(root), tuple(good), tuple(sorted(bad)), held_out, split)
    if stamps:  # a disk that is not there must not make the node forget
        trained = before["trained"].keys() | (good.keys() - set(held_out))
        _keep(_list_of(state, root, run), found, good, trained)
    return found


def load_inventory(data_dir: str, state: Path, run: str = "") -> Inventory | None:
    """What the node found when it last took stock for ``run``; None if it has forgotten, or never did so there."""
    root = Path(data_dir).expanduser()
    if root.is_file():
        return Inventory(str(root))
    kept = _kept(_list_of(state, root, run), root)
    readable, unreadable, held_out = (tuple(kept[part]) for part in _LISTS[:3])
    return Inventory(str(root), readable, unreadable, held_out, kept["split"]) if readable else None


@lru_cache(maxsize=64)
def open_inventory(inventory: Inventory, side: int) -> Dataset:
    """The images of an inventory with the node's own class names and ids.

    Without train/ and test/ about a fifth of the files is held out, by a digest of their names, but never one that was
    trained on before. Of a class at least one file is trained on.

    Args:
        inventory: of this node.
        side: of decoded image files, in pixels.

    Raises:
        ConfigError: an .npz file that cannot be used, or a class name that cannot travel.
    """
    root = Path(inventory.data_dir)
    if root.is_file():
        found = npz(root, side, by_content=True)
        return replace(found, class_names=tuple(_travelling(found.class_names, root)))
    by_class = _travelling(_classes_of(inventory.split, inventory.readable), root)
    names, labels = np.unique(np.array(by_class, np.str_), return_inverse=True)
    held_out = set(inventory.held_out)
    test = np.array([name in held_out for name in inventory.readable], bool)
    parts = [_part(root, inventory.readable, labels, np.flatnonzero(mask), side) for mask in (~test, test)]
    return Dataset(tuple(map(str, names)), *parts[0], *parts[1])


def _travelling(names: Sequence[str], root: Path) -> list[str]:
    """Class names as all nodes write them: two systems may write one letter in two ways."""
    odd = [name for name in names if not name.isprintable()]
    if odd:
        raise ConfigError(f"data-dir = {str(root)!r}: rename the class {odd[0]!r}, it cannot be shown.")
    return [unicodedata.normalize("NFC", name) for name in names]


def _part(
    root: Path, files: tuple[str, ...], labels: np.ndarray, positions: np.ndarray, side: int
) -> tuple[ImageFiles, np.ndarray]:
    return ImageFiles(tuple(str(root / files[i]) for i in positions), side), labels[positions].astype(np.int64)


def _classes_of(split: bool, files: Sequence[str]) -> list[str]:
    """Name of the class folder of each file."""
    return [PurePosixPath(name).parts[int(split)] for name in files]


def _held_out(split: bool, files: tuple[str, ...], trained: AbstractSet[str]) -> tuple[str, ...]:
    if split:
        return tuple(name for name in files if name.startswith("test/"))
    marked = select_by_digest([os.fsencode(name) for name in files])
    left = [name for name, mark in zip(files, marked, strict=True) if mark and name not in trained]
    # a class needs a file to be trained on: the first in order where all would be held out
    for of_class in set(_classes_of(split, files)) - set(_classes_of(split, sorted(set(files) - set(left)))):
        left.remove(min(name for name in left if name.startswith(f"{of_class}/")))
    return tuple(left)


def _listed(root: Path, split: bool) -> list[str]:
    roots = [root / part for part in PARTS] if split else [root]
    folders = [folder for r in roots for folder in class_folders(r)]
    require_classes(folders)
    return [Path(path).relative_to(root).as_posix() for path in images_by_class(folders, side=1)[0].paths]


def _stamp(path: Path) -> list[int]:
    try:
        found = path.stat()
    except OSError:  # a link to nowhere, or a file that has just gone: reading it will say so
        return [0, 0]
    return [found.st_size, found.st_mtime_ns]


def _unreadable(root: Path, names: Sequence[str]) -> set[str]:
    with ThreadPoolExecutor() as pool:
        reasons = pool.map(_problem, [root / name for name in names])
        problems = {name: why for name, why in zip(names, reasons, strict=True) if why}
    for name in sorted(problems)[:_NAMED]:
        log.warning("left out: %s", problems[name])
    if len(problems) > _NAMED:
        log.warning("and %d more unreadable image files", len(problems) - _NAMED)
    return set(problems)


def _problem(path: Path) -> str:
    try:
        read_rgb(str(path))
    except ConfigError as error:
        return str(error)
    return ""


def _list_of(state: Path, root: Path, run: str) -> Path:
    """Where a run's list is; nodes that share a folder of state have others."""
    return state / f"inventory-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}-{run}.json"


def _lists_of(state: Path, root: Path) -> Iterator[Path]:
    """Those of all runs."""
    return state.glob(_list_of(state, root, "*").name)


def _newest(state: Path, root: Path) -> Path:
    """The list of the run that took stock last."""
    return max(_lists_of(state, root), key=lambda path: (_stamp(path)[1], path.name), default=_list_of(state, root, ""))


def _kept(path: Path, root: Path) -> dict[str, Any]:
    """What :func:`_keep` wrote for this data-dir; nothing if it is gone, damaged or of another one."""
    try:
        kept = json.loads(path.read_text())
        if kept["data-dir"] == str(root):
            return {part: dict(kept[part]) for part in _LISTS} | {"split": kept["split"]}
    except (OSError, ValueError, LookupError, TypeError):
        log.debug("no inventory in %s", path)
    return {part: {} for part in _LISTS} | {"split": False}


def _keep(path: Path, found: Inventory, stamps: Stamps, trained: Iterable[str]) -> None:
    """Write the list of a run; ``trained`` are all files that any run may have trained on."""
    named: dict[str, Stamps] = {
        "readable": stamps,
        "unreadable": {name: [] for name in found.unreadable},
        "held-out": {name: [] for name in found.held_out},
        "trained": {name: [] for name in sorted(trained)},
    }
    content = {"data-dir": found.data_dir, "split": found.split, **named}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content).encode())
        for old in _lists_of(path.parent, Path(found.data_dir)):
            if _stamp(old)[1] < (time.time() - _KEPT) * 1e9:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"state-dir = {str(path.parent)!r} of this node cannot be written: {error}.") from error
