"""Sets of images that are made of packages."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.open_images import CLOTHES, DRAWINGS, draw_all, read_clothes


def test_each_drawing_is_in_one_class_once_and_on_white(tmp_path: Path) -> None:
    for number, folder in enumerate(DRAWINGS.values()):
        (tmp_path / "png" / folder).mkdir(parents=True, exist_ok=True)
        for name, share in (
            ("all", 0),
            ("a", number + 1),
            ("copy of a", number + 1),
            ("b", number + 30),
            ("empty", 60),
        ):
            drawing = np.zeros((60, 60, 4), np.uint8)  # black below what is transparent
            drawing[share:, :, 3] = 255
            Image.fromarray(drawing).save(tmp_path / "png" / folder / f"{name}.png")
    draw_all(tmp_path / "png", tmp_path / "out")
    drawings = {c: list((tmp_path / "out" / c).iterdir()) for c in DRAWINGS}
    assert [len(files) for files in drawings.values()] == [3] + [2] * (len(DRAWINGS) - 1)  # "all" is the first class's
    [top] = [np.asarray(Image.open(p)) for p in drawings["arrows"] if p.stem == "b"]
    assert top.shape == (60, 60, 3)
    assert (top[:30] == 255).all()
    assert (top[30:] == 0).all()
    draw_all(tmp_path / "png", tmp_path / "one", each=1)
    assert {len(list(p.iterdir())) for p in (tmp_path / "one").iterdir()} == {1}


def test_clothes_are_parted_by_class_and_an_empty_row_is_passed_over(tmp_path: Path) -> None:
    for label in range(len(CLOTHES)):
        rows = [[10 * label + i] * 784 for i in range(4)] + [[0, 0]]
        (tmp_path / f"{label}.json").write_text(json.dumps({"data": rows}))
    arrays = read_clothes(tmp_path, each=2)
    values = arrays["images"].reshape(10, 4, 784)
    assert (values == values[..., :1]).all()
    assert np.sort(values[..., 0], axis=1).tolist() == [[10 * c + i for i in range(4)] for c in range(10)]
    assert arrays["labels"].tolist() == [c for c in range(10) for _ in range(4)]
    assert arrays["split"].tolist() == [0, 0, 1, 1] * 10
