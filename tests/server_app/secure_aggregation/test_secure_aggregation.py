"""Whole runs with sums that the server cannot take apart: equal to plain ones, with lost and lying clients."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from server_app.errors import RunError
from server_app.rounds.reply_checks import Bounds, InvalidReply, check_sum
from task.config.parsing import parse
from task.config.schema import defaults, known_keys
from task.keys import ConfigError
from task.message import Kind, Packet
from task.methods import METHODS
from tests.conftest import QUICK, TINY
from tests.helpers.runs import FaultyTransport, folder_of, interrupt, model_of, results_of, run, without_times

SECURE = {"secure-aggregation": "pairwise"}
ONE_TASK = {"num-tasks": 1}


def keys_of(folder: Path, method: str, **more: Any) -> dict[str, Any]:
    """Run keys of four clients."""
    name = {"output-dir": str(folder), "run-name": "run", "num-clients": 4, "method": method}
    return {**TINY, **QUICK.get(method, {}), **name, **more}


def both(folder: Path, method: str, more: dict[str, Any], **faults: Any) -> tuple[list[dict], list[dict]]:
    """Results and model of a plain run and of a secure one."""
    plain = keys_of(folder / "plain", method, **more)
    secure = keys_of(folder / "secure", method, **more, **SECURE)
    return [run(keys, **faults) for keys in (plain, secure)], [model_of(keys) for keys in (plain, secure)]


# What one round may differ by: with 4 clients and a range of 1e9, steps are 2^-30. The sum of a round is wrong by two
# steps at most, a mean over 400 images by 1e-11, which moves a float32 number to its neighbour. A head that is solved
# for divides such errors by the smallest eigenvalues; that of a discriminant is also larger.
EQUAL = [
    ("fedavg", {}, 1e-7),
    ("fedavg", {"fedavg-mean": "plain", "partition": "dirichlet"}, 1e-7),
    ("fedavg", {"partition": "quantity", "classes-per-client": 3, "privacy-clip": 0.5}, 1e-7),
    ("fedavg", {"clients-per-round": 3}, 1e-7),
    ("fedprox", {"partition": "class-share"}, 1e-7),
    ("fed-cprompt", {}, 1e-7),
    ("head-only", {"partition": "consensus"}, 1e-7),
    ("ncm", {"partition": "split-ratio"}, 1e-7),
    ("afcl", {"partition": "dirichlet", "afcl-ridge": 1.0}, 1e-6),
    ("afcl", {"afcl-head": "discriminant"}, 1e-3),
    ("afcl", {"afcl-head": "discriminant", "afcl-sketch": 20}, 1e-3),
    ("afcl", {"afcl-ridge": 1.0, "afcl-dtype": "fp16", "min-class-count": 3}, 1e-6),
    ("afcl", {"afcl-ridge": 1.0, "privacy-noise": 1.0, "privacy-feature-clip": 9.0, "privacy-seeded": True}, 1e-5),
    ("fedrda", {"fedrda-head": "discriminant"}, 1e-3),
    ("fedewc", {"learning-rate": 1e-4}, 1e-5),
    ("fedlwf", {"local-epochs": 1}, 1e-5),
    ("fedavg-ft", {}, 1e-5),
]


def test_every_method_whose_answers_add_up_is_compared():
    assert {method for method, _, _ in EQUAL} == {row.name for row in METHODS.values() if row.sums}


@pytest.mark.parametrize(
    ("method", "more", "limit"),
    [
        pytest.param(m, k, limit, id=f"{m} {[*k.values()]}", marks=() if m in ("fedavg", "afcl") else pytest.mark.ci)
        for m, k, limit in EQUAL
    ],
)
def test_a_secure_run_equals_a_plain_one_but_for_rounding(tmp_path, method, more, limit):
    """One task: the next one would train from the rounded model and carry its last bits further."""
    results, models = both(tmp_path, method, ONE_TASK | more)
    for name, array in models[0].items():
        np.testing.assert_allclose(models[1][name], array, rtol=limit, atol=limit, err_msg=name)
    plain, secure = (r["rounds"][-1] for r in results)
    assert secure["failures"] == []
    for name in ("train_loss", "train_accuracy"):
        assert secure[name] == (plain[name] if plain[name] is None else pytest.approx(plain[name], abs=1e-9))
    assert results[1]["metrics"] == pytest.approx(results[0]["metrics"], abs=0.02)


@pytest.mark.ci
@pytest.mark.parametrize("method", ["fedewc", "afcl"])
def test_later_tasks_follow_from_the_sums_of_earlier_ones(tmp_path, method):
    results, _ = both(tmp_path, method, {"num-tasks": 2, "learning-rate": 1e-4})
    assert results[1]["metrics"] == pytest.approx(results[0]["metrics"], abs=0.03)
    assert [len(r["rounds"]) for r in results] == [2, 2]


@pytest.mark.parametrize("method", ["fedavg", "afcl"])
@pytest.mark.parametrize("kind", ["keys", "shares", "train"])
def test_a_lost_client_is_missing_as_in_a_plain_run(tmp_path, method, kind):
    more = ONE_TASK | {"afcl-ridge": 1.0} if method == "afcl" else ONE_TASK
    plain = keys_of(tmp_path / "plain", method, **more)
    secure = keys_of(tmp_path / "secure", method, **more, **SECURE)
    expected = run(plain, broken=lambda node, of: (node, of) == (1, "train"))
    got = run(secure, broken=lambda node, of: (node, of) == (1, kind))
    for name, array in model_of(plain).items():
        np.testing.assert_allclose(model_of(secure)[name], array, rtol=1e-6, atol=1e-6)
    [failed] = got["rounds"][0]["failures"]
    assert failed["name"] == expected["rounds"][0]["failures"][0]["name"] == "client-0001"
    assert "no answer within" in failed["reason"]


@pytest.mark.parametrize("broken", [[], [2]], ids=["all", "one lost"])
def test_clients_add_up_what_they_evaluate(tmp_path, broken):
    """Every image counts once and whole numbers are exact, so that nothing differs from a plain run."""
    more = {"evaluate": "clients", "secure-aggregation-range": 1e6}
    secure = keys_of(tmp_path, "ncm", **more, **SECURE)
    got = run(secure, broken=lambda node, kind: kind == "evaluate" and node in broken)
    plain = run(
        keys_of(tmp_path / "plain", "ncm", evaluate="clients"),
        broken=lambda node, kind: kind == "evaluate" and node in broken,
    )
    assert got["confusion"] == plain["confusion"]
    assert got["accuracy_matrix"] == plain["accuracy_matrix"]
    names = [[f["reason"] for f in r["failures"]] for r in got["rounds"]]
    assert names == [["evaluation: no answer within 2250 s"] * len(broken)] * 2


@pytest.mark.parametrize(
    ("faults", "more", "reason"),
    [
        ({"broken": lambda node, kind: kind == "evaluate" and node > 1}, {}, "2 of 4 clients have sent their part"),
        (
            {"broken": lambda node, kind: kind == "evaluate" and node > 2},
            {"quorum": 4},
            "3 clients evaluated it, the q",
        ),
        (
            {"tamper": lambda node, kind, answer: lie(node, "train" if kind == "evaluate" else kind, answer)},
            {},
            "no cou",
        ),
    ],
    ids=["threshold", "quorum", "lie"],
)
def test_an_evaluation_that_is_no_sum_ends_the_run(tmp_path, faults, more, reason):
    if "tamper" in faults:
        change = faults["tamper"]
        faults = {"tamper": lambda node, kind, answer: change(node, kind, answer) if kind == "evaluate" else answer}
    with pytest.raises(RunError, match=f"evaluation of task 1: .*{reason}"):
        run(keys_of(tmp_path, "ncm", **more, **SECURE, evaluate="clients"), **faults)


def test_a_client_that_does_not_help_to_open_the_sum_is_in_it(tmp_path):
    whole = keys_of(tmp_path / "whole", "fedavg", **SECURE)
    run(whole)
    secure = keys_of(tmp_path / "secure", "fedavg", **SECURE)
    got = run(secure, broken=lambda node, kind: (node, kind) == (1, "unmask"))
    assert [r["failures"] for r in got["rounds"]] == [[], []]
    for name, array in model_of(whole).items():
        np.testing.assert_array_equal(model_of(secure)[name], array)


def test_below_the_threshold_the_run_ends_with_words(tmp_path):
    keys = keys_of(tmp_path, "fedavg", **SECURE)
    with pytest.raises(RunError, match=r"task 1, round 1: 2 of 4 clients have .*, secure-aggregation-threshold is 3"):
        run(keys, broken=lambda node, kind: node in (1, 2) and kind == "train")
    assert results_of(folder_of(keys))["status"] == "failed"


def test_the_quorum_holds_too(tmp_path):
    keys = keys_of(tmp_path, "fedavg", quorum=4, **SECURE)
    with pytest.raises(RunError, match="3 of 4 clients answered, the quorum is 4"):
        run(keys, broken=lambda node, kind: (node, kind) == (1, "train"))


BEYOND = "a sum of this node exceeds secure-aggregation-range = {:g}: raise it, or train with smaller steps."


def test_sums_beyond_the_range_of_all_clients_end_the_run(tmp_path):
    """Each has 120 images, a number that is added up too."""
    keys = keys_of(tmp_path, "head-only", **ONE_TASK, **SECURE, **{"secure-aggregation-range": 50.0})
    with pytest.raises(RunError, match=r"0 of 4 clients have sent their part of the sum, .*client-0000: a sum of this"):
        run(keys)


def test_a_sum_beyond_the_range_is_that_clients_failure(tmp_path):
    """The range is between the two largest; the largest number of each is its images times its loss, above 1 here."""
    uneven: dict[str, Any] = ONE_TASK | {"partition": "dirichlet", "dirichlet-min-size": 5}
    plain = keys_of(tmp_path / "plain", "head-only", **uneven)
    transport = Listening(4)
    run(plain, transport)
    sums = [answer.metrics["num-examples"] * answer.metrics["loss"] for answer in transport.heard]
    largest, limit = int(np.argmax(sums)), float(np.mean(sorted(sums)[-2:]))
    secure = keys_of(tmp_path / "secure", "head-only", **uneven, **SECURE, **{"secure-aggregation-range": limit})
    [failed] = run(secure)["rounds"][0]["failures"]
    assert failed == {"name": f"client-{largest:04d}", "reason": BEYOND.format(limit)}
    again = keys_of(tmp_path / "again", "head-only", **uneven)
    run(again, broken=lambda node, kind: (node, kind) == (largest, "train"))
    for name, array in model_of(again).items():
        np.testing.assert_allclose(model_of(secure)[name], array, rtol=1e-6, atol=1e-7)


class Listening(FaultyTransport):
    """Keeps all train answers."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.heard: list[Packet] = []
        self.tamper = self.listen

    def listen(self, node: int, kind: Kind, answer: Packet) -> Packet:
        self.heard += [answer] if kind == "train" else []
        return answer


@pytest.mark.ci
@pytest.mark.parametrize("method", ["fedavg", "afcl", "fedewc"])
def test_a_train_answer_holds_nothing_but_hidden_numbers_and_seconds(tmp_path, method):
    """Also of a client without images of the task, whose answer is as long as the others'."""
    keys = keys_of(tmp_path, method, **SECURE, partition="quantity", **{"classes-per-client": 1, "num-clients": 8})
    transport = Listening(8)
    run(keys, transport)
    assert len(transport.heard) == 16
    for answer in transport.heard:
        assert list(answer.arrays) == ["hidden"]
        assert set(answer.metrics) <= {"seconds-train", "seconds-statistics"}
        assert set(answer.config) == {"name"}
        assert answer.statistics == {}
        assert answer.arrays["hidden"].dtype == np.uint64
    assert len({answer.arrays["hidden"].shape for answer in transport.heard[:8]}) == 1
    assert all(not node.memory for node in transport._nodes.values())


def test_a_client_without_images_adds_zeros_and_is_not_called_idle(tmp_path):
    """Classes are so uneven that some have nothing of a task; a plain run lists them as idle."""
    uneven: dict[str, Any] = {"partition": "dirichlet", "dirichlet-beta": 0.02, "num-clients": 8}
    assert any(r["idle"] for r in run(keys_of(tmp_path / "plain", "fedavg", **uneven))["rounds"])
    assert [r["idle"] for r in run(keys_of(tmp_path, "fedavg", **uneven, **SECURE))["rounds"]] == [[], []]


def lie(node: int, kind: Kind, answer: Packet) -> Packet:
    """Client 2 adds what no client has."""
    if kind == "train" and node == 2 and "hidden" in answer.arrays:
        return Packet({"hidden": answer.arrays["hidden"] + np.uint64(2**50)}, metrics=answer.metrics)
    return answer


def test_a_sum_that_no_clients_can_have_drops_the_round(tmp_path):
    lies = iter([True] * 4 + [False] * 100)

    def tamper(node: int, kind: Kind, answer: Packet) -> Packet:
        return lie(node, kind, answer) if kind == "train" and next(lies) else answer

    keys = keys_of(tmp_path, "fedavg", **SECURE, **{"rounds-per-task": 2, "num-tasks": 1})
    results = run(keys, tamper=tamper)
    assert [r["dropped"] for r in results["rounds"]] == [True, False]
    assert results["status"] == "finished"


def test_a_task_of_such_rounds_only_ends_the_run_with_the_reason(tmp_path):
    keys = keys_of(tmp_path, "fedavg", **SECURE)
    with pytest.raises(RunError, match="no round of task 1 gave a usable model: the sum is of "):
        run(keys, tamper=lie)
    (line,) = (folder_of(keys) / "rounds.jsonl").read_text().splitlines()
    assert json.loads(line)["dropped"]


def test_the_same_seed_gives_the_same_results_whatever_the_masks(tmp_path):
    first, second = (without_times(run(keys_of(tmp_path / name, "afcl", **SECURE))) for name in ("first", "second"))
    assert first == second


@pytest.mark.ci
def test_a_run_that_was_cut_off_goes_on_with_new_secrets(tmp_path):
    """Power goes when keys and shares of the second round have been exchanged."""
    whole = run(keys_of(tmp_path / "whole", "fedewc", **SECURE))
    cut = interrupt(keys_of(tmp_path / "cut", "fedewc", **SECURE), cut_in_round=2)
    assert without_times(run({"resume": str(cut)})) == without_times(whole)


# What cannot be used with it

CARRY_ONE_BY_ONE = ["hgp", "pip", "fppl", "hepco", "fedprok", "ccvr", "joint", "fedslca"]


@pytest.mark.parametrize("method", CARRY_ONE_BY_ONE)
def test_a_method_that_needs_single_answers_is_refused(method):
    with pytest.raises(ConfigError, match=f"does not go with method '{method}'.*It goes with fedrda, fedavg, fedprox"):
        parse({"method": method, **SECURE})


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"method": "fedrda"}, "sends principal directions of classes, which do not add up"),
        ({"method": "afcl", "afcl-head": "regularised"}, "sends principal directions of classes"),
        ({"method": "afcl", "rounds-per-task": 2}, "needs rounds-per-task = 1 with method 'afcl', not 2"),
        ({"method": "ncm", "rounds-per-task": 3}, "needs rounds-per-task = 1 with method 'ncm', not 3"),
        ({"max-update-norm": 2.0}, "not possible with max-update-norm = 2.0: .* use privacy-clip"),
        ({"max-update-ratio": 2.0}, "not possible with max-update-ratio = 2.0: .* use privacy-clip"),
        ({"federated-bias": True}, "not possible with federated-bias = True"),
        ({"num-clients": 1}, "secure-aggregation-threshold = 1 is not possible with 1 clients"),
        ({"num-clients": 301}, "a sum of 301 clients: .* At most 300 can be: clients-per-round draws"),
        ({"num-clients": 301, "clients-per-round": 9, "evaluate": "clients"}, "a sum of 301 clients: .* asks all"),
        ({"secure-aggregation-threshold": 5}, "threshold = 5 is not possible with 10 clients .* more than half"),
        ({"secure-aggregation-threshold": 11}, "threshold = 11 is not possible with 10 clients"),
        ({"secure-aggregation-threshold": 3, "clients-per-round": 6}, "threshold = 3 is not possible with 6 clients"),
    ],
    ids=lambda keys: " ".join(map(str, keys.values())) if isinstance(keys, dict) else "",
)
def test_what_cannot_be_kept_is_refused_before_the_run(keys, reason):
    with pytest.raises(ConfigError, match=reason):
        parse({"method": "fedavg", "num-clients": 10, **SECURE, **keys})


@pytest.mark.parametrize("name", [name for name in known_keys() if name.startswith("secure-aggregation-")])
def test_its_keys_are_read_with_it_only(name):
    value = {"secure-aggregation-threshold": 7, "secure-aggregation-range": 1e6}[name]
    assert value != defaults()[name]
    parse({"method": "fedavg", "num-clients": 10, **SECURE, name: value})
    with pytest.raises(ConfigError, match="would be ignored: only secure-aggregation = 'pairwise'"):
        parse({"method": "fedavg", name: value})


@pytest.mark.parametrize(
    ("keys", "present", "threshold"),
    [
        ({"num-clients": 2}, 2, 2),
        ({"num-clients": 3}, 3, 2),
        ({"num-clients": 10}, 10, 7),
        ({"num-clients": 10}, 1, 7),  # the others are missing
        ({"num-clients": 10}, 15, 8),  # more have come
        ({"num-clients": 10, "clients-per-round": 6}, 6, 4),
        ({"num-clients": 10, "secure-aggregation-threshold": 6}, 10, 6),
        ({"num-clients": 10, "secure-aggregation-threshold": 6}, 14, 8),
    ],
)
def test_the_threshold_is_two_thirds_or_what_is_given_and_always_more_than_half(keys, present, threshold):
    assert parse({"method": "fedavg", **SECURE, **keys}).unmask_threshold(present) == threshold


def test_there_is_no_sum_of_one_client(tmp_path):
    """Three of four do not even say hello, which the quorum allows."""
    with pytest.raises(RunError, match=r"1 clients can take part, but 3 are needed \(secure-aggregation-threshold\)"):
        run(keys_of(tmp_path, "fedavg", **SECURE), broken=lambda node, kind: node > 0 and kind == "hello")


# Clients hold 3 + 1 images of class 0 and 0 + 2 of class 1
BOUNDS = Bounds([0, 1], {}, 1, 2.0)
HOLDERS = [SimpleNamespace(class_counts=np.array(counts)) for counts in ([3, 0, 4], [1, 2, 0])]


def summed(
    counts: Sequence[int] = (4, 2),
    images: int = 6,
    mean: float = 0.0,
    variance: float = 0.0,
    weight: float = 0.0,
    **measured: float,
) -> Packet:
    """A sum over both clients, with hgp's statistics of one feature, and what they have ``measured``."""
    statistics = {
        "class_ids": np.array([0, 1]),
        "counts": np.array(counts),
        "means": np.full((2, 1), mean, np.float32),
        "variances": np.full((2, 1), variance, np.float32),
    }
    return Packet({"weight": np.float32([weight])}, statistics, {"num-examples": images} | measured)


def test_a_sum_that_honest_clients_can_have_made_is_taken() -> None:
    config = parse({"method": "hgp"})
    update = check_sum(summed(), HOLDERS, BOUNDS, config)
    assert update
    assert update.num_examples == 6
    assert check_sum(summed(loss=9.5, accuracy=1 + 1e-6), HOLDERS, BOUNDS, config)  # all right, rounded in the sum
    assert check_sum(summed(images=0), HOLDERS, BOUNDS, config) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"images": 7}, "7 images; 0 to 6"),
        ({"images": -1}, "-1 images; 0 to 6"),
        ({"counts": (5, 2)}, "more images of a class"),
        ({"counts": (4, 3)}, "more images of a class"),
        ({"variance": -1e-3}, "the mean of variances is negative"),
        ({"variance": math.nan}, "the mean of variances holds values"),
        ({"weight": 2e6}, "the mean of weight holds values above 1e"),
        ({"accuracy": -0.1}, "the mean accuracy is -0.1"),
        ({"accuracy": 5e9}, r"the mean accuracy is 5e\+09"),
        ({"loss": -1e17}, r"the mean loss is -1e\+17"),
        ({"mean": 3.1}, r"means are those of features of norm 3\.1; with this backbone none is above 2"),
    ],
)
def test_a_sum_that_no_honest_clients_can_have_made_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidReply, match=words):
        check_sum(summed(**wrong), HOLDERS, BOUNDS, parse({"method": "hgp"}))
