"""Class names of nodes that have images of their own: which spellings mean one class."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from task.keys import ConfigError


def normal_form(name: str) -> str:
    """The name without case, punctuation and white space: names with equal normal forms mean one class.

    Symbols such as + and < stay, so that "HER2+" and "HER2-" are two classes. A name of nothing but punctuation is its
    own normal form.
    """
    letters = [c for c in name.casefold() if not c.isspace() and not unicodedata.category(c).startswith("P")]
    return unicodedata.normalize("NFC", "".join(letters)) or name


def choose_spellings(names: Iterable[str]) -> dict[str, str]:
    """Normal form and name of each class: the spelling that comes most often, or the first in sorted order of those.

    Each run of white space becomes one blank, and none is left at the ends. A name of punctuation alone stays as it is:
    its white space is a part of its normal form.
    """
    counts = Counter(names)
    spellings: dict[str, str] = {}
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        form, tidy = normal_form(name), " ".join(name.split())
        spellings.setdefault(form, tidy if normal_form(tidy) == form else name)
    return spellings


def find_same_class(names: Iterable[str]) -> tuple[str, ...]:
    """Two different names with the same normal form; empty where there are none."""
    spellings: dict[str, str] = {}
    for name in sorted(set(names)):
        if (first := spellings.setdefault(normal_form(name), name)) != name:
            return first, name
    return ()


def class_ids(names: Sequence[str], class_names: Sequence[str]) -> np.ndarray:
    """Class id of each name of a node, int64 [len(names)]; -1 where the run's ``class_names`` have no such class."""
    ids = {normal_form(name): class_id for class_id, name in enumerate(class_names)}
    return np.array([ids.get(normal_form(name), -1) for name in names], np.int64)


def require_printable(names: Iterable[str], data_dir: str) -> None:
    """Refuse class names that logs, tables and pictures could not show.

    Raises:
        ConfigError: names one of them.
    """
    for name in names:
        if not name.strip() or not name.isprintable():
            undecoded = any("\udc80" <= character <= "\udcff" for character in name)  # PEP 383
            advice = " If it looks right elsewhere, set a locale of UTF-8, LC_ALL=C.UTF-8." if undecoded else ""
            raise ConfigError(f"data-dir = {data_dir!r}: rename the class {name!r}, it cannot be shown.{advice}")
