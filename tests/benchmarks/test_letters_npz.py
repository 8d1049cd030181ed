"""The set of letters: how a letter is drawn, and which fonts are for the test."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest

from benchmarks.letters_npz import LETTERS, MARGIN, SIDE, draw, make

FONTS = sorted((Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("DejaVuSans[-M]*.ttf"))


def test_a_letter_is_black_in_the_middle_and_as_large_as_fits() -> None:
    image = draw("l", FONTS[0])
    assert (image.dtype, image.shape) == (np.uint8, (SIDE, SIDE, 3))
    rows, columns = np.nonzero(image[:, :, 0] < 128)
    assert rows.min() - MARGIN <= 1
    assert SIDE - MARGIN - 1 - rows.max() <= 1
    assert abs(columns.min() + columns.max() - (SIDE - 1)) <= 2
    assert (image[:MARGIN] == 255).all()


def test_too_few_fonts_are_said() -> None:
    with pytest.raises(SystemExit, match=r"3 . 2 fonts are needed, 4 \.woff files were found"):
        make(FONTS[:4], 3, 2, seed=0)


def test_no_font_is_in_both_parts() -> None:
    made = make(FONTS[:5], 3, 2, seed=0)
    of_letter = made["images"].reshape(len(LETTERS), 5, -1)
    assert made["split"].reshape(len(LETTERS), 5).tolist() == [[0, 0, 0, 1, 1]] * len(LETTERS)
    assert made["labels"].reshape(len(LETTERS), 5)[:, 0].tolist() == list(range(len(LETTERS)))
    for font in range(5):  # the same font has the same place in every class
        (drawn,) = [path for path in FONTS[:5] if (draw("a", path).ravel() == of_letter[0, font]).all()]
        assert all((draw(c, drawn).ravel() == of_letter[i, font]).all() for i, c in enumerate(LETTERS))
