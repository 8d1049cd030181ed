"""Who learns from what in which round, and that nobody can report more than the server was told at hello."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from client_app.client import Node, handle
from client_app.objectives.base import LocalData, Objective
from client_app.training import train_locally
from server_app.report.write import load_run, write_report
from task.config.parsing import parse
from task.config.schema import Config
from task.keys import ConfigError
from task.message import Kind, Packet
from task.methods import METHODS
from task.models.evaluation import extract_features
from task.models.model import build_model
from task.scenario import client_data
from task.scenario.client_data import all_client_positions, client_task_data, learnable_classes
from task.scenario.partition import PARTITIONS, partition
from task.scenario.scenario import build_scenario
from task.utils.seeding import torch_rng
from tests.helpers.marks import rest_in_ci
from tests.helpers.runs import hello_message, run

STATELESS = {"partition": "split-ratio", "num-clients": 4, "rounds-per-task": 3, "imbalance-ratio": 0.5}
EACH = {
    "iid": {"partition": "iid"},
    "dirichlet": {"partition": "dirichlet", "dirichlet-beta": 0.1},
    "quantity": {"partition": "quantity", "classes-per-client": 2},
    "class-share": {"partition": "class-share"},
    "split-ratio": STATELESS,
    "joint": {"method": "joint", "rounds-per-task": 2},
    "consensus": {"method": "fedavg", "partition": "consensus"},
    "joint, consensus": {"method": "joint", "partition": "consensus"},
}
OWN = {"partition": "consensus", "consensus-rate": 0.4, "num-tasks": 3}
ABLE = [row for row in METHODS.values() if row.asynchronous]


def counts(config: Config, positions: np.ndarray) -> list[int]:
    dataset = build_scenario(config).dataset
    return np.bincount(dataset.train_labels[positions], minlength=len(dataset.class_names)).tolist()


def ask(config: Config, client: int, task: int = 0, round: int = 0) -> Packet:
    """A client's answer to the train message of a round."""
    model = build_model(config, build_scenario(config).task_sizes(task))
    place = {"task": task + 1, "round": round + 1, "server-round": task * config.rounds_per_task + round + 1}
    place |= {"ends-task": False, "backbone-sha256": model.backbone.sha256}
    place |= {"run-config": json.dumps(config.for_clients())}
    return handle("train", Packet(arrays=model.export(), config=place), Node({"partition-id": client}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"partition": "quantity", "classes-per-client": 100},
            "classes-per-client=100: allowed are .* change classes-per",
        ),
        ({"partition": "dirichlet", "dirichlet-min-size": 10**6}, "dirichlet-min-size=1000000: allowed are"),
        ({"method": "fedavg", "partition": "consensus", "num-tasks": 11}, "num-tasks=11: .* at consensus-rate=0.5"),
    ],
)
def test_partitions_name_the_run_keys(changes: dict, words: str, tiny: dict) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        client_task_data(parse(tiny | changes), 0, 0, 0)
    assert "_" not in str(caught.value)


# SHA-256 of positions of the digits, 10 clients, seed 0, recorded once: others make every kept run irreproducible
PINNED: dict[str, str] = {
    "iid": "22a7963dbee292875a86016ad53d5d4a2aa978b3224488ef2a28fc501eb8ca09",
    "dirichlet": "74d2f217bdb49bdb4d80178ea327a876ca35e37691151e823f21237dab90e0ac",
    "quantity": "e46759857f92008cbf09ff77bb73f10de32ab625a79ffb545b20dbe9d9a6530c",
    "class-share": "bc55295cddbab9a6ed8cc73a09cb56e28a4a57b8b260337cea7fc4f92e586088",
    "split-ratio": "1c911a1ec36dd2eecaa966dda81ba7e1a1afc2f910bcf690630534290fcff22c",
    "consensus": "b8619efd04af948211b6116134dfbb6b8fc9bc20a0b5bdaa76f21b075b3bd2a5",
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_partitions_of_the_digits_are_pinned(name: str) -> None:
    """In the second round of each task, as it matters to split-ratio alone."""
    config = parse({"method": "fedavg", "partition": name, "num-clients": 10, "rounds-per-task": 2})
    places = itertools.product(range(10), range(config.num_tasks))
    parts = [client_task_data(config, client, task, 1).positions for client, task in places]
    assert sum(map(len, parts)) > 100
    text = ";".join(",".join(map(str, part.tolist())) for part in parts)
    assert hashlib.sha256(text.encode()).hexdigest() == PINNED[name]


@pytest.mark.parametrize("name", EACH)
def test_nobody_ever_holds_more_than_hello_said(name: str, tiny: dict) -> None:
    config = parse(tiny | EACH[name])
    for client in range(config.num_clients):
        said = handle("hello", hello_message(config.flat()), Node({"partition-id": client})).arrays["class_counts"]
        assert said.tolist() == counts(config, all_client_positions(config, client))
        for task in range(2):
            for round in range(config.rounds_per_task):
                task_data = client_task_data(config, client, task, round, holds_pool=True)
                held = counts(config, task_data.positions)
                assert all(n <= most for n, most in zip(held, said, strict=True))
                allowed = learnable_classes(config, build_scenario(config).schedule, task)
                assert {c for c, n in enumerate(held) if n} <= set(task_data.classes) <= set(allowed)


def test_split_ratio_draws_anew_in_every_round(tiny: dict) -> None:
    """Of 6 classes 4 (0.6 x 6 = 3.6), of 32 images 3.2, 2.5, 2.0 and 1.6 (0.1 x 32 x 0.5^(i/3))."""
    config = parse(tiny | STATELESS)
    rounds = [
        [[client_task_data(config, m, task, round).positions for m in range(4)] for round in range(3)]
        for task in range(2)
    ]
    sizes = [
        sorted(filter(None, counts(config, positions)), reverse=True)
        for task in rounds
        for round in task
        for positions in round
    ]
    assert sizes == [[3, 3, 2, 2]] * 24
    assert len({positions.tobytes() for task in rounds for round in task for positions in round}) == 24


def test_a_round_draws_for_its_own_task_only(tiny: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(tiny | STATELESS | {"seed": 7})  # a seed of its own: nothing of it has been kept
    asked: list[Sequence[Sequence[int]]] = []
    spy = lambda name, labels, clients, tasks, *rest, **more: (  # noqa: E731
        asked.append(tasks) or partition(name, labels, clients, tasks, *rest, **more)
    )
    monkeypatch.setattr(client_data, "partition", spy)
    for client in range(4):
        ask(config, client, task=1, round=2)
    assert [[len(classes) for classes in tasks] for tasks in asked] == [[0, 6]]
    whole = partition(
        "split-ratio",
        build_scenario(config).dataset.train_labels,
        4,
        build_scenario(config).schedule.tasks,
        7,
        round=2,
        **config.partition_parameters,
    )
    for client, own in enumerate(whole):
        assert (own[1] == client_task_data(config, client, 1, 2).positions).all()


def test_clients_train_on_the_draw_of_the_messages_round(tiny: dict) -> None:
    config = parse(tiny | STATELESS | {"method": "ncm"})
    for task, round in ((0, 0), (0, 2), (1, 0)):
        answer = ask(config, 3, task, round)
        expected = counts(config, client_task_data(config, 3, task, round).positions)
        assert answer.metrics["num-examples"] == sum(expected) == 10
        counted = dict(zip(answer.statistics["class_ids"].tolist(), answer.statistics["counts"].tolist(), strict=True))
        assert counted == {c: n for c, n in enumerate(expected) if n}


@pytest.mark.parametrize("method", ["hepco", "fedavg", "ncm", "pip"])
def test_stateless_clients_take_part_without_failures(method: str, tiny: dict) -> None:
    results = run(tiny | STATELESS | {"method": method, "num-clients": 8, "clients-per-round": 3})
    assert results["status"] == "finished"
    assert not any(r["failures"] or r["idle"] for r in results["rounds"])
    assert len({tuple(r["participants"]) for r in results["rounds"]}) > 1


# joint


def test_the_pool_holds_all_images_so_far_and_nobody_else_any(tiny: dict) -> None:
    config = parse(tiny | {"method": "joint"})
    scenario = build_scenario(config)
    for task in range(2):
        seen = scenario.schedule.seen_classes(task)
        pool, other = (client_task_data(config, client, task, 0, holds_pool=client == 1) for client in (1, 2))
        assert counts(config, pool.positions) == [32 if c in seen else 0 for c in range(12)]
        assert pool.classes == seen
        assert not len(other.positions)


@pytest.mark.parametrize("prompt", ["shared", "dualprompt"])
def test_joint_equals_training_one_client_on_everything(prompt: str, tiny: dict) -> None:
    """The same model as two trainings by hand, on six classes and then on all twelve; others have nothing to do."""
    config = parse(tiny | {"method": "joint", "prompt": prompt, "partition": "dirichlet"})
    results = run(config.flat())
    assert [r["idle"] for r in results["rounds"]] == [["client-0001", "client-0002"]] * 2
    scenario, model = build_scenario(config), build_model(config, [])
    data, order = scenario.dataset, scenario.schedule.seen_classes(1)
    for task in range(2):
        model.begin_task(6)
        model.set_active_rows(np.arange(6 * (task + 1)))
        place = [order.index(label) for label in data.train_labels]
        chosen = np.flatnonzero(np.array(place) < 6 * (task + 1))
        local = LocalData(data.train_images, chosen, np.array(place)[chosen], "none")
        train_locally(model, Objective(config, Packet()), local, config, torch_rng(0, "local", 0, task + 1))
    saved = safetensors.numpy.load_file(Path(str(tiny["output-dir"])) / "run" / "model.safetensors")
    assert all((saved[name] == array).all() for name, array in model.export().items())


def test_one_task_of_joint_is_one_client_that_has_everything(tiny: dict) -> None:
    pooled = run(tiny | {"method": "joint", "num-tasks": 1, "num-clients": 3})
    alone = run(tiny | {"method": "fedavg", "num-tasks": 1, "num-clients": 1, "run-name": "alone"})
    assert pooled["per_class_accuracy"] == alone["per_class_accuracy"]
    assert pooled["rounds"][0]["train_loss"] == alone["rounds"][0]["train_loss"]


@pytest.mark.ci
def test_joint_is_a_ceiling_of_fedavg_whoever_takes_part(tiny: dict) -> None:
    values = tiny | {"num-clients": 6, "clients-per-round": 2, "rounds-per-task": 2, "local-epochs": 3}
    joint, fedavg = (run(values | {"method": method, "run-name": method}) for method in ("joint", "fedavg"))
    drawn = [r["participants"] for r in joint["rounds"]]
    assert drawn == [r["participants"] for r in fedavg["rounds"]]
    assert any("client-0000" not in names for names in drawn)
    assert [r["idle"] for r in joint["rounds"]] == [names[1:] for names in drawn]
    assert joint["metrics"]["final_average_accuracy"] > fedavg["metrics"]["final_average_accuracy"] + 0.2
    assert joint["metrics"]["forgetting"] < fedavg["metrics"]["forgetting"]


# consensus


def test_every_client_learns_its_own_sequence_and_every_image_is_learned_once(tiny: dict) -> None:
    config = parse(tiny | OWN | {"method": "fedavg"})
    scenario = build_scenario(config)
    everything = [[client_task_data(config, client, task, 1) for task in range(3)] for client in range(3)]
    assert [[task_data.classes for task_data in own] for own in everything] == scenario.streams
    for task_data in (task_data for own in everything for task_data in own):
        assert set(np.unique(scenario.dataset.train_labels[task_data.positions]).tolist()) == set(task_data.classes)
    dealt = np.concatenate([task_data.positions for own in everything for task_data in own])
    assert sorted(dealt.tolist()) == list(range(len(scenario.dataset.train_labels)))
    assert sorted(scenario.schedule.head_rows[scenario.schedule.seen_classes(2)].tolist()) == list(range(12))
    assert len({tuple(own[0].classes) for own in everything}) > 1


@pytest.mark.ci
def test_asynchronous_methods_draw_alike_and_evaluate_alike_in_both_ways(tiny: dict) -> None:
    drawn = []
    for method in ABLE:
        values = tiny | OWN | {"method": method.name, "num-tasks": 2, "num-clients": 4, "clients-per-round": 3}
        own = run(values | {"run-name": method.name})
        theirs = run(values | {"run-name": f"{method.name}-clients", "evaluate": "clients"})
        assert own["status"] == theirs["status"] == "finished"
        assert own["accuracy_matrix"] == theirs["accuracy_matrix"]
        assert own["stream"] == {"common": 2, "private": 4, "overlap": 6}  # K = 6: 0.4 x 6 = 2.4; 2 + 4 x 4 = 12 + 6
        assert not any(r["failures"] for r in own["rounds"])
        assert all(r["idle"] == (r["participants"][1:] if method.pooled else []) for r in own["rounds"])
        drawn.append((own["tasks"], [r["participants"] for r in own["rounds"]]))
    assert {method.name for method in ABLE} >= {"fedavg", "fedprok", "fedprox", "head-only", "joint", "ncm"}
    tasks, participants = drawn[0]
    # a method that adapts has more rounds, which come first
    assert all((t, p[: len(participants)]) == (tasks, participants) for t, p in drawn)


@pytest.mark.parametrize("prompt", METHODS["fedavg"].prompts[1:])
def test_every_prompt_of_fedavg_runs_asynchronously(prompt: str, tiny: dict) -> None:
    results = run(tiny | OWN | {"method": "fedavg", "prompt": prompt, "num-tasks": 2})
    assert results["status"] == "finished"
    assert not any(r["failures"] or r["idle"] for r in results["rounds"])


def test_only_rows_of_the_clients_own_classes_learn_old_ones_included(tiny: dict) -> None:
    """Nine of ten clients' second tasks hold a class that somebody has had in the first stage."""
    config = parse(tiny | OWN | {"method": "fedavg", "num-clients": 10})
    scenario, old = build_scenario(config), 0
    for client in range(10):
        sent, answer = build_model(config, scenario.task_sizes(1)).export(), ask(config, client, task=1)
        rows = np.sort(scenario.schedule.head_rows[scenario.streams[client][1]])
        for name in ("head.weight", "head.bias"):
            changed = (answer.arrays[name] != sent[name]).reshape(len(sent[name]), -1).any(axis=1)
            assert np.flatnonzero(changed).tolist() == rows.tolist()
        old += bool((rows < scenario.task_sizes(0)[0]).any())
    assert old >= 5


def test_ncm_ends_at_the_means_of_all_images_whoever_had_them_when(tiny: dict) -> None:
    config = parse(tiny | OWN | {"method": "ncm", "num-clients": 5})
    results = run(config.flat())
    data = build_scenario(config).dataset
    features = extract_features(build_model(config, []), data.train_images, np.arange(len(data.train_labels))).double()
    saved = safetensors.numpy.load_file(Path(str(tiny["output-dir"])) / "run" / "model.safetensors")
    for row, c in enumerate(c for task in results["tasks"] for c in task):
        expected = features[data.train_labels == c].mean(dim=0).numpy()
        assert np.allclose(saved["head.weight"][row], expected, rtol=1e-4, atol=1e-5)


def test_afcl_is_the_same_regression_whoever_had_which_class_when(tiny: dict) -> None:
    rows = []
    for partition_ in ({"partition": "iid"}, OWN):
        results = run(tiny | {"num-clients": 5, "num-tasks": 3} | partition_ | {"method": "afcl", "run-name": "afcl"})
        saved = safetensors.numpy.load_file(Path(str(tiny["output-dir"])) / "afcl" / "model.safetensors")
        shutil.rmtree(Path(str(tiny["output-dir"])) / "afcl")
        rows.append(saved["head.weight"][np.argsort(results["class_order"])])
    assert np.allclose(*rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", rest_in_ci(["fedprok", "ncm", "joint"], ["fedprok"]))
def test_a_stage_without_a_new_class_is_legal(method: str, tiny: dict) -> None:
    """All classes are common and each of six clients has its own order: two stages bring everything."""
    values = {"partition": "consensus", "consensus-rate": 1.0, "num-tasks": 4, "num-clients": 6}
    results = run(tiny | values | {"method": method})
    assert results["status"] == "finished"
    sizes = [len(task) for task in results["tasks"]]
    assert sizes[0] > 0
    assert sizes[-1] == 0
    for i, row in enumerate(results["accuracy_matrix"]):
        assert [a is not None for a in row] == [j <= i and size > 0 for j, size in enumerate(sizes)]
    assert None not in results["per_task_seen_accuracy"]
    last = [a for a in results["accuracy_matrix"][-1] if a is not None]
    assert results["metrics"]["final_average_accuracy"] == pytest.approx(np.mean(last))
    folder = Path(str(tiny["output-dir"])) / "run"
    written = write_report([folder])
    assert {p.name for p in written} >= {"accuracy.png", "forgetting.png", "report.html"}
    assert load_run(folder).finished


def test_a_class_that_a_client_never_has_is_refused_from_it(tiny: dict) -> None:
    config = parse(tiny | OWN | {"method": "ncm"})
    held = {c for task in build_scenario(config).streams[1] for c in task}

    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        if node == 1 and kind == "train":
            others = set(build_scenario(config).schedule.seen_classes(2)) - held
            packet.statistics["class_ids"][0] = min(others)
        return packet

    results = run(config.flat(), tamper=tamper)
    assert all([f["name"] for f in r["failures"]] == ["client-0001"] for r in results["rounds"])


def test_the_number_of_clients_must_be_known(tiny: dict) -> None:
    with pytest.raises(ConfigError, match=r"num-clients = 0 is not possible with partition 'consensus'.*given\.$"):
        build_scenario(parse(tiny | OWN | {"method": "fedavg", "num-clients": 0}))
    with pytest.raises(ConfigError, match="num-tasks=8: allowed are 1 to 6"):
        build_scenario(parse(tiny | OWN | {"method": "fedavg", "num-tasks": 8}))
