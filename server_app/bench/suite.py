"""A suite: variants x partitions x seeds in one YAML file, every run of it checked before any is started.

    title: HGP against averaging
    output-dir: runs/suites/example            # relative as the run key of that name
    seeds: [0, 1, 2]
    common: {dataset: digits, num-clients: 10} # run keys of all runs; may be left out
    partitions:                                # may be left out
      - {label: uneven, dirichlet-beta: 0.05}
      - {label: iid, partition: iid}
    variants:                                  # a label, which names a folder, and run keys
      - {label: hgp, method: hgp}
      - {label: fedavg-coda, method: fedavg, prompt: coda}

A variant's or a partition's keys win over common ones, and those of the command line over all.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from server_app.run_files.paths import placed
from server_app.run_keys import complete_run_keys
from task.config.parsing import parse
from task.config.schema import OF_THE_SERVER, Config, keys_affecting, known_keys
from task.keys import ConfigError
from task.message import Scalar

_ENTRIES = {"title": str, "output-dir": str, "seeds": list, "common": dict, "partitions": list, "variants": list}
_OPTIONAL: dict[str, Any] = {"common": {}, "partitions": []}
_WORDS = {str: "a text", list: "a list that is not empty", dict: "run keys with their values"}


@dataclass(frozen=True)
class Planned:
    """One run of a suite; ``partition`` is empty where the suite names none, ``values`` are run keys."""

    variant: str
    partition: str
    seed: int
    values: dict[str, Scalar] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What people call it, and where it lies in the suite's folder."""
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
        """What its accuracy can be compared under: data set and partition."""
        return ", ".join(filter(None, [self.config.dataset, self.partition]))


@dataclass(frozen=True)
class Suite:
    """All runs, seed by seed, so that an unfinished suite has every method; ``folder`` is absolute."""

    title: str
    folder: Path
    runs: list[Planned]


def read_suite(path: Path, given: Mapping[str, Scalar]) -> Suite:
    """Read a suite and check every run in it.

    Args:
        path: the YAML file.
        given: run keys of the command line; ``output-dir`` takes the place of the suite's own.

    Raises:
        ConfigError: the file cannot be read, an entry or run key is wrong, or two runs would be the same.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        return _suite(_checked(content), given)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


class _Loader(yaml.SafeLoader):
    """The safe loader, which would let the second of two equal names win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"line {node.start_mark.line + 1}: {name!r} is there twice.")
        return super().construct_mapping(node, deep)


def _checked(content: Any) -> dict[str, Any]:
    """The entries of the file, those left out added."""
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


def _suite(entries: Mapping[str, Any], given: Mapping[str, Scalar]) -> Suite:
    folder = placed(Path(str(given.get("output-dir", entries["output-dir"]))))
    own = {name: value for name, value in given.items() if name != "output-dir"}
    variants, partitions = (_labelled(name, entries[name]) for name in ("variants", "partitions"))
    runs = []
    for seed, partition, variant in product(_seeds(entries["seeds"]), partitions or [""], variants):
        layers = {
            f"partition {partition!r}": partitions.get(partition, {}),
            f"variant {variant!r}": variants[variant],
            "the command line": own,
        }
        runs.append(_with_values(Planned(variant, partition, seed), folder, entries["common"], layers))
    _refuse_twins(runs)
    return Suite(entries["title"], folder, runs)


def _seeds(seeds: Sequence[Any]) -> list[int]:
    checked = [int(known_keys()["seed"].check(seed)) for seed in seeds]
    if len(set(checked)) < len(checked):
        raise ConfigError(f"seeds = {seeds!r} has one of them twice.")
    return checked


def _labelled(name: str, items: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Run keys by label."""
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("label"), str):
            raise ConfigError(f"{name}: {item!r} must be a label (a text) and run keys.")
        label = item["label"]
        if not re.fullmatch(r"[A-Za-z0-9][\w.+=-]{0,99}", label, re.ASCII):
            raise ConfigError(f"{name}: label {label!r} names a folder: use letters, digits and . + = _ - in it.")
        if label in found:
            raise ConfigError(f"{name}: label {label!r} is there twice.")
        found[label] = {key: value for key, value in item.items() if key != "label"}
    return found


def _with_values(
    run: Planned, folder: Path, common: Mapping[str, Any], layers: Mapping[str, Mapping[str, Any]]
) -> Planned:
    directory = folder / run.name
    own: dict[str, Scalar] = {"seed": run.seed, "output-dir": str(directory.parent), "run-name": directory.name}
    try:
        return replace(run, values=complete_run_keys(_merged(common, layers) | own))
    except ConfigError as error:
        raise ConfigError(f"{run.name}: {error}") from error


def _merged(common: Mapping[str, Any], layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Common keys and those of the layers, no two of which may set the same: the one's label would be wrong."""
    owners: dict[str, str] = {}
    for layer, keys in [("common", common), *layers.items()]:
        for key in keys:
            if not isinstance(key, str):
                raise ConfigError(f"run key {key!r} of {layer} is no text: put it in quotes.")
            if key in keys_affecting("seed", "folder"):
                raise ConfigError(f"{key} is no run key of {layer}: the suite's seeds and output-dir set it.")
            if owners.get(key, "common") != "common":
                raise ConfigError(f"{key} is set by {owners[key]} and by {layer}.")
            owners[key] = layer
    merged = {key: value for keys in (common, *layers.values()) for key, value in keys.items()}
    return {key: _typed(key, value) for key, value in merged.items()}


def _typed(key: str, value: Any) -> Any:
    """YAML takes 1e-3, and more that people mean as numbers, for a text; what is no run key is refused later."""
    return known_keys()[key].from_text(value) if isinstance(value, str) and key in known_keys() else value


def _refuse_twins(runs: Sequence[Planned]) -> None:
    seen: dict[str, str] = {}
    ignored = keys_affecting(*OF_THE_SERVER)
    for run in runs:
        what = repr([item for item in run.config.flat().items() if item[0] not in ignored])
        if what in seen:
            raise ConfigError(f"{seen[what]} and {run.name} are the same run under two labels.")
        seen[what] = run.name
