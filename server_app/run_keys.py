"""Run keys from the command line; imports nothing heavy."""

import contextlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from server_app.errors import LaunchError
from server_app.run_files.paths import project_folder
from server_app.run_files.resume import load_resumed_keys
from server_app.run_files.status import read_results
from server_app.simulation.superlink import DEFAULT_CLIENTS
from task.config.parsing import check_values, parse, parse_text
from task.config.schema import FROM_PATH, NO_FILE, OWN, Config, keys_affecting, known_keys
from task.keys import ConfigError, nearest
from task.message import Scalar
from task.utils.paths import expand_home

if TYPE_CHECKING:
    from task.data.images import Dataset


def read_words(words: Sequence[str]) -> dict[str, Scalar]:
    """Typed run keys from words such as ``method=hgp``; the first may be a .toml file, over which the others win.

    Raises:
        ConfigError: a word that is no setting, a key given twice, an unknown key, a bad value, an unreadable file.
    """
    if words and _is_file(words[0]):
        return read_file(Path(words[0])) | read_pairs(words[1:])
    return read_pairs(words)


def _is_file(word: str) -> bool:
    return word.endswith(".toml") and "=" not in word


def read_file(path: Path) -> dict[str, Scalar]:
    """Typed run keys from a file as ``flwr run --run-config`` takes it: TOML, a flat list of keys, no tables.

    Raises:
        ConfigError: it cannot be read, or a key or value is none; names the file.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        for name, value in values.items():
            if isinstance(value, dict):
                raise ConfigError(f"{name!r} is a table, but run keys are flat: one KEY = VALUE a line, no [{name}].")
        return check_values(values)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # also what is no TOML, or no text
        raise ConfigError(f"{path}: {error}") from error


def read_pairs(words: Sequence[str]) -> dict[str, Scalar]:
    """Typed run keys from KEY=VALUE words.

    Raises:
        ConfigError: a word that is no setting, a key given twice, an unknown key, a bad value.
    """
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if _is_file(word):
            raise ConfigError(f"{word!r} must come first, once: what follows a file of settings wins over it.")
        if not equals:
            near = nearest(word.lstrip("-"), known_keys()) or "method"
            raise ConfigError(f"{word!r} is not KEY=VALUE; write {near}=... instead.")
        if key in pairs:
            raise ConfigError(f"{key} is given twice: {pairs[key]!r} and {text!r}.")
        pairs[key] = text
    return parse_text(pairs)


def complete_run_keys(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The run keys with absolute paths and the number of clients.

    Raises:
        ConfigError: values that are no run, or a run that cannot be resumed.
    """
    keys = dict(values)
    for name in keys_affecting("files"):  # the workers' working directory is the project's
        if isinstance(keys.get(name), str) and keys[name]:
            keys[name] = _resolve(name, str(keys[name]))
    if keys.get("resume"):
        keys = load_resumed_keys({**keys, "resume": str(expand_home(str(keys["resume"]), "resume").absolute())})
        _require_same_nodes(keys)
        return keys
    if not parse(keys).num_clients:
        keys["num-clients"] = len(_node_folders(keys)) or DEFAULT_CLIENTS  # so that the server waits for all of them
    return keys


def _node_folders(keys: Mapping[str, Scalar]) -> list[str]:
    """Simulated nodes with data of their own are the folders in data-dir: their names; empty for other data."""
    from task.data.image_folders import class_folders

    if keys.get("dataset") != OWN or not keys.get("data-dir"):
        return []
    return [folder.name for folder in class_folders(expand_home(str(keys["data-dir"]), "data-dir"))]


def _require_same_nodes(keys: Mapping[str, Scalar]) -> None:
    """Refuse a resume in which a simulated node would get another one's folder: node i is the i-th of them.

    Raises:
        ConfigError: a node of the run is not among the first num-clients folders.
    """
    names = _node_folders(keys)[: int(keys["num-clients"])]
    before = [str(client["name"]) for client in read_results(Path(str(keys["resume"]))).get("clients", [])]
    if names and not set(before) <= set(names):
        raise ConfigError(
            f"resume = {keys['resume']!r}: the run began with the nodes {', '.join(before)}, the first folders in "
            f"data-dir = {keys['data-dir']!r} are now {', '.join(names)}. Put back what was there, or start the run "
            "anew; only in a deployment may nodes come and go."
        )


def require_files(values: Mapping[str, Scalar]) -> None:
    """Check that the images and weights which run keys name are on this machine; what is in them is not read.

    Raises:
        ConfigError: they are not; for published images it says what belongs there and where it comes from.
    """
    if values.get("dataset") == OWN and not values.get("data-dir"):
        raise ConfigError(
            f"dataset = {OWN!r} needs data-dir here: fcil run simulates the nodes, and each has a folder in it. A run "
            "of real nodes is started, and resumed, by: flwr run . CONNECTION --stream --run-config KEYS"
        )
    folder = run_path("data-dir", str(values.get("data-dir", "")))
    if values.get("dataset") == OWN and folder.is_dir() and not _node_folders({**values, "data-dir": str(folder)}):
        raise ConfigError(
            f"data-dir = {values['data-dir']!r} holds no folder: fcil run simulates a node for each folder in it, "
            "which holds a folder of images per class."
        )
    for name in ("data-dir", "backbone-weights"):
        text = str(values.get(name, ""))
        if text in ("", *NO_FILE) or run_path(name, text).exists():
            continue
        dataset = str(values.get("dataset", ""))
        if name == "data-dir" and dataset in FROM_PATH:
            from task.data.load import load_dataset

            load_dataset(dataset, text, 1, 0.0, 0)
        raise ConfigError(f"{name} = {text!r}: there is no such file or folder here.")


def load_datasets(configs: Sequence[Config]) -> Iterator[tuple[tuple[str, str], "Dataset"]]:
    """The data sets of the runs, each once, with its name and path; nodes' own images are left out.

    Of draws of validation images each is tried, as a class may be too small for one, and the smallest is given.

    Raises:
        ConfigError: one cannot be read, or has too few classes for the tasks or too few images of a class.
    """
    from task.data.load import load_dataset

    sources: dict[tuple[str, str, int], list[Config]] = {}
    for c in configs:
        if not c.own_data:
            sources.setdefault((c.dataset, c.data_dir, c.max_image_pixels), []).append(c)
    for (name, text, limit), readers in sources.items():
        path = str(run_path("data-dir", text)) if text else ""
        for share, seed in sorted({(c.validation_share, c.seed * bool(c.validation_share)) for c in readers})[::-1]:
            dataset = load_dataset(name, path, 1, share, seed, limit)
        classes, tasks = len(dataset.class_names), max(c.num_tasks for c in readers)
        if tasks > classes:
            raise ConfigError(
                f"num-tasks = {tasks}: {text or name} has {classes} classes, and every task needs one at least: "
                f"set num-tasks to {classes} or less."
            )
        yield (name, path), dataset
        load_dataset.cache_clear()  # the runs have processes of their own


def run_path(name: str, text: str) -> Path:
    """Where a run looks for the file of a run key: below the project's folder, or without one the working directory."""
    path = expand_home(text, name)
    with contextlib.suppress(LaunchError):
        path = project_folder() / path
    return path


def require_listed(values: Mapping[str, Scalar]) -> None:
    """Check that Flower takes the keys: those of a method from outside must stand in the project's pyproject.toml.

    Raises:
        ConfigError: some do not; names them and the place.
        LaunchError: this is no project's folder.
    """
    path = project_folder() / "pyproject.toml"
    listed = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    if missing := [name for name in values if name not in listed]:
        raise ConfigError(
            f"Flower takes only keys that are listed: write {', '.join(missing)} with a default into "
            f"[tool.flwr.app.config] of {path}, or do without Flower: add --in-process to fcil run, and no --flower to "
            "fcil bench."
        )


def _resolve(name: str, text: str) -> str:
    """The absolute path if something is there, seen from the working directory; else the text as it is."""
    if name == "backbone-weights" and text in NO_FILE:
        return text
    try:
        path = expand_home(text, name)
        return str(path.resolve()) if path.exists() else text
    except OSError as error:
        raise ConfigError(f"{name} = {text[:100]!r} cannot be read: {error.strerror}.") from error
