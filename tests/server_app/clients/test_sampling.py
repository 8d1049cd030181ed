"""Who takes part in a round."""

import numpy as np

from server_app.clients.sampling import sample_clients
from task.config.parsing import parse

NAMES = [f"client-{i}" for i in range(8)]


def draw(server_round: int, per_round: int = 3, seed: int = 0) -> list[str]:
    config = parse({"num-clients": len(NAMES), "clients-per-round": per_round, "seed": seed})
    return sample_clients(NAMES, config, server_round)


def test_all_take_part_unless_fewer_are_asked_for():
    assert draw(1, per_round=0) == draw(2, per_round=8) == NAMES


def test_a_round_draws_different_clients_in_order_and_always_the_same_ones():
    drawn = [draw(r) for r in range(1, 9)]
    assert all(len(set(clients)) == 3 and clients == sorted(clients) for clients in drawn)
    assert len({tuple(clients) for clients in drawn}) > 4  # 8 rounds are not all alike
    assert [draw(r) for r in range(1, 9)] == drawn
    assert [draw(r, seed=1) for r in range(1, 9)] != drawn


def test_each_client_is_drawn_equally_often():
    """1,000 rounds of 3 of 8: 375 each, standard deviation 15."""
    counts = np.bincount([NAMES.index(name) for r in range(1000) for name in draw(r)], minlength=8)
    assert counts.sum() == 3000
    assert np.abs(counts - 375).max() < 75
