"""Places the labels of points so that they can be read: none upon another, each near its point."""

from collections.abc import Sequence

import numpy as np

_DISTANCES = (5, 9, 16, 26, 40, 58, 80, 106, 136, 170)  # of a label from its point, in pixels
_ANGLES = np.arange(0, 2 * np.pi, np.pi / 12)
_SWEEPS = 6


def place_labels(points: np.ndarray, sizes: np.ndarray, inside: Sequence[float], radius: float) -> np.ndarray:
    """Lower left corners of the labels of points.

    Each label in turn takes the candidate around its point that costs least, given where the others are: overlaps with
    labels and points, lines to points that cross, and the distance. After some sweeps nothing moves any more.

    Args:
        points: [n, 2], in pixels, as all else.
        sizes: [n, 2], width and height of each label.
        inside: x0, y0, x1, y1 of what no label may leave; one that is larger than it lies in its middle.
        radius: of the markers of the points.
    """
    candidates = [_around(point, size, inside, radius) for point, size in zip(points, sizes, strict=True)]
    corners = np.array([choices[0] for choices in candidates])
    crowded = np.argsort([np.partition(_distances(points, p), min(3, len(points) - 1))[-1] for p in points])
    for sweep in range(_SWEEPS):
        placed = sweep > 0
        before = corners.copy()
        for rank, i in enumerate(crowded):
            others = np.delete(np.arange(len(points)), i) if placed else crowded[:rank]
            costs = _costs(i, candidates[i], points, corners, sizes, others, radius)
            corners[i] = candidates[i][np.argmin(costs)]
        if (before == corners).all():
            break
    return corners


def _distances(points: np.ndarray, point: np.ndarray) -> np.ndarray:
    return np.hypot(*(points - point).T)


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
    i: int,
    candidates: np.ndarray,
    points: np.ndarray,
    corners: np.ndarray,
    sizes: np.ndarray,
    others: np.ndarray,
    radius: float,
) -> np.ndarray:
    """What each candidate, [k, 2], of label ``i`` costs, [k], given the ``others`` that have their places."""
    size, point = sizes[i], points[i]
    nearest = np.clip(point, candidates, candidates + size)
    cost = 0.02 * np.hypot(*(nearest - point).T)
    cost += 3 * _overlaps(candidates, size, points - radius, np.full_like(points, 2 * radius)).sum(axis=1)
    if len(others):
        cost += 20 * _overlaps(candidates - 1, size + 2, corners[others], sizes[others]).sum(axis=1)
        ends = np.clip(points[others], corners[others], corners[others] + sizes[others])
        cost += 4 * _cross(nearest, point, ends, points[others]).sum(axis=1)
        for share in (0.25, 0.5, 0.75):  # lines through labels, either way
            own = nearest + share * (point - nearest)
            theirs = ends + share * (points[others] - ends)
            cost += 4 * _overlaps(own, np.zeros(2), corners[others], sizes[others]).sum(axis=1)
            cost += 4 * _overlaps(candidates, size, theirs, np.zeros_like(theirs)).sum(axis=1)
    cost += 2 * _overlaps(
        nearest + (point - nearest) / 2, np.zeros(2), points - radius, np.full_like(points, 2 * radius)
    )[:, np.arange(len(points)) != i].sum(axis=1)
    return cost


def _overlaps(corners: np.ndarray, size: np.ndarray, other: np.ndarray, other_sizes: np.ndarray) -> np.ndarray:
    """Whether boxes of one size, corners [k, 2], overlap others, [n, 2]; [k, n]."""
    apart = (corners[:, None] >= other + other_sizes) | (corners[:, None] + size <= other)
    return ~apart.any(axis=2)


def _cross(starts: np.ndarray, end: np.ndarray, other_starts: np.ndarray, other_ends: np.ndarray) -> np.ndarray:
    """Whether segments [k, 2] to one end cross others, [n, 2] to [n, 2]; [k, n]."""

    def side(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        ab, ac = b - a, c - a
        return np.sign(ab[..., 0] * ac[..., 1] - ab[..., 1] * ac[..., 0])

    a, c, d = starts[:, None], other_starts[None], other_ends[None]
    return (side(a, end, c) * side(a, end, d) < 0) & (side(c, d, a) * side(c, d, np.broadcast_to(end, c.shape)) < 0)
