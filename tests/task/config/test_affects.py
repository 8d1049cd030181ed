"""What each run key affects is said once, with the key; here every use of it is tried with every key."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml

from server_app.bench.runner import finished_run
from server_app.bench.suite import PlannedRun, read_suite
from server_app.report.compare import Group, group_runs
from server_app.report.runs import load_run
from server_app.run_files.checkpoints import write_checkpoint
from server_app.run_files.resume import load_resumed_keys
from server_app.run_keys import complete_run_keys
from task.config.parsing import apply_node_settings, ignored_keys, parse
from task.config.schema import defaults, keys_affecting, known_keys
from task.keys import Affects, ConfigError
from task.message import Scalar
from task.methods import METHODS

KEYS = known_keys()
# What each use must do, written out: the categories for which ...
NODE_WINS = {"files", "device"}
HIDDEN_FROM_CLIENTS = {"folder", "output"}
FREE_WHEN_RESUMED = {"folder", "output", "waiting"}
MAY_MOVE = {"backbone-weights"}  # when a run is resumed; data too where their digest is recorded
SET_BY_A_SUITE = {"folder", "seed"}
SAME_RUN_IN_A_SUITE = {"folder", "output"}
NOT_COMPARED_BY_BENCH = {"device", "speed", "waiting", "folder", "output"}
ONE_ROW_OF_A_REPORT = {"device", "speed", "waiting", "folder", "output", "seed"}

every_key = pytest.mark.parametrize("name", KEYS)


def affects(name: str) -> str:
    return KEYS[name].rule.affects


def owner(name: str) -> str:
    """A method that reads the key."""
    return next((m.name for m in METHODS.values() if name in m.own_keys()), "hgp")


def other_value(name: str) -> Scalar:
    """A value of the key that is not its default, within its limits."""
    key = KEYS[name]
    if key.kind is bool:
        return not key.default
    if key.kind is str:
        return next((c for c in reversed(key.rule.choices) if c != key.default), "another")
    for number in (2, 3, 0.3):
        value = key.kind(number)
        if key.rule.accepts(value) and value != key.default:
            return value
    raise AssertionError(name)


def what_it_needs(name: str) -> dict[str, Scalar]:
    """The settings without which no run reads the key: the partition for its parameter, and so on."""
    if not KEYS[name].rule.only:
        return {}
    owner, value, *_ = KEYS[name].rule.only
    return {**what_it_needs(str(owner)), str(owner): value}


def write_run(folder: Path, **changed: Scalar) -> Path:
    """A finished run of one task; ``changed`` overwrites settings of its config.yaml."""
    folder.mkdir(parents=True)
    results = {
        "schema": 1,
        "status": "finished",
        "method": "hgp",
        "dataset": "digits",
        "seed": 0,
        "num_tasks": 1,
        "accuracy_matrix": [[0.5]],
        "per_task_seen_accuracy": [0.5],
        "metrics": {},
        "communication": {},
        "seconds": {},
    }
    (folder / "results.json").write_text(json.dumps(results))
    settings = {**defaults(), **parse({"method": "hgp"}).flat(), "backbone-sha256": "0", "data-sha256": "", **changed}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


@every_key
def test_the_category_is_one_that_is_known(name: str) -> None:
    assert affects(name) in get_args(Affects)
    assert name in keys_affecting(affects(name))
    assert [name for name in keys_affecting(*get_args(Affects)) if name not in KEYS] == []


@every_key
def test_a_nodes_own_setting_wins_over_the_runs(name: str) -> None:
    run = {"dataset": "folder", "data-dir": "/run"}
    assert (apply_node_settings(run, {name: "of the node"}).get(name) == "of the node") == (affects(name) in NODE_WINS)


@every_key
def test_clients_are_told(name: str) -> None:
    assert (name in parse({"method": owner(name)}).for_clients()) == (affects(name) not in HIDDEN_FROM_CLIENTS)


@pytest.mark.parametrize("name", [name for name in parse({"method": "ncm"}).flat() if name not in ("method", "prompt")])
def test_keys_of_local_training_are_those_that_a_method_without_it_ignores(name: str) -> None:
    changed = replace(parse({"method": "ncm"}), **{name.replace("-", "_"): other_value(name)})
    assert ignored_keys(changed) == [name] * (affects(name) == "local training")


@every_key
def test_a_privacy_key_alone_is_accepted_only_where_it_does_something(name: str) -> None:
    """Head-only sends arrays and nothing else, without noise here: of the privacy keys it can use one."""
    assert (affects(name) == "privacy") == (name.startswith("privacy-") or name == "min-class-count")
    if affects(name) == "privacy" and name != "privacy-clip":
        with pytest.raises(ConfigError, match=r"would be ignored|needs privacy-clip"):
            parse({"method": "head-only", name: other_value(name)})


@every_key
def test_a_resumed_run_may_be_given_another_value(name: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "cut")
    (folder / "results.json").write_text('{"status": "running"}')
    write_checkpoint(folder / "checkpoint", 1, {})
    value = other_value(name)
    if affects(name) not in FREE_WHEN_RESUMED and name not in MAY_MOVE:
        with pytest.raises(ConfigError, match=f"{name} = .* is not possible with resume|does not exist"):
            load_resumed_keys({"resume": str(folder), name: value})
        return
    resumed = load_resumed_keys({name: value, "resume": str(folder)})
    place = {"resume": str(folder), "output-dir": str(folder.parent), "run-name": "cut"}
    assert resumed[name] == place.get(name, value)


@every_key
def test_a_suite_sets_the_seed_and_the_folder(name: str, tmp_path: Path) -> None:
    variant = {"label": "changed", "method": "hgp", name: other_value(name)}
    refused = f"{name} is no run key of variant 'changed'"
    assert refuses(tmp_path, refused, variant) == (affects(name) in SET_BY_A_SUITE)


@pytest.mark.parametrize("name", ["tensorboard", "round-timeout", "threads", "num-tasks"])
def test_two_variants_that_write_the_same_are_twins(name: str, tmp_path: Path) -> None:
    variants = [{"label": "plain", "method": "hgp"}, {"label": "changed", "method": "hgp", name: other_value(name)}]
    refused = "plain/seed0 and changed/seed0 are the same run"
    assert refuses(tmp_path, refused, *variants) == (affects(name) in SAME_RUN_IN_A_SUITE)


def refuses(folder: Path, words: str, *variants: dict[str, Scalar]) -> bool:
    """Whether a suite of these variants is refused for the reason in ``words``."""
    path = folder / "suite.yaml"
    entries = {"title": "A suite", "output-dir": str(folder / "out"), "seeds": [0], "variants": list(variants)}
    path.write_text(yaml.safe_dump(entries))
    try:
        read_suite(path, {})
    except ConfigError as error:
        return words in str(error)
    return False


@every_key
def test_bench_keeps_a_finished_run_with_another_value(name: str, tmp_path: Path) -> None:
    place = {"output-dir": str(tmp_path), "run-name": "finished"}
    planned = PlannedRun("variant", "", 0, {"method": owner(name), **place})
    write_run(planned.directory, **{**planned.config.flat(), name: "another"})
    if affects(name) in NOT_COMPARED_BY_BENCH:
        assert finished_run(planned) is not None
    else:
        with pytest.raises(ConfigError, match=f"holds a finished run with {name} = 'another'"):
            finished_run(planned)


@every_key
def test_runs_that_differ_in_it_are_one_row_of_a_report(name: str, tmp_path: Path) -> None:
    needed = what_it_needs(name)
    folders = [write_run(tmp_path / "a", **needed), write_run(tmp_path / "b", **needed, **{name: "another"})]
    groups = group_runs([load_run(folder) for folder in folders])
    assert len(groups) == (1 if affects(name) in ONE_ROW_OF_A_REPORT else 2)


# with another value of one of these two methods have had another problem
PROTOCOL = ["num-tasks", "class-order", "validation-share", "num-clients", "clients-per-round", "backbone"]
PROTOCOL += ["image-size", "partition", "dirichlet-beta", "dirichlet-min-size", "classes-per-client", "class-share"]
PROTOCOL += ["split-ratio", "category-ratio", "imbalance-ratio", "consensus-rate"]


@pytest.mark.parametrize("name", PROTOCOL)
def test_a_report_tells_in_what_the_problems_of_two_methods_differ(name: str, tmp_path: Path) -> None:
    needed = what_it_needs(name)
    folders = [write_run(tmp_path / "a", **needed), write_run(tmp_path / "b", **needed, **{name: "another"})]
    text = (folders[1] / "results.json").read_text()
    (folders[1] / "results.json").write_text(text.replace('"hgp"', '"fedavg"'))
    labels = [group.label for group in group_runs([load_run(folder) for folder in folders])]
    assert [f"({name} " in label for label in labels] == [True, True], labels


def test_images_that_lie_elsewhere_are_looked_for_where_the_resume_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = {"dataset": "folder", "data-dir": "/mnt/gone", "data-sha256": "0"}
    folder = write_run(tmp_path / "runs" / "cut", **began)
    (folder / "results.json").write_text('{"status": "running"}')
    write_checkpoint(folder / "checkpoint", 1, {})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert complete_run_keys({"resume": str(folder), "data-dir": "photos"})["data-dir"] == str(tmp_path / "photos")


@pytest.mark.parametrize("name", ["tensorboard", "output-dir", "round-timeout", "start-timeout", "threads"])
def test_two_seeds_that_differ_in_nothing_that_counts_are_one_row(name: str, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1, **{name: other_value(name)})]
    (group,) = group_runs([load_run(folder) for folder in folders])
    assert isinstance(group, Group)
    assert (group.label, len(group.runs)) == ("hgp", 2)


@every_key
def test_paths_of_files_are_made_absolute_for_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given").mkdir()
    values = {**defaults(), "num-clients": 2, "dataset": "folder", "data-dir": "given"}
    if KEYS[name].kind is str and affects(name) == "files":
        assert complete_run_keys(values | {name: "given"})[name] == str(tmp_path / "given")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert complete_run_keys(values | {name: "~/given"})[name] == str(tmp_path / "given")


@pytest.mark.parametrize("word", ["auto", "random"])
def test_a_file_called_like_a_word_for_weights_is_not_meant(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / word).mkdir()
    values = {"num-clients": 2, "dataset": "folder", "data-dir": word, "backbone-weights": word}
    keys = complete_run_keys(values)
    assert (keys["data-dir"], keys["backbone-weights"]) == (str(tmp_path / word), word)
