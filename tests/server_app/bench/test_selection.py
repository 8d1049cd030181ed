"""Keys chosen on validation images, runs of a part of a suite, and other people's results in it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from server_app.bench.runner import Bench, SelectionBench
from server_app.bench.selection import apply_choices
from server_app.bench.suite import read_suite
from server_app.cli import main as cli
from server_app.run_files.status import read_results
from task.keys import ConfigError
from task.methods import METHODS
from tests.conftest import TINY
from tests.helpers.suites import HEAD, NCM, fill, run_results, table

ROOT = Path(__file__).parents[3]
RATES = [0.001, 0.005, 0.02]
SELECT = {"keys": {"learning-rate": RATES}, "common": {"validation-share": 0.2, "num-tasks": 3}}


def test_selection_runs_are_those_of_variants_that_read_the_key(write):
    variants = [NCM, HEAD, HEAD | {"label": "fixed", "learning-rate": 0.1}, {"label": "ft", "method": "fedavg-ft"}]
    keys = {"learning-rate": ["1e-3", 0.02], "backbone-learning-rate": [0.0001, 0.001]}
    suite = read_suite(write(variants=variants, seeds=[3], select=SELECT | {"keys": keys, "seeds": [1, 0]}), {})
    runs = suite.selection.suite.runs
    assert [run.name for run in runs if run.seed == 1] == [
        "head/learning-rate=0.001/seed1",
        "head/learning-rate=0.02/seed1",
        *(f"ft/backbone-learning-rate={b}+learning-rate={a}/seed1" for b in (0.0001, 0.001) for a in (0.001, 0.02)),
    ]
    assert [run.seed for run in runs] == [1] * 6 + [0] * 6
    assert suite.selection.left_out == {
        "means": "reads no backbone-learning-rate and no learning-rate",
        "fixed": "sets learning-rate itself",
    }
    assert {(run.config.validation_share, run.config.num_tasks) for run in runs} == {(0.2, 3)}
    assert {run.config.learning_rate for run in runs} == {0.001, 0.02}
    assert {(run.config.validation_share, run.config.num_tasks) for run in suite.runs} == {(0.0, 2)}
    assert runs[0].directory == suite.folder / "_selection" / "head" / "learning-rate=0.001" / "seed1"


def test_whose_keys_win_in_a_selection(write):
    common = {"validation-share": 0.2, "rounds-per-task": 2, "num-clients": 4}
    variants = [HEAD, HEAD | {"label": "long", "rounds-per-task": 9}]
    path = write(variants=variants, select=SELECT | {"common": common})
    head, long = (run.config for run in read_suite(path, {"num-clients": 7, "batch-size": 8}).selection.suite.runs[::3])
    assert (head.rounds_per_task, head.num_clients, head.batch_size) == (2, 4, 8)
    assert long.rounds_per_task == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"select": SELECT | {"kyes": {}}}, "select: entry 'kyes' does not exist"),
        ({"select": SELECT | {"keys": {}}}, r"select: keys = \{\} is not possible"),
        ({"select": {"keys": SELECT["keys"]}}, "select: entry .common. is missing"),
        ({"select": SELECT | {"common": {"num-tasks": 3}}}, "head would be evaluated on test images|means would be"),
        ({"select": SELECT | {"keys": {"learning-rat": RATES}}}, "select: run key 'learning-rat' does not exist"),
        ({"select": SELECT | {"keys": {"learning-rate": [0.1]}}}, "must be a list of two values or more"),
        ({"select": SELECT | {"keys": {"learning-rate": 0.1}}}, "must be a list of two values or more"),
        ({"select": SELECT | {"keys": {"learning-rate": [0.1, "1e-1"]}}}, "has one of them twice"),
        ({"select": SELECT | {"keys": {"learning-rate": [0.1, -1]}}}, "learning-rate = -1.0 is not possible"),
        ({"select": SELECT | {"seeds": [0, 0]}}, r"select: seeds = \[0, 0\] has one of them twice"),
        ({"select": SELECT | {"seeds": ["0"]}}, "seed = '0' is not possible: it must be a whole number"),
        ({"select": SELECT, "common": TINY | {"learning-rate": 0.1}}, "is chosen by select and set by common"),
        ({"select": SELECT, "common": TINY | {"validation-share": 0.2}}, "means/seed0 has a validation-share too"),
        ({"select": SELECT, "variants": [NCM]}, "select: no variant reads learning-rate"),
        ({"select": SELECT | {"common": {"validation-share": 0.2, "rounds": 3}}}, "run key 'rounds' does not exist"),
        ({"variants": [NCM | {"seeds": [1]}, HEAD]}, r"seeds of 'means' must be a list of some of \[0\], not \[1\]"),
        ({"variants": [NCM | {"seeds": 0}, HEAD]}, "seeds of 'means' must be a list of some of"),
        (
            {"partitions": [{"label": "p", "variants": ["x"]}]},
            r"variants of 'p' must be a list of some of .*not \['x'\]",
        ),
        ({"others": ["nowhere.json"]}, "others: .*nowhere.json cannot be used"),
    ],
)
def test_mistakes_are_found_before_anything_runs(write, tmp_path, changes, message):
    path = write(**changes)
    with pytest.raises(ConfigError, match=message):
        read_suite(path, {})
    assert cli.main(["bench", str(path)]) == 2
    assert not (tmp_path / "out").exists()


def test_the_command_line_cannot_set_what_is_chosen(write, capsys):
    path = write(select=SELECT)
    with pytest.raises(ConfigError, match="learning-rate is chosen by select and set by the command line"):
        read_suite(path, {"learning-rate": 0.1})
    assert cli.main(["bench", str(write()), "--select-only"]) == 2
    assert "--select-only needs an entry select" in capsys.readouterr().err


def fill_selection(suite, accuracies):
    """Finished runs of a selection by their names' beginnings; those without an accuracy are left out."""
    for run in suite.selection.suite.runs:
        if (accuracy := accuracies.get((run.variant, run.values["learning-rate"], run.seed))) is not None:
            results = run_results((accuracy, accuracy, accuracy))
            results |= {"num_tasks": 2, "metrics": {"final_average_accuracy": accuracy}}
            fill(run, results)


def choices_of(suite, failed=()):
    bench = SelectionBench(suite.selection, 1, ["--in-process"], lambda line: None)
    bench._failed = [run for run in suite.selection.suite.runs if run.name in failed]
    bench._report()
    return bench.choices()


def test_the_best_mean_over_seeds_is_chosen_and_logged(write, tmp_path):
    variants = [NCM, HEAD, {"label": "avg", "method": "fedavg"}]
    suite = read_suite(write(variants=variants, select=SELECT | {"seeds": [0, 1]}), {})
    means = {0.001: (0.1, 0.2), 0.005: (0.3, 0.9), 0.02: (0.5, 0.5)}  # 0.15, 0.6, 0.5
    accuracies = {("head", rate, seed): means[rate][seed] for rate in RATES for seed in (0, 1)}
    accuracies |= {("avg", rate, seed): 0.5 - rate for rate in RATES for seed in (0, 1)}
    fill_selection(suite, accuracies)
    choices = choices_of(suite)
    assert (choices["head"].values, choices["head"].edges) == ({"learning-rate": 0.005}, [])
    assert (choices["avg"].values, choices["avg"].edges) == ({"learning-rate": 0.001}, ["learning-rate"])
    log = (tmp_path / "out" / "selection.md").read_text()
    assert "| head | 15.00 | 60.00 | 50.00 | learning-rate=0.005 |  |" in log
    assert "| avg | 49.90 | 49.50 | 48.00 | learning-rate=0.001 | edge of the grid: learning-rate |" in log
    assert "| means | - | - | - | - | reads no learning-rate |" in log
    stored = json.loads((tmp_path / "out" / "selection.json").read_text())
    assert stored["variants"]["head"]["chosen"] == {"learning-rate": 0.005}
    assert stored["variants"]["head"]["accuracies"]["learning-rate=0.005"] == [0.3, 0.9]
    final = apply_choices(suite, suite.selection, choices)
    rates = {run.variant: run.config.learning_rate for run in final.runs}
    assert (rates["head"], rates["avg"]) == (0.005, 0.001)
    assert {run.config.validation_share for run in final.runs} == {0.0}
    assert {run.config.num_tasks for run in final.runs} == {2}


def test_a_tie_is_told(write, tmp_path):
    suite = read_suite(write(select=SELECT), {})
    fill_selection(suite, {("head", rate, 0): 0.5 if rate > 0.001 else 0.4 for rate in RATES})
    choice = choices_of(suite)["head"]
    assert (choice.chosen, choice.remark) == ("learning-rate=0.005", "as good: learning-rate=0.02")
    assert "| learning-rate=0.005 | as good: learning-rate=0.02 |" in (tmp_path / "out" / "selection.md").read_text()


def test_of_equal_ones_the_one_that_was_better_on_the_way_is_chosen(write):
    """Accuracies after the first task are 0.6, 0.6 and 0.7, at the end 0.5 with each."""
    suite = read_suite(write(select=SELECT), {})
    for run in suite.selection.suite.runs:
        first = 0.7 if run.values["learning-rate"] == 0.02 else 0.6
        results = run_results((0.5, 0.5, 0.5)) | {"num_tasks": 2, "accuracy_matrix": [[first, None], [0.5, 0.5]]}
        fill(run, results | {"metrics": {}})
    choice = choices_of(suite)["head"]
    assert (choice.chosen, choice.ties) == ("learning-rate=0.02", ["learning-rate=0.001", "learning-rate=0.005"])


def test_a_run_of_which_an_earlier_accuracy_is_unknown_can_be_chosen(write):
    """Nodes with the validation images were away after the first task."""
    suite = read_suite(write(select=SELECT), {})
    for run in suite.selection.suite.runs:
        first = None if run.values["learning-rate"] == 0.005 else 0.7
        results = run_results((0.5, 0.5, 0.5)) | {"num_tasks": 2, "accuracy_matrix": [[first, None], [0.5, 0.5]]}
        fill(run, results | {"metrics": {"final_average_accuracy": 0.5}, "samples_per_task": [10, 10]})
    assert choices_of(suite)["head"].chosen == "learning-rate=0.005"


def test_of_altogether_equal_ones_the_middle_one_is_chosen(write):
    suite = read_suite(write(select=SELECT), {})
    fill_selection(suite, {("head", rate, 0): 0.5 for rate in RATES})
    assert choices_of(suite)["head"].chosen == "learning-rate=0.005"


def test_a_word_may_stand_beside_numbers(write):
    """Edges are those of the numbers."""
    keys = {"afcl-ridge": ["auto", 0.1, 10.0], "dirichlet-beta": [0.1, 1.0]}
    select = {"keys": keys, "common": SELECT["common"]}
    suite = read_suite(write(variants=[{"label": "ridge", "method": "afcl"}], select=select), {})
    for run in suite.selection.suite.runs:
        accuracy = 0.5 + 0.1 * (run.values["afcl-ridge"] == 0.1) + 0.01 * run.values["dirichlet-beta"]
        results = run_results((accuracy, accuracy, accuracy))
        fill(run, results | {"num_tasks": 2, "metrics": {"final_average_accuracy": accuracy}})
    choice = choices_of(suite)["ridge"]
    assert choice.values["afcl-ridge"] == 0.1
    assert choice.edges == ["afcl-ridge", "dirichlet-beta"]


def test_nothing_is_chosen_before_all_is_run_and_failures_are_told(write, tmp_path):
    suite = read_suite(write(variants=[NCM, HEAD, {"label": "avg", "method": "fedavg"}], select=SELECT), {})
    fill_selection(suite, {("head", 0.001, 0): 0.9, ("head", 0.005, 0): 0.8})
    assert choices_of(suite)["head"].chosen == ""
    failed = ["head/learning-rate=0.02/seed0", *(f"avg/learning-rate={rate}/seed0" for rate in RATES)]
    choices = choices_of(suite, failed)
    assert choices["head"].chosen == "learning-rate=0.001"
    assert "| head | 90.00 | 80.00 | failed | learning-rate=0.001 |" in (tmp_path / "out" / "selection.md").read_text()
    final = apply_choices(suite, suite.selection, choices)
    assert [run.variant for run in final.runs] == ["means", "head"]
    assert "Not run, as every run of the selection failed: avg." in final.notes


def test_values_that_have_not_finished_with_every_seed_are_not_chosen(write):
    """0.001 has 0.9 with seed 0 and failed with seed 1; 0.005 the other way round; 0.02 failed with both."""
    suite = read_suite(write(select=SELECT | {"seeds": [0, 1]}), {})
    finished = {("head", 0.001, 0): 0.9, ("head", 0.005, 1): 0.8}
    fill_selection(suite, finished)
    every = suite.selection.suite.runs
    failed = [run.name for run in every if (run.variant, run.values["learning-rate"], run.seed) not in finished]
    assert choices_of(suite, failed)["head"].chosen == ""


def test_runs_of_another_choice_are_refused(write):
    suite = read_suite(write(select=SELECT), {})
    fill_selection(suite, {("head", rate, 0): rate for rate in RATES})
    final = apply_choices(suite, suite.selection, choices_of(suite))
    fill(final.runs[1], run_results((0.5, 0.5, 0.5)), learning_rate=0.001)
    with pytest.raises(ConfigError, match=r"learning-rate = 0\.001; the suite says 0\.02"):
        Bench(final, 1, ["--in-process"], lambda line: None).run()


@pytest.mark.slow
def test_a_selection_and_what_follows_end_to_end(write, tmp_path, capsys):
    """Real runs: two of the selection, then the suite's own with what they chose; the second time nothing runs."""
    select = SELECT | {"keys": {"learning-rate": [0.001, 0.02]}}
    path = write(select=select)
    assert cli.main(["bench", str(path), "--select-only"]) == 0
    assert not (tmp_path / "out" / "table.md").exists()
    assert cli.main(["bench", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("started") == 4
    selected = read_results(tmp_path / "out" / "_selection" / "head" / "learning-rate=0.02" / "seed0")
    images = sum(selected["samples_per_task"])
    assert images < 96  # a fifth of the 384 training images, and not the 96 test images
    log = (tmp_path / "out" / "selection.md").read_text()
    assert f"0.2, {images} images, so that a standard error is up to {50 / images**0.5:.1f} points." in log
    config = yaml.safe_load((tmp_path / "out" / "head" / "seed0" / "config.yaml").read_text())
    assert (config["learning-rate"], config["validation-share"]) == (0.02, 0.0)
    assert "head: learning-rate=0.02 (edge of the grid: learning-rate)" in out
    assert "- head: learning-rate=0.02" in (tmp_path / "out" / "table.md").read_text()
    assert "Recommended: " in out
    assert (tmp_path / "out" / "core_minutes.png").exists()
    assert cli.main(["bench", str(path)]) == 0
    assert "started" not in capsys.readouterr().out


def test_others_without_a_run_beside_them_are_left_out_and_told(write, tmp_path):
    (tmp_path / "theirs.json").write_text(json.dumps(THEIRS | {"partition": "rare"}))
    partitions = [
        {"label": "iid", "partition": "iid", "variants": ["means"]},
        {"label": "rare", "dirichlet-beta": 1, "variants": ["head"]},
    ]
    suite = read_suite(write(partitions=partitions, select=SELECT, others=["theirs.json"]), {})
    (tmp_path / "out").mkdir()
    choices = choices_of(suite, failed=[run.name for run in suite.selection.suite.runs])
    final = apply_choices(suite, suite.selection, choices)
    assert (len(suite.others), final.others) == (1, [])
    assert final.notes[-1] == "Not shown, as no run of their partition is left: hgp (theirs)."
    fill(final.runs[0], run_results((0.5, 0.5, 0.5)))
    Bench(final, 1, ["--in-process"], lambda line: None)._report()
    assert list(table(tmp_path / "out")[1]) == [("means", "synthetic, iid")]


# ------------------------------------------------------------------------------------------------- parts of a suite


def test_variants_and_partitions_may_narrow_the_suite(write):
    partitions = [{"label": "iid", "partition": "iid"}, {"label": "rare", "dirichlet-beta": 1, "variants": ["head"]}]
    partitions[1]["seeds"] = [0, 1]
    variants = [NCM | {"seeds": [2]}, HEAD]
    suite = read_suite(write(seeds=[0, 1, 2], partitions=partitions, variants=variants), {})
    assert [run.name for run in suite.runs] == [
        "head/iid/seed0",
        "head/rare/seed0",
        "head/iid/seed1",
        "head/rare/seed1",
        "means/iid/seed2",
        "head/iid/seed2",
    ]


@pytest.mark.parametrize(("path", "kind"), [("x.npz", "npz"), ("photos", "folder")])
def test_data_of_the_command_line_say_what_they_are(write, path, kind):
    suite = write(common={})
    assert {run.config.dataset for run in read_suite(suite, {"data-dir": path}).runs} == {kind}
    given = read_suite(suite, {"data-dir": path, "dataset": "cifar100"})
    assert {run.config.dataset for run in given.runs} == {"cifar100"}


@pytest.mark.ci
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "suites").glob("*.yaml")))
def test_every_suite_of_the_project_can_be_read(name):
    without_data = name in ("cifar100-closed-form.yaml", "cifar100-full.yaml")
    assert read_suite(ROOT / "suites" / name, {"data-dir": "/data"} if without_data else {}).runs


def test_suites_of_the_project_are_what_they_say():
    cpu = read_suite(ROOT / "suites" / "cifar100-cpu.yaml", {})
    digits = read_suite(ROOT / "suites" / "digits.yaml", {})
    assert {run.config.method for run in cpu.runs} == {run.config.method for run in digits.runs} == set(METHODS)
    seeds = {name: sorted({run.seed for run in cpu.runs if run.variant == name}) for name in ("hgp", "fedewc")}
    assert seeds == {"hgp": [0, 1, 2], "fedewc": [0]}
    assert {run.config.data_dir for run in cpu.selection.suite.runs} == {"cifar100-select.npz"}
    full = read_suite(ROOT / "suites" / "cifar100-full.yaml", {"data-dir": "/data"})
    assert len({run.partition for run in full.runs}) == 9
    compare = read_suite(ROOT / "suites" / "compare.yaml", {"data-dir": "photos"})
    assert {run.config.dataset for run in [*compare.runs, *compare.selection.suite.runs]} == {"folder"}


# ------------------------------------------------------------------------------------------- other people's results

THEIRS: dict[str, Any] = {
    "label": "hgp",
    "source": "https://example.org, commit 1234567, run by us",
    "accuracy_matrix": [[0.9, None], [0.5, 0.75]],
    "bytes_up": 3_000_000,
    "bytes_down": 1_000_000,
    "seconds": 120,
}


def test_others_are_compared_with_runs_on_test_images(write, tmp_path):
    """Where one variant has a validation split of its own."""
    (tmp_path / "theirs.json").write_text(json.dumps(THEIRS))
    suite = read_suite(write(others=["theirs.json"], variants=[NCM | {"validation-share": 0.2}, HEAD]), {})
    for run in suite.runs:
        fill(run, run_results((0.5, 0.5, 0.5)))
    Bench(suite, 1, ["--in-process"], lambda line: None)._report()
    on_test_images = {("head", "synthetic"), ("hgp (theirs)", "synthetic")}
    assert set(table(tmp_path / "out")[1]) == {("means", "synthetic, validation images"), *on_test_images}


def test_others_are_in_table_and_pictures(write, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    for seed, last in enumerate((0.75, 0.85)):
        matrix = [[0.9, None], [0.5, last]]
        (folder / f"{seed}.json").write_text(json.dumps(THEIRS | {"accuracy_matrix": matrix, "seed": seed}))
    suite = read_suite(write(others=["theirs"]), {})
    fill(suite.runs[0], run_results((0.5, 0.5, 0.5)))
    Bench(suite, 1, ["--in-process"], lambda line: None)._report()
    _, rows = table(tmp_path / "out")
    # (0.5 + 0.75) / 2 = 62.5 and (0.5 + 0.85) / 2 = 67.5
    assert rows["hgp (theirs)", "synthetic"][:2] == ["0, 1", "65.00 ± 3.54"]
    assert rows["hgp (theirs)", "synthetic"][5] == "4.00 ± 0.00"
    assert rows["hgp (theirs)", "synthetic"][-1] == "2.000 ± 0.000 (wall)"
    text = (tmp_path / "out" / "table.md").read_text()
    assert "- hgp (theirs): https://example.org, commit 1234567, run by us" in text
    assert (tmp_path / "out" / "core_minutes.png").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": None}, "label = None must be a text"),
        ({"source": ""}, "source = '' must be a text"),
        ({"bytes": 1}, "entry 'bytes' does not exist; allowed: label, source"),
        ({"bytes_up": -1}, "bytes_up = -1 must be a number, 0 or more"),
        ({"seconds": "12"}, "seconds = '12' must be a number"),
        ({"accuracy_matrix": 5}, "accuracy_matrix = 5 must be a list of lists"),
        ({"accuracy_matrix": [[90.0, None], [50.0, 75.0]]}, "accuracies are fractions in 0..1"),
        ({"accuracy_matrix": [[True, None], [0.5, 0.75]]}, "accuracies must be fractions in 0..1"),
        ({"accuracy_matrix": [[0.9], [0.5, 0.75]]}, "the accuracy matrix is not square"),
        ({"accuracy_matrix": [[0.9, None], [None, None]]}, "after task 2 on task 1 is missing"),
        ({"accuracy_matrix": [[0.9, None], [None, 0.5]]}, "cannot be used"),
        ({"accuracy_matrix": [[0.9]]}, r"has 1 tasks, the suite's runs \{2\}"),
        ({"per_task_seen_accuracy": [0.9]}, "per_task_seen_accuracy must have 2 numbers"),
        ({"per_task_seen_accuracy": [0.9, 2]}, "accuracies must be fractions in 0..1"),
        ({"partition": "iid"}, "partition = 'iid' must be left out"),
        ({"seed": [0]}, r"seed = \[0\] must be a whole number"),
        ({"seed": "0"}, "seed = '0' must be a whole number"),
        ({"seed": -1}, "seed = -1 must be a whole number, 0 or more"),
        ({"bytes_up": 10**400}, "too large"),
        ({"samples_per_task": 5}, "samples_per_task must have 2 numbers"),
        ({"samples_per_task": [-1, 1.5]}, "samples_per_task must have whole numbers, 0 or more"),
        ({"per_task_seen_accuracy": 0.9}, "per_task_seen_accuracy must have 2 numbers"),
        ({"accuracy_matrix": [[0.9, None], {"a": 1}]}, "accuracy_matrix must be a list of lists"),
        ({"accuracy_matrix": [[0.9, 0.1], [0.5, 0.75]]}, "row 1 of accuracy_matrix must have null behind its first 1"),
        ({"per_task_seen_accuracy": [0.9, 0.49]}, r"has 0.49 after task 2, which is no mean of \[0.5, 0.75\]"),
    ],
)
def test_what_is_wrong_with_a_result_is_said(write, tmp_path, changes, message):
    (tmp_path / "theirs.json").write_text(json.dumps(THEIRS | changes))
    with pytest.raises(ConfigError, match=rf"theirs.json.*{message}"):
        read_suite(write(others=["theirs.json"]), {})


def test_a_seed_of_others_counts_once(write, tmp_path):
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(THEIRS | {"seed": seed}))
    with pytest.raises(ConfigError, match=r"a.json and .*c.json have the same label and seed"):
        read_suite(write(others=["a.json", "b.json", "c.json"]), {})
    assert len(read_suite(write(others=["a.json", "b.json"]), {}).others) == 2


def test_a_result_names_the_partition_it_belongs_to(write, tmp_path):
    path, partitions = (
        tmp_path / "theirs.json",
        [{"label": "iid", "partition": "iid"}, {"label": "b", "dirichlet-beta": 1}],
    )
    path.write_text(json.dumps(THEIRS))
    with pytest.raises(ConfigError, match="partition = '' must be iid or b"):
        read_suite(write(partitions=partitions, others=["theirs.json"]), {})
    path.write_text(json.dumps(THEIRS | {"partition": "b", "cpu_seconds": 90}))
    suite = read_suite(write(partitions=partitions, others=["theirs.json"]), {})
    Bench(suite, 1, ["--in-process"], lambda line: None)._report()
    assert table(tmp_path / "out")[1]["hgp (theirs)", "synthetic, b"][-1] == "1.500"  # minutes of one core
