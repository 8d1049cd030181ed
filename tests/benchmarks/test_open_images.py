"""Sets of images that are made of packages."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.open_images import CLOTHES, DRAWINGS, copy_drawings, read_clothes


def test_drawings_are_copied_by_class(tmp_path: Path) -> None:
    for folder in DRAWINGS.values():
        (tmp_path / "png" / folder).mkdir(parents=True, exist_ok=True)
        for i in range(4):
            Image.new("L", (i + 1, 1)).save(tmp_path / "png" / folder / f"{i}.png")
    copy_drawings(tmp_path / "png", tmp_path / "out", each=3)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(DRAWINGS)
    assert all(len(list(p.iterdir())) == 3 for p in (tmp_path / "out").iterdir())


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
