"""Runs over nodes that each have images of their own, which come and go and find new classes."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import server_app.rounds.setup
from client_app.client import _HANDLERS, handle
from client_app.node import Node, own_data_dir, state_dir
from client_app.request import Request
from server_app.cli.main import main
from server_app.clients import class_names
from server_app.clients.client_info import MAX_CLASSES
from server_app.errors import RunError
from server_app.report.runs import load_run
from server_app.rounds.progress import summary
from server_app.run_files.results import Results
from server_app.run_files.status import untested_classes
from server_app.transport.base import Reply
from task.config.parsing import parse
from task.data.images import UnreadableImage
from task.inference import load_predictor
from task.keys import ConfigError
from task.message import Kind, Packet
from task.methods import FISHER, METHODS, NO_STATISTICS
from tests.helpers.marks import rest_in_ci
from tests.helpers.own_data import NAMES, OWN, Changing, paint, store
from tests.helpers.runs import PowerCutError, Values, hello_message, results_of, run, without_times

HOLDS = {"north": (0, 1, 2, 3), "south": (0, 1, 2), "west": (2, 3)}  # which patterns are whose


@pytest.fixture
def nodes(tmp_path: Path, patterns: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder per node, as a rehearsal takes it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, classes in HOLDS.items():
        for c in classes:
            store(tmp_path / "nodes" / name, c, patterns[c])
    return tmp_path / "nodes"


@pytest.fixture
def keys(nodes: Path, tmp_path: Path) -> Values:
    return OWN | {"output-dir": str(tmp_path / "runs"), "data-dir": str(nodes), "num-clients": 3}


def test_nodes_with_images_of_their_own_learn_together(keys: Values, nodes: Path) -> None:
    results = run(keys | {"local-epochs": 3})
    assert results["status"] == "finished"
    assert results["class_names"] == ["ant", "bee", "cow", "doe"]
    assert [c["name"] for c in results["clients"]] == ["north", "south", "west"]
    assert results["rounds"][0]["idle"] == ["west"]  # it has neither ants nor bees
    held_out = [sum(results["confusion"][c]) for c in range(4)]
    trained = np.sum([c["class_counts"] for c in results["clients"]], axis=0)
    assert (trained + held_out).tolist() == [40, 40, 60, 40]
    assert results["samples_per_task"] == [sum(held_out[:2]), sum(held_out[2:])]
    assert results["metrics"]["last_accuracy"] > 0.8
    predictor = load_predictor(Path(keys["output-dir"]) / "run")
    files = sorted((nodes / "west" / "doe").iterdir())
    assert predictor.predict(files).names.count("doe") > 15


def test_real_images_with_the_backbone_for_digits_are_warned_of(keys: Values, caplog: pytest.LogCaptureFixture) -> None:
    run(keys | {"method": "ncm"})
    assert sum(message.startswith("backbone = 'vit_glyphs' is for digits") for message in caplog.messages) == 1
    assert "method ncm trains nothing locally and ignores local-epochs" in caplog.messages


@pytest.mark.parametrize("method", ["fedavg", "afcl"])
def test_nodes_learn_together_in_sums_alone(keys: Values, tmp_path: Path, method: str) -> None:
    """As in a plain run, evaluation included; no secret is left in what a node keeps on disk."""
    plain = run(keys | {"method": method})
    secure = run(keys | {"method": method, "run-name": "sums", "secure-aggregation": "pairwise"})
    assert secure["confusion"] == plain["confusion"]
    assert [r["failures"] for r in secure["rounds"]] == [[], []]
    assert [r["idle"] for r in secure["rounds"]] == [[], []]
    assert secure["samples_away_after_task"] == [[0], [0, 0]]
    assert secure["seconds"]["client_train" if method == "fedavg" else "client_statistics"] > 0
    state = [path.read_text() for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert state
    assert not any("masking" in text for text in state)


def test_a_rehearsal_from_the_command_line_has_a_client_for_each_folder(keys: Values) -> None:
    words = [f"{k}={v}" for k, v in keys.items() if k != "num-clients"]
    assert main(["run", "--in-process", *words]) == 0
    results = json.loads((Path(keys["output-dir"]) / "run" / "results.json").read_text())
    assert [c["name"] for c in results["clients"]] == ["north", "south", "west"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda nodes: shutil.copytree(nodes / "west" / "doe", nodes / "west" / "Doe"), "'Doe' and 'doe' differ only"),
        (lambda nodes: shutil.rmtree(nodes / "west"), "has no folder for node 2"),
        (lambda nodes: [f.write_bytes(b"") for f in (nodes / "west" / "doe").iterdir()], "unreadable-share"),
    ],
)
def test_a_mismatch_stops_the_run_at_once(spoil: Callable[[Path], object], message: str, keys: Values) -> None:
    spoil(Path(keys["data-dir"]))
    with pytest.raises(RunError, match=message):
        run(keys)
    assert not (Path(keys["output-dir"]) / "run").exists()


@pytest.mark.parametrize("lost", [2, 10])
def test_files_that_vanish_are_left_out_up_to_the_share(lost: int, keys: Values, nodes: Path) -> None:
    gone = sorted((nodes / "south" / "ant").iterdir())[:lost]
    results = run(keys, Changing({1: lambda: [path.unlink() for path in gone]}))
    reasons = [f["reason"] for r in results["rounds"] for f in r["failures"] if f["name"] == "south"]
    assert results["status"] == "finished"
    assert bool(reasons) == (lost == 10)  # 2 of 60 are below unreadable-share = 0.05
    assert all("10 of 60 image files" in reason and ".png" not in reason for reason in reasons[:1])
    assert sum(results["confusion"][0]) <= 40 - lost


def test_files_that_go_on_vanishing_are_a_failure_that_names_none(
    keys: Values, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def vanish(request: Request) -> Packet:
        tries.append(request.node)
        raise UnreadableImage("'/data/ant/0.png' cannot be read")

    values = parse(keys).flat()
    monkeypatch.setitem(_HANDLERS, "train", vanish)
    answer = handle("train", hello_message(values), Node({"partition-id": 0}))
    assert "vanish while it works" in str(answer.config["error"])
    assert ".png" not in str(answer.config["error"])
    assert "'/data/ant/0.png' cannot be read" in caplog.messages
    assert len(tries) == 2
    answer = handle("train", hello_message({"dataset": "synthetic"}), Node({"partition-id": 0}))
    assert "/data/ant/0.png" in str(answer.config["error"])  # everybody has these files: the name helps
    assert len(tries) == 3


def test_a_node_that_has_lost_its_disk_is_a_failure_and_not_idle(keys: Values, nodes: Path) -> None:
    for part in ("train", "test"):
        shutil.copytree(nodes / "south", nodes.parent / "split" / part)
    shutil.rmtree(nodes / "south")
    (nodes.parent / "split").rename(nodes / "south")

    def unmount() -> None:
        shutil.rmtree(nodes / "south")
        (nodes / "south").mkdir()

    results = run(keys | {"rounds-per-task": 2}, Changing({2: unmount}))
    reasons = [[f["reason"] for f in r["failures"] if f["name"] == "south"] for r in results["rounds"]]
    assert [len(round_reasons) > 0 for round_reasons in reasons] == [False, True, True, True]
    assert "of 120 image files" in reasons[1][0]
    assert not any("south" in r["idle"] for r in results["rounds"])


def test_a_node_that_uses_nothing_of_what_it_has_is_a_failure(keys: Values) -> None:
    def forget(node: int, kind: Kind, answer: Packet) -> Packet:
        return Packet(metrics={"num-examples": 0}) if (node, kind) == (1, "train") else answer

    results = run(keys, tamper=forget)
    held = sum(results["clients"][1]["class_counts"][:2])
    (failure,) = results["rounds"][0]["failures"]
    assert failure["reason"].startswith(f"it has {held} images of the task and used none")


@pytest.mark.parametrize("claimed", [False, True])
def test_a_node_cannot_be_tested_on_more_images_than_it_has_held_out(keys: Values, claimed: bool) -> None:
    def inflate(node: int, kind: Kind, answer: Packet) -> Packet:
        if claimed and (node, kind) == (1, "evaluate"):
            answer.arrays |= {name: 1000 * answer.arrays[name] for name in ("correct", "total")}
            answer.arrays["confusion"] *= [1, 1, 1000]
        return answer

    results = run(keys, tamper=inflate)
    failures = [(f["name"], "no counts of the images" in f["reason"]) for f in results["rounds"][0]["failures"]]
    assert failures == [("south", True)] * claimed


def test_a_node_that_missed_hello_is_asked_again_once_it_is_free(keys: Values) -> None:
    deaf, busy = {2}, {2}
    transport = Changing({1: deaf.clear, 2: busy.clear})
    transport.busy, transport.broken = lambda: busy, lambda node, kind: node in deaf
    results = run(keys | {"rounds-per-task": 3}, transport)
    assert results["absent"] == []
    took_part = [len(r["participants"]) for r in results["rounds"]]
    assert took_part == [2, 2, 3, 3, 3, 3]  # free from the second round on, and greeted before the third


def test_a_node_that_breaks_down_at_hello_is_asked_three_times(keys: Values) -> None:
    asked = []

    class Broken(Changing):
        def exchange(
            self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
        ) -> Iterable[Reply]:
            replies = list(super().exchange(kind, packets, timeout, largest_answer))
            asked.extend(r.node for r in replies if kind == "hello")
            crash = Reply(2, None, f"crash {len(asked)}", 0, 0)
            return [crash if kind == "hello" and r.node == 2 else r for r in replies]

    results = run(keys | {"rounds-per-task": 3}, Broken())
    assert asked.count(2) == 3
    assert [entry["name"] for entry in results["absent"]] == ["node 2"]


def test_a_node_that_comes_back_on_other_weights_is_refused(keys: Values) -> None:
    transport = Changing()
    transport.before[2] = lambda: transport._nodes.update({2: Node({"backbone-weights": "random", "partition-id": 2})})
    results = run(keys | {"backbone-weights": "auto"}, transport)
    reasons = [[f["reason"] for f in r["failures"] if f["name"] == "west"] for r in results["rounds"]]
    assert reasons[0] == []
    assert "other backbone weights than the server" in reasons[1][0]


def test_a_node_without_any_image_stops_a_new_run_that_counts_on_it(keys: Values, nodes: Path) -> None:
    (nodes / "zulu").mkdir()
    with pytest.raises(
        RunError, match=r"3 clients can .* 4 are needed .* 1 nodes cannot; the first is zulu: it has no image"
    ):
        run(keys | {"num-clients": 4})


@pytest.mark.ci
def test_a_run_of_as_many_nodes_as_connect_begins_without_those_that_cannot_take_part(
    keys: Values, nodes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """South has other weights, west no image."""
    empty(nodes / "west")
    values = keys | {"num-clients": 0}
    with pytest.raises(
        RunError, match=r"1 clients can .* 2 are needed .* 2 nodes cannot; the first is south: it has other"
    ):
        run(values | {"quorum": 2}, lying(keys, 1, {"backbone-sha256": "0" * 64}))
    results = run(values, lying(keys, 1, {"backbone-sha256": "0" * 64}))
    assert results["status"] == "finished"
    assert [c["name"] for c in results["clients"]] == ["north"]
    assert [(a["name"], a["reason"].split(":")[0]) for a in results["absent"]] == [
        ("south", "it has other backbone weights than the server"),
        ("west", "it has no image"),
    ]
    assert sum(" does not take part: " in record.getMessage() for record in caplog.records) == 4
    said = json.loads((Path(keys["output-dir"]) / "run" / "nodes.json").read_text())
    assert [(node["name"], node["absent"].split(":")[0], node["free_disk"] > 0) for node in said] == [
        ("north", "", True),
        ("south", "it has other backbone weights than the server", True),
        ("west", "it has no image", True),
    ]


@pytest.mark.ci
def test_a_node_with_another_nodes_name_takes_part_as_little_as_that_one(keys: Values) -> None:
    """Nobody can tell which of them is right; but a node that has other code besides takes no name away."""
    reason = "it has the name of another node: give each its own name or partition-id"
    results = run(keys | {"num-clients": 0}, lying(keys, 1, {"name": "north"}))
    assert [c["name"] for c in results["clients"]] == ["west"]
    assert results["absent"] == [{"name": "north", "reason": reason}] * 2
    results = run(
        keys | {"num-clients": 0, "run-name": "code"}, lying(keys, 1, {"name": "north", "code-sha256": "0" * 64})
    )
    assert [c["name"] for c in results["clients"]] == ["north", "west"]
    assert ["another copy of the code" in a["reason"] for a in results["absent"]] == [True]


@pytest.mark.ci
def test_a_node_whose_twin_in_name_has_gone_takes_part(keys: Values) -> None:
    transport = lying(keys, 1, {"name": "north"})
    transport.before = {1: lambda: transport.hidden.add(1)}
    results = run(keys | {"num-clients": 0, "rounds-per-task": 2}, transport)
    assert [r["participants"] for r in results["rounds"]] == [["west"], *[["north", "west"]] * 3]
    assert results["absent"] == []


def test_a_node_that_invents_classes_takes_no_other_out(keys: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have more classes than it, but the same."""
    monkeypatch.setattr(class_names, "MAX_CLASSES", 5)
    results = run(keys | {"num-clients": 0}, lying(keys, 1, *claims_of(2)))
    assert [c["name"] for c in results["clients"]] == ["north", "west"]
    assert "classes the run would have" in results["absent"][0]["reason"]


def test_a_node_that_claims_more_classes_than_a_run_can_have_takes_no_other_out(keys: Values) -> None:
    results = run(keys | {"num-clients": 0}, lying(keys, 1, *claims_of(MAX_CLASSES)))
    assert [c["name"] for c in results["clients"]] == ["north", "west"]
    reason = f"with its {MAX_CLASSES} classes the run would have {MAX_CLASSES + 4}, more than {MAX_CLASSES}"
    assert results["absent"] == [{"name": "south", "reason": reason}]
    assert results["class_names"] == ["ant", "bee", "cow", "doe"]


def test_classes_that_appear_are_no_way_around_the_limit(keys: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has other classes each time that it comes back."""
    monkeypatch.setattr(class_names, "MAX_CLASSES", 8)
    transport = lying(keys, 1, *claims_of(3))

    def return_with(first: int) -> None:
        claims, arrays = claims_of(3, first)
        transport.tamper = lying(keys, 1, claims, arrays).tamper

    transport.before = {1: lambda: return_with(3), 2: lambda: return_with(6)}
    results = run(appearing(keys) | {"num-tasks": 4}, transport)
    assert len(results["class_names"]) == 7
    assert [c["name"] for c in results["clients"]] == ["north", "south", "west"]


def claims_of(number: int, first: int = 0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a node says that has so many classes of one image."""
    counts = {"class_counts": np.ones(number, np.int64), "test_counts": np.zeros(number, np.int64)}
    return {"classes": [f"zebra {first + i}" for i in range(number)]}, counts


@pytest.fixture
def parted(nodes: Path) -> None:
    """West alone holds the classes of the second task, and none of the first."""
    for name in ("north", "south"):
        for c in (2, 3):
            shutil.rmtree(nodes / name / NAMES[c], ignore_errors=True)


@pytest.mark.usefixtures("parted")
@pytest.mark.parametrize(
    "method", rest_in_ci((name for name, row in METHODS.items() if not row.pooled), ["hgp", "fedavg"])
)
def test_a_task_whose_only_holder_fails_costs_no_other_task(keys: Values, method: str) -> None:
    """It says hello, and nothing else."""
    values = keys | {"method": method, "local-epochs": 8}
    results = run(values, broken=lambda node, kind: node == 2 and kind != "hello")
    assert results["status"] == "finished"
    assert {f["name"] for r in results["rounds"] for f in r["failures"]} == {"west"}
    assert results["rounds"][-1]["idle"] == ["north", "south"]
    assert results["tasks_not_learned"] == [2]
    if METHODS[method].statistics not in (
        NO_STATISTICS,
        FISHER,
    ):  # where clients alone train the head, rows that nobody has trained may win
        assert results["accuracy_matrix"][1][0] >= results["accuracy_matrix"][0][0] - 0.1


@pytest.mark.usefixtures("parted")
def test_a_secure_sum_says_too_that_a_task_is_not_learned(keys: Values, caplog: pytest.LogCaptureFixture) -> None:
    values = keys | {"method": "afcl", "secure-aggregation": "pairwise", "secure-aggregation-threshold": 2}
    results = run(values, broken=lambda node, kind: node == 2 and kind != "hello")
    assert results["tasks_not_learned"] == [2]
    assert "task 2 is not learned: no client with its images has trained" in caplog.text


def cut() -> None:
    """The server's power goes."""
    raise PowerCutError


def reconnect(transport: Changing, keys: Values, node: int, claims: Mapping[str, Any]) -> None:
    """All nodes are connected again, and one claims something in hello."""
    transport.hidden.clear()
    transport.tamper = lying(keys, node, claims).tamper


def away(transport: Changing, nodes: set[int], kinds: set[str], rounds: set[int]) -> Changing:
    """Nodes that answer no message of some kinds in some rounds."""
    current = [0]
    transport.before = {r: lambda r=r: current.append(r) for r in range(1, 9)}
    transport.broken = lambda node, kind: node in nodes and kind in kinds and current[-1] in rounds
    return transport


@pytest.mark.parametrize("rounds", [{1}, {2}])
@pytest.mark.parametrize("kinds", [{"evaluate"}, {"train", "evaluate"}])
def test_holders_of_a_tasks_test_images_that_are_away_for_a_while_end_no_run(
    rounds: set[int], kinds: set[str], keys: Values, nodes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics that need what was not measured are left out, and the page says what is missing."""
    shutil.rmtree(nodes / "south" / "cow")
    results = run(keys, away(Changing(), {0, 1}, kinds, rounds))
    assert results["status"] == "finished"
    matrix, after = results["accuracy_matrix"], min(rounds)
    assert matrix[after - 1][0] is None
    assert (after == 1) == (matrix[1][0] is not None)  # what was measured is kept
    assert results["samples_per_task"][0] == max(counted[0] for counted in results["samples_after_task"])
    expected = {"final_average_accuracy", "last_accuracy"} if after == 1 else set()
    assert results["metrics"].keys() == expected
    assert results["per_task_seen_accuracy"][after - 1] is None
    assert re.search(rf"after task {after} not all test images .*: task 1 on 0 of ", caplog.text)
    found = load_run(Path(keys["output-dir"]) / "run")
    assert found.finished
    assert found.gaps == [(after, 1)]


def test_test_images_of_a_holder_that_is_away_are_missed(keys: Values, caplog: pytest.LogCaptureFixture) -> None:
    """One of two holders away: the accuracy is of fewer images, and log and results say so."""
    results = run(keys, away(Changing(), {0}, {"evaluate"}, {2}))
    (first,), (second, _) = results["samples_after_task"]
    assert 0 < second < first
    assert re.search(rf"after task 2 not all test images .* away: task 1 on {second} of {first}, task 2", caplog.text)
    found = load_run(Path(keys["output-dir"]) / "run")
    evaluated, missing = results["samples_after_task"][1], results["samples_away_after_task"][1]
    assert first == second + missing[0]
    assert found.incomplete == [(2, sum(evaluated), sum(evaluated + missing))]


def test_a_class_that_nodes_delete_leaves_the_accuracy_of_the_others(keys: Values, nodes: Path) -> None:
    """Nobody is away, so nothing is missing: of the first task the bees are what there is to test on."""

    def delete() -> None:
        for node in ("north", "south"):
            shutil.rmtree(nodes / node / "ant")

    values = keys | {"unreadable-share": 0.5}
    results = run(values, Changing({1: delete}))
    assert sum(results["confusion"][0]) == 0
    assert results["samples_after_task"][1][0] == sum(results["confusion"][1]) > 0
    assert results["samples_away_after_task"] == [[0], [0, 0]]
    assert results["accuracy_matrix"][1][0] == results["per_class_accuracy"]["bee"]
    found = load_run(Path(keys["output-dir"]) / "run")
    assert (found.gaps, found.incomplete) == ([], [])


def test_images_that_a_node_collects_while_it_is_away_were_not_missing(keys: Values, nodes: Path) -> None:
    transport = Changing()

    def collect() -> None:
        transport.hidden.add(0)
        paint(nodes / "north" / "bee", 30, first=100)

    transport.before = {2: collect, 3: transport.hidden.clear}
    results = run(keys | {"rounds-per-task": 3}, transport)
    (first,), (second, _) = results["samples_after_task"]
    assert second > first
    assert results["samples_away_after_task"] == [[0], [0, 0]]
    assert load_run(Path(keys["output-dir"]) / "run").incomplete == []


@pytest.mark.parametrize("kinds", [{"evaluate"}, {"train", "evaluate"}])
@pytest.mark.parametrize("kept", [[], ["north/cow"]])
def test_what_was_never_measured_is_no_task_without_test_images(
    kinds: set[str], kept: list[str], keys: Values, nodes: Path
) -> None:
    """West alone holds the images of the last task, or of one of its classes, and is away then."""
    for folder in {"north/cow", "north/doe", "south/cow"} - set(kept):
        shutil.rmtree(nodes / folder)
    results = run(keys, away(Changing(), {2}, kinds, {2}))
    assert results["accuracy_matrix"][1][1] is None
    assert results["samples_away_after_task"][1][1] > 0
    assert results["metrics"] == {}
    assert results["per_task_seen_accuracy"][1] is None
    assert load_run(Path(keys["output-dir"]) / "run").gaps == [(2, 2)]


@pytest.fixture
def lone(nodes: Path) -> None:
    """Cows and does are on node 2 alone."""
    for folder in ("north/cow", "north/doe", "south/cow"):
        shutil.rmtree(nodes / folder)


@pytest.mark.usefixtures("lone")
def test_a_task_whose_only_holder_is_out_is_not_learned(keys: Values, caplog: pytest.LogCaptureFixture) -> None:
    transport = Changing()

    def come_back_unfit() -> None:
        reconnect(transport, keys, 2, {"code-sha256": "0" * 64})

    transport.before = {1: lambda: transport.hidden.add(2), 2: come_back_unfit}
    results = run(keys | {"rounds-per-task": 2}, transport)
    assert results["tasks_not_learned"] == [2]
    assert "task 2 is not learned: no client with its images has trained in any of its rounds" in caplog.text
    assert "not learned, and not tried again: task 2" in summary(Path(keys["output-dir"]) / "run")


@pytest.mark.usefixtures("lone")
def test_a_task_whose_only_holder_is_not_there_on_resume_is_not_learned(
    keys: Values, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Changing()

    transport.before = {2: cut}
    with pytest.raises(PowerCutError):
        run(keys, transport)
    transport = Changing()
    transport.hidden.add(2)
    results = run({"resume": str(Path(keys["output-dir"]) / "run"), "start-timeout": 0.1}, transport)
    assert "going on with 2 of 3 nodes; the others may join later" in caplog.messages
    assert results["tasks_not_learned"] == [2]
    assert results["accuracy_matrix"][1][1] is None
    assert results["metrics"] == {}


def test_a_node_that_has_recovered_is_asked_three_times_again(keys: Values) -> None:
    transport = Changing()
    honest = transport.tamper

    def vanish() -> None:
        transport.hidden.add(1)

    def fail() -> None:
        reconnect(transport, keys, 1, {"error": "data-dir is not there"})

    def recover() -> None:
        transport.tamper = honest

    transport.before = {1: vanish, 2: fail, 4: recover, 6: vanish, 7: fail, 8: recover}
    results = run(keys | {"rounds-per-task": 6}, transport)
    assert [len(entry["participants"]) for entry in results["rounds"]][-4:] == [3, 3, 3, 3]
    assert results["absent"] == []


def test_a_node_that_never_said_its_name_is_not_absent_once_it_has_gone(keys: Values) -> None:
    transport = Changing()
    honest = transport.tamper

    def come_back() -> None:
        transport.tamper = honest
        transport.hidden.add(1)
        transport.aliases[7] = 1

    def fail() -> None:
        reconnect(transport, keys, 1, {"error": "not mounted"})

    transport.before = {1: lambda: transport.hidden.add(1), 2: fail, 3: come_back}
    results = run(keys | {"rounds-per-task": 3}, transport)
    assert [client["name"] for client in results["clients"]] == ["north", "south", "west"]
    assert results["absent"] == []


def test_a_node_that_never_said_its_name_is_absent_though_a_client_has_come_back(keys: Values) -> None:
    transport = Changing()

    def fail() -> None:
        reconnect(transport, keys, 1, {"error": "not mounted"})

    def come_back() -> None:
        transport.hidden = {1}

    before = {1: lambda: transport.hidden.add(1), 2: fail, 3: lambda: transport.hidden.update({1, 2}), 4: come_back}
    transport.before = before
    results = run(keys | {"rounds-per-task": 3}, transport)
    assert [node["reason"] for node in results["absent"]] == ["not mounted"]


def test_on_resume_a_class_outside_the_plan_is_not_counted(
    keys: Values, nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_names, "MAX_CLASSES", 4)
    transport = Changing()

    transport.before = {2: cut}
    with pytest.raises(PowerCutError):
        run(keys, transport)
    (nodes / "west" / "cow").rename(nodes / "west" / "gnu")
    assert run({"resume": str(Path(keys["output-dir"]) / "run")})["absent"] == []


def test_on_resume_a_client_with_other_images_is_told_of(
    keys: Values, nodes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    transport = Changing()
    transport.before = {2: cut}
    with pytest.raises(PowerCutError):
        run(keys, transport)
    folder = Path(keys["output-dir"]) / "run"
    before = {c["name"]: sum(c["class_counts"]) for c in results_of(folder)["clients"]}
    assert "has other images" not in caplog.text
    for path in sorted((nodes / "west" / "doe").iterdir())[:4]:
        path.unlink()
    now = {c["name"]: sum(c["class_counts"]) for c in run({"resume": str(folder)})["clients"]}
    assert now["west"] < before["west"]
    told = [message for message in caplog.messages if "other images than before" in message]
    assert told == [f"west has other images than before: {now['west']} to train on, they were {before['west']}"]


@pytest.mark.usefixtures("parted")
def test_a_run_in_which_nobody_has_trained_is_not_finished(keys: Values) -> None:
    """Whoever holds images of the task fails, and the others, idle, make up the quorum."""
    transport = Changing()

    def break_down(*nodes: int) -> None:
        transport.broken = lambda node, kind: kind == "train" and node in nodes

    transport.before = {1: lambda: break_down(0, 1), 2: lambda: break_down(2)}
    with pytest.raises(RunError, match=r"no client has trained in any round. north: .*; south: .*; west: "):
        run(keys, transport)


@pytest.mark.usefixtures("parted")
def test_a_run_that_never_draws_who_holds_images_is_not_finished(
    keys: Values, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No client fails: each task draws one that holds images of the other task only."""
    drawn = {1: "west", 2: "north"}
    monkeypatch.setattr(
        "server_app.rounds.run.sample_clients",
        lambda clients, config, server_round: [c for c in clients if c.name == drawn[server_round]],
    )
    with pytest.raises(RunError, match=r"any round: those that were asked had no image of the classes of their round$"):
        run(keys | {"quorum": 1})
    assert "task 1 is not learned: no client with its images has trained" in caplog.text


def test_a_secure_sum_that_would_have_too_few_is_refused_before_the_first_round(keys: Values) -> None:
    values = keys | {"method": "afcl", "secure-aggregation": "pairwise", "secure-aggregation-threshold": 3}
    for number in (0, 3):
        with pytest.raises(
            RunError, match=r"2 clients can .* 3 are needed .*secure-aggregation-threshold.* another copy"
        ):
            run(values | {"num-clients": number}, lying(keys, 1, {"code-sha256": "0" * 64}))


def test_a_mended_node_takes_part_and_is_absent_no_more(keys: Values) -> None:
    transport = lying(keys, 1, {"code-sha256": "0" * 64})

    def leave() -> None:
        transport.hidden = {1}

    def return_mended() -> None:
        transport.hidden, transport.tamper = set(), lambda node, kind, answer: answer

    transport.before = {1: leave, 2: return_mended}
    results = run(keys | {"num-clients": 0, "rounds-per-task": 2}, transport)
    assert [len(r["participants"]) for r in results["rounds"]] == [2, 2, 3, 3]
    assert results["absent"] == []
    said = json.loads((Path(keys["output-dir"]) / "run" / "nodes.json").read_text())
    assert [node["absent"] for node in said] == ["", "", ""]


def test_a_node_whose_images_are_there_a_little_later_takes_part_again(keys: Values) -> None:
    transport = Changing()
    honest = transport.tamper

    def return_unfit() -> None:
        transport.hidden, transport.tamper = set(), lying(keys, 1, {"error": "data-dir is not there"}).tamper

    def mount() -> None:
        transport.tamper = honest

    transport.before = {1: lambda: transport.hidden.add(1), 2: return_unfit, 3: mount}
    results = run(keys | {"rounds-per-task": 3}, transport)
    assert [len(r["participants"]) for r in results["rounds"]] == [3, 3, 2, 3, 3, 3]
    assert results["absent"] == []


@pytest.mark.parametrize("claims", [{"code-sha256": "0" * 64}, {"error": "the disk is full"}])
def test_a_node_that_comes_back_unfit_takes_part_no_more(keys: Values, claims: dict[str, str]) -> None:
    transport = Changing()

    def return_unfit() -> None:
        transport.hidden, transport.tamper = set(), lying(keys, 1, claims).tamper

    transport.before = {1: lambda: transport.hidden.add(1), 2: return_unfit}
    results = run(keys | {"rounds-per-task": 2}, transport)
    assert [len(r["participants"]) for r in results["rounds"]] == [3, 3, 2, 2]
    assert [len(r["failures"]) for r in results["rounds"]] == [1, 0, 0, 0]
    (absent,) = results["absent"]
    assert any(reason in absent["reason"] for reason in ("another copy of the code", "the disk is full"))


def test_classes_outside_the_plan_take_no_node_out(
    keys: Values, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run whose classes are settled leaves out what a late node has beside them."""
    monkeypatch.setattr(class_names, "MAX_CLASSES", 5)
    late = lying(keys, 2, *claims_of(4))
    late.hidden.add(2)
    late.before = {1: late.hidden.clear}
    results = run(keys | {"num-clients": 2}, late)
    assert results["absent"] == []
    assert "not in the plan of this run, so left out: zebra 0, zebra 1, zebra 2, zebra 3" in caplog.messages
    assert [c["name"] for c in results["clients"]] == ["north", "south", "west"]


def test_where_classes_appear_a_node_may_begin_with_none(keys: Values, nodes: Path, patterns: list[np.ndarray]) -> None:
    """Anywhere else an empty folder is a mistake, also that of a node which comes late."""
    empty(nodes / "west")
    arrives = Changing({2: lambda: store(nodes / "west", 4, patterns[4])})
    results = run(appearing(keys), arrives)
    assert results["class_names"] == ["ant", "bee", "cow", "doe", "elk"]
    assert [c["name"] for c in results["clients"]] == ["north", "south", "west"]
    empty(nodes / "west")
    late = Changing({1: lambda: late.hidden.clear()})
    late.hidden = {2}
    results = run(keys | {"num-clients": 2, "run-name": "late"}, late)
    assert [len(r["participants"]) for r in results["rounds"]] == [2, 2]
    assert [a["reason"].split(":")[0] for a in results["absent"]] == ["it has no image"]
    for name in ("north", "south"):
        empty(nodes / name)
    with pytest.raises(ConfigError, match="no node holds an image"):
        run(appearing(keys) | {"run-name": "empty"}, Changing())


def empty(folder: Path) -> None:
    """Take a node its images."""
    shutil.rmtree(folder)
    folder.mkdir()


def lying(
    keys: Values, liar: int, claims: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
) -> Changing:
    """Three nodes, one of which says of itself what is not so."""

    def spoil(node: int, kind: Kind, answer: Packet) -> Packet:
        if (node, kind) == (liar, "hello"):
            answer.config |= claims
            answer.arrays |= arrays or {}
        return answer

    transport = Changing()
    transport.tamper = spoil
    return transport


def test_a_run_is_resumed_without_a_node_whose_disk_is_gone(keys: Values, nodes: Path) -> None:
    with pytest.raises(PowerCutError):
        run(keys, Changing({2: cut}))
    empty(nodes / "south")
    results = run({"resume": str(Path(keys["output-dir"]) / "run")})
    assert results["status"] == "finished"
    assert [len(r["participants"]) for r in results["rounds"]] == [3, 2]
    said = json.loads((Path(keys["output-dir"]) / "run" / "nodes.json").read_text())
    assert {node["name"] for node in said if node["absent"]} == {"south"}
    assert sorted(node["name"] for node in said) == ["north", "south", "west"]  # fcil nodes knows it still
    assert results["absent"][0]["reason"].startswith("it has no image")
    counts = {c["name"]: sum(c["class_counts"]) for c in results["clients"]}
    assert list(counts) == ["north", "south", "west"]  # who has trained, though south is away
    assert counts["south"] > 0


@pytest.mark.ci
def test_rounds_of_adaptation_are_those_of_the_nodes_images(
    keys: Values, nodes: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """North and south have 36 training images of the first task, west none; on resume south has none either.

    The number is that of the checkpoint then: it is not chosen again.
    """
    caplog.set_level(logging.INFO)
    adapting = keys | {"method": "fedrda", "batch-size": 7}  # 6 steps a round
    with pytest.raises(PowerCutError):
        run(adapting, Changing({3: cut}))
    assert "10 rounds of adaptation come first" in caplog.messages
    settings = load_run(Path(keys["output-dir"]) / "run").settings
    assert settings["fedrda-adaptation-rounds"] == 0
    assert settings["used.adaptation-rounds"] == 10
    empty(nodes / "south")
    monkeypatch.delattr("server_app.rounds.setup.choose_adaptation_rounds")
    results = run({"resume": str(Path(keys["output-dir"]) / "run")})
    assert [r["task"] for r in results["rounds"]] == [1] * 11 + [2]
    assert [len(r["participants"]) for r in results["rounds"]] == [3] * 2 + [2] * 10


def spell(folder: Path, name: str, spelling: str) -> None:
    """A node calls a class otherwise."""
    (folder / name).rename(folder / spelling)


def test_spellings_that_differ_in_case_or_punctuation_are_one_class(
    keys: Values, nodes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There are 60 images of cows and 40 of each other class; one node each has doe and Doe., ant and a-nt."""
    for node, name, spelling in [
        ("north", "cow", "Cow"),
        ("south", "cow", "cow "),
        ("west", "cow", "Cow"),
        ("west", "doe", "Doe."),
        ("south", "ant", "a-nt"),
    ]:
        spell(nodes / node, name, spelling)
    results = run(keys | {"local-epochs": 3})
    assert results["class_names"] == ["Cow", "Doe.", "a-nt", "bee"]
    trained = np.array([c["class_counts"] for c in results["clients"]])
    assert (trained.sum(axis=0) + np.sum(results["confusion"], axis=1)).tolist() == [60, 40, 40, 40]
    assert (trained > 0).tolist() == [[True] * 4, [True, False, True, True], [True, True, False, False]]
    assert results["metrics"]["last_accuracy"] > 0.8
    warnings = [record.getMessage() for record in caplog.records if "is taken for" in record.getMessage()]
    assert [text.split(":")[0] for text in warnings] == [
        "class 'ant' of north is taken for 'a-nt'",
        "class 'cow ' of south is taken for 'Cow'",
        "class 'doe' of north is taken for 'Doe.'",
    ]
    predictor = load_predictor(Path(keys["output-dir"]) / "run")
    assert sorted(predictor.class_names) == results["class_names"]
    assert predictor.predict(sorted((nodes / "north" / "doe").iterdir())).names.count("Doe.") > 15


def test_a_class_has_the_name_that_most_nodes_use(keys: Values, nodes: Path) -> None:
    for node, spelling in {"north": "cat", "south": "Cat", "west": "cat "}.items():
        spell(nodes / node, "cow", spelling)
    shutil.copytree(nodes / "north" / "cat", nodes / "zulu" / "cat")
    results = run(keys | {"num-clients": 4})
    assert results["class_names"] == ["ant", "bee", "cat", "doe"]
    assert all(client["class_counts"][2] > 0 for client in results["clients"])
    assert list(results["per_class_accuracy"]) == results["class_names"]


def test_the_server_says_who_holds_what_and_what_nobody_can_be_tested_on(
    keys: Values, nodes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in sorted((nodes / "south" / "ant").iterdir())[1:]:
        file.unlink()
    for file in sorted((nodes / "north" / "ant").iterdir())[1:]:
        file.unlink()
    with caplog.at_level("INFO"):
        results = run(keys)
    assert "no node has held out an image of ant" in caplog.text
    assert "held out as test images" not in caplog.text
    assert untested_classes(results) == ["ant"]
    said = "without a test image of ant"
    assert summary(Path(keys["output-dir"]) / "run")[1] == said
    assert "north" in caplog.text
    assert "held out  classes  unreadable" in caplog.text
    alone = run(keys | {"num-tasks": 4, "run-name": "alone"})  # a task of the class that nobody can be tested on
    assert 0 in alone["samples_per_task"]
    assert alone["metrics"].keys() == {"final_average_accuracy", "last_accuracy"}


def test_files_that_come_during_a_task_wait_for_the_next_hello(keys: Values) -> None:
    """The server refuses more examples than a node has spoken of."""
    values = keys | {"num-tasks": 1, "rounds-per-task": 2}
    late = Path(keys["data-dir"]) / "north" / "ant"
    results = run(values, Changing({2: lambda: paint(late, 30, first=100)}))
    assert [r["failures"] for r in results["rounds"]] == [[], []]
    assert results["clients"][0]["class_counts"][0] == 18
    assert run(values | {"run-name": "next"})["clients"][0]["class_counts"][0] > 18


def test_a_node_joins_late(keys: Values) -> None:
    transport = Changing({1: lambda: transport.hidden.clear()})
    transport.hidden = {2}
    results = run(keys | {"num-clients": 2}, transport)
    assert [r["participants"] for r in results["rounds"]] == [["north", "south"], ["north", "south", "west"]]
    assert [c["name"] for c in results["clients"]] == ["north", "south", "west"]


def test_a_late_node_with_another_spelling_joins(keys: Values, nodes: Path, caplog: pytest.LogCaptureFixture) -> None:
    spell(nodes / "west", "doe", "Doe")
    transport = Changing({1: lambda: transport.hidden.clear()})
    transport.hidden = {2}
    results = run(keys | {"num-clients": 2}, transport)
    assert results["class_names"] == ["ant", "bee", "cow", "doe"]
    assert results["rounds"][1]["participants"] == ["north", "south", "west"]
    assert results["rounds"][1]["failures"] == []
    assert results["clients"][2]["class_counts"][3] > 0
    assert caplog.text.count("class 'Doe' of west is taken for 'doe'") == 1
    assert "left out" not in caplog.text


@pytest.mark.parametrize("dataset", ["own", "synthetic"])
def test_a_node_that_comes_back_under_another_handle_takes_its_old_place(dataset: str, keys: Values) -> None:
    """As a SuperNode does that is restarted without a key of its own."""

    def restart() -> None:
        transport.hidden, transport.aliases = {1}, {7: 1}

    values = keys | {"rounds-per-task": 2}
    if dataset == "synthetic":
        values |= {"dataset": "synthetic", "data-dir": "", "partition": "iid"}
    transport = Changing({1: restart})
    results = run(values, transport)
    names = [c["name"] for c in results["clients"]]
    assert [r["participants"] for r in results["rounds"]] == [names] * 4
    assert [[f["name"] for f in r["failures"]] for r in results["rounds"]] == [[names[1]], [], [], []]


def test_a_node_that_comes_back_under_another_name_is_one_client_still(keys: Values, nodes: Path) -> None:
    """The same key, so the same handle, as when somebody corrects its name; here its folder's."""

    def leave() -> None:
        transport.hidden = {2}
        (nodes / "west").rename(nodes / "xeno")

    values = keys | {"rounds-per-task": 2}
    transport = Changing({1: leave, 2: lambda: transport.hidden.clear()})
    results = run(values, transport)
    assert results["rounds"][0]["failures"] == [{"name": "west", "reason": "gone"}]
    assert [r["participants"][-1] for r in results["rounds"]] == ["west", "west", "xeno", "xeno"]
    assert [c["name"] for c in results["clients"]] == ["north", "south", "xeno"]
    assert results["samples_away_after_task"] == [[0], [0, 0]]  # what west held is what xeno holds


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: p.config.update({"backbone-sha256": "0" * 64}), "other backbone weights"),
        (lambda p: p.config.update({"code-sha256": "0" * 64}), "another copy of the code"),
        (lambda p: p.config.update({"classes": ["a", "a"]}), "its classes are not distinct"),
    ],
)
def test_a_late_node_that_does_not_fit_is_named(spoil: Callable[[Packet], object], reason: str, keys: Values) -> None:
    class Odd(Changing):
        def _ask(self, kind: Kind, node: int, packet: Packet) -> Reply:
            reply = super()._ask(kind, node, packet)
            if node == 2 and kind == "hello" and reply.packet:
                spoil(reply.packet)
            return reply

    transport = Odd({1: lambda: transport.hidden.clear()})
    transport.hidden = {2}
    results = run(keys | {"num-clients": 2}, transport)
    assert results["status"] == "finished"
    assert [reason in a["reason"] for a in results["absent"]] == [True]


def test_an_npz_may_name_classes_that_it_does_not_hold(keys: Values, nodes: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), np.uint8)
    np.savez(nodes / "west.npz", images=images, labels=np.repeat([0, 2], 6), class_names=["ant", "bee", "cow"])
    results = run(keys, node_settings=[{}, {}, {"name": "west", "data-dir": str(nodes / "west.npz")}])
    assert results["status"] == "finished"
    assert results["clients"][2]["class_counts"][1] == 0


def test_a_second_node_of_one_name_has_to_wait(keys: Values) -> None:
    transport = Changing({1: lambda: transport.aliases.update({7: 1})})
    results = run(keys, transport)
    assert results["rounds"][1]["participants"] == ["north", "south", "west"]
    assert results["absent"] == [{"name": "south", "reason": "a node of this name takes part already"}]


def appearing(keys: Values) -> Values:
    return keys | {"class-order": "appearing", "num-tasks": 3, "rounds-per-task": 2}


@pytest.mark.ci
def test_a_node_that_is_away_on_resume_is_a_client_still_when_classes_come(
    keys: Values, nodes: Path, patterns: list[np.ndarray]
) -> None:
    with pytest.raises(PowerCutError):
        run(appearing(keys), Changing({2: cut}))
    store(nodes / "north", 4, patterns[4])
    folder, transport = Path(keys["output-dir"]) / "run", Changing()
    transport.hidden.add(1)
    results = run({"resume": str(folder), "start-timeout": 0.1}, transport)
    assert results["class_names"][-1] == "elk"
    assert [len(c["class_counts"]) for c in results["clients"]] == [5, 5, 5]
    assert load_run(folder).client_counts["south"].tolist()[3:] == [0, 0]


def test_classes_that_appear_become_tasks(keys: Values, nodes: Path, patterns: list[np.ndarray]) -> None:
    """Two appear while the first task is learned and none later, so there are two tasks of three that could be."""
    values = appearing(keys) | {"local-epochs": 3}
    new = [lambda: store(nodes / "north", 4, patterns[4]), lambda: store(nodes / "west", 5, patterns[5])]
    results = run(values, Changing({2: lambda: [find() for find in new]}))
    assert results["tasks"] == [[0, 1, 2, 3], [4, 5]]
    assert results["class_names"] == list(NAMES)
    assert [r["task"] for r in results["rounds"]] == [1, 1, 2, 2]
    assert results["num_tasks"] == 2
    assert results["metrics"]["last_accuracy"] > 0.7
    assert len(results["clients"][0]["class_counts"]) == 6


def test_the_run_waits_for_classes_to_appear(
    keys: Values, nodes: Path, patterns: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            store(nodes / "west", 5, patterns[5])

    monkeypatch.setattr(server_app.rounds.setup.time, "sleep", sleep)
    results = run(appearing(keys) | {"class-wait": 3600.0, "num-tasks": 2})
    assert results["tasks"] == [[0, 1, 2, 3], [4]]
    assert slept == [server_app.rounds.setup.POLL] * 2


def test_an_open_ended_run_is_resumed_with_the_classes_it_had(
    keys: Values, nodes: Path, patterns: list[np.ndarray]
) -> None:
    values = appearing(keys)
    arrives = {2: lambda: store(nodes / "north", 4, patterns[4])}
    with pytest.raises(PowerCutError):
        run(values | {"run-name": "cut"}, Changing({**arrives, 4: cut}))
    store(nodes / "north", 5, patterns[5])  # while nobody looks: it comes in its turn, after the task that was cut
    resumed = run({"resume": str(Path(keys["output-dir"]) / "cut")})
    for name in ("elk", "fox"):
        shutil.rmtree(nodes / "north" / name)
    arrives |= {4: lambda: store(nodes / "north", 5, patterns[5])}
    whole = run(values | {"run-name": "whole"}, Changing(arrives))
    assert without_times(resumed) == without_times(whole)
    assert resumed["tasks"] == [[0, 1, 2, 3], [4], [5]]


def test_a_finished_open_ended_run_goes_on_with_classes_that_came_later(
    keys: Values, nodes: Path, patterns: list[np.ndarray]
) -> None:
    """As a run in which they came in time; without new classes nothing changes, and num-tasks is the limit."""
    values, folder = appearing(keys) | {"num-tasks": 2}, Path(keys["output-dir"])
    arrives = {2: lambda: store(nodes / "north", 4, patterns[4])}
    whole = run(values | {"run-name": "whole"}, Changing(arrives))
    shutil.rmtree(nodes / "north" / "elk")
    first = run(values | {"run-name": "first"})
    assert (first["status"], first["tasks"]) == ("finished", [[0, 1, 2, 3]])
    resume = {"resume": str(folder / "first")}
    assert without_times(run(resume)) == without_times(first)
    store(nodes / "north", 4, patterns[4])
    assert without_times(run(resume)) == without_times(whole)
    assert (folder / "first" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="finished run: there is nothing to resume"):
        run(resume)


def test_a_finished_run_that_is_stopped_while_it_waits_is_still_finished(
    keys: Values, nodes: Path, patterns: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one that is stopped in a round of the new classes, or of one whose checkpoint was damaged, has failed."""
    folder, told = Path(keys["output-dir"]) / "first", list[BaseException | None]()
    first = run(appearing(keys) | {"run-name": "first"})
    monkeypatch.setattr("server_app.rounds.run.tell_operator", lambda hook, folder, error: told.append(error))
    resume: Values = {"resume": str(folder), "class-wait": 3600.0}

    def stop(what: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server_app.rounds.setup.time, "sleep", stop)
    with pytest.raises(KeyboardInterrupt):
        run(resume)
    assert without_times(results_of(folder)) == without_times(first)
    assert told == [None]  # the operator is told what the results say
    monkeypatch.setattr(Results, "write_round", stop)
    damaged = max((folder / "checkpoint").glob("*.ckpt"))
    whole = damaged.read_bytes()
    for step in (lambda: damaged.write_bytes(whole[:-5]), lambda: store(nodes / "north", 4, patterns[4])):
        step()
        with pytest.raises(KeyboardInterrupt):
            run(resume)
        assert results_of(folder)["status"] == "failed"
        assert isinstance(told[-1], KeyboardInterrupt)


@pytest.mark.parametrize("error", [RunError("the SuperLink does not answer"), KeyboardInterrupt()])
def test_a_finished_run_that_fails_while_it_waits_or_lost_its_last_checkpoint_has_failed(
    keys: Values, nodes: Path, patterns: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """With one round a task the checkpoint before the damaged one ends a run of fewer classes."""
    folder = Path(keys["output-dir"]) / "first"
    values = appearing(keys) | {"run-name": "first", "rounds-per-task": 1}
    results = run(values, Changing({1: lambda: store(nodes / "north", 4, patterns[4])}))
    assert (results["status"], len(results["tasks"])) == ("finished", 2)
    if isinstance(error, KeyboardInterrupt):
        shutil.rmtree(nodes / "north" / "elk")
        newest = max((folder / "checkpoint").glob("*.ckpt"))
        newest.write_bytes(newest.read_bytes()[:-5])

    def stop(seconds: float) -> None:
        raise error

    monkeypatch.setattr(server_app.rounds.setup.time, "sleep", stop)
    with pytest.raises(type(error)):
        run({"resume": str(folder), "class-wait": 3600.0})
    assert results_of(folder)["status"] == "failed"


def test_a_run_that_stops_within_a_new_task_can_be_looked_at(
    keys: Values, nodes: Path, patterns: list[np.ndarray]
) -> None:
    values, folder = appearing(keys), Path(keys["output-dir"]) / "cut"
    arrives = {2: lambda: store(nodes / "north", 4, patterns[4]), 4: cut}
    with pytest.raises(PowerCutError):
        run(values | {"run-name": "cut"}, Changing(arrives))
    stopped = load_run(folder)
    assert (stopped.results["num_tasks"], len(stopped.matrix), stopped.confusion.shape) == (2, 1, (5, 5))
    assert stopped.untested == []


def test_in_a_rehearsal_a_resumed_run_has_the_nodes_it_had(
    keys: Values, nodes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Node i is the i-th folder: with another one before it, a node would silently get another one's images."""
    run(appearing(keys) | {"run-name": "first"})
    shutil.copytree(nodes / "north", nodes / "east")
    assert main(["run", "--in-process", f"resume={Path(keys['output-dir']) / 'first'}"]) == 2
    assert "only in a deployment may nodes come and go" in capsys.readouterr().err
    (nodes / "east").rename(nodes / "zulu")  # behind the others it changes none of their numbers
    assert main(["run", "--in-process", f"resume={Path(keys['output-dir']) / 'first'}"]) == 0


def test_a_nodes_device_and_paths_win_over_the_runs(nodes: Path) -> None:
    """The device only where it computes, and a path only where the run reads it: digits need none."""
    node = Node({"name": "a", "partition-id": 0, "device": "cuda:7", "data-dir": str(nodes)})
    asked = {"dataset": "synthetic", "num-clients": 1, "device": "cpu"}
    answer = handle("hello", hello_message(parse(asked).flat()), node)
    assert "cuda:7" in answer.config["error"]  # type: ignore[operator]
    folder = parse({"dataset": "folder", "data-dir": "/server", "num-clients": 1, "num-tasks": 2}).flat()
    settings = {"partition-id": 0, "device": "cpu", "data-dir": str(nodes / "north")}
    answer = handle("hello", hello_message(folder), Node(settings))
    assert answer.config["classes"] == ["ant", "bee", "cow", "doe"]


def test_where_a_node_keeps_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = parse(OWN | {"data-dir": "/data"})
    node = Node({"name": "Klinik Süd/1", "data-dir": "/data"})
    assert own_data_dir(config, node) == "/data"
    assert state_dir(config, node).parent == tmp_path / "fcil"
    assert "/" not in state_dir(config, node).name
    assert state_dir(config, Node({"name": "a", "state-dir": "/var/a"})) == Path("/var/a")
    assert own_data_dir(config, Node({"name": "a"})) == "/data"  # one path for all, as in containers
    with pytest.raises(ConfigError, match="data-dir"):
        own_data_dir(parse(OWN), Node({"name": "a"}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"evaluate": "server"}, "evaluate"),
        ({"partition": "iid"}, "partition"),
        ({"dirichlet-beta": 0.1}, "dirichlet-beta"),
        ({"method": "joint"}, "joint"),
        ({"federated-bias": True}, "federated-bias"),
        ({"validation-share": 0.1}, "validation-share"),
        ({"class-wait": 5.0}, "class-wait"),
        ({"dataset": "digits", "class-order": "appearing"}, "appearing"),
        ({"dataset": "digits", "unreadable-share": 0.5}, "unreadable-share"),
    ],
)
def test_what_cannot_work_with_own_data(values: Values, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(OWN | values)
