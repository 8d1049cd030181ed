"""A trained model used from Python and by `fcil predict`: the same answers as in the run's own evaluation."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from server_app.cli import main as cli
from server_app.cli.common import tell_unfinished
from server_app.rounds.run import run_experiment
from server_app.run_files.writers import write_model
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.data.images import decode
from task.inference import ModelError, Predictor, load_predictor
from task.keys import ConfigError
from task.models.metadata import MODEL, ModelMetadata
from task.models.model import build_model
from task.models.preprocessing import prepare
from task.models.weights import build_vit
from task.scenario.scenario import build_scenario

# prompt chosen by the image, trained backbone, and a head on random features
KINDS = {
    "hgp": {"method": "hgp"},
    "dualprompt": {"method": "fedavg", "prompt": "dualprompt"},
    "fedavg-ft": {"method": "fedavg-ft"},
    "random-features": {"method": "afcl", "afcl-random-features": 50},
}


def run(values: dict) -> Path:
    config = parse(values)
    return run_experiment(config, InProcessTransport(config.num_clients))


def untrained(folder: Path, values: dict, tasks: list[int], shape: list[int] | None = None) -> Path:
    """A run's model as it is before its first round: enough for what does not depend on the weights."""
    config = parse(values)
    model, seen = build_model(config, tasks), sum(tasks)
    names = [f"class {i}" for i in range(seen)]
    metadata = ModelMetadata(config.flat(), list(range(seen)), names, tasks, shape or [16, 16], model.backbone.sha256)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / MODEL, model.export(), metadata)
    return folder


@pytest.fixture
def predictor(tiny: dict, tmp_path: Path) -> Predictor:
    return load_predictor(untrained(tmp_path / "model", tiny, [6, 6]))


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_those_of_the_evaluation(kind: str, tiny: dict) -> None:
    directory = run(tiny | KINDS[kind])
    results = json.loads((directory / "results.json").read_text())
    data = build_scenario(parse(tiny | KINDS[kind])).dataset
    predictions = load_predictor(directory).predict(data.test_images[np.arange(len(data.test_labels))])
    right = [name == data.class_names[label] for name, label in zip(predictions.names, data.test_labels, strict=True)]
    assert np.mean(right) == pytest.approx(results["metrics"]["last_accuracy"])
    places = [[i for c in classes for i in np.flatnonzero(data.test_labels == c)] for classes in results["tasks"]]
    assert results["correct_images"] == ["".join("01"[right[i]] for i in task) for task in places]
    assert predictions.class_names == [data.class_names[c] for c in results["class_order"]]
    assert predictions.probabilities.sum(axis=1) == pytest.approx(np.ones(len(right)), abs=1e-5)


def test_probabilities_are_the_softmax_of_the_models_logits(tiny: dict, tmp_path: Path) -> None:
    directory = untrained(tmp_path / "model", tiny, [6, 6])
    model, images = build_model(parse(tiny), [6, 6]), np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), "uint8")
    with torch.inference_mode():
        logits = model(prepare(images, model.backbone)).double().numpy()
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert load_predictor(directory).predict(images).probabilities == pytest.approx(expected, abs=1e-6)


def test_paths_pictures_and_arrays_give_the_same_bits(predictor: Predictor, tmp_path: Path) -> None:
    arrays = np.random.default_rng(0).integers(0, 256, (2, 16, 16), np.uint8)  # grey
    paths = [tmp_path / f"{i}.png" for i in range(2)]
    for path, array in zip(paths, arrays, strict=True):
        Image.fromarray(array).save(path)
    forms = [arrays, arrays[..., None], np.stack([arrays] * 3, -1), paths, [str(p) for p in paths]]
    forms.append([Image.open(path) for path in paths])  # type: ignore[arg-type]
    probabilities = [predictor.predict(form).probabilities for form in forms]
    assert all((other == probabilities[0]).all() for other in probabilities)
    assert predictor.predict([]).probabilities.shape == (0, 12)


def test_a_photograph_is_decoded_as_a_data_set_of_files_would_be(predictor: Predictor, tmp_path: Path) -> None:
    photograph = np.random.default_rng(0).integers(0, 256, (40, 61, 3), np.uint8)
    Image.fromarray(photograph).save(tmp_path / "photo.png")
    assert (predictor.read(tmp_path / "photo.png") == decode(str(tmp_path / "photo.png"), 16)).all()


def test_a_deep_grey_picture_is_stretched_like_its_file(predictor: Predictor, tmp_path: Path) -> None:
    Image.fromarray(np.arange(256, dtype=np.uint16).reshape(16, 16) * 10).save(tmp_path / "scan.png")
    with Image.open(tmp_path / "scan.png") as picture:
        pixels = predictor.read(picture)
    assert (pixels == predictor.read(tmp_path / "scan.png")).all()
    assert (pixels.min(), pixels.max()) == (0, 255)


def test_images_of_the_stored_shape_stay_as_they_are_also_if_not_square(tiny: dict, tmp_path: Path) -> None:
    predictor = load_predictor(untrained(tmp_path / "model", tiny, [6], [12, 20]))
    image = np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)
    assert (predictor.read(image) == image).all()
    assert predictor.read(np.zeros((50, 60, 3), np.uint8)).shape == (12, 20, 3)


@pytest.mark.parametrize("array", [np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), np.zeros(4, np.uint8)])
def test_arrays_of_another_form_are_refused(array: np.ndarray, predictor: Predictor) -> None:
    with pytest.raises(ValueError, match="uint8 \\[H, W, 3\\]"):
        predictor.predict([array])


@pytest.mark.parametrize(
    "image",
    [
        "cat.jpg",
        Path("cat.jpg"),
        Image.new("RGB", (8, 8)),
        np.zeros((8, 9), np.uint8),
        np.zeros((8, 9, 3), np.uint8),
        np.zeros((8, 9, 1), np.uint8),
        np.zeros((8, 9, 4), np.uint8),
    ],
)
def test_one_image_is_no_list(image: str | Path | Image.Image | np.ndarray, predictor: Predictor) -> None:
    for use in (predictor.predict, predictor.pixels):
        with pytest.raises(TypeError, match=r"images must be a list: of one image, \[image\]"):
            use(image)


def test_a_model_between_tasks_knows_the_classes_so_far(tiny: dict, tmp_path: Path) -> None:
    values = tiny | {"method": "fedavg", "prompt": "coda", "num-tasks": 3}
    folder = untrained(tmp_path / "model", values, [4, 4])
    predictions = load_predictor(folder).predict(np.zeros((1, 16, 16, 3), np.uint8))
    assert predictions.probabilities.shape == (1, 8)
    assert len(predictions.top(3)[0]) == 3
    assert predictions.top(99)[0][0][0] == predictions.names[0]


def test_another_backbone_is_refused(tiny: dict, tmp_path: Path) -> None:
    weights = tmp_path / "vit.safetensors"
    for chance in ("auto", "random"):
        safetensors.torch.save_file(build_vit("vit_glyphs", chance)[0].state_dict(), weights)
        if chance == "auto":
            directory = untrained(tmp_path / "model", tiny | {"backbone-weights": str(weights)}, [6, 6])
            load_predictor(directory)
    with pytest.raises(ModelError, match=r"vit\.safetensors.*put those weights back"):
        load_predictor(directory)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"vit\.safetensors': there is no such file.* a file of fcil export has them"):
        load_predictor(directory)


def test_random_weights_are_drawn_with_the_seed_of_the_run(tiny: dict, tmp_path: Path) -> None:
    values = tiny | {"backbone-weights": "random", "seed": 1}
    model = load_predictor(untrained(tmp_path / "model", values, [6, 6])).model
    assert model.backbone.sha256 == build_model(parse(values), [6, 6]).backbone.sha256


def test_a_trained_backbone_needs_no_other_weights(tiny: dict, tmp_path: Path) -> None:
    weights = tmp_path / "vit.safetensors"
    safetensors.torch.save_file(build_vit("vit_glyphs", "random")[0].state_dict(), weights)
    directory = untrained(tmp_path / "model", tiny | {"method": "fedavg-ft", "backbone-weights": str(weights)}, [6, 6])
    before = load_predictor(directory).predict(np.zeros((1, 16, 16, 3), np.uint8)).probabilities
    weights.unlink()
    assert (load_predictor(directory).predict(np.zeros((1, 16, 16, 3), np.uint8)).probabilities == before).all()


def test_a_model_that_is_not_finite_is_refused(tiny: dict, tmp_path: Path) -> None:
    file = untrained(tmp_path / "model", tiny, [6, 6]) / MODEL
    arrays = safetensors.torch.load_file(file)
    with safetensors.safe_open(file, framework="np") as content:
        metadata = content.metadata()
    safetensors.torch.save_file(arrays | {"head.bias": torch.full((12,), torch.nan)}, file, metadata)
    with pytest.raises(ModelError, match=r"head\.bias holds values that are not finite"):
        load_predictor(file)


def test_what_is_no_model_is_named(tiny: dict, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent.*first round"):
        load_predictor(tmp_path / "absent")
    directory = untrained(tmp_path / "model", tiny, [6, 6])
    whole = (directory / MODEL).read_bytes()
    (directory / MODEL).write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="damaged"):
        load_predictor(directory)
    safetensors.torch.save_file({"a": torch.zeros(1)}, directory / MODEL)
    with pytest.raises(ModelError, match="no model of fcil"):
        load_predictor(directory)
    (directory / MODEL).write_bytes(whole.replace(b"prompt-length", b"prompt-widths"))
    with pytest.raises(ModelError, match=r"another version.*prompt-widths"):
        load_predictor(directory)


def test_a_method_that_is_not_here_is_no_other_version(predictor: Predictor, tmp_path: Path) -> None:
    foreign = replace(predictor.metadata, config=predictor.metadata.config | {"method": "absent:ROW"})
    write_model(tmp_path / "foreign", predictor.model.export(), foreign)
    with pytest.raises(ModelError, match=r"or of a method that is not here: method = 'absent:ROW'.*PYTHONPATH"):
        load_predictor(tmp_path / "foreign")


def test_names_that_the_terminal_cannot_show_end_no_prediction(
    tiny: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, printed = tmp_path / "\U0001f431.png", io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    Image.new("RGB", (30, 20), "red").save(path)
    monkeypatch.setattr("sys.stdout", printed)
    assert cli.main(["predict", str(untrained(tmp_path / "model", tiny, [6, 6])), str(path)]) == 0
    printed.seek(0)
    assert r"\U0001f431.png" in printed.read()


def test_the_command_answers_what_it_can_read(tiny: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    directory = str(untrained(tmp_path / "model", tiny, [6, 6]))
    Image.new("RGB", (30, 20), "red").save(tmp_path / "red.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    files = [str(tmp_path / "broken.png"), str(tmp_path / "red.png")]
    assert cli.main(["predict", directory, files[1], "--top", "2"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    assert cli.main(["predict", directory, str(folder.parent), files[1]]) == 1
    out, err = capsys.readouterr()
    assert files[1] in out
    assert err == f"fcil: {str(folder.parent)!r} is a folder without images.\n"
    shutil.copy(files[1], folder)
    assert cli.main(["predict", directory, str(folder.parent)]) == 0
    assert str(folder / "red.png") in capsys.readouterr().out
    assert cli.main(["predict", directory, "absent.png"]) == 1
    assert capsys.readouterr() == ("", "fcil: 'absent.png' does not exist.\n")
    assert heading.split() == ["file", "class", "probability"]
    assert [line.split()[0] for line in lines] == [files[1]] * 2
    assert cli.main(["predict", directory, files[0], "--json", files[1]]) == 1  # images on both sides of an option
    printed = capsys.readouterr()
    assert "broken.png" in printed.err
    broken, red = json.loads(printed.out)
    assert broken["file"] == files[0]
    assert "cannot be read" in broken["error"]
    best = load_predictor(directory).predict([files[1]]).top(1)[0][0]
    assert (red["classes"][0]["class"], red["classes"][0]["probability"]) == best
    assert lines[0].split()[-1] == f"{best[1]:.4f}"


def test_a_model_of_an_unfinished_run_says_so(tiny: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    Image.new("RGB", (30, 20), "red").save(tmp_path / "red.png")
    for tasks, note in (
        ([6], "fcil: note: this model has come to task 1 of 2, and knows no class of later ones\n"),
        ([6, 6], ""),
    ):
        directory = str(untrained(tmp_path / f"{len(tasks)}", tiny, tasks))
        assert cli.main(["predict", directory, str(tmp_path / "red.png")]) == 0
        assert capsys.readouterr().err == note
        assert cli.main(["export", directory, str(tmp_path / "out")]) == 0
        assert capsys.readouterr().err == note
    appearing = untrained(tmp_path / "appearing", tiny, [6])
    metadata = replace(
        load_predictor(appearing).metadata,
        config=load_predictor(appearing).metadata.config | {"class-order": "appearing"},
    )
    tell_unfinished(metadata)  # num-tasks is a limit there
    assert capsys.readouterr().err == ""


def test_exit_codes_of_the_command(tiny: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    directory = str(untrained(tmp_path / "model", tiny, [6, 6]))
    assert cli.main(["predict", str(tmp_path / "absent"), "x.png"]) == 1
    assert cli.main(["predict", directory, "x.png", "--device", "gpu"]) == 2
    assert "device = 'gpu'" in capsys.readouterr().err
