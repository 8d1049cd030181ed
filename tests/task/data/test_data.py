"""Data sets: what they hold, how they are split, and what a broken path says."""

import hashlib
import re
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from task.config.parsing import parse
from task.data.image_folders import class_folders, require_classes
from task.data.images import Dataset, Subset
from task.data.load import load_dataset
from task.data.splits import draw_held_out, split_validation
from task.keys import ConfigError
from task.scenario.scenario import build_scenario


def write_npz(path: Path, **changes: np.ndarray | None) -> str:
    rng = np.random.default_rng(0)
    arrays = {"images": rng.integers(0, 256, (40, 8, 8, 3), np.uint8), "labels": np.arange(40) % 4} | changes
    np.savez(path, **{name: a for name, a in arrays.items() if a is not None})
    return str(path)


def write_folder(root: Path, classes: int = 2, images: int = 10) -> Path:
    for c in range(classes):
        (root / f"class{c}").mkdir(parents=True)
        for i in range(images):
            Image.fromarray(np.full((20, 30, 3), 40 * c + i, np.uint8)).save(root / f"class{c}" / f"{i}.png")
    return root


def test_embedded_digits_are_scikit_learns() -> None:
    """Every image is there once, with its label; pixels 0..16 become 0..255."""
    ours, theirs = load_dataset("digits", "", 32, 0.0, 0), load_digits()
    images = np.concatenate([ours.train_images[np.arange(1438)], ours.test_images[np.arange(359)]])[..., 0]
    labels = np.concatenate([ours.train_labels, ours.test_labels])
    expected = np.round(theirs.images * 255 / 16).astype(np.uint8)
    loaded = sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))
    assert loaded == sorted((image.tobytes(), int(label)) for image, label in zip(expected, theirs.target, strict=True))
    counts = np.bincount(theirs.target)
    assert (np.bincount(ours.test_labels) == np.round(0.2 * counts)).all()
    assert ours.augmentation == "none"


def test_test_images_of_the_digits_are_pinned() -> None:
    """Recorded once: others make every kept run irreproducible."""
    text = ",".join(map(str, load_dataset("digits", "", 32, 0.0, 0).test_images.positions.tolist()))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "ac1574786aa6687b169ab8c5c3da9e1e671d157fac2e2a8684cd3279a66111f0"
    )


def test_held_out_share_of_every_class() -> None:
    labels = np.array([0] * 10 + [1] * 5 + [2] * 20)
    mask = draw_held_out(labels, 0.2, 0, "test")
    assert [int(mask[labels == c].sum()) for c in range(3)] == [2, 1, 4]
    assert (mask == draw_held_out(labels, 0.2, 0, "test")).all()
    assert (mask != draw_held_out(labels, 0.2, 1, "test")).any()


@pytest.mark.parametrize("share", [0.05, 0.2, 0.9])
def test_of_a_class_of_two_images_one_is_held_out_and_of_one_none(share: float) -> None:
    mask = draw_held_out(np.array([0, 0, 2]), share, 0, "test")
    assert [int(mask[:2].sum()), int(mask[2])] == [1, 0]


@pytest.mark.parametrize(
    ("labels", "groups", "held_out"),
    [
        ([0] * 20 + [1] * 10, [*np.arange(20) // 4, *range(5, 15)], [4, 2]),  # five of four images, ten single ones
        ([0, 1] * 10, np.arange(20) // 4, [2, 2]),  # five patients, two images of each class
        ([0] * 60, [0] * 50 + [1] * 10, [10]),  # 12 are wanted: 10 are nearer than 50
        ([0] * 60, [0] * 30 + [1] * 30, [30]),  # none is nearer than 0, but one is needed
        ([0] * 70, [0] * 40 + [1] * 30, [30]),  # the smallest
        ([0] * 10 + [1] * 10, [7] * 20, [2, 2]),  # one for all: by images
        ([0] * 10 + [1] * 10, [7] * 10 + [*range(5), *range(5)], [2, 2]),  # the same for the first class
        ([0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [1, 1]),  # class 0 is of one group; of class 1 either one or two
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_groups_are_not_divided(labels: list[int], groups: Sequence[int], held_out: list[int], seed: int) -> None:
    of, group = np.array(labels), np.array(groups)
    mask = draw_held_out(of, 0.2, seed, "test", group)
    assert np.bincount(of[mask]).tolist() == held_out
    whole = [c for c in range(of.max() + 1) if len(set(group[of == c])) > 1]
    divided = set(group[mask & np.isin(of, whole)]) & set(group[~mask & np.isin(of, whole)])
    assert not divided


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([*np.arange(10) // 2, *[7] * 10], "1 of 3 classes have images of one group only"),
        ([*np.arange(20) // 2], ""),
    ],
)
def test_classes_that_are_divided_image_by_image_are_counted(
    groups: list[int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    labels = np.array([0] * 10 + [1] * 10 + [2])  # the last class has one image, which cannot be divided
    draw_held_out(labels, 0.2, 0, "test", np.array([*groups, 99]))
    assert caplog.text.count("divided image by image") == bool(said)
    assert said in caplog.text


def test_images_that_are_divided_singly_join_no_other_group() -> None:
    """Class 0 is of group 9 alone, the highest number; each of its images may be held out without another image."""
    labels, groups = np.array([0] * 10 + [1] * 40), np.array([9] * 10 + [*np.arange(40) // 8])
    marked = np.stack([draw_held_out(labels, 0.2, seed, "test", groups) for seed in range(40)])
    assert marked[:, :10].any(axis=0).all()
    assert np.unique(marked[:, :10].sum(axis=1)).tolist() == [2]
    assert np.unique(marked[:, 10:].sum(axis=1)).tolist() == [8]


def test_a_group_that_suits_one_class_does_not_take_nearly_all_of_another() -> None:
    """Twenty images of class 0, of which twenty are wanted, lie in one group with nine of the ten of class 1."""
    labels = np.array([0] * 100 + [1] * 10)
    groups = np.array([0] * 20 + [*1 + np.arange(80) // 2] + [0] * 9 + [99])
    for seed in range(10):
        mask = draw_held_out(labels, 0.2, seed, "test", groups)
        assert np.bincount(labels[mask]).tolist() == [20, 1]


def test_a_class_without_test_images_gets_the_group_that_takes_least_of_any_class() -> None:
    """Of groups of 6, 12, and 2 beside 3 of the five images of class 1, which has one held out already."""
    labels = np.array([0] * 20 + [1] * 5)
    groups = np.array([0] * 6 + [1] * 12 + [2] * 2 + [2] * 3 + [3, 4])
    for seed in range(10):
        mask = draw_held_out(labels, 0.1, seed, "test", groups)
        assert np.bincount(labels[mask]).tolist() == [6, 1]


def test_another_seed_holds_out_other_groups() -> None:
    labels, groups = np.zeros(40, np.int64), np.arange(40) // 4
    held_out = {tuple(groups[draw_held_out(labels, 0.1, seed, "test", groups)]) for seed in range(40)}
    assert len(held_out) > 5


def test_every_class_keeps_a_training_image_however_groups_lie() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        labels, groups = rng.integers(0, 6, 18), rng.integers(0, 6, 18)
        mask = draw_held_out(labels, 0.5, seed, "test", groups)
        assert set(labels[~mask]) == set(labels)


@pytest.mark.parametrize("kind", [int, str, np.int8])
def test_groups_of_an_npz_stay_together(tmp_path: Path, kind: type) -> None:
    groups = np.array([kind(n) for n in np.arange(40) // 8])  # five of eight images, two of each class
    path = write_npz(tmp_path / "a.npz", groups=groups)
    data, less = load_dataset("npz", path, 32, 0.0, 0), load_dataset("npz", path, 32, 0.25, 0)
    for held_out in (data.test_images, less.test_images):
        assert isinstance(held_out, Subset)
    chosen = data.test_images.positions // 8, data.train_images.positions[less.test_images.positions] // 8
    assert [np.bincount(part.test_labels).tolist() for part in (data, less)] == [[2] * 4] * 2
    assert [len(set(positions)) for positions in chosen] == [1, 1]
    assert set(chosen[0]) != set(chosen[1])


def test_groups_that_leave_a_class_without_test_images_are_named(tmp_path: Path) -> None:
    """Of three groups each lies in two classes, and holding one out leaves no other."""
    groups = np.concatenate([[0] * 5 + [1] * 5, [0] * 5 + [2] * 5, [1] * 5 + [2] * 5])
    arrays = {"images": np.zeros((30, 8, 8, 3), np.uint8), "labels": np.arange(30) // 10, "groups": groups}
    path = write_npz(tmp_path / "a.npz", **arrays)
    with pytest.raises(ConfigError, match=r"too few images of \['\d'\]; .*, and images of one of its groups stay"):
        load_dataset("npz", path, 32, 0.0, 0)


def test_a_split_that_divides_a_group_is_refused(tmp_path: Path) -> None:
    groups = np.arange(40) // 8
    path = write_npz(tmp_path / "a.npz", groups=groups, split=np.arange(40) >= 33)
    with pytest.raises(ConfigError, match=r"divides 1 of its groups, such as that of the images \[32, 33, 34, 35, 36"):
        load_dataset("npz", path, 32, 0.0, 0)
    path = write_npz(tmp_path / "b.npz", groups=groups, split=np.arange(40) >= 32)
    assert len(load_dataset("npz", path, 32, 0.0, 0).test_labels) == 8


def test_validation_replaces_the_test_set_with_training_images() -> None:
    full = load_dataset("digits", "", 32, 0.0, 0)
    less = split_validation(full, 0.25, seed=0)
    assert len(less.train_labels) + len(less.test_labels) == len(full.train_labels)
    everything = {full.train_images[np.array([i])].tobytes() for i in range(len(full.train_labels))}
    assert all(less.test_images[np.array([i])].tobytes() in everything for i in range(len(less.test_labels)))


def test_npz_with_split_and_names(tmp_path: Path) -> None:
    split = np.repeat([0, 1], [24, 16])
    path = write_npz(tmp_path / "a.npz", split=split, class_names=np.array(["ant", "bee", "cat", "dog"]))
    data = load_dataset("npz", path, 32, 0.0, 0)
    assert data.class_names == ("ant", "bee", "cat", "dog")
    assert (len(data.train_labels), len(data.test_labels)) == (24, 16)
    raw = np.load(path)["images"]
    assert (data.test_images[np.array([3, 0])] == raw[[27, 24]]).all()


def test_names_of_an_unpacked_npz_file_are_those_of_the_file(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", class_names=np.array([b"ant", b"bee", b"cat", b"dog"]))
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "a")
    names = [load_dataset("npz", text, 32, 0.0, 0).class_names for text in (path, str(tmp_path / "a"))]
    assert names == [("ant", "bee", "cat", "dog")] * 2


def test_folder_of_arrays_is_memory_mapped(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"images": rng.integers(0, 256, (40, 8, 8), np.uint8), "labels": np.arange(40, dtype=np.uint8) % 4}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    drawn = load_dataset("npz", str(tmp_path), 32, 0.0, 0)
    assert np.bincount(drawn.test_labels).tolist() == [2, 2, 2, 2]
    np.save(tmp_path / "split.npy", np.repeat([0, 1], [24, 16]))
    (tmp_path / "class_names.txt").write_text("ant\nbee\ncat\nthe dog\n")
    load_dataset.cache_clear()
    data = load_dataset("npz", str(tmp_path), 32, 0.0, 0)
    assert data.class_names == ("ant", "bee", "cat", "the dog")
    assert isinstance(data.train_images.source, np.memmap)  # type: ignore[attr-defined]
    batch = data.test_images[np.array([3, 0])]
    assert type(batch) is np.ndarray
    assert batch.flags.writeable
    assert (batch[..., 0] == arrays["images"][[27, 24]]).all()


def test_unusable_folders_of_arrays(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a folder without \.npy files: of images it is dataset=folder"):
        load_dataset("npz", str(tmp_path), 32, 0.0, 0)
    (tmp_path / "images.npy").write_text("hello")
    with pytest.raises(ConfigError, match=r"folder of \.npy files"):
        load_dataset("npz", str(tmp_path), 32, 0.0, 0)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"images": None}, "images"),
        ({"labels": None}, "labels"),
        ({"images": np.zeros((40, 8, 8, 3), np.float32)}, "float32"),
        ({"images": np.zeros((40, 8, 8, 4), np.uint8)}, "[40, 8, 8, 4]"),
        ({"labels": np.zeros(39, np.int64)}, "[39]"),
        ({"labels": np.arange(40) % 4 - 1}, "start at 0"),
        ({"labels": np.arange(40) % 4 * 2}, "too few images"),
        ({"labels": np.arange(40) * 10**15}, "leave no number out"),
        ({"split": np.zeros(40)}, "0 of its 40 images are test images (split = 1)"),
        ({"split": np.eye(40)}, "a number for each of the 40 labels, 1 for a test image"),
        ({"split": np.arange(40) % 3}, "it is int64 [40], and has 2 too."),  # training, validation and test images
        ({"split": np.where(np.arange(40) % 4, 0.0, np.nan)}, "and has nan too."),
        ({"groups": np.arange(39)}, "groups must be a whole number or a text for each of the 40 labels"),
        ({"groups": np.zeros(40)}, "the same for images that belong together; it is float64 [40]"),
        ({"labels": np.arange(40) % 4 + 1, "class_names": np.array(["a", "b"])}, "and there are 2 class_names"),
        ({"class_names": np.array([["ant"], ["bee"], ["cat"], ["dog"]])}, "of shape [4, 1]"),
        ({"class_names": np.array(["ant", "bee", "ant", "dog"])}, "shown, not ['ant']"),
        ({"class_names": np.array(["ant", "bee", "", "dog"])}, "shown, not ['']"),
        ({"class_names": np.array([b"ant", b" ", b"cat", b"dog"])}, "shown, not [' ']"),
        ({"class_names": np.array(["ant", "b\nee", "cat", "dog"])}, "shown, not ['b\\nee']"),
        ({"images": np.zeros((0, 8, 8, 3), np.uint8), "labels": np.zeros(0, np.int64)}, "images"),
    ],
)
def test_unusable_npz_files_say_what_is_wrong(tmp_path: Path, changes: dict, word: str) -> None:
    path = write_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(ConfigError) as caught:
        load_dataset("npz", path, 32, 0.0, 0)
    assert "data-dir" in str(caught.value)
    assert word in str(caught.value)


def with_header(text: str) -> bytes:
    """A .npy file whose header is this text."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_missing_truncated_and_foreign_files(tmp_path: Path) -> None:
    whole = Path(write_npz(tmp_path / "whole.npz")).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "objects.npz", images=np.array([{}]))
    (tmp_path / "nested.npz").write_bytes(with_header("(" * 9000))
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("none.npz", "cut.npz", "text.npz", "one.npy", "objects.npz", "nested.npz"):
        with pytest.raises(ConfigError, match=name) as caught:
            load_dataset("npz", str(tmp_path / name), 32, 0.0, 0)
        assert "\n" not in str(caught.value)
        assert "pickle" not in str(caught.value)  # to allow it would run the code that a file may hold
    with pytest.raises(ConfigError, match="No such file"):
        load_dataset("npz", str(tmp_path / "pickles.npz"), 32, 0.0, 0)


@pytest.mark.parametrize(
    ("offset", "value"), [(8, 1), (10, 99), (10, zipfile.ZIP_LZMA)], ids=["encrypted", "unknown", "not lzma"]
)
def test_an_npz_that_python_cannot_unpack(offset: int, value: int, tmp_path: Path) -> None:
    """Flags and way of packing of the first array; both stand in its entry of the directory at the end."""
    content = bytearray(Path(write_npz(tmp_path / "a.npz")).read_bytes())
    for start, shift in ((content.index(b"PK\1\2"), 0), (content.index(b"PK\3\4"), -2)):
        content[start + offset + shift] = value
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.npz' is not a readable \.npz file"):
        load_dataset("npz", str(tmp_path / "a.npz"), 32, 0.0, 0)


def test_an_npz_with_a_member_that_is_no_array(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("split.npy", "train,test")
    with pytest.raises(ConfigError, match=r"is not a readable \.npz file \('split' in it is no array\)"):
        load_dataset("npz", path, 32, 0.0, 0)


def test_other_arrays_of_an_npz_are_not_unpacked(tmp_path: Path) -> None:
    """A few bytes may unpack to gigabytes; this one cannot be unpacked at all."""
    path = write_npz(tmp_path / "a.npz")
    with zipfile.ZipFile(path, "a") as archive, archive.open("masks.npy", "w") as file:
        write_header(file, (10**12,))
    assert len(load_dataset("npz", path, 32, 0.0, 0).train_labels) == 32


def test_an_npz_without_images_says_what_it_holds(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=np.zeros((4, 8, 8)), labels=np.zeros(4))
    with pytest.raises(ConfigError, match="needs 'images' and 'labels', and holds 'x_train', 'labels'"):
        load_dataset("npz", str(tmp_path / "a.npz"), 32, 0.0, 0)


def test_an_npz_that_does_not_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = 40 * 8 * 8 * 3 + 40 * 8 + 2 * 128  # with their headers
    monkeypatch.setattr("task.data.custom.available_memory", lambda: arrays - 1.0)
    path = write_npz(tmp_path / "a.npz", masks=np.zeros(10**6))
    with pytest.raises(ConfigError, match=r"a\.npz' is not .* \(it takes 0\.0 GB of memory, 0\.0 GB are free"):
        load_dataset("npz", path, 32, 0.0, 0)
    monkeypatch.setattr("task.data.custom.available_memory", lambda: float(arrays))
    assert len(load_dataset("npz", path, 32, 0.0, 0).train_labels) == 32


def test_a_class_folder_that_is_a_link_to_nowhere(tmp_path: Path) -> None:
    write_folder(tmp_path / "flat")
    (tmp_path / "flat" / "class9").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=r"the classes \['class9'\] hold no image file"):
        load_dataset("folder", str(tmp_path / "flat"), 16, 0.0, 0)


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        (["north/ant", "north/bee", "south/bee"], True),  # two nodes: one folder too high
        (["ant/monday", "bee/tuesday"], False),
        (["ant", "ant/more", "bee/more"], False),  # an image beside a folder
        (["ant/more"], False),
    ],
)
def test_folders_that_may_be_one_too_high_are_warned_of(
    folders: list[str], told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in folders:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / name / "0.png")
    require_classes(class_folders(tmp_path))
    assert ("a folder 'bee': if that is a class, data-dir is a folder too high" in caplog.text) == told
    assert bool(caplog.text) == told


def write_header(file: IO[bytes], shape: tuple[int, ...]) -> None:
    """An array's header that promises this shape, and few bytes of it."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    file.write(bytes(1000))


@pytest.mark.parametrize("images", [10**8, 10**12, 10**17, 10**30])
def test_a_header_that_promises_too_much(images: int, tmp_path: Path) -> None:
    shape = (images, 8, 8, 3)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("images.npy", "w") as file:
        write_header(file, shape)
    with pytest.raises(ConfigError, match=r"a\.npz' is not a readable \.npz file"):
        load_dataset("npz", str(tmp_path / "a.npz"), 32, 0.0, 0)
    (tmp_path / "folder").mkdir()
    with open(tmp_path / "folder" / "images.npy", "wb") as file:
        write_header(file, shape)
    with pytest.raises(ConfigError, match=r"folder' is not a readable folder of \.npy"):
        load_dataset("npz", str(tmp_path / "folder"), 32, 0.0, 0)


def test_folder_per_class_is_split_and_resized(tmp_path: Path) -> None:
    data = load_dataset("folder", str(write_folder(tmp_path / "flat")), 16, 0.0, 0)
    assert data.class_names == ("class0", "class1")
    assert np.bincount(data.test_labels).tolist() == [2, 2]
    assert data.train_images[np.arange(3)].shape == (3, 16, 16, 3)


def test_folder_with_train_and_test(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", images=3)
    write_folder(tmp_path / "test", images=2)
    data = load_dataset("folder", str(tmp_path), 16, 0.0, 0)
    assert (len(data.train_labels), len(data.test_labels)) == (6, 4)
    (tmp_path / "test" / "class1").rename(tmp_path / "test" / "clas1")
    load_dataset.cache_clear()
    with pytest.raises(ConfigError, match="clas1"):
        load_dataset("folder", str(tmp_path), 16, 0.0, 0)


def test_hidden_and_foreign_files_are_no_images(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "class0" / "._0.png").write_bytes(b"")
    (tmp_path / "class0" / "notes.txt").write_text("nothing")
    data = load_dataset("folder", str(tmp_path), 16, 0.0, 0)
    assert len(data.train_labels) + len(data.test_labels) == 20


def test_unusable_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_dataset("folder", str(tmp_path / "nowhere"), 16, 0.0, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no class folder"):
        load_dataset("folder", str(tmp_path / "empty"), 16, 0.0, 0)
    for part in ("train", "val"):
        write_folder(tmp_path / "parts" / part)
    with pytest.raises(ConfigError, match="looks like a part of the data"):
        load_dataset("folder", str(tmp_path / "parts"), 16, 0.0, 0)
    shutil.copytree(next(write_folder(tmp_path / "all").iterdir()), tmp_path / "one" / "lynx")
    with pytest.raises(ConfigError, match=r"one' has one class, 'lynx': give two or more"):
        load_dataset("folder", str(tmp_path / "one"), 16, 0.0, 0)
    (write_folder(tmp_path / "some") / "class9").mkdir()
    with pytest.raises(ConfigError, match="class9"):
        load_dataset("folder", str(tmp_path / "some"), 16, 0.0, 0)


@pytest.mark.parametrize("name", ["two\nlines", "\udcff\udcfe", "\x1b[31m", " "])
def test_a_class_folder_whose_name_cannot_be_shown(tmp_path: Path, name: str) -> None:
    (write_folder(tmp_path) / "class1").rename(tmp_path / name)
    with pytest.raises(ConfigError, match=f"rename the class {re.escape(repr(name))}"):
        load_dataset("folder", str(tmp_path), 16, 0.0, 0)


def test_more_tasks_than_classes() -> None:
    with pytest.raises(ConfigError, match=r"num-tasks=11.*10.*'digits'"):
        build_scenario(parse({"num-tasks": 11}))


def test_each_seed_holds_out_other_validation_images() -> None:
    """A quarter of 2 x 40: 10 of each class, drawn anew for each seed; equal draws have p = 1 / C(40, 10)^2."""
    images, labels = np.arange(80, dtype=np.uint8).reshape(80, 1, 1, 1), np.repeat([0, 1], 40)
    dataset = Dataset(("a", "b"), images, labels, images[:1], labels[:1], "none")
    held = [split_validation(dataset, 0.25, seed) for seed in (0, 1)]
    assert [np.bincount(part.test_labels).tolist() for part in held] == [[10, 10]] * 2
    one, other = (set(part.test_images[np.arange(20)].ravel().tolist()) for part in held)
    assert one != other


def test_the_seed_of_a_run_reaches_the_draw_of_validation_images() -> None:
    first, other = (load_dataset("digits", "", 32, 0.25, seed).test_images for seed in (0, 1))
    assert set(first.positions) != set(other.positions)
