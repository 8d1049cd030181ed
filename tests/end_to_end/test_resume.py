"""Interrupted and resumed equals never interrupted."""

import errno
import hashlib
import json
import logging
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
import yaml
from PIL import Image

from server_app.cli.main import main
from server_app.errors import RunError
from server_app.rounds.run import run_experiment
from server_app.run_files.checkpoints import read_checkpoint, write_checkpoint
from server_app.run_files.locks import lock_folder
from server_app.run_files.resume import load_resumed_keys
from server_app.run_files.writers import append_line, read_lines
from server_app.transport.base import Reply
from server_app.transport.in_process import InProcessTransport
from strategies.base import Strategy
from task.config.parsing import parse
from task.data.load import load_dataset
from task.keys import ConfigError
from task.message import Kind, Packet
from task.methods import METHODS, load_class
from task.scenario.scenario import build_scenario
from task.utils.atomic import write_atomically
from tests.helpers.marks import rest_in_ci
from tests.helpers.own_data import OWN, paint
from tests.helpers.runs import Values, interrupt, run, without_times


def all_of(folder: Path) -> tuple[Any, ...]:
    """Everything that a run leaves, without times."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in line.items() if k not in ("seconds", "elapsed")} for line in lines]
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    return (
        without_times(json.loads((folder / "results.json").read_text())),
        lines,
        {n: a.tobytes() for n, a in arrays.items()},
    )


def two_runs(tiny: Values, **changes: Any) -> tuple[Values, Values]:
    values = tiny | {"rounds-per-task": 2, "num-clients": 4, "clients-per-round": 3} | changes
    return values | {"run-name": "whole"}, values | {"run-name": "cut"}


FIRST = ("fedavg", "hgp")  # those that the default tests resume
REMEMBERING = [name for name, row in METHODS.items() if load_class(row.strategy).refine is not Strategy.refine]


@pytest.mark.parametrize("method", rest_in_ci(["fedavg", *REMEMBERING], FIRST))
def test_a_resumed_run_ends_as_if_nothing_had_happened(method: str, tiny: Values) -> None:
    """Cut in the last round, so that all of a method's memory is needed."""
    uninterrupted, interrupted = two_runs(tiny, method=method)
    run(uninterrupted)
    folder = interrupt(interrupted, cut_in_round=4)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3
    run({"resume": str(folder)})
    assert all_of(folder) == all_of(folder.with_name("whole"))


RESNET: Values = {"method": "fedavg", "prompt": "none", "backbone": "resnet18_cifar", "backbone-weights": "random"}
SCENARIOS: dict[str, tuple[int, Values]] = {
    # of how many rounds the last one is cut, and run keys
    "own class sequences": (4, {"method": "fedavg", "partition": "consensus"}),
    "images drawn anew in each round": (4, {"partition": "split-ratio", "split-ratio": 0.5}),
    "running statistics": (2, RESNET | {"image-size": 9, "num-clients": 2, "clients-per-round": 1, "num-tasks": 1}),
    "as many clients as nodes": (4, {"num-clients": 0}),
    "rounds of adaptation by the images": (10, {"method": "fedrda", "batch-size": 6}),  # 8 of them
}


SLOW = {"running statistics": pytest.mark.slow, "rounds of adaptation by the images": pytest.mark.ci}


@pytest.mark.parametrize("scenario", [pytest.param(scenario, marks=SLOW.get(scenario, ())) for scenario in SCENARIOS])
def test_a_resumed_run_ends_the_same_whatever_clients_learn(
    scenario: str, tiny: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server_app.clients.hello.SETTLED", 0.0)  # no more nodes will come
    rounds, changes = SCENARIOS[scenario]
    uninterrupted, interrupted = two_runs(tiny, **changes)
    run(uninterrupted)
    folder = interrupt(interrupted, cut_in_round=rounds)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == rounds - 1
    run({"resume": str(folder)})
    assert all_of(folder) == all_of(folder.with_name("whole"))


@pytest.mark.parametrize("cut_in_round", [2, 3])
def test_it_may_be_cut_anywhere_and_twice(cut_in_round: int, tiny: Values) -> None:
    uninterrupted, interrupted = two_runs(tiny, prompt="dualprompt", method="fedavg")
    run(uninterrupted)
    folder = interrupt(interrupted, cut_in_round)
    interrupt({"resume": str(folder)}, cut_in_round=4)
    run({"resume": str(folder)})
    assert all_of(folder) == all_of(folder.with_name("whole"))


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    damage: str, tiny: Values, caplog: pytest.LogCaptureFixture
) -> None:
    uninterrupted, interrupted = two_runs(tiny)
    run(uninterrupted)
    folder = interrupt(interrupted, cut_in_round=4)
    kept = sorted((folder / "checkpoint").iterdir())
    assert [p.name for p in kept] == ["000002.ckpt", "000003.ckpt"]
    raw = kept[1].read_bytes()
    kept[1].write_bytes({"truncated": raw[:-100], "empty": b"", "flipped": raw[:-1] + bytes([raw[-1] ^ 1])}[damage])
    caplog.clear()  # of the runs before, if an earlier test has left a level behind
    with caplog.at_level(logging.INFO):
        run({"resume": str(folder)})
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "ckpt is damaged" in line] == [
        f"{kept[1]} is damaged: going back to the round before it"
    ]
    assert said[0] == f"results go to {folder}"
    assert all_of(folder) == all_of(folder.with_name("whole"))


def test_two_processes_cannot_write_one_run(tiny: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = interrupt(tiny, cut_in_round=2)
    config = parse(load_resumed_keys({"resume": str(folder)}))
    first, second = (InProcessTransport(3) for _ in range(2))
    original, refused = first.exchange, list[str]()

    def exchange(kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0) -> Iterable[Reply]:
        if kind == "train":
            with pytest.raises(ConfigError, match="another process is at") as caught:
                run_experiment(config, second)
            refused.append(str(caught.value))
            assert main(["run", f"resume={folder}"]) == 2  # before Flower is started
            assert json.loads((folder / "results.json").read_text())["status"] == "running"
        return original(kind, packets, timeout)

    monkeypatch.setattr(first, "exchange", exchange)
    run_experiment(config, first)
    assert not (folder / "flower.log").exists()
    assert len(refused) == 1
    assert str(folder) in refused[0]
    assert json.loads((folder / "results.json").read_text())["status"] == "finished"


def test_of_two_runs_of_one_name_the_later_begins_nothing(tiny: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have found the name free, and waited for their nodes."""
    second = InProcessTransport(3)
    original, first = second.exchange, []

    def exchange(kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0) -> Iterable[Reply]:
        if not first:
            first.append(run_experiment(parse(tiny), InProcessTransport(3)))
        return original(kind, packets, timeout)

    monkeypatch.setattr(second, "exchange", exchange)
    with pytest.raises(ConfigError, match="is taken"):
        run_experiment(parse(tiny | {"seed": 1}), second)
    assert "seed: 0\n" in (first[0] / "config.yaml").read_text()


@pytest.mark.ci
def test_a_killed_process_is_resumed_from_the_command_line(tiny: Values) -> None:
    uninterrupted, interrupted = two_runs(tiny)
    run(uninterrupted)
    folder = Path(interrupted["output-dir"]) / "cut"
    words = [f"{name}={value}" for name, value in interrupted.items()]
    command = [sys.executable, "-m", "server_app.cli", "run", "--in-process", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint").is_dir() or not list((folder / "checkpoint").glob("*.ckpt")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert json.loads((folder / "results.json").read_text())["status"] == "running"
    assert main(["run", "--in-process", f"resume={folder}"]) == 0
    assert all_of(folder) == all_of(folder.with_name("whole"))


def test_a_run_goes_on_without_a_node_that_is_gone_and_with_it_when_it_returns(
    tiny: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh run waits for all its nodes instead."""
    values = tiny | {"rounds-per-task": 2, "quorum": 2, "start-timeout": 0.2}
    folder = interrupt(values, cut_in_round=2)
    config = parse(load_resumed_keys({"resume": str(folder)}))
    transport, connected, noted = InProcessTransport(3), [0, 2], []
    monkeypatch.setattr(transport, "nodes", lambda: list(connected))
    original = transport.exchange

    def exchange(kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0) -> Iterable[Reply]:
        if kind == "train":
            connected[:] = [0, 1, 2]
            noted.append(json.loads((folder / "results.json").read_text())["clients"])
        return original(kind, packets, timeout)

    monkeypatch.setattr(transport, "exchange", exchange)
    run_experiment(config, transport)
    rounds = json.loads((folder / "results.json").read_text())["rounds"]
    assert [len(r["participants"]) for r in rounds] == [3, 2, 3, 3]
    assert noted == [noted[-1]] * 3  # one that is away is named still
    assert len(noted[0]) == 3
    connected[:] = [0, 2]
    with pytest.raises(RunError, match="num-clients = 3, but 2 nodes are connected"):
        run_experiment(parse(values | {"run-name": "fresh"}), transport)


def test_what_cannot_be_resumed_is_named(tiny: Values, tmp_path: Path) -> None:
    uninterrupted, interrupted = two_runs(tiny)
    run(uninterrupted)
    folder = interrupt(interrupted, cut_in_round=3)
    for values, words in [
        ({"resume": str(tmp_path / "nowhere")}, "nowhere.*no folder of a run"),
        ({"resume": str(folder.with_name("whole"))}, "finished run"),
        ({"resume": str(folder), "seed": 7}, "seed = 7 is not possible with resume: the run has 0"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_resumed_keys(values)
    assert load_resumed_keys({"resume": str(folder), "seed": 0, "rounds-per-task": 2})["rounds-per-task"] == 2
    assert load_resumed_keys({"resume": str(folder), "start-timeout": 300.0})["start-timeout"] == 300.0
    assert load_resumed_keys({"resume": str(folder)})["start-timeout"] == 15.0
    for path in (folder / "checkpoint").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        load_resumed_keys({"resume": str(folder)})
    config = (folder / "config.yaml").read_bytes()
    for content, words in [
        (config.replace(b"method: ", b"methods: "), "config.yaml is not that of a run, it lacks method"),
        (config.replace(b"backbone-sha256: ", b"backbone: "), "not that of a run, it lacks backbone-sha256"),
        (b"just words", "is not that of a run"),
        (b"\xff\xfe", "no folder of a run"),
        (b"a: [", r"no folder of a run \(while parsing.*\)\.$"),
    ]:
        (folder / "config.yaml").write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            load_resumed_keys({"resume": str(folder)})
    (folder / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.yaml: .* ended before its first round"):
        load_resumed_keys({"resume": str(folder)})


def test_a_lost_model_is_written_again_though_no_round_is_left(tiny: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    uninterrupted, interrupted = two_runs(tiny)
    run(uninterrupted)
    with monkeypatch.context() as patched:
        after_last_round = "server_app.rounds.run.require_training"
        patched.setattr(after_last_round, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(interrupted)
    folder = Path(interrupted["output-dir"]) / "cut"
    (folder / "model.safetensors").unlink()
    run({"resume": str(folder)})
    assert all_of(folder) == all_of(folder.with_name("whole"))


def test_a_folder_with_checkpoints_is_taken_though_its_results_are_gone(tiny: Values) -> None:
    folder = interrupt(two_runs(tiny)[1], cut_in_round=3)
    (folder / "results.json").unlink()
    with pytest.raises(ConfigError, match=rf"is taken: .*, or go on there with resume={folder}\.$"):
        run(two_runs(tiny)[1])
    for path in (folder / "checkpoint").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match=rf"is taken: .*, or delete {folder}\.$"):  # rounds.jsonl is left
        run(two_runs(tiny)[1])
    with lock_folder(folder), pytest.raises(ConfigError, match=r"is taken: .* already\. Give another name\.$"):
        run(two_runs(tiny)[1])


def test_a_changed_config_yaml_is_named(tiny: Values) -> None:
    folder = interrupt(two_runs(tiny)[1], 3)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text[: text.index("data-sha256: ")])
    with pytest.raises(ConfigError, match=r"its config\.yaml is not that of a run, it lacks data-sha256"):
        run({"resume": str(folder)})
    for key, now in (("num-tasks", 3), ("seed", 7)):
        began = yaml.safe_load(text)[key]
        (folder / "config.yaml").write_text(text.replace(f"\n{key}: {began}\n", f"\n{key}: {now}\n"))
        with pytest.raises(ConfigError, match=f"was made with {key} = {began}, its config.yaml says {now}; put back"):
            run({"resume": str(folder)})


def test_other_backbone_weights_are_refused(tiny: Values) -> None:
    _, interrupted = two_runs(tiny)
    folder = interrupt(interrupted, 3)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(r"backbone-sha256: \w+", "backbone-sha256: " + "0" * 64, text))
    with pytest.raises(ConfigError, match="began with other backbone weights"):
        run({"resume": str(folder)})


@pytest.mark.parametrize("own", [False, True])
def test_weights_may_lie_elsewhere_on_resume_and_so_may_images_that_the_server_reads(
    own: bool, tiny: Values, tmp_path: Path
) -> None:
    """Of images on the nodes it has no digest that could show that they are the same."""
    values = tiny | {"method": "ncm"}
    if own:
        paint(tmp_path / "nodes" / "north" / "ant", 20, shade=60)
        paint(tmp_path / "nodes" / "north" / "bee", 20, shade=160)
        values = OWN | {"method": "ncm", "data-dir": str(tmp_path / "nodes"), "num-clients": 1}
        values |= {"output-dir": tiny["output-dir"]}
    resume = {"resume": str(interrupt(values, 2))}
    elsewhere = load_resumed_keys(resume | {"backbone-weights": "/elsewhere.pt"})
    assert elsewhere["backbone-weights"] == "/elsewhere.pt"
    if own:
        with pytest.raises(ConfigError, match="data-dir = '/elsewhere' is not possible with resume"):
            load_resumed_keys(resume | {"data-dir": "/elsewhere"})
    else:
        assert load_resumed_keys(resume | {"data-dir": "/elsewhere"})["data-dir"] == "/elsewhere"


def resume_anew(folder: Path, **values: str) -> dict[str, Any]:
    """As a new process does, which has read no image yet."""
    load_dataset.cache_clear()
    build_scenario.cache_clear()
    return run({"resume": str(folder), **values})


def _rename(folder: Path) -> None:
    (folder / "bee").rename(folder / "aphid")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_rename, id="a class has another name, and so another place"),
        pytest.param(lambda folder: paint(folder / "ant", 1, first=40), id="one file more"),
        pytest.param(lambda folder: (folder / "ant" / "003.png").unlink(), id="one file less"),
        pytest.param(lambda folder: (folder / "cow").rename(folder / "ant" / "cow"), id="a class less"),
        pytest.param(
            lambda folder: Image.new("RGB", (8, 8), "red").save(folder / "ant" / "000.png"), id="another picture"
        ),
    ],
)
def test_other_images_in_the_folder_are_refused(change: Callable[[Path], object], tiny: Values, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for shade, name in enumerate(("ant", "bee", "cow", "doe")):
        paint(folder / name, 20, shade=60 * shade)
    _, interrupted = two_runs(tiny, dataset="folder", **{"data-dir": str(folder)})
    cut = interrupt(interrupted, 2)
    moved = folder.rename(tmp_path / "away")
    shutil.copytree(moved, folder)  # a copy is the same, though its files are newer
    change(folder)
    with pytest.raises(ConfigError, match=r"began with other images.*data-dir = '.*photos'"):
        resume_anew(cut)
    assert json.loads((cut / "results.json").read_text())["status"] == "failed"
    shutil.rmtree(folder)
    elsewhere = shutil.copytree(moved, tmp_path / "elsewhere")
    assert resume_anew(cut, **{"data-dir": str(elsewhere)})["status"] == "finished"


@pytest.mark.parametrize("mapped", [False, True])
def test_another_array_of_images_is_refused(mapped: bool, tiny: Values, tmp_path: Path) -> None:
    path, labels = tmp_path / "x.npz", np.arange(80) % 4
    images = np.random.default_rng(0).integers(0, 255, (80, 8, 8), np.uint8)

    def save() -> None:
        if mapped:
            path.mkdir(exist_ok=True)
            np.save(path / "images.npy", images)
            np.save(path / "labels.npy", labels)
        else:
            np.savez(path, images=images, labels=labels)

    save()
    _, interrupted = two_runs(tiny, dataset="npz", **{"data-dir": str(path)})
    cut = interrupt(interrupted, 2)
    images[7, 3, 3] ^= 1
    save()
    with pytest.raises(ConfigError, match="began with other images"):
        resume_anew(cut)


@pytest.mark.ci
def test_a_full_disk_is_an_error_and_leaves_every_earlier_file_whole(
    tiny: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted, interrupted = two_runs(tiny)
    run(uninterrupted)
    original, calls = os.fsync, []

    def full(number: int) -> None:
        calls.append(number)
        if len(calls) > 9:  # in the middle of the second round's files
            raise OSError(errno.ENOSPC, "No space left on device")
        original(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*/cut/[\w./-]+'"):
            run(interrupted)
    folder = Path(interrupted["output-dir"]) / "cut"
    assert not list(folder.rglob("*.part"))
    json.loads((folder / "results.json").read_text())
    safetensors.numpy.load_file(folder / "model.safetensors")
    run({"resume": str(folder)})
    assert all_of(folder) == all_of(folder.with_name("whole"))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing beyond ``size`` bytes ends as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_ends_half_way_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomically(path, b"before")
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        write_atomically(path, bytes(100_000))
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_run_that_has_lost_its_account_is_not_resumed(tiny: Values) -> None:
    private = {"privacy-clip": 1.0, "privacy-feature-clip": 1.0, "privacy-noise": 1.0, "privacy-seeded": True}
    folder = interrupt(tiny | private | {"rounds-per-task": 2}, cut_in_round=4)
    (folder / "checkpoint" / "asked.jsonl").unlink()
    with pytest.raises(ConfigError, match="has lost lines"):
        run({"resume": str(folder)})


def test_a_torn_line_is_replaced_and_a_full_disk_tears_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, on_disk = tmp_path / "rounds.jsonl", []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (fsync(number), on_disk.append(path.stat().st_size)))
    append_line(path, {"round": 1})
    assert on_disk == [len('{"round": 1}\n')]
    path.write_bytes(path.read_bytes() + b'{"round"')  # a power cut
    append_line(path, {"round": 2})
    assert read_lines(path) == [{"round": 1}, {"round": 2}]
    with files_of_at_most(path.stat().st_size + 5), pytest.raises(OSError, match="No space left"):
        append_line(path, {"round": 3})
    assert path.read_text() == '{"round": 1}\n{"round": 2}\n'


@pytest.mark.parametrize("damage", ["torn", "gone"])
def test_lost_lines_of_rounds_do_not_keep_a_run_from_going_on(
    damage: str, tiny: Values, caplog: pytest.LogCaptureFixture
) -> None:
    uninterrupted, interrupted = two_runs(tiny)
    run(uninterrupted)
    folder = interrupt(interrupted, cut_in_round=4)
    path = folder / "rounds.jsonl"
    path.write_bytes(path.read_bytes()[:-9]) if damage == "torn" else path.unlink()
    run({"resume": str(folder)})
    assert f"rounds.jsonl has {2 if damage == 'torn' else 0} of 3 lines" in caplog.text
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["task"], line["round"]) for line in lines][-1] == (2, 2)
    assert all_of(folder)[0] == all_of(folder.with_name("whole"))[0]


def test_a_method_from_outside_keeps_its_keys_in_another_process(tiny: Values) -> None:
    name = "tests.strategies.outside_method:ROW"
    try:
        _, interrupted = two_runs(tiny, method=name, **{"pulled-pull": 7.5})
        folder = interrupt(interrupted, cut_in_round=2)
        METHODS.pop(name)  # as a fresh process would begin
        assert parse(load_resumed_keys({"resume": str(folder)})).options.pull == 7.5
    finally:
        METHODS.pop(name, None)


@pytest.mark.ci
def test_a_method_from_outside_that_adapts_keeps_its_number_of_rounds(tiny: Values) -> None:
    name = "tests.strategies.adapting_method:ROW"
    try:
        folder = interrupt(tiny | {"method": name, "batch-size": 10}, cut_in_round=2)
        METHODS.pop(name)
        results = run({"resume": str(folder)})
        assert [r["task"] for r in results["rounds"]] == [1] * 10 + [2]  # 64 images a client, 7 steps: 9 rounds
    finally:
        METHODS.pop(name, None)


def test_another_version_of_the_code_is_named(tiny: Values, caplog: pytest.LogCaptureFixture) -> None:
    _, interrupted = two_runs(tiny)
    folder = interrupt(interrupted, cut_in_round=3)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("code-sha256: ", "code-sha256: 0"))
    with caplog.at_level(logging.WARNING):
        run({"resume": str(folder)})
    assert "other code or versions" in caplog.text


@pytest.mark.parametrize(
    "content",
    [b"cstrategies.teachers\nTeachers\n.", pickle.dumps({}), pickle.dumps([1]), b"none"],
    ids=["a module that is not here", "nothing", "a list", "no pickle"],
)
def test_a_checkpoint_of_other_code_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "1.ckpt").write_bytes(hashlib.sha256(content).digest() + content)
    with pytest.raises(ConfigError, match="written by other code"):
        read_checkpoint(tmp_path)


def test_the_account_of_a_resumed_run_goes_on(tiny) -> None:
    """One release a round. Task 1 has two; of task 2 the last round is asked for twice, as it was cut: three."""
    private = {"method": "fedavg", "privacy-clip": 1.0, "privacy-noise": 1.0, "privacy-seeded": True}
    folder = interrupt(tiny | private | {"rounds-per-task": 2}, cut_in_round=4)
    account = run({"resume": str(folder)})["privacy"]
    assert account["releases"] == [1, 2, 2, 3]
    assert account["worst_client"] == "client-0000"  # all have released as much
    assert len(account["epsilon"]) == 4
    assert account["epsilon"][1] == account["epsilon"][2] < account["epsilon"][3]


def test_the_bias_of_earlier_tasks_outlives_an_interruption(tiny) -> None:
    values = tiny | {"method": "fedavg", "federated-bias": True}
    whole = run(values | {"run-name": "whole"})["federated_bias"]
    resumed = run({"resume": str(interrupt(values | {"run-name": "cut"}, cut_in_round=2))})["federated_bias"]
    assert [len(entropies) for entropies in resumed["response_entropies"]] == [3, 3]
    assert resumed == whole


def test_the_seconds_of_a_run_are_those_of_all_its_parts(tiny) -> None:
    """The part before the interruption is made to have taken 1,000 s."""
    folder = interrupt(tiny | {"method": "ncm"}, cut_in_round=2)
    state = read_checkpoint(folder / "checkpoint")
    state["results"]["seconds"]["total"] = 1000.0
    write_checkpoint(folder / "checkpoint", 1, state)
    assert 1000 < run({"resume": str(folder)})["seconds"]["total"] < 1300
    last = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    assert 1000 < last["elapsed"] < 1300
