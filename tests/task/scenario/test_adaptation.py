"""How many rounds a method adapts for, where the key leaves it open: worked out by hand."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from task.config.parsing import parse
from task.keys import ConfigError, key
from task.method_options import FedRDAOptions, Options
from task.methods import METHODS
from task.scenario.adaptation import choose_adaptation_rounds, count_first_images, set_adaptation_rounds
from task.scenario.client_data import client_task_data
from task.scenario.scenario import build_scenario


@pytest.mark.parametrize(
    ("images", "epochs", "batch", "rounds"),
    [
        ([100, 96], 2, 16, 5),  # 14 and 12 steps a round: 60 / 13 is below 5
        ([15, 16, 1], 3, 16, 20),  # 3 steps each
        ([33, 0, 40], 2, 8, 6),  # 10 and 10; who has no image takes no step
        ([17, 40], 2, 8, 8),  # 6 and 10: 60 / 8 = 7.5, rounded up
        ([1, 2], 1, 16, 20),  # 60 rounds would be needed
        ([10**9], 1, 1, 5),
        ([0, 0], 3, 16, 5),  # nobody has any
        ([], 3, 16, 5),
    ],
)
def test_rounds_of_adaptation(images, epochs, batch, rounds):
    config = parse({"method": "fedrda", "local-epochs": epochs, "batch-size": batch})
    assert choose_adaptation_rounds(images, config) == rounds


def test_noise_is_not_spent_on_more_rounds():
    config = parse({"method": "fedrda", "fedrda-head": "discriminant", "privacy-noise": 1.0, "privacy-clip": 1.0}
        | {"privacy-feature-clip": 1.0})  # fmt: skip
    assert choose_adaptation_rounds([1, 2], config) == 5


@pytest.mark.parametrize("partition", ["iid", "quantity", "dirichlet"])
def test_images_of_the_first_round_are_those_of_the_first_task(tiny, partition):
    config = parse(tiny | {"method": "fedrda", "partition": partition})
    scenario = build_scenario(config)
    held = [client_task_data(config, m, task=0, round=0).positions for m in range(3)]
    assert count_first_images(config) == [len(positions) for positions in held]
    labels = scenario.dataset.train_labels
    assert sorted(labels[np.concatenate(held)]) == sorted(labels[np.isin(labels, scenario.schedule.tasks[0])])


def test_images_drawn_anew_are_counted_as_drawn(tiny):
    """A fifth of the images of each of three of the six classes."""
    drawn = {"partition": "split-ratio", "split-ratio": 0.2, "category-ratio": 0.5}
    config = parse(tiny | {"method": "fedrda"} | drawn)
    each = np.bincount(build_scenario(config).dataset.train_labels)[0]
    assert count_first_images(config) == [3 * round(0.2 * each)] * 3


def test_only_a_method_that_adapts_leaves_them_open():
    assert parse({"method": "fedrda"}).leaves_adaptation_open
    assert parse({"method": "fedrda", "fedrda-adaptation-rounds": "auto"}).leaves_adaptation_open
    assert parse({"method": "fedrda"}).trains_locally
    config = set_adaptation_rounds(parse({"method": "fedrda"}), 7)
    assert config == parse({"method": "fedrda", "fedrda-adaptation-rounds": 7})
    assert (config.adaptation_rounds, config.leaves_adaptation_open) == (7, False)
    for keys in ({"method": "fedrda", "prompt": "none"}, {"method": "afcl", "prompt": "lora"}, {"method": "hgp"}):
        assert not parse(keys).leaves_adaptation_open
    assert not parse({"method": "fedrda", "prompt": "none"}).trains_locally
    with pytest.raises(ConfigError, match="fedrda-adaptation-rounds = 5 would be ignored"):
        parse({"method": "fedrda", "prompt": "none", "fedrda-adaptation-rounds": 5})


@dataclass(frozen=True)
class ThreeRounds(FedRDAOptions):
    """A method from outside with a default of its own."""

    adaptation_rounds: int = key(3, "rounds of adaptation", minimum=1)


@pytest.mark.parametrize(
    ("options", "row"), [(ThreeRounds, {}), (FedRDAOptions, {"outside-adaptation-rounds": 3})], ids=["option", "row"]
)
def test_a_method_from_outside_may_have_its_own_number(monkeypatch, options, row):
    outside = replace(METHODS["fedrda"], name="outside", options=options, defaults=row)
    monkeypatch.setitem(METHODS, "outside", outside)
    assert parse({"method": "outside", "prompt": "lora"}).adaptation_rounds == 3
    assert parse({"method": "outside", "prompt": "none"}).adaptation_rounds == 0
    with pytest.raises(ConfigError, match="outside-adaptation-rounds = 4 would be ignored"):
        parse({"method": "outside", "prompt": "none", "outside-adaptation-rounds": 4})


def test_a_method_from_outside_that_adapts_needs_a_number():
    with pytest.raises(ConfigError, match="adapts: its options need a key adaptation_rounds"):
        parse({"method": f"{__name__}:NUMBERLESS"})


NUMBERLESS = replace(METHODS["fedrda"], name="numberless", options=Options)
