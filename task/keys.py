"""Declaring and checking run keys: a key is a dataclass field with a type, a default, a help text and limits."""

import difflib
import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

from task.message import Scalar

AUTO = "auto"  # a key left at this value takes the method's own default
LARGEST = {int: 1e9, float: 1e30}  # of a key without a maximum of its own: a larger value is a typing error


# What a run key affects. All but the last five change what a run measures.
Affects = Literal[
    "result",  # nothing special
    "local training",  # ignored by a method that trains nothing at the clients
    "privacy",  # what may leave a client
    "files",  # paths of data and weights, and which images are read; a node's own setting wins over the run's
    "seed",  # another draw of the same protocol
    "device",  # speed and rounding; a node's own setting wins over the run's
    "speed",
    "waiting",  # how long the server waits
    "folder",  # where the run's folder is
    "output",  # what else is written into that folder
]


class ConfigError(ValueError):
    """A run key is unknown, mistyped or impossible; the message is meant for the person who typed it."""


class IgnoredKeyError(ConfigError):
    """A run key was changed that the run does not read."""


class ModelError(RuntimeError):
    """A file holds no model that can be used here; the message is for the person at the terminal."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question that names the nearest of the names; empty if none is near.

    >>> did_you_mean("num_client", ["num-clients", "num-tasks"]), did_you_mean("colour", ["seed"])
    (" Did you mean 'num-clients'?", '')
    """
    near = nearest(name, names)
    return f" Did you mean {near!r}?" if near else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """The name that is most similar to this one; empty if none is similar."""
    return next(iter(difflib.get_close_matches(name.replace("_", "-").lower(), names, n=1)), "")


@dataclass(frozen=True)
class Rule:
    """What is allowed for one key, and what it affects.

    ``only`` is another key, then values of it: a run reads this key only if the other one has one of them.
    """

    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    auto: Scalar | None = None
    only: tuple[Scalar, ...] = ()
    affects: Affects = "result"

    def largest(self, kind: type) -> float:
        """Largest number allowed."""
        return LARGEST.get(kind, math.inf) if self.maximum is None else self.maximum

    def allowed(self, kind: type) -> str:
        """The limits in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        limits = [
            f"above {self.above:g}" if self.above is not None else "",
            f"at least {self.minimum:g}" if self.minimum is not None else "",
            f"at most {self.largest(kind):g}" if kind in LARGEST else "",
        ]
        noun = {int: "a whole number", float: "a number", str: "a text of one line", bool: "true or false"}[kind]
        return " and ".join([noun, *filter(None, limits)]) + (f', or "{AUTO}"' if self.auto is not None else "")

    def accepts(self, value: Scalar) -> bool:
        """Whether a value of the right type is within the limits; NaN and infinity never are."""
        if isinstance(value, str):
            # no control characters, no line ends, and no lone surrogate: a byte that is not UTF-8 (PEP 383)
            shown = not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in value)
            return value in self.choices if self.choices else shown
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and abs(value) <= self.largest(type(value))
        )


def key(default: Scalar, help: str, **rule: Any) -> Any:
    """A dataclass field that is a run key; ``rule`` as in :class:`Rule`."""
    return field(default=default, metadata={"rule": Rule(help, **rule)})


@dataclass(frozen=True)
class Key:
    """One run key as users see it: kebab-case name, type, default, rule."""

    name: str
    kind: type
    default: Scalar
    rule: Rule

    def check(self, value: Scalar) -> Scalar:
        """The value in the key's own type (an int becomes a float where one is expected).

        Raises:
            ConfigError: wrong type or outside the limits; names the key, the value and what is allowed.
        """
        if value == AUTO and self.rule.auto is not None:
            return AUTO
        if self.kind is float and type(value) is int and abs(value) <= self.rule.largest(float):
            value = float(value)
        if type(value) is not self.kind or not self.rule.accepts(value):
            raise ConfigError(f"{self.name} = {value!r} is not possible: it must be {self.rule.allowed(self.kind)}.")
        return value

    def from_text(self, text: str) -> Scalar:
        """The value that unquoted text stands for, in the key's type.

        Raises:
            ConfigError: the text is no such value.
        """
        try:
            value = _CONVERT[self.kind](text)
        except (ValueError, KeyError):
            value = text
        return self.check(value)


_CONVERT: Mapping[type, Any] = {
    int: int,
    float: float,
    str: str,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
}


@cache  # every message of a run is parsed
def keys_of(cls: type, prefix: str = "") -> Mapping[str, Key]:
    """Every run key that a dataclass declares, by its kebab-case name behind ``prefix``."""
    hints, keys = get_type_hints(cls), dict[str, Key]()
    for declared in (f for f in fields(cls) if "rule" in f.metadata):
        rule: Rule = declared.metadata["rule"]
        default: Any = declared.default
        if rule.only:
            rule = replace(rule, only=(f"{prefix}{rule.only[0]}", *rule.only[1:]))
        name = prefix + declared.name.replace("_", "-")
        keys[name] = Key(name, hints[declared.name], default, rule)
    return MappingProxyType(keys)
