"""Messages that need no model are answered without torch, timm and torchvision, and as the full path answers them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app import client
from client_app.learning import load_model
from client_app.node import Node
from client_app.request import Request
from task.config.parsing import parse
from task.message import Kind, Packet
from task.models.evaluation import confusion_counts
from task.models.model import build_model
from task.scenario.scenario import Scenario
from task.scenario.task_plan import first_task_plan
from tests.helpers.deployment import ROOT
from tests.helpers.own_data import OWN, paint
from tests.helpers.runs import hello_message

SCRIPT = """
import json, sys
sys.modules |= dict(torch=None, timm=None, torchvision=None)  # importing one of them is an error
from client_app.client import handle
from client_app.node import Node
from task.message import Packet
kind, config, settings = json.loads(sys.argv[1])
packet = handle(kind, Packet(config=config), Node(settings))
arrays = {name: array.tolist() for name, array in packet.arrays.items()}
print(json.dumps([arrays, packet.metrics, packet.config]))
"""
Answer = list[dict[str, Any]]  # arrays, metrics, config


def ask_without_torch(kind: Kind, config: dict[str, Any], node: Node) -> Answer:
    words = json.dumps([kind, config, dict(node.settings)])
    done = subprocess.run([sys.executable, "-c", SCRIPT, words], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def ask_here(kind: Kind, config: dict[str, Any], node: Node, task: int = 0) -> Answer:
    """With a model in the message."""
    resolved = parse(json.loads(config["run-config"]))
    packet = Packet(build_model(resolved, [2] * (task + 1)).export(), config=config)
    answer = client.handle(kind, packet, node)
    assert "error" not in answer.config, answer.config
    return [{name: array.tolist() for name, array in answer.arrays.items()}, answer.metrics, answer.config]


@pytest.fixture
def own(tmp_path: Path) -> tuple[Node, dict[str, Any]]:
    """A node with the classes of the second task alone, and what the server says to it in the first."""
    for name in ("cow", "doe"):
        paint(tmp_path / "data" / name, 12)
    values = {k: v for k, v in OWN.items() if k != "run-name"}
    plan = first_task_plan(parse(values), ["ant", "bee", "cow", "doe"], (16, 16))
    node = Node({"name": "north", "data-dir": str(tmp_path / "data"), "state-dir": str(tmp_path / "state")})
    sha256 = build_model(parse(values), []).backbone.sha256
    place = {"task": 1, "round": 1, "server-round": 1, "ends-task": True, "backbone-sha256": sha256, "image-size": 16}
    place |= {"run-config": json.dumps(parse(values).flat())}
    return node, plan.message() | place


def test_a_node_without_images_of_the_task_answers_without_torch(own):
    node, config = own
    expected = [{}, {"num-examples": 0}, {"name": "north"}]
    assert ask_without_torch("train", config, node) == expected
    assert ask_here("train", config, node) == expected
    later = ask_here("train", config | {"task": 2, "server-round": 2}, node, task=1)
    assert later[1]["num-examples"] > 12  # of 24, about a fifth is held out


def test_the_side_of_the_images_is_in_the_message(own):
    """A backbone of timm would have to be built to know it."""
    node, config = own
    backbone = {"backbone": "vit_tiny_patch16_224", "backbone-weights": "random", "image-size": 0}
    said = {"image-size": 224, "run-config": json.dumps(json.loads(config["run-config"]) | backbone)}
    answer = ask_without_torch("train", config | said, node)
    assert answer == [{}, {"num-examples": 0}, {"name": "north"}]


def test_a_node_without_test_images_of_the_classes_answers_without_torch(own, monkeypatch):
    node, config = own
    fast = ask_without_torch("evaluate", config, node)
    assert fast == [{"correct": [0] * 4, "total": [0] * 4, "confusion": []}, {}, {"name": "north"}]
    assert ask_here("evaluate", config, node) == fast

    def predict(request: Request, scenario: Scenario, *what: np.ndarray) -> np.ndarray:
        return confusion_counts(load_model(request, scenario), scenario.dataset, *what)

    monkeypatch.setattr(client, "_count_predictions", predict)  # with a model, whatever the images
    assert ask_here("evaluate", config, node) == fast
    later = ask_here("evaluate", config | {"task": 2}, node, task=1)
    assert 0 < sum(later[0]["total"]) < 12
    assert later[0]["total"][:2] == [0, 0]


def test_an_answer_that_needs_a_model_needs_torch(own):
    node, config = own
    assert "torch" in ask_without_torch("train", config | {"task": 2, "server-round": 2}, node)[2]["error"]
    assert "torch" in ask_without_torch("evaluate", config | {"task": 2}, node)[2]["error"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partition-id": 3, "num-partitions": 3}, "partition-id = 3 is not below num-clients = 3"),
        ({"partition-id": 0, "num-partitions": 2}, "num-partitions = 2 of this node is below"),
        (
            {"partition-id": 0, "num-partitions": "all"},
            "num-partitions = 'all' of this node is not possible: it is the",
        ),
    ],
    ids=["partition-id", "num-partitions", "no number"],
)
def test_a_node_of_another_number_of_partitions_says_so_at_once(tiny, settings, words):
    hello = hello_message(tiny | {"num-clients": 3})
    assert words in client.handle("hello", hello, Node(settings)).config["error"]
    fitting = client.handle("hello", hello, Node({"partition-id": 2, "num-partitions": 3}))
    assert "error" not in fitting.config


@pytest.mark.parametrize("values", [{"dataset": "digits"}, {"dataset": "synthetic"}, {"image-size": 48}, {"npz": True}])
def test_a_client_without_a_part_of_registered_data_answers_without_torch(values, tmp_path):
    """Of pooled data, only one client has images in a round."""
    if values.pop("npz", False):
        images = np.zeros((40, 8, 8, 3), np.uint8)
        np.savez(tmp_path / "a.npz", images=images, labels=np.arange(40) % 4)
        values |= {"dataset": "npz", "data-dir": str(tmp_path / "a.npz"), "num-tasks": 2}
    values |= {"method": "joint", "num-clients": 2}
    node = Node({"partition-id": 1})
    config = {"task": 1, "round": 1, "server-round": 1, "ends-task": False, "pool": "client-0000"}
    config |= {"run-config": json.dumps(parse(values).flat())}
    expected = [{}, {"num-examples": 0}, {"name": "client-0001"}]
    assert ask_without_torch("train", config, node) == expected
    assert ask_here("train", config, node) == expected
