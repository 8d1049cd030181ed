"""Suites: what is refused before anything runs, what is skipped and begun anew, how they end, and their table."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock, Timeout
from safetensors.torch import save_file

from benchmarks.keep_results import keep_all
from server_app.bench import runner as bench
from server_app.bench.runner import Bench, finished_run
from server_app.bench.suite import PlannedRun, read_suite
from server_app.cli import main as cli
from server_app.cli.bench import _run_options
from server_app.cli.main import _parser
from server_app.errors import ReportError
from server_app.run_files.checkpoints import write_checkpoint
from server_app.run_files.status import read_results
from server_app.run_files.writers import origin
from server_app.simulation.processes import Interrupted
from task.data.digests import data_digest
from task.data.load import load_dataset
from task.keys import ConfigError
from task.models.load import configured_backbone
from task.models.weights import build_vit
from tests.helpers.marks import rest_in_ci
from tests.helpers.own_data import paint
from tests.helpers.runs import interrupt, without_times
from tests.helpers.runs import run as run_whole
from tests.helpers.suites import HEAD, KEYS, NCM, fill, run_results, table

ROOT = Path(__file__).parents[3]


# ------------------------------------------------------------------------------------------------- reading a suite


def test_runs_are_variants_by_partitions_by_seeds(write, tmp_path):
    partitions = [{"label": "iid", "partition": "iid"}, {"label": "beta-1", "dirichlet-beta": 1}]
    variants = [NCM, HEAD | {"learning-rate": "1e-3", "num-tasks": 3}]
    suite = read_suite(write(seeds=[0, 7], partitions=partitions, variants=variants), {"num-clients": 5})
    assert [run.name for run in suite.runs] == [
        f"{variant}/{partition}/seed{seed}"
        for seed in (0, 7)
        for partition in ("iid", "beta-1")
        for variant in ("means", "head")
    ]
    last = suite.runs[-1]
    assert last.directory == tmp_path / "out" / "head" / "beta-1" / "seed7"
    assert last.setting == "synthetic, beta-1"
    keys = last.config.flat()
    assert keys["learning-rate"] == 0.001
    assert (keys["seed"], keys["dirichlet-beta"], keys["num-tasks"], keys["num-clients"]) == (7, 1.0, 3, 5)
    assert suite.runs[0].config.num_tasks == 2


def test_keys_of_a_variant_for_other_images(write):
    """Those of the method and of local training; not the problem, the folder, the seed and what is the default."""
    variant = {"label": "a", "method": "fedrda", "prompt": "lora", "rounds-per-task": 1, "prompt-blocks": "1,3-4"}
    variant |= {"local-epochs": 2, "num-tasks": 3, "threads": 1, "learning-rate-schedule": "auto"}
    variant |= {"image-size": 16, "backbone-weights": "random", "min-class-count": 2}
    (run, *_) = read_suite(
        write(seeds=[3], partitions=[{"label": "iid", "partition": "iid"}], variants=[variant]), {}
    ).runs
    assert set(run.method_keys.split(" ")) == {
        *("method=fedrda", "prompt=lora", "rounds-per-task=1", "prompt-blocks=1,3-4", "local-epochs=2"),
        *("image-size=16", "backbone-weights=random", "min-class-count=2"),
    }
    (usual, *_) = read_suite(write(variants=[{"label": "hgp", "method": "hgp"}]), {}).runs
    assert "method=hgp" in usual.method_keys.split(" ")  # told though it is the default
    frozen = {"label": "ncm", "method": "ncm", "rounds-per-task": 1}
    (ncm, *_) = read_suite(write(common=KEYS | {"local-epochs": 3}, variants=[frozen]), {}).runs
    assert not [key for key in ncm.method_keys.split(" ") if key.startswith("local-epochs")]  # it would be ignored


def test_relative_folders_are_those_of_runs(write, tmp_path, monkeypatch):
    monkeypatch.setenv("FCIL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.npz").touch()
    path = write(**{"output-dir": "runs/x", "common": KEYS | {"dataset": "npz"}})
    suite = read_suite(path, {"data-dir": "data.npz"})
    assert suite.folder == tmp_path / "home" / "runs" / "x"
    assert suite.runs[0].values["data-dir"] == str(tmp_path / "data.npz")  # runs have another working directory
    assert read_suite(path, {"data-dir": "data.npz", "output-dir": "/elsewhere"}).folder == Path("/elsewhere")
    with pytest.raises(ConfigError, match="output-dir = '' is not possible: name a folder"):
        read_suite(path, {"data-dir": "data.npz", "output-dir": ""})


def test_clients_are_as_many_as_a_run_has(write):
    assert read_suite(write(common={}), {}).runs[0].config.num_clients == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": [NCM, HEAD | {"lerning-rate": 1}]}, r"head/seed0: run key 'lerning-rate' does.*'learning-rate'"),
        ({"variants": [NCM, HEAD | {"learning-rate": 0}]}, r"head/seed0: learning-rate = 0.0 is not possible"),
        ({"variants": [NCM, HEAD | {"learning-rate": "x"}]}, r"head/seed0: learning-rate = 'x' is not possible"),
        ({"variants": [NCM, HEAD | {"learning-rate": [1]}]}, r"head/seed0: learning-rate = \[1\] is not possible"),
        ({"variants": [NCM, HEAD | {"hgp-scale": 2.0}]}, r"head/seed0: hgp-scale = 2.0 would be ignored"),
        ({"variants": [NCM, HEAD | {True: 1}]}, r"run key True of variant 'head' is no text"),
        ({"variants": [NCM, HEAD | {"seed": 1}]}, r"seed is no run key of variant 'head'"),
        ({"common": {"run-name": "x"}}, r"run-name is no run key of common"),
        ({"varients": []}, r"entry 'varients' does not exist. Did you mean 'variants'"),
        ({"variants": [{"label": "a", "variants": ["a"]}]}, "'a' has a list of variants, which only a partition may"),
        ({"variants": []}, r"variants = \[\] is not possible: it must be a list that is not empty"),
        ({"seeds": None}, r"entry 'seeds' is missing: give a list that is not empty"),
        ({"title": 5}, r"title = 5 is not possible: it must be a text"),
        ({"common": ["x"]}, r"common = \['x'\] is not possible: it must be run keys"),
        ({"seeds": [0, 0]}, r"seeds = \[0, 0\] has one of them twice"),
        ({"seeds": [-1]}, r"seed = -1 is not possible"),
        ({"seeds": [True]}, r"seed = True is not possible"),
        ({"seeds": [0, "1"]}, r"seed = '1' is not possible: it must be a whole number"),
        ({"variants": [NCM, NCM]}, r"variants: label 'means' is there twice"),
        ({"variants": [NCM, {"method": "ncm"}]}, r"variants: .* must be a label"),
        ({"variants": ["ncm"]}, r"variants: 'ncm' must be a label"),
        ({"variants": [NCM | {"label": "../x"}]}, r"label '../x' names a folder"),
        ({"variants": [NCM, NCM | {"label": "again"}]}, r"means/seed0 and again/seed0 are the same run"),
        (
            {"partitions": [{"label": "iid", "partition": "iid"}], "variants": [HEAD | {"partition": "dirichlet"}]},
            r"partition is set by partition 'iid' and by variant 'head'",
        ),
    ],
)
def test_mistakes_are_found_before_anything_runs(write, tmp_path, capsys, changes, message):
    path = write(**changes)
    with pytest.raises(ConfigError, match=message):
        read_suite(path, {})
    assert cli.main(["bench", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fcil: {path}: ")
    assert not (tmp_path / "out").exists()


def test_images_that_are_not_there_are_named_before_anything_runs(write, tmp_path, capsys):
    away = {"dataset": "folder", "data-dir": str(tmp_path / "away")}
    path = write(variants=[NCM, HEAD | away | {"backbone-weights": "random"}])
    assert cli.main(["bench", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"fcil: data-dir = '{tmp_path / 'away'}': there is no such folder for dataset 'folder'.\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.ci
def test_weights_that_cannot_be_had_are_told_of_before_anything_runs(write, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    timm = {"backbone": "vit_tiny_patch16_224", "image-size": 0}
    assert cli.main(["bench", str(write(common=KEYS | timm))]) == 2
    said = capsys.readouterr()
    assert "backbone-weights = 'auto': no pre-trained weights of 'vit_tiny_patch16_224'" in said.err
    assert "started" not in said.out


@pytest.mark.ci
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"backbone": "vit_tiny_patch16_224", "image-size": 20, "backbone-weights": "random"},
            "image-size = 20 is not possible: 'vit_tiny_patch16_224' needs a multiple of 16",
        ),
        ({"backbone": "vit_tiny_patch16_224", "image-size": 0, "backbone-weights": "FILE"}, "do not fit"),
    ],
)
def test_a_backbone_that_cannot_be_built_is_told_of_before_anything_runs(changes, words, write, tmp_path, capsys):
    torch.save({"cls_token": torch.zeros(1, 1, 3)}, tmp_path / "other.pt")
    changes = {name: str(tmp_path / "other.pt") if value == "FILE" else value for name, value in changes.items()}
    assert cli.main(["bench", str(write(common=KEYS | changes))]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert "started" not in out


def test_more_tasks_than_classes_are_told_of_before_anything_runs(write, tmp_path, capsys):
    """Of the suite's runs some have few enough."""
    assert cli.main(["bench", str(write(variants=[HEAD | {"num-tasks": 13}, NCM]))]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    problem = "num-tasks = 13: synthetic has 12 classes, and every task needs one at least"
    assert err == f"fcil: {problem}: set num-tasks to 12 or less.\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.ci
def test_images_in_both_parts_are_told_of(write, tmp_path, capsys):
    for name in ("cat", "dog"):
        paint(tmp_path / "pets" / name, 10)
    images = {"dataset": "folder", "data-dir": str(tmp_path / "pets"), "num-tasks": 2}
    cli.main(["bench", str(write(variants=[NCM | images], common={**KEYS, "augmentation": "none"}))])
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line.startswith("WARNING   4 of")]
    assert told == [
        "WARNING   4 of the 4 images to evaluate are training images too, byte by byte, so that accuracies are too "
        "high: keep one copy of each image"
    ]
    (doubt,) = (line for line in lines if line.startswith("4 of the images to evaluate are training images too"))
    assert lines.index(doubt) > lines.index(told[0])  # beside the recommendation, which has to be read with it
    assert doubt in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize("relative", [False, True])
def test_a_damaged_image_is_named_once_before_anything_runs(relative, write, tmp_path, capsys, monkeypatch):
    """A relative folder counts from the project's, in which the runs are."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr("server_app.run_keys.project_folder", lambda: tmp_path)
    for name in ("cat", "dog"):
        paint(tmp_path / "pets" / name, 10)
    (tmp_path / "pets" / "dog" / "003.png").write_bytes(b"no image")
    images = {"dataset": "folder", "data-dir": "pets" if relative else str(tmp_path / "pets")}
    path = write(variants=[NCM | images, HEAD | images])
    assert cli.main(["bench", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == f"reading the images in {tmp_path / 'pets'}\n"
    assert re.fullmatch(r"fcil: '.*/dog/003.png' cannot be read as an image .*\n", err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variants: [{label: a, method: ncm, method: hgp}]", "line 1: 'method' is there twice"),
        ("- 1", "this is a list"),
        ("a: [", "cannot be read"),
        ("!!python/object/apply:os.getcwd []", "cannot be read"),
    ],
)
def test_files_that_are_no_suite(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_suite(tmp_path / "bad.yaml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_suite(tmp_path / "absent.yaml", {})


def test_the_command_line_cannot_undo_what_a_label_says(write):
    with pytest.raises(ConfigError, match="method is set by variant 'means' and by the command line"):
        read_suite(write(), {"method": "hgp"})


# ------------------------------------------------------------------------------------------------ what is run


@pytest.fixture
def quick(monkeypatch):
    """Runs are small programs that note their beginning and end, and fail where a folder's name says so."""
    program = """
import json, sys, time
from pathlib import Path
folder, results = Path(sys.argv[1]), json.loads(sys.argv[2])
log = folder.parents[1] / "log.txt"
log.open("a").write(f"begins {folder.parent.name}\\n")
time.sleep(float(sys.argv[3]))
if "bad" in str(folder):
    sys.exit("fcil: the run failed: no quorum")
(folder / "results.json").write_text(json.dumps(results))
(folder / "config.yaml").write_text(sys.argv[4])
log.open("a").write(f"ends {folder.parent.name}\\n")
"""

    def with_pause(pause=0.0):
        results = json.dumps(run_results((0.9, 0.8, 0.7)) | {"metrics": {"final_average_accuracy": 0.75}})

        def command(self: Bench, run: PlannedRun, resume: bool) -> list[str]:
            words = [str(run.directory), results, str(pause), yaml.safe_dump(run.config.flat())]
            return [sys.executable, "-c", program, *words]

        monkeypatch.setattr(Bench, "_command", command)

    with_pause()
    return with_pause


def events(folder):
    return (folder / "log.txt").read_text().splitlines()


@pytest.mark.ci
def test_a_suite_on_validation_images_says_so(write, quick, capsys, tmp_path):
    partitions = [{"label": "even"}, {"label": "uneven", "dirichlet-beta": 0.1}]
    path = write(common=KEYS | {"validation-share": 0.25, "partition": "dirichlet"}, partitions=partitions)
    assert cli.main(["bench", str(path)]) == 0
    out = capsys.readouterr().out
    assert "finished  means/even/seed0: final average accuracy 75.0% on validation images, " in out
    assert {setting for _, setting in table(tmp_path / "out")[1]} == {
        f"synthetic, {partition}, validation images" for partition in ("even", "uneven")
    }


@pytest.mark.ci
def test_finished_runs_are_skipped_and_others_begun_anew(write, quick, capsys):
    path = write(seeds=[0, 1])
    first, half, failed, _ = read_suite(path, {}).runs
    results = run_results((0.5, 0.5, 0.5), seconds=900.0)
    results["seconds"]["features"] = 300.0  # which later runs find on the disk
    fill(first, results, device="cuda", threads=4)
    fill(half, run_results((0.5, 0.5, 0.5), status="running"))
    (half.directory / "rounds.jsonl").write_text("{}\n")
    fill(failed, run_results((0.5, 0.5, 0.5), status="failed"))
    kept = (first.directory / "results.json").read_text()
    assert cli.main(["bench", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    folder = first.directory.parents[1]
    expected = [
        f"4 runs, 1 of them finished already; results go to {folder}",
        "started   head/seed0",
        "finished  head/seed0: final average accuracy 75.0%, 0 s, answers that failed: 1; 2 left, about 10.0 min",
        "started   means/seed1",
        "finished  means/seed1: final average accuracy 75.0%, 0 s, answers that failed: 1; 1 left, about 0 s",
        "started   head/seed1",
        "finished  head/seed1: final average accuracy 75.0%, 0 s, answers that failed: 1; 0 left",
        f"{folder / 'table.md'}",
        f"{folder / 'report.html'}",
        "",
        "Recommendation: synthetic",
    ]
    assert [re.sub(r"\d+ s\b", "0 s", line) for line in out[: len(expected)]] == expected
    assert out[len(expected)].startswith("Most accurate: head, 75.0 ")  # means have 62.5: half of 50.0 + 75.0
    assert (first.directory / "results.json").read_text() == kept
    assert sorted(file.name for file in half.directory.iterdir()) == ["config.yaml", "results.json", "run.log"]


def test_a_run_that_writes_its_first_results_just_now_is_no_unreadable_one(write, monkeypatch):
    suite, said = read_suite(write(), {}), []

    def too_early(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "results.json").write_text("{}")
        raise ReportError("no run has written anything there")

    monkeypatch.setattr(bench, "load_run", too_early)
    assert (Bench(suite, 1, [], said.append)._load(suite.runs[0]), said) == (None, [])


@pytest.mark.ci
def test_with_resume_an_unfinished_run_goes_on_after_its_last_round(write, capsys):
    """Rounds that were over keep their times, and the end is that of a run without the interruption."""
    path = write(variants=[HEAD | {"rounds-per-task": 2}])
    (planned,) = read_suite(path, {}).runs
    run_whole(planned.values)
    uninterrupted = without_times(read_results(planned.directory))
    shutil.rmtree(planned.directory)
    interrupt(planned.values, cut_in_round=4)
    before = (planned.directory / "rounds.jsonl").read_text()
    assert cli.main(["bench", str(path), "--resume"]) == 0
    assert "resumed   head/seed0" in capsys.readouterr().out.splitlines()
    assert (planned.directory / "rounds.jsonl").read_text().startswith(before)
    ended = without_times(read_results(planned.directory))
    assert {**ended, "environment": 0} == {**uninterrupted, "environment": 0}


@pytest.mark.parametrize(
    ("hook", "message"),
    [("no-such-command", "there is no such command"), ("./notify.sh --now", "write the absolute path")],
)
def test_an_on_end_that_runs_cannot_use_is_refused_once(write, tmp_path, monkeypatch, capsys, hook, message):
    """Runs of a suite, and those that choose keys, do not have the caller's working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notify.sh").write_text("#!/bin/sh\n")
    (tmp_path / "notify.sh").chmod(0o755)
    select = {"keys": {"learning-rate": [0.1, 0.2]}, "common": {"validation-share": 0.3, "on-end": hook}}
    for path, words in ((write(variants=[NCM]), [f"on-end={hook}"]), (write(variants=[HEAD], select=select), [])):
        assert cli.main(["bench", str(path), *words]) == 2
        out, err = capsys.readouterr()
        assert (out, message in err) == ("", True)


REASONS = {
    "--no-resume": "--no-resume is given",
    "checkpoint": "no whole checkpoint",
    "same key": "another batch-size",
    "same code": "another git-revision",
    "same strategies": "another server-code-sha256",
    "same device": "another device",
}


@pytest.mark.parametrize("missing", rest_in_ci(["nothing", "--resume", *REASONS], ["nothing", "same key"]))
def test_an_unfinished_run_begins_anew_unless_all_is_as_it_was(write, quick, capsys, missing):
    path = write(variants=[HEAD])
    (planned,) = read_suite(path, {}).runs
    other = {"same code": {"git-revision": "0"}, "same strategies": {"server-code-sha256": "0"}}
    made_by = origin() | other.get(missing, {})
    changed = {"same key": {"batch_size": 3}, "same device": {"device": "cuda"}}.get(missing, {})
    fill(planned, run_results((0.5, 0.5, 0.5), status="failed"), made_by, **changed)
    (planned.directory / "run.log").write_text("a warning of before\n")
    if missing != "checkpoint":
        write_checkpoint(planned.directory / "checkpoint", 1, {})
    options = {"--resume": [], "same code": [], "--no-resume": ["--no-resume"]}.get(missing, ["--resume"])
    assert cli.main(["bench", str(path), *options]) == 0
    resumed = missing not in REASONS
    told = "resumed   head/seed0" if resumed else f"started   head/seed0, not resumed: {REASONS[missing]}"
    assert told in capsys.readouterr().out.splitlines()
    assert (planned.directory / "checkpoint").exists() == resumed
    assert ("of before" in (planned.directory / "run.log").read_text()) == resumed


def test_a_run_that_is_resumed_gets_what_may_change(write):
    suite = read_suite(write(variants=[HEAD]), {"round-timeout": 7200, "batch-size": 8})
    words = Bench(suite, 1, [], print)._command(suite.runs[0], resume=True)
    assert {f"resume={suite.runs[0].directory}", "round-timeout=7200"} <= set(words)
    assert not [word for word in words if word.startswith(("batch-size", "output-dir", "run-name"))]


@pytest.mark.parametrize("dataset", ["folder", "digits"])
def test_the_backbone_for_digits_on_other_images_is_warned_of_once(write, tmp_path, dataset):
    said = list[str]()
    path = {"data-dir": str(tmp_path)} if dataset == "folder" else {}
    suite = read_suite(write(common=KEYS | {"dataset": dataset, "backbone": "vit_glyphs"} | path), {})
    Bench(suite, 1, [], said.append)._plan()
    warned = [line.startswith("WARNING   backbone = 'vit_glyphs' is for digits") for line in said]
    assert sum(warned) == (dataset == "folder")


@pytest.mark.ci
def test_finished_runs_of_other_code_are_kept_and_told_of_in_one_line(write, quick, capsys):
    path = write(seeds=[0, 1])
    runs, now = read_suite(path, {}).runs, origin()
    other = [now | {"code-sha256": "0"}, now | {"versions": now["versions"] | {"torch": "1.0"}}, now]
    for run, made_by in zip(runs, other, strict=False):
        fill(run, run_results((0.5, 0.5, 0.5)), made_by)
    assert cli.main(["bench", str(path)]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert warnings == [
        "WARNING   2 of the finished runs were made by other code, versions or images, first means/seed0 "
        "(code-sha256); they are kept: remove their folders to run them anew"
    ]
    assert events(runs[0].directory.parents[1]) == ["begins head", "ends head"]
    assert cli.main(["bench", str(path)]) == 0
    assert "first means/seed0" in capsys.readouterr().out


@pytest.mark.ci
@pytest.mark.parametrize("now", ["the same images", "other images", "no images"])
def test_finished_runs_with_other_images_are_told_of(write, capsys, tmp_path, now):
    path, labels = tmp_path / "photos.npz", np.arange(80) % 4
    np.savez(path, images=np.zeros((80, 8, 8), np.uint8), labels=labels)
    suite = write(common=KEYS | {"dataset": "npz", "data-dir": str(path)})
    began_with = data_digest(load_dataset("npz", str(path), 1, 0.0, 0), whole_files=True)
    for run in read_suite(suite, {}).runs:
        fill(run, run_results((0.5, 0.5, 0.5)), origin() | {"data-sha256": began_with})
    if now == "other images":
        np.savez(path, images=np.ones((80, 8, 8), np.uint8), labels=labels)
    if now == "no images":
        path.unlink()
    load_dataset.cache_clear()
    assert cli.main(["bench", str(suite)]) == 0  # a table needs no images
    told = "2 of the finished runs were made by other code, versions or images, first means/seed0 (data-sha256);"
    assert (told in capsys.readouterr().out) == (now == "other images")


@pytest.mark.ci
def test_a_finished_suite_whose_images_cannot_be_read_any_more_has_its_table(write, capsys, tmp_path):
    """A link to nowhere, and a pipe, which would never be read to its end."""
    folder = tmp_path / "photos"
    for name in ("ant", "bee"):
        paint(folder / name, 12)
    suite = write(common=KEYS | {"dataset": "folder", "data-dir": str(folder)}, seeds=[0, 1])
    began_with = data_digest(load_dataset("folder", str(folder), 1, 0.0, 0), whole_files=True)
    for run in read_suite(suite, {}).runs:
        fill(run, run_results((0.5, 0.5, 0.5)), origin() | {"data-sha256": began_with})
    (folder / "ant" / "012.png").symlink_to("/nowhere.png")
    os.mkfifo(folder / "bee" / "012.png")
    load_dataset.cache_clear()
    assert cli.main(["bench", str(suite)]) == 0
    assert "(data-sha256)" in capsys.readouterr().out
    assert (tmp_path / "out" / "table.md").exists()


@pytest.mark.ci
def test_data_are_read_once_for_all_runs_of_a_finished_suite(write, monkeypatch, tmp_path):
    path = tmp_path / "photos.npz"
    np.savez(path, images=np.zeros((80, 8, 8), np.uint8), labels=np.arange(80) % 4)
    suite = write(common=KEYS | {"dataset": "npz", "data-dir": str(path)}, seeds=[0, 1, 2])
    for run in read_suite(suite, {}).runs:
        fill(run, run_results((0.5, 0.5, 0.5)), origin() | {"data-sha256": "0"})
    read, load = [], load_dataset.__wrapped__
    cached = functools.lru_cache(2)(lambda *args: read.append(args) or load(*args))
    monkeypatch.setattr("task.data.load.load_dataset", cached)
    assert cli.main(["bench", str(suite)]) == 0
    assert len(read) == 1
    assert cached.cache_info().currsize == 0


@pytest.mark.ci
def test_a_failed_run_stops_no_other(write, quick, capsys, tmp_path):
    path = write(variants=[NCM | {"label": "bad"}, HEAD])
    assert cli.main(["bench", str(path)]) == 1
    out, err = capsys.readouterr()
    assert f"FAILED    bad/seed0: the run failed: no quorum (see {tmp_path / 'out/bad/seed0/run.log'}); 1 left" in out
    assert "finished  head/seed0" in out
    assert err == "fcil: failed: bad/seed0\n"
    assert events(tmp_path / "out") == ["begins bad", "begins head", "ends head"]
    assert cli.main(["bench", str(path)]) == 1  # once more, and only the one that failed
    assert events(tmp_path / "out")[3:] == ["begins bad"]


@pytest.mark.ci
def test_a_table_that_cannot_be_written_ends_no_run(write, quick, monkeypatch, tmp_path):
    def full(*args):
        if started:
            raise OSError(28, "No space left on device")

    started, said = list[Path](), list[str]()
    monkeypatch.setattr("server_app.bench.runner.write_comparison", full)
    monkeypatch.setattr(Bench, "_start", lambda self, run, start=Bench._start: (started.append(run), start(self, run)))
    assert Bench(read_suite(write(), {}), 1, ["--in-process"], said.append).run() == []
    assert sum(line.startswith("WARNING   the table could not be written: ") for line in said) == 2
    assert events(tmp_path / "out") == ["begins means", "ends means", "begins head", "ends head"]


def test_a_run_that_is_killed_is_a_failed_one(write, quick, monkeypatch):
    program = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(Bench, "_command", lambda self, run, resume: [sys.executable, "-c", program])
    said = []
    failed = Bench(read_suite(write(), {}), 1, ["--in-process"], said.append).run()
    assert [run.name for run in failed] == ["means/seed0", "head/seed0"]
    assert "FAILED    means/seed0: ended by SIGKILL" in said[2]


@pytest.mark.ci
def test_jobs_are_runs_at_a_time(write, quick, tmp_path):
    variants = [HEAD | {"label": f"v{n}", "learning-rate": 0.1 + n} for n in range(4)]
    quick(pause=2.0)
    assert cli.main(["bench", str(write(variants=variants)), "--jobs", "2"]) == 0
    at_work, most = set(), 0
    for line in events(tmp_path / "out"):
        what, name = line.split()
        (at_work.add if what == "begins" else at_work.discard)(name)
        most = max(most, len(at_work))
    assert most == 2


def test_what_remains_is_shared_by_jobs(write, quick):
    suite = read_suite(write(seeds=[0, 1, 2]), {})
    for run, seconds in zip(suite.runs, (30.0, 90.0), strict=False):
        fill(run, run_results((0.5, 0.5, 0.5), seconds))
    bench_run = Bench(suite, 2, ["--in-process"], lambda line: None)
    bench_run._plan()
    assert bench_run._remaining() == "4 left, about 2.0 min"  # 2 * 30 s + 2 * 90 s, two at a time


@pytest.mark.parametrize(
    ("words", "way"),
    [([], ["--in-process"]), (["--flower"], []), (["--flower", "--gpus-per-client=0.25"], ["--gpus-per-client=0.25"])],
)
def test_runs_are_fcil_runs(write, monkeypatch, words, way):
    monkeypatch.setattr("server_app.cli.bench.cluster_address", lambda: "10.0.0.7:6379")
    path = write(common=KEYS | {"augmentation": "none"})
    options = _run_options(_parser().parse_args(["bench", str(path), *words]))
    suite = read_suite(path, {})
    words = Bench(suite, 1, options, print)._command(suite.runs[0], resume=False)
    assert words[:4] == [sys.executable, "-m", "server_app.cli", "run"]
    assert words[4 : 4 + len(way)] == way
    assert {"method=ncm", "augmentation=none", "seed=0", "run-name=seed0"} < set(words[4 + len(way) :])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": 0.5}, "learning-rate = 0.5; the suite says 0.01"),
        ({"backbone_weights": "random"}, "backbone-weights = 'random'; the suite says 'auto'"),
        ({"seed": 1}, "seed = 1; the suite says 0"),
    ],
)
def test_a_finished_run_of_other_keys_is_an_error_that_names_them(write, quick, tmp_path, capsys, changed, message):
    path = write()
    head = read_suite(path, {}).runs[1]
    fill(head, run_results((0.5, 0.5, 0.5)), **changed)
    assert cli.main(["bench", str(path)]) == 2
    assert f"{head.directory} holds a finished run with {message}" in capsys.readouterr().err
    assert not (tmp_path / "out" / "log.txt").exists()


def test_a_mistyped_path_leads_to_no_advice_to_remove_results(write, tmp_path):
    path = write(common={"dataset": "npz", "data-dir": str(tmp_path / "there.npz")}, variants=[NCM])
    (run,) = read_suite(path, {}).runs
    fill(run, run_results((0.5, 0.5, 0.5)))
    (away,) = read_suite(
        write(common={"dataset": "npz", "data-dir": str(tmp_path / "away.npz")}, variants=[NCM]), {}
    ).runs
    with pytest.raises(ConfigError, match=r"away\.npz' is not a readable \.npz file .*No such file"):
        finished_run(away)


@pytest.mark.ci
@pytest.mark.parametrize("weights", ["the same weights", "other weights"])
def test_images_and_weights_may_have_moved_since_a_run(write, tmp_path, weights):
    """Their digests are compared, not their paths: of a finished run, and of one to resume, which is told the paths."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    np.savez(before / "photos.npz", images=np.zeros((80, 8, 8), np.uint8), labels=np.arange(80) % 4)
    save_file(build_vit("vit_glyphs", "auto")[0].state_dict(), before / "vit.safetensors")
    lies = [{"data-dir": f"{at}/photos.npz", "backbone-weights": f"{at}/vit.safetensors"} for at in (before, after)]
    (run,) = read_suite(write(common=KEYS | {"dataset": "npz"} | lies[0], variants=[HEAD]), {}).runs
    began_with = {
        "data-sha256": data_digest(load_dataset("npz", f"{before}/photos.npz", 1, 0.0, 0), whole_files=True),
        "backbone-sha256": configured_backbone(run.config).sha256 if weights == "the same weights" else "0",
    }
    fill(run, run_results((0.5, 0.5, 0.5)), origin() | began_with)
    before.rename(after)
    suite = read_suite(write(common=KEYS | {"dataset": "npz"} | lies[1], variants=[HEAD]), {})
    (moved,) = suite.runs
    if weights == "other weights":
        with pytest.raises(ConfigError, match=r"backbone-weights = '.*before/vit.*; the suite says '.*after/vit"):
            finished_run(moved)
        return
    assert finished_run(moved) is not None
    resumed = Bench(suite, 1, [], print)._command(moved, resume=True)
    assert {f"{name}={path}" for name, path in lies[1].items()} <= set(resumed)


def test_a_finished_run_may_have_waited_otherwise(write):
    (run, _) = read_suite(write(), {}).runs
    fill(run, run_results((0.5, 0.5, 0.5)), start_timeout=99.0, round_timeout=99.0)
    assert bench.finished_run(run) is not None


def test_a_key_that_a_run_is_too_old_to_have_had_its_default(write):
    (run, _) = read_suite(write(), {}).runs
    fill(run, run_results((0.5, 0.5, 0.5)))
    keys = yaml.safe_load((run.directory / "config.yaml").read_text())
    del keys["gradient-clip"]
    (run.directory / "config.yaml").write_text(yaml.safe_dump(keys))
    assert bench.finished_run(run) is not None
    (changed, _) = read_suite(write(), {"gradient-clip": 2.0}).runs
    with pytest.raises(ConfigError, match=r"gradient-clip = 1.0; the suite says 2.0"):
        bench.finished_run(changed)
    (run.directory / "config.yaml").unlink()
    assert bench.finished_run(run) is None


@pytest.mark.ci
def test_a_folder_serves_one_suite_at_a_time(write, quick, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        assert cli.main(["bench", str(write())]) == 1
    assert f"{tmp_path / 'out'} is in use" in capsys.readouterr().err
    assert cli.main(["bench", str(write())]) == 0


# ---------------------------------------------------------------------------------------------- how a suite ends


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def lock_is_free(folder):
    try:
        with FileLock(folder / ".lock", timeout=0):
            return True
    except Timeout:
        return False


def start(path):
    return subprocess.Popen(
        [sys.executable, "-m", "server_app.cli", "bench", str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_suite_that_was_ended_is_continued(write, tmp_path):
    """Real runs: one finishes, the next is ended in its midst; then only the latter goes on, and has all its rounds."""
    path = write(variants=[NCM, HEAD | {"rounds-per-task": 15}])
    means, head = (tmp_path / "out" / name / "seed0" for name in ("means", "head"))
    process = start(path)
    wait_for(lambda: (head / "rounds.jsonl").exists() and len((head / "rounds.jsonl").read_text().splitlines()) > 2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err == "fcil: stopped; the same command continues the suite\n"
    assert "finished  means/seed0" in out
    assert lock_is_free(tmp_path / "out")
    assert lock_is_free(head)  # the run is gone
    assert read_results(head)["status"] == "failed"
    _, rows = table(tmp_path / "out")
    assert rows["means", "synthetic"][0] == "0"
    (head / "rounds.jsonl").open("a").write("a line of the run that was ended\n")

    kept = (means / "results.json").stat()
    assert cli.main(["bench", str(path)]) == 0
    assert (means / "results.json").stat().st_mtime_ns == kept.st_mtime_ns
    lines = [json.loads(line) for line in (head / "rounds.jsonl").read_text().splitlines()]
    assert [(line["task"], line["round"]) for line in lines] == [(t, r) for t in (1, 2) for r in range(1, 16)]
    _, rows = table(tmp_path / "out")
    assert [key[0] for key in rows] == ["means", "head"]
    assert float(rows["means", "synthetic"][1]) > 90
    for name in ("accuracy.png", "matrices.png", "communication.png", "report.html"):
        assert (tmp_path / "out" / name).stat().st_size > 0


def test_a_run_that_another_process_is_at_is_not_deleted(write, quick, tmp_path, capsys):
    """As when somebody resumes one by hand, and continues the suite meanwhile."""
    path = write()
    run, _ = read_suite(path, {}).runs
    fill(run, run_results((0.5, 0.5, 0.5), status="running"))
    with FileLock(run.directory / ".lock"):
        assert cli.main(["bench", str(path)]) == 1
    assert f"{run.directory} is in use" in capsys.readouterr().err
    assert (run.directory / "results.json").exists()
    assert not (tmp_path / "out" / "log.txt").exists()


def test_a_run_that_is_resumed_by_hand_meanwhile_is_not_deleted(write, quick, monkeypatch, capsys):
    path, original = write(), Bench._plan
    run, other = read_suite(path, {}).runs
    fill(run, run_results((0.5, 0.5, 0.5), status="running"))
    lock = FileLock(run.directory / ".lock")
    monkeypatch.setattr(Bench, "_plan", lambda self: (original(self), lock.acquire()))
    assert cli.main(["bench", str(path)]) == 1
    lock.release()
    assert (run.directory / "results.json").exists()
    assert f"FAILED    {run.name}: {run.directory} is in use" in capsys.readouterr().out
    assert (other.directory / "run.log").exists()


def test_a_file_in_the_place_of_the_folder_is_named_with_its_key(write, quick, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert cli.main(["bench", str(write())]) == 2
    out = f"'{tmp_path / 'out'}'"
    assert f"output-dir = {out} cannot be used: {out} is a file, not a folder" in capsys.readouterr().err


def test_a_run_that_outlives_its_suite_keeps_the_folder(write, quick, tmp_path, capsys):
    """SIGKILL leaves a run behind, perhaps one that has not locked its folder yet: no second suite may start there."""
    run = "import time; print('up', flush=True); time.sleep(6)"
    program = "import sys; from server_app.bench import runner, suite; from pathlib import Path\n"
    program += (
        f"runner.Bench._command = lambda self, run, resume: [sys.executable, '-c', {run!r}, str(run.directory)]\n"
    )
    program += "runner.Bench(suite.read_suite(Path(sys.argv[1]), {}), 1, [], print).run()"
    process = subprocess.Popen([sys.executable, "-c", program, str(write())], cwd=ROOT, stdout=subprocess.DEVNULL)
    folder = tmp_path / "out" / "means" / "seed0"
    wait_for(lambda: (folder / "run.log").exists() and (folder / "run.log").read_text() == "up\n")
    process.kill()
    process.wait()
    assert cli.main(["bench", str(write())]) == 1
    assert f"{tmp_path / 'out'} is in use" in capsys.readouterr().err
    assert (folder / "run.log").read_text() == "up\n"


@pytest.mark.ci
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_being_stopped_ends_runs_that_do_not_listen(write, monkeypatch, tmp_path):
    program = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    program += "open(sys.argv[2], 'w').write('{\"status\": \"running\"}')\n"
    program += "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    pid, path = tmp_path / "pid", write()
    results = read_suite(path, {}).runs[0].directory / "results.json"
    words = [sys.executable, "-c", program, str(pid), str(results)]
    monkeypatch.setattr(Bench, "_command", lambda self, run, resume: words)
    monkeypatch.setattr(bench, "PATIENCE", 0.5)
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if pid.exists() and pid.read_text():
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(bench.time, "sleep", lambda s, real=time.sleep: (real(s), sleep(s)))
    with pytest.raises(Interrupted):
        Bench(read_suite(path, {}), 1, ["--in-process"], lambda line: None).run()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert json.loads(results.read_text()) == {"status": "failed", "error": "stopped with its suite"}


def test_being_stopped_leaves_a_run_the_time_to_tell_the_operator(write, monkeypatch, tmp_path):
    """Its command is a process that it starts only then."""
    telling = f"sleep 1; echo told > {tmp_path / 'told'}"
    program = "import signal, subprocess, time\n"
    program += f"signal.signal(15, lambda *_: exit(subprocess.call({telling!r}, shell=True)))\n"
    program += f"open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(60)"
    monkeypatch.setattr(Bench, "_command", lambda self, run, resume: [sys.executable, "-c", program])

    def sleep(seconds: float, real: Callable[[float], None] = time.sleep) -> None:
        real(seconds)
        if (tmp_path / "up").exists():
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(bench.time, "sleep", sleep)
    with pytest.raises(Interrupted):
        Bench(read_suite(write(), {}), 1, ["--in-process"], lambda line: None).run()
    assert (tmp_path / "told").exists()


# ------------------------------------------------------------------------------------------------------- the table


def test_table_against_numbers_worked_out_by_hand(write, tmp_path):
    path = write(seeds=[0, 1, 2], partitions=[{"label": "iid", "partition": "iid"}])
    suite = read_suite(path, {})
    accuracies = {0: (0.9, 0.7, 0.5), 1: (0.9, 0.8, 0.8), 2: (0.6, 0.6, 0.8)}
    for run in suite.runs:
        if run.variant == "means":
            fill(run, run_results(accuracies[run.seed], seconds=10.0 * (run.seed + 1), up=1000 * (run.seed + 1)))
        elif run.seed < 2:  # the one of seed 1 failed
            fill(run, run_results((0.5, 0.25, 0.75), status="finished" if run.seed == 0 else "failed"))
    bench = Bench(suite, 1, ["--in-process"], lambda line: None)
    bench._report()
    recommended = bench.recommendation["Recommendation: synthetic, iid"]
    assert f"Run keys of means: {suite.runs[0].method_keys}" in recommended
    header, rows = table(tmp_path / "out")
    assert list(rows) == [("means", "synthetic, iid"), ("head", "synthetic, iid")]
    shown = dict(zip(header[2:], rows["means", "synthetic, iid"], strict=True))
    assert shown == {
        "Seeds": "0, 1, 2",
        # (0.7 + 0.5) / 2, 0.8, 0.7: 60, 80, 70
        "Final average accuracy, %": "70.00 ± 10.00",
        # (0.9 + 0.6) / 2, (0.9 + 0.8) / 2, (0.6 + 0.7) / 2: 75, 85, 65
        "Average incremental accuracy, %": "75.00 ± 10.00",
        # (0.7 + 3 * 0.5) / 4, 0.8, (0.6 + 3 * 0.8) / 4: 55, 80, 75; deviations -15, 10, 5; sqrt(350 / 2)
        "Last accuracy, %": "70.00 ± 13.23",
        # 0.9 - 0.7, 0.9 - 0.8, 0.6 - 0.6: 20, 10, 0
        "Forgetting, points": "10.00 ± 10.00",
        "Traffic, MB": "5.00 ± 0.00",
        "kB up per client and round": "2.0 ± 1.0",
        "kB down per client and round": "0.5 ± 0.0",
        "Seconds": "20.0 ± 10.0",
        "Core-minutes": "0.333 ± 0.167 (wall)",
    }
    assert rows["head", "synthetic, iid"] == [
        "0 (and 1 unfinished)",
        *("50.00", "50.00", "62.50", "25.00", "5.00", "1.0", "0.5", "60.0", "1.000 (wall)"),
    ]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<h1>Two &lt;methods&gt;</h1>" in page
    assert "70.00 ± 13.23" in page


def test_half_a_run_of_an_earlier_go_is_not_in_the_table(write, tmp_path):
    suite = read_suite(write(seeds=[0, 1]), {})
    fill(suite.runs[0], run_results((0.5, 0.5, 0.5)))
    fill(suite.runs[2], run_results((0.5, 0.5, 0.5), status="failed"))
    go = Bench(suite, 1, ["--in-process"], lambda line: None)
    go._plan()
    go._report()
    assert table(tmp_path / "out")[1]["means", "synthetic"][0] == "0"


@pytest.mark.parametrize("text", ["{", '{"schema": 1, "status": "finished", "metrics": 3}'])
def test_results_that_are_none_are_named_once_and_stop_no_other_run(write, quick, monkeypatch, tmp_path, capsys, text):
    path, write_results = write(), Bench._command
    first, second = (run.name for run in read_suite(path, {}).runs)

    def command(self: Bench, run: PlannedRun, resume: bool) -> list[str]:
        program = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
        words = [sys.executable, "-c", program, str(run.directory / "results.json"), text]
        return words if run.name == first else write_results(self, run, resume)

    monkeypatch.setattr(Bench, "_command", command)
    assert cli.main(["bench", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    [warning] = [line for line in lines if "results.json" in line]
    assert warning.startswith("WARNING")
    assert f"{first}/results.json is no" in warning
    assert [line.split(":")[0] for line in lines if line.startswith(("FAILED", "finished"))] == [
        f"FAILED    {first}",
        f"finished  {second}",
    ]
    _, rows = table(tmp_path / "out")
    assert [row[1] for row in rows.values()] == ["-", "75.00"]  # the final average accuracy


def test_what_may_be_wanted_still_is_not_deleted(write, quick, capsys):
    path = write()
    first, second = (run.directory for run in read_suite(path, {}).runs)
    for folder, name in ((first, "notes.txt"), (second, "results.json")):
        folder.mkdir(parents=True)
        (folder / name).write_text("mine")
    assert cli.main(["bench", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"FAILED    means/seed0: its folder holds files that are of no run: move {first} away" in out
    assert f"FAILED    head/seed0: its results.json is damaged: move {second} away" in out
    assert (first / "notes.txt").read_text() == (second / "results.json").read_text() == "mine"


def test_a_suite_without_any_run_has_its_table_too(write, tmp_path):
    Bench(read_suite(write(), {}), 1, ["--in-process"], lambda line: None)._report()
    _, rows = table(tmp_path / "out")
    assert rows["means", "synthetic"] == ["-"] * 10


def test_a_suite_goes_on_with_runs_in_their_small_form(write, tmp_path):
    suite = read_suite(write(), {})
    for planned, status in zip(suite.runs, ("finished", "failed"), strict=True):
        fill(planned, run_results((0.9, 0.8, 0.7), status=status) | {"class_names": ["a"], "confusion": [[1]]})
    assert keep_all(tmp_path / "out", tmp_path / "kept") == [Path("means/seed0")]
    assert keep_all(tmp_path / "kept", tmp_path / "again") == [Path("means/seed0")]
    files = [tmp_path / name / "means" / "seed0" / "results.json" for name in ("kept", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    first, second = read_suite(write(), {"output-dir": str(tmp_path / "kept")}).runs
    kept = finished_run(first)
    assert kept is not None
    assert kept.results["confusion"] == []
    assert kept.matrix.tolist()[1] == [0.8, 0.7]
    assert finished_run(second) is None
