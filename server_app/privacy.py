"""What the noise of a run is worth: releases of every client, and the worst one's (epsilon, delta) after each round."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from server_app.flower_accountant import epsilon
from server_app.results import RoundReport
from task.config import Config
from task.methods import load_half

log = logging.getLogger(__name__)

UNIT = "one training image of a client, replaced by another of its class"


def open_account(config: Config) -> dict[str, Any]:
    """The entry ``privacy`` of results.json before the first round; empty where there is no noise.

    Raises:
        ConfigError: the accountant is not installed.
    """
    if not config.privacy_noise:
        return {}
    epsilon(config.privacy_noise / 2, 1, config.privacy_delta)
    if config.privacy_seeded:
        log.warning("privacy-seeded = true: whoever knows the seed, as the server does, can take the noise away")
    return {
        "unit": UNIT,
        "unprotected": "number of images of each class, class names, seconds",
        "clip": config.privacy_clip,
        "feature_clip": config.privacy_feature_clip,
        "noise": config.privacy_noise,
        "delta": config.privacy_delta,
        "seeded": config.privacy_seeded,
        "releases_per_message": releases_per_message(config),
        "resumed": 0,
        "worst_client": "",
        "releases": [],
        "epsilon": [],
    }


def releases_per_message(config: Config) -> int:
    """Releases of the Gaussian mechanism in one answer to a train message, each of noise multiplier z / 2."""
    return bool(config.row.client) + load_half(config.row.statistics)().releases


def reopened(account: dict[str, Any]) -> dict[str, Any]:
    """The account of a run that is resumed: the round that was cut short had reached the clients, and comes again."""
    return account | {"resumed": account["resumed"] + 1} if account else {}


def charged(account: dict[str, Any], rounds: Sequence[RoundReport]) -> dict[str, Any]:
    """The account after the last of ``rounds``: that of the client and task with the most releases so far.

    All who were asked to train pay, but for those without data; also one whose answer was late or refused, as it may
    have left the client all the same. An image, being of one class, is learned in the rounds of one task only, so that
    tasks do not add up.
    """
    if not account:
        return {}
    times = Counter((name, r.task) for r in rounds for name in set(r.participants) - set(r.idle))
    (name, _), most = max(sorted(times.items()), key=lambda pair: pair[1], default=(("", 0), 0))
    releases = (most + account["resumed"]) * account["releases_per_message"]
    found = epsilon(account["noise"] / 2, releases, account["delta"])
    spent = {"releases": [*account["releases"], releases], "epsilon": [*account["epsilon"], found]}
    return account | {"worst_client": name} | spent
