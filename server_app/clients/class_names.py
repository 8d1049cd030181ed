"""Whether nodes with images of their own mean the same classes."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from server_app.clients.client_info import Member
from server_app.errors import RunError
from task.config.schema import Config

log = logging.getLogger(__name__)

Likeness = tuple[str, ...]

_LONGEST = 40  # characters of a word in which slips are looked for
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
    alike: dict[Likeness, dict[tuple[str, frozenset[str]], str]] = {}
    for name in sorted(holders):
        for likeness, side in _likenesses(name):
            alike.setdefault(likeness, {}).setdefault((side, frozenset(holders[name])), name)
    pairs = (pair for found in alike.values() for pair in combinations(found.items(), 2))
    odd = min(
        (tuple(sorted((a, b))) for ((s, ours), a), ((t, theirs), b) in pairs if not ours & theirs and s + t != "11"),
        default=None,
    )
    if not odd:
        return ""
    first, second = (f"{name!r} of {min(holders[name])}" for name in odd)
    return (
        f"class {first} and {second} look like one class: rename one folder, "
        "or run with similar-classes = true if they are two."
    )


def _likenesses(name: str) -> Iterator[tuple[Likeness, str]]:
    """What a name shares with those that part its words otherwise, or that one slip in a word makes of it.

    A slip is a letter other, more or less, or two exchanged: then words agree without the letter in one place, one
    agrees with what leaving a letter out of the other makes of it (the side is "1" for such remains, which say nothing
    of each other), or they agree with the letters in one place sorted. In short words only the s of a plural is a
    slip. Numbers have none, and neither has what is not parted by spaces, hyphens and the like.
    """
    words = re.findall(r"\d+|-+(?!\w)|[^\d\s_.,/()\[\]-]+", name.casefold())
    if words:
        yield ("joined", "".join(words)), ""
        yield ("plural", *map(_singular, words)), ""
    for i, word in enumerate(words):
        if _SHORTEST <= len(word) <= _LONGEST and not word.isdigit():
            for kind, made, side in _slips(word):
                yield (f"{kind} {i}", *words[:i], made, *words[i + 1 :]), side


def _slips(word: str) -> Iterator[tuple[str, str, str]]:
    """Kind of slip, what the word and its misspelling have in common then, and the side."""
    yield "more", word, ""
    for j, letter in enumerate(word):
        before, after = word[:j], word[j + 1 :]
        yield "more", before + after, "1"
        yield f"other {j}", before + after, ""
        yield f"exchanged {j}", before + "".join(sorted(letter + after[:1])) + after[1:], ""


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
