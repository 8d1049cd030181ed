"""Make a data set of drawings of graphs: 20 families, such as trees, grids, stars and kinds of random graphs.

    python -m benchmarks.graphs_npz graphs.npz --train 60 --test 20 --seed 0

Number of nodes, layout, size, lines and colours of each drawing are drawn at random. It needs networkx, which PyTorch
brings with it.
"""

from collections.abc import Callable

import networkx as nx
import numpy as np
from PIL import Image, ImageDraw

from benchmarks.drawn_set import labelled, save_set

Draw = Callable[[int, int], nx.Graph]  # number of nodes, about, and seed
FAMILIES: dict[str, Draw] = {
    "path": lambda n, _: nx.path_graph(n),
    "cycle": lambda n, _: nx.cycle_graph(n),
    "star": lambda n, _: nx.star_graph(n),
    "wheel": lambda n, _: nx.wheel_graph(n),
    "complete": lambda n, _: nx.complete_graph(n // 2 + 2),
    "bipartite": lambda n, seed: nx.complete_bipartite_graph(2 + seed % 4, n // 2),
    "multipartite": lambda n, _: nx.complete_multipartite_graph(n // 4, n // 4, n // 4),
    "grid": lambda n, seed: nx.grid_2d_graph(3 + seed % 2, n // 3),
    "triangles": lambda n, _: nx.triangular_lattice_graph(3, n // 2),
    "honeycomb": lambda n, _: nx.hexagonal_lattice_graph(2, n // 6),
    "ladder": lambda n, _: nx.ladder_graph(n // 2),
    "prism": lambda n, _: nx.circular_ladder_graph(n // 2),
    "barbell": lambda n, _: nx.barbell_graph(n // 3, n // 4),
    "lollipop": lambda n, _: nx.lollipop_graph(n // 2, n // 2),
    "windmill": lambda n, _: nx.windmill_graph(n // 3, 3),
    "binary tree": lambda n, _: nx.full_rary_tree(2, n),
    "random tree": lambda n, seed: nx.random_labeled_tree(n, seed=seed),
    "scale-free": lambda n, seed: nx.barabasi_albert_graph(n, 2, seed=seed),
    "small world": lambda n, seed: nx.connected_watts_strogatz_graph(n, 4, 0.15, seed=seed),
    "regular": lambda n, seed: nx.random_regular_graph(3, n + n % 2, seed=seed),
}
LAYOUTS = ("spring", "spring", "circular", "random")
SIDE, NODES = 96, (9, 25)


def positions(graph: nx.Graph, layout: str, rng: np.random.Generator) -> np.ndarray:
    """Where the nodes are drawn, float64 [nodes, 2] in pixels: turned, stretched, moved and a little disturbed."""
    options = {} if layout == "circular" else {"seed": int(rng.integers(2**31))}
    placed = np.array(list(getattr(nx, f"{layout}_layout")(graph, **options).values()))
    placed -= placed.mean(axis=0)
    angle = rng.uniform(0, 2 * np.pi)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    placed = placed @ turn * rng.uniform(0.7, 1, 2) + rng.normal(0, 0.02, placed.shape)
    size = SIDE * rng.uniform(0.55, 0.9)
    placed = placed / np.ptp(placed, axis=0).max() * size
    return placed - placed.min(axis=0) + rng.uniform(0, 1, 2) * (SIDE - 1 - np.ptp(placed, axis=0))


def draw(family: str, rng: np.random.Generator) -> np.ndarray:
    """One drawing, uint8 [SIDE, SIDE, 3]."""
    graph = FAMILIES[family](int(rng.integers(*NODES)), int(rng.integers(2**31)))
    points = positions(graph, str(rng.choice(LAYOUTS)), rng)
    ground, line, node = rng.integers([[160], [0], [0]], [[256], [120], [160]], (3, 3))
    image = Image.new("RGB", (SIDE, SIDE), tuple(map(int, ground)))
    pen, radius, width = ImageDraw.Draw(image), rng.uniform(1, 4), int(rng.integers(1, 3))
    at = dict(zip(graph.nodes, points.tolist(), strict=True))
    for a, b in graph.edges:
        pen.line([*at[a], *at[b]], fill=tuple(map(int, line)), width=width)
    for x, y in at.values():
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=tuple(map(int, node)))
    return np.asarray(image)


def make(train: int, test: int, seed: int) -> dict[str, np.ndarray]:
    """Arrays of an .npz file: images uint8 [N, SIDE, SIDE, 3], labels, split (1 = test) and class names."""
    rng = np.random.default_rng(seed)
    images = [draw(family, rng) for family in FAMILIES for _ in range(train + test)]
    return labelled(images, len(FAMILIES), train, test) | {"class_names": np.array(list(FAMILIES))}


if __name__ == "__main__":
    save_set(make, __doc__, seed=0)
