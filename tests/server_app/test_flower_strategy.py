"""The Strategy adapter: runs in anybody's ServerApp."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from client_app.app import app as client
from client_app.flower_records import to_records
from server_app.errors import RunError
from server_app.flower_strategy import HGP, FCILStrategy, FedAvg
from server_app.rounds.run import run_experiment
from task.config.schema import Config
from task.keys import ConfigError
from task.message import Packet
from tests.helpers.flower import LoopbackGrid, N
from tests.helpers.runs import TWO, comparable, folder_of, interrupt, settings

KEYS = {key.replace("-", "_"): value for key, value in TWO.items() if key != "rounds-per-task"}


def test_strategy_runs_in_anybodys_server_app(tmp_path):
    strategy = HGP(**KEYS, output_dir=str(tmp_path), run_name="adapter")
    evaluated = []
    result = strategy.start(
        grid=LoopbackGrid(client, 2),
        initial_arrays=ArrayRecord(),
        num_rounds=2,
        evaluate_fn=lambda number, arrays: evaluated.append((number, list(arrays))) or MetricRecord({"mine": 1.0}),
    )
    results = json.loads((tmp_path / "adapter" / "results.json").read_text())
    assert results["rounds_per_task"] == 1
    assert [results["method"], results["status"]] == ["hgp", "finished"]
    assert evaluated == [(2, list(result.arrays))]
    assert result.arrays
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert result.train_metrics_clientapp[1]["train_loss"] == results["rounds"][0]["train_loss"]
    assert result.train_metrics_clientapp[1]["participants"] == 2
    assert result.evaluate_metrics_serverapp == {
        1: {"accuracy": results["per_task_seen_accuracy"][0]},
        2: {"accuracy": results["per_task_seen_accuracy"][1], "mine": 1.0},
    }
    assert "accuracy" in str(result)


def test_strategy_resumes_a_run(tmp_path):
    """In the run's folder and with its keys, which need not be given again."""
    grid, whole = LoopbackGrid(client, 2), settings(tmp_path, "whole")
    FCILStrategy(**{key.replace("-", "_"): value for key, value in whole.items()}).start(grid, ArrayRecord())
    stopped = interrupt(settings(tmp_path, "stopped"), 2)
    with pytest.raises(ConfigError, match="num-tasks = 3 is not possible with resume: the run has 2"):
        HGP(resume=str(stopped), num_tasks=3)
    result = HGP(resume=str(stopped)).start(grid, ArrayRecord(), num_rounds=2)
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert comparable(stopped) == comparable(folder_of(whole))
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "stopped"}


def test_what_clients_have_evaluated_is_not_the_servers(tmp_path):
    keys = KEYS | {"method": "ncm", "num_tasks": 1, "rounds_per_task": 1, "evaluate": "clients"}
    strategy = FCILStrategy(**keys, output_dir=str(tmp_path), run_name="clients")
    result = strategy.start(LoopbackGrid(client, 2), ArrayRecord())
    accuracy = json.loads((tmp_path / "clients" / "results.json").read_text())["per_task_seen_accuracy"][0]
    assert result.evaluate_metrics_clientapp == {1: {"accuracy": accuracy}}
    assert result.evaluate_metrics_serverapp == {}


def test_answers_are_waited_for_as_long_as_start_says(tmp_path, monkeypatch):
    grid = LoopbackGrid(client, 2)
    grid.silent.add(N[0])
    monkeypatch.setattr("server_app.flower_strategy.run_experiment", require_timeout)
    strategy = HGP(**KEYS, rounds_per_task=1, quorum=2, output_dir=str(tmp_path), run_name="late")
    with pytest.raises(RunError, match=r"no answer within 0\.2 s"):
        strategy.start(grid, ArrayRecord(), timeout=0.2)


def require_timeout(config: Config, *more: Any) -> Path:
    """The run, which would wait for an hour if nobody had told it to wait for less."""
    assert config.round_timeout == 0.2
    return run_experiment(config, *more)


def test_the_last_round_is_the_last_that_was(tmp_path, monkeypatch):
    """With class-order=appearing fewer tasks may come than num-tasks allows."""
    line = {"train_loss": 1.0, "server": {}, "seen_accuracy": 0.5}
    (tmp_path / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    safetensors.numpy.save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("server_app.flower_strategy.run_experiment", lambda *_: tmp_path)
    numbers = []
    HGP(num_tasks=5).start(
        LoopbackGrid(client, 2), ArrayRecord(), evaluate_fn=lambda number, arrays: numbers.append(number)
    )
    assert numbers == [1]


def test_strategy_starts_from_given_arrays(tmp_path):
    def start(name: str, arrays: ArrayRecord) -> ArrayRecord:
        keys = KEYS | {"num_tasks": 1, "rounds_per_task": 1, "learning_rate": 1e-9}
        strategy = FedAvg(**keys, output_dir=str(tmp_path), run_name=name)
        return strategy.start(LoopbackGrid(client, 2), arrays).arrays

    seeded = start("seeded", ArrayRecord())
    [name] = [k for k in seeded if "prompt" in k]
    first = {k: a.numpy() for k, a in seeded.items()}
    first[name] = np.full_like(first[name], 0.125)
    moved = start("given", to_records(Packet(arrays=first))["arrays"])
    np.testing.assert_allclose(moved[name].numpy(), 0.125, atol=1e-4)
    assert not np.allclose(seeded[name].numpy(), 0.125, atol=1e-4)


def test_strategy_refuses_what_it_cannot_do():
    grid = LoopbackGrid(client, 2)
    with pytest.raises(ConfigError, match="num-task"):
        HGP(num_task=5)
    with pytest.raises(ValueError, match="num_rounds = 7 does not fit: num_tasks = 5 times rounds_per_task = 5 is 25"):
        HGP(num_tasks=5).start(grid, ArrayRecord(), num_rounds=7)
    with pytest.raises(ValueError, match="num_rounds = 10 does not fit"):
        HGP(num_tasks=5, rounds_per_task=3).start(grid, ArrayRecord(), num_rounds=10)
    adapting = {"method": "fedrda", "fedrda_adaptation_rounds": 5, "num_tasks": 2}
    words = "num_rounds = {} does not fit: 5 rounds of adaptation and num_tasks = 2 times rounds_per_task = 1 is 7"
    for number in (3, 8):
        with pytest.raises(ValueError, match=words.format(number)):
            FCILStrategy(**adapting).start(grid, ArrayRecord(), num_rounds=number)
    with pytest.raises(ValueError, match="images: give fedrda_adaptation_rounds a number"):
        FCILStrategy(method="fedrda", num_tasks=5).start(grid, ArrayRecord(), num_rounds=10)
    with pytest.raises(ValueError, match="lr"):
        HGP().start(grid, ArrayRecord(), train_config=ConfigRecord({"lr": 0.1}))
    with pytest.raises(ValueError, match="share"):
        HGP().start(grid, ArrayRecord(), evaluate_config=ConfigRecord({"share": 0.1}))
    strategy = FCILStrategy(method="head-only")
    assert strategy.config.method == "head-only"
    strategy.summary()
    for step in (strategy.configure_train, strategy.configure_evaluate):
        with pytest.raises(NotImplementedError, match="start"):
            step(1, ArrayRecord(), ConfigRecord(), grid)
    for step in (strategy.aggregate_train, strategy.aggregate_evaluate):
        with pytest.raises(NotImplementedError, match="start"):
            step(1, [])
