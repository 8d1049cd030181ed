"""The benchmark of a round in which no node has anything to train: whom it asks, and how it divides a round."""

import pytest

from benchmarks.deployment_round import NAMES, Watch, empty
from server_app.clients.sampling import sample_clients
from task.config.parsing import parse


def test_the_node_with_the_classes_is_not_asked(tmp_path):
    values = empty(4, tmp_path)
    config = parse(values)
    for server_round in range(1, 5):
        assert sample_clients(NAMES, config, server_round) == ["east", "north", "south"]
    assert config.rounds_per_task == 5


def test_steps_are_those_of_the_node_that_answers_last():
    watch = Watch.__new__(Watch)  # without a deployment
    watch.received = {0: [1.0, 12.0], 1: [1.0, 13.0]}
    watch.started = {0: {7: 1.5, 8: 12.5}, 1: {9: 1.5, 10: 13.25}}
    watch.sent = {0: [4.0, 15.0], 1: [5.0, 18.0]}
    watch.ended = [10.0, 18.5]
    assert watch.steps(1) == pytest.approx([3.0, 0.25, 4.75, 0.5])
    assert sum(watch.steps(1)) == 8.5
