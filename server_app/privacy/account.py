"""The privacy account of a run: releases of every client, and the largest epsilon after each round."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server_app.errors import RunError
from server_app.privacy.accountant import epsilon
from server_app.run_files.results import RoundReport
from server_app.run_files.writers import append_line, read_lines
from task.config.schema import Config
from task.keys import ConfigError
from task.methods import load_class

log = logging.getLogger(__name__)


def open_account(config: Config) -> dict[str, Any]:
    """The entry ``privacy`` of results.json before the first round; empty where there is no noise."""
    if not config.privacy_noise:
        return {}
    if config.privacy_seeded:
        log.warning("privacy-seeded = true: whoever knows the seed, as the server does, can take the noise away")
    return {
        "unit": "one training image of a client, replaced by another of its class",
        "unprotected": "number of images of each class, class names, seconds, what evaluate = clients counts",
        "clip": config.privacy_clip,
        "feature_clip": config.privacy_feature_clip,
        "noise": config.privacy_noise,
        "delta": config.privacy_delta,
        "seeded": config.privacy_seeded,
        "releases_per_message": releases_per_message(config, config.adaptation_rounds + 1, ends_task=True),
        "worst_client": "",
        "releases": [],
        "epsilon": [],
    }


def releases_per_message(config: Config, server_round: int, ends_task: bool) -> int:
    """Releases of the Gaussian mechanism in one answer to a train message, each of noise multiplier z / 2.

    ``server_round`` counts from 1; in a task's last round, ``ends_task``, some runs send class statistics only then.
    """
    kind = load_class(config.method_row.statistics)()
    return config.trains_in(server_round) + (kind.releases if kind.due(config, server_round, ends_task) else 0)


def record_asked(path: Path, report: RoundReport, releases: int) -> None:
    """Write down which clients are about to be asked to train, and how many ``releases`` each answer has.

    A round that a resumed run repeats counts twice.
    """
    path.parent.mkdir(exist_ok=True)
    line = {"task": report.task, "round": report.round, "releases": releases, "names": report.participants}
    append_line(path, line)


def require_asked_clients(account: Mapping[str, Any], path: Path, rounds: Sequence[RoundReport]) -> list[Any]:
    """The records of :func:`record_asked`, which must cover ``rounds`` if there is an account.

    Raises:
        ConfigError: records are missing or damaged.
    """
    try:
        lines = read_lines(path)
        recorded = {(line["task"], line["round"]) for line in lines}
    except (ValueError, LookupError, TypeError):
        lines, recorded = [], set()
    if account and not recorded >= {(r.task, r.round) for r in rounds}:
        raise ConfigError(
            f"{path} has lost lines, so that what the clients have released cannot be computed: start a new run."
        )
    return lines


def charge(account: dict[str, Any], path: Path, rounds: Sequence[RoundReport]) -> dict[str, Any]:
    """The account after the last of ``rounds``: that of the client and task with the most releases so far.

    Every client that was asked to train is charged, except where it reported to have no data: a late or refused reply,
    or one to an interrupted round, may have left it. An image is learned in one task only, so tasks do not add up.

    Raises:
        RunError: records are missing or damaged.
    """
    if not account:
        return {}
    try:
        lines = require_asked_clients(account, path, rounds)  # somebody may have deleted them while the run goes on
    except ConfigError as error:
        raise RunError(str(error)) from error
    by_client = Counter[tuple[str, int]]()
    in_round = {(line["task"], line["round"]): line["releases"] for line in lines}
    for line in lines:
        by_client.update({(name, line["task"]): line["releases"] for name in line["names"]})
    for r in rounds:
        by_client.subtract({(name, r.task): in_round[r.task, r.round] for name in r.idle})
    (worst_client, _), releases = max(sorted((+by_client).items()), key=lambda item: item[1], default=(("", 0), 0))
    spent = epsilon(account["noise"] / 2, releases, account["delta"])
    return account | {
        "worst_client": worst_client,
        "releases": [*account["releases"], releases],
        "epsilon": [*account["epsilon"], spent],
    }
