"""What clients may do wrong, and what a run does about it."""

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from server_app.errors import RunError
from server_app.privacy.accountant import epsilon
from server_app.report.runs import load_run
from server_app.run_files.paths import run_directory
from server_app.transport.base import Reply
from server_app.transport.in_process import InProcessTransport
from strategies.base import RoundContext, Update
from task.config.parsing import parse
from task.keys import ConfigError
from task.message import Kind, Packet
from task.models.model import Model
from tests.conftest import TINY
from tests.helpers.own_data import paint
from tests.helpers.runs import Change, Values, folder_of, model_of, results_of, run, set_statistic


def on_training(node: int, change: Change) -> Callable[[int, Kind, Packet], Packet]:
    """Tamper with what one node answers to train messages."""

    def tamper(sender: int, kind: Kind, packet: Packet) -> Packet:
        if sender == node and kind == "train":
            change(packet)
        return packet

    return tamper


BAD: dict[str, tuple[Change, str]] = {  # of the many in test_reply_checks.py
    "NaN in an array": (lambda p: p.arrays["head.bias"].fill(np.nan), "head.bias holds NaN"),
    "negative examples": (lambda p: p.metrics.update({"num-examples": -5}), "num-examples is -5"),
    "count above what is held": (set_statistic("counts", lambda c: c + 10**6), "above what the client said"),
    "its own error": (lambda p: p.config.update({"error": "out of memory"}), "out of memory"),
}


@pytest.fixture(scope="module")
def without_one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[dict, dict[str, np.ndarray]]]:
    """Results and model of a run in which node 1 answers no train message."""
    values = TINY | {"output-dir": str(tmp_path_factory.mktemp("silent")), "run-name": "silent"}
    return cache(lambda: (run(values, broken=lambda node, kind: node == 1 and kind == "train"), model_of(values)))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_left_out_and_named(name: str, tiny: dict, without_one: Callable) -> None:
    """The global model is what it would be had the node not answered at all."""
    (change, reason), (silent, theirs) = BAD[name], without_one()
    spoilt = run(tiny, tamper=on_training(1, change))
    for round_ in spoilt["rounds"]:
        assert [f["name"] for f in round_["failures"]] == ["client-0001"]
        assert reason in round_["failures"][0]["reason"]
    assert spoilt["status"] == "finished"
    assert spoilt["accuracy_matrix"] == silent["accuracy_matrix"]
    ours = model_of(tiny)
    assert all((ours[n] == theirs[n]).all() for n in ours)


@pytest.mark.parametrize("packing", ["full", "low-rank"])
def test_other_packings_are_checked_too(packing: str, tiny: dict) -> None:
    name = {"full": "covariances", "low-rank": "factors"}[packing]
    spoil = (lambda c: -1e3 - c) if packing == "full" else (lambda f: f * np.nan)
    results = run(tiny | {"hgp-covariance": packing}, tamper=on_training(0, set_statistic(name, spoil)))
    assert all([f["name"] for f in r["failures"]] == ["client-0000"] for r in results["rounds"])


def test_a_client_that_never_answers_is_named(tiny: dict) -> None:
    results = run(tiny, broken=lambda node, kind: node == 2 and kind == "train")
    assert results["rounds"][0]["failures"] == [{"name": "client-0002", "reason": "no answer within 3600 s"}]


def test_a_server_app_that_flower_ends_says_so_in_words(tiny: dict) -> None:
    """It did: the error of a run whose superexec had died was "0"."""

    def broken(node: int, kind: Kind) -> bool:
        if kind == "train":
            raise SystemExit(0)
        return False

    with pytest.raises(SystemExit):
        run(tiny, broken=broken)
    assert results_of(folder_of(tiny))["error"].startswith("its process was told to end: by 'flwr stop', by a signal")


def test_a_round_that_is_cut_short_is_not_in_the_results(tiny: dict) -> None:
    """Its bytes and seconds would count in the means over all rounds."""
    asked = list[int]()

    def broken(node: int, kind: Kind) -> bool:
        asked.extend([node] if kind == "train" else [])
        if len(asked) == 4:  # the first client of the second round
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        run(tiny | {"rounds-per-task": 2}, broken=broken)
    lines = (folder_of(tiny) / "rounds.jsonl").read_text().splitlines()
    results = results_of(folder_of(tiny))
    assert results["status"] == "failed"
    assert [r["round"] for r in results["rounds"]] == [json.loads(line)["round"] for line in lines] == [1]


def test_a_round_that_is_cut_short_is_in_the_privacy_account(tiny: dict) -> None:
    """Both have answered in the second round when the run ends: two releases each, whether it is resumed or not."""
    answers = list[int]()

    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        answers.extend([node] if kind == "train" else [])
        if len(answers) == 4:
            raise KeyboardInterrupt
        return packet

    private = {"method": "fedavg", "privacy-clip": 1.0, "privacy-noise": 1.0, "privacy-seeded": True}
    with pytest.raises(KeyboardInterrupt):
        run(tiny | private | {"rounds-per-task": 2, "num-clients": 2}, tamper=tamper)
    results = results_of(folder_of(tiny))
    assert len(results["rounds"]) == 1
    assert results["privacy"]["releases"] == [1, 2]
    assert results["privacy"]["epsilon"][1] == epsilon(0.5, 2, 1e-5)


def test_statistics_that_nobody_asked_for_are_refused(tiny: dict) -> None:
    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        if node == 0 and kind == "train":
            packet.statistics = {"means": np.zeros((1, 4), np.float32)}
        return packet

    results = run(tiny | {"method": "fedavg"}, tamper=tamper)
    assert results["status"] == "finished"
    assert results["rounds"][0]["failures"][0]["name"] == "client-0000"
    assert "none were expected" in results["rounds"][0]["failures"][0]["reason"]


def test_a_client_under_anothers_name_changes_nothing_but_its_own_answer(tiny: dict) -> None:
    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        if node == 1 and kind == "train":
            packet.config["name"], packet.metrics = "client-0000", {"loss": 1.0}
        return packet

    results = run(tiny, tamper=tamper)
    assert results["status"] == "finished"
    assert [f["name"] for f in results["rounds"][0]["failures"]] == ["client-0001"]


@pytest.mark.pictures
def test_without_a_quorum_the_run_stops_and_keeps_what_it_has(tiny: dict) -> None:
    """Two of three vanish in the second task; two are needed."""
    rounds = []

    def broken(node: int, kind: Kind) -> bool:
        rounds.extend([kind] if node == 0 and kind == "train" else [])
        return node > 0 and len(rounds) > 1

    with pytest.raises(RunError, match=r"task 2, round 1: 1 of 3 clients answered, the quorum is 2"):
        run(tiny | {"quorum": 2}, broken=broken)
    results = results_of(folder_of(tiny))
    assert results["status"] == "failed"
    assert "quorum is 2" in results["error"]
    assert results["accuracy_matrix"][0][0] is not None
    assert results["accuracy_matrix"][1] == [None, None]
    assert {f["name"] for f in results["rounds"][-1]["failures"]} == {"client-0001", "client-0002"}
    folder = Path(tiny["output-dir"]) / "run"
    assert {"config.yaml", "model.safetensors", "accuracy.png", "report.html"} <= {p.name for p in folder.iterdir()}


@pytest.mark.parametrize("times", [2, 1000])
def test_a_bad_evaluation_is_named_and_left_out(times: int, tiny: dict) -> None:
    """Twice a client's part is no more than all three clients have, but more than it has itself."""

    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        if node == 1 and kind == "evaluate":
            packet.arrays |= {name: times * packet.arrays[name] for name in ("correct", "total")}
            packet.arrays["confusion"] *= [1, 1, times]
        return packet

    results = run(tiny | {"evaluate": "clients"}, tamper=tamper)
    assert [f["name"] for f in results["rounds"][0]["failures"]] == ["client-0001"]
    assert "evaluation" in results["rounds"][0]["failures"][0]["reason"]
    assert results["accuracy_matrix"][1][1] is not None


@pytest.mark.parametrize("sums", ["off", "pairwise"])
def test_test_images_whose_clients_are_away_are_missed(sums: str, tiny: dict, caplog: pytest.LogCaptureFixture) -> None:
    """Each client evaluates its part of the data set's test images."""
    values = tiny | {"method": "ncm", "evaluate": "clients", "num-clients": 3, "secure-aggregation": sums}
    results = run(values, broken=lambda node, kind: node == 2 and kind == "evaluate")
    whole = run(values | {"run-name": "whole"})
    assert whole["samples_away_after_task"] == [[0], [0, 0]]
    after, away = (np.concatenate(results[f"samples{name}_after_task"]) for name in ("", "_away"))
    assert (away > 0).all()
    assert (after + away).tolist() == np.concatenate(whole["samples_after_task"]).tolist()
    assert "not all test images were evaluated" in caplog.text
    assert load_run(folder_of(tiny)).incomplete


def test_a_class_that_no_client_has_evaluated_leaves_its_task_without_accuracy(
    tiny: dict, tmp_path: Path, patterns: list[np.ndarray]
) -> None:
    """Test images come in the order of their classes again and again, so each of four clients has those of one."""
    images = np.stack(patterns[:4], axis=1).reshape(-1, *patterns[0].shape[1:])
    labels, split = np.tile(np.arange(4), 20), np.repeat([0, 1], 40)
    np.savez(tmp_path / "turns.npz", allow_pickle=False, images=images, labels=labels, split=split)
    values = tiny | {"method": "ncm", "dataset": "npz", "data-dir": str(tmp_path / "turns.npz"), "num-tasks": 2}
    values |= {"class-order": "given", "partition": "iid", "evaluate": "clients", "num-clients": 4}
    evaluations = []

    def broken(node: int, kind: Kind) -> bool:
        evaluations.extend([node] * (kind == "evaluate"))
        return kind == "evaluate" and node == 3 and len(evaluations) > 4

    results = run(values, broken=broken)
    assert (results["samples_after_task"], results["samples_away_after_task"]) == ([[20], [20, 10]], [[0], [0, 10]])
    assert results["accuracy_matrix"][1][0] is not None
    assert results["accuracy_matrix"][1][1] is None
    assert results["metrics"] == {}


def test_a_refinement_that_diverges_ends_the_run_with_a_reason(tiny: dict) -> None:
    with pytest.raises(RunError, match=r"lower the step size of the server \(hgp-learning-rate\)"):
        run(tiny | {"hgp-learning-rate": 1e30})
    assert results_of(folder_of(tiny))["rounds"][0]["dropped"]


def test_a_refinement_that_measures_no_number_ends_the_run_with_its_reason(tiny: dict) -> None:
    """The loss is NaN as well as the model: results.json, which takes none, must not hide the reason."""
    with pytest.raises(RunError, match=r"lower the step size of the server \(ccvr-learning-rate\)"):
        run(tiny | {"method": "ccvr", "prompt": "none", "ccvr-logit-temperature": 1e-40})
    assert results_of(folder_of(tiny))["status"] == "failed"


def test_a_task_that_nobody_could_learn_ends_the_run(tiny: dict) -> None:
    """Idle clients answer too, so the quorum is met: of joint's three clients one has all images, and diverges."""
    with pytest.raises(RunError, match=r"task 1, round 2: no client with its images has trained in any of its rounds"):
        run(tiny | {"method": "joint", "learning-rate": 1e20, "rounds-per-task": 2})


def test_a_round_in_which_the_answers_cannot_be_fetched_is_not_recorded(
    tiny: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look like one in which all clients have answered."""
    transport = InProcessTransport(3)

    def exchange(kind: Kind, packets: dict[int, Packet], *limits: float) -> Iterable[Reply]:
        if any(packet.config.get("server-round") == 2 for packet in packets.values()):
            raise RunError("the SuperLink does not answer")
        return InProcessTransport.exchange(transport, kind, packets, *limits)

    monkeypatch.setattr(transport, "exchange", exchange)
    with pytest.raises(RunError, match="does not answer"):
        run(tiny | {"method": "ncm"}, transport)
    results = results_of(folder_of(tiny))
    assert (results["status"], [r["task"] for r in results["rounds"]]) == ("failed", [1])


def test_a_dropped_round_leaves_no_trace(tiny: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method's own memory goes back with the model, so the next round is as if the bad one had not been."""
    from strategies.hgp import HGP

    banks, refine = [], HGP.refine

    def spoil(self: HGP, model: Model, updates: list, context: RoundContext) -> dict[str, float]:
        banks.append(self.prototypes)
        report = refine(self, model, updates, context)
        if context.server_round == 2:
            model.head.weight.data.fill_(np.nan)
        return report

    monkeypatch.setattr(HGP, "refine", spoil)
    results = run(tiny | {"num-tasks": 1, "rounds-per-task": 3})
    assert [r["dropped"] for r in results["rounds"]] == [False, True, False]
    assert banks[2].means is banks[1].means


def test_a_task_whose_only_answers_were_dropped_is_not_learned(tiny: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round of task 2 nobody has images, what comes in its second one spoils the model."""
    from strategies.hgp import HGP

    asked, refine = [], HGP.refine

    def idle(node: int, kind: Kind, packet: Packet) -> Packet:
        asked.extend([node] * (kind == "train"))
        return Packet(metrics={"num-examples": 0}) if kind == "train" and 6 < len(asked) <= 9 else packet

    def spoil(self: HGP, model: Model, updates: list, context: RoundContext) -> dict[str, float]:
        report = refine(self, model, updates, context)
        if context.server_round == 4:
            model.head.weight.data.fill_(np.nan)
        return report

    monkeypatch.setattr(HGP, "refine", spoil)
    results = run(tiny | {"rounds-per-task": 2}, tamper=idle)
    assert [(r["trained"], r["dropped"]) for r in results["rounds"][2:]] == [(False, False), (True, True)]
    assert results["tasks_not_learned"] == [2]


def test_a_dropped_round_takes_back_what_was_kept_of_its_answers(tiny: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from strategies.hgp import HGP

    met, second, before, refine = [], [], [], HGP.refine

    def receive(self: HGP, model: Model, update: Update, context: RoundContext) -> None:
        assert update.arrays
        self.met = [*getattr(self, "met", []), (context.server_round, update.client)]
        if context.server_round == 2:
            self.second = True

    def spoil(self: HGP, model: Model, updates: list, context: RoundContext) -> dict[str, float]:
        met.append(self.met)
        second.append(hasattr(self, "second"))
        before.append(updates)
        report = refine(self, model, updates, context)
        if context.server_round == 2:
            model.head.weight.data.fill_(np.nan)
        return report

    monkeypatch.setattr(HGP, "receive", receive)
    monkeypatch.setattr(HGP, "refine", spoil)
    run(tiny | {"num-tasks": 1, "rounds-per-task": 3})
    clients = ["client-0000", "client-0001", "client-0002"]
    assert second == [False, True, False]
    assert met[2] == [(number, client) for number in (1, 3) for client in clients]
    assert not any(update.arrays for updates in before for update in updates)


def test_a_run_warns_of_test_images_that_it_trains_on(
    tiny: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("cat", "dog"):
        paint(tmp_path / "pets" / name, 10)
    keys = tiny | {"dataset": "folder", "data-dir": str(tmp_path / "pets"), "partition": "iid", "method": "ncm"}
    assert run(keys)["copied_test_images"] == 4
    assert "4 of the 4 images to evaluate are training images too, byte by byte" in caplog.text
    for shade, path in enumerate(sorted((tmp_path / "pets").glob("*/*.png"))):
        path.unlink()
        paint(path.parent, 1, first=int(path.stem), shade=100 + shade)
    assert "copied_test_images" not in run(keys | {"run-name": "different"})


def test_two_nodes_of_one_name(tiny: dict) -> None:
    with pytest.raises(RunError, match="give each its own name"):
        run(tiny, node_settings=[{"name": "hospital"}] * 3)


def test_bad_settings_leave_no_folder_behind(tiny: dict, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    bad: list[tuple[Values, str]] = [
        ({"backbone": "resnet18"}, "backbone = 'resnet18' is not a plain ViT"),
        ({"backbone": "no_such_vit"}, "backbone = 'no_such_vit' does not exist"),
        ({"backbone-weights": f"{nowhere}.pt"}, r"backbone-weights = .*: there is no such file"),
        ({"image-size": 30}, r"image-size = 30 is not possible: .* multiple of 8"),
        ({"prompt-blocks": "5-9"}, "prompt-blocks = '5-9' is not possible: vit_glyphs has 6"),
        ({"num-tasks": 13}, "num-tasks=13: allowed are 1 to 12"),
        ({"device": "cuda:9"}, "device = 'cuda:9' is not there"),
        ({"device": "abacus"}, "device = 'abacus' is not possible"),
        ({"device": "cuda:999"}, "device = 'cuda:999' is not possible"),
        ({"prompt-blocks": "1-900000000"}, "prompt-blocks = '1-900000000' is not possible"),
        ({"threads": 10**11}, "threads = 100000000000 is not possible"),
        ({"run-name": "../escaped"}, "run-name = '../escaped' is not possible"),
        ({"output-dir": "/proc/nope"}, "output-dir = '/proc/nope' cannot be written"),
        (
            {"partition": "quantity", "classes-per-client": 1, "num-tasks": 1},
            "classes-per-client=1: allowed are 4 to 12",
        ),
        ({"dataset": "folder", "data-dir": nowhere}, r"data-dir = .*: there is no such folder"),
    ]
    for values, words in bad:
        started = time.monotonic()
        with pytest.raises(ConfigError, match=words):
            run(tiny | values)
        assert time.monotonic() - started < 10
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_is_never_overwritten(tiny: dict) -> None:
    run(tiny)
    before = results_of(folder_of(tiny))
    with pytest.raises(ConfigError, match=r"run-name = 'run' is taken: .* already\. Give another name\.$"):
        run(tiny)
    assert results_of(folder_of(tiny)) == before
    appearing = replace(parse(tiny), class_order="appearing")
    with pytest.raises(ConfigError, match=r"Give another name\.$"):
        run_directory(appearing)  # all of its tasks have come
    (folder_of(tiny) / "results.json").write_text(json.dumps(before | {"num_tasks": 1}))
    with pytest.raises(ConfigError, match=f"or go on there with resume={folder_of(tiny)}"):
        run_directory(appearing)  # goes on with new classes
    (folder_of(tiny) / "results.json").write_text(json.dumps(before | {"status": "failed"}))
    with pytest.raises(ConfigError, match=f"or go on there with resume={folder_of(tiny)}"):
        run(tiny)


def test_results_have_a_folder_of_a_name(tiny: dict) -> None:
    with pytest.raises(ConfigError, match="output-dir = '' is not possible"):
        run(tiny | {"output-dir": ""})


@pytest.mark.ci
def test_a_killed_run_leaves_whole_files_up_to_its_last_round(tiny: dict) -> None:
    """SIGKILL after some lines of rounds.jsonl and the first pictures; then the report is drawn from what is there."""
    values = tiny | {"rounds-per-task": 2000}
    code = textwrap.dedent(f"""
        from server_app.rounds.run import run_experiment
        from server_app.transport.in_process import InProcessTransport
        from task.config.parsing import parse
        config = parse({values!r})
        run_experiment(config, InProcessTransport(config.num_clients))
    """)
    folder = Path(tiny["output-dir"]) / "run"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        lines, drawn = folder / "rounds.jsonl", folder / "report.html"
        while not (drawn.exists() and lines.exists()) or len(lines.read_text().splitlines()) < 3:
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    results = results_of(folder_of(tiny))
    assert results["status"] == "running"
    assert {"config.yaml", "accuracy.png", "forgetting.png", "report.html"} <= {p.name for p in folder.iterdir()}
    assert len(results["rounds"]) >= 2
    assert results["accuracy_matrix"][0] == [None, None]
    assert model_of(tiny)["head.weight"].shape == (6, 112)
    from server_app.report.write import write_report

    assert 'class="badge running"' in (folder / "report.html").read_text()  # it drew that itself
    write_report([folder])
    page = (folder / "report.html").read_text()
    assert 'class="badge interrupted"' in page
    assert f"go on with resume={folder}" in page
