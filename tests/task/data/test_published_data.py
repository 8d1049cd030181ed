"""Published data sets: small trees of the right layout through the real loaders, and what an incomplete copy says."""

import hashlib
import pickle
import re
import shutil
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from task.config import schema as config
from task.data import images
from task.data.images import Dataset, ImageFiles
from task.data.load import load_dataset, read_source
from task.data.published import DOMAINS
from task.data.registry import SOURCES, Source
from task.keys import ConfigError

NUMBERS = ["n01443537", "n02012849", "n03126707"]  # goldfish, and two that WordNet both calls crane
WORDS = ("goldfish", "crane (n02012849)", "crane (n03126707)")
BIRDS = ("001.Black_footed_Albatross", "002.Laysan_Albatross")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a loader reached for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def draw(path: Path, label: int) -> None:
    """An image whose brightness is its label's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((20, 30, 3), 10 + 20 * label, np.uint8)).save(path)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def write_cifar(root: Path, patch: pytest.MonkeyPatch, kind: type[CIFAR10], labels_key: str) -> None:
    """Batches of two classes, two images of each; torchvision is told their checksums."""

    def write(name: str, content: dict) -> tuple[str, str]:
        root.mkdir(exist_ok=True)
        (root / name).write_bytes(pickle.dumps(content))
        return name, hashlib.md5((root / name).read_bytes()).hexdigest()

    labels = [0, 1, 0, 1]
    batch = {"data": np.repeat(np.array([[10], [30], [10], [30]], np.uint8), 3072, axis=1), labels_key: labels}
    patch.setattr(kind, "train_list", [write(name, batch) for name, _ in kind.train_list])
    patch.setattr(kind, "test_list", [write(name, batch) for name, _ in kind.test_list])
    name, md5 = write(kind.meta["filename"], {kind.meta["key"]: ["cat", "dog"]})
    patch.setattr(kind, "meta", kind.meta | {"filename": name, "md5": md5})


def write_cifar10(root: Path, patch: pytest.MonkeyPatch) -> Source:
    write_cifar(root, patch, CIFAR10, "labels")
    return replace(SOURCES["cifar10"], classes=2, train=20, test=4)


def write_cifar100(root: Path, patch: pytest.MonkeyPatch) -> Source:
    write_cifar(root, patch, CIFAR100, "fine_labels")
    return replace(SOURCES["cifar100"], classes=2, train=4, test=4)


def write_tiny_imagenet(root: Path, patch: pytest.MonkeyPatch) -> Source:
    write_lines(root / "wnids.txt", reversed(NUMBERS))
    rows = []
    for c, number in enumerate(NUMBERS):
        write_lines(root / "train" / number / f"{number}_boxes.txt", ["a.JPEG\t0\t0\t1\t1"])
        for i in range(4):
            draw(root / "train" / number / "images" / f"{number}_{i}.JPEG", c)
        for i in range(2):
            draw(root / "val" / "images" / f"val_{i}{c}.JPEG", c)
            rows.append(f"val_{i}{c}.JPEG\t{number}\t0\t32\t44\t62")
    write_lines(root / "val" / "val_annotations.txt", sorted(rows))
    return replace(SOURCES["tiny-imagenet"], classes=3, train=12, test=6)


def write_mini_imagenet(root: Path, patch: pytest.MonkeyPatch) -> Source:
    """Each list has a class of its own, as in the few-shot splits."""
    for c, (part, number) in enumerate(zip(("test", "train", "val"), NUMBERS, strict=True)):
        names = [f"{number}{i:08d}.jpg" for i in range(6)]
        write_lines(root / f"{part}.csv", ["filename,label", *(f"{name},{number}" for name in names)])
        for name in names:
            draw(root / "images" / name, c)
    return replace(SOURCES["mini-imagenet"], classes=3, train=18)


def write_cub200(root: Path, patch: pytest.MonkeyPatch) -> Source:
    """Three images of each bird; the first is for training."""
    files = [f"{bird}/{bird}_{i}.jpg" for bird in BIRDS for i in range(3)]
    for i, file in enumerate(files):
        draw(root / "images" / file, i // 3)
    write_lines(root / "classes.txt", (f"{c + 1} {bird}" for c, bird in enumerate(BIRDS)))
    write_lines(root / "images.txt", (f"{i + 1} {file}" for i, file in enumerate(files)))
    write_lines(root / "image_class_labels.txt", (f"{i + 1} {i // 3 + 1}" for i in range(6)))
    write_lines(root / "train_test_split.txt", (f"{i + 1} {int(i % 3 == 0)}" for i in range(6)))
    return replace(SOURCES["cub200"], classes=2, train=2, test=4)


def write_imagenet_r(root: Path, patch: pytest.MonkeyPatch) -> Source:
    write_lines(root / "README.txt", ["n01443537 goldfish"])
    for c, number in enumerate(NUMBERS):
        for i in range(5 + 5 * c):
            draw(root / number / f"art_{i}.jpg", c)
    return replace(SOURCES["imagenet-r"], classes=3, train=30)


def write_domainnet(root: Path, patch: pytest.MonkeyPatch) -> Source:
    """Two objects; one domain lacks one of them, as painting lacks the t-shirt."""
    for domain in DOMAINS:
        for part, numbers in (("train", (1, 2)), ("test", (3,))):
            objects = [(c, name) for c, name in enumerate(("ant", "t-shirt")) if (domain, c) != ("painting", 1)]
            rows = [(f"{domain}/{name}/{domain}_{i}.jpg", c) for c, name in objects for i in numbers]
            write_lines(root / f"{domain}_{part}.txt", (f"{file} {c}" for file, c in rows))
            for file, c in rows:
                draw(root / file, c)
    return replace(SOURCES["domainnet"], classes=2, train=22, test=11)


Tree = Callable[[Path, pytest.MonkeyPatch], Source]
TREES: dict[str, Tree] = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "tiny-imagenet": write_tiny_imagenet,
    "mini-imagenet": write_mini_imagenet,
    "cub200": write_cub200,
    "imagenet-r": write_imagenet_r,
    "domainnet": write_domainnet,
}
NAMES = {
    "cifar10": ("cat", "dog"),
    "cifar100": ("cat", "dog"),
    "tiny-imagenet": WORDS,
    "mini-imagenet": WORDS,
    "cub200": BIRDS,
    "imagenet-r": WORDS,
    "domainnet": ("ant", "t-shirt"),
}
LISTS = {  # one that no loader can do without
    "cifar10": "data_batch_3",
    "cifar100": "meta",
    "tiny-imagenet": "val/val_annotations.txt",
    "mini-imagenet": "val.csv",
    "cub200": "train_test_split.txt",
    "domainnet": "sketch_test.txt",
}


@pytest.fixture(params=TREES)
def tree(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Source, Path]:
    """Name, row with small counts, and folder of a complete small copy below tmp_path."""
    root = tmp_path / SOURCES[request.param].folder
    return request.param, TREES[request.param](root, monkeypatch), root


def brightness(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The label that each training and test image shows."""
    parts = dataset.train_images, dataset.test_images
    train, test = (np.rint((p[np.arange(len(p))].mean((1, 2, 3)) - 10) / 20).astype(int) for p in parts)
    return train, test


def test_table_has_every_data_set_that_may_be_asked_for() -> None:
    assert tuple(SOURCES) == config.EMBEDDED + config.FROM_PATH
    assert set(TREES) == {name for name, source in SOURCES.items() if source.classes}
    assert all(SOURCES[name].address.startswith("http") and SOURCES[name].holds for name in TREES)


def test_complete_copy(tree: tuple[str, Source, Path]) -> None:
    name, source, root = tree
    data = read_source(source, root.parent, 16)
    assert data.class_names == NAMES[name]
    assert data.augmentation == "crop-flip"
    assert (len(data.train_images), len(data.test_images)) == (len(data.train_labels), len(data.test_labels))
    assert len(data.train_labels) + len(data.test_labels) == source.train + source.test
    assert data.train_labels.dtype == data.test_labels.dtype == np.int64
    train, test = brightness(data)
    assert (train == data.train_labels).all()
    assert (test == data.test_labels).all()
    assert set(train) == set(test) == set(range(source.classes))


def test_data_dir_may_be_the_folder_itself_and_the_split_is_always_the_same(tree: tuple[str, Source, Path]) -> None:
    _, source, root = tree
    one, two = read_source(source, root.parent, 16), read_source(source, root, 16)
    assert (one.train_labels == two.train_labels).all()
    assert (brightness(one)[1] == brightness(two)[1]).all()


def test_nothing_there_says_what_belongs_there_and_where_to_get_it(tree: tuple[str, Source, Path]) -> None:
    name, _, root = tree
    shutil.rmtree(root)
    source = SOURCES[name]
    with pytest.raises(ConfigError) as caught:
        read_source(source, root.parent, 16)
    for part in (str(root.parent), source.folder, source.address, source.holds, f"{source.train:,}", "data-dir"):
        assert part in str(caught.value)
    assert f"of {source.classes} classes" in str(caught.value)


def test_other_numbers_than_the_published_are_refused(tree: tuple[str, Source, Path]) -> None:
    name, source, root = tree
    with pytest.raises(ConfigError) as caught:
        read_source(SOURCES[name], root.parent, 16)
    message = f"found {source.train} training and {source.test} test" if source.test else f"found {source.train} images"
    assert message in str(caught.value)
    assert f"{SOURCES[name].train:,}" in str(caught.value)


@pytest.mark.parametrize("tree", [name for name in TREES if name in config.IMAGE_FILES], indirect=True)
def test_one_image_short(tree: tuple[str, Source, Path]) -> None:
    _, source, root = tree
    sorted(path for path in root.rglob("*") if path.suffix in (".jpg", ".JPEG"))[0].unlink()
    with pytest.raises(ConfigError, match=r"1 of \d+ listed images|found \d+ .*has the fewest training images"):
        read_source(source, root.parent, 16)


@pytest.mark.parametrize("tree", LISTS, indirect=True)
def test_a_list_is_missing_or_garbled(tree: tuple[str, Source, Path]) -> None:
    name, source, root = tree
    file = root / LISTS[name]
    file.write_text(file.read_bytes()[:1].decode("latin1") + "x\ny\n")
    with pytest.raises(ConfigError, match=r"not as published|damaged"):
        read_source(source, root.parent, 16)
    file.unlink()
    with pytest.raises(ConfigError, match=re.escape(file.name)):
        read_source(source, root.parent, 16)


def test_a_folder_that_is_no_imagenet_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_imagenet_r(tmp_path / "imagenet-r", monkeypatch)
    draw(tmp_path / "imagenet-r" / "holiday" / "a.jpg", 0)
    with pytest.raises(ConfigError, match=r"not as published.*holiday"):
        read_source(source, tmp_path, 16)


def test_mini_imagenet_holds_back_a_sixth_of_each_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 and 100 of 600."""
    data = read_source(write_mini_imagenet(tmp_path / "mini-imagenet", monkeypatch), tmp_path, 16)
    assert np.bincount(data.train_labels).tolist() == [5, 5, 5]
    assert np.bincount(data.test_labels).tolist() == [1, 1, 1]


def test_official_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, train, test in (("cub200", [1, 1], [2, 2]), ("domainnet", [12, 10], [6, 5])):
        data = read_source(TREES[name](tmp_path / SOURCES[name].folder, monkeypatch), tmp_path, 16)
        assert np.bincount(data.train_labels).tolist() == train
        assert np.bincount(data.test_labels).tolist() == test


def test_small_images_are_not_enlarged_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read_source(write_tiny_imagenet(tmp_path / "tiny-imagenet-200", monkeypatch), tmp_path, 224)
    assert data.train_images[np.array([0])].shape == (1, 64, 64, 3)


def test_a_registered_data_set_loads_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "imagenet-r", write_imagenet_r(tmp_path / "imagenet-r", monkeypatch))
    data = load_dataset("imagenet-r", str(tmp_path), 16, 0.25, 0)
    assert np.bincount(data.test_labels).tolist() == [1, 2, 3]
    assert np.bincount(data.train_labels).tolist() == [3, 6, 9]


def test_files_are_decoded_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "CUB_200_2011"
    source = write_cub200(root, monkeypatch)
    bad = root / "images" / BIRDS[1] / f"{BIRDS[1]}_0.jpg"  # the second training image
    for content in (b"", b"no image", bad.read_bytes()[:200]):
        bad.write_bytes(content)
        data = read_source(source, tmp_path, 16)
        assert data.train_images[np.array([0])].shape == (1, 16, 16, 3)
        with pytest.raises(ConfigError, match=re.escape(bad.name)):
            data.train_images[np.array([0, 1])]


def test_decoded_files_are_kept_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    decode = images.decode
    monkeypatch.setattr(images, "decode", lambda path, side, max_pixels: opened.append(path) or decode(path, side))
    monkeypatch.setattr(images, "CACHE_BYTES", 2 * 8 * 8 * 3)  # two images of 8 x 8
    for i in range(3):
        draw(tmp_path / f"{i}.png", i)
    files = ImageFiles(tuple(str(tmp_path / f"{i}.png") for i in range(3)), 8)
    assert (files[np.array([1, 0, 1])] == files[np.array([1, 0, 1])]).all()
    assert len(opened) == 2
    assert files[np.arange(3)].shape == (3, 8, 8, 3)
    assert files[np.array([], int)].shape == (0, 8, 8, 3)
    assert files.decoded.cache_info().currsize == 2  # type: ignore[attr-defined]
