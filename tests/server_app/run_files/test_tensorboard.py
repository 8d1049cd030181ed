"""Watching a run while it goes on: the log, the report, TensorBoard."""

import importlib.util
import json
import logging
import re
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import server_app.rounds.report_drawer
from server_app.cli import main as cli
from server_app.run_files.results import Results
from task.keys import ConfigError
from task.message import Kind, Packet
from tests.helpers.runs import Values, folder_of, interrupt, run


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Values by tag and step."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_the_log_says_how_far_the_run_is(tiny: Values, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="server_app.rounds.run"):
        run(tiny, broken=lambda node, kind: node == 1 and kind == "train")
    lines = [message.splitlines() for message in caplog.messages if message.startswith("task ")]
    shown = r"task 1/2, round 1/1  3 clients, 1 failed  loss \d\.\d+  accuracy on all seen classes \d+\.\d%  "
    assert re.fullmatch(shown + r"0:\d\d, about 0:\d\d left", lines[0][0])
    assert lines[0][1] == "    client-0001: no answer within 3600 s"
    assert lines[1][0].endswith("about 0:00 left")


@pytest.mark.ci
@pytest.mark.pictures
def test_a_run_that_goes_on_can_be_reported(tiny: Values) -> None:
    folder, codes = folder_of(tiny), []

    def look(node: int, kind: Kind, packet: Packet) -> Packet:
        if kind == "train" and packet.config["name"] == "client-0000" and (folder / "rounds.jsonl").exists():
            deadline = time.monotonic() + 60  # it is drawn beside the run
            while not (folder / "report.html").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            (folder / "report.html").unlink()
            codes.append(cli.main(["report", str(folder)]))
            assert json.loads((folder / "results.json").read_text())["status"] == "running"
            page = (folder / "report.html").read_text()
            assert "This run has not finished." in page
            assert 'class="badge running"' in page
        return packet

    run(tiny, tamper=look)
    assert codes == [0]


def test_tensorboard_has_what_the_results_have(tiny: Values) -> None:
    results = run(
        tiny | {"tensorboard": True, "rounds-per-task": 2}, broken=lambda node, kind: node == 1 and kind == "train"
    )
    logged, rounds = scalars(folder_of(tiny)), results["rounds"]
    for tag, name in [
        ("train/loss", "train_loss"),
        ("train/accuracy", "train_accuracy"),
        ("bytes/up", "bytes_up"),
        ("bytes/down", "bytes_down"),
        ("round/seconds", "seconds"),
    ]:
        assert logged.pop(tag) == pytest.approx({n: r[name] for n, r in enumerate(rounds, 1)})
    assert logged.pop("round/failures") == dict.fromkeys(range(1, 5), 1.0)
    seen, matrix = results["per_task_seen_accuracy"], results["accuracy_matrix"]
    assert logged.pop("accuracy/seen classes") == pytest.approx({2: seen[0], 4: seen[1]})
    assert logged.pop("accuracy/task 1") == pytest.approx({2: matrix[0][0], 4: matrix[1][0]})
    assert logged.pop("accuracy/task 2") == pytest.approx({4: matrix[1][1]})
    assert not logged


@pytest.mark.ci
def test_tensorboard_of_a_resumed_run_is_that_of_a_whole_one(tiny: Values) -> None:
    values = tiny | {"tensorboard": True, "rounds-per-task": 2}
    run(values | {"run-name": "whole"})
    cut = interrupt(values | {"run-name": "cut"}, cut_in_round=3)
    run({"resume": str(cut)})
    times = {"round/seconds"}
    assert {t: v for t, v in scalars(cut).items() if t not in times} == {
        t: v for t, v in scalars(cut.with_name("whole")).items() if t not in times
    }


def test_without_the_package_nothing_is_started(
    tiny: Values, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        run(tiny | {"tensorboard": True})
    assert cli.main(["run", *(f"{name}={value}" for name, value in tiny.items()), "tensorboard=true"]) == 2
    assert "pip install tensorboard" in capsys.readouterr().err
    assert not Path(tiny["output-dir"]).exists()


def test_nothing_is_written_unasked(tiny: Values) -> None:
    run(tiny)
    assert not (folder_of(tiny) / "tensorboard").exists()


def state_of(folder: Path) -> tuple[str, int]:
    """Status and number of rounds, as results.json has them."""
    results = json.loads((folder / "results.json").read_text())
    return results["status"], len(results["rounds"])


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Slow pictures; status and rounds of the run that each of them shows."""
    seen: list[tuple[str, int]] = []

    def draw(folders: list[Path]) -> None:
        seen.append(state_of(folders[0]))
        time.sleep(1.0)

    monkeypatch.setattr(server_app.rounds.report_drawer, "write_report", draw)
    return seen


def drawing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("report")]


@pytest.mark.ci
def test_slow_pictures_hold_up_nothing_and_end_with_the_run(
    tiny: Values, drawings: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for after rounds 1, 2 and 4: those that wait for a drawing under way give way to the newest."""
    draw = server_app.rounds.report_drawer.write_report

    def draw_until_the_last_round(folders: list[Path]) -> None:
        draw(folders)
        while state_of(folders[0])[1] < 4:
            time.sleep(0.05)

    monkeypatch.setattr(server_app.rounds.report_drawer, "write_report", draw_until_the_last_round)
    run(tiny | {"rounds-per-task": 2})
    assert drawings[0] == ("running", 1)
    assert drawings[-1] == ("finished", 4)
    assert len(drawings) <= 3
    assert drawing_threads() == []


def test_no_drawing_outlives_a_run_whose_disk_is_full(
    tiny: Values, drawings: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fills while the pictures of the first round are being drawn."""
    write = Results.write

    def full(results: Results) -> None:
        if len(results.rounds) > 1:
            raise OSError(28, "No space left on device")
        write(results)

    monkeypatch.setattr(Results, "write", full)
    with pytest.raises(OSError, match="No space"):
        run(tiny | {"rounds-per-task": 2})
    assert drawings == [("running", 1)]
    assert drawing_threads() == []
