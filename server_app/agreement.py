"""Whether nodes with images of their own mean the same classes."""

import logging
import re
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from server_app.errors import RunError
from server_app.members import Member
from task.config import Config

log = logging.getLogger(__name__)

_SHORTEST = 4  # characters of a word in which one slip is taken for a mistake: cat and bat are two classes


def require_agreement(members: Sequence[Member], config: Config) -> None:
    """Every node must hold something, and no two nodes the same class under two names.

    Raises:
        RunError: names the nodes, and what to do.
    """
    empty = [m.name for m in members if not m.classes]
    if empty:
        raise RunError(f"{', '.join(empty)}: no image found. Its data-dir needs a folder of images per class.")
    if not config.similar_classes and (reason := misspelt({m.name: set(m.classes) for m in members})):
        raise RunError(reason)
    untested = untestable(members)
    if untested:
        log.warning("no node has held out an image of %s: their accuracy will be unknown", ", ".join(untested))


def untestable(members: Sequence[Member]) -> list[str]:
    """Classes of which no node has a held-out image."""
    held_out = {name for m in members for name, count in zip(m.classes, m.test_counts, strict=True) if count}
    return sorted({name for m in members for name in m.classes} - held_out)


def misspelt(classes: Mapping[str, set[str]]) -> str:
    """What looks wrong in the class names of each node; an empty text if nothing does.

    Names that one node holds both are two classes, whatever they look like.
    """
    owner = {name: node for node in sorted(classes, reverse=True) for name in classes[node]}
    for a, b in combinations(sorted(owner), 2):
        if _alike(a, b) and not any({a, b} <= held for held in classes.values()):
            return (
                f"class {a!r} of {owner[a]} and {b!r} of {owner[b]} look like one class: rename one folder, "
                "or run with similar-classes = true if they are two."
            )
    return ""


def _alike(a: str, b: str) -> bool:
    if abs(len(a) - len(b)) > 3:
        return False
    first, second = (re.findall(r"[^\W_]+", name.casefold()) for name in (a, b))
    if "".join(first) == "".join(second):
        return True
    odd = [pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]]
    return len(first) == len(second) and len(odd) == 1 and _one_slip(*odd[0])


def _one_slip(a: str, b: str) -> bool:
    """Whether one letter more, less or other, or two exchanged, make one word of the other."""
    if min(len(a), len(b)) < _SHORTEST or re.search(r"\d", a + b):
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[start:][::-1], b[start:][::-1]
    end = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[end:], b[end:]
    return max(len(a), len(b)) <= 1 or (len(a) == 2 and a == b[::-1])


def common_shape(members: Sequence[Member], side: int) -> tuple[int, int]:
    """Height and width of the nodes' images in pixels, ``side`` x ``side`` where they differ."""
    shapes = {m.image_shape for m in members}
    height, width = shapes.pop() if len(shapes) == 1 else (side, side)
    return height, width


def overview(members: Sequence[Member], most: int = 40) -> list[str]:
    """A table of who takes part with what, a line for each of the first ``most`` members."""
    rows: list[tuple[str, ...]] = [("client", "images", "held out", "classes", "unreadable", "device", "versions")]
    for m in members[:most]:
        present = np.count_nonzero(m.own_counts + m.test_counts)
        counts = (m.own_counts.sum(), m.test_counts.sum(), present, m.unreadable)
        rows.append((m.name, *(str(n) for n in counts), m.device, ", ".join(m.versions)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    return lines + ([f"and {len(members) - most} more"] if len(members) > most else [])
