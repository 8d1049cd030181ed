"""A suite: variants x partitions x seeds in one YAML file, as docs/guides/suites.md shows it.

All runs are checked before the first one is started. The keys of a variant, of a partition and of the command line
win over common ones; no two of these may set the same key.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from server_app.run_files.paths import resolve_output_dir
from server_app.run_keys import complete_run_keys
from task.config.parsing import parse
from task.config.schema import OF_THE_SERVER, Config, keys_affecting, known_keys
from task.keys import ConfigError
from task.message import Scalar

_ENTRIES = {"title": str, "output-dir": str, "seeds": list, "common": dict, "partitions": list, "variants": list}
_OPTIONAL: dict[str, Any] = {"common": {}, "partitions": []}
_WORDS = {str: "a text", list: "a list that is not empty", dict: "run keys with their values"}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a suite; ``partition`` is empty if the suite has none; ``values`` are complete run keys."""

    variant: str
    partition: str
    seed: int
    values: dict[str, Scalar] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, which is also its folder inside the suite's folder."""
        return "/".join(filter(None, [self.variant, self.partition, f"seed{self.seed}"]))

    @property
    def directory(self) -> Path:
        """The run's folder, absolute."""
        return Path(str(self.values["output-dir"])) / str(self.values["run-name"])

    @property
    def config(self) -> Config:
        """The run's resolved keys."""
        return parse(self.values)

    @property
    def setting(self) -> str:
        """Data set and partition; runs of one setting can be compared."""
        return ", ".join(filter(None, [self.config.dataset, self.partition]))


@dataclass(frozen=True)
class Suite:
    """All runs, seed by seed, so that an unfinished suite has runs of all methods; ``folder`` is absolute."""

    title: str
    folder: Path
    runs: list[PlannedRun]


def read_suite(path: Path, overrides: Mapping[str, Scalar]) -> Suite:
    """Read a suite and check every run in it.

    Args:
        path: the YAML file.
        overrides: run keys of the command line; ``output-dir`` replaces that of the suite.

    Raises:
        ConfigError: the file cannot be read, an entry or run key is wrong, or two runs would be the same.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        return _build_suite(_check_entries(content), overrides)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


class _Loader(yaml.SafeLoader):
    """The safe loader, with an error if a name occurs twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"line {node.start_mark.line + 1}: {name!r} is there twice.")
        return super().construct_mapping(node, deep)


def _check_entries(content: Any) -> dict[str, Any]:
    """The entries of the file, with defaults for optional ones."""
    if not isinstance(content, dict):
        raise ConfigError(f"a suite has the entries {', '.join(_ENTRIES)}; this is a {type(content).__name__}.")
    for name in content:
        if name not in _ENTRIES:
            near = difflib.get_close_matches(str(name), _ENTRIES, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"entry {name!r} does not exist.{hint} Allowed: {', '.join(_ENTRIES)}.")
    entries = _OPTIONAL | content
    for name, kind in _ENTRIES.items():
        if not isinstance(entries.get(name), kind) or not (entries[name] or name in _OPTIONAL):
            raise ConfigError(f"{name} = {entries.get(name)!r} is not possible: it must be {_WORDS[kind]}.")
    return entries


def _build_suite(entries: Mapping[str, Any], overrides: Mapping[str, Scalar]) -> Suite:
    folder = resolve_output_dir(str(overrides.get("output-dir", entries["output-dir"])))
    command_line = {name: value for name, value in overrides.items() if name != "output-dir"}
    variants, partitions = (_keys_by_label(name, entries[name]) for name in ("variants", "partitions"))
    seeds = [int(known_keys()["seed"].check(seed)) for seed in entries["seeds"]]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds = {seeds!r} has one of them twice.")
    runs = []
    for seed, partition, variant in product(seeds, partitions or [""], variants):
        layers = {
            "common": entries["common"],
            f"partition {partition!r}": partitions.get(partition, {}),
            f"variant {variant!r}": variants[variant],
            "the command line": command_line,
        }
        runs.append(_set_values(PlannedRun(variant, partition, seed), folder, layers))
    _refuse_duplicates(runs)
    return Suite(entries["title"], folder, runs)


def _keys_by_label(name: str, items: Sequence[Any]) -> dict[str, dict[str, Any]]:
    keys: dict[str, dict[str, Any]] = {}
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("label"), str):
            raise ConfigError(f"{name}: {item!r} must be a label (a text) and run keys.")
        label = item["label"]
        if not re.fullmatch(r"[A-Za-z0-9][\w.+=-]{0,99}", label, re.ASCII):
            raise ConfigError(f"{name}: label {label!r} names a folder: use letters, digits and . + = _ - in it.")
        if label in keys:
            raise ConfigError(f"{name}: label {label!r} is there twice.")
        keys[label] = {key: value for key, value in item.items() if key != "label"}
    return keys


def _set_values(run: PlannedRun, folder: Path, layers: Mapping[str, Mapping[str, Any]]) -> PlannedRun:
    directory = folder / run.name
    identity: dict[str, Scalar] = {"seed": run.seed, "output-dir": str(directory.parent), "run-name": directory.name}
    try:
        return replace(run, values=complete_run_keys(_merge_keys(layers) | identity))
    except ConfigError as error:
        raise ConfigError(f"{run.name}: {error}") from error


def _merge_keys(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of all layers; only one of "common" may be set by another too, as a label would be wrong.

    Text is converted to the type of its key: YAML reads 1e-3, for one, as text. Unknown keys are refused later.
    """
    owners: dict[str, str] = {}
    merged: dict[str, Any] = {}
    for layer, keys in layers.items():
        for name, value in keys.items():
            if not isinstance(name, str):
                raise ConfigError(f"run key {name!r} of {layer} is no text: put it in quotes.")
            if name in keys_affecting("seed", "folder"):
                raise ConfigError(f"{name} is no run key of {layer}: the suite's seeds and output-dir set it.")
            if owners.get(name, "common") != "common":
                raise ConfigError(f"{name} is set by {owners[name]} and by {layer}.")
            owners[name] = layer
            key = known_keys().get(name)
            merged[name] = key.from_text(value) if key and isinstance(value, str) else value
    return merged


def _refuse_duplicates(runs: Sequence[PlannedRun]) -> None:
    seen: dict[str, str] = {}
    ignored = keys_affecting(*OF_THE_SERVER)
    for run in runs:
        what = repr([item for item in run.config.flat().items() if item[0] not in ignored])
        if what in seen:
            raise ConfigError(f"{seen[what]} and {run.name} are the same run under two labels.")
        seen[what] = run.name
