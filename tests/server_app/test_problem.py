"""`fcil problem`: NumPy alone reads the partition that the run uses, timm alone computes its features."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file

from server_app.cli.main import main
from server_app.problem import write_problem
from server_app.report.others import read_others
from task.config.parsing import parse
from task.data.images import Dataset
from task.models import linear
from task.models.model import build_model
from task.models.preprocessing import prepare
from task.scenario.client_data import client_task_data
from task.scenario.scenario import build_scenario
from tests.helpers.runs import run

CASES = [
    {"dirichlet-beta": 0.3},
    {"partition": "split-ratio", "split-ratio": 0.5, "rounds-per-task": 2},  # drawn anew in every round
    {"method": "fedprok", "partition": "consensus"},  # clients have class sequences of their own
    {"method": "joint", "clients-per-round": 2, "rounds-per-task": 2},
    {"clients-per-round": 2, "rounds-per-task": 2, "validation-share": 0.25},
]


@pytest.mark.ci
def test_rounds_of_adaptation_are_those_of_the_run(tiny, tmp_path):
    values = tiny | {"method": "fedrda", "batch-size": 10}
    _, problem, _, indices = written(values, tmp_path / "problem")
    results = run(values)
    assert len(results["rounds"]) > 2 + 5
    assert problem["participants"] == [entry["participants"] for entry in results["rounds"]]
    assert problem["config"]["fedrda-adaptation-rounds"] == len(results["rounds"]) - 2
    assert f"task1-round{len(results['rounds']) - 1}-client-0000" in indices


def test_groups_of_the_images_are_written_too(tiny, tmp_path):
    rng = np.random.default_rng(0)
    images, labels, groups = rng.integers(0, 256, (80, 16, 16, 3), np.uint8), np.arange(80) % 2, np.arange(80) // 8
    np.savez(tmp_path / "a.npz", images=images, labels=labels, groups=groups)
    values = tiny | {"dataset": "npz", "data-dir": str(tmp_path / "a.npz"), "image-size": 16}
    _, _, data, _ = written(values, tmp_path / "problem")
    test = data["split"] == 1
    assert np.unique(data["groups"][~test], return_counts=True)[1].tolist() == [8] * 8
    assert len(set(data["groups"][test])) == test.sum() == 16
    assert not set(data["groups"][test]) & set(data["groups"][~test])
    _, _, data, _ = written(values | {"validation-share": 0.2}, tmp_path / "validation")
    assert np.unique(data["groups"][data["split"] != 1], return_counts=True)[1].tolist() == [8] * 7


def written(values, folder):
    """What is written of a problem, read with NumPy and json."""
    config = parse(values)
    paths = write_problem(config, folder)
    assert {path.name for path in paths} == {
        *("README.md", "backbone.safetensors", "data.npz", "indices.npz", "problem.json")
    }
    arrays = [dict(np.load(folder / name, allow_pickle=False)) for name in ("data.npz", "indices.npz")]
    return config, json.loads((folder / "problem.json").read_text()), *arrays


@pytest.mark.parametrize("keys", CASES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_the_partition_is_that_of_the_run(tiny, tmp_path, keys):
    values = tiny | {"partition": "dirichlet"} | keys
    config, problem, data, indices = written(values, tmp_path / "problem")
    results = run(values)
    assert problem["tasks"] == results["tasks"]
    assert problem["class_order"] == results["class_order"]
    assert problem["class_names"] == results["class_names"] == data["class_names"].tolist()
    assert problem["participants"] == [entry["participants"] for entry in results["rounds"]]
    dataset = build_scenario(config).dataset
    train, test = data["split"] == 0, data["split"] == 1
    assert (data["labels"][train] == dataset.train_labels).all()
    assert (data["labels"][test] == dataset.test_labels).all()
    assert (data["images"][train] == dataset.train_images[np.arange(train.sum())]).all()
    assert (data["images"][test] == dataset.test_images[np.arange(test.sum())]).all()
    expected = {}
    for number, entry in enumerate(results["rounds"]):
        task, round = divmod(number, config.rounds_per_task)
        for place, name in enumerate(entry["participants"]):
            client = int(name.removeprefix("client-"))
            own = client_task_data(config, client, task, round, holds_pool=place == 0)
            expected[f"task{task + 1}-round{round + 1}-{name}"] = own.positions
            if problem.get("client_classes"):
                assert problem["client_classes"][name][task] == own.classes
    assert expected.keys() == indices.keys()
    assert all((indices[name] == positions).all() for name, positions in expected.items())
    assert ("client_classes" in problem) == (config.partition == "consensus")


def test_the_counts_are_those_that_a_run_reports(tiny, tmp_path):
    values = tiny | {"partition": "dirichlet", "dirichlet-beta": 0.3}
    _, problem, data, indices = written(values, tmp_path / "problem")
    for client in run(values)["clients"]:
        held = [indices[f"task{task}-round1-{client['name']}"] for task in (1, 2)]
        counts = np.bincount(data["labels"][np.concatenate(held)], minlength=len(problem["class_names"]))
        assert counts.tolist() == client["class_counts"]


def test_this_project_reads_it_back_as_the_same_problem(tiny, tmp_path):
    values = tiny | {"method": "ncm", "partition": "dirichlet"}
    config, *_ = written(values, tmp_path / "problem")
    again = {"dataset": "npz", "data-dir": str(tmp_path / "problem" / "data.npz"), "run-name": "again"}
    first, second = run(config.flat()), run(config.flat() | again)
    assert first["accuracy_matrix"] == second["accuracy_matrix"]
    assert first["clients"] == second["clients"]


@pytest.mark.parametrize(
    "keys",
    [
        {"image-size": 0},
        {"image-size": 16},
        {"backbone": "vit_tiny_patch16_224", "backbone-weights": "random", "image-size": 48},
    ],
    ids=str,
)
def test_timm_alone_gives_the_same_features(tiny, tmp_path, keys, monkeypatch):
    """Bit for bit by PyTorch's linear maps, and but for rounding by the convolutions that a CPU is faster with."""
    config, problem, data, _ = written(tiny | {"method": "ncm"} | keys, tmp_path / "problem")
    given = problem["backbone"]
    if given["class"]:
        vit = timm.models.VisionTransformer(num_classes=0, **given["arguments"])
    else:
        vit = timm.create_model(given["name"], num_classes=0, **given["arguments"])
    vit.load_state_dict(load_file(tmp_path / "problem" / "backbone.safetensors"))
    vit.eval()
    model = build_model(config, [])
    x = prepare(data["images"][:20], model.backbone)
    with torch.no_grad():
        features = vit.forward_head(vit.forward_features(x), pre_logits=True)
        assert torch.allclose(features, model.query(x), rtol=1e-4, atol=1e-5)
        monkeypatch.setattr(linear, "by_convolution", lambda tokens: False)
        assert torch.equal(features, model.query(x))
    assert x.shape[-1] == given["image_size"]
    assert np.allclose(model.backbone.mean.flatten(), given["mean"])
    assert np.allclose(model.backbone.std.flatten(), given["std"])


def test_the_code_in_the_readme_works_and_prepares_images_as_a_run_does(tiny, tmp_path, monkeypatch, capsys):
    words = [f"{name}={value}" for name, value in tiny.items()]
    folder = tmp_path / "problem"
    assert main(["problem", str(folder), "method=ncm", *words]) == 0
    assert str(folder / "problem.json") in capsys.readouterr().out
    (code,) = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(folder)
    names = {}
    exec(code, names)
    assert "client-0000 trains on" in capsys.readouterr().out
    backbone = build_model(parse(tiny | {"method": "ncm"}), []).backbone
    rng = np.random.default_rng(0)
    # enlarged by matrix products in a run, so equal but for rounding; as it is; made smaller
    for side, rounding in ((8, 1e-5), (16, 0), (31, 0)):
        images = rng.integers(0, 256, (3, side, side, 1), np.uint8)
        assert torch.allclose(names["prepare"](images), prepare(images, backbone), rtol=0, atol=rounding)


def test_the_folder_comes_before_the_keys(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for word in ("dataset=digits", "data-dir=a/b", "datset=digits"):
        assert main(["problem", word]) == 2
        assert f"{word!r} is not a folder's name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_result_in_the_readme_is_one_that_a_suite_takes(tiny, tmp_path):
    written(tiny, tmp_path / "problem")
    text = (tmp_path / "problem" / "README.md").read_text()
    (result,) = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "result.json").write_text(result)
    (other,) = read_others([tmp_path / "result.json"], {"": "synthetic"})
    assert other.label == "name of the method (theirs)"
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "problem").iterdir()}
    assert len(modes) == 1  # a colleague can read all files or none


def test_the_seed_and_all_keys_are_there(tiny, tmp_path):
    config, problem, *_ = written(tiny | {"seed": 7}, tmp_path / "problem")
    assert problem["seed"] == 7
    assert parse(problem["config"]) == replace(config, augmentation="none", validation_share=0.0)
    assert problem["augmentation"] == "none"


def test_what_cannot_be_written_is_refused_with_nothing_written(tiny, tmp_path, capsys):
    words = [f"{name}={value}" for name, value in tiny.items()]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    refused = {
        "name a folder that is new or empty": [str(tmp_path / "full")],
        "only a ViT of timm": [
            str(tmp_path / "new"),
            "method=fedavg-ft",
            "backbone=resnet18_cifar",
            "backbone-weights=random",
        ],
        "num-tasks=50": [str(tmp_path / "new"), "num-tasks=50"],
        "dirichlet-min-size=900": [str(tmp_path / "new"), "partition=dirichlet", "dirichlet-min-size=900"],
    }
    for reason, given in refused.items():
        keys = {word.split("=")[0]: word for word in [*words, *given[1:]]}
        assert main(["problem", given[0], *keys.values()]) == 2
        assert reason in capsys.readouterr().err
    own = ["dataset=own", "evaluate=clients", f"data-dir={tmp_path}", "num-clients=2"]
    assert main(["problem", str(tmp_path / "new"), *own]) == 2
    assert "stay on the nodes" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert [path.name for path in Path(tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_problem_with_validation_images_is_read_back_with_none_held_out_again(tiny, tmp_path) -> None:
    """12 classes of 40 images, 32 to train on: a quarter, 8 of each class, is held out and becomes the test set."""

    def sizes(dataset: Dataset) -> tuple[set[int], set[int]]:
        return set(np.bincount(dataset.train_labels).tolist()), set(np.bincount(dataset.test_labels).tolist())

    config = parse(tiny | {"validation-share": 0.25})
    write_problem(config, tmp_path / "problem")
    keys = json.loads((tmp_path / "problem" / "problem.json").read_text())["config"]
    again = parse(keys | {"dataset": "npz", "data-dir": str(tmp_path / "problem" / "data.npz")})
    assert sizes(build_scenario(config).dataset) == sizes(build_scenario(again).dataset) == ({24}, {8})


def test_a_problem_names_mean_and_deviation_of_the_backbone(tiny, tmp_path) -> None:
    """DeiT's are ImageNet's; those of the other tests' backbones are equal, 0.5."""
    vit = {"backbone": "deit_tiny_patch16_224", "backbone-weights": "random", "image-size": 32}
    write_problem(parse(tiny | vit), tmp_path / "problem")
    given = json.loads((tmp_path / "problem" / "problem.json").read_text())["backbone"]
    assert given["mean"] == pytest.approx([0.485, 0.456, 0.406])
    assert given["std"] == pytest.approx([0.229, 0.224, 0.225])


def test_in_a_problem_the_one_client_that_is_drawn_has_the_pool(tiny, tmp_path) -> None:
    """12 classes of 32 training images, 6 in each task: 192 and, as joint keeps what came, 384, whoever is drawn."""
    write_problem(parse(tiny | {"method": "joint", "clients-per-round": 1, "rounds-per-task": 3}), tmp_path / "problem")
    with np.load(tmp_path / "problem" / "indices.npz") as indices:
        assert len({name.rpartition("client-")[2] for name in indices.files}) > 1  # seed 0 draws several
        sizes = {name.split("-round")[0]: set[int]() for name in indices.files}
        for name in indices.files:
            sizes[name.split("-round")[0]].add(len(indices[name]))
    assert sizes == {"task1": {192}, "task2": {384}}
