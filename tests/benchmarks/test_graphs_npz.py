"""The set of graphs: every family can be drawn at every size, inside the picture, and a seed draws the same again."""

import networkx as nx
import numpy as np
import pytest

from benchmarks.graphs_npz import FAMILIES, LAYOUTS, NODES, SIDE, make, positions


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_a_connected_graph_of_every_size(family: str) -> None:
    for n in range(*NODES):
        graph = FAMILIES[family](n, n)
        assert 0.5 * n <= len(graph) <= 3 * n
        assert nx.is_connected(graph) or family == "regular"


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS)))
def test_nodes_are_inside_the_picture(layout: str) -> None:
    for seed in range(20):
        points = positions(nx.path_graph(9 + seed), layout, np.random.default_rng(seed))
        assert points.shape == (9 + seed, 2)
        assert points.min() >= -1e-9
        assert points.max() <= SIDE - 1 + 1e-9


def test_a_seed_draws_the_same_images_again() -> None:
    first, again, other = (make(2, 1, seed) for seed in (0, 0, 1))
    assert (first["images"] == again["images"]).all()
    assert (first["images"] != other["images"]).any(axis=(1, 2, 3)).all()
    assert first["images"].shape == (60, SIDE, SIDE, 3)
    assert first["labels"].tolist() == [c for c in range(20) for _ in range(3)]
    assert first["split"].tolist() == [0, 0, 1] * 20
    assert len(np.unique(first["images"].reshape(60, -1), axis=0)) == 60
