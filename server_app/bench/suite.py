"""A suite: variants x partitions x seeds in one YAML file, as docs/guides/suites.md shows it.

All runs are checked before the first one is started. The keys of a variant, of a partition and of the command line
win over common ones; no two of these may set the same key. A suite may choose keys on validation images first, and
take in results of other people.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from server_app.report.compare import PROBLEM
from server_app.report.others import OtherResult, read_others
from server_app.report.runs import data_name, name_setting
from server_app.run_files.paths import resolve_output_dir
from server_app.run_keys import complete_run_keys
from task.config.parsing import parse, reads_key
from task.config.schema import OF_THE_SERVER, Config, defaults, keys_affecting, known_keys
from task.keys import ConfigError, did_you_mean
from task.message import Scalar
from task.methods import register

_ENTRIES = {
    "title": str,
    "output-dir": str,
    "seeds": list,
    "common": dict,
    "partitions": list,
    "variants": list,
    "select": dict,
    "others": list,
}
_OPTIONAL: dict[str, Any] = {"common": {}, "partitions": [], "select": {}, "others": []}
_SELECT: dict[str, type] = {"keys": dict, "seeds": list, "common": dict}
_WORDS: dict[type, str] = {str: "a text", list: "a list that is not empty", dict: "run keys with their values"}


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
    def method_keys(self) -> str:
        """The run keys that another run of the same method on other images needs, as fcil run takes them."""
        training = ["local training"] if self.config.trains_locally else []
        usual, names = defaults(), ["backbone-weights", *keys_affecting("result", *training, "privacy")]
        values, left_out = usual | self.values, {"dataset", *PROBLEM} - {"backbone", "image-size"}
        told = [n for n in names if (n == "method" or values[n] != usual[n]) and n not in left_out]
        return " ".join(f"{name}={shlex.quote(str(values[name]))}" for name in told)

    @property
    def setting(self) -> str:
        """Data set and partition; runs of one setting can be compared."""
        name = data_name(self.config.dataset, self.config.data_dir)
        return name_setting(name, self.partition, validation_share=self.config.validation_share)


@dataclass(frozen=True)
class Suite:
    """All runs, seed by seed, so that an unfinished suite has runs of all methods; ``folder`` is absolute.

    ``others`` are results of other people, which its table and pictures show beside its own.
    """

    title: str
    folder: Path
    runs: list[PlannedRun]
    selection: "Selection | None" = None
    others: list[OtherResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Selection:
    """The runs on validation images before a suite, which choose run keys.

    Attributes:
        suite: its runs; ``partition`` of each is the label of its point.
        points: by variant and label, the keys and values that may be chosen.
        left_out: by variant for which nothing is chosen, the reason.
    """

    suite: Suite
    points: dict[str, dict[str, dict[str, Scalar]]]
    left_out: dict[str, str]


def read_suite(path: Path, overrides: Mapping[str, Scalar]) -> Suite:
    """Read a suite and check every run in it.

    Args:
        path: the YAML file.
        overrides: run keys of the command line; ``output-dir`` replaces that of the suite.

    Raises:
        ConfigError: the file cannot be read, an entry or run key is wrong, or two runs would be the same.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        return _build_suite(_check_entries(content, _ENTRIES, _OPTIONAL), overrides, path.absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


class _Loader(yaml.SafeLoader):
    """The safe loader, with an error if a name occurs twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"line {node.start_mark.line + 1}: {name!r} is there twice.")
        return super().construct_mapping(node, deep)


def _check_entries(
    content: Any, kinds: Mapping[str, type], optional: Mapping[str, Any], where: str = ""
) -> dict[str, Any]:
    """The entries of the file, or those of one of them, with the values that ``optional`` ones have by default."""
    if not isinstance(content, dict):
        raise ConfigError(f"a suite has the entries {', '.join(kinds)}; this is a {type(content).__name__}.")
    for name in content:
        if name not in kinds:
            hint = did_you_mean(str(name), kinds)
            raise ConfigError(f"{where}entry {name!r} does not exist.{hint} Allowed: {', '.join(kinds)}.")
    entries = {**optional, **content}
    for name, kind in kinds.items():
        if name not in entries:
            raise ConfigError(f"{where}entry {name!r} is missing: give {_WORDS[kind]}.")
        # only what is empty by default may be empty
        if not isinstance(entries[name], kind) or (not entries[name] and optional.get(name, True)):
            raise ConfigError(f"{where}{name} = {entries[name]!r} is not possible: it must be {_WORDS[kind]}.")
    return entries


def _build_suite(entries: Mapping[str, Any], overrides: Mapping[str, Scalar], base: Path) -> Suite:
    folder = resolve_output_dir(str(overrides.get("output-dir", entries["output-dir"])))
    variants = _keys_by_label("variants", entries["variants"])
    partitions = _keys_by_label("partitions", entries["partitions"]) or {"": {}}
    seeds = _check_seeds("seeds", entries["seeds"])
    seeds_of_variant = {label: _take_list(label, keys, "seeds", seeds) for label, keys in variants.items()}
    seeds_of_partition = {label: _take_list(label, keys, "seeds", seeds) for label, keys in partitions.items()}
    members = {label: _take_list(label, keys, "variants", list(variants)) for label, keys in partitions.items()}
    command_line = {name: value for name, value in overrides.items() if name != "output-dir"}
    command_line |= _guess_data_set(command_line, [entries["common"], *partitions.values(), *variants.values()])
    runs = []
    for seed, partition, variant in product(seeds, partitions, variants):
        layers = {
            "common": entries["common"],
            f"partition {partition!r}": partitions[partition],
            f"variant {variant!r}": variants[variant],
            "the command line": command_line,
        }
        wanted = seed in seeds_of_variant[variant] and seed in seeds_of_partition[partition]
        if wanted and variant in members[partition]:
            runs.append(_set_values(PlannedRun(variant, partition, seed), folder, layers))
    _refuse_duplicates(runs)
    datasets = {run.partition: run.config.dataset for run in runs}
    others = read_others([base / str(path) for path in entries["others"]], datasets)
    _check_lengths(others, runs)
    suite = Suite(entries["title"], folder, runs, others=others)
    if not entries["select"]:
        return suite
    taken = {"common": entries["common"], "the command line": command_line}
    taken |= {f"partition {label!r}": keys for label, keys in partitions.items()}
    return replace(suite, selection=_build_selection(suite, _check_select(entries["select"], taken), taken, variants))


def _check_lengths(others: Sequence[OtherResult], runs: Sequence[PlannedRun]) -> None:
    for other in others:
        lengths = {run.config.num_tasks for run in runs if run.partition == other.partition}
        if (tasks := len(other.run.matrix)) not in lengths:
            raise ConfigError(f"others: {other.run.folder} has {tasks} tasks, the suite's runs {lengths or 'none'}.")


def _check_seeds(entry: str, seeds: Sequence[Any]) -> list[int]:
    """Check that seeds are whole numbers, none of them twice. Text is refused: variants name seeds as numbers."""
    key = known_keys()["seed"]
    return [int(seed) for seed in _refuse_twice(entry, [key.check(seed) for seed in seeds])]


def _check_choices(entry: str, name: str, choices: Sequence[Any]) -> list[Scalar]:
    """Typed values of a run key, none of them twice."""
    key = known_keys()[name]
    return _refuse_twice(entry, [key.from_text(v) if isinstance(v, str) else key.check(v) for v in choices])


def _refuse_twice(entry: str, values: list[Scalar]) -> list[Scalar]:
    if len(set(values)) < len(values):
        raise ConfigError(f"{entry} = {values!r} has one of them twice.")
    return values


def _take_list(label: str, keys: dict[str, Any], name: str, all_values: Sequence[Any]) -> Sequence[Any]:
    """Take the list ``name`` out of the keys of a variant or partition; all values where there is none."""
    values = keys.pop(name, all_values)
    strange = [value for value in values if value not in all_values] if isinstance(values, list) else [values]
    if strange or not values:
        raise ConfigError(f"{name} of {label!r} must be a list of some of {all_values!r}, not {values!r}.")
    return values


def _guess_data_set(command_line: Mapping[str, Scalar], layers: Sequence[Mapping[str, Any]]) -> dict[str, Scalar]:
    """The kind of images in a data-dir on the command line, where nothing else names the data set."""
    if "data-dir" not in command_line or any("dataset" in keys for keys in [command_line, *layers]):
        return {}
    return {"dataset": "npz" if str(command_line["data-dir"]).endswith(".npz") else "folder"}


def _check_select(entry: Mapping[str, Any], taken: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The entry ``select`` with typed values; ``taken`` are the keys of the suite that have a value already."""
    grid: dict[str, list[Scalar]] = {}
    entries = _check_entries(entry, _SELECT, {"seeds": [0]}, "select: ")
    for name, choices in entries["keys"].items():
        if name not in known_keys():
            raise ConfigError(f"select: run key {name!r} does not exist.")
        if not isinstance(choices, list) or len(choices) < 2:
            raise ConfigError(f"select: {name} = {choices!r} must be a list of two values or more.")
        grid[name] = _check_choices(f"select: {name}", name, choices)
    for name, (layer, keys) in product(grid, [*taken.items(), ("select: common", entries["common"])]):
        if name in keys:
            raise ConfigError(f"{name} is chosen by select and set by {layer}.")
    return {"keys": grid, "seeds": _check_seeds("select: seeds", entries["seeds"]), "common": entries["common"]}


def _build_selection(
    suite: Suite,
    select: Mapping[str, Any],
    taken: Mapping[str, Mapping[str, Any]],
    variants: Mapping[str, Mapping[str, Any]],
) -> Selection:
    """Plan the runs of a selection.

    The command line wins over common keys, the keys of select over both, those of a variant over all.
    """
    folder = suite.folder / "_selection"  # no label begins like this
    base = {**taken["common"], **taken["the command line"], **select["common"]}
    points: dict[str, dict[str, dict[str, Scalar]]] = {}
    left_out: dict[str, str] = {}
    runs, grid = [], select["keys"]
    for variant, keys in variants.items():
        layers = {"common": base, f"variant {variant!r}": keys}
        plain = _set_values(PlannedRun(variant, "", 0), folder, layers)
        _check_split(plain, [run for run in suite.runs if run.variant == variant])
        points[variant] = _points(plain, keys, grid)
        if not points[variant]:
            own = [name for name in grid if name in keys]
            left_out[variant] = f"sets {' and '.join(own)} itself" if own else f"reads no {' and no '.join(grid)}"
        for seed, (label, values) in product(select["seeds"], points[variant].items()):
            runs.append(_set_values(PlannedRun(variant, label, seed), folder, layers | {"select: keys": values}))
    runs.sort(key=lambda run: select["seeds"].index(run.seed))
    _refuse_duplicates(runs)
    if not runs:
        raise ConfigError(
            f"select: no variant reads {' or '.join(grid)}, or each sets it itself: remove the entry select."
        )
    return Selection(Suite(f"{suite.title}: selection", folder, runs), points, left_out)


def _check_split(selecting: PlannedRun, final: Sequence[PlannedRun]) -> None:
    """A selection must use validation images, and the suite's own runs must not."""
    if not selecting.config.validation_share:
        raise ConfigError(
            f"select: {selecting.variant} would be evaluated on test images: give common: {{validation-share: 0.2}}."
        )
    if measured := [run.name for run in final if run.config.validation_share]:
        raise ConfigError(
            f"select: {measured[0]} has a validation-share too: its result would be what was selected by."
        )


def _points(
    plain: PlannedRun, keys: Mapping[str, Any], grid: Mapping[str, list[Scalar]]
) -> dict[str, dict[str, Scalar]]:
    """The points of the grid for one variant, by label, over the keys that it reads and does not set itself."""
    read = [name for name in grid if name not in keys and reads_key(plain.values, name, grid[name])]
    combinations = [dict(zip(read, values, strict=True)) for values in product(*(grid[name] for name in read))]
    return {"+".join(f"{name}={value}" for name, value in point.items()): point for point in combinations if point}


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
        if name == "variants" and "variants" in item:
            raise ConfigError(f"variants: {label!r} has a list of variants, which only a partition may have.")
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
    """The keys of all layers. Another layer may set a key of "common" again, no other key: its label would be wrong.

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
            owners[name], merged[name] = layer, value
    register(str(merged.get("method", "")))  # one from outside adds keys
    known = known_keys()
    return {n: known[n].from_text(v) if n in known and isinstance(v, str) else v for n, v in merged.items()}


def _refuse_duplicates(runs: Sequence[PlannedRun]) -> None:
    seen: dict[str, str] = {}
    ignored = keys_affecting(*OF_THE_SERVER)
    for run in runs:
        settings = repr([item for item in run.config.flat().items() if item[0] not in ignored])
        if settings in seen:
            raise ConfigError(f"{seen[settings]} and {run.name} are the same run under two labels.")
        seen[settings] = run.name
