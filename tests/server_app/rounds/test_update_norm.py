"""Bounds on how far one client may move the model: numbers by hand, and a whole run."""

import numpy as np
import pytest

from server_app.rounds.reply_checks import find_excessive, update_norm
from strategies.base import Update
from task.config.parsing import parse
from task.keys import ConfigError
from task.message import Arrays, Kind, Packet
from tests.helpers.runs import run

SENT: Arrays = {"a": np.float32([1, 1]), "b": np.float32([[2]]), "kept": np.float32([9])}


def moved(client: str, length: float) -> Update:
    """An update of the given norm: the way is (2, 3, 6) / 7, spread over two arrays, a third is not trained."""
    step = np.array([2, 3, 6]) / 7 * length
    return Update(client, 1, {"a": np.float32(1 + step[:2]), "b": np.float32([[2 + step[2]]])}, {})


def reasons(lengths: list[float], **keys: float) -> dict[str, str]:
    updates = [moved(str(i), length) for i, length in enumerate(lengths)]
    return find_excessive(updates, SENT, parse({name.replace("_", "-"): value for name, value in keys.items()}))


def test_the_norm_is_taken_over_all_arrays_together() -> None:
    assert update_norm(moved("c", 7), SENT) == pytest.approx(7)
    assert update_norm(Update("c", 1, {"a": np.float32([4, 5])}, {}), SENT) == 5


def test_nothing_is_bounded_by_default() -> None:
    assert reasons([1, 1, 1e6]) == {}


def test_an_update_beyond_the_bound_is_refused_and_both_numbers_are_named() -> None:
    refused = reasons([1.0, 7.0, 6.9], max_update_norm=6.95)
    assert refused == {"1": "its update has the norm 7, which is above max-update-norm = 6.95"}


def test_an_update_beyond_so_many_medians_is_refused() -> None:
    """Norms 1, 2, 3, 10: the median is 2.5; 10 is above 3 x 2.5 = 7.5 and below 4.1 x 2.5 = 10.25."""
    refused = reasons([1, 2, 3, 10], max_update_ratio=3)
    assert refused == {"3": "its update has the norm 10, which is above max-update-ratio = 3 times the median 2.5"}
    assert reasons([1, 2, 3, 10], max_update_ratio=4.1) == {}


def test_two_updates_have_no_median_that_says_anything() -> None:
    assert reasons([1, 100], max_update_ratio=2) == {}


def test_the_median_is_that_of_what_the_other_bound_lets_through() -> None:
    """Of 1, 1, 3, 50, 60 the bound takes 50 and 60; 3 is above 2 x the median 1 of the rest (of all it would be 3)."""
    refused = reasons([1, 1, 3, 50, 60], max_update_norm=20, max_update_ratio=2)
    assert set(refused) == {"2", "3", "4"}
    assert "max-update-ratio = 2 times the median 1" in refused["2"]
    assert "max-update-norm = 20" in refused["3"]


@pytest.mark.parametrize("key", ["max-update-norm", "max-update-ratio"])
def test_a_client_whose_update_is_excessive_is_as_if_it_had_not_answered(key: str, tiny: dict) -> None:
    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        if node == 1 and kind == "train":
            packet.arrays["head.weight"] += np.float32(10)
        return packet

    bounded = tiny | {key: 20.0}
    spoilt = run(bounded | {"run-name": "spoilt"}, tamper=tamper)
    silent = run(bounded | {"run-name": "silent"}, broken=lambda node, kind: node == 1 and kind == "train")
    assert [[f["name"] for f in r["failures"]] for r in spoilt["rounds"]] == [["client-0001"]] * 2
    assert all(f"above {key} = 20" in r["failures"][0]["reason"] for r in spoilt["rounds"])
    assert spoilt["confusion"] == silent["confusion"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max-update-norm": -1.0}, ["max-update-norm", "-1", "at least 0"]),
        ({"max-update-ratio": 0.5}, ["max-update-ratio", "0.5", "below 1"]),
        ({"max-update-norm": 1.0, "method": "ncm"}, ["max-update-norm", "'ncm'", "ignored"]),
    ],
)
def test_bounds_that_cannot_be_are_named(values: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    assert all(word in str(caught.value) for word in words), caught.value
