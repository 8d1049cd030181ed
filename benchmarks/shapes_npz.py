"""Make a data set of drawn shapes: regular polygons and stars of 3 to 8 points, turned, before random lines.

    python -m benchmarks.shapes_npz shapes.npz --train 60 --test 20 --seed 5

Size, place, angle and colours of each drawing are drawn at random, so that only the outline tells the classes apart.
"""

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.drawn_set import labelled, save_set

SIDE, LINES = 64, 8
# of each class: number of points, and the inner radius of a star as a share of the outer one; 1 is a polygon
CLASSES = [(points, inner) for points in range(3, 9) for inner in (1.0, 0.75, 0.5, 0.3)]


def outline(points: int, inner: float, radius: float, centre: tuple[float, float], angle: float) -> np.ndarray:
    """Corners of a shape, float64 [corners, 2] in pixels; those of a star are far and near by turns."""
    corners = points if inner == 1 else 2 * points
    radii = radius * np.where(np.arange(corners) % 2 == 1, inner, 1.0)
    angles = angle + 2 * np.pi * np.arange(corners) / corners
    return np.array(centre) + radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def draw(points: int, inner: float, rng: np.random.Generator) -> np.ndarray:
    """One drawing, uint8 [SIDE, SIDE, 3]."""

    def colour() -> tuple[int, ...]:
        return tuple(map(int, rng.integers(0, 256, 3)))

    image = Image.new("RGB", (SIDE, SIDE), colour())
    pen = ImageDraw.Draw(image)
    for _ in range(LINES):
        ends = rng.integers(0, SIDE, 4).tolist()
        pen.line(ends, fill=colour(), width=int(rng.integers(1, 4)))
    radius, centre, angle = rng.uniform(14, 26), rng.uniform(28, 36, 2), rng.uniform(0, 2 * np.pi)
    corners = outline(points, inner, radius, (float(centre[0]), float(centre[1])), angle)
    pen.polygon(list(map(tuple, corners.tolist())), fill=colour())
    return np.asarray(image)


def make(train: int, test: int, seed: int) -> dict[str, np.ndarray]:
    """Arrays of an .npz file: images uint8 [N, SIDE, SIDE, 3], labels and split (1 = test)."""
    rng = np.random.default_rng(seed)
    images = [draw(*shape, rng) for shape in CLASSES for _ in range(train + test)]
    return labelled(images, len(CLASSES), train, test)


if __name__ == "__main__":
    save_set(make, __doc__, seed=5)
