"""The run key ``resume``: the settings of an earlier run, whatever else was typed."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from server_app.run_files.paths import placed, read_results
from task.config.schema import OF_THE_SERVER, keys_affecting, known_keys
from task.keys import ConfigError
from task.message import Scalar
from task.methods import register
from task.utils.versions import code_sha256, versions

log = logging.getLogger(__name__)


def load_resumed_keys(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """``values`` themselves, or those of the run that they say to resume, in its folder.

    A key that says something else than the run does is a mistake, unless it only has its default.

    Raises:
        ConfigError: no such run, a finished one, or another setting than it had.
    """
    if not values.get("resume"):
        return dict(values)
    directory = placed(Path(str(values["resume"])).expanduser())
    saved = _saved(directory)
    register(str(saved["method"]))
    known, free = known_keys(), keys_affecting("waiting", *OF_THE_SERVER)
    for name, value in values.items():
        if name in known and name not in free and value not in (known[name].default, saved.get(name)):
            raise ConfigError(f"{name} = {value!r} is not possible with resume: the run has {saved.get(name)!r}.")
    if read_results(directory).get("status") == "finished":
        raise ConfigError(f"resume = {str(directory)!r} is a finished run: there is nothing to resume.")
    place: dict[str, Scalar] = {
        "resume": str(directory),
        "output-dir": str(directory.parent),
        "run-name": directory.name,
    }
    given = {name: values[name] for name in free if values.get(name, known[name].default) != known[name].default}
    return {name: value for name, value in saved.items() if name in known} | given | place


def require_same_backbone(directory: Path, backbone_sha256: str) -> None:
    """The run must have begun with this backbone; other code or versions are named in the log.

    Raises:
        ConfigError: it began with other weights.
    """
    saved: dict[str, Any] = _saved(directory)
    if saved["backbone-sha256"] != backbone_sha256:
        raise ConfigError(f"resume = {str(directory)!r} began with other backbone weights than these.")
    if saved.get("code-sha256") != code_sha256() or saved.get("versions") != versions():
        log.warning("the run began with other code or versions: it may end otherwise than without the interruption")


def _saved(directory: Path) -> dict[str, Scalar]:
    try:
        found = yaml.safe_load((directory / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"resume = {str(directory)!r} is no folder of a run ({error}).") from error
    if not isinstance(found, dict) or "backbone-sha256" not in found:
        raise ConfigError(f"resume = {str(directory)!r}: its config.yaml is not that of a run.")
    return found
