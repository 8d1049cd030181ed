"""The clients of one round."""

from collections.abc import Sequence
from typing import TypeVar

from task.config.schema import Config
from task.utils.seeding import numpy_rng

Client = TypeVar("Client")  # a ClientInfo, or a name


def sample_clients(clients: Sequence[Client], config: Config, server_round: int) -> list[Client]:
    """The clients of one round: all, or ``clients-per-round`` drawn with the run's seed; ``clients`` sorted by name."""
    number = config.clients_per_round or len(clients)
    if number >= len(clients):
        return list(clients)
    drawn = numpy_rng(config.seed, "participants", server_round).choice(len(clients), number, replace=False)
    return [clients[i] for i in sorted(drawn)]
