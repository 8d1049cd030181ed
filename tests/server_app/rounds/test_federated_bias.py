"""Federated bias of a run: the local models' answers before aggregation, and how far their prototypes are apart."""

import json
import math

import numpy as np
import pytest

from client_app.client import Node, handle
from server_app.rounds.measurement import local_distance, response_entropies
from strategies.base import Update
from task.config.parsing import parse
from task.keys import ConfigError
from task.metrics import prototype_distance
from task.models.evaluation import extract_features
from task.models.model import build_model
from task.scenario.scenario import build_scenario
from task.utils.atomic import write_json
from tests.helpers.runs import run, train_message, without_times


def test_local_models_answer_and_the_global_one_stays(tiny):
    """One local model always names the third class; another the first or second, by the sign of one feature."""
    config = parse(tiny | {"method": "fedavg", "prompt": "none"})
    scenario, model = build_scenario(config), build_model(config, [6])
    order, before = np.array(scenario.schedule.tasks[0]), model.export()
    stubborn, split = (Update("", 1, {n: np.zeros_like(a) for n, a in before.items()}, {}) for _ in range(2))
    stubborn.arrays["head.bias"][2] = 1
    split.arrays["head.weight"][:2, 5] = 1, -1
    split.arrays["head.bias"][2:] = -1e3
    seen = np.flatnonzero(np.isin(scenario.dataset.test_labels, order))
    p = float((extract_features(model, scenario.dataset.test_images, seen)[:, 5] > 0).float().mean())
    assert 0 < p < 1
    entropies = [e for u in (stubborn, split, stubborn) for e in response_entropies(model, u, scenario.dataset, order)]
    assert entropies == pytest.approx([0, -p * math.log(p) - (1 - p) * math.log(1 - p), 0])
    assert all((before[n] == a).all() for n, a in model.export().items())


def test_a_run_notes_its_bias_without_changing_anything_else(tiny):
    plain = run(tiny | {"run-name": "plain"})
    measured = run(tiny | {"federated-bias": True, "run-name": "measured"})
    one, other = plain["federated_bias"], measured["federated_bias"]
    changed = {"federated_bias", "communication", "rounds"}  # the key itself travels, a byte shorter as true than false
    assert {n: v for n, v in without_times(plain).items() if n not in changed} == {
        n: v for n, v in without_times(measured).items() if n not in changed
    }
    assert one["response_entropies"] == [[], []]
    assert one["prototype_distance"] == other["prototype_distance"]
    for t, seen in enumerate((6, 12)):
        entropies = other["response_entropies"][t]
        assert len(entropies) == 3
        assert all(0 <= h <= math.log(seen) for h in entropies)
        assert other["prototype_distance"][t] > 0


def test_the_distance_is_that_of_the_means_that_clients_send(tiny):
    """HGP's Gaussians of three clients, computed once more from their messages."""
    config = parse(tiny)
    answers = [handle("train", train_message(config), Node({"partition-id": i})) for i in range(3)]
    updates = [Update(str(i), 1, a.arrays, a.statistics) for i, a in enumerate(answers)]
    ids, means = (np.concatenate([a.statistics[name] for a in answers]) for name in ("class_ids", "means"))
    assert local_distance(updates) == prototype_distance(ids, means)
    assert local_distance(updates) == pytest.approx(run(tiny)["federated_bias"]["prototype_distance"][0])
    assert math.isnan(local_distance([Update("", 1, {}, {})]))


def test_a_method_that_trains_nothing_has_no_local_model(tiny):
    with pytest.raises(ConfigError, match="trains no model in every task"):
        parse(tiny | {"method": "ncm", "federated-bias": True})
    distances = run(tiny | {"method": "ncm"})["federated_bias"]["prototype_distance"]
    assert all(d > 0 for d in distances)


def test_the_results_say_who_holds_what(tiny):
    results = run(tiny)
    assert [c["name"] for c in results["clients"]] == ["client-0000", "client-0001", "client-0002"]
    counts = np.array([c["class_counts"] for c in results["clients"]])
    assert counts.sum(axis=0).tolist() == np.bincount(build_scenario(parse(tiny)).dataset.train_labels).tolist()


def test_results_agree_with_their_confusion(tiny):
    results = run(tiny)
    confusion = np.array(results["confusion"])
    by_class = confusion.diagonal() / confusion.sum(axis=1)
    assert list(results["per_class_accuracy"].values()) == pytest.approx(by_class.tolist())
    assert results["metrics"]["last_accuracy"] == pytest.approx(confusion.trace() / confusion.sum())
    assert results["per_task_mean_accuracy"][-1] == pytest.approx(results["metrics"]["final_average_accuracy"])


def test_results_are_written_with_a_list_of_numbers_on_one_line(tmp_path):
    value = {"a": [1, -2.5e-7, None], "b": [[1, 2], []], "c": ["[\n1,\n2]", "x"], "d": {"e": [True]}}
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == value
    assert ' "a": [ 1, -2.5e-07, null ],\n' in text
    assert "  [ 1, 2 ],\n" in text
