"""Reports of finished, running and failed runs, comparisons over seeds, and what people are told about broken files."""

import base64
import dataclasses
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from PIL import Image

import server_app.report
from server_app.cli import main as cli
from server_app.errors import PicturesUnavailable, ReportError
from server_app.report import figures, heatmaps, tradeoffs
from server_app.report.compare import Group, comparison_table, group_runs
from server_app.report.pages import single_page
from server_app.report.runs import load_run
from server_app.report.write import write_report
from server_app.rounds.progress import summary

MATRIX = [[0.80, None, None], [0.90, 0.70, None], [0.60, 0.75, 0.45]]
SEEN = [0.80, 0.80, 0.5625]
SINGLE = ["accuracy.png", "forgetting.png", "report.html"]
COMPARISON = ["accuracy.png", "matrices.png", "communication.png", "core_minutes.png", "table.md", "report.html"]


def results(done=3, **changes):
    """A results.json of schema 1: three tasks, two rounds each, of which ``done`` tasks are finished."""
    rounds = [
        {
            "task": task,
            "round": number,
            "participants": ["alice", "bob"],
            "failures": [{"name": "carol", "reason": "out of memory"}] if (task, number) == (1, 2) else [],
            "train_loss": 1.25,
            "bytes_up": 250_000,
            "seconds": 2.0,
            "server": {"rebalance_loss": 0.375},
        }
        for task in range(1, done + 1)
        for number in (1, 2)
    ]
    entries = {
        "schema": 1,
        "status": "finished" if done == 3 else "running",
        "method": "hgp",
        "dataset": "digits",
        "seed": 0,
        "num_tasks": 3,
        "rounds_per_task": 2,
        "class_order": [2, 0, 1, 3],
        "tasks": [[2, 0], [1], [3]],
        "class_names": ["zero", "one", "two", "three"],
        "accuracy_matrix": [row if i < done else [None] * 3 for i, row in enumerate(MATRIX)],
        "per_task_seen_accuracy": [a if i < done else None for i, a in enumerate(SEEN)],
        "metrics": {},
        "communication": {"bytes_up": 2_000_000, "bytes_down": 3_500_000, "bytes_up_per_client_round": 1500},
        "seconds": {"total": 61.25},
        "rounds": rounds,
        "environment": {"python": "3.11", "packages": {"torch": "2.5"}},
    }
    return entries | changes


@pytest.fixture
def make_run(tmp_path):
    """Writes a run directory and returns it; ``config`` None leaves config.yaml out."""

    def make(name="run", config=None, **changes):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(results(**changes)))
        if config is not None:
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return folder

    return make


class Page(HTMLParser):
    """Collects the text, the attributes and the tables of a page; fails on a tag that is not closed in order."""

    VOID = ("meta", "img", "br", "hr", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.attributes, self.tags, self.rows = [], "", [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def row(self, *start):
        """The one table row that begins with these cells."""
        (match,) = [row for row in self.rows if row[: len(start)] == list(start)]
        return match


def page_of(folder, name="report.html"):
    return Page((folder / name).read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------------- one run


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_one_run_gets_its_files_in_its_folder(make_run, done):
    folder = make_run(done=done)
    assert write_report([folder]) == [folder / name for name in SINGLE]
    assert sorted(p.name for p in folder.iterdir()) == sorted([*SINGLE, "results.json"])
    for name in SINGLE[:2]:
        content = (folder / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert 600 < width < 2500
        assert 600 < height < 2500


def test_one_run_may_be_written_elsewhere(make_run, tmp_path):
    folder, elsewhere = make_run(), tmp_path / "new" / "deep"
    assert write_report([folder], elsewhere) == [elsewhere / name for name in SINGLE]
    assert [p.name for p in folder.iterdir()] == ["results.json"]


def test_page_shows_the_run(make_run):
    folder = make_run(config={"prompt": "shared", "num-tasks": 3, "versions": {"flwr": "1.41"}})
    write_report([folder])
    page = page_of(folder)
    assert "hgp on digits" in page.text
    assert "This run" not in page.text
    assert page.row("final_average_accuracy")[-1] == "60.00 %"
    assert page.row("forgetting")[-1] == "12.50 %"
    assert page.row("last_accuracy")[-1] == "56.25 %"
    assert page.row("average_seen_accuracy")[-1] == "72.08 %"
    assert page.row("3", "60.0")[1:] == ["60.0", "75.0", "45.0", "56.2", "60.0"]
    assert page.row("1", "two, zero")
    head = page.row("Task", "Round", "Participants")
    assert head[3:] == ["Failures", "Train loss", "Bytes up", "Seconds", "Rebalance loss"]
    assert page.row("1", "2", "2", "1") == ["1", "2", "2", "1", "1.25", "250.00 kB", "2", "0.375"]
    assert page.row("1", "2", "carol")[-1] == "out of memory"
    assert page.row("bytes_up") == ["bytes_up", "2.00 MB"]
    assert page.row("bytes_up_per_client_round") == ["bytes_up_per_client_round", "1.50 kB"]
    assert page.row("total") == ["total", "61.25"]
    assert page.row("prompt") == ["prompt", "shared"]
    assert page.row("num-tasks") == ["num-tasks", "3"]
    assert page.row("versions.flwr") == ["versions.flwr", "1.41"]
    assert page.row("packages.torch") == ["packages.torch", "2.5"]
    assert ("span", "title", "alice, bob") in page.attributes


def test_page_is_self_contained(make_run):
    folder = make_run()
    write_report([folder])
    page = page_of(folder)
    assert not {"script", "link", "iframe", "object", "a", "base"} & set(page.tags)
    sources = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "data")]
    assert len(sources) == 2
    for source, name in zip(sources, SINGLE, strict=False):
        kind, data = source.split(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True) == (folder / name).read_bytes()
    assert not re.search(r"https?:|url\(|@import", (folder / "report.html").read_text())
    assert page.tags.count("html") == page.tags.count("main") == 1


def test_page_names_tasks_that_are_not_learned(make_run):
    folder = make_run(tasks_not_learned=[1, 3])
    write_report([folder])
    assert "Not learned: tasks 1, 3. No client with its images has trained" in " ".join(page_of(folder).text.split())


def test_page_and_table_say_what_was_not_measured(make_run):
    whole = make_run("whole", seed=0, samples_per_task=[100, 100, 200])
    matrix = json.loads((whole / "results.json").read_text())["accuracy_matrix"]
    matrix[2][:2] = [None, None]
    seen = [0.9, 0.8, None]
    changes = {"accuracy_matrix": matrix, "per_task_seen_accuracy": seen, "samples_per_task": [100, 100, 200]}
    gapped = make_run("gapped", seed=1, **changes)
    write_report([gapped])
    text = " ".join(page_of(gapped).text.split())
    assert "Not measured: after task 3, on tasks 1, 2. Nodes that hold test images of these tasks were away, or" in text
    assert "recognises" not in text
    assert load_run(gapped).metrics == {}
    table = comparison_table(group_runs([load_run(whole), load_run(gapped)]))[1]
    assert [row[2] for row in table] == ["0, 1 (1 with accuracies missing)"]
    assert load_run(whole).metrics["final_average_accuracy"] == pytest.approx(float(table[0][3]) / 100)


def test_page_says_where_fewer_images_were_evaluated(make_run):
    counts = {"samples_after_task": [[100], [90, 100], [100, 100, 7]]}
    counts["samples_away_after_task"] = [[0], [10, 0], [0, 0, 193]]
    folder = make_run(**counts)
    write_report([folder])
    text = " ".join(page_of(folder).text.split())
    assert "fewer test images than nodes hold: after task 2 on 190 of 200, after task 3 on 207 of 400." in text
    row = comparison_table(group_runs([load_run(folder)]))[1][0]
    assert row[2] == "0 (1 measured on fewer test images, as nodes were away)"
    away = "measured on fewer test images, as nodes were away: after task 2 on 190 of 200, task 3 on 207 of 400"
    assert away in summary(folder)
    for run in (load_run(folder), load_run(make_run("whole"))):
        shown = " ".join(text.get_text() for text in figures.accuracy_figure(run).texts)
        assert ("after some tasks on fewer test images" in shown) == bool(run.incomplete)


def test_folders_named_by_seed_are_no_suite_if_methods_differ(make_run):
    """A suite's labels stay, whatever else its runs differ in, as they may come from several versions."""
    seeds = [make_run(f"{label}/seed{s}", seed=s, config={"threads": s}) for label in ("a", "b") for s in (0, 1)]
    suite = group_runs(list(map(load_run, seeds)))
    assert {group.label: len(group.runs) for group in suite} == {"a": 2, "b": 2}
    other = make_run("c/seed0"), make_run("c/seed1", method="ncm")
    mixed = group_runs(list(map(load_run, [*seeds, *other])))
    assert {group.label: len(group.runs) for group in mixed} == {"hgp": 5, "ncm": 1}


def test_single_values_of_results_that_are_no_run_keys_are_no_settings(make_run):
    settings = load_run(make_run(status="failed", error="the disk is full", copied_test_images=3)).settings
    assert settings["seed"] == 0
    assert not {"schema", "status", "error", "copied-test-images"} & settings.keys()


def test_a_folder_below_a_home_that_is_not_there_does_not_end_a_report(make_run, tmp_path):
    folders = [make_run("a"), make_run("b", seed=1), Path("~nobody-has-this-name/x")]
    write_report(folders, tmp_path / "out")
    assert (tmp_path / "out" / "table.md").exists()


@pytest.mark.ci
def test_pages_tell_of_copied_test_images(make_run, tmp_path):
    folder = make_run(copied_test_images=35)
    write_report([folder])
    assert "Copied test images: 35. They are training images too" in " ".join(page_of(folder).text.split())
    clean = make_run("other"), make_run("third", seed=1)
    write_report([folder, clean[0]], tmp_path / "both")
    assert "35 of the images to evaluate are training images too" in (tmp_path / "both" / "table.md").read_text()
    write_report(clean, tmp_path / "clean")
    assert "Doubts" not in (tmp_path / "clean" / "table.md").read_text()


def test_a_comparison_tells_of_runs_that_repeat_a_seed(make_run, tmp_path):
    """Typed twice, a command gives the same accuracy, and a standard deviation of 0."""
    write_report([make_run("a"), make_run("b"), make_run("c", method="pip")], tmp_path / "out")
    text = (tmp_path / "out" / "table.md").read_text()
    assert "60.00 ± 0.00" in text
    assert text.endswith("- hgp: its standard deviations are not over seeds, as there are several runs of a seed.\n")


def test_page_names_the_classes_without_test_images(make_run):
    accuracies = {"zero": 0.9, "one": 0.75, "two": None, "three": 0.25}
    folder = make_run(per_class_accuracy=accuracies, samples_per_task=[100, 100, 200])
    write_report([folder])
    text = " ".join(page_of(folder).text.split())
    assert "Not tested: two. No test image of this class was evaluated at the end." in text


def test_what_a_task_without_test_images_made_the_model_forget_is_not_known(make_run):
    """The first task falls from 90 to 60 %: folded into the second, the third would hide that."""
    matrix = [[0.8, None, None], [0.9, 0.7, None], [0.6, 0.5, None]]
    untested = {
        "samples_per_task": [100, 100, 0],
        "accuracy_matrix": matrix,
        "per_task_seen_accuracy": [0.8, 0.8, 0.55],
    }
    folder = make_run(per_class_accuracy={"zero": 0.5, "one": 0.5, "two": 0.7, "three": None}, **untested)
    run = load_run(folder)
    assert run.metrics.keys() == {"final_average_accuracy", "last_accuracy", "average_seen_accuracy"}
    assert run.metrics["final_average_accuracy"] == pytest.approx(0.55)
    recorded = run.results["metrics"]  # by an earlier version
    recorded |= {"final_average_accuracy": 0.55, "forgetting": 0.0}
    assert "forgetting" not in run.metrics
    assert comparison_table(group_runs([run]))[1][0][2].endswith("(1 with accuracies missing)")
    write_report([folder])
    text = " ".join(page_of(folder).text.split())
    assert "So nothing is known of task 3, and not how much the model has forgotten." in text
    assert "its earlier best" not in text
    assert "not known" in [text.get_text() for axes in figures.matrix_figure(run).axes for text in axes.texts]


def test_page_of_a_finished_run_without_test_images_says_so(make_run):
    folder = make_run(done=0, status="finished", metrics={})
    write_report([folder])
    text = " ".join(page_of(folder).text.split())
    assert "No accuracy is known." in text
    assert "has not finished" not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"done": 1}, "This run has not finished. 1 of 3 tasks are finished. The numbers cover the finished tasks"),
        ({"done": 0}, "This run has not finished. 0 of 3 tasks are finished. No task is finished yet"),
        ({"done": 2, "status": "failed"}, "This run failed. 2 of 3 tasks are finished."),
        ({"done": 2, "status": "failed", "error": "no <quorum>"}, "finished tasks only. no <quorum>"),
        ({"done": 2, "status": "finished"}, "This run has not finished. 2 of 3 tasks"),
    ],
)
def test_page_of_an_unfinished_run_says_so(make_run, changes, words):
    folder = make_run(**changes)
    write_report([folder])
    page = page_of(folder)
    assert words in " ".join(page.text.split())
    expected = changes.get("status", "interrupted")  # nobody holds the lock of its folder
    assert ("span", "class", f"badge {expected}") in page.attributes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "After learning 3 tasks one after another, the model recognises 60.0 % of the test images, averaged over "
            "the tasks; on the tasks before the last it is 12.5 percentage points below its earlier best: "
            "that much it has forgotten.",
        ),
        ({"done": 2}, "it is 10.0 percentage points above its earlier best: it has forgotten nothing."),
        ({"done": 1}, "After learning one task, the model recognises 80.0 % of the test images."),
    ],
)
def test_page_begins_with_the_outcome_in_words_and_the_pictures(make_run, changes, sentence):
    folder = make_run(**changes)
    write_report([folder])
    page = page_of(folder)
    text = " ".join(page.text.split())
    assert sentence in text
    assert text.index(sentence) < text.index("Metric")
    assert page.tags.index("p") < page.tags.index("img") < page.tags.index("table")


@pytest.mark.parametrize("recorded_in", ["results.json", "config.yaml"])
def test_accuracies_on_validation_images_are_called_so(make_run, recorded_in):
    """They are no result: something was chosen on these images, or may have been."""
    in_results = recorded_in == "results.json"
    folder = make_run("v", **({"validation_share": 0.2} if in_results else {"config": {"validation-share": 0.2}}))
    runs = [load_run(folder), load_run(make_run("t"))]
    assert [run.title for run in runs] == ["hgp on digits, validation images", "hgp on digits"]
    assert [group.setting for group in group_runs(runs)] == ["digits", "digits, validation images"]
    for shown, words in [(runs[:1], "Validation"), (runs[1:], "Test"), (runs, "Test or validation")]:
        label = figures.comparison_figure(group_runs(shown)).axes[0].get_ylabel()
        assert label == f"{words} accuracy, %"
    assert figures.accuracy_figure(runs[0]).axes[0].get_ylabel() == "Validation accuracy, %"
    assert "validation accuracy" in " ".join(text.get_text() for text in figures.matrix_figure(runs[0]).texts)
    write_report([folder])
    text = " ".join(page_of(folder).text.split())
    assert "recognises 60.0 % of the validation images" in text
    assert "Accuracy over all validation samples after the last task" in text


def test_numbers_of_a_partial_run_cover_its_finished_tasks(make_run):
    run = load_run(make_run(done=2))
    assert run.matrix.shape == (2, 2)
    assert run.metrics["final_average_accuracy"] == pytest.approx(0.80)
    assert run.metrics["forgetting"] == pytest.approx(-0.10)
    assert run.metrics["last_accuracy"] == pytest.approx(0.80)
    assert load_run(make_run("none", done=0)).metrics == {}


def test_recorded_metrics_win_and_null_ones_do_not(make_run):
    run = load_run(make_run(metrics={"forgetting": 0.5, "plasticity": None, "bias_entropy": 1.5}))
    assert run.metrics["forgetting"] == 0.5
    assert run.metrics["plasticity"] == pytest.approx(0.65)
    page = Page(single_page(run, dict.fromkeys(SINGLE[:2], b"")))
    assert page.row("bias_entropy")[-1] == "1.5"


def test_classes_are_listed_worst_first_and_idle_clients_counted(make_run):
    rounds = [{"task": 1, "round": 1, "participants": ["alice", "bob"], "idle": ["bob"], "train_accuracy": 0.5}]
    folder = make_run(rounds=rounds, per_class_accuracy={"one": 0.75, "two": None, "three": 0.25})
    write_report([folder])
    page = page_of(folder)
    start = page.rows.index(["Class", "Accuracy, %"])
    assert page.rows[start + 1 : start + 3] == [["three", "25.0"], ["one", "75.0"]]
    assert page.row("Task", "Round")[2:] == ["Participants", "Idle", "Train accuracy"]
    assert page.row("1", "1") == ["1", "1", "2", "1", "50.0 %"]


def test_last_accuracy_is_that_of_the_matrix_where_the_test_images_are_counted(make_run):
    """As of other people's results, which need no accuracies over all classes: (60 + 75 + 2 * 45) / 400."""
    run = load_run(make_run(per_task_seen_accuracy=None, samples_per_task=[100, 100, 200]))
    assert run.metrics["last_accuracy"] == pytest.approx(0.5625)
    assert run.metrics["average_seen_accuracy"] == pytest.approx(0.7208, abs=1e-4)


def test_last_accuracy_is_left_out_rather_than_guessed(make_run):
    run = load_run(make_run(per_task_seen_accuracy=None))
    assert "last_accuracy" not in run.metrics
    write_report([run.folder])


def test_optional_parts_may_be_absent(tmp_path):
    kept = ("schema", "status", "method", "dataset", "num_tasks")
    (tmp_path / "results.json").write_text(json.dumps({name: results()[name] for name in kept}))
    write_report([tmp_path])
    assert "No accuracy is known" in page_of(tmp_path).text


def test_report_is_replaced_and_leaves_no_half_written_file(make_run):
    folder = make_run(done=1)
    write_report([folder])
    (folder / "results.json").write_text(json.dumps(results()))
    write_report([folder])
    assert "This run" not in page_of(folder).text
    assert not [p for p in folder.iterdir() if p.name not in [*SINGLE, "results.json"]]


# Anything but lone surrogates, which no file in UTF-8 can hold, and the controls that HTML itself forbids.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30)
TAGS = ["<script>alert(1)</script>", '"><img src=x onerror=y>', "&lt;b&gt;", "'--><!--", "</style>"]
HOSTILE = TEXT | st.sampled_from(TAGS)


@pytest.mark.ci
@given(name=HOSTILE, reason=HOSTILE, key=HOSTILE)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_run_is_called_comes_back_as_text(tmp_path, name, reason, key):
    failure = {"name": name, "reason": reason}
    rounds = [{"task": 1, "round": 1, "participants": [name], "failures": [failure], "server": {key: name}}]
    content = results(method=name, dataset=reason, status=key, rounds=rounds, class_names=[name] * 4)
    changes = {"environment": {key: reason}, "metrics": {key: 2.0}}
    (tmp_path / "results.json").write_text(json.dumps(content | changes))
    plain = Page(single_page(load_run_of("plain", tmp_path), dict.fromkeys(SINGLE[:2], b"")))
    page = Page(single_page(load_run(tmp_path), dict.fromkeys(SINGLE[:2], b"")))
    assert f"{name} on {reason}" in page.text
    assert [name, reason] in [row[-2:] for row in page.rows]
    assert [key, reason] in page.rows
    assert ("span", "title", name) in page.attributes
    assert set(page.tags) <= set(plain.tags) | {"p"}


def load_run_of(name, folder):
    """The harmless run, loaded from a folder of its own."""
    other = folder / name
    other.mkdir(exist_ok=True)
    (other / "results.json").write_text(json.dumps(results(done=1)))
    return load_run(other)


# ------------------------------------------------------------------------------------------------------ pictures


def lines_of(axes):
    """Points of the drawn lines as (x list, y list, width), without those that exist for the legend only."""
    curves = ((list(line.get_xdata()), list(line.get_ydata()), line.get_linewidth()) for line in axes.lines)
    return [line for line in curves if len(line[0])]


def test_accuracy_picture_draws_every_task_and_all_seen(make_run):
    (axes,) = figures.accuracy_figure(load_run(make_run())).axes
    *own, (x, y, width) = lines_of(axes)
    assert [(x, y) for x, y, _ in own] == [
        ([1, 2, 3], pytest.approx([80, 90, 60])),
        ([2, 3], pytest.approx([70, 75])),
        ([3], pytest.approx([45])),
    ]
    assert (x, y) == ([1, 2, 3], pytest.approx([80, 80, 56.25]))
    assert width > max(line[2] for line in own)
    assert "%" in axes.get_ylabel()
    low, high = axes.get_ylim()
    assert low < 45
    assert high > 90


@pytest.mark.parametrize("done", [0, 1, 2])
def test_accuracy_picture_of_a_partial_run(make_run, done):
    figure = figures.accuracy_figure(load_run(make_run(done=done)))
    (axes,) = figure.axes
    assert len(lines_of(axes)) == done + 1
    assert axes.get_xlim()[1] > 3
    shown = [text.get_text() for text in (*figure.texts, *axes.texts)]
    assert any(f"INTERRUPTED, {done} OF 3 TASKS" in text for text in shown)
    assert ("no task finished yet" in shown) == (done == 0)


def test_matrix_picture_shows_every_number_and_what_was_forgotten(make_run):
    figure = figures.matrix_figure(load_run(make_run()))
    top, bottom = figure.axes[:2]
    numbers = {(text.get_position()[::-1], text.get_text()) for text in top.texts}
    assert numbers == {((i, j), f"{100 * MATRIX[i][j]:.1f}") for i in range(3) for j in range(i + 1)}
    assert [text.get_text() for text in bottom.texts] == ["30.0", "-5.0"]


def test_matrix_picture_marks_what_is_not_done(make_run):
    top, bottom = figures.matrix_figure(load_run(make_run(done=1))).axes[:2]
    assert [text.get_text() for text in top.texts] == ["80.0", "not done"]
    assert [text.get_text() for text in bottom.texts] == ["no earlier task yet"]


def test_numbers_of_the_matrix_can_be_read(make_run):
    """Black on light and white on dark: the luminances differ by enough for small print."""

    def luminance(rgb):
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    matrix = [[0.2 + 0.07 * j + 0.005 * i if j <= i else None for j in range(10)] for i in range(10)]
    changes = {"accuracy_matrix": matrix, "per_task_seen_accuracy": None, "num_tasks": 10, "tasks": []}
    top = figures.matrix_figure(load_run(make_run(**changes))).axes[0]
    image = top.images[0]
    for text in top.texts:
        j, i = text.get_position()
        cell = luminance(image.cmap(image.norm(100 * matrix[i][j]))[:3])
        ink = luminance({"#000000": (0, 0, 0), "#ffffff": (1, 1, 1)}[to_hex(text.get_color())])
        assert (max(cell, ink) + 0.05) / (min(cell, ink) + 0.05) > 3.9


def recorded(classes=4, tasks=3, clients=2, seed=0):
    """Results of a finished run with confusion, clients and bias; classes come in the order 0, 1, 2, ... backwards."""
    rng = np.random.default_rng(seed)
    parts = [part.tolist() for part in np.array_split(np.arange(classes)[::-1], tasks)]
    names = [f"the class number {c}" for c in range(classes)]
    held = [{"name": f"client-{m:04d}", "class_counts": rng.integers(0, 90, classes).tolist()} for m in range(clients)]
    seen = np.cumsum([len(part) for part in parts])
    entropies = [(rng.uniform(0.2, 1, clients) * np.log(most)).tolist() for most in seen]
    return {
        "num_tasks": tasks,
        "tasks": parts,
        "class_names": names,
        "accuracy_matrix": [[0.5 if j <= i else None for j in range(tasks)] for i in range(tasks)],
        "per_task_seen_accuracy": [0.5] * tasks,
        "confusion": rng.integers(0, 20, (classes, classes)).tolist(),
        "clients": held,
        "federated_bias": {"response_entropies": entropies, "prototype_distance": [1.5, *[None] * (tasks - 1)]},
    }


def test_what_was_recorded_is_drawn_and_shown(make_run):
    folder = make_run(**recorded())
    names = ["accuracy.png", "forgetting.png", "confusion.png", "clients.png", "federated_bias.png", "report.html"]
    assert write_report([folder]) == [folder / name for name in names]
    page = page_of(folder)
    assert page.tags.count("img") == 5
    for title in ("Confusion of classes", "Training images of each client", "How local models differ"):
        assert title in page.text


def test_confusion_picture_shows_shares_in_order_of_arrival(make_run):
    """Tasks [3, 2], [1], [0], the last not done: true class 3 was taken for 3, 2 and 1 in 6, 3 and 1 of 10 images."""
    confusion = [[0, 0, 0, 0], [0, 2, 0, 2], [0, 0, 5, 0], [0, 1, 3, 6]]
    changes = {"tasks": [[3, 2], [1], [0]], "confusion": confusion, "done": 2}
    figure = heatmaps.confusion_figure(load_run(make_run(**changes)))
    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == [[60, 30, 10], [0, 100, 0], [50, 0, 50]]
    written = {(text.get_position()[::-1], text.get_text()) for text in axes.texts}
    assert written == {((0, 0), "60"), ((0, 1), "30"), ((0, 2), "10"), ((1, 1), "100"), ((2, 0), "50"), ((2, 2), "50")}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["three", "two", "one"]
    assert [list(line.get_xdata()) for line in axes.lines if line.get_ydata()[0] == 0] == [[1.5, 1.5]]
    assert "INTERRUPTED" in " ".join(text.get_text() for text in figure.texts)


def test_clients_picture_shows_counts_by_task_and_their_sum(make_run):
    clients = [{"name": "alice", "class_counts": [1, 0, 40, 7]}, {"name": "b$b", "class_counts": [0, 5, 0, 0]}]
    figure = heatmaps.clients_figure(load_run(make_run(clients=clients)))  # tasks [2, 0], [1], [3]
    axes, total = figure.axes[:2]
    assert axes.images[0].get_array().tolist() == [[40, 1, 0, 7], [0, 0, 5, 0]]
    assert [bar.get_width() for bar in total.patches] == [48, 5]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["alice", r"b\$b"]
    assert [label.get_text() for label in axes.child_axes[0].get_xticklabels()] == ["task 1", "task 2", "task 3"]


@pytest.mark.parametrize(("names", "angle"), [(["0", "1", "2", "3", "4", "5"], 0), (["cat", *"abcde"], 90)])
def test_only_long_names_below_a_picture_are_turned(names, angle, make_run):
    run = load_run(make_run("a", class_names=names, confusion=np.eye(6, dtype=int).tolist()))
    axes = heatmaps.confusion_figure(run).axes[0]
    assert {label.get_rotation() for label in axes.get_xticklabels()} == {angle}
    assert {label.get_rotation() for label in axes.get_yticklabels()} == {0}


def test_bias_picture_shows_shares_of_the_largest_entropy(make_run):
    """2, 3 and 4 seen classes; task 2 was not measured, and only task 1 has a distance."""
    entropies = [[math.log(2), 0.0], [], [math.log(2), math.log(4)]]
    bias = {"response_entropies": entropies, "prototype_distance": [2.5, None, None]}
    left, right = heatmaps.bias_figure(load_run(make_run(federated_bias=bias))).axes
    points = [tuple(map(float, p)) for dots in left.collections for p in dots.get_offsets()]
    assert np.array(sorted(points)) == pytest.approx(np.array([(1, 0), (1, 1), (3, 0.5), (3, 1)]))
    mean = max(left.lines, key=lambda line: line.get_linewidth())
    assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([1, 3], pytest.approx([0.5, 0.75]))
    assert right.lines[0].get_ydata()[0] == 2.5
    only = {"response_entropies": [[], [], []], "prototype_distance": [2.5, None, None]}
    assert len(heatmaps.bias_figure(load_run(make_run("only", federated_bias=only))).axes) == 1
    nothing = {"response_entropies": [[], [], []], "prototype_distance": [None] * 3}
    assert heatmaps.recorded_figures(load_run(make_run("nothing", federated_bias=nothing))) == {}


@pytest.mark.parametrize(("classes", "tasks", "clients"), [(1, 1, 1), (10, 5, 10), (30, 3, 30), (200, 20, 100)])
def test_labels_of_maps_can_be_read(make_run, classes, tasks, clients):
    run = load_run(make_run(**recorded(classes, tasks, clients)))
    for name, figure in heatmaps.recorded_figures(run).items():
        figure.draw_without_rendering()
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            boxes = [label.get_window_extent() for label in axis.get_ticklabels() if label.get_text()]
            overlapping = [(a, b) for n, a in enumerate(boxes) for b in boxes[:n] if a.overlaps(b)]
            assert not overlapping, name
        assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in figure.texts)
        assert figure.bbox.width <= 13 * figure.dpi


@pytest.mark.parametrize("num_tasks", [1, 2, 12, 20, 25])
def test_task_numbers_do_not_overlap(make_run, num_tasks):
    rng = np.random.default_rng(num_tasks)
    matrix = [[float(rng.uniform(0.6, 0.95)) if j <= i else None for j in range(num_tasks)] for i in range(num_tasks)]
    seen = [float(np.mean(row[: i + 1])) for i, row in enumerate(matrix)]
    changes = {"accuracy_matrix": matrix, "per_task_seen_accuracy": seen, "num_tasks": num_tasks, "tasks": []}
    figure = figures.accuracy_figure(load_run(make_run(**changes)))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == num_tasks + 1
    assert not [(a, b) for n, a in enumerate(boxes) for b in boxes[:n] if a.overlaps(b)]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_a_small_picture_looks_like_the_full_one(make_run):
    """99 of 100 pixels within 12 of 255 of their full colour, in half the bytes; edges of lines may differ more."""
    figure = figures.comparison_figure(group_runs([load_run(make_run(f"m{n}", method=f"m{n}")) for n in range(6)]))
    full, small = figures.png(figure), figures.small_png(figure)
    assert len(small) < len(full) / 2
    pixels = [np.asarray(Image.open(BytesIO(data)).convert("RGB"), dtype=np.int16) for data in (full, small)]
    assert np.mean(np.abs(pixels[0] - pixels[1]).max(axis=-1) <= 12) >= 0.99


@pytest.mark.parametrize("name", ["a$b$c", "$", "x" * 300, "two\nlines", "_hidden", r"\frac{", "画像"])
@pytest.mark.filterwarnings("ignore:Glyph")
def test_pictures_take_any_name(make_run, name):
    run = load_run(make_run(method=name, dataset=name))
    figure = figures.accuracy_figure(run)
    figures.small_png(figure)
    assert figure.get_suptitle().startswith(name.split("\n")[0][:20].replace("$", r"\$"))
    labels = [text.get_text() for text in figures.comparison_figure(group_runs([run])).legends[0].get_texts()]
    assert len(labels) == 1
    assert len(labels[0]) <= 62


def test_fonts_are_installed_ones():
    """Matplotlib would log a line for each text and each font that it does not find."""
    families = figures.rcParams["font.family"]
    assert families[0] == "DejaVu Sans"
    assert set(families) <= set(figures.fontManager.get_font_names())


def test_pictures_are_white_whatever_the_users_matplotlib_does(make_run):
    with matplotlib.rc_context({"figure.facecolor": "black"}):
        drawn = Image.open(BytesIO(figures.small_png(figures.accuracy_figure(load_run(make_run()))))).convert("RGB")
    assert drawn.getpixel((2, 2)) == (255, 255, 255)


def test_a_letter_that_no_font_has_is_no_warning():
    """In a process of its own, as pytest has its own filters for warnings; U+10FFFD is in no font."""
    code = "from server_app.report import figures as f; f.small_png(f.make_figure(4, 3, chr(0x10FFFD), ''))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_fifty_tasks_are_drawn(make_run):
    matrix = [[0.5 if j <= i else None for j in range(50)] for i in range(50)]
    changes = {"accuracy_matrix": matrix, "per_task_seen_accuracy": [0.5] * 50, "num_tasks": 50, "tasks": []}
    folder = make_run(**changes)
    write_report([folder])
    page = (folder / "report.html").read_text()
    assert all((folder / name).stat().st_size > 10_000 for name in ("accuracy.png", "forgetting.png"))
    assert "50.0" in page


@pytest.mark.parametrize(("package", "module"), [("matplotlib", "figures"), ("jinja2", "pages")])
def test_without_a_package_the_error_names_the_command(make_run, monkeypatch, package, module):
    folder = make_run()
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"server_app.report.{module}")
    monkeypatch.delattr(server_app.report, module)
    with pytest.raises(PicturesUnavailable, match=re.escape("pip install 'matplotlib>=3.9' 'jinja2>=3.1'")):
        write_report([folder])
    assert [p.name for p in folder.iterdir()] == ["results.json"]


def test_packages_are_loaded_late_and_pyplot_never(make_run):
    program = (
        "import sys; from pathlib import Path; import server_app.report.write as r\n"
        "assert not {'matplotlib', 'jinja2'} & sys.modules.keys(), 'loaded on import'\n"
        "r.write_report([Path(sys.argv[1])])\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot was used'\n"
    )
    root = Path(server_app.report.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program, make_run()], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


# -------------------------------------------------------------------------------------------------- several runs


def scaled(factor):
    """MATRIX and SEEN times ``factor``, as changes to a run."""
    return {
        "accuracy_matrix": [[x and x * factor for x in row] for row in MATRIX],
        "per_task_seen_accuracy": [x * factor for x in SEEN],
    }


@pytest.fixture
def seeds(make_run):
    """Three seeds of one run, the final average accuracies 60 %, 54 % and 48 %, of 60, 70 and 80 seconds."""
    return [make_run(f"s{n}", seed=n, seconds={"total": 60.0 + 10 * n}, **scaled(1 - 0.1 * n)) for n in range(3)]


def test_seeds_are_averaged(seeds, tmp_path):
    output = tmp_path / "compared"
    assert write_report(seeds, output) == [output / name for name in COMPARISON]
    row = page_of(output).row("hgp", "digits")
    assert row[:3] == ["hgp", "digits", "0, 1, 2"]
    assert row[3:7] == ["54.00 ± 6.00", "66.00 ± 7.33", "50.62 ± 5.62", "11.25 ± 1.25"]
    assert row[7:] == ["5.50 ± 0.00", "1.5 ± 0.0", "-", "70.0 ± 10.0", "1.167 ± 0.167 (wall)"]
    table = (output / "table.md").read_text().splitlines()
    assert [cell.strip() for cell in table[2].strip("|").split("|")] == row
    assert len({line.count("|") for line in table[:3]}) == 1


def test_runs_of_a_suite_keep_its_labels(make_run):
    runs = [make_run(f"{label}/beta-0.5/seed{seed}", seed=seed) for label in ("hgp", "hgp-32") for seed in (0, 1)]
    groups = group_runs([load_run(folder) for folder in runs])
    assert sorted((group.label, len(group.runs)) for group in groups) == [("hgp", 2), ("hgp-32", 2)]
    (alone,) = group_runs([load_run(folder) for folder in runs[:2]])
    assert (alone.setting, alone.label) == ("digits", "hgp")


def test_the_page_lists_each_run_by_its_label(make_run, tmp_path):
    folders = [make_run(f"{label}/seed{seed}", seed=seed) for label in ("hgp", "hgp-32") for seed in (0, 1)]
    write_report(folders, tmp_path / "compared")
    page = page_of(tmp_path / "compared")
    assert page.row(str(folders[2]))[1:4] == ["hgp-32", "digits", "0"]


def test_curve_and_point_of_the_comparison(seeds):
    groups = group_runs([load_run(folder) for folder in seeds])
    (axes,) = figures.comparison_figure(groups).axes
    ((x, y, _),) = lines_of(axes)
    assert (x, y) == ([1, 2, 3], pytest.approx([72, 72, 50.625]))
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((50.625 - 5.625, 80))
    (axes,) = tradeoffs.communication_figure(groups).axes
    assert lines_of(axes)[0][:2] == (pytest.approx([5.5]), pytest.approx([54]))
    assert axes.get_xscale() == "log"


def test_a_band_stays_between_0_and_100_percent(make_run):
    """96 and 60 % after the first task: 78 with a deviation of 25; 100 and 0 % after the last: 50 with 71."""
    runs = [make_run("a", seed=0, per_task_seen_accuracy=[0.96, 0.5, 1.0])]
    runs += [make_run("b", seed=1, per_task_seen_accuracy=[0.60, 0.5, 0.0])]
    (axes,) = figures.comparison_figure(group_runs([load_run(run) for run in runs])).axes
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0, 100)


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=30))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_many_seeds_agree_with_numpy(tmp_path, factors):
    runs = []
    for seed, factor in enumerate(factors):
        folder = tmp_path / str(seed)
        folder.mkdir(exist_ok=True)
        (folder / "results.json").write_text(json.dumps(results(seed=seed, **scaled(factor))))
        runs.append(load_run(folder))
    (group,) = group_runs(runs)
    values = 0.6 * np.array(factors)
    assert group.mean_sd("final_average_accuracy") == pytest.approx((values.mean(), values.std(ddof=1)), abs=1e-12)


def test_one_seed_has_no_standard_deviation(make_run, tmp_path):
    write_report([make_run("a"), make_run("b", method="pip")], tmp_path / "c")
    assert "±" not in "".join(page_of(tmp_path / "c").row("hgp", "digits"))


def test_unfinished_runs_are_shown_but_not_averaged(make_run, tmp_path):
    folders = [make_run("a"), make_run("b", seed=1, done=2, status="failed"), make_run("c", method="pip", done=1)]
    write_report(folders, tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert page.row("hgp", "digits")[2:5] == ["0 (and 1 unfinished)", "60.00", "73.33"]
    assert page.row("pip", "digits")[2:] == ["- (and 1 unfinished)", *["-"] * 9]
    assert page.row(str(folders[1]))[-1] == "failed, 2 of 3 tasks"
    figure = figures.comparison_figure(group_runs([load_run(folder) for folder in folders]))
    assert [line.get_linestyle() for line in figure.axes[0].lines] == ["-", ":"]
    assert [len(line[0]) for line in lines_of(figure.axes[0])] == [3, 1]


def test_only_unfinished_runs(make_run, tmp_path):
    written = write_report([make_run("a", done=0), make_run("b", seed=1, done=0)], tmp_path / "out")
    assert [p.name for p in written] == ["accuracy.png", "table.md", "report.html"]


def test_settings_that_differ_part_the_groups(make_run):
    folders = [
        make_run("a", method="fedavg", config={"prompt": "shared", "dirichlet-beta": 0.5, "seed": 0, "device": "cpu"}),
        make_run("b", method="fedavg", config={"prompt": "none", "dirichlet-beta": 0.5, "seed": 1, "device": "cuda"}),
        make_run("c", method="fedavg", config={"prompt": "none", "dirichlet-beta": 0.5, "versions": {"flwr": "1"}}),
        make_run("d", method="hgp", config={"prompt": "shared", "dirichlet-beta": 0.05}),
        make_run("e", method="hgp", dataset="cifar100", config={"prompt": "shared"}),
    ]
    groups = group_runs([load_run(folder) for folder in folders])
    assert {(g.setting, g.label): [r.folder.name for r in g.runs] for g in groups} == {
        ("cifar100", "hgp"): ["e"],
        ("digits", "fedavg (dirichlet-beta 0.5, prompt shared)"): ["a"],
        ("digits", "fedavg (dirichlet-beta 0.5, prompt none)"): ["b", "c"],
        ("digits", "hgp (dirichlet-beta 0.05)"): ["d"],
    }


def test_keys_of_a_method_from_outside_part_its_groups(make_run):
    """The report does not import the method; what else config.yaml says is no key."""
    saved = {"a": (0.1, "1"), "b": (5.0, "1"), "c": (5.0, "2")}
    folders = [
        make_run(name, method="mine:ROW", config={"mine-pull": pull, "git-revision": code, "versions": {"torch": code}})
        for name, (pull, code) in saved.items()
    ]
    groups = group_runs([load_run(folder) for folder in folders])
    assert {g.label: [r.folder.name for r in g.runs] for g in groups} == {
        "mine:ROW (mine-pull 0.1)": ["a"],
        "mine:ROW (mine-pull 5.0)": ["b", "c"],
    }


def test_rounds_of_adaptation_are_told_as_they_were_asked_for(make_run):
    saved = {"none": ("none", 0), "auto": ("lora", 0), "three": ("lora", 3)}
    folders = [
        make_run(name, method="fedrda", config={"prompt": prompt, "fedrda-adaptation-rounds": rounds})
        for name, (prompt, rounds) in saved.items()
    ]
    labels = {group.runs[0].folder.name: group.label for group in group_runs([load_run(folder) for folder in folders])}
    rounds = {name: label.split("fedrda-adaptation-rounds ")[1].rstrip(")") for name, label in labels.items()}
    assert rounds == {"none": "none", "auto": "auto", "three": "3"}


@pytest.mark.parametrize("numbers", [(1, 5), (10, 5)])
def test_numbers_of_the_protocol_are_never_told_as_auto(numbers, make_run):
    """5 is what auto means for most methods, 1 for fedrda."""
    folders = [make_run(str(n), method="fedrda", config={"rounds-per-task": n}) for n in numbers]
    labels = {group.label for group in group_runs([load_run(folder) for folder in folders])}
    assert labels == {f"fedrda (rounds-per-task {n})" for n in numbers}


def test_prompt_is_found_without_a_config(make_run):
    folders = [make_run("a", method="fedavg", prompt="shared"), make_run("b", method="fedavg", prompt="none")]
    labels = [group.label for group in group_runs([load_run(folder) for folder in folders])]
    assert labels == ["fedavg (prompt none)", "fedavg (prompt shared)"]


def test_runs_of_different_length_are_never_averaged(make_run):
    short = {"num_tasks": 1, "accuracy_matrix": [[0.9]], "per_task_seen_accuracy": [0.9], "tasks": []}
    groups = group_runs([load_run(make_run("long")), load_run(make_run("short", **short))])
    assert [group.label for group in groups] == ["hgp (num-tasks 1)", "hgp (num-tasks 3)"]
    figures.small_png(figures.comparison_figure(groups))


def test_best_comes_first_and_each_data_set_has_its_panel(make_run):
    folders = [
        make_run("a", method="worse", **scaled(0.5)),
        make_run("b", method="better"),
        make_run("c", method="better", dataset="cifar100"),
    ]
    groups = group_runs([load_run(folder) for folder in folders])
    assert [(g.setting, g.label) for g in groups] == [("cifar100", "better"), ("digits", "better"), ("digits", "worse")]
    figure = figures.comparison_figure(groups)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["cifar100", "digits"]
    first, second = figure.axes
    assert first.lines[0].get_color() == second.lines[0].get_color() != second.lines[1].get_color()


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([("hgp", 0), ("pip", 0)], "one seed each"),
        ([("hgp", 0), ("hgp", 1)], "mean and standard deviation over seeds"),
        ([("hgp", 0), ("hgp", 1), ("pip", 0)], "mean and standard deviation over seeds; one seed where none is drawn"),
    ],
)
def test_one_seed_is_not_called_a_mean(make_run, runs, words):
    assert figures.over_seeds(group_runs([load_run(make_run(f"{m}{s}", method=m, seed=s)) for m, s in runs])) == words


def test_a_method_keeps_its_colour_across_the_pictures(make_run):
    silent = {"communication": {}}
    groups = group_runs([load_run(make_run("a", **silent)), load_run(make_run("b", method="pip", **scaled(0.9)))])
    curve = figures.comparison_figure(groups).axes[0].lines[1]
    point = tradeoffs.communication_figure(groups).axes[0].lines[0]
    assert curve.get_color() == point.get_color()


def test_matrices_are_averaged_over_seeds_and_drawn_side_by_side(make_run):
    folders = [make_run("a"), make_run("b", seed=1, **scaled(0.5)), make_run("c", method="pip", **scaled(0.6))]
    groups = group_runs([load_run(folder) for folder in [*folders, make_run("d", method="fppl", done=1)]])
    first, second = figures.matrices_figure(groups).axes
    assert [first.get_title(), second.get_title()] == ["hgp", "pip"]
    shown = [text.get_text() for text in first.texts]
    assert shown == ["60", "68", "52", "45", "56", "34"]  # 3/4 of MATRIX, row by row
    assert first.images[0].get_clim() == second.images[0].get_clim()


def test_points_of_many_groups_can_be_told_apart(make_run):
    groups = group_runs([load_run(make_run(str(n), method=f"m{n:02}")) for n in range(30)])
    figure = figures.comparison_figure(groups)
    legend = figure.legends[0]
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in legend.get_lines()}
    assert len(looks) == 30
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert figure.bbox.y0 <= box.y0
    assert box.y1 <= figure.bbox.y1


def costly(make_run, name, accuracy, megabytes, minutes=None, **changes):
    """A run of one accuracy in all tasks, with its traffic and its core-minutes."""
    seconds = {"total": 600.0} | ({} if minutes is None else {"cpu_total": 60.0 * minutes})
    traffic = {"bytes_up": 1e6 * megabytes, "bytes_down": 0}
    matrix = [[accuracy if j <= i else None for j in range(3)] for i in range(3)]
    seen = {"accuracy_matrix": matrix, "per_task_seen_accuracy": [accuracy] * 3}
    return load_run(make_run(name, method=name, communication=traffic, seconds=seconds, **seen, **changes))


def test_labels_of_many_points_can_be_read(make_run):
    """Thirty methods, ten of them in one place: no label upon another or out of the picture, each near its point."""
    rng = np.random.default_rng(0)
    spots = [
        (0.97 + 0.001 * n, 20 + n) if n < 10 else (rng.uniform(0.1, 0.9), 10 ** rng.uniform(0, 3)) for n in range(30)
    ]
    groups = group_runs([costly(make_run, f"method-{n:02}", *spot, 1.0) for n, spot in enumerate(spots)])
    figure = tradeoffs.communication_figure(groups)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts if text.get_text().startswith("method")}
    assert len(boxes) == 30
    texts = list(boxes.values())
    assert not [(a, b) for n, a in enumerate(texts) for b in texts[:n] if a.overlaps(b)]
    inside = axes.get_window_extent()
    assert all(
        inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1 for box in texts
    )
    for group in groups:
        point = axes.transData.transform((group.megabytes[0], 100 * group.mean_sd("final_average_accuracy")[0]))
        box = boxes[group.label]
        assert np.hypot(*(np.clip(point, box.p0, box.p1) - point)) < 200


def test_pareto_front_by_hand(make_run):
    spots = {
        "cheap": (0.5, 1),
        "dear": (0.9, 10),
        "worse": (0.8, 20),
        "twin": (0.4, 1),
        "same": (0.9, 30),
        "mid": (0.7, 5),
    }
    runs = [costly(make_run, name, *spot) for name, spot in spots.items()]
    joint = costly(make_run, "joint", 0.99, 2)  # has all images in one place
    groups = group_runs([*runs, joint])
    (own,) = [n for n, group in enumerate(groups) if group.label == "mid"]
    groups[own] = dataclasses.replace(groups[own], theirs=True)  # other people's code counts like any other
    figure = tradeoffs.communication_figure(groups)
    (front,) = [line for line in figure.axes[0].lines if line.get_gid() == "front"]
    assert front.get_xydata().tolist() == [[1, pytest.approx(50)], [5, pytest.approx(70)], [10, pytest.approx(90)]]
    hollow = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert sorted(line.get_xdata()[0] for line in hollow) == [2, 5]


def test_one_point_that_beats_all_others_is_no_line(make_run):
    groups = group_runs([costly(make_run, "best", 0.9, 1), costly(make_run, "worse", 0.8, 2)])
    (axes,) = tradeoffs.communication_figure(groups).axes
    assert not [line for line in axes.lines if line.get_gid() == "front"]
    assert not [text for text in axes.texts if "Pareto" in text.get_text()]


def test_the_legend_reads_as_the_curves_end(make_run):
    """Also for the groups of a suite, which are in the suite's order; what has not finished comes last."""
    ends = {"low": 0.2, "high": 0.9, "middle": 0.5}
    runs = [costly(make_run, name, end, 1, metrics={"last_accuracy": end}) for name, end in ends.items()]
    groups = [Group("digits", run.results["method"], [run]) for run in [load_run(make_run("cut", done=1)), *runs]]
    (legend,) = figures.comparison_figure(groups).legends
    assert [text.get_text() for text in legend.get_texts()] == ["high", "middle", "low", "hgp"]


@pytest.mark.ci
def test_core_minutes_fall_back_to_the_clock_and_say_so(make_run, tmp_path):
    runs = [costly(make_run, "measured", 0.5, 1, 2.5), costly(make_run, "clocked", 0.6, 1)]
    runs.append(costly(make_run, "neither", 0.7, 1))
    runs[2].results["seconds"].clear()
    figure = tradeoffs.core_minutes_figure(group_runs(runs))
    assert [text.get_text() for text in figure.texts if "clock" in text.get_text()] == [
        "minutes of the clock, where no processor time was recorded: clocked"
    ]
    assert sorted(x for line in figure.axes[0].lines if line.get_marker() != "None" for x in line.get_xdata()) == [
        2.5,
        10,
    ]
    write_report([run.folder for run in runs], tmp_path / "out")
    assert page_of(tmp_path / "out").row("measured")[-1] == "2.500"
    assert page_of(tmp_path / "out").row("clocked")[-1] == "10.000 (wall)"


def test_without_traffic_there_is_no_picture_of_it(make_run, tmp_path):
    silent = {"communication": {"bytes_up": None, "bytes_down": 5}}
    written = write_report([make_run("a", **silent), make_run("b", seed=1, **silent)], tmp_path / "out")
    assert "communication.png" not in [p.name for p in written]


def test_names_cannot_break_the_markdown_table(make_run, tmp_path):
    write_report([make_run("a", method="a|b"), make_run("b", method="<i>*x*")], tmp_path / "out")
    rows = [line for line in (tmp_path / "out" / "table.md").read_text().splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert any(r"a\|b" in row for row in rows)
    assert any(r"\<i\>\*x\*" in row for row in rows)


def test_a_run_named_twice_counts_once(make_run):
    folder = make_run()
    written = write_report([folder, folder / ".." / folder.name])
    assert [path.resolve() for path in written] == [(folder / name).resolve() for name in SINGLE]


# --------------------------------------------------------------------------------------------------- broken input


def test_no_run_at_all():
    with pytest.raises(ReportError, match="no run directory"):
        write_report([])


def test_several_runs_need_a_folder_of_their_own(make_run):
    folders = [make_run("a"), make_run("b", seed=1)]
    with pytest.raises(ReportError, match="2 runs are compared in a folder of their own"):
        write_report(folders)
    with pytest.raises(ReportError, match=r"b is a run's own folder"):
        write_report(folders, folders[1])
    assert not (folders[1] / "report.html").exists()


@pytest.mark.parametrize("text", ["{", '{"schema": 2}', json.dumps(results(seconds=7, seed=2))])
def test_one_bad_run_stops_no_comparison_and_is_named_once(make_run, tmp_path, caplog, text):
    folders = [make_run("a"), make_run("bad"), make_run("b", seed=1)]
    (folders[1] / "results.json").write_text(text)
    write_report(folders, tmp_path / "both")
    assert [record.getMessage().count(str(folders[1])) for record in caplog.records] == [1]
    assert "<h1>Comparison of 2 of 3 runs</h1>" in (tmp_path / "both" / "report.html").read_text()
    assert "| hgp | digits | 0, 1 |" in (tmp_path / "both" / "table.md").read_text()


def test_a_comparison_of_nothing_readable_is_an_error(tmp_path, caplog):
    with pytest.raises(ReportError, match="no run can be read"):
        write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert f"{tmp_path / 'a' / 'results.json'} does not exist" in caplog.messages[0]
    assert f"{tmp_path / 'b' / 'results.json'} does not exist" in caplog.messages[1]
    assert not (tmp_path / "both").exists()


def test_missing_results(tmp_path):
    with pytest.raises(ReportError, match=re.escape(f"{tmp_path / 'results.json'} does not exist")):
        write_report([tmp_path])


def test_a_run_of_the_same_name_in_the_projects_folder_is_pointed_to(make_run, tmp_path, monkeypatch):
    make_run("home/runs/a")
    monkeypatch.setenv("FCIL_HOME", str(tmp_path / "home"))
    with pytest.raises(ReportError, match=re.escape(f"; did you mean {tmp_path / 'home/runs/a'}?")):
        write_report([Path("runs/a")])


def test_the_command_fails_if_a_folder_holds_no_run(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("server_app.report.write.write_comparison", lambda groups, folder, *_: [folder / "table.md"])
    words = ["report", "--output", str(tmp_path / "out"), str(make_run("a")), str(make_run("b", seed=1))]
    assert cli.main(words) == 0
    assert cli.main([*words, str(tmp_path / "a" / "results.json")]) == 0
    assert cli.main([*words, str(tmp_path / "c")]) == 1
    (make_run("d") / "results.json").write_text("{")
    assert cli.main([*words, str(tmp_path / "d")]) == 1
    assert str(tmp_path / "out" / "table.md") in capsys.readouterr().out


def test_several_runs_are_compared_in_a_folder_below_the_working_directory(make_run, tmp_path, monkeypatch):
    asked = []

    def note(runs, output, on_error):
        asked.append(output)
        return []

    monkeypatch.setattr("server_app.report.write.write_report", note)
    first, second = str(make_run("a")), str(make_run("b", seed=1))
    assert cli.main(["report", first, second]) == 0
    assert cli.main(["report", first]) == cli.main(["report", first, f"{first}/results.json"]) == 0
    assert cli.main(["report", first, "comparison", second]) == 0
    assert asked == [Path("comparison"), None, None, Path("comparison")]


@pytest.mark.parametrize("text", ["", '{"schema": 1', "[1, 2]", "\xff", "null", "{}", '{"schema": 1}'])
def test_a_file_that_is_no_results_json_is_named(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ReportError, match=f"{re.escape(str(path))} is no results.json of schema 1"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 2}, "its schema is 2"),
        ({"status": None}, "'status'"),
        ({"num_tasks": "5"}, "str"),
        ({"num_tasks": 5}, "reshape"),
        ({"accuracy_matrix": 7}, "int"),
        ({"accuracy_matrix": [[0.5, None, None], [0.5, 50, None], [None] * 3]}, "after task 2 on task 2 is 50"),
        ({"accuracy_matrix": [[0.5, None, None], [None] * 3, [0.5] * 3]}, "after task 2 on task 1 is missing"),
        ({"confusion": [[1, 2], [3, 4]]}, "reshape"),
        ({"clients": [{"name": "alice"}]}, "'class_counts'"),
        ({"federated_bias": {"prototype_distance": [1]}}, "reshape"),
        ({"communication": [[1]]}, "'communication'"),
        ({"environment": "x"}, "'environment'"),
        ({"method": ["hgp"]}, "'method'"),
        ({"dataset": 7}, "'dataset'"),
    ],
)
def test_results_of_another_form_name_the_path_and_the_reason(make_run, changes, reason):
    folder = make_run(**changes)
    expected = f"{re.escape(str(folder / 'results.json'))} is no results.json of schema 1 .*{reason}"
    with pytest.raises(ReportError, match=expected):
        load_run(folder)


def test_broken_config_names_its_path(make_run):
    folder = make_run(config={})
    (folder / "config.yaml").write_text("a: [1, 2")
    with pytest.raises(ReportError, match=re.escape(str(folder / "config.yaml"))):
        load_run(folder)


def test_losses_that_are_not_numbers_are_shown(make_run):
    rounds = [{"task": 1, "round": n, "train_loss": loss, "server": None} for n, loss in ((1, math.nan), (2, None))]
    folder = make_run(rounds=rounds)
    write_report([folder])
    assert page_of(folder).row("1", "1") == ["1", "1", "nan"]
    assert page_of(folder).row("1", "2") == ["1", "2", "-"]


@pytest.mark.parametrize("changes", [{"rounds": [None]}, {"rounds": 3}])
def test_what_cannot_be_drawn_is_the_same_error(make_run, changes):
    folder = make_run(**changes)
    with pytest.raises(ReportError, match=f"{re.escape(str(folder / 'results.json'))} is no results.json of schema 1"):
        write_report([folder])


def test_runs_in_which_fewer_tasks_came_than_others_are_compared(make_run, tmp_path):
    """With class-order=appearing num-tasks is a limit, the same in both runs."""
    config = {"num-tasks": 3, "class-order": "appearing"}
    changes = {"num_tasks": 2, "tasks": [[2, 0], [1]], "per_task_seen_accuracy": SEEN[:2]}
    changes["accuracy_matrix"] = [row[:2] for row in MATRIX[:2]]
    folders = [make_run("three", config), make_run("two", config, **changes)]
    write_report(folders, tmp_path / "compared")
    labels = {row[0] for row in page_of(tmp_path / "compared").rows[1:3]}
    assert labels == {"hgp (num-tasks 2)", "hgp (num-tasks 3)"}


def test_a_label_has_no_key_that_its_partition_does_not_read(make_run):
    of_hgp = {"partition": "dirichlet", "dirichlet-beta": 0.1, "classes-per-client": 2}
    of_fedavg = {"partition": "quantity", "dirichlet-beta": 0.5, "classes-per-client": 2}
    runs = [make_run("a", method="hgp", config=of_hgp), make_run("b", method="fedavg", config=of_fedavg)]
    labels = {group.label for group in group_runs([load_run(run) for run in runs])}
    assert labels == {"hgp (partition dirichlet)", "fedavg (partition quantity)"}


def test_the_number_at_a_curves_end_and_the_bars_of_a_point(tmp_path) -> None:
    """56.25 % after the last task; final averages 60, 54 and 48 %: 54 with a deviation of 6 points."""
    runs = []
    for seed in range(3):
        (folder := tmp_path / str(seed)).mkdir()
        (folder / "results.json").write_text(json.dumps(results(seed=seed, **scaled(1 - 0.1 * seed))))
        runs.append(load_run(folder))
    texts = [text.get_text() for text in figures.accuracy_figure(runs[0]).axes[0].texts]
    assert [text for text in texts if "." in text] == ["56.2"]
    (axes,) = tradeoffs.communication_figure(group_runs(runs)).axes
    heights = [np.ptp(bars.get_segments()[0][:, 1]) for bars in axes.containers[0].lines[2]]
    assert sorted(heights) == pytest.approx([0, 12])


def test_the_bar_of_a_cost_that_differs_between_seeds(make_run):
    """5.5 and 7.5 MB: 6.5 with a deviation of 1.41."""
    sent = {"bytes_up": 4_000_000, "bytes_down": 3_500_000}
    runs = [make_run("a", seed=0), make_run("b", seed=1, communication=sent)]
    (axes,) = tradeoffs.communication_figure(group_runs([load_run(run) for run in runs])).axes
    widths = [np.ptp(bars.get_segments()[0][:, 0]) for bars in axes.containers[0].lines[2]]
    assert sorted(widths) == pytest.approx([0, 2 * 2**0.5])


def test_a_task_without_test_images_leaves_its_mean_blank(make_run):
    folder = make_run(done=1, samples_per_task=[0, 100, 200], accuracy_matrix=[[None] * 3] * 3)
    write_report([folder])
    rows = page_of(folder).rows
    head = next(i for i, row in enumerate(rows) if row[:1] == ["After task"])
    assert [row[-1] for row in rows[head : head + 2]] == ["mean", ""]
