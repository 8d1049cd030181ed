"""Labels of points: which belongs to which can be seen."""

import numpy as np
import pytest

from server_app.report.labels import place_labels

BOX, RADIUS = (0.0, 0.0, 1000.0, 800.0), 6.0


def gap(corner: np.ndarray, size: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Distance of a label's box to each of the points [n, 2]: [n]."""
    return np.linalg.norm(np.clip(points, corner, corner + size) - points, axis=1)


def test_no_label_stands_beside_the_point_of_another() -> None:
    """Two rows of points, closer than their labels are wide."""
    points = np.array([[400.0 + 40 * i, 400.0 + 30 * (i % 2)] for i in range(8)])
    sizes = np.tile([120.0, 16.0], (len(points), 1))
    corners = place_labels(points, sizes, BOX, RADIUS)
    for i, (corner, size) in enumerate(zip(corners, sizes, strict=True)):
        away = gap(corner, size, points)
        assert (np.delete(away, i) >= min(away[i], 3 * RADIUS)).all()


@pytest.mark.parametrize("seed", range(4))
def test_no_line_to_a_point_runs_through_a_label(seed: int) -> None:
    """Twenty labels around a crowd of points, as methods of similar cost and accuracy."""
    points = np.random.default_rng(seed).normal([500.0, 400.0], [90.0, 60.0], (20, 2))
    sizes = np.tile([110.0, 16.0], (len(points), 1))
    corners = place_labels(points, sizes, BOX, RADIUS)
    nearest = np.clip(points, corners, corners + sizes)
    lines = nearest + np.linspace(0, 1, 200)[:, None, None] * (points - nearest)  # [200, 20, 2]
    inside = ((lines[:, :, None] > corners) & (lines[:, :, None] < corners + sizes)).all(axis=3).any(axis=0)
    assert not (inside & ~np.eye(len(points), dtype=bool)).any()
