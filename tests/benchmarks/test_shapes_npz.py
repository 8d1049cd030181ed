"""The set of shapes: corners by hand, every shape inside the picture, and a seed draws the same again."""

import numpy as np
import pytest

from benchmarks.shapes_npz import CLASSES, SIDE, make, outline


def test_corners_of_a_square_and_of_a_star_by_hand() -> None:
    """Radius 10 about (30, 30), from the right: a square, and a star of two points whose inner radius is 5."""
    square = [[40, 30], [30, 40], [20, 30], [30, 20]]
    assert outline(4, 1.0, 10, (30, 30), 0) == pytest.approx(np.array(square))
    star = [[40, 30], [30, 35], [20, 30], [30, 25]]
    assert outline(2, 0.5, 10, (30, 30), 0) == pytest.approx(np.array(star))


def test_a_shape_is_inside_the_picture() -> None:
    """The largest one at the most distant place."""
    for points, inner in CLASSES:
        corners = outline(points, inner, 26, (36, 36), 0.1)
        assert corners.min() >= 0
        assert corners.max() <= SIDE - 1


def test_a_seed_draws_the_same_images_again() -> None:
    first, again, other = (make(2, 1, seed) for seed in (0, 0, 1))
    assert (first["images"] == again["images"]).all()
    assert (first["images"] != other["images"]).any(axis=(1, 2, 3)).all()
    assert first["images"].shape == (72, SIDE, SIDE, 3)
    assert first["labels"].tolist() == [c for c in range(24) for _ in range(3)]
    assert first["split"].tolist() == [0, 0, 1] * 24
    assert len(np.unique(first["images"].reshape(72, -1), axis=0)) == 72
