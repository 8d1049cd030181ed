"""Places the labels of points so that they can be read: none upon another, each near its point."""

from collections.abc import Sequence

import numpy as np

_DISTANCES = (5, 9, 16, 26, 40, 58, 80, 106, 136, 170)  # of a label from its point, in pixels
_ANGLES = np.arange(0, 2 * np.pi, np.pi / 12)
_DOTS = np.arange(0, 1, 1 / 4)[:, None]  # shares of the line from a label to its point that are looked at
_SWEEPS = 6


def place_labels(points: np.ndarray, sizes: np.ndarray, inside: Sequence[float], radius: float) -> np.ndarray:
    """Lower left corners of the labels of points.

    Each label in turn takes the candidate around its point that costs least, given where the others are: overlaps with
    labels, points and lines to points, and the distance. After some sweeps nothing moves any more.

    Args:
        points: [n, 2], in pixels, as all else.
        sizes: [n, 2], width and height of each label.
        inside: x0, y0, x1, y1 of what no label may leave; one that is larger than it lies in its middle.
        radius: of the markers of the points.
    """
    candidates = [_around(point, size, inside, radius) for point, size in zip(points, sizes, strict=True)]
    corners = np.array([choices[0] for choices in candidates])
    for _ in range(_SWEEPS):
        before = corners.copy()
        for i, choices in enumerate(candidates):
            corners[i] = choices[np.argmin(_costs(i, choices, points, corners, sizes, radius))]
        if (before == corners).all():
            break
    return corners


def _around(point: np.ndarray, size: np.ndarray, inside: Sequence[float], radius: float) -> np.ndarray:
    """Possible lower left corners, [k, 2], the nearest first; the first of these is at the right."""
    directions = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
    reach = np.array([radius + distance for distance in _DISTANCES])
    touching = point + reach[:, None, None] * directions  # the point of the label's edge that is nearest
    corners = (touching - size * (1 - directions) / 2).reshape(-1, 2)
    low, high = np.array(inside[:2]), np.array(inside[2:]) - size
    fits = ((corners >= low) & (corners <= high)).all(axis=1)
    return corners[fits] if fits.any() else (low + high)[None] / 2


def _costs(
    i: int, candidates: np.ndarray, points: np.ndarray, corners: np.ndarray, sizes: np.ndarray, radius: float
) -> np.ndarray:
    """What each candidate, [k, 2], of label ``i`` costs, [k], given where the others are."""
    others, size = np.arange(len(points)) != i, sizes[i]
    line, lines = _line(candidates, size, points[i]), _line(corners, sizes, points)[others]  # [k, s, 2], [n - 1, s, 2]
    cost = 0.02 * np.hypot(*(line[:, 0] - points[i]).T)
    cost += 20 * _overlaps(candidates - 1, size + 2, corners[others], sizes[others])
    cost += 3 * _overlaps(candidates, size, points - radius, 2 * radius)
    cost += 4 * _overlaps(candidates, size, lines.reshape(-1, 2), 0)
    for dots in line.swapaxes(0, 1):
        cost += 4 * _overlaps(dots, 0, corners[others], sizes[others])
        cost += 2 * _overlaps(dots, 0, points[others] - radius, 2 * radius)
    return cost


def _line(corners: np.ndarray, size: np.ndarray, point: np.ndarray) -> np.ndarray:
    """Dots on the line from each label to its point, [n, s, 2]; the first one is on the label's edge."""
    edge = np.clip(point, corners, corners + size)
    return edge[:, None] + _DOTS * (point - edge)[:, None]


def _overlaps(
    corners: np.ndarray, size: np.ndarray | float, other: np.ndarray, other_sizes: np.ndarray | float
) -> np.ndarray:
    """How many boxes, corners [n, 2], each of those with corners [k, 2] overlaps, [k]; a dot has size 0."""
    apart = (corners[:, None] >= other + other_sizes) | (corners[:, None] + size <= other)
    return (~apart.any(axis=2)).sum(axis=1)
