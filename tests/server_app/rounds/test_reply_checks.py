"""Single answers that a server must refuse, or take."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from server_app.clients.client_info import ClientInfo, failure
from server_app.rounds.reply_checks import Bounds, InvalidReply, check_counts, check_reply, largest_answer
from server_app.transport.base import Reply
from strategies.base import RoundContext, Update
from task.config.parsing import parse
from task.config.schema import Config
from task.message import Packet
from task.method_options import AFCLOptions, Options
from task.prototypes.scatter import ScatterStatistics
from task.prototypes.statistics import ClientStatistics
from task.scenario.class_stream import Schedule
from tests.helpers.runs import Change, set_statistic


def client_with(*counts: int):
    """What a client of images of these classes has said."""
    held = np.array(counts)
    return ClientInfo("a", 1, tuple(map(str, counts)), held, held * 0, held, 0, (), (), "", "", (), "", 0)


def test_a_confusion_with_more_images_than_the_client_has_is_refused() -> None:
    """Its diagonal is honest, but it names 10^9 mistakes of 3 images: the run's accuracy would be that client's."""
    cells = np.array([[0, 0, 2], [0, 1, 10**9]])
    arrays = {"correct": np.array([2, 0]), "total": np.array([3, 0]), "confusion": cells}
    with pytest.raises(InvalidReply, match="add up"):
        check_counts(Reply(1, Packet(arrays), "", 0, 0), np.array([3, 0]), [0, 1])
    arrays["confusion"] = np.array([[0, 0, 2], [0, 1, 1]])
    assert check_counts(Reply(1, Packet(arrays), "", 0, 0), np.array([3, 0]), [0, 1]).tolist() == [[2, 1], [0, 0]]


COUNTS: dict[str, tuple[Change, str]] = {
    "no totals": (lambda p: p.arrays.pop("total"), "correct and total must be int64 [3] both"),
    "NaN": (lambda p: p.arrays.update(correct=p.arrays["correct"] * np.nan), "correct and total must be int64 [3]"),
    "fewer classes": (lambda p: p.arrays.update(correct=np.zeros(2, np.int64)), "correct and total must be int64 [3]"),
    "more than all right": (
        lambda p: p.arrays.update(correct=p.arrays["total"] + 1),
        "correct and total are no counts",
    ),
    "no confusion": (lambda p: p.arrays.pop("confusion"), "confusion must be int64 [K, 3]"),
    "fractions": (lambda p: edit_cells(p, lambda cells: cells.astype(np.float64)), "confusion must be int64 [K, 3]"),
    "two columns": (lambda p: edit_cells(p, lambda cells: cells[:, :2]), "confusion must be int64 [K, 3]"),
    "a cell less": (lambda p: edit_cells(p, lambda cells: cells[1:]), "confusion does not add up"),
    "a cell of no image": (lambda p: edit_cells(p, lambda cells: cells - [0, 0, 1]), "confusion holds no counts"),
    "an unknown class": (
        lambda p: edit_cells(p, lambda cells: np.add(cells, [99, 0, 0])),
        "a class that has not been seen",
    ),
    "a class to come": (
        lambda p: edit_cells(p, lambda cells: np.add(cells, [0, 1, 0])),
        "a class that has not been seen",
    ),
    "a negative class": (lambda p: edit_cells(p, lambda cells: cells - [0, 99, 0]), "a class that has not been seen"),
    "a cell twice": (lambda p: edit_cells(p, lambda cells: cells[[0, 0, 1, 2]]), "or a pair of classes twice"),
    "absurdly many": (lambda p: edit_cells(p, lambda cells: cells * [1, 1, 2**40]), "confusion holds no counts"),
    "each image a thousand times": (
        lambda p: p.arrays.update({name: a * ([1, 1, 1000] if a.ndim == 2 else 1000) for name, a in p.arrays.items()}),
        "correct and total are no counts",
    ),
    "its own error": (lambda p: p.config.update(error="no disk"), "no disk"),
}


def edit_cells(packet: Packet, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    packet.arrays["confusion"] = edit(packet.arrays["confusion"])


@pytest.mark.parametrize("name", COUNTS)
def test_an_evaluation_that_cannot_be_is_refused(name: str) -> None:
    """Of 3 images of the first class 2 are right, of 1 of the second none; the third has not been seen."""
    change, reason = COUNTS[name]
    cells = np.array([[0, 0, 2], [0, 1, 1], [1, 0, 1]])
    packet = Packet({"correct": np.array([2, 0, 0]), "total": np.array([3, 1, 0]), "confusion": cells})
    reply = Reply(1, packet, "", 0, 0)
    assert check_counts(reply, np.array([3, 1, 9]), [0, 1]).tolist() == [[2, 1, 0], [1, 0, 0], [0, 0, 0]]
    change(packet)
    with pytest.raises(InvalidReply, match=re.escape(reason)):
        check_counts(reply, np.array([3, 1, 9]), [0, 1])


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(1, None, "", 0, 0), "it failed without a reason"),  # as of a node whose reason is blank
        (Reply(1, Packet(config={"error": " \n"}), "", 0, 0), "it failed without a reason"),
        (Reply(1, None, "no answer within 1 s", 0, 0), "no answer within 1 s"),
        (Reply(1, Packet(config={"error": "no disk"}), "", 0, 0), "no disk"),
        (Reply(1, Packet(), "", 0, 0), ""),
    ],
)
def test_a_failure_has_a_reason_though_the_node_gives_none(reply: Reply, reason: str) -> None:
    assert failure(reply) == reason


def checked(packet: Packet, config: Config, dim: int = 4, max_norm: float = math.inf) -> Update:
    """As the answer of a client that holds 3 images of the task's class and 5 of another one's."""
    context = RoundContext(Schedule([[0], [1]], 1), 1)
    shapes, client = {"w": (2,)}, client_with(3, 5)
    return check_reply(Reply(1, packet, "", 0, 0), client, Bounds([0], shapes, dim, max_norm), context, config)


ANSWERS: dict[str, tuple[Change, str]] = {
    "infinity in an array": (lambda p: p.arrays["w"].fill(np.inf), "w holds NaN or infinite values"),
    "huge array": (lambda p: p.arrays["w"].fill(1e30), "w holds values above 1e+06"),
    "wrong shape": (lambda p: p.arrays.update(w=np.zeros(99, np.float32)), "w is float32 [99]; float32 [2] was"),
    "wrong type": (lambda p: p.arrays.update(w=np.zeros(2)), "w is float64 [2]; float32 [2] was expected"),
    "extra array": (lambda p: p.arrays.update(x=np.zeros(1, np.float32)), "arrays ['w', 'x'] came; ['w'] were"),
    "missing array": (lambda p: p.arrays.clear(), "arrays [] came; ['w'] were expected"),
    "absurd examples": (lambda p: p.metrics.update({"num-examples": 10**12}), "num-examples is 1000000000000"),
    "fractional examples": (lambda p: p.metrics.update({"num-examples": 1.5}), "num-examples is 1.5"),
    "no examples given": (lambda p: p.metrics.pop("num-examples"), "num-examples is None"),
    "negative count": (set_statistic("counts", lambda c: -c), "counts has -3 images of class id 0, below 1"),
    "unknown class": (set_statistic("class_ids", lambda c: c + 1000), "[1000] are not distinct classes of the task"),
    "class of another task": (set_statistic("class_ids", lambda c: c + 1), "[1] are not distinct classes of the task"),
    "class twice": (
        lambda p: p.statistics.update({name: np.repeat(a, 2, axis=0) for name, a in p.statistics.items()}),
        "[0, 0] are not distinct classes of the task",
    ),
    "negative variance": (set_statistic("variances", lambda v: v - 2), "variances are negative"),
    "NaN mean": (set_statistic("means", lambda m: m * np.nan), "means holds NaN"),
    "means of another size": (set_statistic("means", lambda m: m[:, :-1]), "means is float32 [1, 3]"),
    "missing statistic": (lambda p: p.statistics.pop("variances"), "variances'] were expected"),
    "huge variance": (set_statistic("variances", lambda v: v + np.float32(3e38)), "variances holds values above"),
    "seconds that are no number": (lambda p: p.metrics.update({"seconds-train": np.nan}), "seconds-train is nan"),
    "seconds whose sum overflows": (lambda p: p.metrics.update({"seconds-train": 1e308}), "seconds-train is 1e+308"),
    "a loss of too many digits": (lambda p: p.metrics.update({"loss": 10**400}), "loss is 1000"),
    "a loss that has exploded": (lambda p: p.metrics.update({"loss": 1e30}), "was expected; lower learning-rate"),
    "a list for a loss": (lambda p: p.metrics.update({"loss": [1.0, 2.0]}), "loss is [1.0, 2.0]"),
    "a text for an accuracy": (lambda p: p.metrics.update({"accuracy": "high"}), "accuracy is 'high'"),
    "a reason that repaints the screen": (lambda p: p.config.update(error="\x1b[2J" + "x" * 10**6), "[2Jxxx"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_cannot_be_is_refused(name: str, tiny) -> None:
    """Whole runs with such an answer are in test_faults.py."""
    change, reason = ANSWERS[name]
    config = parse(tiny | {"method": "hgp", "hgp-covariance": "diagonal"})
    statistics = {"class_ids": np.array([0]), "counts": np.array([3])}
    statistics |= {name: np.ones((1, 4), np.float32) for name in ("means", "variances")}
    packet = Packet({"w": np.ones(2, np.float32)}, statistics, {"num-examples": 3})
    assert checked(packet, config).num_examples == 3
    change(packet)
    with pytest.raises(InvalidReply, match=re.escape(reason)) as refused:
        checked(packet, config)
    assert len(str(refused.value)) < 400
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(("examples", "accepted"), [(3, True), (4, False)])
def test_a_client_weighs_by_the_images_of_the_task_alone(examples: int, accepted: bool, tiny) -> None:
    """It holds 3 images of the task's class and 5 of another one's: 4 are too many, though it has 8."""
    config = parse(tiny | {"method": "fedavg"})
    packet = Packet({"w": np.ones(2, np.float32)}, metrics={"num-examples": examples})
    if accepted:
        assert checked(packet, config).num_examples == 3
    else:
        with pytest.raises(InvalidReply, match="from 0 to 3 was expected"):
            checked(packet, config)


@pytest.mark.parametrize(("dtype", "size"), [("fp16", 2), ("fp32", 4), ("fp64", 8)])
def test_the_client_with_most_images_may_send_the_largest_answer(dtype: str, size: int, tiny) -> None:
    """Afcl at D = 64: of 2 + 2 images a few rows travel, of 500 + 500 a packed matrix, 64 x 65 / 2 numbers."""
    config = parse(tiny | {"method": "afcl", "afcl-dtype": dtype})
    few, many = client_with(2, 2), client_with(500, 500)
    bounds = Bounds([0, 1], {}, 64, math.inf)
    small, large, both = (largest_answer(c, bounds, config) for c in ([few], [many], [few, many]))
    assert both == large == 2**24 + size * (2 * 64 + 64 * 65 // 2)
    assert small < large


@pytest.mark.parametrize(
    ("packing", "changes", "words"),
    [
        ("full", {"covariances": [[1, 2, 1]]}, "not positive semi-definite"),  # eigenvalues 3 and -1
        ("full", {"covariances": [[2, 1, 2]]}, ""),  # 3 and 1
        ("full", {"covariances": [[2, 1, 2]], "factors": [[1, 1]]}, "came; class_ids"),
    ],
)
def test_covariances_that_are_none_and_arrays_that_are_not_due_are_refused(packing, changes, words, tiny) -> None:
    config = parse(tiny | {"method": "ccvr", "ccvr-covariance": packing})
    statistics = {"class_ids": np.array([0]), "counts": np.array([3]), "means": np.ones((1, 2), np.float32)}
    statistics |= {name: np.array(value, np.float32) for name, value in changes.items()}
    packet = Packet({"w": np.ones(2, np.float32)}, statistics, {"num-examples": 3})
    if words:
        with pytest.raises(InvalidReply, match=words):
            checked(packet, config, dim=2)
    else:
        assert checked(packet, config, dim=2).statistics.keys() == statistics.keys()


FAR = "means are those of features of norm 6; with this backbone none is above 3"


@pytest.mark.parametrize(
    ("keys", "means", "variances", "words"),
    [
        ({}, [2.7, 3.6], [1, 1], ""),  # |mu| = 4.5, and norms up to 1.5 * 3 pass
        ({}, [6, 0], [1, 1], FAR),
        ({}, [0, 0], [9, 11.25], ""),  # the root of 20.25 is 4.5
        ({}, [0, 0], [9, 12], "variances are those of features of norm 4.58"),
        ({"privacy-feature-clip": 2.0}, [2.7, 3.6], [1, 1], "norm 4.5; with this backbone none is above 2"),
        ({"privacy-feature-clip": 2.0, "privacy-clip": 1.0, "privacy-noise": 1.0}, [6, 0], [1, 1], ""),
    ],
)
def test_statistics_that_no_features_have_are_refused(keys, means, variances, words, tiny) -> None:
    config = parse(tiny | {"method": "hgp", "hgp-covariance": "diagonal"} | keys)
    statistics = {"class_ids": np.array([0]), "counts": np.array([3])}
    statistics |= {name: np.array([a], np.float32) for name, a in (("means", means), ("variances", variances))}
    packet = Packet({"w": np.ones(2, np.float32)}, statistics, {"num-examples": 3})
    if words:
        with pytest.raises(InvalidReply, match=words):
            checked(packet, config, dim=2, max_norm=3.0)
    else:
        assert checked(packet, config, dim=2, max_norm=3.0).num_examples == 3


@pytest.mark.parametrize("count", [0, 4])
def test_a_count_that_the_client_cannot_have_is_named(count: int, tiny) -> None:
    statistics = {"class_ids": np.array([0]), "counts": np.array([count]), "means": np.ones((1, 4), np.float32)}
    packet = Packet({}, statistics, {"num-examples": 3})
    with pytest.raises(InvalidReply, match=f"counts has {count} images of class id 0, below 1 or above .* hold, 3: "):
        checked(packet, parse(tiny | {"method": "ncm"}))


def test_norms_of_every_form_by_hand() -> None:
    """A packed [[1, 5], [5, 3]] has the trace 4, directions (0, 1) and (3, 4) 1 + 25, variances (4, 2) 6."""
    kind, scatter, means = ClientStatistics(), ScatterStatistics(), np.array([[3, 4], [1, 1]], np.float32)
    packed, rows = np.array([[1, 5, 3]], np.float16), np.array([[0, 1], [3, 4]], np.float16)
    assert kind.norms({"class_ids": np.array([9])}, 2, Options()) == {}
    assert kind.norms({"means": means}, 2, Options()) == {"means": 5.0}
    assert kind.norms({"covariances": packed}, 2, Options()) == {"variances": 2.0}
    low_rank = {"variances": np.array([[4, 2], [1, 1]]), "factors": np.stack([rows, 0 * rows])}  # of two classes
    assert kind.norms(low_rank, 2, Options()) == {"variances": pytest.approx(32**0.5)}
    of_all = {"means": means, "factors": rows, "scatter": packed}
    assert scatter.norms(of_all, 2, AFCLOptions()) == {"means": 5.0, "variances": pytest.approx(30**0.5)}
    of_all["scatter"] = rows
    assert scatter.norms(of_all, 2, AFCLOptions()) == {"means": 5.0, "variances": pytest.approx(52**0.5)}
    assert scatter.norms(of_all, 2, AFCLOptions(sketch=2)) == {"means": 5.0, "variances": pytest.approx(26**0.5)}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"seconds-train": -1.0}, "seconds are not negative"),
        ({"accuracy": 1.01}, "a share from 0 to 1 was expected"),
        ({"accuracy": -0.1}, "a share from 0 to 1 was expected"),
        ({"accuracy": 1.0, "loss": 9.5, "seconds-train": 0.0}, ""),
    ],
)
def test_seconds_and_accuracy_that_cannot_be_are_refused(metrics, words, tiny) -> None:
    config = parse(tiny | {"method": "fedavg"})
    packet = Packet({"w": np.ones(2, np.float32)}, metrics={"num-examples": 3} | metrics)
    if words:
        with pytest.raises(InvalidReply, match=words):
            checked(packet, config)
    else:
        assert checked(packet, config).metrics == {"num-examples": 3} | metrics


def test_a_client_may_leave_out_its_statistics_only_where_all_its_counts_may_be_below_the_threshold(tiny) -> None:
    packet = Packet(metrics={"num-examples": 3})
    with pytest.raises(InvalidReply, match="class_ids and counts must be int64 lists of equal length, not empty"):
        checked(packet, parse(tiny | {"method": "ncm"}))
    assert checked(packet, parse(tiny | {"method": "ncm", "min-class-count": 4})).statistics == {}
