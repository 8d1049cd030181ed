"""The number of rounds in which a method that adapts trains its prompt, where the run key is auto."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from task.config.schema import Config
from task.scenario.client_data import client_task_data

FEWEST, MOST = 5, 20  # rounds
STEPS = 60  # chosen on validation images of seven data sets, see docs/methods/fedrda.md


def choose_adaptation_rounds(images: Sequence[int], config: Config) -> int:
    """As many rounds as make STEPS local steps of the average client, but FEWEST at least and MOST at most.

    A client that is not drawn in each of them, by ``clients-per-round``, takes fewer steps.

    With ``privacy-noise`` FEWEST, as every round is one more release. ``images`` are those of each client in the first
    task; a client without any takes no step and does not count.
    """
    if config.privacy_noise:
        return FEWEST
    steps = [config.local_epochs * math.ceil(number / config.batch_size) for number in images if number]
    return min(max(math.ceil(STEPS / fmean(steps)), FEWEST), MOST) if steps else FEWEST


def count_first_images(config: Config) -> list[int]:
    """Images of each client in the first round, of a run whose data set is divided by a partition.

    Raises:
        ConfigError: the partition's parameters cannot work with the data.
    """
    return [len(client_task_data(config, m, task=0, round=0).positions) for m in range(config.num_clients)]


def set_adaptation_rounds(config: Config, number: int) -> Config:
    """The same run with the number of rounds of adaptation known."""
    return replace(config, options=replace(config.options, adaptation_rounds=number))  # type: ignore[call-arg]
