"""Run keys as people type them on the command line; imports nothing heavy."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from server_app.launcher import DEFAULT_CLIENTS
from server_app.resume import continued
from task.config import ConfigError, known_keys, parse, parse_text
from task.packet import Scalar

_PATHS = ("data-dir", "backbone-weights")


def read_words(words: Sequence[str]) -> dict[str, Scalar]:
    """Typed run keys from words such as ``method=hgp``.

    Raises:
        ConfigError: a word that is no setting, a key given twice, an unknown key, a bad value.
    """
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            near = difflib.get_close_matches(word.lstrip("-"), known_keys(), n=1)
            raise ConfigError(f"{word!r} is not KEY=VALUE; write {near[0] if near else 'method'}=... instead.")
        if key in pairs:
            raise ConfigError(f"{key} is given twice: {pairs[key]!r} and {text!r}.")
        pairs[key] = text
    return parse_text(pairs)


def completed(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The same run keys for another working directory, and with the number of clients.

    Raises:
        ConfigError: values that are no run, or a run that cannot be resumed.
    """
    if values.get("resume"):
        return continued({**values, "resume": str(Path(str(values["resume"])).expanduser().absolute())})
    found = dict(values)
    for key in _PATHS:  # the workers' folder is the project's, not the user's
        if found.get(key) and Path(str(found[key])).exists():
            found[key] = str(Path(str(found[key])).resolve())
    if not parse(found).num_clients:
        found["num-clients"] = DEFAULT_CLIENTS  # so that the server waits for all of them
    return found
