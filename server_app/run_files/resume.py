"""The run key ``resume``: the run keys of the run that is resumed."""

import logging
from collections.abc import Mapping
from pathlib import Path

import yaml

from server_app.errors import one_line
from server_app.run_files.checkpoints import find_checkpoint
from server_app.run_files.paths import resolve_output_dir
from server_app.run_files.status import FINISHED, read_results
from task.config.schema import APPEARING, MAY_CHANGE, Config, keys_affecting, known_keys
from task.keys import ConfigError
from task.message import Scalar
from task.methods import register
from task.utils.paths import expand_home
from task.utils.versions import code_and_versions

log = logging.getLogger(__name__)


def load_resumed_keys(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The run keys of the run to resume, or ``values`` themselves where the key ``resume`` is not given.

    Other keys in ``values`` must have their default or the run's value, but for those about waiting, and the paths of
    data and weights whose digest the run has recorded.

    Raises:
        ConfigError: no such run, a finished one to which no task can be added, one without a checkpoint, or another
            setting than it had.
    """
    if not values.get("resume"):
        return dict(values)
    directory = resolve_output_dir(str(expand_home(str(values["resume"]), "resume")))
    saved = _read_saved_keys(directory)
    register(str(saved["method"]))
    keys, free = known_keys(), _may_differ()
    if not saved["data-sha256"]:  # of nodes with images of their own
        free -= {"data-dir"}
    for name, value in values.items():
        if name in keys and name not in free and value not in (keys[name].default, saved.get(name)):
            raise ConfigError(f"{name} = {value!r} is not possible with resume: the run has {saved.get(name)!r}.")
    results = read_results(directory)
    open_ended = saved.get("class-order") == APPEARING and results.get("num_tasks", 0) < saved["num-tasks"]
    if results.get("status") == FINISHED and not open_ended:
        raise ConfigError(
            f"resume = {str(directory)!r} is a finished run: there is nothing to resume. Only one with "
            f"class-order = {APPEARING!r} goes on with new classes, until it has num-tasks tasks."
        )
    find_checkpoint(directory / "checkpoint")
    given = {name: values[name] for name in free if values.get(name, keys[name].default) != keys[name].default}
    given |= {"resume": str(directory), "output-dir": str(directory.parent), "run-name": directory.name}
    return {name: value for name, value in saved.items() if name in keys} | given


def _may_differ() -> set[str]:
    """Run keys that change no result; data and weights may lie elsewhere, as their content is compared."""
    return {*keys_affecting(*MAY_CHANGE), "data-dir", "backbone-weights"}


def require_same_start(directory: Path, backbone_sha256: str, data_sha256: str, data_dir: str) -> None:
    """Check that the run began with this backbone and these images; the log warns of other code or versions.

    Raises:
        ConfigError: it began with other weights or images.
    """
    saved = _read_saved_keys(directory)
    if saved["backbone-sha256"] != backbone_sha256:
        raise ConfigError(f"resume = {str(directory)!r} began with other backbone weights than these.")
    if saved["data-sha256"] != data_sha256:
        raise ConfigError(
            f"resume = {str(directory)!r} began with other images: classes, labels, groups or files have changed in "
            f"data-dir = {data_dir!r}. Put back what was there, or start the run anew."
        )
    if any(saved.get(name) != value for name, value in code_and_versions().items()):
        log.warning("the run began with other code or versions: it may end otherwise than without the interruption")


def require_same_keys(config: Config, saved: Mapping[str, Scalar]) -> None:
    """Check that the checkpoint is of a run with these keys, ``saved``, but for those that change no result.

    Raises:
        ConfigError: names a key that differs.
    """
    free, now = _may_differ(), config.flat()
    for name, value in saved.items():
        if name not in free and now.get(name) != value:
            raise ConfigError(
                f"resume = {config.resume!r}: its checkpoint was made with {name} = {value!r}, its config.yaml says "
                f"{now.get(name)!r}; put back what was changed there."
            )


def _read_saved_keys(directory: Path) -> dict[str, Scalar]:
    try:
        saved = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, FileNotFoundError) and directory.is_dir():
            raise ConfigError(
                f"resume = {str(directory)!r} holds no config.yaml: it is of no run, or of one that ended before its "
                "first round; such a run is started anew."
            ) from error
        raise ConfigError(f"resume = {str(directory)!r} is no folder of a run ({one_line(str(error))}).") from error
    missing = {"method", "backbone-sha256", "data-sha256"} - (saved.keys() if isinstance(saved, dict) else set())
    if missing:
        lacks = ", ".join(sorted(missing))
        raise ConfigError(f"resume = {str(directory)!r}: its config.yaml is not that of a run, it lacks {lacks}.")
    return saved
