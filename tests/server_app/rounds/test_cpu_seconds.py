"""Processor seconds in results.json: of all threads, without pictures, and summed over the parts of a resumed run."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from client_app.app import app as client
from server_app.errors import RunError
from server_app.rounds import report_drawer
from server_app.rounds.run import run_experiment
from server_app.run_files.results import Results
from server_app.transport.flower_grid import GridTransport
from task.config.parsing import parse
from task.scenario.scenario import build_scenario
from tests.helpers.flower import LoopbackGrid
from tests.helpers.runs import Values, folder_of, interrupt, results_of, run


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture
def results(tiny: Values, tmp_path: Path) -> Results:
    config = parse(tiny)
    return Results(tmp_path, config, build_scenario(config))


def test_threads_count_and_waiting_does_not(results: Results) -> None:
    results.start_cpu_clock()
    thread = threading.Thread(target=busy, args=(0.2,))
    thread.start()
    busy(0.2)
    thread.join()
    time.sleep(0.5)
    results.write()
    assert 0.4 <= results.seconds["cpu_total"] < 0.6
    results.leave_out_cpu(0.3)
    results.write()
    assert 0.1 <= results.seconds["cpu_total"] < 0.3


def test_what_the_first_task_took_stays_when_later_ones_go_on(results: Results) -> None:
    results.start_cpu_clock()
    busy(0.1)
    results.add_evaluation(0, np.eye(12, dtype=np.int64), np.zeros(12, np.int64))
    busy(0.2)
    results.add_evaluation(1, np.eye(12, dtype=np.int64), np.zeros(12, np.int64))
    results.write()
    assert 0.1 <= results.seconds["cpu_first_task"] < 0.2
    assert results.seconds["cpu_total"] >= 0.3


@pytest.mark.parametrize(
    ("before", "rounds", "clock", "expected"),
    [
        ({"total": 50.0, "cpu_total": 40.0}, 1, True, 40.0),
        ({"total": 50.0}, 1, True, None),  # by code that did not measure it
        ({"total": 50.0, "cpu_total": 40.0}, 1, False, None),  # goes on through Flower
    ],
)
def test_parts_of_a_run_add_up_or_nothing_is_recorded(
    results: Results, before: dict[str, float], rounds: int, clock: bool, expected: float | None
) -> None:
    if clock:
        results.start_cpu_clock()
    (results.directory / "rounds.jsonl").write_text("{}\n")
    state = results.export_state() | {"rounds": [None] * rounds}
    state["seconds"] = results.seconds | before
    results.restore(state)
    busy(0.1)
    results.rounds = []
    results.write()
    recorded = json.loads((results.directory / "results.json").read_text())["seconds"].get("cpu_total")
    assert recorded is None if expected is None else expected + 0.1 <= recorded < expected + 0.5


def test_pictures_are_left_out(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_drawer, "write_report", lambda folders: busy(0.3))
    drawer = report_drawer.ReportDrawer(results.directory, results.leave_out_cpu)
    results.start_cpu_clock()
    drawer.draw_in_background()
    drawer.stop()
    results.write()
    assert results.seconds["cpu_total"] < 0.2


def test_only_runs_of_one_process_have_it(tiny: Values) -> None:
    assert run(tiny)["seconds"]["cpu_total"] > 0
    flower = tiny | {"run-name": "flower", "num-clients": 2}
    run_experiment(parse(flower), GridTransport(LoopbackGrid(client, 2)))
    assert "cpu_total" not in results_of(folder_of(flower))["seconds"]


def test_a_resumed_run_has_it(tiny: Values) -> None:
    values = tiny | {"rounds-per-task": 2}
    folder = interrupt(values, cut_in_round=3)
    before = json.loads((folder / "results.json").read_text())["seconds"]["cpu_total"]
    assert run({"resume": str(folder)})["seconds"]["cpu_total"] > before


def test_the_server_computes_with_as_many_threads_as_the_run_says(
    tiny: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients set the number too, but here no node answers."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    with pytest.raises(RunError, match="0 clients can take part"):
        run(tiny | {"threads": 3}, broken=lambda node, kind: True)
    assert numbers == [3]
