"""Places the labels of points so that they can be read: none upon another, each near its point.

The package adjustText 1.4 left some labels upon each other on docs/images/results/cifar100-core-minutes.png.
"""

from collections.abc import Sequence

import numpy as np

_DISTANCES = (5, 9, 16, 26, 40, 58, 80, 106, 136, 170)  # of a label from its point, in pixels
_ANGLES = np.arange(0, 2 * np.pi, np.pi / 12)
_SWEEPS = 6
_ORDERS = 2


def place_labels(points: np.ndarray, sizes: np.ndarray, inside: Sequence[float], radius: float) -> np.ndarray:
    """Lower left corners of the labels of points.

    Each label in turn takes the candidate around its point that costs least, given where the others are: overlaps with
    labels and points, lines to points that cross each other or a label, points of others beside it, and the distance.
    After some sweeps nothing moves any more. Labels are placed in two orders, and the cheaper result is taken.

    Args:
        points: [n, 2], in pixels, as all else.
        sizes: [n, 2], width and height of each label.
        inside: x0, y0, x1, y1 of the box that no label may leave; a label that is larger than it is put in its middle.
        radius: of the markers of the points.
    """
    candidates = [_around(point, size, inside, radius) for point, size in zip(points, sizes, strict=True)]
    orders = [np.random.default_rng(k).permutation(len(points)) for k in range(_ORDERS)]
    tries = [_settle(order, candidates, points, sizes, radius) for order in orders]
    return min(tries, key=lambda one: one[1])[0]


def _settle(
    order: np.ndarray, candidates: Sequence[np.ndarray], points: np.ndarray, sizes: np.ndarray, radius: float
) -> tuple[np.ndarray, float]:
    """Corners [n, 2] if labels are placed in this order, and what they cost in all."""
    corners, placed = np.array([choices[0] for choices in candidates]), np.zeros(len(points), bool)
    for _ in range(_SWEEPS):
        before, total = corners.copy(), 0.0
        for i in order:
            placed[i] = False
            costs = _costs(i, candidates[i], points, corners, sizes, placed, radius)
            corners[i], total = candidates[i][np.argmin(costs)], total + costs.min()
            placed[i] = True
        if (before == corners).all():
            break
    return corners, total


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
    placed: np.ndarray,
    radius: float,
) -> np.ndarray:
    """Cost [k] of each of the ``candidates`` [k, 2] of label ``i``, given the labels that are ``placed``, bool [n]."""
    size, point, others = sizes[i], points[i], np.delete(points, i, axis=0)
    boxes, extents = corners[placed], sizes[placed]
    nearest = np.clip(point, candidates, candidates + size)
    ends = np.clip(points[placed], boxes, boxes + extents)
    away = np.hypot(*(nearest - point).T)
    cost = 0.02 * away + 2 * _misleads(candidates, size, others, np.minimum(1.5 * away, 4 * radius))
    cost += 3 * _overlaps(candidates, size, points - radius, 2 * radius)
    cost += 20 * _overlaps(candidates - 1, size + 2, boxes, extents)
    cost += 4 * _cross(nearest, point, ends, points[placed]).sum(axis=1)
    lines = nearest[:, None]
    cost += 4 * _passes(lines, point, boxes, boxes + extents).sum(axis=1)
    cost += 4 * _passes(ends, points[placed], candidates[:, None], candidates[:, None] + size).sum(axis=1)
    cost += 2 * _passes(lines, point, others - radius, others + radius).sum(axis=1)
    return cost


def _misleads(corners: np.ndarray, size: np.ndarray, others: np.ndarray, nearer: np.ndarray) -> np.ndarray:
    """For each box with corners [k, 2], how many points [n, 2] are nearer to it than ``nearer`` [k]: [k]."""
    gaps = np.clip(others, corners[:, None], (corners + size)[:, None]) - others
    return (np.hypot(gaps[..., 0], gaps[..., 1]) < nearer[:, None]).sum(axis=1)


def _overlaps(
    corners: np.ndarray, size: np.ndarray | float, other: np.ndarray, other_sizes: np.ndarray | float
) -> np.ndarray:
    """For each box with corners [k, 2], how many boxes with corners [n, 2] it overlaps: [k]; a point has size 0."""
    apart = (corners[:, None] >= other + other_sizes) | (corners[:, None] + size <= other)
    return (~apart.any(axis=2)).sum(axis=1)


def _passes(starts: np.ndarray, ends: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Which segments pass through which boxes from ``low`` to ``high``: bool [k, n]; all broadcasts to [k, n, 2]."""
    along = ends - starts + 1e-9  # of each axis, and never 0
    first, second = (low - starts) / along, (high - starts) / along  # where it meets the box's sides, 1 at the end
    enters, leaves = np.minimum(first, second).max(axis=-1), np.maximum(first, second).min(axis=-1)
    return np.maximum(enters, 0) < np.minimum(leaves, 1)


def _cross(starts: np.ndarray, end: np.ndarray, other_starts: np.ndarray, other_ends: np.ndarray) -> np.ndarray:
    """Which segments from ``starts`` [k, 2] to ``end`` cross which of the other segments: bool [k, n]."""

    def side(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        ab, ac = b - a, c - a
        return np.sign(ab[..., 0] * ac[..., 1] - ab[..., 1] * ac[..., 0])

    a, c, d = starts[:, None], other_starts[None], other_ends[None]
    return (side(a, end, c) * side(a, end, d) < 0) & (side(c, d, a) * side(c, d, np.broadcast_to(end, c.shape)) < 0)
