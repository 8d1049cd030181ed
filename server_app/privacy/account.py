"""What the noise of a run is worth: releases of every client, and the worst one's (epsilon, delta) after each round."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server_app.privacy.accountant import epsilon
from server_app.run_files.results import RoundReport
from server_app.run_files.writers import append_line, read_lines
from task.config.schema import Config
from task.keys import ConfigError
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
        "unprotected": "number of images of each class, class names, seconds, what evaluate = clients counts",
        "clip": config.privacy_clip,
        "feature_clip": config.privacy_feature_clip,
        "noise": config.privacy_noise,
        "delta": config.privacy_delta,
        "seeded": config.privacy_seeded,
        "releases_per_message": releases_per_message(config),
        "worst_client": "",
        "releases": [],
        "epsilon": [],
    }


def releases_per_message(config: Config) -> int:
    """Releases of the Gaussian mechanism in one answer to a train message, each of noise multiplier z / 2."""
    return bool(config.row.client) + load_half(config.row.statistics)().releases


def note_asked(path: Path, report: RoundReport) -> None:
    """Write down who is asked to train, before it is: rounds that a resumed run repeats are paid twice."""
    path.parent.mkdir(exist_ok=True)
    append_line(path, {"task": report.task, "round": report.round, "names": report.participants})


def require_asked(account: Mapping[str, Any], path: Path, rounds: Sequence[RoundReport]) -> None:
    """A run that goes on must know whom it has asked.

    Raises:
        ConfigError: it does not.
    """
    try:
        known = {(line["task"], line["round"]) for line in read_lines(path)}
    except (ValueError, LookupError, TypeError):
        known = set()
    if account and not known >= {(r.task, r.round) for r in rounds}:
        raise ConfigError(f"{path} has lost lines, so that what the clients have released cannot be told: start anew.")


def charged(account: dict[str, Any], path: Path, rounds: Sequence[RoundReport]) -> dict[str, Any]:
    """The account after the last of ``rounds``: that of the client and task with the most releases so far.

    All who were asked to train, as :func:`note_asked` has it, pay, but for the rounds for which they said to have no
    data; also one whose answer was late or refused, as it may have left the client all the same, and what it answered
    before the run was interrupted. An image, being of one class, is learned in the rounds of one task only, so that
    tasks do not add up.
    """
    if not account:
        return {}
    asked = read_lines(path)
    times = Counter((name, line["task"]) for line in asked for name in line["names"])
    times -= Counter((name, r.task) for r in rounds for name in r.idle)
    (name, _), most = max(sorted(times.items()), key=lambda pair: pair[1], default=(("", 0), 0))
    releases = most * account["releases_per_message"]
    found = epsilon(account["noise"] / 2, releases, account["delta"])
    spent = {"releases": [*account["releases"], releases], "epsilon": [*account["epsilon"], found]}
    return account | {"worst_client": name} | spent
