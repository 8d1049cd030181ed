"""How much each client counts in the mean of its round, for every method, as its paper says."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from strategies.averaging import WeightedMean
from task.config.parsing import parse
from task.message import Arrays, Kind, Packet
from task.methods import ROWS
from task.scenario.client_data import client_task_data
from tests.helpers.runs import run

Weight = Callable[[int, int], float]  # of a client's images, and of its rounds of training, this one included


def by_images(images: int, rounds: int) -> float:
    return images


def alike(images: int, rounds: int) -> float:
    return 1


def by_rounds_and_images(images: int, rounds: int) -> float:
    return rounds * images


# method, run keys, weight; None: it trains no arrays
EXPECTED: list[tuple[str, dict[str, Any], Weight | None]] = [
    ("hgp", {}, by_images),  # eq. 3
    ("pip", {}, by_rounds_and_images),  # eq. 12 and 13
    ("fppl", {}, by_images),
    ("hepco", {}, alike),  # the provisional server
    ("fedprok", {}, alike),  # algorithm 1, line 13
    ("fedavg", {}, by_images),  # McMahan et al. 2017
    ("fedavg", {"fedavg-mean": "plain"}, alike),  # Fed-L2P and Fed-DualP of Ma'sum et al. 2024
    ("fedprox", {}, by_images),
    ("fed-cprompt", {}, by_images),
    ("ccvr", {}, by_images),
    ("head-only", {}, by_images),
    ("joint", {}, by_images),
    ("ncm", {}, None),
    ("afcl", {}, None),
    ("afcl", {"prompt": "lora", "afcl-adaptation-rounds": 2}, by_images),  # FedAvg trains the prompt
    ("fedrda", {"fedrda-adaptation-rounds": 2}, by_images),
    ("fedavg-ft", {}, by_images),
    ("fedewc", {}, by_images),
    ("fedlwf", {}, by_images),
    ("fedslca", {}, by_images),
]


def test_every_method_has_a_row() -> None:
    assert {method for method, *_ in EXPECTED} == {row.name for row in ROWS}


@pytest.mark.parametrize(("method", "keys", "expected"), EXPECTED, ids=[f"{m}{[*k.values()]}" for m, k, _ in EXPECTED])
def test_the_mean_of_a_round_weighs_clients_as_the_paper_says(
    method: str,
    keys: dict[str, Any],
    expected: Weight | None,
    tiny: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of three clients with uneven parts train in each of four rounds: ratios of the weights that were used."""
    uneven = {"partition": "dirichlet", "dirichlet-beta": 0.5, "rounds-per-task": 2, "clients-per-round": 2}
    keys = tiny | uneven | {"method": method, **keys}
    weights, should_be, trained, config = list[float](), list[float](), Counter[int](), parse(keys)

    class Recording(WeightedMean):
        def add(self, arrays: Arrays, weight: float) -> None:
            weights.append(weight)
            super().add(arrays, weight)

    def note(node: int, kind: Kind, answer: Packet) -> Packet:
        tasks = range(config.num_tasks)
        own = {len(client_task_data(config, node, task, 0, holds_pool=True).positions) for task in tasks}
        if kind == "train" and answer.arrays and expected:
            assert answer.metrics["num-examples"] in own
            trained[node] += 1
            should_be.append(expected(int(answer.metrics["num-examples"]), trained[node]))
        return answer

    monkeypatch.setattr("server_app.rounds.aggregation.WeightedMean", Recording)
    run(keys, tamper=note)
    assert len(weights) == len(should_be) >= (4 if expected else 0)
    assert not expected or expected is alike or len(set(should_be)) > 1
    assert [w / weights[0] for w in weights] == pytest.approx([w / should_be[0] for w in should_be])
