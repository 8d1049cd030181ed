"""The set of emoji: drawings on white, and all makers' drawings of one emoji on one side."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.emoji_npz import CLASSES, MAKERS, SIDE, draw, make


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Ten emoji of each class, one more of the first class that a maker lacks, and one of another class."""
    known = [{"subcategory": name, "image": f"{c}-{n}.png"} for c, name in enumerate(CLASSES) for n in range(10)]
    known += [{"subcategory": CLASSES[0], "image": "lacking.png"}, {"subcategory": "heart", "image": "heart.png"}]
    for m, maker in enumerate(MAKERS):
        folder = tmp_path / maker / "package" / "img" / maker / "64"
        folder.mkdir(parents=True)
        (folder.parents[2] / "emoji.json").write_text(json.dumps(known))
        for n, emoji in enumerate(known):
            if (maker, emoji["image"]) != (MAKERS[2], "lacking.png"):
                Image.new("RGBA", (64, 64), (n, m, 0, 255)).save(folder / emoji["image"])
    return tmp_path


def test_all_drawings_of_an_emoji_are_on_one_side(packages: Path) -> None:
    made = make(packages)
    emoji, maker = made["images"][:, 0, 0, 0], made["images"][:, 0, 0, 1]  # the colours say which
    assert np.bincount(made["labels"]).tolist() == [10 * 4] * 20
    assert np.bincount(made["labels"][made["split"] == 1]).tolist() == [3 * 4] * 20
    assert len(set(zip(emoji, maker, strict=True))) == len(emoji) == 800
    assert (emoji // 10 == made["labels"]).all()
    for group in range(200):
        (rows,) = np.nonzero(made["groups"] == group)
        assert [len(set(values[rows])) for values in (emoji, maker, made["split"])] == [1, 4, 1]


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    Image.new("RGBA", (30, 30), (0, 0, 0, 0)).save(tmp_path / "a.png")
    assert draw(tmp_path / "a.png").shape == (SIDE, SIDE, 3)
    assert (draw(tmp_path / "a.png") == 255).all()
