"""Images of any form on their way to the backbone."""

from types import SimpleNamespace

import pytest
import torch

from task.models.preprocessing import prepare, random_crop, resize


@pytest.mark.parametrize("upright", [True, False])
def test_a_long_image_is_averaged_along_its_long_side(upright: bool) -> None:
    """One line in four of 256 is white: at an eighth of the size every pixel is a quarter white, either way."""
    pixels = torch.zeros(1, 3, 256, 32, dtype=torch.uint8)
    pixels[:, :, ::4] = 255
    x = resize(pixels if upright else pixels.transpose(2, 3), 32)
    middle = x[0, 0, 4:28, 4:28]
    assert torch.allclose(middle, torch.full_like(middle, 0.25), atol=0.02)


def test_a_crop_shifts_by_an_eighth_of_each_side() -> None:
    """Of 128 x 32 pixels no shift takes away more than 16 rows or 4 columns."""
    white = torch.full((300, 1, 128, 32), 255, dtype=torch.uint8)
    x = random_crop(white, torch.Generator().manual_seed(0))[:, 0]
    rows, columns = ((x.amax(dim) == 0).sum(1).max().item() for dim in (2, 1))
    assert (rows, columns) == (16, 4)


def test_crop_flip_crops_too() -> None:
    """Of 900 white images each of the 9 shifts by up to one of 8 pixels is drawn for 100: one in nine stays white."""
    white = torch.full((900, 8, 8, 3), 255, dtype=torch.uint8).numpy()
    half = SimpleNamespace(image_size=8, mean=torch.full((1, 3, 1, 1), 0.5), std=torch.full((1, 3, 1, 1), 0.5))
    for augmentation, expected in (("none", 900), ("crop", 100), ("crop-flip", 100)):
        x = prepare(white, half, augmentation, torch.Generator().manual_seed(1))
        assert (x == 1).all(dim=(1, 2, 3)).sum().item() == pytest.approx(expected, abs=45)
