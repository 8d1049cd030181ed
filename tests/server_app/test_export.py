"""`fcil export`: one file that needs neither the run's folder nor its weights, and ONNX that agrees with it."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
from timm.models import VisionTransformer

from server_app.cli import main as cli
from server_app.export import write_onnx, write_self_contained
from server_app.run_files.writers import write_model
from task.config.parsing import parse
from task.config.schema import Config
from task.data.load import load_dataset
from task.inference import Classifier, ModelError, Predictor, load_predictor
from task.methods import load_class
from task.models.head import Head
from task.models.metadata import MODEL, ModelMetadata
from task.models.model import Model, build_model
from task.models.vit import ViT
from task.models.weights import build_vit
from task.prompt_kinds import PROMPTS
from tests.helpers.runs import run

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)


def metadata(config: Config, tasks: list[int], sha256: str) -> ModelMetadata:
    seen = sum(tasks)
    return ModelMetadata(config.flat(), list(range(seen)), [f"class {i}" for i in range(seen)], tasks, [16, 16], sha256)


def save_run(folder: Path, values: dict) -> Path:
    """Folder of a run whose arrays, of the backbone too if it trains, are not those of the start."""
    config = parse(values)
    model = build_model(config, [6, 6])
    rng = np.random.default_rng(0)
    arrays = {n: a * rng.uniform(0.9, 1.1, a.shape).astype(np.float32) for n, a in model.export().items()}
    folder.mkdir()
    write_model(folder / MODEL, arrays, metadata(config, [6, 6], model.backbone.sha256))
    return folder


@pytest.mark.parametrize(
    "keys",
    [{"method": "pip"}, {"method": "fedavg-ft"}, {"method": "afcl", "afcl-random-features": 50}, {"method": "fedrda"}],
    ids=lambda keys: keys["method"],
)
def test_an_exported_file_is_enough(keys: dict, tiny: dict, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(build_vit("vit_glyphs", "auto")[0].state_dict(), weights)
    directory = save_run(tmp_path / "run", tiny | keys | {"backbone-weights": str(weights)})
    before = load_predictor(directory).predict(IMAGES)
    assert cli.main(["export", str(directory), str(tmp_path / "model.safetensors")]) == 0
    weights.unlink()
    shutil.rmtree(directory)
    after = load_predictor(tmp_path / "model.safetensors").predict(IMAGES)
    assert (after.probabilities == before.probabilities).all()
    assert after.class_names == before.class_names
    write_self_contained(load_predictor(tmp_path / "model.safetensors"), tmp_path / "again.safetensors")
    again = load_predictor(tmp_path / "again.safetensors")
    assert again.metadata == load_predictor(tmp_path / "model.safetensors").metadata
    assert (again.predict(IMAGES).probabilities == before.probabilities).all()


@pytest.mark.ci
def test_an_exported_resnet_is_enough(tiny: dict, tmp_path: Path) -> None:
    """Its batch normalisation has counts that are single numbers."""
    directory = save_run(
        tmp_path / "run",
        tiny | {"method": "fedavg", "prompt": "none", "backbone": "resnet18_cifar", "backbone-weights": "random"},
    )
    assert cli.main(["export", str(directory), str(tmp_path / "model.safetensors")]) == 0
    before, after = (load_predictor(path).predict(IMAGES) for path in (directory, tmp_path / "model.safetensors"))
    assert (after.probabilities == before.probabilities).all()


def test_an_exported_file_must_be_whole(tiny: dict, tmp_path: Path) -> None:
    predictor = load_predictor(save_run(tmp_path / "run", tiny))
    arrays = {name: t.cpu().numpy() for name, t in Classifier(predictor.model).tensors().items()}
    arrays.pop("backbone.vit.norm.weight")
    write_model(tmp_path / "part", arrays, predictor.metadata)
    with pytest.raises(ModelError, match=r"1 arrays do not fit, the first is 'backbone\.vit\.norm\.weight'"):
        load_predictor(tmp_path / "part")


def small(prompt: str) -> Predictor:
    """As few blocks as the prompt needs: exporting takes its time for each."""
    depth = 3 if prompt == "dualprompt" else 1
    blocks = {"prompt-blocks": f"1-{depth}"} if prompt != "none" else {}
    config = parse({"method": "fedavg", "prompt": prompt, "num-tasks": 2, "precision": "bf16"} | blocks)
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=depth, num_heads=2, num_classes=0)
    backbone = ViT(vit, (0.2, 0.3, 0.4), (0.5, 0.6, 0.7))
    model = Model(backbone, load_class(PROMPTS[prompt].path)(config, 16), Head(16, 0), "fp32")
    for classes in (4, 3):
        model.begin_task(classes)
    # larger rows, and prompts that matter: else all probabilities are nearly equal
    model.load({name: 20 * a if name == "head.weight" else 3 * a for name, a in model.export().items()})
    return Predictor(model, metadata(config, [4, 3], backbone.sha256))


def test_no_file_is_onnx_by_its_name_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(tmp_path), str(tmp_path / "model.onnx")]) == 2
    assert "--onnx" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.parametrize("prompt", PROMPTS)
def test_onnxruntime_agrees_with_torch(prompt: str, tmp_path: Path) -> None:
    predictor = small(prompt)
    write_onnx(predictor, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    for size in (1, 5):
        expected = predictor.predict(IMAGES[:size]).probabilities
        pixels = predictor.pixels(IMAGES[:size]).numpy()
        assert 0 <= pixels.min() < pixels.max() <= 1
        (probabilities,) = session.run(["probabilities"], {"images": pixels})
        assert np.abs(probabilities - expected).max() < 1e-4
    assert np.ptp(expected, axis=0).max() > 1e-3  # the images differ, and the model sees it
    assert ModelMetadata.read(session.get_modelmeta().custom_metadata_map) == predictor.metadata


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"fedrda-random-features": 40}], ids=["plain", "random features"])
def test_onnxruntime_agrees_with_torch_on_a_regularised_discriminant(keys: dict, tiny: dict, tmp_path: Path) -> None:
    """Changed weights of the attention, early features, and logits that are quadratic; arrays of a real run."""
    run(tiny | {"method": "fedrda", "fedrda-adaptation-rounds": 1, "fedrda-rank": 4, "num-tasks": 1} | keys)
    predictor = load_predictor(tmp_path / "runs" / "run")
    write_onnx(predictor, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    images = list(load_dataset("synthetic", "", 16, 0.0, 0).test_images[np.arange(0, 96, 20)])  # of different classes
    for size in (1, 5):
        expected = predictor.predict(images[:size]).probabilities
        (probabilities,) = session.run(["probabilities"], {"images": predictor.pixels(images[:size]).numpy()})
        assert np.abs(probabilities - expected).max() < 1e-3
    assert np.ptp(expected, axis=0).max() > 1e-3


def test_exported_models_compute_in_float32(tiny: dict) -> None:
    pixels = torch.rand(2, 3, 16, 16)
    outputs = [
        Classifier(build_model(parse(tiny | {"precision": precision}), [6]))(pixels) for precision in ("fp32", "bf16")
    ]
    assert torch.equal(*outputs)


def test_a_missing_package_is_named_before_anything_is_written(
    tiny: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    directory = save_run(tmp_path / "run", tiny)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    out = tmp_path / "model.safetensors"
    assert cli.main(["export", str(directory), str(out), "--onnx", str(tmp_path / "model.onnx")]) == 1
    assert "pip install onnxscript" in capsys.readouterr().err
    assert not out.exists()


def test_exit_codes(tiny: dict, tmp_path: Path) -> None:
    assert cli.main(["export", str(tmp_path / "absent"), str(tmp_path / "out")]) == 1
    directory = save_run(tmp_path / "run", tiny)
    assert cli.main(["export", str(directory), str(tmp_path / "no" / "folder")]) == 2
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(directory), str(tmp_path / "out"), "more"])
    assert ended.value.code == 2


def test_a_run_keeps_its_own_model(
    tiny: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_run(tmp_path / "run", tiny)
    before = (directory / "model.safetensors").read_bytes()
    for model in (directory, directory / "model.safetensors"):
        assert cli.main(["export", str(model), str(directory / "model.safetensors")]) == 2
        assert capsys.readouterr().err.endswith("is the model itself: name another file\n")
    monkeypatch.chdir(directory)
    assert cli.main(["export", ".", str(tmp_path / "out"), "--onnx", "model.safetensors"]) == 2
    assert capsys.readouterr().err == "fcil: model.safetensors is the model itself: name another file\n"
    assert cli.main(["export", ".", str(tmp_path / "out"), "--onnx", str(tmp_path / "." / "out")]) == 2
    assert "out cannot be both files: give --onnx another name" in capsys.readouterr().err
    assert (directory / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["pipe"], ["folder"], ["new", "--onnx", "pipe"]])
def test_only_files_are_replaced(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # stands for /dev/null, which root could replace by a file
    Path("folder").mkdir()
    assert cli.main(["export", "run", *words]) == 2
    assert capsys.readouterr().err.startswith(f"fcil: {words[-1]} is there and is no file: ")
    assert sorted(os.listdir()) == ["folder", "pipe"]
    assert Path("pipe").is_fifo()
