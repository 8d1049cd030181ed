"""Features on disk: each image passes the backbone once for all runs, and results do not depend on what is there."""

import copy
import gc
import json
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import torch
from flwr.app import Context, RecordDict

from benchmarks.query_cache import seconds
from client_app.app import app as client
from server_app.app import app as server
from server_app.cli.main import main
from server_app.rounds.run import run_experiment
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.data.images import ImageFiles
from task.data.load import load_dataset
from task.keys import ConfigError
from task.models import feature_cache, feature_store
from task.models.evaluation import extract_features
from task.models.feature_cache import cached_query, image_digest
from task.models.feature_store import clear_store, list_stored, stored_features
from task.models.linear import is_amd
from task.models.model import Model, build_model
from task.models.vit import Early
from task.models.weights import build_vit
from task.scenario.scenario import build_scenario
from task.utils.versions import package_version
from tests.helpers.flower import LoopbackGrid
from tests.helpers.own_data import OWN
from tests.helpers.own_data import store as put_images
from tests.helpers.runs import comparable, without_times

ONE_ROUND = {"fedrda-adaptation-rounds": 1}
PLAIN = [  # methods whose features are q(x), and those that read it beside their prompt
    {"method": "ncm"},
    {"method": "afcl"},
    {"method": "head-only"},
    {"method": "ccvr", "prompt": "none"},
    {"method": "fedavg", "prompt": "none"},
    {"method": "fedprok", "prompt": "none"},
    {"method": "fedavg", "prompt": "l2p"},
    {"method": "fppl"},
    {"method": "fedrda", "prompt": "none"},  # which reads two mean patch tokens of earlier blocks too
    {"method": "fedrda", "prompt": "none", "fedrda-frozen-depth": 0},  # one of them
    {"method": "fedrda", "prompt": "l2p"} | ONE_ROUND,  # the other, beside what the prompt reads
]
LORA = {"method": "fedrda", "prompt": "lora"} | ONE_ROUND  # the other alone


@pytest.fixture(autouse=True)
def nothing_open(monkeypatch):
    """Every test begins as a new process does, and stores however few images there are."""
    monkeypatch.setattr(feature_cache, "_TABLES", {})
    monkeypatch.setattr(feature_cache, "WORTH_STORING", 1)


@pytest.fixture
def passed(passes):
    """Number of images in each pass without prompt, be it through some of the blocks only."""
    return passes[False]


@pytest.fixture
def values(tiny, tmp_path):
    """A small run whose images are an .npz file."""
    data = load_dataset("synthetic", "", 16, 0.0, 0)
    images, labels = data.train_images, data.train_labels
    np.savez(tmp_path / "data.npz", images=images[np.arange(len(images))], labels=labels)
    return tiny | {"dataset": "npz", "data-dir": str(tmp_path / "data.npz"), "augmentation": "none"}


def run(values, name):
    """Results of a run without its times, and the arrays of its model."""
    config = parse(values | {"run-name": name})
    folder = run_experiment(config, InProcessTransport(config.num_clients))
    results = json.loads((folder / "results.json").read_text())
    return without_times(results), safetensors.numpy.load_file(folder / "model.safetensors")


def number_of_images(values):
    with np.load(values["data-dir"]) as data:
        return len(data["labels"])


def model_and_images(values, **more):
    config = parse(values | {"method": "ncm"} | more)
    scenario = build_scenario(config)
    return build_model(config, scenario.task_sizes(0)), scenario.dataset


@pytest.mark.parametrize(
    "keys",
    [pytest.param(k, marks=() if k["method"] in ("ncm", "fedrda") else pytest.mark.ci) for k in (*PLAIN, LORA)],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_the_first_run_passes_each_image_once_and_the_second_none(values, passed, monkeypatch, keys):
    first = run(values | keys, "first")
    assert sum(passed) == number_of_images(values)
    monkeypatch.setattr(feature_cache, "_TABLES", {})
    second = run(values | keys, "second")
    assert sum(passed) == number_of_images(values)
    assert first[0] == second[0]
    assert all((first[1][name] == array).all() for name, array in second[1].items())


def test_the_file_of_images_that_are_gone_is_let_go(values):
    for seed in range(3):
        model, dataset = model_and_images(values, seed=seed)
        build_scenario.cache_clear()
        load_dataset.cache_clear()
        cached_query(model, dataset.train_images, np.arange(4))
        del dataset
        gc.collect()
    assert len(feature_cache._TABLES) == 1


@pytest.mark.ci
def test_two_methods_in_a_process_take_each_its_own_features(values, monkeypatch):
    run(values | {"method": "fedrda", "prompt": "none"}, "other")
    after = run(values | LORA, "after")  # which takes one of the other's three, see below
    monkeypatch.setattr(feature_cache, "_TABLES", {})
    clear_store()
    assert run(values | LORA, "alone")[0] == after[0]
    assert [file.about["blocks"] for file in list_stored()] == ["2 (patches)"]


@pytest.mark.ci
def test_all_methods_and_splits_share_one_pass(values, passed):
    for number, keys in enumerate(
        [*PLAIN, LORA, {"method": "ncm", "validation-share": 0.25}, {"method": "ncm", "seed": 3}]
    ):
        run(values | keys, str(number))
    assert sum(passed) == number_of_images(values)
    assert len(list_stored()) == 1


def test_stored_queries_are_timms_in_the_order_of_the_file(values, feature_cache):
    """Batches of 256 of the file's own order, through timm's model as it is."""
    model, dataset = model_and_images(values)
    with np.load(values["data-dir"]) as data:
        images = data["images"]
    vit, mean, std = build_vit("vit_glyphs", "auto")
    vit.set_input_size(img_size=(16, 16))
    vit.eval()
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (mean, std))
    rows = []
    with torch.no_grad():
        for start in (0, 256):
            x = torch.from_numpy(images[start : start + 256]).permute(0, 3, 1, 2).float() / 255
            x = (x.expand(-1, 3, -1, -1) - mean) / std
            rows.append(vit.forward_head(vit.forward_features(x), pre_logits=True))
    expected = torch.cat(rows)
    for part in (dataset.train_images, dataset.test_images):
        positions = np.random.default_rng(0).permutation(len(part))
        assert torch.equal(cached_query(model, part, positions), expected[part.positions[positions]])
        assert torch.equal(extract_features(model, part, positions), expected[part.positions[positions]])
    (file,) = feature_cache.glob("*.safetensors")
    stored = safetensors.numpy.load_file(file)["features"]
    assert stored.shape == (len(expected), 3 * expected.shape[1])
    assert (stored[:, : expected.shape[1]] == expected.numpy()).all()


def test_models_of_one_file_read_each_its_own_columns(values):
    """Blocks of the bundled backbone: 6 in all, 3 and 2 after a half and a third."""
    images = model_and_images(values)[1].train_images
    parts = {(0, 0): [Early(5)], (0.5, 0): [Early(5), Early(2, True)], (0, 0.33): [Early(5), Early(1, True)]}
    for (depth, frozen), read in parts.items():
        keys = {"method": "fedrda", "prompt": "none", "fedrda-depth": depth, "fedrda-frozen-depth": frozen}
        model, _ = model_and_images(values, **keys)
        query = cached_query(model, images, np.arange(len(images)))
        with torch.no_grad():
            expected = model.query(feature_cache.prepare(images[np.arange(len(images))], model.backbone), read)
        assert torch.allclose(query, expected, atol=1e-5)
    assert len(list_stored()) == 1


def test_what_a_caller_writes_into_a_query_is_not_stored(values):
    model, dataset = model_and_images(values)
    query = cached_query(model, dataset.train_images, np.arange(5))
    before = query.clone()
    query.zero_()
    assert torch.equal(cached_query(model, dataset.train_images, np.arange(5)), before)


@pytest.mark.parametrize(
    "more", [{"precision": "bf16"}, {"image-size": 24}, {"backbone-weights": "random"}, {"threads": 2}], ids=str
)
def test_other_settings_have_features_of_their_own(values, passed, more):
    run(values | {"method": "ncm"}, "one")
    run(values | {"method": "ncm"} | more, "two")
    torch.set_num_threads(1)
    assert sum(passed) == 2 * number_of_images(values)
    assert len(list_stored()) == 2


Change = Callable[[pytest.MonkeyPatch, Model, np.ndarray], object]


def put(owner: object, name: str, value: object) -> Change:
    """Replace an attribute of a module or class."""
    return lambda patch, model, images: patch.setattr(owner, name, value)


def put_version(package: str) -> Change:
    """Another version of one package."""
    return put(feature_cache, "package_version", lambda name: "0.0" if name == package else package_version(name))


def put_code(path: str) -> Change:
    """One more line in one file of the package."""
    read, changed = Path.read_bytes, Path(feature_cache.__file__).parents[1] / path
    return put(Path, "read_bytes", lambda self: read(self) + b"\n" if self == changed else read(self))


def of_backbone(name: str, value: object) -> Change:
    return lambda patch, model, images: setattr(model.backbone, name, value)


def of_model(name: str, value: object) -> Change:
    return lambda patch, model, images: setattr(model, name, value)


# entry of a stored file's identity, what is changed of it, and how
CHANGES: list[tuple[str, str, Change]] = [
    ("images", "a pixel", lambda patch, model, images: np.bitwise_xor.at(images, (-1, 0, 0, 0), 1)),
    ("backbone", "name", of_model("backbone_name", "another")),
    ("backbone-sha256", "weights", of_backbone("sha256", "0" * 64)),
    ("image-size", "side", of_backbone("image_size", 24)),
    ("normalisation", "mean", of_backbone("mean", torch.full((1, 3, 1, 1), 0.1))),
    ("normalisation", "std", of_backbone("std", torch.full((1, 3, 1, 1), 0.1))),
    ("precision", "precision", of_model("precision", "bf16")),
    ("features", "a block", of_model("early", (Early(0),))),
    ("features", "what of it", of_model("early", (Early(2, patches=False),))),
    ("batch", "size", put(feature_cache, "BATCH", 128)),
    ("processor", "threads", put(torch, "get_num_threads", lambda: 99)),
    ("processor", "machine", put(platform, "machine", lambda: "another")),
    ("processor", "instructions", put(torch.backends.cpu, "get_cpu_capability", lambda: "another")),
    ("processor", "maker", put(feature_cache, "is_amd", lambda: not is_amd())),
    *(("versions", package, put_version(package)) for package in ("torch", "timm", "pillow")),
    *(("code", path, put_code(path)) for path in ("models/preprocessing.py", "models/vit.py", "data/images.py")),
]


@pytest.fixture
def stored_abouts(values: dict, monkeypatch: pytest.MonkeyPatch) -> Callable[[Change | None], list[dict[str, str]]]:
    """Stores features of four images, changes one thing, stores them again; what the stored files say of themselves."""
    model, images = build_model(parse(values | {"method": "ncm"}), [2]), np.zeros((4, 16, 16, 3), np.uint8)
    zeros = torch.zeros(4, 3, model.backbone.dim)  # at most; the parts are of no importance here
    monkeypatch.setattr(feature_cache, "_compute_all", lambda model, source, parts: zeros[:, : len(parts)].flatten(1))
    model._shared = [copy.deepcopy(model.backbone)]  # the process's own is that of all later tests

    def store_twice(change: Change | None) -> list[dict[str, str]]:
        cached_query(model, images, np.arange(4))
        monkeypatch.setattr(feature_cache, "_TABLES", {})
        if change:
            change(monkeypatch, model, images)
        cached_query(model, images, np.arange(4))
        return [dict(file.about) for file in list_stored()]

    return store_twice


@pytest.mark.parametrize(("entry", "change"), [pytest.param(e, c, id=f"{e}-{what}") for e, what, c in CHANGES])
def test_whatever_the_bits_depend_on_makes_another_file(
    stored_abouts: Callable[[Change | None], list[dict[str, str]]], entry: str, change: Change
) -> None:
    """Each change shows in its entry alone, so a file is shared wrongly as soon as the entry is left out."""
    abouts = stored_abouts(change)
    assert len(abouts) == 2
    one, other = abouts
    different = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    assert different - {"blocks"} == {entry}


def test_all_entries_of_a_file_are_among_the_changes(
    stored_abouts: Callable[[Change | None], list[dict[str, str]]],
) -> None:
    (about,) = stored_abouts(None)
    assert set(about) - {"belongs-to", "number", "blocks"} == {entry for entry, _, _ in CHANGES}


def test_one_changed_pixel_makes_other_features(values, passed):
    run(values | {"method": "ncm"}, "one")
    with np.load(values["data-dir"]) as data:
        images, labels = data["images"], data["labels"]
    images[-1, 0, 0] ^= 1
    other = values["data-dir"].replace("data.npz", "other.npz")
    np.savez(other, images=images, labels=labels)
    run(values | {"method": "ncm", "data-dir": other}, "two")
    assert sum(passed) == 2 * len(labels)
    renamed = shutil.copy(values["data-dir"], values["data-dir"].replace("data.npz", "renamed.npz"))
    run(values | {"method": "ncm", "data-dir": str(renamed)}, "three")
    assert sum(passed) == 2 * len(labels)


def test_files_of_images_are_known_by_path_size_and_time(tmp_path):
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        path.write_bytes(b"12")
        os.utime(path, (1, 1))
    images = ImageFiles(tuple(map(str, paths)), 16)
    digests = {
        image_digest(images),
        image_digest(ImageFiles(images.paths[:1], 16)),
        image_digest(ImageFiles(images.paths, 8)),
    }
    os.utime(paths[0], (2, 2))
    digests.add(image_digest(images))
    assert len(digests) == 4
    np.save(tmp_path / "images.npy", np.zeros((3, 4, 4, 3), np.uint8))
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    before = image_digest(mapped)
    os.utime(tmp_path / "images.npy", (1, 1))
    assert image_digest(mapped) != before


NEVER = [
    {"method": "ncm", "feature-cache": "off"},
    {"method": "ncm", "dataset": "synthetic"},
    {"method": "hgp"},  # its prompt neither reads q(x) nor leaves it as it is
    {"method": "fedavg-ft"},
]


@pytest.mark.parametrize("keys", NEVER, ids=lambda keys: "-".join(keys.values()))
def test_what_is_not_stored(values, feature_cache, keys):
    run({k: v for k, v in values.items() if k != "data-dir" or "dataset" not in keys} | keys, "run")
    assert not feature_cache.exists()


@pytest.mark.ci
def test_what_it_saves_to_keep_features_is_measured_without_the_disk(values, passed, feature_cache):
    assert seconds("ncm", "none", values, reuse=True) > 0
    first = sum(passed)
    assert seconds("ncm", "none", values, reuse=True) > 0
    assert sum(passed) == 2 * first > 0
    assert not feature_cache.exists()


def test_few_images_are_not_stored(values, feature_cache, monkeypatch):
    monkeypatch.setattr("task.models.feature_cache.WORTH_STORING", number_of_images(values) + 1)
    run(values | {"method": "ncm"}, "run")
    assert not feature_cache.exists()


def test_images_of_nodes_are_never_stored(tmp_path, feature_cache, patterns):
    """The images of real nodes are personal data, and so are their features."""
    for name in ("north", "south"):
        for c in range(2):
            put_images(tmp_path / "nodes" / name, c, patterns[c][:10])
    keys = OWN | {"method": "ncm", "data-dir": str(tmp_path / "nodes"), "num-clients": 2}
    config = parse(keys | {"output-dir": str(tmp_path / "runs")})
    run_experiment(config, InProcessTransport(2))
    assert not feature_cache.exists()
    with pytest.raises(ConfigError, match="feature-cache = 'off' would be ignored"):
        parse(keys | {"feature-cache": "off"})


def test_both_transports_take_the_same_features(values, passed, tmp_path):
    keys = values | {"method": "head-only", "num-clients": 2}
    server(LoopbackGrid(client, 2), Context(1, 0, {}, RecordDict(), keys | {"run-name": "grid"}))
    run(keys, "here")
    assert comparable(tmp_path / "runs" / "grid") == comparable(tmp_path / "runs" / "here")
    assert sum(passed) == number_of_images(values)


def test_a_run_says_when_augmentation_keeps_training_from_the_cache(values, caplog):
    caplog.set_level(logging.WARNING)
    run(values | {"method": "ncm"}, "one")
    run(values | {"method": "head-only"}, "two")
    assert "augmentation" not in caplog.text.replace("ignores augmentation", "")
    run(values | {"method": "head-only", "augmentation": "crop"}, "three")
    assert "with augmentation=none training too takes them from the feature cache" in caplog.text


def test_doctor_writes_nothing(values, feature_cache, capsys):
    words = [f"{name}={value}" for name, value in values.items()]
    assert main(["doctor", "method=head-only", *words]) == 0
    assert "a local step" in capsys.readouterr().out
    assert not feature_cache.exists()


def store(name, rows=10, value=1.0):
    """Store 4-dimensional features under a name."""
    return stored_features({"name": name}, {"belongs-to": name}, (rows, 4), lambda: torch.full((rows, 4), value))


def names():
    return [file.about["name"] for file in list_stored()]


def test_two_that_ask_at_once_compute_once(caplog):
    caplog.set_level(logging.INFO)
    begun, calls, answers = threading.Event(), [], []

    def compute():
        calls.append(1)
        begun.set()
        time.sleep(0.5)
        return torch.ones(3, 4)

    def ask():
        answers.append(stored_features({"name": "x"}, {}, (3, 4), compute))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert (len(calls), len(answers)) == (1, 2)
    assert all(torch.equal(answer, torch.ones(3, 4)) for answer in answers)
    assert "another process" in caplog.text


def test_a_pass_that_ends_early_leaves_nothing_and_blocks_nobody(feature_cache):
    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        stored_features({"name": "x"}, {}, (3, 4), fail)
    assert not [path for path in feature_cache.iterdir() if path.suffix != ".lock"]
    assert store("x").shape == (10, 4)


def test_the_longest_unused_make_room(monkeypatch):
    size = 4 * 4 * 1000  # bytes of the numbers; a header comes with them
    monkeypatch.setenv("FCIL_CACHE_GB", str(3.5 * size / 1e9))
    for number, name in enumerate("abc"):
        store(name, 1000)
        os.utime(next(file.path for file in list_stored() if file.about["name"] == name), (number, number))
    assert names() == ["a", "b", "c"]
    kept = store("a", 1000)  # used again
    assert names() == ["b", "c", "a"]
    store("d", 1000)
    assert names() == ["c", "a", "d"]
    monkeypatch.setenv("FCIL_CACHE_GB", str(1.5 * size / 1e9))
    store("e", 1000)
    assert names() == ["e"]
    assert torch.equal(kept, torch.ones(1000, 4))  # whoever has it open goes on


def test_what_is_stored_makes_room_on_a_small_disk(monkeypatch):
    """A disk with room for two and a half files."""
    size = 4 * 4 * 1000
    room = SimpleNamespace(free=0)
    monkeypatch.setattr("task.models.feature_store.shutil.disk_usage", lambda folder: room)
    for name in "abcd":
        room.free = int(2.5 * size) - sum(file.size for file in list_stored())
        store(name, 1000)
    assert names() == ["c", "d"]
    with pytest.raises(ConfigError, match="has 4e-05 for them"):
        store("large", 4000)
    assert names() == ["c", "d"]


@pytest.mark.parametrize(
    ("limit", "words"),
    [("1e-7", "FCIL_CACHE_GB allows 1e-07"), ("much", "must be a number"), ("0", "must be a number")],
)
def test_a_limit_that_cannot_be_kept_is_refused_before_the_pass(monkeypatch, limit, words):
    monkeypatch.setenv("FCIL_CACHE_GB", limit)
    with pytest.raises(ConfigError, match=words):
        stored_features({"name": "x"}, {}, (10, 4), lambda: pytest.fail("computed"))


def test_a_folder_or_file_that_cannot_be_used_is_named(tmp_path, monkeypatch, feature_cache):
    store("x")
    (file,) = list_stored()
    file.path.write_bytes(b"no features")
    with pytest.raises(ConfigError, match=r"is damaged .*fcil cache clear"):
        store("x")
    (tmp_path / "file").touch()
    monkeypatch.setenv("FCIL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=r"cannot be used .*set FCIL_CACHE to another folder, or feature-cache=off"):
        store("x")


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert feature_store.store_folder() == tmp_path / "cache"
    monkeypatch.delenv("FCIL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert feature_store.store_folder() == Path("/elsewhere/fcil")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert feature_store.store_folder() == Path.home() / ".cache" / "fcil"


def test_the_folder_is_its_owners_alone(feature_cache):
    store("x")
    assert feature_cache.stat().st_mode & 0o077 == 0


def test_fcil_cache_lists_and_clears(values, capsys, feature_cache):
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"0 files, 0 GB of at most 10 GB in {feature_cache}\n"
    run(values | {"method": "ncm"}, "run")
    (feature_cache / "odd.safetensors").write_bytes(b"")
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert f"{number_of_images(values)} images of npz {values['data-dir']}, vit_glyphs" in out
    assert "16 pixels, fp32" in out
    assert "blocks 6, 3 (patches), 2 (patches)" in out
    assert "damaged" in out
    with feature_store._lock(feature_cache / "odd.safetensors"):
        assert main(["cache", "clear"]) == 0
    assert "1 files" in capsys.readouterr().out
    assert [path.name for path in feature_cache.glob("*.safetensors")] == ["odd.safetensors"]
    assert len(clear_store()) == 1
    assert not list_stored()
