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
    holders: dict[str, set[str]] = {}
    for node, names in classes.items():
        for name in names:
            holders.setdefault(name, set()).add(node)
    likenesses: dict[tuple[str, ...], dict[frozenset[str], str]] = {}
    for name in sorted(holders):
        for likeness in _likenesses(name):
            likenesses.setdefault(likeness, {}).setdefault(frozenset(holders[name]), name)
    pairs = (pair for alike in likenesses.values() for pair in combinations(alike.items(), 2))
    odd = min((tuple(sorted((a, b))) for (ours, a), (theirs, b) in pairs if not ours & theirs), default=None)
    if not odd:
        return ""
    first, second = (f"{name!r} of {min(holders[name])}" for name in odd)
    return (
        f"class {first} and {second} look like one class: rename one folder, "
        "or run with similar-classes = true if they are two."
    )


def _likenesses(name: str) -> set[tuple[str, ...]]:
    """What a name shares with those that part its words otherwise, or that one slip in a word makes of it.

    A slip is a letter more, less, other or elsewhere: the words then agree with one letter left out of each, or of
    one (deletion neighbourhoods: T. Bocek et al., Fast Similarity Search in Large Dictionaries, 2007); in short words
    only the s of a plural is one. Numbers have none, and a plus or minus behind a word is a word.
    """
    words = re.findall(r"[^\W\d_]+|\d+|[+-]+(?!\w)", name.casefold())
    found: set[tuple[str, ...]] = {("".join(words),), ("plural", *map(_singular, words))}
    for i, word in enumerate(words):
        if len(word) >= _SHORTEST and word.isalpha():
            cut = {word, *(word[:j] + word[j + 1 :] for j in range(len(word)))}
            found |= {("slip", str(i), *words[:i], short, *words[i + 1 :]) for short in cut}
    return found


def _singular(word: str) -> str:
    return word[:-1] if len(word) >= _SHORTEST and word.endswith("s") else word


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
