"""A data set that is cut out of a larger one."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.slice_npz import _main, cut


def _arrays(classes: int, images: int) -> dict[str, np.ndarray]:
    """``images`` training and as many test images of each class; every pixel of an image is its number."""
    count = 2 * classes * images
    return {
        "images": np.arange(count, dtype=np.uint8)[:, None, None, None],
        "labels": np.tile(np.arange(classes), 2 * images),
        "split": np.repeat([0, 1], classes * images),
        "class_names": np.array([f"class {c}" for c in range(classes)]),
        "groups": np.arange(count) // 2,
    }


def test_even_classes_are_cut() -> None:
    arrays = _arrays(classes=5, images=20)
    part = cut(arrays, classes=3, train=7, test=2, seed=1)
    assert np.bincount(part["labels"][part["split"] == 0]).tolist() == [7, 7, 7]
    assert np.bincount(part["labels"][part["split"] == 1]).tolist() == [2, 2, 2]
    numbers = part["images"].ravel()
    assert len(set(numbers.tolist())) == len(numbers)
    assert (arrays["class_names"][arrays["labels"][numbers]] == part["class_names"][part["labels"]]).all()
    assert (arrays["split"][numbers] == part["split"]).all()
    assert (part["groups"] == numbers // 2).all()


def test_uneven_classes_fall_in_geometric_steps() -> None:
    part = cut(_arrays(classes=5, images=20), classes=3, train=16, test=2, seed=1, smallest=4)
    assert sorted(np.bincount(part["labels"][part["split"] == 0]).tolist()) == [4, 8, 16]
    assert np.bincount(part["labels"][part["split"] == 1]).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["missing.npz"], "missing.npz cannot be read as an .npz file"),
        (["text.npz"], "text.npz cannot be read as an .npz file"),
        (["cut.npz"], "cut.npz cannot be read as an .npz file"),
        (["five.npz", "--classes", "6"], "--classes 6: five.npz has 5"),
        (["five.npz", "--classes", "0"], "0 is less than 1"),
    ],
)
def test_slips_are_named(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("five.npz", **_arrays(classes=5, images=2))
    Path("text.npz").write_text("no images")
    Path("cut.npz").write_bytes(Path("five.npz").read_bytes()[:400])
    monkeypatch.setattr(sys, "argv", ["slice_npz", words[0], "part.npz", *words[1:]])
    with pytest.raises(SystemExit) as ended:
        _main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
    assert not Path("part.npz").exists()


def test_slice_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "five.npz", tmp_path / "part.npz"
    np.savez(source, **_arrays(classes=5, images=4))
    monkeypatch.setattr(sys, "argv", ["slice_npz", str(source), str(target), "--classes", "2", "--train", "3"])
    _main()
    assert "2 classes, 6 training and 8 test images, seed 0" in capsys.readouterr().out
    with np.load(target) as file:
        assert set(file.files) == {"images", "labels", "split", "class_names", "groups"}
