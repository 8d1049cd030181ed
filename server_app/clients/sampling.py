"""The clients of one round."""

from collections.abc import Sequence

from server_app.clients.client_info import Member
from task.config.schema import Config
from task.utils.seeding import numpy_rng


def draw(members: Sequence[Member], config: Config, server_round: int) -> list[Member]:
    """The clients of one round: all, or ``clients-per-round`` drawn from the run's own stream by name."""
    wanted = config.clients_per_round or len(members)
    if wanted >= len(members):
        return list(members)
    chosen = numpy_rng(config.seed, "participants", server_round).choice(len(members), wanted, replace=False)
    return [members[i] for i in sorted(chosen)]
